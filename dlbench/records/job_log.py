"""Reads the log of a run's job for the cause of its end and its progress."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.opening import read_end
from dlbench.records.folder import RunFolder
from dlbench.records.status import Failure, RankStatus, first_cause

END_OF_LOG = 1 << 20  # Bytes at the end of a log that are read.
LABEL = re.compile(r"^ *\d+: ", re.MULTILINE)  # The rank that srun --label writes before each line.
_MAX_QUOTED = 200  # Characters of a line that are quoted.

_SUPERVISOR = re.compile(r"^(?: *\d+: )?dlbench: rank (\d+) was ended by signal (\S+) at (\S+)$", re.MULTILINE)
# E.g. "srun: error: n2: tasks 2-3: Killed"; with --label or time stamps something stands before.
_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)$")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_MPIRUN = re.compile(
    r"(?:mpirun|prterun) noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
    r"(?: \([^()]*\)\.?)?".replace(" ", r"\s+")
)
"""Message of mpirun on a rank ended by a signal. Open MPI 5 (prterun) breaks it into lines between any two words."""

# After these lines Slurm itself ends ranks.
_ABORTED = re.compile(
    r"Terminating StepId=|Terminating job step|Job step aborted|\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED"
)
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*")
_WHOLE_JOB = (
    (re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"), "Slurm ended the job at its time limit"),
    (re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE|srun: error: Node failure on"), "a node of the job failed"),
    (re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION"), "Slurm ended the job for another one (preemption)"),
    # A message of bash on a command of the job's script.
    (re.compile(r"slurm_script: line \d+: +\d+ Killed .*\bsrun "), "srun was ended by signal SIGKILL"),
    # The job ended before the step.
    (re.compile(r"\*\*\* STEP \S+ ON \S+ FAILED \(non-zero exit code"), "the job's script ended before its ranks"),
)
_NO_PROGRAM = re.compile(r"slurmstepd\S*: error: execve\(\): (.+)$", re.MULTILINE)
_ERROR = re.compile(r"^ *(\d+): dlbench: error: (?:/\S*/)?(.+)$", re.MULTILINE)
_OWN_ERROR = re.compile(r"^dlbench: error: (.+)$", re.MULTILINE)
_SCRIPT = re.compile(r"\bslurm_script: line \d+: (.+)$", re.MULTILINE)
"""Message of bash on a command of the job's script that it cannot run."""
_CODE = re.compile(r"^dlbench: the run ended with exit code (\d+)$", re.MULTILINE)
"""Message of the script of a job of several runs on each that failed (slurm/job.sbatch.j2)."""
_OUT_OF_MEMORY = re.compile(r"[Dd]etected (\d+ oom[-_]kill event\S*)")
ATTEMPT_MARK = "dlbench: attempt "  # First words of each attempt after the first (slurm/earlier.j2).
_NODE = re.compile(r"srun: error: Node failure on (\S+)")
_SIGNALS = {  # By the texts of strsignal(3), which srun writes.
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}

_NO_MEMORY = "Out Of Memory"  # srun's words for a task that the kernel's out-of-memory killer ended.


@dataclass(frozen=True, kw_only=True)
class _Ending:
    rank: int
    words: str  # E.g. ``by signal SIGKILL``.
    number: signal.Signals | None = None
    at: str = ""  # UTC, ISO 8601, by its supervisor; empty if srun reported it.


def seen_in_log(folder: RunFolder, statuses: Sequence[RankStatus]) -> Failure | None:
    """Returns the cause by the log of the job; None if it has none, or if a rank reported a failure of its own."""
    # Messages on an earlier attempt precede the first line of this one.
    text = _log_of(folder).rpartition(ATTEMPT_MARK)[2]
    reason_of_job = _of_the_whole_job(text)
    if reason_of_job:
        return Failure(reason=reason_of_job)
    no_program = None if statuses else _NO_PROGRAM.search(text)
    if no_program is not None:
        return Failure(reason=f"no rank started: {no_program[1][:_MAX_QUOTED]}")
    ending = _first(text)
    if ending is None:
        # The exit code of the run in the job's script, if neither srun nor a rank reported a cause.
        code = _CODE.search(text)
        if code is None or any(status.stage == "failed" for status in statuses):
            return None
        if statuses:
            return Failure(reason=f"it ended with exit code {code[1]}; see launch.log")
        errors = [*_OWN_ERROR.findall(text)[:1], *_SCRIPT.findall(text)[-1:]]
        reason = f"it ended with exit code {code[1]} before any rank started"
        if errors:
            reason += f": {errors[0][:_MAX_QUOTED]}"
        return Failure(reason=f"{reason}; see launch.log")
    cause = first_cause(statuses)
    if cause is not None and cause.failure == "own":
        # A signal may have ended a rank before another one failed.
        came_before = bool(ending.at) and ending.rank != cause.rank and ending.at < (cause.failed_at or cause.updated)
        if not came_before:
            return None
    killed = _OUT_OF_MEMORY.search(text)
    if killed is not None and ending.words in (_NO_MEMORY, _by(signal.SIGKILL)):
        reason = f"rank {ending.rank} was OOM-killed: Slurm detected {killed[1]}"
    elif ending.words == _NO_MEMORY:
        reason = f"rank {ending.rank} was OOM-killed (out of memory), by Slurm's report"
    else:
        reason = f"rank {ending.rank} was the first to end, {ending.words}"
        # On a full disk the rank has no status, but its error is in the log.
        errors = [message for rank, message in _ERROR.findall(text) if int(rank) == ending.rank]
        if errors:
            reason += f": {errors[0][:_MAX_QUOTED]}"
    return Failure(reason=reason, rank=ending.rank, at=ending.at)


