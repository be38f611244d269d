"""`dlbench submit`: a series of runs as Slurm jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.errors import RunError, UserError

if TYPE_CHECKING:
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.jobs.interruption import Interruption
    from dlbench.jobs.scripts.job import Job
    from dlbench.specs.plan import LaunchPlan
    from dlbench.specs.system.system import SystemSpec


@click.command(cls=shared.GroupedCommand)
@shared.plan_options
@shared.submit_options("1,2,4")
def submit(system: str, nodes: str | None, ranks: str | None, all_scripts: bool, **options: Any) -> None:
    """Submit WORKLOAD at each node count; --dry-run lists the jobs, with their cost, and prints the first script.

    Repeats and swept values of one node count share a job, one after the other on the same nodes, and so do both sides
    of --ab. A job gets the time that earlier runs in --out took, with a margin; else the system's time limit a run.

    \b
    Example:
      dlbench submit resnet50 --system example-gpu --nodes 1,2,4 --dry-run
      dlbench submit bert --system my.yaml --nodes 1,2,4 --repeats 5 --data /wiki --max-node-hours 50
      dlbench submit bert --system my.yaml --nodes 4 --repeats 10 \\
          --ab plain engine.name=ddp
    """
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 1,2")
    points = parse_counts(nodes, "--nodes") if nodes is not None else parse_counts(ranks or "", "--ranks")
    request = shared.request_from(
        options, system=system, points=points, points_are="ranks" if nodes is None else "nodes"
    )
    plans = shared.expand_request(request)
    for one in shared.systems_of(plans):
        require_scheduler(one, options["out"], "dlbench run")
    campaign = campaign_from(plans, options)  # what it refuses is told alone
    shared.require_fitting_data(plans)
    shared.note_few_pairs(request)
    if options["dry_run"]:
        print_scripts(campaign, options["out"], all_scripts=all_scripts)
        return
    submit_all(campaign, options["out"])


def campaign_from(plans: Sequence[LaunchPlan], options: dict[str, Any]) -> Campaign:
    """The jobs that `submit_options` ask for.

    Raises:
        UserError: options exclude each other, sides of a comparison cannot share a job, or it may cost too much.
    """
    import re

    from dlbench.jobs.campaign.campaign import campaign_of, refuse_above
    from dlbench.specs.system.slurm import TIME

    if options["one_run_per_job"] and options["pack"] != "points":
        raise UserError("--pack and --one-run-per-job exclude each other")
    if options["time"] is not None and not re.fullmatch(TIME, options["time"]):
        raise UserError(f"--time {options['time']!a}: must be as Slurm writes it, e.g. 00:20:00")
    most = options["max_node_hours"]
    if most is not None and not 0 < most < float("inf"):
        raise UserError(f"--max-node-hours {most:g}: must be a number above zero")
    campaign = campaign_of(
        plans,
        options["out"],
        packing="runs" if options["one_run_per_job"] else options["pack"],
        chain=options["chain"],
        time=options["time"],
    )
    if most is not None:
        refuse_above(campaign, most)
    return campaign


def require_scheduler(system: SystemSpec, out: Path, instead: str) -> None:
    """Proves that jobs can be written for this system and folder; `instead` is the command without a scheduler.

    Raises:
        UserError: they cannot.
    """
    if system.scheduler != "slurm":
        raise UserError(f"system {system.name} has no scheduler: use `{instead}`, or set scheduler: slurm")
    if "\\" in str(out.absolute()):
        raise UserError(f"--out {out}: sbatch takes a backslash in a path for a sign of its own; rename the folder")


def print_scripts(campaign: Campaign, out: Path, *, all_scripts: bool) -> None:
    """The jobs and their scripts on standard output, the latter byte for byte."""
    from dlbench.cli.dry_run import dry_run_lines

    _note_unseen_data(campaign.plans)
    for line in dry_run_lines(campaign, out, sys.executable, all_scripts=all_scripts):
        # Bytes: of text, click takes terminal sequences out where no terminal reads.
        click.echo(line.encode())


def submit_all(campaign: Campaign, out: Path) -> None:
    """Submits the jobs of a series.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
        UserError: the output folder cannot be, or a run of that name exists.
        RunError: Slurm refused a job, or did not say whether it took it.
        KeyboardInterrupt: on a signal, after the sbatch that ran then has ended.
    """
    from dlbench.cli.dry_run import cost_lines
    from dlbench.jobs.campaign.series import begin
    from dlbench.jobs.interruption import Interruption
    from dlbench.jobs.scripts.launch import quoted
    from dlbench.jobs.slurm.sbatch import require_slurm
    from dlbench.records.folder import prepare_output

    require_slurm()
    _note_unseen_data(campaign.plans)
    root = prepare_output(out)
    with Interruption() as interruption:
        request = quoted(["dlbench", *sys.argv[1:]])
        series = begin(root, campaign.jobs, chain=campaign.chain, python=sys.executable, request=request)
        for line in cost_lines(campaign):
            click.echo(line, err=True)
        complete_series(root, series, out, interruption)
    click.echo(f"next: dlbench status {out}", err=True)


def complete_series(root: Path, series: str, out: Path, interruption: Interruption) -> None:
    """Submits what is left of a series; of each job its id on standard output.

    Args:
        root: folder of all runs, absolute.
        series: its name.
        out: the folder as the person gave it.
        interruption: asked before each job.

    Raises:
        UserError: there is no such series, or another process submits it.
        RunError: Slurm refused a job, did not say whether it took it, or does not say what is queued.
        KeyboardInterrupt: on a signal.
    """
    from contextlib import suppress

    from dlbench.jobs.campaign.series import Submitted, complete, forget, standing
    from dlbench.jobs.slurm.sbatch import RefusedError

    total = standing(root, series).total

    def tell(done: Submitted) -> None:
        how = ", found in the queue" if done.is_adopted else ""
        # A terminal that has closed must not end the series between two jobs.
        with suppress(OSError):
            click.echo(f"[{done.number}/{total}] job {done.job_id}{how}: {_describe_job(done.job)}", err=True)
            click.echo(done.job_id)

    try:
        complete(root, series, interruption.check, tell)
        interruption.check()  # of a signal during the last sbatch
    except KeyboardInterrupt:
        with suppress(OSError):
            click.echo(_left(root, series, out), err=True)
        raise
    except RunError as error:
        if isinstance(error, RefusedError) and not standing(root, series).known:
            forget(root, series)
            raise
        raise type(error)(f"{error}; {_left(root, series, out)}") from None


def _left(root: Path, series: str, out: Path) -> str:
    """How far a series is that was cut off, and what completes it."""
    from dlbench.jobs.campaign.series import standing
    from dlbench.jobs.scripts.launch import quoted

    now = standing(root, series)
    if now.submitted == now.total:
        return f"series {series}: {now.text}"
    return f"series {series}: {now.text}; the rest: {quoted(['dlbench', 'complete', series, '--out', str(out)])}"


def _describe_job(job: Job) -> str:
    first = shared.describe_plan(job.plans[0])
    if len(job.plans) == 1:
        return first
    return f"{'array' if job.is_array else 'job'} of {len(job.plans)} runs, the first {first}"


def _note_unseen_data(plans: Sequence[LaunchPlan]) -> None:
    from dlbench.specs.plan import RunPlan

    for plan in plans:
        data = plan.workload.data if isinstance(plan, RunPlan) else None
        if data is not None and not data.is_synthetic and not Path(data.source).exists():
            click.echo(f"note: {data.source} is not visible from here; the compute nodes must see it", err=True)
            break
