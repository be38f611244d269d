"""A run's steps, phases and spans as one Parquet table, its samples as a second one next to it.

Both are pandas frames, written a row group at a time so that memory does not grow with the run, which
`DataFrame.to_parquet` cannot. Times are those of the trace: nanoseconds on the axis of all nodes. Samples are given as
they were sampled, counters as they stood, in the field's own unit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dlbench.perfetto.events import PHASE_NAMES
from dlbench.perfetto.export import temporary_next_to
from dlbench.perfetto.rows import Notes, SpanRows, SpanSource, StepRows, clean, sample_rows, step_rows
from dlbench.perfetto.run import TraceRun
from dlbench.records.rows.spans import LANES
from dlbench.records.rows.steps import LAUNCHED, PHASES

METADATA_KEY = "dlbench.trace"  # Key of the table's metadata under which the facts stand, as JSON.

_ROWS_PER_GROUP = 262_144

_SPANS: Mapping[str, str] = {
    "rank": "int32",
    "node": "int32",
    "host": "string",
    "lane": "string",
    "track": "int32",
    "name": "string",
    "step": "int32",
    "warmup": "bool",
    "start_ns": "int64",
    "duration_ns": "int64",
    "queued_ns": "int64",
    "num_bytes": "int64",
    "launch_ns": "int64",
}
_COUNTERS: Mapping[str, str] = {
    "time_ns": "int64",
    "node": "int32",
    "host": "string",
    "name": "string",
    "value": "float64",
}


def counters_next_to(output: Path) -> Path:
    """The file of samples that belongs to a table of spans: trace.parquet -> trace.counters.parquet."""
    return output.with_name(f"{output.stem}.counters{output.suffix}")


def write_parquet(run: TraceRun, facts: Mapping[str, Any], notes: Notes, output: Path) -> None:
    """Writes both tables, as a whole or not at all.

    `output` is the file of spans (the other: `counters_next_to`); `facts`: what the trace says of itself; to these, and
    to `notes`, what is met now is added. Raises UserError: they cannot be written.
    """
    with temporary_next_to(output) as temporary:
        spans, counters = temporary / "spans", temporary / "counters"
        with _Table(spans, _SPANS) as span_table, _Table(counters, _COUNTERS) as counter_table:
            for rank in run.selection.ranks:
                _add_rank(run, rank, span_table, notes)
            for node in run.nodes:
                _add_node(run, node, counter_table, notes)
            notes.num_events += span_table.num_rows + counter_table.num_rows
            content = {**facts, "notes": notes.sentences, "problems": list(notes.problems)}
            for table in (span_table, counter_table):
                table.flush()
                table.writer.add_key_value_metadata({METADATA_KEY: json.dumps(content, allow_nan=False)})
        for path in (spans, counters):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        counters.replace(counters_next_to(output))
        spans.replace(output)


class _Table:
    """One file, written a row group at a time."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self._schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
        self.writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._held: list[Any] = []
        self.num_rows = self._num_held = 0

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.close()

    def add(self, columns: Mapping[str, Any]) -> None:
        """Rows: arrays, or one value for all; what is missing is null."""
        frame = pd.DataFrame(columns)
        self._held.append(pa.Table.from_pandas(frame.reindex(columns=self._schema.names), self._schema, False))
        self.num_rows += len(frame)
        self._num_held += len(frame)
        if self._num_held >= _ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._num_held:
            self.writer.write_table(pa.concat_tables(self._held), row_group_size=self._num_held)
        self._held, self._num_held = [], 0


def _add_rank(run: TraceRun, rank: int, table: _Table, notes: Notes) -> None:
    clock = run.clock_of(rank)
    place = {"rank": rank, "node": clock.node, "host": clean(clock.host)}
    for local in notes.guarded(step_rows(run.folder.steps(rank), run.run_id, notes)):
        _add_steps(table, place, local.aligned(clock).chosen(run.selection.steps))
    if not run.has_spans_of(rank, notes):
        return
    for spans in SpanSource(run.folder.spans(rank), run.run_id, clock, notes).batches({}):
        _add_spans(table, place, spans, spans.shown(run.selection.steps, run.window))


def _add_steps(table: _Table, place: Mapping[str, Any], rows: StepRows) -> None:
    """A row for each step, and one for each phase that took time.

    `launch_ns` of a GPU's phase: how long it waited for kernel launches, at most.
    """
    took = np.diff(rows.edges, axis=1)
    for number, name in ((None, "step"), *enumerate(PHASE_NAMES)):
        kept = np.full(len(rows.steps), True) if number is None else took[:, number] > 0
        columns = {
            "lane": "step" if number is None else "phase",
            "name": name,
            "track": 0,
            "queued_ns": 0,
            "step": rows.steps[kept],
            "warmup": rows.warmup[kept],
            "start_ns": rows.edges[kept, number or 0],
            "duration_ns": took[kept].sum(axis=1) if number is None else took[kept, number],
        }
        if number is not None and rows.launch is not None and PHASES[number] in LAUNCHED:
            columns["launch_ns"] = rows.launch[kept, LAUNCHED.index(PHASES[number])]
        table.add({**place, **columns})


def _add_spans(table: _Table, place: Mapping[str, Any], spans: SpanRows, kept: npt.NDArray[np.bool_]) -> None:
    rows, start = spans.rows[kept], spans.start[kept]
    columns = {
        "lane": np.array(LANES, dtype=object)[rows["lane"]],
        "track": rows["track"],
        "name": np.array([clean(name) for name in spans.names], dtype=object)[rows["name"]],
        "step": pd.arrays.IntegerArray(rows["step"], rows["step"] < 0),
        "start_ns": start,
        "duration_ns": spans.end[kept] - start,
        "queued_ns": start - spans.ready[kept],
        "num_bytes": pd.arrays.IntegerArray(rows["num_bytes"], rows["num_bytes"] < 0),
    }
    table.add({**place, **columns})


def _add_node(run: TraceRun, node: int, table: _Table, notes: Notes) -> None:
    path, clock = run.folder.samples(node), run.clocks[node]
    if not run.has_samples_of(node, notes):
        return
    for rows in notes.guarded(sample_rows(path, run.run_id, clock, notes)):
        within = run.in_window(rows.time)
        for name, values in rows.values.items():
            known = within & np.isfinite(values)
            columns = {"time_ns": rows.time[known], "node": node, "host": clean(clock.host), "name": clean(name)}
            table.add({**columns, "value": values[known]})
