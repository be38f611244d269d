"""Starts the ranks of a run on this machine, and says what became of them. One rank's death ends the others.

What became of a run is read from the files it left, never from exit codes of launchers: one SIGKILL gives 137, 1 or 143
there, depending on the launcher.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench import process_tree
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, RunError
from dlbench.jobs.processes import Ending, Interruption, OnProgress, RankProcesses, cannot_start
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.launch import has_script, render_run_script, resolve, shell_command, start_command
from dlbench.machine.arithmetic import has_gpu, lacking_arithmetic
from dlbench.machine.gpus import hidden_gpus
from dlbench.machine.host_memory import MemoryKills
from dlbench.machine.mpi import refusal_of
from dlbench.records.files import write_atomic
from dlbench.records.folder import RunFolder
from dlbench.records.job_log import killed_by_signal
from dlbench.records.status import Failure, RankStatus, first_cause, room_for_failure, write_failure
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import LauncherName
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import SystemSpec
from dlbench.units import utc_now

if TYPE_CHECKING:  # What reads runs is imported when the ranks have started: none of it starts them.
    from dlbench.records.record import QualityResult
    from dlbench.records.scan import LaunchedRun

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

_ANSWER_S = 20  # A machine that has not multiplied two matrices after so long is busy with other things.

MARGIN_S = 60.0
"""Beyond the time after which ranks end themselves: from their first status to their watchdogs they import torch."""

_LOOK_S = 5.0  # How often statuses are looked at; rank 0 reports its step about as often.
_START_S = 120  # How long a Python may take to start and to find dlbench; file systems of clusters are slow at first.


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What became of a run."""

    exit_code: ExitCode
    detail: str  # Empty if the record is valid.
    quality: str = ""  # What a valid run to a quality came to, in words; empty for others.
    reached: bool = True  # Whether it met its target; a valid run that did not is no failure.
    throughput: float | None = None  # Samples per second of a valid run of training, as in reports; None for others.


def what_became(folder: RunFolder) -> str:
    """What somebody did with a run's folder while it ran; empty: nothing, or the file system does not answer."""
    try:
        if stat.S_ISLNK(folder.path.lstat().st_mode):
            return "was replaced by a link"
        folder.plan.stat()
    except FileNotFoundError:
        return "was removed or moved away"
    except OSError:  # a server that hangs, a stale handle
        return ""
    return ""


def verdict(
    folder: RunFolder, ending: Ending | None, stopped: Collection[int] = (), *, given_up: str = ""
) -> RunOutcome:
    """The outcome of a run whose processes have ended; nothing is raised, so that a series goes on.

    `ending`: how the process ended that failed first; None if none did. `stopped`: processes of this machine that were
    stopped when it did. `given_up`: why the launcher ended ranks that would not have ended; empty if it did not.
    """
    from dlbench.records.comm import read_launched
    from dlbench.records.scan import Run

    if became := what_became(folder):
        detail = f"{folder.path} {became} while the run went on: its ranks were ended, and it has no result"
        return RunOutcome(exit_code=ExitCode.RUN_FAILED, detail=detail)
    try:
        done = read_launched(folder.path)
    except DlbenchError as error:
        words = f"; {ending.text}" if ending is not None else ""
        return RunOutcome(exit_code=error.exit_code, detail=f"{error}{words}")
    if done.state == "valid":
        record = done.record if isinstance(done, Run) else None
        outcome = RunOutcome(exit_code=ExitCode.OK, detail="", throughput=None if record is None else record.throughput)
        if record is None or record.quality is None:
            return outcome
        return replace(outcome, quality=_came_to(record.quality), reached=record.quality.reached)
    if done.state == "interrupted":
        return RunOutcome(exit_code=ExitCode.REQUEUE, detail=done.detail)
    if done.state == "invalid":
        return RunOutcome(exit_code=ExitCode.RUN_FAILED, detail=f"no figure: {done.detail}")
    if given_up:
        seen = Failure(reason=given_up, at=utc_now(), stopped=_stopped_ranks(done, stopped))
        return replace(_failed(folder, done, seen), exit_code=ExitCode.TIMEOUT)
    outcome = _failed(folder, done, _seen(done, ending, stopped))
    # On a full disk its status may not say so.
    is_lack = ending is not None and ending.rank is not None and ending.code == ExitCode.ENVIRONMENT
    return replace(outcome, exit_code=ExitCode.ENVIRONMENT) if is_lack else outcome


