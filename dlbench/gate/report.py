"""The result of a comparison as data: every number with its verdict, the headline, and the methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import dlbench
from dlbench.analysis.metrics import Metric
from dlbench.gate.sides import GateSide, KeyDifference, Match, SidePoint, SideRun, point_label, versus
from dlbench.gate.verdicts import Rule, TTest, overall
from dlbench.report.document import definitions
from dlbench.report.table import Cell, times_cell, unit_cell
from dlbench.report.wording import place_text, runs_text, sentence, value_text, within_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import FLOOR as FLOOR_WORDS
from dlbench.stats.verdict_words import GATE_ORDER
from dlbench.units import first_of, whole_seconds

T = TypeVar("T")

FLOOR = Metric(
    name="throughput",
    title="Throughput floor",
    unit="samples/s",
    about="samples of all ranks over the longest measured time of any rank; A is the floor of --at-least; "
    "B / A below 1 is worse",
    higher_is_worse=False,
)

DAY_S = 86_400
MAX_NAMED = 4  # Points with one verdict on their floors that the headline names.


def headline(verdict: str, points: Sequence[PointResult], tolerance: float) -> str:
    """Returns the overall verdict with its largest change, and the verdicts on each floor, as sentences."""
    gated = list(_gated(points))
    floors = [(point, metric) for point, metric in gated if metric.is_floor]
    compared = [(point, metric) for point, metric in gated if not metric.is_floor]
    if not floors:
        return _comparisons_text(verdict, compared, tolerance)
    sentences = [_floors_text(word, floors) for word in reversed(GATE_ORDER)]
    if compared:
        compared_verdict = overall(metric.verdict for _, metric in compared)
        sentences.insert(0, _comparisons_text(compared_verdict, compared, tolerance))
    return " ".join(filter(None, sentences))


def _floors_text(verdict: str, floors: Sequence[tuple[PointResult, MetricResult]]) -> str:
    same = [(point, metric) for point, metric in floors if metric.verdict == verdict]
    if not same:
        return ""
    names = [point.label for point, _ in same]
    if len({point.setting for point, _ in floors}) == 1:
        names = [place_text(point.ranks, point.nodes) for point, _ in same]
    text = f"{first_of(names, MAX_NAMED)}: "
    wording = next(wording for wording in FLOOR_WORDS.values() if wording.word == verdict)
    text += wording.in_sentence
    if wording.tone != "good":
        sizes = [_size(metric) for _, metric in same]
        worst = sizes.index(max(sizes))
        metric = same[worst][1]
        text += ", "
        if len(names) > 1:
            text += f"worst at {names[worst]}: "
        text += metric.reason if verdict == "insufficient" else change_text(metric)
    return f"{text}."


def _comparisons_text(verdict: str, gated: Sequence[tuple[PointResult, MetricResult]], tolerance: float) -> str:
    same = [(point, metric) for point, metric in gated if metric.verdict == verdict]
    if not same:
        return f"{verdict}: nothing was compared."
    point, metric = max(same, key=lambda pair: _size(pair[1]))
    text = f"{verdict}; "
    if len(gated) > 1:
        text = f"{len(same)} of {len(gated)} comparisons {text}"
    if len(same) > 1:
        text += "the largest change is "
    subject = ", ".join(filter(None, [f"{metric.title} at {point.label}", versus(point.allowed)]))
    return f"{text}{subject}: {change_text(metric)}; tolerance {share_text(tolerance)}."


def _size(metric: MetricResult) -> float:
    """Returns how large a change is: the ratio's distance from 1, or the inverse of throughput / floor."""
    if metric.ratio is None:
        return 0.0
    return 1 / metric.ratio.value if metric.is_floor else abs(metric.ratio.value - 1)


