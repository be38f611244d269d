"""Staging, reading and shuffling of samples. Parts of `record.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, RankNumber, Spec
from dlbench.specs.system import StagingTier, Tier
from dlbench.specs.workload import Staging


class StagedNode(Spec):
    """Staging on one node."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Host name.")
    path: str = Field(description="Folder of the staged samples.")
    needed_bytes: CountOrZero = Field(description="Bytes needed there.")
    free_bytes: CountOrZero = Field(description="Free bytes before copying.")
    copied_bytes: CountOrZero = Field(description="Bytes copied by this run before training.")
    reused_bytes: CountOrZero = Field(description="Bytes of complete copies of an earlier run.")
    items: CountOrZero = Field(description="Files (replicate) or samples (shard) staged.")
    seconds: NonNegative = Field(description="Staging time on this node, seconds.")


class StagingResult(Spec):
    """The staging of samples to the nodes."""

    strategy: Staging = Field(description="data.staging.")
    tier: StagingTier = Field(description="Target tier.")
    method: str = Field(description="Method of copying: copy, sbcast, or on first read.")
    streams: Count = Field(description="Concurrent copies on each node.")
    seconds: NonNegative = Field(description="Time until all nodes were ready, seconds; 0 for lazy.")
    nodes: tuple[StagedNode, ...] = Field(description="Staging by node.")
    verified: str = Field(description="Verification of the copies, in words.")
    kept: Flag = Field(description="Whether the staged samples are kept for the next run.")


class ReadEpoch(Spec):
    """The reads of all ranks in an epoch."""

    epoch: CountOrZero = Field(description="The epoch, from 0.")
    is_whole: Flag = Field(description="Whether this run read the whole epoch.")
    samples: CountOrZero = Field(description="Samples read.")
    tier_bytes: dict[Tier, CountOrZero] = Field(description="Bytes of samples fetched, by tier.")
    storage_bytes: CountOrZero | None = Field(
        description="Bytes that the kernel read from storage (read_bytes of /proc/thread-self/io), with read-ahead and "
        "libraries' pages; null: not counted, as on some network file systems."
    )
    fetch_s: NonNegative = Field(description="Time of fetching, all readers together, seconds.")
    prepare_s: NonNegative = Field(description="Time of decoding and augmenting, all readers together, seconds.")
    wait_s: NonNegative = Field(description="Time that ranks waited for batches, mean over ranks, seconds.")
    seconds: NonNegative = Field(description="Length of the epoch's steps on rank 0, seconds.")
    cached_share: NonNegative | None = Field(
        None,
        description="Share of the data set's pages in the page cache at the start; null: only with data.cache cold.",
    )


class ReaderTrial(Spec):
    """A trial of the automatic choice of readers."""

    loader_workers: CountOrZero = Field(description="Reader processes per rank.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead; 0: the training process reads.")
    computing: Flag = Field(
        False, description="Whether the training process computed between batches, as long as it takes to read one."
    )
    samples_per_s: NonNegative = Field(
        description="Samples per second of the slowest rank, all ranks reading; median of trials."
    )


class ReadingResult(Spec):
    """The reading of samples."""

    loader_workers: CountOrZero = Field(description="Reader processes per rank in force.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead; 0: the training process reads.")
    training_cores: CountOrZero | None = Field(
        None, description="Cores of a rank without reader processes, for training on a GPU; null: CPUs share all."
    )
    limited_by_cores: Flag = Field(False, description="Whether the automatic choice was limited by the cores per rank.")
    trials: tuple[ReaderTrial, ...] = Field((), description="Measurements of the automatic choice; empty: none.")
    trials_s: NonNegative = Field(0.0, description="Time of the automatic choice before training, seconds.")
    cache: str = Field(description="Result of data.cache in words, with the evidence.")
    cache_in_force: Flag = Field(description="Whether the page cache was as data.cache requests.")
    cached_share: NonNegative | None = Field(
        description="Share of the data set's pages in the page cache before training, by a sample; null: unknown."
    )
    epochs: tuple[ReadEpoch, ...] = Field((), description="Reading by epoch.")


