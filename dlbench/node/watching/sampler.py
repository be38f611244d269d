"""``python -m dlbench.node.watching.sampler``: the sampler process of one node. It reads its order from standard input
(`SamplerOrder`, one line) and then commands, a line of JSON each: `measuring`, `finish` (prints a
`records.watch.NodeWatch`), `stop`. It imports neither torch nor numpy nor pandas, since it shares memory and cores with
the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dlbench.errors import DlbenchError, ExitCode
from dlbench.machine.host import open_sources
from dlbench.node.rendezvous import own_address
from dlbench.node.watching.clocks import ClockFollower, ClockServer, OffsetEstimate, publish
from dlbench.node.watching.sampling import Commands, SamplerOrder, Sampling, await_termination

NICENESS = 5  # Ranks come first on shared cores; each sample records how late it is.
_PR_SET_PDEATHSIG = 1
_OPENING_S = 3.0


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

    def is_orphan(self) -> bool:
        """Tells whether the rank ended before this process asked the kernel for a signal."""
        return self._order.parent not in (0, os.getppid())

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
        sampler = Sampler(SamplerOrder.from_line(order))
        if not sampler.is_orphan():
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
