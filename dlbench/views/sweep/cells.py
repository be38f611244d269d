"""All settings of a sweep at one rank count, side by side: each against the default, in pairs of repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from dlbench.reading.environments import compare
from dlbench.reading.run_table import RunTable
from dlbench.records.registry import data_source
from dlbench.records.scan import Run
from dlbench.specs.plan import AxisValue
from dlbench.stats.estimates import MIN_RUNS, Estimate, by_definition, median_estimate, ratio_estimate
from dlbench.stats.multiplicity import LEVEL, holm, paired_p, repeats_for
from dlbench.views.sweep.axes import (
    MARGIN,
    Axis,
    Interaction,
    Measured,
    axes,
    excludes_one,
    interaction,
    is_within_margin,
)
from dlbench.views.sweep.settings import (
    Autotuned,
    Losses,
    acting_keys,
    autotuned,
    changed_arithmetic,
    is_default,
    losses,
)

SettingVerdict = Literal["baseline", "faster", "slower", "equal", "undecided", "insufficient", "no figure"]
"""Against the baseline. equal: within the margin, interval and all. undecided: neither that nor a difference."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One combination of the swept keys at one rank count."""

    values: Mapping[str, AxisValue]
    acting: frozenset[str]
    """Swept keys that act in it."""
    is_baseline: bool
    run_ids: tuple[str, ...]
    """Runs with figures."""
    num_planned: int
    """Runs of the series that were to measure it."""
    why: str
    """Why the first of the others has no figure; empty where all have."""
    throughput: Estimate | None
    """Samples a second, median over runs."""
    ratio: Estimate | None
    """To the baseline's, over the repeats that both have (1)."""
    adjusted_p: float | None
    """Of that ratio, after Holm over all settings of the cell; None at the baseline."""
    verdict: SettingVerdict
    changes: tuple[str, ...]
    """What is computed otherwise than at the baseline, in words."""
    inert: tuple[str, ...]
    """Settings of its runs that had no effect: it is not what its name says."""
    autotune: Autotuned | None
    losses: Losses | None
    """The loss after equal steps beside that of fp32 on the wire; None where the wire is that."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All settings at one rank count, with equal preset, precision and data."""

    ranks: int
    nodes: int
    preset: str
    precision: str
    data: str
    has_default: bool
    """Whether the baseline is the default setting; otherwise it is the first of the sweep."""
    settings: tuple[Setting, ...]
    """In the order of the sweep."""
    axes: tuple[Axis, ...]
    interaction: Interaction | None
    best: Setting | None
    """The fastest of those that are faster than the baseline for certain and are what their name says."""
    best_exact: Setting | None
    """The same among those that compute what the baseline computes."""
    ties: tuple[Setting, ...]
    """Others that are not distinguishable from the best."""
    needed_repeats: int | None
    """Repeats that would show a difference of the margin at the scatter found; None where it is not known."""
    notes: tuple[str, ...]
    """What else differs between the runs, in sentences."""

    @property
    def baseline(self) -> Setting:
        """What all others are measured against."""
        return next(setting for setting in self.settings if setting.is_baseline)


def place_of(run: Run) -> tuple[int, int, str, str, str]:
    """Ranks, nodes, preset, precision, data: what settings must share to be compared."""
    plan = run.plan
    return (
        plan.layout.ranks,
        plan.layout.nodes,
        plan.workload.preset,
        plan.workload.train.precision,
        data_source(run),
    )


