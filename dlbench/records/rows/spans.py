"""`node-NNNN.spans`: spans of the ranks of a node in more detail than the phases of steps (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
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
    ("queued_ns", "<i8"),  # of a message: time from ready to start; else 0
    ("num_bytes", "<i8"),  # bytes moved; -1: none
    ("step", "<i4"),  # of this run, from 0; -1 outside of steps
    ("lane", "<u2"),  # number in LANES
    ("track", "<u2"),  # number of reader process or message; swap: 0 recomputing and waiting, 1 out, 2 in; else 0
    ("name", "<u2"),  # index into the names of earlier notes
    ("reserved", "<u2"),
)

MAX_NAMES = 65_535  # Different names in one file; spans of further names are called `OTHER_NAMES`.
OTHER_NAMES = "(further names)"

_SPANS_PER_BLOCK = 256


class SpanWriter(BlockWriter):
    """Writes the spans of one rank, at most `max_bytes`; the others are counted. `header`: rank, run_id."""

    def __init__(self, path: Path, header: dict[str, Any], max_bytes: int) -> None:
        content = {"format": SPANS_FORMAT, "version": SPANS_VERSION, "lanes": list(LANES), **header}
        super().__init__(
            path, content, SPAN_FIELDS, rows_per_block=_SPANS_PER_BLOCK, max_bytes=max_bytes, rank=header["rank"]
        )
        self._names: dict[str, int] = {}
        self._num_written_names = 0

    def add(  # noqa: PLR0913 - the fields of a row; called in hot loops
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
        """Adds a span, CLOCK_MONOTONIC nanoseconds of this machine; in any order, from one thread."""
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = OTHER_NAMES
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
        self.append((start_ns, end_ns - start_ns, queued_ns, num_bytes, step, lane, track, number, 0))

    def flush(self) -> None:
        """Writes the rows in memory with the names that they use first. Raises OSError: the disk is full."""
        first = self._num_written_names
        new_names = [name[:200] for name in islice(self._names, first, None)]
        note = {"first": first, "names": new_names} if new_names else None
        if self.flush_with(note):
            self._num_written_names += len(new_names)


class SpanReader(BlockReader):
    """Reads the spans of one rank by block. `run_id`: the run that they must belong to; empty: any."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        super().__init__(path, SPANS_FORMAT, "spans", run_id=run_id)
        self.names: list[str] = []
        """Names met so far, by number; complete for the rows given so far."""
        expected = {"version": SPANS_VERSION, "fields": [list(f) for f in SPAN_FIELDS], "lanes": list(LANES)}
        if any(self.header.get(key) != value for key, value in expected.items()):
            raise IncompleteDataError(f"{path}: spans of an unknown version ({self.header.get('version')!r})")

    def take_note(self, note: dict[str, Any]) -> None:
        first, names = note.get("first"), note.get("names")
        # Indexes continue those before; after a gap spans would get wrong names.
        if type(first) is not int or not isinstance(names, list) or first != len(self.names):
            raise IncompleteDataError(f"{self.path}: names of spans are damaged")
        self.names.extend(str(name) for name in names)
        if len(self.names) > MAX_NAMES + 1:
            raise IncompleteDataError(f"{self.path}: more names of spans than a file may have")

    def blocks(self) -> Iterator[Rows]:
        """Yields structured arrays with the fields of `SPAN_FIELDS`; lanes are in `LANES`, names in `names`."""
        self.names.clear()
        for block in super().blocks():
            if len(block):
                if int(block["lane"].max()) >= len(LANES) or int(block["name"].max()) >= len(self.names):
                    raise IncompleteDataError(f"{self.path}: spans with an unknown lane or name")
                yield block
