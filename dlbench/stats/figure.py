"""A number as every format prints it: with unit, interval and the runs behind it."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with all that makes it one: unit, interval, how many runs, how the interval was made."""

    value: float
    unit: str
    """`images/s` (or another sample unit a second), `images/s/rank`, `TFLOP/s/rank`, `s`, `fraction`, `ratio`,
    `samples`, `epochs`, `error` (a mean absolute error), `bytes`, `messages`, `loss`."""
    low: float | None
    high: float | None
    n: int
    kind: str
    """`bootstrap 95 %`, `range`, `single run`, `by definition`."""


def figure_of(estimate: Estimate, unit: str) -> Figure:
    """An estimate with its unit."""
    return Figure(
        value=estimate.value, unit=unit, low=estimate.low, high=estimate.high, n=estimate.n, kind=estimate.kind
    )


def optional_figure_of(estimate: Estimate | None, unit: str) -> Figure | None:
    """The same for what may be missing."""
    return None if estimate is None else figure_of(estimate, unit)


Cell = str | int | float | bool | None
"""One value of a table for programs."""


def figure_columns(column: str, figure: Figure | None) -> dict[str, Cell]:
    """A figure and the ends of its interval, as a table for programs has them; empty where there is none."""
    return {
        column: None if figure is None else figure.value,
        f"{column}_low": None if figure is None else figure.low,
        f"{column}_high": None if figure is None else figure.high,
    }
