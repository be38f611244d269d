"""`dlbench project`: what rank counts that were not measured would do, with a band, or why nothing is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import click

from dlbench.cli.choosing import expanded, named, read_comm_runs, read_runs, where_option
from dlbench.cli.estimate import amount_of
from dlbench.cli.options import OUTPUT, size_in_bytes, write_output
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
    from dlbench.projection.exchange import Way
    from dlbench.projection.ingredients import Ingredients
    from dlbench.projection.ledger import Measured, Row
    from dlbench.records.scan import Run
    from dlbench.specs.comm import NetworkModel

SETTABLE = ("exchange", "fusion", "wire", "group_size", "topk_density")  # Keys of `sync` that a projection changes.


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
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
    "overrides",
    multiple=True,
    metavar="sync.KEY=VALUE",
    help=f"Another way of exchanging gradients, repeatable: {', '.join(SETTABLE)}.",
)
@click.option(
    "--ingredients",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write what the projection is made of, for --from.",
)
@click.option(
    "--from", "given", metavar="FILE", type=click.Path(path_type=Path), help="Project from such a file, not from RUNS."
)
@click.option(
    "--points",
    metavar="FILE.csv",
    type=click.Path(path_type=Path),
    help="Project from any series up to 4 times as far: ranks,nodes,step_s,run.",
)
@click.option(
    "--system", metavar="SYSTEM", help="Project to the nodes and the network of another system, by its data sheet."
)
@click.option(
    "--from-spec",
    "is_ideal",
    is_flag=True,
    help="Project by data sheet alone, without runs: --workload on --system. What comes of it is ideal.",
)
@click.option("--workload", metavar="WORKLOAD", help="What is trained, for --from-spec.")
@click.option("--preset", metavar="NAME", help="Preset of --workload.  [default: that of a run on --system]")
@click.option("--price-per-node-hour", metavar="PRICE", help="What a node costs per hour, e.g. '9 EUR'.")
@click.option("--record", "is_recorded", is_flag=True, help="Keep the projection in RUNS, to be scored later.")
@click.option(
    "--against", "is_scored", is_flag=True, help="Instead of --to: score recorded projections by runs planned since."
)
@click.option(
    "--strategy",
    metavar="all|NAME",
    help="What other ways of sharing the training would take and hold: all, or one, e.g. fsdp; RUNS only.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    callback=size_in_bytes,
    help="What a rank may hold, e.g. 16GiB, for --strategy.  [default: device.memory_bytes of the system]",
)
@OUTPUT
@format_option(*get_args(FormatName))
@click.option("--full", is_flag=True, help="Text with all tables; default: one screen per group.")
def project(
    runs: tuple[Path, ...],
    to: str | None,
    where: tuple[str, ...],
    network: Path | None,
    scaling: Literal["weak", "strong"] | None,
    overrides: tuple[str, ...],
    ingredients: Path | None,
    given: Path | None,
    points: Path | None,
    system: str | None,
    is_ideal: bool,
    workload: str | None,
    preset: str | None,
    price_per_node_hour: str | None,
    is_recorded: bool,
    is_scored: bool,
    strategy: str | None,
    memory_limit: int | None,
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
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
    from dlbench.projection.cost import cost_section
    from dlbench.projection.ideal import accuracy_section
    from dlbench.projection.ledger import misses_of, record
    from dlbench.projection.page import ProjectionReport, document_of, projected_group
    from dlbench.projection.spec_machine import elsewhere
    from dlbench.projection.step import project as projected
    from dlbench.projection.strategies.section import chosen as chosen_strategies
    from dlbench.projection.strategies.section import section as strategy_section
    from dlbench.projection.strategies.section import strategies_of
    from dlbench.records.comm import read_network
    from dlbench.specs.choices import choose_system_with_origins
    from dlbench.specs.requests import parse_counts

    if (to is None) != is_scored:
        raise UserError("give --to RANKS, e.g. --to 64,256, or --against, which scores what was recorded")
    targets = () if to is None else parse_counts(to, "--to")
    if ingredients is not None:
        check_writable(ingredients)
    sources = {"RUNS": bool(runs), "--from": given is not None, "--points": points is not None}
    sources["--from-spec"] = is_ideal
    if sum(sources.values()) != 1:
        raise UserError("give one of RUNS, --from FILE and --points FILE.csv, e.g. dlbench project runs --to 64,256")
    if is_ideal and (workload is None or system is None):
        raise UserError("--from-spec needs --workload and --system, e.g. --workload resnet50 --system p40-roce")
    _refuse_without_effect(
        sources,
        where=where,
        network=network,
        overrides=overrides,
        system=system,
        ingredients=ingredients,
        record=is_recorded,
        against=is_scored,
        strategy=strategy,
        workload=workload,
        preset=preset,
        price_per_node_hour=price_per_node_hour,
    )
    if is_ideal and workload is not None and system is not None:
        _ideal(workload, preset, system, targets, scaling, strategy, memory_limit, chosen, output, full=full)
        return
    if memory_limit is not None and strategy is None:
        raise UserError("--memory-limit has no effect without --strategy")
    price, currency, held = amount_of("--price-per-node-hour", price_per_node_hour)
    if held not in ("", "node"):
        raise UserError(f"--price-per-node-hour {price_per_node_hour}: is of a {held}-hour; give that of a node-hour")
    if is_scored:
        others = {"--network": network, "--scaling": scaling, "--set": overrides, "--ingredients": ingredients}
        further = {"--record": is_recorded, "--price-per-node-hour": price, "--system": system, "--strategy": strategy}
        for option, value in (others | further).items():
            if value:
                raise UserError(f"{option} has no effect on --against, which projects nothing")
        _score(runs, where, chosen, output, full=full)
        return
    machine = None if system is None else choose_system_with_origins(system, {})[0]
    costs = None if network is None else read_network(network)
    theirs = costs if costs is not None and machine is not None and costs.system == machine.name else None
    found, damaged, as_of, measured, samples = _found(runs, where, None if theirs else costs, given, points, scaling)
    rows, problems = _ledger(runs, measured)
    if ingredients is not None:
        if len(found) > 1:
            titles = "; ".join(one.title for one in found)
            raise UserError(f"--ingredients holds one group, RUNS holds {len(found)} ({titles}): choose by --where")
        write_output((found[0].model_dump_json(indent=1) + "\n").encode("utf-8"), ingredients)
        click.echo(f"{ingredients}: ingredients {found[0].digest}", err=True)
    groups = []
    for number, one in enumerate(found):
        there = None
        if machine is not None:
            there = elsewhere(one, machine, theirs)
            one, there = (there, None) if there.system == one.system else (one, there)
        misses = misses_of(rows, one.system)
        projection = projected(one, targets, way=_way(overrides, one), misses=misses, there=there)
        name = one.configuration or one.digest
        cost = cost_section(name, one, projection.targets, price, currency)
        if price is not None and cost is None and projection.targets:
            click.echo(f"dlbench: --price-per-node-hour: no price of {one.title}: its batch is not known", err=True)
        more = [] if cost is None else [cost]
        if strategy is not None and projection.targets:
            ranks = [target.ranks for target in projection.targets]
            asked = chosen_strategies(strategy)
            strategies, said = strategies_of(
                there or one, samples[number], ranks, strategies=asked, memory_limit=memory_limit, system=machine
            )
            more.insert(0, strategy_section(strategies, said, anchor=f"strategies-{name}"))
            if there is None:
                place, run = machine or samples[number].plan.system, samples[number]
                steps = accuracy_section(one, run, strategies, asked, place, anchor=f"accuracy-{name}")
                more += [] if steps is None else [steps]
        groups.append(projected_group(name, one, projection, ledger=rows, more=more))
        if is_recorded and projection.targets:
            path = record(expanded(runs)[0], one, projection, datetime.now(UTC))
            click.echo(f"{path}: recorded; after larger runs: dlbench project {named(runs)} --against", err=True)
    report = ProjectionReport(as_of=as_of, groups=tuple(groups), ledger=rows, damaged=problems)
    emit(document_of(report), chosen, output, "targets", full=full)
    told = any(group.projection.targets for group in groups)
    finish(damaged, "" if told else f"{to}: no rank count can be projected; each refusal says what would mend it")


def _ideal(
    workload: str,
    preset: str | None,
    system: str,
    targets: Sequence[int],
    scaling: Literal["weak", "strong"] | None,
    strategy: str | None,
    memory_limit: int | None,
    chosen: FormatName,
    output: Path | None,
    *,
    full: bool,
) -> None:
    """Prints what data sheets say."""
    from dlbench.projection.ideal import by_data_sheet
    from dlbench.projection.strategies.section import chosen as chosen_strategies
    from dlbench.specs.choices import WorkloadFile, choose, choose_system_with_origins
    from dlbench.specs.files import find

    machine, file = choose_system_with_origins(system, {})[0], WorkloadFile(find("workloads", workload))
    document = by_data_sheet(
        choose(file, preset or file.preset_on(machine), {}).workload(),
        machine,
        targets,
        strategies=chosen_strategies(strategy) if strategy else ("data",),
        is_strong=scaling == "strong",
        memory_limit=memory_limit,
    )
    emit(document, chosen, output, "strategies", full=full)


def _score(runs: Sequence[Path], where: Sequence[str], chosen: FormatName, output: Path | None, *, full: bool) -> None:
    """Prints how right recorded projections were."""
    from dlbench.projection.page import ProjectionReport, document_of

    found = _gathered(runs, where, is_whole=False)
    rows, problems = _ledger(runs, found.measured)
    report = ProjectionReport(as_of=found.as_of, groups=(), ledger=rows, damaged=problems)
    emit(document_of(report), chosen, output, "ledger", full=full)
    nothing = f"{named(runs)}: no recorded target was measured since; --record keeps a projection"
    finish((*found.damaged, *problems), "" if rows else nothing)


def _ledger(runs: Sequence[Path], measured: Sequence[Measured]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Recorded targets that were measured since, and files of the ledger that do not count, one line each."""
    from dlbench.projection.ledger import against, read_ledger

    kept = read_ledger(*expanded(runs))
    return against(kept.kept, measured), kept.problems


