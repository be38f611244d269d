"""What staging took on each node, and after how many epochs it has paid.

Break-even epochs = T_stage / (epoch in place - epoch staged), of groups that differ in nothing but the settings of
staging. Its interval is made of the ends of both: the shortest staging over the largest gain, and the longest over the
smallest; where the smallest is no gain there is no upper end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.analysis import scaling
from dlbench.analysis.attribution import about_means
from dlbench.analysis.comparability import averaged_id_without
from dlbench.analysis.scaling import Point
from dlbench.analysis.side_by_side import ComparedFigure, ComparedRow, Comparison
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import StagingResult
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, times_cell
from dlbench.report.wording import DASH, number_text, place_text, times_value, value_text
from dlbench.stats.estimates import Estimate, difference_estimate, geometric_mean_estimate, median_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.data_path import STAGING_KEYS, epoch_times, with_real_data
from dlbench.views.model import Report, ReportGroup
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, place_columns

STRATEGY_TITLES = {
    "replicate": "the whole data set on each node (replicate)",
    "shard": "each rank's samples on its node (shard)",
    "lazy": "kept on the node when first read (lazy)",
}
CAPTION = "Needed and free: on the node that needs most, and that had least. Staging is outside the measured steps."


@dataclass(frozen=True, kw_only=True)
class StagingPoint:
    """Staging at one rank count; over its runs that say something of it."""

    ranks: int
    nodes: int
    strategy: str = field(metadata=column("Strategy"))
    tier: str = field(metadata=column("To"))
    method: str = field(metadata=column("Copied by"))
    streams: int = field(metadata=column("Streams"))
    seconds: Estimate = field(metadata=column("Until all were ready", "staging_s"))
    """Until all nodes were ready; over runs that copied everything, where there are some, else over all."""
    num_reused: int = field(metadata=column(name="reused_runs"))  # Runs that found some or all of it of an earlier run.
    num_runs: int
    needed_bytes: int = field(metadata=column("Needed per node", unit="bytes"))
    free_bytes: int = field(metadata=column("Free there", unit="bytes"))
    """On the node that had least, before the first byte was copied."""
    copied_bytes: int = field(metadata=column("Copied, all nodes", unit="bytes"))  # The most of any run.
    slowest_bytes_per_s: float | None  # Of a node, over all runs; None where nothing was copied before training.
    fastest_bytes_per_s: float | None = field(metadata=column(name="node_bytes_per_s_fastest"))
    kept: bool = field(metadata=column("Kept"))
    paths: tuple[str, ...]
    verified: str


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Staging of a group of runs."""

    points: tuple[StagingPoint, ...]


def staged(group: scaling.Group, table: RunTable) -> Staged | None:
    """Staging at each rank count; None where no run staged."""
    points = tuple(found for point in group.points if (found := _point(point, table)) is not None)
    return Staged(points=points) if points else None


def _results(point: Point, table: RunTable) -> dict[RunKey, StagingResult]:
    records = ((table.keys[run_id], table.runs[run_id].record) for run_id in point.run_ids)
    return {key: record.staging for key, record in records if record is not None and record.staging is not None}


def _point(point: Point, table: RunTable) -> StagingPoint | None:
    by_run = _results(point, table)
    if not by_run:
        return None
    results = list(by_run.values())
    first = results[0]
    nodes = [node for result in results for node in result.nodes]
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
    """Runs that found samples of an earlier run say nothing of what copying takes."""
    whole = {key: result for key, result in results.items() if not _has_reused(result)}
    return median_estimate({key: result.seconds for key, result in (whole or results).items()}, "s")


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """A staged group against the one that reads in place, at one rank count."""

    ranks: int
    nodes: int
    label: str = field(metadata=column("Runs", ""))
    staged_group: str = field(metadata=column(name="group"))
    unstaged_group: str
    strategy: str = field(metadata=column("Strategy"))
    tier: str = field(metadata=column("To"))
    staging: Estimate = field(metadata=column("Staging", "staging_s"))
    unstaged_epoch: Estimate = field(metadata=column("Epoch in place", "unstaged_epoch_s"))
    """Seconds of an epoch, reading in place."""
    staged_epoch: Estimate = field(metadata=column("Epoch staged", "staged_epoch_s"))
    gain: Estimate = field(metadata=column("Gain of an epoch", "gain_s"))  # Seconds in place less seconds staged.
    factor: Estimate = field(metadata=column("Factor", text=times_cell))
    """Epoch in place over epoch staged: above 1, staged epochs are faster."""
    is_paired: bool
    epochs: float | None  # Break-even epochs; None: never, by these means, or nothing is copied before training.
    epochs_low: float | None = field(metadata=column(name="break_even_epochs_low"))
    epochs_high: float | None = field(metadata=column(name="break_even_epochs_high"))  # None: no upper end.
    is_lazy: bool  # Nothing is copied before training: there is nothing to pay back.


