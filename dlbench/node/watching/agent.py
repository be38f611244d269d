"""The rank's side of the sampler of its node, and limits of the bytes that ranks may write.

A failing sampler never fails a run or makes it wait without a limit; `problem` has the reason.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from dlbench.node.ranks import RankPlace
from dlbench.node.watching.sampling import SamplerOrder
from dlbench.records.folder import RunFolder
from dlbench.records.watch import NodeWatch
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import problem_of

STAGE_BYTES = 2_000  # Bytes of a rank whose layers are not watched, for the spans of its stages.
COMMAND = (sys.executable, "-P", "-m", "dlbench.node.watching.sampler")
FINISH_S = 10.0  # Seconds that the sampler may take for its last sample, comparison of clocks and summary.
_STOP_S = 2.0


def window_ranks(plan: RunPlan) -> tuple[int, ...]:
    """Returns the ranks whose layers and messages are watched, spread evenly over the run and over local ranks."""
    watch, ranks = plan.watch, plan.layout.ranks
    if watch is None or watch.window_steps == 0:
        return ()
    number = min(watch.window_ranks, ranks)
    edges = [part * ranks // number for part in range(number + 1)]
    return tuple(first + part % (end - first) for part, (first, end) in enumerate(pairwise(edges)))


def sample_bytes(plan: RunPlan) -> int:
    """Returns the bytes for one node's samples: a third of the limit, divided by the nodes; 0 if not watched."""
    return _third(plan) // plan.layout.nodes


def span_bytes(plan: RunPlan, rank: int) -> int:
    """Returns the bytes for one rank's spans: two thirds of the limit, most of it for ranks with watched layers."""
    total, ranks = 2 * _third(plan), plan.layout.ranks
    window = window_ranks(plan)
    if not window:
        return total // ranks
    outside = min(STAGE_BYTES, total // ranks)
    if rank not in window:
        return outside
    return (total - outside * (ranks - len(window))) // len(window)


def _third(plan: RunPlan) -> int:
    return 0 if plan.watch is None else plan.watch.max_bytes // 3


def order_for(plan: RunPlan, folder: RunFolder, place: RankPlace, allowed_cores: Sequence[int]) -> SamplerOrder:
    """Returns the order for this node's sampler; `allowed_cores` are sorted as for ranks, which take the first ones."""
    if plan.watch is None or not plan.watch.sampler:
        raise ValueError("this plan has no sampler")
    cores = allowed_cores
    if plan.system.launch.pin:
        cores = allowed_cores[plan.layout.cores_per_rank * place.local_size :] or allowed_cores
    return SamplerOrder(
        run_id=plan.run_id,
        samples=str(folder.samples(place.node_rank)),
        clock=str(folder.clock),
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        host=place.host,
        token=place.token,
        period_s=plan.watch.period_s,
        max_bytes=sample_bytes(plan),
        cores=tuple(cores),
        interface=plan.system.launch.interface,
        parent=os.getpid(),
    )


class SamplerProcess:
    """A sampler and the two pipes to it. `command` starts it."""

    def __init__(self, order: SamplerOrder, command: Sequence[str] = COMMAND) -> None:
        self._order = order
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.problem = ""  # Reason why this node was not sampled, or not to the end; empty without a problem.

    @property
    def pid(self) -> int | None:
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def start(self) -> None:
        """Starts the sampler; the kernel ends it with the calling thread (PR_SET_PDEATHSIG, prctl(2))."""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=dict(os.environ)
            )
        except OSError as error:
            self._fail(f"could not be started: {error.strerror or error}")
            return
        assert self._process.stdin is not None
        # Writing to a sampler that hangs must not block when the pipe is full.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send(self._order.to_line())

    def measuring(self, on: bool) -> None:
        self._tell({"measuring": on})

    def finish(self, timeout_s: float = FINISH_S) -> NodeWatch | None:
        """Ends sampling and returns the sampler's summary, None if there is a `problem`."""
        process = self._process
        if process is None or self.problem:
            return None
        self._tell({"finish": True})
        line = self._answer(process, timeout_s)
        if not line:
            return None
        try:
            return NodeWatch.model_validate_json(line)
        except ValidationError as error:
            self._fail(f"sent an unreadable summary: {problem_of(NodeWatch, error)}")
            return None

    def stop(self) -> None:
        """Ends the sampler; if it cannot be killed, leaves it behind and sets `problem`."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdin.closed:
            # Closing the pipe is not enough: processes that this rank forked hold it open, too.
            _write(process, b'{"stop": true}\n')
            process.stdin.close()
            self._wait(process)
        process.stdout.close()

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        """Returns the sampler's summary as a line of JSON; empty if there is a problem."""
        if self.problem:
            return b""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"sent no summary within {timeout_s:g} s and was killed")
                process.kill()
                return b""
            received = os.read(process.stdout.fileno(), 65536)
            if not received:
                self._ended(process)
                return b""
            answer += received
        return answer

    def _tell(self, command: dict[str, Any]) -> None:
        if self._process is not None and not self.problem:
            self._send(json.dumps(command).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        process = self._process
        assert process is not None
        written = _write(process, line)
        if written is None:
            self._ended(process)
        elif written < len(line):
            self._fail("does not read its commands, and was ignored from then on")

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Waits for the sampler's end and returns its exit code; None and a `problem` if it cannot be killed."""
        try:
            return process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            return process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._fail(f"process {process.pid} could not be killed and still exists; it may hang in a driver")
            return None

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        code = self._wait(process)
        if code is None:
            return
        end = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._fail(f"ended {end} before its summary; the rank's log has its messages")

    def _fail(self, reason: str) -> None:
        self.problem = self.problem or f"sampler of {self._order.host}: {reason}"


def _write(process: subprocess.Popen[bytes], line: bytes) -> int | None:
    """Writes a line; returns the number of bytes that the pipe accepted, None if the reader has ended."""
    assert process.stdin is not None
    try:
        return process.stdin.write(line) or 0  # None: the pipe is full
    except OSError:
        return None
