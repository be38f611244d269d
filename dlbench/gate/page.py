"""A comparison as a `Document`: the verdict, one table of all comparisons, and each point with its evidence.

The same as JUnit XML, the form of test results that CI servers show. Regressed and missed are failures. Inconclusive
and insufficient are errors: the test could not tell, and what could not be told must not look like a pass; only where
the reference is not there yet a case is skipped, because there is nothing to mend. The others pass. Metrics that do not
decide are no test cases.

Elements and attributes are those that junit-10.xsd of Jenkins' xUnit plugin allows. GitLab shows an element's text and
not its message; Jenkins shows both, and for a skipped case the text only where there is no message.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from xml.etree import ElementTree

import dlbench
from dlbench.errors import DlbenchError
from dlbench.gate.comparison import FLOOR, ComparedMetric, ComparedPoint, Comparison
from dlbench.gate.sides import KeyDifference, SidePoint, SideRun, point_label, versus
from dlbench.gate.verdicts import TTest
from dlbench.report.document import Document, Mark, Section, methods_section
from dlbench.report.formats.terminal import WIDTH, shorten, to_text
from dlbench.report.table import Cell, Column, Sheet, times_cell, unit_cell
from dlbench.report.wording import DASH, basis_text, clean, place_text, runs_text, value_text, within_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import whole_seconds

if TYPE_CHECKING:
    from dlbench.records.scan import Scan


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

    format: str = "dlbench.comparison"
    version: int = 1
    dlbench_version: str = dlbench.__version__
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
    points = _with_unique_labels(tuple(_point_result(point, found) for point in found.points))
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


def _point_result(found: ComparedPoint, whole: Comparison) -> PointResult:
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
        cautions=tuple(_point_cautions(found, whole)),
        metrics=tuple(_metric_result(one) for one in found.metrics),
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


def _metric_result(found: ComparedMetric) -> MetricResult:
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


def _point_cautions(found: ComparedPoint, whole: Comparison) -> Iterator[str]:
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


# What XML 1.0, section 2.2, does not allow in a document, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: ComparisonReport, name: str = "dlbench check") -> str:
    """One test suite, a test case for each point and metric that decides, and one for damaged data, if there is any.

    Args:
        report: the comparison.
        name: of the suites as a whole.
    """
    cases = [_case(point, metric) for point, metric in report.each()]
    cases += [_damaged(line) for line in report.damaged]
    counts = {"tests": str(len(cases))}
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        counts[count] = str(sum(case.find(tag) is not None for case in cases))
    counts |= _time([point.wall_s for point in report.points if point.gated])
    root = _element("testsuites", {"name": name, **{key: value for key, value in counts.items() if key != "skipped"}})
    suite = _element("testsuite", {"name": f"{report.b} against {report.a}", **counts})
    if moments := [point.finished_b[1] for point in report.points if point.finished_b[1]]:
        suite.set("timestamp", _legal(max(moments).removesuffix("Z")))
    root.append(suite)
    suite.append(
        _properties(
            [
                ("verdict", report.verdict),
                ("headline", report.headline),
                ("tolerance", f"{report.tolerance:.6g}"),
                ("level", f"{report.level:.6g}"),
                ("paired", str(report.paired).lower()),
                ("dlbench_version", report.dlbench_version),
            ]
        )
    )
    suite.extend(cases)
    if said := [*remarks(report)]:
        suite.append(_text("system-out", {}, said))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(point: PointResult, metric: MetricResult) -> ElementTree.Element:
    # The time is that of runs, which all cases of a point judge: each has its part, so that sums are what they took.
    time = _time([None if point.wall_s is None else point.wall_s / len(point.gated)])
    case = _element("testcase", {"classname": point.label, "name": f"{metric.title} ({metric.name})", **time})
    told = {"type": metric.verdict, "message": f"{metric.verdict}: {change_text(metric)}"}
    lines = [*_evidence(point, metric)]
    if metric.verdict in ("regressed", "missed"):
        case.append(_text("failure", told, [metric.reason, *lines]))
    elif metric.awaits_reference:
        case.append(_text("skipped", {"type": metric.verdict}, [f"{metric.verdict}: {metric.reason}", *lines]))
    elif metric.verdict in ("inconclusive", "insufficient"):
        case.append(_text("error", told, [metric.reason, *lines]))
    else:
        case.append(_text("system-out", {}, [told["message"], metric.reason, *lines]))
    return case


def _time(seconds: list[float | None]) -> dict[str, str]:
    """The attribute; none where runs do not tell when they began."""
    told = [one for one in seconds if one is not None]
    return {"time": f"{sum(told):.3f}"} if told and len(told) == len(seconds) else {}


def _text(tag: str, attributes: dict[str, str], lines: list[str]) -> ElementTree.Element:
    found = _element(tag, attributes)
    found.text = _legal("\n".join(lines))
    return found


def _evidence(point: PointResult, metric: MetricResult) -> Iterator[str]:
    a, b, both = metric.sides
    sides = f"{a} {_amount(metric.a)}; {b} {_amount(metric.b)}"
    yield sides if metric.ratio is None else f"{sides}; {both} {ratio_text(metric.ratio)}"
    yield point.caption
    if metric.tested:
        yield f"p worse {p_against(metric.tested.p_worse, metric.tested.level_worse)}; {metric.tested.method}"
    yield from filter(None, [power_text(metric)])
    yield from (
        f"differs on purpose: {one.title}: {one.a or 'none'} against {one.b or 'none'}" for one in point.allowed
    )
    yield from remarks(point)


def _damaged(line: str) -> ElementTree.Element:
    case = _element("testcase", {"classname": "dlbench", "name": f"data: {line[:120]}"})
    case.append(_text("error", {"type": "damaged"}, [line]))
    return case


def _properties(pairs: list[tuple[str, str]]) -> ElementTree.Element:
    properties = _element("properties", {})
    for name, value in pairs:
        properties.append(_element("property", {"name": name, "value": value}))
    return properties


def _element(tag: str, attributes: dict[str, str]) -> ElementTree.Element:
    return ElementTree.Element(tag, {key: _legal(value) for key, value in attributes.items()})


def _legal(text: str) -> str:
    return "\n".join(_ILLEGAL.sub("", clean(line)) for line in text.split("\n"))


MAX_ENVIRONMENT = 6
"""Differing keys of the environment that are shown; JSON has all."""
MAX_LEFT_OUT = 5
_VALUE_WIDTH = 30


@dataclass(frozen=True)
class _Row:
    """One line of the table of all comparisons."""

    point: PointResult
    metric: MetricResult


def document_of(report: ComparisonReport) -> Document:
    """The comparison, ready for every format."""
    rows = [_Row(point, metric) for point, metric in report.each()]
    title, a, b = "dlbench comparison of B against A", "A", "B"
    if report.is_of_floors:
        title, a, b = "dlbench check against a floor", "Against", "Runs"
    verdict = Section(
        id="verdict",
        title=f"Verdict: {report.verdict}",
        level="answer",
        words=(report.headline,),
        facts=((a, report.a), (b, report.b)),
        sheets=(_comparisons(rows),),
        marks=tuple(_cautions(report)),
        sections=tuple(_point(number, point, report) for number, point in enumerate(report.points)),
        next_step=next_step(report),
        brief=(report.headline, f"{a}: {report.a}", f"{b}: {report.b}"),
        is_group=True,
    )
    return Document(
        title=f"{title}: {report.verdict}",
        dlbench_version=report.dlbench_version,
        notices=report.notices,
        sections=(verdict, *methods_section(report.methods, "How the verdicts are made")),
        data=report,
        command="dlbench compare A B",
    )


def next_step(report: ComparisonReport) -> str:
    """What would bring a verdict, or what to look at; empty where there is nothing to do."""
    gated = [metric for point in report.points for metric in point.gated if metric.verdict == report.verdict]
    if not gated:
        return ""
    if report.verdict in ("insufficient", "inconclusive"):
        reasons = dict.fromkeys(metric.reason for metric in gated if metric.reason)
        # How many units show a slowdown says nothing of how near a floor a machine may lie.
        compared = [metric for metric in gated if not metric.is_floor]
        tests = [(metric.tested, metric) for metric in compared if metric.tested and metric.repeats_text]
        if report.verdict == "insufficient":
            return f"{next(iter(reasons), '')}: repeat with --repeats {MIN_RUNS} or more."
        if tests:
            most = max(tests, key=lambda one: one[0].repeats or 0)
            return f"{most[1].repeats_text} would show {share_text(most[0].wanted)} (--detect)."
        return f"{next(iter(reasons), '')}."
    if report.verdict == "missed":
        return f"dlbench diagnose {report.b} says where the time goes."
    return "dlbench diagnose on both sides says where the time went." if report.verdict == "regressed" else ""


def paired_lines(scan: Scan) -> list[str]:
    """What the paired comparisons of some runs say, or why they say nothing: for the end of `dlbench run --ab`."""
    from dlbench.gate.comparison import compare_pairs, paired_points
    from dlbench.gate.verdicts import Rule
    from dlbench.reading.metrics import DEFAULT_METRICS

    try:
        points, both = paired_points(scan, str(scan.root), {}, "--where")
    except DlbenchError as error:
        return textwrap.wrap(f"No comparison of the sides: {clean(str(error))}", WIDTH)
    report = assemble(compare_pairs(points, both=both, metrics=DEFAULT_METRICS, rule=Rule()))
    return to_text(document_of(report)).splitlines()


def remarks(found: PointResult | ComparisonReport) -> Iterator[str]:
    """Cautions at a point, or at all: environments that differ, and reasons to read verdicts with care."""
    if found.environment:
        keys = _keys(found.environment)
        more = f"; and {len(keys) - MAX_ENVIRONMENT} more" if len(keys) > MAX_ENVIRONMENT else ""
        yield f"Environments of A and B differ: {'; '.join(keys[:MAX_ENVIRONMENT])}{more}."
    yield from found.cautions


def _comparisons(rows: list[_Row]) -> Sheet[_Row]:
    """A line for each comparison; the setting only where there are several."""
    settings = {_setting(row.point) for row in rows}
    places = {(row.point.ranks, row.point.nodes) for row in rows}
    # On 80 columns of several points the ratio keeps its interval, and the sides stand in the full form; of floors the
    # throughput keeps it.
    kinds = {row.metric.is_floor for row in rows}
    are_floors = kinds == {True}
    of_floors = ", of a throughput floor below 1" if True in kinds else ""
    is_one = len(places) == 1 or are_floors
    a, b, both = rows[0].metric.sides if are_floors else ("A", "B", "B / A")
    columns: tuple[Column[_Row], ...] = (
        Column("", "Verdict", lambda row: row.metric.verdict, is_brief=True),
        Column(
            "", both, lambda row: row.metric.ratio, lambda row: ratio_cell(row.metric.ratio), is_brief=not are_floors
        ),
        Column("", "Metric", lambda row: row.metric.title, is_brief=not are_floors),
        Column("", "At", lambda row: place_text(row.point.ranks, row.point.nodes), is_brief=len(places) > 1),
        *((Column("", "Setting", lambda row: _setting(row.point), is_brief=True),) if len(settings) > 1 else ()),
        Column(
            "", a, lambda row: row.metric.a, lambda row: unit_cell(row.metric.a, with_interval=False), is_brief=is_one
        ),
        Column(
            "",
            b,
            lambda row: row.metric.b,
            lambda row: unit_cell(row.metric.b, with_interval=are_floors),
            is_brief=is_one,
        ),
        Column("", "p worse", lambda row: _p_worse(row.metric)),
    )
    return Sheet(
        name="comparisons",
        title="All comparisons",
        columns=columns,
        rows=rows,
        caption="missed: the whole interval of the throughput lies below the floor; met: it lies above."
        if are_floors
        else f"B / A: above 1 is worse{of_floors}. "
        "Of a test, regressed means that the whole interval lies above the tolerance.",
        in_terminal=True,
    )


def _setting(point: PointResult) -> str:
    """The label without the place at its end."""
    return point.label.rpartition(", ")[0]


def _information(where: str, metrics: list[MetricResult]) -> Section:
    """Metrics without verdict, a line each, at every width."""
    return Section(
        id=f"{where}-information",
        title="For information, without verdict",
        facts=tuple(
            (one.title, f"B / A {ratio_cell(one.ratio)}; A {_amount(one.a)}; B {_amount(one.b)}") for one in metrics
        ),
    )


def _amount(figure: Estimate | None) -> str:
    return DASH if figure is None else str(unit_cell(figure))


def _point(number: int, point: PointResult, report: ComparisonReport) -> Section:
    others = [metric for metric in point.metrics if not metric.gated]
    return Section(
        id=f"point-{number}",
        title=point.label,
        level="answer",
        brief=(),
        about=(point.caption, f"Differs on purpose: {'; '.join(_keys(point.allowed))}" if point.allowed else ""),
        facts=(("Pairs" if report.paired else "Runs", _sides(point)),),
        marks=tuple(Mark(severity="note", text=text) for text in remarks(point)),
        sections=(
            *(_metric(f"point-{number}", metric, report) for metric in point.gated),
            *((_information(f"point-{number}", others),) if others else ()),
        ),
    )


def _metric(where: str, metric: MetricResult, report: ComparisonReport) -> Section:
    """The evidence behind one verdict."""
    tested = metric.tested
    a, b, both = metric.sides
    facts = [
        (
            name,
            "not measured"
            if figure is None
            else f"{unit_cell(figure)}; {'--at-least' if name == 'Floor' else basis_text(figure)}",
        )
        for name, figure in ((a, metric.a), (b, metric.b))
    ]
    if metric.ratio is not None:
        basis = basis_text(metric.ratio, tested.unit if tested else "run")
        worse = "below" if metric.is_floor else "above"
        facts.append((both, f"{ratio_text(metric.ratio)}; {worse} 1 is worse; {basis}"))
    if tested is not None:
        facts.append(("p worse", f"{p_against(tested.p_worse, tested.level_worse)}; {tested.method}"))
        facts.append(("p better", p_against(tested.p_better, tested.level_better)))
    if tested is not None and not metric.is_floor:
        ends = f"[{tested.equivalence[0]:.3f}, {tested.equivalence[1]:.3f}]"
        facts.append(("90 %", f"{ends}, tolerance {share_text(report.tolerance)}"))
    power = power_text(metric)
    return Section(
        id=f"{where}-{metric.name}",
        title=f"{metric.title}: {metric.verdict}{f' ({metric.reason})' if metric.reason else ''}",
        facts=tuple(facts),
        words=(power,) if power else (),
    )


def _p_worse(metric: MetricResult) -> str:
    return p_against(metric.tested.p_worse, metric.tested.level_worse) if metric.tested else "none"


def _cautions(report: ComparisonReport) -> Iterator[Mark]:
    """What holds for all points, damage first."""
    yield from (Mark(severity="serious", text=f"damaged: {line}") for line in report.damaged)
    yield from (Mark(severity="note", text=text) for text in remarks(report))
    alone = "No floor is for" if report.is_of_floors else "Only in B, compared with nothing"
    for head, found in ((alone, report.only_b), ("Left out", report.left_out)):
        if found:
            more = len(found) - MAX_LEFT_OUT
            shown = "; ".join((*found[:MAX_LEFT_OUT], *([f"and {more} more"] if more > 0 else [])))
            yield Mark(severity="note", text=f"{head}: {shown}.")


def _sides(point: PointResult) -> str:
    texts = []
    for name, runs, sessions, (first, last), tags in (
        ("A", point.runs_a, point.sessions_a, point.finished_a, point.tags_a),
        ("B", point.runs_b, point.sessions_b, point.finished_b, point.tags_b),
    ):
        when = "" if not first else f" ({first})" if first == last else f" ({first} to {last})"
        tagged = "".join(f", {key} {value}" for key, value in tags)
        if name == "A" and not runs:
            continue
        held = f" in {sessions} session{'s' * (sessions > 1)}" if runs else ""
        of = f" of {name}" if point.runs_a else ""
        texts.append(f"{len(runs)}{of}{held}{when}{tagged}")
    if point.sessions_history:
        texts.append(f"scatter also of {point.sessions_history} sessions of the history")
    return ", ".join(texts)


def _keys(pairs: tuple[KeyDifference, ...]) -> list[str]:
    return [
        f"{one.title}: {shorten(one.a or 'none', _VALUE_WIDTH)} against {shorten(one.b or 'none', _VALUE_WIDTH)}"
        for one in pairs
    ]
