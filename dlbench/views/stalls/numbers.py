"""Where a step waits for its samples, found by difference: synthetic data, everything cached, cold storage.

The differential method of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB
14(5), 2021). With T the mean step over ranks, seconds, of repeat k of a scaling point:

* T_synthetic: batches lie in memory. Global batch / T_synthetic is the ingestion ceiling: what the ranks can take.
* preparation stall: T_cached - T_synthetic. Samples come from the page cache; what is left is decoding and augmenting.
* fetch stall: T_cold - T_cached. Samples come from storage.

    T_synthetic + preparation stall + fetch stall = T_cold

The runs of a repeat lie beside each other, so that a drift of the machine falls on all three alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from dlbench.reading.attribution import about_means
from dlbench.reading.measures import measured_or_why
from dlbench.records.data_path import ReadEpoch, ReadingResult
from dlbench.records.scan import Run
from dlbench.specs.plan import Variant
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, mean_estimate
from dlbench.views.reading import WARM_SHARE, storage_share

Tier = Literal["synthetic", "cached", "cold"]
VARIANTS: Mapping[Tier, Variant] = {"synthetic": "synthetic-input", "cached": "cached-input", "cold": "plain"}

WARM_ENOUGH = 0.05
"""Share of the bytes read that may come from storage in a run whose samples are to come from the page cache."""


@dataclass(frozen=True, kw_only=True)
class StallPart:
    """One part of the step with cold storage, or of the cached one where cold was not possible."""

    name: Literal["ingestion", "preparation", "fetch"]
    seconds: Estimate | None
    """Per step, of geometric means over repeats; None: not measured."""
    share: Estimate | None
    """Of the whole; shares sum to 1 over the parts that are there."""
    why: str
    """Why it is not measured; empty where it is."""


@dataclass(frozen=True, kw_only=True)
class TierRuns:
    """The runs of one kind at a scaling point."""

    tier: Tier
    rate: Estimate
    """Samples per second, all ranks together."""
    step_s: Estimate
    """Mean step, geometric mean over runs."""
    storage_share: float | None
    """Of the bytes read, those that came from storage and not from the page cache; mean over runs, None: not known."""
    epochs: float | None
    """Epochs that a run read, the most of any; None: not known."""
    cache: str
    """What became of the page cache, in words; empty for synthetic data."""


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """One scaling point of one series of `dlbench io --tiers`."""

    series: str
    workload: str
    preset: str
    engine: str
    sample_unit: str
    ranks: int
    nodes: int
    tiers: tuple[TierRuns, ...]
    """Kinds of runs with figures, in the order synthetic, cached, cold."""
    ceiling: Estimate | None
    """Samples per second that the ranks take where nothing waits for input; None: no run with synthetic data."""
    parts: tuple[StallPart, ...]
    """Ingestion, preparation, fetch."""
    whole_s: Estimate | None
    """The step that the parts sum to; None where they sum to nothing."""
    whole_is: Tier
    pairs: int
    """Repeats in which all that is subtracted was measured."""
    missing: tuple[str, ...]
    """Runs without figures, in sentences."""
    notes: tuple[str, ...]
    """What the figures must not be mistaken for."""


@dataclass(frozen=True, kw_only=True)
class IoTiers:
    """What the JSON of `dlbench io --tiers` holds."""

    format: str = "dlbench.io-tiers"
    version: int = 1
    points: tuple[Stalls, ...]


def stalls(runs: Sequence[Run]) -> tuple[Stalls, ...]:
    """Every scaling point whose series has the variants of `dlbench io --tiers`, in order of series, ranks, nodes.

    Only repeats count of which all kinds of runs that are subtracted have figures. A copy is no repeat.
    """
    points: dict[tuple[str, str, int, int], list[Run]] = {}
    for run in runs:
        plan = run.plan
        key = plan.created, plan.series.id, plan.layout.ranks, plan.layout.nodes
        points.setdefault(key, []).append(run)
    with_variants = (found for _, found in sorted(points.items()) if _is_of_tiers(found))
    return tuple(_point(found) for found in with_variants)


def _is_of_tiers(runs: Sequence[Run]) -> bool:
    return any(run.plan.series.variant == "cached-input" for run in runs)


@dataclass(frozen=True)
class _One:
    """One run with figures."""

    step_s: float
    rate: float
    reading: ReadingResult | None


def _point(runs: Sequence[Run]) -> Stalls:
    found: dict[Tier, dict[int, _One]] = {tier: {} for tier in VARIANTS}
    missing: list[str] = []
    for run in runs:
        tier = next((name for name, variant in VARIANTS.items() if variant == run.plan.series.variant), None)
        if tier is None or run.plan.series.repeat in found[tier]:  # a copied folder
            continue
        measured, why = measured_or_why(run)
        if measured is None:
            missing.append(why)
            continue
        assert run.record is not None
        whole = sum(measured.parts.values())
        found[tier][run.plan.series.repeat] = _One(whole, measured.throughput, run.record.reading)
    reasons = {tier: _why_not(tier, list(found[tier].values())) for tier in VARIANTS}
    usable: list[Tier] = [tier for tier in VARIANTS if not reasons[tier]]
    repeats = sorted(set.intersection(*(set(found[tier]) for tier in usable))) if usable else []
    plan = min(runs, key=lambda run: run.plan.series.variant != "plain").plan
    parts, whole_is = _parts(found, repeats, reasons)
    present = [part.seconds for part in parts if part.seconds is not None]
    return Stalls(
        series=plan.series.id,
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        sample_unit=plan.workload.sample_unit,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        tiers=tuple(
            _tier(tier, list(known.values()), plan.workload.sample_unit) for tier, known in found.items() if known
        ),
        ceiling=geometric_mean_estimate(
            [one.rate for one in found["synthetic"].values()], f"{plan.workload.sample_unit}/s"
        )
        if found["synthetic"]
        else None,
        parts=parts,
        whole_s=geometric_mean_estimate([found[whole_is][k].step_s for k in repeats], "s") if present else None,
        whole_is=whole_is,
        pairs=len(repeats) if present else 0,
        missing=tuple(missing),
        notes=tuple(_notes(found)),
    )


def _parts(
    found: Mapping[Tier, Mapping[int, _One]], repeats: Sequence[int], reasons: Mapping[Tier, str]
) -> tuple[tuple[StallPart, ...], Tier]:
    """The parts of a step over the same repeats, and whose step they sum to."""
    whole_is: Tier = "cold" if not reasons["cold"] else "cached"
    no_pair = "" if repeats else "no repeat has figures of all its runs"

    def steps(tier: Tier) -> list[float]:
        return [one["step"] for one in about_means([{"step": found[tier][k].step_s} for k in repeats])]

    def part(name: Literal["ingestion", "preparation", "fetch"], tier: Tier, less: Tier | None) -> StallPart:
        why = reasons[tier] or (reasons[less] if less else "") or reasons["synthetic"] or no_pair
        if not why and whole_is == "cached" and reasons["cached"]:
            why = reasons["cached"]
        if why:
            return StallPart(name=name, seconds=None, share=None, why=why)
        own, mean = steps(tier), fmean(steps(whole_is))
        values = own if less is None else [a - b for a, b in zip(own, steps(less), strict=True)]
        # Shares of the mean whole, so that they sum to 1 as the seconds sum to it.
        return StallPart(
            name=name,
            seconds=mean_estimate(values, "s"),
            share=mean_estimate([value / mean for value in values], "fraction"),
            why="",
        )

    return (
        part("ingestion", "synthetic", None),
        part("preparation", "cached", "synthetic"),
        part("fetch", "cold", "cached"),
    ), whole_is


def _why_not(tier: Tier, runs: Sequence[_One]) -> str:
    """Why the runs of a kind say nothing of it; empty if they do."""
    titles = {"synthetic": "with synthetic data", "cached": "with a warm page cache", "cold": "with a cold page cache"}
    if not runs:
        return f"no run {titles[tier]} has figures"
    if tier == "synthetic":
        return ""
    for one in runs:
        if one.reading is None:
            return f"a run {titles[tier]} does not say what became of the page cache"
        if not one.reading.cache_in_force:
            state = "warm" if tier == "cached" else "cold"
            return f"the page cache was not {state}: {one.reading.cache}"
    return ""


def _tier(tier: Tier, runs: Sequence[_One], unit: str) -> TierRuns:
    shares = [share for one in runs if (share := _storage_share(one.reading)) is not None]
    epochs = [count for one in runs if (count := _epochs(one.reading)) is not None]
    reading = next((one.reading for one in runs if one.reading is not None), None)
    return TierRuns(
        tier=tier,
        rate=geometric_mean_estimate([one.rate for one in runs], f"{unit}/s"),
        step_s=geometric_mean_estimate([one.step_s for one in runs], "s"),
        storage_share=sum(shares) / len(shares) if shares else None,
        epochs=max(epochs, default=None),
        cache="" if tier == "synthetic" or reading is None else reading.cache,
    )


def _storage_share(reading: ReadingResult | None) -> float | None:
    return None if reading is None else storage_share(reading.epochs)


def _epochs(reading: ReadingResult | None) -> float | None:
    if reading is None or not reading.epochs:
        return None
    return float(len(reading.epochs))


def _is_cached(epoch: ReadEpoch) -> bool:
    """Whether samples of an epoch may have come from the page cache, as nobody saw that they were not in it."""
    return epoch.cached_share is None or epoch.cached_share > WARM_SHARE


def _unexpected_share(reading: ReadingResult | None) -> float | None:
    """Share of the bytes from storage, unless all was cached: then the kernel fetched something else, e.g. programs."""
    if reading is None or (reading.cached_share is not None and reading.cached_share > 1 - WARM_ENOUGH):
        return None
    return storage_share(reading.epochs)


def _notes(found: Mapping[Tier, Mapping[int, _One]]) -> list[str]:
    notes = []
    cold = [one.reading for one in found["cold"].values() if one.reading is not None and one.reading.cache_in_force]
    if any(_is_cached(epoch) for reading in cold for epoch in reading.epochs[1:]):
        notes.append(
            "The runs with a cold page cache read more than one epoch: from the second on samples may come from the "
            "page cache, so that the fetch stall is smaller than in the first epoch. Fewer steps, or more data, stay "
            "within one"
        )
    warm = [share for one in found["cached"].values() if (share := _unexpected_share(one.reading)) is not None]
    if warm and max(warm) > WARM_ENOUGH:
        notes.append(
            f"Of the bytes read in runs with a warm page cache up to {max(warm):.0%} came from storage all the same: "
            "the preparation stall holds some fetching"
        )
    workers = {one.reading.loader_workers for tier in found.values() for one in tier.values() if one.reading}
    if len(workers) > 1:
        notes.append(
            f"The runs had different numbers of reader processes ({', '.join(map(str, sorted(workers)))} per rank): "
            "set data.loader_workers to one of them"
        )
    return notes
