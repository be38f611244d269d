"""`dlbench project`: what rank counts that were not measured would do, with a band, or why nothing is said of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from dlbench.cli.choosing import expanded, named, open_store, read_comm_runs, read_runs, where_option
from dlbench.cli.estimate import amount_of
from dlbench.cli.options import FILE, OUTPUT, size_in_bytes, value_option, write_output
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
from dlbench.units import whole_seconds

if TYPE_CHECKING:
    from dlbench.comm.measurements import CollectiveTable
    from dlbench.history.entry import HistoryEntry
    from dlbench.projection.exchange import Way
    from dlbench.projection.ingredients import Ingredients, SlowHosts
    from dlbench.projection.ledger import Measured
    from dlbench.projection.projected import Projection
    from dlbench.records.scan import Run
    from dlbench.report.document import Section
    from dlbench.specs.comm import NetworkModel
    from dlbench.specs.system import SystemSpec

SETTABLE = ("exchange", "fusion", "wire", "group_size", "topk_density")  # Keys of `sync` that a projection changes.
ACTS_ON = {
    "where": ("RUNS", "--against"),
    "network": ("RUNS", "--from"),
    "scaling": ("RUNS", "--from", "--points", "--from-spec"),
    "set": ("RUNS", "--from"),
    "ingredients": ("RUNS", "--points"),
    "system": ("RUNS", "--from", "--from-spec"),
    "workload": ("--from-spec",),
    "preset": ("--from-spec",),
    "price_per_node_hour": ("RUNS", "--from"),
    "record": ("RUNS",),
    "history": ("RUNS", "--from"),
    "strategy": ("RUNS", "--from-spec"),
    "memory_limit": ("RUNS", "--from-spec"),
}
"""Options that do not act on every source of a projection."""


@click.command()
@click.argument("runs", nargs=-1, type=FILE)
@click.option("--to", metavar="64,256", help="Rank counts to project.")
@where_option("--where", "runs")
@network_option("in place of those fitted to the runs of dlbench comm in RUNS")
@click.option(
    "--scaling",
    type=click.Choice(["weak", "strong"]),
    help="weak: the batch per rank stays; strong: the global batch.  [default: as the runs]",
)
@click.option(
    "--set",
    multiple=True,
    metavar="sync.KEY=VALUE",
    help=f"Another way of exchanging gradients, repeatable: {', '.join(SETTABLE)}.",
)
@click.option("--ingredients", metavar="FILE", type=FILE, help="Write what the projection is made of, for --from.")
@click.option("--from", metavar="FILE", type=FILE, help="Project from such a file, not from RUNS.")
@value_option(
    "--points",
    "FILE.csv",
    "Project from any series up to 4 times as far. Columns: ranks, nodes, run, and step_s or samples_per_s with "
    "batch_per_rank.",
    type=FILE,
)
@value_option("--system", "SYSTEM", "Project to the nodes and the network of another system, by its data sheet.")
@click.option(
    "--from-spec",
    is_flag=True,
    help="Project by data sheet alone, without runs: --workload on --system. What comes of it is ideal.",
)
@click.option("--workload", metavar="WORKLOAD", help="What is trained, for --from-spec.")
@click.option("--preset", metavar="NAME", help="Preset of --workload.  [default: one whose precision --system has]")
@click.option("--price-per-node-hour", metavar="PRICE", help="What a node costs per hour, e.g. '9 EUR'.")
@value_option(
    "--history", "DIR", "Folder of a history: how many of the system's nodes are slow, and by how much.", type=FILE
)
@click.option("--record", is_flag=True, help="Keep the projection in RUNS, to be scored later.")
@click.option("--against", is_flag=True, help="Instead of --to: score recorded projections by runs planned since.")
@value_option(
    "--strategy", "all|NAME", "What other ways of sharing the training would take and hold: all, or one, e.g. fsdp."
)
@value_option(
    "--memory-limit",
    "SIZE",
    "What a rank may hold, e.g. 16GiB, for --strategy.  [default: device.memory_bytes of the system]",
    callback=size_in_bytes,
)
@OUTPUT
@format_option(*get_args(FormatName))
@click.option("--full", is_flag=True, help="Text with all tables; default: one screen per group.")
def project(
    runs: tuple[Path, ...], output: Path | None, format_name: FormatName | None, full: bool, **options: Any
) -> None:
    """Project the step, throughput and efficiency of RUNS to rank counts that were not measured.

    A projection is the account of the largest measured point, with what the network's costs, the scatter of nodes and
    the storage change from there. It comes with bands, a reason for each lost percent, and the error at points that
    were held out. What was never measured in kind is refused, with the command that would measure it. Ends with 4 if
    nothing is said of any rank count; with --against if nothing recorded was measured since, or a record was changed.

    \b
    Examples:
      dlbench project runs --to 64,256,1024
      dlbench project runs --to 256 --network box.network.json -o projection.html
      dlbench project runs --to 256 --set sync.exchange=hierarchical --set sync.wire=bf16
      dlbench project --points series.csv --to 32
      dlbench project runs --to 64,256 --record
      dlbench project runs --to 64,256 --strategy all --memory-limit 16GiB
      dlbench project runs --against
      dlbench project --workload resnet50 --preset full --system p40-roce --from-spec --to 8,64,2048
    """
    chosen = prepared("project", output, format_name)
    from dlbench.projection.ideal import by_data_sheet
    from dlbench.projection.ledger import against, misses_of, read_ledger, record
    from dlbench.projection.page import ProjectionReport, document_of, projected_group
    from dlbench.projection.spec_machine import elsewhere, peak_tflops
    from dlbench.projection.step import project as projected
    from dlbench.projection.strategies.section import chosen as chosen_strategies
    from dlbench.records.comm import read_network
    from dlbench.specs.choices import WorkloadFile, choose, choose_system_with_origins
    from dlbench.specs.files import find
    from dlbench.specs.requests import parse_counts

    to, is_scored, strategy, kept_in = options["to"], options["against"], options["strategy"], options["ingredients"]
    if (to is None) != is_scored:
        raise UserError("give --to RANKS, e.g. --to 64,256, or --against, which scores what was recorded")
    targets = () if to is None else parse_counts(to, "--to")
    source = _source(runs, options)
    check_writable(kept_in)
    machine = None if options["system"] is None else choose_system_with_origins(options["system"], {})[0]
    if source == "--from-spec" and machine is not None:
        file = WorkloadFile(find("workloads", options["workload"]))
        own = options["preset"] or file.preset_on(machine)
        # Where none is asked for, one in whose precision the device can be priced.
        names = (own,) if options["preset"] else (own, *file.presets)
        able = (one for one in names if peak_tflops(machine, choose(file, one, {}).workload().train.precision))
        ideal, is_told = by_data_sheet(
            choose(file, next(able, own), {}).workload(),
            machine,
            targets,
            strategies=("data",) if strategy is None else chosen_strategies(strategy),
            is_strong=options["scaling"] == "strong",
            memory_limit=options["memory_limit"],
        )
        emit(ideal, chosen, output, "strategies", full=full)
        finish((), "" if is_told else f"{to}: no strategy of these fits; the report says why")
        return
    if options["memory_limit"] is not None and strategy is None:
        raise UserError("--memory-limit has no effect without --strategy")
    price, currency, held = amount_of("--price-per-node-hour", asked := options["price_per_node_hour"])
    if held not in ("", "node"):
        raise UserError(f"--price-per-node-hour {asked}: is of a {held}-hour; give that of a node-hour")
    costs = None if options["network"] is None else read_network(options["network"])
    theirs = costs if costs is not None and machine is not None and costs.system == machine.name else None
    found = _found(runs, None if theirs else costs, options)
    if options["record"] and (options["set"] or machine or not all(one.configuration for one in found.ingredients)):
        raise UserError("--record keeps what later runs can score; none can with --set, --system or another --scaling")
    kept = read_ledger(*expanded(runs))
    rows = against(kept.kept, found.measured)
    if kept_in is not None:
        only, *others = found.ingredients
        if others:
            titles = f"{1 + len(others)} ({'; '.join(one.title for one in found.ingredients)})"
            raise UserError(f"--ingredients holds one group, RUNS holds {titles}: choose by --where")
        write_output((only.model_dump_json(indent=1) + "\n").encode("utf-8"), kept_in)
        click.echo(f"{kept_in}: ingredients {only.digest}", err=True)
    groups = []
    for number, one in enumerate(() if is_scored else found.ingredients):
        there = None if machine is None else elsewhere(one, machine, theirs)
        if there is not None and there.system == one.system:
            one, there = there, None
        way = _way(options["set"], there or one)
        projection = projected(one, targets, way=way, misses=misses_of(rows, one.system), there=there)
        more = []
        if projection.targets:
            run = found.samples[number] if found.samples else None
            more = _further(one, there, projection, run, machine, price, currency, options, found.ingredients)
        groups.append(projected_group(one.configuration or one.digest, one, projection, ledger=rows, more=more))
        if options["record"] and projection.targets:
            path = record(expanded(runs)[0], one, projection, datetime.now(UTC))
            click.echo(f"{path}: recorded; after larger runs: dlbench project {named(runs)} --against", err=True)
    report = ProjectionReport(as_of=found.as_of, groups=tuple(groups), ledger=rows, damaged=kept.problems)
    emit(document_of(report), chosen, output, "ledger" if is_scored else "targets", full=full)
    if is_scored:
        nothing = f"{named(runs)}: no recorded target was measured since; --record keeps a projection"
        finish((*found.damaged, *kept.problems), "" if rows else nothing)
        return
    nothing = f"{to}: no rank count can be projected; each refusal says what would mend it"
    finish(found.damaged, "" if any(group.projection.targets for group in groups) else nothing)


def _source(runs: Sequence[Path], options: dict[str, Any]) -> str:
    """What is projected from, or `--against`. Raises `UserError`: it is not one thing, or an option has no effect."""
    asked = [f"--{name}" for name in ("from", "points", "from-spec") if options[name.replace("-", "_")]]
    sources = ["RUNS", *asked] if runs else asked
    if len(sources) != 1:
        raise UserError(
            "give one of RUNS, --from FILE, --points FILE.csv and --from-spec, e.g. dlbench project runs --to 64"
        )
    (source,) = sources
    if source == "--from-spec" and not (options["workload"] and options["system"]):
        raise UserError("--from-spec needs --workload and --system, e.g. --workload resnet50 --system p40-roce")
    if options["against"] and source != "RUNS":
        raise UserError(f"--against has no effect on {source}; it acts on RUNS")
    source = "--against" if options["against"] else source
    for name, acts in ACTS_ON.items():
        if options[name] and source not in acts:
            raise UserError(f"--{name.replace('_', '-')} has no effect on {source}; it acts on {' and '.join(acts)}")
    return source


def _further(
    given: Ingredients,
    there: Ingredients | None,
    projection: Projection,
    run: Run | None,
    machine: SystemSpec | None,
    price: float | None,
    currency: str,
    options: dict[str, Any],
    others: Sequence[Ingredients],
) -> list[Section]:
    """What follows the projection of a group: strategies and cost. `run`: one of its largest point; None: of a file.
    `others`: all groups of RUNS, of which some may differ in strategy alone.
    """
    from dlbench.projection.cost import cost_section
    from dlbench.projection.strategies.section import case_of, chosen, measured_rows, projected_rows, section

    name = given.configuration or given.digest
    cost = cost_section(name, given, projection.targets, price, currency)
    if price is not None and cost is None:
        click.echo(f"dlbench: --price-per-node-hour: no price of {given.title}: its batch is not known", err=True)
    table = None
    if options["strategy"] is not None and run is not None:
        scale, own = projection.cost_scale, there or given
        case, said = case_of(own, run, scale, memory_limit=options["memory_limit"], system=machine)
        # Of another system no run is a measurement.
        known = () if there else measured_rows(case, given, others)
        asked, is_strong = chosen(options["strategy"]), own.scaling == "strong"
        name_of_runs = given.anchor.strategy or "data"
        rows = projected_rows(case, projection.targets, is_strong=is_strong, strategies=asked, own=name_of_runs)
        table = section((*known, *rows), said, anchor=f"strategies-{name}")
    return [one for one in (table, cost) if one is not None]


class _Found(NamedTuple):
    """What is projected."""

    ingredients: Sequence[Ingredients]
    damaged: Sequence[str] = ()  # Of RUNS.
    as_of: str = ""  # When the newest of RUNS finished.
    measured: Sequence[Measured] = ()  # All of RUNS, for the ledger.
    samples: Sequence[Run] = ()  # Of each group of RUNS a run of its largest point.


def _found(runs: Sequence[Path], costs: NetworkModel | None, options: dict[str, Any]) -> _Found:
    from dlbench.comm.measurements import tabulate
    from dlbench.projection.gathering import with_network
    from dlbench.projection.ingredients import Ingredients
    from dlbench.projection.series_file import read_points
    from dlbench.records.scan import read_given

    scaling, file = options["scaling"], options["from"]
    if options["points"] is not None:
        return _Found([read_points(options["points"], scaling or "weak")])
    if file is not None:
        made_by = "dlbench project RUNS --ingredients"
        read = _Found([read_given(file, Ingredients, "ingredients of a projection", made_by)])
        known = [costs or read.ingredients[0].network]
    else:
        read = _of_runs(runs, options["where"], is_whole=not options["against"])
        if options["against"]:
            return read
        table = tabulate(read_comm_runs(runs)) if costs is None else None
        known = [costs if table is None else _fitted(table, one, named(runs)) for one in read.ingredients]
    found = [with_network(one, own) for one, own in zip(read.ingredients, known, strict=True)]
    for place, one in enumerate(found):
        if scaling not in (None, one.scaling):
            # Of another scaling no run of these is a measurement.
            notes = (f"Projected for {scaling} scaling, and measured for the other.", *one.notes)
            found[place] = one.model_copy(update={"scaling": scaling, "configuration": "", "notes": notes})
    if options["history"] is not None:
        require_modules("project --history", "scipy")
        entries = open_store(options["history"]).entries()
        for number, group in enumerate(found):
            slow_hosts = _slow_hosts(entries, group.system, str(options["history"]))
            found[number] = group.model_copy(update={"slow_hosts": slow_hosts})
    return read._replace(ingredients=found)


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


def _of_runs(runs: Sequence[Path], where: Sequence[str], *, is_whole: bool) -> _Found:
    from dlbench.analysis import scaling
    from dlbench.analysis.table import tabulate
    from dlbench.projection.gathering import gathered
    from dlbench.projection.ledger import measured_in
    from dlbench.views.controls import is_control

    require_modules("project", "scipy")
    table = tabulate(read_runs(runs, where), with_causes=True)
    groups = scaling.groups(table)
    results = [group for group in groups if not is_control(group.sample)] or groups
    found = [gathered(group, table, groups=groups, source=named(runs), is_whole=is_whole) for group in results]
    if not found:
        finish(table.damaged, f"{named(runs)}: no run has figures; `dlbench status` says why")
    finished = [run.record.finished for run in table.runs.values() if run.record is not None]
    created = {run_id: run.plan.created for run_id, run in table.runs.items()}
    measured = [run for one in found for run in measured_in(one, created)]
    samples = [table.runs[one.anchor.runs[0].run_id] for one in found]
    return _Found(found, table.damaged, whole_seconds(max(finished)), measured, samples)


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


def _way(overrides: tuple[str, ...], ingredients: Ingredients) -> Way | None:
    """Another way of exchanging gradients than the runs had."""
    from pydantic import ValidationError

    from dlbench.projection.exchange import Way
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
    return Way(
        exchange=sync.exchange,
        fusion=sync.fusion if "fusion" in asked else None,
        wire=sync.wire,
        group_size=sync.group_size or ran.group_size,
        topk_density=sync.topk_density if sync.wire == "topk" else None,
        by=(ingredients.engine, ran.carrier),
    )
