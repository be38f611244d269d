"""Starts the ranks of a run on this machine, and determines its outcome. If one rank dies the others are ended. The
outcome is read from the files of the run: after one SIGKILL launchers' exit codes are 137, 1 or 143.
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
from dlbench.machine.cgroup import MemoryKills, total_bytes
from dlbench.machine.environment import refusal_of
from dlbench.machine.gpus import hidden_gpus, largest_memory_bytes
from dlbench.records.files import write_atomic
from dlbench.records.folder import RunFolder
from dlbench.records.job_log import killed_by_signal
from dlbench.records.status import Failure, RankStatus, first_cause, room_for_failure, write_failure
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import LauncherName
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import SystemSpec
from dlbench.units import counted, format_bytes, utc_now

if TYPE_CHECKING:  # Modules that read runs are imported after the ranks have started, which need none of them.
    from dlbench.records.record import QualityResult
    from dlbench.records.scan import LaunchedRun

# The best of five products, because other processes may compute, too. 1,024 is enough for a library's fastest kernel.
_PRODUCT = """
import json, time, numpy
matrix = numpy.ones((1024, 1024), numpy.float32)
def seconds():
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start
print(json.dumps(2 * 1024**3 / min(seconds() for _ in range(5))))
"""

_ANSWER_S = 20  # A machine that needs longer for these products is too busy to measure.

MARGIN_S = 60.0
"""Seconds beyond the stall timeout of the ranks: between their first status and their watchdogs they import torch."""

_POLL_S = 5.0  # Seconds between two reads of the statuses; rank 0 reports its step about as often.
_START_S = 120  # Seconds for Python to start and import dlbench; file systems of clusters are slow the first time.


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The result of a run."""

    exit_code: ExitCode
    detail: str  # Why it failed; empty if the record is valid.
    quality: str = ""  # Result of a valid run to a target quality, as text; empty for other runs.
    reached: bool = True  # Whether it reached its target; a valid run that did not reach it has not failed.
    throughput: float | None = None  # Samples per second of a valid training run, as in reports; else None.


def folder_problem(folder: RunFolder) -> str:
    """Returns what happened to a run's folder during the run; empty if nothing, or if the file system hangs."""
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
    """Returns the outcome of a run whose processes have ended. Raises nothing, so that a series continues. `ending`: of
    the process that failed first; None: none failed. `stopped`: processes on this machine that were in state T at that
    time. `given_up`: why the launcher ended ranks that hang; empty if it did not.
    """
    from dlbench.records.comm import read_launched
    from dlbench.records.scan import Run

    if problem := folder_problem(folder):
        detail = f"{folder.path} {problem} during the run: its ranks were ended, and it has no result"
        return RunOutcome(exit_code=ExitCode.RUN_FAILED, detail=detail)
    try:
        run = read_launched(folder.path)
    except DlbenchError as error:
        detail = str(error)
        if ending is not None:
            detail += f"; {ending.text}"
        return RunOutcome(exit_code=error.exit_code, detail=detail)
    if run.state == "valid":
        outcome = RunOutcome(exit_code=ExitCode.OK, detail="")
        if isinstance(run, Run) and run.record is not None:
            outcome = replace(outcome, throughput=run.record.throughput)
            if run.record.quality is not None:
                quality = run.record.quality
                outcome = replace(outcome, quality=_quality_text(quality), reached=quality.reached)
        return outcome
    if run.state == "interrupted":
        return RunOutcome(exit_code=ExitCode.REQUEUE, detail=run.detail)
    if run.state == "invalid":
        return RunOutcome(exit_code=ExitCode.RUN_FAILED, detail=f"invalid: {run.detail}")
    if given_up:
        hang = Failure(reason=given_up, at=utc_now(), stopped=_stopped_ranks(run, stopped))
        return replace(_failed(folder, run, hang), exit_code=ExitCode.TIMEOUT)
    outcome = _failed(folder, run, _observed_failure(run, ending, stopped))
    # With a full disk the status of the rank may not hold its exit code.
    if ending is not None and ending.rank is not None and ending.code == ExitCode.ENVIRONMENT:
        return replace(outcome, exit_code=ExitCode.ENVIRONMENT)
    return outcome


