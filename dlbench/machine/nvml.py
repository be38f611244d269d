"""Reads counters of GPUs with NVML (package nvidia-ml-py); no call sets, resets or clears anything.

NVML's utilisation shows whether any kernel ran. GPU performance monitoring (GPM, Hopper and newer) shows how much of
the GPU it used, as means since the previous reading, so that infrequent reading loses nothing; it needs no privileges.
Source: the NVML API reference of the NVIDIA driver (nvml.h).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import Any, NamedTuple

from dlbench.machine.gpus import nvml_words, shut_down
from dlbench.machine.sources import DOUBLE, FLOAT, Field, Kind, Reading, ReadingFailedError, Source, Values, fact

Call = Callable[[], Values]

# Error codes after which no field of this GPU can be read.
_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_GPU_NOT_FOUND")
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
LEAST_S = 0.1  # Least time between two readings of GPM; only the first reading, right after the start, has to wait.
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
    name: str
    functions: tuple[str, ...]  # Names of the call, newest first: the first that works is used.
    arguments: tuple[str, ...] = ()  # Names of NVML's constants, after the device.
    factor: float = 1.0  # From NVML's unit to that of the field.
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
    # These two come last, because each call measures for 20 ms.
    _Single("pcie_received_bytes_per_s", _PCIE, ("NVML_PCIE_UTIL_RX_BYTES",), 1e3, is_slow=True),
    _Single("pcie_sent_bytes_per_s", _PCIE, ("NVML_PCIE_UTIL_TX_BYTES",), 1e3, is_slow=True),
)


class _Device:
    def __init__(self, nvml: ModuleType, handle: Any, prefix: str) -> None:
        """`prefix`: of the GPU's field names, `gpu.0.`; if the GPU is lost all these fields end."""
        self.nvml, self.handle, self.prefix = nvml, handle, prefix

    def has(self, name: str) -> Any:
        """Returns a constant or function of nvidia-ml-py. Raises `ReadingFailedError`: this version lacks it."""
        try:
            return getattr(self.nvml, name)
        except AttributeError as error:
            raise ReadingFailedError(f"this version of nvidia-ml-py has no {name}") from error

    def ask(self, function: str, *names: str) -> Any:
        arguments = [self.has(name) for name in names]
        return self.has(function)(self.handle, *arguments)

    def failure(self, error: Exception) -> ReadingFailedError:
        """Returns an error with NVML's message; a lost GPU ends all its fields."""
        is_lost = getattr(error, "value", None) in {getattr(self.nvml, name, None) for name in _LOST}
        return ReadingFailedError(str(error), self.prefix if is_lost else "")

    def failed(self, code: int) -> ReadingFailedError:
        return self.failure(self.nvml.NVMLError(code))

    def reading(self, fields: tuple[Field, ...], *calls: Call) -> Reading:
        """Returns a reading of fields by the first of several calls that works."""
        missing = {getattr(self.nvml, name, None) for name in _MISSING}
        candidates = list(calls)

        def call() -> Values:
            try:
                while len(candidates) > 1:
                    try:
                        values = candidates[0]()
                    except ReadingFailedError:
                        candidates.pop(0)
                    except self.nvml.NVMLError as error:
                        if error.value not in missing:
                            raise
                        candidates.pop(0)
                    else:
                        del candidates[1:]
                        return values
                return candidates[0]()
            except self.nvml.NVMLError as error:
                raise self.failure(error) from error

        return Reading(fields=fields, call=call)

    def memory(self, name: str) -> Reading:
        """Returns a reading of the memory in use, without the driver's reserve if version 2 of the call exists."""
        field = Field(name=f"{name}memory_used_bytes", kind=DOUBLE)
        return self.reading(
            (field,),
            lambda: [float(self.ask("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2").used)],
            lambda: [float(self.ask("nvmlDeviceGetMemoryInfo").used)],
        )

    def single(self, single: _Single) -> Reading:
        def call_of(function: str) -> Call:
            return lambda: [self.ask(function, *single.arguments) * single.factor]

        field = Field(name=self.prefix + single.name, kind=single.kind, is_slow=single.is_slow)
        return self.reading((field,), *map(call_of, single.functions))

    def utilization(self) -> Values:
        rates = self.ask("nvmlDeviceGetUtilizationRates")
        return [rates.gpu / 100, rates.memory / 100]

    def field_values(self, ids: Sequence[tuple[str, int]]) -> list[float | ReadingFailedError]:
        """Reads several field values, or their errors, in one call; `ids`: NVML's constant, and the link or 0."""
        arguments = [(self.has(name), link) for name, link in ids]
        types = {getattr(self.nvml, name, None): member for name, member in _VALUE_TYPES}
        values: list[float | ReadingFailedError] = []
        for answer in self.has("nvmlDeviceGetFieldValues")(self.handle, arguments):
            if answer.nvmlReturn != 0:
                values.append(self.failed(answer.nvmlReturn))
            elif answer.valueType not in types:
                values.append(ReadingFailedError(f"NVML gave a value of unknown type {answer.valueType}"))
            else:
                values.append(float(getattr(answer.value, types[answer.valueType])))
        return values

    def links(self, identity: str) -> list[int]:
        """Returns the NVLinks with readable counters. Raises `ReadingFailedError`: there are none."""
        try:
            count = self.field_values([("NVML_FI_DEV_NVLINK_LINK_COUNT", 0)])[0]
            if isinstance(count, ReadingFailedError):
                raise count
            if count < 1:
                raise ReadingFailedError("the GPU has no NVLink")
            values = self.field_values([(identity, link) for link in range(int(count))])
        except self.nvml.NVMLError as error:
            raise self.failure(error) from error
        links = [link for link, value in enumerate(values) if not isinstance(value, ReadingFailedError)]
        if not links:
            raise next(value for value in values if isinstance(value, ReadingFailedError))
        return links

    def by_field_values(self) -> Reading:
        """Returns a reading of memory temperature and NVLink counters; ids that failed are not read again."""
        names = ("memory_temperature_c", "nvlink_replays", "nvlink_received_bytes", "nvlink_sent_bytes")
        ids = [[("NVML_FI_DEV_MEMORY_TEMP", 0)], [("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 0)], [], []]
        factors = (1, 1, 1024, 1024)
        errors: dict[int, ReadingFailedError] = {}
        for number, end in ((2, "RX"), (3, "TX")):
            identity = f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{end}"
            try:
                # KiB of payload of each link; the field is the sum of the links that can be read now.
                ids[number] = [(identity, link) for link in self.links(identity)]
            except ReadingFailedError as error:
                errors[number] = error

        def call() -> Values:
            values = iter(self.field_values(list(chain.from_iterable(ids))) if any(ids) else [])
            sums: list[float | ReadingFailedError] = []
            for number, (field_ids, factor) in enumerate(zip(ids, factors, strict=True)):
                total = 0.0
                for value in islice(values, len(field_ids)):
                    if isinstance(value, ReadingFailedError):
                        errors.setdefault(number, value)
                    else:
                        total += value * factor
                if number in errors:
                    ids[number] = []
                sums.append(errors.get(number, total))
            return sums

        kinds = (FLOAT, DOUBLE, DOUBLE, DOUBLE)
        fields = [
            Field(name=self.prefix + name, kind=kind, is_slow=True) for name, kind in zip(names, kinds, strict=True)
        ]
        return self.reading(tuple(fields), call)

    def readings(self) -> list[Reading]:
        readings = [self.single(single) for single in _SINGLES]
        rates = (Field(name=f"{self.prefix}utilization"), Field(name=f"{self.prefix}memory_utilization"))
        readings[2:2] = [self.reading(rates, self.utilization), self.memory(self.prefix)]
        return [*readings, self.by_field_values()]

    def fact(self, function: str, *names: str, member: str = "", factor: float | None = None) -> str:
        """Returns the answer of a call as text; `unknown: reason` if it fails."""
        return _fact(self.nvml, lambda: self.ask(function, *names), member, factor)

    def facts(self, number: int) -> dict[str, str]:
        facts = {
            "index": str(number),
            "uuid": self.fact("nvmlDeviceGetUUID"),
            "name": self.fact("nvmlDeviceGetName"),
            "pci_bus_id": self.fact("nvmlDeviceGetPciInfo", member="busId"),
            "power_limit_w": self.fact("nvmlDeviceGetEnforcedPowerLimit", factor=1e-3),
            "sm_clock_max_hz": self.fact(*_MAX_CLOCK, "NVML_CLOCK_SM", factor=1e6),
            "memory_clock_max_hz": self.fact(*_MAX_CLOCK, "NVML_CLOCK_MEM", factor=1e6),
            "memory_total_bytes": self.fact("nvmlDeviceGetMemoryInfo", member="total"),
        }
        return {f"{self.prefix}{name}": value for name, value in facts.items()}

    def instances(self, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading] | None:
        """Returns readings of the memory of each MIG instance, and adds facts; None if the GPU is not in MIG mode."""
        nvml, prefix = self.nvml, self.prefix
        count = 0
        try:
            is_split = self.ask("nvmlDeviceGetMigMode")[0] == self.has("NVML_DEVICE_MIG_ENABLE")
            if is_split:
                count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(self.handle))
        except nvml.NVMLError as error:
            facts[f"{prefix}mig"] = f"unknown: {fact(error)}"
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                facts[f"{prefix}mig"] = "not supported"
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
    def __init__(self, device: _Device) -> None:
        self._device = device
        self._samples: list[Any] = []
        self._error: ReadingFailedError | None = None
        self._taken_s = 0.0
        try:
            if device.ask("nvmlGpmQueryDeviceSupport").isSupportedDevice:
                for _ in range(2):
                    self._samples.append(device.has("nvmlGpmSampleAlloc")())
                self._take()
            else:
                self._error = ReadingFailedError("the GPU has no GPM")
        except device.nvml.NVMLError as error:
            self._error = device.failure(error)
        except ReadingFailedError as error:
            self._error = error

    def _take(self) -> None:
        self._device.has("nvmlGpmSampleGet")(self._device.handle, self._samples[0])
        self._samples.reverse()
        self._taken_s = time.monotonic()

    def reading(self) -> Reading:
        prefix = self._device.prefix
        fields = tuple(Field(name=prefix + name, kind=kind, is_slow=True) for name, _, _, kind in METRICS)
        return self._device.reading(fields, self._values)

    def _values(self) -> Values:
        if self._error is not None:
            raise self._error
        time.sleep(max(0.0, self._taken_s + LEAST_S - time.monotonic()))
        self._take()
        has = self._device.has
        request = has("c_nvmlGpmMetricsGet_t")()
        request.version = has("NVML_GPM_METRICS_GET_VERSION")
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = self._samples
        for number, (_, name, _, _) in enumerate(METRICS):
            request.metrics[number].metricId = has(name)
        has("nvmlGpmMetricsGet")(request)
        return [self._value(request.metrics[number], factor) for number, (_, _, factor, _) in enumerate(METRICS)]

    def _value(self, metric: Any, factor: float) -> float | ReadingFailedError:
        if metric.nvmlReturn != 0:
            return self._device.failed(metric.nvmlReturn)
        return float(metric.value) * factor

    def close(self) -> None:
        """Frees the samples; later readings fail."""
        samples, self._samples = self._samples, []
        self._error = ReadingFailedError("closed")
        for sample in samples:
            try:
                self._device.nvml.nvmlGpmSampleFree(sample)
            except self._device.nvml.NVMLError:
                return  # the driver was unloaded meanwhile


def _fact(nvml: ModuleType, call: Callable[[], Any], member: str = "", factor: float | None = None) -> str:
    try:
        answer = call()
        if member:
            answer = getattr(answer, member)
        if factor is not None:
            answer = f"{answer * factor:.10g}"
        return fact(answer)
    except nvml.NVMLError as error:
        return f"unknown: {fact(error)}"
    except ReadingFailedError as error:
        return f"unknown: {error.reason}"
    except UnicodeDecodeError:
        return "unknown: not readable as text"
    except (TypeError, ValueError, AttributeError) as error:
        return f"unknown: {fact(f'{type(error).__name__}: {error}')}"


def open_nvml() -> Source:
    """Opens all GPUs of this machine; without package, library or driver the reason is in `unavailable["gpu"]`."""
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
    split_prefixes: list[str] = []
    metrics: list[_Gpm] = []

    def close() -> None:
        for gpm in metrics:
            gpm.close()
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
            split_prefixes.append(device.prefix)
            readings += instances
    if count:
        facts |= _ABOUT
    source = Source(readings, unavailable, facts, close=close)
    for name, reason in source.unavailable.items():
        if name.startswith(tuple(split_prefixes)):
            source.unavailable[name] = f"{reason} (the GPU is in MIG mode)"
    return source
