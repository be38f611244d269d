"""Warnings about figures, which every report prints next to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["serious", "note"]


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A warning about a figure."""

    code: str  # Stable short name, for programs.
    severity: Severity  # serious: the figure may mislead; note: the reader must know it.
    text: str
    runs: tuple[str, ...] = ()  # Runs that it concerns; empty if it concerns a whole comparison.


def merged(doubts: Iterable[Doubt]) -> list[Doubt]:
    """Merges warnings of equal code and text, with the runs of all, in the order of first appearance."""
    by_text: dict[tuple[str, str], Doubt] = {}
    for doubt in doubts:
        earlier = by_text.get((doubt.code, doubt.text))
        if earlier is not None:
            doubt = replace(earlier, runs=(*earlier.runs, *doubt.runs))
        by_text[doubt.code, doubt.text] = doubt
    return list(by_text.values())
