"""A series of a history: its nights, levels and changes; its numbers and days as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from dlbench.history.change_points import MIN_EFFECT, MIN_NIGHTS, Newest, Shape
from dlbench.history.history import Acknowledgement
from dlbench.report.table import Cell, column, unit_cell
from dlbench.report.wording import basis_text, clean, number_text, place_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import TREND
from dlbench.units import first_of, plural

MAX_NAMED_HOSTS = 4  # Hosts of a night that a table names.
MOST_EVIDENCE = 1e6  # Larger Bayes factors are printed as above this one.
MAX_COMMITS = 3  # Commits of one side of a change that are named.
MAX_COMMIT_LENGTH = 60
MAX_HOSTS = 6  # Hosts of one side of a change that are named.
ChangeWord = Literal["regression", "improvement"]
NOT_COMPARED = "a slow change has no date, so commits and environments are not compared"
NO_DIFFERENCE = "no recorded key of the environment differs between all runs before and all runs after"
_SHAPE_TEXTS = {"step": "{}", "drift": "slow {}", "step or drift": "{}, at once or slowly"}


def day(moment: str) -> str:
    """Returns the day of a moment in UTC, e.g. ``2026-03-04``."""
    return moment[:10]


def day_if_any(moment: str) -> str | None:
    """Returns the day of a moment; None of an empty text."""
    return day(moment) or None


def nights_text(count: int) -> str:
    """Returns ``1 night``, ``5 nights``."""
    return f"{count} {plural('night', count)}"


def names_text(names: Sequence[str]) -> str | None:
    """Returns all names with commas; None if there are none."""
    return ", ".join(names) or None


def hosts_text(names: Sequence[str]) -> str | None:
    """Returns the names of up to `MAX_NAMED_HOSTS` hosts, or the number of more; None if there are none."""
    return str(len(names)) if len(names) > MAX_NAMED_HOSTS else names_text(names)


def amount_text(value: float, unit: str) -> str:
    """Returns one number with its unit, e.g. ``12.3 ms``, ``4.1 J``."""
    text = number_text(value, unit)
    return text if unit in ("s", "fraction") else f"{text} {unit}"


def level_text(level: Estimate) -> str:
    """Returns a level with its interval, e.g. ``101 ms [100, 102]``."""
    return str(unit_cell(level))


def percent_change(ratio: float) -> str:
    """Returns a ratio as a change, e.g. ``+4.8 %``."""
    return f"{(ratio - 1) * 100:+.1f} %"


def change_cell(ratio: Estimate) -> Cell:
    """Returns a ratio as a change with its interval, e.g. ``+4.8 % [+3.9, +5.6]``."""
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f"[{(ratio.low - 1) * 100:+.1f}, {(ratio.high - 1) * 100:+.1f}]"
    return Cell(percent_change(ratio.value), interval, number=ratio.value)


def ratio_cell(ratio: Estimate) -> Cell:
    """Returns a ratio near 1 with its interval, e.g. ``1.048 [1.031, 1.060]``."""
    interval = ""
    if ratio.low is not None and ratio.high is not None:
        interval = f"[{ratio.low:.3f}, {ratio.high:.3f}]"
    return Cell(f"{ratio.value:.3f}", interval, number=ratio.value)


def evidence_text(evidence: float) -> str:
    """Returns ``Bayes factor 2400``, or ``Bayes factor > 1e6``."""
    if evidence > MOST_EVIDENCE:
        return "Bayes factor > 1e6"
    return f"Bayes factor {evidence:.0f}"


@dataclass(frozen=True, kw_only=True)
class Night:
    """The runs of one session at one point."""

    time: str = field(metadata=column("Night"))  # Time when the last run finished, UTC, ISO 8601.
    series: str = field(metadata=column())
    value: float  # Median over the runs, in the metric's unit.
    values: tuple[float, ...]
    run_ids: tuple[str, ...]
    commits: tuple[str, ...] = field(metadata=column("Commit", value=" ".join, text=names_text))
    """Different commits, in order of the runs; empty if none is known."""
    hosts: tuple[str, ...] = field(metadata=column("Hosts", value=" ".join, text=hosts_text))
    level: int  # Index of the series' level that it belongs to, from 0.


@dataclass(frozen=True, kw_only=True)
class LevelStretch:
    """Consecutive nights without a change."""

    first: str = field(metadata=column("From", text=day))  # End of its first night, UTC.
    last: str = field(metadata=column("To", text=day))
    num_nights: int
    value: Estimate = field(metadata=column("Level now", "level", text=unit_cell))
    """Median over nights; `n` counts nights. For a drift the level at its last night."""
    at_first: float  # The level at its first night: `value.value` without a drift.

    @property
    def is_drift(self) -> bool:
        return self.at_first != self.value.value

    @property
    def basis(self) -> str:
        return basis_text(self.value, "night")


@dataclass(frozen=True, kw_only=True)
class DifferingKey:
    """A key whose values in the runs after a change are all different from those before it."""

    key: str  # Key of the environment, or `tag.NAME`.
    before: str  # Values in order of time, the newest of many; `not set` for runs without one.
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def _listed(differences: Sequence[DifferingKey]) -> str:
    return " | ".join(map(str, differences))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change point and the differences between the runs before and after it, which are no proven causes."""

    kind: ChangeWord = field(metadata=column())
    shape: Shape = field(metadata=column())  # A drift has no date, so no differences are listed with it.
    time: str = field(metadata=column("First night after", text=day))  # End of that night, UTC; of a drift its first.
    last_before: str = field(metadata=column())  # End of the last night certainly before it, UTC; of a drift its first.
    first_after: str = field(metadata=column())  # End of the first night certainly after it, UTC; of a drift its last.
    before: Estimate = field(metadata=column("From", text=unit_cell))  # Level; of a drift at its first night.
    after: Estimate = field(metadata=column("To", text=unit_cell))
    ratio: Estimate = field(metadata=column("Ratio", text=change_cell))
    evidence: float = field(metadata=column("Evidence", text=evidence_text))  # Bayes factor (1), corrected.
    acknowledged: Acknowledgement | None = field(metadata=column(value=attrgetter("reason")))
    """None if the change is not acknowledged, or has become worse since."""
    commits_before: tuple[str, ...] = field(metadata=column(value=" ".join))  # Commits of the night `last_before`.
    commits_after: tuple[str, ...] = field(metadata=column(value=" ".join))
    runs_before: tuple[str, ...]
    runs_after: tuple[str, ...]
    differences: tuple[DifferingKey, ...] = field(metadata=column(value=_listed))
    """Differences between all runs of the levels before and after, without the nights that may belong to either side;
    keys with a new value nearly every night are left out."""
    new_hosts: tuple[str, ...] = field(metadata=column(value=" ".join))  # Hosts used after it only.
    removed_hosts: tuple[str, ...] = field(metadata=column(value=" ".join))  # Hosts used before it only.

    @property
    def is_drift(self) -> bool:
        """True for a change over many nights, which has no date."""
        return self.shape == "drift"

    @property
    def words(self) -> str:
        """E.g. ``regression``, ``slow regression`` (a drift), ``regression, at once or slowly``."""
        return _SHAPE_TEXTS[self.shape].format(self.kind)

    @property
    def since(self) -> str:
        """E.g. ``since 2026-03-04``, or for a drift ``from 2026-03-04 to 2026-06-02``."""
        if self.is_drift:
            return f"from {day(self.last_before)} to {day(self.first_after)}"
        return f"since {day(self.time)}"

    @property
    def when(self) -> str:
        """E.g. ``on 2026-03-04``; for a drift `since`."""
        return self.since if self.is_drift else f"on {day(self.time)}"

    @property
    def between(self) -> str:
        if self.is_drift:
            return f"slowly, over the nights of {day(self.last_before)} to {day(self.first_after)}"
        return f"between the nights of {day(self.last_before)} and {day(self.first_after)}"

    @property
    def days(self) -> str:
        return f"{day(self.last_before)}, {day(self.first_after)}"

    @property
    def basis(self) -> str:
        if self.is_drift:
            return f"{nights_text(self.ratio.n)} of the drift, slope by Theil and Sen"
        return f"{basis_text(self.before, 'night')} before, {nights_text(self.after.n)} after"

    @property
    def commits(self) -> str:
        """E.g. ``commit 1a2b3c -> 4d5e6f``, or that none is known; empty for a drift."""
        if self.is_drift:
            return ""
        if not self.commits_before and not self.commits_after:
            return "commit not known"
        before, after = _commits(self.commits_before), _commits(self.commits_after)
        if set(self.commits_before) == set(self.commits_after):
            return f"commit {before} on both sides"
        return f"commit {before} -> {after}"

    @property
    def environment(self) -> tuple[str, ...]:
        """The differences other than commits, a line each; one line if there are none."""
        if self.is_drift:
            return (NOT_COMPARED,)
        lines = [str(difference) for difference in self.differences]
        if self.new_hosts:
            lines.append(f"hosts used only since: {first_of(self.new_hosts, MAX_HOSTS)}")
        if self.removed_hosts:
            lines.append(f"hosts used only before: {first_of(self.removed_hosts, MAX_HOSTS)}")
        return tuple(lines) or (NO_DIFFERENCE,)


