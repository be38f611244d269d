"""Where the lost percent goes: each part of a step against the baseline's, in shares that sum to 1 - efficiency.

With T_i the mean step of run i, s_ik the share that part k has of it, and t the geometric mean of T_i, a part's seconds
are

    q_k = t mean_i(s_ik),

which sum to t because shares sum to 1. With t0 and q0_k those of the baseline, for the same number of samples per rank,
the efficiency is a ratio of geometric means, E = t0 / t, and what is lost to a part is

    L_k = (q_k - q0_k) / t = s_k - E s0_k,        sum over parts of L_k = 1 - E, exactly.

A part that takes less than at the baseline is a gain, below 0.

The interval of L_k is that of a mean of its first-order terms, one for each run (delta method; e.g. Oehlert, The
American Statistician 46(1), 1992). With dE = E (d ln t0 - d ln t), a run i of the point moves L_k by

    (s_ik - s_k) + E s0_k (ln T_i - ln t)

and a run j of the baseline by the negative of E (s0_jk - s0_k) + E s0_k (ln T0_j - ln t0). A run that is slower in all
its parts alike moves the efficiency and hardly any share; that is why both stand here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.lazy import Array, np
from dlbench.stats.estimates import (
    MIN_RUNS,
    Estimate,
    by_definition,
    difference_estimate,
    difference_p,
    geometric_mean_estimate,
    mean_estimate,
    ratio_estimate,
)
from dlbench.stats.pairing import Pairing, RunKey, pairing

PartTimes = Mapping[RunKey, Mapping[str, float]]  # Seconds per step of each part, by run.


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step at one scaling point."""

    name: str  # One of `dlbench.analysis.causes.CAUSES`, a whole or a part of them; `step` for the whole step.
    seconds: Estimate  # Geometric mean over runs (or pairs) of the mean step x the part's mean share of it.
    ideal_seconds: float  # The same at the baseline, for the same number of samples per rank.
    lost: Estimate  # Efficiency that is lost here, a fraction; negative where the part became faster.
    p: float | None  # Two-sided p of Student's t test that nothing is lost or gained by it; None at the baseline.


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The parts of a step and their sum."""

    parts: tuple[Part, ...]
    whole: Part  # The whole step: sum of the parts, lost share = sum of the lost shares = 1 - efficiency.
    more: Mapping[str, Part]  # Further rows, no terms of the sum: what parts consist of, or are part of.


def attribute(
    own: PartTimes,
    baseline: PartTimes,
    *,
    work: float,
    names: Sequence[str],
    more: Sequence[str] = (),
    is_baseline: bool = False,
) -> Attribution:
    """The parts of a point against its baseline; where they are paired (`dlbench.stats.pairing`), over the pairs.

    `names` are the parts, in order, together the whole step; `more` are further rows of the same runs; `work`: samples
    per rank and step of this point / of the baseline (1 under weak scaling); at the baseline (`is_baseline`) nothing is
    lost by definition.
    """
    pairs = Pairing((), 0) if is_baseline else pairing(own, baseline)
    mine = SideShares(own, names, more, pairs.keys or sorted(own), 1.0)
    ideal = SideShares(baseline, names, more, pairs.keys or sorted(baseline), work)
    made = []
    nothing: tuple[Estimate, float | None] = by_definition(0.0, len(mine.steps), "fraction"), None
    for place, name in enumerate((*names, *more)):
        part_s = float(mine.mean * mine.shares[:, place].mean())
        lost, p = nothing if is_baseline else _lost(mine, ideal, place, pairs)
        made.append(
            Part(
                name=name,
                seconds=_seconds(mine, place, part_s),
                ideal_seconds=float(ideal.mean * ideal.shares[:, place].mean()),
                lost=lost,
                p=p,
            )
        )
    count = len(names)
    lost, p = nothing
    if not is_baseline:
        efficiency = ratio_estimate(ideal.by_key(), mine.by_key(), "fraction")
        lost = replace(complement(efficiency), unpaired=pairs.left_out)
        logs = (dict(zip(side.keys, np.log(side.steps).tolist(), strict=True)) for side in (ideal, mine))
        p = difference_p(*logs)
    seconds = geometric_mean_estimate(mine.by_key(), "s")
    whole = Part(name="step", seconds=seconds, ideal_seconds=ideal.mean, lost=lost, p=p)
    return Attribution(parts=tuple(made[:count]), whole=whole, more={one.name: one for one in made[count:]})


def about_means(runs: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The parts of each run, moved by one amount a part, so that their arithmetic means are the point's seconds.

    Those are q_k, not the means of the runs' own, which are larger where runs scatter. Sums and differences of parts
    and of points then are those of the figures that every other table has, and scatter over the runs as they did. Takes
    seconds of the parts of each run's step; together they are the whole step, above 0.
    """
    wholes = [math.fsum(parts.values()) for parts in runs]
    mean = math.exp(math.fsum(map(math.log, wholes)) / len(wholes))
    moves = {
        name: math.fsum(mean * parts[name] / whole - parts[name] for parts, whole in zip(runs, wholes, strict=True))
        / len(runs)
        for name in runs[0]
    }
    return [{name: value + moves[name] for name, value in parts.items()} for parts in runs]


