"""The device of a rank: its own GPU by what is visible, else the CPU; its UUID, and that no other rank has it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.gpus import (
    AMD_LOST,
    HIDES,
    LOST,
    VISIBLE,
    Gpu,
    driver_version,
    hidden_gpus,
    is_given_gpu,
    place_of,
    slices_listed,
    unusable,
    wheel_for,
)
from dlbench.node.ranks import RankPlace
from dlbench.records.record import RankGpu
from dlbench.specs.plan import LaunchPlan

_MAX_WORDS = 200
_SLICE = " MIG "  # In the name that CUDA gives a slice: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
GRANTED = "SLURM_GPUS_ON_NODE"  # How many GPUs of its node a job, or its step, was granted.


def device_for(
    plan: LaunchPlan, place: RankPlace, root: Path = Path("/"), *, environment: Mapping[str, str] = os.environ
) -> torch.device:
    """The rank's GPU where there is one for each rank of the node, the CPU where there is none at all.

    A launcher that shows a rank one GPU has chosen; whether two ranks got the same one shows when they have met: see
    `require_own_gpu`.
    """
    asked = plan.system.slurm.gpu_request if plan.system.scheduler == "slurm" else "none"
    if not torch.cuda.is_available():
        if is_given_gpu(root):
            found = unusable(torch.__version__, torch.version.cuda, torch.version.hip, root)
            reason, remedy = found or (_no_cuda(root), AMD_LOST if torch.version.hip else LOST)
            raise EnvironmentLacksError(f"{place.host} has a GPU that torch cannot use: {reason}; {remedy}, or {HIDES}")
        if asked != "none":
            reason, remedy = hidden_gpus(root) or ("", "check the driver and CUDA_VISIBLE_DEVICES")
            raise EnvironmentLacksError(
                f"slurm.gpu_request is {asked}, but torch sees no GPU on {place.host}: {reason}{'; ' if reason else ''}"
                f"{remedy}, or set gpu_request to none to train on CPUs"
            )
        return torch.device("cpu")
    # Before, torch counts by NVML: every board, also where CUDA shows one MIG slice of them all.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    visible = torch.cuda.device_count()
    if visible > 1 and place.local_size > visible:
        raise EnvironmentLacksError(
            f"{place.local_size} ranks per node, but {visible} GPUs on {place.host}: ranks must not share one; use "
            "fewer ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    granted = environment.get(GRANTED, "")
    if granted.isdecimal() and visible > int(granted):
        raise EnvironmentLacksError(
            f"Slurm granted {granted} of the GPUs of {place.host}, but torch sees {visible}: the others may be another "
            "job's; leave CUDA_VISIBLE_DEVICES as Slurm sets it (launch.environment, setup), or ask for all GPUs of a "
            "node (slurm.gpu_count node)"
        )
    device = torch.device("cuda", 0 if visible == 1 else place.local_rank)
    torch.cuda.set_device(device.index)
    _require_kernels(device, place)
    return device


def _no_cuda(root: Path) -> str:
    """Why CUDA does not begin, in torch's words, with the versions that decide about it."""
    words, built = "it gives no reason", f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        words = " ".join(str(error).split())[:_MAX_WORDS]
    return f"torch {torch.__version__} for {built}, driver {driver_version(root) or 'unknown'}: {words}"


def _require_kernels(device: torch.device, place: RankPlace) -> None:
    """Proves that this torch was built for a GPU's architecture. Raises EnvironmentLacksError: it was not.

    A binary runs on GPUs of the same first number and a second one at least as high, and PTX (`compute_`) on all newer
    ones (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility").
    """
    names = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    major, minor = torch.cuda.get_device_capability(device)
    fits = [
        (int(one), int(two)) <= (major, minor) and (kind == "compute" or int(one) == major) for kind, one, two in names
    ]
    if names and not any(fits):
        built = ", ".join(dict.fromkeys(f"{one}.{two}" for _, one, two in names))
        is_new = all((int(one), int(two)) < (major, minor) for _, one, two in names)
        raise EnvironmentLacksError(
            f"{place.host}: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} (compute "
            f"capability {major}.{minor}; it has {built}): "
            f"{'install a newer torch' if is_new else wheel_for(torch.__version__)}, or {HIDES}"
        )


def rank_gpu(
    device: torch.device, by_nvml: Gpu | None = None, environment: Mapping[str, str] = os.environ
) -> RankGpu | None:
    """The GPU of this rank as CUDA has it; None on a CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the address
    named = str(properties.uuid)
    uuid = named if named.upper()[:4] in ("GPU-", "MIG-") else f"GPU-{named}"
    is_slice = _SLICE in properties.name
    slices = slices_listed(environment.get(VISIBLE))
    if is_slice and (slices or (by_nvml is not None and by_nvml.is_slice)):
        # What CUDA's runtime calls a slice depends on the driver: its own UUID, or that of the board.
        uuid = slices[0] if slices else by_nvml.uuid if by_nvml is not None else uuid
    known = by_nvml if by_nvml is not None and (by_nvml.uuid == uuid or not by_nvml.uuid) else None
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    bus = bus if known is None else known.pci_bus_id
    numa = known.numa_node if known is not None else place_of(bus)[0] if bus else None
    own = device.index or 0
    others = [number for number in range(torch.cuda.device_count()) if number != own]
    return RankGpu(
        uuid=uuid,
        pci_bus_id=bus or None,
        numa_node=numa,
        is_slice=is_slice or uuid.startswith("MIG-"),
        visible=torch.cuda.device_count(),
        no_peer_access=tuple(number for number in others if not torch.cuda.can_device_access_peer(own, number)),
    )


def require_own_gpu(
    gpu: RankGpu | None, place: RankPlace, gather: Callable[[Any], Sequence[Any]], *, by_nccl: bool
) -> None:
    """Fails on all ranks where two of a node share a GPU, or where NCCL would have to join slices of one."""
    if place.size == 1 or gpu is None:
        return
    own = [place.rank, place.host, gpu.uuid, gpu.pci_bus_id or ""]
    require_distinct([(int(rank), str(host), str(uuid), str(bus)) for rank, host, uuid, bus in gather(own)], by_nccl)


def require_distinct(ranks: Sequence[tuple[int, str, str, str]], by_nccl: bool) -> None:
    """The same, of ranks as (rank, host, UUID, PCI address or nothing)."""
    shared = _alike(ranks, lambda one: one[2])
    if shared:
        numbers, host, uuid = shared
        what, way = "GPU", "show each rank its own (slurm.gpu_bind, CUDA_VISIBLE_DEVICES)"
        if uuid.startswith("MIG-"):
            what, way = "slice", "list a slice for each in CUDA_VISIBLE_DEVICES: CUDA shows a process the first alone"
        raise EnvironmentLacksError(
            f"ranks {numbers} share {what} {uuid} of {host}: each rank needs one of its own; use fewer ranks per node, "
            f"or {way}"
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
