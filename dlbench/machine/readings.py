"""A source made of calls: each probed once, ended when it fails, and never called again after that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.machine.source import Field


class ReadingFailedError(Exception):
    """A field cannot be read, now and later.

    Args:
        reason: one line.
        ends: all fields whose names begin so end with it, such as `gpu.1.` when that GPU is lost.
    """

    def __init__(self, reason: str, ends: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.ends = ends


Values = Sequence["float | ReadingFailedError"]

_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, OSError)
"""What a library raises or answers where a driver says what it did not expect: one field fails, not all."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One call that yields the values of one or several fields of the same tier."""

    fields: tuple[Field, ...]
    call: Callable[[], Values]
    """One value for each field; an error in place of a value ends that field, a raised `ReadingFailedError` all.

    So does any other error that a library may raise, and an answer that is no number.
    """
    keep_up_s: float = math.inf
    """How often it must be called, seconds, so that it does not miss that its source started again at zero."""

    def values(self) -> list[float | ReadingFailedError]:
        """One for each field; nothing is raised."""
        try:
            found = self.call()
            if len(found) != len(self.fields):
                raise ValueError(f"{len(found)} values instead of {len(self.fields)}")
            return [value if isinstance(value, ReadingFailedError) else _number(value) for value in found]
        except ReadingFailedError as error:
            return [error] * len(self.fields)
        except _UNEXPECTED as error:
            return [_unexpected(error)] * len(self.fields)


def _number(value: object) -> float | ReadingFailedError:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever a library answered
    except _UNEXPECTED as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> ReadingFailedError:
    failed = ReadingFailedError(" ".join(f"{type(error).__name__}: {error}".split())[:200])
    failed.__cause__ = error
    return failed


@dataclass(kw_only=True)
class _Slot:
    reading: Reading
    places: list[tuple[int, int]]
    """Of each field that lives: its place among the call's values, and among the source's."""


class Readings:
    """The `Source` of these readings.

    Args:
        wanted: what to read; each is called once, here, to see whether it answers.
        unavailable: what is known to be missing, with the reason.
        facts: what `describe` tells.
        close: called once at the end.
    """

    def __init__(
        self,
        wanted: Iterable[Reading],
        unavailable: Mapping[str, str] | None = None,
        facts: Mapping[str, str] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.unavailable = dict(unavailable or {})
        self._facts = dict(facts or {})
        self._close = close
        self._failed: list[tuple[str, str]] = []
        self._ended: dict[str, str] = {}
        readings = list(wanted)
        for reading in readings:
            self._probe(reading)
        self.unavailable |= self._failed
        self._failed = []
        for prefix, reason in self._ended.items():
            names = (field.name for reading in readings for field in reading.fields)
            self.unavailable |= {name: reason for name in names if name.startswith(prefix)}
        self.fields: tuple[Field, ...] = tuple(
            field for reading in readings for field in reading.fields if field.name not in self.unavailable
        )
        place = {field.name: number for number, field in enumerate(self.fields)}
        self._tiers: tuple[list[_Slot], list[_Slot]] = ([], [])
        for reading in readings:
            places = [(n, place[field.name]) for n, field in enumerate(reading.fields) if field.name in place]
            if places:
                self._tiers[reading.fields[0].is_slow].append(_Slot(reading=reading, places=places))

    def _probe(self, reading: Reading) -> None:
        for prefix, reason in self._ended.items():
            if reading.fields[0].name.startswith(prefix):
                self._failed += [(field.name, reason) for field in reading.fields]
                return
        for field, value in zip(reading.fields, reading.values(), strict=True):
            if isinstance(value, ReadingFailedError):
                self._failed.append((field.name, value.reason))
                if value.ends:
                    self._ended[value.ends] = value.reason

    def read(self, *, slow: bool) -> list[float]:
        values = [math.nan] * len(self.fields)
        # What is dear comes last, so that the others are read at one time, close to the sample's own.
        for tier in self._tiers if slow else self._tiers[:1]:
            for slot in tier:
                if slot.places:
                    self._read_slot(slot, values)
        return values

    @property
    def keep_up_s(self) -> float:
        return min((slot.reading.keep_up_s for tier in self._tiers for slot in tier if slot.places), default=math.inf)

    def keep_up(self) -> None:
        for tier in self._tiers:
            for slot in tier:
                if slot.places and slot.reading.keep_up_s < math.inf:
                    self._read_slot(slot, [math.nan] * len(self.fields))

    def _read_slot(self, slot: _Slot, values: list[float]) -> None:
        found = slot.reading.values()
        for number, place in tuple(slot.places):
            value = found[number]
            if (number, place) not in slot.places:
                continue  # it ended with its device, an entry before
            if not isinstance(value, ReadingFailedError):
                values[place] = value
            else:
                slot.places.remove((number, place))
                self._failed.append((self.fields[place].name, value.reason))
                if value.ends:
                    self._end(value.ends, value.reason)

    def _end(self, prefix: str, reason: str) -> None:
        for tier in self._tiers:
            for slot in tier:
                over = [pair for pair in slot.places if self.fields[pair[1]].name.startswith(prefix)]
                self._failed += [(self.fields[place].name, reason) for _, place in over]
                slot.places = [pair for pair in slot.places if pair not in over]

    def drain_failures(self) -> list[tuple[str, str]]:
        failed, self._failed = self._failed, []
        return failed

    def describe(self) -> dict[str, str]:
        return dict(self._facts)

    def close(self) -> None:
        for tier in self._tiers:
            tier.clear()
        if self._close is not None:
            close, self._close = self._close, None
            close()


class Rising:
    """A counter that goes on where its source falls.

    Args:
        wraps_at: the source starts again at zero after this value; None: a fall means that somebody reset it, and what
            was counted between the last reading and the reset is lost.
    """

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


def read_line(path: Path) -> str:
    """A small file of one line, such as those of sysfs.

    Raises:
        ReadingFailedError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ReadingFailedError(f"{path}: {error.strerror or error}") from error


def number_in(text: str, where: Path) -> int:
    """A whole number of at most 64 bits, not below zero.

    Raises:
        ReadingFailedError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ReadingFailedError(f"{where}: {text[:40]!r} is not a whole number")
    return int(text)


def read_number(path: Path) -> int:
    """The number in a file.

    Raises:
        ReadingFailedError: it cannot be read, or holds something else.
    """
    return number_in(read_line(path), path)
