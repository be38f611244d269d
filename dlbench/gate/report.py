"""What a comparison says as plain data: every number with its verdict, the verdict in words, and how it was made."""

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
from dlbench.report.table import Cell, times_cell, unit_cell
from dlbench.report.wording import place_text, runs_text, sentence, value_text, within_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.verdict_words import FLOOR as FLOOR_WORDS
from dlbench.stats.verdict_words import GATE_ORDER
from dlbench.units import first_of, whole_seconds

T = TypeVar("T")

FLOOR = Metric(
    name="throughput",
    title="Throughput floor",
    unit="samples/s",
    about="samples of all ranks over the longest measured time of any rank; A is the floor that --at-least gives, "
    "and of B / A below 1 is worse",
    higher_is_worse=False,
)

_FLOOR = (
    "Floor",
    "--at-least: Student's t test of the mean logarithm of the throughput, without tolerance. missed: the whole "
    "interval lies below the floor; met: above it; else inconclusive. The unit is the run, and the verdict holds "
    "within the session that they ran in; from five sessions on it is the session. The "
    "ratio is throughput / floor: below 1 is worse.",
)
DAY_S = 86_400
MAX_NAMED = 4  # Points with one verdict on their floors that the headline names.


def headline(verdict: str, points: Sequence[PointResult], tolerance: float) -> str:
    """Returns the verdict of all comparisons with the one that stands for it, and what each floor says."""
    every = [(point, metric) for point in points for metric in point.gated]
    floors = [(point, metric) for point, metric in every if metric.is_floor]
    compared = [(point, metric) for point, metric in every if not metric.is_floor]
    if not floors:
        return _headline(verdict, compared, tolerance)
    words = [_floors_text(word, floors) for word in reversed(GATE_ORDER)]
    if compared:
        words.insert(0, _headline(overall(metric.verdict for _, metric in compared), compared, tolerance))
    return " ".join(filter(None, words))


def _floors_text(verdict: str, floors: Sequence[tuple[PointResult, MetricResult]]) -> str:
    same = [(point, metric) for point, metric in floors if metric.verdict == verdict]
    if not same:
        return ""
    is_one_setting = len({point.label.rpartition(", ")[0] for point, _ in floors}) == 1
    names = [place_text(point.ranks, point.nodes) if is_one_setting else point.label for point, _ in same]
    places = first_of(names, MAX_NAMED)
    answer = next(one for one in FLOOR_WORDS.values() if one.word == verdict)
    if answer.tone == "good":
        return f"{places}: {answer.in_sentence}."
    worst = max(range(len(same)), key=lambda place: _size(same[place][1]))
    metric = same[worst][1]
    figure = metric.reason if verdict == "insufficient" else change_text(metric)
    at_worst = f"worst at {names[worst]}: " if len(names) > 1 else ""
    return f"{places}: {answer.in_sentence}, {at_worst}{figure}."


def _headline(verdict: str, every: Sequence[tuple[PointResult, MetricResult]], tolerance: float) -> str:
    same = [(point, metric) for point, metric in every if metric.verdict == verdict]
    if not same:
        return f"{verdict}: nothing was compared."
    point, metric = max(same, key=lambda one: _size(one[1]))
    sides = versus(point.allowed)
    subject = f"{metric.title} at {point.label}{f', {sides}' if sides else ''}: {change_text(metric)}"
    count = f"{len(same)} of {len(every)} comparisons {verdict}" if len(every) > 1 else verdict
    first = "the largest change is " if len(same) > 1 else ""
    return f"{count}; {first}{subject}; tolerance {share_text(tolerance)}."


def _size(metric: MetricResult) -> float:
    if metric.ratio is None:
        return 0.0
    return 1 / metric.ratio.value if metric.is_floor else abs(metric.ratio.value - 1)


