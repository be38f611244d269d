"""Text that nccl-tests and OSU's micro-benchmarks print becomes costs of a network, as runs of `dlbench comm` do.

Tables are read by the names of their columns: those of nccl-tests (NVIDIA) with times out of place and in place, and
those of the OSU micro-benchmarks (Ohio State University, versions 3 to 7). A library's collective becomes a line per
rank count. Where there are several rank counts, costs of messages are fitted to the same times for the algorithm that
explains them best, as a library does not say which one it uses. `osu_latency` is one message: a broadcast between two
ranks. `osu_bw` has the rate of large messages.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dlbench.comm.fits import Fit, Scope, fit_of
from dlbench.errors import UserError
from dlbench.opening import read_named, why_unreadable
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.link_fit import Observation, choose_sharing
from dlbench.perfmodels.predictions import STAND_INS, bus_factor
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.base import MAX_COUNT, Precision
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, LevelName, LineCost, NetworkModel

MAX_BYTES = 1 << 24  # Of a file at most: these tables have some hundred lines.
WRONG = "the result was wrong; measure again on a machine that computes rightly"
ROUNDED = 0.02  # Share by which rates may be off of what time and ranks give: they are printed with three digits.

KINDS = {name.replace("-", ""): name for name in ALGORITHMS} | {
    "alltoallpersonalizedexchange": "all-to-all",
    "reducescatterblock": "reduce-scatter",
    "latency": "latency",
    "bandwidth": "bandwidth",
}
"""What is measured, by the letters of a program of nccl-tests or of a title of OSU's."""
PER_RANK = ("all-gather", "scatter", "gather", "all-to-all")
"""Sizes that OSU gives are of what a rank sends another, not of its buffer."""
WIDTHS = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "uint64": 8, "int8": 1, "uint8": 1, "char": 1}
"""Bytes of an element by the names of nccl-tests; all others have 4."""
LAYOUTS: dict[LevelName, Layout] = {
    "inside": Layout(ranks=2, group_size=2),
    "across": Layout(ranks=2, group_size=1),
    "beyond": Layout(ranks=2, group_size=1, leaf_size=1),
}
"""Two ranks whose messages belong to a level."""


@dataclass(kw_only=True, eq=False)
class Table:
    """What one program measured."""

    path: Path
    line: int  # Of its header.
    carrier: str  # nccl or mpi.
    title: str
    measures: str  # A collective, latency, bandwidth, or empty: the output does not say.
    columns: list[str] = field(default_factory=list)
    ranks: int | None = None
    nodes: int | None = None
    element_bytes: int = 1
    rows: dict[int, float] = field(default_factory=dict)  # Seconds by bytes; of bandwidth those of a message.
    bus: float | None = None  # busbw over algbw of the last row that shows it: it depends on the ranks.

    @property
    def where(self) -> str:
        return f"{self.path}: line {self.line}"

    def add(self, words: Sequence[str]) -> None:
        """One row. Raises `ValueError`: it is cut off, is no number, or says that results are wrong."""
        if len(words) < len(self.columns):
            raise ValueError(f"{len(words)} of {len(self.columns)} columns: the file is cut off here; give all of it")
        if not 0 <= (size := int(words[0])) <= MAX_COUNT:
            raise ValueError(f"{words[0]:.24} B: a size must be from 0 to {MAX_COUNT}")
        checks = {(name, word) for name, word in zip(self.columns, words, strict=False) if word not in ("0", "N/A")}
        if any(name == "#wrong" or (name, word) == ("Validation", "Fail") for name, word in checks):
            raise ValueError(WRONG)
        if "algbw" in self.columns:
            places = [place for place, name in enumerate(self.columns) if name == "algbw"]  # Out of place, in place.
            # Of all-to-all, which has no form in place, the second result is never checked.
            place = ([one for one in places if words[one + 2] != "N/A"] or places[:1])[-1]
            value, algbw, busbw = map(float, words[place - 1 : place + 2])
            if value > 0 and abs(algbw - size / value * 1e-3) > max(ROUNDED * algbw, 0.006):
                raise ValueError(f"{size} B in {value:g} us are no {algbw:g} GB/s: time must be in us, algbw in GB/s")
            self.bus = busbw / algbw if algbw >= 1 else self.bus
            self.element_bytes = WIDTHS.get(words[2], 4)
        else:
            value = float(words[1])
        if not 0 < value < float("inf"):
            raise ValueError(f"{size} B, {value:g}: times must be above 0")
        if size > 0:
            self.rows[size] = size / value * 1e-6 if self.measures == "bandwidth" else value * 1e-6


