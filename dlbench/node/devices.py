"""The device of a rank and its libraries. The device is a GPU that no other rank uses, if any is visible, else the CPU.
Of libraries: versions in this process, switches that decide which kernels run, and NCCL's log, which shows how it
connected the GPUs; in the formats of NCCL 2.18 to 2.28 (init.cc, net.cc). The log is read after all steps, since NCCL
connects a ring or tree when it first uses it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.backends import cuda, cudnn

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.arithmetic import TF32_NEEDS
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

_MAX_CHARACTERS = 200  # Most characters of torch's reason that are shown.
_SLICE = " MIG "  # Part of the name that CUDA gives a slice: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
GRANTED = "SLURM_GPUS_ON_NODE"  # Number of GPUs of its node that a job, or its step, was granted.
_CAPABILITY = (8, 0)  # Ampere: NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions".
OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # 0: NVIDIA's libraries never use TF32, whatever is set (cuBLAS documentation).
_SWITCH = {True: "on", False: "off"}
SUBSYSTEMS = "INIT,ENV,NET,GRAPH"  # Without TUNING, which writes a line for each collective of each step.
MAX_BYTES = 16 * 2**20  # Most bytes of a rank's log that are read, from its end.
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


def device_for(
    plan: LaunchPlan, place: RankPlace, root: Path = Path("/"), *, environment: Mapping[str, str] = os.environ
) -> torch.device:
    """Returns the rank's GPU, or the CPU; raises EnvironmentLacksError if requested GPUs are missing."""
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
    device = torch.device("cuda", 0 if visible == 1 else place.local_rank)
    torch.cuda.set_device(device.index)
    _require_kernels(device, place)
    return device


def _require_no_gpu(plan: LaunchPlan, place: RankPlace, root: Path) -> None:
    if is_given_gpu(root):
        lost = AMD_LOST if torch.version.hip else LOST
        problem = unusable(torch.__version__, torch.version.cuda, torch.version.hip, root)
        reason, remedy = problem or (_no_cuda(root), lost)
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


def set_tf32(is_on: bool) -> None:
    """Lets this process's GPU compute fp32 products in TF32, or not, by torch's old interface and then by the new one.
    Reading one raises if only the other was set, and torch's compiler reads the old one.
    """
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = is_on
    convolutions: Any = cudnn
    precision = "tf32" if is_on else "ieee"
    for part in (cuda.matmul, convolutions.conv, convolutions.rnn):
        part.fp32_precision = precision


def tf32_products() -> dict[str, bool]:
    """Tells whether matrix products (`matmul`) and convolutions (`cudnn`) may use TF32."""
    convolutions: Any = cudnn
    parts = {"matmul": cuda.matmul, "cudnn": convolutions.conv}
    return {name: part.fp32_precision == "tf32" for name, part in parts.items()}


def lacking_tf32(device: torch.device) -> str:
    """Returns why a device has no TF32; empty if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return TF32_NEEDS
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older: {TF32_NEEDS}"
    if os.environ.get(OVERRIDE) == "0":
        return f"{OVERRIDE}=0 switches it off"
    return ""


def torch_facts(problems: list[str], device: torch.device) -> dict[str, str]:
    """Returns facts by name, as `dlbench.machine.environment.capture` does; adds errors to `problems`."""
    facts: dict[str, object] = {"torch.cuda": torch.version.cuda, "torch.hip": torch.version.hip}
    readers: dict[str, Callable[[], object]] = {"torch.cpu_capability": torch.backends.cpu.get_cpu_capability}
    if device.type == "cuda":
        facts["torch.cudnn.benchmark"] = _SWITCH[cudnn.benchmark]
        facts["torch.deterministic"] = _SWITCH[cudnn.deterministic or torch.are_deterministic_algorithms_enabled()]
        readers |= {"torch.cudnn": cudnn.version, "torch.nccl": _nccl, "torch.sdpa": _attention}
        readers |= {"torch.tf32.matmul": lambda: _SWITCH[tf32_products()["matmul"]]}
        readers |= {"torch.tf32.cudnn": lambda: _SWITCH[tf32_products()["cudnn"]]}
    for name, read in readers.items():
        try:
            facts[name] = read()
        except Exception as error:
            problems.append(f"environment: {name} is not known: {type(error).__name__}: {error}"[:300])
    return {name: str(value) for name, value in facts.items() if value is not None}


def _nccl() -> str | None:
    """Returns the version of the NCCL that torch is linked with; Horovod may use another one."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _attention() -> str:
    """Returns the back-ends of attention that torch may choose from; the choice depends on the shapes."""
    allowed = {
        "flash": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "cudnn": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name, is_on in allowed.items() if is_on) or "none"


