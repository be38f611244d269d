"""Which GPUs of a node the ranks of a run computed on, by NVML's numbers, as far as that is known.

CUDA counts only the devices it sees, in an order of its own; NVML counts all, by their place on the bus. The UUIDs that
both tell join them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlbench.reading.samples.node_samples import NodeSamples, node_ranks
from dlbench.records.scan import Run


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """The GPUs of one node that count."""

    gpus: tuple[int, ...]
    """NVML's numbers; none where no rank used one, or the share of a board is not known."""
    is_certain: bool
    """False where some of them may not have been used by the run."""
    how: str
    """How it is known, or why there is none; a sentence without its full stop."""


def sampled_gpus(samples: NodeSamples) -> tuple[int, ...]:
    """Numbers of all GPUs with a sampled field."""
    found = (re.match(r"gpu\.(\d+)\.", name) for name in samples.names)
    return tuple(sorted({int(match[1]) for match in found if match}))


def computes_on_gpu(run: Run, node: int) -> bool:
    """Whether a rank of the node computed on a GPU."""
    return any(rank.device.startswith("cuda") for rank in node_ranks(run, node))


def gpus_of_ranks(run: Run, samples: NodeSamples) -> GpuUse:
    """The GPUs of a node that the run's ranks used, by their UUIDs; all of the node where these are not known."""
    ranks = node_ranks(run, samples.node_rank)
    if not computes_on_gpu(run, samples.node_rank):
        return GpuUse(gpus=(), is_certain=True, how="no rank of the node computes on a GPU")
    gpus = sampled_gpus(samples)
    if not gpus:
        return GpuUse(gpus=(), is_certain=True, how=samples.why_not("gpu.0.power_w", "gpu"))
    used = [rank.gpu for rank in ranks if rank.gpu is not None]
    numbers = {samples.facts.get(f"gpu.{gpu}.uuid"): gpu for gpu in gpus}
    found = tuple(sorted(numbers[gpu.uuid] for gpu in used if gpu.uuid in numbers))
    if any(gpu.is_slice for gpu in used) or any(samples.facts.get(f"gpu.{gpu}.mig") == "on" for gpu in found):
        return GpuUse(
            gpus=(),
            is_certain=True,
            how=f"GPUs of {samples.host} are divided (MIG): power and energy are those of the whole board, and no "
            "share of them is known",
        )
    if len({gpu.uuid for gpu in used}) == len(gpus):
        return GpuUse(gpus=gpus, is_certain=True, how="a rank on every GPU of the node")
    if used and len(found) == len(used):
        return GpuUse(gpus=found, is_certain=True, how="by the UUIDs of the ranks' GPUs")
    return GpuUse(
        gpus=gpus,
        is_certain=False,
        how=f"which of the {len(gpus)} GPUs of {samples.host} the {len(used)} ranks used is not known: all of "
        "them count",
    )
