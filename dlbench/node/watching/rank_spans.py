"""What one rank did when: its stages from start to end, and what the window of watched steps saw.

Spans must never end a run: where they cannot be written, the rest is left out and the reason told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dlbench.node.ranks import RankPlace
from dlbench.node.watching.byte_budget import STAGE_BYTES, span_bytes
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import SPAN_FIELDS, STAGE, SpanWriter
from dlbench.specs.plan import RunPlan

_ROW_BYTES = sum(int(kind[-1]) for _, kind in SPAN_FIELDS)
_HELD_ROWS = 256
"""Rows that a `SpanWriter` holds at most before it writes them."""
_NOTE_BYTES = 64
"""What a new name takes besides its letters, at most."""
_BLOCK_BYTES = 32
"""What a block takes besides its rows, at most, where they cannot be made smaller."""
_LAST_BYTES = 3 * (_ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES + 16)
"""What the stages take that follow a pause, at most: the one it interrupts, "measuring" and "finishing"."""


@dataclass(frozen=True, kw_only=True)
class SpanTotals:
    """How much one rank wrote."""

    num_spans: int
    dropped: int
    """For want of room, or because the file could not be written."""
    num_bytes: int


class RankSpans:
    """Spans of one rank: stages that follow each other without a gap, and single spans of the window.

    Args:
        plan: a plan that watches.
        folder: where the spans go.
        place: this rank.
        start_ns: when the first stage, "starting", began, CLOCK_MONOTONIC; None: now.
    """

    def __init__(self, plan: RunPlan, folder: RunFolder, place: RankPlace, *, start_ns: int | None = None) -> None:
        self.problem = ""
        """Why spans are missing, if the file could not be written; else empty."""
        self._writer: SpanWriter | None = None
        self._given = 0
        self._names: set[str] = set()
        self._name_bytes = 0
        self._num_spans = self._num_bytes = 0
        self._is_closed = False
        self._stage = "starting"
        self._since_ns = time.monotonic_ns() if start_ns is None else start_ns
        self._max_bytes = span_bytes(plan, place.rank)
        # Stages come last as well as first: the window must leave room for them, whatever waits in memory.
        self._window_bytes = self._max_bytes - STAGE_BYTES - _HELD_ROWS * _ROW_BYTES
        header = {"rank": place.rank, "run_id": plan.run_id}
        try:
            self._writer = SpanWriter(folder.spans(place.rank), header, self._max_bytes)
        except OSError as error:
            self._give_up(error)

    def stage(self, name: str) -> None:
        """The stage in force ends and this one begins; what is known so far is then in the file."""
        self._end_stage(name)
        self._flush()

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Interrupts the stage in force by another one (evaluation, checkpoint).

        Where room is left for the last stages only, the stage in force goes on instead, and the two spans that are
        missing are counted.
        """
        if not self._has_room_for_pause():
            self._given += 2
            yield
            return
        before = self._stage
        self._end_stage(name)
        try:
            yield
        finally:
            self._end_stage(before)

    def _has_room_for_pause(self) -> bool:
        for _ in range(2):
            writer = self._writer
            if writer is None:
                return True
            # What is held in memory counts as it is; once written it is smaller.
            held = (writer.num_held + 2) * _ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES
            if writer.bytes_written + self._name_bytes + held + _LAST_BYTES <= self._max_bytes:
                return True
            self._flush()
        return False

    def _end_stage(self, following: str) -> None:
        now = time.monotonic_ns()
        self.add(STAGE, self._stage, self._since_ns, now)
        self._stage, self._since_ns = following, now

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
        """One span, CLOCK_MONOTONIC nanoseconds; see `SpanWriter.add`. What does not fit is counted."""
        self._given += 1
        writer = self._writer
        if writer is None:
            return
        if lane != STAGE:
            if writer.bytes_written + self._name_bytes > self._window_bytes:
                return
            if name not in self._names:
                self._names.add(name)
                self._name_bytes += len(name) + _NOTE_BYTES
        try:
            writer.add(lane, name, start_ns, end_ns, step=step, track=track, num_bytes=num_bytes, queued_ns=queued_ns)
        except OSError as error:
            self._give_up(error)

    def close(self) -> SpanTotals:
        """Ends the stage in force and the file; twice does no harm."""
        if not self._is_closed:
            self._end_stage(self._stage)
            self._is_closed = True
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self.problem = _told(error)
            self._count(writer)
        return SpanTotals(num_spans=self._num_spans, dropped=self._given - self._num_spans, num_bytes=self._num_bytes)

    def _flush(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.problem = _told(error)
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # it was told just now
                writer.close()
            self._count(writer)

    def _count(self, writer: SpanWriter) -> None:
        self._num_spans, self._num_bytes = writer.num_spans, writer.bytes_written


def _told(error: OSError) -> str:
    return f"spans could not be written: {error.strerror or error}"
