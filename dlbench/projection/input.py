"""Whether storage feeds more ranks: what they ask for against what it was seen to deliver."""

from __future__ import annotations

from dlbench.lazy import Array, np
from dlbench.projection.ingredients import Supply
from dlbench.projection.projected import Flag
from dlbench.projection.refusals import flagged
from dlbench.units import format_bytes


def input_wait(
    supply: Supply, nodes: int, anchor_nodes: int, *, samples: int, step_s: Array, proven: Array
) -> tuple[Array, tuple[Flag, ...]]:
    """What a step is longer because storage does not deliver, seconds by draw, and what to know of it. Only where it
    was seen to give no more for more demand is its rate a limit; elsewhere more may come than was asked for.

    `samples`: of a step, all ranks; `step_s`: the step without that wait; `proven`: samples/s that the anchor's runs
    took, which cannot be more than there is.
    """
    size, rate, none = supply.sample_bytes, supply.bytes_per_s, np.zeros_like(step_s)
    if size is None or rate is None:
        return none, ()
    share, more = (nodes / (supply.nodes or nodes), nodes / anchor_nodes) if supply.is_per_node else (1.0, 1.0)
    there, wanted = np.maximum(rate * share, proven * size * more), samples * size
    if supply.is_saturated:
        return np.maximum(0.0, wanted / there - step_s), ()
    asked, limit = float(np.median(wanted / step_s)), float(np.median(there))
    if asked <= limit:
        return none, ()
    needed, seen = (f"{format_bytes(round(one))}/s" for one in (asked, limit))
    flag = flagged("F5", needed=needed, proven=seen, nodes=supply.nodes or "some")
    if_all = f"; if that is all there is, a step takes {wanted / limit:.4g} s"
    return none, (Flag(code=flag.code, text=flag.text + if_all),)
