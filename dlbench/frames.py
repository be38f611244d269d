"""Runs as pandas frames: `dlbench.open("runs").points()`.

`frame.attrs["units"]` has the unit of each column that has one, e.g. ``{"step_s": "s"}``, or all units if rows differ,
``images/s or volumes/s``; column `sample_unit` then has the unit of a row's samples.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import UserError, nearest
from dlbench.perfetto.rows import Notes, sample_rows, span_rows
from dlbench.perfetto.run import TraceRun, read_trace_run
from dlbench.records.rows.spans import EXCHANGE
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import scan
from dlbench.report.document import Document
from dlbench.report.table import NamedTable
from dlbench.views.scaling_report import assemble, document_of

if TYPE_CHECKING:
    import pandas as pd

_UNITS = (  # Units by the end of a column's name, for columns without a unit in their table (docs/formats.md).
    (r"_ns$", "ns"),
    (r"bytes_per_s$", "bytes/s"),
    (r"bytes$", "bytes"),
    (r"_w$", "W"),
    (r"_j$", "J"),
    (r"_hz$", "Hz"),
    (r"_mhz$", "MHz"),
    (r"_c$", "°C"),
    (r"(_fraction|_share|\.busy|_busy)$", "fraction"),
    (r"_h$", "h"),
    (r"_per_s$", "1/s"),
    (r"_s$", "s"),
)


def unit_of(column: str) -> str:
    """Returns the unit in a column's name, e.g. `s` of `step_s`, also for the ends of its interval; empty: none."""
    name = re.sub(r"_(low|high)$", "", column)
    return next((unit for end, unit in _UNITS if re.search(end, name)), "")


class Runs:
    """All training runs below some folders (`dlbench.open`). Raises UserError: there is no such folder."""

    def __init__(self, folder: str | os.PathLike[str], *folders: str | os.PathLike[str]) -> None:
        self._scan = scan(Path(folder), *map(Path, folders))

    @cached_property
    def _report(self) -> Document:
        return document_of(assemble(self._scan))

    @cached_property
    def _tables(self) -> dict[str, NamedTable]:
        return self._report.tables()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tables)

    def table(self, name: str) -> pd.DataFrame:
        """Returns a table as in ``dlbench report --format csv --table NAME``. Raises UserError: there is none."""
        if name not in self._tables:
            raise UserError(f"table {name!r}: {nearest(name, self.names)}")
        return self._frame(list(self._tables[name].rows), self._tables[name].columns, self._report.units(name))

    def runs(self) -> pd.DataFrame:
        """Returns one row per run, including runs without figures (`state`, `failure_reason`)."""
        return self.table("runs")

    def points(self) -> pd.DataFrame:
        """Returns one row per group and rank count: geometric means over runs, with intervals (`_low`, `_high`)."""
        return self.table("points")

    def steps(self, run: str) -> pd.DataFrame:
        """Returns one row per rank and step of a run (docs/formats.md); `start_ns` is on the clock of node 0.

        Raises UserError: there is no such run; or IncompleteDataError: a step file is missing or damaged.
        """
        return self._joined(run, self._steps)

    def messages(self, run: str) -> pd.DataFrame:
        """Returns one row per all-reduce message of a traced run (`--trace`); empty if none was recorded.

        `start_ns` is on the clock of node 0; `queued_ns`: time from ready to start. Raises the errors of `steps`.
        """
        return self._joined(run, self._messages)

    def telemetry(self, run: str) -> pd.DataFrame:
        """Returns one row per node and sample of a run, a column per field (NaN: not read); raises as `steps`."""
        return self._joined(run, self._telemetry)

    def _steps(self, run: TraceRun, notes: Notes) -> Iterator[dict[str, Any]]:
        for rank in run.ranks:
            clock, file = run.clock_of(rank), read_steps(run.folder.steps(rank), run.run_id)
            notes.torn(file.torn_bytes)
            columns = {str(name): file.steps[name] for name in file.steps.dtype.names or ()}
            columns |= {"start_ns": clock.align(columns["start_ns"]), "warmup": columns["warmup"] != 0}
            yield {"rank": rank, "node": clock.node, "host": clock.host, **columns}

    def _messages(self, run: TraceRun, notes: Notes) -> Iterator[dict[str, Any]]:
        for rank in run.ranks:
            if not run.has_spans_of(rank, notes):
                continue
            clock = run.clock_of(rank)
            for spans in notes.guarded(span_rows(run.folder.spans(rank), run.run_id, clock, notes)):
                is_exchange = spans.rows["lane"] == EXCHANGE
                rows, start = spans.rows[is_exchange], spans.start[is_exchange]
                names = [spans.names[number] for number in rows["name"]]
                columns = {"rank": rank, "node": clock.node, "host": clock.host, "step": rows["step"], "name": names}
                columns |= {"track": rows["track"], "start_ns": start, "duration_ns": spans.end[is_exchange] - start}
                yield columns | {"queued_ns": start - spans.ready[is_exchange], "num_bytes": rows["num_bytes"]}

    def _telemetry(self, run: TraceRun, notes: Notes) -> Iterator[dict[str, Any]]:
        for node in run.nodes:
            if not run.has_samples_of(node, notes):
                continue
            clock = run.clocks[node]
            for rows in notes.guarded(sample_rows(run.folder.samples(node), run.run_id, clock, notes)):
                yield {"node": node, "host": clock.host, "time_ns": rows.time, **rows.values}

    def _joined(self, run_id: str, parts_of: Callable[[TraceRun, Notes], Iterator[dict[str, Any]]]) -> pd.DataFrame:
        import pandas as pd

        runs = {run.plan.run_id: run for run in self._scan.runs}
        if run_id not in runs:
            raise UserError(f"run {run_id!r}: {nearest(run_id, runs)}")
        notes = Notes()
        traced = read_trace_run(runs[run_id], notes)[0]
        frames = [pd.DataFrame(part) for part in parts_of(traced, notes)]
        frame = self._frame(pd.concat(frames or [pd.DataFrame()], ignore_index=True))
        frame.attrs["notes"] = [*notes.sentences, *notes.problems]
        return frame

    def _frame(self, content: Any, columns: Any = None, units: Any = None) -> pd.DataFrame:
        import pandas as pd

        frame = pd.DataFrame(content, columns=columns)
        unit_by_column = {name: (units or {}).get(name) or unit_of(str(name)) for name in frame.columns}
        frame.attrs["units"] = {name: unit for name, unit in unit_by_column.items() if unit}
        return frame
