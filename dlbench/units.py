"""Formats and parses numbers with units; elsewhere bytes are integers, times seconds (float) or nanoseconds (int)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from dlbench.final_status import wall_time

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

BYTES_SHOWN = {unit: 1024.0**-power for power, unit in enumerate(_BINARY)}  # With their factors for bytes.
SECONDS_SHOWN = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}  # Printed units of seconds, with the factor for seconds.
CLOCK_FROM_S = 60.0  # Seconds from which a duration is printed in minutes and seconds, or hours and minutes.

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in binary units, e.g. ``128 MiB``."""
    return " ".join(bytes_parts(num_bytes))


def bytes_parts(num_bytes: float) -> tuple[str, str]:
    """Returns number and unit of `format_bytes`."""
    value = float(num_bytes)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.4g}", unit
        value /= 1024
    return f"{value:.4g}", _BINARY[-1]


def bytes_option(num_bytes: int) -> str:
    """Formats a size for `parse_bytes`, e.g. ``412MiB``, rounded up by at most one percent."""
    for unit in reversed(_BINARY[1:5]):
        factor = _FACTORS[unit.lower()]
        if num_bytes >= 100 * factor:
            return f"{-(-num_bytes // factor)}{unit}"
    return str(num_bytes)


def exact_bytes(num_bytes: int) -> str:
    """Formats a size for `parse_bytes` without rounding, e.g. ``64MiB``, ``20MB`` or ``1025``."""
    texts = []
    for unit in (*_BINARY[1:5], "kB", "MB", "GB", "TB"):
        count, remainder = divmod(num_bytes, _FACTORS[unit.lower()])
        if count and not remainder:
            texts.append(f"{count}{unit}")
    return min((*texts, str(num_bytes)), key=len)


def parse_bytes(text: str) -> int:
    """Parses text such as ``64MiB``, ``64M`` (binary) or ``64MB`` (decimal) to bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a number of bytes such as 67108864, 64MiB or 64MB")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def format_seconds(seconds: float) -> str:
    """Formats a duration with a suitable unit, e.g. ``12.3 ms`` or ``4 min 05 s``."""
    return " ".join(part for part in seconds_parts(seconds) if part)


def seconds_parts(seconds: float) -> tuple[str, str]:
    """Returns number and unit of `format_seconds`; no unit for texts with two, such as ``4 min 05 s``."""
    if not math.isfinite(seconds):
        return "unknown", ""
    magnitude = abs(seconds)
    if magnitude >= CLOCK_FROM_S:
        return clock_text(seconds, magnitude), ""
    for unit, factor in SECONDS_SHOWN.items():
        # 0.9995 ms is what three digits round to 1000 µs.
        if magnitude * factor >= 0.9995 or unit == "ns":
            return f"{seconds * factor:.3g}", unit
    raise AssertionError("unreachable")


def clock_text(seconds: float, largest: float) -> str:
    """Formats a duration as ``4 min 05 s``, or ``1 h 08 min`` if the largest number next to it has hours."""
    sign = "-" if round(seconds) < 0 else ""
    if round(largest) >= 3600:
        hours, minutes = divmod(round(abs(seconds) / 60), 60)
        return f"{sign}{hours} h {minutes:02d} min"
    minutes, remainder = divmod(round(abs(seconds)), 60)
    return f"{sign}{minutes} min {remainder:02d} s"


def parse_seconds(text: str) -> float:
    """Parses text such as ``6.6min``, ``90s`` or ``2h`` to seconds."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _SECONDS or float(match[1]) == 0:
        raise ValueError(
            f"{text[:80]!r} is not a duration above zero with its unit ({', '.join(_SECONDS)}), e.g. 6.6min"
        )
    return float(match[1]) * _SECONDS[match[2]]


def printable(text: str) -> str:
    """Returns the text with a space in place of each character that cannot be printed, such as a line break."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def utf8_text(text: str) -> str:
    """Returns a text of the operating system for UTF-8 files, with invalid bytes as ``\\xff``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        pass
    else:
        return text
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # not from the operating system
        raw = text.encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")


def utc_now() -> str:
    """Returns the time now (`wall_time`) as ISO 8601 in UTC with microseconds; such texts sort by time."""
    return utc_text(datetime.fromtimestamp(wall_time(), UTC))


def utc_text(moment: datetime) -> str:
    """Returns a moment in UTC in the format of `utc_now`."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_between(earlier: str, later: str) -> float:
    """Returns the seconds from one moment to another, both UTC in ISO 8601; at least 0."""
    return max(0.0, (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds())


def whole_seconds(moment: str) -> str:
    """Returns a time of ISO 8601 in UTC without its fraction of a second."""
    return re.sub(r"\.\d+(?=Z$)", "", moment)


def format_number(value: float, digits: int = 4) -> str:
    """Formats a number with a fixed number of significant digits and thousands separators."""
    if not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def first_of(texts: Sequence[str], limit: int, joint: str = ", ") -> str:
    """Returns the first texts and how many more there are: ``a, b and 3 more``, or ``a; b; and 3 more``."""
    text = joint.join(texts[:limit])
    if len(texts) <= limit:
        return text
    return f"{text}{joint.rstrip().replace(',', '')} and {len(texts) - limit} more"


def and_text(texts: Sequence[str]) -> str:
    """Returns texts joined for a sentence: ``a``, ``a and b``, ``a, b and c``."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def plural(noun: str, count: float) -> str:
    """Returns the noun, with an ``s`` unless the count is 1: ``rank``, ``ranks``."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns a count and its noun: ``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {plural(noun, count)}"
