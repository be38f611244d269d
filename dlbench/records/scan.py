"""Reads all training runs below folders, each with its state; damaged ones are listed, not dropped."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from dlbench.errors import IncompleteDataError, UserError
from dlbench.opening import WithheldError, may_not_read, parse_json, read_json, read_named, why_unreadable
from dlbench.records.accounting import RunAccounting
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.records.job_log import progress_in_log, seen_in_log
from dlbench.records.record import RankResult, Record
from dlbench.records.status import MAX_BYTES, Failure, Interrupted, RankStatus, failure_line, read_statuses
from dlbench.records.watch import NodeWatch
from dlbench.specs.comm import CommPlan
from dlbench.specs.engine import key_for_name
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.problems import problem_of

RunState = Literal["valid", "invalid", "failed", "interrupted", "incomplete"]

ModelT = TypeVar("ModelT", bound=BaseModel)
R = TypeVar("R", bound="LaunchedRun")

COMM_FORMAT = str(CommPlan.model_fields["format"].default)
EARLIER = "made by an earlier dlbench: measure again"

MAX_LEVELS = 3  # Levels of folders of runs below the folder that is read.
MANY_FILES = 1000  # Files before the first folder above which a folder is taken for a data set, not for runs.


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """A run of any kind on disk: its plan and the reports of ranks and launcher."""

    folder: RunFolder
    plan: LaunchPlan
    record: Any  # The record of this kind of runs, if any.
    statuses: list[RankStatus]  # Last statuses by rank; empty for training runs with a record.
    failure: Failure | None = None  # Report of a launcher that ended the run.
    interrupted: Interrupted | None = None  # Report of a stop on request.
    seen: Failure | None = None  # Cause by the log of its job, if no launcher of dlbench watched it.
    progress: str = ""  # Last report of rank 0 in the job's log, as no status is written between stages.
    accounting: RunAccounting | None = None  # Accounting by Slurm, if it is kept.

    counted: ClassVar[str] = "step"  # Noun of the counter of statuses.
    keeps_statuses: ClassVar[bool] = True  # Whether statuses are kept if there is a record.

    @property
    def recorded(self) -> Literal["valid", "invalid"] | None:
        return None if self.record is None else self.record.state

    @property
    def objection(self) -> str:
        """Returns why the record gives no figure; empty if it does."""
        raise NotImplementedError

    @property
    def state(self) -> RunState:
        """Returns the state: failed (with a cause), interrupted (on request), incomplete (killed or running), or the
        record's.
        """
        if self.recorded is not None:
            return self.recorded
        if self.interrupted is not None:
            return "interrupted"
        return "failed" if self._is_failed else "incomplete"

    @property
    def _is_failed(self) -> bool:
        has_cause = self.failure is not None or self.seen is not None
        return has_cause or any(status.stage == "failed" for status in self.statuses)

    @property
    def detail(self) -> str:
        """Returns what is known of a run without a valid record, in one line."""
        if self.recorded is not None:
            return self.objection
        if self.interrupted is not None:
            return self.interrupted.detail
        if self._is_failed:
            return failure_line(self.statuses, self.failure or self.seen, self.counted)
        log = f"; its log reports {self.progress}" if self.progress else ""
        if not self.statuses:
            return f"not started: no rank wrote a status{log}"
        last = max(self.statuses, key=attrgetter("updated"))
        return (
            f"{len(self.statuses)} of {self.plan.layout.ranks} ranks started; last seen {last.updated}: "
            f"rank {last.rank} on {last.host}, {last.stage}, {self.counted} {last.step}{log}"
        )


@dataclass(frozen=True, kw_only=True)
class Run(LaunchedRun):
    """A training run on disk."""

    plan: RunPlan
    record: Record | None

    keeps_statuses: ClassVar[bool] = False

    @cached_property
    def ranks_by_node(self) -> dict[int, tuple[RankResult, ...]]:
        """Returns the record's ranks by node, each node's by rank; empty without a record."""
        if self.record is None:
            return {}
        by_node: dict[int, list[RankResult]] = {}
        for rank in sorted(self.record.ranks, key=attrgetter("rank")):
            by_node.setdefault(rank.node_rank, []).append(rank)
        return {node: tuple(by_node[node]) for node in sorted(by_node)}

    @cached_property
    def watch_by_node(self) -> dict[int, NodeWatch]:
        """Returns the reports of the samplers by node; empty without a record, or samplers."""
        if self.record is None or self.record.watch is None:
            return {}
        return {watch.node_rank: watch for watch in reversed(self.record.watch.nodes)}

    @property
    def epoch_samples(self) -> int | None:
        """Returns the samples of an epoch, by the schedule or the training data; None for synthetic data."""
        if self.plan.workload.train.schedule.epoch_samples is not None:
            return self.plan.workload.train.schedule.epoch_samples
        if self.record is not None and self.record.quality is not None:
            return self.record.quality.train_samples
        if self.record is None or self.plan.workload.data.is_synthetic:
            return None
        num_samples = self.record.data.get("num_samples")
        return num_samples if isinstance(num_samples, int) and num_samples > 0 else None

    @property
    def objection(self) -> str:
        checks = () if self.record is None else self.record.checks
        return "; ".join(f"{check.name}: {check.detail}" for check in checks if not check.passed)


@dataclass(kw_only=True)
class RunsBelow(Generic[R]):
    """All runs of one kind below a folder."""

    root: Path
    runs: list[R] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # Damaged runs, one line each; they are skipped.
    withheld: list[str] = field(default_factory=list)  # Skipped: without read permission, or of an earlier dlbench.

    def add(self, runs: Iterable[R], other: RunsBelow[R]) -> None:
        """Adds runs of another folder and its problems; runs stay in the order of their plans."""
        self.runs.extend(runs)
        self.runs.sort(key=attrgetter("plan.created", "plan.series.id", "plan.series.position"))
        self.problems += other.problems
        self.withheld += other.withheld


Scan = RunsBelow[Run]


def scan(root: Path, *more_roots: Path) -> Scan:
    """Reads every training run below some folders; see `run_folders`. Raises UserError: there is no such folder."""
    folders = (folder for folder in run_folders(root, *more_roots) if text_in(folder.plan, "format") != COMM_FORMAT)
    return read_each(root, folders, _read)


def read_each(root: Path, folders: Iterable[RunFolder], read: Callable[[RunFolder], R]) -> RunsBelow[R]:
    """Reads the runs of some folders, in the order of planning, with a line for each damaged or withheld one."""
    below: RunsBelow[R] = RunsBelow(root=root)
    runs: list[R] = []
    for folder in folders:
        try:
            runs.append(read(folder))
        except WithheldError as error:
            below.withheld.append(str(error))
        except (IncompleteDataError, UserError) as error:
            below.problems.append(str(error))
    below.add(runs, RunsBelow(root=root))
    return below


def run_folders(*roots: Path) -> list[RunFolder]:
    """Returns the folders that may be runs, each once. A folder without a plan is replaced by the runs in it, up to
    `MAX_LEVELS` deep; without runs it is listed itself, so that its reader reports what is missing.
    """
    paths_of_runs: list[Path] = []
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: no such folder of runs; `dlbench run ... --out {root}` creates one")
        listed = set(map(_identity, paths_of_runs))
        paths = [root] if RunFolder(root).plan.exists() else _runs_in(root, MAX_LEVELS, {_identity(root)})[0]
        paths_of_runs += [path for path in paths if not listed or _identity(path) not in listed]
    return [RunFolder(path) for path in paths_of_runs]


def _runs_in(folder: Path, levels: int, visited: set[tuple[int, int]]) -> tuple[list[Path], bool]:
    """Returns the folders below one that may be runs, and whether any has a plan. `visited`: those searched already."""
    candidates: list[Path] = []
    has_runs = False
    for path in _folders_in(folder, is_root=levels == MAX_LEVELS):
        inner: list[Path] = []
        if os.path.lexists(RunFolder(path).plan):
            has_runs = True
        elif levels:
            identity = _identity(path)
            if identity in visited:
                continue
            visited.add(identity)
            with suppress(OSError):  # Its reader will report that it cannot be read.
                below, is_folder_of_runs = _runs_in(path, levels - 1, visited)
                inner = below if is_folder_of_runs else []
                has_runs = has_runs or is_folder_of_runs
        candidates += inner or [path]
    return candidates, has_runs


def _folders_in(folder: Path, *, is_root: bool) -> list[Path]:
    """Returns the folders in a folder by name, links last, without hidden ones; none if it begins with many files."""
    subfolders: list[tuple[bool, str]] = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MANY_FILES and not subfolders and not is_root:
                return []
            if not entry.name.startswith(".") and entry.is_dir():
                subfolders.append((entry.is_symlink(), entry.name))
    return [folder / name for _, name in sorted(subfolders)]


def _identity(path: Path) -> tuple[int, int]:
    """Returns device and inode, equal for two names of one folder; a unique value if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return (-1, hash(path))
    return status.st_dev, status.st_ino


