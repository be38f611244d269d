"""GPUs through NVML (package nvidia-ml-py), read-only: no call here sets, resets or clears.

NVML's utilisation says whether any kernel ran; its GPU performance monitoring (GPM, Hopper and newer) says how much of
the GPU it used. Those metrics are read without privileges and are means over the time since the reading before, so that
reading seldom loses nothing.

Source: the NVML API reference of the NVIDIA driver (nvml.h), through the package nvidia-ml-py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from dlbench.machine.gpus import nvml_words, shut_down
from dlbench.machine.sources import DOUBLE, FLOAT, Field, Kind, Reading, ReadingFailedError, Source, Values, fact

Call = Callable[[], Values]

# Codes after which nothing of this GPU can be read.
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_GPU_NOT_FOUND")
_MISSING = ("NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH")
_VALUE_TYPES = (
    ("NVML_VALUE_TYPE_DOUBLE", "dVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_INT", "uiVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_LONG", "ulVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_LONG_LONG", "ullVal"),
    ("NVML_VALUE_TYPE_SIGNED_LONG_LONG", "sllVal"),
    ("NVML_VALUE_TYPE_SIGNED_INT", "siVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_SHORT", "usVal"),
)

_ECC = "nvmlDeviceGetTotalEccErrors"
_CLOCK, _MAX_CLOCK = ("nvmlDeviceGetClockInfo",), ("nvmlDeviceGetMaxClockInfo",)
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_TEMPERATURE = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
_PCIE = ("nvmlDeviceGetPcieThroughput",)
LEAST_S = 0.1  # Between two readings of GPM; only the first, which shows whether the GPU answers, has to wait for it.
_MIB = 2.0**20
METRICS: tuple[tuple[str, str, float, Kind], ...] = (
    # Field, NVML's constant, factor to the field's unit.
    ("sm_active", "NVML_GPM_METRIC_SM_UTIL", 0.01, FLOAT),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01, FLOAT),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01, FLOAT),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01, FLOAT),
    ("pcie_received_mean_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB, DOUBLE),
    ("pcie_sent_mean_bytes_per_s", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB, DOUBLE),
    ("nvlink_received_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", _MIB, DOUBLE),
    ("nvlink_sent_bytes_per_s", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", _MIB, DOUBLE),
)

_ABOUT = {
    "gpu.about.sm_active": "share of multiprocessors that were busy, mean since the reading before (GPM)",
    "gpu.about.sm_occupancy": "warps that were active over those that fit, mean since the reading before (GPM)",
    "gpu.about.tensor_active": "share of time in which tensor cores worked, mean since the reading before (GPM)",
    "gpu.about.dram_active": "bandwidth of device memory in use over the highest, mean since the reading before (GPM)",
    "gpu.about.order": "NVML's order, by PCI bus; CUDA_VISIBLE_DEVICES neither hides nor reorders",
    "gpu.about.power_w": "of the whole board, MIG or not; on Ampere and newer, except GA100, the mean of one second",
    "gpu.about.energy_j": "of the whole board, MIG or not, since the driver was loaded; falls when it is reloaded",
    "gpu.about.utilization": "share of NVML's sample period in which any kernel ran; kernels that wait count too",
    "gpu.about.memory_utilization": "share of NVML's sample period in which memory was read or written",
    "gpu.about.memory_used_bytes": "of all processes; drivers before 510 count their own reserve in",
    "gpu.about.pcie_bytes_per_s": "over the 20 ms before the reading; kB of NVML taken as 1000 bytes",
    "gpu.about.nvlink_bytes": "payload, summed over the links that answered at the start",
}


class _Single(NamedTuple):
    """A field that is one number of one call."""

    name: str
    functions: tuple[str, ...]  # The call; older names after newer ones, the first that answers is used.
    arguments: tuple[str, ...] = ()  # Names of NVML's constants, after the device.
    factor: float = 1.0  # Its unit from NVML's.
    kind: Kind = FLOAT
    is_slow: bool = False


_SINGLES = (
    _Single("power_w", ("nvmlDeviceGetPowerUsage",), factor=1e-3),
    _Single("energy_j", ("nvmlDeviceGetTotalEnergyConsumption",), factor=1e-3, kind=DOUBLE),
    _Single("sm_clock_hz", _CLOCK, ("NVML_CLOCK_SM",), 1e6),
    _Single("clock_reasons", _REASONS, kind=DOUBLE),
    _Single("sm_clock_max_hz", _MAX_CLOCK, ("NVML_CLOCK_SM",), 1e6, is_slow=True),
    _Single("memory_clock_hz", _CLOCK, ("NVML_CLOCK_MEM",), 1e6, is_slow=True),
    _Single("temperature_c", _TEMPERATURE, ("NVML_TEMPERATURE_GPU",), is_slow=True),
    _Single("pcie_replays", ("nvmlDeviceGetPcieReplayCounter",), kind=DOUBLE, is_slow=True),
    _Single("ecc_corrected", (_ECC,), ("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"), 1.0, DOUBLE, True),
    _Single("ecc_uncorrected", (_ECC,), ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"), 1.0, DOUBLE, True),
    # Each of these two watches the bus for 20 ms, which is why they come last.
    _Single("pcie_received_bytes_per_s", _PCIE, ("NVML_PCIE_UTIL_RX_BYTES",), 1e3, is_slow=True),
    _Single("pcie_sent_bytes_per_s", _PCIE, ("NVML_PCIE_UTIL_TX_BYTES",), 1e3, is_slow=True),
)


class _Device:
    def __init__(self, nvml: ModuleType, handle: Any, prefix: str) -> None:
        """`prefix` of the whole GPU's field names: `gpu.0.`; if it is lost, all of them end."""
        self.nvml, self.handle, self.prefix = nvml, handle, prefix

    def has(self, name: str) -> Any:
        """A constant or function of nvidia-ml-py; `ReadingFailedError` where this version of it does not have it."""
        try:
            return getattr(self.nvml, name)
        except AttributeError as error:
            raise ReadingFailedError(f"this version of nvidia-ml-py has no {name}") from error

    def ask(self, function: str, *names: str) -> Any:
        arguments = [self.has(name) for name in names]
        return self.has(function)(self.handle, *arguments)

    def failure(self, error: Exception) -> ReadingFailedError:
        """NVML's error in its own words; a lost GPU ends all its fields."""
        is_gone = getattr(error, "value", None) in {getattr(self.nvml, name, None) for name in _GONE}
        return ReadingFailedError(str(error), self.prefix if is_gone else "")

    def failed(self, code: int) -> ReadingFailedError:
        return self.failure(self.nvml.NVMLError(code))

    def reading(self, fields: tuple[Field, ...], *ways: Call) -> Reading:
        """Fields by a call; of several ways the first that answers is used from then on."""
        missing = {getattr(self.nvml, name, None) for name in _MISSING}
        left = list(ways)

        def call() -> Values:
            try:
                while len(left) > 1:
                    try:
                        values = left[0]()
                    except ReadingFailedError:
                        left.pop(0)
                    except self.nvml.NVMLError as error:
                        if error.value not in missing:
                            raise
                        left.pop(0)
                    else:
                        del left[1:]
                        return values
                return left[0]()
            except self.nvml.NVMLError as error:
                raise self.failure(error) from error

        return Reading(fields=fields, call=call)

    def memory(self, name: str) -> Reading:
        """Reads memory in use without the driver's reserve, which drivers without version 2 of the call count in."""
        field = Field(name=f"{name}memory_used_bytes", kind=DOUBLE)
        return self.reading(
            (field,),
            lambda: [float(self.ask("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2").used)],
            lambda: [float(self.ask("nvmlDeviceGetMemoryInfo").used)],
        )

    def single(self, single: _Single) -> Reading:
        def way(function: str) -> Call:
            return lambda: [self.ask(function, *single.arguments) * single.factor]

        field = Field(name=self.prefix + single.name, kind=single.kind, is_slow=single.is_slow)
        return self.reading((field,), *map(way, single.functions))

    def utilization(self) -> Values:
        rates = self.ask("nvmlDeviceGetUtilizationRates")
        return [rates.gpu / 100, rates.memory / 100]

    def field_values(self, wanted: Sequence[tuple[str, int]]) -> list[float | ReadingFailedError]:
        """Returns several field values by one call, each with its return code; `wanted`: constant and link, else 0."""
        asked = [(self.has(name), scope) for name, scope in wanted]
        types = {getattr(self.nvml, name, None): member for name, member in _VALUE_TYPES}
        values: list[float | ReadingFailedError] = []
        for found in self.has("nvmlDeviceGetFieldValues")(self.handle, asked):
            if found.nvmlReturn != 0:
                values.append(self.failed(found.nvmlReturn))
            elif found.valueType not in types:
                values.append(ReadingFailedError(f"NVML gave a value of unknown type {found.valueType}"))
            else:
                values.append(float(getattr(found.value, types[found.valueType])))
        return values

    def links(self, identity: str) -> list[int]:
        """NVLinks whose counters answer; `ReadingFailedError` where there are none."""
        try:
            count = self.field_values([("NVML_FI_DEV_NVLINK_LINK_COUNT", 0)])[0]
            if isinstance(count, ReadingFailedError):
                raise count
            if count < 1:
                raise ReadingFailedError("the GPU has no NVLink")
            found = self.field_values([(identity, link) for link in range(int(count))])
        except self.nvml.NVMLError as error:
            raise self.failure(error) from error
        links = [link for link, value in enumerate(found) if not isinstance(value, ReadingFailedError)]
        if not links:
            raise next(value for value in found if isinstance(value, ReadingFailedError))
        return links

    def by_field_values(self) -> Reading:
        """Reads memory temperature and NVLink, which NVML tells so alone; what failed is not asked for again."""
        names = ("memory_temperature_c", "nvlink_replays", "nvlink_received_bytes", "nvlink_sent_bytes")
        wanted = [[("NVML_FI_DEV_MEMORY_TEMP", 0)], [("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 0)], [], []]
        factors = (1, 1, 1024, 1024)
        refused: dict[int, ReadingFailedError] = {}
        for number, end in ((2, "RX"), (3, "TX")):
            identity = f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{end}"
            try:
                # KiB of payload of each link; their sum is of the links that answer now.
                wanted[number] = [(identity, link) for link in self.links(identity)]
            except ReadingFailedError as error:
                refused[number] = error

        def call() -> Values:
            asked = [(number, one) for number, of in enumerate(wanted) for one in of]
            sums: list[float | ReadingFailedError] = [refused.get(number, 0.0) for number in range(len(wanted))]
            found = self.field_values([one for _, one in asked]) if asked else []
            for (number, _), value in zip(asked, found, strict=True):
                total = sums[number]
                if isinstance(total, ReadingFailedError):
                    continue
                if isinstance(value, ReadingFailedError):
                    sums[number] = refused[number] = value
                    wanted[number] = []
                else:
                    sums[number] = total + value * factors[number]
            return sums

        kinds = (FLOAT, DOUBLE, DOUBLE, DOUBLE)
        fields = [Field(name=self.prefix + n, kind=kind, is_slow=True) for n, kind in zip(names, kinds, strict=True)]
        return self.reading(tuple(fields), call)

    def readings(self) -> list[Reading]:
        found = [self.single(single) for single in _SINGLES]
        rates = (Field(name=f"{self.prefix}utilization"), Field(name=f"{self.prefix}memory_utilization"))
        found[2:2] = [self.reading(rates, self.utilization), self.memory(self.prefix)]
        return [*found, self.by_field_values()]

    def fact(self, function: str, *names: str, member: str = "", factor: float | None = None) -> str:
        """What a call says, as a fact; `unknown: reason` where it says nothing."""
        return _fact(self.nvml, lambda: self.ask(function, *names), member, factor)

    def facts(self, number: int) -> dict[str, str]:
        found = {
            "index": str(number),
            "uuid": self.fact("nvmlDeviceGetUUID"),
            "name": self.fact("nvmlDeviceGetName"),
            "pci_bus_id": self.fact("nvmlDeviceGetPciInfo", member="busId"),
            "power_limit_w": self.fact("nvmlDeviceGetEnforcedPowerLimit", factor=1e-3),
            "sm_clock_max_hz": self.fact(*_MAX_CLOCK, "NVML_CLOCK_SM", factor=1e6),
            "memory_clock_max_hz": self.fact(*_MAX_CLOCK, "NVML_CLOCK_MEM", factor=1e6),
            "memory_total_bytes": self.fact("nvmlDeviceGetMemoryInfo", member="total"),
        }
        return {f"{self.prefix}{name}": value for name, value in found.items()}

    def instances(self, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading] | None:
        """Memory of each MIG instance, and facts about it; None where the GPU is not in MIG mode."""
        nvml, prefix = self.nvml, self.prefix
        try:
            is_split = self.ask("nvmlDeviceGetMigMode")[0] == self.has("NVML_DEVICE_MIG_ENABLE")
            count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(self.handle)) if is_split else 0
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
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    unavailable[f"{prefix}mig.{number}.memory_used_bytes"] = str(error)
                continue
            part, name = _Device(nvml, instance, prefix), f"{prefix}mig.{number}."
            facts[f"{name}uuid"] = part.fact("nvmlDeviceGetUUID")
            facts[f"{name}name"] = part.fact("nvmlDeviceGetName")
            readings.append(part.memory(name))
        return readings


class _Gpm:
    """The GPM metrics of one GPU; `close` gives their two samples back to NVML."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self._samples: list[Any] = []
        self._refused: ReadingFailedError | None = None
        self._taken_s = 0.0
        try:
            if device.ask("nvmlGpmQueryDeviceSupport").isSupportedDevice:
                for _ in range(2):
                    self._samples.append(device.has("nvmlGpmSampleAlloc")())
                self._take()
            else:
                self._refused = ReadingFailedError("the GPU has no GPM")
        except device.nvml.NVMLError as error:
            self._refused = device.failure(error)
        except ReadingFailedError as error:
            self._refused = error

    def _take(self) -> None:
        self._device.has("nvmlGpmSampleGet")(self._device.handle, self._samples[0])
        self._samples.reverse()
        self._taken_s = time.monotonic()

    def reading(self) -> Reading:
        prefix = self._device.prefix
        fields = tuple(Field(name=prefix + name, kind=kind, is_slow=True) for name, _, _, kind in METRICS)
        return self._device.reading(fields, self._values)

    def _values(self) -> Values:
        if self._refused is not None:
            raise self._refused
        time.sleep(max(0.0, self._taken_s + LEAST_S - time.monotonic()))
        self._take()
        has = self._device.has
        asked = has("c_nvmlGpmMetricsGet_t")()
        asked.version = has("NVML_GPM_METRICS_GET_VERSION")
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = self._samples
        for number, (_, name, _, _) in enumerate(METRICS):
            asked.metrics[number].metricId = has(name)
        has("nvmlGpmMetricsGet")(asked)
        return [self._value(asked.metrics[number], factor) for number, (_, _, factor, _) in enumerate(METRICS)]

    def _value(self, metric: Any, factor: float) -> float | ReadingFailedError:
        return self._device.failed(metric.nvmlReturn) if metric.nvmlReturn != 0 else float(metric.value) * factor

    def close(self) -> None:
        """Nothing can be read afterwards."""
        samples, self._samples = self._samples, []
        self._refused = ReadingFailedError("closed")
        for sample in samples:
            try:
                self._device.nvml.nvmlGpmSampleFree(sample)
            except self._device.nvml.NVMLError:
                return  # the driver went away meanwhile


def _fact(nvml: ModuleType, call: Callable[[], Any], member: str = "", factor: float | None = None) -> str:
    try:
        answer = call()
        answer = getattr(answer, member) if member else answer
        return fact(answer if factor is None else f"{answer * factor:.10g}")
    except nvml.NVMLError as error:
        return f"unknown: {fact(error)}"
    except ReadingFailedError as error:
        return f"unknown: {error.reason}"
    except UnicodeDecodeError:
        return "unknown: not readable as text"
    except (TypeError, ValueError, AttributeError) as error:
        return f"unknown: {fact(f'{type(error).__name__}: {error}')}"


def open_nvml() -> Source:
    """Opens all GPUs of this machine; without package, library or driver `unavailable["gpu"]` says why."""
    try:
        import pynvml
    except ImportError:
        return Source([], {"gpu": "the package nvidia-ml-py is not installed"})
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Source([], {"gpu": nvml_words(error)})
    try:
        return _opened(pynvml)
    except BaseException:
        shut_down(pynvml)
        raise


def _opened(nvml: ModuleType) -> Source:
    unavailable: dict[str, str] = {}
    driver = _Device(nvml, None, "")
    facts = {"gpu.driver": _fact(nvml, lambda: driver.has("nvmlSystemGetDriverVersion")())}
    readings: list[Reading] = []
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        count = 0
        unavailable["gpu"] = nvml_words(error)
    else:
        facts["gpu.count"] = str(count)
        if count == 0:
            unavailable["gpu"] = "NVML finds no GPU"
    split: list[str] = []
    metrics: list[_Gpm] = []

    def close() -> None:
        for one in metrics:
            one.close()
        shut_down(nvml)

    for number in range(count):
        try:
            device = _Device(nvml, nvml.nvmlDeviceGetHandleByIndex(number), f"gpu.{number}.")
        except nvml.NVMLError as error:
            unavailable[f"gpu.{number}"] = nvml_words(error)
            continue
        readings += device.readings()
        metrics.append(_Gpm(device))
        readings.append(metrics[-1].reading())
        facts |= device.facts(number)
        instances = device.instances(unavailable, facts)
        if instances is not None:
            split.append(device.prefix)
            readings += instances
    if count:
        facts |= _ABOUT
    source = Source(readings, unavailable, facts, close=close)
    for name, reason in source.unavailable.items():
        if name.startswith(tuple(split)):
            source.unavailable[name] = f"{reason} (the GPU is in MIG mode)"
    return source
