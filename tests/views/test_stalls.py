"""`dlbench io --tiers`: its runs, the stalls by difference, and what is said where one was not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.errors import UserError
from dlbench.records.scan import scan
from dlbench.report.formats.terminal import to_text
from dlbench.views.stalls import StallPart, Stalls, stalls, stalls_document
from tests.support.out_of_core_factory import REAL, read_epoch, write_tiers
from tests.support.paths import GOLDEN
from tests.support.run_factory import plans


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
