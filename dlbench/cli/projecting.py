"""Reads groups of runs for `dlbench project`, and projects them to other rank counts and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
from pydantic import ValidationError

from dlbench.analysis import scaling
from dlbench.analysis.slow_nodes import TO_EXCLUDE
from dlbench.analysis.table import tabulate
from dlbench.cli.options import write_output
from dlbench.cli.report import finish, named, open_store, read_comm_runs, read_runs, require_modules
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
from dlbench.projection.strategies.section import accuracy_steps, case_of, measured_rows, projected_rows, section
from dlbench.records.comm import read_network
from dlbench.records.scan import Run
from dlbench.report.document import Document, Section
from dlbench.specs.comm import NetworkModel
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import parse_counts, parse_set
from dlbench.specs.sync import GROUPED, SyncSpec, layout_problem
from dlbench.specs.system import SystemSpec
from dlbench.units import whole_seconds
from dlbench.views.model import is_control

if TYPE_CHECKING:  # costs of a network and histories are read where they are asked for
    from dlbench.comm.measurements import CollectiveTable

SETTABLE = ("exchange", "fusion", "wire", "group_size", "topk_density")  # Keys of `sync` that a projection can change.

Write = Callable[[Document, str], None]  # Writes a document; as CSV the named table.


class Question(NamedTuple):
    """The question of a projection: rank counts, and settings that differ from the measured ones."""

    to: str  # The text of --to.
    targets: tuple[int, ...]  # Rank counts.
    scaling: str | None = None  # weak or strong; None: as measured.
    costs: NetworkModel | None = None  # Given network costs, of the groups' system or of `system`.
    overrides: tuple[str, ...] = ()  # Texts of --set.
    system: SystemSpec | None = None  # Another system to project to.
    price: tuple[float | None, str] = (None, "")  # Price of a node-hour, and its currency.
    history: Path | None = None

    @property
    def costs_of_system(self) -> NetworkModel | None:
        """The given network costs if they belong to `system`; None: its data sheet is used."""
        if self.costs is not None and self.system is not None and self.costs.system == self.system.name:
            return self.costs
        return None

    @property
    def costs_of_groups(self) -> NetworkModel | None:
        return None if self.costs_of_system else self.costs


class StrategiesAsked(NamedTuple):
    """The strategies to compare for a group."""

    names: Sequence[str]
    memory_limit: int | None  # Memory that a rank may use, bytes.
    sample: Run  # A run of the group's largest point.
    groups: Sequence[Ingredients]  # All groups of RUNS; some may differ only in strategy.
    # The costs of the group's network fitted to the fastest iterations of `dlbench comm` runs in RUNS.
    least_costs: NetworkModel | None = None


def question_of(to: str, network: Path | None = None, **changes: Any) -> Question:
    """Returns the question for a command's options."""
    costs = None if network is None else read_network(network)
    return Question(to, parse_counts(to, "--to"), costs=costs, **changes)


def projected(
    group: Ingredients, question: Question, rows: Sequence[LedgerRow] = (), strategies: StrategiesAsked | None = None
) -> ProjectedGroup:
    """Returns the projection of a group with all sections of its report; `rows`: the ledger of all systems."""
    target_group = None
    if question.system is not None:
        target_group = elsewhere(group, question.system, question.costs_of_system)
        if target_group.system == group.system:
            group, target_group = target_group, None
    method = _way(question.overrides, target_group or group)
    projection = step.project(
        group, question.targets, method=method, misses=misses_of(rows, group.system), other_system=target_group
    )
    name = group.configuration or group.digest
    sections: list[Section] = []
    if projection.targets:
        if strategies is not None:
            sections.append(_strategies_section(strategies, question.system, group, target_group, projection))
        cost = cost_section(name, group, projection.targets, *question.price)
        if cost is not None:
            sections.append(cost)
        elif question.price[0] is not None:
            click.echo(f"dlbench: --price-per-node-hour: no cost of {group.title}: its batch size is unknown", err=True)
    return projected_group(name, group, projection, ledger=rows, more_sections=sections)


