"""What a run says of its samples: how they were staged, read and shuffled. Parts of `record.json`."""

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
    path: str = Field(description="The folder that samples were staged to.")
    needed_bytes: CountOrZero = Field(description="Bytes that had to be there.")
    free_bytes: CountOrZero = Field(description="Bytes that were free there before the first was copied.")
    copied_bytes: CountOrZero = Field(description="Bytes copied by this run before training.")
    reused_bytes: CountOrZero = Field(description="Bytes found there, whole, of an earlier run.")
    items: CountOrZero = Field(description="Files (replicate) or samples (shard) staged.")
    seconds: NonNegative = Field(description="What staging took on this node, seconds.")


class StagingResult(Spec):
    """How samples were brought to the nodes."""

    strategy: Staging = Field(description="data.staging.")
    tier: StagingTier = Field(description="Where to.")
    method: str = Field(description="Who copied: copy, sbcast, or on first read.")
    streams: Count = Field(description="Copies at a time on each node.")
    seconds: NonNegative = Field(description="Until all nodes were ready, seconds; none under lazy.")
    nodes: tuple[StagedNode, ...] = Field(description="Node by node.")
    verified: str = Field(description="How the copies were compared with their source, in words.")
    kept: Flag = Field(description="Whether the staged samples were left for the next run.")


class ReadEpoch(Spec):
    """What all ranks read in one epoch."""

    epoch: CountOrZero = Field(description="The epoch, from 0.")
    is_whole: Flag = Field(description="Whether all of it was read in this run.")
    samples: CountOrZero = Field(description="Samples read.")
    tier_bytes: dict[Tier, CountOrZero] = Field(description="Bytes of samples fetched, by the tier they came from.")
    storage_bytes: CountOrZero | None = Field(
        description="Bytes that the kernel fetched from storage for the reading threads (read_bytes of "
        "/proc/thread-self/io): read-ahead counts, and pages of libraries that a reader first uses; the rest came from "
        "the page cache. Null where the kernel does not count, as on some network file systems."
    )
    fetch_s: NonNegative = Field(description="Time in fetching samples, all readers together, seconds.")
    prepare_s: NonNegative = Field(description="Time in decoding and augmenting, all readers together, seconds.")
    wait_s: NonNegative = Field(description="Time that ranks waited for batches, mean over ranks, seconds.")
    seconds: NonNegative = Field(description="Length of the epoch's steps on rank 0, seconds.")
    cached_share: NonNegative | None = Field(
        None,
        description="Share of the data set's pages in the page cache when the epoch began; null where nobody looked or "
        "the kernel does not say. It is looked at before training and, with data.cache cold, before each epoch.",
    )


class ReaderTrial(Spec):
    """One attempt of the automatic choice of readers."""

    loader_workers: CountOrZero = Field(description="Reader processes per rank.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead; 0 where the training process reads.")
    computing: Flag = Field(
        False,
        description="Whether the training process computed between batches, as long as reading one takes it; otherwise "
        "it took batches as fast as they came.",
    )
    samples_per_s: NonNegative = Field(
        description="Samples of the slowest rank a second, all ranks reading at the same time; median of trials."
    )


class ReadingResult(Spec):
    """How samples were read."""

    loader_workers: CountOrZero = Field(description="Reader processes per rank that were in force.")
    prefetch_batches: CountOrZero = Field(description="Batches each read ahead; 0 where the training process read.")
    training_cores: CountOrZero | None = Field(
        None,
        description="Cores of a rank that no reader process was bound to, so that training on a GPU had them to "
        "itself; null on CPUs, where training and readers share all.",
    )
    limited_by_cores: Flag = Field(
        False,
        description="Whether the automatic choice took as many reader processes as these cores left room for: with "
        "more cores per rank it might have taken more.",
    )
    trials: tuple[ReaderTrial, ...] = Field(
        (), description="What the automatic choice measured; empty: none was asked."
    )
    trials_s: NonNegative = Field(0.0, description="What the automatic choice took before training, seconds.")
    cache: str = Field(description="What became of data.cache, in words, with the evidence.")
    cache_in_force: Flag = Field(description="Whether the page cache was as data.cache asks.")
    cached_share: NonNegative | None = Field(
        description="Share of the data set's pages in the page cache when training began, by a sample of pages; null "
        "where the kernel does not say."
    )
    epochs: tuple[ReadEpoch, ...] = Field((), description="Epoch by epoch.")


