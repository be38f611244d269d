"""`dlbench project`: projects runs to rank counts that were not measured. Each source of a projection is a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from dlbench.cli.estimate import amount_of, whole
from dlbench.cli.options import FILE, OUTPUT, InOrder, decorated, size_in_bytes, value_option
from dlbench.cli.report import (
    FormatName,
    check_writable,
    emit,
    expanded,
    finish,
    format_option,
    named,
    network_option,
    prepared,
    where_option,
)
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.cli.projecting import Write
    from dlbench.specs.system import SystemSpec

SCALING_HELP = "weak: fixed batch per rank. strong: fixed global batch."
SCALING_TYPE = click.Choice(["weak", "strong"])
SCALING = value_option("--scaling", None, SCALING_HELP, "weak", type=SCALING_TYPE)
INGREDIENTS = value_option("--ingredients", "FILE", "Write the inputs to FILE, for `project ingredients`.", type=FILE)
STRATEGY = value_option("--strategy", "all|NAME", "Also project time and memory of one strategy, e.g. fsdp, or all.")
MEMORY_LIMIT = value_option(
    "--memory-limit",
    "SIZE",
    "Memory that a rank may use, e.g. 16GiB, for --strategy.  [default: device.memory_bytes of the system]",
    callback=size_in_bytes,
)
TO = value_option("--to", "64,256", "Rank counts to project to.", required=True)


def _given_runs(ctx: click.Context, _param: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    if not paths:
        command = ctx.command_path
        raise UserError(f"{command}: RUNS is missing; add the folders of the runs, e.g. {command} my-runs")
    return paths


RUNS = click.argument("runs", nargs=-1, type=FILE, metavar="RUNS...", callback=_given_runs)


def _machines(_ctx: click.Context, _param: click.Parameter, names: tuple[str, ...]) -> tuple[SystemSpec, ...]:
    from dlbench.specs.choices import choose_system_with_origins

    systems = {name: choose_system_with_origins(name, {})[0] for name in names}
    if len({system.name for system in systems.values()}) < len(names) or len(names) > 2:
        raise UserError(f"--system {' '.join(names)}: needs one system, or two with different names")
    return tuple(systems.values())


def _machine(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> SystemSpec | None:
    if len(names) > 1:
        raise UserError(
            f"--system {' '.join(names)}: takes one system here, because computing stays that of the runs; compare "
            f"systems by their data sheets: dlbench project spec WORKLOAD --system {' --system '.join(names)}"
        )
    return next(iter(_machines(ctx, param, names)), None)


def _node_price(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float | None, str]:
    price, currency, hours_of = amount_of("--price-per-node-hour", text)
    if hours_of not in ("", "node"):
        raise UserError(f"--price-per-node-hour {text}: must be the price of a node-hour, not of a {hours_of}-hour")
    return price, currency


def _node_prices(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[Sequence[float | None], str]:
    """Returns prices of a node-hour, and their currency."""
    amounts = [_node_price(ctx, param, text) for text in texts]
    if len({currency for _, currency in amounts}) > 1:
        raise UserError(f"--price-per-node-hour {' and '.join(texts)}: must have one currency")
    return [price for price, _ in amounts], next((currency for _, currency in amounts), "")


def _page_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of the output, and passes the command a function `write`."""

    @functools.wraps(function)
    def command(output: Path | None, format_name: FormatName | None, full: bool, **arguments: Any) -> None:
        # Only some projections have a chart, so that the process that draws is started when one has.
        chosen = prepared("project", output, format_name, starts_drawing=False)
        function(write=lambda document, table: emit(document, chosen, output, table, full=full), **arguments)

    full_option = click.option("--full", is_flag=True, help="Print all tables as text (default: one screen per group).")
    return decorated(command, [OUTPUT, format_option(*get_args(FormatName)), full_option])


