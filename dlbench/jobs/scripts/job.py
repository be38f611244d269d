"""A job: the runs that one sbatch takes to Slurm, and what it asks for. Pure.

In templates of `slurm/` undefined names are errors, and text from outside goes through a filter: `sh` makes one word of
it, `comment` what may stand in a comment: one line of printable characters.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench import bundled
from dlbench.jobs.scripts import containers
from dlbench.machine.mpi import FOREIGN, REMEDY
from dlbench.specs.launch import OF_SRUN, SlurmSpec
from dlbench.specs.plan import LaunchPlan, RunPlan, job_label

if TYPE_CHECKING:
    import jinja2

_NOT_ASKED = OF_SRUN | {"max_time", "time_limit"}
"""Keys of `SlurmSpec` that sbatch never sees, or of which a job has the sum over its runs."""

PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # As bash has it by default.

SUBMITTED = "DLBENCH_SUBMITTED"
"""Says to a job's script that it got no other variable of the submitting shell than those let through."""

_OF_SRUN = """
    ACCOUNT BCAST BCAST_EXCLUDE BURST_BUFFER COMPRESS CONSTRAINT CORE_SPEC DEBUG DEBUG_FLAGS DELAY_BOOT DEPENDENCY
    DISABLE_STATUS EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GRES GRES_FLAGS IMMEDIATE KILL_BAD_EXIT
    LABELIO MPI_TYPE NO_KILL OVERLAP PARTITION PMI_KVS_NO_DUP_KEYS POWER PROLOG QOS REMOTE_CWD REQ_SWITCH RESERVATION
    RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB STDERRMODE STDINMODE STDOUTMODE TASK_EPILOG TASK_PROLOG TEST_EXEC THREADS
    THREAD_SPEC TIMELIMIT UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR
"""
"""Variables SLURM_* by which srun takes options, and which sbatch does not set for a job: srun(1), INPUT ENVIRONMENT
VARIABLES, of Slurm 22.05, without those of a step, of the job, and by which the cluster is reached."""

_WITH_OPTION = {
    "ACCTG_FREQ": "acctg-freq",
    "CPU_FREQ_REQ": "cpu-freq",
    "HINT": "hint",
    "MEM_BIND*": "mem-bind",
    "NETWORK": "network",
    "PROFILE": "profile",
}
"""More of them, which sbatch sets where the job is given that option."""


def render(template: str, **values: object) -> str:
    """A template of the bundled folder `slurm/`, filled in.

    Raises `jinja2.UndefinedError`: the template uses a name that was not given (a defect of dlbench).
    """
    return _environment(bundled.folder("slurm")).get_template(template).render(**values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # ranks that start without a script need none

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701  (shell and slurm.conf, not HTML; free text goes through the filter below)
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"foreign_mpirun": FOREIGN, "mpirun_remedy": REMEDY}
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = lambda value: "".join(c if c.isprintable() else " " for c in str(value))[:200]
    return environment


@dataclass(frozen=True, kw_only=True)
class Job:
    """Runs that go to Slurm together.

    One after the other in one allocation; or each in an allocation of its own, as the elements of a job array.
    """

    plans: tuple[LaunchPlan, ...]  # At least one, in the order in which they run.
    time_limit: str  # What sbatch is asked for, as Slurm writes it: of all runs, in an array of each.
    array_limit: int | None = None
    """None: one allocation for all. Else an array, of which that many run at a time at most; 0: any number."""

    @property
    def is_array(self) -> bool:
        """Whether each run has an allocation of its own."""
        return self.array_limit is not None

    @property
    def shape(self) -> LaunchPlan:
        """The plan that decides what is asked for: one of the most nodes and ranks; smaller ones run inside."""
        return max(self.plans, key=lambda plan: (plan.layout.nodes, plan.layout.ranks))

    @property
    def passes_warning_on(self) -> bool:
        """Whether the warning before the end of its time goes to its script, which signals what starts the ranks.

        Slurm signals the tasks of steps otherwise; those of mpirun's steps are daemons, which pass nothing on.
        """
        by_mpirun = any(plan.system.launch.launcher == "mpirun" for plan in self.plans)
        return by_mpirun and self.shape.system.slurm.warning_s > 0

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(plan.run_id for plan in self.plans)

    @property
    def node_hours(self) -> float | None:
        """Nodes times the time limit, all elements of an array together; None where the limit is none."""
        seconds = limit_seconds(self.time_limit) * (len(self.plans) if self.is_array else 1)
        return self.shape.layout.nodes * seconds / 3600 if seconds else None

    @property
    def name(self) -> str:
        """Its name in Slurm's queue, of safe characters."""
        shape = self.shape
        if len(self.plans) == 1 or (isinstance(shape, RunPlan) and shape.series.side):
            return shape.job_name
        return job_label(shape.word, shape.layout, {}, f"{len(self.plans)}runs")


def requested(plan: LaunchPlan) -> Iterator[tuple[str, object]]:
    """All that decides what a plan asks sbatch for, but for nodes, ranks and time, by the keys of the plan."""
    for name in SlurmSpec.model_fields:
        if name not in _NOT_ASKED:
            yield f"system.slurm.{name}", getattr(plan.system.slurm, name)
    # Where Slurm does not know, runs of one job may differ.
    yield "layout.cores_per_rank", plan.layout.cores_per_rank if plan.system.slurm.cpus_per_task else None


def let_through(plans: Sequence[LaunchPlan]) -> set[str]:
    """Names of the submitting shell's variables that a job of these plans gets: all let the same through."""
    given = [source for plan in plans for source in plan.system.launch.environment.values()]
    referenced = {source.variable for source in given if not isinstance(source, str) and source.variable}
    return {*plans[0].system.slurm.export, *referenced, "HOME", "USER", "LOGNAME", "SHELL"}


def shell_values(job: Job) -> dict[str, object]:
    """What the script's part for variables of the submitting shell is filled in with."""
    systems = [plan.system for plan in job.plans]
    # Nodes set what stands in their paths.
    paths = [path for one in systems for path in (one.storage.local.path, one.storage.memory.path)]
    of_paths = {name for path in paths for name in containers.VARIABLE.findall(path)}
    granted = containers.GRANTED if systems[0].slurm.gpu_request != "none" else ()
    slurm = systems[0].slurm
    asked = {word.partition("=")[0] for word in slurm.extra} | ({"hint"} if slurm.hint else set())
    of_srun = [*_OF_SRUN.split(), *(name for name, option in _WITH_OPTION.items() if option not in asked)]
    if slurm.memory is not None:  # else Slurm may set it, by the site's default
        of_srun.append("MEM_PER_CPU")
    others = (let_through(job.plans) | (of_paths - {"TMPDIR"})) - {*granted}
    return {
        # Patterns that the template has anyway would match first.
        "kept": sorted(name for name in others if not name.startswith(("SLURM", "SPANK_"))),
        "granted": granted,
        "of_srun": [f"SLURM_{name}" for name in of_srun],
        "plain_path": PLAIN_PATH,
        "submitted": SUBMITTED,
    }


def time_text(seconds: int) -> str:
    """Seconds as Slurm writes a time limit."""
    clock = f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{seconds // 86400}-{clock}" if seconds >= 86400 else clock


def limit_seconds(limit: str) -> int:
    """A time limit in seconds.

    `limit`: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` or
    `days-hours:minutes:seconds` (sbatch(1), --time).
    """
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
