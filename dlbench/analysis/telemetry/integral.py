"""Integrals of irregularly sampled counters and rates over any interval.

Between two neighbouring samples a counter or a rate is interpolated linearly (trapezoidal rule). Time before the first
sample, after the last one, or in a gap is not known: it adds nothing, and is reported as missing. A gap is a piece
longer than five periods. A counter goes on in a gap: its difference is known for the whole piece and for no part of it,
so it counts only in an interval that contains all of the piece. Except for such pieces, the amounts of the parts of an
interval sum to that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dlbench.lazy import Array, Flags, Times, np

MAX_GAP_PERIODS = 5  # Samples further apart than this many of their own periods are not joined.

_NEIGHBOURS = 5


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The integral over an interval."""

    value: float  # Integral over the known part, in the unit of the counter (joules).
    known_ns: int  # Length of the known part, nanoseconds.
    length_ns: int  # Length of the interval, nanoseconds.

    @property
    def coverage(self) -> float:
        """The known share of the interval (1); 1 for an empty interval."""
        return self.known_ns / self.length_ns if self.length_ns else 1.0

    @property
    def rate(self) -> float | None:
        """The mean over the known part, per second (watts); None if nothing is known."""
        return self.value / self.known_ns * 1e9 if self.known_ns else None

    def __add__(self, other: Amount) -> Amount:
        """Adds two intervals that do not overlap, or two sources over the same one."""
        return Amount(
            value=self.value + other.value,
            known_ns=self.known_ns + other.known_ns,
            length_ns=self.length_ns + other.length_ns,
        )


