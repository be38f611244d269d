"""Tables of slow nodes, over all runs; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.reading.slow_nodes import HostHistory, SlowNodes
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import percent, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import figure_columns

MAX_SHOWN = 10
"""Hosts in a table for people and in a chart; a table has all slow ones."""


def slow_hosts(found: SlowNodes) -> list[HostHistory]:
    """Those that are slow."""
    return [one for one in found.hosts if one.verdict == "slow"]


def slow_node_sheet(found: SlowNodes) -> Sheet:
    """Hosts over all runs of the folder."""
    slow = [one for number, one in enumerate(found.hosts) if number < MAX_SHOWN or one.verdict == "slow"]
    return Sheet(
        name="slow-nodes",
        title="Hosts, over all runs of the folder",
        text=host_rows(slow),
        caption=(
            "Medians over runs; in brackets their 95 % bootstrap interval, or the range below five runs. Fair share: "
            "steps in which one of its ranks would come last if all ranks did equally often."
            + (
                f" The {len(found.hosts) - len(slow)} fastest hosts are left out."
                if len(slow) < len(found.hosts)
                else ""
            )
        ),
        columns=(
            *("host", "own_work_ratio", "own_work_ratio_low", "own_work_ratio_high", "runs", "interval"),
            *("last_share_fraction", "fair_share_fraction", "verdict"),
        ),
        rows=tuple(
            {
                "host": one.host,
                **figure_columns("own_work_ratio", one.ratio),
                "runs": one.ratio.n,
                "interval": one.ratio.kind,
                "last_share_fraction": one.last_share,
                "fair_share_fraction": one.fair_share,
                "verdict": one.verdict,
            }
            for one in found.hosts
        ),
    )


def host_rows(found: Sequence[HostHistory]) -> Table:
    """Hosts over all runs, the slowest first."""
    rows: Table = [("host", "own work", "runs", "last in", "fair share", "verdict")]
    for one in found:
        cells = (str(one.ratio.n), percent(one.last_share, 0), percent(one.fair_share, 0), verdict_text(one))
        rows.append((one.host, ratio_text(one.ratio), *cells))
    return rows


def ratio_text(figure: Estimate) -> str:
    """A ratio near 1 with its interval, to the thousandth."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def history_words(found: SlowNodes) -> tuple[str, ...]:
    """What the comparison of hosts is, and over which runs."""
    told = []
    if not found.num_runs:
        told.append("Nothing to compare: no counted run had ranks on two hosts or more.")
    if found.num_faulty:
        told.append(f"{runs_text(found.num_faulty)} with a planted fault left out.")
    if found.num_runs:
        rest = f", {found.num_single_host} on one" if found.num_single_host else ""
        told.append(
            "Own work (no exchange) of a host's slowest rank relative to the other hosts' in the same run; slow: "
            f"interval above {found.threshold:g}. {len(found.hosts)} hosts, {runs_text(found.num_runs)} on several "
            f"hosts{rest}."
        )
    return tuple(told)


def exclude_lines(found: SlowNodes) -> tuple[str, ...]:
    """The option for Slurm, or that there is none to give; nothing where no hosts were compared."""
    if not found.num_runs:
        return ()
    unsafe = (f"Left out of the list, no name for an option: {host}" for host in found.unsafe)
    return (found.option or "No host is shown to be slow.", *unsafe)


def verdict_text(one: HostHistory) -> str:
    """With fewer than five runs a host is suspected at most."""
    return f"suspected ({runs_text(one.ratio.n)}: insufficient)" if one.verdict == "suspected" else one.verdict
