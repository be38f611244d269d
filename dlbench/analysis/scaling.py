"""Scaling points of comparable runs, and comparisons of runs that differ in one setting: groups, sides, control runs.

Throughput, speed-up and efficiency have an interval over runs each. With p ranks, p0 the smallest rank count of the
group and Thr the throughput in samples per second:

* speed-up S(p) = Thr(p) / Thr(p0); at a fixed global batch (strong scaling) this is T(p0) / T(p);
* efficiency E(p) = S(p) / (p / p0), for weak and strong scaling alike;
* serial fraction, strong scaling only: e = (1/S - 1/k) / (1 - 1/k), k = p / p0 (Karp and Flatt,
  CACM 33(5), 1990), relative to the baseline if that has more than one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Literal, NoReturn, TypeVar

from dlbench.analysis.measures import RunMeasures, measured_or_why
from dlbench.analysis.repeats import allocations_of
from dlbench.analysis.table import FigureRow, RunTable
from dlbench.records.scan import Run
from dlbench.specs.plan import RunPlan, Variant
from dlbench.stats.estimates import MIN_RUNS, Estimate, by_definition, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey, in_all, pairing

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Point:
    """All comparable runs with one rank and node count."""

    ranks: int
    nodes: int
    batch_per_rank: int  # Samples per step.
    is_baseline: bool
    throughput: Estimate  # Samples per second of all ranks; geometric mean over runs, so that ratios are speed-ups.
    throughput_per_rank: Estimate  # Samples per second and rank.
    step: Estimate  # Seconds; geometric mean over runs of each run's median step.
    step_p95: Estimate  # Seconds; geometric mean over runs of each run's 95th percentile.
    speedup: Estimate  # Against the baseline (1).
    ideal_speedup: float  # ranks / ranks of the baseline.
    efficiency: Estimate  # Share of the ideal (1).
    serial_fraction: Estimate | None  # Karp-Flatt (1); None under weak scaling and at the baseline.
    paired_with_baseline: bool  # Whether its runs and the baseline's are the same repeats, interleaved.
    mean_step: Estimate  # Seconds; geometric mean over runs of measured time / steps; efficiency is a ratio of these.
    run_ids: tuple[str, ...]
    leaf_switches: tuple[int, ...] = ()  # Numbers of leaf switches that its runs used, each once; empty: not recorded.

    @property
    def switches_text(self) -> str:
        return " or ".join(map(str, self.leaf_switches))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that may be compared with each other."""

    id: str
    scaling: Literal["weak", "strong"]
    points: tuple[Point, ...]  # By rank count, then node count; the first is the baseline.
    sample: Run  # A run with the common settings.
    runs: tuple[Run, ...]
    leaf_points: tuple[Point, ...] = ()  # Points whose runs differ in the number of leaf switches, one for each number.

    @property
    def baseline(self) -> Point:
        return self.points[0]

    @property
    def is_sufficient(self) -> bool:
        return min(len(point.run_ids) for point in self.points) >= MIN_RUNS


def groups(table: RunTable) -> list[Group]:
    """Returns all groups of comparable runs, sorted by workload, preset, scaling, engine and id."""
    by_group: dict[str, list[FigureRow]] = {}
    for row in table.figures.values():
        by_group.setdefault(row["group"], []).append(row)

    def order(group: Group) -> tuple[str, ...]:
        plan = group.sample.plan
        workload = plan.workload
        return workload.name, workload.preset, group.scaling, plan.engine.name, plan.created, group.id

    return sorted((_group(name, rows, table) for name, rows in by_group.items()), key=order)


def _group(name: str, rows: Sequence[FigureRow], table: RunTable) -> Group:
    by_place: dict[tuple[int, int], list[FigureRow]] = {}
    for row in rows:
        by_place.setdefault((row["ranks"], row["nodes"]), []).append(row)
    cells = [by_place[place] for place in sorted(by_place)]
    sample = table.runs[rows[0]["run_id"]]
    leaf_points = []
    for cell in cells:
        by_number: dict[int, list[FigureRow]] = {}
        for row in cell:
            by_number.setdefault(num_leaf_switches(table.runs[row["run_id"]]), []).append(row)
        by_number.pop(0, None)  # Not recorded.
        if len(by_number) > 1:
            leaf_points += [_point(by_number[number], cells[0], table) for number in sorted(by_number)]
    return Group(
        id=name,
        scaling=sample.plan.series.scaling,
        points=tuple(_point(cell, cells[0], table) for cell in cells),
        sample=sample,
        runs=tuple(table.runs[row["run_id"]] for row in rows),
        leaf_points=tuple(leaf_points),
    )


