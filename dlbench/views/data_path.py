"""The view `data-path`: how long ranks wait for their samples, and what is known of reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from dlbench.views.model import ReportGroup
from dlbench.views.readers import complement
from dlbench.views.view import GroupSource, GroupView, place_columns

STAGING_KEYS = ("staging", "staging_tier", "staging_streams", "keep_staged")
SHUFFLE_KEYS = ("shuffle", "partition")
STALL_SHARE = 0.1  # A step whose input wait is a larger share of it is a stall.
MAX_RANKS = 16  # Ranks of a run whose single steps are looked at, evenly spread.
MAX_POINTS = 100  # Points of a table whose single steps are looked at: those with most ranks.
_FORMATS = {
    "images": "JPEG images",
    "jpeg-tree": "JPEG images",
    "text": "text",
    "density": "density volumes",
    "hdf5-density": "density volumes",
}
INPUT_CAPTION = "Waits and copies: means over all runs. Longest wait: of the run whose throughput is in the middle."
STALLS_CAPTION = "A step stalls if more than 10 % of it is input wait; counted in the median run, on at most 16 ranks."
UTILISATION_CAPTION = "Accelerator utilisation as in MLPerf Storage: time not spent waiting for input (90 % asked for)."


def with_real_data(groups: Sequence[scaling.Group]) -> list[scaling.Group]:
    """Groups that read files."""
    return [group for group in groups if not group.sample.plan.workload.data.is_synthetic]


def epoch_samples(run: Run) -> int | None:
    """Samples of an epoch over all ranks; None where the record names no size of the data set."""
    data = {} if run.record is None else run.record.data
    size, dropped = data.get("num_samples"), data.get("dropped_per_epoch")
    if not isinstance(size, int) or size <= 0:
        return None
    return max(1, size - dropped) if isinstance(dropped, int) else size


def epoch_times(point: Point, table: RunTable) -> dict[RunKey, float]:
    """Seconds that an epoch takes at the measured rate of each run, by series and repeat.

    Runs of one series and repeat ran interleaved, whatever the group.
    """
    rates = table.rates
    found: dict[RunKey, float] = {}
    for run_id in point.run_ids:
        run = table.runs[run_id]
        samples = epoch_samples(run)
        if samples is not None:
            place = run.plan.series
            key = KnownKey.of(f"{run.plan.created} {place.id}", place.repeat, table.sessions[run_id])
            found[key] = samples / float(rates[run_id])
    return found


@dataclass(frozen=True, kw_only=True)
class DataPoint:
    """Input at one rank count."""

    ranks: int
    nodes: int
    wait: Estimate = field(metadata=column("Input wait per step", "input_wait_s"))
    """Mean wait for input, seconds per step; as the parts of a step."""
    copy: Estimate = field(metadata=column("Copy to the device", "copy_s"))
    wait_share: Estimate = field(metadata=column("Share of the step", "input_wait_share"))
    utilisation: Estimate = field(metadata=column("Accelerator utilisation", "accelerator_utilisation"))
    """1 - wait_share: accelerator utilisation as MLPerf Storage has it."""
    stalled: float | None
    """Share of steps that wait for more than `STALL_SHARE` of their time (1), in the run in the middle; None: not
    looked at."""
    longest_wait_s: float | None = field(metadata=column("Longest wait", unit="s"))
    stall_steps: int  # Steps of ranks that were looked at.
    stall_ranks: int


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """Where samples come from and how long the ranks wait for them."""

    source: str
    format: str
    is_synthetic: bool
    points: tuple[DataPoint, ...]
    verdict: str


def data_path(group: scaling.Group, table: RunTable) -> DataPath:
    """Where samples come from and how long ranks wait for them, by rank count."""
    read_points = set(list(table.points)[:MAX_POINTS])
    keys = [(group.id, point.ranks, point.nodes) for point in group.points]
    points = tuple(
        _point(point, table, table.points[key][0], is_looked_at=key in read_points)
        for point, key in zip(group.points, keys, strict=True)
    )
    data = group.sample.plan.workload.data
    return DataPath(
        source=data.source,
        format=_FORMATS.get(data.format, data.format),
        is_synthetic=data.is_synthetic,
        points=points,
        verdict=_verdict(points, is_synthetic=data.is_synthetic),
    )


def _point(point: Point, table: RunTable, middle: Run, *, is_looked_at: bool) -> DataPoint:
    rows = [{name: table.parts[run_id][name] for name in PARTS} for run_id in point.run_ids]
    keys = [table.keys[run_id] for run_id in point.run_ids]
    shares = (row["input"] / sum(row.values()) for row in rows)
    share = mean_estimate(dict(zip(keys, shares, strict=True)), "fraction")
    runs = about_means(rows)
    wait, copy = ({key: run[name] for key, run in zip(keys, runs, strict=True)} for name in ("input", "h2d"))
    stalled, longest_s, num_steps, num_ranks = _stalls(middle) if is_looked_at else (None, None, 0, 0)
    return DataPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        wait=mean_estimate(wait, "s"),
        copy=mean_estimate(copy, "s"),
        wait_share=share,
        utilisation=complement(share),
        stalled=stalled,
        longest_wait_s=longest_s,
        stall_steps=num_steps,
        stall_ranks=num_ranks,
    )


def _stalls(run: Run) -> tuple[float | None, float | None, int, int]:
    """Share of the steps of a run that stall, its longest wait in seconds, and of how many steps of how many ranks."""
    waits, steps = [], []
    chosen = range(0, run.plan.layout.ranks, math.ceil(run.plan.layout.ranks / MAX_RANKS))  # evenly spread
    for rank in chosen:
        try:
            measured = read_steps(run.folder.steps(rank), run.plan.run_id).measured
        except IncompleteDataError:
            return None, None, 0, 0
        waits.append(measured["input_ns"].astype(np.float64))
        steps.append(measured["step_ns"].astype(np.float64))
    wait, step = np.concatenate(waits), np.concatenate(steps)
    return float((wait > STALL_SHARE * step).mean()), float(wait.max()) / 1e9, len(step), len(chosen)


def _verdict(points: tuple[DataPoint, ...], *, is_synthetic: bool) -> str:
    worst = max(points, key=lambda point: point.wait_share.value)
    largest = ", the largest" if len(points) > 1 else ""
    text = (
        f"mean input wait {value_text(worst.wait_share)} of the step ({place_text(worst.ranks, worst.nodes)}{largest})"
    )
    if is_synthetic:
        return f"synthetic data, no storage involved; {text}"
    stalled = max((point.stalled for point in points if point.stalled is not None), default=0.0)
    return f"{text}; {percent(stalled)} of the steps stall" if stalled > 0 else text


def _input_sheet(points: Sequence[DataPoint], *, on_gpu: bool) -> Sheet[DataPoint]:
    """Without a GPU there is no copy worth a column and no accelerator."""

    def stalled(point: DataPoint) -> Cell:
        if point.stalled is None:
            return Cell("not looked at")
        return Cell(f"{percent(point.stalled)} of {point.stall_steps:,}", number=point.stalled)

    columns = columns_of(
        DataPoint,
        *place_columns(),
        *("wait", "wait_share", "copy", "utilisation", "runs=wait.n"),
        Column("stalled_share", "Steps that stall", lambda point: point.stalled, stalled),
        *("stall_steps", "longest_wait_s"),
        titles={} if on_gpu else {"copy_s": "", "accelerator_utilisation": ""},
    )
    return Sheet(
        name="data-path",
        title="Input by rank count",
        columns=drop_empty_columns(columns, points),
        rows=points,
        caption=" ".join(
            [INPUT_CAPTION] + [STALLS_CAPTION] * any(point.stalled for point in points) + [UTILISATION_CAPTION] * on_gpu
        ),
    )


class DataPathView(GroupView):
    """From the data source to the device."""

    id = "data-path"
    title = "Data path"
    key = "data_path"
    after = "exchange"

    def numbers(self, source: GroupSource) -> DataPath:
        return data_path(source.group, source.table)

    def shown(self, group: ReportGroup, found: DataPath) -> Section:
        return Section(headline=found.verdict, sheets=(_input_sheet(found.points, on_gpu=group.on_gpu),))
