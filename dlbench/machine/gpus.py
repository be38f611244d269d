"""The GPUs of a machine: where they, adapters and processors are by PCI and NUMA, and which CUDA shows a process.

Told before torch is imported, by NVML and /sys. CUDA numbers devices by PCI bus where CUDA_DEVICE_ORDER is PCI_BUS_ID,
as NVML always does; CUDA_VISIBLE_DEVICES hides and reorders (CUDA Programming Guide, environment variables). Of MIG
slices CUDA shows a process the first one only.
"""

from __future__ import annotations

import grp
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dlbench.machine.arithmetic import NVIDIA_FILES, has_gpu, is_in_processor
from dlbench.machine.sources import ReadingFailedError, read_line

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""Base class of PCI devices: display controllers, those without a display among them (PCI Code and ID Assignment)."""

_DRIVERS = {"efa": "EFA", "hfi1": "Omni-Path"}  # Whose ports do not say what they are by their link layer.
_LAYERS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
ORDER, VISIBLE = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
BY_BUS = "PCI_BUS_ID"

_NVML_REMEDIES = {
    "NVMLError_LibRmVersionMismatch": "NVIDIA's driver was updated and the kernel still runs the old module: reboot "
    "the node, or end what uses its GPUs and reload the module (rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; "
    "modprobe nvidia)",
    "NVMLError_GpuIsLost": "a GPU no longer answers: look for Xid in the kernel's log (dmesg) and reboot the node; if "
    "it is lost again, the GPU or its slot is defective",
}

_WAIT_S = 5.0  # How long NVML may take to answer.

_MODES = {
    "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": "exclusive process mode",
    "NVML_COMPUTEMODE_PROHIBITED": "prohibited mode",
}

HIDES = "hide the GPU with CUDA_VISIBLE_DEVICES= to train on the CPU"
LOST = "run nvidia-smi, and look for Xid in the kernel's log (dmesg)"
AMD_LOST = "run rocminfo, and look for amdgpu in the kernel's log (dmesg)"

_OLDEST_DRIVERS = {13: 580, 12: 525, 11: 450}
"""Oldest branch of NVIDIA's driver that runs what a CUDA of this first number built: NVIDIA, CUDA Compatibility, "Minor
Version Compatibility", table 1. With packages for forward compatibility older ones do: only CUDA knows for sure."""

_WHEELS = {13: "cu130", 12: "cu126"}
"""Names of torch's wheels by CUDA's first number: pytorch.org, "Previous versions"; there is none for 11 since 2.8."""
_LAST_FOR_12 = (2, 14)
"""Newest release of torch with wheels for CUDA 12 (pytorch#190385), and with kernels for V100 and older."""

_MARKS_OF_CONTAINERS = (".dockerenv", "run/.containerenv", ".singularity.d")  # Of Docker, Podman, Apptainer.


def nvidia_buses(root: Path = Path("/")) -> tuple[str, ...]:
    """PCI addresses of all NVIDIA GPUs of the machine, in order: also of those that a control group hides."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = _text(device / "class").startswith(_DISPLAY_CLASS) and _text(device / "vendor") == _NVIDIA
        if is_gpu:
            found.append(device.name)
    return tuple(found)


def place_of(bus: str, root: Path = Path("/")) -> tuple[int | None, frozenset[int]]:
    """NUMA node of a PCI device and the processors next to it (Linux, Documentation/ABI/testing/sysfs-bus-pci)."""
    device = root / "sys/bus/pci/devices" / bus
    node = _text(device / "numa_node")
    if not node.isdecimal():  # -1: the firmware does not say
        return None, frozenset()
    return int(node), cpu_list(_text(device / "local_cpulist"))


def numa_nodes_of(cores: Sequence[int], root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that hold these processors; none where the machine does not say."""
    nodes = set()
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cpu_list(_text(folder / "cpulist")).intersection(cores):
            nodes.add(int(folder.name.removeprefix("node")))
    return tuple(sorted(nodes))


def adapters(root: Path = Path("/")) -> dict[str, int]:
    """NUMA node of each InfiniBand or RoCE adapter that has one, by its name."""
    found = {}
    for adapter in sorted((root / "sys/class/infiniband").glob("*")):
        node = _text(adapter / "device/numa_node")
        if node.isdecimal():
            found[adapter.name] = int(node)
    return found


