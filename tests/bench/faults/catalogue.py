"""The kinds of faults that are planted, by family. A kind that did not hold once stays in the list for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.faults.workshop import Workshop


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind."""

    family: str
    """E.g. `processes`."""
    name: str
    """What is planted, in words; names it in the list of what did not hold."""
    replay: Callable[[Workshop], None]
    """Plants it and looks; raises DidNotHoldError, or CannotPlantError where this machine does not allow it."""
