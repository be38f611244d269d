"""Finds the GPUs and network adapters of a machine with their NUMA nodes, and the GPUs that CUDA shows a process. Uses
NVML and /sys, so that torch need not be imported. CUDA numbers devices by PCI bus if CUDA_DEVICE_ORDER is PCI_BUS_ID,
as NVML always does; CUDA_VISIBLE_DEVICES hides and reorders (CUDA Programming Guide, environment variables). CUDA shows
a process only the first of several MIG slices.
"""

from __future__ import annotations

import grp
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dlbench.machine.arithmetic import NVIDIA_FILES, has_gpu, is_in_processor
from dlbench.machine.sources import ReadingFailedError, read_line

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""Base class of PCI devices: display controllers, those without a display among them (PCI Code and ID Assignment)."""

_DRIVERS = {"efa": "EFA", "hfi1": "Omni-Path"}  # Adapters whose link layer does not name the kind.
_LAYERS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
BY_BUS = "PCI_BUS_ID"

_NVML_REMEDIES = {
    "NVMLError_LibRmVersionMismatch": "NVIDIA's driver was updated and the kernel still runs the old module: reboot "
    "the node, or end all processes on its GPUs and reload the module (rmmod nvidia_uvm nvidia_drm nvidia_modeset "
    "nvidia; modprobe nvidia)",
    "NVMLError_GpuIsLost": "a GPU no longer answers: look for Xid in the kernel's log (dmesg) and reboot the node; if "
    "it is lost again, the GPU or its slot is defective",
}

_WAIT_S = 5.0  # Seconds to wait for an answer of NVML.

_MODES = {
    "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": "exclusive process mode",
    "NVML_COMPUTEMODE_PROHIBITED": "prohibited mode",
}

HIDES = "hide the GPU with CUDA_VISIBLE_DEVICES= to train on the CPU"
LOST = "run nvidia-smi, and look for Xid in the kernel's log (dmesg)"
AMD_LOST = "run rocminfo, and look for amdgpu in the kernel's log (dmesg)"

_OLDEST_DRIVERS = {13: 580, 12: 525, 11: 450}
"""Oldest branch of NVIDIA's driver by the major version of CUDA: NVIDIA, CUDA Compatibility, "Minor Version
Compatibility", table 1. Packages for forward compatibility allow older drivers: only CUDA knows for sure."""

_WHEELS = {13: "cu130", 12: "cu126"}
"""Names of torch's wheels by the major version of CUDA: pytorch.org, "Previous versions"; none for 11 since 2.8."""
_LAST_FOR_12 = (2, 14)
"""Newest release of torch with wheels for CUDA 12 (pytorch#190385), and with kernels for V100 and older."""

_CONTAINER_FILES = (".dockerenv", "run/.containerenv", ".singularity.d")  # Docker, Podman, Apptainer.


