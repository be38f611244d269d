"""A measured figure: one line for people, one object for `build/bench/<area>.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlbench.stats.estimates import median_estimate

FOLDER = Path(__file__).resolve().parents[2] / "build" / "bench"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure with its interval and its goal."""

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    n: int = 1
    goal: str
    met: bool | None = None
    reason: str = ""
    """Why it could not be measured, or what it says beside its value."""

    def line(self) -> str:
        """`name: value unit (goal ...)`."""
        if self.value is None:
            return f"{self.name}: not measured here: {self.reason} (goal {self.goal})"
        interval = f" [{self.low:.4g}, {self.high:.4g}], n={self.n}" if self.low is not None else ""
        verdict = {True: "met", False: "NOT met", None: "no verdict"}[self.met]
        note = f"; {self.reason}" if self.reason else ""
        return f"{self.name}: {self.value:.4g}{interval} {self.unit} (goal {self.goal}: {verdict}{note})"


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its interval by order statistics at 95 % or the next level above (five values: the range, 93.75 %)."""
    found = median_estimate(values)
    if found.low is None or found.high is None:
        return found.value, found.value, found.value
    return found.value, found.low, found.high


def save(area: str, figures: Sequence[Figure]) -> Path:
    """Writes `build/bench/<area>.json`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{area}.json"
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n", encoding="utf-8")
    return path
