"""Sheets on input stalls: the parts of a step, and the runs that they come from."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import percent, place_text
from dlbench.stats.estimates import Estimate
from dlbench.views.stalls.numbers import StallPart, Stalls, Tier, TierRuns

PART_TITLES = {
    "ingestion": "step without input (synthetic data)",
    "preparation": "preparation stall (decode, augment)",
    "fetch": "fetch stall (storage)",
}
TIER_TITLES: dict[Tier, str] = {
    "synthetic": "synthetic data",
    "cached": "warm page cache",
    "cold": "cold page cache",
}
NOT_MEASURED = "not measured"

CAPTION = (
    "Preparation stall: step with a warm page cache less that with synthetic data. Fetch stall: cold less warm "
    "(DS-Analyzer's method)."
)
RUNS_CAPTION = "Geometric means over runs, all ranks together. Cell of synthetic data: the ingestion ceiling."

PartRow = tuple[Stalls, StallPart]
TierRow = tuple[Stalls, TierRuns]


def place(point: Stalls) -> str:
    """Where a point is."""
    return place_text(point.ranks, point.nodes)


def parts_sheet(found: Sequence[Stalls]) -> Sheet[PartRow]:
    """Ingestion, preparation stall and fetch stall of every scaling point."""
    columns: tuple[Column[PartRow], ...] = (
        Column("series", "", lambda row: row[0].series),
        Column("workload", "", lambda row: row[0].workload),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("", "At", lambda row: place(row[0]), is_brief=True),
        Column("part", "", lambda row: row[1].name),
        Column("", "Part of the step", lambda row: PART_TITLES[row[1].name], is_brief=True),
        Column("seconds", "Per step", lambda row: row[1].seconds, _seconds, has_interval=True, is_brief=True),
        Column("share", "Share", lambda row: row[1].share, has_interval=True, is_brief=True),
        Column("share_of", "", lambda row: row[0].whole_is),
        Column("pairs", "", lambda row: row[0].pairs),
        Column("why_not_measured", "", lambda row: row[1].why),
    )
    return Sheet(
        name="stalls",
        title="Where a step waits for input",
        columns=columns,
        rows=[(point, part) for point in found for part in point.parts],
        caption=CAPTION,
        in_terminal=True,
    )


def _seconds(row: PartRow) -> Estimate | Cell:
    return row[1].seconds or Cell(NOT_MEASURED)


def runs_sheet(found: Sequence[Stalls]) -> Sheet[TierRow]:
    """The three kinds of runs."""
    columns: tuple[Column[TierRow], ...] = (
        Column("series", "", lambda row: row[0].series),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("", "At", lambda row: place(row[0]), is_brief=True),
        Column("tier", "", lambda row: row[1].tier),
        Column("", "Runs with", lambda row: TIER_TITLES[row[1].tier], is_brief=True),
        Column("samples_per_s", "Samples/s", lambda row: row[1].rate, has_interval=True, is_brief=True),
        Column("step_s", "Step", lambda row: row[1].step_s, has_interval=True, is_brief=True),
        Column(
            "storage_share",
            "From storage",
            lambda row: row[1].storage_share,
            lambda row: _share(row[1]),
        ),
        Column("epochs", "", lambda row: row[1].epochs),
        Column("runs", "Runs", lambda row: row[1].step_s.n),
        Column("cache", "Page cache", lambda row: row[1].cache or None),
    )
    return Sheet(
        name="stall-runs",
        title="The same plan with synthetic data, a warm and a cold page cache",
        columns=columns,
        rows=[(point, tier) for point in found for tier in point.tiers],
        caption=RUNS_CAPTION,
        in_terminal=True,
    )


def _share(tier: TierRuns) -> Cell:
    if tier.tier == "synthetic":
        return Cell("nothing is read")
    if tier.storage_share is None:
        return Cell("unknown")
    # Above 1, what was fetched beyond the samples: read-ahead, and the programs' own files.
    return Cell(percent(min(1.0, tier.storage_share)), number=tier.storage_share)
