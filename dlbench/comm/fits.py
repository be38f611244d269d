"""Fits costs to measurements, by system, carrier and type of element, and compares predictions with measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

from dlbench.analysis.comparability import system_content
from dlbench.analysis.environments import side_by_side
from dlbench.analysis.repeats import named
from dlbench.comm.measurements import CollectiveGroup, CollectiveTable, MeasuredSeries, Measurement, at_minimum
from dlbench.errors import DlbenchError, IncompleteDataError, UserError, nearest
from dlbench.perfmodels.link_fit import Observation, choose_sharing, fit_network, hold_out_largest
from dlbench.report.table import column
from dlbench.specs.comm import ELEMENT_BYTES, IN_PLACE, LIBRARY, Collective, FitError, LineCost, NetworkModel
from dlbench.stats.multiplicity import LEAST_RUNS, resampled, stretch

LARGE_BYTES = 1_000_000  # Errors of messages of this size or more, as gradients have, are listed separately.
PointKey = tuple[str, str, int]  # Id of the group, title of the series, bytes.


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The system, carrier and type of element of a fit."""

    system: str
    carrier: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.system}, {self.carrier}, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class PredictionErrors:
    """Errors of predictions over some points, as |predicted / measured - 1|."""

    scope: str = field(metadata=column("Points", ""))
    num_points: int = field(metadata=column("Count", ""))
    median: float = field(metadata=column("Median error", "", unit="fraction"))
    worst: float = field(metadata=column("Worst", "", unit="fraction"))
    is_poor: bool = field(default=False, metadata=column("Recommended", "", text={True: "no: errors too large"}.get))
    """Whether the points are of one algorithm whose predictions are too far off for a recommendation."""


@dataclass(frozen=True, kw_only=True)
class NetworkFit(Scope):
    """The fitted costs of one system, carrier and type of element."""

    network: NetworkModel
    errors: tuple[PredictionErrors, ...] = ()  # Over all held-out points, over large ones, and by algorithm.
    predicted: Mapping[PointKey, float] = field(default_factory=dict, metadata={"json": False})
    """Seconds predicted by a fit without the point."""
    left_out: tuple[str, ...] = field(default=(), metadata={"json": False})
    """Parts of the imported outputs that were not used, in words."""


@dataclass(frozen=True, kw_only=True)
class Fits:
    """All fits of a table."""

    fits: tuple[NetworkFit, ...]
    unfitted: tuple[str, ...]

    def of(self, group: CollectiveGroup, carrier: str) -> NetworkFit | None:
        scope = (group.sample.plan.system.name, carrier, group.dtype)
        return next((fit for fit in self.fits if (fit.system, fit.carrier, fit.dtype) == scope), None)

    def with_predictions(self, group: CollectiveGroup) -> tuple[MeasuredSeries, ...]:
        """Returns the series of a group with the predictions of fits that did not see the points."""
        all_series = []
        for series in group.series:
            fit, rows = self.of(group, series.carrier), list(series.rows)
            for index, row in enumerate(series.rows):
                point = (group.id, series.title, row.num_bytes)
                if not series.is_library and fit is not None and point in fit.predicted:
                    seconds = fit.predicted[point]
                    rows[index] = replace(row, predicted_s=seconds, predicted_over_measured=seconds / row.time.value)
            all_series.append(replace(series, rows=tuple(rows)))
        return tuple(all_series)


def fit_all(table: CollectiveTable, *, fitted: str = "", only: Scope | None = None) -> Fits:
    """Returns the fit of every system, carrier and type in a table, or of one. `fitted`: the time now, ISO 8601."""
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
        # One model is not fitted to runs with different system settings.
        settings = {}
        for group, _ in of_scope:
            content = system_content(group.sample.plan).items()
            settings[group.id] = {key: value for key, value in content if not key.startswith("system.launch.")}
        if differences := side_by_side(settings).differences:
            why = f"its runs have different settings ({named(differences)}); fit each kind from its own folder"
            unfitted.append(f"{scope.title}: {why}")
            continue
        try:
            fit, note = _fit(scope, of_scope, lines_of(table, scope), fitted)
        except DlbenchError as error:
            unfitted.append(f"{scope.title}: {error}")
            continue
        fits.append(fit)
        if note:
            unfitted.append(f"{scope.title}: {note}")
    return Fits(fits=tuple(fits), unfitted=tuple(unfitted))


