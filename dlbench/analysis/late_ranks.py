"""Who is waited for at a scaling point, over its runs: ranks and hosts, longest first, and what made them late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.analysis.causes import Causes
from dlbench.analysis.stragglers import WORK, LateRank


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank, or a host, for which the others waited; means over the runs of a point, seconds per step."""

    rank: int | None  # None for a host.
    host: str
    last_share: float  # Fraction of the steps in which it came last.
    waited_s: float  # Waiting for it, mean over all ranks.
    waited_share: float  # The same as a fraction of all waiting.
    input_s: float
    """Its input wait and copy beyond the mean of the ranks in time, in the steps in which it was late, spread over all
    steps; of a host the mean over its ranks."""
    compute_s: float  # The same of forward, backward and optimizer.
    host_s: float  # The same of what lies between the phases.
    late_by: str  # In what it was late most: `input`, `compute`, `host`; `unexplained` if by nothing of its own.


def ranking(runs: Sequence[Causes]) -> tuple[tuple[Straggler, ...], tuple[Straggler, ...]]:
    """Ranks, and hosts, for which the others waited in the runs of one point, longest first.

    A rank that ran on different hosts is listed once for each.
    """
    total_ns = sum(run.waiting.waited_ns for run in runs)
    steps = sum(run.steps for run in runs)
    by_rank: _PartsByLate = {}
    by_host: _PartsByLate = {}
    for run in runs:
        on_host = Counter(run.hosts)
        for one in run.waiting.ranks:
            host = run.hosts[one.rank]
            by_rank.setdefault((one.rank, host), []).append((one, len(run.hosts), 1))
            by_host.setdefault((None, host), []).append((one, len(run.hosts), on_host[host]))
    return _ranked(by_rank, total_ns, steps), _ranked(by_host, total_ns, steps)


_Part = tuple[LateRank, int, int]
"""A late rank of one run, ranks of that run, and over how many of them its own time is a mean."""
_PartsByLate = dict[tuple[int | None, str], list[_Part]]  # By rank (None: a whole host) and host.


def _ranked(found: _PartsByLate, total_ns: int, steps: int) -> tuple[Straggler, ...]:
    made = [_straggler(rank, host, parts, total_ns, steps) for (rank, host), parts in found.items()]
    return tuple(sorted(made, key=lambda one: (-one.waited_s, one.host, -1 if one.rank is None else one.rank)))


def _straggler(rank: int | None, host: str, parts: Sequence[_Part], total_ns: int, steps: int) -> Straggler:
    late_s = {name: sum(one.late_ns[name] / over for one, _, over in parts) / steps / 1e9 for name in WORK}
    most = max(WORK, key=lambda name: late_s[name])
    return Straggler(
        rank=rank,
        host=host,
        last_share=sum(one.steps_last for one, *_ in parts) / steps,
        waited_s=sum(one.waited_ns / ranks for one, ranks, _ in parts) / steps / 1e9,
        waited_share=sum(one.waited_ns for one, *_ in parts) / total_ns,
        **{f"{name}_s": seconds for name, seconds in late_s.items()},
        late_by=most if late_s[most] > 0 else "unexplained",
    )


def main_straggler(ranks: Sequence[Straggler], hosts: Sequence[Straggler], runs: Sequence[Causes]) -> Straggler | None:
    """Returns the rank, or else the host, for which most of the waiting was; None where they take turns.

    It must hold a share of (1 + s) / 2 of the waiting, half-way from an even share s to all: s is 1 / p for one of p
    ranks, and the share of the ranks on it for one of several hosts. `ranks`, `hosts`: longest waited for first.
    """
    for late in (*ranks[:1], *hosts[:1]):
        even = 1 / runs[0].ranks
        if late.rank is None:
            even = sum(run.hosts.count(late.host) / run.ranks for run in runs) / len(runs)
        is_alone = late.rank is None and all(len(set(run.hosts)) == 1 for run in runs)
        if not is_alone and late.waited_share >= (1 + even) / 2:
            return late
    return None
