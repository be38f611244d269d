"""Waiting for late ranks: how much of the exchange it is, whose it is, and why that rank was late.

A synchronous exchange ends when the last rank has brought its gradients, so the rank that comes last waits least.
With x[r] the exposed exchange of rank r in one step and p ranks, the last rank is l = argmin x (of equal ones the
rank with most work), and the others wait

    W = mean over r != l of (x[r] - x[l]) .

The step is W longer than if l had come with the others. Of that, (p - 1)/p W lies in the mean exchange. The rest,
W/p, is the last rank's own work: it is taken out of the causes in which that rank exceeds the mean of the others in
this step, in proportion to these excesses and up to their sum. So a rank that is D late is charged with D, whatever
the number of ranks, and nothing is counted twice; what no excess explains stays in the cause where it was.

The work before an exchange is: optimiser and *other* of the step before, then input wait, copy, forward and backward.
(*Other* lies at the end of a step; before the first measured step all ranks wait for each other.)

Limits: x tells who came last only if all ranks leave an exchange together. Exchanges with leaders, and engines that
let ranks go one by one, blur W by as much as ranks leave apart. On a GPU x is time of the training stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlbench.analysis.measures import RunSteps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.int64]

WORK = ("input", "compute", "host")
"""In what a rank can be late: input wait and copy; forward, backward and optimiser; what lies between steps."""


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """How often the others waited for one rank, and what held it up; sums over the measured steps, nanoseconds."""

    rank: int
    steps_last: int
    """Steps in which it came last and another rank waited."""
    waited_ns: int
    """Waiting of all other ranks in these steps."""
    late_ns: dict[str, int]
    """Its own time beyond the mean of the others in these steps, as charged to it, by `WORK`."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Waiting of a whole run; sums over ranks and steps, nanoseconds."""

    waited_ns: int = 0
    """In the exchange."""
    moved_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))
    """Of the last ranks' own work, by `WORK`."""
    ranks: tuple[LateRank, ...] = ()
    """Ranks that came last at least once, the one that was waited for longest first."""

    @property
    def total_ns(self) -> int:
        """What the cause `straggler` is charged with."""
        return self.waited_ns + sum(self.moved_ns.values())


