"""The log of a run's job, read for what ended the run and how far it got."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.opening import read_end
from dlbench.records.folder import RunFolder
from dlbench.records.status import Failure, RankStatus, first_cause

END_OF_LOG = 1 << 20  # Bytes of a log that are looked at: what it says of the end stands at the end.

LABEL = re.compile(r"^ *\d+: ", re.MULTILINE)  # What srun --label writes before each line of a rank: its number.

_TOLD = 200  # Characters of a line that are quoted.

_SUPERVISOR = re.compile(r"^(?: *\d+: )?dlbench: rank (\d+) was ended by signal (\S+) at (\S+)$", re.MULTILINE)
# E.g. "srun: error: n2: tasks 2-3: Killed"; with --label or time stamps something stands before.
_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)$")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_MPIRUN = re.compile(
    r"(?:mpirun|prterun) noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
    r"(?: \([^()]*\)\.?)?".replace(" ", r"\s+")
)
"""What mpirun says of a rank that a signal ended. Open MPI 5 (prterun) breaks it into lines, between any two words."""

# After these lines Slurm itself ends ranks.
_ABORTED = re.compile(
    r"Terminating StepId=|Terminating job step|Job step aborted|\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED"
)
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*")
_WHOLE_JOB = (
    (re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"), "Slurm ended the job at its time limit"),
    (re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE|srun: error: Node failure on"), "a node of the job failed"),
    (re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION"), "Slurm ended the job for another one (preemption)"),
    # What bash says of what the job's script started.
    (re.compile(r"slurm_script: line \d+: +\d+ Killed .*\bsrun "), "srun was ended by signal SIGKILL"),
    # The job was at its end, and the step was not.
    (re.compile(r"\*\*\* STEP \S+ ON \S+ FAILED \(non-zero exit code"), "the job's script ended before its ranks"),
)
_NO_PROGRAM = re.compile(r"slurmstepd\S*: error: execve\(\): (.+)$", re.MULTILINE)
_ERROR = re.compile(r"^ *(\d+): dlbench: error: (?:/\S*/)?(.+)$", re.MULTILINE)
_OWN_ERROR = re.compile(r"^dlbench: error: (.+)$", re.MULTILINE)
_SCRIPT = re.compile(r"\bslurm_script: line \d+: (.+)$", re.MULTILINE)
"""What bash says of a command of the job's script that it cannot run."""

_CODE = re.compile(r"^dlbench: the run ended with exit code (\d+)$", re.MULTILINE)
"""What the script of a job of several runs says of each that failed (slurm/job.sbatch.j2)."""

_OUT_OF_MEMORY = re.compile(r"[Dd]etected (\d+ oom[-_]kill event\S*)")
ATTEMPT_MARK = "dlbench: attempt "  # How the job's script begins each attempt after the first (slurm/earlier.j2).

