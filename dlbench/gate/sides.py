"""A side of a comparison: its points, each run with one number per metric, and the keys that two points must share."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dlbench.analysis import environments
from dlbench.analysis.comparability import AFTER_INTERRUPTION, comparable_content, digest_of, select, system_content
from dlbench.analysis.environments import facts, load_doubts, loads_of, side_by_side
from dlbench.analysis.metrics import metrics_by_run
from dlbench.analysis.repeats import (
    Circumstances,
    circumstances_of,
    mixed_configurations,
    sessions_of,
    shared_nodes,
    wall_s,
)
from dlbench.analysis.repeats import named as named_values
from dlbench.analysis.scaling import group_by, last_loss, local_sgd_settings, losses_text
from dlbench.analysis.table import RunTable, tabulate
from dlbench.errors import IncompleteDataError, UserError, nearest
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run, Scan
from dlbench.report.formats.terminal import shorten
from dlbench.report.wording import place_text, ranks_text, runs_text
from dlbench.specs.engine import engine_title
from dlbench.specs.plan import AxisValue
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict_words import QUALITY_OPEN
from dlbench.units import counted, first_of

TITLES = {key.name: key.title for key in KEYS} | {"global_batch": "Global batch"}

MAX_NAMED = 8  # Differing keys that an error names; it counts the others.
VALUE_WIDTH = 30  # Characters of a differing value that are shown.

# Keys of the plan (as `--set` writes them) that a registered key covers: allowing one allows the other.
_COVERED: Mapping[str, tuple[str, ...]] = {
    "workload": ("name",),
    "engine": ("engine.name",),
    "engine_settings": ("engine",),
    "exchange": ("sync",),
    "precision": ("train.precision",),
    "data": ("data",),
    "batch_per_rank": ("train.batch_per_rank",),
    "global_batch": ("train.batch_per_rank",),
    "gradient_accumulation": ("train.gradient_accumulation",),
    "memory_format": ("model.memory_format",),
    "goal": ("measure.until", "quality"),
    "checkpoints": ("checkpoint",),
    "launcher": ("system.launch.launcher",),
    "system": ("system",),
    "cores_per_rank": ("layout.cores_per_rank",),
    "watching": ("watch",),
    "fault": ("fault",),
    "phases": ("measure.phases",),
}

# Runs that differ in these keys are never compared.
_NEVER = {"workload", "name"}
# Parts of the comparable content whose keys have another prefix in `--set`.
_ROOTS = {"workload": "", "measure": "measure.", "launch": "system.launch."}


@dataclass(frozen=True, kw_only=True)
class Content:
    """The settings that decide whether runs may be compared."""

    registered: Mapping[str, str]  # Registered keys by name, and `global_batch` under strong scaling.
    plan: Mapping[str, AxisValue]  # Everything else, by its key in the plan; `variant` and `side` where a run has one.


@dataclass(frozen=True, kw_only=True)
class KeyDifference:
    """A key on which two sides differ."""

    key: str  # Its name, as `--allow` takes it.
    title: str
    a: str
    b: str

    @property
    def text(self) -> str:
        return f"{self.title}: {self.a or 'none'} against {self.b or 'none'}"


def content_of(run: Run) -> Content:
    """Returns the comparable content of a run."""
    content = comparable_content(run)
    plan: dict[str, AxisValue] = {}
    for root, value in content.items():
        if root != "registered":
            plan.update(_leaves(value, _ROOTS.get(root, f"{root}.")))
    return Content(registered=content["registered"], plan=dict(sorted(plan.items())))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, AxisValue]]:
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield path.removesuffix("."), value
        return
    for name, item in value.items():
        yield from _leaves(item, f"{path}{name}.")


def parse_allowed(texts: Iterable[str], contents: Iterable[Content]) -> frozenset[str]:
    """Returns the keys that may differ, from `--allow KEY[,KEY]`; `contents`: those of all runs, for errors."""
    keys = {key.strip() for key in ",".join(texts).split(",") if key.strip()}
    paths = set[str]().union(*(content.plan for content in contents), *_COVERED.values())
    for key in sorted(keys):
        if key in _NEVER:
            raise UserError(f"--allow {key}: runs of different workloads are never compared")
        if key not in TITLES and not any(_is_at(path, key) for path in paths):
            raise UserError(f"--allow {key}: no such key; {nearest(key, {*TITLES, *paths} - _NEVER)}")
    return frozenset(keys)


def without(content: Content, allowed: Collection[str]) -> Content:
    """Returns the content without the keys that may differ, and without those that cover the same setting."""
    return Content(
        registered={name: value for name, value in content.registered.items() if not _allows_name(name, allowed)},
        plan={path: value for path, value in content.plan.items() if not _allows_path(path, allowed)},
    )


def digest(content: Content) -> str:
    """Returns a digest that is equal for equal content."""
    return digest_of({"registered": dict(content.registered), "plan": dict(content.plan)})


def differences(a: Content, b: Content) -> list[KeyDifference]:
    """Returns the keys on which both differ: registered ones, then those of the plan that no registered one covers."""
    result = [
        KeyDifference(
            key=name, title=TITLES.get(name, name), a=a.registered.get(name, ""), b=b.registered.get(name, "")
        )
        for name in dict.fromkeys([*a.registered, *b.registered])
        if a.registered.get(name) != b.registered.get(name)
    ]
    registered = {difference.key for difference in result}
    for path in sorted({*a.plan, *b.plan}):
        text_a, text_b = _value_text(a, path), _value_text(b, path)
        if text_a != text_b and not _allows_path(path, registered):
            result.append(KeyDifference(key=path, title=path, a=text_a, b=text_b))
    return result


def _value_text(content: Content, path: str) -> str:
    value = content.plan.get(path, "not set")
    return value if isinstance(value, str) else json.dumps(value)


def named(differing: Iterable[KeyDifference]) -> str:
    """Returns differing keys as part of a sentence, the first of them by name."""
    return first_of([difference.text for difference in differing], MAX_NAMED, "; ")


def _allows_path(path: str, allowed: Collection[str]) -> bool:
    return any(_is_at(path, prefix) for key in allowed for prefix in (key, *_COVERED.get(key, ())))


def _allows_name(name: str, allowed: Collection[str]) -> bool:
    covered = _COVERED.get(name, ())
    return name in allowed or any(_is_at(path, key) or _is_at(key, path) for path in covered for key in allowed)


def _is_at(path: str, key: str) -> bool:
    """Returns whether a path of the plan is this key, or one below it."""
    return path == key or path.startswith(f"{key}.")


def point_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """Returns workload, preset, engine, precision, batch, scaling and ranks; keys in `without` are left out."""
    registered = {key: value for key, value in point.content.registered.items() if key not in without}
    words = [registered.get("workload", "")]
    if "preset" in registered:
        words.append(f"{registered['preset']} preset")
    words += [engine_title(registered.get("engine", "")), registered.get("precision", "")]
    if "batch_per_rank" in registered:
        words.append(f"batch {registered['batch_per_rank']} per rank")
    elif "global_batch" in registered:
        words.append(f"batch {registered['global_batch']} in all")
    if "scaling" in registered:
        words.append(f"{registered['scaling']} scaling")
    words.append(place_text(point.ranks, point.nodes))
    return ", ".join(filter(None, words))


def versus(allowed: Sequence[KeyDifference]) -> str:
    """Returns the first allowed difference, engines before others, e.g. ``Horovod (B) against PyTorch DDP (A)``."""
    if not allowed:
        return ""
    first = next((difference for difference in allowed if difference.key == "engine"), allowed[0])
    a, b = first.a or "none", first.b or "none"
    if first.key == "engine":
        return f"{engine_title(b)} (B) against {engine_title(a)} (A)"
    return f"{first.title} {shorten(b, VALUE_WIDTH)} (B) against {first.title} {shorten(a, VALUE_WIDTH)} (A)"


@dataclass(frozen=True, kw_only=True)
class SideRun:
    """A run of one side."""

    run_id: str
    figures: Mapping[str, float]  # By name of `dlbench.analysis.metrics.METRICS`; absent if not measured.
    circumstances: Circumstances  # Time, job and boot, which decide its session.
    command: str  # Equal for runs that one command planned, which interleaves them; empty in a baseline file.
    pair: RunKey  # Block and repeat, equal for the partner on the other side; ("", 0) in a baseline file.
    throughput: float | None = None  # Samples per second of all ranks; None in a baseline file.
    wall_s: float | None = None  # From the start of rank 0 to the end of the run, seconds; None in a baseline file.
    loss: float | None = None  # Loss of the last step; None if not finite, and in a baseline file.
    samples: int = 0  # Samples that were trained up to the last step.


@dataclass(frozen=True, kw_only=True)
class SidePoint:
    """Comparable runs with one rank and node count."""

    content: Content
    ranks: int
    nodes: int
    sample_unit: str
    notice: str  # Caveat of the workload, e.g. that it is not the full benchmark.
    runs: tuple[SideRun, ...]  # In the order in which they were planned.
    environment: Mapping[str, str]  # Keys with one value in all runs, without those of the job or a rank's place.
    tags: Mapping[str, str]
    doubts: tuple[str, ...] = ()  # Why its runs are not clean repeats, a sentence each without full stop.
    apart: str = ""  # How its ranks train separately between averages (local SGD); empty: they do not.

    @property
    def place(self) -> tuple[int, int]:
        return self.ranks, self.nodes

    @property
    def workload(self) -> str:
        return self.content.registered["workload"]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A point of A with the equal point of B."""

    a: SidePoint
    b: SidePoint | None
    allowed: tuple[KeyDifference, ...] = ()  # Keys on which the points differ, all of them allowed.
    unpaired: int = 0  # Runs of a paired comparison without their partner, which are in neither side.

    @property
    def points(self) -> list[SidePoint]:
        return [self.a] if self.b is None else [self.a, self.b]

    @property
    def runs_b(self) -> tuple[SideRun, ...]:
        return () if self.b is None else self.b.runs

    @property
    def runs(self) -> tuple[SideRun, ...]:
        return (*self.a.runs, *self.runs_b)

    @property
    def quality(self) -> str:
        """The losses of both sides (medians over runs), if their ranks train differently; else empty."""
        if self.b is None or self.a.apart == self.b.apart:
            return ""
        losses_a = [run.loss for run in self.a.runs if run.loss is not None]
        losses_b = [run.loss for run in self.b.runs if run.loss is not None]
        if not losses_a or not losses_b or len(losses_a) + len(losses_b) < len(self.runs):
            return f"{QUALITY_OPEN}: not every loss is finite and known"
        loss_a, loss_b = median(losses_a), median(losses_b)
        if len({run.samples for run in self.runs}) > 1:
            return f"{QUALITY_OPEN}: unequal samples; loss {loss_b:.5g} (B) against {loss_a:.5g} (A)"
        return f"{QUALITY_OPEN}: {losses_text(loss_b, loss_a, 'A')}"