class _Found(NamedTuple):
    """What is projected."""

    ingredients: list[Ingredients]
    damaged: Sequence[str] = ()  # Of RUNS.
    as_of: str = ""  # When the newest of RUNS finished.
    measured: Sequence[Measured] = ()  # All of RUNS, for the ledger.
    samples: Sequence[Run] = ()  # Of each group of RUNS a run of its largest point.


def _refuse_without_effect(sources: dict[str, bool], **options: Any) -> None:
    acts = {"where": ("RUNS",), "network": ("RUNS", "--from"), "overrides": ("RUNS", "--from")}
    acts |= {
        "ingredients": ("RUNS", "--points"),
        "record": ("RUNS",),
        "against": ("RUNS",),
        "system": ("RUNS", "--from", "--from-spec"),
        "strategy": ("RUNS", "--from-spec"),
        "price_per_node_hour": ("RUNS", "--from"),
        **dict.fromkeys(("workload", "preset"), ("--from-spec",)),
    }
    source = next(name for name, is_given in sources.items() if is_given)
    for name, value in options.items():
        if value and source not in acts[name]:
            option = "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
            raise UserError(f"{option} has no effect on {source}; it acts on {' and '.join(acts[name])}")


def _found(
    runs: Sequence[Path],
    where: Sequence[str],
    costs: NetworkModel | None,
    given: Path | None,
    points: Path | None,
    scaling: Literal["weak", "strong"] | None,
) -> _Found:
    from dlbench.projection.gathering import with_network
    from dlbench.projection.ingredients import Ingredients
    from dlbench.projection.points_only import read_points
    from dlbench.records.scan import read_given

    if points is not None:
        return _Found([read_points(points, scaling or "weak")])
    if given is not None:
        one = read_given(given, Ingredients, "ingredients of a projection", "dlbench project RUNS --ingredients")
        read = _Found([one])
        known = [costs or one.network]
    else:
        read = _gathered(runs, where)
        from dlbench.comm.measurements import tabulate

        measured = None if costs else tabulate(read_comm_runs(runs))
        known = [costs or _fitted(measured, one, named(runs)) for one in read.ingredients]
    found = [with_network(one, costs) for one, costs in zip(read.ingredients, known, strict=True)]
    if scaling is not None:
        # Of another scaling no run of these is a measurement.
        note = f"Projected for {scaling} scaling, and measured for the other."
        other = {"scaling": scaling, "configuration": ""}
        found = [
            one if one.scaling == scaling else one.model_copy(update={**other, "notes": (note, *one.notes)})
            for one in found
        ]
    return read._replace(ingredients=found)


