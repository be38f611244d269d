"""A comparison becomes a `ComparisonReport`: every number beside its verdict, the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import dlbench
from dlbench.gate.comparison import FLOOR, ComparedMetric, ComparedPoint, Comparison
from dlbench.gate.sides import KeyDifference, SidePoint, SideRun, point_label, versus
from dlbench.gate.verdicts import TTest
from dlbench.report.table import Cell, times_cell, unit_cell
from dlbench.report.wording import runs_text, value_text, within_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import whole_seconds


def headline(verdict: str, points: Sequence[PointResult], tolerance: float) -> str:
    """The overall verdict, and the comparison that stands for it; then what floors say, if that is another."""
    every = [(point, metric) for point in points for metric in point.gated]
    words = [_headline(verdict, every, tolerance)]
    floors = [(point, metric) for point, metric in every if metric.is_floor]
    others = dict.fromkeys(metric.verdict for _, metric in floors if metric.verdict != verdict)
    words += [_headline(other, floors, tolerance) for other in others]
    return " ".join(words)


def _headline(verdict: str, every: Sequence[tuple[PointResult, MetricResult]], tolerance: float) -> str:
    same = [(point, metric) for point, metric in every if metric.verdict == verdict]
    if not same:
        return f"{verdict}: nothing was compared."
    point, metric = max(same, key=lambda one: _size(one[1]))
    sides = versus(point.allowed)
    told = f"{metric.title} at {point.label}{f', {sides}' if sides else ''}: {change_text(metric)}"
    count = f"{len(same)} of {len(every)} comparisons {verdict}" if len(every) > 1 else verdict
    first = "the worst is " if metric.is_floor else "the largest change is "
    tolerated = "" if metric.is_floor else f"; tolerance {share_text(tolerance)}"
    return f"{count}; {first if len(same) > 1 else ''}{told}{tolerated}."


def _size(metric: MetricResult) -> float:
    if metric.ratio is None:
        return 0.0
    return 1 / metric.ratio.value if metric.is_floor else abs(metric.ratio.value - 1)


def change_text(metric: MetricResult) -> str:
    """The ratio as a change, e.g. ``5.2 % worse, 1.052x [1.041, 1.064]``; its digits follow the interval, too."""
    if metric.is_floor and metric.a is not None and metric.b is not None:
        return f"{unit_cell(metric.b)} against {unit_cell(metric.a)}"
    if metric.ratio is None:
        return "no ratio"
    word = "worse" if metric.ratio.value >= 1 else "better"
    change = value_text(metric.ratio.mapped(lambda ratio: ratio - 1, "fraction")).removeprefix("-")
    return f"{change} {word}, {ratio_text(metric.ratio)}{within_text(metric.ratio)}"


def ratio_cell(ratio: Estimate | None) -> Cell:
    """A ratio near 1 with as many digits as a gate needs, e.g. ``1.052x [1.041, 1.064]``."""
    return times_cell(ratio, 3)


def ratio_text(ratio: Estimate) -> str:
    """The same on one line."""
    return str(ratio_cell(ratio))


def share_text(fraction: float) -> str:
    """A share without needless digits, e.g. ``2 %``, ``2.5 %``."""
    return f"{fraction * 100:.4g} %"


def p_against(p: float, level: float) -> str:
    """A p and what it is held against, with two significant digits, e.g. ``0.0031 (at most 0.005)``."""
    return f"{p:.2g} (at most {level:.2g})"


def power_text(metric: MetricResult) -> str:
    """What the comparison could have seen, in a sentence; empty with too few runs."""
    test = metric.tested
    if test is None:
        return ""
    wanted, seen = share_text(test.wanted), share_text(round(test.detectable, 4))
    if test.repeats is None:
        needed = f"{wanted}: within the tolerance, or more than 1,000 {test.unit}s"
    else:
        needed = f"{wanted} needs {metric.repeats_text}"
    scatter = share_text(round(test.scatter, 5))
    what = "shortfall below the floor" if metric.is_floor else "slowdown"
    return f"Smallest {what} found with 80 % probability: {seen}; {needed} (scatter of {test.unit}s {scatter})."


_FLOOR = (
    "Floor",
    "--at-least: Student's t test of the mean logarithm of the throughput, without tolerance. missed: the whole "
    "interval lies below the floor; met: above it; else inconclusive. The unit is the run, and the verdict holds "
    "within the session that they ran in; from five sessions on it is the session. The "
    "ratio is throughput / floor: below 1 is worse.",
)


def _correction(num_compared: int) -> str:
    if num_compared < 2:
        return "; no correction, as there is no second comparison"
    return f" for all {num_compared} comparisons of this command together, by Holm's correction"


def methods(found: Comparison) -> tuple[tuple[str, str], ...]:
    """How the verdicts were made, heading and text."""
    rule = found.rule
    floors = any(one.metric.name == FLOOR.name for point in found.points for one in point.metrics)
    if not any(one.gated and one.metric.name != FLOOR.name for point in found.points for one in point.metrics):
        level = f"{share_text(rule.level)} below, and as much above{_correction(found.num_compared)}."
        return _FLOOR, ("Level", level)
    if found.paired:
        test = "Student's t test of the mean logarithm of B / A over pairs."
        unit = "The pair of interleaved runs: what drifts falls on both sides alike."
    else:
        test = (
            "Welch's t test of the difference of mean logarithms over units, with the standard error of a pooled "
            "variance where the sides have unlike many units and that is larger. A side of fewer than five sessions: "
            "Student's t test with the scatter between the sessions of the other side and of the history, "
            "s sqrt(1 + 1/k) for one against k."
        )
        unit = (
            "The session, because its runs share the machine's state: the mean logarithm of its runs. Runs are of one "
            "session while less than 12 h pass between them, for a day at most, unless the host was started anew; one "
            "Slurm job is one session. Where one job or one command ran both sides, the run."
        )
    tolerated = share_text(rule.tolerance)
    return (
        ("Unit", f"{unit} Every run gives one number for each metric; steps of one run are not independent."),
        (
            "Ratio",
            "Geometric mean over units of B by that of A, turned so that above 1 is worse. Its interval is the test's: "
            "its ends leave the level that the test has below and above. Without a test the interval is over runs, "
            f"within the session they ran in, and with fewer than {MIN_RUNS} runs a side their range.",
        ),
        (
            "Test",
            f'{test} B is divided by {1 + rule.tolerance:.4g} first: p is of "no more than {tolerated} worse". Level '
            f"{share_text(rule.level)}{_correction(found.num_compared)}. "
            "With one-sided or two-state noise equal on both sides it fails no more often; where one side is noisier "
            "and slowed now and then, 5 % and more.",
        ),
        (
            "Verdicts",
            f"regressed: p at most {share_text(rule.level)}; improved: the mirror image; equivalent: the 90 % interval "
            f"of the ratio within {tolerated} (TOST at 5 %); else inconclusive, as without sessions enough for a test. "
            f"Fewer than {MIN_RUNS} runs on a side: insufficient.",
        ),
        *((_FLOOR,) if floors else ()),
    )


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
    """regressed, improved, equivalent, inconclusive, insufficient; of a floor missed, met, inconclusive, insufficient;
    `information` for metrics that do not decide."""
    reason: str
    awaits_reference: bool
    """Whether nothing is wrong with B, and the reference is not there yet: too few runs of A, or too few sessions."""
    a: Estimate | None
    """Geometric mean over the units of the ratio, or over runs where no test was made; None where no run tells."""
    b: Estimate | None
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse, and of a floor below 1. Where a test was made its interval is the one
    that decides: regressed where it lies above the tolerance, improved where it lies below."""
    tested: TTest | None
    """The test; None where none was made."""
    values_a: tuple[float, ...]
    """One for each run; where paired, equal places are pairs."""
    values_b: tuple[float, ...]

    @property
    def is_floor(self) -> bool:
        """Whether A is the floor of --at-least."""
        return self.name == FLOOR.name

    @property
    def sides(self) -> tuple[str, str, str]:
        """What A, B and B / A are called."""
        return ("Floor", "Throughput", "Throughput / floor") if self.is_floor else ("A", "B", "B / A")

    @property
    def repeats_text(self) -> str:
        """Units that show the slowdown that is asked for, e.g. ``12 sessions per side``; empty where none do."""
        test = self.tested
        if test is None or test.repeats is None:
            return ""
        return f"{test.repeats} {test.unit}s{'' if test.unit == 'pair' or self.is_floor else ' per side'}"


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
    wall_s: float | None
    """What B's runs took, from start to end, and of pairs also A's, seconds; None: not told."""
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
    """Points that A does not have, or for which no floor is."""
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    notices: tuple[str, ...]
    """What the workloads must not be mistaken for."""
    methods: tuple[tuple[str, str], ...]
    """Heading and text: how the verdicts are made."""

    @property
    def is_of_floors(self) -> bool:
        """Whether there are floors and no side A."""
        return {metric.is_floor for _, metric in self.each()} == {True}

    def each(self) -> Iterator[tuple[PointResult, MetricResult]]:
        """Every comparison that decides, with its point."""
        for point in self.points:
            for metric in point.gated:
                yield point, metric


