"""Starts, monitors and ends the processes of a run on this machine, and handles signals to dlbench. Each process is a
supervisor (dlbench.supervisor), which ends the processes of its program; if it was killed itself, all processes with
the token of the launch are ended. Ctrl-C, SIGTERM and SIGHUP take effect only where dlbench checks for them, never
during cleanup. SIGUSR1 asks the ranks to stop after the current step.
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

KEPT_LINES = 60  # Last lines of output kept in memory: a full disk loses the log, and mpirun ends with many lines.
_MAX_CHARACTERS = 300  # Longest text of an error.
_OWN_ERROR = "dlbench: error: "
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit)(?:: .*)?$")
_LAUNCHER_ERROR = re.compile(r"(?:srun|slurmstepd|mpirun|prterun|orted): (?:error|fatal|Error)?.*")
# Up to the line of dashes: mpirun's notice of a signal is read separately (`dlbench.records.job_log`).
_NOTICED = re.compile(r"(?:mpirun|prterun)\s+noticed\b.*(?:\n(?!---).*)*")

_WARNING = re.compile(r"^\S+:\d+: \w*Warning: |\bwarn(?:ing)?:|^(?:\[rank\d+\]:)?\[W\d", re.IGNORECASE)
"""Warnings of Python's module `warnings`, of most programs, and of torch's C++ (glog: a letter, month and day)."""

_EXTERNAL = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Signals that come from other processes, so that the last output of the process does not explain them."""

_AS_ROOT = "has detected an attempt to run as root"
_ROOT_REMEDY = (
    "mpirun does not run as root: run as another user or, in your own container, set OMPI_ALLOW_RUN_AS_ROOT=1 and "
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
)

_MODULE_REMEDY = (
    "install 'dlbench[node]' into the Python that runs the ranks, or name another with `python` in the system file"
)

GRACE_S = 10.0  # Seconds in which the other ranks may end by themselves after one has failed.
END_S = 3.5  # Seconds between SIGTERM and SIGKILL to supervisors, whose own grace time is shorter.
_KEPT_BYTES = 2000  # Bytes of a line of output that are kept in memory.
POLL_S = 0.1  # Polling interval of the launcher, which shares the cores with the ranks.
FOLDER_POLL_S = 1.0  # Seconds between two checks of the run's folder, whose file system may be remote.


class Interruption:
    """A context in which SIGINT, SIGTERM and SIGHUP are only counted, until `check` or the end of the context. After a
    signal the handlers stay in place beyond the context, so that repeated Ctrl-C does not interrupt the end of the
    command. Ignored signals (nohup) stay ignored. Raises `KeyboardInterrupt`: at the end, if there was a signal and no
    other error.
    """

    def __init__(self) -> None:
        self._num_signals = 0
        self._is_stop_requested = False
        self._old_handlers: dict[signal.Signals, object] = {}

    def check(self) -> None:
        if self._num_signals:
            raise KeyboardInterrupt

    def takes_stop(self) -> bool:
        """Returns whether there was a SIGUSR1, which asks for an orderly stop, since the last call."""
        is_stop_requested, self._is_stop_requested = self._is_stop_requested, False
        return is_stop_requested

    def is_repeated(self) -> bool:
        """Returns whether there was more than one signal: the user does not want to wait."""
        return self._num_signals > 1

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stop_requested = True

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._old_handlers[number] = signal.signal(number, self._count)
            self._old_handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._request_stop)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check()
        if not self._num_signals:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # a handler that signal.signal returned


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, unless they are ignored (nohup)."""

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
    """The end of a process: exit code or signal, time and last error message."""

    rank: int | None  # None if the process is a launcher, which starts several ranks.
    program: str = ""  # The launcher, or `the supervisor of mpirun`; empty if the process is a rank.
    code: int  # Exit code, or the negative number of the signal that ended it.
    at: str  # Time at which the end was noticed: UTC, ISO 8601.
    words: str = ""  # Its last error message; empty if there was none.
    log: str = ""  # Name of its log; empty if the log is empty.
    out_of_memory: str = ""  # The kernel's counters of out-of-memory kills, as text; empty without such a kill.

    @property
    def by_signal(self) -> bool:
        """True if a signal ended it, so that the rank itself could not report why."""
        return self.code < 0

    @property
    def text(self) -> str:
        process = self.program or "the launched process"
        if self.rank is not None:
            process = f"rank {self.rank}"
        if self.out_of_memory and self.code == -signal.SIGKILL:
            return f"{process} was killed by the kernel's out-of-memory killer: {self.out_of_memory}"
        if not self.by_signal:
            text = f"{process} was the first to end, with exit code {self.code}"
        else:
            text = f"{process} was the first to end, by signal {signal_name(-self.code)}"
        if -self.code in _EXTERNAL:
            return text
        if self.words:
            text = f"{text}: {self.words}"
        return f"{text} (see {self.log})" if self.log else text


def signal_name(number: int) -> str:
    """Returns for example ``SIGKILL``; real-time signals have only numbers."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"number {number}"