def _failed(folder: RunFolder, done: LaunchedRun, seen: Failure | None) -> RunOutcome:
    """The outcome of a run without a record; `seen` is what the launcher adds to what the ranks say."""
    if seen is not None:
        done = replace(done, failure=seen)
        try:
            write_failure(folder, seen.reason, rank=seen.rank, at=seen.at, stopped=seen.stopped)
        except RunError as error:
            # Told here, since `dlbench status` cannot know.
            return RunOutcome(exit_code=_code(done), detail=f"{done.detail}; {error}")
    return RunOutcome(exit_code=_code(done), detail=done.detail)


def _seen(done: LaunchedRun, ending: Ending | None, stopped: Collection[int]) -> Failure | None:
    ranks = _stopped_ranks(done, stopped)
    cause = first_cause(done.statuses)
    reason, rank = "", None
    if ending is None:
        reason = "" if cause is not None else "the ranks ended without a record"
    elif _is_news(done, ending, cause):
        reason, rank = ending.text, ending.rank
    elif ending.out_of_memory:
        # A loader process, of which the rank knows the signal alone.
        reason = f"the kernel's out-of-memory killer ended a process of the run's cgroup: {ending.out_of_memory}"
    if not reason and not ranks:
        return None
    return Failure(reason=reason, rank=rank, at=utc_now() if ending is None else ending.at, stopped=ranks)


def _stopped_ranks(done: LaunchedRun, stopped: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(status.rank for status in done.statuses if status.pid in stopped))


def _is_news(done: LaunchedRun, ending: Ending, cause: RankStatus | None) -> bool:
    if cause is None:
        return True
    if cause.failure == "own" and cause.exit_code is not None:
        # A signal that came after a rank's own failure came of it: libraries abort when a peer is gone.
        return ending.by_signal and ending.at < (cause.failed_at or cause.updated)
    if ending.by_signal:
        return True
    failed = {status.rank for status in done.statuses if status.stage == "failed"}
    return ending.rank is not None and ending.rank not in failed


def _code(done: LaunchedRun) -> ExitCode:
    """Of the first cause; a run that a signal or the launcher ended failed."""
    cause = first_cause(done.statuses)
    is_known = done.failure is not None and done.failure.rank is not None
    code = None if cause is None or (is_known and cause.failure != "stalled") else cause.exit_code
    return ExitCode(code) if code in {int(known) for known in ExitCode} - {0} else ExitCode.RUN_FAILED


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


__all__ = ["has_gpu", "hidden_gpus", "precision_problem", "product_rate"]


def precision_problem(plan: RunPlan) -> str:
    """Why the ranks of a plan do not compute in its precision, if they run here: the CPU has no arithmetic of that
    precision, and emulation was not asked for. Empty where they do.
    """
    train = plan.workload.train
    lack = lacking_arithmetic(train.precision) if plan.system.scheduler == "none" else ""
    if lack and train.precision == "tf32":
        return f"train.precision tf32: {lack}, and there is none here; use fp32"
    if lack and not train.allow_emulation:
        return (
            f"train.precision {train.precision}: {lack}; use fp32, or train.allow_emulation=true to test its numerics"
        )
    return ""


