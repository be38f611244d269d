"""What the sampler of a node is asked for, a line of JSON at a time, and its samples in a file of limited size."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlbench.machine.sources import Source
from dlbench.records.rows.samples import TIME_FIELDS, sample_writer

GRACE_S = 5.0  # How long a call that hangs may keep the sampler alive after SIGTERM: it must not outlive its rank.
_TERMINATED = 128 + signal.SIGTERM
_MAX_LINE = 1 << 20
SLOW_EVERY = 10  # One of N samples reads the slow sources too.
SPARE_ROWS = 3  # Rows for which room is kept to the end: where measuring begins, where it ends, and the last sample.

PARTS = 10
"""Each time another of these parts of the room is full the period doubles; the last part is divided so again.

Equal parts hold equally many rows, so that the time that the file reaches over grows as 2 to their number. Halving what
is left instead makes all levels equally long: a file of 50 kB is then full within two minutes.
"""

_BLOCK_BYTES = 64  # What a block needs besides its rows, at most.


@dataclass(frozen=True, kw_only=True)
class SamplerOrder:
    """One node's sampler."""

    run_id: str
    samples: str  # Path of the file of samples, which does not exist yet.
    clock: str  # Path of `clock.json`.
    node_rank: int
    num_nodes: int
    host: str
    token: str  # The same on all nodes of one start of the run.
    period_s: float
    max_bytes: int  # Limit of the file of samples.
    cores: tuple[int, ...]  # Cores the sampler binds itself to; none: those it has.
    interface: str | None  # Network interface at which node 0 answers about its clock; none: the one that routes.
    parent: int = 0  # Number of the process that starts it and without which it ends; 0: it is not started directly.

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> SamplerOrder:
        """The order of a line. Raises ValueError: not a line of `to_line`."""
        try:
            content: dict[str, Any] = json.loads(line)
            return cls(**{**content, "cores": tuple(content["cores"])})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"not a sampler's order: {error}") from None


