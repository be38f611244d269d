"""Slow nodes: hosts whose ranks take longer for their own work than the ranks of other hosts in the same runs.

In one run let w[r] be the mean step of rank r without its exchange: what it does by itself. A host is as slow as its
slowest rank, max w, because all ranks wait for that one; its ratio is that divided by the median, over the other hosts
of the run, of their slowest ranks. Runs of any workload, rank count and day stand side by side then: what slows all
hosts of a run alike cancels. The unit is the run; the median over runs has an interval as
`dlbench.stats.estimates` makes it.

Limit: rank 0 writes records and checkpoints. Where it always runs on the same host, its work is charged to that host.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.causes import Causes
from dlbench.reading.table import RunTable
from dlbench.stats.estimates import MIN_RUNS, Estimate, median_estimate

SLOW = 1.03
"""A host is slow if the low end of its interval is above this: 3 % is the least effect that dlbench promises to see."""

SAFE_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Host names that may stand in a Slurm option; nothing else is printed there."""

Verdict = Literal["slow", "suspected", "not shown to be slow", "too few runs"]


@dataclass(frozen=True, kw_only=True)
class HostHistory:
    """One host over all runs that it shared with other hosts."""

    host: str
    ratio: Estimate
    """Own work of its slowest rank relative to that of the other hosts' slowest ranks; median over runs."""
    last_share: float
    """Fraction of the steps of these runs in which one of its ranks came last and others waited."""
    fair_share: float
    """The fraction it would have if every rank came last equally often."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class SlowNodes:
    """What the runs of a folder say of its hosts."""

    hosts: tuple[HostHistory, ...]
    """Slowest first; empty where no run had ranks on two hosts or more."""
    exclude: tuple[str, ...]
    """Slow hosts for Slurm's `--exclude`, by name."""
    unsafe: tuple[str, ...]
    """Slow hosts whose names may not stand in an option, by name."""
    option: str
    """`--exclude=...` for sbatch; empty where no host is slow."""
    threshold: float
    """`SLOW`."""
    num_runs: int
    """Runs on two hosts or more that were counted."""
    num_single_host: int
    """Runs on one host: nothing to compare."""
    num_faulty: int
    """Runs left out because a fault was planted in them, which would accuse a host of it."""


def slow_nodes(table: RunTable) -> SlowNodes:
    """All hosts of all runs with figures; `table` was made `with_causes`."""
    faulty = {run_id for run_id, run in table.runs.items() if run.plan.fault is not None}
    counted = [causes for run_id, causes in table.causes.items() if run_id not in faulty]
    several = [causes for causes in counted if len(set(causes.hosts)) > 1]
    hosts = sorted(_histories(several), key=lambda one: (-one.ratio.value, one.host))
    slow = sorted(one.host for one in hosts if one.verdict == "slow")
    exclude = tuple(host for host in slow if SAFE_HOST.fullmatch(host))
    return SlowNodes(
        hosts=tuple(hosts),
        exclude=exclude,
        unsafe=tuple(host for host in slow if host not in exclude),
        option=f"--exclude={','.join(exclude)}" if exclude else "",
        threshold=SLOW,
        num_runs=len(several),
        num_single_host=len(counted) - len(several),
        num_faulty=len(faulty),
    )


def _histories(runs: Sequence[Causes]) -> Iterator[HostHistory]:
    """Every host of these runs, each of which had ranks on two hosts or more."""
    ratios: dict[str, list[float]] = {}
    last: dict[str, list[tuple[int, float, int]]] = {}
    for causes in runs:
        on_host = Counter(causes.hosts)
        came_last: Counter[str] = Counter()
        for one in causes.waiting.ranks:
            came_last[causes.hosts[one.rank]] += one.steps_last
        for host, ratio in host_ratios(causes).items():
            ratios.setdefault(host, []).append(ratio)
            last.setdefault(host, []).append((came_last[host], on_host[host] / causes.ranks, causes.steps))
    for host, values in ratios.items():
        steps = sum(count for *_, count in last[host])
        ratio_of_host = median_estimate(values, "ratio")
        yield HostHistory(
            host=host,
            ratio=ratio_of_host,
            last_share=sum(times for times, *_ in last[host]) / steps,
            fair_share=sum(share * count for _, share, count in last[host]) / steps,
            verdict=verdict_of(ratio_of_host),
        )


def host_ratios(causes: Causes) -> Mapping[str, float]:
    """Own work of each host's slowest rank relative to the other hosts' in one run on two hosts or more."""
    slowest: dict[str, int] = {}
    for host, work in zip(causes.hosts, causes.work_ns, strict=True):
        slowest[host] = max(work, slowest.get(host, 0))
    ordered = sorted(slowest.values())
    return {host: own / _median_without(ordered, own) for host, own in slowest.items()}


def _median_without(ordered: list[int], one: int) -> float:
    """The median of sorted values, one of them left out."""
    place, middle = bisect_left(ordered, one), (len(ordered) - 2) // 2
    near = [ordered[at + (at >= place)] for at in range(middle, len(ordered) - 1 - middle)]
    return statistics.median(near)


def verdict_of(ratio: Estimate) -> Verdict:
    """Of a host's ratio over runs."""
    if ratio.n < MIN_RUNS:
        return "suspected" if ratio.value > SLOW else "too few runs"
    return "slow" if ratio.low is not None and ratio.low > SLOW else "not shown to be slow"
