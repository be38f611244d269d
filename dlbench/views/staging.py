"""The time of staging on each node, and the number of epochs after which it has paid off. Break-even epochs = T_stage /
(epoch in place - epoch staged), of groups that differ only in the settings of staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from dlbench.analysis import scaling
from dlbench.analysis.attribution import about_means
from dlbench.analysis.comparability import averaged_id_without
from dlbench.analysis.scaling import ComparedFigure, ComparedRow, Comparison, Point
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import StagingResult
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, times_cell
from dlbench.report.wording import DASH, number_text, place_text, times_value, value_text
from dlbench.stats.estimates import Estimate, difference_estimate, geometric_mean_estimate, median_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import first_of, format_bytes
from dlbench.views.data_path import STAGING_KEYS, epoch_times, with_real_data
from dlbench.views.model import GroupSource, GroupView, Report, ReportGroup, ReportSource, ReportView, place_columns

STRATEGY_TITLES = {
    "replicate": "the whole data set on each node (replicate)",
    "shard": "each rank's samples on its node (shard)",
    "lazy": "kept on the node when first read (lazy)",
}
CAPTION = (
    "Needed: on the node that needs most. Free: on the node that had least. Staging is outside the measured steps."
)


@dataclass(frozen=True, kw_only=True)
class StagingPoint:
    """The staging at one rank count, over the runs that recorded it."""

    ranks: int
    nodes: int
    strategy: str = field(metadata=column("Strategy"))
    tier: str = field(metadata=column("To"))
    method: str = field(metadata=column("Copied by"))
    streams: int = field(metadata=column("Streams"))
    seconds: Estimate = field(metadata=column("Until all were ready", "staging_s"))  # See `_seconds`.
    num_reused: int = field(metadata=column(name="reused_runs"))  # Runs that reused samples of an earlier run.
    num_runs: int
    needed_bytes: int = field(metadata=column("Needed per node", unit="bytes"))
    free_bytes: int = field(metadata=column("Free per node", unit="bytes"))  # Least of any node.
    copied_bytes: int = field(metadata=column("Copied, all nodes", unit="bytes"))  # The most of any run.
    slowest_bytes_per_s: float | None  # Lowest rate of a node in any run; None if nothing was copied before training.
    fastest_bytes_per_s: float | None = field(metadata=column(name="node_bytes_per_s_fastest"))
    kept: bool = field(metadata=column("Kept"))  # Whether copies stay for the next run.
    paths: tuple[str, ...]  # Folders of the copies.
    verified: str  # How copies were compared with their source.


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The staging of a group of runs."""

    points: tuple[StagingPoint, ...]


def staged(group: scaling.Group, table: RunTable) -> Staged | None:
    """Returns the staging at each rank count; None if no run staged."""
    points = [_point(point, results) for point in group.points if (results := _results(point, table))]
    return Staged(points=tuple(points)) if points else None


def _results(point: Point, table: RunTable) -> dict[RunKey, StagingResult]:
    records = ((table.keys[run_id], table.runs[run_id].record) for run_id in point.run_ids)
    return {key: record.staging for key, record in records if record is not None and record.staging is not None}


def _point(point: Point, by_run: Mapping[RunKey, StagingResult]) -> StagingPoint:
    results = list(by_run.values())
    first = results[0]
    nodes = list(chain.from_iterable(result.nodes for result in results))
    rates = [node.copied_bytes / node.seconds for node in nodes if node.copied_bytes and node.seconds]
    return StagingPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        strategy=first.strategy,
        tier=first.tier,
        method=", ".join(dict.fromkeys(result.method for result in results)),
        streams=first.streams,
        seconds=_seconds(by_run),
        num_reused=sum(_has_reused(result) for result in results),
        num_runs=len(results),
        needed_bytes=max((node.needed_bytes for node in nodes), default=0),
        free_bytes=min((node.free_bytes for node in nodes), default=0),
        copied_bytes=max(sum(node.copied_bytes for node in result.nodes) for result in results),
        slowest_bytes_per_s=min(rates, default=None),
        fastest_bytes_per_s=max(rates, default=None),
        kept=any(result.kept for result in results),
        paths=tuple(dict.fromkeys(node.path for node in nodes)),
        verified=" | ".join(dict.fromkeys(result.verified for result in results)),
    )


def _has_reused(result: StagingResult) -> bool:
    return any(node.reused_bytes for node in result.nodes)


