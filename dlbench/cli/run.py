"""`dlbench run` trains a series of runs on this machine; `submit` submits them as Slurm jobs."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dlbench.cli import options as shared
from dlbench.cli.series import aligned, cost_lines, print_dry_run, print_sbatch_commands, resume_series, submit_rest
from dlbench.cli.streams import os_error_words
from dlbench.errors import MACHINE_ERRORS, DlbenchError, ExitCode, IncompleteDataError, UserError

if TYPE_CHECKING:
    from dlbench.cli.progress import ProgressLines
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.jobs.local import RunOutcome
    from dlbench.records.scan import Scan
    from dlbench.specs.plan import LaunchPlan, RunPlan
    from dlbench.specs.requests import Request
    from dlbench.specs.system import SystemSpec


@click.command(cls=shared.GroupedCommand)
@shared.plan_options
@shared.value_option("--ranks", "1,2,4", "Rank counts; each is a point.", "1")
@shared.SYSTEM
@click.option(
    "--decompose",
    is_flag=True,
    help="Also run every point with synthetic input, and without exchange: what do input and exchange cost?",
)
@click.option("--fail-fast", is_flag=True, help="Stop the series at the first failed run.")
@shared.NO_PROGRESS
def run(ranks: str, system: str, fail_fast: bool, no_progress: bool, **options: Any) -> None:
    """Train and measure WORKLOAD (a name or a YAML file) at each rank count.

    \b
    Example:
      dlbench run resnet50 --preset ci --ranks 1,2 --repeats 3 --data synthetic
      dlbench run bert --preset ci --ranks 2 --sweep engine.name=horovod,ddp
      dlbench run resnet50 --preset ci --repeats 10 --ab plain engine.name=ddp
    """
    from dlbench.specs.requests import parse_counts
    from dlbench.specs.series import left_out

    request = shared.request_from(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    plans = shared.expand_request(request)
    for system_spec in shared.systems_of(plans):
        require_here(system_spec)
    shared.require_data(plans)
    for line in left_out(request, plans):
        click.echo(line, err=True)
    shared.note_few_pairs(request)
    shared.require_ranks_needs(plans, is_dry=options["dry_run"])
    if options["dry_run"]:
        print_commands(plans, options["out"])
        return
    bar = sys.stderr.isatty() and not no_progress
    code = run_all(plans, options["out"], fail_fast=fail_fast, bar=bar)
    _tell_result(request, plans, options["out"])
    sys.exit(int(code))


def _tell_result(request: Request, plans: Sequence[RunPlan], out: Path) -> None:
    from dlbench.records.scan import Scan, scan
    from dlbench.report.wording import clean

    series = plans[0].series.id
    folders = [path.parent for path in sorted(out.glob(f"{glob.escape(series)}-*/plan.json"))]
    series_scan = scan(*folders) if folders else Scan(root=out)
    series_scan.root = out
    # A series of that name may have had runs before.
    series_scan.runs = [run for run in series_scan.runs if run.plan.series.id == series]
    for line in series_scan.problems:
        click.echo(f"dlbench: damaged: {clean(line)}", err=True)
    if not any(run.state == "valid" for run in series_scan.runs):
        return
    missing = [name for name in ("numpy", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        click.echo(f"no figures: {names} not installed; remedy: pip install 'dlbench[analysis]'", err=True)
    else:
        if not request.sides:
            from dlbench.cli.report import emit
            from dlbench.views.command_reports import result_of

            report, document = result_of(series_scan)
            for line in report.damaged:
                if line not in series_scan.problems:
                    click.echo(f"dlbench: damaged: {clean(line)}", err=True)
            if report.groups:
                emit(document, "text", None)
        run_ids = {plan.run_id for plan in plans}
        series_scan.runs = [run for run in series_scan.runs if run.plan.run_id in run_ids]
        _tell_comparison(request, series_scan)
    next_command = f"report {shown(out)}"
    if request.sides:
        next_command = f"compare {shown(out)} --paired"
    click.echo(f"next: dlbench {next_command} --where series={series}", err=True)


def _tell_comparison(request: Request, series_scan: Scan) -> None:
    from dlbench.gate.page import paired_lines
    from dlbench.report.formats.terminal import WIDTH, fitted
    from dlbench.report.wording import clean

    if request.sides:
        lines = [clean(line) for line in paired_lines(series_scan)]
    else:
        sentences = []
        if request.decompose:
            from dlbench.views.decomposition import decomposition_lines, decompositions

            sentences += decomposition_lines(decompositions(series_scan.runs))
        if request.ladder:
            from dlbench.analysis.table import tabulate
            from dlbench.views.sweep.numbers import sweeps
            from dlbench.views.sweep.view import settings_sheet

            for sweep in sweeps(tabulate(series_scan, with_causes=True)):
                for cell in sweep.cells:
                    sentences += fitted(settings_sheet(sweep, cell).to_display(brief=True), WIDTH)
                    sentences += [cell.verdict, f"Next: {cell.advice}"]
        lines = []
        for line in map(clean, sentences):
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    for line in lines:
        click.echo(line)


def runs_found(plans: Sequence[RunPlan], out: Path) -> Scan:
    """Returns the existing runs of a series in any state; damaged ones are reported on standard error."""
    from dlbench.records.scan import Scan, read_run
    from dlbench.report.wording import clean

    ended = Scan(root=out)
    for folder in (out / plan.run_id for plan in plans):
        if not folder.exists():  # the series may have stopped before this run
            continue
        try:
            ended.runs.append(read_run(folder))
        except IncompleteDataError as error:
            click.echo(clean(str(error)), err=True)
    return ended


def require_here(system: SystemSpec) -> None:
    """Refuses a system with a scheduler outside of an allocation."""
    if system.scheduler == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            f"system {system.name} uses Slurm, and this shell is not inside an allocation: use `dlbench submit`"
        )
    from dlbench.jobs.local import require_launcher

    require_launcher(system)


def print_commands(plans: Sequence[LaunchPlan], out: Path) -> None:
    """Prints the command of each run, then a table of the points, on standard output; for `--dry-run`."""
    from dlbench.jobs.scripts.containers import quoted
    from dlbench.jobs.scripts.launch import has_script, render_run_script, start_command
    from dlbench.records.folder import RunFolder

    if any(plan.system.launch.launcher == "local" for plan in plans):
        click.echo("# Each command is started once per rank, with DLBENCH_RANK set:")
    for plan in plans:
        folder = RunFolder(out.absolute() / plan.run_id)
        # Bytes, because click removes terminal sequences from text if standard output is no terminal.
        if has_script(plan):
            click.echo(render_run_script(plan, folder, sys.executable).encode(), nl=False)
        else:
            click.echo(quoted(start_command(plan, folder, sys.executable)).encode())
    points = Counter((shared.describe_point(plan), *_conditions(plan)) for plan in plans)
    rows = [[point, f"{runs:,}", *conditions] for (point, *conditions), runs in points.items()]
    for line in aligned([["point", "runs", "precision", "batch per rank", "minimum time"], *rows]):
        click.echo(f"# {line}")


def _conditions(plan: LaunchPlan) -> tuple[str, str, str]:
    from dlbench.jobs.local import has_gpu
    from dlbench.specs.plan import RunPlan
    from dlbench.units import format_seconds

    if not isinstance(plan, RunPlan):
        return "-", "-", "-"
    least_s = sum(plan.measure.wanted_seconds(on_gpu=has_gpu()))
    lasting = format_seconds(least_s) if least_s else "-"
    return shared.precision_words(plan), str(plan.workload.train.batch_per_rank), lasting


def run_all(plans: Sequence[LaunchPlan], out: Path, *, fail_fast: bool, bar: bool, next_command: str = "") -> ExitCode:
    """Runs all plans in order on this machine; returns the exit code of the first failed run."""
    from dlbench.cli.progress import progress
    from dlbench.jobs import local
    from dlbench.jobs.scripts import launch
    from dlbench.jobs.scripts.launch import has_script, resolve
    from dlbench.records.folder import prepare_output

    for plan in plans:
        resolve(launch.rank_environment(plan))  # before anything is made
    # PATH is known here only for plans without modules and setup lines.
    for python in dict.fromkeys(plan.system.python for plan in plans if not has_script(plan)):
        if python is not None:
            local.require_python(python)
    root = prepare_output(out)
    first_failure, valid, missed = ExitCode.OK, 0, 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A cancelled CI job or a closed terminal ends the ranks like Ctrl-C; with nohup the signal stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with progress(plans, bar=bar) as lines:
        for plan in plans:
            outcome = _run_one(plan, root, lines)
            valid += outcome.exit_code is ExitCode.OK
            missed += not outcome.reached
            if outcome.exit_code is not ExitCode.OK:
                if first_failure is ExitCode.OK:
                    first_failure = outcome.exit_code
                # The next run would lack the same, and a request to stop ends the whole series.
                if fail_fast or outcome.exit_code in (ExitCode.ENVIRONMENT, ExitCode.USAGE, ExitCode.REQUEUE):
                    break
    line = f"{valid} of {len(plans)} runs valid"
    if missed:
        line += f", {missed} of them did NOT reach the target"
    line += f", in {root}"
    if valid and next_command:
        line += f"; next: {next_command}"
    click.echo(line, err=True)
    return first_failure


def _run_one(plan: LaunchPlan, root: Path, lines: ProgressLines) -> RunOutcome:
    """Executes one run of a series; a folder that is full or missing fails only this run."""
    from dlbench.jobs import local
    from dlbench.records.folder import create

    on_progress = lines.begin(plan)
    try:
        outcome = local.run(plan, create(root, plan), on_progress)
    except DlbenchError as error:
        outcome = local.RunOutcome(exit_code=error.exit_code, detail=str(error))
    except OSError as error:
        code = ExitCode.ENVIRONMENT if error.errno in MACHINE_ERRORS else ExitCode.RUN_FAILED
        outcome = local.RunOutcome(exit_code=code, detail=os_error_words(error))
    lines.end(plan, outcome)
    return outcome


def shown(path: Path) -> str:
    """Returns a path quoted for a shell."""
    return shlex.quote(str(path))


class SubmitCommand(shared.GroupedCommand):
    """`dlbench submit`: WORKLOAD and --system are optional, because a resumed series has them."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        for param in self.params:
            if param.name in ("workload", "system"):
                param.required = False
            elif param.name == "resume" and isinstance(param, click.Option):
                param.metavar = "RUN|FILE|SERIES"
                param.help = f"{param.help} Without WORKLOAD: a series; submit its remaining runs."


