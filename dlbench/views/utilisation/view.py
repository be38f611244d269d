"""The view `utilisation`: model FLOPs utilisation, and the time that a full training would take."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import basis_text
from dlbench.units import format_number
from dlbench.views.model import Group
from dlbench.views.utilisation.numbers import Utilisation, UtilisationPoint, utilisation
from dlbench.views.view import GroupSource, GroupView, place_columns


class UtilisationView(GroupView):
    """Use of the hardware."""

    id = "utilisation"
    title = "Utilisation and time to train"
    key = "utilisation"

    def numbers(self, source: GroupSource) -> Utilisation | None:
        """MFU and time to train of every point."""
        return utilisation(source.group)

    def section(self, group: Group) -> Section | None:
        """One table."""
        found = group.of(Utilisation)
        if found is None:
            return None
        caption = _caption(found)
        sheet = _sheet(found, group.sample_unit, caption)
        return Section(id=self.id, title=self.title, sheets=(sheet,), brief=(caption,))

    def remedy(self, group: Group) -> str:
        """Newer runs."""
        return (
            "not known: these runs do not record the FLOPs of a sample, and their recipe names no length of a "
            "training; runs of this version of dlbench record the FLOPs."
        )


def _sheet(found: Utilisation, unit: str, caption: str) -> Sheet[UtilisationPoint]:
    """Every point; people see no column without a value."""
    has_mfu = any(point.mfu for point in found.points)
    columns: tuple[Column[UtilisationPoint], ...] = (
        *place_columns(),
        Column("throughput_per_s", f"Throughput, {unit}/s", lambda point: point.throughput),
        Column(
            "tflops_per_rank",
            "Model TFLOP/s per rank" if found.training_flops_per_sample else "",
            lambda point: point.achieved,
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "peak_tflops_per_rank",
            "Peak TFLOP/s per rank" if has_mfu else "",
            lambda point: point.peak_tflops,
            unit="TFLOP/s/rank",
            is_brief=True,
        ),
        Column("mfu", "MFU" if has_mfu else "", lambda point: point.mfu, has_interval=True, is_brief=True),
        Column(
            "training_time_s",
            "Time to train, estimate" if found.recipe else "",
            lambda point: point.training_time,
            has_interval=True,
            is_brief=True,
        ),
        Column("", "Interval", lambda point: basis_text(point.throughput)),
    )
    return Sheet(
        name="utilisation",
        title="Use of the hardware",
        columns=columns,
        rows=found.points,
        caption=caption,
        in_terminal=True,
    )


def _caption(found: Utilisation) -> str:
    """Where FLOPs, peak and the length of the training are from."""
    parts = []
    if found.training_flops_per_sample:
        flops = format_number(found.training_flops_per_sample / 1e9)
        parts.append(f"Model FLOPs of training per sample: {flops} GFLOP. Peak: {found.peak}.")
    if found.recipe:
        parts.append(f"Time to train: {found.recipe}")
    return " ".join(parts)
