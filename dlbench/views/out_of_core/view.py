"""Words, tables and charts of methods for activations side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from dlbench.analysis.scaling import group_by
from dlbench.report.chart_style import HEIGHT, MUTED, WIDE
from dlbench.report.charts import DASHED, Axis, Chart, ReportSubject, Rows, Series, figure_row, finish, layer, lines
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, columns_of
from dlbench.report.wording import DASH, percent, place_text, runs_text, times_text, times_value
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes
from dlbench.views.model import place_of
from dlbench.views.out_of_core.numbers import COLOURS, OTHER_COLOUR, AtLimit, Gain, MethodComparison, MethodPoint

MAX_GAINS = 4  # Rank counts and batches with a sentence on the gain, the largest ones; the tables have all.

_MORE_COLOURS = ("#6b5bb5", "#44aa99", "#a83271", "#f0e442")  # Colours of further methods with one title.


def _place_columns(comparison: MethodComparison) -> tuple[Column[MethodPoint], ...]:
    title = "At" if len({point.place for point in comparison.points}) > 1 else ""
    return columns_of(MethodPoint, "ranks", "nodes", Column("", title, place_of, is_brief=True))


def methods_sheet(comparison: MethodComparison) -> Sheet[MethodPoint]:
    """Returns the table of speed and memory of every method and batch."""
    title = f"{comparison.sample_unit}/s"
    throughput: Column[MethodPoint] = Column(
        "throughput_per_s", title, "throughput", _throughput_cell, has_interval=True, is_brief=True
    )
    return Sheet(
        name="out-of-core",
        title="Methods: speed and memory",
        columns=(
            *_place_columns(comparison),
            *columns_of(
                MethodPoint,
                *("method", "label", "recompute", "swap", "capacity", "batch", "parts", throughput),
                *("device_peak", "predicted_peak_bytes", "peak_error", "capacity_bytes", "in_core_bytes"),
                *("process_peak", "over_budget_bytes", "num_runs", "num_without_memory"),
            ),
        ),
        rows=comparison.points,
        caption="Peak: highest peak of any rank, without the process itself; on a CPU live tensors in the first step, "
        "while resident memory (whole process) need not fall. Predicted: by the simulator, of pass and update. In core "
        "is predicted by the chain that runs of the other methods measured.",
        in_terminal=True,
    )


def _throughput_cell(point: MethodPoint) -> Estimate | Cell:
    if point.throughput is not None:
        return point.throughput
    return Cell("does not fit" if point.num_without_memory else DASH)


def limit_sheet(comparison: MethodComparison) -> Sheet[AtLimit]:
    """Returns the table of recomputing, swapping, sharding and offloading at one memory limit."""
    places = {_limit_text(row) for row in comparison.at_limit}
    title, at_title, titles = "At one memory limit", "At", {}
    if len(places) == 1:
        title, at_title = f"{title}: {places.pop()}", ""
        titles = {"limit_bytes": "", "batch_per_rank": ""}
    at: Column[AtLimit] = Column("", at_title, place_of)
    return Sheet(
        name="memory-limit",
        title=title,
        columns=(at, *columns_of(AtLimit, "ranks", "nodes"), *columns_of(AtLimit, titles=titles)),
        rows=comparison.at_limit,
        caption="Limit: train.memory.capacity of the plans. Peak: highest bytes of tensors of any rank; for ranks that "
        "swap on a CPU resident memory, which includes freed pages: above the limit it is not known whether they fit. "
        "Over best: throughput over that of the fastest that fits.",
        in_terminal=True,
    )


def _limit_text(row: AtLimit) -> str:
    return f"{format_bytes(row.limit)} a rank, {place_of(row)}, batch {row.batch}"


def _choice(rows: Sequence[AtLimit]) -> str:
    """Returns a sentence on the method to choose at a limit; `rows` are sorted, the fastest first."""
    limit, fitting = _limit_text(rows[0]), [row for row in rows if row.fits]
    if not fitting:
        return f"Within {limit}: no method that ran is known to fit."
    words = f"Within {limit}: use {fitting[0].method}, the fastest of the {len(fitting)} that fit"
    similar = [row.method for row in fitting[1:] if row.ratio is None or row.ratio.high is None or row.ratio.high >= 1]
    if similar:
        words += f" (not certainly faster than {' and '.join(similar)})"
    too_large = [row.method for row in rows if row.fits is False]
    if too_large:
        words += f"; {', '.join(too_large)} would not fit"
    return f"{words}."


def steps_sheet(comparison: MethodComparison) -> Sheet[MethodPoint]:
    """Returns the table of the steps of every method, predicted and measured."""
    titles: dict[str, str] = {}
    if all(point.host_update_s is None for point in comparison.points):
        titles |= {"host_update_wait_s": "", "host_update_bytes": ""}
    if all(point.checksum_share is None for point in comparison.points):
        titles["checksum_fraction"] = ""
    columns = columns_of(
        MethodPoint,
        *("label", "batch", "step", "predicted_step", "step_error", "recompute_share", "swap_wait_s", "room_wait_s"),
        *("swapped_bytes", "tier", "checksum_share", "host_update_s", "host_update_bytes"),
        titles=titles,
    )
    return Sheet(
        name="out-of-core-steps",
        title="Steps: predicted and measured",
        columns=(*_place_columns(comparison), *columns),
        rows=[point for point in comparison.points if point.num_runs],
        caption="Predicted: the simulated passes plus the time of warm-up steps outside forward and backward passes.",
    )


def method_charts(comparison: MethodComparison, number: int) -> list[Chart]:
    """Returns the chart of throughput over the batch, at the largest rank count."""
    place = comparison.points[-1].place
    points = [point for point in comparison.points if point.place == place and point.throughput is not None]
    if not points:
        return []
    subject = ReportSubject(id=f"out-of-core-{number}", label=f"{comparison.label}, {place_text(*place)}")
    rows: Rows = []
    # The colour of its title; further colours if several labels share a title.
    colours: dict[str, str] = {}
    more_colours = iter(_MORE_COLOURS)
    for point in points:
        if point.throughput is not None:
            rows.append({"method": point.label, "batch": point.batch, **figure_row(point.throughput)})
        if point.label not in colours:
            colour = COLOURS.get(point.method, OTHER_COLOUR)
            if colour in colours.values():
                colour = next(more_colours, OTHER_COLOUR)
            colours[point.label] = colour
    limits = [limit for limit in comparison.limits if (limit.ranks, limit.nodes) == points[0].place and limit.batch > 0]
    layers: list[dict[str, Any]] = []
    mark = ""
    for limit in limits:
        limit_rows = [{"batch": limit.batch, "text": f"in core up to {limit.batch}", "foot": 0}]
        words_at = {"x": "batch:Q", "y": "foot:Q", "text": "text:N"}
        layers += [
            layer(limit_rows, "rule", {"x": "batch:Q"}, **DASHED),
            layer(limit_rows, "text", words_at, color=MUTED, align="left", dx=5, dy=-8, fontSize=12),
        ]
        capacity = format_bytes(limit.capacity_bytes)
        mark = f" Dashed: the {limit.batch} samples for which {capacity} are enough in core."
    unit = f"{comparison.sample_unit}/s"
    drawn = lines(
        rows,
        Axis(unit, format=",.4~r"),
        Series("method", colours, columns=1, legend={"labelLimit": 340}),
        {"method": "activations", "batch:Q": "batch", "shown": unit, "basis": "interval"},
        x="batch",
        title="batch per rank",
        room=1.15,
        reach=[limit.batch for limit in limits],
    )
    words = "; ".join(f"{row['method']}, batch {row['batch']}: {row['shown']}" for row in rows)
    chart = finish(
        [*drawn, *layers],
        subject,
        name="throughput",
        title="Throughput by batch and method",
        alt=f"Throughput over the batch per rank, a line for each method.{mark} {words}.",
        table=methods_sheet(comparison),
        size=(WIDE - 40, HEIGHT + 30),
    )
    return [chart]


def method_section(comparison: MethodComparison, title: str, number: int) -> Section:
    """Returns the section of a set of runs that differ in the method, the `number`-th."""
    points = comparison.points
    words = tuple(_words(comparison))
    notes = []
    if not any(point.is_in_core and point.num_runs for point in points):
        notes.append("No run of this set trained in core, so the cost of a method against that is not measured.")
    tiers = sorted({point.tier for point in points if point.tier})
    if tiers:
        notes.append(f"Swapped to: {'; '.join(tiers)}.")
    if any(point.host_update_s is not None for point in points):
        notes.append("Waiting for the host's update is part of the forward passes of rank 0, and of the cause compute.")
    sheets: list[Sheet[Any]] = [methods_sheet(comparison), steps_sheet(comparison)]
    if comparison.at_limit:
        sheets.insert(0, limit_sheet(comparison))
    return Section(
        id=f"out-of-core-{number}",
        title=title if number == 1 else f"{title} ({number})",
        caption=f"{comparison.label}.",
        headline=_headline(comparison),
        words=words,
        brief=words,
        charts=lambda: method_charts(comparison, number),
        sheets=tuple(sheets),
        notes=tuple(notes),
        where={"comparison": comparison.id, "of": comparison.label},
    )


def _headline(comparison: MethodComparison) -> str:
    gain = max(comparison.gains, key=attrgetter("ranks", "batch"), default=None)
    if gain is not None:
        return f"{gain.planned}: {times_value(gain.ratio)} the throughput of {gain.over}, batch {gain.batch}"
    if comparison.median_step_error is not None:
        peaks = ""
        if comparison.median_peak_error is not None:
            peaks = f", peaks by {percent(comparison.median_peak_error)}"
        return f"predicted steps are off by {percent(comparison.median_step_error)}{peaks} (median)"
    if len(comparison.points) == 1:
        return "only one method and batch was run; nothing to compare"
    return f"{len(comparison.points)} methods and batches; no two of them differ only in the method"


def _words(comparison: MethodComparison) -> Iterator[str]:
    yield from map(_choice, list(group_by(comparison.at_limit, _limit_text).values())[-MAX_GAINS:])
    for gain in sorted(comparison.gains, key=attrgetter("ranks", "batch"), reverse=True)[:MAX_GAINS]:
        yield _gain_text(gain)
    for limit in comparison.limits:
        place = place_text(limit.ranks, limit.nodes)
        capacity = f"Without recomputing or swapping, {format_bytes(limit.capacity_bytes)} are enough for a pass of"
        yield f"{capacity} {limit.batch} samples at {place}, by the measured chains."
    for point in comparison.points:
        if point.num_without_memory:
            others = f", {point.num_runs} did not" if point.num_runs else ""
            failed = f"{runs_text(point.num_without_memory)} did not fit{others}"
            yield f"{_upper(point.label)} with batch {point.batch} at {place_of(point)}: {failed}."
    yield from _error_words(comparison)
    yield from _memory_words(comparison.points)


def _gain_text(gain: Gain) -> str:
    peaks = ""
    if gain.planned_peak_bytes is not None and gain.over_peak_bytes is not None:
        peaks = f"; measured peaks {format_bytes(gain.planned_peak_bytes)} and {format_bytes(gain.over_peak_bytes)}"
    return (
        f"At {place_of(gain)}, batch {gain.batch}: {gain.planned} has {times_text(gain.ratio)} the throughput of "
        f"{gain.over}, the fastest that treats all blocks equally{peaks}."
    )


def _error_words(comparison: MethodComparison) -> Iterator[str]:
    for title, name in (("steps", "step_error"), ("peaks", "peak_error")):
        median_error = getattr(comparison, f"median_{name}")
        if median_error is not None:
            errors = [abs(getattr(point, name) or 0.0) for point in comparison.points]
            worst = comparison.points[errors.index(max(errors))]
            yield (
                f"Predicted {title} are off by {percent(median_error)} (median of absolute errors), at most by "
                f"{percent(max(errors))} ({worst.label}, batch {worst.batch})."
            )


def _memory_words(points: Sequence[MethodPoint]) -> Iterator[str]:
    from dlbench.perfmodels.out_of_core.planner import saves_nothing

    for point in points:
        in_core, peak = point.in_core_bytes, point.predicted_peak_bytes
        if in_core and peak is not None and not point.is_in_core and saves_nothing(peak, in_core):
            yield (
                f"{_upper(point.label)} saves no memory with batch {point.batch} at {place_of(point)}: "
                f"{format_bytes(peak)} predicted, {format_bytes(in_core)} in core."
            )
    worst = max(points, key=attrgetter("excess_bytes"))
    if worst.excess_bytes > 0:
        yield (
            f"The measured peak exceeds the capacity by up to {format_bytes(worst.excess_bytes)} ({worst.label}, batch "
            f"{worst.batch}): the device needs more memory than the plan accounts for."
        )
    over = max(points, key=lambda point: point.over_budget_bytes or 0)
    if over.over_budget_bytes:
        yield (
            f"Activations exceeded the plan by up to {format_bytes(over.over_budget_bytes)} "
            f"({over.label}, batch {over.batch})."
        )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
