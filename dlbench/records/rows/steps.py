"""`node-NNNN.steps`: raw times of every step of the ranks of a node, ns; 49 bytes per step unless it takes 4.3 s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError, RunError, refused
from dlbench.lazy import np, npt
from dlbench.records.rows.format import BlockWriter, Fields
from dlbench.records.rows.reader import BlockReader
from dlbench.records.rows.shared import RankRows

STEPS_FORMAT, STEPS_VERSION = "dlbench.steps", 1

PHASES = ("input", "h2d", "forward", "backward", "exchange", "optimizer")
"""Phases of a step, in order; `exchange` is the gradient exchange after the backward pass."""

LAUNCHED = ("forward", "backward", "optimizer")
"""Phases in which a GPU may wait for the host's calls."""

FIELDS: tuple[tuple[str, str], ...] = (
    ("step", "<i4"),  # from 0, warm-up included
    ("warmup", "<i4"),  # 1 for a warm-up step
    ("start_ns", "<i8"),  # CLOCK_MONOTONIC of this rank's machine
    ("step_ns", "<i8"),  # start of this step to start of the next; phases and `other` sum to it
    *((f"{phase}_ns", "<i8") for phase in PHASES),
    ("samples", "<i4"),  # samples this rank processed in the step
    ("loss", "<f4"),  # this rank's loss, before averaging over ranks
)
"""Columns and their types in memory, and in blocks with a time that 4 bytes do not hold, 4.29 s."""

LAUNCH_FIELDS: tuple[tuple[str, str], ...] = tuple((f"launch_{phase}_ns", "<i8") for phase in LAUNCHED)
"""Further columns of GPUs: upper bound of the device's wait for the host's calls within the phase."""


def narrow(fields: Fields) -> tuple[tuple[str, str], ...]:
    """Returns the columns with the types of a block without a longer time than 4.29 s, 49 bytes instead of 80."""
    kinds = {name: "<u4" for name, _ in fields if name.endswith("_ns") and name != "start_ns"}
    kinds["warmup"] = "<u1"
    return tuple((name, kinds.get(name, kind)) for name, kind in fields)


_ALL_FIELDS = (*FIELDS, *LAUNCH_FIELDS)
# Columns in a header and in memory; early files have the types of memory.
_LAYOUTS = [(fields, wide) for wide in (FIELDS, _ALL_FIELDS) for fields in (narrow(wide), wide)]


class StepWriter(BlockWriter):
    """Appends rows; keeps `capacity` in memory until ranks pause, so that no measured step includes the writing."""

    def __init__(self, path: Path, header: dict[str, Any], capacity: int = 128, *, launches: bool = False) -> None:
        """`header` is stored with the file: rank, clock, device. `launches`: records end with `LAUNCH_FIELDS`."""
        wide = _ALL_FIELDS if launches else FIELDS
        content = {"format": STEPS_FORMAT, "version": STEPS_VERSION, **header}
        with _naming(path):
            super().__init__(
                path, content, narrow(wide), rows_per_block=capacity, rank=header["rank"], wide_fields=wide
            )

    def flush(self) -> None:
        with _naming(self._path):
            super().flush()

    def sync(self) -> None:
        """Writes the rows in memory and syncs the file, before the record is written."""
        with _naming(self._path):
            super().sync()

    def close(self) -> None:
        with _naming(self._path):
            super().close()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The first error must not be hidden by a second one.
        with suppress(RunError):
            self.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None


@dataclass(frozen=True, kw_only=True)
class StepFile:
    """The steps of a rank."""

    header: dict[str, Any]
    steps: npt.NDArray[np.void]  # Structured array with the fields of `FIELDS`.
    torn_bytes: int  # Bytes behind the last complete block; 0 unless the rank was killed.

    @property
    def measured(self) -> npt.NDArray[np.void]:
        measured: npt.NDArray[np.void] = self.steps[self.steps["warmup"] == 0]
        return measured


class StepReader(BlockReader):
    """Reads the steps of a rank. `part`: its blocks, if they were read before; `run_id`: the run that they must belong
    to; empty: any.
    """

    def __init__(self, path: Path, part: RankRows | None = None, *, run_id: str = "") -> None:
        super().__init__(path, STEPS_FORMAT, "step times", part, run_id)
        version, in_header = self.header.get("version"), self.header.get("fields")
        layout = next(((fields, wide) for fields, wide in _LAYOUTS if [*map(list, fields)] == in_header), None)
        if version != STEPS_VERSION or layout is None:
            raise IncompleteDataError(f"{path}: step times of an unknown version ({version!r})")
        self.fields, self.wide_fields = layout
        self.launches = layout[1] == _ALL_FIELDS


def read_steps(path: Path, run_id: str = "") -> StepFile:
    """Reads the steps of a rank. Raises IncompleteDataError: as `StepReader`, or they are damaged."""
    reader = StepReader(path, run_id=run_id)
    return StepFile(header=reader.header, steps=reader.read_rows(), torn_bytes=reader.torn_bytes)
