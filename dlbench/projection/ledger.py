"""Projections that were recorded before the larger runs existed, and how right they were.

    RUNS/.projections/<UTC>-<first 12 digits of the SHA-256 of the file>.json

A file is never overwritten, and its name says what its content was: one that was changed afterwards does not count.
Runs count for a projection where they were planned after it was recorded. Of several projections of one configuration
from one anchor to one target, the last before its first such run counts, once.
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
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

import dlbench
from dlbench.errors import UserError, refused
from dlbench.opening import folder_below, parse_json, read_bytes, why_unreadable
from dlbench.perfmodels.extrapolation import Miss
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import QUANTILES, Projection
from dlbench.records.files import write_atomic
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.report.table import column
from dlbench.report.wording import percent
from dlbench.specs.base import Positive, Ranks, Spec
from dlbench.stats.estimates import Estimate

FOLDER = ".projections"  # Scans of runs pass over hidden folders.
_NAME = re.compile(r"\d{8}T\d{6}Z-(?P<digest>[0-9a-f]{12})\.json")
_UTC = "%Y-%m-%dT%H:%M:%SZ"  # As plans say when they were made, so that texts compare as times do.
_FAR = {1: "up to one doubling", 2: "two doublings", 3: "three doublings or more"}
LEAST_ROWS = 10  # Of a system, from which on its ledger says how far the model is off there, instead of the prior.

Quantiles = Annotated[tuple[Positive, ...], Field(min_length=len(QUANTILES), max_length=len(QUANTILES))]


class RecordedTarget(Spec):
    """What was projected of one rank count."""

    ranks: Ranks = Field(description="Ranks.")
    nodes: Ranks = Field(description="Nodes.")
    doublings: float = Field(description="log2(ranks / ranks of the anchor).")
    step_s: Quantiles = Field(description="Quantiles 2.5, 5, 10, 25, 50, 75, 90, 95, 97.5 % of the step, seconds.")
    throughput: Quantiles | None = Field(None, description="The same of samples per second; null: batch not known.")
    by: Literal["model", "points"] = Field(description="Who said it: the model of the step, or the points alone.")


class RecordedProjection(Spec):
    """One file of the ledger."""

    format: Literal["dlbench.projection"] = Field("dlbench.projection", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    created: str = Field(
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", description="When it was recorded, UTC, ISO 8601."
    )
    dlbench_version: str = Field(description="Version of dlbench that projected.")
    title: str = Field(description="What was projected, in words.")
    system: str = Field(description="Name of the system.")
    configuration: str = Field(description="Digest of what comparable runs share; empty: not of runs.")
    changes: tuple[str, ...] = Field((), description="Settings that runs behind it did not have, in words.")
    anchor_ranks: Ranks = Field(description="The largest measured rank count.")
    targets: tuple[RecordedTarget, ...] = Field(description="What was projected.")
    strategies: tuple[dict[str, Any], ...] = Field((), description="Of files of earlier versions; not read.")
    refused: tuple[str, ...] = Field((), description="What was not, and why.")
    ingredients: dict[str, Any] = Field(description="`dlbench.ingredients`, as `dlbench project ingredients` takes it.")


def record(runs: Path, ingredients: Ingredients, projection: Projection, now: datetime) -> Path:
    """Writes a projection into the ledger of a folder of runs and returns its file. `now`: aware, any time zone."""
    if RunFolder(runs).plan.exists():
        raise UserError(f"--record: {runs} is a single run, whose folder never changes; give the folder of runs")
    if not projection.targets:
        raise UserError("--record: nothing was projected, so there is nothing to record")
    kept = recorded(ingredients, projection, now)
    return _put(runs, re.sub("[-:]", "", kept.created), kept.model_dump_json(indent=1).encode() + b"\n")


def recorded(ingredients: Ingredients, projection: Projection, now: datetime) -> RecordedProjection:
    """What is written of a projection. `now`: aware, any time zone."""
    return RecordedProjection(
        created=now.astimezone(UTC).strftime(_UTC),
        dlbench_version=dlbench.__version__,
        **ingredients.model_dump(include={"title", "system", "configuration"}),
        changes=projection.changes,
        anchor_ranks=projection.anchor_ranks,
        targets=tuple(
            RecordedTarget(
                ranks=one.ranks,
                nodes=one.nodes,
                doublings=one.doublings,
                step_s=one.step.quantiles,
                throughput=one.throughput and one.throughput.quantiles,
                by="model" if one.parts else "points",
            )
            for one in projection.targets
        ),
        refused=tuple(f"{one.code}, {one.ranks or 'all'} ranks: {one.text}" for one in projection.refused),
        ingredients=ingredients.model_dump(mode="json"),
    )


def digest_of(content: bytes) -> str:
    """What the name of a file says of its content."""
    return hashlib.sha256(content).hexdigest()[:12]


def _put(root: Path, stamp: str, content: bytes) -> Path:
    path = root / FOLDER / f"{stamp}-{digest_of(content)}.json"
    try:
        with folder_below(root, FOLDER, create=True):
            if not path.exists():
                write_atomic(path, content, follow=False)
    except OSError as error:
        why = "is a link or no folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror or error
        raise refused(error, f"{path.parent}: cannot be written: {why}", UserError) from None
    return path


def read_ledger(*roots: Path) -> tuple[tuple[RecordedProjection, ...], tuple[str, ...]]:
    """Returns the projections recorded in folders of runs, by time, and a line for each file that does not count. A
    projection that lies in two folders counts once.
    """
    found, problems = _read(roots)
    return tuple(projection for _, (projection, _) in sorted(found.items())), problems


def bring(source: Path, target: Path) -> tuple[int, tuple[str, ...]]:
    """Copies the ledger of a folder of runs into another folder. Returns how many files are new there, and a line for
    each that does not count and stays out.
    """
    (kept, problems), (there, _) = _read((source,)), _read((target,))
    fresh = [name for name in kept if name not in there]
    for name in fresh:
        _put(target, name.partition("-")[0], kept[name][1])
    return len(fresh), problems


def _read(roots: Sequence[Path]) -> tuple[dict[str, tuple[RecordedProjection, bytes]], tuple[str, ...]]:
    """Projections with their bytes by name of the file, which begins with their time; and what does not count."""
    found: dict[str, tuple[RecordedProjection, bytes]] = {}
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
                found[name] = _read_one(folder / name)
            except (OSError, ValueError) as error:
                problems.append(f"{folder / name}: does not count: {why_unreadable(error)}")
    return found, tuple(problems)


def _read_one(path: Path) -> tuple[RecordedProjection, bytes]:
    content = read_bytes(path, MAX_JSON, follow=False)
    if (said := _NAME.fullmatch(path.name)) is None:
        raise ValueError("no file of a ledger has such a name")
    if digest_of(content) != said["digest"]:
        raise ValueError("it was changed after it was recorded")
    return RecordedProjection.model_validate(parse_json(content.decode("utf-8"))), content


class MeasuredRun(NamedTuple):
    """A run as the ledger looks for it."""

    configuration: str
    ranks: int
    nodes: int
    created: str  # When it was planned, UTC, ISO 8601.
    step_s: float  # Its mean step.


def measured_in(ingredients: Ingredients, created: Mapping[str, str]) -> list[MeasuredRun]:
    """The runs of a comparable group. `created`: when each was planned, by run id; others are left out."""
    return [
        MeasuredRun(ingredients.configuration, point.ranks, point.nodes, created[run.run_id], run.step_s)
        for point in ingredients.points
        for run in point.runs
        if run.run_id in created
    ]


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """A projected target that was measured afterwards."""

    created: str = field(metadata=column("Recorded"))
    title: str = field(metadata=column("Of"))
    system: str
    anchor_ranks: int = field(metadata=column("From ranks", is_brief=True))
    ranks: int = field(metadata=column("Ranks", is_brief=True))
    nodes: int = field(metadata=column("Nodes"))
    doublings: float = field(metadata=column("Doublings", text=lambda value: f"{value:g}"))
    projected: Estimate = field(metadata=column("Projected step, 80 %", "projected_s", is_brief=True))
    measured_s: float = field(metadata=column("Measured step", unit="s", is_brief=True))
    runs: int = field(metadata=column("Runs"))
    accuracy: float = field(metadata=column("Accuracy", unit="fraction", is_brief=True))
    is_in_80: bool = field(metadata=column("Within 80 %", is_brief=True))
    is_in_95: bool = field(metadata=column("Within 95 %"))
    interval_score: float  # Of the 80 % band, over the measured step (1); smaller is better.
    by: Literal["model", "points"]  # Who projected it; what points alone miss is no miss of the model.


@dataclass(frozen=True, kw_only=True)
class Score:
    """How right some recorded projections were, in all or of so many doublings."""

    scope: str = field(metadata=column("Beyond what was measured"))
    rows: int = field(metadata=column("Targets"))
    mean_accuracy: float = field(metadata=column("Mean accuracy", unit="fraction"))
    in_80: int = field(metadata=column("Within 80 %"))
    in_95: int = field(metadata=column("Within 95 %"))
    interval_score: float = field(metadata=column("Interval score", unit="fraction"))


def score(rows: Sequence[LedgerRow]) -> tuple[Score, ...]:
    """In all, then by doublings, rounded; none for no rows."""
    parts = {"in all": rows}
    parts |= {_FAR[far]: [row for row in rows if min(3, max(1, round(row.doublings))) == far] for far in _FAR}
    return tuple(
        Score(
            scope=scope,
            rows=len(some),
            mean_accuracy=statistics.fmean(row.accuracy for row in some),
            in_80=sum(row.is_in_80 for row in some),
            in_95=sum(row.is_in_95 for row in some),
            interval_score=statistics.fmean(row.interval_score for row in some),
        )
        for scope, some in parts.items()
        if some
    )


def against(kept: Iterable[RecordedProjection], measured: Sequence[MeasuredRun]) -> tuple[LedgerRow, ...]:
    """Every recorded target that was measured afterwards, by time of its record.

    Projections of changed settings (`--set`, `--system`) are of no configuration that runs have, so they have no row.
    """
    found: dict[tuple[str, int, int, int], list[LedgerRow]] = {}
    for one in kept:
        for target in one.targets if one.configuration and not one.changes else ():
            steps = [
                run.step_s
                for run in measured
                if (run.configuration, run.ranks, run.nodes) == (one.configuration, target.ranks, target.nodes)
                and run.created > one.created
            ]
            if steps and target.doublings > 0:
                key = (one.configuration, one.anchor_ranks, target.ranks, target.nodes)
                found.setdefault(key, []).append(_row(one, target, steps))
    rows = [max(same, key=lambda row: (row.runs, row.created)) for same in found.values()]
    return tuple(sorted(rows, key=lambda row: (row.created, row.ranks)))


def _row(one: RecordedProjection, target: RecordedTarget, steps: Sequence[float]) -> LedgerRow:
    measured = statistics.geometric_mean(steps)
    least, _, low, _, median, _, high, _, most = target.step_s
    # Gneiting and Raftery, JASA 102(477), 2007, equation 43, with alpha = 0.2.
    missed = (high - low) + 2 / 0.2 * (max(0.0, low - measured) + max(0.0, measured - high))
    return LedgerRow(
        **one.model_dump(include={"created", "title", "system", "anchor_ranks"}),
        **target.model_dump(include={"ranks", "nodes", "doublings"}),
        projected=Estimate(median, low, high, 1, "fit", "s", level=0.8),
        measured_s=measured,
        runs=len(steps),
        accuracy=1 - abs(median / measured - 1),
        is_in_80=low <= measured <= high,
        is_in_95=least <= measured <= most,
        interval_score=missed / measured,
        by=target.by,
    )


def misses_of(rows: Sequence[LedgerRow], system: str) -> tuple[Miss, ...]:
    """What the ledger says of the error of the model of the step on a system; nothing while its rows are few."""
    own = [row for row in rows if row.system == system and row.by == "model"]
    if len(own) < LEAST_ROWS:
        return ()
    return tuple(Miss(error=math.log(row.measured_s / row.projected.value), doublings=row.doublings) for row in own)


def line(rows: Sequence[LedgerRow]) -> str:
    """The ledger in a sentence; empty for no rows."""
    if not rows:
        return ""
    found = score(rows)[0]
    return (
        f"Ledger: {found.rows} recorded target{'s' * (found.rows > 1)}, measured since: mean accuracy "
        f"{percent(found.mean_accuracy)}, {found.in_80} within the 80 % band, {found.in_95} within 95 %."
    )
