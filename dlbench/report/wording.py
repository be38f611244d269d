"""Figures and foreign text become words: the same ones in every format."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import (
    BYTES_SHOWN,
    CLOCK_FROM_S,
    SECONDS_SHOWN,
    bytes_parts,
    clock_text,
    format_number,
    seconds_parts,
)

DASH = "–"
POINTS = "points"  # Unit of a share that is lost: percentage points of scaling efficiency.
PART_TITLES = {
    "input": "waiting for input",
    "h2d": "copy to the device",
    "forward": "forward",
    "backward": "backward",
    "exchange": "gradient exchange after backward",
    "optimizer": "optimizer",
    "other": "host (between phases)",
    "imbalance": "imbalance between ranks",
}


_DROPPED = {"Cc", "Cf", "Cs"}

_FACTORS = {"%": 100.0, POINTS: 100.0, **SECONDS_SHOWN, **BYTES_SHOWN}
"""What a number in an `Estimate`'s unit is multiplied by where it is printed in this one."""
_MOST_DIGITS = 5  # Significant digits that are printed at most; runs that differ by less are called equal.

INTERVALS = (
    f"With {MIN_RUNS} runs or more, a median lies between two of the ordered runs, at a level of 95 % or the next "
    "above (order statistics; five runs: their range, 93.8 %). Means and ratios have a 95 % interval by Student's t "
    "(ratios on logarithms; without pairs Welch's). It holds in 91 to 97 % of cases where a machine has two states, "
    "and for a mean in 87 to 92 % where noise only ever slows runs; a slow state so rare that no run met it is in no "
    "interval. Intervals of one session (one Slurm job, or runs of one day and one start of the machine) hold within "
    "it, for runs that drift no further than they scatter: how far sessions differ is in none of them. Where a "
    "figure names sessions, its interval is made of these, likewise from 5 on."
)
"""How intervals over runs are made, for the methods of every document."""


def clean(text: str, limit: int = 2000) -> str:
    """Foreign text on one line: no control or bidirectional characters, no lone surrogates, not endless."""
    kept = harmless(text)
    return kept if len(kept) <= limit else kept[:limit] + " [cut]"