@dataclass(frozen=True, kw_only=True)
class GateSide:
    """One side of a comparison."""

    name: str  # The path that the user gave.
    points: tuple[SidePoint, ...]
    left_out: tuple[str, ...]  # A line for each run without figures, resumed run, and kind of control runs.
    damaged: tuple[str, ...]


def at_where(points: Sequence[SidePoint], where: Mapping[str, str], name: str, option: str) -> list[SidePoint]:
    """Returns the points with these registered properties; the name of the side and the option are for errors."""
    selected = list(points)
    for key, expected in where.items():
        if key not in TITLES:
            raise UserError(f"{option} {key}: points have no such property; {nearest(key, TITLES)}")
        properties_by_point = [
            {**point.content.registered, "ranks": str(point.ranks), "nodes": str(point.nodes)} for point in selected
        ]
        values = [properties.get(key, "") for properties in properties_by_point]
        if expected not in values:
            suggestion = nearest(expected, filter(None, values))
            raise UserError(f"{option} {key}={expected}: no point of {name} has it; {suggestion}")
        selected = [point for point, value in zip(selected, values, strict=True) if value == expected]
    return selected


def sessions_at(points: Iterable[SidePoint]) -> dict[str, str]:
    """Returns the session of each run, by run id; sides are taken together because a session may span several."""
    runs = itertools.chain.from_iterable(point.runs for point in points)
    return sessions_of({run.run_id: run.circumstances for run in runs})


