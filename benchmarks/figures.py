"""A measured figure: one line for people, one object for `build/bench/<area>.json`."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import psutil

from dlbench.machine.arithmetic import has_gpu, native_precisions
from dlbench.stats.estimates import median_estimate

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench"

NO_GOAL = ("measured", "told", "none", "side by side", "see the false alarms")
"""What a figure without a goal has for one."""


class Interval(NamedTuple):
    """A median and the ends of its interval."""

    value: float
    low: float
    high: float


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

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        *,
        name: str,
        unit: str,
        goal: str,
        met: Callable[[Interval], bool | None] | bool | None = None,
        reason: str = "",
    ) -> Figure:
        """The median of values, by `median_interval`. `met`: whether it meets the goal, or what says that of it; None:
        there is no verdict.
        """
        found = median_interval(values)
        verdict = met(found) if callable(met) else met
        return cls(name=name, **found._asdict(), unit=unit, n=len(values), goal=goal, met=verdict, reason=reason)

    def line(self) -> str:
        """`name: value unit (goal ...)`."""
        if self.value is None:
            return f"{self.name}: {self.reached()} (goal {self.goal})"
        note = f"; {self.reason}" if self.reason else ""
        return f"{self.name}: {self.reached()} (goal {self.goal}: {self.verdict()}{note})"

    def reached(self) -> str:
        """The value with its interval and unit, or why there is none."""
        if self.value is None:
            return f"not measured here: {self.reason}"
        interval = f" [{self.low:.4g}, {self.high:.4g}]" if self.low is not None else ""
        return f"{self.value:.4g}{interval}{f', n={self.n}' if self.n > 1 else ''} {self.unit}"

    def verdict(self) -> str:
        return {True: "met", False: "NOT met", None: "no verdict"}[self.met]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure, and what it was measured on."""

    area: str
    figure: Figure
    date: str
    machine: str
    load: float | None
    """Cores that others kept busy in the second before; None: not known."""
    commit: str
    """Abbreviated commit that was measured; a plus sign follows where files had been changed since."""


def median_interval(values: Sequence[float]) -> Interval:
    """Median and its interval by order statistics at 95 % or the next level above (five values: the range, 93.75 %)."""
    found = median_estimate(values)
    if found.low is None or found.high is None:
        return Interval(found.value, found.value, found.value)
    return Interval(found.value, found.low, found.high)


def timed(*arguments: str) -> tuple[float, float, float]:
    """Seconds of `dlbench ARGUMENTS`, the most memory that it and its children held at one time, bytes, and their CPU
    time.
    """
    with tempfile.TemporaryFile("w+") as told:
        # As installed: bytecode is kept, and compiled in the first round at most.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        start, before = time.monotonic(), os.times()
        command = [sys.executable, "-m", "dlbench", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told, env=environment)
        watched = psutil.Process(process.pid)
        peak = 0
        while process.poll() is None:
            held = 0
            with suppress(psutil.NoSuchProcess):
                for one in [watched, *watched.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        held += one.memory_info().rss
            peak = max(peak, held)
            time.sleep(0.05)
        seconds, after = time.monotonic() - start, os.times()
        if process.returncode != 0:
            told.seek(0)
            raise RuntimeError(f"dlbench {arguments[0]} ended with {process.returncode}: {told.read()[-500:]}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, float(peak), spent


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (JASA 22, 1927)."""
    if of == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share = count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def machine() -> str:
    """Cores, processor, arithmetic and GPU of this machine, in words."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    of = dict(re.findall(r"^(model name|cpu family|model|flags)\s*:\s*(.+)$", text, re.MULTILINE))
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in of.get("flags", "").split()), "no AVX")
    reduced = "".join(f", {name}" for name in sorted(native_precisions() or ()))
    cores = len(os.sched_getaffinity(0))
    kind = f"{of.get('model name', 'unknown processor')}, family {of.get('cpu family')}, model {of.get('model')}"
    return f"{cores} cores of {kind} ({widest}{reduced}), {'a GPU' if has_gpu() else 'no GPU'}"


def commit() -> str:
    """Returns the checked-out commit, abbreviated; with a plus sign where tracked files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def save(area: str, figures: Sequence[Figure], load: float) -> Path:
    """Writes `build/bench/<area>.json`. `load`: cores kept busy by others before the first figure."""
    about = {"area": area, "date": datetime.date.today().isoformat(), "machine": machine(), "load": round(load, 1)}
    about |= {"commit": commit()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{area}.json"
    path.write_text(json.dumps([about | asdict(figure) for figure in figures], indent=2) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> list[Measured]:
    """What `save` wrote."""

    def part(row: Mapping[str, object], of: type) -> dict[str, object]:
        return {key: value for key, value in row.items() if key in of.__dataclass_fields__}  # type: ignore[attr-defined]

    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        Measured(figure=Figure(**part(row, Figure)), **part(row, Measured))  # type: ignore[arg-type]
        for row in rows
    ]