@click.command(cls=SubmitCommand)
@shared.plan_options
@shared.submit_options("1,2,4")
@shared.value_option("--same-nodes", "HOSTS", "Run everything on the first of these nodes, e.g. n[1-8].")
@shared.value_option("--rotate-nodes", "HOSTS", "Run repeats on different nodes, e.g. n[1-8], to average over them.")
@click.option("--cancelled", is_flag=True, help="With --resume SERIES: also submit the runs of cancelled jobs again.")
def submit(system: str, nodes: str | None, ranks: str | None, all_scripts: bool, **options: Any) -> None:
    """Submit runs of WORKLOAD to Slurm at each node count; --dry-run lists the jobs and their cost.

    Runs of one node count (repeats, sweep values, both sides of --ab) share a job and run one after the other on the
    same nodes. A job's time limit is estimated from earlier runs in --out; without them it is the system's per run.

    \b
    Example:
      dlbench submit resnet50 --system example-gpu --nodes 1,2,4 --dry-run
      dlbench submit bert --system my.yaml --nodes 1,2 --repeats 5 --max-node-hours 50
      dlbench submit --resume nightly --max-jobs 10
    """
    from dlbench.specs.series import left_out

    if options["workload"] is None and options["resume"] is not None:
        of_series = {"resume", "workload", "out", "max_jobs", "cancelled", "dry_run", "all_scripts", "write_only"}
        others = {param.name or "" for param in click.get_current_context().command.params} - of_series
        for option in shared.given_options(*others):
            raise UserError(f"--resume {options['resume']} alone: the series already has {option}")
        refuse_beside_write_only(options, "dry_run", "cancelled", "max_jobs")
        resume_series({**options, "all_scripts": all_scripts})
        return
    if options["cancelled"]:
        raise UserError("--cancelled needs --resume SERIES without WORKLOAD")
    if options["workload"] is None:
        raise UserError("give a WORKLOAD, e.g. resnet50; or --resume SERIES alone")
    if system is None:
        raise UserError("give --system NAME or FILE; it must have a scheduler")
    points, points_are = shared.parse_points(nodes, ranks)
    request = shared.request_from(options, system=system, points=points, points_are=points_are)
    plans = _on_nodes(shared.expand_request(request), options)
    for system_spec in shared.systems_of(plans):
        require_scheduler(system_spec, options["out"], "dlbench run")
    campaign = campaign_from(plans, options)  # its errors come before any note
    shared.require_fitting_data(plans)
    shared.note_few_pairs(request)
    for line in left_out(request, plans):
        click.echo(line, err=True)
    shared.require_ranks_needs(plans, is_dry=options["dry_run"])
    if options["dry_run"]:
        print_scripts(campaign, options["out"], all_scripts=all_scripts)
        return
    submit_all(campaign, options)


