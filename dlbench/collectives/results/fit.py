"""Measurements become fitted costs, and what these predict is set beside what was measured.

One fit for each system, carrier and type of element, over every collective, layout, algorithm and size of dlbench's
own algorithms. Libraries choose their algorithms themselves, so that only a line through their sizes is fitted, for
each rank count; the same is done for every algorithm, for programs that want one exchange and no model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.collectives.results.tables import CommGroup, CommTable, Series, SeriesName
from dlbench.costs.fit.link_fit import Observation, choose_sharing, fit_line, fit_network
from dlbench.costs.predictions import crossovers
from dlbench.errors import DlbenchError
from dlbench.specs.base import Precision
from dlbench.specs.collectives.network import LineCost, NetworkModel
from dlbench.specs.collectives.plan import ELEMENT_BYTES

LARGE_BYTES = 1_000_000
"""Messages from here on are told apart in the errors: what gradients are sent in."""

HELD_OUT_SEVERAL = (
    "each size and rank count is predicted from points of other sizes and other rank counts; only which costs there "
    "are is taken from the fit to all points"
)
HELD_OUT_ONE = (
    "each size is predicted from points of other sizes, all at {ranks} ranks, the only rank count; only which costs "
    "there are is taken from the fit to all points"
)

PointKey = tuple[str, SeriesName, int]
"""Id of the group, series, bytes."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What one fit is about."""

    system: str
    carrier: str
    dtype: Precision

    @property
    def title(self) -> str:
        """System, carrier and type in a few words."""
        return f"{self.system}, {self.carrier}, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of predictions over some points."""

    scope: str
    num_points: int
    median: float
    """Median of |predicted / measured - 1|."""
    worst: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fitted costs of one scope."""

    scope: Scope
    network: NetworkModel
    ranks: tuple[int, ...]
    """Rank counts behind it, ascending."""
    held_out_by: str
    """How the predictions came about, in words."""
    predicted: dict[PointKey, float]
    """Seconds that a fit without the point expects of it."""
    errors: tuple[Errors, ...]
    """Over all held-out points, over large ones, and by algorithm."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """All fits of a table."""

    fits: tuple[Fit, ...]
    lines: dict[tuple[str, SeriesName], LineCost]
    """By id of the group and series; only where two sizes or more were measured."""
    unfitted: tuple[str, ...]
    """Scopes without a fit, and why."""

    def of(self, group: CommGroup, carrier: str) -> Fit | None:
        """The fit that holds for a group's algorithms over a carrier."""
        wanted = Scope(system=group.sample.plan.system.name, carrier=carrier, dtype=group.dtype)
        return next((fit for fit in self.fits if fit.scope == wanted), None)


@dataclass(frozen=True, kw_only=True)
class ModelCrossover:
    """Where the model expects one algorithm to overtake another."""

    num_bytes: float
    before: SeriesName
    after: SeriesName


def fit_all(table: CommTable, *, fitted: str = "", only: Scope | None = None) -> Fits:
    """Fits of every system, carrier and type in a table.

    Args:
        table: measurements.
        fitted: the time to write into the models, UTC, ISO 8601.
        only: fit this one alone.
    """
    lines = {(group.id, series.name): line for group in table.groups for series, line in _lines(group)}
    scopes: dict[Scope, list[tuple[CommGroup, Series]]] = {}
    for group in table.groups:
        for series in group.series:
            if not series.name.is_library:
                scope = Scope(system=group.sample.plan.system.name, carrier=series.name.carrier, dtype=group.dtype)
                scopes.setdefault(scope, []).append((group, series))
    fits, unfitted = [], []
    for scope, found in scopes.items():
        if only is not None and scope != only:
            continue
        try:
            fit, left = _fit(scope, found, collectives(table, lines, scope), fitted)
        except DlbenchError as error:
            unfitted.append(f"{scope.title}: {error}")
            continue
        fits.append(fit)
        unfitted += [f"{scope.title}: {left}"] if left else []
    return Fits(fits=tuple(fits), lines=lines, unfitted=tuple(unfitted))


def collectives(table: CommTable, lines: dict[tuple[str, SeriesName], LineCost], scope: Scope) -> tuple[LineCost, ...]:
    """Lines of a system and type, over all carriers; of layouts with equal names and rank counts that of most nodes."""
    chosen: dict[tuple[str, int], tuple[int, LineCost]] = {}
    for group in table.groups:
        plan = group.sample.plan
        if plan.system.name != scope.system or group.dtype != scope.dtype:
            continue
        for series in group.series:
            line = lines.get((group.id, series.name))
            if line is None:
                continue
            key = (line.name, line.ranks)
            if key not in chosen or chosen[key][0] < plan.layout.nodes:
                chosen[key] = (plan.layout.nodes, line)
    return tuple(line for _, line in chosen.values())


