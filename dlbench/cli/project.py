"""`dlbench project`: what rank counts that were not measured would do, with a band, or why nothing is said of them.

Each source of a projection is a command with the options that act there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import click

from dlbench.cli.choosing import expanded, named, open_store, read_comm_runs, read_runs, where_option
from dlbench.cli.estimate import amount_of
from dlbench.cli.options import FILE, OUTPUT, InOrder, decorated, size_in_bytes, value_option, write_output
from dlbench.cli.report import (
    FormatName,
    check_writable,
    emit,
    finish,
    format_option,
    network_option,
    prepared,
    require_modules,
)
from dlbench.errors import DlbenchError, UserError
from dlbench.removed import respelt_projection
from dlbench.units import whole_seconds

if TYPE_CHECKING:
    from dlbench.comm.measurements import CollectiveTable
    from dlbench.history.entry import HistoryEntry
    from dlbench.projection.exchange import ExchangeMethod
    from dlbench.projection.ingredients import Ingredients, SlowHosts
    from dlbench.projection.ledger import LedgerRow, MeasuredRun
    from dlbench.projection.page import ProjectedGroup, ProjectionReport
    from dlbench.projection.projected import Projection
    from dlbench.records.scan import Run
    from dlbench.report.document import Document, Section
    from dlbench.specs.comm import NetworkModel
    from dlbench.specs.system import SystemSpec
    from dlbench.specs.workload import Workload

SETTABLE = ("exchange", "fusion", "wire", "group_size", "topk_density")  # Keys of `sync` that a projection changes.
SCALING = click.option(
    "--scaling",
    type=click.Choice(["weak", "strong"]),
    help="weak: the batch per rank stays; strong: the global batch.  [default: as the runs]",
)
INGREDIENTS = click.option(
    "--ingredients",
    metavar="FILE",
    type=FILE,
    help="Write what the projection is made of, for `dlbench project ingredients`.",
)
STRATEGY = value_option(
    "--strategy", "all|NAME", "What other ways of sharing the training would take and hold: all, or one, e.g. fsdp."
)
MEMORY_LIMIT = value_option(
    "--memory-limit",
    "SIZE",
    "What a rank may hold, e.g. 16GiB, for --strategy.  [default: device.memory_bytes of the system]",
    callback=size_in_bytes,
)


Write = Callable[["Document", str], None]  # Writes a document; of CSV the named table.


class Sources(InOrder):
    """The commands of `dlbench project`; words as earlier versions took them are answered with the new ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        is_option = first.startswith("-") and first not in ctx.help_option_names
        is_path = first != "" and first not in self.commands and Path(first).exists()
        if is_option or is_path:
            ctx.fail(respelt_projection(args))
        return super().parse_args(ctx, args)


class Question(NamedTuple):
    """What is asked of every group: rank counts, and what shall differ from what was measured."""

    to: str  # As it was given.
    targets: tuple[int, ...]
    scaling: str | None = None  # weak or strong; None: as measured.
    costs: NetworkModel | None = None  # Of messages, of the groups' own system or of `system`.
    overrides: tuple[str, ...] = ()
    system: SystemSpec | None = None  # Another system, to whose nodes and network is projected.
    price: tuple[float | None, str] = (None, "")  # Of a node-hour, and its currency.
    history: Path | None = None

    @property
    def costs_of_system(self) -> NetworkModel | None:
        """The costs where they are of `system`; None: those of its data sheet count."""
        is_of_system = self.costs is not None and self.system is not None and self.costs.system == self.system.name
        return self.costs if is_of_system else None

    @property
    def costs_of_groups(self) -> NetworkModel | None:
        return None if self.costs_of_system else self.costs


