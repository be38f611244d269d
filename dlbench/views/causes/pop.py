"""The metrics of the POP project, by their definition.

POP (Performance Optimisation and Productivity, "POP Standard Metrics for Parallel Performance Analysis"; Scalasca and
Extrae print them) compares whole runs and not steps: with each rank's useful time, all that it spends outside of
communication,

    load balance = mean / maximum of the useful time, communication efficiency = maximum of the useful time / run time,

and parallel efficiency is their product. A rank that is late, now one and now another, is waited for in every step and
balanced over the run: here it lowers communication efficiency, where the account says waiting for stragglers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dlbench.reading.causes import Causes
from dlbench.stats.estimates import Estimate, geometric_mean_estimate


@dataclass(frozen=True, kw_only=True)
class Pop:
    """Metrics of one scaling point by itself, fractions; geometric means over runs."""

    load_balance: Estimate
    communication: Estimate
    parallel: Estimate
    """Their product."""


def pop_of(runs: Sequence[Causes]) -> Pop | None:
    """POP's metrics over runs of one scaling point; None where some rank of theirs does nothing but communicate."""
    if any(min(run.work_ns) <= 0 for run in runs):
        return None
    times = [(fmean(run.work_ns), max(run.work_ns), sum(run.sums_ns.values()) / run.ranks) for run in runs]

    def over_runs(top: int, bottom: int) -> Estimate:
        return geometric_mean_estimate([time[top] / time[bottom] for time in times], "fraction")

    return Pop(load_balance=over_runs(0, 1), communication=over_runs(1, 2), parallel=over_runs(0, 2))
