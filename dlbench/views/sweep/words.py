"""The findings of a sweep as sentences: verdicts of rank counts, axes and the autotuner, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from dlbench.report.wording import DASH, basis_text, clean, figure_text, place_text, times_text
from dlbench.specs.plan import AxisValue
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.figure import figure_of
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.sweep.axes import MARGIN, Axis, Interaction
from dlbench.views.sweep.cells import Cell, Setting
from dlbench.views.sweep.settings import Autotuned

MARGIN_TEXT = f"{MARGIN * 100:g} %"
_MAX_NAMED = 3
"""Settings named in a sentence; the others are counted."""


def value_text(key: str, value: AxisValue) -> str:
    """A swept value for readers, e.g. ``64 MiB``, ``on``, ``none``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return clean(str(value), 80)


def label(values: Mapping[str, AxisValue]) -> str:
    """A setting by its values, in the order of the keys."""
    return ", ".join(value_text(key, value) for key, value in values.items())


def short_keys(keys: Sequence[str]) -> list[str]:
    """Keys as column titles: their last word, or all of them where two would be the same."""
    short = ["engine" if key == "engine.name" else key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else list(keys)


def options(setting: Setting) -> str:
    """The options that ask for a setting; keys that act in no run of it are left out."""
    return " ".join(
        f"--set {shlex.quote(f'{key}={_yaml(value)}')}"
        for key, value in setting.values.items()
        if key in setting.acting
    )


def _yaml(value: AxisValue) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return clean(str(value))


def baseline(cell: Cell) -> str:
    """What a cell's settings are measured against."""
    text = label(cell.baseline.values)
    if cell.has_default:
        return f"the default ({text})"
    return f"{text}, the first setting with figures: the default is not in the sweep, or has none"


def verdict(cell: Cell) -> str:
    """What the sweep found at one rank count."""
    place = place_text(cell.ranks, cell.nodes)
    return " ".join([*_best(cell, f"At {place}"), *_axes(cell.axes)])


def headline(cell: Cell) -> tuple[str, str]:
    """The number of a card and what it means."""
    place = place_text(cell.ranks, cell.nodes)
    name = "the default" if cell.has_default else "the first setting"
    if cell.best is None or cell.best.ratio is None:
        return DASH, f"no setting is faster than {name} for certain, at {place}"
    figure = figure_of(cell.best.ratio, "ratio")
    value, _, interval = times_text(figure).partition(" ")
    return value, f"the throughput of {name} {interval} by {label(cell.best.values)}, at {place}; {basis_text(figure)}"


def _best(cell: Cell, start: str) -> list[str]:
    others = [setting for setting in cell.settings if setting.ratio is not None and not setting.is_baseline]
    base = label(cell.baseline.values)
    name = f"the default ({base})" if cell.has_default else base
    if cell.best is None:
        return [f"{start} {_no_best(cell, others, name)}"]
    ratio = cell.best.ratio
    assert ratio is not None
    parts = [
        f"{start} the best of {len(others) + 1} settings is {label(cell.best.values)}: {_times(ratio)} the throughput "
        f"of {name} ({basis_text(figure_of(ratio, 'ratio'))}, in pairs)."
    ]
    if cell.best.changes:
        parts.append(f"It changes the arithmetic ({', '.join(cell.best.changes)}){_loss_text(cell.best)}.")
        if cell.best_exact is not None and cell.best_exact.ratio is not None:
            parts.append(
                f"Of those that do not, the best is {label(cell.best_exact.values)}: {_times(cell.best_exact.ratio)}."
            )
    if cell.ties:
        named = "; ".join(label(setting.values) for setting in cell.ties[:_MAX_NAMED])
        more = f"; and {len(cell.ties) - _MAX_NAMED} more" if len(cell.ties) > _MAX_NAMED else ""
        parts.append(f"Not distinguishable from it: {named}{more}.")
    return parts


def _no_best(cell: Cell, others: Sequence[Setting], name: str) -> str:
    if not others:
        return f"only {name} has figures: there is nothing to compare."
    if any(setting.verdict == "insufficient" for setting in others):
        ratios = [setting.ratio for setting in others if setting.ratio is not None]
        span = f"{min(r.value for r in ratios):.2f}x to {max(r.value for r in ratios):.2f}x"
        return (
            f"nothing is decided: insufficient, fewer than {MIN_RUNS} repeats of some setting (medians {span} of "
            f"{name})."
        )
    slower = sum(setting.verdict == "slower" for setting in others)
    equal = sum(setting.verdict == "equal" for setting in others)
    inert = sum(setting.verdict == "faster" for setting in others)
    counts = [
        f"{count} {words}"
        for count, words in (
            (slower, "slower"),
            (equal, f"equal within {MARGIN_TEXT}"),
            (inert, "faster but not what was asked for"),
            (len(others) - slower - equal - inert, "undecided"),
        )
        if count
    ]
    return f"no setting is faster than {name} for certain: of {len(others)} others {', '.join(counts)}."


def _loss_text(setting: Setting) -> str:
    found = setting.losses
    if found is None:
        return ""
    if found.own is None:
        return "; its loss is not finite"
    if found.reference is None:
        return f"; its loss cannot be compared: {found.why}"
    return f"; loss after equal steps {found.own.value:.4g} against {found.reference.value:.4g} with fp32"


def _times(ratio: Estimate) -> str:
    return times_text(figure_of(ratio, "ratio"))


def _axes(axes: Sequence[Axis]) -> list[str]:
    """Axes by their verdicts, in a sentence."""
    words = {
        "matters": "matters",
        "no effect": f"no effect within {MARGIN_TEXT}",
        "undecided": "undecided",
        "insufficient": "insufficient",
    }
    parts = []
    for verdict_name, words_of in words.items():
        names = [axis.key for axis in axes if axis.verdict == verdict_name]
        if names:
            parts.append(f"{words_of}: {', '.join(names)}")
    text = "; ".join(parts)
    return [f"{text[:1].upper()}{text[1:]}."] if text else []


def axis_words(axis: Axis) -> str:
    """The verdict on one axis."""
    if axis.widest is None:
        return "insufficient: no two of its values ran with the same values of the others"
    fast, slow, ratio = axis.widest
    widest = f"{value_text(axis.key, fast)} over {value_text(axis.key, slow)} is {_times(ratio)}, all else equal"
    return {
        "matters": f"matters: {widest}",
        "no effect": f"no effect: all values within {MARGIN_TEXT} ({widest}); it may stay as it is",
        "undecided": f"undecided: {widest}; neither a difference for certain, nor within {MARGIN_TEXT}",
        "insufficient": f"insufficient: fewer than {MIN_RUNS} repeats ({widest})",
    }[axis.verdict]


def interaction_words(found: Interaction | None) -> str:
    """The check of additivity; empty where it could not be made."""
    if found is None:
        return ""
    deviation = figure_text(figure_of(found.deviation, "ratio"))
    if not found.is_claimed:
        return (
            "The axes add up: no combination deviates for certain from what their effects alone would give (largest: "
            f"{label(found.values)}, {deviation})."
        )
    return (
        f"The axes interact: {label(found.values)} has {deviation} times the throughput that their effects alone would "
        "give, so look at settings, not at axes."
    )


def advice(cell: Cell) -> str:
    """What to do next, in one sentence."""
    compared = [setting for setting in cell.settings if setting.ratio is not None and not setting.is_baseline]
    best = cell.best
    if best is not None and best.changes and cell.best_exact in cell.ties:
        best = cell.best_exact
    if best is not None:
        base = f"Run with {options(best)}"
        if not best.changes:
            return f"{base}."
        exact = "keep the default" if cell.best_exact is None else f"run with {options(cell.best_exact)}"
        return f"{base} if the changed arithmetic is acceptable; otherwise {exact}."
    if compared and all(setting.verdict in ("equal", "slower") for setting in compared):
        kept = "the default" if cell.has_default else options(cell.baseline)
        return f"Keep {kept}: nothing that was swept is worth setting."
    if not compared:
        return "Repeat the settings that have no figures."
    name = "the default" if cell.has_default else label(cell.baseline.values)
    count = "at least 5 runs" if cell.needed_repeats is None else f"about {cell.needed_repeats} runs"
    return (
        f"No setting is distinguishable from {name} as the better one; more repeats needed: {count} of each setting "
        f"for a difference of {MARGIN_TEXT}."
    )


def autotune_words(found: Autotuned, *, is_faster: bool) -> str:
    """Horovod's autotuner: what it chose, at what cost, and when that is paid back."""
    steps = f"{found.planned_steps:,} steps planned"
    if found.settled_step is not None:
        steps = f"settled at step {found.settled_step:,.0f} ({steps})"
    parts = [f"tried {found.evaluations:g} settings, {steps}"]
    if found.num_finished < found.num_runs:
        late = found.num_runs - found.num_finished
        parts.append(f"had not settled before the measured steps in {late} of {found.num_runs} runs")
    parts.append(f"chose {' or '.join(chosen_texts(found))}")
    if found.cost_s is None:
        return "; ".join([*parts, "what the search cost is not known"])
    parts.append(f"the search cost {figure_text(figure_of(found.cost_s, 's'))}")
    if found.break_even_steps is None:
        return "; ".join([*parts, "never paid back: a step is no faster than at the baseline"])
    gain = format_seconds(found.gain_s or 0.0)
    sure = "" if is_faster else ", a gain that is not certain"
    return "; ".join(
        [*parts, f"paid back after {format_number(found.break_even_steps, 3)} steps ({gain} a step{sure})"]
    )


def chosen_texts(found: Autotuned) -> list[str]:
    """Fusion threshold and cycle time that it chose, each pair once."""
    return [
        f"{'an unknown threshold' if threshold is None else format_bytes(threshold)} and "
        f"{'an unknown cycle' if cycle is None else f'{cycle:.3g} ms'}"
        for threshold, cycle in found.chosen
    ]
