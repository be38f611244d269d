"""Rates of the pure reader benchmark, and how many accelerators they can feed.

A sample is fetched (storage) and prepared (CPU). With R readers, n samples and f the time that all of them spent in
fetching, fetching alone would give n R / f samples per second: what storage gives to that many readers where preparing
takes no time. It says nothing of more readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.costs.storage_demand import Demand
from dlbench.records.answers.reading_rate import RateRepeat, ReadingRate
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate
from dlbench.views.reading.numbers import complement

FORMAT = "dlbench.io"

Cache = Literal["cold", "warm"]
Limit = Literal["fetch", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the readers gave, in one state of the page cache."""

    ranks: int
    """Processes that read at the same time, as ranks do."""
    cache: Cache
    in_force: bool
    """Whether the page cache was in that state; where not, there are no figures."""
    told: str
    """What became of the page cache, in words."""
    loader_workers: int
    prefetch_batches: int
    samples_per_s: Estimate | None
    """All ranks together; over repeats."""
    bytes_per_s: Estimate | None
    sample_bytes: float | None
    """Stored bytes of a sample, mean."""
    fetch_share: Estimate | None
    """Of the time of fetching and preparing."""
    prepare_share: Estimate | None
    storage_share: float | None
    """Bytes from devices or the network over bytes of samples; None: not counted."""
    fetch_samples_per_s: Estimate | None
    """What fetching alone would give to as many readers."""
    limit: Limit | None
    """What takes the larger part of the readers' time."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fed:
    """How many accelerators one supply feeds."""

    ranks: int
    cache: Cache
    accelerators: Estimate
    """By all that readers do."""
    by_fetching: Estimate | None
    """If preparing took no time."""
    limit: Limit


@dataclass(frozen=True, kw_only=True)
class Need:
    """One accelerator's demand beside what the readers give."""

    demand: Demand
    bytes_per_s: float | None
    """With the mean sample of this data set; None where it is not known."""
    fed: tuple[Fed, ...]


@dataclass(frozen=True, kw_only=True)
class Io:
    """All that `dlbench io` says without training."""

    format: str = FORMAT
    version: int = 1
    workload: str
    preset: str
    source: str
    kind: str
    num_samples: int
    sample_unit: str
    host: str
    supplies: tuple[Supply, ...]
    needs: tuple[Need, ...]


def supply_of(answer: ReadingRate) -> Supply:
    """An answer of the reader benchmark with cache cold or warm.

    Raises:
        ValueError: it was asked for neither.
    """
    if answer.cache == "any":
        raise ValueError("the reader benchmark ran with the page cache as it was")
    repeats = [one for one in answer.repeats if one.together.samples] if answer.cache_in_force else []
    share = _fetch_share(repeats)
    readers = answer.processes * max(1, answer.loader_workers)
    fetching = [one.together.samples * readers / one.together.fetch_s for one in repeats if one.together.fetch_s]
    samples = sum(one.together.samples for one in repeats)
    return Supply(
        ranks=answer.processes,
        cache=answer.cache,
        in_force=bool(repeats),
        told=answer.cache_told,
        loader_workers=answer.loader_workers,
        prefetch_batches=answer.prefetch_batches,
        samples_per_s=_median([one.together.samples_per_s for one in repeats], "samples/s"),
        bytes_per_s=_median([one.together.bytes_per_s for one in repeats], "bytes/s"),
        sample_bytes=sum(one.together.raw_bytes for one in repeats) / samples if samples else None,
        fetch_share=share,
        prepare_share=None if share is None else complement(share),
        storage_share=_storage_share(repeats),
        fetch_samples_per_s=_median(fetching, "samples/s"),
        limit=None if share is None else "fetch" if share.value >= 0.5 else "prepare",
        warnings=answer.warnings,
    )


def _median(values: Sequence[float], unit: str) -> Estimate | None:
    return median_estimate(values, unit) if values else None


def _fetch_share(repeats: Sequence[RateRepeat]) -> Estimate | None:
    shares = []
    for one in repeats:
        whole = one.together.fetch_s + one.together.prepare_s
        if whole > 0:
            shares.append(one.together.fetch_s / whole)
    return mean_estimate(shares, "fraction") if shares else None


def _storage_share(repeats: Sequence[RateRepeat]) -> float | None:
    known = [
        (one.together.storage_bytes, one.together.raw_bytes)
        for one in repeats
        if one.together.storage_bytes is not None
    ]
    total = sum(raw for _, raw in known)
    return sum(storage for storage, _ in known) / total if total else None


def need_of(demand: Demand, supplies: Sequence[Supply]) -> Need:
    """One demand beside all supplies with figures."""
    sizes = [one.sample_bytes for one in supplies if one.sample_bytes is not None]
    return Need(
        demand=demand,
        bytes_per_s=demand.samples_per_s * sizes[0] if sizes else None,
        fed=tuple(found for one in supplies if (found := _fed(demand, one)) is not None),
    )


def _fed(demand: Demand, supply: Supply) -> Fed | None:
    if supply.samples_per_s is None or supply.limit is None:
        return None
    factor = 1 / demand.samples_per_s
    fetching = supply.fetch_samples_per_s
    return Fed(
        ranks=supply.ranks,
        cache=supply.cache,
        accelerators=supply.samples_per_s.scaled(factor, "accelerators"),
        by_fetching=None if fetching is None else fetching.scaled(factor, "accelerators"),
        limit=supply.limit,
    )
