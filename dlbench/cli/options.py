"""Options that several commands share, and their conversion into requests and plans."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from dlbench.errors import EnvironmentLacksError, MachineError, RunError, UserError
from dlbench.units import counted, format_seconds

if TYPE_CHECKING:
    from dlbench.datasets.splits import Account
    from dlbench.specs.plan import LaunchPlan, RunPlan
    from dlbench.specs.requests import Request
    from dlbench.specs.system import SystemSpec

F = TypeVar("F", bound=Callable[..., Any])
MAX_RANKS_PER_CORE = 64  # Without a scheduler; ranks may share cores, to try out layouts.


def value_option(
    names: str, metavar: str | None, text: str, default: Any = None, **attributes: Any
) -> Callable[[F], F]:
    """Returns an option with one value, whose default is shown; `names`: separated by blanks."""
    if default is not None:
        attributes |= {"default": default, "show_default": True}
    return click.option(*names.split(), metavar=metavar, help=text, **attributes)


FILE = click.Path(path_type=Path)

# Options that several commands have.
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would run; start and write nothing.")
NO_PROGRESS = click.option("--no-progress", is_flag=True, help="Print lines instead of a progress bar.")
PRESET = value_option("--preset", "NAME", "Preset of the workload (`dlbench ls` lists them).")
SYSTEM = value_option("--system", "NAME|FILE", "System: a name (`dlbench ls` lists them) or a YAML file.", "local")
SERIES = value_option("--series", "NAME", "Name of the series (default: time and a random suffix).")
LAUNCHER = value_option("--launcher", "NAME", "Launcher: local, mpirun, srun-mpi or srun-gloo (default: the system's).")
RANKS_PER_NODE = value_option("--ranks-per-node", "N", "Ranks per node (default: the system's).", type=int)
REPEATS = value_option("--repeats", "N", "Number of runs per point; the repeats of all points alternate.", 1, type=int)
KEYS = value_option("--set overrides", "KEY=VALUE", "Set a key (`dlbench show` lists them), repeatable.", multiple=True)
OUTPUT = value_option("-o --output", None, "File to write (default: standard output).", type=FILE)

ENGINE_NAMES = "horovod, ddp, fsdp, pipeline, emulated or single"  # `specs.engine.ENGINES`, which would load pydantic.
COMMIT_VARIABLES = ("CI_COMMIT_SHA", "GITHUB_SHA")  # Variables with the tested commit in GitLab CI and GitHub Actions.
INSTALL_NODE = "pip install 'dlbench[node]'"

OPTION_GROUPS = {
    "Training": "preset engine data to_accuracy resume overrides",
    "Runs": "ranks nodes ranks_per_node repeats scaling sweep ladder ab decompose",
    "System": "system launcher fail_fast",
    "Jobs": "pack one_run_per_job same_nodes rotate_nodes chain time max_node_hours max_jobs cancelled",
    "Output": "out series tags dry_run all_scripts write_only no_progress help",
}
"""How the help of `run` and `submit` groups options, by the names of their parameters."""


class InOrder(click.Group):
    """A group that lists its commands in the order of definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _require_preset_for_cpus(request: Request, plans: Sequence[RunPlan], cores: int) -> None:
    from dlbench.jobs.local import hidden_gpus
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.files import find

    file, preset = WorkloadFile(find("workloads", request.workload)), plans[0].workload.preset
    default = file.default_preset
    # The best preset without a GPU is the last that is neither the default nor made for GPUs.
    others = [name for name in file.presets if name != default and not file.is_meant_for_gpus(name)]
    suggestion = f"did you mean --preset {others[-1]}? " if others else ""
    if request.preset is None and others and preset == default:
        raise UserError(
            f"{request.workload}: no --preset is given, and this machine has no GPU: preset {default}, the default, "
            f"{_duration(plans, cores)}{suggestion}--preset {default} runs it anyway"
        )
    if any(plan.workload.meant_for == "gpu" for plan in plans):
        problem = "this machine has none"
        if hidden := hidden_gpus():
            problem = f"this machine shows none ({hidden.reason}; {hidden.remedy})"
        raise UserError(
            f"{request.workload}: preset {preset} is made for GPUs, and {problem}: "
            f"{suggestion}--set meant_for=any runs it anyway"
        )


