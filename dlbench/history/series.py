"""A series of a history: its nights, its levels, its changes, and the words on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from dlbench.history.acknowledgements import Acknowledgement
from dlbench.history.change_points import MIN_EFFECT, MIN_NIGHTS, Newest, Shape
from dlbench.history.words import (
    amount_text,
    change_cell,
    day,
    evidence_text,
    hosts_text,
    level_text,
    names_text,
    nights_text,
    percent_change,
)
from dlbench.report.table import column, unit_cell
from dlbench.report.wording import basis_text, clean, place_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import TREND
from dlbench.units import first_of

MAX_COMMITS = 3  # Commits of one side of a change that are named.
MAX_COMMIT_LENGTH = 60
MAX_HOSTS = 6  # Hosts of one side of a change that are named.

ChangeWord = Literal["regression", "improvement"]

NOT_ASKED = "a slow change has no date, so commits and environment are not set against it"
NO_DIFFERENCE = "no recorded key of the environment differs between all runs before and all runs after"

_KINDS = {"step": "{}", "drift": "slow {}", "step or drift": "{}, at once or slowly"}  # By shape.


@dataclass(frozen=True, kw_only=True)
class Night:
    """The runs of one session at one point."""

    time: str = field(metadata=column("Night"))  # When the last of them finished, UTC, ISO 8601.
    series: str = field(metadata=column())
    value: float  # Median over the runs, in the metric's unit.
    values: tuple[float, ...]
    run_ids: tuple[str, ...]
    commits: tuple[str, ...] = field(metadata=column("Commit", value=" ".join, text=names_text))
    """Distinct, in order of the runs; empty where none is known."""
    hosts: tuple[str, ...] = field(metadata=column("Hosts", value=" ".join, text=hosts_text))
    level: int  # Number of the series' level that it belongs to, from 0.


@dataclass(frozen=True, kw_only=True)
class LevelStretch:
    """A stretch of nights without a change."""

    first: str = field(metadata=column("From", text=day))  # End of its first night, UTC.
    last: str = field(metadata=column("To", text=day))
    num_nights: int
    value: Estimate = field(metadata=column("Level now", "level", text=unit_cell))
    """Median over nights; `n` counts nights. Of a drift the level at its last night."""
    at_first: float  # The level at its first night: `value.value` where it does not drift.

    @property
    def is_drift(self) -> bool:
        """Whether it changes from night to night."""
        return self.at_first != self.value.value

    @property
    def basis(self) -> str:
        """Says what the interval is, and over how many nights."""
        return basis_text(self.value, "night")


@dataclass(frozen=True, kw_only=True)
class DifferingKey:
    """A key with other values in all runs after a change than in any run before it."""

    key: str  # Of the environment, or `tag.NAME`.
    before: str  # Values in order of time, the newest ones where there are many; `not set` where a run has none.
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def _listed(differences: Sequence[DifferingKey]) -> str:
    return " | ".join(map(str, differences))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change point, and what else changed there. Not one of these is thereby shown to be the cause."""

    kind: ChangeWord = field(metadata=column())
    shape: Shape = field(metadata=column())
    """At once, over many nights, or either: the nights do not show which. A drift has no date, so nothing is named with
    it."""
    time: str = field(metadata=column("First night after", text=day))
    """End of the first night after, UTC; the likeliest. Of a drift that of its first night."""
    last_before: str = field(metadata=column())
    """End of the last night that lies before it (with 95 %), UTC. Of a drift that of its first night."""
    first_after: str = field(metadata=column())
    """End of the first night that lies after it (with 95 %), UTC. Of a drift that of its last night."""
    before: Estimate = field(metadata=column("From", text=unit_cell))
    """Median over nights before; of a drift the level at its first night."""
    after: Estimate = field(metadata=column("To", text=unit_cell))
    ratio: Estimate = field(metadata=column("Ratio", text=change_cell))
    evidence: float = field(metadata=column("Evidence", text=evidence_text))
    """Bayes factor of a change against none (1), divided by what all trends followed together cost."""
    acknowledged: Acknowledgement | None = field(metadata=column(value=attrgetter("reason")))
    """Who said that it is known, when, and why; None where nobody did, or where it has gone on since."""
    commits_before: tuple[str, ...] = field(metadata=column(value=" ".join))
    """Of the night `last_before`; empty where none is known."""
    commits_after: tuple[str, ...] = field(metadata=column(value=" ".join))
    runs_before: tuple[str, ...]
    runs_after: tuple[str, ...]
    differences: tuple[DifferingKey, ...] = field(metadata=column(value=_listed))
    """Between all runs of the levels before and after, without the nights of which it is not certain on which side they
    lie; keys that are new nearly every night are left out."""
    new_hosts: tuple[str, ...] = field(metadata=column(value=" ".join))
    """Hosts used after the change and never on the level before it."""
    gone_hosts: tuple[str, ...] = field(metadata=column(value=" ".join))
    """Hosts used on the level before the change and never after it."""

    @property
    def is_drift(self) -> bool:
        """Whether it came over many nights, so that it has no date."""
        return self.shape == "drift"

    @property
    def words(self) -> str:
        """Says ``regression``, ``slow regression`` (a drift), ``regression, at once or slowly``."""
        return _KINDS[self.shape].format(self.kind)

    @property
    def since(self) -> str:
        """Says ``since 2026-03-04``, or ``from 2026-03-04 to 2026-06-02`` of a drift."""
        if self.is_drift:
            return f"from {day(self.last_before)} to {day(self.first_after)}"
        return f"since {day(self.time)}"

    @property
    def when(self) -> str:
        """Says ``on 2026-03-04``, or of a drift as `since`."""
        return self.since if self.is_drift else f"on {day(self.time)}"

    @property
    def between(self) -> str:
        """Says between which nights it lies, or over which a drift went."""
        if self.is_drift:
            return f"slowly, over the nights of {day(self.last_before)} to {day(self.first_after)}"
        return f"between the nights of {day(self.last_before)} and {day(self.first_after)}"

    @property
    def days(self) -> str:
        """Says the same two days, for a table."""
        return f"{day(self.last_before)}, {day(self.first_after)}"

    @property
    def basis(self) -> str:
        """Says how many nights stand behind it, and what its intervals are."""
        if self.is_drift:
            return f"{nights_text(self.ratio.n)} of the drift, slope by Theil and Sen"
        return f"{basis_text(self.before, 'night')} before, {nights_text(self.after.n)} after"

    @property
    def commits(self) -> str:
        """Says ``commit 1a2b3c -> 4d5e6f``, or that none is known; empty for a drift, which has no commits."""
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
        """Everything else that differs, a line each; one line where nothing does, or why it is not asked."""
        if self.is_drift:
            return (NOT_ASKED,)
        lines = [str(difference) for difference in self.differences]
        if self.new_hosts:
            lines.append(f"hosts used only since: {first_of(self.new_hosts, MAX_HOSTS)}")
        if self.gone_hosts:
            lines.append(f"hosts used only before: {first_of(self.gone_hosts, MAX_HOSTS)}")
        return tuple(lines) or (NO_DIFFERENCE,)


