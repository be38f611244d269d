"""The view `utilisation`: model FLOPs utilisation, and the time that a full training would take."""

from __future__ import annotations

from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import DASH, place_text, value_text
from dlbench.units import format_number
from dlbench.views.model import Group
from dlbench.views.utilisation.numbers import Utilisation, UtilisationPoint, utilisation
from dlbench.views.utilisation.published import PublishedRate
from dlbench.views.view import GroupSource, GroupView, place_columns


class UtilisationView(GroupView):
    """Use of the hardware."""

    id = "utilisation"
    title = "Hardware utilisation"
    key = "utilisation"

    def numbers(self, source: GroupSource) -> Utilisation | None:
        """MFU and time to train of every point."""
        return utilisation(source.group)

    def section(self, group: Group) -> Section | None:
        """Use of the hardware, and published rates of the same card."""
        found = group.of(Utilisation)
        if found is None:
            return None
        return Section(
            id=self.id, title=self.title, headline=_headline(found), sheets=_sheets(found), notes=_notes(found)
        )

    def remedy(self, group: Group) -> str:
        """Newer runs."""
        return "these runs record no FLOPs per sample, and their recipe names no length of a training; newer runs do."


def _sheets(found: Utilisation) -> tuple[Sheet[Any], ...]:
    return (_sheet(found), _published_sheet(found.published)) if found.published else (_sheet(found),)


def _published_sheet(rates: tuple[PublishedRate, ...]) -> Sheet[PublishedRate]:
    columns: tuple[Column[PublishedRate], ...] = (
        Column("gpus", "GPUs", lambda rate: rate.gpus, is_brief=True),
        Column("published_per_gpu_s", "Published per GPU", lambda rate: rate.published, _rate_text, is_brief=True),
        Column("measured_per_gpu_s", "Here per GPU", lambda rate: rate.measured, has_interval=True, is_brief=True),
        Column("ratio", "Here / published", lambda rate: rate.ratio, has_interval=True, is_brief=True),
        Column("differences", "What differs", lambda rate: ", ".join(rate.differences) or "nothing known"),
        Column("source", "Source", lambda rate: rate.source, lambda rate: f"{rate.source}, {rate.address}"),
        Column("address", "", lambda rate: rate.address),
    )
    return Sheet(
        name="published_rates",
        title=f"Published rates of {rates[0].device}, same network and precision",
        columns=columns,
        rows=rates,
        in_terminal=True,
        caption="Another library in another year: a ratio far below 1 asks for a reason, one near 1 proves nothing.",
    )


def _rate_text(rate: PublishedRate) -> str:
    return f"{format_number(rate.published)} {rate.measured.unit.removesuffix('/rank')}"


def _sheet(found: Utilisation) -> Sheet[UtilisationPoint]:
    """Every point; people see no column without a value."""
    has_mfu = any(point.mfu for point in found.points)
    unit, factor = _unit(found)
    columns: tuple[Column[UtilisationPoint], ...] = (
        *place_columns(),
        Column("throughput_per_s", "", lambda point: point.throughput),
        Column(
            "tflops_per_rank",
            f"Model {unit} per rank" if found.training_flops_per_sample else "",
            lambda point: point.achieved,
            lambda point: point.achieved and point.achieved.scaled(factor),
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "peak_tflops_per_rank",
            f"Peak {unit} per rank" if has_mfu else "",
            lambda point: point.peak_tflops,
            lambda point: point.peak_tflops and point.peak_tflops * factor,
            unit="TFLOP/s/rank",
            is_brief=True,
        ),
        Column("mfu", "MFU" if has_mfu else "", lambda point: point.mfu, has_interval=True, is_brief=True),
        Column(
            "training_time_s",
            found.recipe_title,
            lambda point: point.training_time,
            lambda point: point.training_time and value_text(point.training_time),
            has_interval=True,
            is_brief=True,
        ),
    )
    return Sheet(
        name="utilisation",
        title="Use of the hardware",
        columns=columns,
        rows=found.points,
        in_terminal=True,
    )


def _headline(found: Utilisation) -> str:
    last = found.points[-1]
    if last.mfu is not None:
        beside = f"; {value_text(found.published[-1].ratio)} of a published rate" if found.published else ""
        padding = f"; {found.padding}" if found.padding else ""
        return f"MFU {value_text(last.mfu)} at {place_text(last.ranks, last.nodes)}{beside}{padding}"
    if last.achieved is not None:
        unit, factor = _unit(found)
        return f"{value_text(last.achieved.scaled(factor))} model {unit} per rank; MFU unknown: no peak declared"
    return f"{found.recipe_title}: {value_text(last.training_time) if last.training_time else DASH}"


def _unit(found: Utilisation) -> tuple[str, float]:
    """The unit for people, and how many of it a TFLOP/s is."""
    largest = max((point.achieved.value for point in found.points if point.achieved), default=1.0)
    return ("TFLOP/s", 1.0) if largest >= 1 else ("GFLOP/s", 1000.0)


def _notes(found: Utilisation) -> tuple[str, ...]:
    """Where FLOPs, peak and the length of the training are from."""
    if not found.training_flops_per_sample:
        return (found.recipe,)
    flops = format_number(found.training_flops_per_sample / 1e9)
    padding = f"; {found.padding}, so the arithmetic done is less than stated" if found.padding else ""
    return (f"{flops} GFLOP per sample{padding}; {found.peak}.", found.recipe)
