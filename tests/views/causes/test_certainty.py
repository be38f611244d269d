"""A cause is found only after correction over all causes; what others gain is said apart."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from dlbench.analysis.attribution import attribute
from dlbench.analysis.causes import CAUSES
from dlbench.records.scan import scan
from dlbench.views.causes.numbers import adjusted_p, stands_out
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.series_result import result_of
from tests.support.run_factory import constant, plans, write_run
from tests.views.causes.test_diagnose import diagnose, verdict, write_series

SHARES = MappingProxyType(dict(zip(CAUSES, (0.76, 0.10, 0.03, 0.0, 0.05, 0.02, 0.0, 0.01, 0.01, 0.02, 0.0), strict=True)))
Runs = dict[tuple[str, int], dict[str, float]]


def runs(generator: np.random.Generator, scatter: float, repeats: int = 5) -> Runs:
    """Causes of equal runs: half of the scatter is of whole runs, half of each cause."""
    whole = generator.lognormal(0, scatter, repeats)
    return {
        ("", k): {name: share * whole[k] * generator.lognormal(0, scatter) for name, share in SHARES.items()}
        for k in range(repeats)
    }


@pytest.mark.parametrize("scatter", [0.01, 0.03])
def test_equal_runs_have_no_cause(scatter: float) -> None:
    """The largest of eight causes had an interval above 0 in 5 to 14 % of such reports."""
    generator = np.random.default_rng(5)
    trials, found = 150, 0
    for _ in range(trials):
        parts = attribute(runs(generator, scatter), runs(generator, scatter), work=1, names=CAUSES).parts
        (adjusted,) = adjusted_p([parts])
        found += any(stands_out(part, adjusted.get(part.name, 1.0)) for part in parts)
    assert found <= 0.05 * trials


def test_all_rank_counts_and_groups_count() -> None:
    generator = np.random.default_rng(6)
    base = runs(generator, 0.02)
    parts = attribute(runs(generator, 0.02), base, work=1, names=CAUSES).parts
    at_base = attribute(base, base, work=1, is_baseline=True, names=CAUSES).parts
    (alone,) = adjusted_p([parts])
    nothing, more, _ = adjusted_p([at_base, parts, parts], num_groups=3)
    least = min(alone, key=lambda name: alone[name])
    assert nothing == {}
    assert more[least] == pytest.approx(min(1.0, 6 * alone[least]))


def test_a_cause_larger_than_the_loss_is_set_beside_what_others_gain(tmp_path: Path) -> None:
    """25 ms of exchange more, 20 ms of backward less, in a step of 100 ms."""
    for plan in plans(points=(1, 2), repeats=5):
        is_base = plan.layout.ranks == 1
        times = [5.0, 0.0, 30.0, 60.0 if is_base else 40.0, 0.0 if is_base else 25.0, 0.0]
        write_run(tmp_path, plan, constant(times, other=5.0))
    found = verdict(tmp_path)
    assert found["cause"] == "exchange"
    # Lost is one number, 1 - efficiency; a part that is larger is no part "of" it.
    assert found["line"] == (
        "main cause: exchange on the wire, 23.8 points; 4.8 points lost in all, as other parts gain 19.0 points"
    )


def test_a_small_certain_part_of_a_large_loss_is_no_main_cause(tmp_path: Path) -> None:
    """4 ms of exchange in every run, and 10 to 70 ms of backward more in a step of 100 ms."""
    for plan in plans(points=(1, 2), repeats=5):
        times = [5.0, 0.0, 30.0, 60.0, 0.0, 0.0]
        if plan.layout.ranks == 2:
            times[3] += (70.0, 10.0, 60.0, 11.0, 30.0)[plan.series.repeat]
            times[4] = 4.0
        write_run(tmp_path, plan, constant(times, other=5.0))
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"], found["name"]) == ("partial", "exchange", "")
    assert (found["experiments"], found["next"]) == ([], "repeat with --repeats 10")
    sure = "certain: exchange on the wire, 2.9 points"
    rest = "of 28 points lost; the rest (compute 25 points) is too uncertain in 5 runs to name"
    assert found["line"] == f"{sure} [2.2, 3.6] {rest}"
    # The card, the report's verdict, the table of experiments and the end of a run say the same.
    report = assemble(scan(tmp_path))
    (card,) = document_of(report).sections[0].cards
    (group,) = report.groups
    assert dict(card.facts)["Loss"] == f"{sure} of 28 points; larger parts are too uncertain to name"
    assert "Certain: exchange on the wire" in group.verdict
    (screen,) = result_of(scan(tmp_path))[1].sections
    assert group.verdict in screen.brief
    assert "network-bound" not in diagnose(tmp_path)


def test_runs_are_bound_by_nothing_that_is_less_than_a_third_of_the_loss(tmp_path: Path) -> None:
    write_series(tmp_path, {"exchange": 6.0, "input": 5.0, "backward": 5.0, "other": 5.0})
    found = verdict(tmp_path)
    assert (found["finding"], found["cause"], found["name"]) == ("found", "exchange", "")
    assert found["line"].startswith("main cause: exchange on the wire, 5.0 points of 17.4 points lost; also ")
