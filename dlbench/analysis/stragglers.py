"""Waiting for stragglers: how much of the exchange it is, whose it is, and why those ranks were late.

A synchronous exchange ends when the last rank has brought its gradients, so a rank that comes late waits less. With
x[r] the exchange phase of rank r in one step and p ranks, rank r waits

    wait[r] = x[r] - min x .

It is *in time* if wait[r] >= max(wait)/2 (`IN_TIME_SHARE`), else *late*; where max(wait) = 0 nobody is late. The step
is

    W = mean of wait over the ranks in time

longer than if the late ranks had come with the others, and a late rank is L[r] = W - wait[r] late. Of W, mean(wait)
over all ranks lies in the mean exchange. The rest, (sum of L)/p, is the late ranks' own work: it is taken out of the
causes in which a late rank exceeds the mean of the ranks in time in this step, in proportion to these excesses and up
to L[r]. So ranks that are D late are charged with D, however many ranks there are and however many of them are late,
and nothing is counted twice; what no excess explains stays in the cause where it was.

All waiting of a step is owed by its late ranks, in proportion to L[r]. One of them came *last*: the rank that waited
least, of equal ones the one with most work.

The work before an exchange is: optimizer and *other* of the step before, then input wait, copy, forward and backward.
(*Other* lies at the end of a step; before the first measured step all ranks wait for each other.)

Collectives within the passes hold up ranks as the exchange does, and what ranks waited in them is part of x. Known is
only what each rank waited in a phase over all steps: in each step it is what exceeds a level of own work, the same in
all steps, that leaves as much (`without_waits`). So x of a rank whose passes are longer now and then is longer, too, as
if it had waited: ranks that take turns at that are not found, those late by input or between steps are. Where ranks
wait in the update as well, that is an exchange of its own, and the work before it is the optimizer's.

All times are whole nanoseconds: W and the means of the ranks in time are rounded down, and waiting is shared out so
that its sum stays.

Limits: x shows who came late only if all ranks leave an exchange together. Exchanges with leaders, and engines that
let ranks go one by one, blur W by as much as ranks leave apart. Jitter of which no rank is the cause is waiting too:
about half of the ranks are late then, now these, now those. On a GPU x is time of the training stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from dlbench.analysis.measures import RunSteps
from dlbench.lazy import Flags, Times, np

WORK_PHASES: Mapping[str, tuple[str, ...]] = {
    "input": ("input", "h2d"),
    "compute": ("forward", "backward", "optimizer"),
    "host": ("other",),
}
"""In what a rank can be late, and the phases of a step it consists of; `other` is what no phase holds."""

WORK = tuple(WORK_PHASES)
PHASES_OF_WORK = tuple(phase for phases in WORK_PHASES.values() for phase in phases)

IN_TIME_SHARE = 0.5  # Of the longest wait of a step: a rank that waits so long is in time.


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """How often one rank was late, who waited for it, and what held it up; sums over the measured steps."""

    rank: int
    steps_last: int  # Steps in which it came last and another rank waited.
    waited_ns: int  # Its share of all ranks' waiting in the steps in which it was late, nanoseconds.
    late_ns: dict[str, int]
    """Its own time beyond the mean of the ranks in time in these steps, as charged to it, by `WORK`, nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Waiting of a whole run; sums over ranks and steps, nanoseconds."""

    waited_ns: int = 0  # In the exchange, and in collectives within passes and update.
    moved_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))  # Own work of late ranks.
    moved_phases_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES_OF_WORK, 0))
    """The same by phase; those of one `WORK` sum to its own."""
    ranks: tuple[LateRank, ...] = ()  # Ranks that were late at least once, the one that was waited for longest first.

    @property
    def total_ns(self) -> int:
        """What the cause `straggler` is charged with."""
        return self.waited_ns + sum(self.moved_ns.values())


def without_waits(steps: RunSteps, waits: Mapping[str, Times]) -> tuple[RunSteps, Times | None]:
    """The steps with what ranks waited within the phases in `exchange` instead; and what of it was in the update.

    `waits`: of all steps, by phase, nanoseconds, shape (ranks,); at most what the phase took.
    """
    phases: dict[str, Times] = dict(steps.phase_ns)
    update: Times | None = None
    for name, waited_ns in waits.items():
        beyond = np.stack(
            [_beyond(times, int(rank_waited_ns)) for times, rank_waited_ns in zip(phases[name], waited_ns, strict=True)]
        )
        phases[name] = phases[name] - beyond
        phases["exchange"] = phases["exchange"] + beyond
        if name == "optimizer":
            update = beyond
    return replace(steps, phase_ns=phases), update


def _beyond(times: Times, total_ns: int) -> Times:
    """What of each time exceeds a level at which that sums to `whole`; shape (steps,)."""
    high = np.sort(times)[::-1]
    total = np.cumsum(high)
    # Beyond a level as high as the k-th highest.
    above = int(np.searchsorted(total - np.arange(1, len(high) + 1) * high, total_ns, side="right"))
    beyond: Times = np.maximum(times - (int(total[above - 1]) - total_ns) // above, 0)
    # The level is rounded down.
    beyond[np.flatnonzero(beyond)[: int(beyond.sum()) - total_ns]] -= 1
    return beyond


_AT_ONCE = 1 << 16
"""Times of all ranks that are looked at together, some steps: what is made of them meanwhile fits into a cache."""


def waiting(steps: RunSteps, update: Times | None = None) -> Waiting:
    """Who waited for whom in the measured steps of one run; nobody at one rank.

    `update`: what of the exchange phase ranks waited in the update, shape (ranks, steps).
    """
    ranks, count = steps.step_ns.shape
    if ranks == 1:
        return Waiting()
    if update is not None and not update.any():
        update = None
    by_rank = dict.fromkeys((*WORK, "last", "waited", "late"), np.zeros(ranks, dtype=np.int64))
    by_phase = dict.fromkeys(PHASES_OF_WORK, 0)
    waited = 0
    width = max(1, _AT_ONCE // ranks)
    for begin in range(0, count, width):
        some = slice(begin, begin + width)
        exchange = steps.phase_ns["exchange"][:, some]
        phases = _phases_before_exchange(steps, some)
        num_steps = exchange.shape[1]
        if update is not None:
            update_ns = update[:, some]
            exchange = np.concatenate([exchange - update_ns, update_ns], axis=1)
            phases["optimizer"] = steps.phase_ns["optimizer"][:, some]
            none = np.zeros_like(update_ns)
            phases = {
                name: np.concatenate([none, times] if name == "optimizer" else [times, none], axis=1)
                for name, times in phases.items()
            }
        wait: Times = exchange - exchange.min(axis=0)
        in_time = wait >= IN_TIME_SHARE * wait.max(axis=0)
        # L of the late ranks, at least 1; 0 for those in time.
        late: Times = _summed(wait, in_time) // in_time.sum(axis=0) - wait
        late[in_time] = 0
        work = {
            name: reduce(np.add, [phases[phase] for phase in phase_names]) for name, phase_names in WORK_PHASES.items()
        }
        moved, of_phases = _moved(late, in_time, work, phases)
        moved["last"] = _steps_last(wait, work, num_steps)
        moved["waited"] = _shared_out(wait.sum(axis=0), late).sum(axis=1)
        moved["late"] = late.max(axis=1)
        by_rank = {name: by_rank[name] + values for name, values in moved.items()}
        by_phase = {name: value + of_phases[name] for name, value in by_phase.items()}
        waited += int(wait.sum())
    late_ranks = [
        LateRank(
            rank=rank,
            steps_last=int(by_rank["last"][rank]),
            waited_ns=int(by_rank["waited"][rank]),
            late_ns={name: int(by_rank[name][rank]) for name in WORK},
        )
        for rank in np.flatnonzero(by_rank["late"]).tolist()
    ]
    return Waiting(
        waited_ns=waited,
        moved_ns={name: int(by_rank[name].sum()) for name in WORK},
        moved_phases_ns=by_phase,
        ranks=tuple(sorted(late_ranks, key=lambda late_rank: (-late_rank.waited_ns, late_rank.rank))),
    )


def _phases_before_exchange(steps: RunSteps, some: slice) -> dict[str, Times]:
    """What each rank did between two exchanges, by `PHASES_OF_WORK`; shape (ranks, steps), of some steps.

    Optimizer and other are those of the step before; 0 in the first, before which all ranks waited for each other.
    """
    phases = {name: steps.phase_ns[name][:, some] for name in ("input", "h2d", "forward", "backward")}
    before = slice(max(0, some.start - 1), some.start + phases["input"].shape[1] - 1)
    sliced = {name: times[:, before] for name, times in steps.phase_ns.items()}
    other_ns = replace(steps, step_ns=steps.step_ns[:, before], phase_ns=sliced).other_ns
    for name, times in (("optimizer", sliced["optimizer"]), ("other", other_ns)):
        phases[name] = times if some.start else np.pad(times, ((0, 0), (1, 0)))
    return phases


def _summed(times: Times, of: Flags) -> Times:
    """The sum of the ranks that count, shape (steps,): four times as quick as `sum` with `where`."""
    total: Times = np.einsum("rs,rs->s", times, of)
    return total


def _steps_last(wait: Times, work: Mapping[str, Times], steps: int) -> Times:
    """Steps in which each rank came last and another waited, shape (ranks,).

    Last is of those that waited least the one with most work, in the one of two exchanges that was waited in longer.
    """
    total = reduce(np.add, work.values())
    total[wait > 0] = np.iinfo(np.int64).min
    longest = wait.max(axis=0)
    counted = longest.reshape(-1, steps).argmax(axis=0) * steps + np.arange(steps)
    last = total.argmax(axis=0)[counted[longest[counted] > 0]]
    return np.bincount(last, minlength=len(wait)).astype(np.int64)


def _moved(
    late: Times, in_time: Flags, work: Mapping[str, Times], phases: Mapping[str, Times]
) -> tuple[dict[str, Times], dict[str, int]]:
    """What is charged: to each rank by `WORK`, shape (ranks,), and of all ranks by `PHASES_OF_WORK`.

    Where a rank is late, what exceeds the ranks in time; the excesses are scaled down in proportion where together they
    exceed its lateness.
    """
    # Only what is late is looked at: most of a run is not.
    is_late = late > 0
    place = np.flatnonzero(is_late)
    column = place % late.shape[1]
    lateness = late.ravel()[place]
    count = in_time.sum(axis=0)

    def excess(times: Times) -> Times:
        beyond: Times = times.ravel()[place] - (_summed(times, in_time) // count)[column]
        return np.maximum(beyond, 0, out=beyond)

    beyond = {name: excess(times) for name, times in work.items()}
    excess_sum: Times = np.zeros_like(lateness)
    for values in beyond.values():
        excess_sum += values
    # In floating point, because the product of two times in nanoseconds need not fit into 64 bits.
    share = lateness / np.maximum(excess_sum, 1)
    fits = excess_sum <= lateness
    ends = np.cumsum(is_late.sum(axis=1))
    by_rank: dict[str, Times] = {}
    by_phase: dict[str, int] = {}
    for name, values in beyond.items():
        charged = np.where(fits, values, np.floor(values * share).astype(np.int64))
        # Sums of pieces that lie one behind the other, by where each ends.
        total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(charged)])[ends]
        by_rank[name] = np.diff(total, prepend=0)
        by_phase |= _by_phase(charged, {phase: excess(phases[phase]) for phase in WORK_PHASES[name]})
    return by_rank, by_phase


def _by_phase(charged: Times, excess: Mapping[str, Times]) -> dict[str, int]:
    """The sum of what is charged, by phase: each time shared out as the phases exceed those of the ranks in time."""
    if len(excess) == 1:
        return {name: int(charged.sum()) for name in excess}
    total = np.maximum(reduce(np.add, excess.values()), 1)
    reached, before, sums = np.zeros_like(charged), np.zeros_like(charged), {}
    *others, last = excess
    for name in others:
        reached += excess[name]
        upto = np.minimum(np.floor(charged * (reached / total)).astype(np.int64), charged)
        sums[name] = int((upto - before).sum())
        before = upto
    return {**sums, last: int((charged - before).sum())}


def _shared_out(waited: Times, late: Times) -> Times:
    """The waiting of each step, shape (steps,), among its late ranks in proportion to their lateness; sums stay."""
    reached = np.cumsum(late, axis=0)
    total = np.maximum(reached[-1], 1)
    # Floors of the running sum lose nothing; in floating point for the reason above, so the end is set.
    upto: Times = np.minimum(np.floor(waited * (reached / total)).astype(np.int64), waited)
    upto = np.where(reached == total, waited, upto)
    upto[1:] -= upto[:-1].copy()
    return upto
