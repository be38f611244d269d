"""Compares environments of runs, and warns of settings and other load on the cores that make figures doubtful."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Literal

from dlbench.records.comm import CommRun
from dlbench.records.exchange import NcclTransport
from dlbench.records.record import RankResult, Record
from dlbench.records.scan import Run
from dlbench.records.watch import NodeLoad
from dlbench.specs.plan import LaunchPlan
from dlbench.units import counted, first_of

Severity = Literal["serious", "note"]
LOADED = 0.05  # Share of the cores' time from which other load is a warning: steps may take that much longer.
LOAD_CODES: tuple[str, str] = ("foreign-load", "steal")
_RESOLUTION_S = 0.03  # Error of a core's time: the kernel counts each of three kinds in ticks of 10 ms.
# Keys of the job, its account, the rank's place in it or the number of ranks, which differ between runs by nature.
_EXPECTED = re.compile(
    r"host|boot_id|variable\.(SLURM_(JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NTASKS|NTASKS_PER_NODE|RESTART_COUNT|STEP_ID)"
    r"|PATH|SLURM_TOPOLOGY_ADDR"
    r"|SLURM_(JOB_(ACCOUNT|QOS|RESERVATION)|CPU_BIND|CPU_BIND_LIST|GPUS|GPUS_ON_NODE|GPUS_PER_NODE)"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|GLOO_RENDEZVOUS_(ADDR|PORT))"
    r"|OMPI_MCA_(ess|orte|pmix|initial|shmem)_.*"
    # dlbench sets these itself: from the plan, whose settings are compared, or from the rank count.
    r"|HOROVOD_(AUTOTUNE\w*|FUSION_THRESHOLD|CYCLE_TIME|(HIERARCHICAL|TORUS)_ALLREDUCE|GLOO_TIMEOUT_SECONDS|DYNAMIC_PROCESS_SETS))"
)
# Interfaces that dlbench chooses, each a variable: ranks of one node meet at the loopback.
_INTERFACES = ("variable.HOROVOD_GLOO_IFACE", "variable.GLOO_SOCKET_IFNAME")
_LOOPBACK = "lo"
TELLING = (  # Prefixes of keys that may explain differences of speed, the likeliest first.
    *("system.", "dlbench.", "image.", "container.", "package.", "torch.", "mpi.", "gpu.", "cpu."),
    *("kernel", "os", "python", "libc", "memory."),
    *("data.", "variable."),
)
_TO_SOCKETS = {"NCCL_NET": re.compile("socket", re.IGNORECASE), "NCCL_IB_DISABLE": re.compile("[1-9]")}
"""Variables, and their values that keep NCCL off the adapters."""

_MAX_ADAPTERS = 6  # Adapters that are named; others are counted.
NOT_SET = "not set"  # Value of a key that a run does not have.
# Recorded properties of a data source that must be equal for repeats; others depend on the rank count.
_DATA_KEYS = ("kind", "index_sha256", "num_samples", "decoder")


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A warning about a figure."""

    code: str  # Stable short name, for programs.
    severity: Severity  # serious: the figure may mislead; note: the reader must know it.
    text: str
    runs: tuple[str, ...] = ()  # Runs that it concerns; empty if it concerns a whole comparison.


def merged(doubts: Iterable[Doubt]) -> list[Doubt]:
    """Merges warnings of equal code and text, with the runs of all, in the order of first appearance."""
    by_text: dict[tuple[str, str], Doubt] = {}
    for doubt in doubts:
        earlier = by_text.get((doubt.code, doubt.text))
        if earlier is not None:
            doubt = replace(earlier, runs=(*earlier.runs, *doubt.runs))
        by_text[doubt.code, doubt.text] = doubt
    return list(by_text.values())


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


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key of the environment with different values."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]  # Each value (or `not set`) and its runs, the most frequent first.
    expected: bool  # Whether it differs by nature, because it names the job or a rank's place in it.


@dataclass(frozen=True, kw_only=True)
class Environments:
    """The environments of several runs."""

    common: dict[str, str]  # Keys with one value in all runs.
    differences: tuple[Difference, ...]


def order_of(key: str) -> tuple[int, str]:
    """Returns a sort key: keys that most likely explain a difference first."""
    return next((number for number, start in enumerate(TELLING) if key.startswith(start)), len(TELLING)), key


def names_the_job(key: str) -> bool:
    """Returns whether a key differs by nature: it names the job or a rank's place in it, or dlbench sets it."""
    return _EXPECTED.fullmatch(key) is not None