def nvidia_buses(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns the PCI addresses of all NVIDIA GPUs, in order, including those that a control group hides."""
    displays = sorted((root / "sys/bus/pci/devices").glob("*"))
    displays = [device for device in displays if _text(device / "class").startswith(_DISPLAY_CLASS)]
    return tuple(device.name for device in displays if _text(device / "vendor") == _NVIDIA)


def place_of(bus: str, root: Path = Path("/")) -> tuple[int | None, frozenset[int]]:
    """Returns the NUMA node of a PCI device and its cores (Linux, Documentation/ABI/testing/sysfs-bus-pci)."""
    device = root / "sys/bus/pci/devices" / bus
    node = _text(device / "numa_node")
    if not node.isdecimal():  # -1 if the firmware does not provide it
        return None, frozenset()
    return int(node), cpu_list(_text(device / "local_cpulist"))


def numa_nodes_of(cores: Sequence[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Returns the NUMA nodes of these cores; empty if the machine does not provide them."""
    nodes = set()
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cpu_list(_text(folder / "cpulist")).intersection(cores):
            nodes.add(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def adapters(root: Path = Path("/")) -> dict[str, int]:
    """Returns the NUMA node of each InfiniBand or RoCE adapter that has one, by the adapter's name."""
    folders = sorted((root / "sys/class/infiniband").glob("*"))
    node_by_adapter = {folder.name: _text(folder / "device/numa_node") for folder in folders}
    return {adapter: int(node) for adapter, node in node_by_adapter.items() if node.isdecimal()}


def fabric_adapters(root: Path = Path("/")) -> dict[str, str]:
    """Returns the kind of each adapter of a fast network with an active link, by the adapter's name. EFA and Omni-Path
    are also in the class of InfiniBand; software adapters (rxe, siw) have no device (Linux,
    Documentation/ABI/stable/sysfs-class-infiniband).
    """
    kind_by_adapter = {}
    for adapter in sorted((root / "sys/class/infiniband").glob("*")):
        ports = [port for port in (adapter / "ports").glob("*") if _text(port / "state").endswith("ACTIVE")]
        if ports and (adapter / "device").exists():
            layer = _LAYERS.get(_text(ports[0] / "link_layer"), "RDMA")
            kind_by_adapter[adapter.name] = _DRIVERS.get((adapter / "device/driver").resolve().name, layer)
    return kind_by_adapter | {adapter.name: "Slingshot" for adapter in sorted((root / "sys/class/cxi").glob("*"))}


def cpu_list(text: str) -> frozenset[int]:
    """Parses ``0-3,8,10-11``; returns an empty set for any other text."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return frozenset()
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bus_of_nvml(text: str) -> str:
    """Returns NVML's ``00000000:1B:00.0`` as /sys writes it: ``0000:1b:00.0``."""
    domain, _, address = text.lower().partition(":")
    return f"{int(domain or '0', 16):04x}:{address}"


def _text(path: Path) -> str:
    try:
        return read_line(path)
    except ReadingFailedError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device: a whole GPU or a MIG slice."""

    uuid: str  # ``GPU-...``, or ``MIG-...`` for a slice.
    pci_bus_id: str  # In the form of /sys, ``0000:1b:00.0``; that of the board for a slice; empty if unknown.
    numa_node: int | None  # None if unknown, or without NUMA.
    cores: frozenset[int]  # Cores of its NUMA node; empty if unknown.

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")


@contextmanager
def nvml_session() -> Iterator[ModuleType | None]:
    """Opens NVML for reading; yields None without the package, the library or a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        shut_down(pynvml)


def shut_down(nvml: ModuleType) -> None:
    """Closes NVML."""
    with suppress(nvml.NVMLError):  # the driver was unloaded meanwhile
        nvml.nvmlShutdown()


def nvml_remedy(error: str) -> str:
    """Returns the remedy for an error of NVML, by the name of its class; empty if there is none."""
    return next((remedy for name, remedy in _NVML_REMEDIES.items() if name in error), "")


def nvml_words(error: Exception) -> str:
    """Returns NVML's error message, with a remedy if there is one."""
    remedy = nvml_remedy(type(error).__name__)
    return f"{str(error).rstrip('.')}; {remedy}" if remedy else str(error)


def gpus_of_node(environment: Mapping[str, str], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA will show with these variables, in its order; empty if that is unknown."""
    boards: list[tuple[Gpu, list[Gpu]]] = []
    with nvml_session() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError, UnicodeDecodeError, AttributeError):
                boards = list(_boards(nvml, root))
    if not boards:
        return ()
    whole_gpus = [board for board, _ in boards]
    if len(whole_gpus) > 1 and environment.get(ORDER, "FASTEST_FIRST") != BY_BUS:
        # The numbers of FASTEST_FIRST, CUDA's default, are not documented: only UUIDs are unambiguous.
        entries = [entry.strip() for entry in environment.get(VISIBLE, "").split(",")]
        if not all(entry.upper()[:4] in ("GPU-", "MIG-") for entry in entries):
            whole_gpus = []
    slices = list(chain.from_iterable(board_slices for _, board_slices in boards))
    return visible(environment.get(VISIBLE), whole_gpus, slices)


def visible(listed: str | None, gpus: Sequence[Gpu], slices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Returns the devices that CUDA shows for a value of `CUDA_VISIBLE_DEVICES` (None: not set), up to the first wrong
    entry. `gpus`: whole GPUs by PCI bus; one in MIG mode computes only in its slices.
    """
    if listed is None:
        # A GPU in MIG mode is not a device itself, and CUDA uses only the first slice.
        split_buses = {part.pci_bus_id for part in slices}
        undivided = tuple(gpu for gpu in gpus if gpu.pci_bus_id not in split_buses)
        return undivided or tuple(slices[:1])
    devices: list[Gpu] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not entry.isdecimal():
            device = named(entry, [*gpus, *slices])
        elif int(entry) < len(gpus):
            device = gpus[int(entry)]
        else:
            break
        if device is not None and not device.is_slice:
            bus = device.pci_bus_id
            device = next((part for part in slices if part.pci_bus_id == bus), device)
        if device is None or device in devices:
            break
        devices.append(device)
    if devices and devices[0].is_slice:
        return tuple(devices[:1])
    return tuple(devices)


def named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns the GPU whose UUID begins with an entry (`MIG-GPU-<UUID>/...` before driver 470); None if ambiguous."""
    if entry.upper()[:4] not in ("GPU-", "MIG-"):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def slices_listed(listed: str | None) -> tuple[str, ...]:
    """Returns the MIG slices in a list of visible devices."""
    return tuple(part.strip() for part in (listed or "").split(",") if part.strip().upper().startswith("MIG-"))


def gpu_trouble(uuid: str) -> str:
    """Returns NVML's error for a GPU, or an empty text; in a thread, because a driver may hang on a lost GPU."""

    def memory_error(nvml: ModuleType) -> str:
        try:
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError as error:
            return str(error)
        return ""

    problem = _asked(memory_error)
    if problem is None:
        return f"nothing within {_WAIT_S:.0f} s"
    return problem


def largest_memory_bytes() -> int | None:
    """Returns the memory of this machine's largest GPU, bytes; None if NVML does not say."""

    def largest(nvml: ModuleType) -> str:
        with suppress(nvml.NVMLError):
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(int(nvml.nvmlDeviceGetCount()))]
            return str(max(int(nvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles))
        return ""

    answer = _asked(largest)
    return int(answer) if answer else None


def restricted_mode(uuid: str | None) -> str:
    """Returns e.g. `exclusive process mode, used by process 4711`; empty in the default mode (nvmlComputeMode_t).
    `uuid`: None: the first GPU of the machine in such a mode counts.
    """

    def mode_text(nvml: ModuleType, handle: Any) -> str:
        mode = nvml.nvmlDeviceGetComputeMode(handle)
        text = next((text for name, text in _MODES.items() if getattr(nvml, name) == mode), "")
        if text:
            with suppress(nvml.NVMLError):
                pids = [str(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                if pids:
                    return f"{text}, used by process {', '.join(pids)}"
        return text

    def first_mode(nvml: ModuleType) -> str:
        with suppress(nvml.NVMLError, AttributeError):
            if uuid:
                return mode_text(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
            for number in range(int(nvml.nvmlDeviceGetCount())):
                if text := mode_text(nvml, nvml.nvmlDeviceGetHandleByIndex(number)):
                    return text
        return ""

    return _asked(first_mode) or ""


def _asked(question: Callable[[ModuleType], str]) -> str | None:
    """Returns the answer of NVML, empty without NVML; None if there was none within `_WAIT_S`."""
    answers: list[str] = []

    def ask() -> None:
        with nvml_session() as nvml:
            answers.append("" if nvml is None else question(nvml))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return answers[0] if answers else None


def wheel_for(torch: str, cuda: int = 12) -> str:
    """Returns how to install a torch of this version, for a major version of CUDA."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    release = torch.partition("+")[0]
    if cuda == 12 and numbers is not None and (int(numbers[1]), int(numbers[2])) > _LAST_FOR_12:
        release = ".".join(map(str, (*_LAST_FOR_12, 0)))
    return (
        f"pip install torch=={release}+{_WHEELS[cuda]} with PIP_EXTRA_INDEX_URL set to PyTorch's index for "
        f"{_WHEELS[cuda]}, or load the site's torch"
    )


class Unusable(NamedTuple):
    """Why torch cannot use a GPU, as a sentence without full stop, and a remedy."""

    reason: str
    remedy: str


def is_given_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether ranks started here should use a GPU: `has_gpu`, and this process may open its device file.
    Slurm's control groups (ConstrainDevices) keep the device files of other jobs' GPUs, and refuse to open them. AMD's
    file counts even if the user is not in its group: `unusable` reports that.
    """
    files = [*(root / "dev").glob("nvidia[0-9]*"), root / "dev/dxg"]
    if not _has_nvidia_driver(root):
        files = [root / "dev/kfd"]
    is_open = any(os.access(file, os.R_OK | os.W_OK) for file in files)
    return has_gpu(root, environment) and (is_open or _lacking_group(files[-1]) != "")


def _has_nvidia_driver(root: Path) -> bool:
    return any((root / file).exists() for file in NVIDIA_FILES)


def _lacking_group(file: Path) -> str:
    """Returns the group that a user needs to access a file and is not in; empty if there is none."""
    try:
        status = file.stat()
    except OSError:
        return ""
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() in (0, status.st_uid) or status.st_mode & 0o006 == 0o006 or status.st_gid in groups:
        return ""
    try:
        return grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        return str(status.st_gid)


def hidden_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Unusable | None:
    """Returns why this process cannot use the machine's GPUs although no variable hides them; else None. A container
    without devices still sees the PCI bus of its machine. GPUs with other drivers (nouveau, vfio-pci) do not count.
    """
    if is_given_gpu(root, environment) or environment.get(VISIBLE) is not None:
        return None
    devices = root / "sys/bus/pci/devices"
    # Without a driver the link is missing, and `resolve` keeps its own name.
    buses = [bus for bus in nvidia_buses(root) if (devices / bus / "driver").resolve().name in ("nvidia", "driver")]
    if not buses:
        if _has_nvidia_driver(root) or not (root / "dev/kfd").exists() or not is_in_processor(root):
            return None
        return Unusable(
            "AMD's driver (/dev/kfd) shows only a GPU in the processor, and torch is not built for ROCm",
            "install torch for ROCm, from PyTorch's own index, to try that",
        )
    gpus = f"{len(buses)} NVIDIA GPU{'s are' if len(buses) > 1 else ' is'} on the PCI bus"
    if any((root / "dev").glob("nvidia[0-9]*")):
        return Unusable(f"{gpus}, but this job may not open their device files", "request GPUs (slurm.gpu_request)")
    give_devices = "give the container its devices (container.gpu=nvidia; apptainer --nv; docker --gpus all)"
    remedy = f"load NVIDIA's driver, or run nvidia-smi once; in a container, {give_devices}"
    if any((root / file).exists() for file in _CONTAINER_FILES):
        remedy = f"{give_devices}, or load the driver"
    return Unusable(f"{gpus}, but /dev has no device file of a GPU", remedy)


def driver_version(root: Path = Path("/")) -> str:
    """Returns the version of NVIDIA's driver, e.g. 535.183.01, from its kernel module, else from NVML, else empty."""
    if match := re.search(r"Kernel Module(?: for \S+)? +(\d[\d.]*)", _text(root / "proc/driver/nvidia/version")):
        return match[1]
    with nvml_session() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                return _as_text(nvml.nvmlSystemGetDriverVersion())
    return ""


def unusable(torch: str, cuda: str | None, hip: str | None, root: Path = Path("/")) -> Unusable | None:
    """Returns why a torch built for `cuda` or `hip` cannot use this machine's GPU; None if nothing is known."""
    base = torch.partition("+")[0]
    if not _has_nvidia_driver(root):
        if hip is None:
            target = f"CUDA {cuda}" if cuda else "CPUs"
            reason = f"torch {torch} is built for {target}, and the GPU is AMD's (/dev/kfd)"
            return Unusable(reason, f"install torch {base} for ROCm, from PyTorch's own index")
        group = _lacking_group(root / "dev/kfd")
        if not group:
            return None
        join = f"join group {group} (as root: usermod -aG {group} USER) and log in again"
        return Unusable(f"/dev/kfd is for group {group}, which this user is not in", join)
    driver = driver_version(root)
    branch = int(driver.partition(".")[0] or 0)
    supported = [major for major, oldest in _OLDEST_DRIVERS.items() if branch >= oldest]
    newest_cuda = max(supported, default=0) if branch else 12
    remedy = f"update the driver: torch {base} needs {_OLDEST_DRIVERS[12]} or newer"
    if newest_cuda in _WHEELS:
        remedy = wheel_for(torch, newest_cuda)
    if cuda is None:
        target = f"ROCm {hip}" if hip else "CPUs"
        reason = f"torch {torch} is built for {target}, and the GPU is NVIDIA's"
        if driver:
            reason += f" (driver {driver})"
        return Unusable(reason, remedy)
    needed = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    if needed is None or not branch or branch >= needed:
        return None
    return Unusable(
        f"torch {torch} is built for CUDA {cuda}, which needs driver {needed} or newer, and the driver is {driver}",
        remedy,
    )


def _boards(nvml: ModuleType, root: Path) -> Iterator[tuple[Gpu, list[Gpu]]]:
    boards = []
    for number in range(int(nvml.nvmlDeviceGetCount())):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        bus = bus_of_nvml(_as_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        node, cores = place_of(bus, root)
        uuid = _as_text(nvml.nvmlDeviceGetUUID(handle))
        board = Gpu(uuid=uuid, pci_bus_id=bus, numa_node=node, cores=cores)
        slices = [replace(board, uuid=slice_uuid) for slice_uuid in _slices(nvml, handle)]
        boards.append((board, slices))
    yield from sorted(boards, key=lambda pair: pair[0].pci_bus_id)


def _slices(nvml: ModuleType, handle: Any) -> list[str]:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError:  # a GPU, or a driver, without MIG
        return []
    uuids = []
    for number in range(count):
        try:
            slice_handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            uuids.append(_as_text(nvml.nvmlDeviceGetUUID(slice_handle)))
        except nvml.NVMLError:  # no slice with this number
            continue
    return uuids


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
