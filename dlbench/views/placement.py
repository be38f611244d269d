"""Warnings on where ranks computed, and on the convolutions that their GPUs used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from dlbench.analysis.doubts import Severity
from dlbench.analysis.environments import network_doubts
from dlbench.records.record import RankResult, Record
from dlbench.specs.plan import RunPlan

_BROKEN_CUDNN = (90800, 91500)
"""The first version of cuDNN whose 3-D convolutions in 16 bits are wrong, and the first where they are not
(pytorch#163539; `use_cudnn` in torch's Convolution.cpp). There torch 2.9 goes by its own kernels, four times slower and
more (pytorch#166122, #166643), and a later one where memory is contiguous."""


def place_doubts(record: Record) -> Iterator[tuple[str, Severity, str]]:
    """Codes, severities and texts: slices of GPUs, cores far from their GPU, GPUs that cannot reach each other."""
    slices = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.is_slice]
    if slices:
        what = f"{_ranks(slices)} computed on MIG slices"
        yield "gpu-slice", "note", f"{what}: a slice is no whole GPU, and NCCL does not join slices of one"
    far = [rank for rank in record.ranks if _is_outside(rank) and not _has_near(rank)]
    part = [rank for rank in record.ranks if _is_outside(rank) and _has_near(rank) and rank.pinned]
    other = "ran on cores of another NUMA node than the GPU's"
    if far:
        yield "gpu-remote", "serious", f"{_ranks(far)} {other}: launches and copies take longer"
    elif part:
        yield "gpu-remote", "note", f"{_ranks(part)} also {other}, which has too few: lower layout.cores_per_rank"
    if why := _unreachable(record):
        yield "no-peer-access", "serious", why
    if record.nccl is not None:
        yield from network_doubts(record.nccl, record.environment)


def convolution_doubts(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[tuple[str, Severity, str]]:
    """That 3-D convolutions in 16 bits were wrong, or left to slow kernels, by the versions of torch and cuDNN."""
    cudnn, torch = environment.get("torch.cudnn", ""), environment.get("package.torch", "")
    known = re.match(r"(\d+)\.(\d+)", torch)
    is_16_bits = plan.workload.train.precision in ("bf16", "fp16")
    if not (plan.workload.model.is_3d and is_16_bits and known and cudnn.isdecimal()):
        return
    release, version = (int(known[1]), int(known[2])), int(cudnn)
    if not _BROKEN_CUDNN[0] <= version < _BROKEN_CUDNN[1]:
        return
    what = f"cuDNN {version // 10000}.{version // 100 % 100} and torch {torch}: 3-D convolutions in 16 bits"
    remedy = "install cuDNN 9.15 or newer, with torch 2.10 or newer"
    if release < (2, 9):
        yield "conv3d", "serious", f"{what} give wrong results for large volumes (pytorch#163539): {remedy}"
    elif release == (2, 9) or plan.workload.model.order == "contiguous":
        yield ("conv3d", "serious", f"{what} are left to torch's own, slower kernels (pytorch#166122): {remedy}")


def _is_outside(rank: RankResult) -> bool:
    """Whether some of its cores are known to be on another NUMA node than its GPU."""
    if rank.gpu is None or rank.gpu.numa_node is None:
        return False
    return bool(set(rank.numa_nodes) - {rank.gpu.numa_node})


def _has_near(rank: RankResult) -> bool:
    return rank.gpu is not None and rank.gpu.numa_node in rank.numa_nodes


def _unreachable(record: Record) -> str:
    """Why GPUs of a node went by the host's memory, or may have; empty where they did not, or no node has two."""
    nodes = Counter(rank.node_rank for rank in record.ranks if rank.gpu is not None)
    if max(nodes.values(), default=0) < 2:
        return ""
    if record.nccl is not None and record.nccl.channels:
        if record.nccl.has_peer_access:
            return ""
        return "NCCL reached no GPU of the same node directly (P2P), but by the host's memory or the network"
    alone = [
        rank for rank in record.ranks if rank.gpu is not None and rank.gpu.visible == 1 and nodes[rank.node_rank] > 1
    ]
    if alone:
        saw = f"{_ranks(alone)} saw no GPU but their own, as under gpus-per-task"
        return f"{saw}: NCCL may then go by the host's memory; set slurm.gpu_bind none"
    apart = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.no_peer_access]
    return f"the GPUs of {_ranks(apart)} cannot reach all others of their node (no peer access)" if apart else ""


def _ranks(ranks: list[RankResult]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank.rank) for rank in ranks)}"