def _by_run(rows: Sequence[FigureRow], column: str, table: RunTable) -> dict[RunKey, float]:
    return {table.keys[row["run_id"]]: row[column] for row in rows}


def _point(rows: Sequence[FigureRow], baseline: Sequence[FigureRow], table: RunTable) -> Point:
    first = rows[0]
    ranks = first["ranks"]
    ideal = ranks / baseline[0]["ranks"]
    is_baseline = rows is baseline
    throughputs, reference = _by_run(rows, "throughput", table), _by_run(baseline, "throughput", table)
    if is_baseline:
        speedup = by_definition(1.0, len(rows))
    else:
        speedup = ratio_estimate(throughputs, reference)
    plan = table.runs[first["run_id"]].plan
    serial_fraction = None
    if plan.series.scaling == "strong" and ideal > 1:
        # Below 0 if the speed-up exceeds the ideal.
        serial_fraction = speedup.mapped(lambda value: (1 / value - 1 / ideal) / (1 - 1 / ideal), "fraction")
    unit = f"{plan.workload.sample_unit}/s"
    throughput = geometric_mean_estimate(throughputs, unit)
    mean_steps = {table.keys[row["run_id"]]: row["measured_s"] / row["steps"] for row in rows}
    return Point(
        ranks=ranks,
        nodes=first["nodes"],
        batch_per_rank=first["batch"],
        is_baseline=is_baseline,
        throughput=throughput,
        throughput_per_rank=throughput.scaled(1 / ranks, f"{unit}/rank"),
        step=geometric_mean_estimate(_by_run(rows, "step_median_s", table), "s"),
        step_p95=geometric_mean_estimate(_by_run(rows, "step_p95_s", table), "s"),
        speedup=speedup,
        ideal_speedup=ideal,
        efficiency=speedup.scaled(1 / ideal, "fraction"),
        serial_fraction=serial_fraction,
        paired_with_baseline=not is_baseline and pairing(throughputs, reference).is_paired,
        mean_step=geometric_mean_estimate(mean_steps, "s"),
        run_ids=tuple(row["run_id"] for row in rows),
        leaf_switches=tuple(sorted({num_leaf_switches(table.runs[row["run_id"]]) for row in rows} - {0})),
    )


