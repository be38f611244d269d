"""Finds slow nodes (hosts whose own work takes longer, or that leave exchanges later) and ranks that others wait for.

In one run a host is as slow as its slowest rank (`largest_by_host`), by its mean step without the exchange,
its own work; its ratio is that divided by the median over the other hosts. So runs of any workload, rank count and day
can be combined. The unit is the session (the median of its runs), because another job or heat is no property of the
host; a host counts with the geometric mean of its sessions. A host is called slow by a one-sided t test against `SLOW`
over all hosts together: on average at most `FALSE_SHARE` of the hosts called slow are not (Benjamini and Hochberg).

Limit: if rank 0, which writes records and checkpoints, always runs on the same host, its work counts for that host.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, cast

from dlbench.analysis.causes import Causes
from dlbench.analysis.repeats import MIN_SESSIONS
from dlbench.analysis.stragglers import LATE, WORK, LateRank, largest_by_host, medians_of_others
from dlbench.analysis.table import RunTable
from dlbench.specs.launch import compressed
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, mean_estimate
from dlbench.stats.multiplicity import benjamini_hochberg, student_tail, t_of_mean
from dlbench.stats.verdict_words import HOST

_Part = tuple[LateRank, int, int]  # A late rank, the ranks of its run, and the ranks over which its own time is a mean.
_PartsByLate = dict[tuple[int | None, str], list[_Part]]  # Parts by rank (None: a whole host) and host.
SLOW = 1 + LATE
"""A host is slow if its own work is more than this many times that of others: the smallest effect that is promised."""

FALSE_SHARE = 0.05  # Share of the hosts called slow that are not, on average over many reports (false discovery rate).
SAFE_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Host names that are printed in a Slurm option; no others are."""

