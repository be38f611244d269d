"""The sampler of a node, as seen from the rank that starts it (local rank 0), and who may write how much.

Nothing in it fails a run or makes it wait without a limit: what goes wrong is in `problem`, and the run has one thing
less to report.
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

STAGE_BYTES = 2_000  # Room of a rank outside of the window: its stages, and nothing else.
COMMAND = (sys.executable, "-P", "-m", "dlbench.node.watching.sampler")
FINISH_S = 10.0  # How long the sampler may take for its account; the last comparison of clocks is within.
_STOP_S = 2.0


def window_ranks(plan: RunPlan) -> tuple[int, ...]:
    """Returns ranks whose layers and messages are watched; spread evenly over the run and over the places of nodes."""
    watch, ranks = plan.watch, plan.layout.ranks
    if watch is None or watch.window_steps == 0:
        return ()
    number = min(watch.window_ranks, ranks)
    edges = [part * ranks // number for part in range(number + 1)]
    return tuple(first + part % (end - first) for part, (first, end) in enumerate(pairwise(edges)))


def sample_bytes(plan: RunPlan) -> int:
    """Bytes of one node's samples: a third of the limit, shared evenly over the nodes; 0 where nothing is watched."""
    return _third(plan) // plan.layout.nodes


def span_bytes(plan: RunPlan, rank: int) -> int:
    """Returns bytes of a rank's spans: two thirds of the limit are shared; beside the window there are stages only."""
    total, ranks = 2 * _third(plan), plan.layout.ranks
    window = window_ranks(plan)
    if not window:
        return total // ranks
    outside = min(STAGE_BYTES, total // ranks)
    if rank not in window:
        return outside
    return (total - outside * (ranks - len(window))) // len(window)


def _third(plan: RunPlan) -> int:
    return plan.watch.max_bytes // 3 if plan.watch is not None else 0


def order_for(plan: RunPlan, folder: RunFolder, place: RankPlace, allowed_cores: Sequence[int]) -> SamplerOrder:
    """Returns the order for this node's sampler; `allowed_cores`: in the order in which ranks take theirs."""
    if plan.watch is None or not plan.watch.sampler:
        raise ValueError("this plan has no sampler")
    spare = allowed_cores[plan.layout.cores_per_rank * place.local_size :] if plan.system.launch.pin else []
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
        cores=tuple(spare or allowed_cores),
        interface=plan.system.launch.interface,
        parent=os.getpid(),
    )


class SamplerProcess:
    """A sampler and the two pipes to it. `command`: how it is started; for tests."""

    def __init__(self, order: SamplerOrder, command: Sequence[str] = COMMAND) -> None:
        self._order = order
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.problem = ""  # Why this node was not sampled, or not to the end, one sentence; empty if all went well.

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Starts it; the kernel ends it with the thread that calls this (PR_SET_PDEATHSIG, prctl(2))."""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=dict(os.environ)
            )
        except OSError as error:
            self._fail(f"was not started: {error.strerror or error}")
            return
        assert self._process.stdin is not None
        # A sampler that hangs reads no more: once the pipe is full a write would wait for it.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send(self._order.to_line())

    def measuring(self, on: bool) -> None:
        self._tell({"measuring": on})

    def finish(self, timeout_s: float = FINISH_S) -> NodeWatch | None:
        """Returns the sampler's account, or None and `problem` says why; node 0's goes on answering until `stop`."""
        process = self._process
        if process is None or self.problem:
            return None
        self._tell({"finish": True})
        line = b"" if self.problem else self._answer(process, timeout_s)
        if not line:
            return None
        try:
            return NodeWatch.model_validate_json(line)
        except ValidationError as error:
            self._fail(f"gave an account that cannot be read: {problem_of(NodeWatch, error)}")
            return None

    def stop(self) -> None:
        """Ends it, at any time; one that cannot even be killed is left behind, and `problem` says so."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdin.closed:
            # Said, not only shown by the end of the pipe: processes that this rank forked hold the pipe too.
            _write(process, b'{"stop": true}\n')
            process.stdin.close()
            self._wait(process)
        process.stdout.close()

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        said = b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"gave no account within {timeout_s:g} s and was ended")
                process.kill()
                return b""
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                self._ended(process)
                return b""
            said += more
        return said

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
            self._fail("does not read its orders, and was given up")

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Its exit code; None, and `problem` says so, where it does not end even when it is killed."""
        try:
            return process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            return process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._fail(f"process {process.pid} could not be ended and was left behind; it may hang in a driver")
            return None

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        code = self._wait(process)
        if code is None:
            return
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._fail(f"ended {how} before its account; the rank's log has what it said")

    def _fail(self, what: str) -> None:
        self.problem = self.problem or f"sampler of {self._order.host}: {what}"


def _write(process: subprocess.Popen[bytes], line: bytes) -> int | None:
    """Bytes of the line that the pipe took; None where nobody can read it any more."""
    assert process.stdin is not None
    try:
        return process.stdin.write(line) or 0  # None: the pipe is full
    except OSError:
        return None
