"""Starts the ranks of a run on this machine, and tells what became of them. One rank's death ends the others."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

from dlbench import process_tree
from dlbench.errors import DlbenchError, EnvironmentLacksError
from dlbench.jobs.interruption import Interruption
from dlbench.jobs.processes import Ending, OnProgress, RankProcesses, cannot_start
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.launch import has_script, render_run_script, resolve, shell_command, start_command
from dlbench.jobs.verdict import Outcome, verdict, what_became
from dlbench.machine.arithmetic import has_gpu, lacking_arithmetic
from dlbench.machine.memory import MemoryKills
from dlbench.records.files import write_atomic
from dlbench.records.folder import RunFolder
from dlbench.records.job.log import killed_by_signal
from dlbench.records.status import room_for_failure, write_failure
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan

__all__ = ["has_gpu", "product_rate", "require_precision"]

# The best of five: others may compute at the same time. 1,024 is large enough for a library's best kernel.
_PRODUCT = """
import json, time, numpy
one = numpy.ones((1024, 1024), numpy.float32)
def seconds():
    start = time.perf_counter()
    one @ one
    return time.perf_counter() - start
print(json.dumps(2 * 1024**3 / min(seconds() for _ in range(5))))
"""
_ANSWER_S = 20
"""A machine that has not multiplied two matrices after so long is busy with other things."""


def require_precision(plan: RunPlan) -> None:
    """Proves that the ranks of a plan compute in its precision, if they run here.

    Raises `EnvironmentLacksError`: the CPU has no arithmetic of that precision, and emulation was not asked for.
    """
    train = plan.workload.train
    lack = lacking_arithmetic(train.precision)
    if lack and train.precision == "tf32":
        raise EnvironmentLacksError(f"train.precision tf32: {lack}, and there is none here; use fp32")
    if lack and not train.allow_emulation:
        raise EnvironmentLacksError(
            f"train.precision {train.precision}: {lack}; use fp32, or train.allow_emulation=true to test its numerics"
        )


def product_rate() -> float | None:
    """FLOP/s of a product of two fp32 matrices on one core of this machine; None where numpy does not answer.

    Training does not reach it: what needs so many FLOPs takes at least as long as they do at this rate.
    """
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PRODUCT],
            capture_output=True,
            timeout=_ANSWER_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads},
        )
        return float(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


MARGIN_S = 60.0
"""Beyond the time after which ranks end themselves: from their first status to their watchdogs they import torch."""

_LOOK_S = 5.0
"""How often statuses are looked at; rank 0 tells how far it is about as often."""


class Silence:
    """How long no rank of a run has given a sign of life: written a status, or told the launcher how far it is.

    `plan`: says after what time without progress a rank ends itself.
    """

    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._folder = folder
        self._limit_s = _stall_timeout_s(plan) + MARGIN_S
        self._newest = 0
        self._since = time.monotonic()
        self._next_look = 0.0

    def heard(self) -> None:
        """Rank 0 told something; called from another thread."""
        self._since = max(self._since, time.monotonic())

    def reason(self) -> str:
        """Why the run is given up; empty while it is not."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            # Two times of the file system's own clock are compared, which may differ from this machine's.
            newest = self._newest_change()
            if newest != self._newest:
                self._newest, self._since = newest, now
        silent = now - self._since
        if silent <= self._limit_s:
            return ""
        return f"no rank gave a sign of life for {silent:.0f} s (stall_timeout_s and {MARGIN_S:.0f} s): all hang"

    def _newest_change(self) -> int:
        newest = self._newest
        with suppress(OSError), os.scandir(self._folder.path) as entries:
            for entry in entries:
                if entry.name.endswith(".status.json"):
                    with suppress(OSError):
                        newest = max(newest, entry.stat(follow_symlinks=False).st_mtime_ns)
        return newest


def _stall_timeout_s(plan: LaunchPlan) -> float:
    if isinstance(plan, RunPlan):
        return plan.measure.stall_timeout_s
    if isinstance(plan, CommPlan):
        return plan.stall_timeout_s
    raise TypeError(type(plan).__name__)


