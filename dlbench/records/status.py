"""How far ranks got. Verdicts on dead runs come from here, not from launchers' exit codes.

`node-NNNN.status.json` holds the ranks of a node as they were when a stage of the run began. `rank-NNNN.status.json` is
of a rank that failed, or of one whose supervisor found it dead: there are none of a run that ends well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import TEMPORARY_SUFFIX, write_json
from dlbench.records.folder import RunFolder
from dlbench.sharing import may_not_read
from dlbench.specs.base import CountOrZero, RankNumber, Spec
from dlbench.units import utc_now

PROGRESS_MARK = "DLBENCH-PROGRESS "
"""What the lines begin with by which rank 0 reports its progress to a launcher, on standard output."""

_ROOM_BYTES = 4096  # One block and one inode of most file systems, which is what `failure.json` takes.

MAX_BYTES = 1 << 20
"""Of a file of statuses at most, which holds one line of each rank of a node, and of one that says why a run ended."""

_STATUS = re.compile(r"(rank|node)-.*\.status\.json", re.DOTALL)

PEER_MARK = "dlbench: another rank ended first"
"""The line of a rank's log by which a launcher knows, also on a full disk, that this rank is no cause."""

SIGN_PERIOD_S = 5.0  # How often rank 0 gives the launcher a sign of life at least, seconds.

Stage = Literal["starting", "staging", "warm-up", "measuring", "finishing", "done", "failed"]

FailureKind = Literal["own", "stalled", "peer"]
"""own: the rank itself failed. stalled: nothing moved. peer: it lost another rank, and is no cause."""


class RankStatus(Spec):
    """The last thing one rank said about itself."""

    format: Literal["dlbench.rank-status"] = Field("dlbench.rank-status", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    rank: RankNumber = Field(description="The rank, from 0.")
    host: str = Field(description="Host name; under Slurm the node's name.")
    pid: CountOrZero = Field(description="Process id on that host.")
    stage: Stage = Field(description="How far it got.")
    step: int = Field(description="Last step begun when this was written; -1 before the first.")
    updated: str = Field(description="UTC, ISO 8601.")
    source: Literal["rank", "supervisor"] = Field(
        "rank",
        description="Who wrote this: supervisor: the rank ended without a word, and step is the last it began, updated "
        "its last sign of life.",
    )
    reason: str = Field("", description="Why it failed, in one line.")
    exit_code: int | None = Field(None, description="What it exits with; null while it runs.")
    failed_at: str | None = Field(
        None, description="When it noticed that it failed: UTC, ISO 8601, microseconds; null unless it failed."
    )
    failure: FailureKind | None = Field(
        None,
        description="own: the rank itself failed; stalled: nothing moved for longer than allowed; peer: it lost "
        "another rank, and is not the cause; null unless it failed.",
    )


class NodeStatuses(Spec):
    """What the ranks of one node said when a stage of the run began, as the first of them heard it."""

    format: Literal["dlbench.node-status"] = Field("dlbench.node-status", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    node: RankNumber = Field(description="The node, from 0.")
    ranks: tuple[RankStatus, ...] = Field(description="The ranks that said something, by rank.")


class Failure(Spec):
    """`failure.json`: why a launcher gave a run up."""

    format: Literal["dlbench.failure"] = Field("dlbench.failure", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    reason: str = Field(description="What the launcher saw, in one line; empty if only what follows is known.")
    rank: RankNumber | None = Field(None, description="The rank that ended first; null if the launcher does not know.")
    at: str = Field("", description="When it saw that: UTC, ISO 8601.")
    stopped: tuple[RankNumber, ...] = Field(
        (), description="Ranks that were stopped (state T of the kernel: SIGSTOP, Ctrl-Z, a debugger) at that time."
    )


def write_failure(
    folder: RunFolder, reason: str, *, rank: int | None = None, at: str = "", stopped: Iterable[int] = ()
) -> None:
    """Says why a run was given up: see `Failure`; `at` is a time in UTC, ISO 8601, empty for now."""
    content = Failure(reason=reason, rank=rank, at=at or utc_now(), stopped=tuple(sorted(stopped))).model_dump(
        mode="json"
    )
    try:
        write_json(folder.failure, content)
    except RunError:
        with suppress(OSError):
            _room(folder).unlink()
        write_json(folder.failure, content)


@contextmanager
def room_for_failure(folder: RunFolder) -> Iterator[None]:
    """Keeps room for `failure.json`, so that a disk which a run fills can still say why it failed."""
    room = _room(folder)
    with suppress(OSError):  # full already: the run will say so itself
        room.write_bytes(bytes(_ROOM_BYTES))
    try:
        yield
    finally:
        with suppress(OSError):  # or the folder is gone
            room.unlink(missing_ok=True)


def _room(folder: RunFolder) -> Path:
    return folder.failure.with_name(f".{folder.failure.name}.room{TEMPORARY_SUFFIX}")


def write_node_statuses(folder: RunFolder, statuses: NodeStatuses) -> None:
    """Replaces what a node's ranks said. Raises RunError: the file cannot be written."""
    write_json(folder.node_status(statuses.node), statuses.model_dump(mode="json"))


def write_status(folder: RunFolder, status: RankStatus) -> None:
    """Replaces a rank's status of its own. Raises RunError: the file cannot be written."""
    write_json(folder.status(status.rank), status.model_dump(mode="json"))


def read_statuses(folder: RunFolder, *, is_over: bool = False) -> list[RankStatus]:
    """The newest status of each rank in a run's folder, by rank.

    `is_over`: whether a record says what became of the run; then a status that may not be read is passed over.
    """
    newest: dict[int, RankStatus] = {}
    try:
        names = [entry.name for entry in os.scandir(folder.path) if _STATUS.fullmatch(entry.name)]
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    # Names are sorted and not paths, which compare part by part: a large run has a thousand of them.
    for name in sorted(names):
        path = folder.path / name
        try:
            content = read_json(path, MAX_BYTES)
            if name.startswith("node-"):
                found = NodeStatuses.model_validate(content).ranks
            else:
                found = (RankStatus.model_validate(content),)
        except PermissionError as error:
            if not is_over:
                raise may_not_read(path, error) from None
        except (OSError, ValueError) as error:
            raise IncompleteDataError(
                f"{path}: damaged: {why_unreadable(error)}; delete it or restore it from a copy"
            ) from None
        else:
            for status in found:
                known = newest.get(status.rank)
                if known is None or known.updated <= status.updated:
                    newest[status.rank] = status
    return [newest[rank] for rank in sorted(newest)]


_NAMED = 3  # Ranks of which each is named; the others are counted.

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


def failure_line(statuses: Sequence[RankStatus], failure: Failure | None, counted: str) -> str:
    """The line: what the launcher saw, then the cause as ranks say it, then how many ended with it. `counted`: what a
    rank's status counts, `step` or `point`.
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
    """Where a rank was that says nothing more: its supervisor knows the last step, the file of its node an earlier."""
    place = f"before the first {counted} ({status.stage})"
    if status.step >= 0:
        later = "" if status.source == "supervisor" else " or later"
        place = f"at {counted} {status.step}{later} ({status.stage})"
    if is_first:  # whom the launcher has named already
        return f"it was on {status.host}, {place}"
    return f"rank {status.rank} on {status.host} {_STOPPED if is_stopped else 'vanished'} {place}"