def fabric_adapters(root: Path = Path("/")) -> dict[str, str]:
    """Returns the kind of each adapter of a fast network that has an active link, as far as it says so, by its name.

    EFA and Omni-Path are in the class of InfiniBand too, Slingshot's Cassini has its own. Adapters made by software
    (rxe, siw) belong to no device (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
    """
    found = {}
    for adapter in sorted((root / "sys/class/infiniband").glob("*")):
        ports = [port for port in (adapter / "ports").glob("*") if _text(port / "state").endswith("ACTIVE")]
        if ports and (adapter / "device").exists():
            layer = _LAYERS.get(_text(ports[0] / "link_layer"), "RDMA")
            found[adapter.name] = _DRIVERS.get((adapter / "device/driver").resolve().name, layer)
    return found | {adapter.name: "Slingshot" for adapter in sorted((root / "sys/class/cxi").glob("*"))}


def cpu_list(text: str) -> frozenset[int]:
    """``0-3,8,10-11`` as numbers; empty where it is no such list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return frozenset()
    ends = [part.partition("-") for part in text.split(",")]
    return frozenset(cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1))


def bus_of_nvml(text: str) -> str:
    """NVML's ``00000000:1B:00.0`` as /sys writes it: ``0000:1b:00.0``; a domain of more digits keeps them."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain or '0', 16):04x}:{rest}"


def _text(path: Path) -> str:
    try:
        return read_line(path)
    except ReadingFailedError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device as CUDA counts it: a whole GPU, or a MIG slice of one."""

    uuid: str  # ``GPU-...``, or ``MIG-...`` for a slice.
    pci_bus_id: str  # As /sys has it: ``0000:1b:00.0``; a slice has its board's. Empty where not known.
    numa_node: int | None  # None where the machine has one memory, or does not say.
    cores: frozenset[int]  # Processors next to it; empty where not known.

    @property
    def is_slice(self) -> bool:
        return self.uuid.startswith("MIG-")


@contextmanager
def nvml_session() -> Iterator[ModuleType | None]:
    """NVML, read-only, for as long as it is used; None without the package, the library or a driver."""
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
    """Gives NVML back."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return  # the driver went away meanwhile; there is nothing left to give back


def nvml_remedy(error: str) -> str:
    """Returns what to do about an error of NVML, by the name of its class; empty where nothing is to be mended."""
    return next((remedy for name, remedy in _NVML_REMEDIES.items() if name in error), "")


def nvml_words(error: Exception) -> str:
    """Returns NVML's own words, and what to do where something is to be mended."""
    remedy = nvml_remedy(type(error).__name__)
    return f"{str(error).rstrip('.')}; {remedy}" if remedy else str(error)


