"""The view `out-of-core`: methods to hold activations side by side; and a pass in lanes for `dlbench memory plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from dlbench.analysis.side_by_side import alike
from dlbench.perfmodels.out_of_core.planner import saves_nothing
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, Subject, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
from dlbench.report.charts.style import HEIGHT, IDEAL, MUTED, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, columns_of
from dlbench.report.wording import DASH, percent, place_text, runs_text, times_text, times_value
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes
from dlbench.views.model import Report
from dlbench.views.next_step import rerun
from dlbench.views.out_of_core.numbers import COLOURS, OTHER_COLOUR, AtLimit, MethodComparison, MethodPoint, out_of_core
from dlbench.views.view import ReportSource, ReportView, place_of

TITLE = "Out of core"
MAX_GAINS = 4  # Rank counts and batches whose gain is said in words, the largest first; the tables have all.

_FURTHER = ("#6b5bb5", "#44aa99", "#a83271", "#f0e442")  # Of methods with the title of another one.


def _place_columns(found: MethodComparison) -> tuple[Column[MethodPoint], ...]:
    are_several = len({(one.ranks, one.nodes) for one in found.points}) > 1
    at: Column[MethodPoint] = Column("", "At" if are_several else "", place_of, is_brief=True)
    return columns_of(MethodPoint, "ranks", "nodes", at)


def methods_sheet(found: MethodComparison) -> Sheet[MethodPoint]:
    """Speed and memory of every method and batch."""

    def rate(one: MethodPoint) -> Estimate | Cell:
        return one.throughput or Cell("does not fit" if one.num_without_memory else DASH)

    title = f"{found.sample_unit}/s"
    throughput: Column[MethodPoint] = Column(
        "throughput_per_s", title, "throughput", rate, has_interval=True, is_brief=True
    )
    said = ("method", "label", "recompute", "swap", "capacity", "batch", "parts", throughput)
    memory = ("device_peak", "predicted_peak_bytes", "peak_error", "capacity_bytes", "in_core_bytes", "process_peak")
    rest = ("over_budget_bytes", "num_runs", "num_without_memory")
    return Sheet(
        name="out-of-core",
        title="Methods: speed and memory",
        columns=(*_place_columns(found), *columns_of(MethodPoint, *said, *memory, *rest)),
        rows=found.points,
        caption="Peak: of the rank that held most, beyond the process itself; on a CPU live tensors in the first step, "
        "with which what is resident (whole process) need not fall. Predicted: by the simulator, of pass and update. "
        "In core is predicted by the chain that runs of the other methods measured.",
        in_terminal=True,
    )


def limit_sheet(found: MethodComparison) -> Sheet[AtLimit]:
    """Recomputing, swapping, sharding and offloading at one memory limit."""
    are_several = len({_limit_text(one) for one in found.at_limit}) > 1
    titles = {} if are_several else {"limit_bytes": "", "batch_per_rank": ""}
    at: Column[AtLimit] = Column("", "At" if are_several else "", place_of)
    return Sheet(
        name="memory-limit",
        title="At one memory limit" if are_several else f"At one memory limit: {_limit_text(found.at_limit[0])}",
        columns=(at, *columns_of(AtLimit, "ranks", "nodes"), *columns_of(AtLimit, titles=titles)),
        rows=found.at_limit,
        caption="Limit: train.memory.capacity of the plans. Peak: tensors of the rank that held most; of one that "
        "swaps on a CPU what was resident, pages of freed ones too: above the limit nothing is known. Over best: "
        "throughput over that of the fastest that fits.",
        in_terminal=True,
    )


def _limit_text(one: AtLimit) -> str:
    return f"{format_bytes(one.limit)} a rank, {place_of(one)}, batch {one.batch}"


def _choice(rows: Sequence[AtLimit]) -> str:
    """Which one to take at a limit; `rows`: fastest first."""
    where, able = _limit_text(rows[0]), [one for one in rows if one.fits]
    if not able:
        return f"Within {where}: nothing that was run is known to fit."
    near = [one.method for one in able[1:] if one.ratio is None or one.ratio.high is None or one.ratio.high >= 1]
    beyond = [one for one in rows if one.fits is False]
    words = f"Within {where}: take {able[0].method}, the fastest of the {len(able)} that fit"
    words += f" (not for certain faster than {' and '.join(near)})" if near else ""
    return words + (f"; {', '.join(one.method for one in beyond)} would not fit." if beyond else ".")


def steps_sheet(found: MethodComparison) -> Sheet[MethodPoint]:
    """Where the steps of every method go, predicted and measured."""
    titles: dict[str, str] = {}
    if all(one.host_update_s is None for one in found.points):
        titles |= {"host_update_wait_s": "", "host_update_bytes": ""}
    if all(one.checksum_share is None for one in found.points):
        titles["checksum_fraction"] = ""
    steps = ("label", "batch", "step", "predicted_step", "step_error", "recompute_share", "swap_wait_s", "room_wait_s")
    moved = ("swapped_bytes", "tier", "checksum_share", "host_update_s", "host_update_bytes")
    return Sheet(
        name="out-of-core-steps",
        title="Steps: predicted and measured",
        columns=(*_place_columns(found), *columns_of(MethodPoint, *steps, *moved, titles=titles)),
        rows=[one for one in found.points if one.num_runs],
        caption="Predicted: the simulated passes plus what warm-up steps spent next to them.",
    )


def method_charts(found: MethodComparison, number: int) -> list[Chart]:
    """Throughput over the batch, at the largest rank count."""
    place = found.points[-1].ranks, found.points[-1].nodes
    points = [one for one in found.points if (one.ranks, one.nodes) == place]
    subject = ReportSubject(id=f"out-of-core-{number}", label=f"{found.label}, {place_text(*place)}")
    return [_throughput_chart(found, points, subject)] if any(one.throughput is not None for one in points) else []


def _throughput_chart(found: MethodComparison, points: Sequence[MethodPoint], subject: Subject) -> Chart:
    import altair as alt

    rows: Rows = [
        {"method": one.label, "batch": one.batch, **figure_row(one.throughput)}
        for one in points
        if one.throughput is not None
    ]
    # The colour of its title, and others where several labels share one.
    colours: dict[str, str] = {}
    further = iter(_FURTHER)
    for one in points:
        if one.throughput is not None and one.label not in colours:
            colour = COLOURS.get(one.method, OTHER_COLOUR)
            colours[one.label] = colour if colour not in colours.values() else next(further, OTHER_COLOUR)
    place = points[0].ranks, points[0].nodes
    limit = next((one for one in found.limits if (one.ranks, one.nodes) == place and one.batch > 0), None)
    in_core: list[Any] = []
    if limit:
        row = {"batch": limit.batch, "text": f"in core up to {limit.batch}", "foot": 0}
        base, x, y = alt.Chart(alt.InlineData(values=[row])), alt.X("batch:Q"), alt.Y("foot:Q")
        text = base.mark_text(color=MUTED, align="left", dx=5, dy=-8, fontSize=12)
        in_core = [
            base.mark_rule(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(x=x),
            text.encode(x=x, y=y, text=alt.Text("text:N")),
        ]
    unit = f"{found.sample_unit}/s"
    drawn = lines(
        rows,
        Axis(unit, format=",.4~r"),
        Series("method", colours, columns=1, legend={"labelLimit": 340}),
        {"method:N": "activations", "batch:Q": "batch", "shown:N": unit, "basis:N": "interval"},
        x="batch",
        title="batch per rank",
        room=1.15,
        reach=[limit.batch] if limit else [],
    )
    mark = (
        f" Dashed: the {limit.batch} samples for which {format_bytes(limit.capacity_bytes)} are enough in core."
        if limit
        else ""
    )
    words = "; ".join(f"{row['method']}, batch {row['batch']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*drawn.layer, *in_core),
        subject,
        name="throughput",
        title="Throughput by batch and method",
        alt=f"Throughput over the batch per rank, a line for each method.{mark} {words}.",
        table=methods_sheet(found),
        size=(WIDE - 40, HEIGHT + 30),
    )


class OutOfCoreView(ReportView):
    """What recomputing and swapping cost, and which batches they make possible."""

    id = "out-of-core"
    title = TITLE
    key = "out_of_core"
    after = "large-batch"

    def numbers(self, source: ReportSource) -> tuple[MethodComparison, ...]:
        """Sets of runs that differ in nothing but method and batch."""
        return out_of_core(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One for each set."""
        return tuple(_section(one, number) for number, one in enumerate(report.all_of(MethodComparison), 1))

    def remedy(self, report: Report) -> str:
        """A sweep over batches with a plan."""
        if not report.groups:
            return ""
        group = report.groups[0]
        batch = group.baseline.batch_per_rank
        wanted = "--set train.recompute=planned --set train.swap=planned --set train.memory.capacity=50%"
        command = rerun(group, f"{wanted} --sweep train.batch_per_rank={batch},{2 * batch}")
        return f"no run recomputes or swaps activations; {command} does."


