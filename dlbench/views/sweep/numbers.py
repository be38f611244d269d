"""A series with swept keys becomes a verdict at each rank count: each setting against the default, in pairs of repeats.

Runs of a group may be averaged; settings of a sweep are in different groups, and are compared on purpose. What makes
that fair is the series: one request, so that all but the swept keys is equal, and repeats interleaved over the
settings, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from dlbench.analysis.comparability import run_facts
from dlbench.analysis.core_load import load_doubts, loads_of
from dlbench.analysis.repeats import averaged_unlike, compared_unlike, named
from dlbench.analysis.side_by_side import alike, losses_text, trains_apart
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.records.registry import data_source
from dlbench.records.scan import Run
from dlbench.report.table import times_cell
from dlbench.report.wording import (
    DASH,
    basis_text,
    percent,
    place_text,
    reached_text,
    repeat_text,
    sentence,
    times_text,
    times_value,
    units_text,
)
from dlbench.specs.plan import AxisValue, LadderStep
from dlbench.specs.series import idle_steps
from dlbench.stats.estimates import (
    MIN_RUNS,
    Estimate,
    by_definition,
    gain_of_best,
    geometric_mean_estimate,
    is_other_than,
    means_of,
    paired_logs,
)
from dlbench.stats.multiplicity import LEVEL, holm, paired_p, pooled_freedom, repeats_for
from dlbench.stats.pairing import RunKey
from dlbench.views.doubts import run_doubts
from dlbench.views.next_step import remedy_of
from dlbench.views.sweep.ladder import Rates, efficiency, gains_of, height, published_text, step_words
from dlbench.views.sweep.settings import (
    MARGIN,
    MARGIN_TEXT,
    Axis,
    AxisVerdict,
    Measured,
    Pair,
    Setting,
    SettingVerdict,
    acting_keys,
    autotuned,
    axes,
    changed_arithmetic,
    contrasts,
    costs,
    is_default,
    is_within_margin,
    label,
    levels_of,
    losses,
    options,
    ratio_of,
    run_key,
    value_text,
)
from dlbench.views.sweep.updates import Update, updates_of

OVER = {False: "the throughput of", True: "as fast to the target as"}  # What decides, with a target and without.
_MAX_NAMED = 3  # Settings named in a sentence; the others are counted.
MANY_REPEATS = 100
"""Ten hours of runs of a minute for six settings: from here on the scatter is to be mended, not the number of runs."""


def short_keys(keys: Sequence[str]) -> list[str]:
    """Keys as column titles: their last word, or all of them where two would be the same."""
    short = ["engine" if key == "engine.name" else key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else list(keys)


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """All settings at one rank count, with equal preset, precision and data."""

    ranks: int
    nodes: int
    conditions: str
    baseline: str
    has_default: bool  # Whether the baseline is the default setting; otherwise it is the first of the sweep.
    steps: tuple[LadderStep, ...]  # Of a ladder: all in order, those too that cannot act here; empty: it is none.
    to_target: bool  # Whether runs train to a target, so that the time to it decides, and not throughput.
    settings: tuple[Setting, ...]
    axes: tuple[Axis, ...]
    updates: tuple[Update, ...]  # By setting, where optimizers or their sharding are swept.
    best: str
    """Label of the fastest of those that are faster than the baseline for certain and are what their name says; empty
    where there is none."""
    best_ratio: Estimate | None
    """What decides over the baseline's, corrected for having been chosen from all settings."""
    verdict: str
    advice: str
    needed_repeats: int | None  # That show a difference of the margin at the scatter found; None: not known.
    notes: tuple[str, ...]

    @property
    def best_setting(self) -> Setting | None:
        """The setting that `best` names."""
        return next((setting for setting in self.settings if self.best and setting.label == self.best), None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One swept series."""

    id: str  # In the page: `sweep-1`.
    label: str
    series: str
    keys: tuple[str, ...]
    sample_unit: str
    headline: tuple[str, str]  # The card's number and what it means, at the largest rank count.
    verdict: str
    cells: tuple[SweepCell, ...]  # By rank count; only where a swept key acts.
    idle: tuple[str, ...]
    """Rank counts at which no swept key acts, each a sentence with the largest relative difference between settings:
    scatter, not effect; steps of a ladder that cannot act somewhere, and why."""
    caption: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """All settings at one rank count, before they are judged."""

    runs: tuple[tuple[Run, ...], ...]  # Of each setting, those without figures too.
    rates: tuple[dict[RunKey, float], ...]  # Throughput of each setting by repeat, samples per second.
    reached: tuple[int, ...] | None  # Runs of each setting that met their target; None where runs measure speed.
    speeds: tuple[dict[RunKey, float], ...]
    """What decides: with a target the reciprocal of the time to it (none where a run missed it), else the rates."""
    base: int
    has_default: bool
    rate_logs: tuple[dict[RunKey, float], ...]
    """Of each setting's rates over the baseline's, one for each repeat that both have."""
    logs: tuple[dict[RunKey, float], ...]  # The same of the speeds.
    gains: tuple[dict[RunKey, float], ...]  # Of a ladder: each step over the one before it; empty: no ladder.
    first: Sequence[tuple[Run, Rates]]  # Of a ladder: the steps at the smallest rank count.
    levels: Mapping[str, list[AxisValue]]
    contrasts: Mapping[Pair, dict[RunKey, float]]

    @property
    def judged(self) -> tuple[dict[RunKey, float], ...]:
        """By what each setting has its verdict."""
        return self.gains or self.logs

    @property
    def comparisons(self) -> list[dict[RunKey, float]]:
        """Log ratios of all that is compared here: settings but the baseline, and pairs of values."""
        judged = (self.gains,) if self.gains else (self.logs, self.rate_logs)
        settings = [found[i] for found in judged for i in range(len(found)) if i != self.base]
        return [*settings, *self.contrasts.values()]


@dataclass(frozen=True, kw_only=True)
class Family:
    """All comparisons of a report: Holm's procedure is over all of them, so that any false claim is one in twenty."""

    adjusted: Mapping[tuple[float, ...], float]
    size: int  # Comparisons, those too that have too few repeats as yet; what is the same twice over counts once.

    def of(self, logs: Mapping[RunKey, float]) -> float:
        """The adjusted p of one of them; 1 where its repeats, or their sessions, are too few for a claim."""
        return self.adjusted.get(_identity(means_of(logs)), 1.0) if logs else 1.0


def family_of(drafts: Sequence[Draft]) -> Family:
    """The family of all that is compared at these rank counts, of whatever series."""
    known = [means_of(logs) for draft in drafts for logs in draft.comparisons if logs]
    every = {_identity(logs): logs for logs in known}
    judged = {key: logs for key, logs in every.items() if len(logs) >= MIN_RUNS}
    adjusted = holm([paired_p(logs) for logs in judged.values()])
    return Family(adjusted=dict(zip(judged, adjusted, strict=True)), size=len(every))


def _identity(logs: Sequence[float]) -> tuple[float, ...]:
    """The same for a comparison and for its reverse."""
    sign = -1 if next((value for value in logs if value), 1.0) < 0 else 1
    return tuple(round(sign * value, 12) for value in logs)


def sweeps(table: RunTable) -> tuple[Sweep, ...]:
    """All series with swept keys that hold figures, in the order of their creation."""
    table = without_resumed(table)
    planned = [*table.runs.values(), *(item.run for item in table.without if item.run.plan.run_id not in table.runs)]
    swept = (run for run in planned if run.plan.series.named)
    series = alike(swept, lambda run: (run.plan.created, run.plan.series.id))
    found = [(runs, *_drafts(runs, table)) for _, runs in sorted(series.items())]
    family = family_of([draft for _, drafts, _ in found for draft in drafts])
    with_figures = [one for one in found if one[1] or one[2]]
    return tuple(
        _sweep(runs, [cell_of(draft, family, table) for draft in drafts], idle, table, f"sweep-{number}")
        for number, (runs, drafts, idle) in enumerate(with_figures, 1)
    )


def _drafts(runs: Sequence[Run], table: RunTable) -> tuple[list[Draft], list[str]]:
    """Rank counts with two settings and a run with figures, and what to say of those at which no swept key acts."""
    drafts: list[Draft] = []
    idle: list[str] = []
    for (ranks, nodes, *_), group in sorted(alike(sorted(runs, key=_order), _place).items()):
        figures = [run for run in group if run.plan.run_id in table.runs]
        if len(_by_setting(group)) < 2 or not figures:
            continue
        if any(acting_keys(run.plan) for run in group):
            drafts.append(_draft(group, table, drafts[0].first if drafts else None))
        else:
            rates = [geometric_mean_estimate(_rates(found, table)).value for found in _by_setting(figures)]
            idle.append(
                f"At {place_text(ranks, nodes)} no swept key acts; settings differ by up to "
                f"{percent(max(rates) / min(rates) - 1)} there, which is the scatter of the machine."
            )
    return drafts, idle


def _sweep(
    runs: Sequence[Run], cells: Sequence[SweepCell], idle: Sequence[str], table: RunTable, sweep_id: str
) -> Sweep:
    plan = next((run for run in runs if run.plan.run_id in table.runs), runs[0]).plan
    keys = tuple(sorted({key for run in runs for key in run.plan.series.named}))
    unit = plan.workload.sample_unit
    batch = f"{plan.workload.train.batch_per_rank} {unit} per rank"
    if plan.series.scaling == "strong":
        batch = f"{plan.global_batch} {unit} global batch"
    if plan.series.step:
        batch = "each step on top of those before it"
    last = cells[-1] if cells else None
    return Sweep(
        id=sweep_id,
        label=f"{plan.workload.name}: {'ladder' if plan.series.step else ' x '.join(keys)} (series {plan.series.id})",
        series=plan.series.id,
        keys=keys,
        sample_unit=unit,
        headline=_headline(last) if last else (DASH, "no swept key acts"),
        verdict=last.verdict if last else "The swept keys act at no rank count that was run.",
        cells=tuple(cells),
        idle=(*idle, *(f"{text}." for text in idle_steps([run.plan for run in runs]))),
        caption=f"{plan.workload.name}, {batch}, {plan.series.scaling} scaling on {plan.system.name}; geometric "
        "means over runs; ratios in pairs of interleaved repeats"
        + f"; {plan.workload.notice}"
        * bool(plan.workload.notice),
    )


def _headline(cell: SweepCell) -> tuple[str, str]:
    if cell.steps:
        whole, words = height(cell.steps, cell.settings)
        found = times_cell(whole)
        return found.text, f"{found.interval} {words}, at {place_text(cell.ranks, cell.nodes)}".lstrip()
    name, place = "the default" if cell.has_default else "the first setting", place_text(cell.ranks, cell.nodes)
    if cell.best_ratio is None:
        return DASH, f"no setting is faster than {name} for certain, at {place}"
    found = times_cell(cell.best_ratio)
    basis = basis_text(cell.best_ratio)
    return found.text, f"{OVER[cell.to_target]} {name} {found.interval} by {cell.best}, at {place}; {basis}"


def _order(run: Run) -> tuple[int, int]:
    """The order of the request: every second repeat runs it backwards."""
    place = run.plan.series
    return place.repeat, place.position if place.repeat % 2 == 0 else -place.position


def _place(run: Run) -> tuple[int, int, str, str, str]:
    """Ranks, nodes, preset, precision, data: what settings must share to be compared."""
    plan = run.plan
    precision, data = str(plan.workload.train.precision), data_source(run)
    if plan.series.step:  # which may set both
        precision, data = "precision by step", plan.workload.data.source
    return (plan.layout.ranks, plan.layout.nodes, plan.workload.preset, precision, data)


def _by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of equal swept values together, in the order given."""
    found = alike(runs, lambda run: tuple(f"{key}={value!r}" for key, value in sorted(run.plan.series.named.items())))
    return list(found.values())


def _rates(runs: Sequence[Run], table: RunTable) -> dict[RunKey, float]:
    """Throughput by repeat, samples per second, of the runs with figures."""
    rates = table.rates
    return {run_key(run, table): float(rates[run.plan.run_id]) for run in runs if run.plan.run_id in table.runs}


def _num_ended(runs: Sequence[Run], table: RunTable) -> int:
    """Runs that were trained to the end of their limit, or to the target; of others nobody knows."""
    return sum(run.plan.run_id in table.runs or run.state == "invalid" for run in runs)


def _draft(runs: Sequence[Run], table: RunTable, first: Sequence[tuple[Run, Rates]] | None) -> Draft:
    """The settings of one rank count from every run of the series there, in the order of the request."""
    groups = _by_setting(runs)
    order = [step.name for step in runs[0].plan.series.ladder]
    if is_ladder := bool(order):  # whose steps keep their order where the first run of one is missing
        groups.sort(key=lambda group: order.index(group[0].plan.series.step))
    rates = [_rates(group, table) for group in groups]
    firsts = groups[0][0].plan.series.axes
    defaults = [i for i, group in enumerate(groups) if rates[i] and not is_ladder and is_default(group[0].plan, firsts)]
    base = defaults[0] if defaults else next(i for i, found in enumerate(rates) if found)
    speeds, reached = rates, None
    if groups[0][0].plan.measure.until == "quality":
        times = []
        for group in groups:  # seconds to the target, of the runs that met it
            known = ((run, run.record and run.record.quality) for run in group if run.plan.run_id in table.runs)
            times.append({run_key(run, table): q.time_to_quality_s for run, q in known if q and q.time_to_quality_s})
        reached = tuple(map(len, times))
        whole = [len(found) == _num_ended(group, table) for found, group in zip(times, groups, strict=True)]
        speeds = [
            {key: 1 / seconds for key, seconds in found.items()} if is_whole else {}
            for found, is_whole in zip(times, whole, strict=True)
        ]
    measured = [
        Measured(
            values=dict(sorted(group[0].plan.series.axes.items())), acting=acting_keys(group[0].plan), throughput=found
        )
        for group, found in zip(groups, speeds, strict=True)
        # What had no effect would make its axis look as if it had none.
        if found and not is_ladder and not _inert(group, table)
    ]
    levels = levels_of(measured, dict(sorted(groups[base][0].plan.series.axes.items())))
    return Draft(
        runs=tuple(map(tuple, groups)),
        rates=tuple(rates),
        reached=reached,
        speeds=tuple(speeds),
        base=base,
        has_default=bool(defaults),
        rate_logs=tuple(paired_logs(found, rates[base]) for found in rates),
        logs=tuple(paired_logs(found, speeds[base]) for found in speeds),
        gains=gains_of(rates) if is_ladder else (),
        first=first or [(group[0], found) for group, found in zip(groups, rates, strict=True)],
        levels=levels,
        contrasts=contrasts(measured, levels),
    )


def _inert(runs: Sequence[Run], table: RunTable) -> tuple[str, ...]:
    """Settings of the runs with figures that had no effect."""
    found = (run.record for run in runs if run.plan.run_id in table.runs)
    return tuple(sorted({text for record in found if record for text in record.inert}))


def cell_of(draft: Draft, family: Family, table: RunTable) -> SweepCell:
    """The comparison of all settings of one rank count, some of whose runs must have figures."""
    choice = _Choice(draft, _settings(draft, family, table), family)
    effects = axes(draft.levels, draft.contrasts, [family.of(logs) for logs in draft.contrasts.values()])
    runs = [run for group in draft.runs for run in group]
    ranks, nodes, preset, precision, data = _place(runs[0])
    found = [*load_doubts(loads_of(runs)), *(doubt for run in runs for doubt in run_doubts(run))]
    plan, baseline = runs[0].plan, ", the first setting with figures: the default is not in the sweep, or has none"
    notes = list(_notes(runs, choice.settings, table))
    if draft.gains:
        known = [set(rates) for rates in draft.rates if rates]
        common, every = len(set.intersection(*known)), len(set.union(*known))
        if common < every:
            shared = f"{common} of {every} repeats"
            notes.append(f"Only over the {shared} that all steps have do gains multiply exactly to the last ratio.")
    return SweepCell(
        ranks=ranks,
        nodes=nodes,
        conditions=f"{preset} preset, {precision}, {'synthetic data' if data == 'synthetic' else data}",
        baseline=f"the default ({choice.baseline.label})"
        if draft.has_default
        else choice.baseline.label + baseline * (not draft.gains),
        steps=plan.series.ladder,
        has_default=draft.has_default,
        to_target=draft.reached is not None,
        settings=choice.settings,
        axes=effects,
        updates=updates_of(draft.runs, table),
        best=choice.best.label if choice.best else "",
        best_ratio=choice.gain_of(choice.best),
        verdict=step_words(plan, choice.settings)
        if draft.gains
        else " ".join([*choice.words(f"At {place_text(ranks, nodes)}"), *_axes_words(effects)]),
        advice=remedy_of(found) or choice.advice(),
        needed_repeats=choice.needed_repeats,
        notes=tuple(notes),
    )


class _Choice:
    """Which of the settings at one rank count is to be preferred."""

    def __init__(self, draft: Draft, settings: tuple[Setting, ...], family: Family) -> None:
        self.draft, self.settings, self.baseline = draft, settings, settings[draft.base]
        known = (one for one in settings if one.decides is not None or one.verdict == "target missed")
        self.compared = [one for one in known if not one.is_baseline]
        self.is_missed = draft.reached is not None and self.baseline.decides is None
        sure = [one for one in self.compared if one.verdict == "faster" and not one.inert]

        def gain(setting: Setting) -> float:
            return setting.decides.value if setting.decides else 0.0

        # The fastest of those that are faster for certain and are what their name says; of all, and of those that
        # compute what the baseline computes.
        self.best = max(sure, key=gain, default=None)
        self.best_exact = max((one for one in sure if not one.changes), key=gain, default=None)
        self.ties = [] if self.best is None else [one for one in settings if one is not self.best and self._is_tie(one)]
        self.needed_repeats = self._needed(family)

    def _is_tie(self, setting: Setting) -> bool:
        """Whether it is not distinguishable from the best."""
        assert self.best is not None
        top, bottom = (self.draft.speeds[self.settings.index(one)] for one in (self.best, setting))
        logs = {} if setting.inert else paired_logs(top, bottom)
        return bool(logs) and (not is_other_than(ratio_of(logs), 1) or is_within_margin(ratio_of(logs)))

    def _needed(self, family: Family) -> int | None:
        """Repeats for the margin at the pooled scatter of what is not decided yet; None: too few runs to know it."""
        pairs = zip(self.settings, self.draft.judged, strict=True)
        undecided = [logs for one, logs in pairs if one.verdict in ("undecided", "insufficient") and logs]
        known = [means for logs in undecided if len(means := means_of(logs)) >= MIN_RUNS]
        if not known:
            return None
        pooled = math.sqrt(fmean(variance(found) for found in known))
        freedom = pooled_freedom(len(known), fmean(map(len, known)))
        return max(MIN_RUNS, repeats_for(pooled, MARGIN, family.size, freedom))

    def gain_of(self, best: Setting | None) -> Estimate | None:
        """What the best of all settings gains, corrected for the choice."""
        if best is None:
            return None
        compared = [i for i in range(len(self.settings)) if i != self.draft.base]
        logs = [means_of(self.draft.logs[i]) if self.draft.logs[i] else [] for i in compared]
        found, ratio = gain_of_best(logs, compared.index(self.settings.index(best))), best.decides
        return found if ratio is None else replace(found, n=ratio.n, sessions=ratio.sessions)

    def words(self, start: str) -> list[str]:
        """What the sweep found, in sentences."""
        base = self.baseline.label
        name = f"the default ({base})" if self.draft.has_default else base
        best, ratio = self.best, self.gain_of(self.best)
        if self.is_missed:
            met = reached_text(self.baseline.num_reached or 0, self.baseline.num_runs)
            return [f"{start} {met} of {name} met the target: there is no time to compare others with."]
        if best is None or best.decides is None or ratio is None:
            return [f"{start} {_no_best(self.compared, name)}"]
        count = len(self.compared)
        corrected = f", corrected for the choice among {count}; {times_value(best.decides)} as measured" * (count > 1)
        parts = [
            f"{start} the best of {count + 1} settings is {best.label}: {times_text(ratio)} "
            f"{OVER[self.draft.reached is not None]} {name} "
            f"({basis_text(ratio)}, in pairs{corrected})."
        ]
        if best.changes:
            parts.append(f"It changes the arithmetic ({', '.join(best.changes)}){loss_text(best)}.")
            exact, gained = self.best_exact, self.gain_of(self.best_exact)
            if exact is not None and gained is not None:
                parts.append(f"Of those that do not, the best is {exact.label}: {times_text(gained)}.")
        elif best.strategy != self.baseline.strategy:
            parts.append(f"{sentence(strategy_words(best, self.baseline))}")
        if self.ties:
            labels = "; ".join(setting.label for setting in self.ties[:_MAX_NAMED])
            more = f"; and {len(self.ties) - _MAX_NAMED} more" if len(self.ties) > _MAX_NAMED else ""
            parts.append(f"Not distinguishable from it: {labels}{more}.")
        return parts

    def advice(self) -> str:
        """What to do next, in one sentence."""
        compared, best = self.compared, self.best
        if self.is_missed:
            return "Let the baseline meet the target first: quality.max_epochs or max_samples, or quality.target."
        if best is not None and best.changes and self.best_exact in self.ties:
            best = self.best_exact
        if best is not None:
            base = f"Run with {best.options}"
            if not best.changes or self.draft.reached is not None:
                return f"{base}."
            exact = "keep the default" if self.best_exact is None else f"run with {self.best_exact.options}"
            return f"{base} if the changed arithmetic is acceptable; otherwise {exact}."
        if not compared:
            return "Repeat the settings that have no figures."
        apart = [one.options for one in compared if one.verdict == "faster per step"]
        if apart:
            return (
                f"Train to a target (--to-accuracy) with {apart[0]} and without: a step of it is not the same training."
            )
        if all(setting.verdict in ("equal", "slower", "target missed") for setting in compared):
            kept = "the default" if self.draft.has_default else self.baseline.options
            return f"Keep {kept}: nothing that was swept is worth setting."
        fewest = min((one.decides for one in compared if one.decides is not None), key=lambda ratio: ratio.units)
        name = "the default" if self.draft.has_default else self.baseline.label
        text = f"no setting is distinguishable from {name} as the better one"
        needed = self.needed_repeats
        if needed is None:
            return sentence(f"{repeat_text(fewest)}: {text} in {units_text(fewest)}")
        if needed > MANY_REPEATS:
            return (
                f"Find what makes runs of one setting differ first: a difference of {MARGIN_TEXT} would take {needed} "
                "repeats of each."
            )
        return sentence(f"{repeat_text(fewest, needed)}: {text}; that many show a difference of {MARGIN_TEXT}")


def _no_best(others: Sequence[Setting], name: str) -> str:
    if not others:
        return f"only {name} has figures: there is nothing to compare."
    ratios = [setting.decides for setting in others if setting.decides is not None]
    if any(setting.verdict == "insufficient" for setting in others) and ratios:
        ends = dict.fromkeys(times_value(pick(ratios, key=lambda one: one.value)) for pick in (min, max))
        few = units_text(min(ratios, key=lambda one: one.units))
        return f"nothing is decided in {few} ({' to '.join(ends)} of {name})."
    inert = "faster but not what was asked for"
    said = alike(others, lambda one: inert if one.verdict == "faster" else one.verdict_title.replace(";", ","))
    counts = ", ".join(f"{len(found)} {title}" for title, found in said.items())
    goal = " to the target" * (others[0].num_reached is not None)
    return f"no setting is faster{goal} than {name} for certain: of {len(others)} others {counts}."


def strategy_words(setting: Setting, baseline: Setting | None = None) -> str:
    """What another strategy than the baseline's changes: memory, never the mathematics, which its loss shows."""
    found, more = setting.losses, ""
    if setting.memory_bytes and baseline is not None and baseline.memory_bytes:
        ratio = f"{setting.memory_bytes / baseline.memory_bytes:.2f} times"
        more = f", {ratio} the memory per rank"
    loss = loss_text(setting) if found is not None else ""
    draw = " but for another draw of dropout" * setting.redraws_dropout
    return f"the same mathematics{draw} (strategy {setting.strategy}){more}{loss}"


def loss_text(setting: Setting) -> str:
    """The loss beside its reference's, to be put behind a clause; empty where it is not compared."""
    found = setting.losses
    if found is None or found.own is None:
        return "" if found is None else "; its loss is not finite"
    if found.reference is None:
        return f"; its loss cannot be compared: {found.why}"
    return f"; {losses_text(found.own.value, found.reference.value, found.reference_label)}"


def _axes_words(axes: Sequence[Axis]) -> list[str]:
    titles: dict[AxisVerdict, str] = {
        "matters": "matters",
        "no effect": f"no effect within {MARGIN_TEXT}",
        "undecided": "undecided",
        "insufficient": "insufficient",
    }
    found = {title: [axis.key for axis in axes if axis.verdict == verdict] for verdict, title in titles.items()}
    text = "; ".join(f"{title}: {', '.join(keys)}" for title, keys in found.items() if keys)
    return [f"{text[:1].upper()}{text[1:]}."] if text else []


def _settings(draft: Draft, family: Family, table: RunTable) -> tuple[Setting, ...]:
    """Every setting with its verdict: a difference must leave 1 out, stand after Holm, and leave the margin."""
    without = {item.run.plan.run_id: f"{item.state}: {item.why}" for item in table.without}
    rates, base = draft.rates, draft.base
    measured = [[run for run in group if run.plan.run_id in table.runs] for group in draft.runs]
    rate_base = geometric_mean_estimate(rates[base]).value
    made = []
    for i, group in enumerate(draft.runs):
        plan, one = group[0].plan, by_definition(1.0, len(rates[base]))
        by_rate, by_what_counts = (ratio_of(found[i]) if found[i] else None for found in (draft.rate_logs, draft.logs))
        ratio = one if i == base else by_rate
        per_step = _verdict(by_rate, family.of(draft.rate_logs[i]))
        gain = ratio_of(draft.gains[i]) if draft.gains and draft.gains[i] else None
        adjusted_p = family.of(draft.judged[i])
        counts = gain if draft.gains else by_what_counts
        verdict: SettingVerdict = "baseline" if i == base else _verdict(counts, adjusted_p)
        step = next((step for step in plan.series.ladder if step.name == plan.series.step), None)
        times: dict[RunKey, float] = {}
        if draft.reached is not None:
            times = {key: 1 / speed for key, speed in draft.speeds[i].items()}
            if i != base and not times and _num_ended(group, table):
                verdict = "target missed"
            elif verdict == "no figure" and times:
                verdict = "undecided"
        elif verdict == "faster" and trains_apart(plan):
            verdict = "faster per step"
        missing = [run.plan.run_id for run in group if run.plan.run_id not in table.runs]
        made.append(
            Setting(
                values=tuple((key, value_text(key, value)) for key, value in sorted(plan.series.named.items())),
                label=label(plan.series.named),
                is_baseline=i == base,
                throughput=geometric_mean_estimate(rates[i], f"{plan.workload.sample_unit}/s") if rates[i] else None,
                ratio=ratio,
                gain=gain,
                efficiency=efficiency(plan, rates[i], draft.first) if step and rates[i] else None,
                published=published_text(step.published) if step and step.published else "",
                num_reached=None if draft.reached is None else draft.reached[i],
                time=geometric_mean_estimate(times, "s") if times else None,
                sooner=(one if i == base else by_what_counts) if times else None,
                is_faster_per_step=per_step == "faster",
                adjusted_p=None if i == base or by_what_counts is None else adjusted_p,
                verdict=verdict,
                num_runs=len(measured[i]),
                num_planned=max(len(group), plan.series.repeats),
                why=without[missing[0]] if missing else "",
                changes=changed_arithmetic(plan),
                inert=_inert(group, table),
                autotune=autotuned(measured[i], table, ratio, rate_base, is_faster=per_step == "faster"),
                # Runs that end at a target end after unequal samples.
                losses=None if draft.reached is not None else losses(measured[i], measured, table),
                strategy=plan.strategy,
                redraws_dropout=plan.redraws_dropout,
                **costs(measured[i], table),
                options=options(plan),
                run_ids=tuple(run.plan.run_id for run in measured[i]),
            )
        )
    return tuple(made)


def _verdict(ratio: Estimate | None, adjusted_p: float) -> SettingVerdict:
    if ratio is None:
        return "no figure"
    if not ratio.is_confident:
        return "insufficient"
    if is_within_margin(ratio):
        return "equal"
    if adjusted_p < LEVEL and is_other_than(ratio, 1):
        return "faster" if ratio.value > 1 else "slower"
    return "undecided"


def _notes(runs: Sequence[Run], settings: Sequence[Setting], table: RunTable) -> Iterator[str]:
    """What is left out, and differences that no swept key explains: the ratios hold them too."""
    inert = sum(bool(setting.inert) for setting in settings)
    if inert:
        yield (
            f"In {inert} of {len(settings)} settings a requested value had no effect; they are marked, cannot be the "
            "best, and are left out of the axes."
        )
    measured = [run for run in runs if run.plan.run_id in table.runs]
    devices = sorted({rank.device.split(":")[0] for run in measured if run.record for rank in run.record.ranks})
    if len(devices) > 1:
        yield f"Runs were on different devices ({', '.join(devices)}): the ratios hold that difference too."
    facts = {
        label(found[0].plan.series.named): {run.plan.run_id: run_facts(run) for run in found}
        for found in _by_setting(measured)
    }
    if averaged := averaged_unlike(facts):
        yield sentence(averaged)
    swept = {key for run in measured for key in run.plan.series.axes}
    if "train.batch_per_rank" in swept and all(run.plan.workload.data.is_synthetic for run in measured):
        swept.add("data.num_samples")  # a pool of a few batches
    differences = [one for one in compared_unlike(facts) if one.key not in swept]
    if differences:
        yield f"Settings differ in {named(differences)}; unless the swept keys set that, the ratios hold it too."
