"""numpy, imported at its first use, so that commands without figures start fast on any login node."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Times = npt.NDArray[np.int64]  # Nanoseconds.
    Flags = npt.NDArray[np.bool_]
else:

    class _Library:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):  # introspection of the object, not use of the library
                raise AttributeError(attribute)
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)
            return value

    np, npt = _Library("numpy"), _Library("numpy.typing")
    Array = Times = Flags = Any

__all__ = ["Array", "Flags", "Times", "np", "npt"]
