"""Groups of runs as `dlbench project` reads them, and their projection to other rank counts or another setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from pydantic import ValidationError

from dlbench.analysis import scaling
from dlbench.analysis.slow_nodes import TO_EXCLUDE
from dlbench.analysis.table import tabulate
from dlbench.cli.choosing import named, open_store, read_comm_runs, read_runs
from dlbench.cli.options import write_output
from dlbench.cli.report import finish, require_modules
from dlbench.errors import DlbenchError, UserError
from dlbench.projection import step
from dlbench.projection.cost import cost_section
from dlbench.projection.exchange import ExchangeMethod
from dlbench.projection.gathering import gathered, with_network
from dlbench.projection.ingredients import Ingredients, SlowHosts
from dlbench.projection.ledger import LedgerRow, MeasuredRun, measured_in, misses_of
from dlbench.projection.page import ProjectedGroup, ProjectionReport, document_of, projected_group
from dlbench.projection.projected import Projection
from dlbench.projection.spec_machine import elsewhere
from dlbench.projection.strategies.section import case_of, measured_rows, projected_rows, section
from dlbench.records.comm import read_network
from dlbench.records.scan import Run
from dlbench.report.document import Document, Section
from dlbench.specs.comm import NetworkModel
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import parse_counts, parse_set
from dlbench.specs.sync import GROUPED, SyncSpec, layout_problem
from dlbench.specs.system import SystemSpec
from dlbench.units import whole_seconds
from dlbench.views.controls import is_control

if TYPE_CHECKING:  # costs of a network and histories are read where they are asked for
    from dlbench.comm.measurements import CollectiveTable

SETTABLE = ("exchange", "fusion", "wire", "group_size", "topk_density")  # Keys of `sync` that a projection changes.

Write = Callable[[Document, str], None]  # Writes a document; of CSV the named table.


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


class StrategiesAsked(NamedTuple):
    """The strategies that a group is compared in."""

    names: Sequence[str]
    memory_limit: int | None  # Bytes that a rank may hold.
    sample: Run  # A run of the group's largest point.
    groups: Sequence[Ingredients]  # All of RUNS, of which some may differ in strategy alone.


def question_of(to: str, network: Path | None = None, **changes: Any) -> Question:
    """Returns the question of a command's options."""
    costs = None if network is None else read_network(network)
    return Question(to, parse_counts(to, "--to"), costs=costs, **changes)


def projected(
    group: Ingredients,
    question: Question,
    rows: Sequence[LedgerRow] = (),
    strategies: StrategiesAsked | None = None,
) -> ProjectedGroup:
    """Returns the projection of a group with what follows from it. `rows`: of the ledger, of every system."""
    there = None if question.system is None else elsewhere(group, question.system, question.costs_of_system)
    if there is not None and there.system == group.system:
        group, there = there, None
    way = _way(question.overrides, there or group)
    projection = step.project(
        group, question.targets, method=way, misses=misses_of(rows, group.system), other_system=there
    )
    name = group.configuration or group.digest
    sections: list[Section] = []
    if projection.targets:
        if strategies is not None:
            sections.append(_strategies_section(strategies, question.system, group, there, projection))
        cost = cost_section(name, group, projection.targets, *question.price)
        if cost is not None:
            sections.append(cost)
        elif question.price[0] is not None:
            click.echo(f"dlbench: --price-per-node-hour: no price of {group.title}: its batch is not known", err=True)
    return projected_group(name, group, projection, ledger=rows, more_sections=sections)


def _strategies_section(
    asked: StrategiesAsked,
    system: SystemSpec | None,
    group: Ingredients,
    there: Ingredients | None,
    projection: Projection,
) -> Section:
    """Returns the table of strategies at the targets of a group, with measured ones next to them."""
    priced, limit = there or group, asked.memory_limit
    case, basis = case_of(priced, asked.sample, projection.cost_scale, memory_limit=limit, system=system)
    # Of another system no run is a measurement.
    measured = () if there else measured_rows(case, group, asked.groups)
    is_strong, strategy = priced.scaling == "strong", group.anchor.strategy or "data"
    rows = projected_rows(case, projection.targets, is_strong=is_strong, strategies=asked.names, own_strategy=strategy)
    return section((*measured, *rows), basis, anchor=f"strategies-{group.configuration or group.digest}")


