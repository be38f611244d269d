"""One side of a comparison: the points of some runs, each run with one number for every metric.

And what two points must share before they are compared, key by key, so that a difference can be named and allowed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dlbench.analysis import environments
from dlbench.analysis.comparability import AFTER_INTERRUPTION, comparable_content, digest_of, system_content
from dlbench.analysis.core_load import load_doubts, loads_of
from dlbench.analysis.environments import facts, side_by_side
from dlbench.analysis.metrics import metrics_by_run
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.analysis.repeats import named as named_values
from dlbench.analysis.selection import select
from dlbench.analysis.sessions import Circumstances, circumstances_of, sessions_of, wall_s
from dlbench.analysis.side_by_side import alike, last_loss, losses_text, trains_apart
from dlbench.analysis.table import RunTable, tabulate
from dlbench.errors import IncompleteDataError, UserError, nearest
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run, Scan
from dlbench.report.formats.terminal import shorten
from dlbench.report.wording import place_text, ranks_text
from dlbench.specs.engine import engine_title
from dlbench.specs.plan import AxisValue
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict_words import QUALITY_OPEN
from dlbench.units import first_of

TITLES = {key.name: key.title for key in KEYS} | {"global_batch": "Global batch"}

MAX_NAMED = 8  # Differing keys that a refusal names; it counts the others.

# Keys of the plan (as `--set` writes them) that a registered key speaks of: allowing one allows the other.
_SPEAKS_OF: Mapping[str, tuple[str, ...]] = {
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

# What a comparison is of: runs that differ here are never put into one ratio.
_NEVER = {"workload", "name"}
# What is in the plan under other names than `--set` has.
_ROOTS = {"workload": "", "measure": "measure.", "launch": "system.launch."}


@dataclass(frozen=True, kw_only=True)
class Content:
    """What decides whether runs may be compared."""

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
    """The comparable content of a run."""
    found = comparable_content(run)
    plan: dict[str, AxisValue] = {}
    for root, value in found.items():
        if root != "registered":
            plan.update(_leaves(value, _ROOTS.get(root, f"{root}.")))
    return Content(registered=found["registered"], plan=dict(sorted(plan.items())))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, AxisValue]]:
    if not isinstance(value, dict | list | tuple):
        yield path.removesuffix("."), value
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{path}{name}.")


def parse_allowed(texts: Iterable[str], known: Iterable[Content]) -> frozenset[str]:
    """Keys that may differ, from `--allow KEY[,KEY]`."""
    keys = {key.strip() for text in texts for key in text.split(",") if key.strip()}
    contents = list(known)
    paths = {path for content in contents for path in content.plan} | {p for ps in _SPEAKS_OF.values() for p in ps}
    for key in sorted(keys):
        if key in _NEVER:
            raise UserError(f"--allow {key}: runs of different workloads are never compared")
        if key not in TITLES and not any(_is_at(path, key) for path in paths):
            raise UserError(f"--allow {key}: no such key; {nearest(key, {*TITLES, *paths} - _NEVER)}")
    return frozenset(keys)


def without(content: Content, allowed: Collection[str]) -> Content:
    """The content less the keys that may differ, and less those that speak of the same."""
    return Content(
        registered={name: value for name, value in content.registered.items() if not _allows_name(name, allowed)},
        plan={path: value for path, value in content.plan.items() if not _allows_path(path, allowed)},
    )


def digest(content: Content) -> str:
    """Equal for equal content."""
    return digest_of({"registered": dict(content.registered), "plan": dict(content.plan)})


def differences(a: Content, b: Content) -> list[KeyDifference]:
    """Keys on which both differ: registered ones first, then those of the plan of which no registered one speaks."""
    found = [
        KeyDifference(
            key=name, title=TITLES.get(name, name), a=a.registered.get(name, ""), b=b.registered.get(name, "")
        )
        for name in dict.fromkeys([*a.registered, *b.registered])
        if a.registered.get(name) != b.registered.get(name)
    ]
    registered = {one.key for one in found}
    for path in sorted({*a.plan, *b.plan}):
        values = [content.plan.get(path, "not set") for content in (a, b)]
        here, there = (value if isinstance(value, str) else json.dumps(value) for value in values)
        if here != there and not _allows_path(path, registered):
            found.append(KeyDifference(key=path, title=path, a=here, b=there))
    return found


def named(found: Iterable[KeyDifference]) -> str:
    """Differing keys in a sentence, the first of them by name."""
    return first_of([one.text for one in found], MAX_NAMED, "; ")


def _allows_path(path: str, allowed: Collection[str]) -> bool:
    return any(_is_at(path, prefix) for key in allowed for prefix in (key, *_SPEAKS_OF.get(key, ())))


def _allows_name(name: str, allowed: Collection[str]) -> bool:
    prefixes = _SPEAKS_OF.get(name, ())
    return name in allowed or any(_is_at(p, key) or _is_at(key, p) for p in prefixes for key in allowed)


def _is_at(path: str, key: str) -> bool:
    """Whether a key of the plan is this one, or one below it."""
    return path == key or path.startswith(f"{key}.")


# Points and their runs

VALUE_WIDTH = 30  # Characters of a differing value that are shown.


def point_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """Returns workload, preset, engine, precision, batch, scaling and ranks; keys in `without` are left out."""
    known = {key: value for key, value in point.content.registered.items() if key not in without}
    batch = f"batch {known['batch_per_rank']} per rank" if "batch_per_rank" in known else ""
    batch = batch or (f"batch {known['global_batch']} in all" if "global_batch" in known else "")
    words = (
        known.get("workload", ""),
        f"{known['preset']} preset" if "preset" in known else "",
        engine_title(known.get("engine", "")),
        known.get("precision", ""),
        batch,
        f"{known['scaling']} scaling" if "scaling" in known else "",
        place_text(point.ranks, point.nodes),
    )
    return ", ".join(filter(None, words))


def versus(allowed: Sequence[KeyDifference]) -> str:
    """What the sides are, where they differ on purpose, e.g. ``Horovod (B) against PyTorch DDP (A)``."""
    if not allowed:
        return ""
    first = min(allowed, key=lambda one: one.key != "engine")
    a, b = (
        engine_title(value) if first.key == "engine" else f"{first.title} {shorten(value, VALUE_WIDTH)}"
        for value in (first.a or "none", first.b or "none")
    )
    return f"{b} (B) against {a} (A)"


@dataclass(frozen=True, kw_only=True)
class SideRun:
    """One run."""

    run_id: str
    figures: Mapping[str, float]  # By name of `dlbench.analysis.metrics.METRICS`; absent where the run does not say.
    circumstances: Circumstances  # What decides its session.
    command: str  # Equal for runs that one command planned, which interleaves them; empty in a baseline file.
    pair: RunKey  # Block and repeat: the other side's run with the same one is its partner; ("", 0) in a baseline file.
    throughput: float | None = None  # Samples per second of all ranks; None in a baseline file.
    wall_s: float | None = None  # From the start of rank 0 to the end of the run, seconds; None in a baseline file.
    loss: float | None = None  # Of its last step; None where it is not finite, and in a baseline file.
    samples: int = 0  # That were trained by then.


@dataclass(frozen=True, kw_only=True)
class SidePoint:
    """Comparable runs with one rank and node count."""

    content: Content
    ranks: int
    nodes: int
    sample_unit: str
    notice: str  # What the workload must not be mistaken for.
    runs: tuple[SideRun, ...]  # In the order in which they were planned.
    environment: Mapping[str, str]  # Keys with one value in all runs, but those that name the job or the place in it.
    tags: Mapping[str, str]
    doubts: tuple[str, ...] = ()
    """Why its runs are no clean repeats of each other, or not of them alone, a sentence each without full stop."""
    apart: str = ""  # How its ranks train apart between averages (local SGD); empty: they do not.

    @property
    def place(self) -> tuple[int, int]:
        """Ranks and nodes."""
        return self.ranks, self.nodes

    @property
    def workload(self) -> str:
        return self.content.registered["workload"]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A point of A with the same point of B."""

    a: SidePoint
    b: SidePoint | None
    allowed: tuple[KeyDifference, ...] = ()  # What differs though, because it may.
    unpaired: int = 0  # Runs of a paired comparison without their partner, which are in neither side.

    @property
    def quality(self) -> str:
        """What a step's time leaves open where one side's ranks train apart, and the other's do not, or otherwise: the
        losses of both, medians over runs. Empty: both do the same training.
        """
        if self.b is None or self.a.apart == self.b.apart:
            return ""
        a, b = ([run.loss for run in side.runs if run.loss is not None] for side in (self.a, self.b))
        runs = (*self.a.runs, *self.b.runs)
        if not a or not b or len(a) + len(b) < len(runs):
            return f"{QUALITY_OPEN}: not every loss is finite and known"
        if len({run.samples for run in runs}) > 1:
            return f"{QUALITY_OPEN}: unequal samples; loss {median(b):.5g} (B) against {median(a):.5g} (A)"
        return f"{QUALITY_OPEN}: {losses_text(median(b), median(a), 'A')}"


