"""A plan becomes the command that starts its ranks, a job a batch script and the sbatch command that submits it.

Pure: nothing is run, nothing is looked up.
"""

from __future__ import annotations

import os
import re
import site
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.scripts import containers
from dlbench.jobs.scripts.job import Job, render, shell_values
from dlbench.jobs.scripts.words import IN_SCRIPT, RunWords, joined, quoted, variable, words_of
from dlbench.opening import read_bytes, why_unreadable
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import VariableSource
from dlbench.specs.plan import YIELD, LaunchPlan, RunPlan, value_text
from dlbench.specs.series import side_words

MAX_BYTES = 64 * 1024  # Of a value from a file; Linux itself refuses a variable of 128 KiB.

UNBOUND = ("env", "-u", "SLURM_GPUS_PER_TASK", "-u", "SLURM_TRES_PER_TASK")
"""Before srun: its step does not take over the job's --gpus-per-task (the second variable: since Slurm 23.11)."""

TOKEN = "DLBENCH_LAUNCH_TOKEN"  # noqa: S105 (a variable's name)
"""Distinguishes the ranks of one start from those of another."""

_PLAIN = re.compile(r"[A-Za-z0-9._:,/@=+%&|*^\[\]()-]*")
_NEVER_A_LINE = re.compile(r"(?i)hetjob|packjob|--(quiet|verbose|ignore-pbs)\b")
"""sbatch takes the first two, anywhere in such a line, for the beginning of another job; the others it reads as
arguments alone (src/sbatch/opt.c of Slurm)."""