def names_a_cause(lines: Sequence[str]) -> bool:
    """Returns whether a process reported its own error, and not the end of another process."""
    messages = [LABEL.sub("", line).strip() for line in lines]
    return PEER_MARK not in messages and any(message.startswith(_OWN_ERROR) for message in messages)


def last_words(lines: Sequence[str]) -> str:
    """Returns the error message in a process's last lines, as one line; empty if there is none."""
    text = _NOTICED.sub("", "\n".join(LABEL.sub("", line) for line in lines))
    # Without warnings of libraries; Python's module `warnings` prints a second, indented line of source.
    candidates: list[str] = []
    follows_warning = False
    for line in text.split("\n"):
        is_warning = _WARNING.search(line) is not None
        if not is_warning and not (follows_warning and line[:1].isspace()):
            candidates.append(line)
        follows_warning = is_warning
    messages = [" ".join(line.split()) for line in candidates if line.strip(" \t\r\n-=*") and PEER_MARK not in line]
    if any(_AS_ROOT in message for message in messages):
        return _ROOT_REMEDY
    own_errors = [message.removeprefix(_OWN_ERROR) for message in messages if message.startswith(_OWN_ERROR)]
    exceptions = [message for message in messages if _EXCEPTION.match(message)]
    launcher_errors = [message for message in messages if _LAUNCHER_ERROR.match(message)]
    # The first error of dlbench or of a launcher is the cause, later ones are consequences. For exceptions Python
    # prints the cause last.
    fatal = [message for message in launcher_errors if ": fatal: " in message]
    by_relevance = [*own_errors[:1], *exceptions[-1:], *fatal[:1], *launcher_errors[:1], *messages[-1:]]
    message = next(iter(by_relevance), "")
    if message.startswith("ModuleNotFoundError:"):
        return f"{message}; {_MODULE_REMEDY}"
    if len(message) > _MAX_CHARACTERS:
        return message[: _MAX_CHARACTERS - 3] + "..."
    return message


