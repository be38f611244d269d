"""What a group's measured points let expect of more ranks: laws, published figures, forecasts; none is measured."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.reading.scaling import Group
from dlbench.reading.table import RunTable
from dlbench.report.wording import percent, ranks_text
from dlbench.views.forecast import anchors
from dlbench.views.forecast.laws import MIN_POINTS, ForecastPoint, Law, forecasts, law_of
from dlbench.views.next_step import most_ranks, rank_counts


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A published figure for the same kind of network."""

    title: str
    efficiency: float
    """Share of the ideal (fraction)."""
    ranks: int
    baseline: str
    hardware: str
    recipe: str
    source: str
    address: str
    differences: tuple[str, ...]
    """What the runs do otherwise; empty: the same work, and only then is it drawn."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The fit of a scaling law, published figures for the same work, and forecasts."""

    law: Law | None
    why_no_law: str
    forecasts: tuple[ForecastPoint, ...]
    why_no_forecast: str
    anchors: tuple[Anchor, ...]
    why_no_anchor: str
    notes: tuple[str, ...]
    """What limits the forecasts."""

    @property
    def same_work(self) -> tuple[Anchor, ...]:
        """Published figures that may stand beside the measured ones."""
        return tuple(anchor for anchor in self.anchors if not anchor.differences)


def forecast(group: Group, table: RunTable, *, is_oversubscribed: bool = False) -> Forecast | None:
    """Fits, anchors and forecasts; None for a group of one point, which scales against nothing.

    Args:
        group: comparable runs.
        table: all runs.
        is_oversubscribed: whether ranks shared cores: such points say nothing of a machine with more ranks.
    """
    if len(group.points) == 1:
        return None
    fitted = law_of(group, table)
    law = None if fitted is None else fitted.law
    found = () if fitted is None or is_oversubscribed else forecasts(group, fitted)
    doubt = "no law is fitted" if law is None else "ranks shared cores" if is_oversubscribed else law.doubt
    known = anchors.beside(group.sample)
    return Forecast(
        law=law,
        why_no_law="" if law else _why_no_law(group),
        forecasts=found,
        why_no_forecast="" if found else f"No forecast: {doubt}.",
        anchors=tuple(
            Anchor(
                **one.anchor.model_dump(exclude={"id", "work"}),
                differences=tuple(f"{each.what} {each.theirs} there, {each.ours} here" for each in one.differences),
            )
            for one in known
        ),
        why_no_anchor="" if any(not one.differences for one in known) else _why_no_anchor(known),
        notes=_notes(law) if found and law else (),
    )


def _why_no_law(group: Group) -> str:
    counts = sorted({point.ranks for point in group.points})
    if len(counts) >= MIN_POINTS:
        return (
            f"No scaling law fitted: needs {MIN_POINTS} rank counts inside one node or across nodes; measure more, "
            "e.g. --nodes 1,2,4."
        )
    text = f"No scaling law fitted: needs {MIN_POINTS} rank counts (you have {len(counts)}"
    more = [*counts, *rank_counts(counts[-1], (2, 4), most_ranks(group.sample.plan))]
    if len(more) < MIN_POINTS:
        return f"{text}, and this machine holds no more)."
    return f"{text}); run the same workload with --ranks {','.join(map(str, more[:MIN_POINTS]))}."


def _notes(law: Law) -> tuple[str, ...]:
    notes = []
    if law.alternatives:
        notes.append(f"Not ruled out, and in the interval: {', '.join(law.alternatives)}.")
    if law.points[-1].nodes > 1:
        notes.append(f"No point holds switches beyond {law.points[-1].nodes} nodes.")
    return tuple(notes)


def _why_no_anchor(known: tuple[anchors.Beside, ...]) -> str:
    if not known:
        return "No published reference of this kind of network is on file."
    nearest = min(known, key=lambda one: len(one.differences))
    what = ", ".join(difference.what for difference in nearest.differences)
    return (
        f"No published reference is of the same work; the nearest, {nearest.anchor.title} "
        f"({percent(nearest.anchor.efficiency)} at {ranks_text(nearest.anchor.ranks)}), differs in {what}."
    )
