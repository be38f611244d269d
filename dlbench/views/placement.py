"""Warnings on the placement of ranks, and on the convolutions of their GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from dlbench.analysis.environments import Severity, network_doubts
from dlbench.records.record import RankResult, Record
from dlbench.specs.plan import RunPlan
from dlbench.units import plural

_BROKEN_CUDNN = (90800, 91500)
"""The first version of cuDNN whose 3-D convolutions in 16 bits are wrong, and the first that is correct again
(pytorch#163539; `use_cudnn` in torch's Convolution.cpp). With these, torch 2.9 uses its own kernels, which are at least
four times slower (pytorch#166122, #166643); later versions do so if memory is contiguous."""


def place_doubts(record: Record) -> Iterator[tuple[str, Severity, str]]:
    """Yields codes, severities and texts: GPU slices, cores far from their GPU, GPUs that cannot reach each other."""
    slices = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.is_slice]
    if slices:
        subject = f"{_ranks(slices)} computed on MIG slices"
        yield "gpu-slice", "note", f"{subject}: a slice is no whole GPU, and NCCL does not join slices of one"
    far = [rank for rank in record.ranks if _is_outside(rank) and not _has_near(rank)]
    partly_far = [rank for rank in record.ranks if _is_outside(rank) and _has_near(rank) and rank.pinned]
    other = "ran on cores of another NUMA node than the GPU's"
    if far:
        yield "gpu-remote", "serious", f"{_ranks(far)} {other}: launches and copies take longer"
    elif partly_far:
        yield "gpu-remote", "note", f"{_ranks(partly_far)} also {other}, which has too few: lower layout.cores_per_rank"
    unreachable = _unreachable(record)
    if unreachable:
        yield "no-peer-access", "serious", unreachable
    if record.nccl is not None:
        yield from network_doubts(record.nccl, record.environment)


def convolution_doubts(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[tuple[str, Severity, str]]:
    """Yields a warning if 3-D convolutions in 16 bits were wrong or slow, by the versions of torch and cuDNN."""
    cudnn, torch = environment.get("torch.cudnn", ""), environment.get("package.torch", "")
    torch_version = re.match(r"(\d+)\.(\d+)", torch)
    is_16_bits = plan.workload.train.precision in ("bf16", "fp16")
    if not (plan.workload.model.is_3d and is_16_bits and torch_version and cudnn.isdecimal()):
        return
    release, version = (int(torch_version[1]), int(torch_version[2])), int(cudnn)
    if not _BROKEN_CUDNN[0] <= version < _BROKEN_CUDNN[1]:
        return
    subject = f"cuDNN {version // 10000}.{version // 100 % 100} and torch {torch}: 3-D convolutions in 16 bits"
    remedy = "install cuDNN 9.15 or newer, with torch 2.10 or newer"
    if release < (2, 9):
        yield "conv3d", "serious", f"{subject} give wrong results for large volumes (pytorch#163539): {remedy}"
    elif release == (2, 9) or plan.workload.model.order == "contiguous":
        yield "conv3d", "serious", f"{subject} use torch's own, slower kernels (pytorch#166122): {remedy}"


def _is_outside(rank: RankResult) -> bool:
    if rank.gpu is None or rank.gpu.numa_node is None:
        return False
    return bool(set(rank.numa_nodes) - {rank.gpu.numa_node})


def _has_near(rank: RankResult) -> bool:
    return rank.gpu is not None and rank.gpu.numa_node in rank.numa_nodes


def _unreachable(record: Record) -> str:
    num_gpus = Counter(rank.node_rank for rank in record.ranks if rank.gpu is not None)
    if max(num_gpus.values(), default=0) < 2:
        return ""
    if record.nccl is not None and record.nccl.channels:
        if record.nccl.has_peer_access:
            return ""
        return "NCCL reached no GPU of the same node directly (P2P), but by the host's memory or the network"
    with_gpu = [(rank, rank.gpu) for rank in record.ranks if rank.gpu is not None]
    isolated = [rank for rank, gpu in with_gpu if gpu.visible == 1 and num_gpus[rank.node_rank] > 1]
    without_access = [rank for rank, gpu in with_gpu if gpu.no_peer_access]
    if isolated:
        subject = f"{_ranks(isolated)} saw no GPU but their own, as under gpus-per-task"
        return f"{subject}: NCCL may then go by the host's memory; set slurm.gpu_bind none"
    if without_access:
        return f"the GPUs of {_ranks(without_access)} cannot reach all others of their node (no peer access)"
    return ""


def _ranks(ranks: list[RankResult]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"{plural('rank', len(ranks))} {', '.join(str(rank.rank) for rank in ranks)}"
