"""The collective benchmark's files: `comm.json`, its runs below a folder with their states, fitted network costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dlbench.errors import UserError
from dlbench.records.exchange import NcclTransport
from dlbench.records.folder import RunFolder
from dlbench.records.record import Environment
from dlbench.records.scan import (
    COMM_FORMAT,
    LaunchedRun,
    Run,
    RunsBelow,
    launched,
    load_of_run,
    load_plan,
    read_each,
    read_given,
    read_run,
    run_folders,
    text_in,
)
from dlbench.records.watch import NodeLoad
from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, Precision, Ranks, RunName, Spec
from dlbench.specs.comm import Collective, CommPlan, NetworkModel, RankPair
from dlbench.units import format_bytes


class CommPoint(Spec):
    """One collective, by one algorithm or library, at one size."""

    collective: Collective = Field(description="The collective.")
    algorithm: str = Field(
        description="dlbench's own algorithm, or `library` for a reference; of MPI's all-reduce "
        "`library-in-place` and `library-out-of-place` (into a second buffer)."
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
    launch_bound: CountOrZero | None = Field(
        None,
        description="In-stream: timed iterations in which the GPU came to the operations before the host had queued "
        "all of them, so that waits for the host's calls may be in the time. Null: the stream was not held back, as "
        "each call waits for its operation (Horovod), or the host's clock timed it.",
    )
    single_call_s: tuple[NonNegative, ...] = Field(
        (), description="In-stream: one operation alone in each iteration, by the host's clock, seconds."
    )
    operations: Count = Field(
        1, description="Operations of an iteration, back to back: more than one where it is short."
    )
    is_cut: Flag = Field(
        False,
        description="In-stream: whether these are fewer than a sample should have, as the GPU came to more of them "
        "before the host had queued all.",
    )
    skew_s: tuple[NonNegative, ...] = Field((), description="How far apart ranks began each timed iteration, seconds.")
    pair: RankPair | None = Field(
        None,
        description="p2p: who begins and who answers; its times are each operation's: half of a ping-pong, or the "
        "share of a message in a window of `operations`.",
    )
    congestors: tuple[NonNegative, ...] = Field(
        (), description="p2p: bytes per second of each congestor meanwhile, as in the plan; empty: the pair alone."
    )
    correct: Flag | None = Field(description="Whether all ranks held the right result; null if not checked.")
    max_error: NonNegative | None = Field(description="Largest relative error over ranks and elements.")
    chunks: Count | None = Field(
        None, description="Chunks of a vector; null: libraries, and earlier records, whose hierarchical sent one."
    )
    steps: CountOrZero | None = Field(None, description="Steps per rank, the most, counted; null for libraries.")
    messages: tuple[CountOrZero, ...] = Field((), description="Messages sent by each rank, counted.")
    bytes_sent: tuple[CountOrZero, ...] = Field((), description="Bytes sent by each rank, counted.")
    bytes_across: tuple[CountOrZero, ...] = Field((), description="Those of them that left the group.")
    problem: str = Field("", description="Why there is no time, or why it is in doubt.")

    @property
    def chunks_run(self) -> int | None:
        """As the formulas take them; None: `pipeline_chunks`."""
        return 1 if self.chunks is None and self.algorithm == "hierarchical" else self.chunks


class CommRecord(Spec):
    """`comm.json`, written last, by rank 0."""

    format: Literal["dlbench.comm"] = Field("dlbench.comm", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a result was wrong; no figure may be made.")
    started: str = Field(description="UTC, ISO 8601, of rank 0's start.")
    finished: str = Field(description="UTC, ISO 8601.")
    hosts: tuple[str, ...] = Field(description="Host of each rank.")
    switches: tuple[str, ...] = Field(
        (), description="Switches above each rank's node from the root, root.leaf1, as Slurm reports them; empty: none."
    )
    device: str = Field(description="Where buffers lay, e.g. cpu.")
    group_size: Ranks = Field(description="Ranks of a group.")
    points: tuple[CommPoint, ...] = Field(description="Everything measured, in order.")
    load: tuple[NodeLoad, ...] = Field((), description="Who computed on the cores of each node's ranks.")
    nccl: NcclTransport | None = Field(None, description="How NCCL joined the GPUs; null where it does not say.")
    not_measured: tuple[str, ...] = Field((), description="What was asked for and cannot be had here, with the reason.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt, each a sentence.")
    environment: Environment = Field(description="Environment of rank 0, by name.")


@dataclass(frozen=True, kw_only=True)
class CommRun(LaunchedRun):
    """One run of the collective benchmark as it lies on disk."""

    plan: CommPlan
    record: CommRecord | None

    counted: ClassVar[str] = "point"

    @property
    def objection(self) -> str:
        """The first points that are wrong."""
        if self.record is None or self.record.state == "valid":
            return ""
        points = self.record.points
        wrong = [p for p in points if p.correct is False] or [p for p in points if p.problem]
        named = []
        for point in wrong[:3]:
            error = "" if point.max_error is None else f", largest relative error {point.max_error:.3g}"
            why = point.problem or f"wrong result{error}"
            where = f"{point.collective} {point.algorithm} over {point.carrier} of {format_bytes(point.num_bytes)}"
            named.append(f"{where}: {why}")
        more = [f"and {len(wrong) - 3} points more"] if len(wrong) > 3 else []
        return "; ".join([*named, *more]) or "the record says invalid, and not why"


CommScan = RunsBelow[CommRun]


def scan_comm(root: Path, *more: Path) -> CommScan:
    """Reads every run of the collective benchmark below some folders; see `dlbench.records.scan.run_folders`.

    A folder whose plan cannot be read is a problem here as in `dlbench.records.scan`: it may be of either kind.
    """
    folders = (folder for folder in run_folders(root, *more) if text_in(folder.plan, "format") in (COMM_FORMAT, ""))
    return read_each(root, folders, _read)


def read_comm_run(path: Path) -> CommRun:
    """One folder of the collective benchmark."""
    folder = RunFolder(path)
    if text_in(folder.plan, "format") not in (COMM_FORMAT, ""):
        raise UserError(f"{path}: is no run of the collective benchmark: see `dlbench report`")
    return _read(folder)


def _read(folder: RunFolder) -> CommRun:
    plan = load_plan(folder, CommPlan)
    return launched(CommRun, folder, plan, load_of_run(folder.comm, CommRecord, plan))


def read_launched(path: Path) -> Run | CommRun:
    """One run's folder, of whichever kind. Raises IncompleteDataError: a file is damaged, or it holds no plan."""
    return read_comm_run(path) if text_in(RunFolder(path).plan, "format") == COMM_FORMAT else read_run(path)


MAX_BYTES = 1 << 24  # Of a file at most: it holds some numbers for each carrier and algorithm.


def read_network(path: Path) -> NetworkModel:
    """The file. Raises UserError: there is none, or it holds something else; or IncompleteDataError: it is damaged."""
    return read_given(path, NetworkModel, "fitted costs of a network", "dlbench comm fit", MAX_BYTES)
