"""A history over time: what is one series, what differs at a change, slow nodes by month, and the page in a browser."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dlbench.analysis.metrics import by_name
from dlbench.cli import cli
from dlbench.history.document import nodes_document, trends_document
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.history import Acknowledgement
from dlbench.history.series import change_cell, level_text
from dlbench.history.slow_months import RECENT_DAYS, slow_months
from dlbench.history.tables import TrendsReport, series_sheet, trends_of
from dlbench.history.trends import dated, trends
from dlbench.report.document import Rating
from dlbench.report.formats.data import to_csv, to_json
from dlbench.report.formats.html import to_html
from dlbench.report.formats.markdown import to_markdown
from dlbench.report.formats.terminal import to_text
from dlbench.views.history import HistoryView
from dlbench.views.summary import rating
from tests.support.history_factory import write_history

START = datetime(2026, 1, 1, 2, tzinfo=UTC)


def entry(night: int, repeat: int = 0, **changes: Any) -> HistoryEntry:
    moment = START + timedelta(days=night)
    finished = (moment + timedelta(minutes=5 * (repeat + 1))).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    made = HistoryEntry(
        run_id=f"run-{night}-{repeat}", folder=f"runs/run-{night}-{repeat}", state="valid", why="", variant="plain",
        created=moment.strftime("%Y-%m-%dT%H:%M:%SZ"), finished=finished, series=f"s{night}", repeat=repeat, side="",
        group="0123456789ab", label="resnet50, ci preset, horovod, weak scaling", system="box", workload="resnet50",
        preset="ci", engine="horovod", ranks=2, nodes=1, slurm_job_id=str(9000 + night), commit=f"c{night // 2:04d}",
        tags={}, environment={}, figures={"step_median_s": 0.1}, content_digest="",
        hosts=(HostEntry(host="n0", num_ranks=2, work_ratio=None),),
    )  # fmt: skip
    return replace(made, **changes)


def course(
    count: int,
    factor: Callable[[int], float],
    repeats: int = 2,
    seed: int = 0,
    scatter: float = 0.01,
    changes: Callable[[int], dict[str, Any]] = lambda night: {},
) -> list[HistoryEntry]:
    """Runs around 0.1 s times a factor, by night; nights differ from each other more than runs of one night."""
    generator = np.random.default_rng(seed)
    made = []
    for night in range(count):
        value = 0.1 * factor(night) * math.exp(generator.normal(0, scatter))
        for repeat in range(repeats):
            figures = {"step_median_s": value * math.exp(generator.normal(0, scatter / 4))}
            made.append(entry(night, repeat, **({"figures": figures} | changes(night))))
    return made


def step_at(place: int, factor: float) -> Callable[[int], float]:
    return lambda night: factor if night >= place else 1.0


def of_steps(entries: Sequence[HistoryEntry]) -> TrendsReport:
    return trends_of(entries, ["step_median_s"])


def as_text(report: TrendsReport) -> str:
    return to_text(trends_document(report))


# What is one series, what is one night


def test_runs_of_one_session_are_one_night() -> None:
    (trend,) = trends(dated(course(30, step_at(15, 1.1), repeats=3)))
    assert len(trend.nights) == 30
    assert trend.num_runs == 90
    for night in trend.nights:
        assert night.value == sorted(night.values)[1]
        assert len(night.run_ids) == 3
    (change,) = trend.changes
    assert change.ratio.n == 15  # nights, not runs
    assert change.kind == "regression"


@pytest.mark.parametrize("key", ["group", "ranks", "nodes"])
def test_what_may_not_be_compared_is_not_one_series(key: str) -> None:
    other = {"group": "ffffffffffff", "ranks": 8, "nodes": 4}[key]
    entries = course(40, lambda night: 1.0, changes=lambda night: {key: other} if night >= 20 else {})
    slower = {"step_median_s": 0.2}
    found = trends(dated([replace(one, figures=slower) if getattr(one, key) == other else one for one in entries]))
    assert [len(trend.nights) for trend in found] == [20, 20]
    assert [trend.changes for trend in found] == [(), ()]


def test_runs_without_figures_and_copies_do_not_count() -> None:
    entries = course(20, lambda night: 1.0, repeats=1)
    spoilt = [
        entry(50, state="invalid", figures={}),
        entry(51, state="damaged", why="torn", group="", figures={}),
        entry(52, finished="soon"),
        entry(53, finished="0001-01-01T00:00:00+14:00"),
        entries[3],
    ]
    (trend,) = trends(dated([*spoilt, *entries]))
    assert trend.num_runs == 20
    report = of_steps([*entries, *spoilt])
    assert (report.num_runs, report.num_without) == (20, 5)
    assert report.damaged == ("run-51-0: torn",)


def test_times_of_other_zones_sort_as_moments() -> None:
    late = entry(1, finished="2026-01-02T01:00:00-05:00")
    early = entry(2, finished="2026-01-02T05:00:00Z")
    assert [one.run_id for one in dated([late, early])] == ["run-2-0", "run-1-0"]
    assert dated([late])[0].finished == "2026-01-02T06:00:00Z"


@pytest.mark.parametrize("metric", sorted(by_name()))
def test_direction_is_that_of_the_metric(metric: str) -> None:
    entries = course(40, lambda night: 1.0, changes=lambda night: {"figures": {metric: 2.0 if night < 20 else 3.0}})
    (series,) = trends_of(entries, [metric]).series
    assert [change.kind for change in series.changes] == ["regression"]
    assert by_name()[metric].higher_is_worse
    inverse = [replace(one, figures={metric: 1 / one.figures[metric]}) for one in entries]
    (series,) = trends_of(inverse, [metric]).series
    assert [change.kind for change in series.changes] == ["improvement"]


# What differs at a change


def drivers(night: int) -> dict[str, Any]:
    environment = {
        "gpu.driver": "550.54" if night < 20 else ("560.28" if night < 30 else "560.35"),
        "os": "Debian 12",
        "variable.SLURM_JOB_ID": str(1000 + night),
        "package.torch": "2.10" if night < 25 else "2.11",
        "dlbench.commit": f"d{night}",
    }
    if night >= 20:
        environment["variable.NCCL_DEBUG"] = "INFO"
    hosts = tuple(
        HostEntry(host=name, num_ranks=1, work_ratio=None) for name in (["a", "b"] if night < 20 else ["b", "c"])
    )
    return {
        "environment": environment,
        "hosts": hosts,
        "tags": {"queue": "x" if night < 20 else "y", "commit": f"t{night}"},
    }


def test_a_change_names_what_differs_on_both_sides() -> None:
    (trend,) = trends(dated(course(40, step_at(20, 1.1), changes=drivers)))
    (change,) = trend.changes
    assert {one.key: (one.before, one.after) for one in change.differences} == {
        "gpu.driver": ("550.54", "560.28, 560.35"),
        "variable.NCCL_DEBUG": ("not set", "INFO"),
        "tag.queue": ("x", "y"),
    }
    assert (change.new_hosts, change.removed_hosts) == (("c",), ("a",))
    assert (change.commits_before, change.commits_after) == (("c0009",), ("c0010",))


def test_nights_of_which_the_side_is_not_certain_are_left_out() -> None:
    """A step of one scatter is found some nights off; the driver that came with it is named all the same."""

    def changes(night: int) -> dict[str, Any]:
        return {"environment": {"gpu.driver": "1" if night < 60 else "2"}}

    named = []
    for seed in range(12):
        (trend,) = trends(dated(course(120, step_at(60, 1.03), seed=seed, scatter=0.02, changes=changes)))
        for change in trend.changes:
            assert change.last_before < change.time <= change.first_after
            named.append(bool(change.differences))
    assert len(named) >= 9
    assert sum(named) >= len(named) - 2


def test_equal_commits_are_named() -> None:
    same = course(40, step_at(20, 1.1), changes=lambda night: {"commit": "abc"})
    (series,) = of_steps(same).series
    assert series.changes[0].commits == "commit abc on both sides"
    none = course(40, step_at(20, 1.1), changes=lambda night: {"commit": ""})
    assert of_steps(none).series[0].changes[0].commits == "commit not known"
    assert "no recorded key of the environment differs" in as_text(of_steps(none)).replace("\n  ", " ")


# How a history is rated, and what is acknowledged


def rated(entries: Sequence[HistoryEntry], acknowledged: Sequence[Acknowledgement] = ()) -> Rating:
    """As the report's card says it, where no other reference is known."""
    report: Any = SimpleNamespace(views={"history": trends_of(entries, ["step_median_s"], acknowledged)})
    point = SimpleNamespace(ranks=2, nodes=1)
    group: Any = SimpleNamespace(points=(point,), largest=point, id="0123456789ab", all_of=lambda kind: ())
    return rating(group, report)