def progress_in_log(folder: RunFolder, run_id: str) -> str:
    """Returns rank 0's last progress, e.g. ``measuring, step 40 of 100``, else bash's last error, else empty text."""
    text = _log_of(folder)
    lines = re.findall(rf"^(?:\s*\d+: )?dlbench {re.escape(run_id)}: (.+)$", text, re.MULTILINE)
    lines = lines or _SCRIPT.findall(text.rpartition(ATTEMPT_MARK)[2])
    return lines[-1][:_MAX_QUOTED] if lines else ""


def killed_by_signal(folder: RunFolder) -> tuple[int, int] | None:
    """Returns rank and signal of the first rank that a signal ended, by `launch.log`; None if there is none."""
    text = _text_of(folder.launch_log)
    noticed = _noticed(text)
    if noticed is not None:
        return int(noticed[1]), int(noticed[2])
    ending = _of_srun(text)
    if ending is None or ending.number is None:
        return None
    return ending.rank, ending.number


def was_cancelled(path: Path) -> bool:
    """Returns whether the log of a job shows that it was cancelled."""
    return _CANCELLED.search(_text_of(path).rpartition(ATTEMPT_MARK)[2]) is not None


def has_own_end(folder: RunFolder) -> bool:
    """Returns whether the script of a job of several runs reported that the run failed."""
    return _CODE.search(_text_of(folder.launch_log).rpartition(ATTEMPT_MARK)[2]) is not None


def _log_of(folder: RunFolder) -> str:
    outputs = sorted(folder.path.glob("slurm-*.out"), key=lambda path: (len(path.name), path.name))
    text = _text_of(folder.launch_log)
    if not text and outputs:
        return _text_of(outputs[-1])
    return text


def _text_of(path: Path) -> str:
    try:
        return read_end(path, END_OF_LOG).decode("utf-8", "replace")
    except OSError:  # It is missing or may not be read.
        return ""


def _of_the_whole_job(text: str) -> str:
    """Returns why Slurm ended all ranks, if none had ended before; else an empty text."""
    for line in text.splitlines():
        if _TASKS.search(line) or _SUPERVISOR.match(line):
            return ""
        for pattern, words in _WHOLE_JOB:
            if pattern.search(line):
                node = _NODE.search(text)
                return f"{words}: {node[1]}" if node is not None else words
    return ""


def _first(text: str) -> _Ending | None:
    by_srun = _of_srun(text)
    endings = [
        _Ending(rank=int(match[1]), words=f"by signal {match[2]}", at=match[3]) for match in _SUPERVISOR.finditer(text)
    ]
    # A supervisor that Slurm ends shortly after its rank may still report it, later.
    same = [ending for ending in endings if by_srun is not None and ending.rank == by_srun.rank]
    if same and by_srun is not None and by_srun.words == _NO_MEMORY:
        return by_srun
    earliest = min(same or endings, key=lambda ending: ending.at, default=None)
    return earliest or by_srun


def _noticed(text: str) -> re.Match[str] | None:
    # mpirun itself ends the others by SIGTERM.
    return next((match for match in _MPIRUN.finditer(text) if int(match[2]) != signal.SIGTERM), None)


def _of_srun(text: str) -> _Ending | None:
    """Returns the first rank that ended by srun or mpirun, before they ended the others."""
    noticed = _noticed(text)
    position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        match = _TASKS.search(line)
        if match is not None:
            # E.g. `Exited with exit code 3`, `Killed`, `Segmentation fault (core dumped)`.
            rank, words = int(re.split("[,-]", match[1])[0]), match[2].strip()
            code = _EXITED.match(words)
            if code is not None:
                return _Ending(rank=rank, words=f"with exit code {code[1]}")
            number = _SIGNALS.get(words.removesuffix(" (core dumped)"))
            return _Ending(rank=rank, words=words if number is None else _by(number), number=number)
        if noticed is not None and noticed.start() < position:
            number = signal.Signals(int(noticed[2]))
            return _Ending(rank=int(noticed[1]), words=_by(number), number=number)
        if _ABORTED.search(line):
            return None
    return None


def _by(number: signal.Signals) -> str:
    return f"by signal {number.name}"
