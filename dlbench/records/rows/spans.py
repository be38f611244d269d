"""`node-NNNN.spans`: what the ranks of a node did when, beyond the phases of its steps; blocks of rows.

Lanes are the threads of a trace. Stages (starting, building, profiling memory, staging, warm-up, measuring, evaluation,
checkpoint, finishing) come from every rank; layers, messages and reading only from the window of watched steps; staging
from the first rank of each node, stream by stream; swap from the window of runs that treat activations by a plan:
recomputing and waiting (track 0), what leaves the device (1), what comes back (2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader

if TYPE_CHECKING:
    from dlbench.records.rows.reader import Rows

SPANS_FORMAT, SPANS_VERSION = "dlbench.spans", 1

LANES = ("stage", "compute", "exchange", "input", "staging", "swap")  # Lane of a span, by its number.
STAGE, COMPUTE, EXCHANGE, INPUT, STAGING, SWAP = range(len(LANES))

SPAN_FIELDS: tuple[tuple[str, str], ...] = (
    ("start_ns", "<i8"),  # CLOCK_MONOTONIC of this rank's machine
    ("duration_ns", "<i8"),
    ("queued_ns", "<i8"),  # of a message: how long it was ready before it started; else 0
    ("num_bytes", "<i8"),  # what was moved; -1 where nothing was
    ("step", "<i4"),  # of this run, from 0; -1 outside of steps
    ("lane", "<u2"),  # number in LANES
    ("track", "<u2"),  # within the lane: number of the reader process, of the message, of the direction; else 0
    ("name", "<u2"),  # number in the names that the notes before gave
    ("reserved", "<u2"),
)


MAX_NAMES = 65_535  # Different names in one file; spans of further names are called `OTHER_NAMES`.
OTHER_NAMES = "(further names)"

_SPANS_PER_BLOCK = 256


class SpanWriter:
    """Writes the spans of one rank, at most `max_bytes`; the others are counted. `header`: rank, run_id."""

    def __init__(self, path: Path, header: dict[str, Any], max_bytes: int) -> None:
        content = {"format": SPANS_FORMAT, "version": SPANS_VERSION, "lanes": list(LANES), **header}
        # Blocks end here and not in the block writer, so that the names of a block come before it in one note.
        rows, rank = _SPANS_PER_BLOCK + 1, header["rank"]
        self._blocks = BlockWriter(
            path, content, SPAN_FIELDS, delta=("start_ns",), rows_per_block=rows, max_bytes=max_bytes, rank=rank
        )
        self._names: dict[str, int] = {}
        self._new_names: list[str] = []
        self.num_held = 0
        """Spans in memory, which the next `flush` writes."""

    def add(
        self,
        lane: int,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        step: int = -1,
        track: int = 0,
        num_bytes: int = -1,
        queued_ns: int = 0,
    ) -> None:
        """One span, CLOCK_MONOTONIC nanoseconds of this machine; they may come in any order, but from one thread."""
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER_NAMES
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            self._new_names.append(name[:200])
        self._blocks.append((start_ns, end_ns - start_ns, queued_ns, num_bytes, step, lane, track, number, 0))
        self.num_held += 1
        if self.num_held == _SPANS_PER_BLOCK:
            self.flush()

    @property
    def num_spans(self) -> int:
        """Spans in the file."""
        return self._blocks.num_rows

    @property
    def dropped(self) -> int:
        """Spans left out for lack of space."""
        return self._blocks.dropped

    @property
    def bytes_written(self) -> int:
        """Size of the file."""
        return self._blocks.bytes_written

    def flush(self) -> None:
        """Writes what is held in memory. Raises OSError: the disk is full or gone."""
        if self._new_names:
            names, self._new_names = self._new_names, []
            first = len(self._names) - len(names)
            self._blocks.note({"first": first, "names": names}, before_rows=True)
        self.num_held = 0
        self._blocks.flush()

    def close(self) -> None:
        """Writes the rest and closes."""
        try:
            self.flush()
        finally:
            self._blocks.close()


@dataclass(kw_only=True)
class SpanReader:
    """Spans of one rank, block by block."""

    path: Path
    run_id: str = ""  # The run that they must be of; empty: any.
    names: list[str] = field(default_factory=list)  # Names met so far, by number; complete for the rows given so far.

    def __post_init__(self) -> None:
        self._reader = BlockReader(self.path, SPANS_FORMAT, "spans", run_id=self.run_id)
        self.header = self._reader.header
        """What the writer said of itself."""
        wanted = {"version": SPANS_VERSION, "fields": [list(f) for f in SPAN_FIELDS], "lanes": list(LANES)}
        if any(self.header.get(key) != value for key, value in wanted.items()):
            raise IncompleteDataError(f"{self.path}: spans of an unknown version ({self.header.get('version')!r})")

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last whole block, known when all was read: 0 unless the rank was killed while writing."""
        return self._reader.torn_bytes

    def blocks(self) -> Iterator[Rows]:
        """Structured arrays with the fields of `SPAN_FIELDS`; lanes are in `LANES`, names in `names`."""
        self.names.clear()
        for block in self._reader.blocks():
            if isinstance(block, dict):
                first, names = block.get("first"), block.get("names")
                # Their numbers go on where those before ended; a gap would give spans a wrong name.
                if type(first) is not int or not isinstance(names, list) or first != len(self.names):
                    raise IncompleteDataError(f"{self.path}: names of spans are damaged")
                self.names.extend(str(name) for name in names)
                if len(self.names) > MAX_NAMES + 1:
                    raise IncompleteDataError(f"{self.path}: more names of spans than a file holds")
            elif len(block):
                if int(block["lane"].max()) >= len(LANES) or int(block["name"].max()) >= len(self.names):
                    raise IncompleteDataError(f"{self.path}: spans of a lane or a name that there is not")
                yield block
