"""What NVML answers, and how it says that it does not: constants, errors and field values of nvidia-ml-py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dlbench.machine.readings import ReadingFailedError, Values

# Codes after which nothing of this GPU can be read.
_GONE = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_GPU_NOT_FOUND")


_VALUE_TYPES = (
    ("NVML_VALUE_TYPE_DOUBLE", "dVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_INT", "uiVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_LONG", "ulVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_LONG_LONG", "ullVal"),
    ("NVML_VALUE_TYPE_SIGNED_LONG_LONG", "sllVal"),
    ("NVML_VALUE_TYPE_SIGNED_INT", "siVal"),
    ("NVML_VALUE_TYPE_UNSIGNED_SHORT", "usVal"),
)


def constant(nvml: ModuleType, name: str) -> Any:
    """A constant or function of nvidia-ml-py, by its name.

    Raises:
        ReadingFailedError: this version of the package does not have it.
    """
    try:
        return getattr(nvml, name)
    except AttributeError as error:
        raise ReadingFailedError(f"this version of nvidia-ml-py has no {name}") from error


def failure(nvml: ModuleType, error: Exception, prefix: str) -> ReadingFailedError:
    """NVML's error in its own words; a lost GPU ends all fields that begin with `prefix`."""
    is_gone = getattr(error, "value", None) in {getattr(nvml, name, None) for name in _GONE}
    return ReadingFailedError(str(error), prefix if is_gone else "")


def field_value(
    nvml: ModuleType, device: Any, prefix: str, wanted: Sequence[tuple[str, int]]
) -> list[float | ReadingFailedError]:
    """Several field values in one call, each with its own return code.

    Args:
        nvml: the package.
        device: handle.
        prefix: of the GPU's field names.
        wanted: name of the field's constant, and its scope: number of the link, else 0.

    Raises:
        ReadingFailedError: the package does not know a field.
        NVMLError: the call failed as a whole.
    """
    asked = [(constant(nvml, name), scope) for name, scope in wanted]
    types = {getattr(nvml, name, None): member for name, member in _VALUE_TYPES}
    values: list[float | ReadingFailedError] = []
    for found in constant(nvml, "nvmlDeviceGetFieldValues")(device, asked):
        if found.nvmlReturn != 0:
            values.append(failure(nvml, nvml.NVMLError(found.nvmlReturn), prefix))
        elif found.valueType not in types:
            values.append(ReadingFailedError(f"NVML gave a value of unknown type {found.valueType}"))
        else:
            values.append(float(getattr(found.value, types[found.valueType])))
    return values


class FieldValues:
    """A call for several fields at once, each a sum of field values; what failed is not asked for again."""

    def __init__(self, nvml: ModuleType, device: Any, prefix: str) -> None:
        self._nvml, self._device, self._prefix = nvml, device, prefix
        self._wanted: list[list[tuple[str, int]]] = []
        self._factors: list[float] = []
        self._refused: dict[int, ReadingFailedError] = {}

    def want(self, wanted: list[tuple[str, int]], factor: float) -> None:
        """One more field: the sum of these, times the factor."""
        self._wanted.append(wanted)
        self._factors.append(factor)

    def refuse(self, error: ReadingFailedError) -> None:
        """One more field, which is known to be missing."""
        self._refused[len(self._wanted)] = error
        self.want([], math.nan)

    def __call__(self) -> Values:
        asked = [(number, one) for number, wanted in enumerate(self._wanted) for one in wanted]
        sums: list[float | ReadingFailedError] = [self._refused.get(n, 0.0) for n in range(len(self._wanted))]
        if asked:
            found = field_value(self._nvml, self._device, self._prefix, [one for _, one in asked])
            for (number, _), value in zip(asked, found, strict=True):
                total = sums[number]
                if isinstance(total, ReadingFailedError):
                    continue
                if isinstance(value, ReadingFailedError):
                    sums[number] = self._refused[number] = value
                    self._wanted[number] = []
                else:
                    sums[number] = total + value * self._factors[number]
        return sums