def num_leaf_switches(run: Run) -> int:
    """Returns the number of leaf switches that join the nodes of a run; 0 if they were not recorded of all ranks."""
    if run.record is None:
        return 0
    switches = {rank.switch for rank in run.record.ranks}
    return 0 if "" in switches else len(switches)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Groups items by their `key`, in the order of first appearance."""
    items_by_key: dict[K, list[T]] = {}
    for item in items:
        items_by_key.setdefault(key(item), []).append(item)
    return items_by_key


def match_by(
    sides: Sequence[Iterable[T]], key: Callable[[T], Hashable], refuse: Callable[[int, T, T], NoReturn]
) -> list[tuple[T | None, ...]]:
    """Returns rows of items with equal `key`, one of each side or None; `refuse` raises if a side has two."""
    rows: dict[Hashable, list[T | None]] = {}
    for number, side in enumerate(sides):
        for item in side:
            row = rows.setdefault(key(item), [None] * len(sides))
            earlier = row[number]
            if earlier is not None:
                refuse(number, earlier, item)
            row[number] = item
    return [tuple(row) for row in rows.values()]


def compared(values: Mapping[RunKey, float], base: Mapping[RunKey, float]) -> tuple[Estimate | None, bool]:
    """Returns the ratio values / base, None if a side is empty or not positive, and whether the runs are paired."""
    is_paired = bool(values) and pairing(values, base).is_paired
    if min(values.values(), default=0.0) <= 0 or min(base.values(), default=0.0) <= 0:
        return None, is_paired
    return ratio_estimate(values, base), is_paired


def pair_key(run: Run, session: str, compared_keys: Collection[str]) -> RunKey:
    """Returns block (the series with its values of other swept keys) and repeat: equal ones ran interleaved."""
    series = run.plan.series
    axes = (f"{key}={value}" for key, value in sorted(series.axes.items()) if key not in compared_keys)
    return KnownKey.of(" ".join([series.id, run.plan.created, *axes]), series.repeat, session)


def with_train(run: Run, settings: Mapping[str, object]) -> Run:
    """Returns a run with other settings of `train` in its plan, for digests without the compared settings."""
    plan = run.plan
    train = plan.workload.train.model_copy(update=settings)
    workload = plan.workload.model_copy(update={"train": train})
    return replace(run, plan=plan.model_copy(update={"workload": workload}))


def local_sgd_settings(plan: RunPlan) -> str:
    """Returns the settings of local SGD and emulated workers, which train separately; empty for other strategies."""
    if plan.strategy == "asynchronous":
        return plan.engine.emulated.words
    if plan.strategy != "local-sgd":
        return ""
    names = ("average_every", "average_from", "average_momentum", "exchange", "group_size")
    return ", ".join(f"{name} {getattr(plan.sync, name)}" for name in names)


def losses_text(loss: float, reference_loss: float, reference: str) -> str:
    """Returns a text on two losses after equal samples; `reference`: the name of the reference."""
    text = f"loss after equal samples {loss:.5g} against {reference_loss:.5g} with {reference}"
    if reference_loss:
        text += f", relative difference {abs(loss / reference_loss - 1):.1g}"
    return text


def batch_text(plan: RunPlan) -> str:
    """Returns the batch per rank, or the global batch under strong scaling, in words."""
    unit = plan.workload.sample_unit
    if plan.series.scaling == "strong":
        return f"{plan.global_batch} {unit} global batch"
    return f"{plan.workload.train.batch_per_rank} {unit} per rank"


def last_loss(run: Run) -> float | None:
    """Returns the loss of the last step, mean over ranks; None if it is not finite on one."""
    if run.record is None:
        return None
    finite = [rank.last_loss for rank in run.record.ranks if rank.last_loss is not None]
    if not finite or len(finite) < len(run.record.ranks):
        return None
    return fmean(finite)


def at_last_place(rows: Sequence[T]) -> list[T]:
    """Returns the rows of the largest rank and node count, which headlines use; rows have `ranks` and `nodes`."""
    place = attrgetter("ranks", "nodes")
    return [row for row in rows if place(row) == place(rows[-1])]


def best_at_last(rows: Sequence[T], ratio: Callable[[T], Estimate | None]) -> tuple[Estimate, T] | None:
    """Returns the largest ratio at the largest rank count, with its row; None if there is no ratio."""
    best: tuple[Estimate, T] | None = None
    for row in at_last_place(rows):
        estimate = ratio(row)
        if estimate is not None and (best is None or estimate.value > best[0].value):
            best = estimate, row
    return best


@dataclass(frozen=True)
class Side:
    """A group at one rank and node count."""

    group: Group
    point: Point


@dataclass(frozen=True)
class ComparedFigure:
    """A figure with one value per run of a side."""

    values: Callable[[Side], Mapping[RunKey, float]]
    is_time: bool = False  # Whether less is better: the ratio is then the reference over the side.


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A side with the reference of its rank count."""

    side: Side
    reference: Side | None  # None if it did not run.
    figures: Mapping[str, ComparedFigure]

    @property
    def is_reference(self) -> bool:
        return self.side is self.reference

    def ratio(self, figure: str) -> tuple[Estimate | None, bool]:
        """Returns the ratio of a figure (above 1 is better, None for the reference), and whether it is of pairs."""
        if self.reference is None or self.is_reference:
            return None, False
        compared_figure = self.figures[figure]
        values, reference_values = compared_figure.values(self.side), compared_figure.values(self.reference)
        if compared_figure.is_time:
            return compared(reference_values, values)
        return compared(values, reference_values)