def cleaned(value: Any) -> Any:
    """The same with all text in it clean; a tuple stays one, and everything else as it is."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return tuple(map(cleaned, value)) if isinstance(value, tuple) else value


def harmless(text: str) -> str:
    """Text on one line without control or bidirectional characters and without lone surrogates, however long.

    Documents clean what enters them (`clean`); formats ask once more for all that they write, so that a text which came
    in another way cannot move a terminal's cursor or turn the order of a line round.
    """
    if text.isprintable():
        return text
    spaced = "".join(" " if c in "\t\n\r\v\f\x85\u2028\u2029" else c for c in text)
    return "".join(c for c in spaced if unicodedata.category(c) not in _DROPPED)


def short_data(data: str) -> str:
    """What data ran, without most of its path: ``real: /long/path/demo/text`` -> ``real data demo/text``."""
    kind, _, path = data.partition(": ")
    return f"{kind} data {'/'.join(path.split('/')[-2:])}" if path else f"{data} data"


def percent(fraction: float, decimals: int = 1) -> str:
    """A fraction as text, e.g. ``83.1 %``."""
    return _joined(_hundredths(fraction, "%", decimals))


def points(fraction: float) -> str:
    """A share of efficiency as text, e.g. ``17.2 points``."""
    return number_text(fraction, POINTS)


def lost_value(figure: Estimate) -> str:
    """A lost share without its interval, e.g. ``12.3 points``."""
    return value_text(figure.in_unit(POINTS))


def lost_text(figure: Estimate) -> str:
    """A lost share with its interval, e.g. ``12.3 points [11.0, 13.9]``."""
    return figure_text(figure.in_unit(POINTS))


def _hundredths(fraction: float, unit: str, decimals: int = 1) -> tuple[str, str]:
    if not math.isfinite(fraction):
        return "n/a", ""
    return _fixed(fraction * 100, decimals), unit


def _fixed(value: float, decimals: int) -> str:
    # Adding zero turns the -0.0 that rounding leaves into 0.0.
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"


def _joined(parts: tuple[str, str]) -> str:
    return " ".join(part for part in parts if part)


def _number_parts(value: float, unit: str) -> tuple[str, str]:
    """The number in the form that suits its unit, and the unit if it is printed: those of rates stand in headers."""
    if unit in ("fraction", POINTS):
        return _hundredths(value, "%" if unit == "fraction" else POINTS)
    if unit == "s":
        return seconds_parts(value) if value else ("0", "s")
    if unit == "bytes":
        return bytes_parts(value)
    if unit in ("samples", "count"):
        return f"{value:,.0f}", ""
    if unit == "messages":
        return f"{value:,.4g}", ""
    return format_number(value, 3 if unit in ("GB/s", "epochs") else 4), ""


def number_text(value: float, unit: str) -> str:
    """One number in the form that suits its unit, without the names of rates."""
    return _joined(_number_parts(value, unit))


def shown(figure: Estimate, decimals: int | None = None) -> tuple[str, str, str]:
    """Value, interval and unit of an estimate as text, in every format the same.

    The digits follow the interval: its half width has two significant digits where these are at most 35, else one (the
    rule of the Particle Data Group, "Review of Particle Physics", introduction, section 5.3; of a ratio its lower end
    where that is less), but at least all before the decimal point and at most `_MOST_DIGITS`; value and ends stop at
    that decimal place, and have one unit. Without an interval, and where its ends do not differ in these digits, a
    number has the digits of its unit.
    `decimals` are those of a factor, where the interval does not say; None: those of its unit. The interval is ``[low,
    high]`` where it has a level, ``(low to high)`` for a mere range, empty for none; the unit empty where headers name
    it.
    """
    value, low, high = figure.value, figure.low, figure.high
    if low is None or high is None or is_point(figure) or not all(map(math.isfinite, (value, low, high))):
        if decimals is not None:
            return _fixed(value, decimals), "", ""
        number, unit = _number_parts(value, figure.unit)
        return number, "", unit
    half = (high - low) / 2
    if figure.unit == "ratio" and half > low > 0:
        half = low  # A ratio's end is never 0.
    largest = max(abs(value), half)
    if figure.unit == "s" and largest >= CLOCK_FROM_S:
        # Where the interval alone has hours, these would hide the value's minutes.
        texts = [clock_text(one, abs(one) if abs(value) < 3600 <= half else largest) for one in (value, low, high)]
        unit = ""
    else:
        unit = "" if decimals is not None else _number_parts(largest, figure.unit)[1]
        factor = _FACTORS.get(unit, 1.0)
        places = 0 if figure.unit in ("samples", "count") else _decimals(half * factor, _scale(figure) * factor)
        texts = [_fixed(one * factor, places) for one in (value, low, high)]
    first, last = texts[1:]
    is_range = figure.kind in ("range", "within-run")
    return texts[0], f"({first} to {last})" if is_range else f"[{first}, {last}]", unit


def _decimals(half: float, scale: float) -> int:
    exponent = math.floor(math.log10(half))
    wanted = (1 if half / 10.0**exponent < 3.55 else 0) - exponent
    return max(0, min(wanted, _MOST_DIGITS - 1 - math.floor(math.log10(scale))))


def _scale(figure: Estimate) -> float:
    """The largest number of a figure; 1 for shares, which may be nearly nothing of a whole."""
    ends = (abs(one) for one in (figure.value, figure.low, figure.high) if one is not None)
    return max(*ends, 1.0 if figure.unit in ("fraction", POINTS, "ratio") else 0.0)


def is_point(figure: Estimate) -> bool:
    """Whether the interval is none: its runs gave equal values, to all digits that are printed."""
    if figure.low is None or figure.high is None:
        return False
    scale = _scale(figure)
    if scale == 0:
        return True
    last = math.floor(math.log10(scale)) + 1 - _MOST_DIGITS
    # Whole numbers are printed whole, however long; bytes in larger units.
    return figure.high - figure.low < 10.0 ** (last if figure.unit == "bytes" else min(0, last))


def value_text(figure: Estimate) -> str:
    """The value alone, e.g. ``83.1 %``, ``120 ms``, ``24.31``."""
    number, _, unit = shown(figure)
    return _joined((number, unit))


def interval_text(figure: Estimate) -> str:
    """The interval alone, in the unit of the value, e.g. ``[81.9, 84.2]``; a range as ``(81.9 to 84.2)``."""
    return shown(figure)[1]


def basis_text(figure: Estimate, unit: str = "run") -> str:
    """What the interval is and how many runs (or nights, as `unit` says) stand behind it."""
    count = f"{figure.n} {unit}{'' if figure.n == 1 else 's'}"
    if (figure.sessions or 1) > 1:
        count = f"{figure.sessions} sessions{f' of {count}' * (figure.n > (figure.sessions or 0))}"
    if is_point(figure):
        return f"{count}, all equal"
    level = level_text(figure.level)
    text = {
        "range": f"range of {count}{level and f', {level}'}",
        "single run": f"single {unit}, no interval",
        "by definition": f"baseline by definition, {count}",
        "within-run": "within-run: middle half of the iterations of a single run",
        "fit": f"{level} interval of the fit",
    }.get(figure.kind, f"{level} {figure.kind}, {count}")
    text += within_text(figure)
    return f"{text}, {figure.unpaired} without a partner left out" if figure.unpaired else text


def within_text(figure: Estimate) -> str:
    """What an interval over the runs of one session leaves out, e.g. ``, within one session``; empty where nothing."""
    if figure.sessions != 1 or figure.low is None:
        return ""
    if figure.is_across_sessions:
        return ", one session a side: how far sessions differ is not in it"
    return ", within one session"


def level_text(level: float | None) -> str:
    """The confidence of an interval, e.g. ``95 %``, ``93.8 %``; empty if there is none."""
    return "" if level is None else f"{round(level * 100, 1):g} %"


def figure_text(figure: Estimate) -> str:
    """Value and interval, e.g. ``83.1 % [81.9, 84.2]``."""
    return f"{value_text(figure)} {interval_text(figure)}".rstrip()


def slow_link_text(later: Estimate) -> str:
    """How a host at a slow link is recognised, with what is not known of it."""
    return (
        f"its exchanges end {figure_text(later)} of a step later than the other hosts', which its own work does not "
        "explain (its own link, or that of the host it receives from)"
    )


def counts_text(counts: Sequence[int]) -> str:
    """Ascending counts as one or a range, e.g. ``3`` or ``1 to 4``."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def runs_text(count: int) -> str:
    """``1 run``, ``5 runs``."""
    return f"{count} run" if count == 1 else f"{count} runs"


