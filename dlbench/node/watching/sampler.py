"""``python -m dlbench.node.watching.sampler``: the sampler process of one node. It reads its order from standard input
(`SamplerOrder`, one line) and then commands, a line of JSON each: `measuring`, `finish` (prints a
`records.watch.NodeWatch`), `stop`. Samples go to a file of limited size. It imports neither torch nor numpy nor pandas,
since it shares memory and cores with the ranks.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlbench.errors import DlbenchError, ExitCode
from dlbench.machine.host import open_sources
from dlbench.machine.sources import Source
from dlbench.node.rendezvous import own_address
from dlbench.node.watching.clocks import ClockFollower, ClockServer, OffsetEstimate, publish
from dlbench.records.rows.samples import TIME_FIELDS, sample_writer

GRACE_S = 5.0  # Seconds after SIGTERM until the sampler ends even if a call hangs: it must not outlive its rank.
_TERMINATED = 128 + signal.SIGTERM
_MAX_LINE = 1 << 20
SLOW_EVERY = 10  # Every tenth sample also reads the slow sources.
SPARE_ROWS = 3  # Rows reserved for the begin and end of the measured steps and for the last sample.
# Number of parts of the file. Each time one is full, the sampling period doubles; the last part is divided again in the
# same way. Parts are equal, so that the time covered by the file grows as 2 to their number.
PARTS = 10
_BLOCK_BYTES = 64  # Most bytes of a block besides its rows.
NICENESS = 5  # Ranks come first on shared cores; each sample records how late it is.
_PR_SET_PDEATHSIG = 1
_OPENING_S = 3.0


@dataclass(frozen=True, kw_only=True)
class SamplerOrder:
    """The settings of one node's sampler."""

    run_id: str
    samples: str  # Path of the file of samples, which does not exist yet.
    clock: str  # Path of `clock.json`.
    node_rank: int
    num_nodes: int
    host: str
    token: str  # The same on all nodes of one start of the run.
    period_s: float
    max_bytes: int  # Limit of the file of samples.
    cores: tuple[int, ...]  # Cores to which the sampler binds itself; empty for no change.
    interface: str | None  # Network interface of node 0's clock server; None for the one of the default route.
    parent: int = 0  # Process id of the rank with which the sampler ends; 0 if no rank starts it directly.

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> SamplerOrder:
        """Parses a line of `to_line`. Raises ValueError for any other."""
        try:
            content: dict[str, Any] = json.loads(line)
            return cls(**{**content, "cores": tuple(content["cores"])})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"not a sampler's order: {error}") from None


