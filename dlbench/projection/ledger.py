"""Records projections in RUNS/.projections/<UTC>-<digest>.json, and scores them by runs planned later. Changed files
are rejected; of several projections of a target from one anchor only the last before the first such run counts.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

import dlbench
from dlbench.errors import UserError, refused
from dlbench.opening import folder_below, parse_json, read_bytes, why_unreadable
from dlbench.perfmodels.predictions import Miss
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import LEAST_ROWS, QUANTILES, Projection
from dlbench.records.files import write_atomic
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.report.table import column
from dlbench.report.wording import percent
from dlbench.specs.base import Positive, Ranks, Spec
from dlbench.stats.estimates import Estimate
from dlbench.units import counted

FOLDER = ".projections"  # Scans of runs skip hidden folders.
_NAME = re.compile(r"\d{8}T\d{6}Z-(?P<digest>[0-9a-f]{12})\.json")
_UTC = "%Y-%m-%dT%H:%M:%SZ"  # The format of plans, so that texts sort by time.
_FAR = {1: "up to one doubling", 2: "two doublings", 3: "three doublings or more"}

Quantiles = Annotated[tuple[Positive, ...], Field(min_length=len(QUANTILES), max_length=len(QUANTILES))]


class RecordedTarget(Spec):
    """The projection of one rank count."""

    ranks: Ranks = Field(description="Ranks.")
    nodes: Ranks = Field(description="Nodes.")
    doublings: float = Field(description="log2(ranks / ranks of the anchor).")
    step_s: Quantiles = Field(description="Quantiles 2.5, 5, 10, 25, 50, 75, 90, 95, 97.5 % of the step, seconds.")
    throughput: Quantiles | None = Field(None, description="Quantiles of samples per second; null: batch not known.")
    by: Literal["model", "points"] = Field(description="Source: the model of the step, or the points only.")


class RecordedProjection(Spec):
    """One file of the ledger."""

    format: Literal["dlbench.projection"] = Field("dlbench.projection", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    created: str = Field(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", description="When it was recorded, UTC, ISO 8601."
    )
    dlbench_version: str = Field(description="Version of dlbench that projected.")
    title: str = Field(description="What was projected, in words.")
    system: str = Field(description="Name of the system.")
    configuration: str = Field(description="Digest of the configuration of comparable runs; empty: not of runs.")
    changes: tuple[str, ...] = Field((), description="Settings that differ from those of the runs, in words.")
    anchor_ranks: Ranks = Field(description="The largest measured rank count.")
    targets: tuple[RecordedTarget, ...] = Field(description="Projected rank counts.")
    strategies: tuple[dict[str, Any], ...] = Field((), description="From files of earlier versions; ignored.")
    refused: tuple[str, ...] = Field((), description="Refused targets, with the reason.")
    ingredients: dict[str, Any] = Field(description="`dlbench.ingredients`, as `dlbench project ingredients` takes it.")


def record(runs: Path, ingredients: Ingredients, projection: Projection, now: datetime) -> Path:
    """Writes a projection into the ledger of a folder of runs and returns its file. `now`: aware, any time zone."""
    if RunFolder(runs).plan.exists():
        raise UserError(f"--record: {runs} is a single run, which is never changed; give the folder of runs")
    if not projection.targets:
        raise UserError("--record: no rank count was projected, so no record is written")
    projection_record = recorded(ingredients, projection, now)
    return _put(
        runs,
        re.sub("[-:]", "", projection_record.created),
        projection_record.model_dump_json(indent=1).encode() + b"\n",
    )


def recorded(ingredients: Ingredients, projection: Projection, now: datetime) -> RecordedProjection:
    """Returns the record of a projection. `now`: aware, any time zone."""
    return RecordedProjection(
        created=now.astimezone(UTC).strftime(_UTC),
        dlbench_version=dlbench.__version__,
        **ingredients.model_dump(include={"title", "system", "configuration"}),
        changes=projection.changes,
        anchor_ranks=projection.anchor_ranks,
        targets=tuple(
            RecordedTarget(
                ranks=target.ranks,
                nodes=target.nodes,
                doublings=target.doublings,
                step_s=target.step.quantiles,
                throughput=target.throughput and target.throughput.quantiles,
                by="model" if target.parts else "points",
            )
            for target in projection.targets
        ),
        refused=tuple(
            f"{refusal.code}, {refusal.ranks or 'all'} ranks: {refusal.text}" for refusal in projection.refused
        ),
        ingredients=ingredients.model_dump(mode="json"),
    )


def digest_of(content: bytes) -> str:
    """Returns the digest of a content for the name of its file."""
    return hashlib.sha256(content).hexdigest()[:12]


def _put(root: Path, stamp: str, content: bytes) -> Path:
    path = root / FOLDER / f"{stamp}-{digest_of(content)}.json"
    try:
        with folder_below(root, FOLDER, create=True):
            if not path.exists():
                write_atomic(path, content, follow=False)
    except OSError as error:
        why = error.strerror or error
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            why = "is a link or not a folder"
        raise refused(error, f"{path.parent}: cannot be written: {why}", UserError) from None
    return path


def read_ledger(*roots: Path) -> tuple[tuple[RecordedProjection, ...], tuple[str, ...]]:
    """Returns the projections recorded in folders of runs, by time, each once, and a line for each invalid file."""
    files, problems = _read(roots)
    return tuple(projection for _, (projection, _) in sorted(files.items())), problems


def bring(source: Path, target: Path) -> tuple[int, tuple[str, ...]]:
    """Copies a ledger to another folder of runs. Returns the number of copied files, and a line per invalid file."""
    (files, problems), (target_files, _) = _read((source,)), _read((target,))
    new_names = [name for name in files if name not in target_files]
    for name in new_names:
        _put(target, name.partition("-")[0], files[name][1])
    return len(new_names), problems


def _read(roots: Sequence[Path]) -> tuple[dict[str, tuple[RecordedProjection, bytes]], tuple[str, ...]]:
    files: dict[str, tuple[RecordedProjection, bytes]] = {}
    problems: list[str] = []
    for folder in (root / FOLDER for root in roots):
        try:
            with folder_below(folder.parent, FOLDER) as opened:
                names = [name for name in os.listdir(opened) if not name.startswith(".")]  # noqa: PTH208
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{folder}: cannot be read: {error.strerror or error}")
            continue
        for name in names:
            try:
                files[name] = _read_one(folder / name)
            except (OSError, ValueError) as error:
                problems.append(f"{folder / name}: is ignored: {why_unreadable(error)}")
    return files, tuple(problems)


def _read_one(path: Path) -> tuple[RecordedProjection, bytes]:
    content = read_bytes(path, MAX_JSON, follow=False)
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError("it does not have the name of a record")
    if digest_of(content) != match["digest"]:
        raise ValueError("it was changed after it was recorded")
    return RecordedProjection.model_validate(parse_json(content.decode("utf-8"))), content


class MeasuredRun(NamedTuple):
    """A run that may be a target of recorded projections."""

    configuration: str
    ranks: int
    nodes: int
    created: str  # When it was planned, UTC, ISO 8601.
    step_s: float  # Its mean step.


def measured_in(ingredients: Ingredients, created: Mapping[str, str]) -> list[MeasuredRun]:
    """Returns the runs of a comparable group. `created`: time of planning by run id; others are left out."""
    measured = []
    for point in ingredients.points:
        for run in point.runs:
            if run.run_id in created:
                key = (ingredients.configuration, point.ranks, point.nodes)
                measured.append(MeasuredRun(*key, created[run.run_id], run.step_s))
    return measured


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """A projected target that was measured afterwards."""

    created: str = field(metadata=column("Recorded"))
    title: str = field(metadata=column("Projection"))
    system: str
    anchor_ranks: int = field(metadata=column("From ranks", is_brief=True))
    ranks: int = field(metadata=column("Ranks", is_brief=True))
    nodes: int = field(metadata=column("Nodes"))
    doublings: float = field(metadata=column("Doublings", text="{:g}".format))
    projected: Estimate = field(metadata=column("Projected step, 80 %", "projected_s", is_brief=True))
    measured_s: float = field(metadata=column("Measured step", unit="s", is_brief=True))
    runs: int = field(metadata=column("Runs"))
    accuracy: float = field(metadata=column("Accuracy", unit="fraction", is_brief=True))
    is_in_80: bool = field(metadata=column("Within 80 %", is_brief=True))
    is_in_95: bool = field(metadata=column("Within 95 %"))
    interval_score: float  # Score of the 80 % band, over the measured step; smaller is better.
    by: Literal["model", "points"]  # Source of the projection; errors by points are not errors of the model.


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy of recorded projections, of all or by doublings."""

    scope: str = field(metadata=column("Distance from measured points"))
    rows: int = field(metadata=column("Targets"))
    mean_accuracy: float = field(metadata=column("Mean accuracy", unit="fraction"))
    in_80: int = field(metadata=column("Within 80 %"))
    in_95: int = field(metadata=column("Within 95 %"))
    interval_score: float = field(metadata=column("Interval score", unit="fraction"))


