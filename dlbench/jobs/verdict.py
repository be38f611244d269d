"""What became of a run: from the files it left, never from exit codes of launchers.

One SIGKILL gives 137, 1 or 143 there, depending on the launcher.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from dlbench.errors import ExitCode
from dlbench.records.collectives_scan import read_launched
from dlbench.records.folder import RunFolder
from dlbench.records.record import QualityResult
from dlbench.records.scan import Run
from dlbench.records.status import write_failure


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


def killed_under_mpirun(folder: RunFolder) -> str:
    """The rank that a signal ended, as Open MPI's mpirun says it in the log; empty if it says none.

    Its exit code does not tell, and the other ranks may be ended before they can say what they saw.
    """
    try:
        log = folder.launch_log.read_text(encoding="utf-8", errors="replace")
    except OSError:  # launcher local has none
        return ""
    told = re.search(r"mpirun noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+) ", log)
    # SIGTERM is mpirun's own way to end the others.
    if told is None or int(told[2]) == signal.SIGTERM or int(told[2]) not in set(signal.Signals):
        return ""
    return f"rank {told[1]} was the first to end, by signal {signal.Signals(int(told[2])).name}"


def verdict(folder: RunFolder, ending: str) -> Outcome:
    """The outcome of a run whose processes have ended; `ending` says which one failed first, empty if none did.

    Raises:
        RunError: the folder cannot be written.
    """
    done = read_launched(folder.path)
    if done.state == "valid":
        result = done.record.quality if isinstance(done, Run) and done.record is not None else None
        if result is None:
            return Outcome(exit_code=ExitCode.OK, story="")
        return Outcome(exit_code=ExitCode.OK, story="", quality=_came_to(result), reached=result.reached)
    if done.state == "invalid":
        return Outcome(exit_code=ExitCode.RUN_FAILED, story=f"no figure: {done.story}")
    codes = [s.exit_code for s in done.statuses if s.exit_code]
    if "signal" in ending or not codes:
        write_failure(folder, ending or "the ranks ended without a record")
        done = read_launched(folder.path)
    known = {int(code) for code in ExitCode}
    code = next((c for c in codes if c in known), int(ExitCode.RUN_FAILED))
    return Outcome(exit_code=ExitCode(code), story=done.story)


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