HostWord = Literal["slow", "slow link", "slow and slow link", "suspected", "not shown to be slow", "too few sessions"]
TO_EXCLUDE: tuple[HostWord, ...] = ("slow", "slow and slow link")  # Of a slow link it is not known which end is slow.
ACCUSED: tuple[HostWord, ...] = (*TO_EXCLUDE, "slow link")  # Verdicts that reports show first.


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank, or a host, for which the others waited; means over the runs of a point, seconds per step."""

    rank: int | None  # None for a host.
    host: str
    last_share: float  # Fraction of the steps in which it came last.
    waited_s: float  # Waiting for it, mean over all ranks.
    waited_share: float  # Waiting for it as a fraction of all waiting.
    input_s: float
    """Its input wait and copy beyond the mean of the ranks in time, over all steps; of a host the mean of its ranks."""
    compute_s: float  # Its forward, backward and optimizer beyond that mean.
    host_s: float  # Its time between the phases beyond that mean.
    late_by: str  # Main cause: `input`, `compute`, `host`; `unexplained` if it exceeds the others in none.

    @property
    def order(self) -> tuple[float, str, int]:
        return -self.waited_s, self.host, -1 if self.rank is None else self.rank


def ranking(runs: Sequence[Causes]) -> tuple[tuple[Straggler, ...], tuple[Straggler, ...]]:
    """Returns the ranks, and the hosts, for which others waited in the runs of one point, longest waited for first."""
    total_ns = sum(run.waiting.waited_ns for run in runs)
    steps = sum(run.steps for run in runs)
    by_rank: _PartsByLate = {}
    by_host: _PartsByLate = {}
    for run in runs:
        on_host = Counter(run.hosts)
        for late_rank in run.waiting.ranks:
            host = run.hosts[late_rank.rank]
            by_rank.setdefault((late_rank.rank, host), []).append((late_rank, len(run.hosts), 1))
            by_host.setdefault((None, host), []).append((late_rank, len(run.hosts), on_host[host]))
    return _ranked(by_rank, total_ns, steps), _ranked(by_host, total_ns, steps)


def _ranked(parts_by_late: _PartsByLate, total_ns: int, steps: int) -> tuple[Straggler, ...]:
    stragglers = [_straggler(rank, host, parts, total_ns, steps) for (rank, host), parts in parts_by_late.items()]
    return tuple(sorted(stragglers, key=attrgetter("order")))


def _straggler(rank: int | None, host: str, parts: Sequence[_Part], total_ns: int, steps: int) -> Straggler:
    late_s: dict[str, float] = {}
    for name in WORK:
        late_s[name] = sum(part.late_ns[name] / num_ranks for part, _, num_ranks in parts) / steps / 1e9
    late_by = max(WORK, key=late_s.__getitem__)
    if late_s[late_by] <= 0:
        late_by = "unexplained"
    return Straggler(
        rank=rank,
        host=host,
        last_share=sum(part.steps_last for part, *_ in parts) / steps,
        waited_s=sum(part.waited_ns / ranks for part, ranks, _ in parts) / steps / 1e9,
        waited_share=sum(part.waited_ns for part, *_ in parts) / total_ns,
        **{f"{name}_s": seconds for name, seconds in late_s.items()},
        late_by=late_by,
    )


def main_straggler(ranks: Sequence[Straggler], hosts: Sequence[Straggler], runs: Sequence[Causes]) -> Straggler | None:
    """Returns the rank, or the host, that caused most of the waiting; None if ranks take turns.

    It must cause (1 + s) / 2 of the waiting, half-way from an even share s to all: 1 / p for one of p ranks, for a host
    the share of the ranks on it. `ranks`, `hosts`: longest waited for first.
    """
    for late in (*ranks[:1], *hosts[:1]):
        even = 1 / runs[0].ranks
        if late.rank is None:
            even = sum(run.hosts.count(late.host) / run.ranks for run in runs) / len(runs)
        is_alone = late.rank is None and all(len(set(run.hosts)) == 1 for run in runs)
        if not is_alone and late.waited_share >= (1 + even) / 2:
            return late
    return None


@dataclass(frozen=True, kw_only=True)
class HostSessions:
    """The figures of a host, one for each session."""

    work: Sequence[float]  # Own work relative to the other hosts' (1).
    at_least: Sequence[float] = ()  # Share of the step by which it certainly leaves later (1); known clocks only.


@dataclass(frozen=True, kw_only=True)
class HostHistory:
    """A host over all sessions in which it ran with other hosts."""

    host: str
    ratio: Estimate  # Own work of its slowest rank over that of other hosts' slowest ranks; mean over sessions.
    later: Estimate | None
    """Share of the step by which its exchanges end later, mean over sessions; None: clocks unknown."""
    num_runs: int
    last_share: float  # Fraction of the steps of these runs in which one of its ranks came last and others waited.
    fair_share: float  # The fraction it would have if every rank came last equally often.
    verdict: HostWord


@dataclass(frozen=True, kw_only=True)
class SlowNodes:
    """The hosts of a folder of runs."""

    hosts: tuple[HostHistory, ...]  # Slow hosts, then the slowest first; empty if no run had ranks on two hosts.
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
    option = f"--exclude={compressed(exclude)}" if exclude else ""
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
            ratio=geometric_mean_estimate(host_sessions.work, "ratio"),
            later=mean_estimate(medians(later[host]), "fraction") if host in later else None,
            num_runs=len(last[host]),
            last_share=sum(times for times, *_ in last[host]) / steps,
            fair_share=sum(share * count for _, share, count in last[host]) / steps,
            verdict=verdicts[host],
        )


def host_ratios(causes: Causes) -> Mapping[str, float]:
    """Returns the own work of each host's slowest rank relative to the other hosts' in a run on two hosts or more."""
    slowest = largest_by_host(causes.hosts, causes.work_ns)
    others = medians_of_others(slowest)
    return {host: slowest_ns / others[host] for host, slowest_ns in slowest.items()}


def medians(by_session: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns the median over the runs of each session."""
    return [statistics.median(values) for values in by_session.values()]


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
