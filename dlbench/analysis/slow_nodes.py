"""Finds slow nodes: hosts whose own work takes longer than that of other hosts, or that leave exchanges later.

In one run let w[r] be the mean step of rank r without its exchange, its own work. A host is as slow as its slowest
rank, because all ranks wait for that one (`late_hosts.largest_by_host` corrects for different numbers of ranks); its
ratio is that divided by the median, over the other hosts of the run, of their slowest ranks. So runs of any workload,
rank count and day can be combined: anything that slows all hosts of a run cancels. A slow link does not show in own
work: see `dlbench.analysis.late_hosts`.

A cause that slows a host for one job (another job, heat) is no property of the host, so the unit is the session
(`dlbench.analysis.sessions`): the median of its runs, and for a host the geometric mean of its sessions with Student's
t. A host is called slow by a one-sided t test against `SLOW` over all hosts together: on average at most `FALSE_SHARE`
of the hosts called slow are not (Benjamini and Hochberg).

Limit: rank 0 writes records and checkpoints. If it always runs on the same host, its work counts for that host.
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
"""A host is slow if its own work is shown to be more than this many times that of others: 3 % is the smallest effect
that dlbench promises to find."""
FALSE_SHARE = 0.05  # Share of the hosts called slow that are not, on average over many reports (false discovery rate).

SAFE_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Host names that are printed in a Slurm option; no others are."""

HostWord = Literal["slow", "slow link", "slow and slow link", "suspected", "not shown to be slow", "too few sessions"]

TO_EXCLUDE: tuple[HostWord, ...] = ("slow", "slow and slow link")
"""Verdicts of hosts to exclude from jobs; of a slow link it is not known which end is slow."""
ACCUSED: tuple[HostWord, ...] = (*TO_EXCLUDE, "slow link")  # Verdicts that reports show first.


@dataclass(frozen=True, kw_only=True)
class HostSessions:
    """The figures of a host, one for each session."""

    work: Sequence[float]  # Own work relative to the other hosts' (1).
    at_least: Sequence[float] = ()
    """Time by which it certainly leaves an exchange later, as a share of the step (1); sessions with known clocks."""


@dataclass(frozen=True, kw_only=True)
class HostHistory:
    """A host over all sessions in which it ran with other hosts."""

    host: str
    ratio: Estimate  # Own work of its slowest rank over that of other hosts' slowest ranks; mean over sessions.
    later: Estimate | None
    """Time by which its exchanges end after the other hosts', as a share of the step; mean over sessions. None if the
    clocks were not compared."""
    num_runs: int
    last_share: float  # Fraction of the steps of these runs in which one of its ranks came last and others waited.
    fair_share: float  # The fraction it would have if every rank came last equally often.
    verdict: HostWord


@dataclass(frozen=True, kw_only=True)
class SlowNodes:
    """The hosts of a folder of runs."""

    hosts: tuple[HostHistory, ...]
    """Slow hosts first, then the slowest first; empty if no run had ranks on two hosts or more."""
    exclude: tuple[str, ...]  # Slow hosts for Slurm's `--exclude`, by name.
    unsafe: tuple[str, ...]  # Slow hosts whose names are not valid in an option, by name.
    option: str  # `--exclude=...` for sbatch; empty if no host is slow.
    threshold: float  # `SLOW`.
    num_runs: int  # Runs on two hosts or more that were counted.
    num_sessions: int  # Sessions of these runs.
    num_single_host: int  # Runs on one host, which compare no hosts.
    num_faulty: int  # Runs left out because an injected fault would make a host seem slow.


def slow_nodes(table: RunTable) -> SlowNodes:
    """Returns all hosts of all runs with figures; `table` was made `with_causes`."""
    faulty = {run_id for run_id, run in table.runs.items() if run.plan.fault is not None}
    counted = {run_id: causes for run_id, causes in table.causes.items() if run_id not in faulty}
    several = [(table.sessions[run_id], causes) for run_id, causes in counted.items() if len(set(causes.hosts)) > 1]
    hosts = sorted(
        _histories(several), key=lambda history: (history.verdict not in ACCUSED, -history.ratio.value, history.host)
    )
    slow = sorted(history.host for history in hosts if history.verdict in TO_EXCLUDE)
    exclude = tuple(host for host in slow if SAFE_HOST.fullmatch(host))
    option = ""
    if exclude:
        option = f"--exclude={compressed(exclude)}"
    return SlowNodes(
        hosts=tuple(hosts),
        exclude=exclude,
        unsafe=tuple(host for host in slow if host not in exclude),
        option=option,
        threshold=SLOW,
        num_runs=len(several),
        num_sessions=len({session for session, _ in several}),
        num_single_host=len(counted) - len(several),
        num_faulty=len(faulty),
    )


def _histories(runs: Sequence[tuple[str, Causes]]) -> Iterator[HostHistory]:
    """Yields every host of runs on two hosts or more; each run has its session before it."""
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
        host: HostSessions(work=medians(host_ratios_by_session), at_least=medians(at_least.get(host, {})))
        for host, host_ratios_by_session in ratios.items()
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
    """Returns the own work of each host's slowest rank relative to the other hosts' in a run on two hosts or more."""
    slowest = largest_by_host(causes.hosts, causes.work_ns)
    others = of_others(slowest)
    return {host: slowest_ns / others[host] for host, slowest_ns in slowest.items()}


def medians(by_session: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns the median over the runs of each session."""
    return [statistics.median(values) for values in by_session.values()]


def mean_ratio(ratios: Sequence[float]) -> Estimate:
    """Returns the geometric mean over sessions, with its interval."""
    return geometric_mean_estimate(ratios, "ratio")


def verdicts_of(hosts: Mapping[str, HostSessions]) -> dict[str, HostWord]:
    """Returns the verdicts on hosts, tested for own work and for late exchanges over all hosts together."""
    values_by_question: dict[tuple[str, str], list[float]] = {}
    for host, sessions in hosts.items():
        values_by_question[host, "worse"] = [math.log(ratio / SLOW) for ratio in sessions.work]
    for host, sessions in hosts.items():
        values_by_question[host, "slow link"] = [share - LATE for share in sessions.at_least]
    # One-sided p of Student's t that the mean is at most 0.
    tests = {
        key: student_tail(t_of_mean(values), len(values) - 1)
        for key, values in values_by_question.items()
        if len(values) >= MIN_SESSIONS
    }
    adjusted = dict(zip(tests, benjamini_hochberg(list(tests.values())), strict=True))
    shown = {question for question, p in adjusted.items() if p <= FALSE_SHARE}
    suspected_hosts = set()
    for question, values in values_by_question.items():
        if values and question not in tests and statistics.fmean(values) > 0:
            suspected_hosts.add(question[0])
    words = {}
    for host in hosts:
        is_slow, has_slow_link = (host, "worse") in shown, (host, "slow link") in shown
        if is_slow and has_slow_link:
            outcome = "slow and slow link"
        elif is_slow:
            outcome = "worse"
        elif has_slow_link:
            outcome = "slow link"
        elif host in suspected_hosts:
            outcome = "suspected"
        else:
            outcome = "undecided" if (host, "worse") in tests else "insufficient"
        words[host] = cast("HostWord", HOST[outcome].word)
    return words