def stopped_among(pids: Collection[int], proc: Path = Path("/proc")) -> set[int]:
    """Returns the processes that are stopped: state T or t of proc(5), /proc/pid/stat."""
    stopped = set()
    for pid in pids:
        with suppress(OSError, IndexError):  # the process has ended
            # The name in parentheses may contain any character, also parentheses.
            if (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t"):
                stopped.add(pid)
    return stopped


OnProgress = Callable[[int, int, str], None]  # Called with the step or point, their total number, and the stage.


class RankProcesses:
    """The processes of one run. `on_progress`: called from another thread. `token`: identifies this launch in
    DLBENCH_LAUNCH_TOKEN of all its processes. `launcher`: `mpirun` or `srun`, which starts all ranks; empty: each
    process is one rank, in order.
    """

    def __init__(self, on_progress: OnProgress, token: str, *, launcher: str = "") -> None:
        self._on_progress = on_progress
        self._token = token
        self._launcher = launcher
        self._has_launcher_report = False  # Its supervisor reported a failure of mpirun, and so was not killed itself.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self._last_lines: list[deque[str]] = []
        self._first_failure: tuple[int, float] | None = None
        self._ended: list[tuple[float, int, int]] = []
        """Reports of supervisors: time of a rank's end, rank, and exit code (negative: signal)."""
        self.stopped: set[int] = set()
        """Processes in state T when the first process failed, or when the run was given up."""

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Starts one supervisor, which ends with the calling thread; output that is no progress goes to `log`."""
        sink = log.open("ab", buffering=0)
        self._logs.append(sink)
        try:
            process = subprocess.Popen(
                command,
                env={**environment, launch.TOKEN: self._token, "DLBENCH_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # In a new session, so that Ctrl-C reaches only the launcher.
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
                # The mark may follow a line that a dying rank did not finish.
                text, mark, report = line.partition(process_tree.ENDED_MARK.encode())
                if mark:
                    with suppress(ValueError):
                        rank, code, at = report.split()
                        if rank == process_tree.LAUNCHER.encode():
                            self._has_launcher_report = True
                        else:
                            self._ended.append((float(at), int(rank), int(code)))
                if text:
                    lines.append(text[:_KEPT_BYTES].decode("utf-8", "backslashreplace"))
                    # Even with a full disk or a closed log the pipe must be drained.
                    with suppress(OSError, ValueError):
                        sink.write(text)

    def wait(self, check: Callable[[], None], may_continue: Callable[[], bool] = lambda: True) -> None:
        """Returns when all processes have ended; ends them `GRACE_S` after the first failure, or at once if
        `may_continue`, called about once a second, returns False. `check`: called at every poll.
        """
        deadline: float | None = None
        next_folder_poll = time.monotonic() + FOLDER_POLL_S
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
            if time.monotonic() > next_folder_poll:
                if not may_continue():
                    self.stopped = stopped_among(self._living())
                    self.end()
                    return
                next_folder_poll = time.monotonic() + FOLDER_POLL_S
            time.sleep(POLL_S)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the supervisors, which pass it to their programs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Sends SIGTERM to the supervisors, then, at once if `is_hurried`, SIGKILL to all processes of the launch."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while any(p.poll() is None for p in self._processes) and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)
        process_tree.end(self._living, 0.0, on_poll=self._reap)
        self._reap()

    def _living(self) -> set[int]:
        return process_tree.with_variable(launch.TOKEN, self._token)

    def _reap(self) -> None:
        for process in self._processes:
            process.poll()

    def close(self, places: Sequence[str]) -> None:
        """Ends processes of killed supervisors, removes temporary folders in `places`, and drains the logs."""
        self.end()
        process_tree.remove_abandoned(places)
        for reader in self._readers:
            reader.join(timeout=5)
        for log in self._logs:
            log.close()

    def _cause(self, failed: Sequence[int]) -> int:
        """Returns which of the processes that ended within one poll is the cause: one that a signal ended, if any."""
        return min(failed, key=lambda index: self._processes[index].returncode >= 0)

    def first_ending(self, killed: tuple[int, int] | None = None) -> Ending | None:
        """Returns how the process that failed first ended; `killed`: rank and signal that mpirun or srun printed."""
        ends = self._ends()
        if not ends:
            return None
        at, index, code = ends[0]
        if killed is not None and killed[0] not in {rank for _, rank, _ in self._ended}:
            return self._ending(killed[0], -killed[1], at)
        if code > 0 and not names_a_cause(self._lines_of(index)):
            # A rank that lost its peer may end before the peer does, or its node's clock may be behind.
            lost_peer = any(PEER_MARK in line for line in self._lines_of(index))
            causes = [end for end in ends if end[2] > 0 and names_a_cause(self._lines_of(end[1]))]
            if lost_peer:
                causes += [end for end in ends if end[2] < 0]
            if causes:
                at, index, code = causes[0]
        rank = None if self._launcher and (at, index, code) not in self._ended else index
        return self._ending(rank, code, at)

    def _ends(self) -> list[tuple[float, int, int]]:
        """Returns time, rank and exit code of each rank that failed, by time."""
        failed = [index for index, p in enumerate(self._processes) if p.returncode]
        if not failed:
            return []
        first, at = self._first_failure or (self._cause(failed), wall_time())
        reported_ranks = {rank for _, rank, _ in self._ended}
        if self._ended and (self._processes[first].returncode >= 0 or first in reported_ranks):
            return sorted(self._ended)
        ordered = [first, *(index for index in failed if index != first)]
        return [(at, index, self._processes[index].returncode) for index in ordered]

    def _lines_of(self, rank: int) -> Sequence[str]:
        return [*self._last_lines[0 if self._launcher else rank]]

    def _ending(self, rank: int | None, code: int, at: float) -> Ending:
        index = 0 if self._launcher or rank is None else rank
        path = Path(self._logs[index].name)
        log_name = ""
        with suppress(OSError):
            if path.stat().st_size:  # it is empty if the disk is full
                log_name = path.name
        program = self._launcher
        if code <= 0 and not self._has_launcher_report:
            program = f"the supervisor of {self._launcher}"
        return Ending(
            rank=rank,
            program=program,
            code=code,
            at=utc_text(datetime.fromtimestamp(at, UTC)),
            words=last_words([*self._last_lines[index]]),
            log=log_name,
        )


def cannot_start(program: str, error: Exception) -> EnvironmentLacksError:
    """Returns the error for a Python of the ranks that cannot be executed."""
    reason = getattr(error, "strerror", None) or error
    return EnvironmentLacksError(f"python: {program}: cannot be executed: {reason}")