DAY_S = 86_400

T = TypeVar("T")


def assemble(found: Comparison) -> ComparisonReport:
    """The report of a comparison; equal comparisons give equal reports."""
    points = _with_unique_labels(tuple(_point(point, found) for point in found.points))
    environment = _of_all([point.environment for point in points])
    cautions = _of_all([point.cautions for point in points])
    points = tuple(
        dataclasses.replace(
            point,
            environment=tuple(one for one in point.environment if one not in environment),
            cautions=tuple(one for one in point.cautions if one not in cautions),
        )
        for point in points
    )
    return ComparisonReport(
        dlbench_version=dlbench.__version__,
        a=found.a,
        b=found.b,
        paired=found.paired,
        history=found.history,
        verdict=found.verdict,
        headline=headline(found.verdict, points, found.rule.tolerance),
        tolerance=found.rule.tolerance,
        level=found.rule.level,
        num_compared=found.num_compared,
        points=points,
        environment=environment,
        cautions=cautions,
        only_b=tuple(point_label(point) for point in found.only_b),
        left_out=found.left_out,
        damaged=found.damaged,
        notices=tuple(sorted({point.a.notice for point in found.points} - {""})),
        methods=methods(found),
    )


def _with_unique_labels(points: tuple[PointResult, ...]) -> tuple[PointResult, ...]:
    """Points of equal labels are counted: a CI server takes test cases of one name for one."""
    seen: dict[str, int] = {}
    result = []
    for point in points:
        seen[point.label] = number = seen.get(point.label, 0) + 1
        result.append(dataclasses.replace(point, label=f"{point.label} ({number})") if number > 1 else point)
    return tuple(result)