def known(entries: Sequence[HistoryEntry]) -> Acknowledgement:
    """Somebody's word for the newest change of the one series."""
    (trend,) = of_steps(entries).series
    change = trend.changes[-1]
    return Acknowledgement(
        group=trend.group,
        ranks=trend.ranks,
        nodes=trend.nodes,
        metric=trend.metric,
        time=change.time,
        through=change.first_after,
        level=change.after.value,
        ratio=change.ratio.value,
        reason="planned",
        by="me",
        written="2026-06-01T00:00:00Z",
    )


@pytest.mark.parametrize("count", [2, 5, 11])
def test_few_nights_are_rated_unknown_whatever_the_newest(count: int) -> None:
    """A night three times as slow was "good: as usual"."""
    for factor in (1.0, 3.0):
        found = rated(course(count, step_at(count - 1, factor)))
        assert (found.tone, found.text) == ("unknown", f"unknown: {count} of the 12 nights that show what is usual")


def test_a_level_that_became_worse_is_rated_low_until_it_is_acknowledged() -> None:
    """However long ago; a further change is not covered, nor one that goes on."""
    entries = course(40, step_at(15, 1.3))
    found = rated(entries)
    assert found.tone == "low"
    assert re.fullmatch(r"slower: step \+(29|30|31)\.\d % since 2026-01-16, not acknowledged", found.text)
    word = known(entries)
    calm = rated(entries, [word])
    assert calm.tone == "good"
    assert "acknowledged" in calm.text
    again = course(60, lambda night: 1.0 if night < 15 else (1.3 if night < 40 else 1.4))
    assert rated(again, [word]).tone == "low"
    assert "since 2026-02-10" in rated(again, [word]).text
    assert rated(course(40, step_at(15, 1.3)), [word.model_copy(update={"ranks": 8})]).tone == "low"


