"""Modules that are imported, and values that are computed, at their first use, so that short commands start fast."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # introspection of the object, not use of the module
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Times = npt.NDArray[np.int64]  # Nanoseconds.
    Flags = npt.NDArray[np.bool_]
else:
    np, npt = LazyModule("numpy"), LazyModule("numpy.typing")
    Array = Times = Flags = Any

__all__ = ["Array", "Deferred", "Flags", "LazyModule", "Times", "np", "npt"]


class Deferred(Generic[T]):
    """A value that is computed when it is first read, for what needs a slow import and is seldom printed."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> T:
        return self._compute()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deferred) and self.value == other.value
