"""Projects a training by data sheets of devices and links: the ideal case of Kahira et al., HPDC 2021 (ParaDL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.errors import UserError
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.spec_machine import ideal_times, layout_of, network_of, peak_tflops
from dlbench.projection.strategies.layers import ELEMENT_BYTES, limit
from dlbench.projection.strategies.section import section
from dlbench.projection.strategies.table import StrategyCase, StrategyRow, best
from dlbench.report.document import BaseReport, Document, Section
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
from dlbench.specs.plan import AxisValue, value_text
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload

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
    rows: tuple[StrategyRow, ...]


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


def workload_for(
    name: str, preset: str | None, system: SystemSpec, settings: Mapping[str, AxisValue] | None = None
) -> Workload:
    """Returns a preset of a workload; by default one with a precision for which the device has a peak. `settings` are
    those of --set; raises `UserError`: one is wrong, or data sheets do not depend on it.
    """
    file = WorkloadFile(find("workloads", name))
    overrides = {key: (value, "--set") for key, value in (settings or {}).items()}
    default = file.preset_on(system)
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
        if peak_tflops(system, workload.train.precision):
            return workload
    return first


def by_data_sheet(
    workload: Workload,
    system: SystemSpec,
    ranks: Sequence[int],
    *,
    strategies: Sequence[str],
    is_strong: bool = False,
    memory_limit: int | None = None,
    overrides: Mapping[str, AxisValue] | None = None,
) -> tuple[Document, bool]:
    """Returns the projection by data sheet, and whether a strategy fits. `is_strong`: equal global batches."""
    per_node = system.node.default_ranks
    rows: list[StrategyRow] = []
    words: list[str] = []
    batches = {count: workload.train.batch_per_rank * count for count in sorted(ranks)}
    if is_strong:
        batches = dict.fromkeys(batches, workload.train.batch_per_rank * min(ranks))
    for count, batch in batches.items():
        if count > per_node and count % per_node:
            raise UserError(f"--to {count}: does not fill nodes of {per_node} ranks; choose a multiple of {per_node}")
        count_rows = ideal_rows(
            workload, system, layout_of(system, count), batch=batch, strategies=strategies, memory_limit=memory_limit
        )
        rows += count_rows
        fastest = best([row for row in count_rows if row.strategy != "serial"] or count_rows)
        if fastest is not None:
            alone = max(1, batch // count)
            (serial,) = ideal_rows(workload, system, layout_of(system, 1), batch=alone, strategies=("serial",))
            rate = batch / fastest.step_s
            words.append(
                f"{ranks_text(count)}, {fastest.strategy}: {rate:,.0f} {workload.sample_unit}/s, "
                f"{percent(rate / (count * alone / serial.step_s))} of one rank's with its batch; ideal."
            )
    sources = network_of(system).sources
    if system.device is not None:
        sources = (system.device.source, *sources)
    report = IdealReport(
        workload=workload.name,
        preset=workload.preset,
        system=system.name,
        sources=sources,
        overrides=dict(overrides or {}),
        global_batch=batches,
        rows=tuple(rows),
    )
    changed = "".join(f", {key}={value_text(key, value)}" for key, value in report.overrides.items())
    title = f"{workload.title}, {workload.preset} preset{changed}, {workload.train.precision}, on {system.title}."
    return _document(report, title, words), any(not row.refused and row.fits is not False for row in rows)


def _document(report: IdealReport, title: str, words: Sequence[str]) -> Document:
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
        section(report.rows, ("Every figure is ideal, by data sheet.",)),
        notices=("Modelled by data sheet, not measured.",),
        file_prefix="ideal-",
        command="dlbench project spec WORKLOAD",
    )
