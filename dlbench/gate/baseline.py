"""Figures that runs must reach: the figures of reference runs (`baseline.json`), and a throughput (`--at-least`).

Keys of the file have a fixed order, so that diffs in git are readable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

import dlbench
from dlbench.analysis.repeats import Circumstances
from dlbench.errors import MachineError, RunError, UserError
from dlbench.gate.sides import Content, GateSide, SidePoint, SideRun, at_where, point_label
from dlbench.records.files import json_text, write_result
from dlbench.records.record import Environment
from dlbench.records.scan import given_content, validated
from dlbench.report.wording import runs_text
from dlbench.specs.base import Ranks, RunName, Spec
from dlbench.specs.plan import AxisValue
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import first_of

_EXAMPLE = (
    "write it as '2500 images/s' (no ',', 'k' or 'e3' in the number), or for some runs only as "
    "'workload=resnet50,ranks=4: 2500 images/s'"
)
VERSION = 1
MAX_BYTES = 1 << 26  # Largest file that is read: a point has some kB, and no baseline has ten thousand points.
MAX_FEW = 6  # Points with too few runs that an error names.
Amount = Annotated[float, Field(strict=True, ge=1e-12, le=1e15)]
"""A figure in seconds, bytes, samples per second or joules; no measured one is smaller or larger."""

_SHARED_FIELDS = ("ranks", "nodes", "sample_unit", "notice", "tags", "environment", "doubts", "apart")
"""Fields with the same name in a `BaselinePoint` and a `SidePoint`."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The minimum throughput of one `--at-least`."""

    text: str
    rate: float  # Samples per second.
    sample_unit: str
    is_per_rank: bool
    where: Mapping[str, str] = field(default_factory=dict)  # Registered properties of its points; empty: all.

    @property
    def unit(self) -> str:
        return f"{self.sample_unit}/s/rank" if self.is_per_rank else f"{self.sample_unit}/s"


def parse_floor(text: str) -> Floor:
    """Reads ``[KEY=VALUE[,KEY=VALUE]:] NUMBER UNIT/s[/rank]``."""
    where, _, rate = text.rpartition(":")
    # Digits directly followed by a single letter are 2.5k or 1e3; read as 2.5 or 1 they would always pass.
    number = r"([0-9]{1,15}(?:\.[0-9]{1,12})?)(?:\s+|(?=[^\W\d_]{2}))"
    match = re.fullmatch(rf"\s*{number}([^\W\d_][^/,]*)/s(/rank)?\s*", rate)
    pairs = [part.partition("=") for part in where.split(",") if part.strip()]
    properties = {key.strip(): value.strip() for key, _, value in pairs}
    if match is None or not float(match[1]) or not all(properties.values()) or len(properties) != len(pairs):
        raise UserError(f"--at-least {text}: is not a throughput; {_EXAMPLE}")
    return Floor(
        text=text, rate=float(match[1]), sample_unit=match[2].strip(), is_per_rank=bool(match[3]), where=properties
    )


def floors_at(points: Sequence[SidePoint], floors: Sequence[Floor], name: str) -> dict[int, float]:
    """Returns the floor of each point that has one, the highest, by the point's `id`, in samples/s of all ranks."""
    rates: dict[int, float] = {}
    for floor in floors:
        selected = at_where(points, floor.where, name, "--at-least")
        points_of_unit = [point for point in selected if point.sample_unit == floor.sample_unit]
        if not points_of_unit:
            measured = replace(floor, sample_unit=selected[0].sample_unit)
            raise UserError(
                f"--at-least {floor.text}: {selected[0].workload} counts {measured.sample_unit}, not "
                f"{floor.sample_unit}: write NUMBER {measured.unit}"
            )
        for point in points_of_unit:
            rate = floor.rate * point.ranks if floor.is_per_rank else floor.rate
            rates[id(point)] = max(rate, rates.get(id(point), 0.0))
    return rates


def baseline_of(side: GateSide, *, allow_few: bool) -> Baseline:
    """Returns the content of the file for a side; `allow_few` permits points with fewer than `MIN_RUNS` runs."""
    few = [point for point in side.points if len(point.runs) < MIN_RUNS]
    if few and not allow_few:
        names = first_of([f"{point_label(point)} ({runs_text(len(point.runs))})" for point in few], MAX_FEW, "; ")
        raise UserError(
            f"{side.name}: a baseline needs {MIN_RUNS} runs per point; too few: {names}; "
            f"choose others with --where, run with --repeats {MIN_RUNS} or more (10 find smaller slowdowns), or give "
            "--allow-few: comparisons with these points then have no verdict"
        )
    points = [_point(point) for point in side.points]
    points.sort(key=lambda point: (sorted(point.registered.items()), point.ranks, point.nodes, point.runs[0].run_id))
    return Baseline(dlbench_version=dlbench.__version__, points=tuple(points))


