"""Reads the output of nccl-tests (text or JSON) and of OSU's micro-benchmarks as series of times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlbench.errors import UserError
from dlbench.opening import parse_json, read_named, why_unreadable
from dlbench.specs.base import MAX_COUNT
from dlbench.specs.comm import ALGORITHMS

MAX_BYTES = 1 << 24  # Limit for a file: the tables have some hundred lines.
ROUNDED = 0.02  # Share by which a printed rate may differ from size over time: rates have three digits.
IN_PLACE, OUT_OF_PLACE = "in place", "out of place"

KINDS = {name.replace("-", ""): name for name in ALGORITHMS} | {
    "alltoallpersonalizedexchange": "all-to-all",
    "reducescatterblock": "reduce-scatter",
    "latency": "latency",
    "bandwidth": "bandwidth",
}
"""Measured quantities by the letters of a program's name (nccl-tests) or title (OSU)."""
KIND_NAMES = ", ".join(dict.fromkeys(KINDS.values()))

PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
DEVICE = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s)?.*\bon\s+(\S+)\s+device")
TITLE = re.compile(r"OSU ([A-Za-z]+)(_\w+)?(?:-\S+)? (.+?) Test(?: (v\S+))?$")
HEAD = re.compile(r"(.*?)#\s*(?:nccl-tests version|Collective test starting|nThread|Using devices|size\s+count|OSU )")
"""The first lines that the programs print; text before them on the line is a launcher's prefix."""
ROW = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\b")  # The first cells of a row of nccl-tests: bytes, elements, type.
NAME = re.compile(r"[a-z]\w*")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)|N/A")
FIGURES = ("time", "algbw", "busbw")
COLUMNS = ("size", "count", "type", "redop", "root", *(*FIGURES, "#wrong") * 2)  # In JSON.
TORN = "other text interrupts the row (NCCL_DEBUG_FILE moves NCCL's messages to a file), or the file is cut off"
CPU_TIME = "is the time of the host's calls (nccl-tests -C 1), not of the collective; run nccl-tests without -C 1"


@dataclass(kw_only=True, eq=False)
class OutputSeries:
    """The times of one type, operation, root and side in a table."""

    path: Path
    line: int  # Line of the table's header; 0 in JSON.
    carrier: str  # nccl or mpi.
    title: str
    measures: str  # A collective, latency or bandwidth; empty if the output does not say.
    ranks: int | None = None
    nodes: int | None = None
    dtype: str = ""  # Name in the file; empty if it has none.
    op: str = ""
    root: str = ""
    side: str = ""  # Empty for OSU, whose programs have one side.
    is_checked: bool = True  # Whether the program checked its results.
    seconds: dict[int, list[float]] = field(default_factory=dict)  # Times of all cycles, by size in bytes.
    bus: float | None = None  # busbw / algbw of the last row that shows it.

    @property
    def where(self) -> str:
        if not self.line:
            return str(self.path)
        return f"{self.path}: line {self.line}"

    @property
    def cycles(self) -> int:
        return max(map(len, self.seconds.values()))

    def add(self, size: int, seconds: float) -> None:
        if not 0 <= size <= MAX_COUNT:
            raise ValueError(f"{size!s:.24} B: a size must be from 0 to {MAX_COUNT}")
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{size} B, {seconds * 1e6:g}: times must be above 0")
        if size > 0:
            self.seconds.setdefault(size, []).append(seconds)


class OutputTable:
    """A table while its rows are read."""

    def __init__(self, head: OutputSeries, columns: Sequence[str] = ()) -> None:
        self.head = head
        self.columns = columns
        self.series: dict[tuple[str, ...], OutputSeries] = {}

    @property
    def has_figures(self) -> bool:
        return any(series.seconds for series in self.series.values())

    def of(self, dtype: str, op: str = "", root: str = "", side: str = "") -> OutputSeries:
        """Returns the series of this type, operation, root and side, a new one if the table has none yet."""
        new = replace(self.head, dtype=dtype, op=op, root=root, side=side, seconds={})
        return self.series.setdefault((dtype, op, root, side), new)


