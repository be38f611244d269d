"""CPU time of ranks and of other processes on the ranks' cores within the measured steps: the difference of the
kernel's counters by core (/proc/stat, proc(5)) and by process. Interrupts are not counted, since ranks' messages cause
some.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlbench.records.watch import NodeLoad

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = (0, 1, 2)  # Columns of a core's line in /proc/stat: user, nice and system.
_STEAL = 7  # Column of the time taken by the hypervisor.


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
