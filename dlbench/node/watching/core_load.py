"""Who computed on the cores of a node's ranks while steps were measured: the ranks, or others.

The kernel counts CPU time by core (/proc/stat, proc(5)) and by process. What the cores counted and the ranks and their
children did not is others': another job, a daemon, a compiler. Interrupts are left out, as those of a rank's own
messages are among them. Read at the edges of the measured steps alone; it costs the steps nothing.
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
_BUSY = (0, 1, 2)
_STEAL = 7  # Columns of a core's line: user, nice and system; taken by the hypervisor.


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
        """The measured steps begin or end now; nothing is raised."""
        now = self._now()
        since, self._since = self._since, now if on else None
        if on or since is None:
            return
        self._window_s += now.time_s - since.time_s
        self._own_s += now.own_s - since.own_s
        for counted, after, before in ((self._busy, now.busy, since.busy), (self._steal, now.steal, since.steal)):
            # The kernel's count of a core may step back where it was off (proc(5)).
            counted.update({core: max(0, value - before.get(core, value)) for core, value in after.items()})
        if self._pressure_s is not None and now.pressure_s is not None and since.pressure_s is not None:
            self._pressure_s += now.pressure_s - since.pressure_s
        else:
            self._pressure_s = None

    def summary(self) -> dict[str, Any]:
        """What rank 0 needs of it, plain Python."""
        found: dict[str, Any] = {"window_s": self._window_s, "own_s": self._own_s}
        if self._sees_node:
            found["node"] = {
                "busy_s": {str(core): ticks / _TICKS_PER_S for core, ticks in self._busy.items()},
                "steal_s": {str(core): ticks / _TICKS_PER_S for core, ticks in self._steal.items()},
                "pressure_s": self._pressure_s,
                "problem": self._problem,
            }
        return found

    def _now(self) -> _Moment:
        busy: dict[int, int] = {}
        steal: dict[int, int] = {}
        pressure: float | None = None
        if self._sees_node:
            try:
                busy, steal = _cores(self._root / "proc/stat")
            except (OSError, ValueError, IndexError) as error:
                self._problem = f"/proc/stat: {error}"[:200]
            # Seconds in which something waited for a core, since the start; not every kernel counts them (PSI).
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
    """CPU time of this process and of all that descend from it, those that ended included."""
    import psutil

    own = psutil.Process()
    used_s = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = process.cpu_times()
            used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


class Seated(Protocol):
    """A rank and where it runs."""

    @property
    def host(self) -> str:
        """Host name."""

    @property
    def cores(self) -> Collection[int]:
        """Cores that it may run on."""


def node_loads(
    summaries: Sequence[Mapping[str, Any]], ranks: Sequence[Seated], node_ranks: Sequence[int]
) -> tuple[NodeLoad, ...]:
    """Returns the load of each node's cores, from `CoreLoad.summary` of every rank, in the order of `ranks`."""
    nodes: dict[int, list[tuple[Seated, Mapping[str, Any]]]] = {}
    for number, rank, one in zip(node_ranks, ranks, summaries, strict=True):
        nodes.setdefault(number, []).append((rank, one))
    found = []
    for number, members in sorted(nodes.items()):
        seen = next((one["node"] for _, one in members if "node" in one), None)
        if seen is None:
            continue
        cores = sorted(set().union(*(rank.cores for rank, _ in members)))
        names = [str(core) for core in cores if str(core) in seen["busy_s"]]
        found.append(
            NodeLoad(
                node_rank=number,
                host=members[0][0].host,
                cores=tuple(cores),
                window_s=max(one["window_s"] for _, one in members),
                busy_s=sum(seen["busy_s"][name] for name in names) if names else None,
                own_s=sum(one["own_s"] for _, one in members),
                steal_s=sum(seen["steal_s"][name] for name in names) if names else None,
                pressure_s=seen["pressure_s"],
                problem=seen["problem"] or ("" if names else "no step was measured"),
            )
        )
    return tuple(found)