def product_rate() -> float | None:
    """FLOP/s of a product of two fp32 matrices on one core of this machine; None where numpy does not answer.

    Training does not reach it: FLOPs take at least as long as they do at this rate.
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


class HangDetector:
    """How long no rank of a run has given a sign of life: written a status, or reported its step to the launcher.

    `plan`: says after what time without progress a rank ends itself.
    """

    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._folder = folder
        assert isinstance(plan, RunPlan | CommPlan)
        limits = plan.measure if isinstance(plan, RunPlan) else plan
        self._limit_s = limits.stall_timeout_s + MARGIN_S
        self._newest = 0
        self._since = time.monotonic()
        self._next_look = 0.0

    def progressed(self) -> None:
        """Rank 0 reported something; called from another thread."""
        self._since = max(self._since, time.monotonic())

    def reason(self) -> str:
        """Why the run is given up; empty while it is not."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            # Two times of the file system's own clock are compared, which may differ from this machine's.
            newest = self._newest
            with suppress(OSError), os.scandir(self._folder.path) as entries:
                for entry in entries:
                    if entry.name.endswith(".status.json"):
                        with suppress(OSError):
                            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime_ns)
            if newest != self._newest:
                self._newest, self._since = newest, now
        silent = now - self._since
        if silent <= self._limit_s:
            return ""
        return f"no rank gave a sign of life for {silent:.0f} s (stall_timeout_s and {MARGIN_S:.0f} s): all hang"


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


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> RunOutcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation.

    Modules and setup lines of the system come first, as in a job; with launcher `local` each rank's shell runs them.

    Raises `EnvironmentLacksError`: the launcher's program, or the ranks' Python, cannot be executed; the folder says
    so. `UserError`: the value of a variable is not where the plan says. `KeyboardInterrupt`: passed on, after the ranks
    were ended and the folder says so.
    """
    token = secrets.token_hex(8)
    is_local = plan.system.launch.launcher == "local"
    memory, hang = MemoryKills(), HangDetector(folder, plan)

    def report(step: int, of: int, stage: str) -> None:
        hang.progressed()
        on_progress(step, of, stage)

    ranks = RankProcesses(report, token, launcher=_program(plan.system.launch.launcher))
    environment = {**os.environ, "DLBENCH_PROGRESS": "launcher", **resolve(launch.rank_environment(plan))}
    # An allocation made with --export=NONE has it, and the srun of mpirun would keep everything from other nodes.
    environment.pop("SLURM_EXPORT_ENV", None)
    with room_for_failure(folder), Interruption() as interruption:

        def check() -> None:
            interruption.check()
            if interruption.takes_stop():
                ranks.send_signal(signal.SIGUSR1)

        try:
            _start(ranks, plan, folder, environment, token)
            # For `verdict`: now, as no rank waits for it, not hours later, when the installation may be another.
            import dlbench.records.comm
            import dlbench.records.scan  # noqa: F401

            ranks.wait(check, lambda: not what_became(folder) and not hang.reason())
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
        if is_local:
            ending = ranks.first_ending(folder.log)
        else:
            ending = ranks.first_ending(lambda _: folder.launch_log, killed_by_signal(folder))
        seen = None if ending is None else replace(ending, out_of_memory=memory.since())
        return verdict(folder, seen, ranks.stopped, given_up=hang.reason())


def require_launcher(system: SystemSpec, path: str | None = None) -> None:
    """Refuses a launcher whose program cannot start ranks, unless modules or setup lines may bring another.

    `path`: of the ranks; None: this process's. Raises `EnvironmentLacksError`: it is not on PATH, or is the mpirun of
    another MPI.
    """
    launcher = system.launch.launcher
    if launcher == "local" or system.modules or system.setup:
        return
    name = _program(launcher)
    program = shutil.which(name, path=path)
    if program is None:
        raise EnvironmentLacksError(f"launcher {launcher}: {name} is not on PATH")
    if launcher == "mpirun" and (why := refusal_of(program)):
        raise EnvironmentLacksError(f"launcher {launcher}: {why}")


def _program(launcher: LauncherName) -> str:
    return "" if launcher == "local" else launcher.partition("-")[0]


def _start(ranks: RankProcesses, plan: LaunchPlan, folder: RunFolder, environment: dict[str, str], token: str) -> None:
    words = start_command(plan, folder, sys.executable)
    if has_script(plan):
        write_atomic(folder.launch_script, render_run_script(plan, folder, sys.executable))
        words = shell_command(plan, folder.launch_script)
    if plan.system.launch.launcher == "local":
        for rank, variables in enumerate(launch.local_environments(plan, token)):
            ranks.start(words, {**environment, **resolve(variables)}, folder.log(rank))
        return
    if not has_script(plan):
        require_launcher(plan.system, environment.get("PATH"))
    ranks.start(launch.supervised(words, sys.executable), environment, folder.launch_log)