def by_setting(runs: Sequence[Run]) -> dict[tuple[str, ...], list[Run]]:
    """Runs by their swept values, in the order given."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        values = tuple(f"{key}={value!r}" for key, value in sorted(run.plan.series.axes.items()))
        found.setdefault(values, []).append(run)
    return found


def rates_of(runs: Sequence[Run], table: RunTable) -> dict[int, float]:
    """Throughput by repeat, of the runs with figures."""
    rates = table.figures.set_index("run_id")["throughput"]
    return {run.plan.series.repeat: float(rates[run.plan.run_id]) for run in runs if run.plan.run_id in table.runs}


def cell_of(runs: Sequence[Run], table: RunTable) -> Cell:
    """The comparison of all settings of one rank count.

    Args:
        runs: every run of the series there, in the order of the request, those without figures too.
        table: figures, and why there are none; some run must have some.
    """
    groups = list(by_setting(runs).values())
    rates = [rates_of(group, table) for group in groups]
    firsts = groups[0][0].plan.series.axes
    defaults = [i for i, group in enumerate(groups) if rates[i] and is_default(group[0].plan, firsts)]
    base = defaults[0] if defaults else next(i for i, found in enumerate(rates) if found)
    settings = _settings(groups, rates, base, table)
    logs = [_logs(found, rates[base]) for found in rates]
    settings = _decided(settings, logs)
    measured = [
        Measured(values=setting.values, acting=setting.acting, throughput=found)
        for setting, found in zip(settings, rates, strict=True)
        # What had no effect would make its axis look as if it had none.
        if found and not setting.inert
    ]
    effects = axes(measured, settings[base].values)
    sure = [setting for setting in settings if setting.verdict == "faster" and not setting.inert]
    best = max(sure, key=_gain, default=None)
    ranks, nodes, preset, precision, data = place_of(runs[0])
    return Cell(
        ranks=ranks,
        nodes=nodes,
        preset=preset,
        precision=precision,
        data=data,
        has_default=bool(defaults),
        settings=tuple(settings),
        axes=tuple(effects),
        interaction=interaction(measured, effects),
        best=best,
        best_exact=max((setting for setting in sure if not setting.changes), key=_gain, default=None),
        ties=_ties(settings, rates, best),
        needed_repeats=_needed(logs, settings),
        notes=tuple(_notes(runs, settings, table)),
    )


def _gain(setting: Setting) -> float:
    assert setting.ratio is not None
    return setting.ratio.value


def _settings(
    groups: Sequence[Sequence[Run]], rates: Sequence[Mapping[int, float]], base: int, table: RunTable
) -> list[Setting]:
    """Every setting, not yet with a verdict."""
    without = {item.run.plan.run_id: f"{item.state}: {item.why}" for item in table.without}
    measured = [[run for run in group if run.plan.run_id in table.runs] for group in groups]
    rate_base = median_estimate(list(rates[base].values())).value
    made = []
    for i, group in enumerate(groups):
        plan = group[0].plan
        ratio = by_definition(1.0, len(rates[i])) if i == base else ratio_of(rates[i], rates[base])
        missing = [run.plan.run_id for run in group if run.plan.run_id not in table.runs]
        made.append(
            Setting(
                values=dict(sorted(plan.series.axes.items())),
                acting=acting_keys(plan),
                is_baseline=i == base,
                run_ids=tuple(run.plan.run_id for run in measured[i]),
                num_planned=max(len(group), plan.series.repeats),
                why=without[missing[0]] if missing else "",
                throughput=median_estimate(list(rates[i].values())) if rates[i] else None,
                ratio=ratio,
                adjusted_p=None,
                verdict="baseline" if i == base else "no figure",
                changes=changed_arithmetic(plan),
                inert=tuple(sorted({text for run in measured[i] if run.record for text in run.record.inert})),
                autotune=autotuned(measured[i], ratio, rate_base),
                losses=losses(measured[i], measured),
            )
        )
    return made


def ratio_of(top: Mapping[int, float], bottom: Mapping[int, float]) -> Estimate | None:
    """The ratio of two settings over the repeats that both have, resampled in pairs; None without any."""
    both = sorted(top.keys() & bottom.keys())
    if not both:
        return None
    return ratio_estimate({("", k): top[k] for k in both}, {("", k): bottom[k] for k in both})


def _logs(top: Mapping[int, float], bottom: Mapping[int, float]) -> list[float]:
    return [math.log(top[repeat] / bottom[repeat]) for repeat in sorted(top.keys() & bottom.keys())]


def _decided(settings: Sequence[Setting], logs: Sequence[Sequence[float]]) -> list[Setting]:
    """The settings with their verdicts: a difference must leave 1 out, stand after Holm, and leave the margin."""
    compared = [i for i, setting in enumerate(settings) if setting.ratio is not None and not setting.is_baseline]
    adjusted = dict(zip(compared, holm([paired_p(logs[i]) for i in compared]), strict=True))
    return [
        replace(setting, adjusted_p=adjusted[i], verdict=_verdict(setting.ratio, adjusted[i]))
        if i in adjusted and setting.ratio is not None
        else setting
        for i, setting in enumerate(settings)
    ]


def _verdict(ratio: Estimate, adjusted_p: float) -> SettingVerdict:
    if ratio.n < MIN_RUNS:
        return "insufficient"
    if is_within_margin(ratio):
        return "equal"
    if adjusted_p < LEVEL and excludes_one(ratio):
        return "faster" if ratio.value > 1 else "slower"
    return "undecided"


def _ties(
    settings: Sequence[Setting], rates: Sequence[Mapping[int, float]], best: Setting | None
) -> tuple[Setting, ...]:
    if best is None:
        return ()
    top = rates[settings.index(best)]
    others = [(s, ratio_of(top, rates[i])) for i, s in enumerate(settings) if s is not best and not s.inert]
    return tuple(s for s, ratio in others if ratio is not None and (not excludes_one(ratio) or is_within_margin(ratio)))


def _needed(logs: Sequence[Sequence[float]], settings: Sequence[Setting]) -> int | None:
    """Repeats for the margin at the pooled scatter of what is not decided yet; of all where all is."""
    open_ones = [logs[i] for i, s in enumerate(settings) if s.verdict in ("undecided", "insufficient")]
    scatters = [stdev(found) for found in open_ones if len(found) > 1]
    if not scatters:
        return None
    pooled = math.sqrt(fmean(scatter**2 for scatter in scatters))
    return max(MIN_RUNS, repeats_for(pooled, MARGIN, len(settings) - 1))


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
    keys = [item.key for item in compare(measured).differences if not item.expected]
    if keys:
        shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        yield f"Runs differ in their environment ({shown}): unless the swept keys set that, the ratios hold it too."
