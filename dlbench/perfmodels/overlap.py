"""Communication under the backward pass: which gradients to send together.

Wait-free back-propagation sends each gradient as soon as it is ready (Zhang et al., Poseidon, USENIX ATC 2017).
Messages follow each other: one starts when it is ready and the one before is through. Each costs startup + bytes x per
byte, so that it pays to merge gradients, and costs to wait for the later ones. MG-WFBP (Shi, Chu & Li, INFOCOM 2019,
algorithm 1) merges by a rule that looks at two neighbours at a time, which is not always the best: gradients of 10, 1
and 10 bytes ready at 0, 0.5 and 2.5 s, at 2 s + 0.1 s/byte, end at 6.6 s by the rule and could at 6.1 s. `best_merge`
finds the least end of all partitions in the same model.

Gradients stand in the order in which they become ready; times are seconds on one clock, usually from the start of the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dlbench.specs.comm import LineCost


def merged(
    groups: Sequence[int], sizes: Sequence[float], ready_s: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sizes of the merged messages, and when they are ready: with the last of their gradients. `groups`: gradients of
    each message; together all of them.
    """
    ends = list(accumulate(groups))
    spans = [slice(end - count, end) for end, count in zip(ends, groups, strict=True)]
    return tuple(sum(sizes[span]) for span in spans), tuple(max(ready_s[span]) for span in spans)


def best_merge(sizes: Sequence[float], ready_s: Sequence[float], cost: LineCost) -> tuple[int, ...]:
    """Gradients of each message so that the last exchange ends as early as any partition in this order allows.

    Exact: the end of a message grows with the end of the one before, so the best way to send the first j gradients
    contains a best way to send the first i for some i < j: end(j) = min over i of max(end(i), ready(j)) + startup + per
    byte x bytes of i + 1, ..., j. Of partitions that end alike, one with few messages is taken. Time grows with the
    square of the number of gradients.

    `ready_s`: when each is ready, ascending.
    """
    total = [0.0, *accumulate(float(size) for size in sizes)]
    # Of the first j gradients: end, messages, and how many gradients went before the last message.
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
    """Message size in bytes from which on the flat exchange is no slower than the grouped one. 0 where it never is
    slower; None where there is no such size: the grouped one is faster for all large messages.
    """
    startup, per_byte = flat.startup_s - grouped.startup_s, flat.per_byte_s - grouped.per_byte_s
    if per_byte > 0 or (per_byte == 0 and startup > 0):
        return None
    return 0 if startup <= 0 else math.ceil(startup / -per_byte)
