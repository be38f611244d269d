"""The agent by which a rank watches its node: it starts and asks the sampler, limits bytes, and counts CPU time.

CPU time of ranks and of other processes on the ranks' cores within the measured steps is the difference of the kernel's
counters by core (/proc/stat, proc(5)) and by process. Interrupts are not counted, since ranks' messages cause some.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from dlbench.node.ranks import RankPlace
from dlbench.node.watching.sampler import SamplerOrder
from dlbench.records.folder import RunFolder
from dlbench.records.watch import NodeLoad, NodeWatch
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import problem_of

STAGE_BYTES = 2_000  # Bytes of a rank whose layers are not watched, for the spans of its stages.
COMMAND = (sys.executable, "-P", "-m", "dlbench.node.watching.sampler")
FINISH_S = 10.0  # Seconds that the sampler may take for its last sample, comparison of clocks and summary.
_STOP_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2)  # Columns of a core's line in /proc/stat: user, nice and system.
_STEAL = 7  # Column of the time taken by the hypervisor.


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
    """A sampler and the two pipes to it; if it fails, the run continues, and `problem` has the reason."""

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
        self._send_command({"measuring": on})

    def finish(self, timeout_s: float = FINISH_S) -> NodeWatch | None:
        """Ends sampling and returns the sampler's summary, None if there is a `problem`."""
        process = self._process
        if process is None or self.problem:
            return None
        self._send_command({"finish": True})
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
                self._fail_ended(process)
                return b""
            answer += received
        return answer

    def _send_command(self, command: dict[str, Any]) -> None:
        if self._process is not None and not self.problem:
            self._send(json.dumps(command).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        process = self._process
        assert process is not None
        written = _write(process, line)
        if written is None:
            self._fail_ended(process)
        elif written < len(line):
            self._fail("does not read its commands, and is not used any more")

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

    def _fail_ended(self, process: subprocess.Popen[bytes]) -> None:
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


class CoreLoad:
    """CPU time within the measured steps, of this rank and, if it `sees_node`, of the node's cores."""

    def __init__(self, *, sees_node: bool, root: Path = Path("/")) -> None:
        self._sees_node = sees_node
        self._root = root
        self._since: _Moment | None = None
        self._window_s = self._own_s = 0.0
        self._pressure_s: float | None = 0.0
        self._busy: Counter[int] = Counter()
        self._steal: Counter[int] = Counter()
        self._problem = ""

    def measuring(self, on: bool) -> None:
        """Begins or ends counting with the measured steps; raises nothing."""
        now, since = self._now(), self._since
        if on:
            self._since = now
            return
        self._since = None
        if since is None:
            return
        self._window_s += now.time_s - since.time_s
        self._own_s += now.own_s - since.own_s
        for total, after, before in ((self._busy, now.busy, since.busy), (self._steal, now.steal, since.steal)):
            # The kernel's counter of a core may decrease if the core was offline (proc(5)).
            total.update({core: max(0, ticks - before.get(core, ticks)) for core, ticks in after.items()})
        if self._pressure_s is not None and now.pressure_s is not None and since.pressure_s is not None:
            self._pressure_s += now.pressure_s - since.pressure_s
        else:
            self._pressure_s = None

    def summary(self) -> dict[str, Any]:
        """Returns the counted times for `node_loads`, ready for JSON."""
        summary: dict[str, Any] = {"window_s": self._window_s, "own_s": self._own_s}
        if self._sees_node:
            summary["node"] = {
                "busy_s": {str(core): ticks / _TICKS_PER_S for core, ticks in self._busy.items()},
                "steal_s": {str(core): ticks / _TICKS_PER_S for core, ticks in self._steal.items()},
                "pressure_s": self._pressure_s,
                "problem": self._problem,
            }
        return summary

    def _now(self) -> _Moment:
        busy: dict[int, int] = {}
        steal: dict[int, int] = {}
        pressure: float | None = None
        if self._sees_node:
            try:
                busy, steal = _cores(self._root / "proc/stat")
            except (OSError, ValueError, IndexError) as error:
                self._problem = f"/proc/stat: {error}"[:200]
            # Seconds since boot in which a process waited for a core; not every kernel counts them (PSI).
            with suppress(OSError, ValueError, IndexError):
                some = (self._root / "proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
                pressure = int(some.rpartition("total=")[2]) / 1e6
        return _Moment(time_s=time.monotonic(), own_s=_own_s(), busy=busy, steal=steal, pressure_s=pressure)


@dataclass(frozen=True, kw_only=True)
class _Moment:
    time_s: float
    own_s: float
    busy: Mapping[int, int]
    steal: Mapping[int, int]  # Ticks by core.
    pressure_s: float | None


def _cores(path: Path) -> tuple[dict[int, int], dict[int, int]]:
    busy: dict[int, int] = {}
    steal: dict[int, int] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            core = int(name[3:])
            busy[core] = sum(int(ticks[column]) for column in _BUSY)
            steal[core] = int(ticks[_STEAL])
    if not any(busy.values()):
        raise ValueError("counts no core's time")
    return busy, steal


def _own_s() -> float:
    """Returns the CPU time of this process and its descendants, also of those that ended, in seconds."""
    import psutil

    this_process = psutil.Process()
    used_s = 0.0
    for process in (this_process, *this_process.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = process.cpu_times()
            used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


class RankOnCores(Protocol):
    """A rank with its host and the cores it may use."""

    @property
    def host(self) -> str: ...

    @property
    def cores(self) -> Collection[int]: ...


def node_loads(
    summaries: Sequence[Mapping[str, Any]], ranks: Sequence[RankOnCores], node_ranks: Sequence[int]
) -> tuple[NodeLoad, ...]:
    """Returns the load of each node's cores, from `CoreLoad.summary` of every rank, in the order of `ranks`."""
    nodes: dict[int, list[tuple[RankOnCores, Mapping[str, Any]]]] = {}
    for number, rank, summary in zip(node_ranks, ranks, summaries, strict=True):
        nodes.setdefault(number, []).append((rank, summary))
    loads = []
    for number, members in sorted(nodes.items()):
        node = next((summary["node"] for _, summary in members if "node" in summary), None)
        if node is None:
            continue
        cores = sorted(set().union(*(rank.cores for rank, _ in members)))
        names = [str(core) for core in cores if str(core) in node["busy_s"]]
        busy_s, steal_s, problem = None, None, node["problem"] or "no step was measured"
        if names:
            busy_s, steal_s = (sum(node[key][name] for name in names) for key in ("busy_s", "steal_s"))
            problem = node["problem"]
        loads.append(
            NodeLoad(
                node_rank=number,
                host=members[0][0].host,
                cores=tuple(cores),
                window_s=max(summary["window_s"] for _, summary in members),
                busy_s=busy_s,
                own_s=sum(summary["own_s"] for _, summary in members),
                steal_s=steal_s,
                pressure_s=node["pressure_s"],
                problem=problem,
            )
        )
    return tuple(loads)
