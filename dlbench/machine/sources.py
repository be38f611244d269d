"""What is sampled while a node trains: a source made of calls, each probed once, and never called again once it failed.

Read-only: nothing is set, reset or written. What answers when the source is opened is in `fields`; what does not is in
`unavailable` with the reason, and is never read as zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["<f4", "<f8"]
FLOAT: Kind = "<f4"  # For gauges: keeps seven digits.
DOUBLE: Kind = "<f8"  # For counters, bytes and bit masks: keeps whole numbers up to 2^53.

Values = Sequence["float | ReadingFailedError"]

_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, OSError, NotImplementedError)
"""What a library raises or answers where a driver or the kernel says what it did not expect."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One number that can be read again and again."""

    name: str  # It says the unit: `gpu.0.power_w`; letters, digits and `_.:-` alone.
    kind: Kind = FLOAT
    is_slow: bool = False  # Whether it belongs to the slow tier: expensive to read, or changing seldom.


class ReadingFailedError(Exception):
    """A field cannot be read, now and later; with it end all whose names begin with `ends`, e.g. `gpu.1.`."""

    def __init__(self, reason: str, ends: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.ends = ends


def guarded(call: Callable[[], T]) -> T:
    """What a call answers."""
    try:
        return call()
    except _UNEXPECTED as error:
        raise ReadingFailedError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One call that yields the values of one or several fields of the same tier."""

    fields: tuple[Field, ...]
    call: Callable[[], Values]
    """One value for each field; an error in place of a value ends that field, a raised one all."""
    keep_up_s: float = math.inf
    """How often it must be called, seconds, so that it does not miss that its source started again at zero."""

    def values(self) -> list[float | ReadingFailedError]:
        """Returns one for each field, whatever a library raised or answered; nothing is raised."""

        def number(value: Any) -> float | ReadingFailedError:
            try:
                return value if isinstance(value, ReadingFailedError) else guarded(lambda: float(value))
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
    """The fields of these readings, sampled together; each is called once, here, to see whether it answers.

    `unavailable`: what is known to be missing, by field or group (`gpu`), and why. `facts`: what `describe` returns.
    `close`: called once at the end.
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
        every = [field for reading in self._readings for field in reading.fields]
        self.fields: tuple[Field, ...] = tuple(field for field in every if field.name not in self._ended)
        self._places = {field.name: place for place, field in enumerate(self.fields)}

    def _lives(self, reading: Reading) -> bool:
        return any(field.name not in self._ended for field in reading.fields)

    def _values(self, reading: Reading) -> dict[str, float]:
        """Values of the fields that live, by name; notes what fails, and all that ends with it."""
        values = {}
        for field, value in zip(reading.fields, reading.values(), strict=True):
            if field.name in self._ended:
                continue
            if not isinstance(value, ReadingFailedError):
                values[field.name] = value
                continue
            every = [other.name for reading in self._readings for other in reading.fields]
            beside = [name for name in every if value.ends and name.startswith(value.ends) and name != field.name]
            for name in (field.name, *(name for name in beside if name not in self._ended)):
                self._ended.add(name)
                self._failed.append((name, value.reason))
        return values

    def joined(self, other: Source) -> Source:
        """Both as one, the fields of `other` last; neither is probed again, nor used by itself any more."""
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
        """One value for each field, in their order; NaN where it was not read this time, or failed."""
        values = [math.nan] * len(self.fields)
        # Expensive reads last, so that the others are read at one time, close to the sample's own.
        for tier in (False, True) if slow else (False,):
            for reading in self._readings:
                if reading.fields[0].is_slow == tier and self._lives(reading):
                    for name, value in self._values(reading).items():
                        values[self._places[name]] = value
        return values

    @property
    def keep_up_s(self) -> float:
        """How often `read` or `keep_up` must be called, seconds, for counters that start again at zero; or infinity."""
        return min((reading.keep_up_s for reading in self._readings if self._lives(reading)), default=math.inf)

    def keep_up(self) -> None:
        """Reads what else would miss such a start, and keeps it to itself; nothing else is read."""
        for reading in self._readings:
            if reading.keep_up_s < math.inf and self._lives(reading):
                self._values(reading)

    def drain_failures(self) -> list[tuple[str, str]]:
        """Field and reason of what failed since the last call. Each field fails once: it is NaN from then on."""
        failed, self._failed = self._failed, []
        return failed

    def describe(self) -> dict[str, str]:
        """What does not change while sampling."""
        return dict(self._facts)

    def close(self) -> None:
        """Nothing can be read afterwards."""
        self._readings = []
        if self._close is not None:
            close, self._close = self._close, None
            close()


class MonotonicCounter:
    """A counter that goes on where its source falls: by a wrap after `wraps_at`, or (None) because it was reset."""

    def __init__(self, wraps_at: int | None = None) -> None:
        self._wraps_at = wraps_at
        self._base = 0
        self._last = 0

    def at(self, value: int) -> int:
        """The counter, given what its source says now; it never falls."""
        if value < self._last:
            self._base += self._last if self._wraps_at is None else self._wraps_at
        self._last = value
        return self._base + value


def read_text(path: Path) -> str:
    """A file of the kernel, such as those of sysfs, whatever its encoding."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReadingFailedError(f"{path}: {error.strerror or error}") from error


def read_line(path: Path) -> str:
    """The same, of one line."""
    return read_text(path).strip()


def number_in(text: str, where: Path) -> int:
    """A whole number of at most 64 bits, not below zero. Raises `ReadingFailedError`: it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ReadingFailedError(f"{where}: {text[:40]!r} is not a whole number")
    return int(text)


def read_number(path: Path) -> int:
    """The number in a file. Raises `ReadingFailedError`: it cannot be read, or holds something else."""
    return number_in(read_line(path), path)


def keyed_number(path: Path, key: str) -> int | None:
    """The number after `key` in a file of lines `key number`; None without such a line."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return number_in(value.strip(), path)
    return None


def field_parts(names: list[str]) -> dict[str, str]:
    """Returns each name from outside as up to 64 letters, digits and `_.:-`; equal ones get a number."""
    parts: dict[str, str] = {}
    for name in names:
        part = plain = re.sub(r"[^A-Za-z0-9_.:-]", "_", name[:64]) or "_"
        number = 2
        while part in parts.values():
            part, number = f"{plain}_{number}", number + 1
        parts[name] = part
    return parts


def fact(text: object, limit: int = 200) -> str:
    """A text from outside as a fact: one line, nothing unprintable, bounded."""
    return "".join(letter if letter.isprintable() else "_" for letter in str(text)[:limit])
