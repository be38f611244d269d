"""GPUs through NVML (package nvidia-ml-py), read-only.

GPUs are numbered as NVML does, by PCI bus; CUDA_VISIBLE_DEVICES neither hides nor reorders them, so a GPU is known by
its UUID, in `describe`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dlbench.machine.gpu.gpm import ABOUT, GpmMetrics
from dlbench.machine.gpu.nvml_fields import device_readings, memory_reading
from dlbench.machine.gpu.nvml_values import constant
from dlbench.machine.readings import Reading, ReadingFailedError, Readings
from dlbench.machine.source import Source, fact

_ABOUT = {
    "gpu.about.order": "NVML's order, by PCI bus; CUDA_VISIBLE_DEVICES neither hides nor reorders",
    "gpu.about.power_w": "of the whole board, MIG or not; on Ampere and newer, except GA100, the mean of one second",
    "gpu.about.energy_j": "of the whole board, MIG or not, since the driver was loaded; falls when it is reloaded",
    "gpu.about.utilization": "share of NVML's sample period in which any kernel ran; kernels that wait count too",
    "gpu.about.memory_utilization": "share of NVML's sample period in which memory was read or written",
    "gpu.about.memory_used_bytes": "of all processes; drivers before 510 count their own reserve in",
    "gpu.about.pcie_bytes_per_s": "over the 20 ms before the reading; kB of NVML taken as 1000 bytes",
    "gpu.about.nvlink_bytes": "payload, summed over the links that answered at the start",
}


def open_nvml() -> Source:
    """All GPUs of this machine.

    Without the package, the library or a driver there are no fields, and `unavailable["gpu"]` says why.
    """
    try:
        import pynvml
    except ImportError:
        return Readings([], {"gpu": "the package nvidia-ml-py is not installed"})
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Readings([], {"gpu": str(error)})
    try:
        return _opened(pynvml)
    except BaseException:
        _shut_down(pynvml)
        raise


def _opened(nvml: ModuleType) -> Source:
    unavailable: dict[str, str] = {}
    facts = {"gpu.driver": _told(nvml, "nvmlSystemGetDriverVersion")}
    readings: list[Reading] = []
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        count = 0
        unavailable["gpu"] = str(error)
    else:
        facts["gpu.count"] = str(count)
        if count == 0:
            unavailable["gpu"] = "NVML finds no GPU"
    split: list[str] = []
    metrics: list[GpmMetrics] = []

    def close() -> None:
        for one in metrics:
            one.close()
        _shut_down(nvml)

    for number in range(count):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(number)
        except nvml.NVMLError as error:
            unavailable[f"gpu.{number}"] = str(error)
            continue
        prefix = f"gpu.{number}."
        readings += device_readings(nvml, device, prefix)
        metrics.append(GpmMetrics(nvml, device, prefix))
        readings.append(metrics[-1].reading())
        facts |= _device_facts(nvml, device, number)
        instances = _instances(nvml, device, prefix, unavailable, facts)
        if instances is not None:
            split.append(prefix)
            readings += instances
    if count:
        facts |= _ABOUT | ABOUT
    source = Readings(readings, unavailable, facts, close=close)
    for name, reason in source.unavailable.items():
        if name.startswith(tuple(split)):
            source.unavailable[name] = f"{reason} (the GPU is in MIG mode)"
    return source


def _device_facts(nvml: ModuleType, device: Any, number: int) -> dict[str, str]:
    prefix = f"gpu.{number}."
    return {
        f"{prefix}index": str(number),
        f"{prefix}uuid": _told(nvml, "nvmlDeviceGetUUID", device),
        f"{prefix}name": _told(nvml, "nvmlDeviceGetName", device),
        f"{prefix}pci_bus_id": _told(nvml, "nvmlDeviceGetPciInfo", device, member="busId"),
        f"{prefix}power_limit_w": _told(nvml, "nvmlDeviceGetEnforcedPowerLimit", device, factor=1e-3),
        f"{prefix}sm_clock_max_hz": _told(nvml, "nvmlDeviceGetMaxClockInfo", device, "NVML_CLOCK_SM", factor=1e6),
        f"{prefix}memory_clock_max_hz": _told(nvml, "nvmlDeviceGetMaxClockInfo", device, "NVML_CLOCK_MEM", factor=1e6),
        f"{prefix}memory_total_bytes": _told(nvml, "nvmlDeviceGetMemoryInfo", device, member="total"),
    }


def _told(
    nvml: ModuleType, function: str, device: Any = None, *names: str, member: str = "", factor: float | None = None
) -> str:
    """What a call says, as a fact; `unknown: reason` where it says nothing."""
    try:
        arguments = [constant(nvml, name) for name in names]
        answer = constant(nvml, function)(*([] if device is None else [device]), *arguments)
        answer = getattr(answer, member) if member else answer
        shown = fact(answer if factor is None else f"{answer * factor:.10g}")
    except nvml.NVMLError as error:
        return f"unknown: {fact(error)}"
    except ReadingFailedError as error:
        return f"unknown: {error.reason}"
    except UnicodeDecodeError:
        return "unknown: not readable as text"
    except (TypeError, ValueError, AttributeError) as error:
        return f"unknown: {fact(f'{type(error).__name__}: {error}')}"
    return shown


def _instances(
    nvml: ModuleType, device: Any, prefix: str, unavailable: dict[str, str], facts: dict[str, str]
) -> list[Reading] | None:
    """Memory of each MIG instance, and facts about it; None where the GPU is not in MIG mode."""
    try:
        is_split = constant(nvml, "nvmlDeviceGetMigMode")(device)[0] == constant(nvml, "NVML_DEVICE_MIG_ENABLE")
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(device)) if is_split else 0
    except nvml.NVMLError as error:
        is_plain = error.value == nvml.NVML_ERROR_NOT_SUPPORTED
        facts[f"{prefix}mig"] = "not supported" if is_plain else f"unknown: {fact(error)}"
        return None
    except ReadingFailedError as error:
        facts[f"{prefix}mig"] = f"unknown: {error.reason}"
        return None
    facts[f"{prefix}mig"] = "on" if is_split else "off"
    if not is_split:
        return None
    readings = []
    for number in range(count):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                unavailable[f"{prefix}mig.{number}.memory_used_bytes"] = str(error)
            continue
        name = f"{prefix}mig.{number}."
        facts[f"{name}uuid"] = _told(nvml, "nvmlDeviceGetUUID", instance)
        facts[f"{name}name"] = _told(nvml, "nvmlDeviceGetName", instance)
        readings.append(memory_reading(nvml, instance, prefix, name))
    return readings


def _shut_down(nvml: ModuleType) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return  # The driver went away meanwhile; there is nothing left to give back.
