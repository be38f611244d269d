"""What the units of a GPU did between two readings, by NVML's GPU performance monitoring (GPM): Hopper and newer.

NVML's utilisation says whether any kernel ran; these say how much of the GPU it used. They are read without privileges
and are means over the time since the reading before, so that reading seldom loses nothing.

Source: nvml.h of the NVIDIA driver ("GPM"), through the package nvidia-ml-py.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from dlbench.machine.gpu.nvml_values import constant, failure
from dlbench.machine.readings import Reading, ReadingFailedError, Values
from dlbench.machine.source import DOUBLE, FLOAT, Field, Kind

LEAST_S = 0.1
"""Between two readings; only the first, which shows whether the GPU answers, has to wait for it."""

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

ABOUT = {
    "gpu.about.sm_active": "share of multiprocessors that were busy, mean since the reading before (GPM)",
    "gpu.about.sm_occupancy": "warps that were active over those that fit, mean since the reading before (GPM)",
    "gpu.about.tensor_active": "share of time in which tensor cores worked, mean since the reading before (GPM)",
    "gpu.about.dram_active": "bandwidth of device memory in use over the highest, mean since the reading before (GPM)",
}


class GpmMetrics:
    """The metrics of one GPU; `close` gives their two samples back to NVML."""

    def __init__(self, nvml: ModuleType, device: Any, prefix: str) -> None:
        """Takes the first sample, if the GPU has any."""
        self._nvml, self._device, self._prefix = nvml, device, prefix
        self._samples: list[Any] = []
        self._refused: ReadingFailedError | None = None
        self._taken_s = 0.0
        try:
            self._begin()
        except nvml.NVMLError as error:
            self._refused = failure(nvml, error, prefix)
        except ReadingFailedError as error:
            self._refused = error

    def _begin(self) -> None:
        support = constant(self._nvml, "nvmlGpmQueryDeviceSupport")(self._device)
        if not support.isSupportedDevice:
            raise ReadingFailedError("the GPU has no GPM")
        for _ in range(2):
            self._samples.append(constant(self._nvml, "nvmlGpmSampleAlloc")())
        self._take()

    def _take(self) -> None:
        """The older of the two samples becomes the newest."""
        constant(self._nvml, "nvmlGpmSampleGet")(self._device, self._samples[0])
        self._samples.reverse()
        self._taken_s = time.monotonic()

    def reading(self) -> Reading:
        """All metrics by one call."""
        fields = tuple(Field(name=self._prefix + name, kind=kind, is_slow=True) for name, _, _, kind in METRICS)
        return Reading(fields=fields, call=self._values)

    def _values(self) -> Values:
        nvml = self._nvml
        if self._refused is not None:
            raise self._refused
        time.sleep(max(0.0, self._taken_s + LEAST_S - time.monotonic()))
        try:
            self._take()
            newest, before = self._samples[1], self._samples[0]
            asked = constant(nvml, "c_nvmlGpmMetricsGet_t")()
            asked.version = constant(nvml, "NVML_GPM_METRICS_GET_VERSION")
            asked.numMetrics = len(METRICS)
            asked.sample1, asked.sample2 = before, newest
            for number, (_, name, _, _) in enumerate(METRICS):
                asked.metrics[number].metricId = constant(nvml, name)
            constant(nvml, "nvmlGpmMetricsGet")(asked)
        except nvml.NVMLError as error:
            raise failure(nvml, error, self._prefix) from error
        return [self._value(asked.metrics[number], factor) for number, (_, _, factor, _) in enumerate(METRICS)]

    def _value(self, metric: Any, factor: float) -> float | ReadingFailedError:
        if metric.nvmlReturn != 0:
            return failure(self._nvml, self._nvml.NVMLError(metric.nvmlReturn), self._prefix)
        return float(metric.value) * factor

    def close(self) -> None:
        """Nothing can be read afterwards."""
        samples, self._samples = self._samples, []
        self._refused = ReadingFailedError("closed")
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except self._nvml.NVMLError:
                return  # the driver went away meanwhile
