"""`dlbench submit`: submits a series of runs as Slurm jobs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dlbench.cli import options as shared
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.specs.plan import LaunchPlan, RunPlan
    from dlbench.specs.system import SystemSpec


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
    from dlbench.cli.series import resume_series
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
    from dlbench.cli.series import print_dry_run

    _note_unseen_data(campaign.plans)
    print_dry_run(campaign, out, sys.executable, all_scripts)


def submit_all(campaign: Campaign, options: dict[str, Any]) -> None:
    """Submits the jobs of a series as the options of `submit_options` say.

    Raises `EnvironmentLacksError`: there is no sbatch. `UserError`: a run of that name exists. And see `submit_rest`.
    """
    from dlbench.cli.series import cost_lines, print_commands, submit_rest
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
            print_commands(root, series, out, write_only(root, series, scheduler, interruption.check))
            return
        submit_rest(root, series, options, interruption)


def _note_unseen_data(plans: Sequence[LaunchPlan]) -> None:
    from dlbench.specs.plan import RunPlan

    for plan in plans:
        data = plan.workload.data if isinstance(plan, RunPlan) else None
        if data is not None and not data.is_synthetic and not Path(data.source).exists():
            click.echo(f"note: {data.source} is not visible from here; the compute nodes must see it", err=True)
            break