class _Reader:
    """Lines of one output, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path, self.found = path, list[Table]()
        self._program, self._hosts = "", dict[str, str]()  # The program of nccl-tests, and the host of each rank.
        self._is_open = False  # Whether a table of nccl-tests has not ended.

    def take(self, number: int, line: str) -> None:
        """Raises `ValueError`: what is wrong with the line, in words."""
        text = line.strip().lstrip("#").strip()
        words, table = text.split(), self.found[-1] if self.found else None
        if named := re.search(r"\b([a-z_]+)_perf\b", line):
            self._program = named[1]
        if words[:1] == ["nThread"]:
            self._hosts = {}
        elif device := re.match(r"Rank\s+(\d+)\s.*\bon\s+(\S+)\s+device", text):
            if device[1] in self._hosts:
                raise ValueError(f"rank {device[1]} again: each process measured alone; build nccl-tests with MPI=1")
            self._hosts[device[1]] = device[2]
        elif osu := re.match(r"OSU (MPI|NCCL|xCCL)\S* (.+) Test(?: (v\S+))?$", text):
            carrier, title = "mpi" if osu[1] == "MPI" else "nccl", f"OSU {osu[2]} {osu[3] or ''}".strip()
            self._open(number, carrier, title, osu[2].removesuffix(" Latency"))
        elif words[:1] == ["Size"] and table is not None and not table.columns:
            unit = "(MB/s)" if table.measures == "bandwidth" else "(us)"
            if unit not in text.split(")")[0] + ")":
                raise ValueError(f"{text!r}: the second column must be in {unit[1:-1]}")
            table.columns, table.line = re.split(r"\s{2,}|\t", text), number
        elif words[:3] == ["size", "count", "type"]:
            table = self._open(number, "nccl", "nccl-tests", self._program)
            table.columns, self._is_open = words, True
            table.ranks, table.nodes = len(self._hosts) or None, len(set(self._hosts.values())) or None
        elif words[:1] == ["Out"] and "FAILED" in words:
            raise ValueError(WRONG)
        elif text.startswith("Avg bus bandwidth"):
            self._is_open = False
        elif table is not None and table.columns and re.match(r"\s*-?[0-9]", line):
            table.add(words)

    def _open(self, number: int, carrier: str, title: str, name: str) -> Table:
        self.end()
        kind = re.sub("[^a-z]", "", name.lower())
        if kind and kind not in KINDS:
            raise ValueError(f"no costs are made of {name!r}, but of {', '.join(dict.fromkeys(KINDS.values()))}")
        table = Table(path=self._path, line=number, carrier=carrier, title=title, measures=KINDS.get(kind, ""))
        self.found.append(table)
        return table

    def end(self) -> None:
        """Raises `ValueError`: the table so far is not whole."""
        if self._is_open:
            raise ValueError("the table has no end (the line 'Avg bus bandwidth'): the file is cut off; give all of it")
        if self.found and not self.found[-1].rows:
            raise ValueError(f"no row of {self.found[-1].title} until here; give the whole output")


def read_tables(path: Path) -> list[Table]:
    """All tables of a file. Raises `UserError`: it is unreadable, damaged, or something else; names the line."""
    try:
        lines = read_named(path, MAX_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}") from None
    reader, number = _Reader(path), 0
    try:
        for number, line in enumerate(lines, 1):
            reader.take(number, line)
        reader.end()
    except ValueError as error:
        raise UserError(f"{path}: line {number}: {error}") from None
    if not reader.found:
        raise UserError(f"{path}: line {number}: no table of nccl-tests or OSU until here; give all that one printed")
    return reader.found


def import_tables(
    paths: Sequence[Path],
    *,
    system: str,
    ranks: Sequence[int] = (),
    group_size: int | None = None,
    levels: Sequence[LevelName] = (),
    collective: Collective | None = None,
    fitted: str,
) -> Fit:
    """Costs of a network by the outputs in some files.

    `system`: what to call it. `fitted`: when, UTC, ISO 8601. The others are for outputs that do not say it, in their
    order or one for all: `ranks` of a collective, `group_size` of a node, `levels` of the two ranks of osu_latency and
    osu_bw, `collective` of nccl-tests.

    Raises `UserError`: as `read_tables`; an option lacks or has no effect; several carriers; too few sizes for a fit.
    """
    tables = [table for path in paths for table in read_tables(path)]
    known: dict[tuple[object, ...], Table] = {}
    for one in tables:
        same = known.setdefault((one.title, one.measures, one.ranks, one.nodes, *one.rows.items()), one)
        if same is not one:
            raise UserError(f"{one.where}: is the output of {same.where} once more; a repeat is measured anew")
    named = _each("--collective", [collective] if collective else [], [one for one in tables if not one.measures])
    for one, kind in named.items():
        one.measures = kind
    pairs = _each("--level", levels, [one for one in tables if one.measures not in ALGORITHMS])
    whole = [one for one in tables if one not in pairs]
    for one, count in _each("--ranks", ranks, [one for one in whole if not one.ranks]).items():
        one.ranks = count
    groups = _each("--group-size", [group_size] if group_size else [], [one for one in whole if not one.nodes])
    placed: dict[str, list[tuple[Table, Layout]]] = {}
    for one in tables:
        if one.carrier != tables[0].carrier:
            raise UserError(f"{one.where}: {one.title} is of another library than {tables[0].where}; import it apart")
        layout = LAYOUTS[pairs[one]] if one in pairs else _layout(one, groups.get(one))
        placed.setdefault(one.measures, []).append((one, layout))
    levels = tuple(pairs.values())
    if "beyond" in levels and "across" not in levels:
        raise UserError("--level beyond: such messages pass the links of nodes as well; give osu_latency of across too")
    if "bandwidth" in placed and "latency" not in placed:
        raise UserError(f"{placed['bandwidth'][0][0].where}: says nothing of start-ups; give osu_latency as well")
    carrier, sources, lines = tables[0].carrier, list[str](), list[LineCost]()
    observed: list[tuple[Observation, dict[str, float]]] = []
    for kind, found in placed.items():
        assumed, counts = "", sorted({layout.ranks for _, layout in found})
        if kind == "latency":
            observed += _seen("broadcast", "binomial-tree", found)
        elif kind != "bandwidth":
            measured = cast("Collective", kind)
            if len(counts) > 1:
                assumed = _assumed(measured, found)
                observed += _seen(measured, assumed, found)
            for count in counts:
                least = min(layout.group_size for _, layout in found if layout.ranks == count)  # That of most nodes.
                used = [one for one in found if one[1] == Layout(ranks=count, group_size=least)]
                rows = {seen.num_bytes: seen.seconds for seen, _ in _seen(measured, "", used)}
                name = f"{carrier} flat" if kind == "allreduce" else f"{carrier} {kind} library"
                line = fit_line(name, count, list(rows), list(rows.values()))
                lines.append(line.model_copy(update={"sizes": (min(rows), max(rows))}))
        as_of = f", costs as of {assumed}" if assumed else ""
        sources += [f"{one.path.name}: {one.title} {kind}, {layout.ranks} ranks{as_of}" for one, layout in found]
    dtype: Precision = "fp16" if tables[0].element_bytes == 2 else "fp32"
    scope = Scope(system=system, carrier="torch-nccl" if carrier == "nccl" else carrier, dtype=dtype)
    about: dict[str, Any] = {"sources": tuple(sources), "fitted": fitted}
    if not observed:
        network = NetworkModel(system=system, transport=scope.carrier, collectives=tuple(lines), **about)
        return Fit(**vars(scope), network=network)
    points, by_run = zip(*observed, strict=True)
    fit = fit_of(scope, points, by_run, lines=tuple(lines), **about)
    network = fit.network
    for one, _ in placed.get("bandwidth", []):
        if (level := network.levels.get(pairs[one])) is None:
            raise UserError(f"{one.where}: says nothing of start-ups; give osu_latency of {pairs[one]} as well")
        rate = min(seconds / size for size, seconds in one.rows.items())
        last = level.pieces[-1].model_copy(update={"beta_s_per_byte": rate, "beta_interval_s_per_byte": None})
        level = level.model_copy(update={"pieces": (*level.pieces[:-1], last)})
        network = network.model_copy(update={pairs[one]: level, "draws": ()})  # Draws hold the rate of latencies.
    return Fit(**vars(scope), network=network, errors=fit.errors)


def _each(option: str, given: Sequence[Any], tables: Sequence[Table]) -> dict[Table, Any]:
    """By table what an option says of those that do not say it: one value for all, or one for each."""
    if given and not tables:
        raise UserError(f"{option}: every output says it, or is none that needs it")
    if tables and len(given) not in (1, len(tables)):
        raise UserError(
            f"{tables[0].where}: does not say its {option[2:]}; give {option} once, or once for each of {len(tables)} "
            f"such outputs, here {len(given)}"
        )
    return dict(zip(tables, list(given) * (len(tables) if len(given) == 1 else 1), strict=True))


def _layout(one: Table, group_size: int | None) -> Layout:
    kind, count = cast("Collective", one.measures), one.ranks or 0
    group = max(1, count // one.nodes) if one.nodes else min(group_size or count, count)
    if count < 2 or count % group or (one.nodes and group * one.nodes != count):
        where = f"{one.nodes} nodes" if one.nodes else f"nodes of {group}"
        raise UserError(f"{one.where}: {count} ranks on {where}: want two ranks or more, equally many on each node")
    expected = bus_factor(kind, count)
    if one.bus is not None and abs(one.bus / expected - 1) > ROUNDED:
        raise UserError(f"{one.where}: busbw is {one.bus:.3g} x algbw; {kind} over {count} ranks has {expected:.3g}")
    if one.title.startswith("OSU") and kind in PER_RANK:
        one.rows = {size * count: seconds for size, seconds in one.rows.items()}
    return Layout(ranks=count, group_size=group)


def _seen(
    collective: Collective, algorithm: str, found: Sequence[tuple[Table, Layout]]
) -> Iterator[tuple[Observation, dict[str, float]]]:
    """Points, and their seconds by run: outputs of one layout are its runs."""
    runs: dict[tuple[Layout, int, int], dict[str, float]] = {}
    for table, layout in found:
        for size, seconds in table.rows.items():
            known = runs.setdefault((layout, size, table.element_bytes), {})
            known[str(len(known))] = seconds
    kind: dict[str, Any] = {"collective": collective, "algorithm": algorithm, "shards": None}
    for (layout, size, width), by_run in runs.items():
        seconds = statistics.median(by_run.values())
        yield Observation(layout=layout, num_bytes=size, element_bytes=width, seconds=seconds, **kind), by_run


def _assumed(collective: Collective, found: Sequence[tuple[Table, Layout]]) -> str:
    """The algorithm by which points held out are predicted best; the first where none can be held out."""
    errors: dict[str, float] = {}
    has_groups = all(1 < layout.group_size < layout.ranks for _, layout in found)
    for name in STAND_INS if collective == "allreduce" else ALGORITHMS[collective]:
        if has_groups or name not in GROUPED_ALGORITHMS:
            _, predictions = choose_sharing([seen for seen, _ in _seen(collective, name, found)])
            missed = [abs(seconds / seen.seconds - 1) for seen, seconds in predictions]
            errors[name] = statistics.median(missed) if missed else float("inf")
    return min(errors, key=lambda name: errors[name])