@dataclass(frozen=True, kw_only=True)
class NewestNights(Newest):
    """The newest nights where they lie beyond the usual range, too few for a change point."""

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
    verdict: str = field(init=False, metadata=column())  # The finding in one sentence.
    num_runs: int = field(metadata=column("Runs"))
    is_long_enough: bool  # Whether there are enough nights for a change point.
    nights: tuple[Night, ...] = field(metadata=column("Nights", "num_nights", value=len))
    levels: tuple[LevelStretch, ...]  # Between changes; one where there are none.
    changes: tuple[Change, ...]
    newest: NewestNights | None  # None where the newest night is an ordinary one, or too few nights say what that is.

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self._verdict())

    @property
    def standing(self) -> Literal["too few nights", "worse", "odd", "as usual"]:
        """Says how it stands for a rating and a gate: `worse` where a level became worse and nobody acknowledged that.

        An odd newest night is no level yet, whatever its value.
        """
        if not self.is_long_enough:
            return "too few nights"
        if self.open_regressions:
            return "worse"
        return "odd" if self.newest is not None and self.newest.is_worse else "as usual"

    @property
    def open_regressions(self) -> tuple[Change, ...]:
        """Regressions that nobody acknowledged and that hold: the level now is worse than the one before them."""
        worse = math.log1p(MIN_EFFECT) * (1 if self.higher_is_worse else -1)
        now = self.level.value.value
        return tuple(
            change
            for change in self.changes
            if change.kind == TREND["worse"].word
            and change.acknowledged is None
            and math.log(now / change.before.value) / worse >= 1
        )

    @property
    def level(self) -> LevelStretch:
        """The level now."""
        return self.levels[-1]

    @property
    def point(self) -> str:
        """Configuration and place in words, without the metric."""
        return f"{self.configuration}; {place_text(self.ranks, self.nodes)}"

    @property
    def subject(self) -> str:
        """The metric's title within a sentence."""
        return self.title.lower()

    @property
    def odd_nights(self) -> str:
        """Says what the newest nights show, and how long to wait; empty where the newest night is an ordinary one."""
        newest = self.newest
        if newest is None:
            return ""
        nights = "The newest night lies" if newest.num_beyond == 1 else f"The newest {newest.num_beyond} nights lie"
        usual = f"{amount_text(newest.low, self.unit)} to {amount_text(newest.high, self.unit)}"
        word = "worse" if newest.is_worse else "better"
        return (
            f"{nights} beyond the usual range ({self.subject} {percent_change(newest.ratio)}, {word}; usual: {usual}). "
            f"That is not yet a change point: wait for {newest.wait_for} or more such nights."
        )

    @property
    def short_verdict(self) -> str:
        """The finding in a few words."""
        count = nights_text(len(self.nights))
        if not self.changes:
            return f"{TREND['equal'].word} in {count}" if self.is_long_enough else count
        last = self.changes[-1]
        known = ", acknowledged" if last.acknowledged else ""
        return f"{last.words} {last.when}, {percent_change(last.ratio.value)}{known}"

    def _verdict(self) -> str:
        count, level = nights_text(len(self.nights)), level_text(self.level.value)
        if not self.is_long_enough:
            return f"{count}, level {level}; a change point needs {MIN_NIGHTS} nights."
        if not self.changes:
            return f"No change in {count}; level {level}."
        last = self.changes[-1]
        more = f" ({len(self.changes)} changes in all)" if len(self.changes) > 1 else ""
        now = "at its end" if last.is_drift else "since then"
        known = " Acknowledged." if last.acknowledged else ""
        return (
            f"{last.words.capitalize()} {last.when}: {self.subject} {change_cell(last.ratio)}{more}; {now} "
            f"{level_text(last.after)} over {nights_text(last.after.n)}.{known}"
        )

    def acknowledgement(self, change: Change) -> str:
        """Says who knows of a change, and why; else how to say so; empty where a change needs nobody's word."""
        if change.acknowledged is not None:
            word = change.acknowledged
            return f"acknowledged by {clean(word.by)} on {day(word.written)}: {clean(word.reason)}"
        if change not in self.open_regressions:
            return ""
        return f"to acknowledge: dlbench history acknowledge {self.id} {day(change.time)} --reason TEXT"

    def details(self, change: Change) -> tuple[str, ...]:
        """Lists what differs at a change, and who knows of it, a line each."""
        lines = (change.commits, *change.environment, self.acknowledgement(change))
        return tuple(filter(None, lines))


def _commits(names: Sequence[str]) -> str:
    return first_of([clean(name, MAX_COMMIT_LENGTH) for name in names], MAX_COMMITS) or "not known"
