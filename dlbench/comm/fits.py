"""Measurements become fitted costs, and what these predict is compared with what was measured.

One fit for each system, carrier and type of element, over every collective, layout, algorithm and size of dlbench's
own algorithms. Libraries choose their algorithms themselves, so that only a line through their sizes is fitted, for
each rank count; the same is done for every algorithm, for programs that want one exchange and no model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from types import MappingProxyType

from dlbench.analysis.comparability import system_content
from dlbench.analysis.environments import side_by_side
from dlbench.analysis.repeats import named
from dlbench.comm.measurements import CollectiveGroup, CollectiveTable, MeasuredSeries, Measurement
from dlbench.errors import DlbenchError, IncompleteDataError, UserError, nearest
from dlbench.perfmodels.link_fit import Observation, choose_sharing, fit_network, hold_out_largest
from dlbench.report.table import column
from dlbench.specs.comm import ELEMENT_BYTES, IN_PLACE, LIBRARY, FitError, LineCost, NetworkModel
from dlbench.stats.resampling import LEAST_RUNS, resampled, stretch

LARGE_BYTES = 1_000_000  # Errors of messages from here on are listed by themselves: what gradients are sent in.
PointKey = tuple[str, str, int]  # Id of the group, title of the series, bytes.


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What one fit is about."""

    system: str
    carrier: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.system}, {self.carrier}, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class PredictionErrors:
    """PredictionErrors of predictions over some points."""

    scope: str = field(metadata=column("Points", ""))
    num_points: int = field(metadata=column("Count", ""))
    median: float = field(metadata=column("Median error", "", unit="fraction"))  # Of |predicted / measured - 1|.
    worst: float = field(metadata=column("Worst", "", unit="fraction"))
    is_poor: bool = field(
        default=False, metadata=column("Advice", "", text=lambda poor: "none: the fit misses it" if poor else None)
    )
    """Whether it is one algorithm whose predictions are no advice."""