def change_text(metric: MetricResult) -> str:
    """The ratio as a change, e.g. ``5.2 % worse, 1.052x [1.041, 1.064]``; its digits follow the interval, too."""
    if metric.is_floor and metric.a is not None and metric.b is not None:
        return f"{unit_cell(metric.b)} against a floor of {metric.a.value:,.10g}"
    if metric.ratio is None:
        return "no ratio"
    words = ("worse", "better")
    if metric.quality:
        words = ("slower per step", "faster per step") if metric.name.startswith("step_") else ("more", "less")
    word = words[metric.ratio.value < 1]
    change = value_text(metric.ratio.mapped(lambda ratio: ratio - 1, "fraction")).removeprefix("-")
    text = f"{change} {word}, {ratio_cell(metric.ratio)}{within_text(metric.ratio)}"
    return f"{text}; {metric.quality}" if metric.quality else text


def ratio_cell(ratio: Estimate | None) -> Cell:
    """A ratio near 1 with as many digits as a gate needs, e.g. ``1.052x [1.041, 1.064]``."""
    return times_cell(ratio, 3)


def share_text(fraction: float) -> str:
    """A share without needless digits, e.g. ``2 %``, ``2.5 %``."""
    return f"{fraction * 100:.4g} %"


def p_against(test: TTest, than: Literal["worse", "better"]) -> str:
    """A p and what it is held against, with two significant digits, e.g. ``0.0031 (at most 0.005)``."""
    p, level = (test.p_worse, test.level_worse) if than == "worse" else (test.p_better, test.level_better)
    return f"{p:.2g} (at most {level:.2g})"


def power_text(metric: MetricResult) -> str:
    """What the comparison could have seen, in a sentence; empty with too few runs."""
    test = metric.tested
    if test is None:
        return ""
    wanted, seen = share_text(test.wanted), share_text(round(test.detectable, 4))
    if test.repeats is None and metric.is_floor:
        needed = f"{wanted} needs more than 1,000 {test.unit}s"
    elif test.repeats is None:
        needed = f"{wanted}: within the tolerance, or more than 1,000 {test.unit}s"
    else:
        needed = f"{wanted} needs {metric.repeats_text}"
    scatter = share_text(round(test.scatter, 5))
    what = "shortfall below the floor" if metric.is_floor else "slowdown"
    return f"Smallest {what} found with 80 % probability: {seen}; {needed} (scatter of {test.unit}s {scatter})."