def line_name(group: CommGroup, name: SeriesName) -> str:
    """What a line is called: of all-reduces the carrier as exchanges of training call it, and `flat` or the algorithm.

    A library's all-reduce is what the exchange `flat` calls. Other collectives have their name between the two.
    """
    carrier = name.carrier.removeprefix("torch-")
    if group.collective == "allreduce":
        return f"{carrier} {'flat' if name.is_library else name.algorithm}"
    return f"{carrier} {group.collective} {name.algorithm}"


def model_crossovers(group: CommGroup, fit: Fit) -> tuple[ModelCrossover, ...]:
    """Where the model expects the lead to change among a group's algorithms over the fit's carrier."""
    names = [one.name for one in group.series if one.name.carrier == fit.scope.carrier and not one.name.is_library]
    sizes = group.sizes
    if len(names) < 2 or len(sizes) < 2:
        return ()
    algorithms = [name.algorithm for name in names]
    carrier = fit.scope.carrier
    return tuple(
        ModelCrossover(
            num_bytes=size,
            before=SeriesName(carrier=carrier, algorithm=before),
            after=SeriesName(carrier=carrier, algorithm=after),
        )
        for size, before, after in crossovers(
            group.collective, algorithms, group.layout, fit.network, sizes[0], sizes[-1]
        )
    )


def _lines(group: CommGroup) -> Iterator[tuple[Series, LineCost]]:
    for series in group.series:
        if len(series.sizes) > 1:
            sizes = [one.num_bytes for one in series.sizes]
            seconds = [one.seconds.value for one in series.sizes]
            yield series, fit_line(line_name(group, series.name), group.layout.ranks, sizes, seconds)


def _fit(
    scope: Scope, found: Sequence[tuple[CommGroup, Series]], lines: tuple[LineCost, ...], fitted: str
) -> tuple[Fit, str]:
    """The fit of a scope, and what it left out, in words."""
    used, left = _real_groups(found)
    observed = dict(_observations(used))
    observations = list(observed.values())
    sharing, predictions = choose_sharing(observations)
    network = fit_network(
        observations,
        system=scope.system,
        transport=scope.carrier,
        sources=tuple(dict.fromkeys(run.plan.run_id for group, _ in used for run in group.runs)),
        fitted=fitted,
        sharing=sharing,
    )
    ranks = tuple(sorted({seen.layout.ranks for seen in observations}))
    keys = {id(seen): key for key, seen in observed.items()}
    fit = Fit(
        scope=scope,
        network=network.model_copy(update={"collectives": lines}),
        ranks=ranks,
        held_out_by=HELD_OUT_SEVERAL if len(ranks) > 1 else HELD_OUT_ONE.format(ranks=ranks[0]),
        predicted={keys[id(seen)]: seconds for seen, seconds in predictions},
        errors=tuple(_errors(predictions)),
    )
    return fit, left


def _real_groups(
    found: Sequence[tuple[CommGroup, Series]],
) -> tuple[list[tuple[CommGroup, Series]], str]:
    """Groups inside one node say nothing of messages between nodes: beside real ones they are left out."""
    pretended = [one for one in found if one[0].sample.plan.layout.nodes == 1 and one[0].layout.num_groups > 1]
    if len(pretended) == len(found) or not any(group.sample.plan.layout.nodes > 1 for group, _ in found):
        return list(found), ""
    used = [one for one in found if one not in pretended]
    count = sum(len(series.sizes) for _, series in pretended)
    return used, f"{count} points of groups inside one node are left out beside groups on several" if count else ""


def _errors(predictions: Sequence[tuple[Observation, float]]) -> Iterator[Errors]:
    scopes: dict[str, list[float]] = {}
    for seen, seconds in predictions:
        error = abs(seconds / seen.seconds - 1)
        names = ["all", f"{seen.collective}, {seen.algorithm}"]
        for name in [*names[:1], *(["1 MB and more"] if seen.num_bytes >= LARGE_BYTES else []), *names[1:]]:
            scopes.setdefault(name, []).append(error)
    order = sorted(scopes, key=lambda name: {"all": 0, "1 MB and more": 1}.get(name, 2))
    for name in order:
        values = scopes[name]
        yield Errors(scope=name, num_points=len(values), median=statistics.median(values), worst=max(values))


def _observations(found: Iterable[tuple[CommGroup, Series]]) -> Iterator[tuple[PointKey, Observation]]:
    for group, series in found:
        for one in series.sizes:
            yield (
                (group.id, series.name, one.num_bytes),
                Observation(
                    collective=group.collective,
                    algorithm=series.name.algorithm,
                    layout=group.layout,
                    num_bytes=one.num_bytes,
                    element_bytes=ELEMENT_BYTES[group.dtype],
                    shards=group.sample.plan.comm.shards,
                    seconds=one.seconds.value,
                ),
            )
