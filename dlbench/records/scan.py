"""All of `runs/` becomes a list of runs, each with its state; what is damaged is named, not dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from dlbench.errors import IncompleteDataError, UserError
from dlbench.records.folder import RunFolder
from dlbench.records.record import Record
from dlbench.records.status import Failure, RankStatus, read_statuses
from dlbench.specs.plan import RunPlan

RunState = Literal["valid", "invalid", "failed", "incomplete"]

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as it lies on disk."""

    folder: RunFolder
    plan: RunPlan
    record: Record | None
    statuses: list[RankStatus]
    failure: str = ""
    """Why a launcher gave up; empty where none did."""

    @property
    def state(self) -> RunState:
        """Valid and invalid have a record; failed says why; incomplete was killed or still runs."""
        if self.record is not None:
            return self.record.state
        if self.failure or any(status.stage == "failed" for status in self.statuses):
            return "failed"
        return "incomplete"

    @property
    def story(self) -> str:
        """One line: what is known of a run that has no valid record."""
        if self.record is not None:
            return "; ".join(f"{c.name}: {c.detail}" for c in self.record.failed_checks)
        failed = [s for s in self.statuses if s.stage == "failed"]
        if failed or self.failure:
            parts = [self.failure] if self.failure else []
            if failed:
                # Who went without a word is the likely cause; the others only noticed.
                gone = [s for s in self.statuses if s.stage not in ("failed", "done")]
                parts += [f"rank {s.rank} on {s.host} vanished at step {s.step} ({s.stage})" for s in gone[:3]]
                parts += [f"rank {s.rank} on {s.host} failed at step {s.step}: {s.reason}" for s in failed[:3]]
            return "; ".join(parts)
        if not self.statuses:
            return "not started: no rank wrote a status"
        last = max(self.statuses, key=lambda s: s.updated)
        return (
            f"{len(self.statuses)} of {self.plan.layout.ranks} ranks started; last seen {last.updated}: "
            f"rank {last.rank} on {last.host}, {last.stage}, step {last.step}"
        )


@dataclass(kw_only=True)
class Scan:
    """Everything found under one folder."""

    root: Path
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Damaged runs, one line each; they are skipped."""


def scan(root: Path) -> Scan:
    """Reads every run below `root` (a folder of runs, or one run).

    Raises:
        UserError: there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder of runs; `dlbench run ... --out {root}` makes one")
    result = Scan(root=root)
    one = RunFolder(root)
    folders = [one.path] if one.plan.exists() else sorted(p for p in root.iterdir() if p.is_dir())
    for path in folders:
        if path.name.startswith("."):
            continue
        try:
            result.runs.append(read_run(path))
        except IncompleteDataError as error:
            result.problems.append(str(error))
    result.runs.sort(key=lambda run: (run.plan.created, run.plan.series.id, run.plan.series.position))
    return result


def read_run(path: Path) -> Run:
    """One run's folder.

    Raises:
        IncompleteDataError: a file is damaged, or it holds no plan.
    """
    folder = RunFolder(path)
    plan = _load(folder.plan, RunPlan)
    if plan is None:
        raise IncompleteDataError(f"{path}: no plan.json; not a run, or copied in part")
    record = _load(folder.record, Record)
    if record is not None and record.run_id != plan.run_id:
        raise IncompleteDataError(f"{folder.record}: belongs to run {record.run_id}, not to {plan.run_id}")
    return Run(folder=folder, plan=plan, record=record, statuses=read_statuses(folder), failure=_failure(folder))


def _failure(folder: RunFolder) -> str:
    failure = _load(folder.failure, Failure)
    return "" if failure is None else failure.reason


def _load(path: Path, model: type[ModelT]) -> ModelT | None:
    try:
        return model.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IncompleteDataError(f"{path}: damaged: {where}: {first['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise IncompleteDataError(f"{path}: damaged: {str(error).splitlines()[0]}") from None