def test_a_word_for_one_change_covers_no_earlier_one() -> None:
    entries = course(90, lambda night: 1.0 if night < 30 else (1.1 if night < 60 else 1.25))
    (trend,) = trends_of(entries, ["step_median_s"], [known(entries)]).series
    assert [change.acknowledged is not None for change in trend.changes] == [False, True]
    assert rated(entries, [known(entries)]).tone == "low"


def test_a_level_that_is_mended_or_better_is_rated_good() -> None:
    assert rated(course(30, lambda night: 1.0)) == Rating(tone="good", text="as usual in 30 nights")
    assert rated(course(60, lambda night: 1.2 if 20 <= night < 40 else 1.0)).tone == "good"
    assert rated(course(40, step_at(20, 0.8))).tone == "good"


def test_an_odd_newest_night_is_no_level_yet() -> None:
    found = rated(course(31, step_at(30, 2.0)))
    assert found.tone == "unknown"
    assert re.match(r"unknown: newest night (1\.9|2\.0)\dx the usual step; \d more decide", found.text)


def test_a_slow_regression_has_no_commit_and_comes_back_when_it_goes_on() -> None:
    def drift(count: int) -> list[HistoryEntry]:
        return course(count, lambda night: 1 + 0.002 * max(0, night - 20), changes=drivers)

    (trend,) = of_steps(drift(90)).series
    (change,) = trend.changes
    assert (change.shape, change.kind) == ("drift", "regression")
    assert change.since == f"from {change.last_before[:10]} to {change.first_after[:10]}" == change.when
    assert (change.commits_before, change.differences, change.new_hosts) == ((), (), ())
    (slope,) = [level for level in trend.levels if level.is_drift]
    assert slope.at_first < slope.value.value
    assert rated(drift(90)).tone == "low"
    word = known(drift(90))
    assert rated(drift(90), [word]).tone == "good"
    assert rated(drift(140), [word]).tone == "low"
    text = " ".join(as_text(of_steps(drift(90))).split())
    assert "slow regression" in text.lower()
    assert "a slow change has no date" in text
    assert "commit c" not in text
    assert to_html(trends_document(of_steps(drift(90))))


