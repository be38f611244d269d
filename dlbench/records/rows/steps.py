"""`node-NNNN.steps`: raw times of every step of the ranks of a node; appended while they run, a torn tail is legal.

The rows lie in compressed blocks, see `dlbench.records.rows.format`: noisy times take about 27 bytes per step. All
times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.errors import IncompleteDataError, RunError, refused
from dlbench.lazy import np, npt
from dlbench.records.rows.format import BlockWriter
from dlbench.records.rows.reader import BlockReader
from dlbench.records.rows.shared import Opened

STEPS_FORMAT, STEPS_VERSION = "dlbench.steps", 1

PHASES = ("input", "h2d", "forward", "backward", "exchange", "optimizer")
"""Phases of a step, in order; `exchange` is the gradient exchange after the backward pass."""

LAUNCHED = ("forward", "backward", "optimizer")
"""Phases in which a device that computes on its own may wait for the host to hand it work."""

FIELDS: tuple[tuple[str, str], ...] = (
    ("step", "<i4"),  # from 0, warm-up included
    ("warmup", "<i4"),  # 1 for a warm-up step
    ("start_ns", "<i8"),  # CLOCK_MONOTONIC of this rank's machine
    ("step_ns", "<i8"),  # start of this step to start of the next; phases and `other` sum to it
    *((f"{phase}_ns", "<i8") for phase in PHASES),
    ("samples", "<i4"),  # samples this rank processed in the step
    ("loss", "<f4"),  # this rank's loss, before averaging over ranks
)

LAUNCH_FIELDS: tuple[tuple[str, str], ...] = tuple((f"launch_{phase}_ns", "<i8") for phase in LAUNCHED)
"""Further columns, of GPUs only: how long the device waited for the host's calls within the phase, at most."""

_ALL_FIELDS = [list(field) for field in (*FIELDS, *LAUNCH_FIELDS)]


def step_dtype(*, launches: bool = False) -> np.dtype[np.void]:
    """The numpy layout of one record; `launches`: with what only GPUs have."""
    return np.dtype([*FIELDS, *(LAUNCH_FIELDS if launches else ())])


class StepWriter(BlockWriter):
    """Appends records; keeps up to `capacity` in memory, then compresses them and writes them in one call: more than
    ranks measure between two standstills, at which they flush, so that no measured step has that work in it. Raises
    RunError: rows of the rank are there already, or cannot be written; as all errors, it names the file.
    """

    def __init__(self, path: Path, header: dict[str, Any], capacity: int = 128, *, launches: bool = False) -> None:
        """`header` is stored with the file: rank, clock, device. `launches`: records end with `LAUNCH_FIELDS`."""
        fields = (*FIELDS, *LAUNCH_FIELDS) if launches else FIELDS
        content = {"format": STEPS_FORMAT, "version": STEPS_VERSION, **header}
        with _naming(path):
            super().__init__(
                path, content, fields, delta=("step", "start_ns"), rows_per_block=capacity, rank=header["rank"]
            )

    def _write(self, data: bytes, num_rows: int = 0) -> None:
        with _naming(self._path):
            super()._write(data, num_rows)

    def sync(self) -> None:
        """Writes what is held in memory and waits until the disk has it: a record rests on whole step files."""
        with _naming(self._path):
            super().sync()

    def close(self) -> None:
        with _naming(self._path):
            super().close()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Why it ends is known already; a disk that refuses the rest as well would hide it.
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
    """Steps of one rank, as read."""

    header: dict[str, Any]
    steps: npt.NDArray[np.void]  # Structured array with the fields of `FIELDS`.
    torn_bytes: int  # Bytes behind the last whole block: 0 unless the rank was killed while writing.

    @property
    def measured(self) -> npt.NDArray[np.void]:
        """Without warm-up."""
        measured: npt.NDArray[np.void] = self.steps[self.steps["warmup"] == 0]
        return measured


class StepReader(BlockReader):
    """Steps of one rank. `rows`: what was opened already; `run_id`: the run that they must be of; empty: any."""

    def __init__(self, path: Path, rows: Opened | None = None, *, run_id: str = "") -> None:
        super().__init__(path, STEPS_FORMAT, "step times", rows, run_id)
        version, fields = self.header.get("version"), self.header.get("fields")
        self.launches = fields == _ALL_FIELDS
        """Whether rows have `LAUNCH_FIELDS` too."""
        if version != STEPS_VERSION or not (self.launches or fields == _ALL_FIELDS[: len(FIELDS)]):
            raise IncompleteDataError(f"{path}: step times of an unknown version ({version!r})")


def read_steps(path: Path, run_id: str = "") -> StepFile:
    """The steps of one rank. Raises IncompleteDataError: as `StepReader`, or they are damaged."""
    reader = StepReader(path, run_id=run_id)
    blocks = [*reader.blocks()]
    # Not `concatenate`, which compares the fields of all arrays with each other.
    steps = np.empty(sum(len(block) for block in blocks), dtype=step_dtype(launches=reader.launches))
    end = 0
    for block in blocks:
        steps[end : (end := end + len(block))] = block
    return StepFile(header=reader.header, steps=steps, torn_bytes=reader.torn_bytes)