def _question_options(costs: str, scaling: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of `projecting.question_of`; `costs`: what --network replaces; `scaling`: the default."""
    exchange_help = "Change the gradient exchange, repeatable: exchange, fusion, wire, group_size, topk_density."
    slow = "History folder: take from it how many nodes of the system are slow, and by how much."
    system_help = "Project to the nodes and the network of another system, from its data sheet."
    price = "Price of a node-hour, e.g. '9 EUR'."
    decorators = [
        TO,
        network_option(f"instead of {costs}"),
        value_option("--scaling", None, f"{SCALING_HELP}  [default: {scaling}]", type=SCALING_TYPE),
        value_option("--set overrides", "sync.KEY=VALUE", exchange_help, multiple=True),
        value_option("--system", "SYSTEM", system_help, multiple=True, callback=_machine),
        value_option("--price-per-node-hour price", "PRICE", price, callback=_node_price),
        value_option("--history", "DIR", slow, type=FILE),
    ]
    return functools.partial(decorated, decorators=decorators)


@click.group(cls=InOrder)
def project() -> None:
    """Project step time, throughput and efficiency to rank counts that were not measured.

    A projection starts from the largest measured point and adds the effects of more ranks: network costs, differences
    between nodes, storage. It has uncertainty bands, causes of losses, and its error at left-out points. If a
    measurement is missing, the command for it is printed. Exits with 4 if no rank count can be projected.
    """


@project.command("runs")
@RUNS
@_question_options("costs fitted to the `dlbench comm` runs in RUNS", "that of the measured points")
@where_option("--where", "runs")
@INGREDIENTS
@click.option("--record", is_flag=True, help="Store the projection in RUNS, for `dlbench project score`.")
@STRATEGY
@MEMORY_LIMIT
@_page_options
def project_runs(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    ingredients: Path | None,
    record: bool,
    strategy: str | None,
    memory_limit: int | None,
    write: Write,
    **question_options: Any,
) -> None:
    """Project from RUNS: run folders, folders of runs, histories.

    \b
    Examples:
      dlbench project runs my-runs --to 256 --network box.network.json -o projection.html
      dlbench project runs my-runs --to 256 --set sync.exchange=hierarchical --set sync.wire=bf16
      dlbench project runs my-runs --to 64,256 --strategy all --memory-limit 16GiB
    """
    from dlbench.cli import projecting
    from dlbench.projection import ledger
    from dlbench.projection.page import ProjectionReport
    from dlbench.projection.strategies.section import chosen

    question = projecting.question_of(**question_options)
    check_writable(ingredients)
    if memory_limit is not None and strategy is None:
        raise UserError("--memory-limit has no effect without --strategy")
    strategies = () if strategy is None else chosen(strategy)
    measured = projecting.read_groups(runs, where)
    groups = projecting.with_costs(measured.groups, question, runs)
    is_changed = question.overrides or question.system or not all(group.configuration for group in groups)
    if record and is_changed:
        raise UserError("--record cannot be combined with --set, --system or another --scaling: no run could score it")
    recorded, problems = ledger.read_ledger(*expanded(runs))
    rows = ledger.against(recorded, measured.runs)
    projecting.write_ingredients(groups, ingredients)
    projected = []
    for group, sample in zip(groups, measured.samples, strict=True):
        compared = None
        if strategies:
            least = projecting.least_costs(group, question, runs)
            compared = projecting.StrategiesAsked(strategies, memory_limit, sample, groups, least)
        projected.append(projecting.projected(group, question, rows, compared))
        projection = projected[-1].projection
        if record and projection.targets:
            path = ledger.record(expanded(runs)[0], group, projection, datetime.now(UTC))
            click.echo(f"{path}: recorded; after larger runs: dlbench project score {named(runs)}", err=True)
    report = ProjectionReport(as_of=measured.as_of, groups=tuple(projected), ledger=rows, damaged=problems)
    projecting.write_report(report, question, write, measured.damaged)


@project.command("ingredients")
@click.argument("file", type=FILE)
@_question_options("the costs in FILE", "that in FILE")
@_page_options
def project_ingredients(file: Path, write: Write, **question_options: Any) -> None:
    """Project from FILE, which contains the inputs of a projection.

    FILE is written by `project runs --ingredients`, or by hand from figures of another tool or a publication (`dlbench
    show --schema ingredients`).

    \b
    Example:
      dlbench project ingredients ingredients.json --to 64,256
    """
    from dlbench.cli import projecting
    from dlbench.projection.ingredients import Ingredients
    from dlbench.records.scan import read_given

    question = projecting.question_of(**question_options)
    made_by = "dlbench project runs RUNS --ingredients"
    group = read_given(file, Ingredients, "ingredients of a projection", made_by)
    group = projecting.changed(group, question.costs_of_groups or group.network, question)
    projecting.write_projection(group, question, write)


@project.command("points", short_help="Project from a CSV file of measured points.")
@click.argument("file", type=FILE, metavar="FILE.csv")
@TO
@SCALING
@INGREDIENTS
@_page_options
def project_points(
    file: Path, to: str, scaling: Literal["weak", "strong"], ingredients: Path | None, write: Write
) -> None:
    """Project from a CSV file of measured points, to at most 4 times the largest rank count.

    Columns of FILE.csv: ranks, nodes, run, and step_s, or samples_per_s with batch_per_rank.

    \b
    Example:
      dlbench project points series.csv --to 32
    """
    from dlbench.cli import projecting
    from dlbench.projection.points_only import read_points

    question = projecting.question_of(to)
    check_writable(ingredients)
    group = read_points(file, scaling)
    projecting.write_ingredients([group], ingredients)
    projecting.write_projection(group, question, write)


@project.command("spec", short_help="Project the training of a workload from data sheets.")
@click.argument("workload")
@TO
@value_option(
    "--system systems",
    "SYSTEM",
    "System to project to, by its data sheet; a second one is compared with it.",
    required=True,
    multiple=True,
    callback=_machines,
)
@value_option("--preset", "NAME", "Preset of WORKLOAD.  [default: one whose precision SYSTEM supports]")
@value_option("--set overrides", "KEY=VALUE", "Change a setting of model, data or train, repeatable.", multiple=True)
@SCALING
@STRATEGY
@MEMORY_LIMIT
@value_option("--samples", "N", "Samples of the training (default: those of the recipe).", callback=whole)
@value_option(
    "--price-per-node-hour prices",
    "PRICE",
    "Price of a node-hour, e.g. '9 EUR'; one for each --system, in their order.",
    multiple=True,
    callback=_node_prices,
)
@_page_options
def project_spec(
    workload: str,
    to: str,
    systems: tuple[SystemSpec, ...],
    preset: str | None,
    overrides: tuple[str, ...],
    scaling: str,
    strategy: str | None,
    memory_limit: int | None,
    samples: int | None,
    prices: tuple[Sequence[float | None], str],
    write: Write,
) -> None:
    """Project the training of WORKLOAD from data sheets alone, without runs; an upper bound.

    With two systems, time, node-hours, energy and price of the same training are compared, and the numbers of nodes at
    which they are equal are searched.

    \b
    Examples:
      dlbench project spec resnet50 --preset full --system p40-roce --to 8,64,2048
      dlbench project spec bert --preset 13b --system abci --to 1024 --strategy all --set train.batch_per_rank=1
      dlbench project spec resnet50 --system abci --system p40-roce --to 8,64,512
    """
    from dlbench.projection.ideal import IdealCase, by_data_sheet, training_samples, workload_for
    from dlbench.projection.strategies.section import chosen
    from dlbench.specs.choices import read_sizes
    from dlbench.specs.requests import parse_counts, parse_set

    settings = read_sizes(parse_set(overrides), "--set")
    strategies = ("data",) if strategy is None else chosen(strategy)
    trained, counts = workload_for(workload, preset, systems, settings), parse_counts(to, "--to")
    smallest_batch = trained.train.batch_per_rank * min(counts)
    num_samples, work = training_samples(trained, samples, smallest_batch)
    node_prices, currency = prices
    if len(node_prices) not in (0, len(systems)):
        raise UserError(
            f"--price-per-node-hour: {len(node_prices)} prices for {len(systems)} systems; give one for each"
        )
    cases = [
        IdealCase(
            workload=trained,
            system=system,
            strategies=strategies,
            memory_limit=memory_limit,
            global_batch=smallest_batch if scaling == "strong" else None,
            samples=num_samples,
            node_price=price,
            overrides=settings,
        )
        for system, price in zip(systems, node_prices or [None] * len(systems), strict=True)
    ]
    document, is_answered = by_data_sheet(cases, counts, work=work, currency=currency)
    write(document, "strategies" if len(systems) == 1 else "costs")
    finish((), f"{to}: none of these strategies fits; the report says why", unless=is_answered)


@project.command("score", short_help="Compare recorded projections with later runs.")
@RUNS
@where_option("--where", "runs")
@_page_options
def project_score(runs: tuple[Path, ...], where: tuple[str, ...], write: Write) -> None:
    """Compare the projections recorded in RUNS (`project runs --record`) with runs that were planned after them.

    Exits with 4 if no recorded projection was measured since, or if a record was changed.

    \b
    Example:
      dlbench project score my-runs
    """
    from dlbench.cli.projecting import read_groups
    from dlbench.projection.ledger import against, read_ledger
    from dlbench.projection.page import ProjectionReport, document_of

    measured = read_groups(runs, where, is_whole=False)
    recorded, problems = read_ledger(*expanded(runs))
    rows = against(recorded, measured.runs)
    report = ProjectionReport(as_of=measured.as_of, groups=(), ledger=rows, damaged=problems)
    write(document_of(report), "ledger")
    problem = f"{named(runs)}: no recorded projection was measured since; --record stores a projection"
    finish((*measured.damaged, *problems), problem, unless=rows)
