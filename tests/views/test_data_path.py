"""Staging, reading and shuffling in the report, by made runs; and what synthetic runs show of it: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.causes import INPUT_PARTS
from dlbench.errors import UserError
from dlbench.records.scan import scan
from dlbench.report.document import Document, Section
from dlbench.report.formats.terminal import to_text
from dlbench.report.wording import figure_text, place_text
from dlbench.stats.estimates import Estimate, interval, median_estimate
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.model import Report, ReportGroup
from dlbench.views.readers import GroupReading
from dlbench.views.scaling_report import assemble, document_of, scaling_views
from dlbench.views.shuffling import Audit, ShuffleComparison
from dlbench.views.staging import BreakEven, Staged, break_even_epochs, break_even_text
from dlbench.views.stalls import StallPart, Stalls, stalls, stalls_document
from tests.support.out_of_core_factory import (
    MB,
    REAL,
    audit_epoch,
    data_story,
    read_epoch,
    reading_result,
    shuffle_result,
    staging_result,
    write_tiers,
)
from tests.support.paths import GOLDEN
from tests.support.run_factory import Story, Training, constant, plans, quality_plans, write_run, write_scaling
from tests.views.causes.test_page import drawn_rows


def write(out: Path, wait_ms: float, record: dict[str, Any], **request: Any) -> None:
    """A series of 2 ranks that waits `wait_ms` in a step of 100 ms more."""
    for plan in plans(**{"data": REAL, "points": (2,), **request}):
        drift = 1 + plan.series.repeat / 1000
        write_run(
            out, plan, constant([part * drift for part in (wait_ms, 1.0, 30.0, 50.0, 10.0, 9.0)]), data_story(**record)
        )


def page(out: Path) -> tuple[Report, Document]:
    report = assemble(scan(out))
    return report, document_of(report)


def sections(document: Document) -> dict[str, Section]:
    """By id without that of the group."""
    return {section.id.rpartition("-")[0] or section.id: section for section, _ in document.walk()}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Document]:
    """Runs that read in place, replicated, and with local and partial shuffling from their own parts."""
    out = tmp_path_factory.mktemp("runs")
    cold = reading_result([read_epoch(0), read_epoch(1, storage=0.02, fetch_s=0.5)])
    write(out, 60.0, {"reading": cold, "shuffle": shuffle_result("global")}, series="in-place")
    replicated = {"reading": cold, "staging": staging_result(), "shuffle": shuffle_result("global")}
    write(out, 10.0, replicated, series="copied", overrides={"data.staging": "replicate"})
    shard = {"data.staging": "shard", "data.shuffle": "local", "data.partition": "contiguous"}
    own = reading_result([read_epoch(0, tier_bytes={"local": 50 * MB})])
    write(
        out,
        10.0,
        {"reading": own, "staging": staging_result("shard"), "shuffle": shuffle_result("local")},
        series="own",
        overrides=shard,
    )
    wrong = [audit_epoch(0, sent=200, received=199), audit_epoch(1, twice=1, never=1, novelty=0.2)]
    exchanged = shuffle_result("partial:0.1", wrong, errors=["epoch 1: sample 17 (a/17.jpeg): read by ranks 0 and 1"])
    write(
        out,
        15.0,
        {"reading": own, "staging": staging_result("shard"), "shuffle": exchanged},
        series="some",
        overrides={**shard, "data.shuffle": "partial:0.1"},
    )
    return page(out)


def group(report: Report, **settings: str) -> ReportGroup:
    (found,) = [
        one
        for one in report.groups
        if {key: dict(one.settings).get(f"data.{key}", "") for key in ("staging", "shuffle")}
        == {"staging": "", "shuffle": "", **settings}
    ]
    return found


def test_runs_that_differ_in_the_data_path_are_kept_apart_and_named(shown: tuple[Report, Document]) -> None:
    report, _ = shown
    assert len(report.groups) == 4
    paths = {one.condition("data_path") for one in report.groups}
    assert paths == {
        "",
        "staging=replicate to local",
        "staging=shard to local, shuffle=local, partition=contiguous",
        "staging=shard to local, shuffle=partial:0.1, partition=contiguous",
    }


def test_staging_says_time_rate_room_and_what_became_of_it(shown: tuple[Report, Document]) -> None:
    (point,) = group(shown[0], staging="replicate").of(Staged).points
    assert point.seconds.value == 20.0
    assert (point.slowest_bytes_per_s, point.fastest_bytes_per_s) == (5 * MB, 5 * MB)
    assert (point.needed_bytes, point.free_bytes, point.kept) == (100 * MB, 900 * MB, False)
    assert group(shown[0]).of(Staged) is None


def test_staging_has_paid_after_its_time_over_what_an_epoch_gains(shown: tuple[Report, Document]) -> None:
    (row,) = shown[0].all_of(BreakEven)
    # 4,096 samples, 8 per step: 512 steps of 160 ms in place, of 110 ms staged.
    assert row.gain.value == pytest.approx(512 * 0.05, rel=0.01)
    assert row.epochs == pytest.approx(20 / (512 * 0.05), rel=0.01)
    assert row.epochs_low <= row.epochs <= row.epochs_high


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.lists(st.floats(0.1, 9), min_size=1, max_size=6))
def test_break_even_lies_in_its_interval_and_is_never_where_nothing_is_gained(
    gains: list[float], times: list[float]
) -> None:
    gain, staging = median_estimate(gains, "s"), median_estimate(times, "s")
    low, value, high = break_even_epochs(staging, gain)
    if gain.value <= 0:
        assert value is None
        assert high is None
    else:
        assert value is not None
        assert low is None or low <= value * (1 + 1e-12)
        assert high is None or high >= value * (1 - 1e-12)


def test_staged_epochs_that_are_not_faster_never_pay(tmp_path: Path) -> None:
    write(tmp_path, 10.0, {"reading": reading_result()}, series="in-place")
    write(tmp_path, 20.0, {"staging": staging_result()}, series="copied", overrides={"data.staging": "replicate"})
    report, document = page(tmp_path)
    (row,) = report.all_of(BreakEven)
    assert row.epochs is None
    assert break_even_text(row) == "never"
    assert "never pays" in sections(document)["break"].headline


def test_samples_found_of_an_earlier_run_are_not_the_time_of_copying(tmp_path: Path) -> None:
    node = {**staging_result()["nodes"][0], "copied_bytes": 0, "reused_bytes": 100 * MB}
    for plan in plans(data=REAL, points=(2,), overrides={"data.staging": "replicate"}):
        told = staging_result() if plan.series.repeat == 0 else staging_result(seconds=0.5, nodes=0) | {"nodes": [node]}
        write_run(tmp_path, plan, constant([5.0, 0.0, 30.0, 50.0, 10.0, 5.0]), data_story(staging=told))
    report, document = page(tmp_path)
    assert report.groups[0].of(Staged).points[0].seconds.value == 20.0
    assert "4 of 5 runs reused samples of an earlier run" in sections(document)["staging"].notes[0]


def test_cold_and_warm_epochs_and_tiers_are_told_apart(shown: tuple[Report, Document]) -> None:
    first, second = group(shown[0]).of(GroupReading).epochs
    assert (first.temperature, second.temperature) == ("cold", "warm")
    assert (first.shared_bytes, first.storage_bytes, first.cached_bytes) == (50 * MB, 50 * MB, 0)
    assert second.cached_bytes == 49 * MB
    own = group(shown[0], staging="shard", shuffle="local").of(GroupReading)
    assert (own.epochs[0].local_bytes, own.epochs[0].shared_bytes) == (50 * MB, 0)


def test_bytes_that_nobody_counted_are_not_zero(tmp_path: Path) -> None:
    write(tmp_path, 5.0, {"reading": reading_result([read_epoch(storage=None)])})
    report, document = page(tmp_path)
    found = report.groups[0].of(GroupReading)
    assert (found.epochs[0].storage_bytes, found.epochs[0].temperature) == (None, "not known")
    header = sections(document)["reading"].sheets[1].to_display().header
    assert not {"Of it from storage", "From the page cache"} & set(header)


def test_the_audit_names_errors_first_and_says_how_well_samples_are_mixed(shown: tuple[Report, Document]) -> None:
    one = group(shown[0], staging="shard", shuffle="partial:0.1")
    (point,) = one.of(Audit).points
    assert (point.num_bad, point.twice, point.never, point.sent, point.received) == (5, 5, 5, 1000, 995)
    assert point.novelty == pytest.approx(0.2)
    view = next(view for view in scaling_views().group if view.id == "shuffle-audit")
    section = view.section(one)
    assert [mark.severity for mark in section.marks] == ["serious"] * 5
    assert "a/17.jpeg" in section.marks[0].text
    assert section.headline.startswith("errors in 5 of 5 runs: 5 samples read more than once, 5 samples never")
    fine = view.section(group(shown[0]))
    assert fine.marks == ()
    assert "no sample read twice" in fine.headline


def test_ways_of_shuffling_are_compared_with_global_shuffling(shown: tuple[Report, Document]) -> None:
    found = shown[0].all_of(ShuffleComparison)
    (rows,) = [one.rows for one in found]
    factors = {
        (row.shuffle, row.staging): row.factor.value for row in rows if row.factor is not None and not row.is_reference
    }
    assert [row.shuffle for row in rows if row.is_reference] == ["global"]
    assert factors["local", "shard"] == pytest.approx(160 / 110, rel=0.01)
    assert factors["partial:0.1", "shard"] == pytest.approx(160 / 115, rel=0.01)


def test_what_runs_learn_under_each_way_of_shuffling_is_their_last_value(tmp_path: Path) -> None:
    for shuffle, values in (("global", (0.3, 0.8)), ("local", (0.2, 0.4))):
        made = quality_plans(points=(2,), repeats=2, series=shuffle, overrides={"data.shuffle": shuffle})
        for plan in made:
            story = Story(data={"kind": "jpeg-tree", "num_samples": 160}, training=Training(values=values))
            write_run(tmp_path, plan, constant([5.0, 0.0, 30.0, 50.0, 10.0, 5.0]), story)
    report, _ = page(tmp_path)
    (found,) = report.all_of(ShuffleComparison)
    assert {row.shuffle: row.final.value for row in found.rows if row.final} == {"global": 0.8, "local": 0.4}


def test_epochs_of_each_way_and_tier_are_drawn_over_nodes_next_to_the_ideal(tmp_path: Path) -> None:
    """2 and 4 ranks on 1 and 2 nodes; a step of 4 ranks is no longer, so that epochs halve."""
    cluster: dict[str, Any] = {"system": "box", "points": (2, 4), "ranks_per_node": 2, "repeats": 2}
    shard = {"data.staging": "shard", "data.staging_tier": "memory"}
    ways = {
        "global": ({}, 10.0),
        "copied": ({"data.staging": "replicate"}, 5.0),
        "local": ({"data.shuffle": "local", **shard}, 0.0),
    }
    for series, (overrides, wait_ms) in ways.items():
        told = {"staging": staging_result(overrides["data.staging"])} if overrides else {}
        write(tmp_path, wait_ms, told, **cluster, series=series, overrides=overrides)
    report, document = page(tmp_path)
    (by_shuffling,) = next(list(one.charts()) for one in document.sections if one.id == "shuffling")
    assert by_shuffling.title == "Epoch over nodes (dashed: ideal from global, 2 ranks)"
    (found,) = report.all_of(ShuffleComparison)
    for row in found.rows:
        way = {"none": "global", "replicate": "global, replicate to local", "shard": f"{row.title}, shard to memory"}
        figure = row.epoch_s.scaled(1, "seconds")
        assert f"{way[row.staging]}, {place_text(row.ranks, row.nodes)}: {figure_text(figure)}" in by_shuffling.alt
    # One ideal for all lines: what global shuffling takes at one node, halved by two.
    in_place = {one["nodes"]: one["value"] for one in drawn_rows(by_shuffling.spec) if one.get("line") == "global"}
    for one in drawn_rows(by_shuffling.spec):
        if "ideal" in one:
            assert one["ideal"] == pytest.approx(in_place[1] / one["nodes"])
    # Every run with real data says what an epoch takes: 4,096 samples, 4 a rank and step.
    for run in report.runs:
        assert run.epoch_s == pytest.approx(4096 / run.throughput)
    (runs,) = [sheet for one in document.sections if one.id == "runs" for sheet in one.sheets]
    assert "Epoch" in runs.to_display().header


def test_input_is_split_as_readers_spent_their_time(shown: tuple[Report, Document]) -> None:
    (point,) = group(shown[0]).of(LostPercent).diagnosed.points
    cause = point.cause("input")
    assert tuple(part.name for part in cause.parts) == INPUT_PARTS
    assert sum(part.seconds.value for part in cause.parts) == pytest.approx(cause.seconds.value)
    fetch, prepare, copy = (part.seconds.value for part in cause.parts)
    # 3.5 s of fetching, 2 s of preparing; 60 ms of wait and 1 ms of copy per step.
    assert fetch / prepare == pytest.approx(3.5 / 2)
    assert copy == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(("fetch_s", "words"), [(9.0, "data.staging=replicate"), (0.1, "data.loader_workers=auto")])
def test_what_to_try_follows_from_what_readers_do(tmp_path: Path, fetch_s: float, words: str) -> None:
    for plan in plans(data=REAL, points=(1, 2), overrides={"data.loader_workers": 0}):
        wait = 5.0 if plan.layout.ranks == 1 else 60.0
        drift = 1 + plan.series.repeat / 1000
        told = reading_result([read_epoch(fetch_s=fetch_s)])
        times = constant([part * drift for part in (wait, 0.0, 30.0, 50.0, 10.0, 5.0)])
        write_run(tmp_path, plan, times, data_story(reading=told))
    report, _ = page(tmp_path)
    verdict = report.groups[0].of(LostPercent).diagnosed.points[-1].verdict
    assert verdict.name == "input-bound"
    assert words in verdict.experiments[0].text
    assert "of their time " in verdict.experiments[0].text
    assert any("dlbench io sample --preset tiny" in one.text and "--tiers" in one.text for one in verdict.experiments)


def test_synthetic_runs_show_nothing_of_it(tmp_path: Path) -> None:
    write_scaling(tmp_path, repeats=1)
    report, document = page(tmp_path)
    names = {section.id.split("-")[0] for section, _ in document.walk()}
    assert not names & {"staging", "reading", "shuffle", "shuffling", "stalls", "break"}
    assert not report.all_of(BreakEven)
    assert {run.epoch_s for run in report.runs} == {None}


def test_an_interval_without_a_lower_gain_has_no_upper_end() -> None:
    gain = interval(2.0, -1.0, 4.0, 5, "Student t", "s")
    staging = Estimate(10.0, None, None, 1, "single run", "s")
    assert break_even_epochs(staging, gain) == (2.5, 5.0, None)


def only_point(out: Path) -> Stalls:
    (point,) = stalls(scan(out).runs)
    return point


def parts(point: Stalls) -> dict[str, StallPart]:
    return {part.name: part for part in point.parts}


# --- plans ------------------------------------------------------------------------------------------------------------


def test_each_repeat_is_cold_cached_and_synthetic_and_every_second_goes_backwards() -> None:
    made = plans(data=REAL, tiers=True, points=(2,), repeats=2)
    assert [(plan.series.variant, plan.workload.data.cache) for plan in made] == [
        ("plain", "cold"),
        ("cached-input", "warm"),
        ("synthetic-input", "any"),
        ("synthetic-input", "any"),
        ("cached-input", "warm"),
        ("plain", "cold"),
    ]
    assert {plan.workload.data.source for plan in made if plan.series.variant != "synthetic-input"} == {REAL}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"data": None}, "give --data"),
        ({"overrides": {"data.cache": "warm"}}, "--set data.cache: has no effect: --tiers"),
        ({"sweep": {"train.batch_per_rank": (1, 2)}}, "--tiers: cannot be combined with --sweep"),
        ({"to_accuracy": True}, "--tiers: measures throughput"),
        ({"overrides": {"checkpoint.every_steps": 2}}, "cannot be combined with checkpoints"),
    ],
)
def test_what_does_not_go_with_tiers_is_refused(request_: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plans(**{"data": REAL, "tiers": True, **request_})


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_stalls_are_what_the_runs_were_made_of(tmp_path: Path) -> None:
    write_tiers(tmp_path, prepare_ms=20.0, fetch_ms=50.0)
    point = only_point(tmp_path)
    found = parts(point)
    seconds = {name: part.seconds for name, part in found.items()}
    assert seconds["ingestion"].value == pytest.approx(0.1, rel=0.01)
    assert seconds["preparation"].value == pytest.approx(0.02, rel=0.01)
    assert seconds["fetch"].value == pytest.approx(0.05, rel=0.01)
    assert seconds["fetch"].kind == "Student t"
    assert point.pairs == 5
    # 2 ranks x 4 samples in 100 ms.
    assert point.ceiling.value == pytest.approx(80, rel=0.01)
    assert point.notes == ()


@settings(max_examples=10)
@given(prepare=st.floats(0, 500), fetch=st.floats(0, 500), repeats=st.integers(1, 3), is_cold=st.booleans())
def test_shares_and_seconds_sum_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, prepare: float, fetch: float, repeats: int, is_cold: bool
) -> None:
    out = tmp_path_factory.mktemp("runs")
    write_tiers(
        out, prepare_ms=prepare, fetch_ms=fetch, repeats=repeats, points=(1,), reading={"cache_in_force": is_cold}
    )
    point = only_point(out)
    known = [part for part in point.parts if part.seconds is not None and part.share is not None]
    assert len(known) == (3 if is_cold else 2)
    assert point.whole_is == ("cold" if is_cold else "cached")
    assert sum(part.share.value for part in known if part.share) == pytest.approx(1.0)
    assert sum(part.seconds.value for part in known if part.seconds) == pytest.approx(point.whole_s.value)


def test_without_a_cold_cache_the_fetch_stall_is_not_measured_and_says_why(tmp_path: Path) -> None:
    write_tiers(tmp_path, reading={"cache_in_force": False, "cache": "no right to drop it"})
    point = only_point(tmp_path)
    found = parts(point)
    assert found["fetch"].seconds is None
    assert found["fetch"].why == "the page cache was not cold: no right to drop it"
    assert found["preparation"].seconds is not None
    assert point.whole_is == "cached"


def test_a_repeat_without_all_its_runs_does_not_count(tmp_path: Path) -> None:
    made = write_tiers(tmp_path, repeats=3)
    lost = next(plan for plan in made if plan.series.variant == "cached-input")
    (tmp_path / lost.run_id / "record.json").unlink()
    point = only_point(tmp_path)
    assert point.pairs == 2
    assert [lost.run_id in text for text in point.missing] == [True]


def test_later_epochs_from_the_page_cache_are_told(tmp_path: Path) -> None:
    second = read_epoch(1, cached_share=0.9)
    write_tiers(tmp_path, reading={"epochs": [read_epoch(cached_share=0.0), second]})
    (note,) = only_point(tmp_path).notes
    assert "more than one epoch" in note


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_answer_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    write_tiers(tmp_path, points=(1, 2))
    text = to_text(stalls_document(stalls(scan(tmp_path).runs)))
    assert max(map(len, text.splitlines())) <= 80
    assert text == (GOLDEN / "io-tiers.txt").read_text(encoding="utf-8")