def require_room(plans: Sequence[LaunchPlan]) -> None:
    """Refuses more ranks than one machine can start and measure."""
    cores = len(os.sched_getaffinity(0))
    ranks = max((plan.layout.ranks for plan in plans if plan.system.scheduler == "none"), default=0)
    if ranks > MAX_RANKS_PER_CORE * cores:
        raise UserError(
            f"--ranks {ranks}: this machine takes at most {MAX_RANKS_PER_CORE * cores}, {MAX_RANKS_PER_CORE} for each "
            f"of its {cores} cores: more would only measure how processes wait for memory and cores"
        )


def _require_memory(plans: Sequence[RunPlan]) -> None:
    """Raises `UserError` for a plan whose ranks surely need more memory than they have, if that is known."""
    from dlbench.jobs.local import memory_of_rank
    from dlbench.specs.rank_memory import memory_problem

    for plan in plans:
        if plan.series.repeat:
            continue
        limit_bytes, source = memory_of_rank(plan)
        if limit_bytes is None:
            continue
        if problem := memory_problem(plan, limit_bytes, source):
            remedy = "share it with engine fsdp over more ranks"
            if plan.workload.model.has_slabs:
                remedy = "share volumes over more ranks (engine.ddp.spatial_ranks, as many train.gradient_accumulation)"
            raise UserError(
                f"{plan.workload.name} ({plan.workload.preset}) on {counted(plan.layout.ranks, 'rank')} of "
                f"{plan.system.name}: {problem}; {remedy}, or project it: dlbench project spec {plan.workload.name} "
                f"--preset {plan.workload.preset}"
            )


def _default_note(request: Request, plans: Sequence[RunPlan]) -> str | None:
    from dlbench.jobs.local import has_gpu
    from dlbench.specs.choices import GPU_PRESET, WorkloadFile
    from dlbench.specs.files import find

    file = WorkloadFile(find("workloads", request.workload))
    preset, system = plans[0].workload.preset, plans[0].system
    if request.preset is not None or GPU_PRESET not in file.presets or file.default_preset == GPU_PRESET:
        return None
    because = f"preset {preset}, because no --preset is given and system {system.name}"
    if preset == GPU_PRESET:
        return f"{because} has GPUs (node.gpus); on CPUs it would be {file.default_preset}"
    if system.scheduler == "none" and has_gpu():
        return f"{because} names no GPUs (node.gpus); for the GPU of this machine: --preset {GPU_PRESET}"
    return None


def preset_notes(plans: Sequence[RunPlan]) -> list[str]:
    """Returns notes on presets, recipes and the environment in which the plans will run, each once."""
    from dlbench.jobs.local import hidden_gpus
    from dlbench.specs.training import recipe_note

    recipe_notes = [
        recipe_note(plan.workload.train, global_batch=plan.global_batch, to_quality=plan.measure.until == "quality")
        for plan in plans
    ]
    # A site's profile may set e.g. the account.
    sbatch = ", ".join(sorted(name for name in os.environ if name.startswith("SBATCH_")))
    missing: list[str | None] = []
    for system in (plan.system for plan in plans):
        missing.append(_variable_missing(system))
        if system.scheduler == "slurm" and sbatch:
            missing.append(f"{sbatch}: set here but not used: jobs are requested as in system {system.name} (slurm.*)")
    if any(plan.system.scheduler == "none" for plan in plans) and (hidden := hidden_gpus()):
        missing.append(f"ranks probably compute on the CPU: {hidden.reason}; {hidden.remedy}")
    return list(
        dict.fromkeys(f"note: {note}" for note in (*map(_asks_for_no_gpus, plans), *missing, *recipe_notes) if note)
    )


def _variable_missing(system: SystemSpec) -> str | None:
    for name, value in system.launch.environment.items():
        if isinstance(value, str) or value.variable is None or system.scheduler != "slurm":
            continue
        if value.variable not in os.environ:
            return f"launch.environment.{name}: {value.variable} is not set here: modules or setup must set it"
    return None