def _strategies_section(
    strategies_asked: StrategiesAsked,
    system: SystemSpec | None,
    group: Ingredients,
    target_group: Ingredients | None,
    projection: Projection,
) -> Section:
    priced, limit = target_group or group, strategies_asked.memory_limit
    case, basis = case_of(priced, strategies_asked.sample, projection.cost_scale, memory_limit=limit, system=system)
    # The runs are no measurements of another system.
    measured = () if target_group else measured_rows(case, group, strategies_asked.groups)
    least = strategies_asked.least_costs
    if group.network is not None and least is not None:
        networks = {"medians of the network's costs": group.network, "minima, without congestion": least}
        basis += accuracy_steps(case, group, {**networks, "scaled to the anchor": case.network})
    is_strong, strategy = priced.scaling == "strong", group.anchor.strategy or "data"
    rows = projected_rows(
        case, projection.targets, is_strong=is_strong, strategies=strategies_asked.names, own_strategy=strategy
    )
    return section((*measured, *rows), basis, anchor=f"strategies-{group.configuration or group.digest}")


def write_report(report: ProjectionReport, question: Question, write: Write, damaged: Sequence[str] = ()) -> None:
    """Writes a report; exits with 4 if no rank count was projected or a run is damaged."""
    write(document_of(report), "targets")
    problem = f"{question.to}: no rank count can be projected; each refusal names a remedy"
    finish(damaged, problem, unless=any(group.projection.targets for group in report.groups))


def write_ingredients(groups: Sequence[Ingredients], path: Path | None) -> None:
    """Writes the inputs of a projection if a file is given. Raises `UserError`: there are several groups."""
    if path is None:
        return
    if len(groups) > 1:
        titles = f"{len(groups)} ({'; '.join(group.title for group in groups)})"
        raise UserError(f"--ingredients takes one group, RUNS contains {titles}: select one with --where")
    write_output((groups[0].model_dump_json(indent=1) + "\n").encode("utf-8"), path)
    click.echo(f"{path}: ingredients {groups[0].digest}", err=True)


def write_projection(group: Ingredients, question: Question, write: Write) -> None:
    """Projects a single group, and writes the report as `write_report` does."""
    write_report(ProjectionReport(groups=(projected(group, question),)), question, write)


def with_costs(groups: Sequence[Ingredients], question: Question, runs: Sequence[Path]) -> list[Ingredients]:
    """Returns the groups with the given network costs, or with those fitted to `dlbench comm` runs in RUNS."""
    from dlbench.comm.measurements import tabulate as tabulate_collectives

    if question.costs_of_groups is not None:
        return [changed(group, question.costs_of_groups, question) for group in groups]
    table = tabulate_collectives(read_comm_runs(runs))
    return [changed(group, _fitted(table, group, named(runs)), question) for group in groups]


def least_costs(group: Ingredients, question: Question, runs: Sequence[Path]) -> NetworkModel | None:
    """Returns the costs fitted to the fastest iterations of `dlbench comm` runs in RUNS; None: there are none."""
    from dlbench.comm.measurements import tabulate as tabulate_collectives

    if group.network is None or question.costs is not None or question.system is not None:
        return None
    return _fitted(tabulate_collectives(read_comm_runs(runs)), group, named(runs), "minimum")


def changed(group: Ingredients, costs: NetworkModel | None, question: Question) -> Ingredients:
    """Returns a group with other network costs, the requested scaling and the slow hosts of a history."""
    group = with_network(group, costs)
    if question.scaling not in (None, group.scaling):
        # Without a configuration, no run counts as a measurement of the other scaling.
        notes = (f"Projected for {question.scaling} scaling, but measured with the other.", *group.notes)
        group = group.model_copy(update={"scaling": question.scaling, "configuration": "", "notes": notes})
    if question.history is not None:
        require_modules("project --history", "scipy")
        group = group.model_copy(update={"slow_hosts": _slow_hosts(question.history, group.system)})
    return group