def methods(
    points: Sequence[PointResult], rule: Rule, *, paired: bool, num_compared: int
) -> tuple[tuple[str, str], ...]:
    """How the verdicts were made, heading and text."""
    correction = f" for all {num_compared} comparisons of this command together, by Holm's correction"
    if num_compared < 2:
        correction = "; no correction, as there is no second comparison"
    kinds = {one.is_floor for point in points for one in point.gated}
    if False not in kinds:
        return _FLOOR, ("Level", f"{share_text(rule.level)} below, and as much above{correction}.")
    if paired:
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
            f"{share_text(rule.level)}{correction}. "
            "With one-sided or two-state noise equal on both sides it fails no more often; where one side is noisier "
            "and slowed now and then, 5 % and more.",
        ),
        (
            "Verdicts",
            f"regressed: p at most {share_text(rule.level)}; improved: the mirror image; equivalent: the 90 % interval "
            f"of the ratio within {tolerated} (TOST at 5 %); else inconclusive, as without sessions enough for a test. "
            f"Fewer than {MIN_RUNS} runs on a side: insufficient.",
        ),
        *((_FLOOR,) if True in kinds else ()),
    )


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """One metric at one point."""

    name: str
    title: str
    about: str
    gated: bool  # Whether it has a part in the verdict; the others are information.
    verdict: str
    """regressed, improved, equivalent, inconclusive, insufficient; of a floor missed, met, inconclusive, insufficient;
    `information` for metrics that do not decide."""
    reason: str
    awaits_reference: bool  # Whether B is all right and the reference lacks runs or sessions.
    a: Estimate | None
    """Geometric mean over the units of the ratio, over runs without a test; None where no run has the figure."""
    b: Estimate | None
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse, and of a floor below 1. Where a test was made its interval is the one
    that decides: regressed where it lies above the tolerance, improved where it lies below."""
    tested: TTest | None
    values_a: tuple[float, ...]  # One for each run; where paired, equal places are pairs.
    values_b: tuple[float, ...]
    quality: str = ""
    """What the ratio leaves open, with the losses, where the sides do not do the same training: neither is better."""

    @property
    def is_floor(self) -> bool:
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

    label: str  # Workload, preset, engine, scaling, place.
    caption: str  # Conditions of the figures in one line.
    workload: str
    ranks: int
    nodes: int
    runs_a: tuple[str, ...]
    runs_b: tuple[str, ...]
    sessions_a: int  # Sessions of these runs, as comparisons over time count them.
    sessions_b: int
    sessions_history: int  # Further sessions, of the history, which show how far sessions scatter.
    finished_a: tuple[str, str]  # First and last end of a run, UTC; empty where there is none.
    finished_b: tuple[str, str]
    wall_s: float | None  # What B's runs took, from start to end, and of pairs also A's, seconds; None: not known.
    tags_a: tuple[tuple[str, str], ...]
    tags_b: tuple[tuple[str, str], ...]
    allowed: tuple[KeyDifference, ...]
    environment: tuple[KeyDifference, ...]  # What differs between the environments at this point and not at all points.
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
    a: str  # What side A is called.
    b: str
    paired: bool
    history: str  # What shows how far sessions scatter, besides the sides; empty: nothing.
    verdict: str
    headline: str
    tolerance: float  # Fraction by which B may be slower.
    level: float  # Chance that any comparison of the command fails though none is slower than tolerated.
    num_compared: int  # Comparisons that the correction counts.
    points: tuple[PointResult, ...]
    environment: tuple[KeyDifference, ...]  # What differs between the environments at every point.
    cautions: tuple[str, ...]  # Reasons to read every verdict with care, in sentences.
    only_b: tuple[str, ...]  # Points that A does not have, or for which no floor is.
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    notices: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def is_of_floors(self) -> bool:
        return {metric.is_floor for _, metric in self.each()} == {True}

    def each(self) -> Iterator[tuple[PointResult, MetricResult]]:
        """Every comparison that decides, with its point."""
        for point in self.points:
            for metric in point.gated:
                yield point, metric


def report_of(
    a: GateSide,
    b: GateSide,
    points: Sequence[PointResult],
    rule: Rule,
    *,
    paired: bool,
    only_b: Sequence[SidePoint],
    notices: Iterable[str],
    history: str,
) -> ComparisonReport:
    """The points of a comparison with the verdict of all of them, and what holds for all said once."""
    # Points of equal labels are counted: a CI server takes test cases of one name for one.
    seen: dict[str, int] = {}
    result = []
    for point in points:
        seen[point.label] = number = seen.get(point.label, 0) + 1
        result.append(dataclasses.replace(point, label=f"{point.label} ({number})") if number > 1 else point)
    points = tuple(result)
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
    gated = [metric for point in points for metric in point.gated]
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
        only_b=tuple(map(point_label, only_b)),
        left_out=tuple(dict.fromkeys((*a.left_out, *b.left_out))),
        damaged=tuple(dict.fromkeys((*a.damaged, *b.damaged))),
        notices=tuple(sorted({*notices} - {""})),
        methods=methods(points, rule, paired=paired, num_compared=num_compared),
    )


def _of_all(lists: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(one for one in lists[0] if all(one in other for other in lists[1:])) if lists else ()


def point_of(
    found: Match, metrics: Sequence[MetricResult], sessions: Mapping[str, str], *, num_history: int, paired: bool
) -> PointResult:
    """A point with its metrics; `sessions` are those of the runs of the command, by run id."""
    a, b, runs_b = found.a, found.b, () if found.b is None else found.b.runs
    a_met, b_met = a.environment, {} if b is None else b.environment
    runs = (*a.runs, *runs_b) if paired else runs_b
    known = [run.wall_s for run in runs if run.wall_s is not None]
    return PointResult(
        label=point_label(a, {one.key for one in found.allowed}),
        caption=_caption(a, found.allowed),
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
        wall_s=sum(known) if known and len(known) == len(runs) else None,
        tags_a=tuple(sorted(a.tags.items())),
        tags_b=() if b is None else tuple(sorted(b.tags.items())),
        allowed=found.allowed,
        environment=tuple(
            KeyDifference(key=key, title=key, a=a_met[key], b=b_met[key])
            for key in sorted(a_met.keys() & b_met.keys())
            if a_met[key] != b_met[key]
        ),
        cautions=tuple(_point_cautions(found, metrics, sessions, paired)),
        metrics=tuple(metrics),
    )


def _caption(point: SidePoint, allowed: Sequence[KeyDifference]) -> str:
    """Conditions that both sides share; what differs on purpose is said elsewhere."""
    # Most runs are of speed: only a target is worth words.
    registered = {name: value for name, value in point.content.registered.items() if value and value != "speed"}
    unit = point.sample_unit
    # Before and behind the value; never a pattern, for units and values are text of workload files.
    around = {
        "precision": ("", ""),
        "batch_per_rank": ("", f" {unit} per rank"),
        "global_batch": ("", f" {unit} in all"),
        "data": ("", " data" if registered.get("data") == "synthetic" else ""),
        "exchange": ("exchange ", ""),
        "goal": ("", ""),
        "system": ("on ", ""),
        "device": ("", ""),
        "watching": ("monitoring ", ""),
        "fault": ("injected fault ", ""),
    }
    different = {one.key for one in allowed}
    shown = [
        f"{before}{registered[name]}{behind}"
        for name, (before, behind) in around.items()
        if name in registered and name not in different
    ]
    return "; ".join(["geometric means", *shown, *([point.notice] if point.notice else [])])


def _span(runs: Sequence[SideRun]) -> tuple[str, str]:
    ends = sorted(whole_seconds(run.circumstances.finished) for run in runs)
    return (ends[0], ends[-1]) if ends else ("", "")


def _point_cautions(
    found: Match, metrics: Sequence[MetricResult], sessions: Mapping[str, str], paired: bool
) -> Iterator[str]:
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
    if not paired and found.a.runs:
        yield from filter(None, [_spacing(found.a.runs, found.b.runs, sessions)])
    if found.quality:
        yield sentence(f"a step of both is not the same training (local SGD); {found.quality}")
    wanted = len(found.a.runs), len(found.b.runs)
    for one in metrics:
        counts = len(one.values_a), len(one.values_b)
        if one.gated and not one.is_floor and counts != wanted:
            a, b = (f"{n} of {of} runs of" for n, of in zip(counts, wanted, strict=True))
            yield f"{one.title}: in {a} A and {b} B."


def _spacing(a: Sequence[SideRun], b: Sequence[SideRun], sessions: Mapping[str, str]) -> str:
    """Returns how far apart in time the sides were run, because a machine drifts; empty where that is accounted for."""
    advice = "`dlbench run --ab` interleaves them, and --paired compares the pairs."
    times = [[moment for run in side if math.isfinite(moment := run.circumstances.moment)] for side in (a, b)]
    if not all(times):
        return f"When the runs ended is not known; a drift of the machine would count as a difference. {advice}"
    first, second = sorted(times, key=min)
    gap = min(second) - max(first)
    if gap <= 0:
        return f"The runs were not compared as pairs; {advice}"
    # Sessions that lie as far apart as the sides have its drift in their scatter.
    several = (len({sessions[run.run_id] for run in side}) > 1 for side in (a, b))
    spans = [max(ends) - min(ends) for ends, is_several in zip(times, several, strict=True) if is_several]
    if gap <= max(spans, default=0.0):
        return ""
    far = f"{gap / 3600:.0f} hours apart" if gap >= 7200 else "one after the other"
    if gap >= 2 * DAY_S:
        far = f"{gap / DAY_S:.0f} days apart"
    return f"The sides were run {far}: a drift of the machine in between counts as a difference; {advice}"
