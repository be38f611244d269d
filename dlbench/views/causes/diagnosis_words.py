"""A diagnosis in words: one line for a scaling point, and what blurs its causes."""

from __future__ import annotations

from dlbench.reading.attribution import Part
from dlbench.records.scan import Run
from dlbench.report.wording import clean, figure_text, percent, runs_text
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.figure import figure_of
from dlbench.views.causes.diagnosis import Advice, Diagnosis
from dlbench.views.causes.experiments import RULES
from dlbench.views.causes.numbers import CausePoint

CAUSE_TITLES = {
    "exchange": "exposed exchange",
    "straggler": "waiting for late ranks",
    "input": "input and copy to the device",
    "host": "host between phases",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "compute": "compute",
    "rest": "rest: imbalance of ends",
}
"""What the causes are called in tables, in order."""

_LATE_TITLES = {
    "input": "late by {} input",
    "compute": "late by {} computing",
    "host": "late between {} steps",
    None: "late by nothing of {} own",
}


def cause_notes(name: str, point: CausePoint) -> tuple[str, ...]:
    """How the runs of a point know a cause, or why it is 0."""
    if name == "memory":
        return ("nothing recomputes or swaps in these runs",)
    return tuple(map(clean, point.throttling_evidence)) if name == "throttling" else ()


def finding_line(point: CausePoint, found: Diagnosis) -> str:
    """The diagnosis of a point in one sentence, without the place."""
    lost = percent(point.whole.lost.value)
    largest = found.largest
    if found.finding == "baseline":
        return _baseline_line(point, found)
    if found.finding == "above ideal":
        more = percent(-point.whole.lost.value)
        return f"{more} above the ideal: the baseline ran with a handicap, or its runs drifted"
    if found.finding == "small loss":
        return f"no loss worth explaining ({lost})"
    if found.finding == "no loss" or largest is None:
        return "nothing is lost"
    in_runs = runs_text(largest.lost.n)
    most = f"the largest part is {found.told}"
    if found.finding == "too few runs":
        why = f"{in_runs}, fewer than {MIN_RUNS}, cannot tell the loss of {lost} from noise"
        return f"nothing stands out: {why}; {most}{_late(point, largest)}; repeat with --repeats {MIN_RUNS}"
    if found.finding == "within noise":
        why = f"the loss of {lost} is within the noise of {in_runs}"
        return f"nothing stands out: {why}; {most}; repeat with --repeats {2 * MIN_RUNS}"
    return _found_line(point, found, largest)


def _baseline_line(point: CausePoint, found: Diagnosis) -> str:
    largest = found.largest
    compute = point.part("compute").seconds.value
    text = f"baseline: {percent(compute / point.whole.seconds.value)} of a step is compute"
    if largest is None:
        return text
    share = largest.seconds.value / point.whole.seconds.value
    return f"{text}, {percent(share)} {found.told}{_late(point, largest)}"


def _found_line(point: CausePoint, found: Diagnosis, largest: Part) -> str:
    rule = RULES[largest.name]
    share = figure_text(figure_of(largest.lost, "fraction"))
    text = f"{rule.name}: {share} of the ideal is lost in {found.told}{_late(point, largest)}"
    advice = [one for one in found.advice if one.forecast is None or one.forecast.gain > 0]
    if advice:
        text += f"; try {clean(advice[0].text)}"
        if advice[0].forecast is not None:
            return f"{text}, {forecast_text(advice[0])}"
    return text if found.bound is None else f"{text}; {bound_text(found.bound)}"


def _late(point: CausePoint, largest: Part) -> str:
    """For whom ranks wait, where it is mostly one, or the ranks of one host."""
    if largest.name != "straggler" or not point.ranks:
        return ""
    first = point.main_straggler or point.main_host
    if first is None:
        return ", now for one, now for another"
    host = clean(first.host, 64)
    who, whose = (f"the ranks of {host}", "their") if first.rank is None else (f"rank {first.rank} on {host}", "its")
    why = _LATE_TITLES[first.main_cause].format(whose)
    return f": {percent(first.waited_share, 0)} of the wait is for {who}, {why}"


def forecast_text(advice: Advice) -> str:
    """``forecast +18 % throughput``."""
    assert advice.forecast is not None
    return f"forecast {gain_text(advice.forecast.gain)}"


def gain_text(gain: float) -> str:
    """``+18 % throughput``; a loss with its sign."""
    return f"{'+' if gain >= 0 else ''}{percent(gain, 0)} throughput"


def bound_text(bound: float) -> str:
    """What it would be if all of it were hidden: a limit, no forecast."""
    return f"at most +{percent(bound, 0)} throughput (if all of it were hidden)"


def limits(sample: Run) -> tuple[str, ...]:
    """What blurs the causes of these runs, each a sentence."""
    record = sample.record
    found = []
    result = None if record is None else record.exchange
    how = sample.plan.sync.exchange if result is None else result.exchange
    if how == "none":
        found.append("Nothing is exchanged: ranks drift apart and nobody waits; what is late shows in the rest.")
    elif how != "flat":
        found.append(f"In exchange {how} ranks leave at different times: waiting for late ranks is blurred by that.")
    if record is not None and record.clock == "cuda-events":
        found.append("Phases are times of the training stream: what overlaps on other streams is not charged.")
    elif record is not None and len(record.ranks) > 1:
        found.append(
            "On a CPU the exchange shares the ranks' cores: what it takes from the backward pass shows as compute."
        )
    if record is not None and record.phases == "synchronised":
        found.append("Phases are synchronised: the device is waited for after each, so exchange hides less than usual.")
    return tuple(found)