_NODE = re.compile(r"srun: error: Node failure on (\S+)")
_SIGNALS = {  # By the words of strsignal(3), which srun writes.
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
    at: str = ""  # UTC, ISO 8601, as its supervisor said; empty if srun said it.


def seen_in_log(folder: RunFolder, statuses: Sequence[RankStatus]) -> Failure | None:
    """What the log says of the cause and no rank says; None where it says nothing, or a rank's own words are enough.
    `launch.log`, else the newest `slurm-*.out`, is read.
    """
    # What ended an earlier attempt stands before the line that begins this one.
    text = _log_of(folder).rpartition(ATTEMPT_MARK)[2]
    whole = _of_the_whole_job(text)
    if whole:
        return Failure(reason=whole)
    no_program = None if statuses else _NO_PROGRAM.search(text)
    if no_program is not None:
        return Failure(reason=f"no rank started: {no_program[1][:_TOLD]}")
    ending = _first(text)
    if ending is None:
        # How the part of the job's script ended that is the run's, where neither srun nor a rank said why.
        code = _CODE.search(text)
        if code is None or any(status.stage == "failed" for status in statuses):
            return None
        if statuses:
            return Failure(reason=f"it ended with exit code {code[1]}; see launch.log")
        said = [*_OWN_ERROR.findall(text)[:1], *_SCRIPT.findall(text)[-1:], ""][0][:_TOLD]
        words = f": {said}" if said else ""
        return Failure(reason=f"it ended with exit code {code[1]} before any rank started{words}; see launch.log")
    cause = first_cause(statuses)
    if cause is not None and cause.failure == "own":
        # A signal may have ended one rank before another failed by itself.
        came_before = bool(ending.at) and ending.rank != cause.rank and ending.at < (cause.failed_at or cause.updated)
        if not came_before:
            return None
    killed = _OUT_OF_MEMORY.search(text)
    if killed is not None and ending.words in (_NO_MEMORY, _by(signal.SIGKILL)):
        reason = f"rank {ending.rank} was OOM-killed: Slurm detected {killed[1]}"
    elif ending.words == _NO_MEMORY:
        reason = f"rank {ending.rank} was OOM-killed (out of memory), as Slurm says"
    else:
        # Its status says it better; on a full disk it has none.
        own = [words for rank, words in _ERROR.findall(text) if int(rank) == ending.rank]
        reason = f"rank {ending.rank} was the first to end, {ending.words}" + (f": {own[0][:_TOLD]}" if own else "")
    return Failure(reason=reason, rank=ending.rank, at=ending.at)


def progress_in_log(folder: RunFolder, run_id: str) -> str:
    """What rank 0 reported last of its progress, e.g. ``measuring, step 40 of 100``; empty where the log has nothing.

    Where rank 0 reported nothing: what bash said last of the job's script, e.g. ``module: command not found``.
    """
    text = _log_of(folder)
    lines = re.findall(rf"^(?:\s*\d+: )?dlbench {re.escape(run_id)}: (.+)$", text, re.MULTILINE)
    lines = lines or _SCRIPT.findall(text.rpartition(ATTEMPT_MARK)[2])
    return lines[-1][:_TOLD] if lines else ""


def killed_by_signal(folder: RunFolder) -> tuple[int, int] | None:
    """Rank and signal of the rank that a signal ended, as mpirun or srun says it in `launch.log`; None if it says none.

    Its exit code does not say, and the other ranks may be ended before they can say what they saw.
    """
    text = _text_of(folder.launch_log)
    noticed = _noticed(text)
    if noticed is not None:
        return int(noticed[1]), int(noticed[2])
    ending = _of_srun(text)
    return None if ending is None or ending.number is None else (ending.rank, ending.number)


def was_cancelled(path: Path) -> bool:
    """Whether the log of a job says that somebody cancelled it: then Slurm gives no other reason."""
    return _CANCELLED.search(_text_of(path).rpartition(ATTEMPT_MARK)[2]) is not None


def has_own_end(folder: RunFolder) -> bool:
    """Returns whether the script of a job of several runs says that the run failed: the job ended later."""
    return _CODE.search(_text_of(folder.launch_log).rpartition(ATTEMPT_MARK)[2]) is not None


def _log_of(folder: RunFolder) -> str:
    outputs = sorted(folder.path.glob("slurm-*.out"), key=lambda path: (len(path.name), path.name))
    return _text_of(folder.launch_log) or (_text_of(outputs[-1]) if outputs else "")


def _text_of(path: Path) -> str:
    try:
        return read_end(path, END_OF_LOG).decode("utf-8", "replace")
    except OSError:  # there is none, or it may not be read
        return ""


def _of_the_whole_job(text: str) -> str:
    """Why Slurm ended all ranks, if none had ended before; empty if it did not."""
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
    ended = [
        _Ending(rank=int(found[1]), words=f"by signal {found[2]}", at=found[3]) for found in _SUPERVISOR.finditer(text)
    ]
    # A supervisor that Slurm ends a moment after its rank may still say that, later.
    same = [one for one in ended if by_srun is not None and one.rank == by_srun.rank]
    if same and by_srun is not None and by_srun.words == _NO_MEMORY:
        return by_srun
    earliest = min(same or ended, key=lambda one: one.at, default=None)
    return earliest or by_srun


def _noticed(text: str) -> re.Match[str] | None:
    """Returns rank and signal of the first rank of which mpirun says that a signal ended it."""
    # SIGTERM is mpirun's own way to end the others.
    return next((match for match in _MPIRUN.finditer(text) if int(match[2]) != signal.SIGTERM), None)


def _of_srun(text: str) -> _Ending | None:
    """The first rank that srun, or mpirun, says ended, before it ended the others."""
    noticed = _noticed(text)
    position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        found = _TASKS.search(line)
        if found is not None:
            # E.g. `Exited with exit code 3`, `Killed`, `Segmentation fault (core dumped)`.
            rank, words = int(re.split("[,-]", found[1])[0]), found[2].strip()
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