_START_S = 120
"""How long a Python may take to start and to find dlbench; file systems of clusters are slow at first."""


def require_python(python: str) -> None:
    """Proves that ranks can be started by a Python.

    Raises `EnvironmentLacksError`: it cannot be executed, or has no dlbench.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", "import dlbench.supervisor"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise cannot_start(python, error) from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        raise EnvironmentLacksError(f"python: {python}: cannot load dlbench (Python 3.11 or later is needed): {last}")


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> Outcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation.

    Modules and setup lines of the system come first, as in a job; with launcher `local` each rank's shell runs them.

    Raises `EnvironmentLacksError`: the launcher's program, or the ranks' Python, cannot be executed; the folder says
    so. `UserError`: the value of a variable is not where the plan says. `KeyboardInterrupt`: passed on, after the ranks
    were ended and the folder says so.
    """
    token = secrets.token_hex(8)
    is_local = plan.system.launch.launcher == "local"
    memory, silence = MemoryKills(), Silence(folder, plan)

    def told(step: int, of: int, stage: str) -> None:
        silence.heard()
        on_progress(step, of, stage)

    ranks = RankProcesses(told, token, launcher=_program(plan))
    environment = {**os.environ, "DLBENCH_PROGRESS": "launcher", **resolve(launch.rank_environment(plan))}
    # An allocation made with --export=NONE has it, and the srun of mpirun would keep everything from other nodes.
    environment.pop("SLURM_EXPORT_ENV", None)
    with room_for_failure(folder), Interruption() as interruption:

        def check() -> None:
            interruption.check()
            if interruption.takes_stop():
                ranks.tell(signal.SIGUSR1)

        try:
            _start(ranks, plan, folder, environment, token)
            ranks.wait(check, lambda: not what_became(folder) and not silence.reason())
        except KeyboardInterrupt:
            ranks.end(interruption.is_repeated)
            with suppress(DlbenchError):  # a full disk: the interruption is what counts
                write_failure(folder, "interrupted by the user or by a signal to dlbench")
            raise
        except EnvironmentLacksError as error:
            with suppress(DlbenchError):
                write_failure(folder, str(error))
            raise
        except FileNotFoundError:
            if not what_became(folder):
                raise
        finally:
            ranks.close(process_tree.temporary_places(environment))
        ending = _first_ending(folder, ranks, is_local=is_local)
        seen = None if ending is None else replace(ending, out_of_memory=memory.since())
        return verdict(folder, seen, ranks.stopped, given_up=silence.reason())


def _program(plan: LaunchPlan) -> str:
    """What holds the ranks: `mpirun` or `srun`; empty: nothing."""
    launcher = plan.system.launch.launcher
    return "" if launcher == "local" else launcher.partition("-")[0]


def _first_ending(folder: RunFolder, ranks: RankProcesses, *, is_local: bool) -> Ending | None:
    if is_local:
        return ranks.first_ending(folder.log)
    return ranks.first_ending(lambda _: folder.launch_log, killed_by_signal(folder))


def _start(ranks: RankProcesses, plan: LaunchPlan, folder: RunFolder, environment: dict[str, str], token: str) -> None:
    words = start_command(plan, folder, sys.executable)
    if has_script(plan):
        write_atomic(folder.launch_script, render_run_script(plan, folder, sys.executable))
        words = shell_command(plan, folder.launch_script)
    if plan.system.launch.launcher == "local":
        for rank, variables in enumerate(launch.local_environments(plan, token)):
            ranks.start(words, {**environment, **resolve(variables)}, folder.log(rank))
        return
    if shutil.which(words[0], path=environment.get("PATH")) is None:
        raise EnvironmentLacksError(f"launcher {plan.system.launch.launcher}: {words[0]} is not on PATH")
    ranks.start(launch.supervised(words, sys.executable), environment, folder.launch_log)