def _on_nodes(plans: list[RunPlan], options: dict[str, Any]) -> list[RunPlan]:
    from dlbench.jobs.campaign.campaign import on_node_sets

    same, rotate = options["same_nodes"], options["rotate_nodes"]
    if same and rotate:
        raise UserError("--same-nodes and --rotate-nodes exclude each other")
    if not same and not rotate:
        return plans
    kind: Literal["same", "rotate"] = "same" if same else "rotate"
    return on_node_sets(plans, kind, same or rotate, share_one_job=options["pack"] == "all")


def refuse_beside_write_only(options: dict[str, Any], *names: str) -> None:
    """Raises `UserError` if one of these options, which act on submitted jobs only, is given with --write-only."""
    for name in names:
        if options["write_only"] and options[name]:
            raise UserError(f"--write-only and --{name.replace('_', '-')} exclude each other")


def campaign_from(plans: Sequence[LaunchPlan], options: dict[str, Any]) -> Campaign:
    """Returns the jobs for the options of `submit_options`. Raises `UserError`: they contradict each other."""
    from dlbench.jobs.campaign.campaign import campaign_of, refuse_above
    from dlbench.specs.launch import TIME

    refuse_beside_write_only(options, "dry_run")
    if options["one_run_per_job"] and options["pack"] != "points":
        raise UserError("--pack and --one-run-per-job exclude each other")
    if options["time"] is not None and not re.fullmatch(TIME, options["time"]):
        raise UserError(f"--time {options['time']!a}: must be as Slurm writes it, e.g. 00:20:00")
    max_node_hours = options["max_node_hours"]
    if max_node_hours is not None and not 0 < max_node_hours < float("inf"):
        raise UserError(f"--max-node-hours {max_node_hours:g}: must be a number above zero")
    packing: Literal["points", "all", "runs"] = "runs" if options["one_run_per_job"] else options["pack"]
    campaign = campaign_of(plans, options["out"], packing=packing, chain=options["chain"], time=options["time"])
    if max_node_hours is not None:
        refuse_above(campaign, max_node_hours)
    return campaign


