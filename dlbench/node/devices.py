"""The device of a rank: a GPU that no other rank uses, if any is visible, else the CPU."""

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

_MAX_CHARACTERS = 200  # Most characters of torch's reason that are shown.
_SLICE = " MIG "  # Part of the name that CUDA gives a slice: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
GRANTED = "SLURM_GPUS_ON_NODE"  # Number of GPUs of its node that a job, or its step, was granted.


def device_for(
    plan: LaunchPlan, place: RankPlace, root: Path = Path("/"), *, environment: Mapping[str, str] = os.environ
) -> torch.device:
    """Returns the rank's GPU, or the CPU if the node has no GPU.

    Raises EnvironmentLacksError if GPUs were requested and are missing, or are too few. If the launcher shows each rank
    one GPU, only `require_own_gpu` can tell whether two ranks got the same one.
    """
    if not torch.cuda.is_available():
        _require_no_gpu(plan, place, root)
        return torch.device("cpu")
    # Before this, torch counts by NVML: all boards, even if CUDA shows only one MIG slice.
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
    device = torch.device("cuda", place.local_rank)
    if visible == 1:
        device = torch.device("cuda", 0)
    torch.cuda.set_device(device.index)
    _require_kernels(device, place)
    return device


def _require_no_gpu(plan: LaunchPlan, place: RankPlace, root: Path) -> None:
    """Raises EnvironmentLacksError if torch sees no GPU although the node has one or one was requested."""
    if is_given_gpu(root):
        problem = unusable(torch.__version__, torch.version.cuda, torch.version.hip, root)
        if problem is not None:
            reason, remedy = problem
        elif torch.version.hip:
            reason, remedy = _no_cuda(root), AMD_LOST
        else:
            reason, remedy = _no_cuda(root), LOST
        raise EnvironmentLacksError(f"{place.host} has a GPU that torch cannot use: {reason}; {remedy}, or {HIDES}")
    requested = plan.system.slurm.gpu_request
    if plan.system.scheduler != "slurm" or requested == "none":
        return
    advice = "; ".join(hidden_gpus(root) or ["check the driver and CUDA_VISIBLE_DEVICES"])
    raise EnvironmentLacksError(
        f"slurm.gpu_request is {requested}, but torch sees no GPU on {place.host}: {advice}, or set gpu_request to "
        "none to train on CPUs"
    )


def _no_cuda(root: Path) -> str:
    """Returns torch's reason why CUDA does not start, with the versions of torch, CUDA and driver."""
    reason, platform = "it gives no reason", "ROCm"
    if torch.version.cuda:
        platform = f"CUDA {torch.version.cuda}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"torch {torch.__version__} for {platform}, driver {driver_version(root) or 'unknown'}: {reason}"


def _require_kernels(device: torch.device, place: RankPlace) -> None:
    """Raises EnvironmentLacksError if this torch was not built for a GPU's architecture.

    A binary runs on GPUs of the same major version and at least its minor version, and PTX (`compute_`) on all newer
    ones (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility").
    """
    architectures = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    capability = torch.cuda.get_device_capability(device)
    built = []
    for kind, major, minor in architectures:
        built.append((int(major), int(minor)))
        if built[-1] <= capability and (kind == "compute" or built[-1][0] == capability[0]):
            return
    if not built:
        return
    remedy = "install a newer torch" if max(built) < capability else wheel_for(torch.__version__)
    versions = ", ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in built))
    raise EnvironmentLacksError(
        f"{place.host}: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} (compute "
        f"capability {capability[0]}.{capability[1]}; it has {versions}): {remedy}, or {HIDES}"
    )


def rank_gpu(
    device: torch.device, by_nvml: Gpu | None = None, environment: Mapping[str, str] = os.environ
) -> RankGpu | None:
    """Returns the GPU of this rank as CUDA describes it, with the place that NVML gives it; None on a CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the address
    uuid = str(properties.uuid)
    if uuid.upper()[:4] not in ("GPU-", "MIG-"):
        uuid = f"GPU-{uuid}"
    is_slice = _SLICE in properties.name
    slices = slices_listed(environment.get(VISIBLE))
    # CUDA's runtime gives the UUID of a slice or that of its board, depending on the driver.
    if is_slice and slices:
        uuid = slices[0]
    elif is_slice and by_nvml is not None and by_nvml.is_slice:
        uuid = by_nvml.uuid
    if by_nvml is not None and by_nvml.uuid in (uuid, ""):
        bus, numa_node = by_nvml.pci_bus_id, by_nvml.numa_node
    else:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        numa_node = place_of(bus)[0]
    index = device.index or 0
    others = [number for number in range(torch.cuda.device_count()) if number != index]
    return RankGpu(
        uuid=uuid,
        pci_bus_id=bus or None,
        numa_node=numa_node,
        is_slice=is_slice or uuid.startswith("MIG-"),
        visible=torch.cuda.device_count(),
        no_peer_access=tuple(number for number in others if not torch.cuda.can_device_access_peer(index, number)),
    )


def require_own_gpu(
    gpu: RankGpu | None, place: RankPlace, gather: Callable[[Any], Sequence[Any]], *, by_nccl: bool
) -> None:
    """Raises on all ranks if two of a node share a GPU, or if NCCL would have to join slices of one; collective."""
    if place.size == 1 or gpu is None:
        return
    ranks = gather([place.rank, place.host, gpu.uuid, gpu.pci_bus_id or ""])
    require_distinct([(int(rank), str(host), str(uuid), str(bus)) for rank, host, uuid, bus in ranks], by_nccl)


def require_distinct(ranks: Sequence[tuple[int, str, str, str]], by_nccl: bool) -> None:
    """Raises EnvironmentLacksError if ranks share a GPU. `ranks`: rank, host, UUID, PCI address or "" of each."""
    shared = _first_shared([(rank, host, uuid) for rank, host, uuid, _ in ranks])
    if shared:
        numbers, host, uuid = shared
        kind, remedy = "GPU", "show each rank its own (slurm.gpu_bind, CUDA_VISIBLE_DEVICES)"
        if uuid.startswith("MIG-"):
            kind = "slice"
            remedy = "list a slice for each in CUDA_VISIBLE_DEVICES: CUDA shows a process only the first"
        raise EnvironmentLacksError(
            f"ranks {numbers} share {kind} {uuid} of {host}: each rank needs its own; use fewer ranks per node, or "
            f"{remedy}"
        )
    slices = [(rank, host, bus) for rank, host, uuid, bus in ranks if uuid.startswith("MIG-")]
    if by_nccl and (shared := _first_shared(slices)):
        numbers, host, bus = shared
        raise EnvironmentLacksError(
            f"ranks {numbers} have MIG slices of one GPU ({bus} of {host}), which NCCL refuses to join; use one slice "
            "of each GPU, or engine ddp with engine.ddp.backend gloo"
        )


def _first_shared(ranks: Sequence[tuple[int, str, str]]) -> tuple[str, str, str] | None:
    """Returns the first device ("": unknown) that several ranks of a host have: ranks as text, host, device."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, host, device in ranks:
        if device:
            groups.setdefault((host, device), []).append(rank)
    for (host, device), numbers in groups.items():
        if len(numbers) > 1:
            return ", ".join(map(str, sorted(numbers))), host, device
    return None
