"""Communication during the backward pass: which gradients to send in one message.

Wait-free back-propagation sends each gradient as soon as it is ready (Zhang et al., Poseidon, USENIX ATC 2017); a
message starts when it is ready and the one before has ended. MG-WFBP (Shi, Chu & Li, INFOCOM 2019, algorithm 1) merges
by a rule over two neighbours, which is not always the best. Gradients are in the order in which they become ready.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dlbench.specs.comm import LineCost


def merged(
    groups: Sequence[int], sizes: Sequence[float], ready_s: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the sizes of merged messages and when each is ready; `groups` are the numbers of gradients of each
    message.
    """
    ends = list(accumulate(groups))
    spans = [slice(end - count, end) for end, count in zip(ends, groups, strict=True)]
    return tuple(sum(sizes[span]) for span in spans), tuple(max(ready_s[span]) for span in spans)


def best_merge(sizes: Sequence[float], ready_s: Sequence[float], cost: LineCost) -> tuple[int, ...]:
    """Returns the gradients of each message so that the last exchange ends as early as any partition allows.

    Exact, by dynamic programming: end(j) = min over i of max(end(i), ready(j)) + startup + per byte x bytes of i + 1,
    ..., j. Takes time quadratic in the number of gradients; `ready_s` is ascending.
    """
    total = [0.0, *accumulate(float(size) for size in sizes)]
    # For the first j gradients: end, messages, and the number of gradients before the last message.
    best: list[tuple[float, int, int]] = [(-math.inf, 0, 0)]
    for j, ready in enumerate(ready_s, start=1):
        best.append(min((max(best[i][0], ready) + cost.time(total[j] - total[i]), best[i][1] + 1, i) for i in range(j)))
    groups: list[int] = []
    j = len(sizes)
    while j:
        groups.append(j - best[j][2])
        j = best[j][2]
    return tuple(reversed(groups))


def hybrid_threshold(flat: LineCost, grouped: LineCost) -> int | None:
    """Returns the bytes from which on the flat exchange is no slower than the grouped one; 0: always, None: never."""
    startup, per_byte = flat.startup_s - grouped.startup_s, flat.per_byte_s - grouped.per_byte_s
    if per_byte > 0 or (per_byte == 0 and startup > 0):
        return None
    if startup <= 0:
        return 0
    return math.ceil(startup / -per_byte)