@dataclass(frozen=True, kw_only=True)
class GateSide:
    """One side of a comparison."""

    name: str  # What a person calls it: a path.
    points: tuple[SidePoint, ...]
    left_out: tuple[str, ...]
    """Runs without figures, runs that went on after an interruption, and those from which something was taken away on
    purpose, a line each."""
    damaged: tuple[str, ...]


def at_where(points: Sequence[SidePoint], where: Mapping[str, str], name: str, option: str) -> list[SidePoint]:
    """The points with these registered properties; the name of the side and the option are for errors."""
    found = list(points)
    for key, wanted in where.items():
        if key not in TITLES:
            raise UserError(f"{option} {key}: points have no such property; {nearest(key, TITLES)}")
        known = [{**one.content.registered, "ranks": str(one.ranks), "nodes": str(one.nodes)} for one in found]
        values = [properties.get(key, "") for properties in known]
        if wanted not in values:
            there = nearest(wanted, filter(None, values))
            raise UserError(f"{option} {key}={wanted}: no point of {name} has it; {there}")
        found = [point for point, value in zip(found, values, strict=True) if value == wanted]
    return found


def sessions_at(points: Iterable[SidePoint]) -> dict[str, str]:
    """Run -> its session, over points of all sides together: what one side ran, another may have run with it."""
    return sessions_of({run.run_id: run.circumstances for point in points for run in point.runs})


