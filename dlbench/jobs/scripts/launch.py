"""Builds the commands that start the ranks of a plan, a job's batch script and its sbatch command; runs nothing."""

from __future__ import annotations

import os
import re
import site
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.scripts import containers
from dlbench.jobs.scripts.containers import IN_SCRIPT, RunWords, joined, quoted, variable, words_of
from dlbench.jobs.scripts.job import Job, render, shell_values
from dlbench.opening import read_bytes, why_unreadable
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import VariableSource
from dlbench.specs.plan import YIELD, LaunchPlan, RunPlan, value_text
from dlbench.specs.series import side_words
from dlbench.units import counted

MAX_BYTES = 64 * 1024  # Largest value of a variable from a file; Linux itself refuses 128 KiB.

UNBOUND = ("env", "-u", "SLURM_GPUS_PER_TASK", "-u", "SLURM_TRES_PER_TASK")
"""Keeps srun's step from inheriting the job's --gpus-per-task (the second variable: since Slurm 23.11)."""

TOKEN = "DLBENCH_LAUNCH_TOKEN"  # noqa: S105 (a variable's name)
"""Distinguishes the ranks of one start from those of another."""

_PLAIN = re.compile(r"[A-Za-z0-9._:,/@=+%&|*^\[\]()-]*")
_NEVER_A_LINE = re.compile(r"(?i)hetjob|packjob|--(quiet|verbose|ignore-pbs)\b")
"""Options that cannot be #SBATCH lines: the first two begin a new job component anywhere in a line, the others are read
only as arguments (src/sbatch/opt.c of Slurm)."""


