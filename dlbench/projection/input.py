"""Whether storage feeds more ranks: what they ask for against what it was seen to deliver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlbench.projection.ingredients import Supply
from dlbench.projection.projected import Flag
from dlbench.projection.refusals import flagged
from dlbench.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]


def delivered(supply: Supply | None, nodes: int, proven: Array | float) -> Array | None:
    """What storage delivers to so many nodes, bytes/s; None where nothing is known or no files are read. `proven`: what
    the anchor's runs took of it, which cannot be more than there is.
    """
    import numpy as np

    if supply is None or supply.bytes_per_s is None or supply.sample_bytes is None:
        return None
    share = nodes / (supply.nodes or nodes) if supply.is_per_node else 1.0
    return np.maximum(supply.bytes_per_s * share, proven)


def input_wait(supply: Supply, there: Array, wanted: float, step_s: Array) -> tuple[Array, tuple[Flag, ...]]:
    """What a step is longer because storage does not deliver, seconds by draw, and what to know of it.

    `there`: what storage delivers, bytes/s; `wanted`: bytes of a step; `step_s`: the step without that wait. Only where
    storage was seen to give no more for more demand is its rate a limit; elsewhere more may come than was asked for.
    """
    import numpy as np

    longer = np.maximum(0.0, wanted / there - step_s)
    rate, limit = float(np.median(wanted / step_s)), float(np.median(there))
    if supply.is_saturated or rate <= limit:
        return longer if supply.is_saturated else np.zeros_like(step_s), ()
    flag = flagged(
        "F5",
        needed=f"{format_bytes(round(rate))}/s",
        proven=f"{format_bytes(round(limit))}/s",
        nodes=supply.nodes or "some",
    )
    if_all = f"; if that is all there is, a step takes {wanted / limit:.4g} s"
    return np.zeros_like(step_s), (Flag(code=flag.code, text=flag.text + if_all),)
