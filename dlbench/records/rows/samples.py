"""`node-NNNN.samples`: the samples of a node as blocks of rows. Columns, notes and NaN: docs/formats.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader

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
    """Returns the writer of a node's samples. `header`: node_rank, host, run_id, period_s, unavailable."""
    content = {"format": SAMPLES_FORMAT, "version": SAMPLES_VERSION, **header}
    return BlockWriter(path, content, [*TIME_FIELDS, *columns], rows_per_block=16, max_bytes=max_bytes)


class SamplesReader(BlockReader):
    """Reads the samples of a node. `run_id`: the run that they must belong to; empty: any."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        super().__init__(path, SAMPLES_FORMAT, "samples", run_id=run_id)
        header = self.header
        if header.get("version") != SAMPLES_VERSION:
            raise IncompleteDataError(f"{path}: samples of an unknown version ({header.get('version')!r})")
        wrong = [key for key, kind in _HEADER_KEYS.items() if not isinstance(header.get(key), kind)]
        if not wrong and not 0 < header["period_s"] < math.inf:
            wrong = ["period_s"]
        if wrong:
            raise IncompleteDataError(f"{path}: the header's `{wrong[0]}` is damaged")
        fields = self.fields
        kinds = {kind for _, kind in fields[len(TIME_FIELDS) :]}
        if fields[: len(TIME_FIELDS)] != TIME_FIELDS or not kinds <= set(SAMPLE_TYPES):
            raise IncompleteDataError(f"{path}: the header's `fields` are damaged")

    @property
    def columns(self) -> list[str]:
        return [name for name, _ in self.fields[len(TIME_FIELDS) :]]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Returns the failed fields in the blocks read so far: `failed`, `time_ns`, `reason`."""
        return [note for note in self.notes if "failed" in note]

    @property
    def end(self) -> dict[str, Any] | None:
        """Returns the sampler's summary; None before it is read, and if the sampler was killed."""
        ends = [note["end"] for note in self.notes if isinstance(note.get("end"), dict)]
        return ends[-1] if ends else None