def _failed(folder: RunFolder, run: LaunchedRun, observed: Failure | None) -> RunOutcome:
    """Returns the outcome of a run without a record; `observed`: what the launcher knows beyond the ranks' statuses."""
    if observed is None:
        return RunOutcome(exit_code=_code(run), detail=run.detail)
    run = replace(run, failure=observed)
    detail = run.detail
    try:
        write_failure(folder, observed.reason, rank=observed.rank, at=observed.at, stopped=observed.stopped)
    except RunError as error:
        detail = f"{detail}; {error}"
    return RunOutcome(exit_code=_code(run), detail=detail)


def _observed_failure(run: LaunchedRun, ending: Ending | None, stopped: Collection[int]) -> Failure | None:
    stopped_ranks = _stopped_ranks(run, stopped)
    cause = first_cause(run.statuses)
    reason, rank, at = "", None, utc_now()
    if ending is None:
        if cause is None:
            reason = "the ranks ended without a record"
    else:
        at = ending.at
        if _precedes_cause(run, ending, cause):
            reason, rank = ending.text, ending.rank
        elif ending.out_of_memory:
            # A loader process, for which the rank knows only the signal.
            reason = f"the kernel's out-of-memory killer ended a process of the run's cgroup: {ending.out_of_memory}"
    if not reason and not stopped_ranks:
        return None
    return Failure(reason=reason, rank=rank, at=at, stopped=stopped_ranks)


def _stopped_ranks(run: LaunchedRun, stopped: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(status.rank for status in run.statuses if status.pid in stopped))


def _precedes_cause(run: LaunchedRun, ending: Ending, cause: RankStatus | None) -> bool:
    """Returns whether the end of a process explains the failure better than the cause that the statuses name."""
    if cause is None:
        return True
    if cause.failure == "own" and cause.exit_code is not None:
        # A later signal is a consequence of the rank's own failure: libraries abort when a peer is gone.
        return ending.by_signal and ending.at < (cause.failed_at or cause.updated)
    if ending.by_signal:
        return True
    failed_ranks = {status.rank for status in run.statuses if status.stage == "failed"}
    return ending.rank is not None and ending.rank not in failed_ranks


def _code(run: LaunchedRun) -> ExitCode:
    """Returns the exit code of the first cause; RUN_FAILED if a signal or the launcher ended the run."""
    cause = first_cause(run.statuses)
    if cause is None or cause.exit_code not in {int(code) for code in ExitCode if code != ExitCode.OK}:
        return ExitCode.RUN_FAILED
    was_ended = run.failure is not None and run.failure.rank is not None
    if was_ended and cause.failure != "stalled":
        return ExitCode.RUN_FAILED
    return ExitCode(cause.exit_code)


def _quality_text(result: QualityResult) -> str:
    target = f"{result.target:.6g} {result.metric}"
    if result.reached:
        return f"reached {target} after {result.samples_to_quality or 0:,} samples"
    if not result.evaluations:
        return f"did NOT reach {target}; it was never evaluated"
    last = result.evaluations[-1]
    value = "not finite" if last.value is None else f"{last.value:.4g}"
    return f"did NOT reach {target} within {last.samples:,} samples; the last evaluation is {value}"


__all__ = ["has_gpu", "hidden_gpus", "precision_problem", "product_rate"]


def memory_of_rank(plan: RunPlan) -> tuple[float | None, str]:
    """Returns the memory that each rank of a plan can have at most, bytes, and its source; None: it is not known."""
    system, ranks = plan.system, plan.layout.ranks_per_node
    if system.node.gpus and system.device is not None and system.device.memory_bytes is not None:
        return system.device.memory_bytes, f"device.memory_bytes of {system.name}"
    if system.scheduler != "none":
        return None, ""
    if has_gpu():
        return largest_memory_bytes(), "the largest GPU of this machine"
    machine_bytes = total_bytes()
    if machine_bytes is None:
        return None, ""
    source = f"memory of this machine, {format_bytes(machine_bytes)}, over {counted(ranks, 'rank')}"
    return machine_bytes / ranks, source


def precision_problem(plan: RunPlan) -> str:
    """Returns why this machine cannot run a plan in its precision; empty if it can, or if the ranks run elsewhere."""
    train = plan.workload.train
    if plan.system.scheduler != "none":
        return ""
    lack = lacking_arithmetic(train.precision)
    if lack and train.precision == "tf32":
        return f"train.precision tf32: {lack}, and there is none here; use fp32"
    if lack and not train.allow_emulation:
        return (
            f"train.precision {train.precision}: {lack}; use fp32, or train.allow_emulation=true to test its numerics"
        )
    return ""


