"""`rank-NNNN.steps`: raw times of every step of one rank; appended while it runs, a torn tail is legal.

Layout: one line of JSON (the header, ending in a newline), then records of fixed size in the
layout of `STEP_DTYPE`, little-endian. All times are nanoseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dlbench.errors import IncompleteDataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STEPS_VERSION = 1

PHASES = ("input", "h2d", "forward", "backward", "exchange", "optimizer")
"""Phases of a step, in order; `exchange` is the exposed part of the gradient exchange."""

FIELDS: tuple[tuple[str, str], ...] = (
    ("step", "<i4"),  # from 0, warm-up included
    ("warmup", "<i4"),  # 1 for a warm-up step
    ("start_ns", "<i8"),  # CLOCK_MONOTONIC of this rank's machine
    ("step_ns", "<i8"),  # start of this step to start of the next; phases and `other` sum to it
    *((f"{phase}_ns", "<i8") for phase in PHASES),
    ("samples", "<i4"),  # samples this rank processed in the step
    ("loss", "<f4"),  # this rank's loss, before averaging over ranks
)


def step_dtype() -> np.dtype[np.void]:
    """The numpy layout of one record."""
    import numpy as np

    return np.dtype(list(FIELDS))


class StepWriter:
    """Appends records; keeps up to `capacity` in memory and writes them in one call."""

    def __init__(self, path: Path, header: dict[str, Any], capacity: int = 64) -> None:
        """`header` is stored with the file: rank, clock, device."""
        import numpy as np

        self._buffer = np.zeros(capacity, dtype=step_dtype())
        self._used = 0
        self._unwritten = b""
        self._file = path.open("xb", buffering=0)
        content = {"format": "dlbench.steps", "version": STEPS_VERSION, "fields": [list(f) for f in FIELDS], **header}
        self._file.write((json.dumps(content, sort_keys=True) + "\n").encode())

    def append(self, record: tuple[float, ...]) -> None:
        """Adds one record, in the order of `FIELDS`."""
        self._buffer[self._used] = record
        self._used += 1
        if self._used == len(self._buffer):
            self.flush()

    def flush(self) -> None:
        """Writes what is held in memory.

        Raises:
            OSError: the disk is full or gone.
        """
        self._unwritten += self._buffer[: self._used].tobytes()
        self._used = 0
        while self._unwritten:
            # Unbuffered writes may be short; a full disk then raises at the next one, and what was
            # written of a record must not be written again.
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        """Writes the rest and closes."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class StepFile:
    """Steps of one rank, as read."""

    header: dict[str, Any]
    steps: npt.NDArray[np.void]
    """Structured array with the fields of `FIELDS`."""
    torn_bytes: int
    """Bytes behind the last whole record: 0 unless the rank was killed while writing."""

    @property
    def measured(self) -> npt.NDArray[np.void]:
        """Without warm-up."""
        measured: npt.NDArray[np.void] = self.steps[self.steps["warmup"] == 0]
        return measured


def read_steps(path: Path) -> StepFile:
    """The steps of one rank.

    Raises:
        IncompleteDataError: not a steps file, or one of an unknown version.
    """
    import numpy as np

    try:
        content = path.read_bytes()
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    head, separator, body = content.partition(b"\n")
    try:
        header = json.loads(head) if separator else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != "dlbench.steps":
        raise IncompleteDataError(f"{path}: not a file of step times, or damaged at its start")
    if header.get("version") != STEPS_VERSION or header.get("fields") != [list(f) for f in FIELDS]:
        raise IncompleteDataError(f"{path}: step times of an unknown version ({header.get('version')!r})")
    dtype = step_dtype()
    whole = len(body) // dtype.itemsize
    steps = np.frombuffer(body, dtype=dtype, count=whole)
    return StepFile(header=header, steps=steps, torn_bytes=len(body) - whole * dtype.itemsize)
