"""What a check has measured, each figure next to what is published for the same card or measured by another program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import figures as bench
from dlbench.comm.report import CollectivesReport
from dlbench.comm.report import assemble as assemble_comm
from dlbench.records.comm import scan_comm
from dlbench.records.scan import scan
from dlbench.report.document import warnings_cell
from dlbench.report.table import column, times_cell, unit_cell
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Report, ReportGroup, Views
from dlbench.views.scaling_report import assemble
from dlbench.views.utilisation import PublishedRate, Utilisation, UtilisationView
from tests.gpu.steps import TRAINED

VIEWS = Views(group=(UtilisationView(),))


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Throughput of one GPU, and one published figure of the same card, network and precision."""

    what: str = field(metadata=column("What", is_brief=True))
    gpus: int = field(metadata=column("GPUs", is_brief=True))
    here: Estimate = field(metadata=column("Here per GPU", text=lambda one: unit_cell(_per_gpu(one)), is_brief=True))
    mfu: Estimate | None = field(metadata=column("MFU"))
    published: float | None = field(metadata=column("Published per GPU", unit="samples/s"))
    ratio: Estimate | None = field(metadata=column("Here / published", text=times_cell, is_brief=True))
    differences: str = field(metadata=column("What differs"))
    source: str = field(metadata=column("Source"))
    address: str = field(default="", metadata=column())


@dataclass(frozen=True, kw_only=True)
class Message:
    """An all-reduce of NCCL by dlbench, and by nccl-tests."""

    num_bytes: int = field(metadata=column("Size", unit="bytes"))
    time: Estimate = field(metadata=column("dlbench, median"))
    busbw: Estimate | None = field(metadata=column("dlbench, busbw GB/s"))
    nccl_tests_busbw: float | None = field(metadata=column("nccl-tests, busbw GB/s"))
    ratio: float | None = field(metadata=column("dlbench / nccl-tests"))


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """A run, with what dlbench itself says against it."""

    run_id: str = field(metadata=column("Run"))
    state: str = field(metadata=column("State"))
    why: str = field(metadata=column("Why there is no figure"))
    throughput: float | None = field(metadata=column("Samples per second, all ranks", unit="samples/s"))
    warnings: tuple[str, ...] = field(metadata=column("Warnings", "warnings", value=len, text=warnings_cell))


def _per_gpu(found: Estimate) -> Estimate:
    return found.in_unit(found.unit.removesuffix("/rank"))


def reports(folder: Path) -> Iterator[Report]:
    """One for each folder of runs that train, with what they attain; groups of pairs are compared elsewhere."""
    for name in TRAINED:
        if (folder / name).is_dir():
            yield assemble(scan(folder / name), views=VIEWS, with_digests=False)


def rates(found: Report, card: str) -> Iterator[Rate]:
    """Every point of presets for GPUs with every published figure of its card; one row without where none is known."""
    for group in found.groups:
        of = group.of(Utilisation)
        if not group.condition("preset").startswith("gpu"):
            continue
        for place, point in enumerate(group.points):
            known = [one for one in (of.published if of else ()) if one.gpus == point.ranks]
            for anchor in (*known, *([] if known else [None])):
                yield Rate(
                    what=_what(group),
                    gpus=point.ranks,
                    here=point.throughput_per_rank,
                    mfu=of.points[place].mfu if of else None,
                    published=anchor.published if anchor else None,
                    ratio=anchor.ratio if anchor else None,
                    differences=_differences(anchor),
                    source=anchor.source if anchor else _unknown(group, point.ranks, card),
                    address=anchor.address if anchor else "",
                )


def _what(group: ReportGroup) -> str:
    settings = {key: value for key, value in group.settings if not key.startswith("measure.")}
    kind = f"{group.condition('workload')} {group.condition('preset')}"
    return ", ".join([kind, group.condition("engine"), *(f"{k}={v}" for k, v in settings.items())])


def _differences(anchor: PublishedRate | None) -> str:
    return "" if anchor is None else ", ".join(anchor.differences) or "nothing known"


def _unknown(group: ReportGroup, gpus: int, card: str) -> str:
    where = f"{gpus} x {card}" if gpus > 1 else card
    return f"none in reports/rates.yaml for {where} in {group.condition('precision') or 'this precision'}"


def runs(found: Report) -> Iterator[RunLine]:
    """All runs, whatever became of them."""
    for run in found.runs:
        yield RunLine(
            run_id=run.run_id, state=run.state, why=run.failure_reason, throughput=run.throughput, warnings=run.warnings
        )


_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+((?:\s+\S+){8})\s*$", re.MULTILINE)


def nccl_tests(printed: str) -> dict[int, float]:
    """GB/s on the bus by bytes of a message, of `all_reduce_perf` in place, as dlbench reduces.

    Its table has size, count, type, operation and root, and then time, algbw, busbw and wrong results twice: out of
    place and in place (nccl-tests, doc/PERFORMANCE.md says what they are).
    """
    return {int(size): float(rest.split()[6]) for size, rest in _ROW.findall(printed)}


def messages(folder: Path, printed: str) -> Iterator[Message]:
    """NCCL's own all-reduce as `dlbench comm` timed it; `printed`: by nccl-tests, empty where it was not run."""
    if not folder.is_dir():
        return
    theirs = nccl_tests(printed)
    found: CollectivesReport = assemble_comm(scan_comm(folder))
    for group in found.groups:
        for series in group.series:
            if not (series.is_library and "nccl" in series.carrier):
                continue
            for row in series.rows:
                other = theirs.get(row.num_bytes)
                ratio = row.busbw.value / other if row.busbw and other else None
                yield Message(
                    num_bytes=row.num_bytes, time=row.time, busbw=row.busbw, nccl_tests_busbw=other, ratio=ratio
                )


def axes() -> Iterator[bench.Figure]:
    """What `FIGURES=1` has saved."""
    for path in [*sorted(bench.FOLDER.glob("gpu*.json")), *bench.FOLDER.glob("spine.host.json")]:
        yield from (one.figure for one in bench.load(path))
