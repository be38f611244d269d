"""The view `noise`: the gradient noise scale beside the global batch."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import place_text, times_value
from dlbench.views.model import Group
from dlbench.views.noise.numbers import NoisePoint, noise_points
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

CAPTION = "A guide: it supposes a learning rate tuned to each batch."

COLUMNS: tuple[Column[NoisePoint], ...] = (
    *place_columns(),
    Column("global_batch", "Global batch", lambda point: point.global_batch, unit="samples", is_brief=True),
    Column(
        "noise_scale_samples", "Noise scale, samples", lambda point: point.noise_scale, has_interval=True, is_brief=True
    ),
    Column(
        "batch_over_noise_scale",
        "Batch / noise scale",
        lambda point: point.share,
        has_interval=True,
        is_brief=True,
    ),
    Column("", "From", lambda point: point.basis),
    Column("", "What that means", lambda point: point.advice),
)


class NoiseView(GroupView):
    """Whether a larger batch would still save steps."""

    id = "noise"
    title = "Gradient noise scale"
    key = "noise"

    def numbers(self, source: GroupSource) -> tuple[NoisePoint, ...]:
        """The noise scale at each point where it was asked for."""
        return noise_points(source.group)

    def section(self, group: Group) -> Section | None:
        """One table."""
        points = group.all_of(NoisePoint)
        if not points:
            return None
        sheet = Sheet(
            name="noise",
            title="Noise scale and global batch",
            columns=COLUMNS,
            rows=points,
            caption=CAPTION,
            in_terminal=True,
        )
        advice = tuple(f"At {place_text(point.ranks, point.nodes)}: {point.advice}." for point in points)
        return Section(id=self.id, title=self.title, headline=_headline(points[-1]), sheets=(sheet,), brief=advice)

    def remedy(self, group: Group) -> str:
        """An option."""
        return "--set measure.noise_scale=true estimates it, at the cost of speed."


def _headline(point: NoisePoint) -> str:
    if point.share is None:
        return f"unknown at {place_of(point)}"
    return f"global batch is {times_value(point.share)} the noise scale at {place_of(point)}"
