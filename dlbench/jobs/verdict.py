"""What became of a run: from the files it left, never from exit codes of launchers.

One SIGKILL gives 137, 1 or 143 there, depending on the launcher.
"""

from __future__ import annotations

import stat
from collections.abc import Collection
from dataclasses import dataclass, replace

from dlbench.errors import DlbenchError, ExitCode, RunError
from dlbench.jobs.processes import Ending
from dlbench.records.collectives_scan import read_launched
from dlbench.records.folder import RunFolder
from dlbench.records.record import QualityResult
from dlbench.records.scan import LaunchedRun, Run
from dlbench.records.status import Failure, RankStatus, write_failure
from dlbench.records.story import first_cause
from dlbench.units import utc_now


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    exit_code: ExitCode
    story: str
    """Empty if the record is valid."""
    quality: str = ""
    """What a valid run to a quality came to, in words; empty for others."""
    reached: bool = True
    """Whether it met its target; a valid run that did not is no failure."""
    throughput: float | None = None
    """Samples per second of a valid run of training, as reports have it; None for others."""


def what_became(folder: RunFolder) -> str:
    """What somebody did with a run's folder while it ran; empty: nothing, or the file system does not answer."""
    try:
        if stat.S_ISLNK(folder.path.lstat().st_mode):
            return "was replaced by a link"
        folder.plan.stat()
    except FileNotFoundError:
        return "was removed or moved away"
    except OSError:  # a server that hangs, a stale handle
        return ""
    return ""


def verdict(folder: RunFolder, ending: Ending | None, stopped: Collection[int] = (), *, given_up: str = "") -> Outcome:
    """The outcome of a run whose processes have ended; nothing is raised, so that a series goes on.

    `ending`: how the process ended that failed first; None if none did. `stopped`: processes of this machine that were
    stopped when it did. `given_up`: why the launcher ended ranks that would not have ended; empty if it did not.
    """
    if became := what_became(folder):
        story = f"{folder.path} {became} while the run went on: its ranks were ended, and it has no result"
        return Outcome(exit_code=ExitCode.RUN_FAILED, story=story)
    try:
        done = read_launched(folder.path)
    except DlbenchError as error:
        words = f"; {ending.text}" if ending is not None else ""
        return Outcome(exit_code=error.exit_code, story=f"{error}{words}")
    if done.state == "valid":
        record = done.record if isinstance(done, Run) else None
        outcome = Outcome(exit_code=ExitCode.OK, story="", throughput=None if record is None else record.throughput)
        if record is None or record.quality is None:
            return outcome
        return replace(outcome, quality=_came_to(record.quality), reached=record.quality.reached)
    if done.state == "interrupted":
        return Outcome(exit_code=ExitCode.REQUEUE, story=done.story)
    if done.state == "invalid":
        return Outcome(exit_code=ExitCode.RUN_FAILED, story=f"no figure: {done.story}")
    if given_up:
        seen = Failure(reason=given_up, at=utc_now(), stopped=_stopped_ranks(done, stopped))
        return replace(_failed(folder, done, seen), exit_code=ExitCode.TIMEOUT)
    outcome = _failed(folder, done, _seen(done, ending, stopped))
    # On a full disk its status may not say so.
    is_lack = ending is not None and ending.rank is not None and ending.code == ExitCode.ENVIRONMENT
    return replace(outcome, exit_code=ExitCode.ENVIRONMENT) if is_lack else outcome


def _failed(folder: RunFolder, done: LaunchedRun, seen: Failure | None) -> Outcome:
    """The outcome of a run without a record; `seen` is what the launcher adds to what the ranks say."""
    if seen is not None:
        done = replace(done, failure=seen)
        try:
            write_failure(folder, seen.reason, rank=seen.rank, at=seen.at, stopped=seen.stopped)
        except RunError as error:
            # Told here, since `dlbench status` cannot know.
            return Outcome(exit_code=_code(done), story=f"{done.story}; {error}")
    return Outcome(exit_code=_code(done), story=done.story)


def _seen(done: LaunchedRun, ending: Ending | None, stopped: Collection[int]) -> Failure | None:
    """What the launcher saw and no rank says; None where the ranks' own words are enough."""
    ranks = _stopped_ranks(done, stopped)
    cause = first_cause(done.statuses)
    reason, rank = "", None
    if ending is None:
        reason = "" if cause is not None else "the ranks ended without a record"
    elif _is_news(done, ending, cause):
        reason, rank = ending.text, ending.rank
    elif ending.out_of_memory:
        # A loader process, of which the rank knows the signal alone.
        reason = f"the kernel's out-of-memory killer ended a process of the run's cgroup: {ending.out_of_memory}"
    if not reason and not ranks:
        return None
    return Failure(reason=reason, rank=rank, at=utc_now() if ending is None else ending.at, stopped=ranks)


def _stopped_ranks(done: LaunchedRun, stopped: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(status.rank for status in done.statuses if status.pid in stopped))


def _is_news(done: LaunchedRun, ending: Ending, cause: RankStatus | None) -> bool:
    """Whether how a process ended says more of the cause than the ranks do."""
    if cause is None:
        return True
    if cause.failure == "own" and cause.exit_code is not None:
        # A signal that came after a rank's own failure came of it: libraries abort when a peer is gone.
        return ending.by_signal and ending.at < (cause.failed_at or cause.updated)
    if ending.by_signal:
        return True
    failed = {status.rank for status in done.statuses if status.stage == "failed"}
    return ending.rank is not None and ending.rank not in failed


def _code(done: LaunchedRun) -> ExitCode:
    """Of the first cause; a run that a signal or the launcher ended failed."""
    cause = first_cause(done.statuses)
    told = done.failure is not None and done.failure.rank is not None
    code = None if cause is None or (told and cause.failure != "stalled") else cause.exit_code
    return ExitCode(code) if code in {int(known) for known in ExitCode} - {0} else ExitCode.RUN_FAILED


def _came_to(result: QualityResult) -> str:
    """E.g. ``reached 0.52 top1 after 4,096 samples``: the target, and with what it was met or how far it is."""
    target = f"{result.target:.6g} {result.metric}"
    if result.reached:
        return f"reached {target} after {result.samples_to_quality or 0:,} samples"
    if not result.evaluations:
        return f"did NOT reach {target}; it was never evaluated"
    last = result.evaluations[-1]
    value = "not finite" if last.value is None else f"{last.value:.4g}"
    return f"did NOT reach {target} within {last.samples:,} samples; the last evaluation is {value}"
