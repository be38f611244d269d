"""What one GPU is asked for by NVML. Every call here reads; none sets, resets or clears.

Source: the NVML API reference of the NVIDIA driver (nvml.h), through the package nvidia-ml-py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dlbench.machine.gpu.nvml_values import FieldValues, constant, failure, field_value
from dlbench.machine.readings import Reading, ReadingFailedError, Values
from dlbench.machine.source import DOUBLE, FLOAT, Field, Kind

Call = Callable[[], Values]


@dataclass(frozen=True, kw_only=True)
class _Single:
    """A field that is one number of one call."""

    name: str
    functions: tuple[str, ...]
    """The call; older names after newer ones, the first that answers is used."""
    arguments: tuple[str, ...] = ()
    """Names of NVML's constants, after the device."""
    factor: float = 1.0
    """Its unit from NVML's."""
    kind: Kind = FLOAT
    is_slow: bool = False


_SINGLES = (
    _Single(name="power_w", functions=("nvmlDeviceGetPowerUsage",), factor=1e-3),
    _Single(name="energy_j", functions=("nvmlDeviceGetTotalEnergyConsumption",), factor=1e-3, kind=DOUBLE),
    _Single(name="sm_clock_hz", functions=("nvmlDeviceGetClockInfo",), arguments=("NVML_CLOCK_SM",), factor=1e6),
    _Single(
        name="clock_reasons",
        functions=("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        kind=DOUBLE,
    ),
    _Single(
        name="sm_clock_max_hz",
        functions=("nvmlDeviceGetMaxClockInfo",),
        arguments=("NVML_CLOCK_SM",),
        factor=1e6,
        is_slow=True,
    ),
    _Single(
        name="memory_clock_hz",
        functions=("nvmlDeviceGetClockInfo",),
        arguments=("NVML_CLOCK_MEM",),
        factor=1e6,
        is_slow=True,
    ),
    _Single(
        name="temperature_c",
        functions=("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
        arguments=("NVML_TEMPERATURE_GPU",),
        is_slow=True,
    ),
    _Single(name="pcie_replays", functions=("nvmlDeviceGetPcieReplayCounter",), kind=DOUBLE, is_slow=True),
    _Single(
        name="ecc_corrected",
        functions=("nvmlDeviceGetTotalEccErrors",),
        arguments=("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"),
        kind=DOUBLE,
        is_slow=True,
    ),
    _Single(
        name="ecc_uncorrected",
        functions=("nvmlDeviceGetTotalEccErrors",),
        arguments=("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
        kind=DOUBLE,
        is_slow=True,
    ),
    # Each of these two watches the bus for 20 ms, which is why they come last.
    _Single(
        name="pcie_received_bytes_per_s",
        functions=("nvmlDeviceGetPcieThroughput",),
        arguments=("NVML_PCIE_UTIL_RX_BYTES",),
        factor=1e3,
        is_slow=True,
    ),
    _Single(
        name="pcie_sent_bytes_per_s",
        functions=("nvmlDeviceGetPcieThroughput",),
        arguments=("NVML_PCIE_UTIL_TX_BYTES",),
        factor=1e3,
        is_slow=True,
    ),
)


def device_readings(nvml: ModuleType, device: Any, prefix: str) -> list[Reading]:
    """What is asked of one GPU; fields are named `prefix` (`gpu.0.`) and more."""
    readings = [_single(nvml, device, prefix, single) for single in _SINGLES]
    rates = (Field(name=f"{prefix}utilization"), Field(name=f"{prefix}memory_utilization"))
    readings.insert(2, Reading(fields=rates, call=_asked(nvml, prefix, lambda: _utilization(nvml, device))))
    readings.insert(3, memory_reading(nvml, device, prefix, prefix))
    return [*readings, *_by_field_values(nvml, device, prefix)]


def memory_reading(nvml: ModuleType, device: Any, prefix: str, name: str) -> Reading:
    """Memory in use of a GPU, or of one of its MIG instances: what is allocated, without the driver's reserve.

    Drivers that do not have the second version of the call count the reserve in.
    """

    def second() -> Values:
        version = constant(nvml, "nvmlMemory_v2")
        return [float(constant(nvml, "nvmlDeviceGetMemoryInfo")(device, version).used)]

    def first() -> Values:
        return [float(constant(nvml, "nvmlDeviceGetMemoryInfo")(device).used)]

    field = Field(name=f"{name}memory_used_bytes", kind=DOUBLE)
    return Reading(fields=(field,), call=_asked(nvml, prefix, _first_that_answers(nvml, [second, first])))


def _single(nvml: ModuleType, device: Any, prefix: str, single: _Single) -> Reading:
    def way(function: str) -> Call:
        def call() -> Values:
            arguments = [constant(nvml, name) for name in single.arguments]
            return [constant(nvml, function)(device, *arguments) * single.factor]

        return call

    field = Field(name=prefix + single.name, kind=single.kind, is_slow=single.is_slow)
    ways = [way(function) for function in single.functions]
    return Reading(fields=(field,), call=_asked(nvml, prefix, _first_that_answers(nvml, ways)))


def _utilization(nvml: ModuleType, device: Any) -> Values:
    rates = constant(nvml, "nvmlDeviceGetUtilizationRates")(device)
    return [rates.gpu / 100, rates.memory / 100]


def _asked(nvml: ModuleType, prefix: str, call: Call) -> Call:
    def asked() -> Values:
        try:
            return call()
        except nvml.NVMLError as error:
            raise failure(nvml, error, prefix) from error

    return asked


def _first_that_answers(nvml: ModuleType, ways: Sequence[Call]) -> Call:
    """The ways in their order, until one answers; from then on that one alone."""
    missing = {
        getattr(nvml, name, None)
        for name in (
            "NVML_ERROR_FUNCTION_NOT_FOUND",
            "NVML_ERROR_NOT_SUPPORTED",
            "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
        )
    }
    left = list(ways)

    def call() -> Values:
        while len(left) > 1:
            try:
                values = left[0]()
            except ReadingFailedError:
                left.pop(0)
            except nvml.NVMLError as error:
                if error.value not in missing:
                    raise
                left.pop(0)
            else:
                del left[1:]
                return values
        return left[0]()

    return call


def _by_field_values(nvml: ModuleType, device: Any, prefix: str) -> list[Reading]:
    """What NVML tells by field values alone: memory temperature and NVLink. All slow."""

    def field(name: str, kind: Kind = DOUBLE) -> Field:
        return Field(name=prefix + name, kind=kind, is_slow=True)

    reading = FieldValues(nvml, device, prefix)
    fields = [field("memory_temperature_c", FLOAT), field("nvlink_replays")]
    reading.want([("NVML_FI_DEV_MEMORY_TEMP", 0)], 1)
    reading.want([("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 0)], 1)
    for name, identity in (
        ("nvlink_received_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
        ("nvlink_sent_bytes", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
    ):
        fields.append(field(name))
        try:
            # KiB of payload, each link apart; their sum is of the links that answer now.
            reading.want([(identity, link) for link in _links(nvml, device, prefix, identity)], 1024)
        except ReadingFailedError as error:
            reading.refuse(error)
    return [Reading(fields=tuple(fields), call=_asked(nvml, prefix, reading))]


def _links(nvml: ModuleType, device: Any, prefix: str, identity: str) -> list[int]:
    """NVLinks of a GPU whose counters answer.

    Raises:
        ReadingFailedError: it has none, or none answers.
    """
    try:
        count = field_value(nvml, device, prefix, [("NVML_FI_DEV_NVLINK_LINK_COUNT", 0)])[0]
        if isinstance(count, ReadingFailedError):
            raise count
        if count < 1:
            raise ReadingFailedError("the GPU has no NVLink")
        found = field_value(nvml, device, prefix, [(identity, link) for link in range(int(count))])
    except nvml.NVMLError as error:
        raise failure(nvml, error, prefix) from error
    links = [link for link, value in enumerate(found) if not isinstance(value, ReadingFailedError)]
    if not links:
        raise next(value for value in found if isinstance(value, ReadingFailedError))
    return links
