"""Which GPUs of a node the ranks of a run computed on, by NVML's numbers, as far as that is known.

CUDA counts only the devices it sees, in an order of its own; NVML counts all, by their place on the bus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.samples.node_samples import NodeSamples, node_ranks
from dlbench.records.scan import Run

_VISIBLE = "variable.CUDA_VISIBLE_DEVICES"


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
    """The GPUs of a node that the run's ranks used.

    All, where there is a rank for each. Otherwise the ranks' CUDA devices are looked up in CUDA_VISIBLE_DEVICES, by
    number or by UUID, if all ranks had the same list; without a list CUDA's numbers are taken for NVML's where all
    GPUs are of one model, because CUDA puts faster models first. Otherwise all GPUs of the node.
    """
    ranks = node_ranks(run, samples.node_rank)
    if not computes_on_gpu(run, samples.node_rank):
        return GpuUse(gpus=(), is_certain=True, how="no rank of the node computes on a GPU")
    gpus = sampled_gpus(samples)
    if not gpus:
        return GpuUse(gpus=(), is_certain=True, how=samples.why_not("gpu.0.power_w", "gpu"))
    devices = [rank.device for rank in ranks if rank.device.startswith("cuda")]
    environment = run.record.environment if run.record is not None else {}
    visible = environment.get(_VISIBLE)
    found = None
    differ = run.record is not None and any(_VISIBLE in text for text in run.record.environment_differences)
    if len(devices) >= len(gpus):
        found = GpuUse(gpus=gpus, is_certain=True, how="a rank on every GPU of the node")
    elif not differ:
        numbers = _looked_up(devices, visible, gpus, samples.facts, environment)
        if numbers is not None:
            how = "by the numbers of the ranks' devices" if visible is None else "by CUDA_VISIBLE_DEVICES"
            found = GpuUse(gpus=numbers, is_certain=True, how=how)
    divided = any(samples.facts.get(f"gpu.{gpu}.mig") == "on" for gpu in (found.gpus if found else gpus))
    if divided or any(" MIG " in device for device in devices) or (visible or "").startswith("MIG-"):
        return GpuUse(
            gpus=(),
            is_certain=True,
            how=f"GPUs of {samples.host} are divided (MIG): power and energy are those of the whole board, and no "
            "share of them is known",
        )
    return found or GpuUse(
        gpus=gpus,
        is_certain=False,
        how=f"which of the {len(gpus)} GPUs of {samples.host} the {len(devices)} ranks used is not known: all of "
        "them count",
    )


def _looked_up(
    devices: Sequence[str],
    visible: str | None,
    gpus: tuple[int, ...],
    facts: Mapping[str, str],
    environment: Mapping[str, str],
) -> tuple[int, ...] | None:
    """NVML's numbers of CUDA devices; None where they are not known."""
    matches = [re.match(r"cuda:(\d+)", device) for device in devices]
    numbers = [int(match[1]) for match in matches if match]
    if len(set(numbers)) != len(devices):
        return None
    models = {environment.get(f"gpu.{gpu}", facts.get(f"gpu.{gpu}.name")) for gpu in gpus}
    by_uuid = {facts[f"gpu.{gpu}.uuid"]: gpu for gpu in gpus if f"gpu.{gpu}.uuid" in facts}
    found: list[int] = []
    listed = visible.split(",") if visible is not None else None
    for number in numbers:
        entry = str(number) if listed is None else listed[number].strip() if number < len(listed) else ""
        if entry.isdecimal() and len(models) == 1 and None not in models:
            found.append(int(entry))
        else:
            found += [gpu for uuid, gpu in by_uuid.items() if entry and uuid.startswith(entry)]
    whole = len(set(found)) == len(numbers) and set(found) <= set(gpus)
    return tuple(sorted(found)) if whole else None
