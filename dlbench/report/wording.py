"""Texts for figures and clean foreign text, the same in every format."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import (
    BYTES_SHOWN,
    CLOCK_FROM_S,
    SECONDS_SHOWN,
    bytes_parts,
    clock_text,
    counted,
    format_number,
    plural,
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

_FACTORS = {"%": 100.0, POINTS: 100.0, **SECONDS_SHOWN, **BYTES_SHOWN}  # Factors by printed unit.
_MOST_DIGITS = 5  # Significant digits that are printed at most; runs that differ by less are called equal.


def clean(text: str, limit: int = 2000) -> str:
    """Returns foreign text on one line, without control or bidirectional characters, of limited length."""
    one_line = harmless(text)
    if len(one_line) <= limit:
        return one_line
    return one_line[:limit] + " [cut]"


def cleaned(value: Any) -> Any:
    """Returns a value with all texts in it clean; everything else is left as it is."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(cleaned, value))
    return value


def harmless(text: str) -> str:
    """Returns a text on one line without control or bidirectional characters and lone surrogates."""
    if text.isprintable():
        return text
    letters = []
    for letter in text:
        if letter in "\t\n\r\v\f\x85\u2028\u2029":
            letters.append(" ")
        elif unicodedata.category(letter) not in _DROPPED:
            letters.append(letter)
    return "".join(letters)


def short_data(data: str) -> str:
    """Returns a data source without most of its path: ``real: /long/path/demo/text`` -> ``real data demo/text``."""
    kind, _, path = data.partition(": ")
    if not path:
        return f"{data} data"
    return f"{kind} data {'/'.join(path.split('/')[-2:])}"


def percent(fraction: float, decimals: int = 1) -> str:
    """Returns a fraction as text, e.g. ``83.1 %``."""
    return _joined(_hundredths(fraction, "%", decimals))


def points(fraction: float) -> str:
    """Returns a share of efficiency as text, e.g. ``17.2 points``."""
    return number_text(fraction, POINTS)


def lost_value(figure: Estimate) -> str:
    """Returns a lost share without its interval, e.g. ``12.3 points``."""
    return value_text(figure.in_unit(POINTS))


def lost_text(figure: Estimate) -> str:
    """Returns a lost share with its interval, e.g. ``12.3 points [11.0, 13.9]``."""
    return figure_text(figure.in_unit(POINTS))


def _hundredths(fraction: float, unit: str, decimals: int = 1) -> tuple[str, str]:
    if not math.isfinite(fraction):
        return "n/a", ""
    return _fixed(fraction * 100, decimals), unit


def _fixed(value: float, decimals: int) -> str:
    # Adding zero turns the -0.0 that rounding leaves into 0.0.
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"


def _joined(parts: tuple[str, str]) -> str:
    return " ".join(filter(None, parts))


def _number_parts(value: float, unit: str) -> tuple[str, str]:
    """Returns a number in the form that suits its unit, and the unit unless table headers name it."""
    if unit == "fraction":
        return _hundredths(value, "%")
    if unit == POINTS:
        return _hundredths(value, POINTS)
    if unit == "s":
        if not value:
            return "0", "s"
        return seconds_parts(value)
    if unit == "bytes":
        return bytes_parts(value)
    if unit in ("samples", "count"):
        return f"{value:,.0f}", ""
    if unit == "messages":
        return f"{value:,.4g}", ""
    if unit in ("GB/s", "epochs"):
        return format_number(value, 3), ""
    return format_number(value), ""


def number_text(value: float, unit: str) -> str:
    """Returns a number in the form that suits its unit, without the names of rates."""
    return _joined(_number_parts(value, unit))


