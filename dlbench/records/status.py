"""Statuses of ranks, which tell why a run failed: of a node's ranks at each stage, and of each rank that failed; and
`interrupted.json`, a run that stopped on request. If Slurm restarts it, earlier attempts are in `attempt-NNNN/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench import units
from dlbench.errors import IncompleteDataError, RunError
from dlbench.opening import may_not_read, read_json, why_unreadable
from dlbench.records.files import TEMPORARY_SUFFIX, write_json
from dlbench.records.folder import RunFolder
from dlbench.specs.base import Count, CountOrZero, RankNumber, Spec
from dlbench.units import utc_now

PROGRESS_MARK = "DLBENCH-PROGRESS "
"""Start of the lines by which rank 0 reports its progress to a launcher, on standard output."""

_ROOM_BYTES = 4096  # One block of most file systems, enough for `failure.json`.
MAX_BYTES = 1 << 20
"""Limit for a file of statuses or of a failure."""

_STATUS = re.compile(r"(rank|node)-.*\.status\.json", re.DOTALL)
PEER_MARK = "dlbench: another rank ended first"
"""The line of a rank's log that tells a launcher, also on a full disk, that this rank is not the cause."""

SIGN_PERIOD_S = 5.0  # Longest time between two signs of life of rank 0 to the launcher, seconds.
Stage = Literal["starting", "staging", "warm-up", "measuring", "finishing", "done", "failed"]
FailureKind = Literal["own", "stalled", "peer"]
"""own: the rank itself failed. stalled: there was no progress. peer: it lost another rank, and is not the cause."""

_NAMED = 3  # Ranks that are named; the others are counted.
_STOPPED = "was stopped (state T: SIGSTOP, Ctrl-Z or a debugger)"
_ATTEMPT = re.compile(r"attempt-(\d{4})")