def side_of_runs(scan: Scan, name: str, where: Mapping[str, str], option: str) -> GateSide:
    """The side that a folder of runs is; name and option are for errors, `where` as of `chosen`."""
    runs, left_out = chosen(scan, name, where, option)
    plain = [run for run in runs if not run.plan.series.side]
    if plain and len(plain) < len(runs) and "side" not in where:
        left_out.append(f"{len(runs) - len(plain)} runs of run --ab, which compare --paired compares")
        runs = plain
    damaged: list[str] = []
    table, more = tabulated(scan, runs)
    left_out += more
    points = points_of(table, damaged)
    refuse_no_figures(name, points, left_out, table.damaged)
    return GateSide(name=name, points=points, left_out=tuple(left_out), damaged=(*table.damaged, *damaged))


def tabulated(scan: Scan, runs: Sequence[Run]) -> tuple[RunTable, list[str]]:
    """Figures of some runs of a scan, and a line for each of these without figures that is not damaged."""
    table = tabulate(Scan(root=scan.root, runs=list(runs), problems=list(scan.problems)))
    lines = (f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without if item.state != "damaged")
    return table, list(lines)


def chosen(scan: Scan, name: str, where: Mapping[str, str], option: str) -> tuple[list[Run], list[str]]:
    """Runs with all these properties, and a line for each kind, or run, that is left out.

    For properties see `dlbench.analysis.selection`. Runs of another variant than `plain` are left out unless they were
    asked for: they ran to be subtracted. Always left out are runs that went on after an interruption: they are no
    repeats of those that ran through.
    """
    runs = select(scan.runs, name, where, option)
    resumed = [run.plan.run_id for run in runs if run.record is not None and run.record.goes_on]
    left_out = [f"{run_id}: resumed {AFTER_INTERRUPTION}" for run_id in resumed]
    through = [run for run in runs if run.record is None or not run.record.goes_on]
    if "variant" in where:
        return through, left_out
    plain = [run for run in through if run.plan.series.variant == "plain"]
    twins = len(through) - len(plain)
    return plain, left_out + [f"{twins} control runs (run --decompose, io --tiers)"] * bool(twins)


def points_of(table: RunTable, damaged: list[str]) -> tuple[SidePoint, ...]:
    """The points of runs with figures, by ranks in the order in which their kinds are first met."""
    figures = metrics_by_run(table, damaged=damaged)
    rates = table.rates
    contents = {run_id: content_of(run) for run_id, run in table.runs.items()}
    digests = {run_id: digest(content) for run_id, content in contents.items()}
    order = {kind: number for number, kind in enumerate(dict.fromkeys(digests.values()))}
    found = alike(
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
        for _, runs in sorted(found.items())
    )


def _point(runs: Sequence[Run], content: Content, members: Sequence[SideRun]) -> SidePoint:
    plan = runs[0].plan
    # What differs between the sides is compared; within one its runs would be averaged.
    found = side_by_side({run.plan.run_id: system_content(run.plan) for run in runs}).differences
    if found:
        raise UserError(
            f"runs of one side at {ranks_text(plan.layout.ranks)} are no repeats of each other "
            f"({named_values(found)}); choose those of each side with --where, e.g. --where {found[0].key}="
            f"{found[0].values[0][0]}"
        )
    tags = [run.plan.tags for run in runs]
    met = environments.compare(runs).common
    facts_by_run = {run.plan.run_id: facts(run.record) for run in runs if run.record is not None}
    doubts = [doubt.text for doubt in mixed_configurations({"": facts_by_run})]
    doubts += sorted({text for run in runs if (text := shared_nodes(run.plan))})
    doubts += [doubt.text for doubt in load_doubts(loads_of(runs))]
    return SidePoint(
        content=content,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        sample_unit=plan.workload.sample_unit,
        notice=plan.workload.notice,
        runs=tuple(members),
        environment={key: value for key, value in met.items() if not environments.names_the_job(key)},
        tags={key: value for key, value in tags[0].items() if all(other.get(key) == value for other in tags)},
        doubts=tuple(doubts),
        apart=trains_apart(plan),
    )


def refuse_no_figures(name: str, points: Sequence[SidePoint], left_out: Sequence[str], damaged: Sequence[str]) -> None:
    """A side without figures cannot be compared."""
    if points:
        return
    reasons = [*damaged, *left_out][:3] or ["there is no run"]
    raise IncompleteDataError(f"{name}: no run has figures: {'; '.join(reasons)}")