def score(rows: Sequence[LedgerRow]) -> tuple[Score, ...]:
    """Returns the score of all rows, then by rounded doublings; none for no rows."""
    by_scope: dict[str, list[LedgerRow]] = {"in all": list(rows)} | {scope: [] for scope in _FAR.values()}
    for row in rows:
        by_scope[_FAR[min(3, max(1, round(row.doublings)))]].append(row)
    return tuple(
        Score(
            scope=scope,
            rows=len(scope_rows),
            mean_accuracy=statistics.fmean(row.accuracy for row in scope_rows),
            in_80=sum(row.is_in_80 for row in scope_rows),
            in_95=sum(row.is_in_95 for row in scope_rows),
            interval_score=statistics.fmean(row.interval_score for row in scope_rows),
        )
        for scope, scope_rows in by_scope.items()
        if scope_rows
    )


def against(
    recorded_projections: Iterable[RecordedProjection], measured: Sequence[MeasuredRun]
) -> tuple[LedgerRow, ...]:
    """Returns every recorded target that was measured later, by time. Projections of changed settings have no runs."""
    candidates: dict[tuple[str, int, int, int], list[LedgerRow]] = {}
    for recorded in recorded_projections:
        if recorded.changes or not recorded.configuration:
            continue
        for target in recorded.targets:
            steps = [
                run.step_s
                for run in measured
                if (run.configuration, run.ranks, run.nodes) == (recorded.configuration, target.ranks, target.nodes)
                and run.created > recorded.created
            ]
            if steps and target.doublings > 0:
                key = (recorded.configuration, recorded.anchor_ranks, target.ranks, target.nodes)
                candidates.setdefault(key, []).append(_row(recorded, target, steps))
    rows = [max(same, key=attrgetter("runs", "created")) for same in candidates.values()]
    return tuple(sorted(rows, key=attrgetter("created", "ranks")))