def _point(point: SidePoint) -> BaselinePoint:
    runs = sorted(point.runs, key=attrgetter("run_id"))
    return BaselinePoint(
        **{name: getattr(point, name) for name in _SHARED_FIELDS},
        **vars(point.content),
        runs=tuple(
            BaselineRun(run_id=run.run_id, **run.circumstances._asdict(), figures=dict(run.figures)) for run in runs
        ),
    )


def side_of_baseline(baseline: Baseline, name: str, where: Mapping[str, str], option: str) -> GateSide:
    """Returns the points of a file with these registered properties as a side; name and option are for errors."""
    points = at_where(list(map(_side_point, baseline.points)), where, name, option)
    return GateSide(name=name, points=tuple(points), left_out=(), damaged=())


def _side_point(point: BaselinePoint) -> SidePoint:
    return SidePoint(
        **{name: getattr(point, name) for name in _SHARED_FIELDS},
        content=Content(registered=point.registered, plan=point.plan),
        runs=tuple(
            SideRun(
                run_id=run.run_id,
                figures=run.figures,
                circumstances=Circumstances(finished=run.finished, job=run.job, boot=run.boot),
                command="",
                pair=("", number),
            )
            for number, run in enumerate(point.runs)
        ),
    )


class BaselineRun(Spec):
    """A run of a baseline."""

    run_id: RunName = Field(description="Its name.")
    finished: str = Field(description="When it ended, UTC, ISO 8601.")
    job: str = Field(description="Cluster and id of its Slurm job; empty outside of one.")
    boot: str = Field(description="Host of rank 0 and the id of its boot; empty where the run does not know.")
    figures: dict[str, Amount] = Field(
        description="Its metrics by name (dlbench.analysis.metrics), with the unit in the name; absent: not known."
    )


class BaselinePoint(Spec):
    """Comparable runs with one rank and node count."""

    ranks: Ranks = Field(description="Ranks of each run.")
    nodes: Ranks = Field(description="Nodes of each run.")
    registered: dict[str, str] = Field(description="Registered keys that a candidate must share, by name.")
    plan: dict[str, AxisValue] = Field(description="Keys of the plan that a candidate must share.")
    sample_unit: str = Field(description="What a sample is, in the plural.")
    notice: str = Field(description="What the workload must not be mistaken for.")
    tags: dict[str, str] = Field(description="Tags that all runs share, e.g. commit.")
    environment: Environment = Field(description="What all runs recorded alike of their environment.")
    doubts: tuple[str, ...] = Field((), description="Why its runs are no clean repeats of each other, in sentences.")
    apart: str = Field("", description="How ranks train apart between averages (local SGD); empty: they do not.")
    runs: tuple[BaselineRun, ...] = Field(min_length=1, description="The runs, in the order of their names.")

    @field_validator("registered")
    @classmethod
    def _names_the_work(cls, registered: dict[str, str]) -> dict[str, str]:
        missing = sorted({"workload", "preset", "engine", "scaling"} - registered.keys())
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}")
        return registered

    @field_validator("runs")
    @classmethod
    def _each_once(cls, runs: tuple[BaselineRun, ...]) -> tuple[BaselineRun, ...]:
        if len({run.run_id for run in runs}) < len(runs):
            raise ValueError("holds a run twice; a copy is no repeat")
        return runs


class Baseline(Spec):
    """The content of a baseline file."""

    format: Literal["dlbench.baseline"] = Field("dlbench.baseline", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    dlbench_version: str = Field(description="Version of dlbench that made the file.")
    points: tuple[BaselinePoint, ...] = Field(min_length=1, description="All points.")


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes the file atomically."""
    try:
        write_result(path, json_text(baseline.model_dump(mode="json")))
    except MachineError as error:
        raise type(error)(f"-o {error}") from None
    except RunError as error:
        raise UserError(f"-o {error}") from None


def read_baseline(path: Path) -> Baseline:
    """Reads and validates the file."""
    content = given_content(path, Baseline, "baseline", "dlbench baseline", MAX_BYTES)
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UserError(
            f"{path}: version {version} of the format; this dlbench reads version {VERSION}: make the baseline "
            "again with this version, or use the newer dlbench"
        )
    return validated(path, Baseline, content)
