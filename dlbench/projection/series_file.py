"""Reads a table of runs (`dlbench project points FILE`) as `Ingredients`: separated by tabs, semicolons or commas."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dlbench.errors import UserError
from dlbench.opening import read_named, why_unreadable
from dlbench.projection.ingredients import Ingredients, RunFigures
from dlbench.records.folder import MAX_JSON
from dlbench.specs.base import MAX_RANKS
from dlbench.specs.problems import problem_of

COUNTS = ("ranks", "nodes", "batch_per_rank")
_COUNT = re.compile(r"[1-9]\d{0,6}(\.0+)?|[1-9]\d{0,2}(,\d{3}){1,2}", re.ASCII)  # 8, 8.0 or 1,024
# 0.12, 1.2e-1 or 14,919.9; a comma alone is refused, as it may be a decimal point.
_FIGURE = re.compile(r"\+?(\d+\.?\d*|\.\d+|\d{1,3}(,\d{3})+\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def read_points(path: Path, scaling: Literal["weak", "strong"]) -> Ingredients:
    """Returns the series of a file."""
    rows, left_out = _rows(path)
    points: dict[int, dict[str, int]] = {}
    runs: dict[int, dict[str, RunFigures]] = {}
    for where, row in rows:
        counts = {name: _count(where, name, row[name]) for name in COUNTS if name in row}
        ranks = counts["ranks"]
        point, steps = points.setdefault(ranks, counts), runs.setdefault(ranks, {})
        for name, count in counts.items():
            if count != point[name]:
                raise UserError(f"{where}: {name} {count:,}: earlier rows have {point[name]:,} at {ranks:,} ranks")
        if row["run"] in steps:
            raise UserError(f"{where}: run {row['run']!r}: appears twice at {ranks:,} ranks; give one row for each run")
        steps[row["run"]] = _run(where, row, counts)
    batches = {point.get("batch_per_rank", 0) for point in points.values()}
    if scaling == "strong":
        batches = {point.get("batch_per_rank", 0) * ranks for ranks, point in points.items()}
    if len(batches) > 1:
        raise UserError(
            f"{path}: batch_per_rank differs between rank counts, which is not weak scaling; with --scaling strong "
            "ranks x batch_per_rank must be equal"
        )
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (f"Columns that were left out: {', '.join(left_out)}.",)
    content = {
        "title": path.name,
        "source": str(path),
        "scaling": scaling,
        "points": [{**points[ranks], "runs": tuple(runs[ranks].values())} for ranks in sorted(points)],
        "notes": notes,
    }
    try:
        return Ingredients.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: nodes: {problem_of(Ingredients, error)}") from None


def _count(where: str, name: str, text: str) -> int:
    if _COUNT.fullmatch(text):
        count = int(text.partition(".")[0].replace(",", ""))
        if 1 <= count <= MAX_RANKS:
            return count
    raise UserError(f"{where}: {name} {text!r}: must be a whole number from 1 to {MAX_RANKS:,}")


def _rows(path: Path) -> tuple[list[tuple[str, Mapping[str, str]]], list[str]]:
    """Returns the rows by column, each with its file and line, and the columns that are left out."""
    try:
        text = read_named(path, MAX_JSON).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a table: {why_unreadable(error)}") from None
    table = list(_cells(path, text.splitlines()))
    if len(table) < 2:
        raise UserError(f"{path}: contains no runs; give a line with the names of columns and a line for each run")
    (first, header), *data = table
    used = _used(first, header)
    for where, cells in data:
        if len(cells) != len(header):
            raise UserError(
                f"{where}: has {len(cells)} values, but the header has {len(header)} columns; put a value with a "
                "comma in double quotes"
            )
    left_out = [name or "a column without a name" for name in header if name not in used]
    rows: list[tuple[str, Mapping[str, str]]] = []
    for where, cells in data:
        row = dict(zip(header, cells, strict=True))
        rows.append((where, {name: row[name] for name in used}))
    return rows, left_out


def _cells(path: Path, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    data_lines = ["" if line.lstrip().startswith("#") else line for line in lines]
    header = next((line for line in data_lines if line.strip()), "")
    delimiter = next((mark for mark in "\t;" if mark in header), ",")
    reader = csv.reader(data_lines, delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield f"{path}: line {reader.line_num}", [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}") from None


def _used(where: str, header: list[str]) -> list[str]:
    used = ["ranks", "nodes", "run", "step_s"]
    if "samples_per_s" in header and "step_s" not in header:
        used[-1:] = ["samples_per_s", "batch_per_rank"]
    elif "batch_per_rank" in header:
        used.append("batch_per_rank")
    wrong = [name for name in used if header.count(name) != 1]
    if wrong:
        raise UserError(
            f"{where}: columns {', '.join(map(repr, header))}: {', '.join(wrong)} must appear once; instead of "
            "step_s samples_per_s with batch_per_rank is possible (step_s = ranks x batch_per_rank / samples_per_s)"
        )
    return used


def _run(where: str, row: Mapping[str, str], counts: Mapping[str, int]) -> RunFigures:
    name = "step_s" if "step_s" in row else "samples_per_s"
    text = row[name]
    value = float(text.replace(",", "")) if _FIGURE.fullmatch(text) else 0.0
    if not value:
        raise UserError(f"{where}: {name} {text!r}: must be a number above 0, with a decimal point")
    step_s = value
    if name == "samples_per_s":
        step_s = counts["ranks"] * counts["batch_per_rank"] / value
    try:
        return RunFigures(run_id=row["run"], step_s=step_s)
    except ValidationError as error:
        raise UserError(f"{where}: {name} {text!r}: {problem_of(RunFigures, error)}") from None