class NcclTable(OutputTable):
    """A table of nccl-tests. Rows that other text interrupts are joined if the number of cells fits."""

    cells: tuple[str, ...] = ()  # Cells of the row that is not complete yet.

    def take(self, line: str) -> None:
        words = line.split()
        if ROW.match(line):
            self.require_whole_row()
        elif not self.cells or not ("NCCL" in line or all(map(NUMBER.fullmatch, words))):
            return
        before = len(self.cells)
        for column, word in zip(self.columns[before:], words, strict=False):
            form = NAME if column in ("type", "redop") else NUMBER
            if column == "timestamp" or not form.fullmatch(word):
                break
            self.cells += (word,)
        if len(self.cells) == len(self.columns) - self.columns.count("timestamp"):
            if any(map(NUMBER.fullmatch, words[len(self.cells) - before :])):
                raise ValueError(f"a row has more cells than the {len(self.columns)} columns: {TORN}")
            self.add_row(self.cells)
            self.cells = ()

    def require_whole_row(self) -> None:
        if self.cells:
            raise ValueError(
                f"{len(self.cells)} of {len(self.columns)} columns in the row of {self.cells[0]} B: {TORN}"
            )

    def add_row(self, cells: Sequence[Any]) -> None:
        starts = [index for index, name in enumerate(self.columns) if name == "time"]
        row = dict(zip(self.columns[: starts[0]], cells, strict=False))
        size = int(row["size"])
        for side, start in zip((OUT_OF_PLACE, IN_PLACE), starts, strict=True):
            figures = dict(zip(self.columns[start : start + 4], cells[start:], strict=False))
            # Old versions print the largest difference (error) instead of a count.
            wrong = figures.get("#wrong", 0)
            is_checked = wrong not in ("N/A", None) and figures.get("error") != "N/A"
            if is_checked and float(wrong):
                raise ValueError(f"nccl-tests counted {float(wrong):g} wrong values at {size} B, {side} (#wrong)")
            time, algbw, busbw = (float(str(figures[name]).replace("N/A", "nan")) for name in FIGURES)
            series = self.of(row["type"], row.get("redop", ""), row.get("root", ""), side)
            series.is_checked = is_checked
            series.add(size, time * 1e-6)
            if abs(algbw - size / time * 1e-3) > max(ROUNDED * algbw, 0.006):
                raise ValueError(f"{size} B in {time:g} us are not {algbw:g} GB/s: time must be in us, algbw in GB/s")
            if algbw >= 1:
                series.bus = busbw / algbw


class OsuTable(OutputTable):
    """A table of OSU's micro-benchmarks. It has no last line, so lines that are not rows are skipped."""

    dtype = ""
    last_size: int | None = None

    def take(self, line: str, *, is_cut: bool) -> None:
        words = line.split()
        if not self.columns or not words or not words[0].isdecimal():
            return
        size = int(words[0][:20])
        is_row = all(NUMBER.fullmatch(word) or word in ("Pass", "Fail") for word in words)
        if not is_row or len(words) < len(self.columns):
            # Sizes are doubled from row to row.
            if (is_row and is_cut) or (self.last_size and size == 2 * self.last_size):
                raise ValueError(f"{len(words)} of {len(self.columns)} columns: {TORN}")
            return
        if "Fail" in words:
            raise ValueError(f"OSU's validation failed at {size} B (Fail)")
        if self.last_size is not None and size <= self.last_size:
            raise ValueError(f"{size} B after {self.last_size} B: not a row of this table, whose sizes grow")
        self.last_size = size
        value = float(words[1])
        if self.head.measures == "bandwidth" and value:
            value = max(size, 1) / value
        self.of(self.dtype).add(size, value * 1e-6)

    def set_columns(self, text: str, line: int) -> None:
        if any(series.dtype == self.dtype for series in self.series.values()):
            raise ValueError("a second table without a title; give all that each program printed")
        unit = "MB/s" if self.head.measures == "bandwidth" else "us"
        self.columns, self.last_size = re.split(r"\s{2,}|\t", text), None
        self.head.line = line
        if f"({unit})" not in "".join(self.columns[1:2]):
            raise ValueError(f"{text!r}: the second column must be in {unit}")


