"""`dlbench run`: a series of runs on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.cli.ending import MACHINE_ERRORS, os_error_words
from dlbench.cli.streams import cleaned, terminal
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, IncompleteDataError, UserError

if TYPE_CHECKING:
    from dlbench.jobs.processes import OnProgress
    from dlbench.jobs.verdict import Outcome
    from dlbench.records.scan import Scan
    from dlbench.specs.plan import LaunchPlan, RunPlan
    from dlbench.specs.requests import Request
    from dlbench.specs.system import SystemSpec

MAX_RANKS_PER_CORE = 64
"""Where there is no scheduler; to try layouts out, ranks may share cores."""

INSTALL_ANALYSIS = "pip install 'dlbench[analysis]'"


@click.command(cls=shared.GroupedCommand)
@shared.plan_options
@click.option("--ranks", default="1", show_default=True, metavar="1,2,4", help="Rank counts.")
@click.option("--system", default="local", show_default=True, metavar="NAME|FILE", help="System file.")
@click.option(
    "--decompose",
    is_flag=True,
    help="Run everything also with synthetic input, and without exchange; tell what input and exchange cost.",
)
@click.option("--watch-cost", is_flag=True, help="Run everything also unwatched; tell and record what watching costs.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first run that fails.")
@click.option("--no-progress", is_flag=True, help="Plain lines instead of a progress bar.")
def run(ranks: str, system: str, fail_fast: bool, no_progress: bool, **options: Any) -> None:
    """Train and measure WORKLOAD (a name or a YAML file) at each rank count.

    \b
    Example:
      dlbench run resnet50 --preset ci --ranks 1,2 --engine horovod --repeats 3 --data synthetic --out runs
      dlbench run bert --preset ci --ranks 2 --sweep engine.name=horovod,ddp
      dlbench run cosmoflow --preset ci --ranks 1,2 --data data/demo/density --to-accuracy
      dlbench run cosmoflow --preset ci --ranks 2 --data data/demo/density --repeats 5 --decompose
      dlbench run resnet50 --preset ci --ranks 2 --repeats 10 --ab plain engine.name=ddp --tag branch=main
    """
    from dlbench.specs.requests import parse_counts
    from dlbench.specs.variants import left_out

    request = shared.request_from(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    plans = shared.expand_request(request)
    for one in shared.systems_of(plans):
        require_here(one)
    require_room(plans)
    shared.require_data(plans)
    for line in left_out(request, plans):
        click.echo(line, err=True)
    shared.note_few_pairs(request)
    if options["dry_run"]:
        print_commands(plans, options["out"])
        return
    shared.require_engines(plans)
    following = f"dlbench report {shown(options['out'])} -o report.html"
    if request.sides:
        following = f"dlbench compare {shown(options['out'])} --paired --where series={plans[0].series.id}"
    code = run_all(plans, options["out"], following, fail_fast=fail_fast, bar=sys.stderr.isatty() and not no_progress)
    if lines_of := _comparison_of(request):
        _compare(plans, options["out"], lines_of)
    sys.exit(int(code))


def _comparison_of(request: Request) -> Callable[[Scan], list[str]] | None:
    """What tells a series' runs against each other; None for a series of runs of one kind."""
    if request.sides:
        return _sides
    if request.decompose:
        return _decomposition
    return _watch_cost if request.watch_cost else None


def _compare(plans: Sequence[RunPlan], out: Path, lines_of: Callable[[Scan], list[str]]) -> None:
    """Tells what the variants or sides of a series show; of the cost of watching every watched run keeps a file.

    Raises:
        RunError: a file cannot be written.
    """
    import importlib.util

    if importlib.util.find_spec("numpy") is None:
        click.echo(f"the runs are not compared: numpy is not installed; remedy: {INSTALL_ANALYSIS}", err=True)
        return
    from dlbench.report.wording import clean

    for line in lines_of(runs_found(plans, out)):
        click.echo(clean(line))


def runs_found(plans: Sequence[RunPlan], out: Path) -> Scan:
    """The runs of a series that are there, whatever became of them; what is damaged is said on standard error."""
    from dlbench.records.scan import Scan, read_run
    from dlbench.report.wording import clean

    found = Scan(root=out)
    for folder in (out / plan.run_id for plan in plans):
        if not folder.exists():  # --fail-fast, or a machine that lacks something
            continue
        try:
            found.runs.append(read_run(folder))
        except IncompleteDataError as error:
            click.echo(clean(str(error)), err=True)
    return found