# Slow nodes over months


def shared(night: int, slow: dict[str, float], hosts: Sequence[str] = ("n1", "n2", "n3")) -> HistoryEntry:
    entries = tuple(
        HostEntry(host=host, num_ranks=4, work_ratio=slow.get(host, 1.0) + night % 3 / 1e3) for host in hosts
    )
    return entry(night, hosts=entries, nodes=len(hosts))


def test_a_node_that_became_slow_is_slow_since_then() -> None:
    found = slow_months(dated([shared(night, {"n2": 1.08} if night >= 80 else {}) for night in range(150)]))
    first = found.hosts[0]
    assert (first.host, first.verdict) == ("n2", "slow")
    assert first.since[:10] == (START + timedelta(days=80)).strftime("%Y-%m-%d")
    assert first.current.value == pytest.approx(1.081, abs=1e-4)
    assert [change.time[:10] for change in first.changes] == [first.since[:10]]
    assert found.exclude == ("n2",)
    assert found.months == ("2026-01", "2026-02", "2026-03", "2026-04", "2026-05")
    verdicts = {month.month: month.verdict for month in first.months}
    assert verdicts["2026-01"] == "not shown to be slow"
    assert verdicts["2026-04"] == verdicts["2026-05"] == "slow"
    assert {host.verdict for host in found.hosts[1:]} == {"not shown to be slow"}


def test_a_mended_node_is_not_excluded() -> None:
    found = slow_months(dated([shared(night, {"n2": 1.08} if night < 60 else {}) for night in range(80)]))
    assert found.exclude == ()
    course_of = {host.host: host for host in found.hosts}["n2"]
    assert course_of.months[0].verdict == "slow"
    assert course_of.verdict == "not shown to be slow"


def test_a_node_that_is_not_used_any_more_is_not_excluded() -> None:
    gone = [shared(night, {"n9": 1.2}, ("n1", "n9")) for night in range(10)]
    later = [shared(night, {}, ("n1", "n2")) for night in range(RECENT_DAYS + 20, RECENT_DAYS + 30)]
    found = {host.host: host for host in slow_months(dated([*gone, *later])).hosts}
    assert (found["n9"].verdict, found["n9"].current) == ("not used lately", None)
    assert found["n9"].months[0].verdict == "slow"


def test_runs_of_one_night_or_job_are_one_look_at_its_hosts() -> None:
    """Forty runs while a neighbour slowed n1: of one request, or of forty requests in one allocation."""
    one_request = [replace(shared(3, {"n1": 1.1}), run_id=f"a{number}") for number in range(40)]
    one_job = [replace(shared(3, {"n1": 1.1}), run_id=f"b{number}", series=f"b{number}") for number in range(40)]
    own_jobs = [replace(run, slurm_job_id=run.run_id) for run in one_job]
    for runs in (one_request, one_job, own_jobs):
        found = slow_months(dated(runs))
        assert found.exclude == ()
        assert (found.hosts[0].host, found.hosts[0].verdict) == ("n1", "suspected")
        assert (found.hosts[0].num_nights, found.hosts[0].num_runs) == (1, 40)


