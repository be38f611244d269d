"""The same runs but for one thing, side by side: the steps that all comparisons share.

Compared are groups of a report (`Comparison`), sides of a gate (`matched`), and control runs with the plain ones of
their series (`twins`); what a ratio means, each comparison says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NoReturn, TypeVar

from dlbench.analysis.measures import RunMeasures, measured_or_why
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.sessions import allocations_of
from dlbench.records.scan import Run
from dlbench.specs.plan import RunPlan, Variant
from dlbench.stats.estimates import Estimate, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey, in_all, pairing

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def alike(items: Iterable[T], same: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they share, in the order in which each set first comes."""
    items_by_kind: dict[K, list[T]] = {}
    for item in items:
        items_by_kind.setdefault(same(item), []).append(item)
    return items_by_kind


def matched(
    sides: Sequence[Iterable[T]], same: Callable[[T], Hashable], refuse: Callable[[int, T, T], NoReturn]
) -> list[tuple[T | None, ...]]:
    """Items of several sides that are alike, one of each side; None where a side has none. Each side has at most one
    item of a kind: `refuse` raises on two, given the side's number. `same` is equal for items that belong together.
    """
    rows: dict[Hashable, list[T | None]] = {}
    for number, side in enumerate(sides):
        for item in side:
            row = rows.setdefault(same(item), [None] * len(sides))
            if (other := row[number]) is not None:
                refuse(number, other, item)
            row[number] = item
    return [tuple(row) for row in rows.values()]


def compared(own: Mapping[RunKey, float], base: Mapping[RunKey, float]) -> tuple[Estimate | None, bool]:
    """The ratio own / base, in pairs where the runs are, and whether they are.

    The ratio is None where a side is empty, or holds a value that is not positive.
    """
    is_known = all(side and min(side.values()) > 0 for side in (own, base))
    return (ratio_estimate(own, base) if is_known else None), bool(own) and pairing(own, base).is_paired


def pair_key(run: Run, session: str, apart: Collection[str]) -> RunKey:
    """Block and repeat of a run, without the keys that are compared: runs with equal ones ran interleaved."""
    series = run.plan.series
    axes = (f"{key}={value}" for key, value in sorted(series.axes.items()) if key not in apart)
    return KnownKey.of(" ".join([series.id, run.plan.created, *axes]), series.repeat, session)


def with_train(run: Run, settings: Mapping[str, object]) -> Run:
    """A run as if its plan had these settings of `train`: for digests without what is compared."""
    plan = run.plan
    train = plan.workload.train.model_copy(update=settings)
    workload = plan.workload.model_copy(update={"train": train})
    return replace(run, plan=plan.model_copy(update={"workload": workload}))


def trains_apart(plan: RunPlan) -> str:
    """How ranks make updates of their own between averages (local SGD), so that a step does not do what one of replicas
    does; empty where they do not.
    """
    if plan.strategy != "local-sgd":
        return ""
    names = ("average_every", "average_from", "average_momentum", "exchange", "group_size")
    return ", ".join(f"{name} {getattr(plan.sync, name)}" for name in names)


def losses_text(own: float, reference: float, of: str) -> str:
    """Losses after equal samples; `of`: what the reference is called."""
    gap = f", relative difference {abs(own / reference - 1):.1g}" if reference else ""
    return f"loss after equal samples {own:.5g} against {reference:.5g} with {of}{gap}"


def batch_text(plan: RunPlan) -> str:
    """Samples per rank, or of the global batch under strong scaling, in words."""
    unit = plan.workload.sample_unit
    if plan.series.scaling == "strong":
        return f"{plan.global_batch} {unit} global batch"
    return f"{plan.workload.train.batch_per_rank} {unit} per rank"


def last_loss(run: Run) -> float | None:
    """Loss of the last step, mean over ranks; None where it is not finite on one."""
    losses = [] if run.record is None else [rank.last_loss for rank in run.record.ranks]
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None


def at_last_place(rows: Sequence[T]) -> list[T]:
    """Rows of the largest rank and node count, of which sentences and headlines are; rows have `ranks` and `nodes`."""

    def place(row: Any) -> tuple[int, int]:
        return row.ranks, row.nodes

    return [row for row in rows if place(row) == place(rows[-1])]


def best_at_last(rows: Sequence[T], ratio: Callable[[T], Estimate | None]) -> tuple[Estimate, T] | None:
    """The largest ratio at the largest rank count, with its row; None where there is nothing to compare."""
    known = [(found, row) for row in at_last_place(rows) if (found := ratio(row)) is not None]
    return max(known, key=lambda one: one[0].value, default=None)


# Groups of a report


