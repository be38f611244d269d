"""The processes of a run on this machine: started, watched, ended together, their output kept; and signals to dlbench.

Each is a supervisor (dlbench.supervisor), which ends what its program started. Here is only what holds for all of them
together, and what holds when a supervisor itself was killed: whatever carries the launch's token is ended.

Ctrl-C, SIGTERM and SIGHUP are asked for where it suits, and never in the middle of cleaning up. SIGUSR1 is no
interruption: ranks are asked to stop in good order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

from dlbench import process_tree
from dlbench.errors import EnvironmentLacksError
from dlbench.final_status import wall_time
from dlbench.jobs.scripts import launch
from dlbench.records.job_log import LABEL
from dlbench.records.status import PEER_MARK, PROGRESS_MARK
from dlbench.units import utc_text

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

KEPT_LINES = 60  # Last lines of output that the launcher keeps: a full disk takes the log, mpirun ends with a page.
_MAX_WORDS = 300  # Characters of the last words that are said.
_OWN_WORDS = "dlbench: error: "
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit)(?:: .*)?$")
_LAUNCHER_WORDS = re.compile(r"(?:srun|slurmstepd|mpirun|prterun|orted): (?:error|fatal|Error)?.*")
# Up to the line of dashes: what mpirun saw of a signal is read by itself (`dlbench.records.job_log`).
_NOTICED = re.compile(r"(?:mpirun|prterun)\s+noticed\b.*(?:\n(?!---).*)*")

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

GRACE_S = 10.0  # How long the other ranks may take to end by themselves after one has failed.
END_S = 3.5  # How long supervisors have between SIGTERM and SIGKILL; they need less, as their own grace is shorter.
_KEPT_BYTES = 2000  # Of a line of a rank's output that is kept with its log.
POLL_S = 0.1  # How often the launcher looks; it shares the cores with the ranks.
FOLDER_POLL_S = 1.0  # How often the launcher looks for the run's folder, whose file system may be far away.


class Interruption:
    """A context in which these signals do no more than to be counted; one that nobody asked about counts at its end.

    After a first one it stays so when the context ends: the command is ending, and a hand that stays on Ctrl-C must not
    interrupt that either. Signals that are ignored (nohup) stay so. In a thread other than the main one nothing
    changes.

    Raises `KeyboardInterrupt`: at the end, if there was a signal and no other error.
    """

    def __init__(self) -> None:
        self._times = 0
        self._is_to_stop = False
        self._before: dict[signal.Signals, object] = {}

    def check(self) -> None:
        """Returns if there was no signal. Raises `KeyboardInterrupt`: there was one."""
        if self._times:
            raise KeyboardInterrupt

    def takes_stop(self) -> bool:
        """Whether there was a SIGUSR1, which asks to stop in good order, since this was asked last."""
        is_to_stop, self._is_to_stop = self._is_to_stop, False
        return is_to_stop

    def is_repeated(self) -> bool:
        """Whether somebody is impatient: there was more than one signal."""
        return self._times > 1

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_to_stop = True

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._times += 1

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._count)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._stop)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check()
        if not self._times:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """A cancelled job or a closed terminal ends what runs as Ctrl-C does; nohup asks for the contrary."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended."""

    rank: int | None  # None where the process is a launcher, which holds several ranks.
    program: str = ""  # The launcher, or `the supervisor of mpirun`; empty where the process is a rank.
    code: int  # Its exit code; a signal's number, negative, if that ended it.
    at: str  # When that was seen: UTC, ISO 8601.
    words: str = ""  # What it said last of its failure; empty if it said nothing.
    log: str = ""  # Name of its log; empty where that holds nothing.
    out_of_memory: str = ""  # What the kernel's counters prove of a process that was killed for lack of memory.

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended it: then no rank could say why."""
        return self.code < 0

    @property
    def text(self) -> str:
        who = (self.program or "the launched process") if self.rank is None else f"rank {self.rank}"
        if self.out_of_memory and self.code == -signal.SIGKILL:
            return f"{who} was killed by the kernel's out-of-memory killer: {self.out_of_memory}"
        how = f"by signal {signal_name(-self.code)}" if self.by_signal else f"with exit code {self.code}"
        if -self.code in _SENT:
            return f"{who} was the first to end, {how}"
        words = f": {self.words}" if self.words else ""
        return f"{who} was the first to end, {how}{words}" + (f" (see {self.log})" if self.log else "")


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

    An error that dlbench says, else an exception, else what mpirun or srun says, else the last line that is of no
    warning.
    """
    text = _NOTICED.sub("", "\n".join(LABEL.sub("", line) for line in lines))
    # Without what libraries warn of; Python's module `warnings` puts the line of source behind its own, indented.
    bare: list[str] = []
    follows_warning = False
    for line in text.split("\n"):
        is_warning = _WARNING.search(line) is not None
        if not is_warning and not (follows_warning and line[:1].isspace()):
            bare.append(line)
        follows_warning = is_warning
    said = [" ".join(line.split()) for line in bare if line.strip(" \t\r\n-=*") and PEER_MARK not in line]
    if any(_AS_ROOT in line for line in said):
        return _ROOT_REMEDY
    own = [line.removeprefix(_OWN_WORDS) for line in said if line.startswith(_OWN_WORDS)]
    raised = [line for line in said if _EXCEPTION.match(line)]
    launcher = [line for line in said if _LAUNCHER_WORDS.match(line)]
    # The first of dlbench's and a launcher's own words is the cause: the rest is what it led to.
    fatal = [line for line in launcher if ": fatal: " in line]
    words = next(iter([*own[:1], *raised[-1:], *fatal[:1], *launcher[:1], *said[-1:]]), "")
    if words.startswith("ModuleNotFoundError:"):
        return f"{words}; {_MODULE_REMEDY}"
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 3] + "..."


