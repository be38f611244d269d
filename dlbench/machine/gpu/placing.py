"""Where the GPUs, adapters and processors of a machine are: PCI and NUMA as /sys tells them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dlbench.machine.readings import ReadingFailedError, read_line

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""Base class of PCI devices: display controllers, those without a display among them (PCI Code and ID Assignment)."""


def nvidia_buses(root: Path = Path("/")) -> tuple[str, ...]:
    """PCI addresses of all NVIDIA GPUs of the machine, in order: also of those that a control group hides."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = _text(device / "class").startswith(_DISPLAY_CLASS) and _text(device / "vendor") == _NVIDIA
        if is_gpu:
            found.append(device.name)
    return tuple(found)


def place_of(bus: str, root: Path = Path("/")) -> tuple[int | None, frozenset[int]]:
    """NUMA node of a PCI device and the processors beside it (Linux, Documentation/ABI/testing/sysfs-bus-pci)."""
    device = root / "sys/bus/pci/devices" / bus
    node = _text(device / "numa_node")
    if not node.isdecimal():  # -1: the firmware does not say
        return None, frozenset()
    return int(node), cpu_list(_text(device / "local_cpulist"))


def numa_nodes_of(cores: Sequence[int], root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that hold these processors; none where the machine does not tell."""
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
