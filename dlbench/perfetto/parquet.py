"""A run's steps, phases and spans as one Parquet table, its samples as a second one beside it.

Both are written in row groups, so that memory does not grow with the run. Times are those of the trace: nanoseconds on
the axis of all nodes. Samples are given as they were sampled, counters as they stood, in the field's own unit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import EnvironmentLacksError
from dlbench.perfetto.counters import sample_rows
from dlbench.perfetto.events import PHASE_NAMES
from dlbench.perfetto.export import temporary_beside
from dlbench.perfetto.notes import Notes, clean
from dlbench.perfetto.run import TraceRun
from dlbench.perfetto.spans import SpanRows, SpanSource
from dlbench.perfetto.steps import StepRows, step_rows
from dlbench.records.rows.spans import LANES
from dlbench.records.rows.steps import LAUNCHED, PHASES

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = "dlbench.trace"
"""Key of the table's metadata under which the facts stand, as JSON."""

_ROWS_PER_GROUP = 262_144


def counters_beside(output: Path) -> Path:
    """The file of samples that belongs to a table of spans: trace.parquet -> trace.counters.parquet."""
    return output.with_name(f"{output.stem}.counters{output.suffix}")


def write_parquet(run: TraceRun, facts: Mapping[str, Any], notes: Notes, output: Path) -> None:
    """Writes both tables, as a whole or not at all.

    Args:
        run: what to show.
        facts: what the trace says of itself; the notes are added.
        notes: what was met so far; what is met now is added.
        output: the file of spans; see `counters_beside` for the other.

    Raises:
        UserError: they cannot be written.
        EnvironmentLacksError: pyarrow is too old.
    """
    import pyarrow.parquet as pq

    if not hasattr(pq.ParquetWriter, "add_key_value_metadata"):
        raise EnvironmentLacksError("--format parquet: pyarrow is too old; remedy: pip install 'pyarrow>=16'")
    with temporary_beside(output) as temporary:
        spans, counters = temporary / "spans", temporary / "counters"
        with _Table(spans, _span_schema()) as span_table, _Table(counters, _counter_schema()) as counter_table:
            for rank in run.selection.ranks:
                _add_rank(run, rank, span_table, notes)
            for node in run.nodes:
                _add_node(run, node, counter_table, notes)
            notes.num_events += span_table.num_rows + counter_table.num_rows
            content = {**facts, "notes": notes.sentences, "problems": list(notes.problems)}
            span_table.say(content)
            counter_table.say(content)
        for path in (spans, counters):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        counters.replace(counters_beside(output))
        spans.replace(output)


def _span_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("node", pa.int32(), nullable=False),
            pa.field("host", pa.string(), nullable=False),
            pa.field("lane", pa.string(), nullable=False),
            pa.field("track", pa.int32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("step", pa.int32()),
            pa.field("warmup", pa.bool_()),
            pa.field("start_ns", pa.int64(), nullable=False),
            pa.field("duration_ns", pa.int64(), nullable=False),
            pa.field("queued_ns", pa.int64(), nullable=False),
            pa.field("num_bytes", pa.int64()),
            pa.field("launch_ns", pa.int64()),
        ]
    )


def _counter_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("time_ns", pa.int64(), nullable=False),
            pa.field("node", pa.int32(), nullable=False),
            pa.field("host", pa.string(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("value", pa.float64(), nullable=False),
        ]
    )


class _Table:
    """One file, written a row group at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._held: list[Any] = []
        self._num_held = 0
        self.num_rows = 0

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def add(self, columns: Mapping[str, Any], number: int) -> None:
        """Rows: an array or list for each column, or one value for all."""
        import pyarrow as pa

        if not number:
            return
        arrays = []
        for field in self._schema:
            value = columns[field.name]
            if isinstance(value, (str, int)) or value is None:
                arrays.append(pa.repeat(pa.scalar(value, type=field.type), number))
            else:
                arrays.append(pa.array(value, type=field.type))
        self._held.append(pa.record_batch(arrays, schema=self._schema))
        self._num_held += number
        self.num_rows += number
        if self._num_held >= _ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held), row_group_size=self._num_held)
        self._held, self._num_held = [], 0

    def say(self, content: Mapping[str, Any]) -> None:
        """Writes the rest, and the facts into the file's metadata."""
        self._flush()
        self._writer.add_key_value_metadata({METADATA_KEY: json.dumps(content, allow_nan=False)})