def _row(recorded: RecordedProjection, target: RecordedTarget, steps: Sequence[float]) -> LedgerRow:
    measured = statistics.geometric_mean(steps)
    lowest, _, low, _, median, _, high, _, highest = target.step_s
    # Gneiting and Raftery, JASA 102(477), 2007, equation 43, with alpha = 0.2.
    missed = (high - low) + 2 / 0.2 * (max(0.0, low - measured) + max(0.0, measured - high))
    return LedgerRow(
        **recorded.model_dump(include={"created", "title", "system", "anchor_ranks"}),
        **target.model_dump(include={"ranks", "nodes", "doublings"}),
        projected=Estimate(median, low, high, 1, "fit", "s", level=0.8),
        measured_s=measured,
        runs=len(steps),
        accuracy=1 - abs(median / measured - 1),
        is_in_80=low <= measured <= high,
        is_in_95=lowest <= measured <= highest,
        interval_score=missed / measured,
        by=target.by,
    )


def misses_of(rows: Sequence[LedgerRow], system: str) -> tuple[Miss, ...]:
    """Returns the errors of the model of the step on a system by its ledger; none while it has few rows."""
    model_rows = [row for row in rows if row.system == system and row.by == "model"]
    if len(model_rows) < LEAST_ROWS:
        return ()
    return tuple(
        Miss(error=math.log(row.measured_s / row.projected.value), doublings=row.doublings) for row in model_rows
    )


def line(rows: Sequence[LedgerRow]) -> str:
    """Returns the ledger in a sentence; empty for no rows."""
    if not rows:
        return ""
    overall = score(rows)[0]
    return (
        f"Ledger: {counted(overall.rows, 'recorded target')} measured since: mean accuracy "
        f"{percent(overall.mean_accuracy)}, {overall.in_80} within the 80 % band, {overall.in_95} within 95 %."
    )
