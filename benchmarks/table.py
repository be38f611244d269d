"""One table of all figures: the goal, what was reached, when, on which machine, and whether the code has changed since.

`build/bench/` has what was measured in this checkout, `docs/figures.json` what is kept in the repository;
`docs/status.md` shows the latter: ``python -m benchmarks keep`` takes figures over and writes the table there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from benchmarks.figures import FOLDER, NO_GOAL, ROOT, Measured, digest, load

KEPT = ROOT / "docs" / "figures.json"
STATUS = ROOT / "docs" / "status.md"
BEGIN, END = "<!-- figures: python -m benchmarks keep -->\n", "<!-- end of figures -->\n"

_TRAINING = ("dlbench/node/training", "dlbench/node/sync", "dlbench/node/models")
_COMM = ("dlbench/node/comm", "dlbench/node/sync", "dlbench/perfmodels", "dlbench/comm")
_DATA = ("dlbench/node/data", "dlbench/datasets")
_MEMORY = ("dlbench/node/memory", "dlbench/node/training", "dlbench/perfmodels/memory")
_READING = ("dlbench/records", "dlbench/analysis", "dlbench/views", "dlbench/report", "dlbench/frames.py")

MEASURED: dict[str, tuple[str, ...]] = {
    "spine": _TRAINING,
    "workloads": (*_TRAINING, "workloads"),
    "communication": _COMM,
    "checkpoint": ("dlbench/node/training",),
    "watching": ("dlbench/node/watching", "dlbench/node/training"),
    "reading": _READING,
    "reader_rate": _DATA,
    "input": _DATA,
    "gate": ("dlbench/gate", "dlbench/stats", "dlbench/analysis"),
    "projection": ("dlbench/projection", "dlbench/perfmodels"),
    "gpu": _TRAINING,
    "history": ("dlbench/history", "dlbench/gate"),
    "shuffling": (*_DATA, "dlbench/node/training"),
    "staging": ("dlbench/node/data/staging.py", "dlbench/node/training/staging.py"),
    "memory": _MEMORY,
    "memory-plan": ("dlbench/perfmodels/memory",),
    "slurm": ("dlbench/jobs", "dlbench/supervisor.py"),
    "truth": ("dlbench/stats", "dlbench/gate", "dlbench/projection"),
    "strategies": _TRAINING,
    "figures": ("dlbench/perfmodels", "dlbench/node/comm", "dlbench/datasets", "dlbench/views/sweep"),
    "wait": ("dlbench/node", "dlbench/jobs", "dlbench/setup"),
    "demo": ("dlbench/setup", "dlbench/node", "dlbench/jobs"),
}
"""The code that an area measures, by the first word of its name, up to a dot or, where that is no key, a dash."""


QUIET = 0.5
"""Cores kept busy by others up to which a machine of two cores counts as quiet."""


def key(area: str) -> str:
    """The key of `MEASURED` that an area or a part of one has."""
    first = area.partition(".")[0]
    return first if first in MEASURED else first.partition("-")[0]


def places(area: str) -> tuple[str, ...]:
    """The code that an area measures. Raises KeyError: `MEASURED` does not tell."""
    return MEASURED[key(area)]


def newest() -> list[Measured]:
    """What is kept, and over it what was measured here later; a figure that could not be measured replaces none."""
    found = {(key(one.area), one.figure.name): one for one in (load(KEPT) if KEPT.exists() else [])}
    for path in sorted(FOLDER.glob("*.json"), key=lambda path: path.stat().st_mtime):
        for one in load(path):
            name = (key(one.area), one.figure.name)
            if name not in found or (one.figure.value is not None and found[name].date <= one.date):
                found[name] = one
    return sorted(found.values(), key=lambda one: (list(MEASURED).index(key(one.area)), one.area))


def keep() -> None:
    """Takes what was measured here over into the repository, and writes the table of docs/status.md."""
    rows = newest()
    flat = [{key: value for key, value in asdict(one).items() if key != "figure"} | asdict(one.figure) for one in rows]
    KEPT.write_text("[\n" + ",\n".join(json.dumps(row) for row in flat) + "\n]\n", encoding="utf-8")
    text = STATUS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    STATUS.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def table(rows: Iterable[Measured]) -> str:
    """Markdown: machines by letter, then a row per figure."""
    rows = list(rows)
    machines = list(dict.fromkeys(one.machine for one in rows))
    letters = {machine: chr(ord("A") + k) for k, machine in enumerate(machines)}
    lines = [*summary(rows), ""]
    lines += [f"- Machine {letters[machine]}: {machine}." for machine in machines]
    lines += ["", "| `AREA=` | figure | goal | reached | | date | on |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for one in rows:
        cells = (cell.replace("|", "\\|") for cell in _cells(one, letters[one.machine]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def summary(rows: Iterable[Measured]) -> Iterator[str]:
    """Yields Markdown: how many figures meet their goals, and those that fall short, a line each."""
    judged = [row for row in rows if row.figure.goal not in NO_GOAL and row.figure.value is not None]
    verdicts = Counter(row.figure.verdict() for row in judged)
    counts = ", ".join(f"{count} {word}" for word, count in verdicts.most_common())
    yield f"{len(judged)} figures with a goal: {counts}."
    short = [row for row in judged if row.figure.met is False]
    if short:
        yield ""
        yield "What falls short:"
        yield ""
    for row in short:
        yield f"- {row.area}: {row.figure.name}: {row.figure.reached()} (goal: {row.figure.goal})"


def _cells(one: Measured, letter: str) -> Iterator[str]:
    figure = one.figure
    has_goal = figure.goal not in NO_GOAL
    note = f" ({figure.reason})" if figure.reason and figure.value is not None else ""
    yield from (one.area, figure.name, figure.goal if has_goal else "no goal", figure.reached() + note)
    yield figure.verdict() if has_goal and figure.value is not None else ""
    yield one.date + ", older than the code" * (one.code != digest(places(one.area)))
    yield letter + (f", load {one.load:g}" if one.load is not None and one.load > QUIET else "")