def fit_one(
    table: CollectiveTable,
    *,
    system: str | None,
    transport: str | None,
    dtype: str | None,
    fitted: str,
    where: str,
    fitted_to: Literal["median", "minimum"] = "median",
) -> NetworkFit:
    """Returns the fit for a file (`*.network.json`), or only lines if only libraries were measured. Options may be None
    if the runs have one value, or fp32. `where`: the name of the runs in errors; `fitted_to`: the time of each point.
    """
    if fitted_to == "minimum":
        table = at_minimum(table)
    if table.pairs and not table.groups:
        raise IncompleteDataError(f"{where}: has only pairs of ranks, and costs are fitted to collectives")
    if not table.groups:
        reasons = [f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without] or list(table.damaged)
        more = ""
        if len(reasons) > 1:
            more = f" (and {len(reasons) - 1} more)"
        reason = next(iter(reasons), "there are no runs")
        raise IncompleteDataError(f"{where}: no run of the collective benchmark has figures; {reason}{more}")
    chosen = _chosen("--system", system, [group.sample.plan.system.name for group in table.groups], where)
    groups = [group for group in table.groups if group.sample.plan.system.name == chosen]
    dtypes: list[str] = [group.dtype for group in groups]
    if dtype is None and "fp32" in dtypes:
        dtype = "fp32"
    precision = _chosen("--dtype", dtype, dtypes, where)
    groups = [group for group in groups if group.dtype == precision]
    all_series = list(chain.from_iterable(group.series for group in groups))
    carriers = [series.carrier for series in all_series]
    modelled = [series.carrier for series in all_series if not series.is_library]
    run_ids = dict.fromkeys(run.plan.run_id for run in chain.from_iterable(group.runs for group in groups))
    carrier = _chosen("--transport", transport, modelled or carriers, where)
    scope = Scope(system=chosen, carrier=carrier, dtype=groups[0].dtype)
    fits = fit_all(table, fitted=fitted, only=scope)
    if fits.fits:
        (fit,) = fits.fits
        return replace(fit, network=fit.network.model_copy(update={"fitted_to": fitted_to}))
    if modelled:
        raise IncompleteDataError(f"{where}: {fits.unfitted[0]}")
    lines = lines_of(table, scope)
    if not lines:
        raise IncompleteDataError(f"{where}: {scope.title}: one size only; a line needs two or more (--sizes)")
    network = NetworkModel(
        system=chosen, transport=carrier, collectives=lines, sources=tuple(run_ids), fitted=fitted, fitted_to=fitted_to
    )
    return NetworkFit(**vars(scope), network=network)


def _chosen(option: str, choice: str | None, names: list[str], where: str) -> str:
    distinct = list(dict.fromkeys(names))
    if choice is not None:
        if choice not in distinct:
            raise UserError(f"{option} {choice}: not among the runs in {where}: {nearest(choice, distinct)}")
        return choice
    if len(distinct) > 1:
        raise UserError(
            f"{where}: a file contains one of {', '.join(distinct)}; choose with {option}, e.g. {option} {distinct[0]}"
        )
    return distinct[0]


def lines_of(table: CollectiveTable, scope: Scope) -> tuple[LineCost, ...]:
    """Returns the lines of a system and type; of layouts with equal names and ranks, the one with the most nodes."""
    chosen: dict[tuple[str, int], tuple[int, LineCost]] = {}
    for group in table.groups:
        plan = group.sample.plan
        if plan.system.name != scope.system or group.dtype != scope.dtype:
            continue
        for series in group.series:
            if series.startup_s is None or series.per_byte_s is None:
                continue
            key = (line_name(series.carrier, group.collective, series.algorithm), group.layout.ranks)
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
    """Returns the half width of a line's 95 % interval over runs, as a share of its times; None with too few runs."""
    runs = min(len(row.by_run) for row in rows)
    if runs < LEAST_RUNS:
        return None
    # In the worst case a run shifts all sizes alike, so more sizes do not narrow the interval.
    spreads = [statistics.stdev(map(math.log, row.by_run.values())) for row in rows]
    median = statistics.median(spreads) * math.sqrt(math.pi / 2 / runs)  # of a median, normal runs
    return math.expm1(NormalDist().inv_cdf(0.975) * stretch(runs) * math.sqrt(1 - 1 / runs) * median)


def line_name(carrier: str, collective: Collective, algorithm: str) -> str:
    """Returns the name of a line, e.g. `gloo flat` (a library's all-reduce), `gloo ring`, `gloo all-gather ring`."""
    words = [carrier.removeprefix("torch-"), collective, algorithm]
    if collective == "allreduce":
        words[1:] = ["flat" if algorithm in (LIBRARY, IN_PLACE) else algorithm]
    return " ".join(words)


def _fit(
    scope: Scope, measured: Sequence[tuple[CollectiveGroup, MeasuredSeries]], lines: tuple[LineCost, ...], fitted: str
) -> tuple[NetworkFit, str]:
    # Groups inside one node do not show messages between nodes: if there are real ones, they are left out.
    used, notes = list(measured), []
    if any(group.sample.plan.layout.nodes > 1 for group, _ in measured):
        used = [
            (group, series)
            for group, series in measured
            if group.sample.plan.layout.nodes > 1 or group.layout.num_groups == 1
        ]
        count = sum(len(series.rows) for _, series in measured) - sum(len(series.rows) for _, series in used)
        if count:
            notes.append(f"{count} points of groups inside one node are left out, as others span several nodes")
    if any(group.has_uneven_leaves for group, _ in used):
        notes.append(
            "leaf switches have unequal numbers of ranks, or other ranks in other runs: messages between switches are "
            "counted as messages between groups"
        )
    observed: dict[PointKey, Observation] = {}
    by_run: list[dict[str, float]] = []
    run_ids: dict[str, None] = {}
    for group, series in used:
        run_ids |= dict.fromkeys(run.plan.run_id for run in group.runs)
        # By series and repeat: runs of a repeat were interleaved, whatever their rank count.
        names = {run.plan.run_id: f"{run.plan.series.id}/{run.plan.series.repeat}" for run in group.runs}
        for row in series.rows:
            by_run.append({names[run_id]: seconds for (run_id, _), seconds in row.by_run.items()})
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
        sources=tuple(run_ids),
        lines=lines,
        fitted=fitted,
        keys={id(observation): key for key, observation in observed.items()},
    )
    return fit, "; ".join(notes)


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
    """Returns the costs fitted to points. `by_run`: seconds of each point by run. `keys`: of reported points, by id."""
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
