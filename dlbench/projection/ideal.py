"""Projects a training by data sheets of devices and links: the ideal case of Kahira et al., HPDC 2021 (ParaDL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from dlbench.errors import UserError
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES
from dlbench.projection.spec_machine import (
    LayerPass,
    ideal_times,
    layer_rows,
    layers_section,
    layout_of,
    network_of,
    peak_tflops,
)
from dlbench.projection.strategies.layers import ELEMENT_BYTES, limit
from dlbench.projection.strategies.section import section
from dlbench.projection.strategies.table import StrategyCase, StrategyRow, best
from dlbench.report.document import BaseReport, Document, Section
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
from dlbench.specs.plan import AxisValue, value_text
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload
from dlbench.units import and_text, format_number


def _figure_column(title: str) -> dict[str, Any]:
    return column(title, text=format_number, is_brief=True)


def _equal_column(figure: str) -> dict[str, Any]:
    return column(f"Equal {figure}", text="{:,}".format, missing="never", is_brief=True)


@dataclass(frozen=True, kw_only=True)
class MachineCost:
    """The cost of a training on some nodes of a system, by data sheet, with the fastest strategy that fits. Equal: the
    fewest nodes of the other system that take at most this time, or the most that need at most this energy or price;
    None: no node count within the asked ones, or no figure.
    """

    system: str = field(metadata=column("System", is_brief=True))
    nodes: int = field(metadata=column("Nodes", is_brief=True))
    ranks: int = field(metadata=column("Ranks"))
    strategy: str = field(metadata=column("Strategy"))
    hours: float = field(metadata=_figure_column("Time, h"))
    node_hours: float = field(metadata=_figure_column("Node-hours"))
    kwh: float | None = field(metadata=_figure_column("kWh"))  # None: the power of a node is not known.
    price: float | None = field(metadata=_figure_column("Price"))
    equal_hours: int | None = field(default=None, metadata=_equal_column("time"))
    equal_kwh: int | None = field(default=None, metadata=_equal_column("energy"))
    equal_price: int | None = field(default=None, metadata=_equal_column("price"))


# Beginnings of the keys on which a projection by data sheet depends.
READ = (
    *("model.", "data.sequence_length", "data.max_predictions"),
    *("train.batch_per_rank", "train.precision", "train.optimizer.name", "train.optimizer.momentum"),
)


@dataclass(frozen=True, kw_only=True)
class IdealReport(BaseReport):
    """The report of `dlbench project spec`, without any measured figure."""

    format: str = "dlbench.ideal-projection"
    title: str = "Ideal, by data sheet, not measured"
    as_of: str = ""
    workload: str
    preset: str
    system: str
    sources: tuple[str, ...]  # Sources of links and device in the system file.
    overrides: dict[str, AxisValue]  # Settings given by --set.
    global_batch: dict[int, int]  # Samples of a step, by ranks.
    rows: tuple[StrategyRow, ...]  # Of one system.
    costs: tuple[MachineCost, ...]
    layers: tuple[LayerPass, ...]  # Of one system.


def workload_for(
    name: str, preset: str | None, systems: Sequence[SystemSpec], settings: Mapping[str, AxisValue] | None = None
) -> Workload:
    """Returns a preset of a workload; by default one with a precision for which the devices have a peak. `settings`
    are those of --set; raises `UserError`: one is wrong, or data sheets do not depend on it.
    """
    file = WorkloadFile(find("workloads", name))
    overrides = {key: (value, "--set") for key, value in (settings or {}).items()}
    default = file.preset_on(systems[0])
    candidates = (default, *file.presets)
    if preset is not None:
        default, candidates = preset, ()
    first = choose(file, default, overrides).workload()
    for key in overrides:
        if not key.startswith(READ):
            names = ", ".join(beginning.rstrip(".") for beginning in READ)
            raise UserError(f"--set {key}: has no effect on a projection by data sheet, which reads {names}")
    for candidate in candidates:
        workload = choose(file, candidate, overrides).workload()
        if all(peak_tflops(system, workload.train.precision) for system in systems):
            return workload
    return first


def training_samples(workload: Workload, samples: int | None, batch: int) -> tuple[float, str]:
    """Returns the samples of a training, and in words: as asked, or of the schedule, or a million if it does not end.
    `batch`: samples of a step if the workload has no reference batch.
    """
    train, unit = workload.train, workload.sample_unit
    if samples is not None:
        return samples, f"{samples:,} {unit} (as asked)"
    num_samples = train.total_samples(train.schedule, train.optimizer.reference_batch or batch)
    if num_samples is not None:
        return num_samples, f"{num_samples:,.0f} {unit} (the schedule's)"
    return UNSTATED_SAMPLES, f"{UNSTATED_SAMPLES:,} {unit} (the schedule does not say how many; --samples N)"


@dataclass(frozen=True, kw_only=True)
class IdealCase:
    """A training on one system, by data sheet."""

    workload: Workload
    system: SystemSpec
    strategies: Sequence[str]
    memory_limit: int | None = None  # Bytes of a rank; None: of a device.
    global_batch: int | None = None  # Samples of a step of all ranks; None: the workload's batch on each rank.
    samples: float = UNSTATED_SAMPLES  # Samples of the training.
    node_price: float | None = None  # Price of a node-hour.
    overrides: Mapping[str, AxisValue] = field(default_factory=dict)  # Settings given by --set, already in `workload`.

    def batch(self, ranks: int) -> int:
        return self.global_batch or self.workload.train.batch_per_rank * ranks

    @cached_property
    def rows(self) -> Callable[[int], tuple[StrategyRow, ...]]:
        """The strategies by ranks, on full nodes. Raises `UserError`: the ranks do not fill them."""
        return cache(self._rows)

    def _rows(self, ranks: int) -> tuple[StrategyRow, ...]:
        system, per_node = self.system, self.system.node.default_ranks
        if ranks > per_node and ranks % per_node:
            raise UserError(f"--to {ranks}: does not fill nodes of {per_node} ranks; choose a multiple of {per_node}")
        workload, train, batch = self.workload, self.workload.train, self.batch(ranks)
        layers, name = workload.model.layer_table(workload.data), workload.name
        if not layers:
            raise UserError(f"project spec: layers of {name} are not known (layer_table, docs/architecture.md)")
        slots, per_rank = train.optimizer.slots, max(1, batch // ranks)
        case = StrategyCase(
            layers=layers,
            times=ideal_times(layers, system, train.precision, batch=per_rank, optimizer_slots=slots),
            network=network_of(system),
            layout=layout_of(system, ranks),
            batch=batch,
            slots=slots,
            activation_bytes=ELEMENT_BYTES[train.precision],
            memory_limit=limit(self.memory_limit, system)[0],
        )
        return tuple(replace(row, is_ideal=True) for row in case.table(self.strategies))

    def cost(self, ranks: int) -> MachineCost | None:
        """Returns the cost with the fastest strategy on some ranks; None: none fits."""
        fastest = best(self.rows(ranks))
        if fastest is None:
            return None
        nodes = -(-ranks // self.system.node.default_ranks)
        hours = self.samples / self.batch(ranks) * fastest.step_s / HOUR_S
        kwh = price = None
        if self.system.device is not None and self.system.device.node_watts is not None:
            kwh = nodes * hours * self.system.device.node_watts / 1000
        if self.node_price is not None:
            price = nodes * hours * self.node_price
        return MachineCost(
            system=self.system.name,
            nodes=nodes,
            ranks=ranks,
            strategy=fastest.strategy,
            hours=hours,
            node_hours=nodes * hours,
            kwh=kwh,
            price=price,
        )


def _costs(cases: Sequence[IdealCase], counts: Sequence[int]) -> Iterator[MachineCost]:
    """Yields the costs on each system; on one of two with the node counts of the other at which figures are equal."""
    for case, other in zip(cases, reversed(cases), strict=True):
        # Between the asked counts, only strategies that are fastest at one of them are priced.
        fastest = {cost.strategy: None for cost in map(other.cost, counts) if cost is not None}
        searched = replace(other, strategies=tuple(fastest))
        full_counts = [count for count in counts if count % other.system.node.default_ranks == 0]
        for cost in filter(None, map(case.cost, counts)):
            equal_nodes: dict[str, Any] = {}
            if len(cases) > 1:
                equal_nodes["equal_hours"] = _equal_nodes(cost, "hours", searched, full_counts)
                for name in ("kwh", "price"):
                    equal_nodes[f"equal_{name}"] = _equal_nodes(cost, name, searched, full_counts[::-1])
            yield replace(cost, **equal_nodes)


def _equal_nodes(cost: MachineCost, name: str, case: IdealCase, counts: Sequence[int]) -> int | None:
    """Returns the first node count of a case, of some rank counts or between them, at which a figure is at most that of
    `cost`. None: it is at none.
    """
    per_node = case.system.node.default_ranks

    def is_within(nodes: int) -> bool:
        figure, limit = getattr(case.cost(nodes * per_node), name, None), getattr(cost, name)
        return figure is not None and limit is not None and figure <= limit

    beyond = None
    for count in counts:
        nodes = count // per_node
        if is_within(nodes):
            while beyond is not None and abs(nodes - beyond) > 1:
                middle = (nodes + beyond) // 2
                if is_within(middle):
                    nodes = middle
                else:
                    beyond = middle
            return nodes
        beyond = nodes
    return None


def _cost_section(costs: Sequence[MachineCost], *, work: str, currency: str) -> Section:
    """Returns the cost of a training by system and rank count. `work`: its samples in words."""
    names = ["system", "nodes", "ranks", "strategy", "hours", "node_hours", "kwh", "price"]
    caption = ""
    if len({cost.system for cost in costs}) > 1:
        caption = (
            "Equal, within the asked counts: the fewest nodes of the other system that take at most this time, and the "
            "most nodes that need at most this energy or price."
        )
        figures = ("hours", "kwh", "price")
        names += [f"equal_{name}" for name in figures if all(getattr(cost, name) is not None for cost in costs)]
    unknown = dict.fromkeys(cost.system for cost in costs if cost.kwh is None)
    sheet = Sheet(
        name="costs",
        title="Cost by system",
        columns=columns_of(MachineCost, *names, titles={"price": currency or "Price"}),
        rows=costs,
        caption=caption,
        in_terminal=True,
    )
    return Section(
        id="cost",
        title="Cost of the training",
        level="answer",
        about=(f"For {work}.",),
        brief=(f"For {work}.",),
        sheets=(sheet,),
        notes=(
            "Ideal, by data sheet: training steps only, without start, evaluations, checkpoints and queue.",
            *(f"Energy of {name}: device.node_watts is missing in its file." for name in unknown),
        ),
    )


def by_data_sheet(
    cases: Sequence[IdealCase], ranks: Sequence[int], *, work: str, currency: str
) -> tuple[Document, bool]:
    """Returns the projection by data sheet of one training, by strategy, or of one on two systems, and whether a
    strategy fits. `work`: its samples in words; `currency`: that of prices.
    """
    first, counts = cases[0], sorted(ranks)
    workload, costs = first.workload, list(_costs(cases, counts))
    rows: list[StrategyRow] = []
    words: list[str] = []
    layers: tuple[LayerPass, ...] = ()
    sections = [_cost_section(costs, work=work, currency=currency)]
    if len(cases) == 1:
        for count in counts:
            count_rows = first.rows(count)
            rows += count_rows
            words += _throughput_words(first, count, count_rows)
        layers = layer_rows(workload.model.layer_table(workload.data), first.system, workload.train)
        sections += [section(rows, ("Every figure is ideal, by data sheet.",)), layers_section(layers)]
    sources: list[str] = []
    for system in (case.system for case in cases):
        if system.device is not None:
            sources.append(system.device.source)
        sources += network_of(system).sources
    report = IdealReport(
        workload=workload.name,
        preset=workload.preset,
        system=" and ".join(case.system.name for case in cases),
        sources=tuple(dict.fromkeys(sources)),
        overrides=dict(first.overrides),
        global_batch={count: first.batch(count) for count in counts},
        rows=tuple(rows),
        costs=tuple(costs),
        layers=tuple(layers),
    )
    changed = "".join(f", {key}={value_text(key, value)}" for key, value in report.overrides.items())
    title = f"{workload.title}, {workload.preset} preset{changed}, {workload.train.precision}, on "
    title += and_text([case.system.title for case in cases])
    is_answered = bool(costs) or any(not row.refused and row.fits is not False for row in rows)
    return _document(report, f"{title}.", words, sections), is_answered


def _throughput_words(case: IdealCase, ranks: int, rows: Sequence[StrategyRow]) -> Iterator[str]:
    """Yields the throughput of the fastest strategy against that of one rank; nothing if none fits."""
    fastest = best([row for row in rows if row.strategy != "serial"] or rows)
    if fastest is not None:
        batch = case.batch(ranks)
        alone, rate = max(1, batch // ranks), batch / fastest.step_s
        (serial,) = replace(case, strategies=("serial",), global_batch=alone).rows(1)
        yield (
            f"{ranks_text(ranks)}, {fastest.strategy}: {rate:,.0f} {case.workload.sample_unit}/s, "
            f"{percent(rate / (ranks * alone / serial.step_s))} of one rank's with its batch; ideal."
        )


def _document(report: IdealReport, title: str, words: Sequence[str], sections: Sequence[Section]) -> Document:
    return report.document(
        Section(
            id="ideal",
            title="Ideal throughput",
            level="answer",
            about=(title,),
            words=tuple(words),
            brief=tuple(words),
            notes=(
                "Operations at the peak or bytes at the memory's rate, links at their stated rate, all-reduce by the "
                "fastest of ring, hierarchical and double binary tree. For figures with a band, measure a few ranks: "
                "dlbench project runs RUNS --to RANKS.",
                *report.sources,
            ),
        ),
        *sections,
        notices=("Modelled by data sheet, not measured.",),
        file_prefix="ideal-",
        command="dlbench project spec WORKLOAD",
    )