def text_in(path: Path, key: str) -> str:
    """Returns the text of a key in a JSON file; empty if there is none."""
    try:
        content = read_json(path, MAX_JSON)
    except (OSError, ValueError):
        return ""
    text = content.get(key) if isinstance(content, dict) else None
    return text if isinstance(text, str) else ""


def read_run(path: Path) -> Run:
    """Reads the folder of a training run."""
    folder = RunFolder(path)
    if text_in(folder.plan, "format") == COMM_FORMAT:
        raise UserError(f"{path}: is a run of the collective benchmark, not of training: see `dlbench comm report`")
    return _read(folder)


def _read(folder: RunFolder) -> Run:
    plan = load_plan(folder, RunPlan)
    record = load_of_run(folder.record, Record, plan)
    if record is not None and record.state == "valid" and len(record.ranks) != plan.layout.ranks:
        raise IncompleteDataError(
            f"{folder.record}: damaged: has {len(record.ranks)} ranks, the plan has {plan.layout.ranks}"
        )
    if record is not None:
        _share_alike(record.ranks)
        _share_alike([rank.gpu for rank in record.ranks if rank.gpu is not None])
    if record is not None and record.watch is not None:
        _share_alike(record.watch.nodes, "sources")
    return launched(Run, folder, plan, record)