def _section(found: MethodComparison, number: int) -> Section:
    words = tuple(_words(found))
    notes = []
    if not any(one.is_in_core and one.num_runs for one in found.points):
        notes.append("No run of this set trained in core: what a method costs against that is not measured.")
    tiers = sorted({one.tier for one in found.points if one.tier})
    if tiers:
        notes.append(f"Swapped to: {'; '.join(tiers)}.")
    if any(one.host_update_s is not None for one in found.points):
        notes.append("Waiting for the host's update is part of the forward passes of rank 0, and of the cause compute.")
    return Section(
        id=f"out-of-core-{number}",
        title=TITLE if number == 1 else f"{TITLE} ({number})",
        caption=f"{found.label}.",
        headline=_headline(found),
        words=words,
        brief=words,
        charts=lambda: method_charts(found, number),
        sheets=(*((limit_sheet(found),) if found.at_limit else ()), methods_sheet(found), steps_sheet(found)),
        notes=tuple(notes),
        where={"comparison": found.id, "of": found.label},
    )


def _headline(found: MethodComparison) -> str:
    """The gain of a plan at the largest rank count and batch, or how well steps were predicted."""
    gain = max(found.gains, key=lambda one: (one.ranks, one.batch), default=None)
    if gain is not None:
        return f"{gain.planned}: {times_value(gain.ratio)} the throughput of {gain.over}, batch {gain.batch}"
    if found.median_step_error is not None:
        peaks = f", peaks by {percent(found.median_peak_error)}" if found.median_peak_error is not None else ""
        return f"predicted steps are off by {percent(found.median_step_error)}{peaks} (median)"
    if len(found.points) == 1:
        return "only one method and batch was run; nothing to compare"
    return f"{len(found.points)} methods and batches, none of which differ in the method alone"