def test_a_slow_link_is_named_and_is_no_slow_host() -> None:
    def late(night: int) -> HistoryEntry:
        run = shared(night, {})
        hosts = [
            replace(host, later=0.04 * (host.host == "n2"), later_at_least=0.038 * (host.host == "n2"))
            for host in run.hosts
        ]
        return replace(run, hosts=tuple(hosts))

    found = slow_months(dated([late(night) for night in range(8)]))
    assert found.exclude == ()
    assert (found.hosts[0].verdict, found.hosts[0].months[0].verdict) == ("slow link", "slow link")
    words = "n2: slow link or NIC: its exchanges end 4.0 % of a step later than the other hosts', which"
    assert found.hosts[0].sentence.startswith(words)
    few = slow_months(dated([late(night) for night in range(4)]))
    assert few.exclude == ()
    assert {host.host: host.verdict for host in few.hosts}["n2"] == "suspected"


def test_runs_on_one_host_compare_nothing() -> None:
    found = slow_months(dated([entry(night) for night in range(10)]))
    assert (found.hosts, found.num_runs, found.num_without, found.as_of) == ((), 0, 10, "")


def test_names_that_cannot_stand_in_an_option_are_kept_out_of_it() -> None:
    found = slow_months(dated([shared(night, {"x;reboot": 1.2}, ("n1", "x;reboot")) for night in range(8)]))
    assert found.exclude == ()
    assert found.unsafe == ("x;reboot",)


# All formats say the same


@pytest.fixture(scope="module")
def sample() -> TrendsReport:
    entries = course(90, lambda night: (1.0 if night < 30 else 0.93) * (1.06 if night >= 70 else 1.0), changes=drivers)
    entries += [
        replace(
            one,
            run_id=f"{one.run_id}-x",
            ranks=8,
            nodes=2,
            figures=dict.fromkeys(["step_median_s", "energy_per_sample_j"], one.figures["step_median_s"]),
        )
        for one in entries
    ]
    hosts = [
        replace(shared(night, {"n2": 1.08} if night >= 40 else {}), run_id=f"h{night}", group="h")
        for night in range(90)
    ]
    return trends_of([*entries, *hosts, entry(95, state="damaged", why="torn")])


@pytest.mark.slow
def test_no_format_drops_a_change(sample: TrendsReport) -> None:
    assert len(sample.changes) >= 4
    page = to_html(trends_document(sample)).replace("\N{NO-BREAK SPACE}", " ").replace("&gt;", ">")
    page = re.sub(r' <span class="interval">|</span>', lambda mark: " " if mark[0][0] == " " else "", page)
    text = " ".join(as_text(sample).split())
    written = to_markdown(trends_document(sample)).replace("\\", "")
    content = json.loads(to_json(trends_document(sample)))
    assert (content["format"], content["version"]) == ("dlbench.trends", 1)
    in_json = [change["ratio"]["value"] for series in content["series"] for change in series["changes"]]
    in_csv = [float(row["ratio"]) for row in csv.DictReader(io.StringIO(to_csv(trends_document(sample), "changes")))]
    assert sorted(in_json) == sorted(in_csv) == sorted(change.ratio.value for _, change in sample.changes)
    for _, change in sample.changes:
        for words in (str(change_cell(change.ratio)), level_text(change.after)):
            assert words in text
            assert words in written
            assert words in page
        assert change.commits in text
        assert change.commits in page


def test_terminal_fits_eighty_columns(sample: TrendsReport) -> None:
    lines = [*as_text(sample).splitlines(), *to_text(nodes_document(sample.nodes)).splitlines()]
    assert max(map(len, lines)) <= 80
    assert "sbatch --exclude=n2" in lines