@dataclass(frozen=True)
class Side:
    """A group at one rank and node count."""

    group: Group
    point: Point


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of which each run of a side has one value."""

    values: Callable[[Side], Mapping[RunKey, float]]
    is_time: bool = False  # Whether less is better: the ratio then is that of the reference over the side.


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A side next to the reference of its place."""

    side: Side
    reference: Side | None  # None where it did not run.
    figures: Mapping[str, ComparedFigure]

    @property
    def is_reference(self) -> bool:
        """Returns whether the others are measured against this side."""
        return self.side is self.reference

    def ratio(self, figure: str) -> tuple[Estimate | None, bool]:
        """Returns the ratio of a figure, above 1 is better, and whether it is of pairs; None for the reference itself,
        and as `compared` says.
        """
        if self.reference is None or self.is_reference:
            return None, False
        compared_figure = self.figures[figure]
        values, reference_values = compared_figure.values(self.side), compared_figure.values(self.reference)
        return compared(reference_values, values) if compared_figure.is_time else compared(values, reference_values)


@dataclass(frozen=True, kw_only=True)
class ComparedSet:
    """Groups that differ in nothing but what is compared."""

    id: str
    groups: tuple[Group, ...]
    places: Mapping[tuple[int, int], tuple[Side, ...]]
    """Sides by ranks and nodes, ascending, where two kinds or more ran."""
    references: Mapping[tuple[int, int], Side]  # What the others of a place are measured against, where it ran.
    figures: Mapping[str, ComparedFigure]

    @property
    def rows(self) -> list[ComparedRow]:
        """Returns every side with the reference of its place."""
        return [
            ComparedRow(side=side, reference=self.references.get(place), figures=self.figures)
            for place, sides in self.places.items()
            for side in sides
        ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What groups are compared in, as data."""

    differ_in: Callable[[Run], str]  # A digest of a run without what is compared.
    kind: Callable[[Group], Hashable]  # What a group is in the comparison.
    reference: Callable[[Group], bool] = lambda group: True
    """Whether the others may be measured against it: the first of a place is."""
    order: Callable[[Group], tuple[float | str, ...]] = lambda group: ()  # Of the groups of a set.
    figures: Mapping[str, ComparedFigure] = field(default_factory=dict)  # What is compared, by name.

    def of(self, groups: Iterable[Group]) -> list[ComparedSet]:
        """Returns all sets of groups of two kinds or more that ran at one rank and node count, in the order of the
        groups.
        """
        sets = []
        for digest, members in alike(groups, lambda group: self.differ_in(group.sample)).items():
            ordered = sorted(members, key=self.order)
            sides = [Side(group, point) for group in ordered for point in group.points]
            by_place = alike(sides, lambda side: (side.point.ranks, side.point.nodes))
            places = {
                place: tuple(by_place[place])
                for place in sorted(by_place)
                if len({self.kind(side.group) for side in by_place[place]}) > 1
            }
            if not places:
                continue
            bases = {place: [side for side in sides if self.reference(side.group)] for place, sides in places.items()}
            references = {place: sides[0] for place, sides in bases.items() if sides}
            sets.append(
                ComparedSet(
                    id=digest, groups=tuple(ordered), places=places, references=references, figures=self.figures
                )
            )
        return sets


# Control runs


@dataclass(frozen=True, kw_only=True)
class Twins:
    """The plain runs of a series at one rank and node count, and those that went without something."""

    plan: RunPlan
    planned: frozenset[Variant]
    runs: Mapping[Variant, Mapping[RunKey, tuple[Run, RunMeasures]]]
    """Those with figures, by variant and repeat; every variant that was asked for is there."""
    missing: tuple[str, ...]  # Why the others have none, in sentences.

    def of(self, variant: Variant, figure: Callable[[RunMeasures], T]) -> dict[RunKey, T]:
        """A figure of the runs of a variant."""
        return {key: figure(measures) for key, (_, measures) in self.runs[variant].items()}

    def repeats(self, variants: Collection[Variant]) -> list[RunKey]:
        """Returns the repeats of which the runs of all these variants have figures: what may be subtracted."""
        return in_all(*(self.runs[variant] for variant in variants)) if variants else []


def twins(
    runs: Iterable[Run], variants: Collection[Variant], is_wanted: Callable[[Collection[Variant]], bool]
) -> list[Twins]:
    """Every scaling point of every series that has the wanted variants, in order of series, ranks and nodes.

    A copy of a run is no repeat. Runs of other variants are left out; `is_wanted`: whether a point with runs of these
    variants takes part.
    """
    runs = list(runs)
    sessions = allocations_of(runs)
    points = alike(
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
            measures, why = measured_or_why(run)
            if measures is None:
                missing.append(why)
            else:
                side[key] = run, measures
        plan = min(members, key=lambda run: run.plan.series.variant != "plain").plan
        result.append(Twins(plan=plan, planned=planned, runs=sides, missing=tuple(missing)))
    return result
