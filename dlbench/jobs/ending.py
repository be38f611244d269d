"""How the process that failed first ended: its code or signal, when, and what it said last."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlbench.records.job.log import LABEL
from dlbench.records.status import PEER_MARK

KEPT_LINES = 60
"""Last lines of a process's output that the launcher keeps: a full disk takes its log, mpirun ends with a page."""

_MAX_WORDS = 300
"""Characters of the last words that are told."""

_OWN_WORDS = "dlbench: error: "
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit)(?:: .*)?$")
_LAUNCHER_WORDS = re.compile(r"(?:srun|slurmstepd|mpirun|prterun|orted): (?:error|fatal|Error)?.*")
# What mpirun saw of a signal is read by itself (`dlbench.records.job.log`).
_NO_CAUSE = re.compile(rf"mpirun noticed|{PEER_MARK}")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: |\bwarn(?:ing)?:|^(?:\[rank\d+\]:)?\[W\d", re.IGNORECASE)
"""Of Python's module `warnings`, of most programs, and of torch's C++ (glog: a letter, month and day)."""
_SENT = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Signals that others send: what a process says before one has nothing to do with it."""
_AS_ROOT = "has detected an attempt to run as root"
_ROOT_REMEDY = (
    "mpirun does not run as root: run as another user or, in a container of your own, set OMPI_ALLOW_RUN_AS_ROOT=1 and "
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
)
_MODULE_REMEDY = (
    "install 'dlbench[node]' into the Python that runs the ranks, or name another with `python` in the system file"
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended."""

    rank: int | None
    """None where the process is a launcher, which holds several ranks."""
    program: str = ""
    """The launcher, or `the supervisor of mpirun`; empty where the process is a rank."""
    code: int
    """Its exit code; a signal's number, negative, if that ended it."""
    at: str
    """When that was seen: UTC, ISO 8601."""
    words: str = ""
    """What it said last of its failure; empty if it said nothing."""
    log: str = ""
    """Name of its log; empty where that holds nothing."""
    out_of_memory: str = ""
    """What the kernel's counters prove of a process that was killed for want of memory."""

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended it: then no rank could say why."""
        return self.code < 0

    @property
    def text(self) -> str:
        """One line."""
        who = (self.program or "the launched process") if self.rank is None else f"rank {self.rank}"
        if self.out_of_memory and self.code == -signal.SIGKILL:
            return f"{who} was killed by the kernel's out-of-memory killer: {self.out_of_memory}"
        how = f"by signal {signal_name(-self.code)}" if self.by_signal else f"with exit code {self.code}"
        if -self.code in _SENT:
            return f"{who} was the first to end, {how}"
        told = f": {self.words}" if self.words else ""
        return f"{who} was the first to end, {how}{told}" + (f" (see {self.log})" if self.log else "")


def signal_name(number: int) -> str:
    """``SIGKILL``; real-time signals have numbers only."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"number {number}"


def names_a_cause(lines: Sequence[str]) -> bool:
    """Whether a process said why it ended, and not that another one ended first."""
    said = [LABEL.sub("", line).strip() for line in lines]
    return PEER_MARK not in said and any(line.startswith(_OWN_WORDS) for line in said)


def last_words(lines: Sequence[str]) -> str:
    """What a process's last lines say of why it ended, as one line; empty if they say nothing.

    An error that dlbench tells, else an exception, else what mpirun or srun says, else the last line that is of no
    warning.
    """
    bare = _without_warnings([LABEL.sub("", line) for line in lines])
    said = [" ".join(line.split()) for line in bare if line.strip(" \t\r\n-=*") and not _NO_CAUSE.search(line)]
    if any(_AS_ROOT in line for line in said):
        return _ROOT_REMEDY
    own = [line.removeprefix(_OWN_WORDS) for line in said if line.startswith(_OWN_WORDS)]
    raised = [line for line in said if _EXCEPTION.match(line)]
    launcher = [line for line in said if _LAUNCHER_WORDS.match(line)]
    # The first of dlbench's and a launcher's own words is the cause: the rest tells what it led to.
    fatal = [line for line in launcher if ": fatal: " in line]
    words = next(iter([*own[:1], *raised[-1:], *fatal[:1], *launcher[:1], *said[-1:]]), "")
    if words.startswith("ModuleNotFoundError:"):
        return f"{words}; {_MODULE_REMEDY}"
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 3] + "..."


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Without what libraries warn of; Python's module `warnings` puts the line of source behind its own, indented."""
    kept: list[str] = []
    after = False
    for line in lines:
        is_warning = _WARNING.search(line) is not None
        if not is_warning and not (after and line[:1].isspace()):
            kept.append(line)
        after = is_warning
    return kept


def stopped_among(processes: Collection[int], proc: Path = Path("/proc")) -> set[int]:
    """Those of the processes that are stopped: state T or t of proc(5), /proc/pid/stat."""
    found = set()
    for pid in processes:
        with suppress(OSError, IndexError):  # it ended meanwhile
            # The name in brackets may hold anything, brackets too.
            if (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t"):
                found.add(pid)
    return found