def test_an_empty_history_says_so() -> None:
    empty = of_steps([])
    assert "No run has figures" in as_text(empty)
    assert "Import runs with dlbench history import" in to_html(trends_document(empty))
    assert to_csv(trends_document(empty), "changes").count("\n") == 1
    assert "None." in to_markdown(trends_document(empty))


def test_the_report_leads_with_what_changed() -> None:
    changed = of_steps(course(40, step_at(20, 1.2)))
    assert as_text(changed).splitlines()[3].startswith("1 regression in 1 trend. Newest: step time +")
    (steady,) = [of_steps(course(30, lambda night: 1.0))]
    assert as_text(steady).splitlines()[3] == "Nothing changed in 1 trend."
    for report, words in ((steady, "0"), (of_steps(course(5, lambda night: 1.0)), "too few nights")):
        assert words in [str(cell) for cell in series_sheet(report).to_display().rows[0].cells]
    sections = {section.id: section for section in trends_document(changed).sections}
    assert [one.id for one in sections.values()][:2] == ["changes", f"series-{changed.series[0].id}"]
    assert sections["changes"].level == sections[f"series-{changed.series[0].id}"].level == "answer"


def test_of_many_nights_the_newest_and_those_of_changes_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlbench.history.document.MAX_NIGHTS", 10)
    report = of_steps(course(41, lambda night: 1.0 if night < 20 else 1.2))
    (series,) = report.series
    assert len(series.changes) == 1
    (chart,) = [chart for section in trends_document(report).sections for chart in section.charts()]
    text = json.dumps(chart.spec)
    for night in (series.changes[0].time, series.nights[-1].time):
        assert f'"time": "{night}", "commit": "c' in text
    assert text.count('"hosts": ') < 41


def test_a_report_shows_a_history_beside_its_runs(sample: TrendsReport) -> None:
    view = HistoryView()
    shown, absent = (SimpleNamespace(views={view.key: found}) for found in (sample, None))
    (section,) = view.sections(shown)
    assert [sheet.name for sheet in section.sheets] == ["history-changes", "history-series", "history-hosts"]
    assert all(list(sheet.records()) and sheet.to_display().rows for sheet in section.sheets)
    assert len(section.charts()) == len(sample.series) + 1
    assert any("Slow now: n2" in text for text in section.words)
    assert view.sections(absent) == ()
    assert "--history" in view.remedy(absent)


# Commands