def _row(one: ComparedRow, table: RunTable) -> BreakEven | None:
    """None where there is nothing to compare with, nothing was staged, or an epoch's time is not known."""
    side, base = one.side, one.reference
    if base is None or one.is_reference:
        return None
    results = _results(side.point, table)
    own, reference = epoch_times(side.point, table), epoch_times(base.point, table)
    if not (results and own and reference):
        return None
    plan, staging = side.group.sample.plan, _seconds(results)
    data = plan.workload.data
    gain = difference_estimate(_about_mean(reference), _about_mean(own), "s")
    factor, is_paired = one.ratio("epoch")
    assert factor is not None
    low, value, high = (None, None, None) if data.staging == "lazy" else break_even_epochs(staging, gain)
    return BreakEven(
        ranks=side.point.ranks,
        nodes=side.point.nodes,
        label=f"{plan.workload.name}, {plan.workload.preset} preset",
        staged_group=side.group.id,
        unstaged_group=base.group.id,
        strategy=data.staging,
        tier=data.staging_tier,
        staging=staging,
        unstaged_epoch=geometric_mean_estimate(reference, "s"),
        staged_epoch=geometric_mean_estimate(own, "s"),
        gain=gain,
        factor=factor,
        is_paired=is_paired,
        epochs=value,
        epochs_low=low,
        epochs_high=high,
        is_lazy=data.staging == "lazy",
    )


def _about_mean(epochs: Mapping[RunKey, float]) -> dict[RunKey, float]:
    return {key: one["s"] for key, one in zip(epochs, about_means([{"s": s} for s in epochs.values()]), strict=True)}


def break_even_epochs(staging: Estimate, gain: Estimate) -> tuple[float | None, float | None, float | None]:
    """Low end, value and high end of the epochs after which seconds of staging have paid for the seconds that an epoch
    gains; None where there is none.
    """
    value = staging.value / gain.value if gain.value > 0 else None
    low = high = None
    if gain.high is not None and gain.high > 0:
        low = (staging.low if staging.low is not None else staging.value) / gain.high
    if gain.low is not None and gain.low > 0:
        high = (staging.high if staging.high is not None else staging.value) / gain.low
    return low, value, high


class StagingView(GroupView):
    """How samples were brought to the nodes."""

    id = "staging"
    title = "Staging"
    key = "staging"
    after = "data-path"

    def numbers(self, source: GroupSource) -> Staged | None:
        return staged(source.group, source.table)

    def shown(self, group: ReportGroup, found: Staged) -> Section:
        last = found.points[-1]
        took = "; no time before training"
        if last.strategy != "lazy":
            took = f": {value_text(last.seconds)} at {place_text(last.ranks, last.nodes)}"
        return Section(
            headline=f"{STRATEGY_TITLES.get(last.strategy, last.strategy)}, to {last.tier}{took}",
            sheets=(_sheet(found.points),),
            notes=_notes(found.points),
        )