def _of_all(lists: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """What is in every list, in the order of the first."""
    return tuple(one for one in lists[0] if all(one in other for other in lists[1:])) if lists else ()


def _point(found: ComparedPoint, whole: Comparison) -> PointResult:
    a, b = found.a, found.b
    runs_b = () if b is None else b.runs
    return PointResult(
        label=point_label(a, {one.key for one in found.allowed}),
        caption=_caption(a, found.allowed),
        workload=a.content.registered["workload"],
        ranks=a.ranks,
        nodes=a.nodes,
        runs_a=tuple(run.run_id for run in a.runs),
        runs_b=tuple(run.run_id for run in runs_b),
        sessions_a=_sessions(a.runs, found),
        sessions_b=_sessions(runs_b, found),
        sessions_history=found.num_history,
        finished_a=_span(a.runs),
        finished_b=_span(runs_b),
        wall_s=_wall_s((*a.runs, *runs_b) if whole.paired else runs_b),
        tags_a=_tags(a.tags),
        tags_b=_tags({} if b is None else b.tags),
        allowed=found.allowed,
        environment=found.environment,
        cautions=tuple(_cautions(found, whole)),
        metrics=tuple(_metric(one) for one in found.metrics),
    )


def _caption(point: SidePoint, allowed: Sequence[KeyDifference]) -> str:
    """Conditions that both sides share; what differs on purpose is told apart."""
    # Most runs are of speed: only a target is worth words.
    told = {name: value for name, value in point.content.registered.items() if value and value != "speed"}
    unit = point.sample_unit
    # Before and behind the value; never a pattern, for units and values are text of workload files.
    around = {
        "precision": ("", ""),
        "batch_per_rank": ("", f" {unit} per rank"),
        "global_batch": ("", f" {unit} in all"),
        "data": ("", " data" if told.get("data") == "synthetic" else ""),
        "exchange": ("exchange ", ""),
        "goal": ("", ""),
        "system": ("on ", ""),
        "device": ("", ""),
        "watching": ("monitoring ", ""),
        "fault": ("injected fault ", ""),
    }
    different = {one.key for one in allowed}
    shown = [
        f"{before}{told[name]}{behind}"
        for name, (before, behind) in around.items()
        if name in told and name not in different
    ]
    return "; ".join(["geometric means", *shown, *([point.notice] if point.notice else [])])


def _sessions(runs: Sequence[SideRun], found: ComparedPoint) -> int:
    return len({found.sessions[run.run_id] for run in runs})


def _span(runs: Sequence[SideRun]) -> tuple[str, str]:
    ends = sorted(whole_seconds(run.finished) for run in runs)
    return (ends[0], ends[-1]) if ends else ("", "")


def _wall_s(runs: Sequence[SideRun]) -> float | None:
    told = [run.wall_s for run in runs if run.wall_s is not None]
    return sum(told) if told and len(told) == len(runs) else None


def _tags(tags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(tags.items()))


def _metric(found: ComparedMetric) -> MetricResult:
    judged, metric = found.judgement, found.metric
    return MetricResult(
        name=metric.name,
        title=metric.title,
        about=metric.about,
        gated=found.gated,
        verdict=judged.verdict if found.gated else "information",
        reason=judged.reason if found.gated else "",
        awaits_reference=found.gated and judged.awaits_reference,
        a=found.a,
        b=found.b,
        ratio=judged.ratio,
        tested=judged.tested,
        values_a=found.values_a,
        values_b=found.values_b,
    )


def _cautions(found: ComparedPoint, whole: Comparison) -> Iterator[str]:
    if found.b is None:
        yield "B has no run with figures here: nothing is compared."
        return
    for side, point in (("A", found.a), ("B", found.b)):
        yield from (f"{side}: {text}." if found.a.runs else f"{text}." for text in point.doubts)
    if found.unpaired:
        yield f"{runs_text(found.unpaired)} without a partner on the other side left out."
    shared = {run.run_id for run in found.a.runs} & {run.run_id for run in found.b.runs}
    if shared:
        yield f"{runs_text(len(shared))} on both sides: a run is compared with itself."
    if not whole.paired and found.a.runs:
        yield from filter(None, [_spacing(found)])
    for one in found.metrics:
        if one.metric.name == FLOOR.name:
            continue
        counts = len(one.values_a), len(one.values_b)
        wanted = len(found.a.runs), len(found.b.runs)
        if one.gated and counts != wanted:
            told = " and ".join(f"{n} of {of} runs of {side}" for n, of, side in zip(counts, wanted, "AB", strict=True))
            yield f"{one.metric.title}: in {told}."


def _spacing(found: ComparedPoint) -> str:
    """How far apart in time the sides were run, because a machine drifts; empty where that is accounted for."""
    advice = "`dlbench run --ab` interleaves them, and --paired compares the pairs."
    sides = found.a.runs, found.b.runs if found.b else ()
    times = [[moment for run in side if math.isfinite(moment := run.circumstances.moment)] for side in sides]
    if not all(times):
        return f"When the runs ended is not known; a drift of the machine would count as a difference. {advice}"
    first, second = sorted(times, key=min)
    gap = min(second) - max(first)
    if gap <= 0:
        return f"The runs were not compared as pairs; {advice}"
    # Sessions that lie as far apart as the sides have its drift in their scatter.
    spans = [max(ends) - min(ends) for ends, side in zip(times, sides, strict=True) if _sessions(side, found) > 1]
    if gap <= max(spans, default=0.0):
        return ""
    days = gap / DAY_S
    far = (
        f"{days:.0f} days apart"
        if days >= 2
        else f"{gap / 3600:.0f} hours apart"
        if gap >= 7200
        else "one after the other"
    )
    return f"The sides were run {far}: a drift of the machine in between counts as a difference; {advice}"