class NcclLog:
    """The log of NCCL in this process."""

    def __init__(self, variables: MutableMapping[str, str] = os.environ) -> None:
        """Sets NCCL's variables for a log, before anything starts NCCL; not if the user has set NCCL_DEBUG."""
        self._variables = variables
        self._folder: str | None = None
        self.why = ""  # Reason why there is no log.
        if variables.get(_DEBUG):
            self.why = "NCCL_DEBUG is set, so that dlbench does not redirect NCCL's log"
            return
        self._folder = tempfile.mkdtemp(prefix="dlbench-nccl-")
        self._before = {name: variables.get(name) for name in _VARIABLES}
        self._file = Path(self._folder) / "nccl.log"
        variables.update({_DEBUG: "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": str(self._file)})

    def read(self) -> dict[str, Any] | None:
        """Returns the content of this rank's log, None without one, and restores the user's variables."""
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
        """Deletes the log; if the rank failed, prints NCCL's warnings first."""
        if self._folder is None:
            return
        if failed and (transport := self.read()):
            for line in transport["warnings"]:
                print(f"NCCL WARN {line}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


@dataclass(slots=True)
class _Parser:
    """Collects the facts of one rank's log, message by message."""

    fields: dict[str, Any] = field(default_factory=dict)  # Version, network, plugin and nvls of `NcclTransport`.
    channels: Counter[str] = field(default_factory=Counter)  # Connections by transport.
    collective_channels: list[int] = field(default_factory=list)  # Channels of each communicator.
    nvls_channels: list[int] = field(default_factory=list)  # NVLS channels of communicators that have some.
    rings: int = 0
    trees: int = 0
    warnings: dict[str, None] = field(default_factory=dict)  # Texts, each once, in order.

    def add_line(self, line: str) -> None:
        if version := _VERSION.search(line):
            self.fields.setdefault("version", version[1])
        marked = _MARK.search(line)
        if marked is None:
            return
        if marked[1] == "WARN":
            self.warnings[marked[2].strip()] = None
        else:
            self.add_message(marked[2].strip())

    def add_message(self, message: str) -> None:
        if connection := _CONNECTION.match(message):
            # A log has both ends of a connection over the network; only the sending one counts.
            if connection[1] != "receive":
                self.channels[transport_of(connection[2])] += 1
        elif ring := _RING.match(message):
            self.rings = max(self.rings, int(ring[2]))
        elif trees := _TREES.match(message):
            self.trees = max(self.trees, trees[1].count("["))
        elif count := _COUNTS.match(message):
            self.collective_channels.append(int(count[1]))
            self.nvls_channels += map(int, re.findall(r"(\d+) nvls channels", message)[:1])
        elif network := _NETWORK.match(message):
            self.fields["network"] = network[1]
        elif plugin := _PLUGIN.match(message):
            self.fields["plugin"] = plugin[1]
        elif _NVLS.match(message):
            self.fields["nvls"] = True


def parsed(lines: Iterable[str]) -> NcclTransport:
    """Parses the lines of one rank's log; unknown lines are ignored."""
    parser = _Parser()
    for line in lines:
        parser.add_line(line)
    return NcclTransport(
        **parser.fields,
        channels=dict(sorted(parser.channels.items())),
        collective_channels=max(parser.collective_channels, default=None),
        nvls_channels=max(parser.nvls_channels, default=None),
        rings=parser.rings,
        trees=parser.trees,
        warnings=tuple(parser.warnings)[:_MAX_WARNINGS],
    )


def transport_of(text: str) -> str:
    """Returns a transport without adapter numbers: ``NET/IB/GDRDMA`` for ``NET/IB/2(0)/GDRDMA``."""
    return "/".join(part for part in text.strip().split("/") if not re.fullmatch(r"\d+(\(\d+\))?", part))


def joined_transport(ranks: Sequence[NcclTransport | dict[str, Any] | None]) -> NcclTransport | None:
    """Merges the logs of all ranks; None if no rank has one. Numbers of connections are added up."""
    logs = [NcclTransport.model_validate(rank) for rank in ranks if rank is not None]
    if not logs:
        return None
    channels: Counter[str] = Counter()
    warnings: dict[str, None] = {}
    adapters: dict[str, Any] = {}
    for log in logs:
        channels.update(log.channels)
        warnings |= dict.fromkeys(log.warnings)
        adapters |= log.adapters
    fields: dict[str, Any] = {}
    for name in ("version", "network", "plugin"):  # one text if ranks agree, else all texts
        texts = [getattr(log, name) for log in logs]
        fields[name] = ", ".join(dict.fromkeys(filter(None, texts))) or None
    for name in ("collective_channels", "nvls_channels", "nvls", "rings", "trees"):
        counts = [getattr(log, name) for log in logs]
        fields[name] = max((count for count in counts if count is not None), default=None)
    return NcclTransport(
        **fields, channels=dict(sorted(channels.items())), warnings=tuple(warnings)[:_MAX_WARNINGS], adapters=adapters
    )
