"""`dlbench submit`: a series of runs as Slurm jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.specs.plan import LaunchPlan
    from dlbench.specs.system import SystemSpec


@click.command()
@shared.plan_options
@shared.submit_options("1,2,4")
def submit(system: str, nodes: str | None, ranks: str | None, chain: bool, **options: Any) -> None:
    """Submit WORKLOAD at each node count, one job a run; --dry-run prints the exact scripts.

    \b
    Example:
      dlbench submit resnet50 --preset ci --system box --nodes 1,2 --repeats 3 --dry-run
      dlbench submit bert --system my-cluster.yaml --nodes 1,2,4,8 --repeats 5 --data /scratch/wikipedia
    """
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 1,2")
    points = parse_counts(nodes, "--nodes") if nodes is not None else parse_counts(ranks or "", "--ranks")
    request = shared.request_from(
        options, system=system, points=points, points_are="ranks" if nodes is None else "nodes"
    )
    plans = shared.expand_request(request)
    require_scheduler(plans[0].system, options["out"], "dlbench run")
    if options["dry_run"]:
        print_scripts(plans, options["out"])
        return
    submit_all(plans, options["out"], chain)


def require_scheduler(system: SystemSpec, out: Path, instead: str) -> None:
    """Proves that jobs can be written for this system and folder; `instead` is the command without a scheduler.

    Raises:
        UserError: they cannot.
    """
    if system.scheduler != "slurm":
        raise UserError(f"system {system.name} has no scheduler: use `{instead}`, or set scheduler: slurm")
    if "\\" in str(out.absolute()):
        raise UserError(f"--out {out}: sbatch takes a backslash in a path for a sign of its own; rename the folder")


def print_scripts(plans: Sequence[LaunchPlan], out: Path) -> None:
    """Scripts on standard output, byte for byte; what is said about them on standard error."""
    from dlbench.jobs.batch import render_script, sbatch_arguments
    from dlbench.jobs.launch import quoted
    from dlbench.records.folder import RunFolder

    for number, plan in enumerate(plans, 1):
        folder = RunFolder(out.absolute() / plan.run_id)
        click.echo(f"# {number} of {len(plans)}: {shared.describe_plan(plan)}", err=True)
        click.echo(f"# {quoted(sbatch_arguments(folder))}", err=True)
        click.echo(render_script(plan, folder, sys.executable), nl=False)


def submit_all(plans: Sequence[LaunchPlan], out: Path, chain: bool) -> None:
    """Submits a job for each plan; with `chain` each waits for the one before.

    Raises:
        EnvironmentLacksError: sbatch is not on PATH.
        UserError: the output folder cannot be, or a run of that name exists.
        RunError: Slurm refused a job.
    """
    from dlbench.jobs.slurm import require_slurm, submit
    from dlbench.records.folder import create, prepare_output

    require_slurm()
    _note_unseen_data(plans)
    root = prepare_output(out)
    before: str | None = None
    for number, plan in enumerate(plans, 1):
        submission = submit(plan, create(root, plan), sys.executable, before if chain else None)
        before = submission.job_id
        click.echo(f"[{number}/{len(plans)}] job {submission.job_id}: {shared.describe_plan(plan)}", err=True)
        click.echo(submission.job_id)
    click.echo(f"next: dlbench status {out}", err=True)


def _note_unseen_data(plans: Sequence[LaunchPlan]) -> None:
    from dlbench.specs.plan import RunPlan

    for plan in plans:
        data = plan.workload.data if isinstance(plan, RunPlan) else None
        if data is not None and not data.is_synthetic and not Path(data.source).exists():
            click.echo(f"note: {data.source} is not visible from here; the compute nodes must see it", err=True)
            break