def change_text(metric: MetricResult) -> str:
    """Returns the ratio as a change, e.g. ``5.2 % worse, 1.052x [1.041, 1.064]``; its digits follow the interval."""
    if metric.is_floor and metric.a is not None and metric.b is not None:
        return f"{unit_cell(metric.b)} against a floor of {metric.a.value:,.10g}"
    if metric.ratio is None:
        return "no ratio"
    above, below = "worse", "better"
    if metric.quality and metric.name.startswith("step_"):
        above, below = "slower per step", "faster per step"
    elif metric.quality:
        above, below = "more", "less"
    word = below if metric.ratio.value < 1 else above
    change = value_text(metric.ratio.mapped(lambda ratio: ratio - 1, "fraction")).removeprefix("-")
    text = f"{change} {word}, {ratio_cell(metric.ratio)}{within_text(metric.ratio)}"
    return f"{text}; {metric.quality}" if metric.quality else text


def ratio_cell(ratio: Estimate | None) -> Cell:
    """Returns a ratio near 1 with the digits that a gate needs, e.g. ``1.052x [1.041, 1.064]``."""
    return times_cell(ratio, 3)


def share_text(fraction: float) -> str:
    """Returns a fraction in percent without needless digits, e.g. ``2 %``, ``2.5 %``."""
    return f"{fraction * 100:.4g} %"


def p_against(test: TTest, than: Literal["worse", "better"]) -> str:
    """Returns a p and its corrected level, with two significant digits, e.g. ``0.0031 (at most 0.005)``."""
    p, level = test.p_better, test.level_better
    if than == "worse":
        p, level = test.p_worse, test.level_worse
    return f"{p:.2g} (at most {level:.2g})"


def power_text(metric: MetricResult) -> str:
    """Returns the smallest change that the comparison can find, as a sentence; empty with too few runs."""
    test = metric.tested
    if test is None:
        return ""
    wanted_slowdown, smallest_slowdown = share_text(test.wanted), share_text(round(test.detectable, 4))
    if test.repeats is None and metric.is_floor:
        needed = f"{wanted_slowdown} needs more than 1,000 {test.unit}s"
    elif test.repeats is None:
        needed = f"{wanted_slowdown}: within the tolerance, or more than 1,000 {test.unit}s"
    else:
        needed = f"{wanted_slowdown} needs {metric.repeats_text}"
    scatter = share_text(round(test.scatter, 5))
    change = "shortfall below the floor" if metric.is_floor else "slowdown"
    return (
        f"Smallest {change} found with 80 % probability: {smallest_slowdown}; {needed} "
        f"(scatter of {test.unit}s {scatter})."
    )


