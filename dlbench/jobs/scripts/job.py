"""A job, the runs that one sbatch submits, and the resources that it requests; nothing is run here. In the templates of
`slurm/` undefined names are errors, and text from outside passes through a filter: `sh` quotes it as one word,
`comment` turns it into one line of printable characters.
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
from dlbench.machine.environment import FOREIGN, REMEDY
from dlbench.specs.launch import OF_SRUN, SlurmSpec
from dlbench.specs.plan import LaunchPlan, RunPlan, job_label
from dlbench.units import printable

if TYPE_CHECKING:
    import jinja2

_NOT_ASKED = OF_SRUN | {"max_time", "time_limit"}
"""Keys of `SlurmSpec` that are not options of sbatch, or that a job sums over its runs."""

PLAIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # Bash's default.

SUBMITTED = "DLBENCH_SUBMITTED"
"""Tells the job script that `dlbench submit` has removed the other variables of the submitting shell."""

_OF_SRUN = """
    ACCOUNT BCAST BCAST_EXCLUDE BURST_BUFFER COMPRESS CONSTRAINT CORE_SPEC DEBUG DEBUG_FLAGS DELAY_BOOT DEPENDENCY
    DISABLE_STATUS EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GRES GRES_FLAGS IMMEDIATE KILL_BAD_EXIT
    LABELIO MPI_TYPE NO_KILL OVERLAP PARTITION PMI_KVS_NO_DUP_KEYS POWER PROLOG QOS REMOTE_CWD REQ_SWITCH RESERVATION
    RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB STDERRMODE STDINMODE STDOUTMODE TASK_EPILOG TASK_PROLOG TEST_EXEC THREADS
    THREAD_SPEC TIMELIMIT UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR
"""
"""Variables SLURM_* that set options of srun and that sbatch does not set for a job: srun(1), INPUT ENVIRONMENT
VARIABLES, of Slurm 22.05, without those that describe a step, the job or the cluster."""

_WITH_OPTION = {
    "ACCTG_FREQ": "acctg-freq",
    "CPU_FREQ_REQ": "cpu-freq",
    "HINT": "hint",
    "MEM_BIND*": "mem-bind",
    "NETWORK": "network",
    "PROFILE": "profile",
}
"""More such variables with their options: sbatch sets one of these if the job has the option."""


def render(template: str, **values: object) -> str:
    """Renders a template of the bundled folder `slurm/`. Raises `jinja2.UndefinedError`: a name in it has no value."""
    return _environment(bundled.folder("slurm")).get_template(template).render(**values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2  # slow, and ranks that start without a script do not need it

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
    environment.filters["comment"] = lambda value: printable(str(value))[:200]
    return environment


@dataclass(frozen=True, kw_only=True)
class Job:
    """Runs that are submitted together: one after the other in one allocation, or as elements of a job array."""

    plans: tuple[LaunchPlan, ...]  # At least one, in the order in which they run.
    time_limit: str  # Time limit of all runs, or of each element of an array, as Slurm writes it.
    array_limit: int | None = None
    """None: one allocation for all. Else a job array with at most this many elements running; 0: no maximum."""

    @property
    def is_array(self) -> bool:
        """True if each run has its own allocation."""
        return self.array_limit is not None

    @property
    def num_elements(self) -> int:
        """Number of jobs in the queue: the elements of an array, else 1."""
        return len(self.plans) if self.is_array else 1

    @property
    def shape(self) -> LaunchPlan:
        """The plan with the most nodes and ranks, whose resources the job requests."""
        return max(self.plans, key=lambda plan: (plan.layout.nodes, plan.layout.ranks))

    @property
    def passes_warning_on(self) -> bool:
        """True if Slurm warns the script, not the steps: the tasks of mpirun's step are daemons, which ignore it."""
        by_mpirun = any(plan.system.launch.launcher == "mpirun" for plan in self.plans)
        return by_mpirun and self.shape.system.slurm.warning_s > 0

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(plan.run_id for plan in self.plans)

    @property
    def node_hours(self) -> float | None:
        """Nodes times the time limit, summed over the elements of an array; None without a time limit."""
        seconds = limit_seconds(self.time_limit) * self.num_elements
        return self.shape.layout.nodes * seconds / 3600 if seconds else None

    @property
    def name(self) -> str:
        """Name of the job in Slurm's queue."""
        shape = self.shape
        if len(self.plans) == 1 or (isinstance(shape, RunPlan) and shape.series.side):
            return shape.job_name
        return job_label(shape.word, shape.layout, {}, f"{len(self.plans)}runs")


def requested(plan: LaunchPlan) -> Iterator[tuple[str, object]]:
    """Yields the keys of a plan that decide the options of sbatch, with their values, except nodes, ranks and time."""
    for name in SlurmSpec.model_fields:
        if name not in _NOT_ASKED:
            yield f"system.slurm.{name}", getattr(plan.system.slurm, name)
    cores: int | None = None  # Unless sbatch gets --cpus-per-task, runs of one job may differ.
    if plan.system.slurm.cpus_per_task:
        cores = plan.layout.cores_per_rank
    yield "layout.cores_per_rank", cores


def let_through(plans: Sequence[LaunchPlan]) -> set[str]:
    """Returns the names of the submitting shell's variables that a job gets; slurm.export is equal for all plans."""
    names = {*plans[0].system.slurm.export, "HOME", "USER", "LOGNAME", "SHELL"}
    for plan in plans:
        for source in plan.system.launch.environment.values():
            if not isinstance(source, str) and source.variable:
                names.add(source.variable)
    return names


def shell_values(job: Job) -> dict[str, object]:
    """Returns the values for the template `shell.j2`."""
    slurm = job.plans[0].system.slurm
    granted = containers.GRANTED if slurm.gpu_request != "none" else ()
    names = let_through(job.plans)
    # Variables in the paths of storage tiers are set by the nodes.
    for plan in job.plans:
        for path in (plan.system.storage.local.path, plan.system.storage.memory.path):
            names.update(name for name in containers.VARIABLE.findall(path) if name != "TMPDIR")
    names.difference_update(granted)
    options = {word.partition("=")[0] for word in slurm.extra}
    if slurm.hint:
        options.add("hint")
    of_srun = [*_OF_SRUN.split(), *(name for name, option in _WITH_OPTION.items() if option not in options)]
    if slurm.memory is not None:  # else Slurm may set it to the site's default
        of_srun.append("MEM_PER_CPU")
    return {
        # The template has patterns for Slurm's variables already.
        "kept": sorted(name for name in names if not name.startswith(("SLURM", "SPANK_"))),
        "granted": granted,
        "of_srun": [f"SLURM_{name}" for name in of_srun],
        "plain_path": PLAIN_PATH,
        "submitted": SUBMITTED,
    }


def time_text(seconds: int) -> str:
    """Returns seconds as a time limit of Slurm, ``HH:MM:SS`` or ``D-HH:MM:SS``."""
    clock = f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{seconds // 86400}-{clock}" if seconds >= 86400 else clock


def limit_seconds(limit: str) -> int:
    """Returns a time limit of Slurm, such as `90`, `1:30:00` or `1-12` (sbatch(1), --time), in seconds."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