def gpus_of_node(environment: Mapping[str, str], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA will show, in its order, by two variables; none where that is not known."""
    boards: list[tuple[Gpu, list[Gpu]]] = []
    with nvml_session() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError, UnicodeDecodeError, AttributeError):
                boards = list(_boards(nvml, root))
    if not boards:
        return ()
    whole = [board for board, _ in boards]
    if len(whole) > 1 and environment.get(ORDER, "FASTEST_FIRST") != BY_BUS:
        # FASTEST_FIRST, CUDA's own choice: which number a GPU gets is not documented. UUIDs still name it.
        entries = [part.strip() for part in environment.get(VISIBLE, "").split(",")]
        whole = whole if (bool(entries) and all(entry.upper()[:4] in ("GPU-", "MIG-") for entry in entries)) else []
    return visible(environment.get(VISIBLE), whole, [part for _, parts in boards for part in parts])


def visible(listed: str | None, gpus: Sequence[Gpu], slices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Returns what CUDA makes of `CUDA_VISIBLE_DEVICES` (None: not set); none at all where an entry is not understood.

    `gpus`: whole GPUs, by PCI bus; one in MIG mode computes only in its slices.
    """
    if listed is None:
        # A GPU in MIG mode is not counted as one, and of its slices CUDA takes the first.
        split = {part.pci_bus_id for part in slices}
        free = tuple(gpu for gpu in gpus if gpu.pci_bus_id not in split)
        return free or tuple(slices[:1])
    found: list[Gpu] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            if int(entry) >= len(gpus):
                break
            one: Gpu | None = gpus[int(entry)]
        else:
            one = named(entry, [*gpus, *slices])
        parts = [part for part in slices if one is not None and part.pci_bus_id == one.pci_bus_id]
        if one is not None and parts and not one.is_slice:
            one = parts[0]
        if one is None or one in found:
            break
        found.append(one)
    return tuple(found[:1]) if found and found[0].is_slice else tuple(found)


def named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns the only GPU whose UUID begins so (`MIG-GPU-<UUID>/...` before driver 470); None where it is not one."""
    if entry.upper()[:4] not in ("GPU-", "MIG-"):
        return None
    found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None


def slices_listed(listed: str | None) -> tuple[str, ...]:
    """The MIG slices that a list of visible devices names."""
    return tuple(part.strip() for part in (listed or "").split(",") if part.strip().upper().startswith("MIG-"))


def gpu_trouble(uuid: str) -> str:
    """Returns what NVML says against a GPU, empty for nothing; on a thread: a driver may wait for a lost GPU."""

    def trouble(nvml: ModuleType) -> str:
        try:
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError as error:
            return str(error)
        return ""

    said = _asked(trouble)
    return f"nothing within {_WAIT_S:.0f} s" if said is None else said


def restricted_mode(uuid: str | None) -> str:
    """Returns e.g. `exclusive process mode, used by process 4711`; empty where processes may use it
    (nvmlComputeMode_t).

    `uuid`: None where the GPU is not known: the first of the machine that is in such a mode counts.
    """

    def mode(nvml: ModuleType) -> str:
        with suppress(nvml.NVMLError, AttributeError):
            every = range(0 if uuid else int(nvml.nvmlDeviceGetCount()))
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid)] if uuid else map(nvml.nvmlDeviceGetHandleByIndex, every)
            for handle in handles:
                found = nvml.nvmlDeviceGetComputeMode(handle)
                words = next((text for name, text in _MODES.items() if getattr(nvml, name) == found), "")
                if words:
                    with suppress(nvml.NVMLError):
                        running = [str(one.pid) for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
                        words += f", used by process {', '.join(running)}" if running else ""
                    return words
        return ""

    return _asked(mode) or ""


def _asked(question: Callable[[ModuleType], str]) -> str | None:
    """NVML's answer, empty without NVML; None where there was none in time."""
    answers: list[str] = []

    def ask() -> None:
        with nvml_session() as nvml:
            answers.append("" if nvml is None else question(nvml))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_S)
    return answers[0] if answers else None


def wheel_for(torch: str, cuda: int = 12) -> str:
    """What to install in place of a torch of this version, for a CUDA of this first number."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    is_newer = cuda == 12 and numbers is not None and (int(numbers[1]), int(numbers[2])) > _LAST_FOR_12
    release = ".".join(map(str, (*_LAST_FOR_12, 0))) if is_newer else torch.partition("+")[0]
    return (
        f"pip install torch=={release}+{_WHEELS[cuda]} with PIP_EXTRA_INDEX_URL set to PyTorch's index for "
        f"{_WHEELS[cuda]}, or load the site's torch"
    )


class Unusable(NamedTuple):
    """Why a torch computes on no GPU, in a sentence without its full stop, and what to do."""

    reason: str
    remedy: str


def is_given_gpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks started here should compute on a GPU: `has_gpu`, and this process may open one's own device file.

    Slurm's control groups (ConstrainDevices) leave the files of other jobs' GPUs in place, and refuse to open them.
    AMD's file that its user lacks the group for counts: `unusable` says so.
    """
    files = [*(root / "dev").glob("nvidia[0-9]*"), root / "dev/dxg"]
    if not _has_nvidia_driver(root):
        files = [root / "dev/kfd"]
    is_open = any(os.access(file, os.R_OK | os.W_OK) for file in files)
    return has_gpu(root, environment) and (is_open or _lacking_group(files[-1]) != "")


def _has_nvidia_driver(root: Path) -> bool:
    return any((root / file).exists() for file in NVIDIA_FILES)


def _lacking_group(file: Path) -> str:
    """The group of a file whose mode keeps this user out, who is not in it; empty where that is not so."""
    try:
        found = file.stat()
    except OSError:
        return ""
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() in (0, found.st_uid) or found.st_mode & 0o006 == 0o006 or found.st_gid in groups:
        return ""
    try:
        return grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        return str(found.st_gid)