def side_of_runs(scan: Scan, name: str, where: Mapping[str, str], option: str) -> GateSide:
    """Returns the side of a folder of runs; name and option are for errors, `where` is described at `chosen`."""
    runs, left_out = chosen(scan, name, where, option)
    plain = [run for run in runs if not run.plan.series.side]
    if plain and len(plain) < len(runs) and "side" not in where:
        left_out.append(f"{runs_text(len(runs) - len(plain))} of run --ab, which compare --paired compares")
        runs = plain
    damaged: list[str] = []
    table, without_figures = tabulated(scan, runs)
    left_out += without_figures
    points = points_of(table, damaged)
    refuse_no_figures(name, points, left_out, table.damaged)
    return GateSide(name=name, points=points, left_out=tuple(left_out), damaged=(*table.damaged, *damaged))


def tabulated(scan: Scan, runs: Sequence[Run]) -> tuple[RunTable, list[str]]:
    """Returns the figures of some runs of a scan, and a line for each run without figures that is not damaged."""
    table = tabulate(Scan(root=scan.root, runs=list(runs), problems=list(scan.problems)))
    lines = (f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without if item.state != "damaged")
    return table, list(lines)


def chosen(scan: Scan, name: str, where: Mapping[str, str], option: str) -> tuple[list[Run], list[str]]:
    """Returns the runs with these properties, and a line for each left-out run or kind: resumed and control runs."""
    left_out: list[str] = []
    uninterrupted: list[Run] = []
    for run in select(scan.runs, name, where, option):
        if run.record is not None and run.record.goes_on:
            left_out.append(f"{run.plan.run_id}: resumed {AFTER_INTERRUPTION}")
        elif run.plan.strategy == "asynchronous":
            left_out.append(f"{run.plan.run_id}: its workers were emulated in one process")
        else:
            uninterrupted.append(run)
    if "variant" in where:
        return uninterrupted, left_out
    plain = [run for run in uninterrupted if run.plan.series.variant == "plain"]
    num_controls = len(uninterrupted) - len(plain)
    if num_controls:
        left_out.append(f"{counted(num_controls, 'control run')} (run --decompose, io --tiers)")
    return plain, left_out