class SideShares:
    """Steps and shares of the runs of one side; `steps` has shape (runs,), `shares` (runs, parts)."""

    def __init__(
        self, times: PartTimes, names: Sequence[str], more: Sequence[str], keys: Sequence[RunKey], work: float
    ) -> None:
        seconds = np.array([[times[key][name] for name in (*names, *more)] for key in keys], dtype=float)
        whole = seconds[:, : len(names)].sum(axis=1)
        known = {key: key for key in times}
        self.keys = [known[key] for key in keys]
        """As this side has them: with the sessions of its own runs."""
        self.steps: Array = whole * work
        self.shares: Array = seconds / whole[:, None]
        logs = np.log(self.steps)
        self.mean = math.exp(float(logs.mean()))
        self.drift: Array = logs - logs.mean()
        """ln T_i - ln t."""

    def by_key(self) -> dict[RunKey, float]:
        return dict(zip(self.keys, self.steps.tolist(), strict=True))


def complement(efficiency: Estimate) -> Estimate:
    """1 - efficiency: what is lost of it in all."""
    return efficiency.mapped(lambda value: 1 - value, "fraction")


def _seconds(mine: SideShares, place: int, seconds: float) -> Estimate:
    """q_k; to first order a run moves it by t (s_ik - s_k) + q_k (ln T_i - ln t)."""
    share = mine.shares[:, place]
    if len(share) < MIN_RUNS:
        moved = mine.steps * share
    else:
        moved = seconds + mine.mean * (share - share.mean()) + seconds * mine.drift
    return mean_estimate(dict(zip(mine.keys, moved.tolist(), strict=True)), "s").holding(seconds)


def _lost(mine: SideShares, ideal: SideShares, place: int, pairs: Pairing) -> tuple[Estimate, float]:
    """L_k and its p. Below `MIN_RUNS` the range is that of what single runs, or pairs of them, lose."""
    own, base = mine.shares[:, place], ideal.shares[:, place]
    efficiency = ideal.mean / mine.mean
    lost = float(own.mean() - efficiency * base.mean())
    drifts = efficiency * base.mean()
    moves = (own - own.mean() + drifts * mine.drift, efficiency * (base - base.mean()) + drifts * ideal.drift)
    top, bottom = (
        dict(zip(side.keys, values.tolist(), strict=True)) for side, values in zip((mine, ideal), moves, strict=True)
    )
    p = difference_p({key: lost + move for key, move in top.items()}, bottom)
    found = difference_estimate(top, bottom, "fraction").mapped(lambda moved: lost + moved, "fraction")
    found = replace(found, unpaired=pairs.left_out)
    if found.kind == "range" and found.n < MIN_RUNS:
        single = own[:, None] - (ideal.steps * base)[None, :] / mine.steps[:, None]
        if pairs.is_paired:
            single = own - ideal.steps / mine.steps * base
        found = replace(found, low=float(single.min()), high=float(single.max()))
    return found.holding(lost), p
