"""The report's plain data on laws, published anchors and forecasts; none of them is measured; see `model`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Fits of scaling laws, published figures for the same work, and forecasts."""

    notes: tuple[str, ...]
