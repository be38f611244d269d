"""Warnings that others computed on the cores of the ranks, or that the hypervisor took them away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dlbench.analysis.doubts import Doubt
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.records.watch import NodeLoad

LOADED = 0.05  # Share of the cores' time from which others' use of it is a warning: steps may take longer by as much.
LOAD_CODES = ("foreign-load", "steal")
_RESOLUTION_S = 0.03  # Error of a core's time: the kernel counts each of three kinds in ticks of 10 ms.


def load_doubts(runs: Mapping[str, Sequence[NodeLoad]]) -> Iterator[Doubt]:
    """One warning for each node whose cores others used, over all runs; and one where the hypervisor took them."""
    others = "other processes used {amount} ({share:.0f} %): repeat on an idle machine"
    stolen = "the hypervisor took {amount} away ({share:.0f} %, steal time): repeat on an idle host"
    yield from _doubts(runs, LOAD_CODES[0], lambda load: load.others_s, others)
    yield from _doubts(runs, LOAD_CODES[1], lambda load: load.steal_s, stolen)


def loads_of(runs: Iterable[Run]) -> dict[str, tuple[NodeLoad, ...]]:
    """What runs of training say of their nodes, by id."""
    return {run.plan.run_id: run.record.load for run in runs if run.record is not None}


def _doubts(
    runs: Mapping[str, Sequence[NodeLoad]], code: str, taken: Callable[[NodeLoad], float | None], text: str
) -> Iterator[Doubt]:
    found: dict[str, list[tuple[float, NodeLoad, str]]] = {}
    for run_id, loads in runs.items():
        for load in loads:
            seconds = taken(load)
            num_cores = len(load.cores)
            if seconds is None or load.window_s <= 0:
                continue
            if seconds - num_cores * _RESOLUTION_S > LOADED * num_cores * load.window_s:
                found.setdefault(load.host, []).append((seconds / load.window_s, load, run_id))
    for host, much in found.items():
        cores, worst, _ = max(much, key=lambda one: one[0])
        ids = tuple(dict.fromkeys(run_id for _, _, run_id in much))
        count = "core" if len(worst.cores) == 1 else f"{len(worst.cores)} cores"
        most = "up to " if len(ids) > 1 else ""
        amount = f"{most}{cores:.2g} of the {count} of node {host}"
        said = text.format(amount=amount, share=100 * cores / len(worst.cores))
        yield Doubt(code=code, severity="serious", text=said, runs=ids)


def crowded_hosts(record: Record) -> list[str]:
    """Hosts whose ranks compute with more threads than they have cores, in words: such steps say nothing of others."""
    hosts: dict[str, tuple[int, int, set[int]]] = {}
    for rank in record.ranks:
        threads, count, cores = hosts.get(rank.host, (0, 0, set()))
        hosts[rank.host] = (threads + rank.threads, count + 1, cores | set(rank.cores))
    return [
        f"{threads} threads of {count} rank{'s' * (count > 1)} on {len(cores)} core{'s' * (len(cores) > 1)} of {host}"
        for host, (threads, count, cores) in sorted(hosts.items())
        if cores and threads > len(cores)
    ]
