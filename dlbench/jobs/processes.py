"""The processes of a run on this machine: started, watched, ended together, their output kept."""

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

from dlbench.records.status import PROGRESS_MARK

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

POLL_S = 0.1
"""How often the launcher looks; it shares the cores with the ranks."""

OnProgress = Callable[[int, int, str], None]
"""Called with the step or point, how many there are, and the stage."""


class RankProcesses:
    """The processes of one run."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[bytes]] = []
        self._first_failure: int | None = None

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
        reader = threading.Thread(target=self._read, args=(process.stdout, sink), daemon=True)
        reader.start()
        self._processes.append(process)
        self._readers.append(reader)

    def _read(self, pipe: IO[bytes], sink: IO[bytes]) -> None:
        for line in pipe:
            if line.startswith(PROGRESS_MARK.encode()):
                with suppress(ValueError, KeyError):
                    told = json.loads(line[len(PROGRESS_MARK) :])
                    self._on_progress(int(told["step"]), int(told["of"]), str(told["stage"]))
            else:
                with suppress(OSError, ValueError):  # a full disk, a closed log: the pipe must be drained all the same
                    sink.write(line)

    def wait(self) -> None:
        """Returns when all have ended; after the first failure the others get `GRACE_S`."""
        deadline: float | None = None
        while any(p.poll() is None for p in self._processes):
            if deadline is None:
                failed = [index for index, p in enumerate(self._processes) if p.poll() not in (None, 0)]
                if failed:
                    self._first_failure = self._cause(failed)
                    deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                self.end()
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

    def first_ending(self) -> str:
        """How the process that failed first ended, in words; empty if none did."""
        if self._first_failure is None:
            failed = [index for index, p in enumerate(self._processes) if p.returncode]
            if not failed:
                return ""
            self._first_failure = self._cause(failed)
        code = self._processes[self._first_failure].returncode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        who = f"rank {self._first_failure}" if len(self._processes) > 1 else "the launched process"
        return f"{who} was the first to end, {how}"
