"""What the pure reader benchmark answers: how fast samples are read and prepared, without training."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Spec
from dlbench.specs.system import Tier


class _Told(Spec):
    """Newer programs may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ReadRate(_Told):
    """What some readers read in some seconds."""

    samples: CountOrZero = Field(description="Samples read and prepared.")
    seconds: NonNegative = Field(description="Time of it.")
    samples_per_s: NonNegative = Field(description="Rate.")
    raw_bytes: CountOrZero = Field(description="Stored bytes of these samples.")
    bytes_per_s: NonNegative = Field(description="Their rate.")
    tier_bytes: dict[Tier, CountOrZero] = Field(description="The bytes by tier.")
    storage_bytes: CountOrZero | None = Field(description="Bytes that came from devices; null: not counted.")
    fetch_s: NonNegative = Field(description="Time in fetching, all readers together.")
    prepare_s: NonNegative = Field(description="Time in decoding and augmenting, all readers together.")
    passes: NonNegative = Field(description="Times that the data set was read.")
    is_short: Flag = Field(description="Whether a cold pass ended before the seconds asked for.")


class RateRepeat(_Told):
    """One repeat."""

    cached_share: NonNegative | None = Field(description="Of the data set's pages in the page cache at its begin.")
    cache_in_force: Flag = Field(description="Whether the page cache was as asked.")
    together: ReadRate = Field(description="All processes.")


class ReadingRate(_Told):
    """The answer."""

    format: Literal["dlbench.reading-rate"]
    kind: str = Field(description="Kind of the data set.")
    num_samples: Count = Field(description="Samples in it.")
    processes: Count = Field(description="Processes that read, as ranks of a node do.")
    cores_per_process: Count = Field(description="Cores of each.")
    loader_workers: CountOrZero = Field(description="Reader processes of each.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead.")
    cache: Literal["any", "cold", "warm"] = Field(description="Page cache as asked.")
    cache_told: str = Field(description="What became of it, in words.")
    cache_in_force: Flag = Field(description="Whether it was as asked in every repeat.")
    warnings: tuple[str, ...] = Field(description="Reasons for doubt.")
    repeats: tuple[RateRepeat, ...] = Field(min_length=1, description="Repeat by repeat.")
