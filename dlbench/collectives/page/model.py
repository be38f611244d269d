"""The report of the collective benchmark as plain data: everything its formats print, nothing computed later.

Numbers are raw: seconds, bytes, fractions; rates in figures are GB/s (1e9 bytes), as nccl-tests prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.report.model import Condition, Doubt
from dlbench.stats.estimates import Estimate

FORMAT = "dlbench.comm-report"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """One series at one size."""

    num_bytes: int
    """Bytes of each rank's whole buffer."""
    time: Estimate
    """Seconds; for a single run the interval is the middle half of its iterations (`within-run`)."""
    algbw: Estimate
    """GB/s."""
    busbw: Estimate | None
    """GB/s; None for one rank."""
    iterations: int
    """Timed iterations of each run, at least."""
    steps: int | None
    """Most steps of a rank, counted; None for libraries."""
    messages: int | None
    """Most messages that a rank sends, counted."""
    bytes_sent: int | None
    """Most bytes that a rank sends, counted."""
    bytes_across: int | None
    """Most bytes that a rank sends to other groups, counted."""
    predicted_s: float | None
    """Seconds that a fit without this point expects; None where there is none."""
    predicted_over_measured: float | None
    is_best: bool
    """Whether it is the fastest at this size."""


@dataclass(frozen=True, kw_only=True)
class SeriesTable:
    """One algorithm over one carrier, or one library."""

    title: str
    carrier: str
    algorithm: str
    is_library: bool
    rows: tuple[SizeRow, ...]
    startup_s: float | None
    """Of a line through all sizes; None with fewer than two sizes."""
    per_byte_s: float | None


@dataclass(frozen=True, kw_only=True)
class BestRow:
    """The fastest series of a size."""

    num_bytes: int
    title: str
    time: Estimate
    rate: Estimate
    """busbw, GB/s; algbw for one rank."""
    second: str
    """The next one; empty where only one was measured."""
    lead: Estimate | None
    """Time of the next over that of the fastest."""
    is_clear: bool
    """Whether the interval of the lead keeps away from 1."""


@dataclass(frozen=True, kw_only=True)
class CrossoverRow:
    """Where one series overtakes another."""

    source: Literal["measured", "model"]
    before: str
    after: str
    num_bytes: float
    low: int | None
    """The measured sizes between which it lies; None for the model."""
    high: int | None
    is_clear: bool | None
    """Whether scatter leaves no doubt of it; None for the model."""


@dataclass(frozen=True, kw_only=True)
class RecommendedRow:
    """A series for a range of measured sizes."""

    low: int
    high: int
    title: str


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """How large a message of fused gradients should be."""

    title: str
    """Series it holds for: the one recommended at the largest size."""
    num_bytes: float | None
    """Bytes; None where every size costs the start-up alone."""
    share: float
    """Share of the asymptotic rate that it reaches."""
    asymptotic_algbw: float | None
    """GB/s."""
    beyond_measured: bool
    """Whether it is larger than the largest measured size."""


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """One of dlbench's algorithms against a library."""

    num_bytes: int
    own: str
    library: str
    speed: Estimate
    """Time of the library over time of the algorithm."""
    paired: bool


@dataclass(frozen=True, kw_only=True)
class RejectedRow:
    """Points without a figure."""

    title: str
    num_bytes: int
    why: str
    runs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CommGroup:
    """One collective at one layout."""

    id: str
    label: str
    collective: str
    dtype: str
    system: str
    ranks: int
    nodes: int
    group_size: int
    verdict: str
    conditions: tuple[Condition, ...]
    caption: str
    """The conditions in one line, under every table and chart."""
    num_runs: int
    series: tuple[SeriesTable, ...]
    best: tuple[BestRow, ...]
    crossovers: tuple[CrossoverRow, ...]
    recommended: tuple[RecommendedRow, ...]
    fusion: Fusion | None
    """For all-reduce; None for other collectives, or without a line."""
    ratios: tuple[RatioRow, ...]
    rejected: tuple[RejectedRow, ...]
    not_measured: tuple[str, ...]
    doubts: tuple[Doubt, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes with a figure, ascending."""
        return tuple(row.num_bytes for row in self.best)


@dataclass(frozen=True, kw_only=True)
class PieceRow:
    """Costs of one level for messages up to a size."""

    level: Literal["inside", "across"]
    up_to_bytes: int | None
    alpha_s: float
    alpha_low_s: float | None
    alpha_high_s: float | None
    beta_s_per_byte: float
    beta_low_s_per_byte: float | None
    beta_high_s_per_byte: float | None


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """Errors of predictions over some of the points."""

    scope: str
    num_points: int
    median: float
    """Median of |predicted / measured - 1|."""
    worst: float


@dataclass(frozen=True, kw_only=True)
class LineRow:
    """One series at one rank count as a line."""

    name: str
    ranks: int
    startup_s: float
    per_byte_s: float


@dataclass(frozen=True, kw_only=True)
class FitTable:
    """Fitted costs of one system and carrier."""

    label: str
    system: str
    carrier: str
    dtype: str
    pieces: tuple[PieceRow, ...]
    gamma_s_per_byte: float
    shared_link: bool
    shared_memory: bool
    num_points: int
    ranks: tuple[int, ...]
    """Rank counts behind the fit."""
    held_out_by: str
    """How points were held out, in words."""
    errors: tuple[ErrorRow, ...]
    lines: tuple[LineRow, ...]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run, whatever became of it."""

    run_id: str
    group: str
    """Id of its group; empty for runs without figures."""
    state: str
    story: str
    collective: str
    dtype: str
    system: str
    ranks: int
    nodes: int
    repeat: int
    finished: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CommReport:
    """Everything."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run finished, UTC; empty if none did."""
    dlbench_version: str
    groups: tuple[CommGroup, ...]
    fits: tuple[FitTable, ...]
    unfitted: tuple[str, ...]
    """Systems and carriers without a fit, and why."""
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """What the environments of all runs with figures share."""
    methods: tuple[tuple[str, str], ...]

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        """Runs that yield no figure."""
        return tuple(run for run in self.runs if not run.group)