class ShuffleEpoch(Spec):
    """The audit of one epoch: who read what."""

    epoch: CountOrZero = Field(description="The epoch, from 0.")
    is_whole: Flag = Field(description="Whether all of it was read in this run; only then must every sample be seen.")
    visits: CountOrZero = Field(description="Samples read, over all ranks.")
    left_out: CountOrZero = Field(description="Samples left out by rule, because they fill no batch on every rank.")
    twice: CountOrZero = Field(description="Samples read more than once.")
    never: CountOrZero = Field(description="Samples that should have been read and were not.")
    sent: CountOrZero = Field(description="Samples sent from a rank to another during the epoch.")
    received: CountOrZero = Field(description="Samples received; the same, if none was lost.")
    sent_bytes: CountOrZero = Field(description="Bytes of these.")
    novelty: NonNegative | None = Field(
        description="Share of a rank's samples that it did not read in the epoch before, over what global shuffling "
        "gives, 1 - 1/ranks; mean over ranks: 0 under local, about 1 under global shuffling. Null in the first epoch "
        "and at one rank."
    )
    label_distance: NonNegative | None = Field(
        description="Total variation distance between the classes of a rank's samples and those of all, mean over "
        "ranks; null where samples have no classes."
    )


class ShuffleResult(Spec):
    """How samples were shuffled, and whether each was read once an epoch."""

    shuffle: str = Field(description="data.shuffle.")
    partition: str | None = Field(description="data.partition; null under global shuffling.")
    exchanged_share: NonNegative = Field(description="Q that was in force, after rounding to whole samples.")
    errors: tuple[str, ...] = Field((), description="Samples read twice or never, by name, and lost exchanges.")
    held_samples_peak: CountOrZero | None = Field(
        None, description="Most samples that a rank held at one time; null where ranks hold none of their own."
    )
    exchange_wait_s: NonNegative = Field(0.0, description="Longest time that a rank waited for samples on their way.")
    audit_s: NonNegative = Field(description="What the audit cost, mean over ranks, seconds.")
    epochs: tuple[ShuffleEpoch, ...] = Field((), description="Epoch by epoch.")


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
    opens_per_s: NonNegative | None = Field(None, description="Files opened and closed unread; null: there are none.")
    stats_per_s: NonNegative | None = Field(None, description="Files whose attributes were asked for.")
    names_per_s: NonNegative | None = Field(None, description="Names listed.")


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
    num_files: CountOrZero = Field(0, description="Files in it.")
    names_from: str | None = Field(None, description="Where their names are from; null: of a kind of few files.")
    open_s: NonNegative = Field(0.0, description="Until they were known, seconds.")
    processes: Count = Field(description="Processes that read, as ranks of a node do.")
    cores_per_process: Count = Field(description="Cores of each.")
    loader_workers: CountOrZero = Field(description="Reader processes of each.")
    prefetch_batches: CountOrZero = Field(description="Batches each reads ahead.")
    cache: Literal["any", "cold", "warm"] = Field(description="Page cache as asked.")
    cache_told: str = Field(description="What became of it, in words.")
    cache_in_force: Flag = Field(description="Whether it was as asked in every repeat.")
    warnings: tuple[str, ...] = Field(description="Reasons for doubt.")
    repeats: tuple[RateRepeat, ...] = Field(min_length=1, description="Repeat by repeat.")