class RankStatus(Spec):
    """The last status of a rank."""

    format: Literal["dlbench.rank-status"] = Field("dlbench.rank-status", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    rank: RankNumber = Field(description="The rank, from 0.")
    host: str = Field(description="Host, under Slurm the node's name.")
    pid: CountOrZero = Field(description="Process id on that host.")
    stage: Stage = Field(description="Stage of the run.")
    step: int = Field(description="Last step begun; -1 before the first.")
    updated: str = Field(description="UTC, ISO 8601.")
    source: Literal["rank", "supervisor"] = Field(
        "rank", description="Writer; supervisor: the rank ended without a report, `updated` is its last sign of life."
    )
    reason: str = Field("", description="Reason of the failure, in one line.")
    exit_code: int | None = Field(None, description="Exit code; null while it runs.")
    failed_at: str | None = Field(
        None, description="Time of the failure, UTC, ISO 8601, microseconds; null: no failure."
    )
    failure: FailureKind | None = Field(
        None, description="own, stalled (no progress within the limit), peer (it lost another rank); null: no failure."
    )


class NodeStatuses(Spec):
    """The statuses of the ranks of a node at the start of a stage, written by the first of them."""

    format: Literal["dlbench.node-status"] = Field("dlbench.node-status", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    node: RankNumber = Field(description="The node, from 0.")
    ranks: tuple[RankStatus, ...] = Field(description="Statuses by rank.")


class Failure(Spec):
    """`failure.json`: the reason why a launcher ended a run."""

    format: Literal["dlbench.failure"] = Field("dlbench.failure", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    reason: str = Field(description="Observation of the launcher, in one line; may be empty.")
    rank: RankNumber | None = Field(None, description="The first rank that ended; null: unknown.")
    at: str = Field("", description="Time of the observation, UTC, ISO 8601.")
    stopped: tuple[RankNumber, ...] = Field(
        (), description="Ranks in state T (SIGSTOP, Ctrl-Z, a debugger) at that time."
    )


def write_failure(
    folder: RunFolder, reason: str, *, rank: int | None = None, at: str = "", stopped: Iterable[int] = ()
) -> None:
    """Records why a run was ended, see `Failure`. `at`: time in UTC, ISO 8601; empty: now."""
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
    """Reserves disk space for `failure.json`, so that it can be written if the run fills the disk."""
    room = _room(folder)
    with suppress(OSError):  # The disk is full already; the run will report it.
        room.write_bytes(bytes(_ROOM_BYTES))
    try:
        yield
    finally:
        with suppress(OSError):  # The folder may have been deleted.
            room.unlink(missing_ok=True)


def _room(folder: RunFolder) -> Path:
    return folder.failure.with_name(f".{folder.failure.name}.room{TEMPORARY_SUFFIX}")


def write_node_statuses(folder: RunFolder, statuses: NodeStatuses) -> None:
    """Replaces the statuses of a node's ranks. Raises RunError: the file cannot be written."""
    write_json(folder.node_status(statuses.node), statuses.model_dump(mode="json"))


def write_status(folder: RunFolder, status: RankStatus) -> None:
    """Replaces a rank's status of its own. Raises RunError: the file cannot be written."""
    write_json(folder.status(status.rank), status.model_dump(mode="json"))


def read_statuses(folder: RunFolder, *, is_over: bool = False) -> list[RankStatus]:
    """Returns the newest status of each rank. `is_over`: with a record, files without read permission are skipped."""
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
                statuses = NodeStatuses.model_validate(content).ranks
            else:
                statuses = (RankStatus.model_validate(content),)
        except PermissionError as error:
            if not is_over:
                raise may_not_read(path, error) from None
        except (OSError, ValueError) as error:
            raise IncompleteDataError(
                f"{path}: damaged: {why_unreadable(error)}; delete it or restore it from a copy"
            ) from None
        else:
            for status in statuses:
                previous = newest.get(status.rank)
                if previous is None or previous.updated <= status.updated:
                    newest[status.rank] = status
    return [newest[rank] for rank in sorted(newest)]


def first_cause(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Returns the failed rank that is the most likely cause (`_likeliness`); None if no rank failed."""
    failed = [status for status in statuses if status.stage == "failed"]
    return min(failed, key=_likeliness, default=None)


def _likeliness(status: RankStatus) -> tuple[int, str, int]:
    order = ("own", None, "stalled", "peer")  # None: not recorded
    return order.index(status.failure), status.failed_at or status.updated, status.rank


def failure_line(statuses: Sequence[RankStatus], failure: Failure | None, counted: str) -> str:
    """Returns the cause of a failure in one line. `counted`: noun of the statuses' counter, `step` or `point`."""
    report = failure or Failure(reason="")
    parts = list(filter(None, [report.reason]))
    cause = first_cause(statuses)
    silent: list[RankStatus] = []
    if cause is None or cause.failure != "own":
        silent = _silent(statuses, failure)[:_NAMED]
    parts += [_silence(status, counted, report) for status in silent]
    named_ranks = {status.rank for status in silent}
    if report.rank is not None:
        named_ranks.add(report.rank)
    if cause is not None and (cause.failure != "peer" or not parts):
        when = f"at {counted} {cause.step}" if cause.step >= 0 else f"before the first {counted}"
        parts.append(f"rank {cause.rank} on {cause.host} failed {when}: {cause.reason}")
        named_ranks.add(cause.rank)
    others = sum(status.stage != "done" and status.rank not in named_ranks for status in statuses)
    if others and named_ranks:
        parts.append(f"{units.counted(others, 'other rank')} ended with it")
    return "; ".join(parts)


def _silent(statuses: Sequence[RankStatus], failure: Failure | None) -> list[RankStatus]:
    """Returns ranks that ended without a report and may be the cause: stopped ones, then by their last sign of life."""
    silent = [status for status in statuses if status.stage not in ("failed", "done")]
    if failure is None:
        return sorted(silent, key=attrgetter("updated", "rank"))
    suspects = {status.rank for status in silent}
    if failure.rank is not None:  # The launcher knows who ended first, and ended the others itself.
        suspects = {failure.rank}
    elif failure.reason and len(silent) == len(statuses):  # The launcher ended all of them.
        suspects = set()
    silent = [status for status in silent if status.rank in suspects | set(failure.stopped)]
    return sorted(silent, key=lambda status: (status.rank not in failure.stopped, status.updated, status.rank))


def _silence(status: RankStatus, counted: str, report: Failure) -> str:
    """Returns the last known state of a rank without a report; only a supervisor knows the last step exactly."""
    place = f"before the first {counted} ({status.stage})"
    if status.step >= 0:
        later = "" if status.source == "supervisor" else " or later"
        place = f"at {counted} {status.step}{later} ({status.stage})"
    if status.rank == report.rank:  # The launcher's reason names it already.
        return f"it was on {status.host}, {place}"
    ending = _STOPPED if status.rank in report.stopped else "vanished"
    return f"rank {status.rank} on {status.host} {ending} {place}"


class Interrupted(Spec):
    """The step and checkpoint at which a run stopped on request."""

    format: Literal["dlbench.interrupted"] = Field("dlbench.interrupted", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    attempt: Count = Field(description="Number of the attempt, from 1.")
    step: CountOrZero = Field(description="Optimizer steps so far, with those before a resume.")
    checkpoint: str | None = Field(None, description="Checkpoint to resume from; null: none.")
    at: str = Field(description="UTC, ISO 8601.")

    @property
    def detail(self) -> str:
        resume = "it has no checkpoint and must start again"
        if self.checkpoint:
            resume = f"it can resume from {self.checkpoint}"
        return f"interrupted after step {self.step} of attempt {self.attempt}, on request (SIGUSR1); {resume}"


def attempt_of(folder: RunFolder) -> int:
    """Returns the number of the attempt whose files are in a run's folder, from 1."""
    earlier = (_ATTEMPT.fullmatch(path.name) for path in folder.path.glob("attempt-*"))
    return 1 + max((int(match[1]) for match in earlier if match is not None), default=0)


def last_attempt(folder: RunFolder) -> Interrupted | None:
    """Returns the interruption of the attempt before; None if there was none, or it was killed."""
    before = RunFolder(folder.path / f"attempt-{attempt_of(folder) - 1:04d}")
    try:
        return Interrupted.model_validate(read_json(before.interrupted, MAX_BYTES))
    except (OSError, ValueError):
        return None


def write_interrupted(folder: RunFolder, step: int, checkpoint: str | None) -> None:
    """Records that a run stopped on request. Raises RunError: the file cannot be written."""
    content = Interrupted(attempt=attempt_of(folder), step=step, checkpoint=checkpoint, at=utc_now())
    write_json(folder.interrupted, content.model_dump(mode="json"))
