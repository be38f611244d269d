"""The next step: one ordered rule for all reports, and commands that this machine can run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from dlbench.analysis.environments import LOAD_CODES, Doubt
from dlbench.report.wording import percent, place_text, repeat_text, sentence
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import MIN_RUNS
from dlbench.views.causes.experiments import throttling_remedy
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent
from dlbench.views.model import ReportGroup
from dlbench.views.quality.numbers import GroupQuality

UNTRUSTWORTHY = (*LOAD_CODES, "oversubscribed")  # Nothing else is worth trying after these warnings.


def remedy_of(doubts: Sequence[Doubt]) -> str:
    """Returns the remedy before any other, in a sentence; empty without a warning of `UNTRUSTWORTHY`."""
    for code in UNTRUSTWORTHY:
        for doubt in doubts:
            if doubt.code == code:
                reason, _, remedy = doubt.text.rpartition(": ")
                return sentence(f"{remedy}: {reason}")
    return ""


def next_step(group: ReportGroup) -> str:
    """Returns what to do next, in a sentence; empty if there is no suggestion."""
    lost = group.of(LostPercent)
    first = remedy_of(group.doubts) or _throttling_remedy(group, lost)
    if first:
        return first
    quality = group.of(GroupQuality)
    if quality is not None and quality.num_reached < quality.num_runs:
        limit, unit = quality.limit.split()
        twice = f"--set quality.max_{unit}={2 * float(limit.replace(',', '')):.15g}"
        return f"Train longer ({twice}): runs ended after {quality.limit} without meeting the target."
    account = lost.at(group.largest) if lost else None
    diagnosis = ""
    if account is not None and account.verdict.next:
        diagnosis = sentence(account.verdict.next)
    if account is not None and not account.is_baseline:
        return diagnosis
    fewest = min((point.throughput for point in group.points), key=attrgetter("units"))
    if fewest.units < MIN_RUNS:
        return sentence(repeat_text(fewest))
    counts = more_ranks(group)
    if len(group.points) == 1 and counts:
        return f"Run the same workload at more rank counts, for example --ranks {counts}."
    return diagnosis


def _throttling_remedy(group: ReportGroup, lost: LostPercent | None) -> str:
    if lost is None:
        return ""
    for point in reversed(lost.diagnosed.points):
        share = point.cause("throttling").seconds.value / point.whole.seconds.value
        if share >= WORTH_EXPLAINING:
            remedy, place = throttling_remedy(on_gpu=group.on_gpu), place_text(point.ranks, point.nodes)
            return sentence(f"{remedy}: throttling took {percent(share)} of a step at {place}")
    return ""


def more_ranks(group: ReportGroup) -> str:
    """Returns rank counts that a group of one point lacks, as an option has them; empty if its machine has no more."""
    counts = rank_counts(group.baseline.ranks, (1, 2, 4), group.most_ranks)
    if len(counts) < 2 and group.baseline.ranks > 1:
        counts = [1, *counts]
    return ",".join(map(str, counts)) if len(counts) > 1 else ""


def rank_counts(ranks: int, factors: Sequence[int], machine_ranks: int | None) -> list[int]:
    """Returns multiples of a rank count, up to the ranks that a machine holds (`most_ranks`)."""
    counts = [ranks * factor for factor in factors]
    return [count for count in counts if count == ranks or machine_ranks is None or count <= machine_ranks]


def most_ranks(plan: RunPlan) -> int | None:
    """Returns the ranks that the machine of a run holds, one per GPU or else per core; None for several machines."""
    if plan.system.scheduler != "none" or plan.layout.nodes > 1:
        return None
    return plan.system.node.gpus or plan.layout.node_cores


def rerun(group: ReportGroup, options: str) -> str:
    """Returns ``dlbench run WORKLOAD --preset PRESET --engine ENGINE OPTIONS`` for the group's workload."""
    workload, preset, engine = (group.condition(name) for name in ("workload", "preset", "engine"))
    return f"dlbench run {workload} --preset {preset} --engine {engine} {options}"


def second_rank(group: ReportGroup, lack: str) -> str:
    """Returns the remedy of a group of one rank for a view that compares ranks; `lack` says why it is missing."""
    counts = more_ranks(group)
    if not counts:
        return f"{lack}, and this machine holds no other."
    return f"{lack}: {rerun(group, f'--ranks {counts} --repeats {MIN_RUNS}')}."
