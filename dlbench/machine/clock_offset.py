"""How far a clock stands from another, from messages there and back; and a bound on the error that holds always.

Cristian, Probabilistic Clock Synchronization, Distributed Computing 3, 1989; four time stamps as in RFC 5905, section
8. The request leaves at t0 (own clock), comes at t1 (the other's); the answer leaves at t2 (the other's), comes at t3
(own). Neither message goes back in time, so the other clock less the own lies between t2 - t3 and t1 - t0, however
unlike the two ways are. The middle is the estimate, half the width its bound, and the exchange with the shortest
round trip the best of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRIFT_PPM = 500
"""How much faster or slower than another a clock may run, millionths: MAXFREQ, RFC 5905, appendix A.1.1.

The clock moves on while a message travels. Allowing for it adds a thousandth to the bound, and makes it hold.
"""

WIDE = 10  # A point whose bound is this many times the narrowest one makes the line worse, not better.


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One message there and back; nanoseconds of two clocks."""

    sent_ns: int  # t0, own clock.
    received_ns: int  # t1, the other's clock.
    answered_ns: int  # t2, the other's clock.
    returned_ns: int  # t3, own clock.

    def __post_init__(self) -> None:
        if self.returned_ns < self.sent_ns or self.answered_ns < self.received_ns or self.bound_ns < 0:
            raise ValueError(f"no possible exchange: {self}; a clock was set while messages were under way")

    @property
    def offset_ns(self) -> int:
        """The other clock less the own: ((t1 - t0) + (t2 - t3)) / 2."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2

    @property
    def bound_ns(self) -> int:
        """Returns the largest error of `offset_ns`: half the round trip, drift meanwhile, and 1 for whole numbers."""
        passed_ns = self.returned_ns - self.sent_ns
        round_trip_ns = passed_ns - (self.answered_ns - self.received_ns)  # without the other side's work
        return _rounded_up(round_trip_ns, 2) + _rounded_up(passed_ns * MAX_DRIFT_PPM, 1_000_000) + 1


@dataclass(frozen=True, kw_only=True)
class OffsetEstimate:
    """How far the other clock was ahead at one moment."""

    local_ns: int  # When, by the own clock.
    offset_ns: int  # The other clock less the own.
    bound_ns: int  # Largest possible error.
    num_exchanges: int  # Exchanges it was chosen from.


def estimate(exchanges: Sequence[Exchange]) -> OffsetEstimate:
    """The estimate of the exchange with the narrowest bound, which is the one with the shortest round trip."""
    if not exchanges:
        raise ValueError("no exchange to estimate an offset from")
    best = min(exchanges, key=lambda exchange: exchange.bound_ns)
    return OffsetEstimate(
        local_ns=(best.sent_ns + best.returned_ns) // 2,
        offset_ns=best.offset_ns,
        bound_ns=best.bound_ns,
        num_exchanges=len(exchanges),
    )


def worth_keeping(estimates: Sequence[OffsetEstimate]) -> tuple[OffsetEstimate, ...]:
    """Returns the first, the last, and those between that a busy network did not make much wider than the narrowest."""
    if len(estimates) < 3:
        return tuple(estimates)
    limit = WIDE * min(one.bound_ns for one in estimates)
    return (estimates[0], *(one for one in estimates[1:-1] if one.bound_ns <= limit), estimates[-1])


def every_second(estimates: Sequence[OffsetEstimate]) -> list[OffsetEstimate]:
    """Half of them, the first and the last among those kept."""
    kept = list(estimates[::2])
    if len(estimates) % 2 == 0:
        kept.extend(estimates[-1:])
    return kept


def _rounded_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
