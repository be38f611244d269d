"""Figures of the collective benchmark as words; what it shares with other reports is in `wording`."""

from __future__ import annotations

import math
from typing import Final

from dlbench.report import wording
from dlbench.report.wording import DASH
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes, format_number, format_seconds

COLLECTIVE_TITLES = {
    "allreduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "broadcast": "broadcast",
    "all-to-all": "all-to-all",
}

WITHIN_RUN: Final = "within-run"
"""Kind of an interval that one run's iterations make; it says nothing on how runs differ."""


def size_text(num_bytes: float | None) -> str:
    """Bytes in binary units; a dash for what is not counted."""
    if num_bytes is None:
        return DASH
    return format_bytes(num_bytes)


def about(num_bytes: float) -> str:
    """Bytes that are computed, not chosen: three digits."""
    if not math.isfinite(num_bytes):
        return "no size"
    value, unit = format_bytes(num_bytes).split(" ")
    return f"{float(f'{float(value):.3g}'):g} {unit}"


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit that suits them; a dash for what is missing."""
    return DASH if seconds is None else format_seconds(seconds) if seconds else "0 s"


def rate_text(gigabytes: float | None) -> str:
    """GB/s with three digits; a dash for what is missing."""
    return DASH if gigabytes is None else format_number(gigabytes, 3)


def per_byte_text(seconds_per_byte: float) -> str:
    """Seconds per byte as the rate that they are, GB/s; `free` where bytes cost nothing."""
    return "free" if seconds_per_byte <= 0 else rate_text(1e-9 / seconds_per_byte)


def time_text(figure: Estimate) -> str:
    """A time with its interval."""
    return wording.figure_text(figure)


def rate_figure_text(figure: Estimate | None) -> str:
    """A rate with its interval, GB/s; a dash for what is missing."""
    if figure is None:
        return DASH
    if figure.low is None or figure.high is None:
        return rate_text(figure.value)
    return f"{rate_text(figure.value)} [{rate_text(figure.low)}, {rate_text(figure.high)}]"


def ratio_text(ratio: float | None) -> str:
    """A ratio with two decimals; a dash for what is missing."""
    return DASH if ratio is None else f"{ratio:.2f}"


def basis_text(figure: Estimate) -> str:
    """What an interval is and how many runs stand behind it."""
    if figure.kind == WITHIN_RUN:
        return "within-run: middle half of the iterations of a single run"
    return wording.basis_text(figure)


def count_text(count: int | None) -> str:
    """A count; a dash for what is not counted."""
    return DASH if count is None else f"{count:,}"


def range_text(low: float, high: float) -> str:
    """A range of sizes, or one size."""
    return size_text(low) if low == high else f"{size_text(low)} to {size_text(high)}"
