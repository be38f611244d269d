"""numpy and Altair, loaded when they are first used: what needs no figures starts without them, on any login node."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
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
            if attribute.startswith("__"):  # what asks any object for these means no library
                raise AttributeError(attribute)
            found = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, found)
            return found

    alt, np, npt = _Library("altair"), _Library("numpy"), _Library("numpy.typing")
    Array = Times = Flags = Any

__all__ = ["Array", "Flags", "Times", "alt", "np", "npt"]
