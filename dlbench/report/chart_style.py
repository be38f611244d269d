"""Colours, sizes and the Vega-Lite configuration of all charts. Colours are Okabe and Ito's, for colour-blind readers;
the style sheet maps ink, grid and muted text to its own in the dark scheme.
"""

from __future__ import annotations

from typing import Any

INK = "#1f2328"
MUTED = "#57606a"
GRID = "#d8dee4"
MEASURED = "#0b67b2"
IDEAL = "#8a8f98"
FORECAST = "#b0431e"  # What a law says and nobody measured: always dotted and hollow as well.
PUBLISHED = "#6b5bb5"  # What others published of the same work.
TONE_COLOURS = {"good": "#009e73", "bad": "#d55e00"}  # By the tones of `dlbench.stats.verdict`.

PART_COLOURS = {
    "input": "#e69f00",
    "h2d": "#f0e442",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exchange": "#d55e00",
    "optimizer": "#009e73",
    "other": "#9aa0a6",
    "imbalance": "#cc79a7",
}

RANK_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Of rank counts, ascending.

NARROW = 300  # Plot width of a scaling chart, pixels; with its axis it fits a third of the page, or a telephone.
WIDE = 430  # Plot width of a chart of parts, pixels.
HEIGHT = 200
SUBTITLE_PIXELS = 6.5  # Width of a character of the subtitle, roughly.

FONT = "Arial, Liberation Sans, Helvetica, sans-serif"  # Of one width nearly everywhere.

CONFIG: dict[str, Any] = {
    # The figure around a chart is one image with its finding in words; labels of single marks would drown it.
    "aria": False,
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "gridColor": GRID,
        "domainColor": MUTED,
        "tickColor": MUTED,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {"labelColor": MUTED, "labelFontSize": 12, "titleColor": MUTED, "labelLimit": 260, "columnPadding": 36},
    "title": {
        "color": INK,
        "fontSize": 14,
        "anchor": "start",
        "subtitleColor": MUTED,
        "subtitleFontSize": 11,
        "offset": 10,
    },
}


def si_label(unit: str) -> str:
    """The labels of an axis as a Vega expression: numbers with SI prefixes at the unit, e.g. ``-800 ms``, ``0 s``."""
    return f"replace(format(datum.value, '~s'), regexp('([a-zA-Zµ]?)$'), ' $1{unit}')"
