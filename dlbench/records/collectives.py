"""`comm.json`: what one run of the collective benchmark measured; raw times, no rates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.records.record import Environment
from dlbench.records.watch import NodeLoad
from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Precision, Ranks, RunName, Spec
from dlbench.specs.collectives import Collective


class CommPoint(Spec):
    """One collective, by one algorithm or library, at one size."""

    collective: Collective = Field(description="The collective.")
    algorithm: str = Field(
        description="dlbench's own algorithm, or `library` for a reference; of MPI's all-reduce "
        "`library-in-place` and `library-out-of-place` (into a second buffer).",
    )
    carrier: str = Field(description="What moved the bytes, e.g. torch-gloo, mpi, horovod-gloo.")
    num_bytes: Count = Field(description="Bytes of each rank's buffer.")
    dtype: Precision = Field(description="Type of an element.")
    times_s: tuple[NonNegative, ...] = Field(
        description="Every timed iteration, seconds of one operation: those of the iteration over `operations`; empty "
        "if it failed."
    )
    timing: Literal["host clock", "in-stream"] = Field(
        "host clock",
        description="host clock, after a barrier of the carrier; in-stream: events of the GPU's stream, after a "
        "barrier in it.",
    )
    single_call_s: tuple[NonNegative, ...] = Field(
        (), description="In-stream: one operation alone in each iteration, by the host's clock, seconds."
    )
    operations: Count = Field(
        1, description="Operations of an iteration, back to back: more than one where it is short."
    )
    skew_s: tuple[NonNegative, ...] = Field((), description="How far apart ranks began each timed iteration, seconds.")
    correct: Flag | None = Field(description="Whether all ranks held the right result; null if not checked.")
    max_error: NonNegative | None = Field(description="Largest relative error over ranks and elements.")
    steps: CountOrZero | None = Field(None, description="Most steps of a rank, counted; null for libraries.")
    messages: tuple[CountOrZero, ...] = Field((), description="Messages sent by each rank, counted.")
    bytes_sent: tuple[CountOrZero, ...] = Field((), description="Bytes sent by each rank, counted.")
    bytes_across: tuple[CountOrZero, ...] = Field((), description="Those of them that left the group.")
    problem: str = Field("", description="Why there is no time, or why it is in doubt.")


class CommRecord(Spec):
    """`comm.json`, written last, by rank 0."""

    format: Literal["dlbench.comm"] = Field("dlbench.comm", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a result was wrong; no figure may be made.")
    started: str = Field(description="UTC, ISO 8601, of rank 0's start.")
    finished: str = Field(description="UTC, ISO 8601.")
    hosts: tuple[str, ...] = Field(description="Host of each rank.")
    device: str = Field(description="Where buffers lay, e.g. cpu.")
    group_size: Ranks = Field(description="Ranks of a group.")
    points: tuple[CommPoint, ...] = Field(description="Everything measured, in order.")
    load: tuple[NodeLoad, ...] = Field((), description="Who computed on the cores of each node's ranks.")
    not_measured: tuple[str, ...] = Field((), description="What was asked for and cannot be had here, with the reason.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt, each a sentence.")
    environment: Environment = Field(description="Environment of rank 0, by name.")
