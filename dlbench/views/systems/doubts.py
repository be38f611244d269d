"""What the place of ranks and GPUs on their nodes gives reason to doubt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dlbench.reading.doubts import Severity
from dlbench.records.record import RankResult, Record


def place_doubts(record: Record) -> Iterator[tuple[str, Severity, str]]:
    """Codes, severities and texts: slices of GPUs, cores far from their GPU, GPUs that cannot reach each other."""
    slices = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.is_slice]
    if slices:
        yield (
            "gpu-slice",
            "note",
            f"{_ranks(slices)} computed on MIG slices: a slice is no whole GPU, and NCCL does not join slices of one",
        )
    far = [rank for rank in record.ranks if _is_outside(rank) and not _has_near(rank)]
    part = [rank for rank in record.ranks if _is_outside(rank) and _has_near(rank) and rank.pinned]
    if far:
        yield (
            "gpu-remote",
            "serious",
            f"{_ranks(far)} ran on cores of another NUMA node than the GPU's: launches and copies take longer",
        )
    elif part:
        yield (
            "gpu-remote",
            "note",
            f"{_ranks(part)} also ran on cores of another NUMA node than the GPU's, which has too few: lower "
            "layout.cores_per_rank",
        )
    if why := _unreachable(record):
        yield "no-peer-access", "serious", why


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
        return (
            f"{_ranks(alone)} saw no GPU but their own, as under gpus-per-task: NCCL may then go by the host's memory; "
            "set slurm.gpu_bind none"
        )
    apart = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.no_peer_access]
    return f"the GPUs of {_ranks(apart)} cannot reach all others of their node (no peer access)" if apart else ""


def _ranks(ranks: list[RankResult]) -> str:
    """`rank 3`, `ranks 0, 1`, or `12 ranks`."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank.rank) for rank in ranks)}"
