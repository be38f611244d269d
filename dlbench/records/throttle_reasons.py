"""NVML's clocks event reasons (formerly throttle reasons): why a GPU's clock is below its maximum (nvml.h,
`nvmlClocksEventReasons`). Samples have the mask as an 8-byte float, exact up to 2^53; NVML uses eleven bits.
"""

from __future__ import annotations

from dataclasses import dataclass

IDLE_BIT = 0x1  # The GPU is idle: such a sample does not show the clock under load.


@dataclass(frozen=True, kw_only=True)
class ClockReason:
    """One bit of the mask."""

    bit: int  # The bit's value: 1, 2, 4, ...
    name: str  # NVML's name in lower case.
    is_throttling: bool  # Caused by power, heat or a fault; other reasons are settings, or idleness.
    about: str  # The cause, in a few words.


CLOCK_REASONS = (  # All bits that NVML documents, lowest first.
    ClockReason(bit=IDLE_BIT, name="gpu_idle", is_throttling=False, about="nothing runs"),
    ClockReason(bit=0x2, name="applications_clocks_setting", is_throttling=False, about="clocks set by a user"),
    ClockReason(bit=0x4, name="sw_power_cap", is_throttling=True, about="the power limit"),
    ClockReason(
        bit=0x8, name="hw_slowdown", is_throttling=True, about="hardware halves the clock: heat or power supply"
    ),
    ClockReason(bit=0x10, name="sync_boost", is_throttling=False, about="clocks synchronized with other GPUs"),
    ClockReason(bit=0x20, name="sw_thermal_slowdown", is_throttling=True, about="too hot, the driver slows down"),
    ClockReason(bit=0x40, name="hw_thermal_slowdown", is_throttling=True, about="too hot, hardware halves the clock"),
    ClockReason(
        bit=0x80, name="hw_power_brake_slowdown", is_throttling=True, about="the power supply requests less power"
    ),
    ClockReason(bit=0x100, name="display_clock_setting", is_throttling=False, about="the clock of a display"),
    ClockReason(bit=0x200, name="board_limit", is_throttling=False, about="a limit of the board"),
    ClockReason(bit=0x400, name="reliability", is_throttling=False, about="the highest voltage that is safe"),
)

THROTTLING_MASK = sum(reason.bit for reason in CLOCK_REASONS if reason.is_throttling)
"""The bits of all throttling reasons."""


def clock_reason_names(mask: int) -> tuple[str, ...]:
    """Returns the names of the bits that are set, lowest first; unknown ones are `bit_0x...`."""
    names = {reason.bit: reason.name for reason in CLOCK_REASONS}
    bits = (1 << number for number in range(mask.bit_length()))
    return tuple(names.get(bit, f"bit_0x{bit:x}") for bit in bits if mask & bit)


def throttling_names(mask: int) -> tuple[str, ...]:
    """Returns the names of the throttling reasons of a mask, lowest bit first."""
    return clock_reason_names(mask & THROTTLING_MASK)