def resolve(sources: Mapping[str, str | VariableSource], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the values of variables. Raises `UserError`: a reference has no value; the message contains none."""
    return {name: _value(name, source, variables) for name, source in sources.items()}


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
            raise UserError(f"{where}: {path} contains a NUL character and cannot be the value of a variable")
        return os.fsdecode(content).rstrip("\n")
    assert source.variable is not None
    if source.variable not in variables:
        raise UserError(f"{where}: {source.variable} is not set where dlbench runs; export it, then run again")
    return variables[source.variable]


def has_script(plan: LaunchPlan) -> bool:
    """Returns whether a shell script must start the ranks."""
    system = plan.system
    return bool(system.modules or system.setup or system.slurm.login_shell or system.container.is_used)


def shell_command(plan: LaunchPlan, script: Path) -> list[str]:
    """Returns the command that runs a script in the shell that a job would use."""
    if plan.system.slurm.login_shell:
        return ["bash", "-l", str(script)]
    return ["bash", str(script)]


def render_run_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """Returns the text of `launch.sh`, which execs a rank (launcher local) or the launcher."""
    return render(
        "launch.sh.j2",
        plan=plan,
        variables=rank_environment(plan),
        command=f"exec {quoted(start_command(plan, folder, python))}",
        is_rank=plan.system.launch.launcher == "local",
        is_job=False,
    )


def start_command(plan: LaunchPlan, folder: RunFolder, python: str) -> list[str]:
    """Returns the command that starts one rank (launcher local) or all of them; arguments as `render_run_script`."""
    host_python = plan.system.python or python
    rank_python = containers.python_of(plan, host_python)
    words = words_of(folder)
    if plan.system.launch.launcher != "local":
        return launcher_command(plan, words, rank_python)
    command = node_command(words.plan, rank_python)
    runtime = containers.in_container(plan, words.folder)
    if runtime:
        # A second supervisor outside of the container ends its runtime.
        return supervised([*runtime, *command], host_python)
    return command


def sbatch_options(
    plan: LaunchPlan, *, job_name: str = "", time_limit: str = "", warn_script: bool = False
) -> list[str]:
    """Returns the options of sbatch that a plan (the largest of a job) and its system decide, without --chdir, --output
    and --comment. `job_name`, `time_limit`: in place of those of the plan and its system. `warn_script`: Slurm's
    warning before the time limit goes to the script, not to its steps.
    """
    layout, slurm = plan.layout, plan.system.slurm
    options = [
        f"--job-name={job_name or plan.job_name}",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
    ]
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    options.append(f"--time={time_limit or slurm.time_limit}")
    names = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")
    options += [f"--{name}={getattr(slurm, name)}" for name in names if getattr(slurm, name) is not None]
    options += _resources(plan)
    if slurm.exclusive:
        options.append("--exclusive")
    options += threading_options(plan)
    options += [f"--{option}" for option in slurm.extra]
    # Exports the environment of sbatch, which is small (`dlbench.jobs.slurm.environment`). All versions of Slurm agree
    # on ALL, but not on NIL and lists of names, for which some run a login shell on the node.
    options.append("--export=ALL")
    if slurm.warning_s and warn_script:
        options.append(f"--signal=B:USR1@{slurm.warning_s}")
    elif slurm.warning_s and plan.system.launch.launcher != "mpirun":  # the tasks of mpirun's steps are daemons
        options.append(f"--signal=USR1@{slurm.warning_s}")
    options.append("--requeue" if slurm.requeue else "--no-requeue")
    return [*options, "--open-mode=append"]


def threading_options(plan: LaunchPlan) -> list[str]:
    """Returns the options of sbatch and srun on hardware threads."""
    slurm = plan.system.slurm
    values = {"hint": slurm.hint, "threads-per-core": slurm.threads_per_core}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _gpus(plan: LaunchPlan, count: int) -> str:
    gpu_type = plan.system.slurm.gpu_type
    return f"{gpu_type}:{count}" if gpu_type else str(count)


def _gpus_per_node(plan: LaunchPlan) -> str:
    if plan.system.slurm.gpu_count == "node":
        return _gpus(plan, plan.system.node.gpus)
    return _gpus(plan, plan.layout.ranks_per_node)


def _resources(plan: LaunchPlan) -> list[str]:
    slurm = plan.system.slurm
    gres = []
    if slurm.gpu_request == "gres":
        gres.append(f"gpu:{_gpus_per_node(plan)}")
    if slurm.gres is not None:
        gres.append(slurm.gres)
    options = []
    if gres:
        options.append(f"--gres={','.join(gres)}")
    if slurm.gpu_request == "gpus-per-node":
        options.append(f"--gpus-per-node={_gpus_per_node(plan)}")
    elif slurm.gpu_request == "gpus-per-task":
        options.append(f"--gpus-per-task={_gpus(plan, 1)}")
    if slurm.cpus_per_gpu is not None:
        options.append(f"--cpus-per-gpu={slurm.cpus_per_gpu}")
    if slurm.mem_per_gpu is not None:
        options.append(f"--mem-per-gpu={slurm.mem_per_gpu}")
    elif slurm.memory is not None:
        options.append(f"--mem={slurm.memory}")
    return options


def srun_options(plan: LaunchPlan) -> list[str]:
    """Returns the options of srun for the step of a plan's ranks. --kill-on-bad-exit ends the step if a rank dies.
    --label begins each line of output with the rank's number. --export=ALL gives ranks the variables of the script,
    whatever export policy the allocation has. Ranks are distributed in blocks over nodes and sockets (srun(1),
    --distribution): neighbouring ranks share a socket, as GPUs of neighbouring indices mostly do; Slurm's default is
    cyclic over the sockets. GPUs are not bound to ranks: a bound rank cannot open the GPUs of others, and NCCL then
    copies through host memory. Without --gpu-bind Slurm shows each rank all GPUs of the step on its node, and it
    selects one by its local rank. --gpu-bind=none is not used: for steps of two or more tasks it unsets
    CUDA_VISIBLE_DEVICES (seen with Slurm 22.05), and ranks then see GPUs of other jobs if the site does not constrain
    devices.
    """
    layout, launch, slurm = plan.layout, plan.system.launch, plan.system.slurm
    mpi_plugin = launch.mpi_plugin if launch.launcher == "srun-mpi" else "none"
    options = [
        f"--mpi={mpi_plugin}",
        "--kill-on-bad-exit=1",
        "--label",
        "--export=ALL",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
        # Not the run's folder: a process that crashes writes its core dump into its working directory.
        "--chdir=/",
    ]
    if slurm.distribution != "site":
        options.append(f"--distribution={slurm.distribution}")
    if slurm.gpu_request != "none" and slurm.gpu_bind not in ("none", "site"):
        options.append(f"--gpu-bind={slurm.gpu_bind}")
    if _unbinds_tasks(plan):
        options.append(f"--gpus-per-node={_gpus_per_node(plan)}")
    bindings = {"cpu-bind": slurm.cpu_bind, "mem-bind": slurm.mem_bind}
    options += [f"--{name}={value}" for name, value in bindings.items() if value is not None]
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    return [*options, *threading_options(plan), *(f"--{option}" for option in slurm.srun_args)]


def _unbinds_tasks(plan: LaunchPlan) -> bool:
    """Returns whether the step requests its GPUs per node, because one per task would bind them (srun(1))."""
    return plan.system.slurm.gpu_request == "gpus-per-task" and plan.system.slurm.gpu_bind == "none"


def node_command(plan_file: str, python: str) -> list[str]:
    """Returns the command of every rank; with -P Python imports no module from the working directory."""
    return [python, "-P", "-m", "dlbench.supervisor", "-m", "dlbench.node", plan_file]


def supervised(launcher_command: list[str], python: str) -> list[str]:
    """Returns the command of mpirun or srun under a supervisor, as `dlbench run` starts it."""
    return [python, "-P", "-m", "dlbench.supervisor", "--launcher", *launcher_command]


def rank_environment(plan: LaunchPlan) -> dict[str, str | VariableSource]:
    """Returns the variables of every rank, whatever starts it, as values or references."""
    # Unbuffered, because the output of a rank must be in its log when it dies.
    variables: dict[str, str | VariableSource] = {"PYTHONUNBUFFERED": "1"}
    # Keeps many ranks from searching and writing shared folders (python(1)). Ranks on this machine alone are few, and
    # keep compiled modules for the next start.
    if plan.system.launch.launcher != "local":
        variables |= {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if Path(site.getusersitepackages()) not in Path(__file__).parents:
            variables["PYTHONNOUSERSITE"] = "1"
    variables |= containers.facts(plan)
    if plan.yields:
        # Open MPI busy-waits. With more ranks than cores that starves the rank it waits for.
        variables[YIELD] = "1"
    if plan.system.launch.by_mpi and plan.layout.nodes == 1:
        # Ranks of one node use shared memory; Open MPI's TCP and OFI transports would open ports nevertheless.
        variables["OMPI_MCA_btl"] = "^tcp,ofi"
    # The system file overrides all others.
    return {**variables, **plan.system.launch.environment}


def local_environments(plan: LaunchPlan, token: str) -> list[dict[str, str | VariableSource]]:
    """Returns the variables of each rank of launcher `local`, with rank and world size."""
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
    """Returns Open MPI's mpirun with its options. Ranks pin themselves, so --bind-to is none. Only the names of
    variables are options, because everybody can read a command line. Under Slurm a node has one slot per task, and so
    per rank; elsewhere one per physical core, and a host given by --host has one (mpirun(1)), so that oversubscription
    must be allowed.
    """
    mapping = f"ppr:{plan.layout.ranks_per_node}:node"
    if plan.system.scheduler == "none" or plan.layout.shares_cores or hosts:
        mapping += ":OVERSUBSCRIBE"
    command = ["mpirun", "-np", str(plan.layout.ranks), "--map-by", mapping, "--bind-to", "none"]
    if hosts:
        command += ["--host", hosts]
    for name in sorted([*rank_environment(plan), TOKEN]):
        command += ["-x", name]
    return command


def before_rank(plan: LaunchPlan, run: RunWords, hosts: str = "") -> list[str]:
    """Returns the launcher (not `local`) and a container's runtime; `hosts`: names, separated by commas, or all."""
    in_container = containers.in_container(plan, run.folder)
    if plan.system.launch.launcher == "mpirun":
        return [*_mpirun(plan, hosts), *in_container]
    command: list[str] = []
    if _unbinds_tasks(plan):
        command += UNBOUND
    command += containers.before_launcher(plan)
    # The name of the step identifies the run in Slurm's accounting.
    command += ["srun", joined("--job-name=", run.run_id), *srun_options(plan)]
    if hosts:
        command.append(joined("--nodelist=", hosts))
    return [*command, *containers.srun_words(plan, run.folder), *in_container]


def launcher_command(plan: LaunchPlan, run: RunWords, python: str, hosts: str = "") -> list[str]:
    """Returns the command that starts all ranks. `python`: of the ranks; other arguments as `before_rank`."""
    return [*before_rank(plan, run, hosts), *node_command(run.plan, python)]


def render_job(job: Job, folders: Sequence[RunFolder], python: str, comment: str = "") -> str:
    """Returns the text of `job.sbatch`. `folders`: absolute, one per run; `comment`: identifies the job."""
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    record = folders[0].record if isinstance(plan, RunPlan) else folders[0].comm
    words_by_side: dict[str, str] = {}
    swept: dict[str, list[str]] = {}
    for run in job.plans:
        if isinstance(run, RunPlan):
            if run.series.side:
                words_by_side[run.series.side] = side_words(run)
            for key, value in run.series.named.items():
                swept.setdefault(key, []).append(value_text(key, value))
    swept_texts = [f"{key}={','.join(dict.fromkeys(values))}" for key, values in swept.items()]
    configurations = _configurations(job, python)
    pairs = zip(configurations, folders, strict=True)
    return render(
        "job.sbatch.j2",
        plan=plan,
        slurm=plan.system.slurm,
        **script_options(job, folders[0], comment),
        **shell_values(job),
        content=_content(job),
        swept=", ".join(swept_texts),
        sides=[{"name": side, "words": words_by_side[side]} for side in sorted(words_by_side)],
        configurations=list({configuration["name"]: configuration for configuration in configurations}.values()),
        runs=[{"configuration": configuration["name"], "folder": folder.path} for configuration, folder in pairs],
        record=record.name,
        is_array=job.is_array,
        passes_warning_on=job.passes_warning_on,
        is_job=True,
    )


def _content(job: Job) -> str:
    plan = job.shape
    assert isinstance(plan, RunPlan | CommPlan)
    if len(job.plans) == 1:
        return f"repeat {plan.series.repeat + 1} of {plan.series.repeats}: {plan.title}"
    name = plan.title
    if isinstance(plan, RunPlan):
        name = f"{plan.workload.name} ({plan.workload.preset})"
    order = "one in each element of a job array" if job.is_array else "one after the other on the same nodes"
    return f"{len(job.plans)} runs of {name}, {order}"


def _configurations(job: Job, python: str) -> list[dict[str, object]]:
    """Returns the shell function that starts each run, as values of the template; equal runs share one."""
    by_text: dict[str, dict[str, object]] = {}
    configurations = []
    for plan in job.plans:
        is_part = not job.is_array and plan.layout.nodes < job.shape.layout.nodes
        hosts = variable("dlbench_hosts") if is_part else ""
        command = quoted(launcher_command(plan, IN_SCRIPT, containers.python_of(plan, python), hosts))
        if job.passes_warning_on:
            # The launcher replaces the shell, because the script signals this process.
            command = f"exec {command}"
        values = {"plan": plan, "is_part": is_part, "variables": rank_environment(plan), "command": command}
        # Everything in the function that depends on the plan.
        text = f"{is_part} {plan.layout.nodes} {render('environment.j2', is_job=True, **values)}"
        if text not in by_text:
            name = _function_name(plan, [*by_text.values()])
            by_text[text] = {**values, "name": name, "heading": _heading(job, plan)}
        configurations.append(by_text[text])
    if len(by_text) == 1:
        configurations[0] |= {"name": "start", "heading": ""}
    return configurations


def _function_name(plan: LaunchPlan, others: Sequence[Mapping[str, object]]) -> str:
    if isinstance(plan, RunPlan) and plan.series.side:
        name = f"start_{plan.series.side}"
        if all(name != other["name"] for other in others):
            return name
    return f"start_{len(others) + 1}"


def _heading(job: Job, plan: LaunchPlan) -> str:
    parts = []
    if len({(other.layout.nodes, other.layout.ranks) for other in job.plans}) > 1:
        parts += [counted(plan.layout.nodes, "node"), counted(plan.layout.ranks, "rank")]
    if isinstance(plan, RunPlan) and plan.series.side:
        parts.append(f"Side {plan.series.side}")
    elif isinstance(plan, RunPlan):
        settings = {key: value for key, value in plan.series.axes.items() if key.startswith("system.")}
        parts += [f"{key}={value_text(key, value)}" for key, value in settings.items()]
    return f"{', '.join(parts)}. " if parts else ""


def _options(job: Job, folder: RunFolder, comment: str) -> list[str]:
    options = sbatch_options(job.shape, job_name=job.name, time_limit=job.time_limit, warn_script=job.passes_warning_on)
    log_name = "slurm-%A_%a.out" if job.is_array else "slurm-%j.out"
    # Slurm expands percent signs in --output.
    output_folder = str(folder.path).replace("%", "%%")
    options += [f"--chdir={folder.path}", f"--output={output_folder}/{log_name}"]
    if job.is_array:
        limit = f"%{job.array_limit}" if job.array_limit else ""
        options.append(f"--array=1-{len(job.plans)}{limit}")
    # A comment that the system file sets is not replaced.
    has_comment = any(option.startswith("comment=") for option in job.shape.system.slurm.extra)
    if comment and not has_comment:
        options.append(f"--comment={comment}")
    return options


def directive(option: str) -> str:
    """Returns an option as the text after `#SBATCH`; empty if it must be an argument."""
    if not option.isprintable() or _NEVER_A_LINE.search(option):
        return ""
    name, equals, value = option.partition("=")
    if _PLAIN.fullmatch(value):
        return option
    # Within double quotes sbatch interprets only backslashes, which escape (`_get_argument` of its opt.c).
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def script_options(job: Job, folder: RunFolder, comment: str = "") -> dict[str, list[str]]:
    """Returns a job's options for its script: `directives`, and `arguments` that cannot be directives."""
    directives, arguments = [], []
    for option in _options(job, folder, comment):
        if line := directive(option):
            directives.append(line)
        else:
            arguments.append(option)
    return {"directives": directives, "arguments": arguments}


def sbatch_arguments(job: Job, folder: RunFolder, after: str | None = None, comment: str = "") -> list[str]:
    """Returns the command that submits a job's script; `after`: id of a job that must have ended before."""
    arguments = ["sbatch", "--parsable", *script_options(job, folder, comment)["arguments"]]
    if after is not None:
        arguments.append(f"--dependency=afterany:{after}")
    return [*arguments, str(folder.script)]