def _given_runs(ctx: click.Context, _param: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Returns the folders. Raises `UserError`: there are none, as in `project runs --to 64` of earlier versions."""
    if not paths:
        command = ctx.command_path
        raise UserError(f"{command}: RUNS is missing; name the folders of runs behind it, e.g. {command} my-runs")
    return paths


def _counts(_ctx: click.Context, _param: click.Parameter, to: str) -> Question:
    from dlbench.specs.requests import parse_counts

    return Question(to, parse_counts(to, "--to"))


def _machine(_ctx: click.Context, _param: click.Parameter, name: str | None) -> SystemSpec | None:
    from dlbench.specs.choices import choose_system_with_origins

    return None if name is None else choose_system_with_origins(name, {})[0]


def _node_price(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float | None, str]:
    price, currency, hours_of = amount_of("--price-per-node-hour", text)
    if hours_of not in ("", "node"):
        raise UserError(f"--price-per-node-hour {text}: is of a {hours_of}-hour; give that of a node-hour")
    return price, currency


RUNS = click.argument("runs", nargs=-1, type=FILE, metavar="RUNS...", callback=_given_runs)
TO = click.option("--to", "question", required=True, metavar="64,256", callback=_counts, help="Rank counts to project.")


def _page_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of how a projection is printed, and passes the command `write`."""

    @functools.wraps(function)
    def command(output: Path | None, format_name: FormatName | None, full: bool, **arguments: Any) -> None:
        chosen = prepared("project", output, format_name)
        function(write=lambda document, table: emit(document, chosen, output, table, full=full), **arguments)

    shown = click.option("--full", is_flag=True, help="Text with all tables; default: one screen per group.")
    return decorated(command, [OUTPUT, format_option(*get_args(FormatName)), shown])


def _changes(costs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of what shall differ from what was measured, which the command gets in its `question`. `costs`:
    what those of `--network` replace.
    """
    way = f"Another way of exchanging gradients, repeatable: {', '.join(SETTABLE)}."
    slow = "Folder of a history: how many of the system's nodes are slow, and by how much."
    other = "Project to the nodes and the network of another system, by its data sheet."
    price = "What a node costs per hour, e.g. '9 EUR'."
    decorators = [
        TO,
        network_option(f"in place of {costs}"),
        SCALING,
        value_option("--set overrides", "sync.KEY=VALUE", way, multiple=True),
        value_option("--system", "SYSTEM", other, callback=_machine),
        value_option("--price-per-node-hour price", "PRICE", price, callback=_node_price),
        value_option("--history", "DIR", slow, type=FILE),
    ]

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(question: Question, network: Path | None, **arguments: Any) -> None:
            from dlbench.records.comm import read_network

            changes = {name: arguments.pop(name) for name in ("scaling", "overrides", "system", "price", "history")}
            costs = None if network is None else read_network(network)
            function(question=question._replace(costs=costs, **changes), **arguments)

        return decorated(command, decorators)

    return add


@click.group(cls=Sources)
def project() -> None:
    """Project step, throughput and efficiency to rank counts that were not measured, with bands.

    A projection is the account of the largest measured point, with what the network's costs, the scatter of nodes and
    the storage change from there. It comes with bands, a reason for each lost percent, and the error at points that
    were held out. What was never measured in kind is refused, with the command that would measure it. A command ends
    with 4 if nothing is said of any rank count.
    """


@project.command("runs")
@RUNS
@_changes("those fitted to the runs of dlbench comm in RUNS")
@where_option("--where", "runs")
@INGREDIENTS
@click.option("--record", is_flag=True, help="Keep the projection in RUNS, to be scored later.")
@STRATEGY
@MEMORY_LIMIT
@_page_options
def project_runs(
    runs: tuple[Path, ...],
    question: Question,
    where: tuple[str, ...],
    ingredients: Path | None,
    record: bool,
    strategy: str | None,
    memory_limit: int | None,
    write: Write,
) -> None:
    """Project from RUNS: folders of runs, single runs, histories.

    \b
    Examples:
      dlbench project runs my-runs --to 64,256,1024
      dlbench project runs my-runs --to 256 --network box.network.json -o projection.html
      dlbench project runs my-runs --to 256 --set sync.exchange=hierarchical --set sync.wire=bf16
      dlbench project runs my-runs --to 64,256 --record
      dlbench project runs my-runs --to 64,256 --strategy all --memory-limit 16GiB
    """
    from dlbench.projection import ledger
    from dlbench.projection.page import ProjectionReport
    from dlbench.projection.strategies.section import chosen

    check_writable(ingredients)
    if memory_limit is not None and strategy is None:
        raise UserError("--memory-limit has no effect without --strategy")
    strategies = () if strategy is None else chosen(strategy)
    measured = _read_groups(runs, where)
    groups = _with_costs(measured.groups, question, runs)
    is_changed = question.overrides or question.system or not all(group.configuration for group in groups)
    if record and is_changed:
        raise UserError("--record keeps what later runs can score; none can with --set, --system or another --scaling")
    recorded, problems = ledger.read_ledger(*expanded(runs))
    rows = ledger.against(recorded, measured.runs)
    _write_ingredients(groups, ingredients)
    projected = []
    for group, sample in zip(groups, measured.samples, strict=True):
        compare = None
        if strategies:
            compare = functools.partial(_strategies, question.system, strategies, memory_limit, sample, groups)
        one = _projected(group, question, rows, compare)
        projected.append(one)
        if record and one.projection.targets:
            path = ledger.record(expanded(runs)[0], group, one.projection, datetime.now(UTC))
            click.echo(f"{path}: recorded; after larger runs: dlbench project score {named(runs)}", err=True)
    report = ProjectionReport(as_of=measured.as_of, groups=tuple(projected), ledger=rows, damaged=problems)
    _write(report, question, write, measured.damaged)


@project.command("ingredients")
@click.argument("file", type=FILE)
@_changes("those in FILE")
@_page_options
def project_ingredients(file: Path, question: Question, write: Write) -> None:
    """Project from FILE, which holds what a projection is made of: written by `project runs --ingredients`, or by hand
    of figures of another tool or a publication (`dlbench show --schema ingredients`).

    \b
    Examples:
      dlbench project ingredients made.json --to 64,256
    """
    from dlbench.projection.ingredients import Ingredients
    from dlbench.projection.page import ProjectionReport
    from dlbench.records.scan import read_given

    made_by = "dlbench project runs RUNS --ingredients"
    group = read_given(file, Ingredients, "ingredients of a projection", made_by)
    group = _changed(group, question.costs_of_groups or group.network, question)
    _write(ProjectionReport(groups=(_projected(group, question),)), question, write)


@project.command("points")
@click.argument("file", type=FILE, metavar="FILE.csv")
@TO
@SCALING
@INGREDIENTS
@_page_options
def project_points(
    file: Path, question: Question, scaling: Literal["weak", "strong"] | None, ingredients: Path | None, write: Write
) -> None:
    """Project from any series up to 4 times as far. Columns of FILE.csv: ranks, nodes, run, and step_s or samples_per_s
    with batch_per_rank.

    \b
    Examples:
      dlbench project points series.csv --to 32
    """
    from dlbench.projection.page import ProjectionReport
    from dlbench.projection.series_file import read_points

    check_writable(ingredients)
    group = read_points(file, scaling or "weak")
    _write_ingredients([group], ingredients)
    _write(ProjectionReport(groups=(_projected(group, question),)), question, write)


@project.command("spec")
@click.argument("workload")
@TO
@value_option("--system", "SYSTEM", "The machine, by its data sheet.", required=True, callback=_machine)
@value_option("--preset", "NAME", "Preset of WORKLOAD.  [default: one whose precision SYSTEM has]")
@SCALING
@STRATEGY
@MEMORY_LIMIT
@_page_options
def project_spec(
    workload: str,
    question: Question,
    system: SystemSpec,
    preset: str | None,
    scaling: str | None,
    strategy: str | None,
    memory_limit: int | None,
    write: Write,
) -> None:
    """Project the training of WORKLOAD by data sheets alone, without runs. The result is ideal.

    \b
    Examples:
      dlbench project spec resnet50 --preset full --system p40-roce --to 8,64,2048
    """
    from dlbench.projection.ideal import by_data_sheet
    from dlbench.projection.strategies.section import chosen

    document, is_answered = by_data_sheet(
        _workload_for(workload, preset, system),
        system,
        question.targets,
        strategies=("data",) if strategy is None else chosen(strategy),
        is_strong=scaling == "strong",
        memory_limit=memory_limit,
    )
    write(document, "strategies")
    finish((), "" if is_answered else f"{question.to}: no strategy of these fits; the report says why")


@project.command("score")
@RUNS
@where_option("--where", "runs")
@_page_options
def project_score(runs: tuple[Path, ...], where: tuple[str, ...], write: Write) -> None:
    """Score the projections recorded in RUNS (project runs --record) by runs that were planned since.

    Ends with 4 if nothing recorded was measured since, or a record was changed.

    \b
    Examples:
      dlbench project score my-runs
    """
    from dlbench.projection.ledger import against, read_ledger
    from dlbench.projection.page import ProjectionReport, document_of

    measured = _read_groups(runs, where, is_whole=False)
    recorded, problems = read_ledger(*expanded(runs))
    rows = against(recorded, measured.runs)
    report = ProjectionReport(as_of=measured.as_of, groups=(), ledger=rows, damaged=problems)
    write(document_of(report), "ledger")
    nothing = f"{named(runs)}: no recorded target was measured since; --record keeps a projection"
    finish((*measured.damaged, *problems), "" if rows else nothing)


def _projected(
    group: Ingredients,
    question: Question,
    rows: Sequence[LedgerRow] = (),
    compare: Callable[[Ingredients, Ingredients | None, Projection], Section] | None = None,
) -> ProjectedGroup:
    """Returns the projection of a group with what follows from it. `rows`: of the ledger, of every system; `compare`:
    makes the table of strategies.
    """
    from dlbench.projection.cost import cost_section
    from dlbench.projection.ledger import misses_of
    from dlbench.projection.page import projected_group
    from dlbench.projection.spec_machine import elsewhere
    from dlbench.projection.step import project as project_step

    there = None if question.system is None else elsewhere(group, question.system, question.costs_of_system)
    if there is not None and there.system == group.system:
        group, there = there, None
    way = _way(question.overrides, there or group)
    projection = project_step(group, question.targets, way=way, misses=misses_of(rows, group.system), there=there)
    name = group.configuration or group.digest
    sections: list[Section] = []
    if projection.targets:
        if compare is not None:
            sections.append(compare(group, there, projection))
        cost = cost_section(name, group, projection.targets, *question.price)
        if cost is not None:
            sections.append(cost)
        elif question.price[0] is not None:
            click.echo(f"dlbench: --price-per-node-hour: no price of {group.title}: its batch is not known", err=True)
    return projected_group(name, group, projection, ledger=rows, more=sections)


def _strategies(
    system: SystemSpec | None,
    strategies: Sequence[str],
    memory_limit: int | None,
    sample: Run,
    groups: Sequence[Ingredients],
    group: Ingredients,
    there: Ingredients | None,
    projection: Projection,
) -> Section:
    """Returns the table of strategies at the targets of a group, with measured ones next to them. `sample`: a run of
    its largest point; `groups`: all of RUNS, of which some may differ in strategy alone.
    """
    from dlbench.projection.strategies.section import case_of, measured_rows, projected_rows, section

    priced = there or group
    case, basis = case_of(priced, sample, projection.cost_scale, memory_limit=memory_limit, system=system)
    # Of another system no run is a measurement.
    measured = () if there else measured_rows(case, group, groups)
    is_strong, strategy = priced.scaling == "strong", group.anchor.strategy or "data"
    rows = projected_rows(case, projection.targets, is_strong=is_strong, strategies=strategies, own=strategy)
    return section((*measured, *rows), basis, anchor=f"strategies-{group.configuration or group.digest}")


def _write(report: ProjectionReport, question: Question, write: Write, damaged: Sequence[str] = ()) -> None:
    """Writes a report; ends the command with 4 where no rank count was projected or one of the runs is damaged."""
    from dlbench.projection.page import document_of

    write(document_of(report), "targets")
    nothing = f"{question.to}: no rank count can be projected; each refusal says what would mend it"
    finish(damaged, "" if any(group.projection.targets for group in report.groups) else nothing)


def _write_ingredients(groups: Sequence[Ingredients], path: Path | None) -> None:
    """Writes what a projection is made of, where that was asked for. Raises `UserError`: there are several groups."""
    if path is None:
        return
    if len(groups) > 1:
        titles = f"{len(groups)} ({'; '.join(group.title for group in groups)})"
        raise UserError(f"--ingredients holds one group, RUNS holds {titles}: choose by --where")
    write_output((groups[0].model_dump_json(indent=1) + "\n").encode("utf-8"), path)
    click.echo(f"{path}: ingredients {groups[0].digest}", err=True)


def _workload_for(name: str, preset: str | None, system: SystemSpec) -> Workload:
    """Returns a preset of a workload; where none is asked for, one in whose precision the device can be priced."""
    from dlbench.projection.spec_machine import peak_tflops
    from dlbench.specs.choices import WorkloadFile, choose
    from dlbench.specs.files import find

    file = WorkloadFile(find("workloads", name))
    if preset is not None:
        return choose(file, preset, {}).workload()
    default = file.preset_on(system)
    for other in (default, *file.presets):
        workload = choose(file, other, {}).workload()
        if peak_tflops(system, workload.train.precision):
            return workload
    return choose(file, default, {}).workload()


def _with_costs(groups: Sequence[Ingredients], question: Question, runs: Sequence[Path]) -> list[Ingredients]:
    """Returns groups of RUNS as they are asked for: with the costs given, else those fitted to runs of `dlbench comm`
    in RUNS.
    """
    from dlbench.comm.measurements import tabulate

    if question.costs_of_groups is not None:
        return [_changed(group, question.costs_of_groups, question) for group in groups]
    table = tabulate(read_comm_runs(runs))
    return [_changed(group, _fitted(table, group, named(runs)), question) for group in groups]


def _changed(group: Ingredients, costs: NetworkModel | None, question: Question) -> Ingredients:
    """Returns a group with these costs of messages, the scaling that is asked for and the slow hosts of a history."""
    from dlbench.projection.gathering import with_network

    group = with_network(group, costs)
    if question.scaling not in (None, group.scaling):
        # Of another scaling no run of these is a measurement.
        notes = (f"Projected for {question.scaling} scaling, and measured for the other.", *group.notes)
        group = group.model_copy(update={"scaling": question.scaling, "configuration": "", "notes": notes})
    if question.history is not None:
        require_modules("project --history", "scipy")
        slow_hosts = _slow_hosts(open_store(question.history).entries(), group.system, str(question.history))
        group = group.model_copy(update={"slow_hosts": slow_hosts})
    return group


def _slow_hosts(entries: Sequence[HistoryEntry], system: str, source: str) -> SlowHosts:
    """Returns how many hosts of a system are slow by its history. Raises `UserError`: the history compares none."""
    from dlbench.analysis.slow_nodes import TO_EXCLUDE
    from dlbench.history.slow_months import slow_months
    from dlbench.projection.ingredients import SlowHosts

    hosts = slow_months(entry for entry in entries if system in ("", entry.system)).hosts
    ratios = [(host.verdict, host.current.value) for host in hosts if host.current is not None]
    compared = [(verdict, ratio) for verdict, ratio in ratios if verdict != "too few sessions"]
    if not compared:
        raise UserError(
            f"--history {source}: no host of system {system} has the five sessions that show whether it is slow; leave "
            "the option out, or import more runs on several hosts"
        )
    slow = tuple(math.log(ratio) for verdict, ratio in compared if verdict in TO_EXCLUDE)
    return SlowHosts(hosts=len(compared), ratios=slow, source=source)


class _MeasuredGroups(NamedTuple):
    """Groups of comparable runs."""

    groups: Sequence[Ingredients]
    damaged: Sequence[str]
    as_of: str  # When the newest run finished.
    runs: Sequence[MeasuredRun]  # All of them, for the ledger.
    samples: Sequence[Run]  # Of each group a run of its largest point.


def _read_groups(runs: Sequence[Path], where: Sequence[str], *, is_whole: bool = True) -> _MeasuredGroups:
    """Returns the groups of comparable runs. `is_whole`: with what takes to read step files and samples again."""
    from dlbench.analysis import scaling
    from dlbench.analysis.table import tabulate
    from dlbench.projection.gathering import gathered
    from dlbench.projection.ledger import measured_in
    from dlbench.views.controls import is_control

    require_modules("project", "scipy")
    table = tabulate(read_runs(runs, where), with_causes=True)
    groups = scaling.groups(table)
    results = [group for group in groups if not is_control(group.sample)] or groups
    source = named(runs)
    ingredients = [gathered(group, table, groups=groups, source=source, is_whole=is_whole) for group in results]
    if not ingredients:
        finish(table.damaged, f"{named(runs)}: no run has figures; `dlbench status` says why")
    finished = [run.record.finished for run in table.runs.values() if run.record is not None]
    created = {run_id: run.plan.created for run_id, run in table.runs.items()}
    measured = [run for group in ingredients for run in measured_in(group, created)]
    samples = [table.runs[group.anchor.runs[0].run_id] for group in ingredients]
    return _MeasuredGroups(ingredients, table.damaged, whole_seconds(max(finished)), measured, samples)


def _fitted(table: CollectiveTable, ingredients: Ingredients, where: str) -> NetworkModel | None:
    """Costs fitted to runs of the collective benchmark, as `dlbench comm fit` does; what hinders is said on stderr."""
    from dlbench.comm.fits import fit_one

    system, exchange = ingredients.system, ingredients.exchange
    groups = [group for group in table.groups if group.sample.plan.system.name == system]
    carriers = {(one.is_library, one.carrier) for group in groups for one in group.series}
    if not carriers:
        return None
    # Of dlbench's own algorithms, where there are any, those over the carrier of the runs.
    own = sorted(name for is_library, name in carriers if is_library == min(carriers)[0])
    transport = next((name for name in own if exchange and name.removeprefix("torch-") == exchange.carrier), None)
    try:
        return fit_one(table, system=system, transport=transport, dtype=None, fitted="", where=where).network
    except DlbenchError as error:
        click.echo(f"dlbench: no costs of the network: {error}", err=True)
        return None


def _way(overrides: tuple[str, ...], ingredients: Ingredients) -> ExchangeMethod | None:
    """Another way of exchanging gradients than the runs had."""
    from pydantic import ValidationError

    from dlbench.projection.exchange import ExchangeMethod
    from dlbench.specs.problems import problem_of
    from dlbench.specs.requests import parse_set
    from dlbench.specs.sync import GROUPED, SyncSpec, layout_problem

    if not overrides:
        return None
    known = {f"sync.{name}": name for name in SETTABLE}
    given = parse_set(overrides)
    if unknown := [key for key in given if key not in known]:
        raise UserError(f"--set {unknown[0]}: a projection changes the exchange alone: {', '.join(known)}")
    asked = {known[key]: value for key, value in given.items()}
    ran = ingredients.exchange
    if ran is None:
        raise UserError("--set: the runs recorded no exchange, so none can be changed")
    try:
        sync = SyncSpec.model_validate({"exchange": ran.exchange, "wire": ran.wire, **asked})
    except ValidationError as error:
        raise UserError(f"--set sync.{problem_of(SyncSpec, error)}") from None
    for key, is_idle in (("group_size", sync.exchange not in GROUPED), ("topk_density", sync.wire != "topk")):
        if key in asked and is_idle:
            raise UserError(f"--set sync.{key} has no effect on exchange {sync.exchange} with wire {sync.wire}")
    if problem := layout_problem(sync, engine=ingredients.engine, ranks=2 * ingredients.per_node, nodes=2):
        raise UserError(f"--set: {problem}")
    return ExchangeMethod(
        exchange=sync.exchange,
        fusion=sync.fusion if "fusion" in asked else None,
        wire=sync.wire,
        group_size=sync.group_size or ran.group_size,
        topk_density=sync.topk_density if sync.wire == "topk" else None,
        by=(ingredients.engine, ran.carrier),
    )