def require_scheduler(system: SystemSpec, out: Path, instead: str) -> None:
    """Raises `UserError` if jobs cannot be written for this system or folder; `instead`: the local command."""
    if system.scheduler != "slurm":
        raise UserError(f"system {system.name} has no scheduler: use `{instead}`, or set scheduler: slurm")
    if "\\" in str(out.absolute()):
        raise UserError(f"--out {out}: sbatch interprets a backslash in a path; rename the folder")


def print_scripts(campaign: Campaign, out: Path, *, all_scripts: bool) -> None:
    """Prints the jobs as `--dry-run` does, with their scripts if `all_scripts`."""
    _note_unseen_data(campaign.plans)
    print_dry_run(campaign, out, sys.executable, all_scripts)


def submit_all(campaign: Campaign, options: dict[str, Any]) -> None:
    """Submits the jobs of a series as the options of `submit_options` say.

    Raises `EnvironmentLacksError`: there is no sbatch. `UserError`: a run of that name exists. And see `submit_rest`.
    """
    from dlbench.jobs.campaign.completing import begin, write_only
    from dlbench.jobs.campaign.series_file import scheduler_named
    from dlbench.jobs.processes import Interruption
    from dlbench.jobs.scripts.containers import quoted
    from dlbench.records.folder import prepare_output

    scheduler = scheduler_named(campaign.plans[0].system.scheduler)
    if not options["write_only"]:
        scheduler.require()
    _note_unseen_data(campaign.plans)
    out = options["out"]
    root = prepare_output(out)
    with Interruption() as interruption:
        request = quoted(["dlbench", *sys.argv[1:]])
        series = begin(
            root,
            campaign.jobs,
            chain=campaign.chain,
            python=sys.executable,
            request=request,
            pack=campaign.packing,
            max_jobs=options["max_jobs"],
            max_node_hours=options["max_node_hours"],
        )
        for line in cost_lines(campaign):
            click.echo(line, err=True)
        if options["write_only"]:
            print_sbatch_commands(root, series, out, write_only(root, series, scheduler, interruption.check))
            return
        submit_rest(root, series, options, interruption)


def _note_unseen_data(plans: Sequence[LaunchPlan]) -> None:
    from dlbench.specs.plan import RunPlan

    for plan in plans:
        data = plan.workload.data if isinstance(plan, RunPlan) else None
        if data is not None and not data.is_synthetic and not Path(data.source).exists():
            click.echo(f"note: {data.source} is not visible from here; the compute nodes must see it", err=True)
            break
