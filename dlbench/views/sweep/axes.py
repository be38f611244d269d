"""Which axes of a sweep matter: the effect of each axis, paired by repeat and by the values of all other axes.

Effects are ratios of throughput, so they are taken on its logarithm, where they add. For two values a and b of an
axis, the contrast of a repeat is the mean of log thr(a, o) - log thr(b, o) over all combinations o of the other axes'
values that ran with both; each repeat gives one contrast, and repeats are the sample. A combination in which an axis
cannot act (Horovod's cycle time under DDP) takes no part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.report.wording import figure_text, times_text
from dlbench.specs.plan import AxisValue
from dlbench.stats.estimates import MIN_RUNS, Estimate, by_definition, mean_estimate, paired_logs
from dlbench.stats.multiplicity import LEVEL
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdicts import is_other_than, placed
from dlbench.views.sweep.settings import label, value_text

MARGIN = 0.02
"""Differences that lie within this share, interval and all, are no reason to choose one setting over another."""
MARGIN_TEXT = f"{MARGIN * 100:g} %"

Pair = tuple[str, AxisValue, AxisValue]
"""An axis and two of its values: the second over the first."""

AxisVerdict = Literal["matters", "no effect", "undecided", "insufficient"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting's throughput, as the comparison of axes needs it."""

    values: Mapping[str, AxisValue]
    """Value of each swept key."""
    acting: frozenset[str]
    """Swept keys that act in this combination."""
    throughput: Mapping[RunKey, float]
    """Samples per second of each run."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One value of an axis."""

    value: str
    effect: Estimate | None
    """Throughput over that of the axis' first value, all else equal (ratio); None where no combination ran with
    both."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One swept key."""

    key: str
    levels: tuple[Level, ...]
    """The first is the one that the others are measured against."""
    verdict: AxisVerdict
    words: str
    """The verdict in a sentence, with the two values that are furthest apart."""


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The largest deviation from what the axes' effects alone would give."""

    values: Mapping[str, AxisValue]
    """The combination."""
    deviation: Estimate
    """Its throughput over that of the additive model on the logarithm (ratio)."""
    is_claimed: bool
    """Whether it stands after counting all combinations and leaves the margin."""

    @property
    def words(self) -> str:
        """The check of additivity in a sentence."""
        if not self.is_claimed:
            return (
                "The axes add up: no combination deviates for certain from what their effects alone would give "
                f"(largest: {label(self.values)}, {figure_text(self.deviation)})."
            )
        return (
            f"The axes interact: {label(self.values)} has {figure_text(self.deviation)} times the throughput that "
            "their effects alone would give, so look at settings, not at axes."
        )


def is_within_margin(ratio: Estimate) -> bool:
    """Whether a ratio lies, interval and all, so near to 1 that it does not matter."""
    return placed(ratio, 1 - MARGIN, 1 + MARGIN) == "within"


def levels_of(settings: Sequence[Measured], references: Mapping[str, AxisValue]) -> dict[str, list[AxisValue]]:
    """Values of every axis that acts anywhere and has two of them or more, the reference first.

    Args:
        settings: all that were measured.
        references: the value of each axis that its others are compared with.
    """
    found: dict[str, list[AxisValue]] = {}
    for key, reference in references.items():
        seen = _distinct([s.values[key] for s in settings if key in s.acting])
        if len(seen) > 1:
            found[key] = sorted(seen, key=lambda value: not same(value, reference))
    return found


def contrasts(
    settings: Sequence[Measured], levels: Mapping[str, Sequence[AxisValue]]
) -> dict[Pair, dict[RunKey, float]]:
    """Log ratios of throughput of every pair of values of every axis, one for each repeat; `levels` of `levels_of`."""
    return {
        (key, a, b): _contrast(settings, key, b, a)
        for key, values in levels.items()
        for a, b in itertools.combinations(values, 2)
    }


def axes(
    levels: Mapping[str, Sequence[AxisValue]], found: Mapping[Pair, Mapping[RunKey, float]], adjusted: Sequence[float]
) -> tuple[Axis, ...]:
    """The effect of every axis.

    Args:
        levels: as `levels_of` gives them.
        found: as `contrasts` gives them.
        adjusted: the p value of each of these after Holm over the whole family.
    """
    pairs = dict(zip(found, zip(found.values(), adjusted, strict=True), strict=True))
    return tuple(
        _axis(key, values, {(a, b): pairs[name, a, b] for name, a, b in pairs if name == key})
        for key, values in levels.items()
    )


def _axis(
    key: str,
    found: Sequence[AxisValue],
    pairs: Mapping[tuple[AxisValue, AxisValue], tuple[Mapping[RunKey, float], float]],
) -> Axis:
    """`pairs`: log contrasts of the second value over the first, and their adjusted p."""
    known = {pair: _estimate(logs) for pair, (logs, _) in pairs.items() if logs}
    claimed = [pair for pair, ratio in known.items() if pairs[pair][1] < LEVEL and is_other_than(ratio, 1)]
    claimed = [pair for pair in claimed if not is_within_margin(known[pair])]
    verdict: AxisVerdict = "undecided"
    if not known or not all(ratio.is_confident for ratio in known.values()):
        verdict = "insufficient"
    elif claimed:
        verdict = "matters"
    elif len(known) == len(pairs) and all(map(is_within_margin, known.values())):
        verdict = "no effect"
    count = max((ratio.n for ratio in known.values()), default=0)
    effects = [by_definition(1.0, count), *(known.get((found[0], value)) for value in found[1:])]
    widest = max(known, key=lambda pair: abs(math.log(known[pair].value)), default=None)
    return Axis(
        key=key,
        levels=tuple(
            Level(value=value_text(key, value), effect=effect) for value, effect in zip(found, effects, strict=True)
        ),
        verdict=verdict,
        words=_words(key, verdict, widest, widest and known[widest]),
    )