@dataclass(frozen=True, kw_only=True)
class ComparedSet:
    """Groups that differ only in the compared settings."""

    id: str
    groups: tuple[Group, ...]
    places: Mapping[tuple[int, int], tuple[Side, ...]]  # By ranks and nodes, ascending; in each some sides differ.
    references: Mapping[tuple[int, int], Side]  # The reference of each rank and node count, if it ran.
    figures: Mapping[str, ComparedFigure]

    @property
    def rows(self) -> list[ComparedRow]:
        rows: list[ComparedRow] = []
        for place, sides in self.places.items():
            reference = self.references.get(place)
            rows += [ComparedRow(side=side, reference=reference, figures=self.figures) for side in sides]
        return rows


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The definition of a comparison of groups."""

    common_digest: Callable[[Run], str]  # Digest of a run without the compared settings.
    kind: Callable[[Group], Hashable]  # The compared settings of a group.
    reference: Callable[[Group], bool] = lambda group: True  # The first such group of a rank count is the reference.
    order: Callable[[Group], tuple[float | str, ...]] = lambda group: ()  # Sort key of the groups of a set.
    figures: Mapping[str, ComparedFigure] = field(default_factory=dict)  # Compared figures by name.

    def of(self, groups: Iterable[Group]) -> list[ComparedSet]:
        """Returns all sets of groups that differ in `kind` at some rank and node count, in the order of the groups."""
        sets = []
        for digest, members in group_by(groups, lambda group: self.common_digest(group.sample)).items():
            ordered = sorted(members, key=self.order)
            by_place: dict[tuple[int, int], list[Side]] = {}
            for group in ordered:
                for point in group.points:
                    by_place.setdefault((point.ranks, point.nodes), []).append(Side(group, point))
            places: dict[tuple[int, int], tuple[Side, ...]] = {}
            references: dict[tuple[int, int], Side] = {}
            for place, sides in sorted(by_place.items(), key=itemgetter(0)):
                if len({self.kind(side.group) for side in sides}) < 2:
                    continue
                places[place] = tuple(sides)
                reference = next((side for side in sides if self.reference(side.group)), None)
                if reference is not None:
                    references[place] = reference
            if not places:
                continue
            sets.append(
                ComparedSet(
                    id=digest, groups=tuple(ordered), places=places, references=references, figures=self.figures
                )
            )
        return sets


@dataclass(frozen=True, kw_only=True)
class Twins:
    """The plain runs of a series at one rank and node count, and their control runs, which lack some part of a step."""

    plan: RunPlan
    planned: frozenset[Variant]
    runs: Mapping[Variant, Mapping[RunKey, tuple[Run, RunMeasures]]]  # By variant (every requested one) and repeat.
    missing: tuple[str, ...]  # Reasons of runs without figures, in sentences.

    def of(self, variant: Variant, figure: Callable[[RunMeasures], T]) -> dict[RunKey, T]:
        return {key: figure(measures) for key, (_, measures) in self.runs[variant].items()}

    def repeats(self, variants: Collection[Variant]) -> list[RunKey]:
        """Returns the repeats with figures of all these variants, which may be subtracted."""
        return in_all(*(self.runs[variant] for variant in variants)) if variants else []


def twins(
    runs: Iterable[Run], variants: Collection[Variant], is_wanted: Callable[[Collection[Variant]], bool]
) -> list[Twins]:
    """Returns `Twins` of each series, rank and node count with wanted variants, in this order, without copies."""
    runs = list(runs)
    sessions = allocations_of(runs)
    points = group_by(
        runs, lambda run: (run.plan.created, run.plan.series.id, run.plan.layout.ranks, run.plan.layout.nodes)
    )
    result = []
    for _, members in sorted(points.items()):
        planned = frozenset(run.plan.series.variant for run in members)
        if not is_wanted(planned):
            continue
        sides: dict[Variant, dict[RunKey, tuple[Run, RunMeasures]]] = {variant: {} for variant in variants}
        missing = []
        for run in members:
            side = sides.get(run.plan.series.variant)
            key = KnownKey.of("", run.plan.series.repeat, sessions[run.plan.run_id])
            if side is None or key in side:
                continue
            measures, reason = measured_or_why(run)
            if measures is None:
                missing.append(reason)
            else:
                side[key] = run, measures
        plan = min(members, key=lambda run: run.plan.series.variant != "plain").plan
        result.append(Twins(plan=plan, planned=planned, runs=sides, missing=tuple(missing)))
    return result
