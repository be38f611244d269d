"""Which setting of a sweep is to be preferred at one rank count, and what to do next, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, variance

from dlbench.analysis.side_by_side import alike, losses_text
from dlbench.report.wording import basis_text, reached_text, repeat_text, sentence, times_text, times_value, units_text
from dlbench.stats.estimates import MIN_RUNS, Estimate, gain_of_best, means_of, paired_logs
from dlbench.stats.multiplicity import pooled_freedom, repeats_for
from dlbench.stats.verdict import judge, ratio_of_logs
from dlbench.stats.verdict_words import SETTING_MARGIN, SETTING_MARGIN_TEXT
from dlbench.units import first_of
from dlbench.views.sweep.drafts import Draft
from dlbench.views.sweep.settings import SweptSetting

OVER = {False: "the throughput of", True: "as fast to the target as"}  # What decides, with a target and without.
MANY_REPEATS = 100
"""Ten hours of runs of a minute for six settings: from here on the scatter is to be mended, not the number of runs."""
_MAX_NAMED = 3  # Settings named in a sentence; the others are counted.


class SettingChoice:
    """Which of the settings at one rank count is to be preferred."""

    def __init__(self, draft: Draft, settings: tuple[SweptSetting, ...], family_size: int) -> None:
        self.draft, self.settings, self.baseline = draft, settings, settings[draft.base]
        known = (one for one in settings if one.decides is not None or one.outcome == "target missed")
        self.compared = [one for one in known if not one.is_baseline]
        self.is_missed = draft.to_target and self.baseline.decides is None
        sure = [one for one in self.compared if one.outcome == "better" and not one.inert]

        def gain(setting: SweptSetting) -> float:
            return setting.decides.value if setting.decides else 0.0

        # The fastest of those that are faster for certain and are what their name says; of all, and of those that
        # compute what the baseline computes.
        self.best = max(sure, key=gain, default=None)
        self.best_exact = max((one for one in sure if not one.changes), key=gain, default=None)
        self.ties = [] if self.best is None else [one for one in settings if one is not self.best and self._is_tie(one)]
        self.needed_repeats = self._needed(family_size)

    def _is_tie(self, setting: SweptSetting) -> bool:
        assert self.best is not None
        top, bottom = (self.draft.settings[self.settings.index(one)].speeds for one in (self.best, setting))
        logs = {} if setting.inert else paired_logs(top, bottom)
        if not logs:
            return False
        return not judge(ratio_of_logs(logs), SETTING_MARGIN, centre=1.0, none_at=1.0).is_difference

    def _needed(self, family_size: int) -> int | None:
        undecided = [
            draft.gain_logs if self.draft.is_ladder else draft.logs
            for one, draft in zip(self.settings, self.draft.settings, strict=True)
            if one.outcome in ("undecided", "insufficient")
        ]
        known = [means for logs in undecided if logs and len(means := means_of(logs)) >= MIN_RUNS]
        if not known:
            return None
        pooled = math.sqrt(fmean(variance(means) for means in known))
        freedom = pooled_freedom(len(known), fmean(map(len, known)))
        return max(MIN_RUNS, repeats_for(pooled, SETTING_MARGIN, family_size, freedom))

    def gain_of(self, best: SweptSetting | None) -> Estimate | None:
        """What the best of all settings gains, corrected for the choice."""
        if best is None:
            return None
        others = [i for i in range(len(self.settings)) if i != self.draft.base]
        drafts = [self.draft.settings[i] for i in others]
        logs = [means_of(one.logs) if one.logs else [] for one in drafts]
        found, ratio = gain_of_best(logs, others.index(self.settings.index(best))), best.decides
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
            f"{OVER[self.draft.to_target]} {name} ({basis_text(ratio)}, in pairs{corrected})."
        ]
        if best.changes:
            parts.append(f"It changes the arithmetic ({', '.join(best.changes)}){loss_text(best)}.")
            exact, gained = self.best_exact, self.gain_of(self.best_exact)
            if exact is not None and gained is not None:
                parts.append(f"Of those that do not, the best is {exact.label}: {times_text(gained)}.")
        elif best.strategy != self.baseline.strategy:
            parts.append(f"{sentence(strategy_words(best, self.baseline))}")
        if self.ties:
            labels = first_of([setting.label for setting in self.ties], _MAX_NAMED, "; ")
            parts.append(f"Not distinguishable from it: {labels}.")
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
            if not best.changes or self.draft.to_target:
                return f"{base}."
            exact = "keep the default" if self.best_exact is None else f"run with {self.best_exact.options}"
            return f"{base} if the changed arithmetic is acceptable; otherwise {exact}."
        if not compared:
            return "Repeat the settings that have no figures."
        apart = [one.options for one in compared if one.outcome == "faster per step"]
        if apart:
            why = "a step of it is not the same training"
            return f"Train to a target (--to-accuracy) with {apart[0]} and without: {why}."
        if all(setting.outcome in ("equal", "worse", "target missed") for setting in compared):
            kept = "the default" if self.draft.has_default else self.baseline.options
            return f"Keep {kept}: nothing that was swept is worth setting."
        fewest = min((one.decides for one in compared if one.decides is not None), key=lambda ratio: ratio.units)
        name = "the default" if self.draft.has_default else self.baseline.label
        text = f"no setting is distinguishable from {name} as the better one"
        needed = self.needed_repeats
        if needed is None:
            return sentence(f"{repeat_text(fewest)}: {text} in {units_text(fewest)}")
        if needed > MANY_REPEATS:
            much = f"a difference of {SETTING_MARGIN_TEXT} would take {needed} repeats of each"
            return f"Find what makes runs of one setting differ first: {much}."
        return sentence(f"{repeat_text(fewest, needed)}: {text}; that many show a difference of {SETTING_MARGIN_TEXT}")


def _no_best(others: Sequence[SweptSetting], name: str) -> str:
    if not others:
        return f"only {name} has figures: there is nothing to compare."
    ratios = [setting.decides for setting in others if setting.decides is not None]
    if any(setting.outcome == "insufficient" for setting in others) and ratios:
        ends = dict.fromkeys(times_value(pick(ratios, key=lambda one: one.value)) for pick in (min, max))
        few = units_text(min(ratios, key=lambda one: one.units))
        return f"nothing is decided in {few} ({' to '.join(ends)} of {name})."
    inert = "faster but not what was asked for"
    said = alike(others, lambda one: inert if one.outcome == "better" else one.verdict_title.replace(";", ","))
    counts = ", ".join(f"{len(found)} {title}" for title, found in said.items())
    goal = " to the target" * (others[0].num_reached is not None)
    return f"no setting is faster{goal} than {name} for certain: of {len(others)} others {counts}."


def strategy_words(setting: SweptSetting, baseline: SweptSetting | None = None) -> str:
    """What another strategy than the baseline's changes: memory, never the mathematics, which its loss shows."""
    more = ""
    if setting.memory_bytes and baseline is not None and baseline.memory_bytes:
        more = f", {setting.memory_bytes / baseline.memory_bytes:.2f} times the memory per rank"
    draw = " but for another draw of dropout" if setting.redraws_dropout else ""
    return f"the same mathematics{draw} (strategy {setting.strategy}){more}{loss_text(setting)}"


def loss_text(setting: SweptSetting) -> str:
    """The loss beside its reference's, to be put behind a clause; empty where it is not compared."""
    found = setting.losses
    if found is None or found.own is None:
        return "" if found is None else "; its loss is not finite"
    if found.reference is None:
        return f"; its loss cannot be compared: {found.why}"
    return f"; {losses_text(found.own.value, found.reference.value, found.reference_label)}"
