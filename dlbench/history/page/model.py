"""A history over time as plain data: what every format of `dlbench history trends` prints.

Numbers are raw (seconds, joules, ratios); `dlbench.history.page.words` makes text of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.stats.estimates import Estimate

FORMAT = "dlbench.trends"
VERSION = 1
NODES_FORMAT = "dlbench.slow-nodes"


@dataclass(frozen=True, kw_only=True)
class NightRow:
    """The runs of one request at one point."""

    time: str
    """When the last of them finished, UTC, ISO 8601."""
    series: str
    value: float
    """Median over the runs."""
    values: tuple[float, ...]
    """One for each run."""
    run_ids: tuple[str, ...]
    commits: tuple[str, ...]
    hosts: tuple[str, ...]
    level: int
    """Which of the series' levels it belongs to, from 0."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A stretch of nights without a change."""

    first: str
    """End of its first night, UTC."""
    last: str
    num_nights: int
    value: Estimate
    """Median over nights; `n` counts nights."""


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """A key with other values in all runs after a change than in any run before."""

    key: str
    before: str
    """Values in order of time, the newest ones where there are many."""
    after: str


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """A change point and what differs between its two sides."""

    kind: Literal["regression", "improvement"]
    time: str
    """End of the first night after, UTC; the likeliest."""
    last_before: str
    """End of the last night that lies before it for certain (95 % bootstrap of the place), UTC."""
    first_after: str
    """End of the first night that lies after it for certain, UTC."""
    before: Estimate
    """Median over nights before."""
    after: Estimate
    ratio: Estimate
    """After over before."""
    p: float
    commits_before: tuple[str, ...]
    """Of the night `last_before`; empty where none is known."""
    commits_after: tuple[str, ...]
    """Of the night `first_after`."""
    runs_before: tuple[str, ...]
    """Of the last night before."""
    runs_after: tuple[str, ...]
    differences: tuple[DifferenceRow, ...]
    new_hosts: tuple[str, ...]
    gone_hosts: tuple[str, ...]

    @property
    def has_equal_commits(self) -> bool:
        """Whether both nights beside the change ran the same known commit."""
        return bool(self.commits_before) and set(self.commits_before) == set(self.commits_after)


@dataclass(frozen=True, kw_only=True)
class NewestNights:
    """The newest nights where they lie beyond the usual range, too few for a change point."""

    num_beyond: int
    ratio: float
    low: float
    """Usual range of a night, in the metric's unit."""
    high: float
    wait_for: int
    """More such nights that make a change point of them at the earliest."""
    is_worse: bool


@dataclass(frozen=True, kw_only=True)
class TrendSeries:
    """One metric of one point over time."""

    id: str
    """Unique in the report; letters, digits, - and _."""
    label: str
    """Configuration, ranks and metric in words."""
    group: str
    configuration: str
    system: str
    workload: str
    preset: str
    engine: str
    ranks: int
    nodes: int
    metric: str
    title: str
    """The metric in words."""
    unit: str
    higher_is_worse: bool
    caption: str
    """The conditions in one line: it stands under every chart and table."""
    verdict: str
    """One sentence."""
    num_runs: int
    is_long_enough: bool
    """Whether there are nights enough for a change point."""
    nights: tuple[NightRow, ...]
    levels: tuple[Level, ...]
    changes: tuple[ChangeRow, ...]
    newest: NewestNights | None
    """None where the newest night is an ordinary one."""


@dataclass(frozen=True, kw_only=True)
class HostMonthRow:
    """One host in one calendar month."""

    month: str
    ratio: Estimate
    """Own work of its slowest rank over that of the other hosts' slowest ranks."""
    verdict: str


@dataclass(frozen=True, kw_only=True)
class HostChangeRow:
    """A change of a host's level."""

    time: str
    """End of the first night after, UTC."""
    ratio: Estimate
    """After over before."""
    p: float


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One host over all months."""

    host: str
    verdict: str
    """`slow`, `suspected`, `not shown to be slow`, `too few runs`, `not used lately`: as it is now."""
    current: Estimate | None
    since: str
    """First run that the current figure is made of, UTC; empty without one."""
    num_runs: int
    months: tuple[HostMonthRow, ...]
    changes: tuple[HostChangeRow, ...]


@dataclass(frozen=True, kw_only=True)
class NodesOverTime:
    """Hosts by month."""

    format: str = NODES_FORMAT
    version: int = VERSION
    as_of: str
    hosts: tuple[HostRow, ...]
    months: tuple[str, ...]
    num_runs: int
    """Runs on two hosts or more that were counted."""
    num_without: int
    """Valid runs that compare no hosts."""
    exclude: tuple[str, ...]
    """Hosts that are slow now, for Slurm's `--exclude`."""
    unsafe: tuple[str, ...]
    """Slow hosts whose names cannot stand in an option."""
    damaged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrendsReport:
    """Everything."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run with figures finished, UTC; empty if there is none."""
    dlbench_version: str
    num_runs: int
    """Runs with figures."""
    num_without: int
    series: tuple[TrendSeries, ...]
    nodes: NodesOverTime
    damaged: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def changes(self) -> tuple[tuple[TrendSeries, ChangeRow], ...]:
        """All change points, newest first."""
        found = [(series, change) for series in self.series for change in series.changes]
        return tuple(sorted(found, key=lambda one: one[1].time, reverse=True))