def write_report(report: ProjectionReport, question: Question, write: Write, damaged: Sequence[str] = ()) -> None:
    """Writes a report; ends the command with 4 where no rank count was projected or one of the runs is damaged."""
    write(document_of(report), "targets")
    nothing = f"{question.to}: no rank count can be projected; each refusal says what would mend it"
    finish(damaged, "" if any(group.projection.targets for group in report.groups) else nothing)


def write_ingredients(groups: Sequence[Ingredients], path: Path | None) -> None:
    """Writes what a projection is made of, where that was asked for. Raises `UserError`: there are several groups."""
    if path is None:
        return
    if len(groups) > 1:
        titles = f"{len(groups)} ({'; '.join(group.title for group in groups)})"
        raise UserError(f"--ingredients holds one group, RUNS holds {titles}: choose by --where")
    write_output((groups[0].model_dump_json(indent=1) + "\n").encode("utf-8"), path)
    click.echo(f"{path}: ingredients {groups[0].digest}", err=True)


def write_projection(group: Ingredients, question: Question, write: Write) -> None:
    """Projects a single group, and writes the report as `write_report` does."""
    write_report(ProjectionReport(groups=(projected(group, question),)), question, write)


def with_costs(groups: Sequence[Ingredients], question: Question, runs: Sequence[Path]) -> list[Ingredients]:
    """Returns groups of RUNS as they are asked for: with the costs given, else those fitted to runs of `dlbench comm`
    in RUNS.
    """
    from dlbench.comm.measurements import tabulate as tabulate_collectives

    if question.costs_of_groups is not None:
        return [changed(group, question.costs_of_groups, question) for group in groups]
    table = tabulate_collectives(read_comm_runs(runs))
    return [changed(group, _fitted(table, group, named(runs)), question) for group in groups]


def changed(group: Ingredients, costs: NetworkModel | None, question: Question) -> Ingredients:
    """Returns a group with these costs of messages, the scaling that is asked for and the slow hosts of a history."""
    group = with_network(group, costs)
    if question.scaling not in (None, group.scaling):
        # Of another scaling no run of these is a measurement.
        notes = (f"Projected for {question.scaling} scaling, and measured for the other.", *group.notes)
        group = group.model_copy(update={"scaling": question.scaling, "configuration": "", "notes": notes})
    if question.history is not None:
        require_modules("project --history", "scipy")
        group = group.model_copy(update={"slow_hosts": _slow_hosts(question.history, group.system)})
    return group


def _slow_hosts(history: Path, system: str) -> SlowHosts:
    """Returns how many hosts of a system are slow by its history. Raises `UserError`: the history compares none."""
    from dlbench.history.slow_months import slow_months

    entries = open_store(history).entries()
    hosts = slow_months(entry for entry in entries if system in ("", entry.system)).hosts
    ratios = [(host.verdict, host.current.value) for host in hosts if host.current is not None]
    compared = [(verdict, ratio) for verdict, ratio in ratios if verdict != "too few sessions"]
    if not compared:
        raise UserError(
            f"--history {history}: no host of system {system} has the five sessions that show whether it is slow; "
            "leave the option out, or import more runs on several hosts"
        )
    slow = tuple(math.log(ratio) for verdict, ratio in compared if verdict in TO_EXCLUDE)
    return SlowHosts(hosts=len(compared), ratios=slow, source=str(history))


class MeasuredGroups(NamedTuple):
    """Groups of comparable runs."""

    groups: Sequence[Ingredients]
    damaged: Sequence[str]
    as_of: str  # When the newest run finished.
    runs: Sequence[MeasuredRun]  # All of them, for the ledger.
    samples: Sequence[Run]  # Of each group a run of its largest point.


def read_groups(runs: Sequence[Path], where: Sequence[str], *, is_whole: bool = True) -> MeasuredGroups:
    """Returns the groups of comparable runs. `is_whole`: with what takes to read step files and samples again."""
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
    return MeasuredGroups(ingredients, table.damaged, whole_seconds(max(finished)), measured, samples)


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