def run_cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["history", *map(str, arguments)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trends") / "store"
    generator = np.random.default_rng(1)
    points = [(float(day), (1.06 if day >= 14 else 1.0) * math.exp(generator.normal(0, 0.005))) for day in range(28)]
    write_history(
        path,
        points,
        commit=lambda number: f"c{number // 7}",
        environment=lambda number: {"gpu.driver": "1" if number < 14 else "2"},
        host=lambda number, rank: f"n{rank}",
        slow_rank=lambda number, rank: 1.08 if rank == 1 and number >= 14 else 1.0,
    )
    return path


def test_commands_read_a_real_store(store: Path, tmp_path: Path) -> None:
    done = run_cli("trends", "--store", store)
    assert done.exit_code == 0, done.output
    assert "Regression on 2026-03-15" in done.output
    assert "gpu.driver: 1 -> 2" in done.output
    assert "commit c1 -> c2" in done.output
    for name, start in (("t.html", "<!DOCTYPE html>"), ("t.md", "# dlbench"), ("t.json", "{"), ("t.csv", "series_id,")):
        assert run_cli("trends", "--store", store, "-o", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    slow = run_cli("slow-nodes", "--store", store)
    assert slow.exit_code == 0
    assert "sbatch --exclude=n1" in slow.output
    option = run_cli("slow-nodes", "--store", store, "--exclude")
    assert option.stdout == "--exclude=n1\n"
    assert "more own work" in option.stderr
    assert json.loads(run_cli("slow-nodes", "--store", store, "--format", "json").stdout)["exclude"] == ["n1"]


def test_a_regression_is_named_until_somebody_acknowledges_it(store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))

    def trends_json() -> Any:
        (series,) = json.loads(run_cli("trends", "--store", copy, "--format", "json").stdout)["series"]
        return series

    series = trends_json()["id"]
    shown = run_cli("trends", "--store", copy, "--where", "state=valid").stdout
    assert f"dlbench history acknowledge {series} 2026-03-15" in " ".join(shown.split())
    done = run_cli("acknowledge", series, "2026-03-15", "--reason", "driver 2, vendor told", "--store", copy)
    assert done.exit_code == 0, done.output
    known = trends_json()["changes"][0]["acknowledged"]
    assert known["reason"].startswith("driver 2")
    assert known["by"]
    assert known["written"].startswith("20")
    shown = " ".join(run_cli("trends", "--store", copy).stdout.split())
    assert "acknowledged by" in shown
    assert "vendor told" in shown
    assert run_cli("trends", "--store", copy, "--fail-on-regression").exit_code == 0
    again = run_cli("acknowledge", series, "2026-03-15", "--reason", "x", "--store", copy)
    assert "was acknowledged by" in str(again.exception)
    for note in (copy / "acknowledged").iterdir():
        note.unlink()
    assert run_cli("trends", "--store", copy, "--fail-on-regression").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["abc-2-1-step_median_s", "2026-03-15", "--reason", "x"],
            "no such trend in this history; trends with changes: ",
        ),
        (["TREND", "2026-03-02", "--reason", "x"], "has no change on that day, only: 2026-03-15"),
        (["TREND", "2", "--reason", "x"], "has no change on that day"),
        (["TREND", "2026-03-15", "--reason", " "], "--reason: must have 1 to 500 characters"),
    ],
)
def test_only_what_is_there_can_be_acknowledged(store: Path, arguments: list[str], message: str) -> None:
    series = json.loads(run_cli("trends", "--store", store, "--format", "json").stdout)["series"][0]["id"]
    done = run_cli("acknowledge", *(series if one == "TREND" else one for one in arguments), "--store", store)
    assert message in str(done.exception)
    assert not (store / "acknowledged").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trends", "--metric", "step_medain_s"], "step_median_s"),
        (["trends", "--table", "hosts"], "--table hosts: has no effect"),
        (["trends", "--where", "wrkload=x"], "did you mean workload"),
        (["trends", "-o", "/nowhere/t.html"], "there is no folder"),
        (["slow-nodes", "--exclude", "--format", "json"], "--exclude"),
        (["slow-nodes", "-o", "hosts.html"], "no --format"),
    ],
)
def test_wrong_use_is_one_line(store: Path, arguments: list[str], message: str) -> None:
    done = run_cli(*arguments, "--store", store)
    assert done.exception is not None
    assert message in str(done.exception)


# The page


def test_figures_of_zero_have_no_course() -> None:
    assert trends(dated([entry(night, figures={"step_median_s": 0.0}) for night in range(20)])) == []


def test_series_of_equal_words_are_told_apart() -> None:
    """By what was asked of the system; where that does not differ, by the configuration's id."""

    def asked(group: str, **environment: str) -> list[HistoryEntry]:
        changes = {"group": group, "environment": {f"system.{key}": value for key, value in environment.items()}}
        return [entry(0, 0, **(changes | {"run_id": f"run-{group}"}))]

    apart = of_steps([*asked("a", modules="gcc/12"), *asked("b", modules="gcc/13"), *asked("c"), *asked("d")])
    ends = [one.label.rsplit(", ", 1)[1] for one in apart.series]
    assert ends == ["system.modules=gcc/12", "system.modules=gcc/13", "configuration c", "configuration d"]


def test_too_few_nights_are_inconclusive(tmp_path: Path) -> None:
    write_history(tmp_path / "store", [(float(day), 1.0 + day / 1000) for day in range(3)])
    done = run_cli("trends", "--store", tmp_path / "store", "--fail-on-regression")
    assert done.exit_code == 6
    assert "none long enough: a change point needs 12 nights, the longest has 3" in done.stderr