def _notes(points: Sequence[StagingPoint]) -> tuple[str, ...]:
    notes = []
    reused = [point for point in points if point.num_reused]
    for point in reused:
        left = "" if point.num_reused < point.num_runs else ": the time above is not that of copying everything"
        notes.append(
            f"{place_text(point.ranks, point.nodes)}: {point.num_reused} of {point.num_runs} runs found samples of an "
            f"earlier run{left}."
        )
    verified = dict.fromkeys(point.verified for point in points if point.verified)
    notes += [f"Copies compared with their source: {text}." for text in verified]
    paths = dict.fromkeys(path for point in points for path in point.paths)
    shown = ", ".join(list(paths)[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    kept = "kept for the next run" if any(point.kept for point in points) else "removed when the run ended"
    return (*notes, *((f"In {shown}; {kept}.",) if paths else ()))


def _sheet(points: Sequence[StagingPoint]) -> Sheet[StagingPoint]:
    columns = columns_of(
        StagingPoint,
        *place_columns(),
        *("strategy", "tier", "method", "streams", "seconds", "runs=seconds.n"),
        Column("node_bytes_per_s_slowest", "Rate per node", lambda point: point.slowest_bytes_per_s, _rate),
        *("fastest_bytes_per_s", "copied_bytes", "needed_bytes", "free_bytes", "num_reused", "kept"),
    )
    return Sheet(name="staging", title="Staging by rank count", columns=columns, rows=points, caption=CAPTION)


def _rate(point: StagingPoint) -> Cell:
    low, high = point.slowest_bytes_per_s, point.fastest_bytes_per_s
    if low is None or high is None:
        return Cell(DASH)
    text = f"{format_bytes(low)}/s"
    return Cell(text if high <= low * 1.005 else f"{text} to {format_bytes(high)}/s", number=low)


class BreakEvenView(ReportView):
    """After how many epochs staging has paid."""

    id = "break-even"
    title = "Staged against read in place"
    key = "break_even"
    after = "stalls"

    def numbers(self, source: ReportSource) -> tuple[BreakEven, ...]:
        # Every staged group next to the one that differs in nothing but staging, by rank count.
        comparison = Comparison(
            differ_in=lambda run: averaged_id_without(run, STAGING_KEYS),
            kind=lambda group: group.id,
            reference=lambda group: group.sample.plan.workload.data.staging == "none",
            figures={"epoch": ComparedFigure(lambda side: epoch_times(side.point, source.table), is_time=True)},
        )
        rows = [
            _row(row, source.table)
            for found in comparison.of(with_real_data(source.groups))
            for row in sorted(found.rows, key=lambda row: found.groups.index(row.side.group))
        ]
        return tuple(row for row in rows if row is not None)

    def shown(self, report: Report, found: tuple[BreakEven, ...]) -> Section:
        last = found[-1]
        headline = f"{last.strategy} to {last.tier} at {place_text(last.ranks, last.nodes)}"
        if last.is_lazy:
            headline += f": epochs in place take {times_value(last.factor)} as long; nothing to pay back"
        elif last.epochs is None:
            headline += " never pays: staged epochs are not faster"
        else:
            headline += f" has paid after {number_text(last.epochs, 'epochs')} epochs"

        def epochs(row: BreakEven) -> Cell:
            return Cell(break_even_text(row), number=row.epochs)

        columns = columns_of(
            BreakEven,
            "label",
            *place_columns(),
            *("staged_group", "unstaged_group", "strategy", "tier", "staging", "unstaged_epoch", "staged_epoch"),
            *("gain", "factor"),
            Column("break_even_epochs", "Break-even epochs", lambda row: row.epochs, epochs),
            *("epochs_low", "epochs_high", "is_paired"),
        )
        caption = "Break-even: staging time over what an epoch gains; no upper end: the gain may be none."
        sheet = Sheet(name="break-even", title="Break-even epochs", columns=columns, rows=found, caption=caption)
        return Section(headline=headline, sheets=(sheet,))


def break_even_text(row: BreakEven) -> str:
    """``3.2 [2.9, 3.6]``, ``never``, ``3.2 [2.9, no upper end]``."""
    if row.is_lazy:
        return "nothing to pay back"
    if row.epochs is None:
        least = "" if row.epochs_low is None else f" (at best {number_text(row.epochs_low, 'epochs')})"
        return f"never{least}"
    text = number_text(row.epochs, "epochs")
    if row.epochs_low is None or row.gain.low is None:
        return text
    end = "no upper end" if row.epochs_high is None else number_text(row.epochs_high, "epochs")
    return f"{text} [{number_text(row.epochs_low, 'epochs')}, {end}]"
