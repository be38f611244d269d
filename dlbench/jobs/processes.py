"""The processes of a run on this machine: started, watched, ended together, their output kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dlbench.jobs.ending import KEPT_LINES, Ending, last_words, names_a_cause, stopped_processes
from dlbench.records.status import PROGRESS_MARK
from dlbench.units import utc_now

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

POLL_S = 0.1
"""How often the launcher looks; it shares the cores with the ranks."""

FOLDER_POLL_S = 1.0
"""How often the launcher looks whether the run's folder is there; it may be on a file system that is far away."""

OnProgress = Callable[[int, int, str], None]
"""Called with the step or point, how many there are, and the stage."""


class RankProcesses:
    """The processes of one run."""

    def __init__(self, on_progress: OnProgress, *, are_ranks: bool = True) -> None:
        """`are_ranks`: each process is the rank of its number, and not a launcher of several."""
        self._on_progress = on_progress
        self._are_ranks = are_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self._last_lines: list[deque[str]] = []
        self._first_failure: tuple[int, str] | None = None
        self.stopped: set[int] = set()
        """Processes of the run that were stopped (state T) when the first failed."""

    def start(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Starts one process; its output goes to `log`, its progress lines to the caller."""
        sink = log.open("ab", buffering=0)
        self._logs.append(sink)
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Of its own group, so that Ctrl-C reaches the launcher alone and signals reach all children.
            start_new_session=True,
        )
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
                        told = json.loads(line[len(PROGRESS_MARK) :])
                        self._on_progress(int(told["step"]), int(told["of"]), str(told["stage"]))
                else:
                    lines.append(line[:2000].decode("utf-8", "backslashreplace"))
                    with suppress(
                        OSError, ValueError
                    ):  # a full disk, a closed log: the pipe must be drained all the same
                        sink.write(line)

    def wait(self, goes_on: Callable[[], bool]) -> None:
        """Returns when all have ended; after the first failure the others get `GRACE_S`.

        They are ended at once when `goes_on`, which is asked about once a second, says no.
        """
        deadline: float | None = None
        next_look = time.monotonic() + FOLDER_POLL_S
        while any(p.poll() is None for p in self._processes):
            if deadline is None:
                failed = [index for index, p in enumerate(self._processes) if p.poll() not in (None, 0)]
                if failed:
                    self._first_failure = self._cause(failed), utc_now()
                    self.stopped = stopped_processes({p.pid for p in self._processes})
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                self.end()
            if time.monotonic() > next_look:
                if not goes_on():
                    self.end()
                    return
                next_look = time.monotonic() + FOLDER_POLL_S
            time.sleep(POLL_S)

    def end(self) -> None:
        """Ends what still runs: SIGTERM, then SIGKILL, to the groups that were started here."""
        for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            running = [p for p in self._processes if p.poll() is None]
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=wait_s)

    def close(self) -> None:
        """Drains the logs."""
        for reader in self._readers:
            reader.join(timeout=5)
        for log in self._logs:
            log.close()

    def _cause(self, failed: Sequence[int]) -> int:
        """Of several that were found ended within one look, the one that a signal ended."""
        return min(failed, key=lambda index: self._processes[index].returncode >= 0)

    def first_ending(self, log: Callable[[int], Path]) -> Ending | None:
        """How the process that failed first ended; None if none failed. `log` is the log of a process."""
        if self._first_failure is None:
            failed = [index for index, p in enumerate(self._processes) if p.returncode]
            if not failed:
                return None
            self._first_failure = self._cause(failed), utc_now()
        index, at = self._first_failure
        if self._processes[index].returncode > 0 and not names_a_cause(self._last_lines[index]):
            # It may have lost the cause, which takes longer to end.
            failed = [number for number, p in enumerate(self._processes) if p.returncode > 0]
            index = next((number for number in failed if names_a_cause(self._last_lines[number])), index)
        return Ending(
            rank=index if self._are_ranks else None,
            code=self._processes[index].returncode,
            at=at,
            words=last_words([*self._last_lines[index]]),
            log=_if_filled(log(index)),
        )


def _if_filled(log: Path) -> str:
    """Name of a log; empty where it holds nothing, as on a full disk."""
    try:
        return log.name if log.stat().st_size else ""
    except OSError:
        return ""
