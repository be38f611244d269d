"""The report's plain data on runs beside each other: precision, differences, systems; see `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrecisionComparison:
    """Runs that differ in nothing but precision."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A setting or a property of the environment in which runs differ."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """One system that runs of the report ran on."""

    notes: tuple[str, ...]