def compare(runs: Sequence[Run]) -> Environments:
    """Compares the environments (of rank 0) of runs that have a record."""
    return side_by_side({run.plan.run_id: run.record.environment for run in runs if run.record is not None})


def facts(record: Record) -> dict[str, str]:
    """Returns the environment of a run without the names of job and host, and the properties of its data."""
    data = {f"data.{key}": str(record.data[key]) for key in _DATA_KEYS if key in record.data}
    return without_names({**record.environment, **data})


def without_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without keys that differ by nature, or that dlbench sets in every run."""
    return {
        key: value
        for key, value in environment.items()
        if not names_the_job(key) and not (key in _INTERFACES and value == _LOOPBACK)
    }


def environment_doubts(plan: LaunchPlan, environment: Mapping[str, str], *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yields codes and texts of warnings about one environment."""
    version = environment.get("dlbench.version", plan.dlbench_version)
    if version != plan.dlbench_version:
        yield (
            "other-dlbench",
            f"the ranks ran dlbench {version}, the plan was made by {plan.dlbench_version}: set system.python to a "
            "Python with the same",
        )
    ran = environment.get("dlbench.commit") or environment.get("dlbench.files", "")
    if ran and plan.dlbench_code and ran != plan.dlbench_code:
        yield (
            "other-dlbench",
            f"the ranks ran different code of dlbench {version} ({ran}) than the planning command "
            f"({plan.dlbench_code}): it was changed, or installed again, in between",
        )
    if on_gpu and environment.get("variable.CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield (
            "launch-blocking",
            "CUDA_LAUNCH_BLOCKING was set, which is for debugging: the host waited for each kernel before it launched "
            "the next, and nothing overlaps",
        )


def network_doubts(nccl: NcclTransport, environment: Mapping[str, str]) -> Iterator[tuple[str, Severity, str]]:
    """Yields warnings if messages between nodes used TCP in spite of adapters, or copies through host memory."""
    connections = {transport: count for transport, count in nccl.channels.items() if transport.startswith("NET/")}
    by_socket = sum(count for transport, count in connections.items() if transport.startswith("NET/Socket"))
    if by_socket and nccl.adapters:
        kinds = set(nccl.adapters.values())
        needs = []
        if kinds & {"EFA", "Slingshot"}:
            needs.append("its plugin aws-ofi-nccl (libnccl-net.so)")
        if kinds - {"EFA", "Slingshot"}:
            needs.append("libibverbs and /dev/infiniband, in a container too")
        variables = {name: environment.get(f"variable.{name}", "") for name in _TO_SOCKETS}
        causes = [f"{name}={value} was set" for name, value in variables.items() if _TO_SOCKETS[name].match(value)]
        reason = " and ".join(causes) or f"to use them NCCL needs {' and '.join(needs)}"
        adapters = first_of([f"{name} ({kind})" for name, kind in nccl.adapters.items()], _MAX_ADAPTERS)
        text = f"NCCL used TCP sockets between nodes ({by_socket} connections), although they have {adapters}: {reason}"
        yield "nccl-socket", "serious", text
    # Only for NCCL's own transport does a missing GDRDMA mean host memory: a plugin's name need not say how it copies.
    by_host = sum(
        count
        for transport, count in connections.items()
        if transport.split("/")[1] == "IB" and "GDRDMA" not in transport
    )
    if by_host:
        text = f"{by_host} of NCCL's {sum(connections.values())} connections between nodes had no GPUDirect RDMA"
        remedy = "check nvidia-peermem or DMA-BUF, and the distance of adapters from the GPUs"
        yield "nccl-no-gdrdma", "note", f"{text}, through the host's memory: {remedy}"


def side_by_side(environment_by_run: Mapping[str, Mapping[str, str]]) -> Environments:
    """Compares environments by run id."""
    keys = sorted(set().union(*environment_by_run.values()))
    common: dict[str, str] = {}
    differences: list[Difference] = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for run_id, environment in environment_by_run.items():
            by_value.setdefault(environment.get(key, NOT_SET), []).append(run_id)
        if len(by_value) == 1:
            common[key] = next(iter(by_value))
            continue
        ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
        values = tuple((value, tuple(ids)) for value, ids in ordered)
        differences.append(Difference(key=key, values=values, expected=names_the_job(key)))
    return Environments(common=common, differences=tuple(differences))