def _words(key: str, verdict: AxisVerdict, widest: tuple[AxisValue, AxisValue] | None, ratio: Estimate | None) -> str:
    """The verdict on an axis; `ratio` is that of the second of the `widest` values over the first."""
    if widest is None or ratio is None:
        return "insufficient: no two of its values ran with the same values of the others"
    slow, fast = (value_text(key, value) for value in widest)
    if ratio.value < 1:
        slow, fast, ratio = fast, slow, ratio.inverted("ratio")
    text = f"{fast} over {slow} is {times_text(ratio)}, all else equal"
    return {
        "matters": f"matters: {text}",
        "no effect": f"no effect: all values within {MARGIN_TEXT} ({text}); it may stay as it is",
        "undecided": f"undecided: {text}; neither a difference for certain, nor within {MARGIN_TEXT}",
        "insufficient": f"insufficient: fewer than {MIN_RUNS} repeats ({text})",
    }[verdict]


def _contrast(settings: Sequence[Measured], key: str, top: AxisValue, bottom: AxisValue) -> dict[RunKey, float]:
    """By repeat: mean log ratio of two values of an axis over the combinations of the other axes that ran with both."""
    sides: list[dict[tuple[str, ...], Mapping[RunKey, float]]] = []
    for value in (top, bottom):
        acting = [s for s in settings if same(s.values[key], value) and key in s.acting]
        sides.append({tuple(repr(s.values[k]) for k in s.values if k != key): s.throughput for s in acting})
    logs: dict[RunKey, list[float]] = {}
    for others in sides[0].keys() & sides[1].keys():
        for key, ratio in paired_logs(sides[0][others], sides[1][others]).items():
            logs.setdefault(key, []).append(ratio)
    # Repeats that lack a combination would compare something else.
    whole = max(map(len, logs.values()), default=0)
    return {repeat: math.fsum(found) / whole for repeat, found in sorted(logs.items()) if len(found) == whole}


def _estimate(logs: Mapping[RunKey, float]) -> Estimate:
    return mean_estimate(logs).mapped(math.exp, "ratio")


def deviations(
    settings: Sequence[Measured], levels: Mapping[str, Sequence[AxisValue]]
) -> dict[tuple[AxisValue, ...], dict[RunKey, float]]:
    """What the axes' effects leave of the logarithm of each combination's throughput, one for each repeat.

    Empty where it cannot be computed. It can where two axes or more act in every combination of their values, and all
    of these ran in at least one common repeat.

    Args:
        settings: all that were measured.
        levels: as `levels_of` gives them.
    """
    import numpy as np

    keys = list(levels)
    grid = list(itertools.product(*levels.values()))
    by_values = {tuple(repr(s.values[key]) for key in keys): s for s in settings}
    cells = [by_values.get(tuple(map(repr, values))) for values in grid]
    whole = [cell for cell in cells if cell is not None and cell.acting >= set(keys)]
    if len(keys) < 2 or len(whole) < len(grid) or len(by_values) < len(settings):
        return {}
    repeats = [key for key in whole[0].throughput if all(key in cell.throughput for cell in whole)]
    if not repeats:
        return {}
    logs = np.log([[cell.throughput[repeat] for repeat in repeats] for cell in whole])
    cube = logs.reshape(*map(len, levels.values()), len(repeats))
    places = tuple(range(len(keys)))
    mean = cube.mean(axis=places, keepdims=True)
    fitted = mean + sum(
        cube.mean(axis=tuple(other for other in places if other != place), keepdims=True) - mean for place in places
    )
    rest = (cube - fitted).reshape(len(grid), len(repeats))
    return {values: dict(zip(repeats, row.tolist(), strict=True)) for values, row in zip(grid, rest, strict=True)}


def interaction(
    keys: Sequence[str], found: Mapping[tuple[AxisValue, ...], Mapping[RunKey, float]], adjusted: Sequence[float]
) -> Interaction | None:
    """The largest deviation from additivity; None where there is none to look at.

    Args:
        keys: the axes.
        found: as `deviations` gives them.
        adjusted: the p value of each of these after Holm over the whole family.
    """
    if not found:
        return None
    estimates = [_estimate(logs) for logs in found.values()]
    worst = max(range(len(found)), key=lambda i: abs(math.log(estimates[i].value)))
    ratio = estimates[worst]
    return Interaction(
        values=dict(zip(keys, list(found)[worst], strict=True)),
        deviation=ratio,
        is_claimed=adjusted[worst] < LEVEL and is_other_than(ratio, 1) and not is_within_margin(ratio),
    )


def same(one: AxisValue, other: AxisValue) -> bool:
    """Equal in value and type: 1 is not true, and 1.0 is not 1 where a person wrote them apart."""
    return repr(one) == repr(other)


def _distinct(values: Sequence[AxisValue]) -> list[AxisValue]:
    """Each value once, in the order of first appearance."""
    return list({repr(value): value for value in values}.values())