def _asks_for_no_gpus(plan: RunPlan) -> str | None:
    system, workload = plan.system, plan.workload
    is_asked = system.node.gpus or system.slurm.gpu_request != "none"
    if workload.meant_for != "gpu" or system.scheduler == "none" or is_asked:
        return None
    return (
        f"preset {workload.preset} of {workload.name} is made for GPUs, and system {system.name} has none (node.gpus) "
        "and requests none (slurm.gpu_request)"
    )


def _gpus_not_asked(plan: RunPlan) -> str:
    system, slurm = plan.system, plan.system.slurm
    is_asked = slurm.gpu_request != "none" or any("gpu" in word for word in (*slurm.extra, *slurm.srun_args))
    if system.scheduler != "slurm" or not system.node.gpus or is_asked:
        return ""
    return (
        f"system {system.name} has GPUs (node.gpus {system.node.gpus}), but its jobs request none: ranks may see "
        "none and train on CPUs; set slurm.gpu_request to gres, gpus-per-node or gpus-per-task"
    )


def _duration(plans: Sequence[RunPlan], cores: int) -> str:
    """Returns e.g. ``takes at least 2 h 05 min on 2 cores (...); ``; empty if the time is not known."""
    from dlbench.jobs.local import product_rate

    if any(plan.measure.until != "steps" for plan in plans):
        return ""
    rate = product_rate()
    if rate is None:
        return ""
    seconds = 0.0
    for plan in plans:
        steps = plan.measure.warmup_steps + plan.measure.measured_steps
        flops = plan.workload.model.training_flops(plan.workload.data) * plan.global_batch * steps
        seconds += max(flops / (rate * cores), plan.least_training_s)
    scope = counted(cores, "core")
    if len(plans) > 1:
        scope += f" for {len(plans)} runs"
    return f"takes at least {format_seconds(seconds)} on {scope} (its model FLOPs at the rate of a matrix product); "


class GroupedCommand(click.Command):
    """A command whose help lists its options by `OPTION_GROUPS`, and all others at the end."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        lines: dict[str, tuple[str, str]] = {}
        for option in options:
            if line := option.get_help_record(ctx):
                # The name of click's help option differs between versions.
                lines["help" if "--help" in option.opts else str(option.name)] = line
        width = max(len(words) for words, _ in lines.values())
        groups = {title: names.split() for title, names in OPTION_GROUPS.items()}
        for title, names in {**groups, "Other options": [*lines]}.items():
            if group_lines := [lines.pop(name) for name in names if name in lines]:
                with formatter.section(title):
                    formatter.write_dl([(words.ljust(width), text) for words, text in group_lines])


def plan_options(function: F) -> F:
    """Adds the options that say what to run; `request_from` reads them."""
    decorators = [
        click.argument("workload"),
        PRESET,
        value_option("--engine", "NAME", f"Engine: {ENGINE_NAMES} (default: the workload's)."),
        value_option("--data", "PATH|synthetic", "Data set folder, or random tensors (default: the workload's)."),
        click.option("--to-accuracy", is_flag=True, help="Train to the target quality, instead of timing steps."),
        value_option("--resume", "RUN|FILE", "Continue from a checkpoint file or a run's newest checkpoint."),
        REPEATS,
        value_option(
            "--scaling",
            None,
            "weak: fixed batch per rank. strong: fixed global batch (the preset's times the smallest rank count).",
            "weak",
            type=click.Choice(["weak", "strong"]),
        ),
        value_option(
            "--set overrides",
            "KEY=VALUE",
            "Set a key (`dlbench show` lists them), repeatable. Sizes may have units: 64MiB. A list: [16,32].",
            multiple=True,
        ),
        value_option(
            "--sweep", "KEY=A,B", "Run points with each value, repeatable. Lists: [1,2],[2,4].", multiple=True
        ),
        click.option("--ladder", is_flag=True, help="Run every point once per rung of the ladder."),
        value_option(
            "--ab",
            "A B",
            "Run every point as pairs of side A and side B on the same nodes. A side is `plain` or "
            "KEY=VALUE,KEY=VALUE. A verdict needs 5 repeats.",
            nargs=2,
        ),
        value_option(
            "--tag tags",
            "KEY=VALUE",
            f"Label stored with the runs, repeatable; `commit` is set from {' or '.join(COMMIT_VARIABLES)}.",
            multiple=True,
        ),
        LAUNCHER,
        RANKS_PER_NODE,
        SERIES,
        output_folder(),
        DRY_RUN,
    ]
    return decorated(function, decorators)


def output_folder() -> Callable[[F], F]:
    """Returns the option --out."""
    return value_option("--out", None, "Folder of the runs.", Path("runs"), type=FILE, callback=_for_scripts)


def duration(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Parses a duration such as 6.6min, 90s or 2h into seconds, above zero."""
    from dlbench.units import parse_seconds

    try:
        return None if text is None else parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{param.opts[0]}: {error}") from None


