"""Slow nodes: hosts whose ranks take longer for their own work than those of other hosts, or leave exchanges later.

In one run let w[r] be the mean step of rank r without its exchange: what it does by itself. A host is as slow as its
slowest rank, because all ranks wait for that one (`by_host.largest_by_host` says how hosts of unlike
many ranks compare); its ratio is that divided by the median, over the other hosts of the run, of their slowest ranks.
Runs of any workload, rank count and day stand side by side then: what slows all hosts of a run alike cancels. A slow
link does not show in own work: `dlbench.analysis.late_hosts`.

What slows a host for one job (a neighbour, heat) is no property of the host, so the unit is the session and no run in
it: `dlbench.analysis.sessions`. Of a session counts the median of its runs, of a host the geometric mean of its
sessions with Student's t. A host is called slow where a one-sided t test against `SLOW`, and not against "no
difference", holds over all hosts together: at most `FALSE_SHARE` of the hosts called slow are not, on average
(Benjamini and Hochberg).

Limit: rank 0 writes records and checkpoints. Where it always runs on the same host, its work is charged to that host.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from dlbench.analysis.causes import Causes
from dlbench.analysis.late_hosts import LATE, largest_by_host, of_others
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.table import RunTable
from dlbench.specs.hostlist import compressed
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, mean_estimate
from dlbench.stats.multiplicity import benjamini_hochberg, student_tail, t_of_mean
from dlbench.stats.verdict_words import HOST

SLOW = 1 + LATE
"""A host is slow if its own work is shown to be more than this many times that of others: 3 % is the least effect
that dlbench promises to see."""
FALSE_SHARE = 0.05  # Share of the hosts called slow that are not, on average over many reports (false discovery rate).

SAFE_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Host names that may stand in a Slurm option; nothing else is printed there."""

HostWord = Literal["slow", "slow link", "slow and slow link", "suspected", "not shown to be slow", "too few sessions"]

TO_EXCLUDE: tuple[HostWord, ...] = ("slow", "slow and slow link")
"""Verdicts of hosts that jobs are better kept off. Which end of a slow link is to blame is not known."""
ACCUSED: tuple[HostWord, ...] = (*TO_EXCLUDE, "slow link")  # Verdicts that people should see.


@dataclass(frozen=True, kw_only=True)
class HostSessions:
    """What the sessions say of one host, a value for each."""

    work: Sequence[float]  # Own work relative to the other hosts' (1).
    at_least: Sequence[float] = ()
    """By how much later it leaves an exchange for certain, as a share of the step (1); sessions with known clocks."""


@dataclass(frozen=True, kw_only=True)
class HostHistory:
    """One host over all sessions in which it ran with other hosts."""

    host: str
    ratio: Estimate  # Own work of its slowest rank over that of other hosts' slowest ranks; mean over sessions.
    later: Estimate | None
    """By how much later than the other hosts' its exchanges end, as a share of the step; mean over sessions. None where
    the clocks do not say."""
    num_runs: int
    last_share: float  # Fraction of the steps of these runs in which one of its ranks came last and others waited.
    fair_share: float  # The fraction it would have if every rank came last equally often.
    verdict: HostWord


@dataclass(frozen=True, kw_only=True)
class SlowNodes:
    """What the runs of a folder say of its hosts."""

    hosts: tuple[HostHistory, ...]
    """Those that are shown to be slow first, then slowest first; empty where no run had ranks on two hosts or more."""
    exclude: tuple[str, ...]  # Slow hosts for Slurm's `--exclude`, by name.
    unsafe: tuple[str, ...]  # Slow hosts whose names may not stand in an option, by name.
    option: str  # `--exclude=...` for sbatch; empty where no host is slow.
    threshold: float  # `SLOW`.
    num_runs: int  # Runs on two hosts or more that were counted.
    num_sessions: int  # Sessions of these runs.
    num_single_host: int  # Runs on one host: nothing to compare.
    num_faulty: int  # Runs left out because a fault was injected into them, which would accuse a host of it.