def product_rate() -> float | None:
    """Measures the FLOP/s of an fp32 matrix product on one core, an upper bound for training; None if numpy fails."""
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
    """Detects that for longer than the stall timeout no rank has written a status or reported a step."""

    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._folder = folder
        assert isinstance(plan, RunPlan | CommPlan)
        limits = plan.measure if isinstance(plan, RunPlan) else plan
        self._limit_s = limits.stall_timeout_s + MARGIN_S
        self._newest_ns = 0  # Modification time of the newest status, by the clock of the file system.
        self._last_progress = time.monotonic()
        self._next_poll = 0.0

    def progressed(self) -> None:
        """Notes a report of rank 0; called from another thread."""
        self._last_progress = max(self._last_progress, time.monotonic())

    def reason(self) -> str:
        """Returns why the ranks hang; empty as long as they make progress."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_S
            # Modification times are compared only with each other: the file system may have another clock.
            newest_ns = self._newest_ns
            with suppress(OSError), os.scandir(self._folder.path) as entries:
                for entry in entries:
                    if entry.name.endswith(".status.json"):
                        with suppress(OSError):
                            newest_ns = max(newest_ns, entry.stat(follow_symlinks=False).st_mtime_ns)
            if newest_ns != self._newest_ns:
                self._newest_ns, self._last_progress = newest_ns, now
        silent_s = now - self._last_progress
        if silent_s <= self._limit_s:
            return ""
        return f"no rank made progress for {silent_s:.0f} s (stall_timeout_s and {MARGIN_S:.0f} s): all ranks hang"


def require_python(python: str) -> None:
    """Raises `EnvironmentLacksError` if a Python cannot be executed, or cannot import dlbench."""
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
        last_line = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        raise EnvironmentLacksError(
            f"python: {python}: cannot import dlbench (Python 3.11 or later is needed): {last_line}"
        )


def run(plan: LaunchPlan, folder: RunFolder, on_progress: OnProgress) -> RunOutcome:
    """Runs a plan on this machine with launcher `local` or `mpirun`, or with srun inside an allocation. Raises
    `EnvironmentLacksError`: the launcher or the ranks' Python cannot be executed. `UserError`: a variable that the plan
    refers to has no value. `KeyboardInterrupt`: after the ranks were ended and the interruption was recorded.
    """
    token = secrets.token_hex(8)
    is_local = plan.system.launch.launcher == "local"
    memory, hang = MemoryKills(), HangDetector(folder, plan)

    def report(step: int, num_steps: int, stage: str) -> None:
        hang.progressed()
        on_progress(step, num_steps, stage)

    def may_continue() -> bool:
        return not folder_problem(folder) and not hang.reason()

    ranks = RankProcesses(report, token, launcher=_program(plan.system.launch.launcher))
    environment = {**os.environ, "DLBENCH_PROGRESS": "launcher", **resolve(launch.rank_environment(plan))}
    # An allocation made with --export=NONE sets it, and mpirun's own srun would then pass no variables to other nodes.
    environment.pop("SLURM_EXPORT_ENV", None)
    with room_for_failure(folder), Interruption() as interruption:

        def check() -> None:
            interruption.check()
            if interruption.takes_stop():
                ranks.send_signal(signal.SIGUSR1)

        try:
            _start(ranks, plan, folder, environment, token)
            # `verdict` needs these modules. Hours later the installation might have changed.
            import dlbench.records.comm
            import dlbench.records.scan  # noqa: F401

            ranks.wait(check, may_continue)
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
            if not folder_problem(folder):
                raise
        finally:
            ranks.close(process_tree.temporary_places(environment))
        killed = killed_by_signal(folder) if not is_local else None
        ending = ranks.first_ending(killed)
        if ending is not None:
            ending = replace(ending, out_of_memory=memory.cause_of_kill())
        return verdict(folder, ending, ranks.stopped, given_up=hang.reason())


def require_launcher(system: SystemSpec, path: str | None = None) -> None:
    """Raises `EnvironmentLacksError` if the launcher is not on PATH, or is an mpirun other than Open MPI's."""
    launcher = system.launch.launcher
    if launcher == "local" or system.modules or system.setup:
        return
    name = _program(launcher)
    program = shutil.which(name, path=path)
    if program is None:
        raise EnvironmentLacksError(f"launcher {launcher}: {name} is not on PATH")
    if launcher == "mpirun" and (problem := refusal_of(program)):
        raise EnvironmentLacksError(f"launcher {launcher}: {problem}")


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