def estimate_parts(figure: Estimate, decimals: int | None = None) -> tuple[str, str, str]:
    """Returns value, interval and unit of an estimate as text, the same in every format. The half width of the interval
    has two significant digits if these are at most 35, else one (the rule of the Particle Data Group, "Review of
    Particle Physics", introduction, section 5.3; of a ratio its lower end if that is less); without an interval, or if
    its ends are equal in these digits, the unit decides. The interval is ``[low, high]`` if it has a level, ``(low to
    high)`` for a range; `decimals` are those of a factor without an interval.
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
    unit = ""
    if figure.unit == "s" and largest >= CLOCK_FROM_S:
        # If the interval alone has hours, these would hide the value's minutes.
        is_own_scale = abs(value) < 3600 <= half
        scale = None if is_own_scale else largest
        texts = [clock_text(seconds, scale or abs(seconds)) for seconds in (value, low, high)]
    else:
        if decimals is None:
            _, unit = _number_parts(largest, figure.unit)
        factor = _FACTORS.get(unit, 1.0)
        places = 0
        if figure.unit not in ("samples", "count"):
            places = _decimals(half * factor, _scale(figure) * factor)
        texts = [_fixed(number * factor, places) for number in (value, low, high)]
    value_digits, low_digits, high_digits = texts
    if figure.kind in ("range", "within-run"):
        return value_digits, f"({low_digits} to {high_digits})", unit
    return value_digits, f"[{low_digits}, {high_digits}]", unit


def _decimals(half: float, scale: float) -> int:
    exponent = math.floor(math.log10(half))
    decimals = -exponent
    if half / 10.0**exponent < 3.55:
        decimals += 1
    return max(0, min(decimals, _MOST_DIGITS - 1 - math.floor(math.log10(scale))))


def _scale(figure: Estimate) -> float:
    """Returns the largest number of a figure; at least 1 for shares, which may be nearly nothing of a whole."""
    numbers = [abs(number) for number in (figure.value, figure.low, figure.high) if number is not None]
    if figure.unit in ("fraction", POINTS, "ratio"):
        numbers.append(1.0)
    return max(numbers)


def is_point(figure: Estimate) -> bool:
    """Returns whether all runs gave equal values, to all digits that are printed, so that there is no interval."""
    if figure.low is None or figure.high is None:
        return False
    scale = _scale(figure)
    if scale == 0:
        return True
    last_place = math.floor(math.log10(scale)) + 1 - _MOST_DIGITS
    if figure.unit != "bytes":
        # Whole numbers are printed whole, however long; bytes in larger units.
        last_place = min(0, last_place)
    return figure.high - figure.low < 10.0**last_place


def value_text(figure: Estimate) -> str:
    """Returns the value without its interval, e.g. ``83.1 %``, ``120 ms``, ``24.31``."""
    number, _, unit = estimate_parts(figure)
    return _joined((number, unit))


def interval_text(figure: Estimate) -> str:
    """Returns the interval, in the unit of the value, e.g. ``[81.9, 84.2]``; a range as ``(81.9 to 84.2)``."""
    return estimate_parts(figure)[1]


def basis_text(figure: Estimate, unit: str = "run") -> str:
    """Returns the kind of the interval and how many runs (or nights, as `unit` says) it is made of."""
    count = counted(figure.n, unit)
    sessions = figure.sessions or 1
    if sessions > 1 and figure.n > sessions:
        count = f"{sessions} sessions of {count}"
    elif sessions > 1:
        count = f"{sessions} sessions"
    if is_point(figure):
        return f"{count}, all equal"
    level = level_text(figure.level)
    text = {
        "range": ", ".join(filter(None, (f"range of {count}", level))),
        "single run": f"single {unit}, no interval",
        "by definition": f"baseline by definition, {count}",
        "within-run": "within-run: middle half of the iterations of a single run",
        "fit": f"{level} interval of the fit",
    }.get(figure.kind, f"{level} {figure.kind}, {count}")
    text += within_text(figure)
    if figure.unpaired:
        text += f", {figure.unpaired} without a partner left out"
    return text


def within_text(figure: Estimate) -> str:
    """Returns the limit of an interval over runs of one session, e.g. ``, within one session``; empty if none."""
    if figure.sessions != 1 or figure.low is None:
        return ""
    if figure.is_across_sessions:
        return ", one session per side: differences between sessions are not included"
    return ", within one session"


def level_text(level: float | None) -> str:
    """Returns the confidence level of an interval, e.g. ``95 %``, ``93.8 %``; empty for None."""
    return "" if level is None else f"{round(level * 100, 1):g} %"


def figure_text(figure: Estimate) -> str:
    """Returns value and interval, e.g. ``83.1 % [81.9, 84.2]``."""
    return f"{value_text(figure)} {interval_text(figure)}".rstrip()


def slow_link_text(later: Estimate) -> str:
    """Returns how a host with a slow link is recognised, and what remains unknown."""
    return (
        f"its exchanges end {figure_text(later)} of a step later than the other hosts', which its own work does not "
        "explain (its own link, or that of the host it receives from)"
    )


def span_text(first: object, last: object) -> str:
    """Returns a range, e.g. ``1 to 4``; of two equal ends one."""
    return str(first) if first == last else f"{first} to {last}"


def runs_text(count: int) -> str:
    """Returns ``1 run``, ``5 runs``."""
    return f"{count} {plural('run', count)}"


def sessions_text(count: int) -> str:
    """Returns ``1 session``, ``5 sessions``."""
    return f"{count} {plural('session', count)}"


def units_text(figure: Estimate) -> str:
    """Returns the sample of a figure's interval: ``5 runs``, or ``2 sessions`` if runs of several are pooled."""
    if (figure.sessions or 1) > 1:
        return sessions_text(figure.units)
    return runs_text(figure.n)


def repeat_text(figure: Estimate, num_wanted: int = MIN_RUNS) -> str:
    """Returns a phrase that says how to get `num_wanted` runs, or sessions if runs of several are pooled."""
    if (figure.sessions or 1) > 1:
        num_further = max(1, num_wanted - figure.units)
        return f"repeat in {num_further} more {plural('session', num_further)} (other days, or other Slurm jobs)"
    return f"repeat with --repeats {num_wanted}"


def sentence(text: str) -> str:
    """Returns a phrase with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def ranks_text(ranks: int) -> str:
    """Returns ``1 rank``, ``2,048 ranks``."""
    return counted(ranks, "rank")


def place_text(ranks: int, nodes: int) -> str:
    """Returns ``4 ranks on 2 nodes``; a single node is not named."""
    if nodes == 1:
        return ranks_text(ranks)
    return f"{ranks_text(ranks)} on {nodes} nodes"


def times_text(figure: Estimate) -> str:
    """Returns a factor with its interval, e.g. ``1.80x [1.75, 1.86]``."""
    number, interval, _ = estimate_parts(figure, 2)
    return f"{number}x {interval}".rstrip()


def times_value(factor: Estimate) -> str:
    """Returns a factor without its interval, e.g. ``1.80x``."""
    return f"{estimate_parts(factor, 2)[0]}x"


def reached_text(reached: int, runs: int) -> str:
    """Returns ``3 of 5 runs``."""
    return f"{reached} of {runs_text(runs)}"


def optional_figure(figure: Estimate | None) -> str:
    """Returns a figure as text; a dash for None."""
    return DASH if figure is None else figure_text(figure)


def optional(value: float | None, unit: str) -> str:
    """Returns a number as text; a dash for None."""
    return DASH if value is None else number_text(value, unit)
