"""The report's plain data on the machine while it trained: telemetry, energy, data path, memory; see `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the samplers of the nodes saw."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of the runs."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """Where samples come from and how long the ranks wait for them."""

    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of ranks, and what limits the batch."""

    notes: tuple[str, ...]
