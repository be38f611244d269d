"""Runs of the collective benchmark below a folder, each with its state; those of training are passed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from dlbench.errors import IncompleteDataError, UserError
from dlbench.records.collectives import CommPoint, CommRecord
from dlbench.records.folder import RunFolder
from dlbench.records.job.log import seen_in_log
from dlbench.records.scan import (
    COMM_FORMAT,
    LaunchedRun,
    Run,
    load_file,
    load_plan,
    plan_format,
    read_accounting,
    read_failure,
    read_run,
    run_folders,
)
from dlbench.records.status import read_statuses
from dlbench.sharing import WithheldError
from dlbench.specs.collectives import CommPlan
from dlbench.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class CommRun(LaunchedRun):
    """One run of the collective benchmark as it lies on disk."""

    plan: CommPlan
    record: CommRecord | None

    counted: ClassVar[str] = "point"

    @property
    def recorded(self) -> Literal["valid", "invalid"] | None:
        """The record's state."""
        return None if self.record is None else self.record.state

    @property
    def objection(self) -> str:
        """The first points that are wrong."""
        if self.record is None or self.record.state == "valid":
            return ""
        points = self.record.points
        wrong = [p for p in points if p.correct is False] or [p for p in points if p.problem]
        told = [_wrong(point) for point in wrong[:3]]
        more = [f"and {len(wrong) - 3} points more"] if len(wrong) > 3 else []
        return "; ".join([*told, *more]) or "the record says invalid, and not why"


def _wrong(point: CommPoint) -> str:
    error = "" if point.max_error is None else f", largest relative error {point.max_error:.3g}"
    why = point.problem or f"wrong result{error}"
    return f"{point.collective} {point.algorithm} over {point.carrier} of {format_bytes(point.num_bytes)}: {why}"


@dataclass(kw_only=True)
class CommScan:
    """Every run of the collective benchmark found under one folder."""

    root: Path
    runs: list[CommRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Damaged runs, one line each; they are skipped."""
    withheld: list[str] = field(default_factory=list)
    """Runs of other users, who let nobody read them, one line each; they are skipped."""


def scan_comm(root: Path, *more: Path) -> CommScan:
    """Reads every run of the collective benchmark below some folders; see `dlbench.records.scan.run_folders`.

    A folder whose plan cannot be read is a problem here as in `dlbench.records.scan`: it may be of either kind.

    Raises:
        UserError: there is no such folder.
    """
    result = CommScan(root=root)
    for folder in run_folders(root, *more):
        if plan_format(folder) not in (COMM_FORMAT, None):
            continue
        try:
            result.runs.append(_read(folder))
        except WithheldError as error:
            result.withheld.append(str(error))
        except IncompleteDataError as error:
            result.problems.append(str(error))
    result.runs.sort(key=lambda run: (run.plan.created, run.plan.series.id, run.plan.series.position))
    return result


def read_comm_run(path: Path) -> CommRun:
    """One folder of the collective benchmark.

    Raises:
        UserError: it is a run of something else.
        IncompleteDataError: a file is damaged, or it holds no plan.
    """
    folder = RunFolder(path)
    if plan_format(folder) not in (COMM_FORMAT, None):
        raise UserError(f"{path}: is no run of the collective benchmark: see `dlbench report`")
    return _read(folder)


def _read(folder: RunFolder) -> CommRun:
    plan = load_plan(folder, CommPlan)
    record = load_file(folder.comm, CommRecord)
    if record is not None and record.run_id != plan.run_id:
        raise IncompleteDataError(f"{folder.comm}: belongs to run {record.run_id}, not to {plan.run_id}")
    statuses, failure = read_statuses(folder, is_over=record is not None), read_failure(folder)
    return CommRun(
        folder=folder,
        plan=plan,
        record=record,
        statuses=statuses,
        failure=failure,
        seen=seen_in_log(folder, statuses) if record is None and failure is None else None,
        accounting=read_accounting(folder, plan),
    )


def read_launched(path: Path) -> Run | CommRun:
    """One run's folder, of whichever kind.

    Raises:
        IncompleteDataError: a file is damaged, or it holds no plan.
    """
    return read_comm_run(path) if plan_format(RunFolder(path)) == COMM_FORMAT else read_run(path)
