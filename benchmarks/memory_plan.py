"""The planner of activations against the exact optimum, and against the clock.

Chains are drawn as in `tests.support.out_of_core_oracle`: networks of five shapes, links from ten times faster than the
pass to ten times slower, capacities from the smallest that fits. The optimum is that of keep, swap and recompute with
the same blocks (`tests.support.out_of_core_oracle`, branch and bound, tested against trying all plans); the planner may
also swap the input of a recomputed block, which in the second comparison the optimum may, too. Times are those of one
core, in processor seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figures import Figure, median_interval
from dlbench.perfmodels.out_of_core.planner import fixed_plan, plan_blocks
from dlbench.perfmodels.out_of_core.search import EFFORT, DoesNotFitError
from tests.support.out_of_core_oracle import DECISIONS, Case, best_cut, best_plan, random_case

CHAINS, CHAINS_MORE = 1000, 250
"""Compared with the optimum of keep, swap and recompute; and of these and recompute-swap, which takes ten times as
long."""
FIRST_SEED = 10_000
"""Other chains than those that the planner was made on."""
BLOCKS = 10
CUT_CHAINS, CUT_UNITS = 100, 6
LARGE_CHAINS, LARGE_UNITS = 15, 100
LONGER = 4
"""Times the effort that the plans of large chains are compared with: no optimum is known there."""


class Compared(NamedTuple):
    """A plan beside the best there is."""

    case: Case
    planned_s: float | None
    best_s: float | None


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from against_the_optimum()
    yield from against_the_best_cuts()
    yield from large_chains()


def against_the_optimum() -> Iterator[Figure]:
    """1,000 chains of up to 10 blocks that are given."""
    cases = [random_case(seed, most=BLOCKS) for seed in range(FIRST_SEED, FIRST_SEED + CHAINS)]
    plans = [_planned_s(case, pinned=True) for case in cases]
    for name, decisions, count in (
        ("keep, swap, recompute", DECISIONS[:3], CHAINS),
        ("keep, swap, recompute and its inputs swapped", DECISIONS, CHAINS_MORE),
    ):
        begin = time.process_time()
        found = []
        for case, planned_s in zip(cases[:count], plans[:count], strict=True):
            # What the planner found bounds the search; an infinite bound proves that nothing fits.
            best = best_plan(case.chain, case.rates, case.capacity_bytes, decisions=decisions)
            found.append(Compared(case, planned_s, None if best is None else best[1]))
        took = time.process_time() - begin
        yield from _shares(f"plans of given blocks, optimum over {name}", found, f"optimum in {took:.0f} s")


def against_the_best_cuts() -> Iterator[Figure]:
    """Chains of 6 units whose blocks are to be chosen as well."""
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + CUT_CHAINS):
        case = random_case(seed, units=CUT_UNITS)
        best = best_cut(case.chain, case.rates, case.capacity_bytes)
        found.append(Compared(case, _planned_s(case, pinned=False), None if best is None else best[1]))
    yield from _shares(f"plans and blocks of {CUT_UNITS} units, optimum over all", found, "")


def _planned_s(case: Case, *, pinned: bool) -> float | None:
    starts = range(len(case.chain.units)) if pinned else None
    try:
        plan = plan_blocks(case.chain, case.rates, case.capacity_bytes, recompute=True, swap=True, starts=starts)
    except DoesNotFitError:
        return None
    return plan.predicted.pass_s


def _shares(name: str, found: list[Compared], note: str) -> Iterator[Figure]:
    both = [each for each in found if each.planned_s is not None and each.best_s is not None]
    missed = sum(each.planned_s is None and each.best_s is not None for each in found)
    gaps = sorted((each.planned_s or 0.0) / each.best_s - 1 for each in both if each.best_s)
    near = sum(gap <= 0.02 for gap in gaps)
    equal = sum(gap <= 1e-9 for gap in gaps)
    within = 100 * near / len(gaps)
    yield Figure(
        name=f"{name}: within 2 %",
        value=within,
        unit="% of chains",
        n=len(gaps),
        goal="at least 99",
        met=within >= 99,
        reason=f"{100 * equal / len(gaps):.1f} % equal, worst {100 * gaps[-1]:.2f} % slower"
        + (f"; {note}" * bool(note)),
    )
    yield Figure(
        name=f"{name}: no plan where one fits", value=missed, unit="chains", n=len(found), goal="0", met=missed == 0
    )


def large_chains() -> Iterator[Figure]:
    """Chains of 100 units: how long planning takes, what more effort would find, and what single methods take."""
    seconds, gains, speedups = [], [], []
    for seed in range(LARGE_CHAINS):
        case = random_case(seed, units=LARGE_UNITS)
        begin = time.process_time()
        plan = plan_blocks(case.chain, case.rates, case.capacity_bytes, recompute=True, swap=True)
        seconds.append(time.process_time() - begin)
        longer = plan_blocks(
            case.chain,
            case.rates,
            case.capacity_bytes,
            recompute=True,
            swap=True,
            known=[plan.blocks],
            effort=LONGER * EFFORT,
        )
        gains.append(100 * (plan.predicted.pass_s / longer.predicted.pass_s - 1))
        single = _best_single_s(case)
        if single is not None:
            speedups.append(single / plan.predicted.pass_s)
    median, low, high = median_interval(seconds)
    yield Figure(
        name=f"planning of {LARGE_UNITS} units",
        value=median,
        low=low,
        high=high,
        n=len(seconds),
        unit="s of one core",
        goal="below 1 at most",
        met=max(seconds) < 1,
        reason=f"at most {max(seconds):.2f} s",
    )
    median, low, high = median_interval(gains)
    yield Figure(
        name=f"plans of {LARGE_UNITS} units over those of {LONGER} times the effort",
        value=median,
        low=low,
        high=high,
        n=len(gains),
        unit="% longer",
        goal="none",
        reason=f"at most {max(gains):.2f} %",
    )
    yield Figure(
        name=f"plans of {LARGE_UNITS} units over the best single method that fits",
        value=statistics.geometric_mean(speedups),
        n=len(speedups),
        unit="times (geometric mean, simulated)",
        goal="at least 1 everywhere",
        met=min(speedups) >= 1 - 1e-9,
        reason=f"from {min(speedups):.3f} to {max(speedups):.2f}; single methods hold every unit alike",
    )


def _best_single_s(case: Case) -> float | None:
    """The shortest pass of a single method that fits."""
    plans = [
        fixed_plan(case.chain, case.rates, recompute, swap)
        for recompute, swap in (
            ("none", "none"),
            ("blocks", "none"),
            ("none", "offload"),
            ("none", "streamed"),
            ("blocks", "streamed"),
        )
    ]
    return min(
        (plan.predicted.pass_s for plan in plans if plan.predicted.peak_bytes <= case.capacity_bytes), default=None
    )
