"""A comparison as plain data: what every format of `dlbench compare` and `dlbench check` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dlbench.gate.content import KeyDifference
from dlbench.gate.verdicts import TTest
from dlbench.stats.estimates import Estimate

FORMAT = "dlbench.comparison"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """One metric at one point."""

    name: str
    title: str
    about: str
    gated: bool
    """Whether it has a part in the verdict; the others are information."""
    verdict: str
    """regressed, improved, equivalent, inconclusive, insufficient; `information` for metrics that do not decide."""
    reason: str
    a: Estimate | None
    """Geometric mean over the units of the ratio, or over runs where no test was made; None where no run tells."""
    b: Estimate | None
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse. Where a test was made its interval is the one that decides: regressed
    where it lies above the tolerance, improved where it lies below."""
    tested: TTest | None
    """The test; None where none was made."""
    values_a: tuple[float, ...]
    """One for each run; where paired, equal places are pairs."""
    values_b: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """One rank and node count."""

    label: str
    """Workload, preset, engine, scaling, place."""
    caption: str
    """Conditions of the figures in one line."""
    workload: str
    ranks: int
    nodes: int
    runs_a: tuple[str, ...]
    runs_b: tuple[str, ...]
    sessions_a: int
    """Sessions of these runs, as comparisons over time count them."""
    sessions_b: int
    sessions_history: int
    """Further sessions, of the history, which tell how far sessions scatter."""
    finished_a: tuple[str, str]
    """First and last end of a run, UTC; empty where there is none."""
    finished_b: tuple[str, str]
    tags_a: tuple[tuple[str, str], ...]
    """Tags that all runs of the side share."""
    tags_b: tuple[tuple[str, str], ...]
    allowed: tuple[KeyDifference, ...]
    """What differs between the sides on purpose."""
    environment: tuple[KeyDifference, ...]
    """What differs between the environments at this point and not at all points."""
    cautions: tuple[str, ...]
    """Reasons to read its verdicts with care, in sentences; those of all points stand in the report."""
    metrics: tuple[MetricResult, ...]

    @property
    def gated(self) -> tuple[MetricResult, ...]:
        """Those that decide."""
        return tuple(metric for metric in self.metrics if metric.gated)


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """The whole."""

    format: str = FORMAT
    version: int = VERSION
    dlbench_version: str
    a: str
    """What side A is called."""
    b: str
    paired: bool
    history: str
    """What told how far sessions scatter, beside the sides; empty: nothing."""
    verdict: str
    headline: str
    """The verdict in a sentence or two."""
    tolerance: float
    """Fraction by which B may be slower."""
    level: float
    """Chance that any comparison of the command fails though none is slower than tolerated."""
    num_compared: int
    """Comparisons that the correction counts."""
    points: tuple[PointResult, ...]
    environment: tuple[KeyDifference, ...]
    """What differs between the environments at every point."""
    cautions: tuple[str, ...]
    """Reasons to read every verdict with care, in sentences."""
    only_b: tuple[str, ...]
    """Points that A does not have."""
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    notices: tuple[str, ...]
    """What the workloads must not be mistaken for."""
    methods: tuple[tuple[str, str], ...]
    """Heading and text: how the verdicts are made."""

    def each(self) -> Iterator[tuple[PointResult, MetricResult]]:
        """Every comparison that decides, with its point."""
        for point in self.points:
            for metric in point.gated:
                yield point, metric
