"""``python -m dlbench.node.watching.sampler``: the sampler of one node, a process next to its ranks.

It reads its order from standard input (`SamplerOrder`, one line) and then commands, a line of JSON each:
`{"measuring": true}` and `false` at the edges of the measured steps, `{"finish": true}` for its account (one line on
standard output, `records.watch.NodeWatch`), `{"stop": true}` or the end of the input to end. After its account it
samples no longer, but node 0's goes on answering about its clock. However it ends, short of SIGKILL, what it holds is
written; also when its rank was killed, which the kernel signals by SIGTERM.

It loads neither torch nor numpy nor pandas, nor the plan: it shares memory and cores with what is measured.
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
from dlbench.node.watching.clocks import ClockFollower, ClockServer, publish
from dlbench.node.watching.sampling import Commands, SamplerOrder, Sampling, await_termination

NICENESS = 5  # Where cores are shared, ranks go first; how late samples are because of it is in each of them.
_PR_SET_PDEATHSIG = 1
_OPENING_S = 3.0


class Sampler:
    """One node's sampler; what fails ends sampling with a reason, and it goes on answering."""

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
        self._told: dict[str, Any] | None = None

    def is_orphan(self) -> bool:
        """Whether the rank ended before the kernel was asked to signal it."""
        return self._order.parent not in (0, os.getppid())

    def start(self) -> None:
        if self._order.cores:
            try:
                os.sched_setaffinity(0, self._order.cores)
            except OSError as error:
                self._failures.append(f"cores {list(self._order.cores)}: the sampler was not bound: {error.strerror}")
        os.nice(NICENESS)
        self._attempt(self._open)
        # Last: what computes in Python during a comparison makes each answer wait for the interpreter, up to 5 ms.
        order = self._order
        if order.num_nodes > 1 and order.node_rank != 0:
            self._follower = ClockFollower(Path(order.clock), order.token)
            self._follower.start()
        elif order.num_nodes > 1:
            # On a thread, as a name server may take seconds to know this node's address.
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
        """When the next sample is due; None if there will be none."""
        return self._sampling.due_ns if self._sampling is not None and self._is_sampling else None

    def sample(self) -> None:
        if self._sampling is not None and self._is_sampling:
            self._attempt(self._sampling.take_due)

    def measuring(self, on: bool) -> None:
        """The measured steps begin or end now."""
        if on and self._measuring_since is None:
            self._measuring_since = _cpu_s()
        elif not on and self._measuring_since is not None:
            self._measured_cpu_s = (self._measured_cpu_s or 0.0) + _cpu_s() - self._measuring_since
            self._measuring_since = None
        self._sample_now()

    def finish(self) -> dict[str, Any]:
        """The last sample, the last comparison of clocks, and the account: content of a `NodeWatch`."""
        if self._told is None:
            if self._measuring_since is not None:
                self.measuring(False)
            self._sample_now(is_last=True)
            self._told = self._account()
            self.close()
        return self._told

    def close(self) -> None:
        """Writes what is held, and the account if there is one."""
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            try:
                if self._told is not None:
                    sampling.end(self._told)
                sampling.close()
            except Exception as error:
                self._give_up(error)

    def _sample_now(self, *, is_last: bool = False) -> None:
        if self._sampling is not None and self._is_sampling:
            self._attempt(partial(self._sampling.take_now, is_last=is_last))

    def _account(self) -> dict[str, Any]:
        order = self._order
        if self._opening is not None:
            self._opening.join(_OPENING_S)
        points, problem = self._follower.finish() if self._follower is not None else ((), "")
        seen: dict[str, Any] = {"num_samples": 0, "period_s": order.period_s, "late_median_s": 0.0, "late_max_s": 0.0}
        if self._sampling is not None:
            self._attempt(self._sampling.flush)
            seen = self._sampling.account()
            self._failures += self._sampling.failures
        if self._server is not None and self._server.problem:
            self._failures.append(self._server.problem)
        # Of the fastest reading: between two of one clock lies the other's.
        readings = []
        for _ in range(5):
            before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            readings.append((after - before, wall - (before + after) // 2))
        return {
            **seen,
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
        """Sampling ends: the disk is full, a source broke in a way of its own."""
        if not self._is_sampling:
            return
        reason = str(error) if isinstance(error, DlbenchError | OSError) else f"{type(error).__name__}: {error}"
        self._failures.append(f"sampling ended: {' '.join(reason.split())}")
        self._is_sampling = False


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _follow(sampler: Sampler, commands: Commands, output: int) -> None:
    """Samples and obeys until it is asked to stop, or the writer of the commands is gone."""
    while True:
        due = sampler.due_ns
        line = commands.line(None if due is None else max(0.0, (due - time.monotonic_ns()) / 1e9))
        if line is not None:
            command = json.loads(line)
            if "stop" in command:
                return
            if "measuring" in command:
                sampler.measuring(bool(command["measuring"]))
            elif "finish" in command:
                os.write(output, json.dumps(sampler.finish()).encode() + b"\n")
        due = sampler.due_ns
        if due is not None and time.monotonic_ns() >= due:
            sampler.sample()


def main() -> int:
    """The process; returns its exit code."""
    termination = await_termination()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # Ctrl-C reaches all processes of a terminal; the rank decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output is the answer's alone, whatever libraries print.
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