def methods(
    points: Sequence[PointResult], rule: Rule, *, paired: bool, num_compared: int
) -> tuple[tuple[str, str], ...]:
    """Returns how the verdicts were made, as pairs of heading and text."""
    correction = f" for all {num_compared} comparisons of this command together, by Holm's correction"
    if num_compared < 2:
        correction = "; no correction, as there is no second comparison"
    values = {
        "correction": correction,
        "level": share_text(rule.level),
        "tolerance": share_text(rule.tolerance),
        "factor": 1 + rule.tolerance,
    }
    kinds = {metric.is_floor for _, metric in _gated(points)}
    floor, level = definitions("gate-floor", **values)
    if False not in kinds:
        return floor, level
    (_, unit), (_, test) = definitions("gate-pairs" if paired else "gate-sessions")
    texts = definitions("gate", unit=unit, test=test, **values)
    if True in kinds:
        return (*texts, floor)
    return texts


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """A metric at one point."""

    name: str
    title: str
    about: str
    gated: bool  # Whether it counts for the verdict; other metrics are information.
    verdict: str  # A word of `GATE`, of a floor of `FLOOR`; `information` for metrics that do not count.
    reason: str
    reference_incomplete: bool  # Whether B has runs enough and the reference lacks runs or sessions.
    a: Estimate | None  # Geometric mean of A over the units of the test, else runs; None if not measured.
    b: Estimate | None
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse; for a floor below 1. With a test, its interval decides."""
    tested: TTest | None
    values_a: tuple[float, ...]  # One for each run of A; if paired, in the order of `values_b`.
    values_b: tuple[float, ...]
    quality: str = ""  # Losses of sides that train differently, so that the ratio decides nothing alone.

    @property
    def is_floor(self) -> bool:
        return self.name == FLOOR.name

    @property
    def sides(self) -> tuple[str, str, str]:
        return ("Floor", "Throughput", "Throughput / floor") if self.is_floor else ("A", "B", "B / A")

    @property
    def repeats_text(self) -> str:
        """The units that find the wanted slowdown, e.g. ``12 sessions per side``; empty if no number does."""
        test = self.tested
        if test is None or test.repeats is None:
            return ""
        text = f"{test.repeats} {test.unit}s"
        return text if test.unit == "pair" or self.is_floor else f"{text} per side"


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """A rank and node count with its metrics."""

    label: str  # Workload, preset, engine, precision, batch, scaling, and last the ranks.
    caption: str  # Conditions of the figures in one line.
    workload: str
    ranks: int
    nodes: int
    runs_a: tuple[str, ...]
    runs_b: tuple[str, ...]
    sessions_a: int  # Sessions of the runs of A.
    sessions_b: int
    sessions_history: int  # Sessions of the history, which only show how far sessions scatter.
    finished_a: tuple[str, str]  # First and last end of a run of A, UTC; empty without runs.
    finished_b: tuple[str, str]
    wall_s: float | None  # Sum of the times of B's runs from start to end, of pairs also A's, seconds; None: not known.
    tags_a: tuple[tuple[str, str], ...]
    tags_b: tuple[tuple[str, str], ...]
    allowed: tuple[KeyDifference, ...]
    environment: tuple[KeyDifference, ...]  # Differences of the environments at this point that not all points have.
    cautions: tuple[str, ...]  # Warnings about its verdicts, in sentences; those of all points are in the report.
    metrics: tuple[MetricResult, ...]

    @property
    def gated(self) -> tuple[MetricResult, ...]:
        return tuple(metric for metric in self.metrics if metric.gated)

    @property
    def setting(self) -> str:
        return self.label.rpartition(", ")[0]


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """The result of a comparison command."""

    format: str = "dlbench.comparison"
    version: int = 1
    dlbench_version: str = dlbench.__version__
    a: str  # Name of side A.
    b: str
    paired: bool
    history: str  # Name of the history that shows how far sessions scatter; empty: none.
    verdict: str
    headline: str
    tolerance: float  # Fraction by which B may be slower.
    level: float  # Probability that any comparison of the command fails though none is slower than tolerated.
    num_compared: int  # Comparisons that the correction counts.
    points: tuple[PointResult, ...]
    environment: tuple[KeyDifference, ...]  # Differences of the environments that all points have.
    cautions: tuple[str, ...]  # Warnings about all verdicts, in sentences.
    points_only_in_b: tuple[str, ...]  # Points of B that A does not have, or that no floor applies to.
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    notices: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def is_of_floors(self) -> bool:
        return {metric.is_floor for _, metric in self.each()} == {True}

    def each(self) -> Iterator[tuple[PointResult, MetricResult]]:
        """Yields every comparison that counts for the verdict, with its point."""
        return _gated(self.points)


def _gated(points: Iterable[PointResult]) -> Iterator[tuple[PointResult, MetricResult]]:
    for point in points:
        for metric in point.gated:
            yield point, metric


def report_of(  # noqa: PLR0913 - the parts of a report that are not in its points
    a: GateSide,
    b: GateSide,
    points: Sequence[PointResult],
    rule: Rule,
    *,
    paired: bool,
    points_only_in_b: Sequence[SidePoint],
    notices: Iterable[str],
    history: str,
) -> ComparisonReport:
    """Returns the report of the points; warnings and differences that all points have are moved to the report."""
    environment = _shared_by_all([point.environment for point in points])
    cautions = _shared_by_all([point.cautions for point in points])
    # Points of equal labels are numbered: a CI server takes test cases of one name for one.
    count_by_label: dict[str, int] = {}
    results = []
    for point in points:
        number = count_by_label.get(point.label, 0) + 1
        count_by_label[point.label] = number
        label = point.label if number == 1 else f"{point.label} ({number})"
        own_differences = tuple(difference for difference in point.environment if difference not in environment)
        own_cautions = tuple(caution for caution in point.cautions if caution not in cautions)
        results.append(dataclasses.replace(point, label=label, environment=own_differences, cautions=own_cautions))
    points = tuple(results)
    gated = [metric for _, metric in _gated(points)]
    verdict = overall(metric.verdict for metric in gated)
    num_compared = sum(metric.tested is not None for metric in gated)
    return ComparisonReport(
        a=a.name,
        b=b.name,
        paired=paired,
        history=history,
        verdict=verdict,
        headline=headline(verdict, points, rule.tolerance),
        tolerance=rule.tolerance,
        level=rule.level,
        num_compared=num_compared,
        points=points,
        environment=environment,
        cautions=cautions,
        points_only_in_b=tuple(map(point_label, points_only_in_b)),
        left_out=tuple(dict.fromkeys((*a.left_out, *b.left_out))),
        damaged=tuple(dict.fromkeys((*a.damaged, *b.damaged))),
        notices=tuple(sorted({*notices} - {""})),
        methods=methods(points, rule, paired=paired, num_compared=num_compared),
    )


def _shared_by_all(lists: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    if not lists:
        return ()
    shared = list(lists[0])
    for items in lists[1:]:
        shared = [item for item in shared if item in items]
    return tuple(shared)


def point_of(
    match: Match, metrics: Sequence[MetricResult], sessions: Mapping[str, str], *, num_history: int, paired: bool
) -> PointResult:
    """Returns a point with its metrics; `sessions` are those of the runs of the command, by run id."""
    a, runs_b = match.a, match.runs_b
    environment: list[KeyDifference] = []
    tags_b: Mapping[str, str] = {}
    if match.b is not None:
        environment_a, environment_b = a.environment, match.b.environment
        for key in sorted(environment_a.keys() & environment_b.keys()):
            if environment_a[key] != environment_b[key]:
                difference = KeyDifference(key=key, title=key, a=environment_a[key], b=environment_b[key])
                environment.append(difference)
        tags_b = match.b.tags
    timed_runs = (*a.runs, *runs_b) if paired else runs_b
    run_seconds = [run.wall_s for run in timed_runs if run.wall_s is not None]
    wall_s = None
    if run_seconds and len(run_seconds) == len(timed_runs):
        wall_s = sum(run_seconds)
    return PointResult(
        label=point_label(a, {difference.key for difference in match.allowed}),
        caption=_caption(a, match.allowed),
        workload=a.workload,
        ranks=a.ranks,
        nodes=a.nodes,
        runs_a=tuple(run.run_id for run in a.runs),
        runs_b=tuple(run.run_id for run in runs_b),
        sessions_a=len({sessions[run.run_id] for run in a.runs}),
        sessions_b=len({sessions[run.run_id] for run in runs_b}),
        sessions_history=num_history,
        finished_a=_span(a.runs),
        finished_b=_span(runs_b),
        wall_s=wall_s,
        tags_a=tuple(sorted(a.tags.items())),
        tags_b=tuple(sorted(tags_b.items())),
        allowed=match.allowed,
        environment=tuple(environment),
        cautions=tuple(_point_cautions(match, metrics, sessions, paired)),
        metrics=tuple(metrics),
    )


def _caption(point: SidePoint, allowed: Sequence[KeyDifference]) -> str:
    """Returns the conditions that both sides share; allowed differences are printed elsewhere."""
    # Most runs are of speed: only a target is worth words.
    registered = {name: value for name, value in point.content.registered.items() if value and value != "speed"}
    unit = point.sample_unit
    # Text before and behind the value; never a pattern, because units and values are text of workload files.
    around = {
        "precision": ("", ""),
        "batch_per_rank": ("", f" {unit} per rank"),
        "global_batch": ("", f" {unit} in all"),
        "data": ("", ""),
        "exchange": ("exchange ", ""),
        "goal": ("", ""),
        "system": ("on ", ""),
        "device": ("", ""),
        "watching": ("monitoring ", ""),
        "fault": ("injected fault ", ""),
    }
    if registered.get("data") == "synthetic":
        around["data"] = ("", " data")
    different = {difference.key for difference in allowed}
    conditions = ["geometric means"]
    for name, (before, behind) in around.items():
        if name in registered and name not in different:
            conditions.append(f"{before}{registered[name]}{behind}")
    if point.notice:
        conditions.append(point.notice)
    return "; ".join(conditions)


def _span(runs: Sequence[SideRun]) -> tuple[str, str]:
    ends = [whole_seconds(run.circumstances.finished) for run in runs]
    return min(ends, default=""), max(ends, default="")


def _point_cautions(
    match: Match, metrics: Sequence[MetricResult], sessions: Mapping[str, str], paired: bool
) -> Iterator[str]:
    if match.b is None:
        yield "B has no run with figures at this point: nothing is compared."
        return
    for side, point in (("A", match.a), ("B", match.b)):
        head = f"{side}: " if match.a.runs else ""
        yield from (f"{head}{text}." for text in point.doubts)
    if match.unpaired:
        yield f"{runs_text(match.unpaired)} left out: no partner on the other side."
    shared = {run.run_id for run in match.a.runs} & {run.run_id for run in match.b.runs}
    if shared:
        yield f"{runs_text(len(shared))} on both sides: a run is compared with itself."
    if not paired and match.a.runs:
        yield from _spacing(match.a.runs, match.b.runs, sessions)
    if match.quality:
        yield sentence(f"the steps of the two sides do not train the same (local SGD); {match.quality}")
    num_a, num_b = len(match.a.runs), len(match.b.runs)
    for metric in metrics:
        with_a, with_b = len(metric.values_a), len(metric.values_b)
        if metric.gated and not metric.is_floor and (with_a, with_b) != (num_a, num_b):
            yield f"{metric.title}: measured in {with_a} of {num_a} runs of A and {with_b} of {num_b} runs of B."


def _spacing(a: Sequence[SideRun], b: Sequence[SideRun], sessions: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning about the time between the sides, unless the scatter of sessions includes the drift."""
    advice = "`dlbench run --ab` interleaves them, and --paired compares the pairs."
    ends_a, ends_b = _end_times(a), _end_times(b)
    if not ends_a or not ends_b:
        yield f"The end times of the runs are not known; drift of the machine would count as a difference. {advice}"
        return
    first, second = sorted((ends_a, ends_b), key=min)
    gap_s = min(second) - max(first)
    if gap_s <= 0:
        yield f"The runs were not compared as pairs; {advice}"
        return
    # The scatter of sessions that are as far apart as the sides includes the drift.
    for runs, ends in ((a, ends_a), (b, ends_b)):
        if len({sessions[run.run_id] for run in runs}) > 1 and gap_s <= max(ends) - min(ends):
            return
    distance = "one after the other"
    if gap_s >= 2 * DAY_S:
        distance = f"{gap_s / DAY_S:.0f} days apart"
    elif gap_s >= 7200:
        distance = f"{gap_s / 3600:.0f} hours apart"
    yield f"The sides were run {distance}: drift of the machine in between counts as a difference; {advice}"


def _end_times(runs: Sequence[SideRun]) -> list[float]:
    moments = [run.circumstances.moment for run in runs]
    return [moment for moment in moments if math.isfinite(moment)]
