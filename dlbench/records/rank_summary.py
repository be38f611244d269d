"""`RankSummary`: what one rank says at the end of a run, gathered as JSON by all ranks and never stored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from dlbench.records.data_path import StagedNode
from dlbench.records.exchange import NcclTransport
from dlbench.records.out_of_core import RankMemory
from dlbench.records.record import Environment, RankResult
from dlbench.records.watch import NodeWatch
from dlbench.specs.base import CountOrZero, Flag, Spec

AnyFloat = Annotated[float, Field(allow_inf_nan=True)]


class SpanCounts(Spec):
    """The spans of one rank's file."""

    num: CountOrZero
    dropped: CountOrZero  # Spans that there was no room for.
    bytes: CountOrZero


class WatchSummary(Spec):
    """The monitoring of a rank."""

    node: NodeWatch | None = None  # What the sampler of the node says, on its first rank.
    spans: SpanCounts | None = None  # None: no spans are kept.
    sample_bytes: CountOrZero  # Bytes of the node's samples, on its first rank.
    problems: tuple[str, ...]  # What went wrong with watching, each a sentence.
    load: dict[str, Any]  # CPU time, as `CoreLoad.summary` gives it.


class StagingSummary(Spec):
    """The staging of the samples of a node."""

    node: StagedNode | None  # None: nothing was copied.
    warnings: tuple[str, ...]


class RankSummary(Spec):
    """The summary of a rank at the end; each part of training fills in its own fields."""

    result: RankResult
    environment: Environment
    nccl: NcclTransport | None = None  # None: there is no log.
    warnings: tuple[str, ...]
    emulates_precision: Flag
    reads: tuple[dict[str, Any], ...]  # What it read, epoch by epoch, as `EpochReads` has it.
    samples: dict[str, Any] | None = None  # As `ReadAudit.summary` has it; None where nothing is read.
    norms: tuple[tuple[AnyFloat, AnyFloat], ...] = ()  # Squared norms of its own and of the exchanged gradients.
    memory: RankMemory | None = None  # None: activations are left to autograd.
    watch: WatchSummary
    staging: StagingSummary | None = None  # On the first rank of a node.