class OutputReader:
    """A reader of the lines of an output."""

    def __init__(self, path: Path) -> None:
        self.series: list[OutputSeries] = []
        self.left_out: list[str] = []  # Programs that give no costs, each with its line.
        self.line = 0
        self._path = path
        self._prefix: re.Pattern[str] | None = None  # A launcher's in each line: ``[1,0]<stdout>:`` or ``0: ``.
        self._program = ""
        self._hosts: dict[str, str] = {}  # Host by rank, of nccl-tests.
        self._groups: set[str | None] = set()
        self._table: NcclTable | OsuTable | None = None

    def take(self, line: str, *, is_cut: bool) -> None:
        """Reads the next line. `is_cut`: the file ends within it. Raises `ValueError`: the line is not valid here."""
        self.line += 1
        line = self._without_prefix(line)
        text = line.strip().lstrip("#").strip()
        words = text.split()
        program = PROGRAM.search(line)
        if program and "concluded" not in line:
            self._program = program[1]
        if words[:1] == ["nThread"]:
            self._hosts, self._groups = {}, set()
        elif device := DEVICE.match(text):
            rank, group, host = device.groups()
            if rank in self._hosts:
                raise ValueError(f"rank {rank} again: each process measured alone; build nccl-tests with MPI=1")
            self._hosts[rank] = host
            self._groups.add(group)
        elif title := TITLE.match(text):
            self._open_osu(*title.groups())
        elif words[:3] == ["size", "count", "type"]:
            self._open_nccl(words)
        elif words[:1] == ["Out"] and "FAILED" in words:
            raise ValueError(f"nccl-tests counted wrong values in this table ({text})")
        elif text.startswith("Avg bus bandwidth"):
            self._close()
            self._program = ""
        elif self._table is not None:
            self._take_row(self._table, line, text, is_cut=is_cut)

    def _without_prefix(self, line: str) -> str:
        if head := HEAD.match(line):
            self._prefix = None
            if prefix := head[1].strip():
                digits_vary = re.sub(r"\d+", r"\\d+", re.escape(prefix))
                self._prefix = re.compile(rf"^\s*{digits_vary} ?")
        if self._prefix is None:
            return line
        return self._prefix.sub("", line, count=1)

    def _take_row(self, table: NcclTable | OsuTable, line: str, text: str, *, is_cut: bool) -> None:
        if isinstance(table, NcclTable):
            table.take(line)
        elif text.startswith("Datatype:"):
            table.dtype = text.split()[-1].rstrip(".")
        elif text.split()[:1] == ["Size"]:
            table.set_columns(text, self.line)
        else:
            table.take(line, is_cut=is_cut)

    def _open_osu(self, library: str, one_sided: str | None, name: str, version: str | None) -> None:
        self.end()
        kind = kind_of(name.removesuffix(" Latency"))
        if one_sided or kind is None or library not in ("MPI", "NCCL", "xCCL"):
            program = f"OSU {library} {name}"
            if one_sided:
                program = f"OSU {library}{one_sided} {name} (one-sided)"
            self._leave_out(program)
            return
        carrier = "mpi" if library == "MPI" else "nccl"
        title = f"OSU {name} {version or ''}".strip()
        self._table = OsuTable(
            OutputSeries(path=self._path, line=self.line, carrier=carrier, title=title, measures=kind)
        )

    def _open_nccl(self, columns: Sequence[str]) -> None:
        self.end()
        kind = kind_of(self._program)
        if kind is None:
            self._leave_out(f"nccl-tests {self._program}")
            return
        if "cputime" in columns:
            raise ValueError(f"column cputime {CPU_TIME}")
        if any(columns.count(name) != 2 for name in FIGURES):
            raise ValueError(f"columns {' '.join(columns)}: time, algbw and busbw must each appear twice")
        head = nccl_head(self._path, kind, len(self._hosts), set(self._hosts.values()), self._groups)
        self._table = NcclTable(replace(head, line=self.line), columns)

    def _leave_out(self, program: str) -> None:
        self.left_out.append(f"line {self.line}: {program} gives no costs")

    def _close(self) -> None:
        if isinstance(self._table, NcclTable):
            self._table.require_whole_row()
        if self._table and not self._table.has_figures:
            raise ValueError(f"{self._table.head.title} has no row up to here; give the whole output")
        if self._table:
            self.series += self._table.series.values()
        self._table = None

    def end(self) -> None:
        is_open = isinstance(self._table, NcclTable)
        self._close()
        if is_open:
            raise ValueError(
                "the table has no end (the line 'Avg bus bandwidth'): the file is cut off; give the whole file"
            )


