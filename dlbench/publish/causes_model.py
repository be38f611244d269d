"""The report's plain data on where the lost percent goes; see `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CauseAccount:
    """Efficiency lost by cause at every rank count, and who was waited for."""

    notes: tuple[str, ...]
