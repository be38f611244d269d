"""Transitional: estimates get their units here until each is made with its own."""

from __future__ import annotations

from dlbench.stats.estimates import Estimate


def figure_of(estimate: Estimate, unit: str) -> Estimate:
    """An estimate with its unit."""
    return estimate.in_unit(unit)


def optional_figure_of(estimate: Estimate | None, unit: str) -> Estimate | None:
    """The same for what may be missing."""
    return None if estimate is None else estimate.in_unit(unit)


Cell = str | int | float | bool | None
"""One value of a table for programs."""


def figure_columns(column: str, figure: Estimate | None) -> dict[str, Cell]:
    """A figure and the ends of its interval, as a table for programs has them; empty where there is none."""
    return {
        column: None if figure is None else figure.value,
        f"{column}_low": None if figure is None else figure.low,
        f"{column}_high": None if figure is None else figure.high,
    }
