"""Transitional: tables of ready texts."""

from __future__ import annotations

from dlbench.report.formats.terminal import aligned as aligned

Table = list[tuple[str, ...]]
