"""The device of a rank: its own GPU by what is visible, else the CPU; its UUID; and what NCCL's own log says.

NCCL writes the log from the first communicator on, and a ring or tree is connected when it is first used: it is read
when all steps are done. Subsystem TUNING is left out: NCCL writes a line of it for each collective of each step.
Lines have the forms of NCCL 2.18 to 2.28 (init.cc, transport/*.cc, net.cc).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
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
    fabric_adapters,
    hidden_gpus,
    is_given_gpu,
    place_of,
    slices_listed,
    unusable,
    wheel_for,
)
from dlbench.node.ranks import RankPlace
from dlbench.opening import read_end
from dlbench.records.exchange import NcclTransport
from dlbench.records.record import RankGpu
from dlbench.specs.plan import LaunchPlan

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


_MAX_WORDS = 200

_SLICE = " MIG "  # In the name that CUDA gives a slice: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.


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


SUBSYSTEMS = "INIT,ENV,NET,GRAPH"
MAX_BYTES = 16 * 2**20  # Of a rank's log: the end of a longer one is read.
_MAX_WARNINGS = 5

_DEBUG = "NCCL_DEBUG"
_VARIABLES = (_DEBUG, "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")

_MARK = re.compile(r"NCCL (INFO|WARN) (.*)$")
_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"^Using network (.+)$")
_PLUGIN = re.compile(r"^(?:P2P plugin (?:v\d+ )?|NET/Plugin: Loaded net plugin )(\S.*?)(?: \(v\d+\))?$")
_CONNECTION = re.compile(
    r"^Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(send|receive)\])? via (\S.*?)(?: comm .*)?$"
)
_RING = re.compile(r"^Channel (\d+)/(\d+) ?:(?: +\d+)+ *$")
_TREES = re.compile(r"^Trees ((?:\[\d+\] \S+ ?)+)")
_COUNTS = re.compile(r"^(?:comm 0x\w+ ?,? ?)?(\d+) coll channels,.*?(?:(\d+) nvls channels)?(?:,|$)")
_NVLS = re.compile(r"^NVLS multicast support is available")


class NcclLog:
    """The log of NCCL in this process."""

    def __init__(self, variables: MutableMapping[str, str] = os.environ) -> None:
        """Asks NCCL for a log; before anything has started it. Not where the user has asked for one himself."""
        self._variables = variables
        self._folder: str | None = None
        self.why = ""  # Why there is no log.
        if variables.get(_DEBUG):
            self.why = "NCCL_DEBUG is set: dlbench leaves NCCL's log alone"
            return
        self._folder = tempfile.mkdtemp(prefix="dlbench-nccl-")
        self._before = {name: variables.get(name) for name in _VARIABLES}
        self._file = Path(self._folder) / "nccl.log"
        variables.update({_DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(self._file)})

    def read(self) -> dict[str, Any] | None:
        """What this rank's NCCL said; None where there is no log. The variables are the user's again after that."""
        if self._folder is None:
            return None
        for name, value in self._before.items():
            if value is None:
                self._variables.pop(name, None)
            else:
                self._variables[name] = value
        try:
            text = read_end(self._file, MAX_BYTES).decode(errors="replace")
        except OSError:
            self.why = "NCCL wrote no log: it was not started"
            return None
        return {**parsed(text.splitlines()).model_dump(mode="json"), "adapters": fabric_adapters()}

    def close(self, *, failed: bool = False) -> None:
        """Deletes the log; of a rank that fails, NCCL's warnings go to its own log before."""
        if self._folder is None:
            return
        if failed and (found := self.read()):
            for line in found["warnings"]:
                print(f"NCCL WARN {line}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def parsed(lines: Iterable[str]) -> NcclTransport:
    """What the lines of one rank's log say; lines that say nothing of interest are passed over."""
    found: dict[str, Any] = {}
    ways: Counter[str] = Counter()
    counts: list[tuple[int, int | None]] = []
    rings = trees = 0
    warnings: dict[str, None] = {}
    for line in lines:
        if version := _VERSION.search(line):
            found.setdefault("version", version[1])
        marked = _MARK.search(line)
        if marked is None:
            continue
        words = marked[2].strip()
        if marked[1] == "WARN":
            warnings[words] = None
        elif connection := _CONNECTION.match(words):
            # Both ends of a connection over the network are in a log; what is sent counts.
            if connection[1] != "receive":
                ways[way_of(connection[2])] += 1
        elif ring := _RING.match(words):
            rings = max(rings, int(ring[2]))
        elif several := _TREES.match(words):
            trees = max(trees, several[1].count("["))
        elif count := _COUNTS.match(words):
            nvls = re.search(r"(\d+) nvls channels", words)
            counts.append((int(count[1]), int(nvls[1]) if nvls else None))
        elif network := _NETWORK.match(words):
            found["network"] = network[1]
        elif plugin := _PLUGIN.match(words):
            found["plugin"] = plugin[1]
        elif _NVLS.match(words):
            found["nvls"] = True
    return NcclTransport(
        **found,
        channels=dict(sorted(ways.items())),
        collective_channels=max((count for count, _ in counts), default=None),
        nvls_channels=max((nvls for _, nvls in counts if nvls is not None), default=None),
        rings=rings,
        trees=trees,
        warnings=tuple(warnings)[:_MAX_WARNINGS],
    )


def way_of(text: str) -> str:
    """A way without the number of its adapter: ``NET/IB/3/GDRDMA`` and ``NET/IB/2(0)/GDRDMA`` are one way."""
    return "/".join(part for part in text.strip().split("/") if not re.fullmatch(r"\d+(\(\d+\))?", part))


def together(ranks: Sequence[NcclTransport | dict[str, Any] | None]) -> NcclTransport | None:
    """What the logs of all ranks say together; None where no rank has one. Numbers of connections add up."""
    logs = [NcclTransport.model_validate(one) for one in ranks if one is not None]
    if not logs:
        return None
    ways: Counter[str] = Counter()
    for log in logs:
        ways.update(log.channels)
    return NcclTransport(
        version=_texts([log.version for log in logs]),
        network=_texts([log.network for log in logs]),
        plugin=_texts([log.plugin for log in logs]),
        channels=dict(sorted(ways.items())),
        collective_channels=_most([log.collective_channels for log in logs]),
        nvls_channels=_most([log.nvls_channels for log in logs]),
        nvls=any(log.nvls for log in logs),
        rings=max(log.rings for log in logs),
        trees=max(log.trees for log in logs),
        warnings=tuple(dict.fromkeys(line for log in logs for line in log.warnings))[:_MAX_WARNINGS],
        adapters={name: kind for log in logs for name, kind in log.adapters.items()},
    )


def _texts(values: Sequence[str | None]) -> str | None:
    """One text where ranks agree, else all of them."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