def launched(kind: type[R], folder: RunFolder, plan: LaunchPlan, record: Any) -> R:
    """Returns a run of a kind with the reports of its ranks, its launcher, its job's log and Slurm."""
    statuses = read_statuses(folder, is_over=record is not None)
    failure = load_file(folder.failure, Failure, MAX_BYTES)
    accounting = load_of_run(folder.accounting, RunAccounting, plan)
    if record is not None and not kind.keeps_statuses:
        statuses = []
    run = kind(folder=folder, plan=plan, record=record, statuses=statuses, failure=failure, accounting=accounting)
    if record is not None:
        return run
    if failure is None:
        run = replace(run, seen=seen_in_log(folder, statuses))
    interrupted = load_file(folder.interrupted, Interrupted, MAX_BYTES)
    return replace(run, interrupted=interrupted, progress=progress_in_log(folder, plan.run_id))


def _share_alike(parts: Sequence[BaseModel], name: str = "") -> None:
    """Lets neighbours share equal sets of field names and values of `name`, which take more than half of the memory."""
    for last, part in itertools.pairwise(parts):
        if part.model_fields_set == last.model_fields_set:
            object.__setattr__(part, "__pydantic_fields_set__", last.model_fields_set)
        if name and getattr(part, name) == getattr(last, name):
            object.__setattr__(part, name, getattr(last, name))


def load_of_run(path: Path, model: type[ModelT], plan: LaunchPlan) -> ModelT | None:
    """Reads a file of a run; None if there is none. Raises IncompleteDataError: it is damaged, or another run's."""
    content = load_file(path, model)
    run_id = getattr(content, "run_id", plan.run_id)
    if run_id != plan.run_id:
        raise IncompleteDataError(f"{path}: belongs to run {run_id}, not to {plan.run_id}")
    return content


def load_plan(folder: RunFolder, model: type[ModelT]) -> ModelT:
    """Reads a folder's plan. Raises IncompleteDataError: there is none, or it is damaged."""
    plan = load_file(folder.plan, model)
    if plan is None:
        raise IncompleteDataError(f"{folder.path}: no plan.json; not a run, or copied in part")
    return plan


def load_file(path: Path, model: type[ModelT], limit: int = MAX_JSON) -> ModelT | None:
    """Reads a JSON file as a model; None: no file. Raises WithheldError: not allowed; IncompleteDataError: damaged."""
    try:
        return model.model_validate(read_json(path, limit))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise refused_file(path, model, error) from None
    except PermissionError as error:
        raise may_not_read(path, error) from None
    except (OSError, ValueError) as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None


def read_given(path: Path, model: type[ModelT], content_name: str, made_by: str, limit: int = MAX_JSON) -> ModelT:
    """Reads a JSON file named by a user; arguments and errors as of `given_content`; IncompleteDataError: damaged."""
    return validated(path, model, given_content(path, model, content_name, made_by, limit))


def given_content(
    path: Path, model: type[BaseModel], content_name: str, made_by: str, limit: int = MAX_JSON
) -> dict[str, object]:
    """Returns the content of a user's file. Raises UserError: no file, other format; IncompleteDataError: no JSON."""
    try:
        content = parse_json(read_named(path, limit))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}; `{made_by}` writes one") from None
    except ValueError as error:
        raise IncompleteDataError(f"{path}: damaged: {why_unreadable(error)}") from None
    expected = model.model_fields["format"].default
    if not isinstance(content, dict) or content.get("format") != expected:
        raise UserError(f"{path}: has no {content_name} (format {expected}); `{made_by}` writes one")
    return content


def validated(path: Path, model: type[ModelT], content: dict[str, object]) -> ModelT:
    """Returns the content of a file as its model. Raises IncompleteDataError: it does not match the model."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise IncompleteDataError(f"{path}: damaged: {problem_of(model, error)}") from None


def refused_file(path: Path, model: type[BaseModel], error: ValidationError) -> IncompleteDataError:
    """Returns the error of a JSON file that does not match its model: damaged, or a plan of an earlier dlbench."""
    problem = problem_of(model, error)
    is_of_engine = problem.known and problem.path[0] == "engine" and key_for_name(problem.path[-1])
    if is_of_engine or problem.path in (("system", "image"), ("sync", "inside")):
        return WithheldError(f"{path}: {EARLIER}")
    return IncompleteDataError(f"{path}: damaged: {problem}")
