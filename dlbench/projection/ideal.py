"""Projects a training by data sheets of devices and links: the ideal case of Kahira et al., HPDC 2021 (ParaDL)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain

from dlbench.errors import UserError
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES
from dlbench.projection.machines import BreakEven, Machine, MachineCost, break_evens, machines_section
from dlbench.projection.spec_machine import ideal_times, layout_of, network_of, peak_tflops
from dlbench.projection.strategies.layers import ELEMENT_BYTES, limit
from dlbench.projection.strategies.section import section
from dlbench.projection.strategies.table import StrategyCase, StrategyRow, best
from dlbench.report.document import BaseReport, Document, Section
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload
from dlbench.units import and_text


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
    global_batch: dict[int, int]  # Samples of a step, by ranks.
    rows: tuple[StrategyRow, ...]  # System by system.
    machines: tuple[MachineCost, ...] = ()  # Cost of the same training, by system and ranks.
    break_evens: tuple[BreakEven, ...] = ()  # Of the first system against each other one.


def ideal_rows(
    workload: Workload,
    system: SystemSpec,
    layout: Layout,
    *,
    batch: int,
    strategies: Sequence[str],
    memory_limit: int | None = None,
) -> tuple[StrategyRow, ...]:
    """Returns the rows of strategies by data sheet. `batch`: samples of a step of all ranks."""
    layers, train = workload.model.layer_table(workload.data), workload.train
    if not layers:
        raise UserError(f"project spec: layers of {workload.name} are not known (layer_table, docs/architecture.md)")
    per_rank, slots = max(1, batch // layout.ranks), train.optimizer.slots
    times = ideal_times(layers, system, train.precision, batch=per_rank, optimizer_slots=slots)
    case = StrategyCase(
        layers=layers,
        times=times,
        network=network_of(system),
        layout=layout,
        batch=batch,
        slots=slots,
        activation_bytes=ELEMENT_BYTES[train.precision],
        memory_limit=limit(memory_limit, system)[0],
    )
    return tuple(replace(row, is_ideal=True) for row in case.table(strategies))


def workload_for(name: str, preset: str | None, *systems: SystemSpec) -> Workload:
    """Returns a preset of a workload; by default one with a precision for which the devices have a peak."""
    file = WorkloadFile(find("workloads", name))
    if preset is not None:
        return choose(file, preset, {}).workload()
    default = file.preset_on(systems[0])
    for candidate in (default, *file.presets):
        workload = choose(file, candidate, {}).workload()
        if all(peak_tflops(system, workload.train.precision) for system in systems):
            return workload
    return choose(file, default, {}).workload()


@dataclass(frozen=True, kw_only=True)
class CostQuestion:
    """The training whose cost is asked, and prices."""

    samples: float = UNSTATED_SAMPLES
    work: str = f"{UNSTATED_SAMPLES:,} samples"  # `samples` in words.
    node_prices: Mapping[str, float] = field(default_factory=dict)  # Price of a node-hour by name of the system.
    currency: str = ""


@dataclass(frozen=True, kw_only=True)
class IdealCase:
    """A workload on one system, by data sheet."""

    workload: Workload
    system: SystemSpec
    strategies: Sequence[str]
    memory_limit: int | None
    global_batch: int | None = None  # Samples of a step of all ranks; None: the workload's batch on each rank.

    def batch(self, ranks: int) -> int:
        return self.global_batch or self.workload.train.batch_per_rank * ranks

    def rows(self, ranks: int) -> tuple[StrategyRow, ...]:
        """Returns the strategies on full nodes. Raises `UserError`: the ranks do not fill them."""
        per_node = self.system.node.default_ranks
        if ranks > per_node and ranks % per_node:
            raise UserError(
                f"--to {ranks}: does not fill nodes of {per_node} ranks of {self.system.name}; choose a multiple of "
                f"{per_node}"
            )
        return ideal_rows(
            self.workload,
            self.system,
            layout_of(self.system, ranks),
            batch=self.batch(ranks),
            strategies=self.strategies,
            memory_limit=self.memory_limit,
        )

    def cost(self, ranks: int, question: CostQuestion) -> MachineCost | None:
        """Returns the cost with the fastest strategy on some ranks; None: none fits."""
        fastest = best(self.rows(ranks))
        if fastest is None:
            return None
        nodes = -(-ranks // self.system.node.default_ranks)
        samples_per_s = self.batch(ranks) / fastest.step_s
        node_hours = nodes * question.samples / samples_per_s / HOUR_S
        watts, price = self.system.device and self.system.device.node_watts, question.node_prices.get(self.system.name)
        return MachineCost(
            system=self.system.name,
            nodes=nodes,
            ranks=ranks,
            strategy=fastest.strategy,
            samples_per_s=samples_per_s,
            hours=node_hours / nodes,
            node_hours=node_hours,
            kwh=None if watts is None else node_hours * watts / 1000,
            price=None if price is None else node_hours * price,
        )

    def machine(self, ranks: Sequence[int], question: CostQuestion) -> Machine:
        """Returns the system with its full nodes among some rank counts."""
        per_node = self.system.node.default_ranks
        full = [count // per_node for count in sorted(ranks) if count % per_node == 0]
        return Machine(self.system.name, full, cache(lambda nodes: self.cost(nodes * per_node, question)))
def by_data_sheet(
    cases: Sequence[IdealCase], ranks: Sequence[int], question: CostQuestion
) -> tuple[Document, bool]:
    """Returns the projection of a workload by the data sheets of one or several systems, and whether a strategy fits on
    any of them.
    """
    first, counts = cases[0], sorted(ranks)
    rows_by_system: dict[str, tuple[StrategyRow, ...]] = {}
    words: list[str] = []
    for case in cases:
        rows: list[StrategyRow] = []
        for count in counts:
            count_rows = case.rows(count)
            rows += count_rows
            words += _throughput_words(case, count, count_rows, of_several=len(cases) > 1)
        rows_by_system[case.system.name] = tuple(rows)
    costs = [cost for case in cases for count in counts if (cost := case.cost(count, question)) is not None]
    machines = [case.machine(counts, question) for case in cases]
    report = IdealReport(
        workload=first.workload.name,
        preset=first.workload.preset,
        system=" ".join(rows_by_system),
        sources=tuple(dict.fromkeys(chain.from_iterable(_sources(case.system) for case in cases))),
        global_batch={count: first.batch(count) for count in counts},
        rows=tuple(chain.from_iterable(rows_by_system.values())),
        machines=tuple(costs),
        break_evens=tuple(chain.from_iterable(break_evens(machines[0], other) for other in machines[1:])),
    )
    document = _document(report, cases, rows_by_system, words, question)
    return document, any(not row.refused and row.fits is not False for row in report.rows)


def _throughput_words(
    case: IdealCase, ranks: int, rows: Sequence[StrategyRow], *, of_several: bool
) -> Iterator[str]:
    """Yields the throughput of the fastest strategy against that of one rank; nothing if none fits."""
    fastest = best([row for row in rows if row.strategy != "serial"] or rows)
    if fastest is None:
        return
    alone, rate = max(1, case.batch(ranks) // ranks), case.batch(ranks) / fastest.step_s
    (serial,) = replace(case, strategies=("serial",), global_batch=alone).rows(1)
    place = f"{case.system.name}, " if of_several else ""
    yield (
        f"{place}{ranks_text(ranks)}, {fastest.strategy}: {rate:,.0f} {case.workload.sample_unit}/s, "
        f"{percent(rate / (ranks * alone / serial.step_s))} of one rank's with its batch; ideal."
    )


def _sources(system: SystemSpec) -> tuple[str, ...]:
    sources = network_of(system).sources
    if system.device is None:
        return sources
    return (system.device.source, *sources)


def _document(
    report: IdealReport,
    cases: Sequence[IdealCase],
    rows_by_system: Mapping[str, tuple[StrategyRow, ...]],
    words: Sequence[str],
    question: CostQuestion,
) -> Document:
    workload, titles = cases[0].workload, and_text([case.system.title for case in cases])
    sections = [
        Section(
            id="ideal",
            title="Ideal throughput",
            level="answer",
            about=(f"{workload.title}, {workload.preset} preset, {workload.train.precision}, on {titles}.",),
            words=tuple(words),
            brief=tuple(words),
            notes=(
                "Operations at the peak or bytes at the memory's rate, links at their stated rate, all-reduce by the "
                "fastest of ring, hierarchical and double binary tree. For figures with a band, measure a few ranks: "
                "dlbench project runs RUNS --to RANKS.",
                *report.sources,
            ),
        )
    ]
    if report.machines:
        unknown = [name for name in rows_by_system if not any(row.kwh for row in report.machines if row.system == name)]
        notes = [f"Energy of {name}: device.node_watts is missing in its file." for name in unknown]
        sections.append(
            machines_section(
                report.machines, report.break_evens, work=question.work, currency=question.currency, notes=notes
            )
        )
    for name, rows in rows_by_system.items():
        strategies = section(rows, ("Every figure is ideal, by data sheet.",))
        if len(cases) > 1:
            strategies = replace(
                strategies,
                id=f"strategies-{name}",
                title=f"{strategies.title}, {name}",
                level="evidence",
                where={"system": name},
            )
        sections.append(strategies)
    return report.document(
        *sections,
        notices=("Modelled by data sheet, not measured.",),
        file_prefix="ideal-",
        command="dlbench project spec WORKLOAD",
    )
