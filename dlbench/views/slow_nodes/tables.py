"""The table of slow nodes, over all runs."""

from __future__ import annotations

from dlbench.reading.hosts.slow_nodes import ACCUSED, FALSE_SHARE, HostHistory, SlowNodes
from dlbench.report.table import Cell, Column, Sheet, unit_cell
from dlbench.report.wording import percent, shown
from dlbench.stats.estimates import Estimate

MAX_SHOWN = 10
"""Hosts in a table for people, which has all slow ones, and in a chart."""


def host_sheet(found: SlowNodes) -> Sheet[HostHistory]:
    """Hosts over all runs of the folder."""
    slowest = found.hosts[:MAX_SHOWN]
    left = sum(one.verdict not in ACCUSED for one in found.hosts[MAX_SHOWN:])
    columns: tuple[Column[HostHistory], ...] = (
        Column("host", "Host", lambda one: one.host, limit=64),
        Column(
            "own_work_ratio", "Own work", lambda one: one.ratio, lambda one: ratio_cell(one.ratio), has_interval=True
        ),
        Column(
            "leaves_later_fraction",
            "Leaves later",
            lambda one: one.later,
            lambda one: None if one.later is None else unit_cell(one.later),
            has_interval=True,
        ),
        Column("sessions", "Sessions", lambda one: one.ratio.n),
        Column("runs", "Runs", lambda one: one.num_runs),
        Column("interval", "", lambda one: one.ratio.kind),
        Column("last_share_fraction", "Last in", lambda one: one.last_share, lambda one: percent(one.last_share, 0)),
        Column("fair_share_fraction", "Fair share", lambda one: one.fair_share, lambda one: percent(one.fair_share, 0)),
        Column("verdict", "Verdict", lambda one: one.verdict, verdict_text),
    )
    return Sheet(
        name="slow-nodes",
        title="Hosts, over all runs of the folder",
        columns=columns,
        rows=found.hosts,
        is_shown=lambda one: one.verdict in ACCUSED or one in slowest,
        caption=(
            f"Own work: the slowest rank's step without exchange, over the other hosts'; slow: above "
            f"{found.threshold:g} by a t test over sessions (false discovery rate {FALSE_SHARE * 100:.0f} %)."
            + (f" The {left} fastest hosts are left out." if left else "")
        ),
    )


def ratio_cell(ratio: Estimate) -> Cell:
    """A ratio near 1 with its interval."""
    number, interval, _ = shown(ratio, 3)
    return Cell(number, interval, number=ratio.value)


def ratio_text(ratio: Estimate) -> str:
    """The same as text."""
    return str(ratio_cell(ratio))


def verdict_text(one: HostHistory) -> str:
    """With fewer than five sessions a host is suspected at most."""
    if one.verdict == "suspected":
        return f"suspected ({sessions_text(one.ratio.n)}: insufficient)"
    return one.verdict.replace("slow link", "slow link or NIC")


def sessions_text(count: int) -> str:
    """``1 session``, ``5 sessions``."""
    return f"{count} session{'' if count == 1 else 's'}"