def resolve(given: Mapping[str, str | VariableSource], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Every variable with its value.

    `given`: texts, and references to where the text is. `variables`: the environment of dlbench itself.
    Raises `UserError`: a variable that is referred to is not set, or a file cannot be read; the line holds no value.
    """
    return {name: _value(name, source, variables) for name, source in given.items()}


def _value(name: str, source: str | VariableSource, variables: Mapping[str, str]) -> str:
    if isinstance(source, str):
        return source
    where = f"launch.environment.{name}"
    if source.file is not None:
        path = Path(source.file).expanduser()
        try:
            content = read_bytes(path, MAX_BYTES)
        except OSError as error:
            raise UserError(f"{where}: {path} {why_unreadable(error)}; it cannot be read") from None
        if b"\0" in content:
            raise UserError(f"{where}: {path} holds no value of a variable, but a NUL character")
        return os.fsdecode(content).rstrip("\n")
    assert source.variable is not None
    if source.variable not in variables:
        raise UserError(f"{where}: {source.variable} is not set where dlbench runs; export it, then run again")
    return variables[source.variable]


def has_script(plan: LaunchPlan) -> bool:
    """Whether a shell must come before the ranks."""
    system = plan.system
    return bool(system.modules or system.setup or system.slurm.login_shell or system.container.is_used)


def shell_command(plan: LaunchPlan, script: Path) -> list[str]:
    """What runs the script; the shell of a job."""
    return ["bash", *(["-l"] if plan.system.slurm.login_shell else []), str(script)]


def render_run_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """The exact text of `launch.sh`, which becomes what it starts last: a rank of launcher local, else the launcher.

    `python`: Python of the ranks, unless the system names another.
    """
    return render(
        "launch.sh.j2",
        plan=plan,
        variables=rank_environment(plan),
        command=f"exec {quoted(start_command(plan, folder, python))}",
        is_rank=plan.system.launch.launcher == "local",
        is_job=False,
    )


def start_command(plan: LaunchPlan, folder: RunFolder, python: str) -> list[str]:
    """What starts one rank under launcher local, else all of them; arguments as `render_run_script`."""
    own = plan.system.python or python
    of_ranks = containers.python_of(plan, own)
    words = words_of(folder)
    if plan.system.launch.launcher == "local":
        command = node_command(words.plan, of_ranks)
        runtime = containers.in_container(plan, words.folder)
        # A container is under a supervisor of its own, which ends the container's runtime.
        return supervised([*runtime, *command], own) if runtime else command
    return launcher_command(plan, words, of_ranks)


def sbatch_options(
    plan: LaunchPlan, *, job_name: str | None = None, time_limit: str | None = None, warn_script: bool = False
) -> list[str]:
    """Every option that the plan and its system decide; where a job runs and what it writes to is not among them.

    `plan`: of the run; of a job with several runs, of its largest. `job_name`: another name than the plan's.
    `time_limit`: another than the system's, as Slurm writes it. `warn_script`: the warning before the end of the job's
    time goes to its script, not to its steps.
    """
    layout, slurm = plan.layout, plan.system.slurm
    options = [
        f"--job-name={plan.job_name if job_name is None else job_name}",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
    ]
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    options.append(f"--time={slurm.time_limit if time_limit is None else time_limit}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude"):
        value = getattr(slurm, name)
        if value is not None:
            options.append(f"--{name}={value}")
    options += _resources(plan)
    if slurm.exclusive:
        options.append("--exclusive")
    options += threading_options(plan)
    options += [f"--{option}" for option in slurm.extra]
    # All that sbatch is given, which is little: see `dlbench.jobs.slurm.scheduler`. Unlike NIL and a list of names,
    # every version of Slurm reads ALL alike, and runs no login shell on the node for it.
    options.append("--export=ALL")
    # The tasks of mpirun's steps are daemons, which get no signal: only mpirun itself passes one on.
    if slurm.warning_s and (warn_script or plan.system.launch.launcher != "mpirun"):
        options.append(f"--signal={'B:' if warn_script else ''}USR1@{slurm.warning_s}")
    requeue = "--requeue" if slurm.requeue else "--no-requeue"
    return [*options, requeue, "--open-mode=append"]


def threading_options(plan: LaunchPlan) -> list[str]:
    """What sbatch and srun are both given on the threads of a core."""
    slurm = plan.system.slurm
    hint = [] if slurm.hint is None else [f"--hint={slurm.hint}"]
    return hint + ([] if slurm.threads_per_core is None else [f"--threads-per-core={slurm.threads_per_core}"])


def _gpus_per_node(plan: LaunchPlan) -> str:
    slurm = plan.system.slurm
    typed = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    count = plan.system.node.gpus if slurm.gpu_count == "node" else plan.layout.ranks_per_node
    return f"{typed}{count}"


def _resources(plan: LaunchPlan) -> list[str]:
    slurm = plan.system.slurm
    gres = [f"gpu:{_gpus_per_node(plan)}"] if slurm.gpu_request == "gres" else []
    gres += [] if slurm.gres is None else [slurm.gres]
    options = [f"--gres={','.join(gres)}"] if gres else []
    if slurm.gpu_request == "gpus-per-node":
        options.append(f"--gpus-per-node={_gpus_per_node(plan)}")
    elif slurm.gpu_request == "gpus-per-task":
        typed = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        options.append(f"--gpus-per-task={typed}1")
    if slurm.cpus_per_gpu is not None:
        options.append(f"--cpus-per-gpu={slurm.cpus_per_gpu}")
    if slurm.mem_per_gpu is not None:
        options.append(f"--mem-per-gpu={slurm.mem_per_gpu}")
    elif slurm.memory is not None:
        options.append(f"--mem={slurm.memory}")
    return options


def srun_options(plan: LaunchPlan) -> list[str]:
    """Every option of the step that a plan's ranks are.

    A dead rank ends the step, which srun does not do by itself. Each line of output begins with its rank's number.
    Whatever export policy the allocation was made with, ranks get what the script has.

    Ranks go in blocks over nodes and over the sockets of a node (srun(1), --distribution): neighbours share a socket,
    as the GPUs of neighbouring numbers mostly do. Slurm alone would deal them out over the sockets in turn.

    GPUs are not bound to ranks: a bound rank cannot open the others', and NCCL goes by the host's memory. Each rank
    takes its own by its place on the node. Without --gpu-bind Slurm shows each rank all GPUs that the step has on its
    node. --gpu-bind=none is not given: for steps of two tasks or more it unsets CUDA_VISIBLE_DEVICES (seen with Slurm
    22.05), which shows ranks the GPUs of other jobs where the site does not constrain devices.
    """
    layout, launch, slurm = plan.layout, plan.system.launch, plan.system.slurm
    options = [
        f"--mpi={launch.mpi_plugin if launch.launcher == 'srun-mpi' else 'none'}",
        "--kill-on-bad-exit=1",
        "--label",
        "--export=ALL",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
        # Not the run's folder: a process that dies leaves its core where it is.
        "--chdir=/",
    ]
    if slurm.distribution != "site":
        options.append(f"--distribution={slurm.distribution}")
    if slurm.gpu_request != "none" and slurm.gpu_bind not in ("none", "site"):
        options.append(f"--gpu-bind={slurm.gpu_bind}")
    if _unbinds_tasks(plan):
        options.append(f"--gpus-per-node={_gpus_per_node(plan)}")
    for name, value in (("cpu-bind", slurm.cpu_bind), ("mem-bind", slurm.mem_bind)):
        if value is not None:
            options.append(f"--{name}={value}")
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    return [*options, *threading_options(plan), *(f"--{option}" for option in slurm.srun_args)]


def _unbinds_tasks(plan: LaunchPlan) -> bool:
    """Returns whether the step asks for its GPUs per node, because one per task would bind them (srun(1))."""
    return plan.system.slurm.gpu_request == "gpus-per-task" and plan.system.slurm.gpu_bind == "none"


def node_command(plan_file: str, python: str) -> list[str]:
    """What every rank executes: a supervisor, which runs the rank and ends all that it started (dlbench.supervisor).

    With -P no module is taken from the working directory.
    """
    return [python, "-P", "-m", "dlbench.supervisor", "-m", "dlbench.node", plan_file]


def supervised(launcher_command: list[str], python: str) -> list[str]:
    """The command of mpirun or srun under a supervisor, as `dlbench run` starts it."""
    return [python, "-P", "-m", "dlbench.supervisor", "--launcher", *launcher_command]


def rank_environment(plan: LaunchPlan) -> dict[str, str | VariableSource]:
    """Variables that every rank gets, whatever starts it; of those given by reference, where their values are."""
    # A rank's output must be in its log when it dies.
    variables: dict[str, str | VariableSource] = {"PYTHONUNBUFFERED": "1"}
    # Python leaves shared folders alone where no module is to come from: see python(1). Ranks on this machine alone are
    # few, and keep what they compile for the next start.
    if plan.system.launch.launcher != "local":
        variables |= {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if Path(site.getusersitepackages()) not in Path(__file__).parents:
            variables["PYTHONNOUSERSITE"] = "1"
    variables |= containers.facts(plan)
    if plan.yields:
        # Open MPI spins while it waits; with more ranks than cores that starves the one it waits for.
        variables[YIELD] = "1"
    if plan.system.launch.by_mpi and plan.layout.nodes == 1:
        # Ranks of one node share memory; Open MPI's TCP and OFI transports would listen all the same.
        variables["OMPI_MCA_btl"] = "^tcp,ofi"
    # What the site says has the last word.
    return {**variables, **plan.system.launch.environment}


def local_environments(plan: LaunchPlan, token: str) -> list[dict[str, str | VariableSource]]:
    """For each rank of launcher `local`, the variables by which it knows its place."""
    return [
        {
            **rank_environment(plan),
            "DLBENCH_RANK": str(rank),
            "DLBENCH_WORLD_SIZE": str(plan.layout.ranks),
            "DLBENCH_LOCAL_RANK": str(rank),
            TOKEN: token,
        }
        for rank in range(plan.layout.ranks)
    ]


def _mpirun(plan: LaunchPlan, hosts: str) -> list[str]:
    """Open MPI's mpirun; ranks pin themselves, so it must not.

    Variables are named and their values left to mpirun's own environment: everybody may read a command line.

    Under Slurm a node has as many slots as tasks were asked for, one for each rank. Elsewhere it has as many as
    physical cores, and a host that is named has one (mpirun(1)): there more must be allowed.
    """
    exports = [part for name in sorted([*rank_environment(plan), TOKEN]) for part in ("-x", name)]
    mapping = f"ppr:{plan.layout.ranks_per_node}:node"
    if plan.system.scheduler == "none" or plan.layout.shares_cores or hosts:
        mapping += ":OVERSUBSCRIBE"
    return [
        *("mpirun", "-np", str(plan.layout.ranks), "--map-by", mapping, "--bind-to", "none"),
        *(("--host", hosts) if hosts else ()),
        *exports,
    ]


def before_rank(plan: LaunchPlan, run: RunWords, hosts: str = "") -> list[str]:
    """What comes before a rank's own command: the plan's launcher, which is not `local`, and a container's runtime.

    `hosts`: names of its nodes with commas between them; empty: all nodes of the allocation.
    """
    in_container = containers.in_container(plan, run.folder)
    if plan.system.launch.launcher == "mpirun":
        return [*_mpirun(plan, hosts), *in_container]
    nodes = [joined("--nodelist=", hosts)] if hosts else []
    return [
        *(UNBOUND if _unbinds_tasks(plan) else ()),
        *containers.before_launcher(plan),
        # By its name, which is the run's, accounting finds the step again.
        *("srun", joined("--job-name=", run.run_id), *srun_options(plan), *nodes),
        *containers.srun_words(plan, run.folder),
        *in_container,
    ]


def launcher_command(plan: LaunchPlan, run: RunWords, python: str, hosts: str = "") -> list[str]:
    """The command that starts all ranks. `python`: of the ranks; other arguments as `before_rank`."""
    return [*before_rank(plan, run, hosts), *node_command(run.plan, python)]


def render_job(job: Job, folders: Sequence[RunFolder], python: str, comment: str = "") -> str:
    """The exact text of `job.sbatch`, for one run or several.

    `job`: the runs; their system must have a scheduler. `folders`: where each run lives, absolute, in the same order.
    `python`: Python of the compute nodes, unless the system names another. `comment`: by which the job is found again;
    empty: none.
    """
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    ways = _ways(job, python)
    record = folders[0].record if isinstance(plan, RunPlan) else folders[0].comm
    words = {plan.series.side: side_words(plan) for plan in job.plans if isinstance(plan, RunPlan) and plan.series.side}
    swept: dict[str, list[str]] = {}
    for run in job.plans:
        if isinstance(run, RunPlan):
            for key, value in run.series.named.items():
                swept.setdefault(key, []).append(value_text(key, value))
    swept_text = ", ".join(f"{key}={','.join(dict.fromkeys(values))}" for key, values in swept.items())
    return render(
        "job.sbatch.j2",
        plan=plan,
        slurm=plan.system.slurm,
        **told_options(job, folders[0], comment),
        **shell_values(job),
        what=_what(job),
        place={"series": plan.series.id, "swept": swept_text},
        sides=[{"name": side, "words": words[side]} for side in sorted(words)],
        configurations=list({way["name"]: way for way in ways}.values()),
        runs=[{"configuration": way["name"], "folder": folder.path} for way, folder in zip(ways, folders, strict=True)],
        record=record.name,
        is_array=job.is_array,
        passes_warning_on=job.passes_warning_on,
        is_job=True,
    )


def _what(job: Job) -> str:
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    if len(job.plans) == 1:
        return f"repeat {plan.series.repeat + 1} of {plan.series.repeats}: {plan.title}"
    name = f"{plan.workload.name} ({plan.workload.preset})" if isinstance(plan, RunPlan) else plan.title
    how = "one in each job of an array" if job.is_array else "one after the other on the same nodes"
    return f"{len(job.plans)} runs of {name}, {how}"


def _ways(job: Job, python: str) -> list[dict[str, object]]:
    named: dict[str, dict[str, object]] = {}
    ways = []
    for plan in job.plans:
        is_part = not job.is_array and plan.layout.nodes < job.shape.layout.nodes
        hosts = variable("dlbench_hosts") if is_part else ""
        words = launcher_command(plan, IN_SCRIPT, containers.python_of(plan, python), hosts)
        way = {
            "plan": plan,
            "is_part": is_part,
            "variables": rank_environment(plan),
            # In place of the shell: the process that the script signals is the launcher.
            "command": ("exec " if job.passes_warning_on else "") + quoted(words),
        }
        # Whatever of a plan reaches its part of the script.
        text = f"{is_part} {plan.layout.nodes} {render('environment.j2', is_job=True, **way)}"
        if text not in named:
            named[text] = {**way, "name": _name(plan, [*named.values()]), "whose": _whose(job, plan)}
        ways.append(named[text])
    if len(named) == 1:
        ways[0] |= {"name": "start", "whose": ""}
    return ways


def _name(plan: LaunchPlan, others: Sequence[Mapping[str, object]]) -> str:
    name = f"start_{plan.series.side}" if isinstance(plan, RunPlan) and plan.series.side else ""
    return name if name and all(name != other["name"] for other in others) else f"start_{len(others) + 1}"


def _whose(job: Job, plan: LaunchPlan) -> str:
    layout = plan.layout
    parts = []
    if len({(one.layout.nodes, one.layout.ranks) for one in job.plans}) > 1:
        parts.append(f"{layout.nodes} node{'s' * (layout.nodes > 1)}, {layout.ranks} rank{'s' * (layout.ranks > 1)}")
    if isinstance(plan, RunPlan) and plan.series.side:
        parts.append(f"Side {plan.series.side}")
    elif isinstance(plan, RunPlan):
        of_system = {key: value for key, value in plan.series.axes.items() if key.startswith("system.")}
        parts += [f"{key}={value_text(key, value)}" for key, value in of_system.items()]
    return f"{', '.join(parts)}. " if parts else ""


def _options(job: Job, folder: RunFolder, comment: str) -> list[str]:
    # In the path of --output Slurm expands percent signs.
    output = f"{str(folder.path).replace('%', '%%')}/slurm-{'%A_%a' if job.is_array else '%j'}.out"
    options = sbatch_options(job.shape, job_name=job.name, time_limit=job.time_limit, warn_script=job.passes_warning_on)
    options += [f"--chdir={folder.path}", f"--output={output}"]
    if job.array_limit is not None:
        options.append(f"--array=1-{len(job.plans)}{f'%{job.array_limit}' if job.array_limit else ''}")
    # A comment of the site's, of the system file, is not replaced.
    is_free = not any(option.startswith("comment=") for option in job.shape.system.slurm.extra)
    return [*options, *([f"--comment={comment}"] if comment and is_free else [])]


def directive(option: str) -> str:
    """An option as it stands after `#SBATCH`; empty where it cannot.

    Inside of double quotes sbatch takes all as it is but a backslash, which escapes (`_get_argument` of its opt.c).
    """
    if not option.isprintable() or _NEVER_A_LINE.search(option):
        return ""
    name, equals, value = option.partition("=")
    if _PLAIN.fullmatch(value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def told_options(job: Job, folder: RunFolder, comment: str = "") -> dict[str, list[str]]:
    """What the script says of a job's options: `directives`, and `arguments` that no directive can hold.

    Arguments as of `sbatch_arguments`.
    """
    stated = [(option, directive(option)) for option in _options(job, folder, comment)]
    return {
        "directives": [line for _, line in stated if line],
        "arguments": [option for option, line in stated if not line],
    }


def sbatch_arguments(job: Job, folder: RunFolder, after: str | None = None, comment: str = "") -> list[str]:
    """The command that submits a job's script, which holds all options but these.

    `folder`: that of its first run, absolute. `after`: id of the job that must have ended before this one begins; runs
    of a series would disturb each other on shared switches and file systems.
    """
    arguments = ["sbatch", "--parsable", *told_options(job, folder, comment)["arguments"]]
    if after is not None:
        arguments.append(f"--dependency=afterany:{after}")
    return [*arguments, str(folder.script)]
