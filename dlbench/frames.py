"""Runs as pandas frames, for people's own analysis: `dlbench.open("runs").points()`.

Tables are those that `dlbench report --format csv` writes, made by the same code; steps, messages and telemetry are
the raw rows of a run. `frame.attrs["units"]` holds the unit of each column that has one, e.g. ``{"step_s": "s"}``;
where rows differ all of them, ``images/s or volumes/s``, and column `sample_unit` says what the rates of a row count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import UserError, nearest
from dlbench.perfetto.rows import Notes, sample_rows
from dlbench.perfetto.run import TraceRun, read_trace_run
from dlbench.perfetto.spans import span_rows
from dlbench.records.rows.spans import EXCHANGE
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import scan
from dlbench.report.document import Document
from dlbench.report.table import NamedTable
from dlbench.views.scaling_report import assemble, document_of

if TYPE_CHECKING:
    import pandas as pd

_UNITS = (  # Units by the end of a column's name, where the table itself does not say (docs/formats.md).
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
    """The unit that a column's name says, e.g. `s` of `step_s`, also of the ends of its interval; empty: none."""
    name = re.sub(r"_(low|high)$", "", column)
    return next((unit for end, unit in _UNITS if re.search(end, name)), "")


class Runs:
    """`dlbench.open`: every run of training below some folders. Nothing is kept open; frames are made when they are
    asked for. Raises UserError: there is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *more: str | os.PathLike[str]) -> None:
        self._scan = scan(Path(folder), *map(Path, more))

    @cached_property
    def _report(self) -> Document:
        return document_of(assemble(self._scan))

    @cached_property
    def _tables(self) -> dict[str, NamedTable]:
        return self._report.tables()

    @property
    def names(self) -> tuple[str, ...]:
        """What `table` takes."""
        return tuple(self._tables)

    def table(self, name: str) -> pd.DataFrame:
        """A table of the report, as ``dlbench report --format csv --table NAME`` writes it. Raises UserError: there is
        none of that name.
        """
        if name not in self._tables:
            raise UserError(f"table {name!r}: {nearest(name, self.names)}")
        return self._frame(list(self._tables[name].rows), self._tables[name].columns, self._report.units(name))

    def runs(self) -> pd.DataFrame:
        """One row per run, those without figures too (`state`, `failure_reason`)."""
        return self.table("runs")

    def points(self) -> pd.DataFrame:
        """One row per group of comparable runs and rank count, with intervals (`_low`, `_high`). Throughput and
        median step are geometric means over the runs.
        """
        return self.table("points")

    def steps(self, run: str) -> pd.DataFrame:
        """One row per rank and step of run id `run`: `start_ns` on the clock of node 0, phases, samples, loss.

        Columns as in docs/formats.md, "node-NNNN.steps"; warm-up steps have `warmup`. Raises UserError: there is no
        such run; or IncompleteDataError: a step file is missing or damaged.
        """
        return self._joined(run, self._steps)

    def messages(self, run: str) -> pd.DataFrame:
        """One row per all-reduce message of a traced run (`--trace`); empty where none was recorded.

        `start_ns` is on the clock of node 0; `queued_ns`: how long it was ready before it started. Raises UserError:
        there is no such run; or IncompleteDataError: see `steps`.
        """
        return self._joined(run, self._messages)

    def telemetry(self, run: str) -> pd.DataFrame:
        """One row per node and sample of a watched run, one column per sampled field; NaN: not read at that time.
        Raises UserError: there is no such run; or IncompleteDataError: see `steps`.
        """
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
                kept = spans.rows["lane"] == EXCHANGE
                rows, start = spans.rows[kept], spans.start[kept]
                names = [spans.names[number] for number in rows["name"]]
                columns = {"rank": rank, "node": clock.node, "host": clock.host, "step": rows["step"], "name": names}
                columns |= {"track": rows["track"], "start_ns": start, "duration_ns": spans.end[kept] - start}
                yield columns | {"queued_ns": start - spans.ready[kept], "num_bytes": rows["num_bytes"]}

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
        frame = self._frame(pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())
        frame.attrs["notes"] = [*notes.sentences, *notes.problems]
        return frame

    def _frame(self, content: Any, columns: Any = None, units: Any = None) -> pd.DataFrame:
        import pandas as pd

        frame = pd.DataFrame(content, columns=columns)
        known = {name: (units or {}).get(name) or unit_of(str(name)) for name in frame.columns}
        frame.attrs["units"] = {name: unit for name, unit in known.items() if unit}
        return frame