@dataclass(frozen=True, kw_only=True)
class NewestNights(Newest):
    """The newest nights, outside the usual range and too few for a change point."""

    is_worse: bool


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One metric of one point over time."""

    id: str
    label: str = field(metadata=column())  # Configuration, ranks and metric in words.
    group: str = field(metadata=column())
    configuration: str
    system: str = field(metadata=column())
    workload: str = field(metadata=column())
    preset: str = field(metadata=column())
    engine: str = field(metadata=column())
    ranks: int = field(metadata=column())
    nodes: int = field(metadata=column())
    metric: str = field(metadata=column())
    title: str
    unit: str = field(metadata=column())
    higher_is_worse: bool
    caption: str
    verdict: str = field(init=False, metadata=column())  # The last change and the level, in one or two sentences.
    num_runs: int = field(metadata=column("Runs"))
    is_long_enough: bool  # Whether there are enough nights for a change point.
    nights: tuple[Night, ...] = field(metadata=column("Nights", "num_nights", value=len))
    levels: tuple[LevelStretch, ...]  # Levels between changes; at least one.
    changes: tuple[Change, ...]
    newest: NewestNights | None  # None if the newest night is usual, or there are too few nights to know that.

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self._verdict())

    @property
    def standing(self) -> Literal["too few nights", "worse", "odd", "as usual"]:
        """The state for ratings and gates; `worse`: a regression is not acknowledged, `odd`: only newest nights."""
        if not self.is_long_enough:
            return "too few nights"
        if self.open_regressions:
            return "worse"
        if self.newest is not None and self.newest.is_worse:
            return "odd"
        return "as usual"

    @property
    def open_regressions(self) -> tuple[Change, ...]:
        """Regressions that are not acknowledged, if the present level is still worse than before them."""
        min_shift = math.log1p(MIN_EFFECT)
        if not self.higher_is_worse:
            min_shift = -min_shift
        present_level = self.level.value.value
        return tuple(
            change
            for change in self.changes
            if change.kind == TREND["worse"].word
            and change.acknowledged is None
            and math.log(present_level / change.before.value) / min_shift >= 1
        )

    @property
    def num_changes(self) -> int | None:
        return len(self.changes) if self.is_long_enough else None

    @property
    def level(self) -> LevelStretch:
        return self.levels[-1]

    @property
    def point(self) -> str:
        return f"{self.configuration}; {place_text(self.ranks, self.nodes)}"

    @property
    def subject(self) -> str:
        return self.title.lower()

    @property
    def newest_nights_text(self) -> str:
        """Sentences on newest nights outside the usual range, and how many more to wait for; empty without any."""
        newest = self.newest
        if newest is None:
            return ""
        nights = f"The newest {newest.num_outside} nights are"
        if newest.num_outside == 1:
            nights = "The newest night is"
        usual = f"{amount_text(newest.low, self.unit)} to {amount_text(newest.high, self.unit)}"
        word = "worse" if newest.is_worse else "better"
        return (
            f"{nights} outside the usual range ({self.subject} {percent_change(newest.ratio)}, {word}; usual: "
            f"{usual}). That is not yet a change point: wait for {newest.wait_for} or more such nights."
        )

    @property
    def short_verdict(self) -> str:
        count = nights_text(len(self.nights))
        if not self.is_long_enough:
            return count
        if not self.changes:
            return f"{TREND['equal'].word} in {count}"
        last = self.changes[-1]
        text = f"{last.words} {last.when}, {percent_change(last.ratio.value)}"
        return f"{text}, acknowledged" if last.acknowledged else text

    def _verdict(self) -> str:
        count, level = nights_text(len(self.nights)), level_text(self.level.value)
        if not self.is_long_enough:
            return f"{count}, level {level}; a change point needs {MIN_NIGHTS} nights."
        if not self.changes:
            return f"No change in {count}; level {level}."
        last = self.changes[-1]
        text = f"{last.words.capitalize()} {last.when}: {self.subject} {change_cell(last.ratio)}"
        if len(self.changes) > 1:
            text += f" ({len(self.changes)} changes in all)"
        text += "; at its end" if last.is_drift else "; since then"
        text += f" {level_text(last.after)} over {nights_text(last.after.n)}."
        return f"{text} Acknowledged." if last.acknowledged else text

    def acknowledgement(self, change: Change) -> str:
        """Returns the acknowledgement of a change, or the command for one; empty if it needs none."""
        if change.acknowledged is not None:
            acknowledged = change.acknowledged
            return (
                f"acknowledged by {clean(acknowledged.by)} on {day(acknowledged.written)}: {clean(acknowledged.reason)}"
            )
        if change not in self.open_regressions:
            return ""
        return f"to acknowledge: dlbench history acknowledge {self.id} {day(change.time)} --reason TEXT"

    def details(self, change: Change) -> tuple[str, ...]:
        """Returns the differences at a change, and its acknowledgement, a line each."""
        lines = (change.commits, *change.environment, self.acknowledgement(change))
        return tuple(filter(None, lines))


def _commits(names: Sequence[str]) -> str:
    return first_of([clean(name, MAX_COMMIT_LENGTH) for name in names], MAX_COMMITS) or "not known"
