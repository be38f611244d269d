"""Why a run failed, cause first: what ranks and the launcher say becomes one line.

Ranks that only lost another one are counted, not quoted: their words say how a connection ends, not why.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.records.status import Failure, RankStatus

_NAMED = 3
"""Ranks of which each is named; the others are counted."""

_STOPPED = "was stopped (state T: SIGSTOP, Ctrl-Z or a debugger)"


def first_cause(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """The failed rank that is the likeliest cause; None if none says that it failed.

    A rank that failed by itself comes before one in which nothing moved, and that before one that lost another rank;
    ranks of one kind by the time at which they failed, and not by their number.
    """
    failed = [status for status in statuses if status.stage == "failed"]
    return min(failed, key=_likeliness, default=None)


def _likeliness(status: RankStatus) -> tuple[int, str, int]:
    order = ("own", None, "stalled", "peer")  # None: whoever wrote it did not say
    return order.index(status.failure), status.failed_at or status.updated, status.rank


def told_failure(statuses: Sequence[RankStatus], failure: Failure | None, counted: str) -> str:
    """The line: what the launcher saw, then the cause as ranks say it, then how many ended with it.

    Args:
        statuses: what the ranks said last.
        failure: what the launcher saw; None if it said nothing.
        counted: what a rank's status counts, `step` or `point`.
    """
    parts = [failure.reason] if failure is not None and failure.reason else []
    cause = first_cause(statuses)
    gone = [] if cause is not None and cause.failure == "own" else _silent(statuses, failure)
    stopped = set() if failure is None else set(failure.stopped)
    first = None if failure is None else failure.rank
    parts += [
        _silence(status, counted, is_first=status.rank == first, is_stopped=status.rank in stopped)
        for status in gone[:_NAMED]
    ]
    named = {status.rank for status in gone[:_NAMED]}
    if first is not None:
        named.add(first)
    if cause is not None and (cause.failure != "peer" or not parts):
        when = f"at {counted} {cause.step}" if cause.step >= 0 else f"before the first {counted}"
        parts.append(f"rank {cause.rank} on {cause.host} failed {when}: {cause.reason}")
        named.add(cause.rank)
    others = sum(status.stage != "done" and status.rank not in named for status in statuses)
    if others and named:
        parts.append(f"{others} other rank{'s' if others > 1 else ''} ended with it")
    return "; ".join(parts)


def _silent(statuses: Sequence[RankStatus], failure: Failure | None) -> list[RankStatus]:
    """Ranks that went without a word and may be the cause: those that were stopped, then by their last sign of life.

    Where the launcher knows who ended first, it ended the others itself.
    """
    silent = [status for status in statuses if status.stage not in ("failed", "done")]
    if failure is None:
        return sorted(silent, key=lambda status: (status.updated, status.rank))
    suspects = {failure.rank} if failure.rank is not None else {status.rank for status in silent}
    if failure.reason and failure.rank is None and len(silent) == len(statuses):  # ended by the launcher, all of them
        suspects = set()
    silent = [status for status in silent if status.rank in suspects | set(failure.stopped)]
    return sorted(silent, key=lambda status: (status.rank not in failure.stopped, status.updated, status.rank))


def _silence(status: RankStatus, counted: str, *, is_first: bool, is_stopped: bool) -> str:
    place = _place(status, counted)
    if is_first:  # whom the launcher has named already
        return f"it was on {status.host}, {place}"
    return f"rank {status.rank} on {status.host} {_STOPPED if is_stopped else 'vanished'} {place}"


def _place(status: RankStatus, counted: str) -> str:
    """Where a rank was that says nothing more: its supervisor knows the last step, the file of its node an earlier."""
    if status.step < 0:
        return f"before the first {counted} ({status.stage})"
    later = "" if status.source == "supervisor" else " or later"
    return f"at {counted} {status.step}{later} ({status.stage})"