def _gathered(runs: Sequence[Path], where: Sequence[str], *, is_whole: bool = True) -> _Found:
    from dlbench.analysis import scaling
    from dlbench.analysis.table import tabulate
    from dlbench.projection.gathering import gathered
    from dlbench.projection.ledger import measured_in
    from dlbench.views.model import is_control

    require_modules("project", "pandas", "scipy")
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


def _fitted(table: CollectiveTable | None, ingredients: Ingredients, where: str) -> NetworkModel | None:
    """Costs fitted to runs of the collective benchmark, as `dlbench comm fit` does; what hinders is said on stderr."""
    from dlbench.comm.fits import fit_one

    system = ingredients.system
    groups = () if table is None else table.groups
    series = [one for group in groups if group.sample.plan.system.name == system for one in group.series]
    if table is None or not series:
        return None
    carrier = "" if ingredients.exchange is None else ingredients.exchange.carrier
    own = {one.carrier for one in series if not one.is_library} or {one.carrier for one in series}
    transport = next((one for one in sorted(own) if one.removeprefix("torch-") == carrier), None)
    try:
        return fit_one(table, system=system, transport=transport, dtype=None, fitted="", where=where).network
    except DlbenchError as error:
        click.echo(f"dlbench: no costs of the network: {error}", err=True)
        return None