def waiting(steps: RunSteps) -> Waiting:
    """Who waited for whom in the measured steps of one run; nobody at one rank."""
    exchange = steps.phase_ns["exchange"]
    ranks = len(exchange)
    if ranks == 1:
        return Waiting()
    least = exchange.min(axis=0)
    waited = exchange.sum(axis=0) - ranks * least
    work = _work_before_exchange(steps)
    last = _last(exchange == least, work)
    moved = _moved(waited // (ranks - 1), {name: _excess(times, last) for name, times in work.items()})
    return Waiting(
        waited_ns=int(waited.sum()),
        moved_ns={name: int(times.sum()) for name, times in moved.items()},
        ranks=_by_rank(last, waited, moved, ranks),
    )


def _work_before_exchange(steps: RunSteps) -> dict[str, Times]:
    """What each rank did between two exchanges, by `WORK`; shape (ranks, steps)."""
    phases = steps.phase_ns
    compute = _of_step_before(phases["optimizer"])
    compute += phases["forward"]
    compute += phases["backward"]
    return {"input": phases["input"] + phases["h2d"], "compute": compute, "host": _of_step_before(steps.other_ns)}


def _of_step_before(times: Times) -> Times:
    """Shifted by one step; 0 in the first, before which all ranks waited for each other."""
    import numpy as np

    shifted = np.zeros_like(times)
    shifted[:, 1:] = times[:, :-1]
    return shifted


def _last(is_least: npt.NDArray[np.bool_], work: Mapping[str, Times]) -> Times:
    """The rank that came last in each step, shape (steps,): of those that waited least the one with most work."""
    import numpy as np

    total = np.add(work["input"], work["compute"])
    total += work["host"]
    total[~is_least] = np.iinfo(np.int64).min
    return np.asarray(total.argmax(axis=0), dtype=np.int64)


def _excess(times: Times, last: Times) -> Times:
    """How far the last rank exceeds the mean of the others in each step, 0 where it does not; shape (steps,)."""
    import numpy as np

    own = np.take_along_axis(times, last[None, :], axis=0)[0]
    excess: Times = np.maximum(own - (times.sum(axis=0) - own) // (len(times) - 1), 0)
    return excess


def _moved(limit: Times, excess: Mapping[str, Times]) -> dict[str, Times]:
    """The excesses, scaled down in proportion where together they exceed the waiting of one rank."""
    import numpy as np

    found: Times = sum(excess.values(), np.zeros_like(limit))
    # In floating point, because the product of two times in nanoseconds need not fit into 64 bits.
    share = np.minimum(1.0, limit / np.maximum(found, 1))
    return {
        name: np.where(found <= limit, times, np.floor(times * share).astype(np.int64))
        for name, times in excess.items()
    }


def _by_rank(last: Times, waited: Times, moved: Mapping[str, Times], ranks: int) -> tuple[LateRank, ...]:
    import numpy as np

    def summed(times: Times) -> Times:
        sums = np.zeros(ranks, dtype=np.int64)
        np.add.at(sums, last, times)
        return sums

    steps_last, waits = summed((waited > 0).astype(np.int64)), summed(waited)
    late = {name: summed(times) for name, times in moved.items()}
    found = [
        LateRank(
            rank=rank,
            steps_last=int(steps_last[rank]),
            waited_ns=int(waits[rank]),
            late_ns={name: int(times[rank]) for name, times in late.items()},
        )
        for rank in range(ranks)
        if waits[rank] > 0
    ]
    return tuple(sorted(found, key=lambda one: (-one.waited_ns, one.rank)))


@dataclass(frozen=True, kw_only=True)
class Late:
    """A rank, or all ranks of a host, over the runs of one point; means over the runs, seconds a step."""

    rank: int | None
    """None for a host."""
    host: str
    last_share: float
    """Share of the steps in which it came last (1)."""
    waited_s: float
    """Waiting for it, mean over all ranks."""
    waited_share: float
    """The same as a share of all waiting (1)."""
    late_s: dict[str, float]
    """Its own time beyond the mean of the others where it was last, by `WORK`, spread over all steps."""

    @property
    def main_cause(self) -> str | None:
        """In what it was late most; None where nothing of its own explains it."""
        name = max(self.late_s, key=lambda key: self.late_s[key])
        return name if self.late_s[name] > 0 else None


@dataclass(frozen=True, kw_only=True)
class Waited:
    """One run of a point, as `ranking` takes it."""

    waiting: Waiting
    hosts: tuple[str, ...]
    """By rank."""
    steps: int


def ranking(runs: Sequence[Waited]) -> tuple[tuple[Late, ...], tuple[Late, ...]]:
    """Ranks, and hosts, for which the others waited in the runs of one point, longest first.

    A rank that ran on different hosts stands there once for each.
    """
    total = sum(run.waiting.waited_ns for run in runs)
    steps = sum(run.steps for run in runs)
    by_rank: dict[tuple[int | None, str], list[tuple[LateRank, int]]] = {}
    by_host: dict[tuple[int | None, str], list[tuple[LateRank, int]]] = {}
    for run in runs:
        for one in run.waiting.ranks:
            host = run.hosts[one.rank]
            by_rank.setdefault((one.rank, host), []).append((one, len(run.hosts)))
            by_host.setdefault((None, host), []).append((one, len(run.hosts)))
    return _ranked(by_rank, total, steps), _ranked(by_host, total, steps)


def _ranked(
    found: Mapping[tuple[int | None, str], Sequence[tuple[LateRank, int]]], total_ns: int, steps: int
) -> tuple[Late, ...]:
    made = [
        Late(
            rank=rank,
            host=host,
            last_share=sum(one.steps_last for one, _ in ones) / steps,
            waited_s=sum(one.waited_ns / ranks for one, ranks in ones) / steps / 1e9,
            waited_share=sum(one.waited_ns for one, _ in ones) / total_ns,
            late_s={name: sum(one.late_ns[name] for one, _ in ones) / steps / 1e9 for name in WORK},
        )
        for (rank, host), ones in found.items()
    ]
    return tuple(sorted(made, key=lambda late: (-late.waited_s, late.host, -1 if late.rank is None else late.rank)))