def sessions_text(count: int) -> str:
    """``1 session``, ``5 sessions``."""
    return f"{count} session{'' if count == 1 else 's'}"


def units_text(figure: Estimate) -> str:
    """What a figure's interval is made of: ``5 runs``, or ``2 sessions`` where runs of several are pooled."""
    return sessions_text(figure.units) if (figure.sessions or 1) > 1 else runs_text(figure.n)


def repeat_text(figure: Estimate, wanted: int = MIN_RUNS) -> str:
    """What makes an interval of N runs, or sessions where runs of several are pooled, as a phrase."""
    if (figure.sessions or 1) > 1:
        more = max(1, wanted - figure.units)
        return f"repeat in {more} more session{'s' * (more > 1)} (other days, or other Slurm jobs)"
    return f"repeat with --repeats {wanted}"


def sentence(text: str) -> str:
    """A phrase with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def ranks_text(ranks: int) -> str:
    """``1 rank``, ``2,048 ranks``."""
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"


def place_text(ranks: int, nodes: int) -> str:
    """``4 ranks on 2 nodes``; one node is not worth words."""
    return ranks_text(ranks) if nodes == 1 else f"{ranks_text(ranks)} on {nodes} nodes"


def times_text(figure: Estimate) -> str:
    """A factor with its interval, e.g. ``1.80x [1.75, 1.86]``."""
    number, ends, _ = shown(figure, 2)
    return f"{number}x {ends}".rstrip()


def times_value(factor: Estimate) -> str:
    """A factor without its interval, e.g. ``1.80x``."""
    return f"{shown(factor, 2)[0]}x"


def reached_text(reached: int, runs: int) -> str:
    """``3 of 5 runs``."""
    return f"{reached} of {runs_text(runs)}"


def optional_figure(figure: Estimate | None) -> str:
    """A figure that may be missing; a dash where it is."""
    return DASH if figure is None else figure_text(figure)


def optional(value: float | None, unit: str) -> str:
    """A number that may be missing; a dash where it is."""
    return DASH if value is None else number_text(value, unit)