class ShuffleEpoch(Spec):
    """The audit of an epoch."""

    epoch: CountOrZero = Field(description="The epoch, from 0.")
    is_whole: Flag = Field(description="Whether this run read the whole epoch, so that each sample must be seen.")
    visits: CountOrZero = Field(description="Samples read, over all ranks.")
    left_out: CountOrZero = Field(description="Samples left out, as they do not fill a batch on every rank.")
    twice: CountOrZero = Field(description="Samples read more than once.")
    never: CountOrZero = Field(description="Samples that were not read but should have been.")
    sent: CountOrZero = Field(description="Samples sent from a rank to another during the epoch.")
    received: CountOrZero = Field(description="Samples received; equal to sent if none was lost.")
    sent_bytes: CountOrZero = Field(description="Bytes sent.")
    novelty: NonNegative | None = Field(
        description="Share of a rank's samples that are new since the last epoch, over 1 - 1/ranks, mean over ranks: 0 "
        "under local, about 1 under global shuffling; null: first epoch, or one rank."
    )
    label_distance: NonNegative | None = Field(
        description="Total variation distance of a rank's classes from those of all, mean over ranks; null: no classes."
    )


class ShuffleResult(Spec):
    """The shuffling of samples, and the audit that each was read once per epoch."""

    shuffle: str = Field(description="data.shuffle.")
    partition: str | None = Field(description="data.partition; null under global shuffling.")
    exchanged_share: NonNegative = Field(description="Q in force, rounded to whole samples.")
    errors: tuple[str, ...] = Field((), description="Names of samples read twice or never, and lost exchanges.")
    held_samples_peak: CountOrZero | None = Field(
        None, description="Most samples of a rank at a time; null: ranks have none."
    )
    exchange_wait_s: NonNegative = Field(0.0, description="Longest wait of a rank for samples, seconds.")
    audit_s: NonNegative = Field(description="Time of the audit, mean over ranks, seconds.")
    epochs: tuple[ShuffleEpoch, ...] = Field((), description="Audit by epoch.")


class _Answer(Spec):
    """An answer of a program; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ReadRate(_Answer):
    """The rate of some readers."""

    samples: CountOrZero = Field(description="Samples read and prepared.")
    seconds: NonNegative = Field(description="Time, seconds.")
    samples_per_s: NonNegative = Field(description="Samples per second.")
    raw_bytes: CountOrZero = Field(description="Stored bytes of these samples.")
    bytes_per_s: NonNegative = Field(description="Bytes per second.")
    tier_bytes: dict[Tier, CountOrZero] = Field(description="Bytes by tier.")
    storage_bytes: CountOrZero | None = Field(description="Bytes read from devices; null: not counted.")
    fetch_s: NonNegative = Field(description="Fetching, all readers together, seconds.")
    prepare_s: NonNegative = Field(description="Decoding and augmenting, all readers together, seconds.")
    passes: NonNegative = Field(description="Passes over the data set.")
    is_short: Flag = Field(description="Whether a cold pass ended before the requested time.")
    opens_per_s: NonNegative | None = Field(None, description="Files opened and closed per second; null: none.")
    stats_per_s: NonNegative | None = Field(None, description="Files queried for attributes per second.")
    names_per_s: NonNegative | None = Field(None, description="Names listed per second.")


class RateRepeat(_Answer):
    """One repeat."""

    cached_share: NonNegative | None = Field(description="Share of the data set in the page cache at the start.")
    cache_in_force: Flag = Field(description="Whether the page cache was as requested.")
    together: ReadRate = Field(description="All processes.")


class ReadingRate(_Answer):
    """The result of a reading benchmark."""

    format: Literal["dlbench.reading-rate"]
    kind: str = Field(description="Kind of the data set.")
    num_samples: Count = Field(description="Samples in it.")
    num_files: CountOrZero = Field(0, description="Files in it.")
    names_from: str | None = Field(None, description="Source of their names; null: few files.")
    open_s: NonNegative = Field(0.0, description="Time until the names were known, seconds.")
    processes: Count = Field(description="Reading processes, as ranks of a node.")
    cores_per_process: Count = Field(description="Cores of each.")
    loader_workers: CountOrZero = Field(description="Reader processes of each.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead.")
    cache: Literal["any", "cold", "warm"] = Field(description="Requested page cache.")
    cache_state: str = Field(description="Result in words.")
    cache_in_force: Flag = Field(description="Whether it was as requested in every repeat.")
    warnings: tuple[str, ...] = Field(description="Warnings.")
    repeats: tuple[RateRepeat, ...] = Field(min_length=1, description="Rates by repeat.")