def slow_nodes(table: RunTable) -> SlowNodes:
    """All hosts of all runs with figures; `table` was made `with_causes`."""
    faulty = {run_id for run_id, run in table.runs.items() if run.plan.fault is not None}
    counted = {run_id: causes for run_id, causes in table.causes.items() if run_id not in faulty}
    several = [(table.sessions[run_id], causes) for run_id, causes in counted.items() if len(set(causes.hosts)) > 1]
    hosts = sorted(
        _histories(several), key=lambda history: (history.verdict not in ACCUSED, -history.ratio.value, history.host)
    )
    slow = sorted(history.host for history in hosts if history.verdict in TO_EXCLUDE)
    exclude = tuple(host for host in slow if SAFE_HOST.fullmatch(host))
    return SlowNodes(
        hosts=tuple(hosts),
        exclude=exclude,
        unsafe=tuple(host for host in slow if host not in exclude),
        option=f"--exclude={compressed(exclude)}" if exclude else "",
        threshold=SLOW,
        num_runs=len(several),
        num_sessions=len({session for session, _ in several}),
        num_single_host=len(counted) - len(several),
        num_faulty=len(faulty),
    )


def _histories(runs: Sequence[tuple[str, Causes]]) -> Iterator[HostHistory]:
    """Yields every host of runs on two hosts or more; before each run its session."""
    ratios: dict[str, dict[str, list[float]]] = {}
    later: dict[str, dict[str, list[float]]] = {}
    at_least: dict[str, dict[str, list[float]]] = {}
    last: dict[str, list[tuple[int, float, int]]] = {}
    for session, causes in runs:
        on_host = Counter(causes.hosts)
        came_last: Counter[str] = Counter()
        for late_rank in causes.waiting.ranks:
            came_last[causes.hosts[late_rank.rank]] += late_rank.steps_last
        for host, ratio in host_ratios(causes).items():
            ratios.setdefault(host, {}).setdefault(session, []).append(ratio)
            last.setdefault(host, []).append((came_last[host], on_host[host] / causes.ranks, causes.steps))
        for host, leaving in causes.leaving.items():
            later.setdefault(host, {}).setdefault(session, []).append(leaving.later)
            at_least.setdefault(host, {}).setdefault(session, []).append(leaving.at_least)
    sessions = {
        host: HostSessions(work=medians(own), at_least=medians(at_least.get(host, {}))) for host, own in ratios.items()
    }
    verdicts = verdicts_of(sessions)
    for host, host_sessions in sessions.items():
        steps = sum(count for *_, count in last[host])
        yield HostHistory(
            host=host,
            ratio=mean_ratio(host_sessions.work),
            later=mean_estimate(medians(later[host]), "fraction") if host in later else None,
            num_runs=len(last[host]),
            last_share=sum(times for times, *_ in last[host]) / steps,
            fair_share=sum(share * count for _, share, count in last[host]) / steps,
            verdict=verdicts[host],
        )


def host_ratios(causes: Causes) -> Mapping[str, float]:
    """Own work of each host's slowest rank relative to the other hosts' in one run on two hosts or more."""
    slowest = largest_by_host(causes.hosts, causes.work_ns)
    others = of_others(slowest)
    return {host: slowest_ns / others[host] for host, slowest_ns in slowest.items()}


def medians(by_session: Mapping[str, Sequence[float]]) -> list[float]:
    """Of the runs of each session."""
    return [statistics.median(values) for values in by_session.values()]


def mean_ratio(ratios: Sequence[float]) -> Estimate:
    """The geometric mean over sessions, with its interval."""
    return geometric_mean_estimate(ratios, "ratio")


def verdicts_of(hosts: Mapping[str, HostSessions]) -> dict[str, HostWord]:
    """Returns which hosts are slow, and which leave exchanges late, over all hosts and both questions together."""
    values_by_question = {
        (host, "worse"): [math.log(ratio / SLOW) for ratio in host_sessions.work]
        for host, host_sessions in hosts.items()
    }
    values_by_question |= {
        (host, "slow link"): [share - LATE for share in host_sessions.at_least] for host, host_sessions in hosts.items()
    }
    # The one-sided p of Student's t that the mean is no larger than 0.
    tests = {
        key: student_tail(t_of_mean(values), len(values) - 1)
        for key, values in values_by_question.items()
        if len(values) >= MIN_SESSIONS
    }
    rejected = {key for key, p in zip(tests, benjamini_hochberg(list(tests.values())), strict=True) if p <= FALSE_SHARE}
    beyond = {
        key
        for key, values in values_by_question.items()
        if values and key not in tests and statistics.fmean(values) > 0
    }
    words = {}
    for host in hosts:
        key = "undecided" if (host, "worse") in tests else "insufficient"
        if {(host, "worse"), (host, "slow link")} & beyond:
            key = "suspected"
        key = next((question for question in ("worse", "slow link") if (host, question) in rejected), key)
        if {(host, "worse"), (host, "slow link")} <= rejected:
            key = "slow and slow link"
        words[host] = cast("HostWord", HOST[key].word)
    return words
