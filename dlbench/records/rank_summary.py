"""`RankSummary`: the summary of a rank at the end of a run, gathered as JSON and never stored."""

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
    dropped: CountOrZero  # Spans beyond the share of bytes.
    bytes: CountOrZero


class WatchSummary(Spec):
    """The monitoring of a rank."""

    node: NodeWatch | None = None  # Summary of the node's sampler, on its first rank.
    spans: SpanCounts | None = None  # None: no spans.
    sample_bytes: CountOrZero  # Bytes of the node's samples, on its first rank.
    problems: tuple[str, ...]  # Problems of monitoring, each a sentence.
    load: dict[str, Any]  # CPU time by `CoreLoad.summary`.


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
    reads: tuple[dict[str, Any], ...]  # Reads by epoch, see `EpochReads`.
    samples: dict[str, Any] | None = None  # See `ReadAudit.summary`; None: nothing is read.
    norms: tuple[tuple[AnyFloat, AnyFloat], ...] = ()  # Squared norms of local and exchanged gradients.
    memory: RankMemory | None = None  # None: activations are left to autograd.
    watch: WatchSummary
    staging: StagingSummary | None = None  # On the first rank of a node.