def _slow_hosts(history: Path, system: str) -> SlowHosts:
    """Returns the number of slow hosts of a system from its history. Raises `UserError`: it compares none."""
    from dlbench.history.slow_months import slow_months
    from dlbench.history.trends import dated

    entries = open_store(history).entries()
    num_compared, slow_ratios = 0, []
    for host in slow_months(dated(entry for entry in entries if system in ("", entry.system))).hosts:
        if host.current is None or host.verdict == "too few sessions":
            continue
        num_compared += 1
        if host.verdict in TO_EXCLUDE:
            slow_ratios.append(math.log(host.current.value))
    if not num_compared:
        raise UserError(
            f"--history {history}: no host of system {system} has the five sessions that show whether it is slow; "
            "leave the option out, or import more runs on several hosts"
        )
    return SlowHosts(hosts=num_compared, ratios=tuple(slow_ratios), source=str(history))


class MeasuredGroups(NamedTuple):
    """Groups of comparable runs."""

    groups: Sequence[Ingredients]
    damaged: Sequence[str]
    as_of: str  # End of the newest run, ISO 8601.
    runs: Sequence[MeasuredRun]  # All runs, for the ledger.
    samples: Sequence[Run]  # A run of the largest point of each group.


def read_groups(runs: Sequence[Path], where: Sequence[str], *, is_whole: bool = True) -> MeasuredGroups:
    """Returns the groups of comparable runs; `is_whole`: also read step files and samples."""
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


def _fitted(
    table: CollectiveTable, ingredients: Ingredients, where: str, fitted_to: Literal["median", "minimum"] = "median"
) -> NetworkModel | None:
    """Fits network costs to runs of the collective benchmark; a failure is printed on standard error."""
    from dlbench.comm.fits import fit_one

    system, exchange = ingredients.system, ingredients.exchange
    groups = [group for group in table.groups if group.sample.plan.system.name == system]
    series = [series for group in groups for series in group.series]
    if not series:
        return None
    # dlbench's own algorithms if they were measured, else libraries; over the transport of the runs.
    is_library = all(row.is_library for row in series)
    names = sorted({row.carrier for row in series if row.is_library == is_library})
    transport = next((name for name in names if exchange and name.removeprefix("torch-") == exchange.carrier), None)
    try:
        options: dict[str, Any] = {"system": system, "transport": transport, "dtype": None, "fitted": ""}
        return fit_one(table, fitted_to=fitted_to, where=where, **options).network
    except DlbenchError as error:
        click.echo(f"dlbench: no costs of the network: {error}", err=True)
        return None


def _way(overrides: tuple[str, ...], ingredients: Ingredients) -> ExchangeMethod | None:
    if not overrides:
        return None
    name_by_key = {f"sync.{name}": name for name in SETTABLE}
    settings = parse_set(overrides)
    if unknown := [key for key in settings if key not in name_by_key]:
        raise UserError(f"--set {unknown[0]}: a projection can only change the exchange: {', '.join(name_by_key)}")
    setting_by_name = {name_by_key[key]: value for key, value in settings.items()}
    ran = ingredients.exchange
    if ran is None:
        raise UserError("--set: the runs recorded no exchange, so none can be changed")
    try:
        sync = SyncSpec.model_validate({"exchange": ran.exchange, "wire": ran.wire, **setting_by_name})
    except ValidationError as error:
        raise UserError(f"--set sync.{problem_of(SyncSpec, error)}") from None
    for key, is_idle in (("group_size", sync.exchange not in GROUPED), ("topk_density", sync.wire != "topk")):
        if key in setting_by_name and is_idle:
            raise UserError(f"--set sync.{key} has no effect on exchange {sync.exchange} with wire {sync.wire}")
    if problem := layout_problem(sync, engine=ingredients.engine, ranks=2 * ingredients.per_node, nodes=2):
        raise UserError(f"--set: {problem}")
    fusion = sync.fusion if "fusion" in setting_by_name else None
    density = sync.topk_density if sync.wire == "topk" else None
    return ExchangeMethod(
        exchange=sync.exchange,
        fusion=fusion,
        wire=sync.wire,
        group_size=sync.group_size or ran.group_size,
        topk_density=density,
        by=(ingredients.engine, ran.carrier),
    )