@dataclass(frozen=True, kw_only=True)
class NetworkFit(Scope):
    """The fitted costs of one system, carrier and type of element."""

    network: NetworkModel
    errors: tuple[PredictionErrors, ...] = ()  # Over all held-out points, over large ones, and by algorithm.
    predicted: Mapping[PointKey, float] = field(default_factory=dict, metadata={"json": False})
    """Seconds by a fit without the point."""
    left_out: tuple[str, ...] = field(default=(), metadata={"json": False})
    """What of the outputs that it was imported from was not used, in words."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """All fits of a table."""

    fits: tuple[NetworkFit, ...]
    unfitted: tuple[str, ...]

    def of(self, group: CollectiveGroup, carrier: str) -> NetworkFit | None:
        wanted = (group.sample.plan.system.name, carrier, group.dtype)
        return next((fit for fit in self.fits if (fit.system, fit.carrier, fit.dtype) == wanted), None)

    def with_predictions(self, group: CollectiveGroup) -> tuple[MeasuredSeries, ...]:
        """Returns the series of a group with what fits that did not see its points predict of them."""
        all_series = []
        for series in group.series:
            fit = None if series.is_library else self.of(group, series.carrier)
            rows = []
            for row in series.rows:
                seconds = None if fit is None else fit.predicted.get((group.id, series.title, row.num_bytes))
                ratio = None if seconds is None else seconds / row.time.value
                rows.append(replace(row, predicted_s=seconds, predicted_over_measured=ratio))
            all_series.append(replace(series, rows=tuple(rows)))
        return tuple(all_series)


def fit_all(table: CollectiveTable, *, fitted: str = "", only: Scope | None = None) -> Fits:
    """Fits of every system, carrier and type in a table, or of one; `fitted` is the time that models say, ISO 8601."""
    scopes: dict[Scope, list[tuple[CollectiveGroup, MeasuredSeries]]] = {}
    for group in table.groups:
        for series in group.series:
            if not series.is_library:
                scope = Scope(system=group.sample.plan.system.name, carrier=series.carrier, dtype=group.dtype)
                scopes.setdefault(scope, []).append((group, series))
    fits, unfitted = [], []
    for scope, of_scope in scopes.items():
        if only not in (None, scope):
            continue
        # What was asked for of the system; one model is not fitted to what differs there.
        asked = {
            group.id: {k: v for k, v in system_content(group.sample.plan).items() if not k.startswith("system.launch.")}
            for group, _ in of_scope
        }
        if unlike := side_by_side(asked).differences:
            why = f"its runs were asked for unlike ({named(unlike)}); fit each kind from a folder of its own"
            unfitted.append(f"{scope.title}: {why}")
            continue
        try:
            fit, left = _fit(scope, of_scope, lines_of(table, scope), fitted)
        except DlbenchError as error:
            unfitted.append(f"{scope.title}: {error}")
            continue
        fits.append(fit)
        unfitted += [f"{scope.title}: {left}"] if left else []
    return Fits(fits=tuple(fits), unfitted=tuple(unfitted))


def fit_one(
    table: CollectiveTable, *, system: str | None, transport: str | None, dtype: str | None, fitted: str, where: str
) -> NetworkFit:
    """The fit that a file (`*.network.json`) holds: of one system, one carrier, one type of element.

    Where only libraries were measured the model has no levels, and holds their lines alone. What is not chosen is the
    only one, and of types fp32 where it was measured; `where` is what errors call the runs.
    """
    if table.pairs and not table.groups:
        raise IncompleteDataError(f"{where}: holds pairs of ranks alone, and costs are fitted to collectives")
    if not table.groups:
        reasons = [f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without] or list(table.damaged)
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise IncompleteDataError(
            f"{where}: no run of the collective benchmark has figures; {reasons[0] + more if reasons else 'none'}"
        )
    chosen = _chosen("--system", system, [group.sample.plan.system.name for group in table.groups], where)
    groups = [group for group in table.groups if group.sample.plan.system.name == chosen]
    dtypes = [group.dtype for group in groups]
    precision = _chosen("--dtype", dtype or ("fp32" if "fp32" in dtypes else None), list(dtypes), where)
    groups = [group for group in groups if group.dtype == precision]
    modelled = [series.carrier for group in groups for series in group.series if not series.is_library]
    carriers = modelled or [series.carrier for group in groups for series in group.series]
    carrier = _chosen("--transport", transport, carriers, where)
    scope = Scope(system=chosen, carrier=carrier, dtype=groups[0].dtype)
    fits = fit_all(table, fitted=fitted, only=scope)
    if fits.fits:
        return fits.fits[0]
    if modelled:
        raise IncompleteDataError(f"{where}: {fits.unfitted[0]}")
    lines = lines_of(table, scope)
    if not lines:
        raise IncompleteDataError(f"{where}: {scope.title}: one size only; a line needs two or more (--sizes)")
    runs = tuple(dict.fromkeys(run.plan.run_id for group in groups for run in group.runs))
    network = NetworkModel(system=chosen, transport=carrier, collectives=lines, sources=runs, fitted=fitted)
    return NetworkFit(**vars(scope), network=network)


def _chosen(option: str, asked: str | None, names: list[str], where: str) -> str:
    distinct = list(dict.fromkeys(names))
    if asked is not None:
        if asked not in distinct:
            raise UserError(f"{option} {asked}: not among the runs in {where}: {nearest(asked, distinct)}")
        return asked
    if len(distinct) > 1:
        raise UserError(
            f"{where}: one file holds one of {', '.join(distinct)}; choose by {option}, e.g. {option} {distinct[0]}"
        )
    return distinct[0]


def lines_of(table: CollectiveTable, scope: Scope) -> tuple[LineCost, ...]:
    """Lines of a system and type, over all carriers; of layouts with equal names and rank counts that of most nodes."""
    chosen: dict[tuple[str, int], tuple[int, LineCost]] = {}
    for group in table.groups:
        plan = group.sample.plan
        if plan.system.name != scope.system or group.dtype != scope.dtype:
            continue
        for series in group.series:
            if series.startup_s is None or series.per_byte_s is None:
                continue
            key = (line_name(group, series), group.layout.ranks)
            if key not in chosen or chosen[key][0] < plan.layout.nodes:
                line = LineCost(
                    name=key[0],
                    ranks=key[1],
                    startup_s=series.startup_s,
                    per_byte_s=series.per_byte_s,
                    sizes=(series.rows[0].num_bytes, series.rows[-1].num_bytes),
                    half_width=_half_width(series.rows),
                )
                chosen[key] = (plan.layout.nodes, line)
    return tuple(line for _, line in chosen.values())


def _half_width(rows: Sequence[Measurement]) -> float | None:
    """95 % interval of a line's times over runs, plus or minus a share: the runs' common part is that of the middle."""
    runs = min(len(row.by_run) for row in rows)
    if runs < LEAST_RUNS:
        return None
    # A run shifts all sizes alike at worst, so that more sizes make nothing surer.
    spreads = [statistics.stdev(math.log(value) for value in row.by_run.values()) for row in rows]
    median = statistics.median(spreads) * math.sqrt(math.pi / 2 / runs)  # of a median, normal runs
    return math.expm1(NormalDist().inv_cdf(0.975) * stretch(runs) * math.sqrt(1 - 1 / runs) * median)


def line_name(group: CollectiveGroup, series: MeasuredSeries) -> str:
    """What a line is called: of all-reduces the carrier as exchanges of training call it, and `flat` or the algorithm.

    A library's all-reduce is what the exchange `flat` calls, in place. Other collectives have their name between the
    two.
    """
    carrier = series.carrier.removeprefix("torch-")
    if group.collective == "allreduce":
        is_flat = series.algorithm in (LIBRARY, IN_PLACE)
        return f"{carrier} {'flat' if is_flat else series.algorithm}"
    return f"{carrier} {group.collective} {series.algorithm}"


def _fit(
    scope: Scope, measured: Sequence[tuple[CollectiveGroup, MeasuredSeries]], lines: tuple[LineCost, ...], fitted: str
) -> tuple[NetworkFit, str]:
    # Groups inside one node say nothing of messages between nodes: next to real ones they are left out.
    used, left = list(measured), ""
    if any(group.sample.plan.layout.nodes > 1 for group, _ in measured):
        used = [item for item in measured if item[0].sample.plan.layout.nodes > 1 or item[0].layout.num_groups == 1]
        count = sum(len(series.rows) for _, series in measured) - sum(len(series.rows) for _, series in used)
        if count:
            left = f"{count} points of groups inside one node are left out next to groups on several"
    if any(group.has_uneven_leaves for group, _ in used):
        why = "ranks lie below leaf switches in unequal blocks, or not alike in all runs"
        left = f"{left}; {why}: messages between switches count as between groups".removeprefix("; ")
    observed: dict[PointKey, Observation] = {}
    by_run: list[dict[str, float]] = []
    for group, series in used:
        # By series and repeat: runs of a repeat were interleaved, whatever their rank count.
        names = {run.plan.run_id: f"{run.plan.series.id}/{run.plan.series.repeat}" for run in group.runs}
        for row in series.rows:
            by_run.append({names[run_id]: took for (run_id, _), took in row.by_run.items()})
            observed[group.id, series.title, row.num_bytes] = Observation(
                collective=group.collective,
                algorithm=series.algorithm,
                layout=group.layout,
                num_bytes=row.num_bytes,
                element_bytes=ELEMENT_BYTES[group.dtype],
                shards=group.sample.plan.comm.shards,
                seconds=row.time.value,
                chunks=row.chunks,
            )
    fit = fit_of(
        scope,
        list(observed.values()),
        by_run,
        sources=tuple(dict.fromkeys(run.plan.run_id for group, _ in used for run in group.runs)),
        lines=lines,
        fitted=fitted,
        keys={id(seen): key for key, seen in observed.items()},
    )
    return fit, left


def fit_of(
    scope: Scope,
    observations: Sequence[Observation],
    by_run: Sequence[Mapping[str, float]],
    *,
    sources: tuple[str, ...],
    lines: tuple[LineCost, ...],
    fitted: str,
    keys: Mapping[int, PointKey] = MappingProxyType({}),
) -> NetworkFit:
    """The costs that points show. `by_run`: of each point its seconds by run. `keys`: of points that a report shows, by
    id of the observation.
    """
    sharing, predictions = choose_sharing(observations)
    network = fit_network(
        observations,
        system=scope.system,
        transport=scope.carrier,
        sources=sources,
        fitted=fitted,
        sharing=sharing,
        resampled=resampled(by_run, centre="median"),
        runs=min(map(len, by_run)),
    )
    errors, of_algorithms = _errors(predictions)
    held_out = {"largest_held_out": hold_out_largest(observations), "errors": tuple(of_algorithms)}
    return NetworkFit(
        **vars(scope),
        network=network.model_copy(update={"collectives": lines, **held_out}),
        errors=tuple(errors),
        predicted={keys[id(observation)]: seconds for observation, seconds in predictions if id(observation) in keys},
    )


def _errors(predictions: Sequence[tuple[Observation, float]]) -> tuple[list[PredictionErrors], list[FitError]]:
    """Returns errors over all points, over large ones and by algorithm; and the last as the file holds them."""
    everything, large = list[float](), list[float]()
    by_algorithm: dict[tuple[str, str], list[float]] = {}
    for observation, seconds in predictions:
        error = abs(seconds / observation.seconds - 1)
        everything.append(error)
        if observation.num_bytes >= LARGE_BYTES:
            large.append(error)
        by_algorithm.setdefault((observation.collective, observation.algorithm), []).append(error)
    rows = [_errors_over(scope, errors) for scope, errors in (("all", everything), ("1 MB and more", large)) if errors]
    of_algorithms = []
    for (collective, algorithm), errors in by_algorithm.items():
        row = _errors_over(f"{collective}, {algorithm}", errors)
        fit_error = FitError(collective=collective, algorithm=algorithm, median=row.median, worst=row.worst)
        of_algorithms.append(fit_error)
        rows.append(replace(row, is_poor=fit_error.is_poor))
    return rows, of_algorithms


def _errors_over(scope: str, errors: Sequence[float]) -> PredictionErrors:
    return PredictionErrors(scope=scope, num_points=len(errors), median=statistics.median(errors), worst=max(errors))
