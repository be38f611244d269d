"""Ranks and hosts that others wait for at a scaling point, over its runs, and the causes of their lateness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from dlbench.analysis.causes import Causes
from dlbench.analysis.stragglers import WORK, LateRank


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank, or a host, for which the others waited; means over the runs of a point, seconds per step."""

    rank: int | None  # None for a host.
    host: str
    last_share: float  # Fraction of the steps in which it came last.
    waited_s: float  # Waiting for it, mean over all ranks.
    waited_share: float  # Waiting for it as a fraction of all waiting.
    input_s: float
    """Its input wait and copy beyond the mean of the ranks in time, in the steps in which it was late, spread over all
    steps; of a host the mean over its ranks."""
    compute_s: float  # Its forward, backward and optimizer beyond that mean.
    host_s: float  # Its time between the phases beyond that mean.
    late_by: str  # Main cause: `input`, `compute`, `host`; `unexplained` if it exceeds the others in none.

    @property
    def order(self) -> tuple[float, str, int]:
        """The sort key: longest waited for first, then by host and rank."""
        return -self.waited_s, self.host, -1 if self.rank is None else self.rank


def ranking(runs: Sequence[Causes]) -> tuple[tuple[Straggler, ...], tuple[Straggler, ...]]:
    """Returns the ranks, and the hosts, for which others waited in the runs of one point, longest first.

    A rank that ran on different hosts is listed once for each.
    """
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


_Part = tuple[LateRank, int, int]
"""A late rank of one run, the ranks of that run, and the number of ranks over which its own time is a mean."""
_PartsByLate = dict[tuple[int | None, str], list[_Part]]  # Parts by rank (None: a whole host) and host.


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

    It must cause a share of (1 + s) / 2 of the waiting, half-way from an even share s to all: s is 1 / p for one of p
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