def _sides(found: Scan) -> list[str]:
    from dlbench.gate.page.document import paired_lines

    return paired_lines(found)


def _decomposition(found: Scan) -> list[str]:
    from dlbench.views.decomposition.numbers import decompositions
    from dlbench.views.decomposition.view import decomposition_lines

    return decomposition_lines(decompositions(found.runs))


def _watch_cost(found: Scan) -> list[str]:
    from dlbench.records.watch_cost import write_watch_cost
    from dlbench.views.watch_cost import watch_cost_lines, watch_costs

    costs = watch_costs(found.runs)
    for cost in costs:
        for run in cost.watched if cost.overhead is not None else ():
            assert cost.overhead is not None
            write_watch_cost(run.folder, run.plan.run_id, cost.overhead)
    return watch_cost_lines(costs)


def require_here(system: SystemSpec) -> None:
    """A system with a scheduler can be run from inside an allocation only.

    Raises:
        UserError: this is no allocation.
        EnvironmentLacksError: the launcher's program is not installed.
    """
    if system.scheduler == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            f"system {system.name} has a scheduler and this is no allocation: use `dlbench submit`, or salloc"
        )
    launcher = system.launch.launcher
    if system.modules or system.setup:
        return  # which may bring it
    if launcher != "local" and shutil.which(launcher.split("-")[0]) is None:
        raise EnvironmentLacksError(f"launcher {launcher}: {launcher.split('-')[0]} is not on PATH")


