"""What the kernels of a phase take by themselves, from steps in which the device never waited for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.int64]

UNKNOWN_NS = -1
"""Instead of the time of a phase's kernels, where no step shows it."""

REFERENCE_STEPS = 3
"""Steps that show what the kernels of a phase take, where so many are found among the measured ones; otherwise the last
ones of the warm-up, for which as many are held back."""


def kernel_ns(took: Times, bound: Times, warmup: Times) -> int:
    """What the kernels of one phase of one rank take, nanoseconds; `UNKNOWN_NS` where no step shows it.

    Args:
        took: of the phase, every step, nanoseconds; shape (steps,).
        bound: how long the device waited for the host in it, at most, likewise.
        warmup: 1 where a step is warm-up.
    """
    import numpy as np

    shows = bound == 0
    measured = took[shows & (warmup == 0)]
    if len(measured) >= REFERENCE_STEPS:
        return round(float(np.median(measured)))
    found = took[shows][-REFERENCE_STEPS:]
    return round(float(np.median(found))) if len(found) else UNKNOWN_NS
