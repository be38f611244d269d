"""Which GPU a rank has, by its UUID, and that no other rank has the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.gpus import VISIBLE, Gpu, place_of, slices_listed
from dlbench.node.ranks import RankPlace
from dlbench.records.record import RankGpu

_SLICE = " MIG "
"""In the name that CUDA gives a slice: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""


def rank_gpu(
    device: torch.device, told: Gpu | None = None, environment: Mapping[str, str] = os.environ
) -> RankGpu | None:
    """The GPU of this rank as CUDA has it; None on a CPU.

    Args:
        device: where this rank computes.
        told: what NVML said before torch was imported; believed where CUDA says nothing against it.
        environment: of the process.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    named = str(properties.uuid)
    uuid = named if named.upper()[:4] in ("GPU-", "MIG-") else f"GPU-{named}"
    is_slice = _SLICE in properties.name
    slices = slices_listed(environment.get(VISIBLE))
    if is_slice and (slices or (told is not None and told.is_slice)):
        # What CUDA's runtime calls a slice depends on the driver: its own UUID, or that of the board.
        uuid = slices[0] if slices else told.uuid if told is not None else uuid
    known = told if told is not None and (told.uuid == uuid or not told.uuid) else None
    bus = known.pci_bus_id if known is not None else _bus(properties)
    numa = known.numa_node if known is not None else place_of(bus)[0] if bus else None
    return RankGpu(
        uuid=uuid,
        pci_bus_id=bus or None,
        numa_node=numa,
        is_slice=is_slice or uuid.startswith("MIG-"),
        visible=torch.cuda.device_count(),
        no_peer_access=_unreachable(device),
    )


def _bus(properties: Any) -> str:
    """A PCI address from what torch tells of it, from 2.7 on; empty before."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(not isinstance(part, int) for part in parts):
        return ""
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _unreachable(device: torch.device) -> tuple[int, ...]:
    own = device.index or 0
    others = [number for number in range(torch.cuda.device_count()) if number != own]
    return tuple(number for number in others if not torch.cuda.can_device_access_peer(own, number))


def require_own_gpu(
    gpu: RankGpu | None, place: RankPlace, gather: Callable[[Any], Sequence[Any]], *, by_nccl: bool
) -> None:
    """Fails on all ranks where two of a node share a GPU, or where NCCL would have to join slices of one.

    Args:
        gpu: this rank's; None on a CPU, where nothing is asked: ranks compute on GPUs all, or none.
        place: this rank.
        gather: what every rank, or every rank of this node, says.
        by_nccl: whether NCCL carries the messages.

    Raises:
        EnvironmentLacksError: they do.
    """
    if place.size == 1 or gpu is None:
        return
    told = [place.rank, place.host, gpu.uuid, gpu.pci_bus_id or ""]
    require_distinct([(int(rank), str(host), str(uuid), str(bus)) for rank, host, uuid, bus in gather(told)], by_nccl)


def require_distinct(ranks: Sequence[tuple[int, str, str, str]], by_nccl: bool) -> None:
    """The same, of ranks as (rank, host, UUID, PCI address or nothing).

    Raises:
        EnvironmentLacksError: two ranks have the same GPU, or NCCL would have to join two slices of one.
    """
    shared = _alike(ranks, lambda one: one[2])
    if shared:
        numbers, host, uuid = shared
        raise EnvironmentLacksError(
            f"ranks {numbers} share GPU {uuid} of {host}: each rank needs one of its own; use fewer ranks per node, or "
            "show each rank its own (slurm.gpu_bind, CUDA_VISIBLE_DEVICES)"
        )
    slices = [one for one in ranks if one[2].startswith("MIG-")]
    if by_nccl and (shared := _alike(slices, lambda one: one[3])):
        numbers, host, bus = shared
        raise EnvironmentLacksError(
            f"ranks {numbers} have MIG slices of one GPU ({bus} of {host}), which NCCL refuses to join; use one slice "
            "of each GPU, or engine ddp with engine.ddp.backend gloo"
        )


def _alike(
    ranks: Sequence[tuple[int, str, str, str]], key: Callable[[tuple[int, str, str, str]], str]
) -> tuple[str, str, str] | None:
    """The first value that two ranks of a host have: the ranks as text, the host, the value."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        if key(one):
            groups.setdefault((one[1], key(one)), []).append(one[0])
    for (host, value), numbers in groups.items():
        if len(numbers) > 1:
            return ", ".join(map(str, sorted(numbers))), host, value
    return None