def size_in_bytes(_ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Parses a size such as 10GB into bytes, above zero."""
    from dlbench.units import parse_bytes

    if text is None:
        return None
    try:
        num = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{param.opts[0]}: {error}") from None
    if num < 1:
        raise UserError(f"{param.opts[0]} {text}: must be above zero")
    return num


def _for_scripts(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    from dlbench.specs.files import text_problem

    absolute = str(value.absolute())
    if problem := text_problem(absolute):
        raise UserError(f"--out {absolute!a}: {problem}")
    return value


def submit_options(ranks_example: str) -> Callable[[F], F]:
    """Returns the options of a command that submits a series to Slurm; `ranks_example`: metavar of --ranks."""
    decorators = [
        value_option("--system", "NAME|FILE", "System with a scheduler: a name or a YAML file.", required=True),
        value_option("--nodes", "1,2,4", "Node counts; each is a point."),
        value_option("--ranks", ranks_example, "Rank counts, instead of --nodes."),
        value_option(
            "--pack",
            None,
            "points: runs of one node count share a job. all: all runs share one job of the largest node count.",
            "points",
            type=click.Choice(["points", "all"]),
        ),
        click.option("--one-run-per-job", is_flag=True, help="Submit one job per run; equal jobs form an array."),
        click.option(
            "--chain/--no-chain",
            default=True,
            show_default=True,
            help="Start each job after the previous one has ended (afterany), so that jobs do not disturb each other.",
        ),
        value_option("--time", "LIMIT", "Time limit per run, e.g. 00:20:00 (default: from earlier runs)."),
        value_option("--max-node-hours", "H", "Submit nothing if the jobs could use more node-hours.", type=float),
        value_option("--max-jobs", "N", "Maximum jobs of the series in the queue.", type=click.IntRange(min=1)),
        click.option("--all-scripts", is_flag=True, help="With --dry-run: print the job scripts before the table."),
        click.option("--write-only", is_flag=True, help="Write plans and scripts, and print the sbatch commands."),
    ]
    return functools.partial(decorated, decorators=decorators)


def given_options(*names: str) -> Iterator[str]:
    """Yields the options, among the parameters `names`, that the command line gives."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            yield param.opts[0]


def decorated(function: F, decorators: Sequence[Callable[[F], F]]) -> F:
    """Adds options to a command; its help lists them in the given order."""
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def parse_points(nodes: str | None, ranks: str | None) -> tuple[tuple[int, ...], Literal["ranks", "nodes"]]:
    """Returns the counts of --nodes or --ranks, and which was given. Raises `UserError`: both or neither."""
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 1,2")
    if nodes is not None:
        return parse_counts(nodes, "--nodes"), "nodes"
    return parse_counts(ranks or "", "--ranks"), "ranks"


def request_from(
    options: dict[str, Any], *, system: str, points: tuple[int, ...], points_are: Literal["ranks", "nodes"]
) -> Request:
    """Returns the request for the options of `plan_options`. Raises `UserError`: one of them is malformed."""
    from dlbench.specs.requests import Request, parse_set, parse_sides, parse_sweep, parse_tags, tag_value

    tags = parse_tags(options["tags"])
    for name in COMMIT_VARIABLES:  # The commit that a CI system tests.
        if "commit" not in tags and os.environ.get(name):
            tags["commit"] = tag_value(os.environ[name], f"tag commit from the variable {name}")
    for name in ("repeats", "ranks_per_node"):
        if options[name] is not None and options[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} {options[name]}: must be 1 or more")
    names = ("workload", "preset", "engine", "data", "to_accuracy", "resume", "ranks_per_node", "repeats", "scaling")
    return Request(
        **{name: options[name] for name in (*names, "launcher", "series")},
        system=system,
        points=points,
        points_are=points_are,
        overrides=parse_set(options["overrides"]),
        sweep=parse_sweep(options["sweep"]),
        decompose=options.get("decompose", False),
        sides=parse_sides(options["ab"]),
        ladder=options.get("ladder", False),
        tags=tags,
    )


def note_few_pairs(request: Request) -> None:
    """Warns on standard error if there are too few pairs for a verdict."""
    from dlbench.stats.estimates import MIN_RUNS

    if request.sides and request.repeats < MIN_RUNS:
        pairs = counted(request.repeats, "pair")
        click.echo(f"note: --ab: {pairs} of runs per point give no verdict: use --repeats {MIN_RUNS} or more", err=True)


def systems_of(plans: Sequence[RunPlan]) -> list[SystemSpec]:
    """Returns the different systems of the plans; the sides of a comparison may have different ones."""
    systems: list[SystemSpec] = []
    for plan in plans:
        if plan.system not in systems:
            systems.append(plan.system)
    return systems


def expand_request(request: Request, *, trains: bool = True) -> list[RunPlan]:
    """Expands a request with this machine's cores; if the plans are trained here, checks that this machine can."""
    from dlbench.jobs.local import has_gpu, precision_problem
    from dlbench.records.layer_profile import with_layers
    from dlbench.specs.expand import expand

    cores = len(os.sched_getaffinity(0))
    profiled = [with_layers(plan) for plan in expand(request, machine_cores=cores, lacking=precision_problem)]
    if any(plan.emulated_workers > 1 for plan, _ in profiled):
        from dlbench.analysis.measures import with_recorded_work

        profiled = [with_recorded_work(plan) for plan, _ in profiled]
    plans = [plan for plan, _ in profiled]
    for profile in dict.fromkeys(profile_note for _, profile_note in profiled if profile_note):
        click.echo(f"note: {profile}", err=True)
    if trains:
        local_plans = [plan for plan in plans if plan.system.scheduler == "none"]
        if any(plan.workload.model.computes for plan in local_plans) and not has_gpu():
            _require_preset_for_cpus(request, local_plans, cores)
        require_room(plans)
        _require_memory(plans)
        for problem in filter(None, map(precision_problem, local_plans)):
            raise EnvironmentLacksError(problem)
        if note := _default_note(request, plans):
            click.echo(f"note: {note}", err=True)
        for note in preset_notes(plans):
            click.echo(note, err=True)
        for warning in dict.fromkeys(map(_gpus_not_asked, plans)):
            if warning:
                click.echo(f"warning: {warning}", err=True)
    return plans


def require_data(plans: list[RunPlan]) -> None:
    """Checks that data sets, checkpoints and validation data exist and can be read."""
    for source in sorted({p.workload.data.source for p in plans if not p.workload.data.is_synthetic}):
        _require_path(source, "data.source", "; give --data a path, or `synthetic`")
    for plan in plans:
        data = plan.workload.data
        if plan.checkpoint.resume_from is not None:
            _require_path(plan.checkpoint.resume_from, "--resume", "; give a checkpoint or a run's folder")
        if plan.checkpoint.initialize_from is not None:
            from dlbench.specs.weights_file import KEY, require_weights

            path = plan.checkpoint.initialize_from or ""
            _require_path(path, KEY, "; give a safetensors file or a run's folder")
            require_weights(Path(path), plan.workload.model)
        if plan.measure.until != "quality":
            continue
        from dlbench.datasets.splits import validation_folder

        if data.validation is not None:
            _require_path(data.validation, "data.validation", "")
        elif validation_folder(Path(data.source)) is None:
            raise UserError(
                f"--to-accuracy: {data.source} holds no validation data: put `train` and `validation` into one folder, "
                "or give data.validation"
            )
    require_fitting_data(plans)


def require_fitting_data(plans: Sequence[RunPlan]) -> None:
    """Checks, as far as this is cheap, that the plans can train on the data sets visible from this machine."""
    checked, lines = set(), set[str]()
    for plan in plans:
        evaluated = plan.measure.until == "quality"
        requirement = plan.workload.model_dump_json(), plan.layout.ranks, evaluated
        if plan.workload.data.is_synthetic or requirement in checked:
            continue
        checked.add(requirement)
        from dlbench.datasets.recognition import require_fitting
        from dlbench.report.wording import clean

        accounts: list[Account] = []
        answers = require_fitting(
            plan.workload, ranks=plan.layout.ranks, evaluated=evaluated, on_account=accounts.append
        )
        line = "".join(f"data {plan.workload.data.source}: {account.line()}" for account in accounts)
        if line and line not in lines:
            lines.add(line)
            click.echo(clean(line), err=True)
        if not answers:
            click.echo(f"note: {plan.workload.data.source} does not answer: not checked before the run", err=True)
            return


def _require_path(path: str, key: str, remedy: str) -> None:
    if not Path(path).exists():
        raise UserError(f"{key} {path}: no such file or folder{remedy}")
    if not (Path(path).is_file() or Path(path).is_dir()):
        raise UserError(f"{key} {path}: is neither a file nor a folder{remedy}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{key} {path}: cannot be read")


def require_ranks_needs(plans: Sequence[LaunchPlan], *, is_dry: bool = False) -> None:
    """Raises errors that ranks would raise; only warns in a dry run, and if compute nodes may differ."""
    from dlbench.setup.probes import is_sure, refusal

    errors = [(error, is_sure(plan.system)) for plan in plans if (error := refusal(plan))]
    for error, is_certain in errors:
        if is_certain and not is_dry:
            raise error
    for error, _ in errors[:1]:
        click.echo(f"warning: {error}", err=True)


def require_torch(system: SystemSpec) -> None:
    """Raises `EnvironmentLacksError` if the Python that the command starts lacks torch."""
    if not system.python and importlib.util.find_spec("torch") is None:
        raise EnvironmentLacksError(f"torch is not installed in {sys.prefix}; remedy: {INSTALL_NODE}")


def precision_words(plan: RunPlan) -> str:
    """Returns the precision of a run as text, e.g. ``strict fp32 (TF32 off)``."""
    precision = plan.workload.train.precision
    return {"fp32": "strict fp32 (TF32 off)", "tf32": "fp32 with TF32"}.get(precision, f"{precision} autocast")


def describe_plan(plan: LaunchPlan) -> str:
    """Returns a line that names a run."""
    from dlbench.specs.comm import CommPlan
    from dlbench.specs.plan import RunPlan

    assert isinstance(plan, RunPlan | CommPlan)
    return f"{describe_point(plan)}, repeat {plan.series.repeat + 1} of {plan.series.repeats}"


def describe_point(plan: LaunchPlan) -> str:
    """Returns a line that names a point of a series, without the repeat."""
    from dlbench.specs.comm import CommPlan
    from dlbench.specs.plan import RunPlan, value_text

    size = counted(plan.layout.ranks, "rank")
    if plan.layout.nodes > 1:
        size += f" on {plan.layout.nodes} nodes"
    if isinstance(plan, CommPlan):
        return f"{plan.title}, {size}"
    assert isinstance(plan, RunPlan)
    parts = [f"{plan.workload.name} ({plan.workload.preset})", plan.engine_words, size]
    # On one line, because `run --dry-run` prints it in a comment.
    parts += [f"{key}={' '.join(value_text(key, value).splitlines())}" for key, value in plan.series.named.items()]
    if plan.series.variant != "plain":
        parts.append(plan.series.variant)
    if plan.series.side:
        parts.append(f"side {plan.series.side}")
    return ", ".join(parts)


def write_output(content: bytes, output: Path | None) -> None:
    """Writes bytes to a file atomically, or to standard output."""
    if output is None:
        # Bytes, because the encoding of a batch job may lack the characters.
        click.echo(content, nl=False)
        return
    from dlbench.records.files import write_result

    try:
        write_result(output, content)
    except RunError as error:
        kind = type(error) if isinstance(error, MachineError) else UserError
        raise kind(f"-o {error}") from None