def stopped_among(processes: Collection[int], proc: Path = Path("/proc")) -> set[int]:
    """Those of the processes that are stopped: state T or t of proc(5), /proc/pid/stat."""
    found = set()
    for pid in processes:
        with suppress(OSError, IndexError):  # it ended meanwhile
            # The name in brackets may hold anything, brackets too.
            if (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t"):
                found.add(pid)
    return found


OnProgress = Callable[[int, int, str], None]  # Called with the step or point, how many there are, and the stage.


class RankProcesses:
    """The processes of one run.

    `on_progress`: called from another thread. `token`: of this launch; all its processes have it in
    DLBENCH_LAUNCH_TOKEN. `launcher`: `mpirun` or `srun`, which holds all ranks; empty: each process is the rank of its
    number.
    """

    def __init__(self, on_progress: OnProgress, token: str, *, launcher: str = "") -> None:
        self._on_progress = on_progress
        self._token = token
        self._launcher = launcher
        self._launcher_told = False  # Its supervisor said that it did not end well, and so was not killed itself.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self._last_lines: list[deque[str]] = []
        self._first_failure: tuple[int, float] | None = None
        self._ended: list[tuple[float, int, int]] = []
        """What supervisors reported: when a rank ended, which, and with what code (negative: the signal)."""
        self.stopped: set[int] = set()
        """Processes of the run that were stopped (state T) when the first failed, or when they were given up."""

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Starts one supervisor; its output goes to `log`, its progress lines to the caller.

        The thread that calls this must live as long as the processes may: they end with it.

        Raises `EnvironmentLacksError`: the command cannot be executed. `OSError`: the log cannot be written.
        """
        sink = log.open("ab", buffering=0)
        self._logs.append(sink)
        try:
            process = subprocess.Popen(
                command,
                env={**environment, launch.TOKEN: self._token, "DLBENCH_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Of its own session, so that Ctrl-C reaches the launcher alone.
                start_new_session=True,
            )
        except OSError as error:
            raise cannot_start(command[0], error) from None
        assert process.stdout is not None
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        reader = threading.Thread(target=self._read, args=(process.stdout, sink, lines), daemon=True)
        reader.start()
        self._processes.append(process)
        self._readers.append(reader)
        self._last_lines.append(lines)

    def _read(self, pipe: IO[bytes], sink: IO[bytes], lines: deque[str]) -> None:
        with pipe:
            for line in pipe:
                if line.startswith(PROGRESS_MARK.encode()):
                    with suppress(ValueError, KeyError):
                        progress = json.loads(line[len(PROGRESS_MARK) :])
                        self._on_progress(int(progress["step"]), int(progress["of"]), str(progress["stage"]))
                    continue
                # The rank may have died in the middle of a line.
                text, mark, told_end = line.partition(process_tree.ENDED_MARK.encode())
                if mark:
                    with suppress(ValueError):
                        rank, code, at = told_end.split()
                        if rank == process_tree.LAUNCHER.encode():
                            self._launcher_told = True
                        else:
                            self._ended.append((float(at), int(rank), int(code)))
                if text:
                    lines.append(text[:_KEPT_BYTES].decode("utf-8", "backslashreplace"))
                    # A full disk, a closed log: the pipe must be drained all the same.
                    with suppress(OSError, ValueError):
                        sink.write(text)

    def wait(self, check: Callable[[], None], goes_on: Callable[[], bool] = lambda: True) -> None:
        """Returns when all have ended; after the first failure the others get `GRACE_S`.

        `check`: called at every look; what it raises is passed on. `goes_on`: asked about once a second; if it says no,
        all are ended at once.
        """
        deadline: float | None = None
        next_look = time.monotonic() + FOLDER_POLL_S
        while any(p.poll() is None for p in self._processes):
            check()
            if deadline is None:
                failed = [index for index, p in enumerate(self._processes) if p.poll() not in (None, 0)]
                if failed:
                    self._first_failure = self._cause(failed), wall_time()
                    self.stopped = stopped_among(self._living())
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                self.end()
            if time.monotonic() > next_look:
                if not goes_on():
                    self.stopped = stopped_among(self._living())
                    self.end()
                    return
                next_look = time.monotonic() + FOLDER_POLL_S
            time.sleep(POLL_S)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the supervisors, which pass it on."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Ends what still runs: SIGTERM to the supervisors, then SIGKILL to all processes of the launch.

        `is_hurried`: whether to go on to SIGKILL at once.
        """
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while any(p.poll() is None for p in self._processes) and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)
        process_tree.end(self._living, 0.0, look=self._reap)
        self._reap()

    def _living(self) -> set[int]:
        return process_tree.with_variable(launch.TOKEN, self._token)

    def _reap(self) -> None:
        for process in self._processes:
            process.poll()

    def close(self, places: Sequence[str]) -> None:
        """Ends what supervisors that were killed left behind, and drains the logs.

        `places`: where the ranks' temporary folders are.
        """
        self.end()
        process_tree.remove_abandoned(places)
        for reader in self._readers:
            reader.join(timeout=5)
        for log in self._logs:
            log.close()

    def _cause(self, failed: Sequence[int]) -> int:
        """Of several that were found ended within one look, the one that a signal ended."""
        return min(failed, key=lambda index: self._processes[index].returncode >= 0)

    def first_ending(self, log: Callable[[int], Path], killed: tuple[int, int] | None = None) -> Ending | None:
        """How the rank that failed first ended; None if none did.

        `killed`: rank and signal by what the launcher's own program says, for ranks whose supervisor was killed with
        them.
        """
        ends = self._ends()
        if not ends:
            return None
        at, index, code = ends[0]
        if killed is not None and killed[0] not in {rank for _, rank, _ in self._ended}:
            return self._ending(killed[0], -killed[1], at, log)
        if code > 0 and not names_a_cause(self._lines_of(index)):
            # One that lost the cause may end sooner than the cause itself, or by a clock that is behind.
            named = [end for end in ends if end[2] > 0 and names_a_cause(self._lines_of(end[1]))]
            is_lost = any(PEER_MARK in line for line in self._lines_of(index))
            at, index, code = next(iter([*named, *(end for end in ends if is_lost and end[2] < 0), ends[0]]))
        is_rank = not self._launcher or (at, index, code) in self._ended
        return self._ending(index if is_rank else None, code, at, log)

    def _ends(self) -> list[tuple[float, int, int]]:
        """When ranks ended that did not end well, which, and with what code, by time.

        As their supervisors reported; what is seen of the processes counts if they reported nothing, or were killed
        themselves.
        """
        failed = [index for index, p in enumerate(self._processes) if p.returncode]
        if not failed:
            return []
        first, at = self._first_failure or (self._cause(failed), wall_time())
        reported = {rank for _, rank, _ in self._ended}
        if self._ended and (self._processes[first].returncode >= 0 or first in reported):
            return sorted(self._ended)
        ordered = [first, *(index for index in failed if index != first)]
        return [(at, index, self._processes[index].returncode) for index in ordered]

    def _lines_of(self, rank: int) -> Sequence[str]:
        return [*self._last_lines[0 if self._launcher else rank]]

    def _ending(self, rank: int | None, code: int, at: float, log: Callable[[int], Path]) -> Ending:
        index = 0 if self._launcher or rank is None else rank
        path = log(index)
        log_name = ""
        with suppress(OSError):
            if path.stat().st_size:  # nothing is in it on a full disk
                log_name = path.name
        of_supervisor = "" if code > 0 or self._launcher_told else "the supervisor of "
        return Ending(
            rank=rank,
            program=of_supervisor + self._launcher,
            code=code,
            at=utc_text(datetime.fromtimestamp(at, UTC)),
            words=last_words([*self._last_lines[index]]),
            log=log_name,
        )


def cannot_start(program: str, error: Exception) -> EnvironmentLacksError:
    """That the Python of the ranks cannot be executed, and why."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return EnvironmentLacksError(f"python: {program}: cannot be executed: {reason}")