def _way(overrides: tuple[str, ...], ingredients: Ingredients) -> Way | None:
    """Another way of exchanging gradients than the runs had. Raises `UserError`: `--set` names anything else."""
    from pydantic import ValidationError

    from dlbench.projection.exchange import AS_IT_RAN, Way
    from dlbench.specs.problems import problem_of
    from dlbench.specs.requests import parse_set
    from dlbench.specs.sync import SyncSpec

    if not overrides:
        return None
    known = [f"sync.{name}" for name in SETTABLE]
    asked = parse_set(overrides)
    for key in asked:
        if key not in known:
            raise UserError(f"--set {key}: a projection changes the exchange alone: {', '.join(known)}")
    try:
        sync = SyncSpec.model_validate({key.removeprefix("sync."): value for key, value in asked.items()})
    except ValidationError as error:
        raise UserError(f"--set sync.{problem_of(SyncSpec, error)}") from None
    ran = ingredients.exchange
    if ran is None:
        raise UserError("--set: the runs recorded no exchange, so none can be changed")
    return Way(
        exchange=sync.exchange if "sync.exchange" in asked else ran.exchange,
        fusion=sync.fusion if "sync.fusion" in asked else AS_IT_RAN,
        wire=sync.wire if "sync.wire" in asked else ran.wire,
        group_size=sync.group_size or ran.group_size,
        topk_density=sync.topk_density if sync.wire == "topk" else None,
    )