def _add_rank(run: TraceRun, rank: int, table: _Table, notes: Notes) -> None:
    clock = run.clock_of(rank)
    place = {"rank": rank, "node": clock.node, "host": clean(clock.host)}
    for local in notes.guarded(step_rows(run.folder.steps(rank), notes)):
        rows = local.aligned(clock).chosen(run.selection.steps)
        if len(rows.steps):
            _add_steps(table, place, rows)
    if not run.folder.spans(rank).exists():
        if run.has_spans:
            notes.problem(f"{run.folder.spans(rank)}: missing: rank {rank} is shown without spans")
        return
    for spans in SpanSource(run.folder.spans(rank), clock, notes).batches({}):
        _add_spans(table, place, spans, spans.shown(run.selection.steps, run.window))


def _add_steps(table: _Table, place: Mapping[str, Any], rows: StepRows) -> None:
    """A row for each step, and one for each phase that took time.

    `launch_ns` of a GPU's phase: how long it waited for kernel launches, at most.
    """
    import numpy as np

    same = {**place, "track": 0, "queued_ns": 0, "num_bytes": None, "launch_ns": None}
    took = np.diff(rows.edges, axis=1)
    whole = {"start_ns": rows.edges[:, 0], "duration_ns": rows.edges[:, -1] - rows.edges[:, 0]}
    told = {"step": rows.steps, "warmup": rows.warmup}
    table.add({**same, **whole, **told, "lane": "step", "name": "step"}, len(rows.steps))
    for number, name in enumerate(PHASE_NAMES):
        kept = took[:, number] > 0
        times = {"start_ns": rows.edges[kept, number], "duration_ns": took[kept, number]}
        told = {"step": rows.steps[kept], "warmup": rows.warmup[kept]}
        if rows.launch is not None and PHASES[number] in LAUNCHED:
            told["launch_ns"] = rows.launch[kept, LAUNCHED.index(PHASES[number])]
        table.add({**same, **times, **told, "lane": "phase", "name": name}, int(kept.sum()))


def _add_spans(table: _Table, place: Mapping[str, Any], spans: SpanRows, kept: Any) -> None:
    import numpy as np
    import pyarrow as pa

    rows = spans.rows[kept]
    names = pa.DictionaryArray.from_arrays(
        pa.array(rows["name"].astype(np.int32)), pa.array([clean(name) for name in spans.names], type=pa.string())
    )
    lanes = pa.DictionaryArray.from_arrays(pa.array(rows["lane"].astype(np.int32)), pa.array(LANES))
    steps, sizes = rows["step"], rows["num_bytes"]
    start, end, ready = spans.start[kept], spans.end[kept], spans.ready[kept]
    columns = {
        **place,
        "lane": lanes.cast(pa.string()),
        "track": rows["track"].astype(np.int32),
        "name": names.cast(pa.string()),
        "step": pa.array(steps, mask=steps < 0),
        "warmup": None,
        "start_ns": start,
        "duration_ns": end - start,
        "queued_ns": start - ready,
        "num_bytes": pa.array(sizes, mask=sizes < 0),
        "launch_ns": None,
    }
    table.add(columns, len(rows))


def _add_node(run: TraceRun, node: int, table: _Table, notes: Notes) -> None:
    import numpy as np

    path, clock = run.folder.samples(node), run.clocks[node]
    if not path.exists():
        if node in run.sampled_nodes:
            notes.problem(f"{path}: missing: node {node} is shown without counters")
        return
    low, high = run.window or (-1 << 62, 1 << 62)
    for rows in notes.guarded(sample_rows(path, clock, notes)):
        within = (rows.time >= low) & (rows.time <= high)
        for name, values in rows.values.items():
            known = within & np.isfinite(values)
            columns = {"time_ns": rows.time[known], "node": node, "host": clean(clock.host), "name": clean(name)}
            table.add({**columns, "value": values[known]}, int(known.sum()))
