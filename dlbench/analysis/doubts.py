"""Reasons to doubt a figure: every report prints them next to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["serious", "note"]


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """One reason for doubt."""

    code: str  # Stable short name, for programs.
    severity: Severity  # serious: the figure may mislead; note: the reader must know it.
    text: str
    runs: tuple[str, ...] = ()  # Runs it concerns; empty where it concerns the comparison as a whole.


def merged(found: Iterable[Doubt]) -> list[Doubt]:
    """Equal codes and texts once, with the runs of all of them; in the order in which they first come."""
    first: dict[tuple[str, str], Doubt] = {}
    for doubt in found:
        before = first.get((doubt.code, doubt.text))
        first[doubt.code, doubt.text] = replace(before, runs=(*before.runs, *doubt.runs)) if before else doubt
    return list(first.values())
