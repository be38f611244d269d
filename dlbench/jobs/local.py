"""Starts the ranks of a run on this machine, watches them, and tells what became of them.

One rank's death ends the others. The verdict comes from the run's files, never from exit codes of
launchers: one SIGKILL gives 137, 1 or 143 there, depending on the launcher.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dlbench.errors import EnvironmentLacksError, ExitCode
from dlbench.jobs import launch
from dlbench.opening import read_end
from dlbench.records.collectives_scan import read_launched
from dlbench.records.folder import RunFolder
from dlbench.records.record import QualityResult
from dlbench.records.scan import Run
from dlbench.records.status import PROGRESS_MARK, write_failure
from dlbench.specs.plan import LaunchPlan

GRACE_S = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

END_OF_LOG = 1 << 20
"""Bytes of a launcher's log that are looked at: what it says of the end stands at the end."""

POLL_S = 0.1
"""How often the launcher looks; it shares the cores with the ranks."""

OnProgress = Callable[[int, int, str], None]
"""Called with the step or point, how many there are, and the stage."""


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


class _Ranks:
    """The processes of one run."""

    def __init__(self, folder: RunFolder, on_progress: OnProgress) -> None:
        self._folder = folder
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


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> Outcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation.

    Raises:
        EnvironmentLacksError: the launcher's program is not installed.
        KeyboardInterrupt: passed on, after the ranks were ended and the folder says so.
    """
    ranks = _Ranks(folder, on_progress)
    token = secrets.token_hex(8)
    base = {**os.environ, "DLBENCH_PROGRESS": "launcher"}
    python = plan.system.python or sys.executable
    try:
        if plan.system.launch.launcher == "local":
            for rank, variables in enumerate(launch.local_environments(plan, token)):
                ranks.start(launch.node_command(folder.plan, python), {**base, **variables}, folder.log(rank))
        else:
            variables = {**launch.rank_environment(plan), "DLBENCH_LAUNCH_TOKEN": token}
            ranks.start(_launcher_command(plan, folder, python, token), {**base, **variables}, folder.launch_log)
        ranks.wait()
    except FileNotFoundError as error:
        ranks.end()
        raise EnvironmentLacksError(
            f"launcher {plan.system.launch.launcher}: {error.filename} is not on PATH"
        ) from None
    except KeyboardInterrupt:
        ranks.end()
        write_failure(folder, "interrupted by the user or by a signal to dlbench")
        raise
    except BaseException:
        ranks.end()
        raise
    finally:
        ranks.close()
    return _verdict(folder, _killed_under_mpirun(folder) or ranks.first_ending())


def _launcher_command(plan: LaunchPlan, folder: RunFolder, python: str, token: str) -> list[str]:
    if plan.system.launch.launcher == "mpirun":
        return launch.mpirun_command(plan, folder, python, token)
    return launch.srun_command(plan, folder, python)


def _killed_under_mpirun(folder: RunFolder) -> str:
    """The rank that a signal ended, as Open MPI's mpirun says it in the log; empty if it says none.

    Its exit code does not tell, and the other ranks may be ended before they can say what they saw.
    """
    try:
        log = read_end(folder.launch_log, END_OF_LOG).decode("utf-8", "replace")
    except OSError:  # launcher local has none
        return ""
    told = re.search(r"mpirun noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+) ", log)
    # SIGTERM is mpirun's own way to end the others.
    if told is None or int(told[2]) == signal.SIGTERM or int(told[2]) not in set(signal.Signals):
        return ""
    return f"rank {told[1]} was the first to end, by signal {signal.Signals(int(told[2])).name}"


def _verdict(folder: RunFolder, ending: str) -> Outcome:
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