NOTHING = Amount(value=0.0, known_ns=0, length_ns=0)  # An interval of no length.


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A rate over time, linear between neighbouring samples."""

    time_ns: Times  # Times of the samples, increasing; shape (n,).
    begin_rate: Array  # Rate per second at the start of each piece between two samples; shape (max(n - 1, 0),).
    end_rate: Array  # Rate per second at the end of each piece.
    known: Flags  # Whether each piece is known.
    bridged: Flags  # Whether it is known only as a whole: a gap over which a counter went on.
    is_counter: bool = False
    resets: int = 0  # Number of times that the counter fell.

    def over(self, begin_ns: int, end_ns: int) -> Amount:
        """Returns the integral from `begin_ns` to `end_ns`; nothing if the end is before the start."""
        return self.between((begin_ns, max(begin_ns, end_ns)))[0]

    def between(self, edges: Sequence[int]) -> list[Amount]:
        """Returns the integrals between neighbouring `edges`, which increase."""
        at = np.asarray(edges, dtype=np.int64)
        values, known_ns = np.zeros(len(at) - 1), np.zeros(len(at) - 1, dtype=np.int64)
        if len(self.known):
            lengths = np.diff(self.time_ns)
            amounts = (self.begin_rate + self.end_rate) / 2 * (lengths / 1e9)
            divisible = self.known & ~self.bridged
            inside = np.clip(at, self.time_ns[0], self.time_ns[-1])
            piece = np.clip(np.searchsorted(self.time_ns, inside, side="right") - 1, 0, len(lengths) - 1)
            into = np.where(divisible[piece], inside - self.time_ns[piece], 0)
            # The mean of a line is its value in the middle.
            middle = self.begin_rate[piece] + (self.end_rate - self.begin_rate)[piece] * (into / lengths[piece]) / 2
            values = np.diff(_sums_before(np.where(divisible, amounts, 0.0))[piece] + middle * (into / 1e9))
            known_ns = np.diff(_sums_before(np.where(divisible, lengths, 0))[piece] + into)
            # A bridged piece counts only in the interval that contains all of it.
            complete = self.known & self.bridged
            first = np.searchsorted(self.time_ns[:-1], at[:-1])
            last = np.maximum(first, np.searchsorted(self.time_ns[1:], at[1:], side="right"))
            bridged_amounts = _sums_before(np.where(complete, amounts, 0.0))
            bridged_ns = _sums_before(np.where(complete, lengths, 0))
            values += bridged_amounts[last] - bridged_amounts[first]
            known_ns += bridged_ns[last] - bridged_ns[first]
        columns = zip(values.tolist(), known_ns.tolist(), np.diff(at).tolist(), strict=True)
        return [Amount(value=value, known_ns=known_ns, length_ns=length) for value, known_ns, length in columns]

    def known_within(self, begin_ns: int, end_ns: int) -> Flags:
        """Returns the pieces that are known and at least partly in an interval, shape (n - 1,)."""
        start, stop = self.time_ns[:-1], self.time_ns[1:]
        is_whole = (start >= begin_ns) & (stop <= end_ns)
        overlapping: Flags = self.known & (start < end_ns) & (stop > begin_ns) & (is_whole | ~self.bridged)
        return overlapping


def counter_curve(time_ns: Times, values: Array, period_s: float) -> Curve:
    """Returns the curve of a counter with any start value, NaN where it was not read.

    A gap longer than five periods is known only as a whole, because the counter went on. A falling counter was reset (a
    driver was reloaded): that piece is unknown. Both arrays have shape (n,); `period_s`: longest period at which the
    field was read, seconds.
    """
    times, read = _readable(time_ns, values)
    grown = np.diff(read)
    is_known = grown >= 0
    rate = np.where(is_known, grown, 0.0) / np.diff(times) * 1e9
    return Curve(
        time_ns=times,
        begin_rate=rate,
        end_rate=rate,
        known=is_known,
        bridged=~joined(times, period_s),
        is_counter=True,
        resets=int((~is_known).sum()),
    )


def rate_curve(time_ns: Times, values: Array, period_s: float) -> Curve:
    """Returns the curve of a rate such as power, NaN where it was not read; gaps over five periods are unknown.

    The period is that of the neighbouring samples, because a sampler doubles its period when its file is full. Both
    arrays have shape (n,); `period_s`: longest period at which the field was read, seconds.
    """
    times, read = _readable(time_ns, values)
    near = joined(times, period_s)
    return Curve(
        time_ns=times, begin_rate=read[:-1], end_rate=read[1:], known=near, bridged=np.zeros(len(near), dtype=np.bool_)
    )


def _sums_before(pieces: Any) -> Any:
    """Returns the sum of all pieces before each, and of all of them, shape (n + 1,)."""
    return np.concatenate([np.zeros(1, dtype=pieces.dtype), np.cumsum(pieces)])


def joined(times: Times, period_s: float) -> Flags:
    """Returns which neighbouring samples are near enough to be joined, shape (n - 1,).

    The local period is the lower median of up to five gaps on either side, and at most `period_s`.
    """
    # Cached, because mostly all sources of a node were read at the same times.
    return np.frombuffer(_joined(np.ascontiguousarray(times, dtype=np.int64).tobytes(), period_s), dtype=np.bool_)


@lru_cache(maxsize=8)
def _joined(content: bytes, period_s: float) -> bytes:
    gaps = np.diff(np.frombuffer(content, dtype=np.int64))
    if not len(gaps):
        return b""
    windows = np.full((2 * _NEIGHBOURS + 1, len(gaps)), np.nan)
    for row, shift in enumerate(range(-_NEIGHBOURS, _NEIGHBOURS + 1)):
        begin, end = max(0, -shift), min(len(gaps), len(gaps) - shift)
        if begin < end:
            windows[row, begin:end] = gaps[begin + shift : end + shift]
    count = np.isfinite(windows).sum(axis=0)
    windows.sort(axis=0)
    local = windows[(count - 1) // 2, np.arange(len(gaps))]
    near: Flags = gaps <= MAX_GAP_PERIODS * np.minimum(local, period_s * 1e9)
    return near.tobytes()


def _readable(time_ns: Times, values: Array) -> tuple[Times, Array]:
    """Returns the samples with a value, each later than the one before."""
    is_finite = np.isfinite(values)
    times, read = time_ns[is_finite], values[is_finite].astype(np.float64)
    later = np.concatenate([np.ones(min(1, len(times)), dtype=bool), np.diff(times) > 0])
    return times[later], read[later]
