"""Environments of several runs side by side: what they share, and where they differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlbench.analysis.doubts import Severity
from dlbench.records.exchange import NcclTransport
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.specs.plan import LaunchPlan
from dlbench.units import first_of

# What names the job, who pays for it, the place in it or the number of ranks, and so differs between runs by nature.
_EXPECTED = re.compile(
    r"host|boot_id|variable\.(SLURM_(JOB_ID|JOB_NODELIST|JOB_NUM_NODES|NTASKS|NTASKS_PER_NODE|RESTART_COUNT|STEP_ID)"
    r"|PATH|SLURM_TOPOLOGY_ADDR"
    r"|SLURM_(JOB_(ACCOUNT|QOS|RESERVATION)|CPU_BIND|CPU_BIND_LIST|GPUS|GPUS_ON_NODE|GPUS_PER_NODE)"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|GLOO_RENDEZVOUS_(ADDR|PORT))"
    r"|OMPI_MCA_(ess|orte|pmix|initial|shmem)_.*"
    # dlbench sets these itself, over what a shell has: by the plan, whose settings are compared, or by the rank count.
    r"|HOROVOD_(AUTOTUNE\w*|FUSION_THRESHOLD|CYCLE_TIME|(HIERARCHICAL|TORUS)_ALLREDUCE|GLOO_TIMEOUT_SECONDS|DYNAMIC_PROCESS_SETS))"
)

# Interfaces that dlbench chooses, each a variable: ranks of one node meet at the loopback.
_INTERFACES = ("variable.HOROVOD_GLOO_IFACE", "variable.GLOO_SOCKET_IFNAME")
_LOOPBACK = "lo"

TELLING = (  # Beginnings of keys that explain differences of speed, the likeliest first.
    *("system.", "dlbench.", "image.", "container.", "package.", "torch.", "mpi.", "gpu.", "cpu."),
    *("kernel", "os", "python", "libc", "memory."),
    *("data.", "variable."),
)

_TO_SOCKETS = {"NCCL_NET": re.compile("socket", re.IGNORECASE), "NCCL_IB_DISABLE": re.compile("[1-9]")}
"""Variables, and their values that keep NCCL off the adapters."""
_MAX_ADAPTERS = 6  # That are named; the rest are counted.

NOT_SET = "not set"  # Value of a key that a run does not have.

# What a data source says of itself that must not change between repeats; the rest depends on the rank count.
_DATA_KEYS = ("kind", "index_sha256", "num_samples", "decoder")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key of the environment that is not the same in all runs."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    """Each value (`not set` where a run has none) with the ids of its runs, the most frequent first."""
    expected: bool  # Whether it names the job or the place in it, and so differs by nature.


@dataclass(frozen=True, kw_only=True)
class Environments:
    """What several runs ran in."""

    common: dict[str, str]  # Keys with one value in all runs.
    differences: tuple[Difference, ...]


def order_of(key: str) -> tuple[int, str]:
    """Keys in this order begin with what most likely explains a difference."""
    return next((number for number, start in enumerate(TELLING) if key.startswith(start)), len(TELLING)), key


def names_the_job(key: str) -> bool:
    """Whether a key of the environment names the job or the place in it, or is dlbench's own; it differs by nature."""
    return _EXPECTED.fullmatch(key) is not None


def compare(runs: Sequence[Run]) -> Environments:
    """The environments (of rank 0) of runs that have a record; others are passed over."""
    return side_by_side({run.plan.run_id: run.record.environment for run in runs if run.record is not None})


def facts(record: Record) -> dict[str, str]:
    """What a run met, by key: its environment without what names the job or the host, and what its data say."""
    data = {f"data.{key}": str(record.data[key]) for key in _DATA_KEYS if key in record.data}
    return without_names({**record.environment, **data})


def without_names(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what names the job or the place in it, or that dlbench itself sets in every run."""
    return {
        key: value
        for key, value in environment.items()
        if not names_the_job(key) and not (key in _INTERFACES and value == _LOOPBACK)
    }


def environment_doubts(plan: LaunchPlan, environment: Mapping[str, str], *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Codes and texts of what one environment has that makes figures doubtful."""
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
            f"the ranks ran other code of dlbench {version} ({ran}) than the plan was made by ({plan.dlbench_code}): "
            "it was changed, or installed anew, in between",
        )
    if on_gpu and environment.get("variable.CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield (
            "launch-blocking",
            "CUDA_LAUNCH_BLOCKING was set, which is for debugging: each kernel was waited for before the next was "
            "launched, and nothing overlaps",
        )


def network_doubts(nccl: NcclTransport, environment: Mapping[str, str]) -> Iterator[tuple[str, Severity, str]]:
    """That messages between nodes went over TCP although there are adapters, or by the host's memory."""
    ways = {way: count for way, count in nccl.channels.items() if way.startswith("NET/")}
    by_socket = sum(count for way, count in ways.items() if way.startswith("NET/Socket"))
    if by_socket and nccl.adapters:
        kinds = set(nccl.adapters.values())
        needs = ["its plugin aws-ofi-nccl (libnccl-net.so)"] * bool(kinds & {"EFA", "Slingshot"})
        needs += ["libibverbs and /dev/infiniband, in a container too"] * bool(kinds - {"EFA", "Slingshot"})
        found = {name: environment.get(f"variable.{name}", "") for name in _TO_SOCKETS}
        asked = [f"{name}={value} was set" for name, value in found.items() if _TO_SOCKETS[name].match(value)]
        why = " and ".join(asked) or f"for them NCCL needs {' and '.join(needs)}"
        adapters = first_of([f"{name} ({kind})" for name, kind in nccl.adapters.items()], _MAX_ADAPTERS)
        where = f"TCP sockets ({by_socket} connections), although nodes have {adapters}"
        yield "nccl-socket", "serious", f"NCCL went between nodes over {where}: {why}"
    # Of NCCL's own transport alone it is known that such a way is by the host: a plugin's need not say how it goes.
    by_host = sum(count for way, count in ways.items() if way.split("/")[1] == "IB" and "GDRDMA" not in way)
    if by_host:
        what = f"{by_host} of NCCL's {sum(ways.values())} connections between nodes went without GPUDirect RDMA"
        remedy = "look for nvidia-peermem or DMA-BUF, and for adapters far from the GPUs"
        yield "nccl-no-gdrdma", "note", f"{what}, through the host's memory: {remedy}"


def side_by_side(known: Mapping[str, Mapping[str, str]]) -> Environments:
    """The same of environments by the id of their run."""
    keys = sorted({key for environment in known.values() for key in environment})
    common: dict[str, str] = {}
    differences: list[Difference] = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for run_id, environment in known.items():
            by_value.setdefault(environment.get(key, NOT_SET), []).append(run_id)
        if len(by_value) == 1:
            common[key] = next(iter(by_value))
            continue
        ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
        values = tuple((value, tuple(ids)) for value, ids in ordered)
        differences.append(Difference(key=key, values=values, expected=names_the_job(key)))
    return Environments(common=common, differences=tuple(differences))