def await_termination() -> int:
    """Returns a pipe that becomes readable with the first SIGTERM; an exception could interrupt writing."""
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
    """Reads lines from a pipe; `termination` is a pipe that becomes readable when the process is to end."""

    def __init__(self, descriptor: int, termination: int) -> None:
        self._descriptor = descriptor
        self._termination = termination
        self._buffer = b""

    def line(self, wait_s: float | None) -> bytes | None:
        """Returns the next line, None after `wait_s`. Raises EOFError without a writer, SystemExit at termination."""
        if b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor, self._termination], [], [], wait_s)
            if self._termination in ready:
                raise SystemExit(_TERMINATED)
            if not ready:
                return None
            received = os.read(self._descriptor, 65536)
            if not received or len(self._buffer) > _MAX_LINE:
                raise EOFError
            self._buffer += received
        if b"\n" not in self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class Sampling:
    """Samples a source at `start + k * period`, so that delays do not add up; `PARTS` explains the period."""

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
        self._num_buffered = 0  # Rows that the writer has not yet written.
        self._left_out = 0
        self._skipped = 0
        self._late = array("q")
        self.failures: list[str] = []  # Errors of single sources.

    @property
    def due_ns(self) -> int:
        """Time of the next sample, or of the next call that keeps counters of the source from wrapping, ns."""
        keep_up_s = self._source.keep_up_s
        if keep_up_s == math.inf:
            return self._sample_due_ns
        return min(self._sample_due_ns, self._read_ns + round(keep_up_s * 1e9))

    @property
    def _sample_due_ns(self) -> int:
        return self._start_ns + self._next * self._base_ns

    @property
    def period_s(self) -> float:
        """Longest period at which a sample was written."""
        return self._written_stride * self._base_ns / 1e9

    def take_due(self) -> None:
        """Takes the newest sample that is due and skips earlier ones; if none is due, keeps the source's counters."""
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
            if self._required_level() > self._level and self._writer.num_rows == 0:
                self.flush()  # only written rows show how well they compress
            level = self._required_level()
            if level > self._level:
                self._stride <<= level - self._level
                self._level = level
                self._next += -self._next % self._stride
            return
        # The file is full; sampling continues at longer and longer periods.
        self._stride *= 2
        self._next += -self._next % self._stride

    def _required_level(self) -> int:
        """Returns how often the period must have doubled for the used bytes, with those of buffered rows."""
        written = self._writer.bytes_written - self._header_bytes
        bytes_per_row: float = written / self._writer.num_rows if self._writer.num_rows else self._row_bytes
        room = self._max_bytes - self._header_bytes - SPARE_ROWS * (self._row_bytes + _BLOCK_BYTES)
        parts = PARTS * (written + self._num_buffered * bytes_per_row) / max(1, room)
        if parts < PARTS - 1:
            return int(parts)
        return PARTS - 1 + min(int(PARTS * (parts - (PARTS - 1))), PARTS - 1)

    def take_now(self, *, is_last: bool = False) -> None:
        """Takes an additional sample of all sources; `is_last` allows it to use the bytes reserved for the last one."""
        self._taken = 0
        kept_bytes = 0 if is_last else self._row_bytes + _BLOCK_BYTES
        self._read_and_write(None, kept_bytes=kept_bytes)

    def _read_and_write(self, due: int | None, *, kept_bytes: int) -> tuple[int, bool]:
        """Reads the source; returns the begin of reading, ns, and whether the file had room besides `kept_bytes`."""
        begin = self._read_ns = self._clock()
        late = 0 if due is None else begin - due
        values = self._source.read(slow=self._taken % SLOW_EVERY == 0)
        self._taken += 1
        for name, reason in self._source.drain_failures():
            self.failures.append(f"{name}: {reason}")
            self._writer.note({"failed": name, "time_ns": begin, "reason": reason})
            self._num_buffered = 0
        if not self._has_room(kept_bytes):
            self.flush()
        fits = self._has_room(kept_bytes)
        if fits:
            written = self._writer.bytes_written
            self._writer.append((begin, late, *values))
            self._num_buffered += 1
            if self._writer.bytes_written != written:
                self._num_buffered = 0
        else:
            self._left_out += 1
        return begin, fits

    def _has_room(self, kept_bytes: int) -> bool:
        """Tells whether one more row fits into the file, even if its block does not compress."""
        block = (self._num_buffered + 1) * self._row_bytes + _BLOCK_BYTES
        return self._writer.bytes_written + block + kept_bytes <= self._max_bytes

    def flush(self) -> None:
        self._writer.flush()
        self._num_buffered = 0

    def summary(self) -> dict[str, Any]:
        """Returns fields of `records.watch.NodeWatch` about all samples; called once."""
        late = sorted(self._late) or [0]
        if self._skipped:
            self.failures.append(f"{self._skipped} samples were skipped because others took longer than the period")
        return {
            "num_samples": self._writer.num_rows,
            "dropped_samples": self._left_out + self._writer.dropped,
            "period_s": self.period_s,
            "late_median_s": (late[(len(late) - 1) // 2] + late[len(late) // 2]) / 2e9,
            "late_max_s": late[-1] / 1e9,
            "sources": [field.name for field in self._source.fields],
            "unavailable": dict(self._source.unavailable),
        }

    def end(self, summary: dict[str, Any]) -> None:
        """Writes the sampler's summary after the samples. Raises OSError, e.g. if the disk is full."""
        self._writer.note({"end": summary})

    def close(self) -> None:
        try:
            self._source.close()
        finally:
            self._writer.close()


class Sampler:
    """The sampler of one node; an error ends sampling with a reason, but not the clock server."""

    def __init__(self, order: SamplerOrder) -> None:
        self._order = order
        self._began_ns = time.monotonic_ns()
        self._failures: list[str] = []
        self._sampling: Sampling | None = None
        self._is_sampling = True
        self._server: ClockServer | None = None
        self._opening: threading.Thread | None = None
        self._follower: ClockFollower | None = None
        self._measuring_since: float | None = None
        self._measured_cpu_s: float | None = None
        self._summary: dict[str, Any] | None = None

    def start(self) -> None:
        if self._order.cores:
            try:
                os.sched_setaffinity(0, self._order.cores)
            except OSError as error:
                self._failures.append(f"cores {list(self._order.cores)}: the sampler was not bound: {error.strerror}")
        os.nice(NICENESS)
        self._attempt(self._open)
        # Last, because Python code in another thread delays each answer of a comparison by up to 5 ms.
        order = self._order
        if order.num_nodes > 1 and order.node_rank != 0:
            self._follower = ClockFollower(Path(order.clock), order.token)
            self._follower.start()
        elif order.num_nodes > 1:
            # In a thread, because a name server may need seconds for this node's address.
            self._opening = threading.Thread(target=self._answer_clocks, name="clock address", daemon=True)
            self._opening.start()

    def _answer_clocks(self) -> None:
        order = self._order
        try:
            self._server = ClockServer(own_address(False, order.interface), order.token)
            self._server.start()
            publish(Path(order.clock), self._server, order.token)
        except (DlbenchError, OSError) as error:
            self._failures.append(f"no node can compare its clock with this one: {error}")

    @property
    def due_ns(self) -> int | None:
        """Time of the next sample; None if sampling has ended."""
        if self._sampling is None or not self._is_sampling:
            return None
        return self._sampling.due_ns

    def sample(self) -> None:
        if self._sampling is not None and self._is_sampling:
            self._attempt(self._sampling.take_due)

    def measuring(self, on: bool) -> None:
        """Notes that the measured steps begin or end, and takes a sample."""
        if on and self._measuring_since is None:
            self._measuring_since = _cpu_s()
        elif not on and self._measuring_since is not None:
            self._measured_cpu_s = (self._measured_cpu_s or 0.0) + _cpu_s() - self._measuring_since
            self._measuring_since = None
        self._sample_now()

    def finish(self) -> dict[str, Any]:
        """Takes the last sample, compares clocks a last time, and returns the content of a `NodeWatch`."""
        if self._summary is None:
            if self._measuring_since is not None:
                self.measuring(False)
            self._sample_now(is_last=True)
            self._summary = self._summarise()
            self.close()
        return self._summary

    def close(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            try:
                if self._summary is not None:
                    sampling.end(self._summary)
                sampling.close()
            except Exception as error:
                self._give_up(error)

    def _sample_now(self, *, is_last: bool = False) -> None:
        if self._sampling is not None and self._is_sampling:
            self._attempt(partial(self._sampling.take_now, is_last=is_last))

    def _summarise(self) -> dict[str, Any]:
        order = self._order
        if self._opening is not None:
            self._opening.join(_OPENING_S)
        points: tuple[OffsetEstimate, ...] = ()
        problem = ""
        if self._follower is not None:
            points, problem = self._follower.finish()
        samples: dict[str, Any] = {"num_samples": 0, "period_s": order.period_s}
        samples |= {"late_median_s": 0.0, "late_max_s": 0.0}
        if self._sampling is not None:
            self._attempt(self._sampling.flush)
            samples = self._sampling.summary()
            self._failures += self._sampling.failures
        if self._server is not None and self._server.problem:
            self._failures.append(self._server.problem)
        # Of several readings of both clocks, the fastest gives the offset with the smallest error.
        readings = []
        for _ in range(5):
            before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            readings.append((after - before, wall - (before + after) // 2))
        return {
            **samples,
            "node_rank": order.node_rank,
            "host": order.host,
            "cpu_s": _cpu_s(),
            "measured_cpu_s": self._measured_cpu_s,
            "wall_s": (time.monotonic_ns() - self._began_ns) / 1e9,
            "failures": self._failures,
            "clock": {
                "node_rank": order.node_rank,
                "host": order.host,
                "points": [asdict(point) for point in points],
                "wall_offset_ns": min(readings)[1],
                "problem": problem,
            },
        }

    def _open(self) -> None:
        self._sampling = Sampling(self._order, open_sources())
        self._sampling.take_due()

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._is_sampling:
            return
        reason = str(error)
        if not isinstance(error, DlbenchError | OSError):
            reason = f"{type(error).__name__}: {error}"
        self._failures.append(f"sampling ended: {' '.join(reason.split())}")
        self._is_sampling = False


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _follow(sampler: Sampler, commands: Commands, output: int) -> None:
    """Samples and executes commands until it is told to stop, or the writer of the commands has ended."""
    while True:
        due_ns, wait_s = sampler.due_ns, None
        if due_ns is not None:
            wait_s = max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
        line = commands.line(wait_s)
        if line is not None:
            command = json.loads(line)
            if "stop" in command:
                return
            if "measuring" in command:
                sampler.measuring(bool(command["measuring"]))
            elif "finish" in command:
                os.write(output, json.dumps(sampler.finish()).encode() + b"\n")
        due_ns = sampler.due_ns
        if due_ns is not None and time.monotonic_ns() >= due_ns:
            sampler.sample()


def main() -> int:
    """Runs the sampler; returns its exit code."""
    termination = await_termination()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # Ctrl-C reaches all processes of a terminal; the rank handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output is for the summary only; output of libraries goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    commands = Commands(0, termination)
    sampler: Sampler | None = None
    try:
        order = None
        while order is None:
            order = commands.line(None)
        settings = SamplerOrder.from_line(order)
        sampler = Sampler(settings)
        if settings.parent in (0, os.getppid()):  # else the rank ended before this process asked for a signal
            sampler.start()
            _follow(sampler, commands, output)
    except EOFError:
        pass
    except ValueError as error:
        print(f"dlbench: error: sampler: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.USAGE)
    finally:
        if sampler is not None:
            sampler.close()
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
