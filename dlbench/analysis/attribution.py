"""Attribution of lost efficiency to the parts of a step, in shares that sum to 1 - efficiency.

With T_i the mean step of run i, t the geometric mean of T_i and s_ik the share of part k, a part takes q_k = t
mean_i(s_ik) seconds, which sum to t. With E = t0 / t the efficiency (t0, q0_k: the baseline, for the same number of
samples per rank) a part loses

    L_k = (q_k - q0_k) / t = s_k - E s0_k,        sum over parts of L_k = 1 - E, exactly.

Its interval is that of a mean of first-order terms (delta method; e.g. Oehlert, The American Statistician 46(1), 1992):
run i of the point moves L_k by (s_ik - s_k) + E s0_k (ln T_i - ln t), run j of the baseline by the negative of E (s0_jk
- s0_k) + E s0_k (ln T0_j - ln t0). The second terms are those of runs that are slower in all parts equally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dlbench.lazy import Array, Deferred, np
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
    """A part of a step at one scaling point."""

    name: str  # One of `dlbench.analysis.causes.CAUSES`, a sum or a part of them; `step` for the whole step.
    seconds: Estimate  # Geometric mean over runs (or pairs) of the mean step x the part's mean share of it.
    ideal_seconds: float  # `seconds` at the baseline, for the same number of samples per rank.
    lost: Estimate  # Efficiency that the part loses, a fraction; negative if it became faster.
    p: Deferred[float] | None
    """Two-sided p of Student's t test that nothing is lost or gained by it; None at the baseline."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The parts of a step and their sum."""

    parts: tuple[Part, ...]
    whole: Part  # The whole step: sum of the parts, lost share = sum of the lost shares = 1 - efficiency.
    more: Mapping[str, Part]  # Further parts that are not terms of the sum: components or sums of parts.


def attribute(
    own: PartTimes,
    baseline: PartTimes,
    *,
    work: float,
    names: Sequence[str],
    more: Sequence[str] = (),
    is_baseline: bool = False,
) -> Attribution:
    """Returns the parts of a point against its baseline (which loses nothing), over pairs if they are paired.

    `names`: the parts in order, together the whole step; `more`: further parts of the same runs; `work`: samples per
    rank and step of this point / of the baseline (1 under weak scaling).
    """
    pairs = Pairing((), 0) if is_baseline else pairing(own, baseline)
    mine = SideShares(own, names, more, pairs.keys or sorted(own), 1.0)
    ideal = SideShares(baseline, names, more, pairs.keys or sorted(baseline), work)
    parts = []
    nothing: tuple[Estimate, Deferred[float] | None] = by_definition(0.0, len(mine.steps), "fraction"), None
    for place, name in enumerate((*names, *more)):
        part_s = float(mine.mean * mine.shares[:, place].mean())
        lost, p = nothing if is_baseline else _lost(mine, ideal, place, pairs)
        parts.append(
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
        logs = ideal.values_by_key(np.log(ideal.steps)), mine.values_by_key(np.log(mine.steps))
        p = Deferred(partial(difference_p, *logs))
    seconds = geometric_mean_estimate(mine.by_key(), "s")
    whole = Part(name="step", seconds=seconds, ideal_seconds=ideal.mean, lost=lost, p=p)
    return Attribution(parts=tuple(parts[:count]), whole=whole, more={part.name: part for part in parts[count:]})


def about_means(runs: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Shifts the parts of all runs, by one amount per part, so that their arithmetic means are the point's seconds q_k.

    Means of runs that scatter are larger. `runs`: seconds of the parts of each run's step, together the whole step.
    """
    step_seconds = [math.fsum(parts.values()) for parts in runs]
    mean = math.exp(math.fsum(map(math.log, step_seconds)) / len(step_seconds))
    shifted: list[dict[str, float]] = [{} for _ in runs]
    for name in runs[0]:
        moves = [mean * parts[name] / step_s - parts[name] for parts, step_s in zip(runs, step_seconds, strict=True)]
        shift = math.fsum(moves) / len(runs)
        for parts, shifted_parts in zip(runs, shifted, strict=True):
            shifted_parts[name] = parts[name] + shift
    return shifted


class SideShares:
    """Steps and shares of the runs of one side; `steps` has shape (runs,), `shares` (runs, parts)."""

    def __init__(
        self, times: PartTimes, names: Sequence[str], more: Sequence[str], keys: Sequence[RunKey], work: float
    ) -> None:
        columns = [[times[key][name] for key in keys] for name in (*names, *more)]
        seconds = np.array(columns, dtype=float).T.copy()
        step_s = seconds[:, : len(names)].sum(axis=1)
        own_keys = {key: key for key in times}
        self.keys = [own_keys[key] for key in keys]  # The keys with the sessions of this side's runs.
        self.steps: Array = step_s * work
        self.shares: Array = seconds / step_s[:, None]
        logs = np.log(self.steps)
        self.mean = math.exp(float(logs.mean()))
        self.drift: Array = logs - logs.mean()  # ln T_i - ln t.

    def by_key(self) -> dict[RunKey, float]:
        return self.values_by_key(self.steps)

    def values_by_key(self, values: Array) -> dict[RunKey, float]:
        return dict(zip(self.keys, values.tolist(), strict=True))


def complement(efficiency: Estimate) -> Estimate:
    """Returns the total loss, 1 - efficiency."""
    return efficiency.mapped(lambda value: 1 - value, "fraction")


def _seconds(mine: SideShares, place: int, seconds: float) -> Estimate:
    """Returns q_k; to first order a run moves it by t (s_ik - s_k) + q_k (ln T_i - ln t)."""
    share = mine.shares[:, place]
    if len(share) < MIN_RUNS:
        moved = mine.steps * share
    else:
        moved = seconds + mine.mean * (share - share.mean()) + seconds * mine.drift
    return mean_estimate(mine.values_by_key(moved), "s").holding(seconds)


def _lost(mine: SideShares, ideal: SideShares, place: int, pairs: Pairing) -> tuple[Estimate, Deferred[float]]:
    """Returns L_k and its p; below `MIN_RUNS` with the range of the losses of single runs, or pairs of them."""
    shares, base_shares = mine.shares[:, place], ideal.shares[:, place]
    efficiency = ideal.mean / mine.mean
    lost = float(shares.mean() - efficiency * base_shares.mean())
    drifts = efficiency * base_shares.mean()
    top = mine.values_by_key(shares - shares.mean() + drifts * mine.drift)
    bottom = ideal.values_by_key(efficiency * (base_shares - base_shares.mean()) + drifts * ideal.drift)
    p = Deferred(partial(difference_p, {key: lost + move for key, move in top.items()}, bottom))
    estimate = difference_estimate(top, bottom, "fraction").mapped(lambda moved: lost + moved, "fraction")
    estimate = replace(estimate, unpaired=pairs.left_out)
    if estimate.kind == "range" and estimate.n < MIN_RUNS:
        single = shares[:, None] - (ideal.steps * base_shares)[None, :] / mine.steps[:, None]
        if pairs.is_paired:
            single = shares - ideal.steps / mine.steps * base_shares
        estimate = replace(estimate, low=float(single.min()), high=float(single.max()))
    return estimate.holding(lost), p