def _seconds(results: Mapping[RunKey, StagingResult]) -> Estimate:
    """Returns the time of copying; runs that reused samples count only if there are no others."""
    complete = {key: result for key, result in results.items() if not _has_reused(result)}
    return median_estimate({key: result.seconds for key, result in (complete or results).items()}, "s")


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """A staged group compared with the one that reads in place, at one rank count."""

    ranks: int
    nodes: int
    label: str = field(metadata=column("Runs", ""))
    staged_group: str = field(metadata=column(name="group"))
    unstaged_group: str
    strategy: str = field(metadata=column("Strategy"))
    tier: str = field(metadata=column("To"))
    staging: Estimate = field(metadata=column("Staging", "staging_s"))
    unstaged_epoch: Estimate = field(metadata=column("Epoch in place", "unstaged_epoch_s"))
    staged_epoch: Estimate = field(metadata=column("Epoch staged", "staged_epoch_s"))  # Seconds of a staged epoch.
    gain: Estimate = field(metadata=column("Gain of an epoch", "gain_s"))  # Seconds in place less seconds staged.
    factor: Estimate = field(metadata=column("Factor", text=times_cell))  # Above 1: staged is faster.
    is_paired: bool
    epochs: float | None  # Break-even epochs; None: staged epochs are not faster, or staging is lazy.
    epochs_low: float | None = field(metadata=column(name="break_even_epochs_low"))
    epochs_high: float | None = field(metadata=column(name="break_even_epochs_high"))  # None: no upper end.
    is_lazy: bool  # Whether nothing is copied before training, so that there is no time to pay back.


def _row(row: ComparedRow, table: RunTable) -> BreakEven | None:
    """Returns the break-even of a staged group; None without staging, a reference, or the time of an epoch."""
    side, base = row.side, row.reference
    if base is None or row.is_reference:
        return None
    results = _results(side.point, table)
    epochs_s, reference_s = epoch_times(side.point, table), epoch_times(base.point, table)
    if not (results and epochs_s and reference_s):
        return None
    plan, staging = side.group.sample.plan, _seconds(results)
    data = plan.workload.data
    gain = difference_estimate(_about_mean(reference_s), _about_mean(epochs_s), "s")
    factor, is_paired = row.ratio("epoch")
    assert factor is not None
    low = epochs = high = None
    if data.staging != "lazy":
        low, epochs, high = break_even_epochs(staging, gain)
    return BreakEven(
        ranks=side.point.ranks,
        nodes=side.point.nodes,
        label=f"{plan.workload.name}, {plan.workload.preset} preset",
        staged_group=side.group.id,
        unstaged_group=base.group.id,
        strategy=data.staging,
        tier=data.staging_tier,
        staging=staging,
        unstaged_epoch=geometric_mean_estimate(reference_s, "s"),
        staged_epoch=geometric_mean_estimate(epochs_s, "s"),
        gain=gain,
        factor=factor,
        is_paired=is_paired,
        epochs=epochs,
        epochs_low=low,
        epochs_high=high,
        is_lazy=data.staging == "lazy",
    )


def _about_mean(epochs_s: Mapping[RunKey, float]) -> dict[RunKey, float]:
    about_mean = about_means([{"epoch": seconds} for seconds in epochs_s.values()])
    return {key: parts["epoch"] for key, parts in zip(epochs_s, about_mean, strict=True)}


def break_even_epochs(staging: Estimate, gain: Estimate) -> tuple[float | None, float | None, float | None]:
    """Returns low end, value and high end of the epochs after which staging has paid off; None where there is none."""
    low = high = None
    value = staging.value / gain.value if gain.value > 0 else None
    if gain.high is not None and gain.high > 0:
        low = (staging.value if staging.low is None else staging.low) / gain.high
    if gain.low is not None and gain.low > 0:
        high = (staging.value if staging.high is None else staging.high) / gain.low
    return low, value, high


class StagingView(GroupView):
    """The staging of samples to the nodes."""

    id = "staging"
    title = "Staging"
    key = "staging"
    after = "data-path"

    def numbers(self, source: GroupSource) -> Staged | None:
        return staged(source.group, source.table)

    def shown(self, group: ReportGroup, staging: Staged) -> Section:
        last = staging.points[-1]
        time = f": {value_text(last.seconds)} at {place_text(last.ranks, last.nodes)}"
        if last.strategy == "lazy":
            time = "; no time before training"
        return Section(
            headline=f"{STRATEGY_TITLES.get(last.strategy, last.strategy)}, to {last.tier}{time}",
            sheets=(_sheet(staging.points),),
            notes=tuple(_notes(staging.points)),
        )