def kind_of(name: str) -> str | None:
    """Returns the kind of measurement of a program, empty if it has no name; None: one that gives no costs."""
    letters = re.sub("[^a-z]", "", name.lower())
    if not letters:
        return ""
    return KINDS.get(letters)


def nccl_head(path: Path, kind: str, ranks: int, hosts: set[str], groups: set[Any]) -> OutputSeries:
    """Returns the series of a table of nccl-tests before its rows are read. Raises `ValueError`: ranks are split."""
    if len(groups) > 1:
        raise ValueError(
            f"the {ranks} ranks are split into {len(groups)} groups, which run at once (NCCL_TESTS_SPLIT): such times "
            "give no costs"
        )
    head = OutputSeries(path=path, line=0, carrier="nccl", title="nccl-tests", measures=kind)
    return replace(head, ranks=ranks or None, nodes=len(hosts) or None)


def read_output(path: Path) -> OutputReader:
    """Returns all series of a file. Raises `UserError`: it is unreadable or damaged, or contains no costs."""
    try:
        text = read_named(path, MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}") from None
    lines = text.splitlines()
    reader = OutputReader(path)
    if text.lstrip().startswith("{"):
        try:
            reader.series = _series_of_json(path, parse_json(text))
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path}: is not JSON of nccl-tests (-J), version 3: {error}") from None
        except ValueError as error:
            raise UserError(f"{path}: {why_unreadable(error)}") from None
        return reader
    try:
        for number, line in enumerate(lines, 1):
            reader.take(line, is_cut=number == len(lines) and not text.endswith("\n"))
        reader.end()
    except ValueError as error:
        raise UserError(f"{path}: line {reader.line}: {error}") from None
    if not reader.series and reader.left_out:
        raise UserError(f"{path}: {reader.left_out[0]}; costs come from {KIND_NAMES}")
    if not reader.series:
        raise UserError(f"{path}: no table of nccl-tests or OSU in {len(lines)} lines; give a program's whole output")
    return reader


def _series_of_json(path: Path, report: Mapping[str, Any]) -> list[OutputSeries]:
    """Returns the series of a JSON report. Raises `LookupError`, `TypeError`, `AttributeError`: another form."""
    kind: str | None = ""
    if program := PROGRAM.search(report["args"][0]):
        kind = kind_of(program[1])
    if kind is None:
        raise ValueError(f"{report['args'][0]} gives no costs; they come from {KIND_NAMES}")
    config, devices = report["config"], report["config"]["devices"]
    # A process lists only its first GPU, whatever the GPUs of a thread are.
    ranks = len(devices) * int(config["nthreads"]) * int(config["ngpus"])
    hosts, groups = {device["hostname"] for device in devices}, {device["group"] for device in devices}
    table = NcclTable(nccl_head(path, kind, ranks, hosts, groups), COLUMNS)
    for row in report["results"]:
        cells = [row["size"], row["count"], row["type"], row["redop"], row["root"].strip()]
        for figures in (row["out_of_place"], row["in_place"]):
            if "cpu_time" in figures:
                raise ValueError(f"cpu_time {CPU_TIME}")
            cells += [figures["time"], figures["alg_bw"], figures["bus_bw"], figures["nwrong"]]
        table.add_row(cells)
    if "average_bus_bandwidth" not in report or not table.has_figures:
        raise ValueError("has no complete table: the run did not end; give the file of a complete run")
    return list(table.series.values())
