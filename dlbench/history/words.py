"""Numbers and days of a history as text, for tables, charts and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.table import Cell, unit_cell
from dlbench.report.wording import number_text
from dlbench.stats.estimates import Estimate
from dlbench.units import plural

MAX_NAMED_HOSTS = 4  # Hosts of a night that a table names.
MOST_EVIDENCE = 1e6  # Larger Bayes factors are printed as above this one.


def day(moment: str) -> str:
    """Returns the day of a moment in UTC, e.g. ``2026-03-04``."""
    return moment[:10]


def day_if_any(moment: str) -> str | None:
    """Returns the day of a moment; None of an empty text."""
    return day(moment) or None


def nights_text(count: int) -> str:
    """Returns ``1 night``, ``5 nights``."""
    return f"{count} {plural('night', count)}"


def names_text(names: Sequence[str]) -> str | None:
    """Returns all names with commas; None if there are none."""
    return ", ".join(names) or None


def hosts_text(names: Sequence[str]) -> str | None:
    """Returns the names of up to `MAX_NAMED_HOSTS` hosts, or the number of more; None if there are none."""
    return str(len(names)) if len(names) > MAX_NAMED_HOSTS else names_text(names)


def amount_text(value: float, unit: str) -> str:
    """Returns one number with its unit, e.g. ``12.3 ms``, ``4.1 J``."""
    text = number_text(value, unit)
    return text if unit in ("s", "fraction") else f"{text} {unit}"


def level_text(level: Estimate) -> str:
    """Returns a level with its interval, e.g. ``101 ms [100, 102]``."""
    return str(unit_cell(level))


def percent_change(ratio: float) -> str:
    """Returns a ratio as a change, e.g. ``+4.8 %``."""
    return f"{(ratio - 1) * 100:+.1f} %"


def change_cell(ratio: Estimate) -> Cell:
    """Returns a ratio as a change with its interval, e.g. ``+4.8 % [+3.9, +5.6]``."""
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f"[{(ratio.low - 1) * 100:+.1f}, {(ratio.high - 1) * 100:+.1f}]"
    return Cell(percent_change(ratio.value), interval, number=ratio.value)


def ratio_cell(ratio: Estimate) -> Cell:
    """Returns a ratio near 1 with its interval, e.g. ``1.048 [1.031, 1.060]``."""
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    return Cell(f"{ratio.value:.3f}", interval, number=ratio.value)


def evidence_text(evidence: float) -> str:
    """Returns ``Bayes factor 2400``, or ``Bayes factor > 1e6``."""
    if evidence > MOST_EVIDENCE:
        return "Bayes factor > 1e6"
    return f"Bayes factor {evidence:.0f}"