def hidden_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Unusable | None:
    """Why this process computes on none of the machine's GPUs, where no variable hides them; else None.

    A container that was given no devices still sees the PCI bus of its machine. GPUs that another driver than NVIDIA's
    has (nouveau, vfio-pci) are not meant for this.
    """
    if is_given_gpu(root, environment) or environment.get(VISIBLE) is not None:
        return None
    devices = root / "sys/bus/pci/devices"
    # Without a driver the link is missing, and the name is that of the link.
    buses = [bus for bus in nvidia_buses(root) if (devices / bus / "driver").resolve().name in ("nvidia", "driver")]
    if not buses:
        if _has_nvidia_driver(root) or not (root / "dev/kfd").exists() or not is_in_processor(root):
            return None
        return Unusable(
            "AMD's driver (/dev/kfd) shows no GPU but one in the processor, and torch is not built for ROCm",
            "install torch for ROCm, from PyTorch's own index, to try that",
        )
    many = f"{len(buses)} NVIDIA GPU{'s are' if len(buses) > 1 else ' is'} on the PCI bus"
    if any((root / "dev").glob("nvidia[0-9]*")):
        return Unusable(f"{many}, but this job may not open their device files", "ask for GPUs (slurm.gpu_request)")
    gives = "the container its devices (container.gpu=nvidia; apptainer --nv; docker --gpus all)"
    remedy = f"load NVIDIA's driver, or run nvidia-smi once; in a container, give {gives}"
    if any((root / mark).exists() for mark in _MARKS_OF_CONTAINERS):
        remedy = f"give {gives}, or load the driver"
    return Unusable(f"{many}, but /dev has no device file of one", remedy)


def driver_version(root: Path = Path("/")) -> str:
    """Version of NVIDIA's driver, e.g. 535.183.01, by its kernel module, else by NVML; empty where neither says."""
    if match := re.search(r"Kernel Module(?: for \S+)? +(\d[\d.]*)", _text(root / "proc/driver/nvidia/version")):
        return match[1]
    with nvml_session() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                return _as_text(nvml.nvmlSystemGetDriverVersion())
    return ""


def unusable(torch: str, cuda: str | None, hip: str | None, root: Path = Path("/")) -> Unusable | None:
    """Returns what is known against a torch, built for `cuda` or `hip`, on this machine's GPU; None for nothing."""
    base, driver = torch.partition("+")[0], driver_version(root)
    branch = int(driver.partition(".")[0] or 0)
    if not _has_nvidia_driver(root):
        if hip is not None:
            group = _lacking_group(root / "dev/kfd")
            join = f"join group {group} (as root: usermod -aG {group} USER) and log in again"
            return Unusable(f"/dev/kfd is for group {group}, which this user is not in", join) if group else None
        wheel = f"install torch {base} for ROCm, from PyTorch's own index"
        return Unusable(
            f"torch {torch} is built for {f'CUDA {cuda}' if cuda else 'CPUs'}, and the GPU is AMD's (/dev/kfd)", wheel
        )
    runs = next((major for major, oldest in _OLDEST_DRIVERS.items() if branch >= oldest), 0 if branch else 12)
    wheel = f"update the driver: torch {base} needs {_OLDEST_DRIVERS[12]} or newer"
    if runs in _WHEELS:
        wheel = wheel_for(torch, runs)
    if cuda is None:
        built = f"ROCm {hip}" if hip else "CPUs"
        of = f" (driver {driver})" if driver else ""
        return Unusable(f"torch {torch} is built for {built}, and the GPU is NVIDIA's{of}", wheel)
    needed = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    if needed is None or not branch or branch >= needed:
        return None
    return Unusable(
        f"torch {torch} is built for CUDA {cuda}, which needs driver {needed} or newer, and the driver is {driver}",
        wheel,
    )


def _boards(nvml: ModuleType, root: Path) -> Iterator[tuple[Gpu, list[Gpu]]]:
    found = []
    for number in range(int(nvml.nvmlDeviceGetCount())):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        bus = bus_of_nvml(_as_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        node, cores = place_of(bus, root)
        uuid = _as_text(nvml.nvmlDeviceGetUUID(handle))
        board = Gpu(uuid=uuid, pci_bus_id=bus, numa_node=node, cores=cores)
        parts = [Gpu(uuid=name, pci_bus_id=bus, numa_node=node, cores=cores) for name in _slices(nvml, handle)]
        found.append((board, parts))
    yield from sorted(found, key=lambda pair: pair[0].pci_bus_id)


def _slices(nvml: ModuleType, handle: Any) -> list[str]:
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError:  # a GPU, or a driver, without MIG
        return []
    found = []
    for number in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(_as_text(nvml.nvmlDeviceGetUUID(part)))
        except nvml.NVMLError:  # nothing at this place
            continue
    return found


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
