"""The processes of a run on this machine: started, watched, ended together, their output kept.

Each is a supervisor (dlbench.supervisor), which ends what its program started. Here is only what holds for all of them
together, and what holds when a supervisor itself was killed: whatever carries the launch's token is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dlbench import process_tree
from dlbench.errors import EnvironmentLacksError
from dlbench.records.status import PROGRESS_MARK

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

END_S = 3.5
"""How long supervisors have between SIGTERM and SIGKILL; they need less, as their own grace is shorter."""

POLL_S = 0.1
"""How often the launcher looks; it shares the cores with the ranks."""

OnProgress = Callable[[int, int, str], None]
"""Called with the step or point, how many there are, and the stage."""


class RankProcesses:
    """The processes of one run.

    Args:
        on_progress: called from another thread.
        token: of this launch; all its processes have it in DLBENCH_LAUNCH_TOKEN.
    """

    def __init__(self, on_progress: OnProgress, token: str) -> None:
        self._on_progress = on_progress
        self._token = token
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self._first_failure: int | None = None
        self._ended: list[tuple[float, int, int]] = []
        """What supervisors told: when a rank ended, which, and with what code (negative: the signal)."""

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Starts one supervisor; its output goes to `log`, its progress lines to the caller.

        The thread that calls this must live as long as the processes may: they end with it.

        Raises:
            EnvironmentLacksError: the command cannot be executed.
            OSError: the log cannot be written.
        """
        sink = log.open("ab", buffering=0)
        self._logs.append(sink)
        try:
            process = subprocess.Popen(
                command,
                env={**environment, "DLBENCH_LAUNCH_TOKEN": self._token, "DLBENCH_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Of its own session, so that Ctrl-C reaches the launcher alone.
                start_new_session=True,
            )
        except OSError as error:
            raise cannot_start(command[0], error) from None
        assert process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout, sink), daemon=True)
        reader.start()
        self._processes.append(process)
        self._readers.append(reader)

    def _read(self, pipe: IO[bytes], sink: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                if line.startswith(PROGRESS_MARK.encode()):
                    with suppress(ValueError, KeyError):
                        told = json.loads(line[len(PROGRESS_MARK) :])
                        self._on_progress(int(told["step"]), int(told["of"]), str(told["stage"]))
                    continue
                # The rank may have died in the middle of a line.
                text, mark, told_end = line.partition(process_tree.ENDED_MARK.encode())
                if mark:
                    with suppress(ValueError):
                        rank, code, at = told_end.split()
                        self._ended.append((float(at), int(rank), int(code)))
                if text:
                    # A full disk, a closed log: the pipe must be drained all the same.
                    with suppress(OSError, ValueError):
                        sink.write(text)

    def wait(self, check: Callable[[], None]) -> None:
        """Returns when all have ended; after the first failure the others get `GRACE_S`.

        Args:
            check: called at every look; what it raises is passed on.
        """
        deadline: float | None = None
        while any(p.poll() is None for p in self._processes):
            check()
            if deadline is None:
                failed = [index for index, p in enumerate(self._processes) if p.poll() not in (None, 0)]
                if failed:
                    self._first_failure = self._cause(failed)
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                self.end()
            time.sleep(POLL_S)

    def end(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Ends what still runs: SIGTERM to the supervisors, then SIGKILL to all processes of the launch.

        Args:
            is_hurried: whether to go on to SIGKILL at once.
        """
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while any(p.poll() is None for p in self._processes) and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)
        process_tree.end(lambda: process_tree.with_variable("DLBENCH_LAUNCH_TOKEN", self._token), 0.0, look=self._reap)
        self._reap()

    def _reap(self) -> None:
        for process in self._processes:
            process.poll()

    def close(self, places: Sequence[str]) -> None:
        """Ends what supervisors that were killed left behind, and drains the logs.

        Args:
            places: where the ranks' temporary folders are.
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

    def first_ending(self, told: str = "") -> str:
        """How the process that failed first ended, in words; empty if none did.

        Args:
            told: what the launcher's own program says of it, for ranks whose supervisor was killed with them.
        """
        first = self._first_failure
        if first is None:
            failed = [index for index, p in enumerate(self._processes) if p.returncode]
            first = self._cause(failed) if failed else None
        is_killed = first is not None and self._processes[first].returncode < 0
        if self._ended and not (is_killed and first not in {rank for _, rank, _ in self._ended}):
            _, rank, code = min(self._ended)
            return f"rank {rank} was the first to end, {_how(code)}"
        if told or first is None:
            return told
        who = f"rank {first}" if len(self._processes) > 1 else "the launched process"
        return f"{who} was the first to end, {_how(self._processes[first].returncode)}"


def cannot_start(program: str, error: Exception) -> EnvironmentLacksError:
    """That the Python of the ranks cannot be executed, and why."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return EnvironmentLacksError(f"python: {program}: cannot be executed: {reason}")


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    return f"by signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"by signal {-code}"
