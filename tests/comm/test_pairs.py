"""Pairs of ranks: which are chosen, what is refused, and figures, factors and costs against planted times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.comm.document import document_of
from dlbench.comm.pairs import PairsReport
from dlbench.comm.report import assemble
from dlbench.errors import UserError
from dlbench.records.comm import CommPoint, scan_comm
from dlbench.records.folder import RunFolder
from dlbench.report.formats import terminal
from tests.support import collectives_factory as factory
from tests.support.run_factory import edit_json

ALPHA, BETA = {"inside": 10e-6, "across": 100e-6}, {"inside": 0.25e-9, "across": 8e-9}
FACTORS = (2.0, 3.0)  # Of the mean, and of the slowest tenth.


def chosen(ranks: int, **request: Any) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    (plan, *_) = factory.comm_plans(collective="p2p", points=(ranks,), backends="auto", repeats=1, **request)
    return plan.comm.pairs, plan.comm.congestors


def write_pairs(out: Path, repeats: int = 5, **request: Any) -> None:
    """Runs with planted costs; beside congestors one operation in ten takes three times as long, on average two."""
    asked = {"collective": "p2p", "backends": "auto", "sizes": "8,4KiB,1MiB", "repeats": repeats, **request}
    for plan in factory.comm_plans(**asked):
        folder: RunFolder = factory.write_comm_run(out, plan)
        points = []
        for size in plan.comm.sizes:
            for pair in plan.comm.pairs:
                level = "inside" if pair[0] // 2 == pair[1] // 2 else "across"
                for way in plan.comm.algorithms:
                    for is_beside in (False, True)[: 1 + bool(plan.comm.congestors)]:
                        seconds = (ALPHA[level] + size * BETA[level]) * (1 + 0.01 * plan.series.repeat)
                        slow, usual = (FACTORS[1], (FACTORS[0] * 10 - FACTORS[1]) / 9) if is_beside else (1.0, 1.0)
                        made = CommPoint(
                            collective="p2p", algorithm=way, carrier="torch-gloo", num_bytes=size, dtype="fp32",
                            times_s=(*[seconds * usual] * 90, *[seconds * slow] * 10), correct=True, max_error=None,
                            pair=pair, congestors=(1e9,) * len(plan.comm.congestors) if is_beside else (),
                        )  # fmt: skip
                        points.append(made.model_dump(mode="json"))
        edit_json(folder.comm, points=points)


def only(folder: Path) -> PairsReport:
    (found,) = assemble(scan_comm(folder)).pairs
    return found


def test_pairs_follow_the_layout() -> None:
    assert chosen(4, group_size=4) == (((0, 1),), ())
    assert chosen(4, group_size=1) == (((0, 1), (2, 3), (0, 3)), ())
    assert chosen(6, group_size=2) == (((0, 1), (2, 3), (4, 5), (0, 2), (0, 4)), ())
    # Beside congestors those between groups alone: the other ranks send from one half to the other.
    assert chosen(4, group_size=2, congestors="auto") == (((0, 2),), ((1, 3),))
    assert chosen(8, group_size=2, congestors="auto") == (((0, 2), (4, 6), (0, 6)), ((1, 5), (3, 7)))
    assert chosen(4, group_size=4, congestors="auto") == (((0, 1),), ((2, 3),))
    assert chosen(8, group_size=4, victims="3:4,2:5", congestors="7:0") == (((3, 4), (2, 5)), ((7, 0),))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"victims": "0:4"}, "--victims 0:4: must be two of 4 ranks, numbered from 0"),
        ({"victims": "1:1"}, "--victims 1:1: must be two"),
        ({"victims": "0:1,0:1"}, "--victims: a pair is given twice"),
        ({"victims": "0-1"}, "--victims '0-1': must be auto or pairs of ranks"),
        ({"victims": "0:1", "congestors": "1:9"}, "--congestors 1:9: must be two"),
        ({"victims": "0:1", "congestors": "1:2"}, "rank 1 is already in another pair"),
        ({"victims": "0:1,2:3", "congestors": "auto"}, "the victims leave 0 of 4 ranks"),
        ({"backends": "gloo"}, "no --backends"),
        ({"algorithms": "ring"}, "'ring' is not a known algorithm of p2p"),
        ({"collective": "allreduce", "victims": "0:1"}, "--victims: has no effect on allreduce"),
        ({"collective": "allreduce", "congestors": "auto"}, "--congestors: has no effect on allreduce"),
    ],
)
def test_what_no_pair_can_be_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        factory.comm_plans(**{"collective": "p2p", "backends": "auto", "points": (4,), **request_})


def test_costs_of_a_level_are_those_planted(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    found = only(tmp_path)
    assert [one.level for one in found.costs] == ["inside", "across"]
    for one in found.costs:
        assert one.alpha.value == pytest.approx(ALPHA[one.level] * 1.02)
        assert one.beta.value == pytest.approx(BETA[one.level] * 1.02)
        assert one.alpha.low < one.alpha.value < one.alpha.high  # type: ignore[operator]
    assert all(one.beside is None and one.factor is None for one in found.figures)
    (one,) = [f for f in found.figures if (f.pair, f.way, f.at.num_bytes) == ("0:2", "window", 2**20)]
    assert one.at.time.value == pytest.approx((ALPHA["across"] + 2**20 * BETA["across"]) * 1.02)
    assert one.at.minimum_s == pytest.approx(one.at.time.value / 1.02)  # of all runs
    assert one.at.algbw.value == pytest.approx(2**20 / one.at.time.value * 1e-9)
    assert [words.split(",")[0] for words in found.words] == ["Within a group", "Between groups"]


def test_factors_are_of_the_same_run(tmp_path: Path) -> None:
    write_pairs(tmp_path, congestors="auto")
    found = only(tmp_path)
    assert {one.name: one.value for one in found.conditions}["congestors"] == "1:3"
    for one in found.figures:
        assert one.factor is not None
        assert one.factor_p99 is not None
        # What runs differ by cancels: the interval has no width.
        assert (one.factor.value, one.factor.low, one.factor.high) == pytest.approx((FACTORS[0],) * 3)
        assert one.factor_p99.value == pytest.approx(FACTORS[1])
    assert any("2.00x" in words and "1 of 1 pairs are certainly affected" in words for words in found.words)
    page = document_of(assemble(scan_comm(tmp_path)))
    text = terminal.to_text(page)
    assert "the pair affected most; 1 of 1 pairs are certainly affected, over 5 runs." in " ".join(text.split())


def test_pairs_and_collectives_stand_side_by_side(tmp_path: Path) -> None:
    factory.write_comm_series(tmp_path, algorithms="ring,direct", backends="none", sizes="1KiB:1MiB")
    write_pairs(tmp_path, series="c2")
    report = assemble(scan_comm(tmp_path))
    assert [group.collective for group in report.groups] == ["allreduce"]
    (found,) = report.pairs
    assert found.fit is report.fits[0]  # pairs are in no fit to collectives
    assert report.fits[0].network.num_points == sum(len(series.rows) for series in report.groups[0].series)
    assert not any(row.get("group") for row in document_of(report).tables()["fits"].rows)  # for people alone
    assert {run.group for run in report.runs} == {found.id, report.groups[0].id}
