"""Sources of telemetry that are sampled during training; a field that fails once is not read again.

Nothing is set, reset or written. The fields that can be read when a source is opened are in `fields`, the others in
`unavailable` with the reason: a missing value is never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["<f4", "<f8"]
FLOAT: Kind = "<f4"  # For gauges: keeps seven digits.
DOUBLE: Kind = "<f8"  # For counters, bytes and bit masks: keeps whole numbers up to 2^53.

Values = Sequence["float | ReadingFailedError"]

_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, OSError, NotImplementedError)
"""Errors of a library when a driver or the kernel returns something unexpected."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One number that is sampled."""

    name: str  # With the unit: `gpu.0.power_w`; only letters, digits and `_.:-`.
    kind: Kind = FLOAT
    is_slow: bool = False  # Sampled less often, because it is expensive to read or rarely changes.


class ReadingFailedError(Exception):
    """A field cannot be read any more, nor can others whose names begin with `ends`, e.g. `gpu.1.`."""

    def __init__(self, reason: str, ends: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.ends = ends


def guarded(call: Callable[[], T]) -> T:
    """Calls a function; raises `ReadingFailedError` in place of an unexpected error."""
    try:
        return call()
    except _UNEXPECTED as error:
        raise ReadingFailedError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A call that returns the values of one or several fields, which are all slow or all fast."""

    fields: tuple[Field, ...]
    call: Callable[[], Values]
    """Returns a value for each field, or an error that ends this field; if it raises, all its fields end."""
    keep_up_s: float = math.inf
    """Longest time between two calls in seconds, so that no overflow of the counter is missed."""

    def values(self) -> list[float | ReadingFailedError]:
        """Returns a value or an error for each field; raises nothing."""

        def number(value: Any) -> float | ReadingFailedError:
            if isinstance(value, ReadingFailedError):
                return value
            try:
                return guarded(lambda: float(value))
            except ReadingFailedError as error:
                return error

        def numbers() -> list[float | ReadingFailedError]:
            answer = self.call()
            if len(answer) != len(self.fields):
                raise ValueError(f"{len(answer)} values instead of {len(self.fields)}")
            return [number(value) for value in answer]

        try:
            return guarded(numbers)
        except ReadingFailedError as error:
            return [error] * len(self.fields)


class Source:
    """Fields that are sampled together. Each reading is called once here to test it.

    `unavailable`: reasons of missing fields or groups (`gpu`), by name. `facts`: returned by `describe`. `close`:
    called once at the end.
    """

    def __init__(
        self,
        readings: Iterable[Reading],
        unavailable: Mapping[str, str] | None = None,
        facts: Mapping[str, str] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.unavailable = dict(unavailable or {})
        self._facts = dict(facts or {})
        self._close = close
        self._readings = list(readings)
        self._ended: set[str] = set()  # Fields that failed.
        self._failed: list[tuple[str, str]] = []
        for reading in self._readings:
            if self._lives(reading):
                self._values(reading)
        self.unavailable |= self.drain_failures()
        self._set_fields()

    def _set_fields(self) -> None:
        self.fields: tuple[Field, ...] = tuple(field for field in self._all_fields() if field.name not in self._ended)
        self._places = {field.name: place for place, field in enumerate(self.fields)}

    def _all_fields(self) -> Iterator[Field]:
        return chain.from_iterable(reading.fields for reading in self._readings)

    def _lives(self, reading: Reading) -> bool:
        return any(field.name not in self._ended for field in reading.fields)

    def _values(self, reading: Reading) -> dict[str, float]:
        """Returns the values of fields that have not failed, by name; records new failures."""
        values = {}
        for field, value in zip(reading.fields, reading.values(), strict=True):
            if field.name in self._ended:
                continue
            if not isinstance(value, ReadingFailedError):
                values[field.name] = value
                continue
            names = [field.name]
            if value.ends:
                names += [other.name for other in self._all_fields() if other.name.startswith(value.ends)]
            for name in dict.fromkeys(names):
                if name not in self._ended:
                    self._ended.add(name)
                    self._failed.append((name, value.reason))
        return values

    def joined(self, other: Source) -> Source:
        """Returns both sources as one, the fields of `other` last; the two must not be used afterwards."""
        both = Source([], self.unavailable | other.unavailable, self._facts | other._facts)
        both._readings = [*self._readings, *other._readings]
        both._ended = self._ended | other._ended
        both._set_fields()

        def close() -> None:
            self.close()
            other.close()

        both._close = close
        return both

    def read(self, *, slow: bool) -> list[float]:
        """Returns a value for each field, in their order; NaN if it was not read this time, or has failed."""
        values = [math.nan] * len(self.fields)
        # Slow fields last, so that the others are read close to the time of the sample.
        tiers = (False, True) if slow else (False,)
        for tier in tiers:
            for reading in self._readings:
                if reading.fields[0].is_slow == tier and self._lives(reading):
                    for name, value in self._values(reading).items():
                        values[self._places[name]] = value
        return values

    @property
    def keep_up_s(self) -> float:
        """Longest time between two calls of `read` or `keep_up` in seconds, so that no counter overflows unnoticed."""
        return min((reading.keep_up_s for reading in self._readings if self._lives(reading)), default=math.inf)

    def keep_up(self) -> None:
        """Reads the counters that might overflow, and discards the values."""
        for reading in self._readings:
            if reading.keep_up_s < math.inf and self._lives(reading):
                self._values(reading)

    def drain_failures(self) -> list[tuple[str, str]]:
        """Returns the fields that failed since the last call, with reasons. A failed field is NaN from then on."""
        failed, self._failed = self._failed, []
        return failed

    def describe(self) -> dict[str, str]:
        """Returns facts that do not change during sampling."""
        return dict(self._facts)

    def close(self) -> None:
        """Closes the source, which cannot be read afterwards."""
        self._readings = []
        if self._close is not None:
            close, self._close = self._close, None
            close()


class MonotonicCounter:
    """A counter that continues when its source falls: by an overflow after `wraps_at`, or (None) by a reset."""

    def __init__(self, wraps_at: int | None = None) -> None:
        self._wraps_at = wraps_at
        self._base = 0
        self._last = 0

    def at(self, value: int) -> int:
        """Returns the counter for the current value of its source; it never falls."""
        if value < self._last and self._wraps_at is not None:
            self._base += self._wraps_at
        elif value < self._last:
            self._base += self._last
        self._last = value
        return self._base + value


def read_text(path: Path) -> str:
    """Reads a file of the kernel, e.g. of sysfs. Raises `ReadingFailedError`: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReadingFailedError(f"{path}: {error.strerror or error}") from error


def read_line(path: Path) -> str:
    """Reads a file of one line. Raises `ReadingFailedError`: it cannot be read."""
    return read_text(path).strip()


def number_in(text: str, where: Path) -> int:
    """Parses a non-negative integer of at most 64 bits. Raises `ReadingFailedError`: it is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ReadingFailedError(f"{where}: {text[:40]!r} is not a whole number")
    return int(text)


def read_number(path: Path) -> int:
    """Reads a file that contains a number. Raises `ReadingFailedError`: it cannot be read, or has something else."""
    return number_in(read_line(path), path)


def keyed_number(path: Path, key: str) -> int | None:
    """Returns the number after `key` in a file of lines `key number`; None without such a line."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return number_in(value.strip(), path)
    return None


def field_parts(names: list[str]) -> dict[str, str]:
    """Returns for each name a part of a field's name: up to 64 letters, digits and `_.:-`; duplicates get a number."""
    parts: dict[str, str] = {}
    for name in names:
        part = plain = re.sub(r"[^A-Za-z0-9_.:-]", "_", name[:64]) or "_"
        number = 2
        while part in parts.values():
            part, number = f"{plain}_{number}", number + 1
        parts[name] = part
    return parts


def fact(text: object, limit: int = 200) -> str:
    """Returns a text from outside as one line of printable characters, at most `limit` long."""
    return "".join(letter if letter.isprintable() else "_" for letter in str(text)[:limit])
