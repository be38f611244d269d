"""What was measured, as docs/status.md shows it: a row per area with what met its goal, and a row per figure.

`build/bench/` has what was measured in this checkout, `docs/figures.json` what is kept in the repository:
``python -m benchmarks keep`` takes figures over and writes both parts of docs/status.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from benchmarks.figures import FOLDER, NO_GOAL, ROOT, Measured, load

KEPT = ROOT / "docs" / "figures.json"
STATUS = ROOT / "docs" / "status.md"
MARKS = {
    "summary": ("<!-- summary: python -m benchmarks keep -->\n", "<!-- end of summary -->\n"),
    "figures": ("<!-- figures: python -m benchmarks keep -->\n", "<!-- end of figures -->\n"),
}
"""Lines of docs/status.md between which a generated part stands."""

QUIET_CORES = 0.5
"""Cores kept busy by others up to which a machine of two cores counts as quiet."""


def newest() -> list[Measured]:
    """Returns what is kept, replaced by what was measured here later; an unmeasured figure replaces none."""
    latest = {(_subject(row), row.figure.name): row for row in (load(KEPT) if KEPT.exists() else [])}
    for path in sorted(FOLDER.glob("*.json"), key=lambda path: path.stat().st_mtime):
        for row in load(path):
            name = (_subject(row), row.figure.name)
            is_newer = row.figure.value is not None and name in latest and latest[name].date <= row.date
            if name not in latest or is_newer:
                latest[name] = row
    return sorted(latest.values(), key=lambda row: row.area)


def keep() -> None:
    """Takes what was measured here into docs/figures.json, and writes the generated parts of docs/status.md."""
    rows = newest()
    flat = [{key: value for key, value in asdict(row).items() if key != "figure"} | asdict(row.figure) for row in rows]
    KEPT.write_text("[\n" + ",\n".join(json.dumps(row) for row in flat) + "\n]\n", encoding="utf-8")
    text = STATUS.read_text(encoding="utf-8")
    for name, part in parts(rows).items():
        begin, end = MARKS[name]
        before, _, after = text.partition(begin)
        text = before + begin + "\n" + part + "\n" + end + after.partition(end)[2]
    STATUS.write_text(text, encoding="utf-8")


def parts(rows: Sequence[Measured]) -> dict[str, str]:
    """Returns the generated parts of docs/status.md as Markdown, by the names of `MARKS`."""
    return {"summary": summary(rows), "figures": table(rows)}


def summary(rows: Iterable[Measured]) -> str:
    """Returns a row per area: how many figures met their goals, and the first that did not."""
    by_area: dict[str, list[Measured]] = {}
    for row in rows:
        if _has_verdict(row):
            by_area.setdefault(row.area.partition(".")[0], []).append(row)
    lines = ["| area | met | no verdict | not met | of those not met |", "| --- | --- | --- | --- | --- |"]
    for area, judged in by_area.items():
        counts = Counter(row.figure.verdict() for row in judged)
        short = [row.figure for row in judged if row.figure.met is False]
        example = f"{short[0].name}: {short[0].reached()} (goal: {short[0].goal})" if short else ""
        cells = (area, str(counts["met"]), str(counts["no verdict"]), str(counts["NOT met"]), _escaped(example))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Measured]) -> str:
    """Returns machines by letter, then a row per figure that has a goal and a value."""
    judged = [row for row in rows if _has_verdict(row)]
    machines = list(dict.fromkeys(row.machine for row in judged))
    letters = {machine: chr(ord("A") + number) for number, machine in enumerate(machines)}
    lines = [f"- Machine {letters[machine]}: {machine}." for machine in machines]
    lines += [
        "",
        "| `AREA=` | figure | goal | reached | | date, commit | on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in judged:
        figure = row.figure
        note = f" ({figure.reason})" if figure.reason else ""
        machine = letters[row.machine]
        if row.load is not None and row.load > QUIET_CORES:
            machine += f", load {row.load:g}"
        cells = (
            row.area,
            figure.name,
            figure.goal,
            figure.reached() + note,
            figure.verdict(),
            f"{row.date}, {row.commit}",
            machine,
        )
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    return "\n".join(lines) + "\n"


def _subject(row: Measured) -> str:
    """Returns the area without its part, under which a figure's name is unique."""
    return row.area.partition(".")[0]


def _has_verdict(row: Measured) -> bool:
    return row.figure.goal not in NO_GOAL and row.figure.value is not None


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
