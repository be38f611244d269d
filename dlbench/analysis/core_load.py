"""Warnings about other load on the cores of the ranks: other processes, or steal time of the hypervisor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter

from dlbench.analysis.doubts import Doubt
from dlbench.records.comm import CommRun
from dlbench.records.record import RankResult, Record
from dlbench.records.scan import Run
from dlbench.records.watch import NodeLoad
from dlbench.units import counted

LOADED = 0.05  # Share of the cores' time from which other load is a warning: steps may take that much longer.
LOAD_CODES = ("foreign-load", "steal")
_RESOLUTION_S = 0.03  # Error of a core's time: the kernel counts each of three kinds in ticks of 10 ms.


def load_doubts(runs: Mapping[str, Sequence[NodeLoad]]) -> Iterator[Doubt]:
    """Yields a warning over all runs for each node with load of other processes, and for each with steal time."""
    others = "other processes used {amount} ({share:.0f} %): repeat on an idle machine"
    stolen = "the hypervisor took {amount} away ({share:.0f} %, steal time): repeat on an idle host"
    yield from _doubts(runs, LOAD_CODES[0], attrgetter("others_s"), others)
    yield from _doubts(runs, LOAD_CODES[1], attrgetter("steal_s"), stolen)


def loads_of(runs: Iterable[Run | CommRun]) -> dict[str, tuple[NodeLoad, ...]]:
    """Returns the load of the nodes of runs with a record, by run id."""
    return {run.plan.run_id: run.record.load for run in runs if run.record is not None}


def _doubts(
    runs: Mapping[str, Sequence[NodeLoad]], code: str, lost_s: Callable[[NodeLoad], float | None], text: str
) -> Iterator[Doubt]:
    loads_by_host: dict[str, list[tuple[float, NodeLoad, str]]] = {}
    for run_id, loads in runs.items():
        for load in loads:
            seconds = lost_s(load)
            num_cores = len(load.cores)
            if seconds is None or load.window_s <= 0:
                continue
            if seconds - num_cores * _RESOLUTION_S > LOADED * num_cores * load.window_s:
                loads_by_host.setdefault(load.host, []).append((seconds / load.window_s, load, run_id))
    for host, host_loads in loads_by_host.items():
        used_cores, worst, _ = max(host_loads, key=itemgetter(0))
        ids = tuple(dict.fromkeys(run_id for _, _, run_id in host_loads))
        num_cores = len(worst.cores)
        amount = f"{used_cores:.2g} of the {num_cores} cores of node {host}"
        if num_cores == 1:
            amount = f"{used_cores:.2g} of the core of node {host}"
        if len(ids) > 1:
            amount = f"up to {amount}"
        share = 100 * used_cores / num_cores
        yield Doubt(code=code, severity="serious", text=text.format(amount=amount, share=share), runs=ids)


def crowded_hosts(record: Record) -> list[str]:
    """Returns the hosts whose ranks compute with more threads than they have cores, in words."""
    ranks_by_host: dict[str, list[RankResult]] = {}
    for rank in record.ranks:
        ranks_by_host.setdefault(rank.host, []).append(rank)
    texts = []
    for host, ranks in sorted(ranks_by_host.items()):
        threads = sum(rank.threads for rank in ranks)
        cores = set().union(*(rank.cores for rank in ranks))
        if cores and threads > len(cores):
            texts.append(
                f"{threads} threads of {counted(len(ranks), 'rank')} on {counted(len(cores), 'core')} of {host}"
            )
    return texts
