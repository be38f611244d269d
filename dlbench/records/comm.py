"""Reads the collective benchmark's files: `comm.json`, runs below a folder, fitted network costs."""

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

MAX_BYTES = 1 << 24  # Limit for a file of fitted costs.


class CommPoint(Spec):
    """One collective, by one algorithm or library, at one size."""

    collective: Collective = Field(description="The collective.")
    algorithm: str = Field(
        description="Algorithm, or `library`; for MPI `library-in-place` and `library-out-of-place` (second buffer)."
    )
    carrier: str = Field(description="Library that sends the bytes, e.g. torch-gloo, mpi, horovod-gloo.")
    num_bytes: Count = Field(description="Bytes of each rank's buffer.")
    dtype: Precision = Field(description="Type of an element.")
    times_s: tuple[NonNegative, ...] = Field(
        description="Seconds of one operation by timed iteration, whose time is over `operations`; empty if it failed."
    )
    timing: Literal["host clock", "in-stream"] = Field(
        "host clock", description="host clock: after the library's barrier; in-stream: GPU events, after one in it."
    )
    launch_bound: CountOrZero | None = Field(
        None,
        description="In-stream: iterations that the GPU reached before the host had queued all operations, so that "
        "times may include its calls; null: host clock, or calls that wait (Horovod).",
    )
    single_call_s: tuple[NonNegative, ...] = Field(
        (), description="In-stream: one operation alone by the host's clock, seconds."
    )
    operations: Count = Field(1, description="Operations of an iteration, back to back; several if one is short.")
    is_cut: Flag = Field(
        False,
        description="In-stream: whether samples have fewer operations, as the GPU was faster than the host's calls.",
    )
    skew_s: tuple[NonNegative, ...] = Field(
        (), description="Time between the first and last rank's start of each iteration, seconds."
    )
    pair: RankPair | None = Field(
        None, description="p2p: sender, receiver; times are half of a ping-pong, or the share of a message in a window."
    )
    congestors: tuple[NonNegative, ...] = Field(
        (), description="p2p: bytes per second of each congestor, as in the plan; empty: none."
    )
    correct: Flag | None = Field(description="Whether all ranks had the correct result; null: not checked.")
    max_error: NonNegative | None = Field(description="Largest relative error over ranks and elements.")
    chunks: Count | None = Field(None, description="Chunks of the buffer, by which levels overlap; null for libraries.")
    steps: CountOrZero | None = Field(None, description="Steps per rank, the most, counted; null for libraries.")
    messages: tuple[CountOrZero, ...] = Field((), description="Messages sent by each rank, counted.")
    bytes_sent: tuple[CountOrZero, ...] = Field((), description="Bytes sent by each rank, counted.")
    bytes_across: tuple[CountOrZero, ...] = Field((), description="Those of them that left the group.")
    problem: str = Field("", description="Why there is no time, or why it is in doubt.")


class CommRecord(Spec):
    """`comm.json`, written last, by rank 0."""

    format: Literal["dlbench.comm"] = Field("dlbench.comm", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a result was wrong; it gives no figure.")
    started: str = Field(description="UTC, ISO 8601, of rank 0's start.")
    finished: str = Field(description="UTC, ISO 8601.")
    hosts: tuple[str, ...] = Field(description="Host of each rank.")
    switches: tuple[str, ...] = Field(
        (), description="Switches above each rank's node from the root, root.leaf1, by Slurm; empty: none."
    )
    device: str = Field(description="Device of the buffers, e.g. cpu.")
    group_size: Ranks = Field(description="Ranks of a group.")
    points: tuple[CommPoint, ...] = Field(description="All points, in order.")
    load: tuple[NodeLoad, ...] = Field((), description="Use of the cores of each node's ranks.")
    nccl: NcclTransport | None = Field(None, description="NCCL's transports; null: not reported.")
    not_measured: tuple[str, ...] = Field(
        (), description="Requested measurements that are not possible here, with the reason."
    )
    warnings: tuple[str, ...] = Field((), description="Warnings, each a sentence.")
    environment: Environment = Field(description="Environment of rank 0, by name.")


@dataclass(frozen=True, kw_only=True)
class CommRun(LaunchedRun):
    """A run of the collective benchmark on disk."""

    plan: CommPlan
    record: CommRecord | None

    counted: ClassVar[str] = "point"

    @property
    def objection(self) -> str:
        if self.record is None or self.record.state == "valid":
            return ""
        points = self.record.points
        wrong = [p for p in points if p.correct is False] or [p for p in points if p.problem]
        texts = []
        for point in wrong[:3]:
            why = point.problem or "wrong result"
            if not point.problem and point.max_error is not None:
                why += f", largest relative error {point.max_error:.3g}"
            where = f"{point.collective} {point.algorithm} over {point.carrier} of {format_bytes(point.num_bytes)}"
            texts.append(f"{where}: {why}")
        if len(wrong) > 3:
            texts.append(f"and {len(wrong) - 3} points more")
        return "; ".join(texts) or "the record is invalid without a reason"


CommScan = RunsBelow[CommRun]


def scan_comm(root: Path, *more_roots: Path) -> CommScan:
    """Reads every run of the collective benchmark below some folders; a folder without a readable plan is a problem."""
    folders = (
        folder for folder in run_folders(root, *more_roots) if text_in(folder.plan, "format") in (COMM_FORMAT, "")
    )
    return read_each(root, folders, _read)


def read_comm_run(path: Path) -> CommRun:
    """Reads one folder of the collective benchmark."""
    folder = RunFolder(path)
    if text_in(folder.plan, "format") not in (COMM_FORMAT, ""):
        raise UserError(f"{path}: is not a run of the collective benchmark; see `dlbench report`")
    return _read(folder)


def _read(folder: RunFolder) -> CommRun:
    plan = load_plan(folder, CommPlan)
    return launched(CommRun, folder, plan, load_of_run(folder.comm, CommRecord, plan))


def read_launched(path: Path) -> Run | CommRun:
    """Reads a run's folder of any kind. Raises IncompleteDataError: a file is damaged, or there is no plan."""
    if text_in(RunFolder(path).plan, "format") == COMM_FORMAT:
        return read_comm_run(path)
    return read_run(path)


def read_network(path: Path) -> NetworkModel:
    """Reads fitted costs. Raises UserError: no such file, or another format; or IncompleteDataError: it is damaged."""
    return read_given(path, NetworkModel, "fitted costs of a network", "dlbench comm fit", MAX_BYTES)
