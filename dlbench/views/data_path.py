"""The view `data-path`: the source of samples, and how long ranks wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dlbench.analysis import scaling
from dlbench.analysis.attribution import about_means
from dlbench.analysis.measures import PARTS
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.errors import IncompleteDataError
from dlbench.lazy import np
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import percent, place_text, value_text
from dlbench.stats.estimates import Estimate, mean_estimate
from dlbench.stats.pairing import KnownKey, RunKey
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns
from dlbench.views.readers import complement

STAGING_KEYS = ("staging", "staging_tier", "staging_streams", "keep_staged")
SHUFFLE_KEYS = ("shuffle", "partition")
STALL_SHARE = 0.1  # A step stalls if a larger share of it is input wait.
MAX_RANKS = 16  # Ranks of a run whose single steps are read, evenly spread.
MAX_POINTS = 100  # Points of a table whose single steps are read: those with most ranks.
_FORMATS = {
    "images": "JPEG images",
    "jpeg-tree": "JPEG images",
    "text": "text",
    "density": "density volumes",
    "hdf5-density": "density volumes",
}
INPUT_CAPTION = "Waits and copies: means over all runs. Longest wait: in the run with the median throughput."
STALLS_CAPTION = "A step stalls if more than 10 % of it is input wait; counted in the median run, on at most 16 ranks."
UTILISATION_CAPTION = "Accelerator utilisation as in MLPerf Storage: time not spent waiting for input (target: 90 %)."


def with_real_data(groups: Sequence[scaling.Group]) -> list[scaling.Group]:
    """Returns the groups that read files."""
    return [group for group in groups if not group.sample.plan.workload.data.is_synthetic]


def epoch_samples(run: Run) -> int | None:
    """Returns the samples of an epoch over all ranks; None if the record does not have the size of the data set."""
    if run.record is None:
        return None
    size, dropped = run.record.data.get("num_samples"), run.record.data.get("dropped_per_epoch")
    if not isinstance(size, int) or size <= 0:
        return None
    return max(1, size - dropped) if isinstance(dropped, int) else size


def epoch_times(point: Point, table: RunTable) -> dict[RunKey, float]:
    """Returns the seconds of an epoch at the measured rate of each run. Runs of one series and repeat ran interleaved,
    whatever their group, so keys are made of these.
    """
    epochs_s: dict[RunKey, float] = {}
    for run_id in point.run_ids:
        run = table.runs[run_id]
        samples = epoch_samples(run)
        if samples is not None:
            series = run.plan.series
            key = KnownKey.of(f"{run.plan.created} {series.id}", series.repeat, table.sessions[run_id])
            epochs_s[key] = samples / float(table.rates[run_id])
    return epochs_s


@dataclass(frozen=True, kw_only=True)
class DataPoint(AtPlace):
    """The input of ranks at one rank count."""

    wait: Estimate = field(metadata=column("Input wait per step", "input_wait_s"))  # Seconds, mean.
    copy: Estimate = field(metadata=column("Copy to the device", "copy_s"))
    wait_share: Estimate = field(metadata=column("Share of the step", "input_wait_share"))
    utilisation: Estimate = field(metadata=column("Accelerator utilisation", "accelerator_utilisation"))
    stalled: float | None  # Share of steps (1) that stall, in the median run; None: not read.
    longest_wait_s: float | None = field(metadata=column("Longest wait", unit="s"))
    stall_steps: int  # Number of steps of ranks that were read.
    stall_ranks: int  # Number of ranks whose steps were read.


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """The source of samples, and how long the ranks wait for them."""

    source: str
    format: str
    is_synthetic: bool
    points: tuple[DataPoint, ...]
    verdict: str


def data_path(group: scaling.Group, table: RunTable) -> DataPath:
    """Returns the source of samples, and how long ranks wait for them, by rank count."""
    points_with_steps = set(list(table.points)[:MAX_POINTS])
    points = []
    for point in group.points:
        key = group.id, point.ranks, point.nodes
        median_run = table.points[key][0]
        points.append(_point(point, table, median_run, with_steps=key in points_with_steps))
    data = group.sample.plan.workload.data
    return DataPath(
        source=data.source,
        format=_FORMATS.get(data.format, data.format),
        is_synthetic=data.is_synthetic,
        points=tuple(points),
        verdict=_verdict(points, is_synthetic=data.is_synthetic),
    )


def _point(point: Point, table: RunTable, median_run: Run, *, with_steps: bool) -> DataPoint:
    rows = [{name: table.parts[run_id][name] for name in PARTS} for run_id in point.run_ids]
    keys = [table.keys[run_id] for run_id in point.run_ids]
    shares = [row["input"] / sum(row.values()) for row in rows]
    share = mean_estimate(dict(zip(keys, shares, strict=True)), "fraction")
    by_key = dict(zip(keys, about_means(rows), strict=True))
    stalls = _stalls(median_run) if with_steps else _Stalls()
    return DataPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        wait=mean_estimate({key: parts["input"] for key, parts in by_key.items()}, "s"),
        copy=mean_estimate({key: parts["h2d"] for key, parts in by_key.items()}, "s"),
        wait_share=share,
        utilisation=complement(share),
        stalled=stalls.share,
        longest_wait_s=stalls.longest_s,
        stall_steps=stalls.num_steps,
        stall_ranks=stalls.num_ranks,
    )


@dataclass(frozen=True, kw_only=True)
class _Stalls:
    """The stalls of a run; without values if its steps were not read."""

    share: float | None = None  # Share of steps that stall (1).
    longest_s: float | None = None  # Longest input wait, seconds.
    num_steps: int = 0
    num_ranks: int = 0


def _stalls(run: Run) -> _Stalls:
    waits, steps = [], []
    ranks = range(0, run.plan.layout.ranks, math.ceil(run.plan.layout.ranks / MAX_RANKS))  # Evenly spread.
    for rank in ranks:
        try:
            measured = read_steps(run.folder.steps(rank), run.plan.run_id).measured
        except IncompleteDataError:
            return _Stalls()
        waits.append(measured["input_ns"].astype(np.float64))
        steps.append(measured["step_ns"].astype(np.float64))
    wait, step = np.concatenate(waits), np.concatenate(steps)
    return _Stalls(
        share=float((wait > STALL_SHARE * step).mean()),
        longest_s=float(wait.max()) / 1e9,
        num_steps=len(step),
        num_ranks=len(ranks),
    )


def _verdict(points: Sequence[DataPoint], *, is_synthetic: bool) -> str:
    worst = max(points, key=attrgetter("wait_share.value"))
    largest = ", the largest" if len(points) > 1 else ""
    place = f"({place_text(worst.ranks, worst.nodes)}{largest})"
    text = f"mean input wait {value_text(worst.wait_share)} of the step {place}"
    if is_synthetic:
        return f"synthetic data, no storage involved; {text}"
    stalled = max((point.stalled for point in points if point.stalled is not None), default=0.0)
    return f"{text}; {percent(stalled)} of the steps stall" if stalled > 0 else text


def _input_sheet(points: Sequence[DataPoint], *, on_gpu: bool) -> Sheet[DataPoint]:
    captions, titles = [INPUT_CAPTION], {}
    if any(point.stalled for point in points):
        captions.append(STALLS_CAPTION)
    if on_gpu:
        captions.append(UTILISATION_CAPTION)
    else:
        titles = {"copy_s": "", "accelerator_utilisation": ""}
    columns = columns_of(
        DataPoint,
        *place_columns(),
        *("wait", "wait_share", "copy", "utilisation", "runs=wait.n"),
        Column("stalled_share", "Steps that stall", "stalled", _stalled_cell),
        *("stall_steps", "longest_wait_s"),
        titles=titles,
    )
    columns, caption = drop_empty_columns(columns, points), " ".join(captions)
    return Sheet(name="data-path", title="Input by rank count", columns=columns, rows=points, caption=caption)


def _stalled_cell(point: DataPoint) -> Cell:
    if point.stalled is None:
        return Cell("not read")
    return Cell(f"{percent(point.stalled)} of {point.stall_steps:,}", number=point.stalled)


class DataPathView(GroupView):
    """The data path from the source to the device."""

    id = "data-path"
    title = "Data path"
    key = "data_path"
    after = "exchange"

    def numbers(self, source: GroupSource) -> DataPath:
        return data_path(source.group, source.table)

    def shown(self, group: ReportGroup, path: DataPath) -> Section:
        return Section(headline=path.verdict, sheets=(_input_sheet(path.points, on_gpu=group.on_gpu),))
