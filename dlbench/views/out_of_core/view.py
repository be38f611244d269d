"""The view `out-of-core`: methods to hold activations beside each other, and one pass in its lanes."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from dlbench.costs.memory.planner import saves_nothing
from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import percent, place_text, runs_text, times_text, times_value
from dlbench.units import format_bytes
from dlbench.views.model import Report
from dlbench.views.next_step import rerun
from dlbench.views.out_of_core.charts import method_charts, passage_charts
from dlbench.views.out_of_core.numbers import Gain, MethodPoint, OutOfCore, out_of_core
from dlbench.views.out_of_core.passes import Passage, PlannedPart
from dlbench.views.out_of_core.tables import blocks_sheet, methods_sheet, steps_sheet
from dlbench.views.view import ReportSource, ReportView

TITLE = "Out of core"
MAX_GAINS = 4
"""Rank counts and batches whose gain is said in words, the largest first; the tables have all."""


class OutOfCoreView(ReportView):
    """What recomputing and swapping cost, and which batches they make possible."""

    id = "out-of-core"
    title = TITLE
    key = "out_of_core"

    def numbers(self, source: ReportSource) -> tuple[OutOfCore, ...]:
        """Sets of runs that differ in nothing but method and batch."""
        return out_of_core(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One for each set."""
        found = report.all_of(OutOfCore)
        return tuple(_section(one, number) for number, one in enumerate(found, 1))

    def remedy(self, report: Report) -> str:
        """A sweep over batches with a plan."""
        if not report.groups:
            return ""
        group = report.groups[0]
        batch = group.baseline.batch_per_rank
        wanted = "--set train.recompute=planned --set train.swap=planned --set train.memory.capacity=50%"
        command = rerun(group, f"{wanted} --sweep train.batch_per_rank={batch},{2 * batch}")
        return f"no run recomputes or swaps activations; {command} does."


def _section(found: OutOfCore, number: int) -> Section:
    words = tuple(_words(found))
    first = found.passages[0] if found.passages else None
    blocks = tuple(
        blocks_sheet(one.blocks, f"Blocks of the plan: {one.label}") for one in found.passages if one.is_planned
    )
    return Section(
        id=f"out-of-core-{number}",
        title=TITLE if number == 1 else f"{TITLE} ({number})",
        caption=f"{found.label}.",
        headline=_headline(found),
        words=words,
        brief=words,
        charts=lambda: method_charts(found, number),
        sheets=(methods_sheet(found), steps_sheet(found)),
        notes=tuple(_notes(found)),
        sections=() if first is None else (_pass_section(found, first, number, blocks),),
        where={"comparison": found.id, "of": found.label},
    )


def _headline(found: OutOfCore) -> str:
    """The gain of a plan at the largest rank count and batch, or how well steps were predicted."""
    gain = max(found.gains, key=lambda one: (one.ranks, one.batch), default=None)
    if gain is not None:
        return f"{gain.planned}: {times_value(gain.ratio)} the throughput of {gain.over}, batch {gain.batch}"
    if found.median_step_error is not None:
        peaks = f", peaks by {percent(found.median_peak_error)}" if found.median_peak_error is not None else ""
        return f"predicted steps are off by {percent(found.median_step_error)}{peaks} (median)"
    return f"{len(found.points)} method{'s' * (len(found.points) != 1)} and batches, none to compare with"


def _pass_section(found: OutOfCore, first: Passage, number: int, blocks: tuple[Sheet[PlannedPart], ...]) -> Section:
    """One pass in its lanes, and the blocks of all plans."""
    words = [f"A pass of {first.label}, predicted with the chain and the rates measured before training."]
    if first.measured:
        words.append("Measured: a watched pass of rank 0 of the same run.")
    return Section(
        id=f"pass-{number}",
        title="One pass",
        words=tuple(words),
        brief=(),
        charts=lambda: passage_charts(first, found.label, number),
        charts_per_row=1,
        sheets=blocks,
        in_contents=False,
    )


def _words(found: OutOfCore) -> Iterator[str]:
    for gain in sorted(found.gains, key=lambda one: (-one.ranks, -one.batch))[:MAX_GAINS]:
        yield _gain(gain)
    for limit in found.limits:
        where = place_text(limit.ranks, limit.nodes)
        held = f"In core {format_bytes(limit.capacity_bytes)} hold {limit.batch} samples of a pass at {where}"
        yield f"{held}, by the chains as measured."
    yield from _without_memory(found)
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
        if in_core and peak is not None and not _is_in_core(one) and saves_nothing(peak, in_core):
            yield (
                f"{_upper(one.label)} saves no memory with batch {one.batch} at {place_text(one.ranks, one.nodes)}: "
                f"{format_bytes(peak)} predicted, {format_bytes(in_core)} in core."
            )
    yield from _beyond_capacity(found)
    over = [one for one in found.points if one.over_budget_bytes]
    if over:
        most = max(over, key=lambda one: one.over_budget_bytes or 0)
        yield (
            f"Activations were more than the plan allowed, by up to {format_bytes(most.over_budget_bytes or 0)} "
            f"({most.label}, batch {most.batch})."
        )


def _beyond_capacity(found: OutOfCore) -> Iterator[str]:
    """That the measured peak is more than was planned for, of the point where it exceeds that most."""
    beyond = {
        one.device_peak.value - one.capacity_bytes: one
        for one in found.points
        if one.device_peak is not None and one.capacity_bytes is not None
    }
    most = max(beyond, default=0.0)
    if most > 0:
        one = beyond[most]
        yield (
            f"The measured peak exceeds the capacity by up to {format_bytes(most)} ({one.label}, batch {one.batch}): "
            "the device needs that much more than the plan knows of."
        )


def _gain(gain: Gain) -> str:
    peaks = ""
    if gain.planned_peak_bytes is not None and gain.over_peak_bytes is not None:
        peaks = f"; measured peaks {format_bytes(gain.planned_peak_bytes)} and {format_bytes(gain.over_peak_bytes)}"
    return (
        f"At {place_text(gain.ranks, gain.nodes)}, batch {gain.batch}: {gain.planned} has {times_text(gain.ratio)} the "
        f"throughput of {gain.over}, the fastest that treats all blocks alike{peaks}."
    )


def _without_memory(found: OutOfCore) -> Iterator[str]:
    for one in found.points:
        if one.num_without_memory:
            yield (
                f"{_upper(one.label)} with batch {one.batch} at {place_text(one.ranks, one.nodes)}: "
                f"{runs_text(one.num_without_memory)} did not fit"
                f"{f', {one.num_runs} did not' if one.num_runs else ''}."
            )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _notes(found: OutOfCore) -> Iterator[str]:
    if not any(_is_in_core(one) and one.num_runs for one in found.points):
        yield "No run of this set trained in core: what a method costs against that is not measured."
    tiers = sorted({one.tier for one in found.points if one.tier})
    if tiers:
        yield f"Swapped to: {'; '.join(tiers)}."
    if found.frees_at_once:
        yield (
            "On a CPU freed tensors go back to the system at once, so that peaks are real. The page faults of that "
            "make all methods slower than in core, and recomputing slower than torch.utils.checkpoint without it: "
            "compare methods with each other."
        )
    if any(one.host_update_s is not None for one in found.points):
        yield "Waiting for the host's update is part of the forward passes of rank 0, and of the cause compute."


def _is_in_core(one: MethodPoint) -> bool:
    return (one.recompute, one.swap) == ("none", "none")
