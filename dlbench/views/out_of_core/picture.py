"""A pass in three lanes, for a terminal: what is computed, what leaves the device and what comes back, over time."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.views.out_of_core.passes import PassSpan

LANES = ("compute", "out", "in")

KIND_SIGNS = {"forward": "F", "recompute": "R", "backward": "B", "wait": "."}
"""What stands in the line of the computation; anything else that is computed is `=`."""
IDLE = "."
WIDTH = 68
"""Characters of a lane: with its title it fits 80 columns."""

LEGEND = (
    "F forward, R recomputed, B backward, = outside of the chain, . waiting or idle; digits: the last digit of the "
    "number of the block."
)


def lanes(spans: Sequence[PassSpan], width: int = WIDTH) -> list[tuple[str, str]]:
    """Title and characters of each lane; the computation has two lines: what is done, and of which block.

    Args:
        spans: operations of one pass.
        width: characters of a lane; each stands for an equal part of the pass, and shows what took most of it; a
            transfer is shown however short it is.
    """
    end = max((span.end_s for span in spans), default=0.0)
    if end <= 0:
        return []
    chosen = {
        lane: _chosen([span for span in spans if span.lane == lane], end, width, has_gaps=lane == "compute")
        for lane in LANES
    }
    found = [("compute", "".join(_sign(span) for span in chosen["compute"]))]
    found.append(("block", "".join(_digit(span) for span in chosen["compute"])))
    found += [(lane, "".join(_digit(span) for span in chosen[lane])) for lane in LANES[1:]]
    return found


def _sign(span: PassSpan | None) -> str:
    return IDLE if span is None else KIND_SIGNS.get(span.kind, "=")


def _digit(span: PassSpan | None) -> str:
    if span is None or (span.lane == "compute" and span.kind not in ("forward", "recompute", "backward")):
        return IDLE
    return IDLE if span.block is None else str(span.block % 10)


def _chosen(spans: Sequence[PassSpan], end: float, width: int, *, has_gaps: bool) -> list[PassSpan | None]:
    """What took most of each of `width` equal parts; None where nothing did, and with `has_gaps` where a gap did."""
    found: list[PassSpan | None] = []
    for place in range(width):
        begin, until = end * place / width, end * (place + 1) / width
        taken = {id(span): min(span.end_s, until) - max(span.start_s, begin) for span in spans}
        longest = max(spans, key=lambda span: taken[id(span)], default=None)
        idle = (until - begin) - sum(max(0.0, seconds) for seconds in taken.values()) if has_gaps else 0.0
        is_idle = longest is None or taken[id(longest)] <= 0 or taken[id(longest)] < idle
        found.append(None if is_idle else longest)
    return found