def await_termination() -> int:
    """Returns a pipe that is readable from the first SIGTERM on: an exception could come in the middle of writing."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def end() -> None:
        select.select([readable], [], [])
        time.sleep(GRACE_S)
        os._exit(_TERMINATED)

    threading.Thread(target=end, name="termination", daemon=True).start()
    return readable


class Commands:
    """Lines of a pipe, without a thread; `termination` becomes readable when the process is to end."""

    def __init__(self, descriptor: int, termination: int) -> None:
        self._descriptor = descriptor
        self._termination = termination
        self._rest = b""

    def line(self, wait_s: float | None) -> bytes | None:
        """Returns the next line, if one comes within `wait_s`; EOFError: the writer is gone, SystemExit: the end."""
        if b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor, self._termination], [], [], wait_s)
            if self._termination in ready:
                raise SystemExit(_TERMINATED)
            if not ready:
                return None
            more = os.read(self._descriptor, 65536)
            if not more or len(self._rest) > _MAX_LINE:
                raise EOFError
            self._rest += more
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        return line


class Sampling:
    """Reads a source at `start + k * period` of the clock, so that lateness does not add up; see `PARTS`."""

    def __init__(self, order: SamplerOrder, source: Source, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._source = source
        self._clock = clock
        self._max_bytes = order.max_bytes
        self._base_ns = round(order.period_s * 1e9)
        header = {
            "node_rank": order.node_rank,
            "host": order.host,
            "run_id": order.run_id,
            "period_s": order.period_s,
            "unavailable": dict(source.unavailable),
            "facts": source.describe(),
        }
        columns = [(field.name, str(field.kind)) for field in source.fields]
        self._row_bytes = sum(int(kind[-1]) for _, kind in (*TIME_FIELDS, *columns))
        self._writer = sample_writer(Path(order.samples), header, columns, order.max_bytes)
        self._header_bytes = self._writer.bytes_written
        self._level = 0
        self._written_stride = 1
        self._start_ns = self._read_ns = clock()
        self._next = 0
        self._stride = 1
        self._taken = 0
        self._held = 0
        self._left_out = 0
        self._skipped = 0
        self._late = array("q")
        self.failures: list[str] = []  # What failed on the way, each a sentence.

    @property
    def due_ns(self) -> int:
        """When the next sample is due, or the source has to be looked at so that none of its counters is lost."""
        keep_up_s = self._source.keep_up_s
        if keep_up_s == math.inf:
            return self._sample_due_ns
        return min(self._sample_due_ns, self._read_ns + round(keep_up_s * 1e9))

    @property
    def _sample_due_ns(self) -> int:
        return self._start_ns + self._next * self._base_ns

    @property
    def period_s(self) -> float:
        """The longest period at which a sample was written; the first one before that."""
        return self._written_stride * self._base_ns / 1e9

    def take_due(self) -> None:
        """Takes the newest sample that is due, skipping those before it; or only looks at the source, where none is."""
        if self._clock() < self._sample_due_ns:
            self._read_ns = self._clock()
            self._source.keep_up()
            return
        behind = max(0, self._clock() - self._sample_due_ns) // (self._stride * self._base_ns)
        self._skipped += behind
        self._next += behind * self._stride
        due = self._sample_due_ns
        begin, fits = self._read_and_write(due, kept_bytes=SPARE_ROWS * (self._row_bytes + _BLOCK_BYTES))
        self._late.append(begin - due)
        self._next += self._stride
        if fits:
            self._written_stride = self._stride
            # The period doubles as often as the room that is used wants it; it is never made shorter again.
            if self._wanted_level() > self._level and self._writer.num_rows == 0:
                self.flush()  # how far rows shrink is not known before
            level = self._wanted_level()
            if level > self._level:
                self._stride <<= level - self._level
                self._level = level
                self._next += -self._next % self._stride
            return
        # There is no room now and will be none: it is looked at less and less.
        self._stride *= 2
        self._next += -self._next % self._stride

    def _wanted_level(self) -> int:
        """How often the period has doubled with the room that is used now, rows that are held included."""
        written = self._writer.bytes_written - self._header_bytes
        rows = self._writer.num_rows
        held = self._held * (written / rows if rows else self._row_bytes)
        room = self._max_bytes - self._header_bytes - SPARE_ROWS * (self._row_bytes + _BLOCK_BYTES)
        parts = PARTS * (written + held) / max(1, room)
        if parts < PARTS - 1:
            return int(parts)
        return PARTS - 1 + min(int(PARTS * (parts - (PARTS - 1))), PARTS - 1)

    def take_now(self, *, is_last: bool = False) -> None:
        """Takes a sample out of turn, of all sources; `is_last`: it may take the room that is kept for the last one."""
        self._taken = 0
        self._read_and_write(None, kept_bytes=0 if is_last else self._row_bytes + _BLOCK_BYTES)

    def _read_and_write(self, due: int | None, *, kept_bytes: int) -> tuple[int, bool]:
        """When the reading began, and whether there was room for it next to what is kept."""
        begin = self._read_ns = self._clock()
        values = self._source.read(slow=self._taken % SLOW_EVERY == 0)
        self._taken += 1
        for name, reason in self._source.drain_failures():
            self.failures.append(f"{name}: {reason}")
            self._writer.note({"failed": name, "time_ns": begin, "reason": reason})
            self._held = 0
        if not self._has_room(kept_bytes):
            self.flush()
        fits = self._has_room(kept_bytes)
        if fits:
            written = self._writer.bytes_written
            self._writer.append((begin, 0 if due is None else begin - due, *values))
            self._held = self._held + 1 if self._writer.bytes_written == written else 0
        else:
            self._left_out += 1
        return begin, fits

    def _has_room(self, kept_bytes: int) -> bool:
        """Whether one more row fits even if the block does not shrink when it is deflated."""
        block = (self._held + 1) * self._row_bytes + _BLOCK_BYTES
        return self._writer.bytes_written + block + kept_bytes <= self._max_bytes

    def flush(self) -> None:
        """Writes what is held. Raises OSError: the disk is full or gone."""
        self._writer.flush()
        self._held = 0

    def account(self) -> dict[str, Any]:
        """Its part of `records.watch.NodeWatch`, of what is written by now; to be asked for once."""
        late = sorted(self._late) or [0]
        if self._skipped:
            self.failures.append(f"{self._skipped} samples were skipped: those before them took longer than the period")
        return {
            "num_samples": self._writer.num_rows,
            "dropped_samples": self._left_out + self._writer.dropped,
            "period_s": self.period_s,
            "late_median_s": (late[(len(late) - 1) // 2] + late[len(late) // 2]) / 2e9,
            "late_max_s": late[-1] / 1e9,
            "sources": [field.name for field in self._source.fields],
            "unavailable": dict(self._source.unavailable),
        }

    def end(self, account: dict[str, Any]) -> None:
        """Writes the sampler's account behind the samples. Raises OSError: the disk is full or gone."""
        self._writer.note({"end": account})

    def close(self) -> None:
        """Closes file and source. Raises OSError: the disk is full or gone."""
        try:
            self._source.close()
        finally:
            self._writer.close()
