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

    num: CountOrZero = Field(description="Spans in the file.")
    dropped: CountOrZero = Field(description="Spans that there was no room for.")
    bytes: CountOrZero = Field(description="Bytes of the file that are this rank's.")


class WatchSummary(Spec):
    """How one rank was watched."""

    node: NodeWatch | None = Field(None, description="What the sampler of the node says, on its first rank.")
    spans: SpanCounts | None = Field(None, description="Its spans; null: none are kept.")
    sample_bytes: CountOrZero = Field(description="Bytes of the node's samples, on its first rank.")
    problems: tuple[str, ...] = Field(description="What went wrong with watching, each a sentence.")
    load: dict[str, Any] = Field(description="CPU time, as `CoreLoad.summary` gives it.")


class StagingSummary(Spec):
    """How the samples of one node were staged."""

    node: StagedNode | None = Field(description="What was copied; null: nothing.")
    warnings: tuple[str, ...] = Field(description="What went wrong, each a sentence.")


class RankSummary(Spec):
    """What one rank says at the end. Each part of training fills in its own fields."""

    result: RankResult = Field(description="What the record holds of each rank.")
    environment: Environment = Field(description="Facts of its machine and of torch, by name.")
    nccl: NcclTransport | None = Field(None, description="What its NCCL said; null where there is no log.")
    warnings: tuple[str, ...] = Field(description="Reasons for doubt, each a sentence.")
    emulates_precision: Flag = Field(description="Whether its device emulates the arithmetic of the precision.")
    reads: tuple[dict[str, Any], ...] = Field(description="What it read, epoch by epoch, as `EpochReads` has it.")
    norms: tuple[tuple[AnyFloat, AnyFloat], ...] = Field(
        (), description="Squared norms of its own and of the exchanged gradient, step by step."
    )
    memory: RankMemory | None = Field(None, description="What it moved and recomputed; null: left to autograd.")
    watch: WatchSummary = Field(description="How it was watched.")
    samples: dict[str, Any] | None = Field(
        None, description="What it read and exchanged, as `ReadAudit.summary` has it; null where nothing is read."
    )
    staging: StagingSummary | None = Field(None, description="On the first rank of a node, how that was staged.")
