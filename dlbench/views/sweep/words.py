"""The findings of a sweep as sentences: the verdict of a rank count, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.table import times_cell
from dlbench.report.wording import DASH, basis_text, times_text, times_value
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.views.sweep.settings import MARGIN_TEXT, Axis, Setting

_MAX_NAMED = 3
"""Settings named in a sentence; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which of the settings at one rank count is to be preferred."""

    settings: tuple[Setting, ...]
    baseline: Setting
    """What all others are measured against."""
    has_default: bool
    """Whether the baseline is the default setting; otherwise it is the first of the sweep."""
    best: Setting | None
    """The fastest of those that are faster than the baseline for certain and are what their name says."""
    best_ratio: Estimate | None
    """What it gains, corrected for having been chosen."""
    best_exact: Setting | None
    """The same among those that compute what the baseline computes."""
    best_exact_ratio: Estimate | None
    ties: tuple[Setting, ...]
    """Others that are not distinguishable from the best."""
    needed_repeats: int | None
    """Repeats that would show a difference of the margin at the scatter found; None where it is not known."""

    @property
    def name(self) -> str:
        """The baseline, short."""
        return "the default" if self.has_default else self.baseline.label

    @property
    def compared(self) -> list[Setting]:
        """Settings with a ratio to the baseline."""
        return [setting for setting in self.settings if setting.ratio is not None and not setting.is_baseline]


def short_keys(keys: Sequence[str]) -> list[str]:
    """Keys as column titles: their last word, or all of them where two would be the same."""
    short = ["engine" if key == "engine.name" else key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else list(keys)


def baseline_words(choice: Choice) -> str:
    """What the settings are measured against."""
    text = choice.baseline.label
    if choice.has_default:
        return f"the default ({text})"
    return f"{text}, the first setting with figures: the default is not in the sweep, or has none"


def headline(best: str, ratio: Estimate | None, place: str, has_default: bool) -> tuple[str, str]:
    """The number of a card and what it means.

    Args:
        best: label of the best setting; empty where there is none.
        ratio: what it gains, corrected for having been chosen.
        place: such as `4 ranks on 2 nodes`.
        has_default: whether it is compared with the default.
    """
    name = "the default" if has_default else "the first setting"
    if ratio is None:
        return DASH, f"no setting is faster than {name} for certain, at {place}"
    cell = times_cell(ratio)
    return cell.text, f"the throughput of {name} {cell.interval} by {best}, at {place}; {basis_text(ratio)}"


def verdict(choice: Choice, axes: Sequence[Axis], place: str) -> str:
    """What the sweep found at a place such as `4 ranks on 2 nodes`."""
    return " ".join([*_best(choice, f"At {place}"), *_axes(axes)])


def _best(choice: Choice, start: str) -> list[str]:
    base = choice.baseline.label
    name = f"the default ({base})" if choice.has_default else base
    best, ratio = choice.best, choice.best_ratio
    if best is None or best.ratio is None or ratio is None:
        return [f"{start} {_no_best(choice.compared, name)}"]
    count = len(choice.compared)
    corrected = f", corrected for the choice among {count}; {times_value(best.ratio)} as measured" if count > 1 else ""
    parts = [
        f"{start} the best of {count + 1} settings is {best.label}: {times_text(ratio)} the throughput of {name} "
        f"({basis_text(ratio)}, in pairs{corrected})."
    ]
    if best.changes:
        parts.append(f"It changes the arithmetic ({', '.join(best.changes)}){_loss_text(best)}.")
        if choice.best_exact is not None and choice.best_exact_ratio is not None:
            parts.append(
                f"Of those that do not, the best is {choice.best_exact.label}: {times_text(choice.best_exact_ratio)}."
            )
    if choice.ties:
        named = "; ".join(setting.label for setting in choice.ties[:_MAX_NAMED])
        more = f"; and {len(choice.ties) - _MAX_NAMED} more" if len(choice.ties) > _MAX_NAMED else ""
        parts.append(f"Not distinguishable from it: {named}{more}.")
    return parts


def _no_best(others: Sequence[Setting], name: str) -> str:
    if not others:
        return f"only {name} has figures: there is nothing to compare."
    if any(setting.verdict == "insufficient" for setting in others):
        ratios = [setting.ratio.value for setting in others if setting.ratio is not None]
        return (
            f"nothing is decided: fewer than {MIN_RUNS} repeats of some setting ({min(ratios):.2f}x to "
            f"{max(ratios):.2f}x of {name})."
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


def advice(choice: Choice) -> str:
    """What to do next, in one sentence."""
    compared, best = choice.compared, choice.best
    if best is not None and best.changes and choice.best_exact in choice.ties:
        best = choice.best_exact
    if best is not None:
        base = f"Run with {best.options}"
        if not best.changes:
            return f"{base}."
        exact = "keep the default" if choice.best_exact is None else f"run with {choice.best_exact.options}"
        return f"{base} if the changed arithmetic is acceptable; otherwise {exact}."
    if compared and all(setting.verdict in ("equal", "slower") for setting in compared):
        kept = "the default" if choice.has_default else choice.baseline.options
        return f"Keep {kept}: nothing that was swept is worth setting."
    if not compared:
        return "Repeat the settings that have no figures."
    no_better = f"No setting is distinguishable from {choice.name} as the better one"
    if choice.needed_repeats is None:
        return (
            f"{no_better}; too few runs to plan: repeat each setting at least {MIN_RUNS} times (--repeats {MIN_RUNS})."
        )
    return (
        f"{no_better}; more repeats needed: about {choice.needed_repeats} runs of each setting for a difference of "
        f"{MARGIN_TEXT}."
    )
