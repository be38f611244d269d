"""`node-NNNN.samples`: what the sampler of one node read; blocks of rows.

The columns depend on the node and stand in the header: `time_ns` (CLOCK_MONOTONIC of the node, when the reading began),
`late_ns` (behind its due time), then one column of 4- or 8-byte floats for each field that could be read. A field's
name says its unit: `gpu.0.power_w`, `host.cpu.3.busy` (share), `host.net.eth0.received_bytes` (counters run from
anywhere). NaN: not read at this time (slow sources are read every tenth time), or not to be had; never a zero
instead. The header's `unavailable` names what this node does not report, each with the reason; notes hold later
failures (`{"failed": field, "time_ns": ..., "reason": ...}`) and, at the end, the sampler's own
account (`{"end": {...}}`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader

if TYPE_CHECKING:
    from dlbench.records.rows.reader import Rows, Values

SAMPLES_FORMAT, SAMPLES_VERSION = "dlbench.samples", 1

TIME_FIELDS: tuple[tuple[str, str], ...] = (("time_ns", "<i8"), ("late_ns", "<i8"))
SAMPLE_TYPES = ("<f4", "<f8")  # Types of sampled fields; counters need 8 bytes.

_HEADER_KEYS: dict[str, type | tuple[type, ...]] = {
    "node_rank": int,
    "host": str,
    "period_s": (int, float),
    "unavailable": dict,
}


def sample_writer(path: Path, header: dict[str, Any], columns: list[tuple[str, str]], max_bytes: int) -> BlockWriter:
    """The writer of one node's samples. `header`: node_rank, host, run_id, period_s, unavailable; `columns`: name and
    type (`<f4` or `<f8`) of each field; `max_bytes`: this node's share.
    """
    content = {"format": SAMPLES_FORMAT, "version": SAMPLES_VERSION, **header}
    return BlockWriter(
        path, content, [*TIME_FIELDS, *columns], delta=("time_ns",), rows_per_block=16, max_bytes=max_bytes
    )


@dataclass(kw_only=True)
class SampleReader:
    """Samples of one node, block by block."""

    path: Path
    run_id: str = ""  # The run that they must be of; empty: any.
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Fields that failed on the way, met so far: `failed`, `time_ns`, `reason`."""
    end: dict[str, Any] | None = None  # The sampler's own account; None until met, and where it was killed.

    def __post_init__(self) -> None:
        self._reader = BlockReader(self.path, SAMPLES_FORMAT, "samples", run_id=self.run_id)
        header = self.header = self._reader.header
        """node_rank, host, run_id, period_s, unavailable, fields."""
        if header.get("version") != SAMPLES_VERSION:
            raise IncompleteDataError(f"{self.path}: samples of an unknown version ({header.get('version')!r})")
        wrong = [key for key, kind in _HEADER_KEYS.items() if not isinstance(header.get(key), kind)]
        if not wrong and not 0 < header["period_s"] < math.inf:
            wrong = ["period_s"]
        if wrong:
            raise IncompleteDataError(f"{self.path}: the header's `{wrong[0]}` is damaged")
        columns = self._reader.columns()
        kinds = {kind for _, kind in columns[len(TIME_FIELDS) :]}
        if columns[: len(TIME_FIELDS)] != TIME_FIELDS or not kinds <= set(SAMPLE_TYPES):
            raise IncompleteDataError(f"{self.path}: the header's `fields` are damaged")

    @property
    def columns(self) -> list[str]:
        """Names of the sampled fields."""
        return [name for name, _ in self._reader.columns()[len(TIME_FIELDS) :]]

    @property
    def torn_bytes(self) -> int:
        """Bytes behind the last whole block, known when all was read: 0 unless the sampler was killed while writing."""
        return self._reader.torn_bytes

    def blocks(self) -> Iterator[Rows]:
        """Structured arrays with the fields of the header. Raises IncompleteDataError: a block is damaged."""
        self.failures.clear()
        self.end = None
        for block in self._reader.blocks():
            if isinstance(block, dict):
                self._take(block)
            else:
                yield block

    def read(self, names: Collection[str]) -> dict[str, Values]:
        """Some columns of all samples, by name, each of shape (samples,); much quicker than block by block."""
        self.failures.clear()
        self.end = None
        found, notes = self._reader.read(names)
        for note in notes:
            self._take(note)
        return found

    def _take(self, note: dict[str, Any]) -> None:
        if "failed" in note:
            self.failures.append(note)
        elif isinstance(note.get("end"), dict):
            self.end = note["end"]