def _notes(points: Sequence[StagingPoint]) -> Iterator[str]:
    for point in points:
        if point.num_reused:
            num_runs = f"{point.num_reused} of {point.num_runs} runs"
            note = f"{place_text(point.ranks, point.nodes)}: {num_runs} reused samples of an earlier run"
            if point.num_reused == point.num_runs:
                note += ": the time above is not that of copying everything"
            yield f"{note}."
    for verified in dict.fromkeys(point.verified for point in points if point.verified):
        yield f"Copies compared with their source: {verified}."
    paths = list(dict.fromkeys(chain.from_iterable(point.paths for point in points)))
    kept = "kept for the next run" if any(point.kept for point in points) else "removed when the run ended"
    if paths:
        yield f"In {first_of(paths, 4)}; {kept}."


def _sheet(points: Sequence[StagingPoint]) -> Sheet[StagingPoint]:
    columns = columns_of(
        StagingPoint,
        *place_columns(),
        *("strategy", "tier", "method", "streams", "seconds", "runs=seconds.n"),
        Column("node_bytes_per_s_slowest", "Rate per node", "slowest_bytes_per_s", _rate_cell),
        *("fastest_bytes_per_s", "copied_bytes", "needed_bytes", "free_bytes", "num_reused", "kept"),
    )
    return Sheet(name="staging", title="Staging by rank count", columns=columns, rows=points, caption=CAPTION)


def _rate_cell(point: StagingPoint) -> Cell:
    low, high = point.slowest_bytes_per_s, point.fastest_bytes_per_s
    if low is None or high is None:
        return Cell(DASH)
    text = f"{format_bytes(low)}/s"
    if high > low * 1.005:
        text += f" to {format_bytes(high)}/s"
    return Cell(text, number=low)


class BreakEvenView(ReportView):
    """The number of epochs after which staging has paid off."""

    id = "break-even"
    title = "Staged against read in place"
    key = "break_even"
    after = "stalls"

    def numbers(self, source: ReportSource) -> tuple[BreakEven, ...]:
        # Every staged group with the one that differs only in staging, by rank count.
        comparison = Comparison(
            common_digest=lambda run: averaged_id_without(run, STAGING_KEYS),
            kind=attrgetter("id"),
            reference=lambda group: group.sample.plan.workload.data.staging == "none",
            figures={"epoch": ComparedFigure(lambda side: epoch_times(side.point, source.table), is_time=True)},
        )
        rows: list[BreakEven | None] = []
        for compared in comparison.of(with_real_data(source.groups)):
            ordered = sorted(compared.rows, key=lambda row: compared.groups.index(row.side.group))
            rows += [_row(row, source.table) for row in ordered]
        return tuple(row for row in rows if row is not None)

    def shown(self, report: Report, rows: tuple[BreakEven, ...]) -> Section:
        last = rows[-1]
        headline = f"{last.strategy} to {last.tier} at {place_text(last.ranks, last.nodes)}"
        if last.is_lazy:
            headline += f": epochs in place take {times_value(last.factor)} as long; no staging time to pay back"
        elif last.epochs is None:
            headline += " never pays off: staged epochs are not faster"
        else:
            headline += f" has paid off after {number_text(last.epochs, 'epochs')} epochs"
        columns = columns_of(
            BreakEven,
            "label",
            *place_columns(),
            *("staged_group", "unstaged_group", "strategy", "tier", "staging", "unstaged_epoch", "staged_epoch"),
            *("gain", "factor"),
            Column("break_even_epochs", "Break-even epochs", "epochs", _epochs_cell),
            *("epochs_low", "epochs_high", "is_paired"),
        )
        caption = "Break-even: staging time over the gain of an epoch; no upper end: there may be no gain."
        sheet = Sheet(name="break-even", title="Break-even epochs", columns=columns, rows=rows, caption=caption)
        return Section(headline=headline, sheets=(sheet,))


def _epochs_cell(row: BreakEven) -> Cell:
    return Cell(break_even_text(row), number=row.epochs)


def break_even_text(row: BreakEven) -> str:
    """Returns e.g. ``3.2 [2.9, 3.6]``, ``never``, ``3.2 [2.9, no upper end]``."""
    if row.is_lazy:
        return "nothing to pay back"
    if row.epochs is None:
        if row.epochs_low is None:
            return "never"
        return f"never (at best {number_text(row.epochs_low, 'epochs')})"
    text = number_text(row.epochs, "epochs")
    if row.epochs_low is None or row.gain.low is None:
        return text
    end = "no upper end" if row.epochs_high is None else number_text(row.epochs_high, "epochs")
    return f"{text} [{number_text(row.epochs_low, 'epochs')}, {end}]"