def _words(found: MethodComparison) -> Iterator[str]:
    yield from map(_choice, list(alike(found.at_limit, _limit_text).values())[-MAX_GAINS:])
    for gain in sorted(found.gains, key=lambda one: (-one.ranks, -one.batch))[:MAX_GAINS]:
        peaks = ""
        if gain.planned_peak_bytes is not None and gain.over_peak_bytes is not None:
            peaks = f"; measured peaks {format_bytes(gain.planned_peak_bytes)} and {format_bytes(gain.over_peak_bytes)}"
        yield (
            f"At {place_of(gain)}, batch {gain.batch}: {gain.planned} has {times_text(gain.ratio)} the throughput of "
            f"{gain.over}, the fastest that treats all blocks alike{peaks}."
        )
    for limit in found.limits:
        where = place_text(limit.ranks, limit.nodes)
        capacity = f"Without recomputing or swapping, {format_bytes(limit.capacity_bytes)} are enough for a pass of"
        yield f"{capacity} {limit.batch} samples at {where}, by the chains as measured."
    for one in found.points:
        if one.num_without_memory:
            others = f", {one.num_runs} did not" if one.num_runs else ""
            failed = f"{runs_text(one.num_without_memory)} did not fit{others}"
            yield f"{_upper(one.label)} with batch {one.batch} at {place_of(one)}: {failed}."
    for what, middle, name in (
        ("steps", found.median_step_error, "step_error"),
        ("peaks", found.median_peak_error, "peak_error"),
    ):
        if middle is not None:
            error, worst = max(((abs(getattr(one, name) or 0.0), one) for one in found.points), key=itemgetter(0))
            yield (
                f"Predicted {what} are off by {percent(middle)} (median of absolute errors), at most by "
                f"{percent(error)} ({worst.label}, batch {worst.batch})."
            )
    for one in found.points:
        in_core, peak = one.in_core_bytes, one.predicted_peak_bytes
        if in_core and peak is not None and not one.is_in_core and saves_nothing(peak, in_core):
            yield (
                f"{_upper(one.label)} saves no memory with batch {one.batch} at {place_of(one)}: "
                f"{format_bytes(peak)} predicted, {format_bytes(in_core)} in core."
            )
    # Of the point whose measured peak exceeds most what was planned for.
    beyond = {
        one.device_peak.value - one.capacity_bytes: one
        for one in found.points
        if one.device_peak is not None and one.capacity_bytes is not None
    }
    if (most := max(beyond, default=0.0)) > 0:
        yield (
            f"The measured peak exceeds the capacity by up to {format_bytes(most)} ({beyond[most].label}, batch "
            f"{beyond[most].batch}): the device needs that much more than the plan knows of."
        )
    over = max(found.points, key=lambda one: one.over_budget_bytes or 0)
    if over.over_budget_bytes:
        yield (
            f"Activations were more than the plan allowed, by up to {format_bytes(over.over_budget_bytes)} "
            f"({over.label}, batch {over.batch})."
        )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