def require_room(plans: Sequence[LaunchPlan]) -> None:
    """Refuses more ranks than one machine can start and still measure anything.

    Raises:
        UserError: a plan has more than `MAX_RANKS_PER_CORE` on every core.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = max((plan.layout.ranks for plan in plans if plan.system.scheduler == "none"), default=0)
    if ranks > MAX_RANKS_PER_CORE * cores:
        raise UserError(
            f"--ranks {ranks}: {MAX_RANKS_PER_CORE * cores} is the most on this machine, {MAX_RANKS_PER_CORE} for each "
            f"of its {cores} cores: more would measure how processes wait for memory and cores"
        )


def print_commands(plans: Sequence[LaunchPlan], out: Path) -> None:
    """What would start each run, on standard output; for `--dry-run`."""
    from dlbench.jobs import launch
    from dlbench.jobs.run_script import has_script, render_run_script, start_command
    from dlbench.records.folder import RunFolder
    from dlbench.specs.plan import RunPlan

    for plan in plans:
        folder = RunFolder(out.absolute() / plan.run_id)
        batch = f", batch {plan.workload.train.batch_per_rank} per rank" if isinstance(plan, RunPlan) else ""
        click.echo(f"# {shared.describe_plan(plan)}{batch}")
        if plan.system.launch.launcher == "local":
            click.echo(f"# {plan.layout.ranks} times, each rank with its own DLBENCH_RANK:")
        # Bytes: of text, click takes terminal sequences out where no terminal reads.
        if has_script(plan):
            click.echo(render_run_script(plan, folder, sys.executable).encode(), nl=False)
        else:
            click.echo(launch.quoted(start_command(plan, folder, sys.executable)).encode())


def run_all(plans: Sequence[LaunchPlan], out: Path, following: str, *, fail_fast: bool, bar: bool) -> ExitCode:
    """Runs all plans on this machine, one after the other; `following` is the command to go on with.

    Returns:
        What the command ends with: the code of the first run that went wrong.

    Raises:
        UserError: the output folder cannot be, a run of that name exists, or a variable's value is not where a plan
            says.
        EnvironmentLacksError: the launcher's program is not installed, or the ranks' Python cannot be executed.
    """
    from dlbench.jobs import launch, local, variables
    from dlbench.jobs.run_script import has_script
    from dlbench.records.folder import prepare_output

    for plan in plans:
        variables.resolve(launch.rank_environment(plan))  # before anything is made
    # What modules and setup lines make of PATH is known when they have run.
    for python in dict.fromkeys(plan.system.python for plan in plans if not has_script(plan)):
        if python is not None:
            local.require_python(python)
    root = prepare_output(out)
    worst, valid, missed = ExitCode.OK, 0, 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A cancelled CI job or a closed terminal ends the ranks as Ctrl-C does; nohup asks for the contrary.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    with _progress(plans, bar) as progress:
        for plan in plans:
            outcome = _run_one(plan, root, progress)
            valid += outcome.exit_code is ExitCode.OK
            missed += not outcome.reached
            if outcome.exit_code is not ExitCode.OK:
                worst = outcome.exit_code if worst is ExitCode.OK else worst
                # What the machine lacks for one run it lacks for the next.
                if fail_fast or outcome.exit_code in (ExitCode.ENVIRONMENT, ExitCode.USAGE):
                    break
    then = f"; next: {following}" if valid else ""
    short = f", {missed} of them did NOT reach the quality" if missed else ""
    click.echo(f"{valid} of {len(plans)} runs valid{short}, in {root}{then}", err=True)
    return worst


def _run_one(plan: LaunchPlan, root: Path, progress: _Lines) -> Outcome:
    """One run of a series; a folder that is full or gone is a failure of this run, not the end of the series.

    Raises:
        KeyboardInterrupt: passed on.
    """
    from dlbench.jobs import local
    from dlbench.jobs.verdict import Outcome
    from dlbench.records.folder import create

    on_progress = progress.begin(plan)
    start = time.monotonic()
    try:
        outcome = local.run(plan, create(root, plan), on_progress)
    except DlbenchError as error:
        outcome = Outcome(exit_code=error.exit_code, story=str(error))
    except OSError as error:
        code = ExitCode.ENVIRONMENT if error.errno in MACHINE_ERRORS else ExitCode.RUN_FAILED
        outcome = Outcome(exit_code=code, story=os_error_words(error))
    progress.end(plan, outcome, time.monotonic() - start)
    return outcome


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def shown(path: Path) -> str:
    """A path as a shell takes it."""
    import shlex

    return shlex.quote(str(path))


class _Lines:
    """Plain lines: one when a run begins to count, one when it ends."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def begin(self, plan: LaunchPlan) -> OnProgress:
        """The start of a run."""
        click.echo(f"[{self._done + 1}/{self._total}] {shared.describe_plan(plan)}", err=True)
        return lambda number, of, stage: None

    def end(self, plan: LaunchPlan, outcome: Outcome, seconds: float) -> None:
        """The end of a run."""
        from dlbench.units import format_seconds

        self._done += 1
        took = format_seconds(seconds)
        what = f"done in {took}" if not outcome.story else f"FAILED after {took}: {outcome.story}"
        what += f": {outcome.quality}" if outcome.quality else ""
        click.echo(f"[{self._done}/{self._total}] {what}", err=True)


class _Bar(_Lines):
    """A progress bar over all runs, with the current step."""

    def __init__(self, total: int, bar: Any, task: Any) -> None:
        super().__init__(total)
        self._bar = bar
        self._task = task

    def begin(self, plan: LaunchPlan) -> OnProgress:
        from rich.markup import escape

        text = escape(cleaned(shared.describe_plan(plan)))
        self._bar.update(self._task, description=text, completed=self._done)

        def tell(number: int, of: int, stage: str) -> None:
            share = number / of if of else 0.0
            self._bar.update(self._task, completed=self._done + 0.99 * share, description=text)

        return tell

    def end(self, plan: LaunchPlan, outcome: Outcome, seconds: float) -> None:
        from rich.markup import escape

        self._done += 1
        self._bar.update(self._task, completed=self._done)
        text = escape(cleaned(shared.describe_plan(plan)))
        if outcome.story:
            self._bar.console.print(f"[red]FAILED[/red] {text}: {escape(cleaned(outcome.story))}")
        elif outcome.quality:
            self._bar.console.print(f"{text}: {escape(cleaned(outcome.quality))}")


@contextmanager
def _progress(plans: Sequence[LaunchPlan], bar: bool) -> Iterator[_Lines]:
    if not bar:
        yield _Lines(len(plans))
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: the bar is drawn on the cores that the ranks compute on.
    with Progress(*columns, console=terminal(), refresh_per_second=2) as progress:
        yield _Bar(len(plans), progress, progress.add_task("", total=len(plans)))