def points_of(table: RunTable, damaged: list[str]) -> tuple[SidePoint, ...]:
    """Returns the points of runs with figures, sorted by kind in the order of first appearance, then by ranks."""
    figures = metrics_by_run(table, damaged=damaged)
    rates = table.rates
    contents = {run_id: content_of(run) for run_id, run in table.runs.items()}
    digests = {run_id: digest(content) for run_id, content in contents.items()}
    order = {kind: number for number, kind in enumerate(dict.fromkeys(digests.values()))}
    runs_by_point = group_by(
        table.runs.values(), lambda run: (order[digests[run.plan.run_id]], run.plan.layout.ranks, run.plan.layout.nodes)
    )

    def side_run(run_id: str, run: Run) -> SideRun:
        return SideRun(
            run_id=run_id,
            figures=figures[run_id],
            circumstances=circumstances_of(run),
            command=f"{run.plan.series.id} {run.plan.created}",
            pair=table.keys[run_id],
            throughput=float(rates[run_id]),
            wall_s=wall_s(run),
            loss=last_loss(run),
            samples=0 if run.record is None else run.record.steps * run.plan.global_batch,
        )

    return tuple(
        _point(runs, contents[runs[0].plan.run_id], [side_run(run.plan.run_id, run) for run in runs])
        for _, runs in sorted(runs_by_point.items())
    )


def _point(runs: Sequence[Run], content: Content, members: Sequence[SideRun]) -> SidePoint:
    plan = runs[0].plan
    # Systems may differ between the sides; within one side the runs would be averaged.
    settings = side_by_side({run.plan.run_id: system_content(run.plan) for run in runs}).differences
    if settings:
        raise UserError(
            f"runs of one side at {ranks_text(plan.layout.ranks)} are not repeats of each other "
            f"({named_values(settings)}); choose those of each side with --where, e.g. --where {settings[0].key}="
            f"{settings[0].values[0][0]}"
        )
    common = environments.compare(runs).common
    facts_by_run = {run.plan.run_id: facts(run.record) for run in runs if run.record is not None}
    doubts = [doubt.text for doubt in mixed_configurations({"": facts_by_run})]
    doubts += sorted({shared_nodes(run.plan) for run in runs} - {""})
    doubts += [doubt.text for doubt in load_doubts(loads_of(runs))]
    common_tags = set(plan.tags.items())
    for run in runs:
        common_tags &= run.plan.tags.items()
    return SidePoint(
        content=content,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        sample_unit=plan.workload.sample_unit,
        notice=plan.workload.notice,
        runs=tuple(members),
        environment={key: value for key, value in common.items() if not environments.names_the_job(key)},
        tags={key: value for key, value in plan.tags.items() if (key, value) in common_tags},
        doubts=tuple(doubts),
        apart=local_sgd_settings(plan),
    )


def refuse_no_figures(name: str, points: Sequence[SidePoint], left_out: Sequence[str], damaged: Sequence[str]) -> None:
    """Raises an error if a side has no point, with the first reasons."""
    if points:
        return
    reasons = [*damaged, *left_out][:3] or ["there is no run"]
    raise IncompleteDataError(f"{name}: no run has figures: {'; '.join(reasons)}")
