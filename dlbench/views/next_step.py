"""What to do next: one ordered rule for all reports, and commands that this machine can run."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.analysis.core_load import LOAD_CODES
from dlbench.analysis.doubts import Doubt
from dlbench.report.wording import percent, place_text, repeat_text, sentence
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import MIN_RUNS
from dlbench.views.causes.experiments import throttling_remedy
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent
from dlbench.views.model import ReportGroup
from dlbench.views.quality.numbers import GroupQuality

UNTRUSTWORTHY = (*LOAD_CODES, "oversubscribed")
"""Warnings after which nothing else is worth trying; each ends in `: ` and its remedy."""


def remedy_of(doubts: Sequence[Doubt]) -> str:
    """What to do before anything else, in a sentence; empty where no warning of `UNTRUSTWORTHY` is among them."""
    wanted = [doubt for code in UNTRUSTWORTHY for doubt in doubts if doubt.code == code]
    if not wanted:
        return ""
    what, _, remedy = wanted[0].text.rpartition(": ")
    return sentence(f"{remedy}: {what}")


def next_step(group: ReportGroup) -> str:
    """What to do next, in a sentence; empty where nothing suggests itself."""
    if first := remedy_of(group.doubts):
        return first
    found = group.of(LostPercent)
    for point in reversed(found.diagnosed.points if found else ()):
        share = point.cause("throttling").seconds.value / point.whole.seconds.value
        if share >= WORTH_EXPLAINING:
            where = place_text(point.ranks, point.nodes)
            return sentence(
                f"{throttling_remedy(on_gpu=group.on_gpu)}: throttling took {percent(share)} of a step at {where}"
            )
    quality = group.of(GroupQuality)
    if quality is not None and quality.num_reached < quality.num_runs:
        limit, what = quality.limit.split()
        twice = f"--set quality.max_{what}={2 * float(limit.replace(',', '')):.15g}"
        return f"Train longer ({twice}): runs ended after {quality.limit} without meeting the target."
    account = found.at(group.largest) if found else None
    if account is not None and not account.is_baseline:
        return sentence(account.verdict.next) if account.verdict.next else ""
    fewest = min((point.throughput for point in group.points), key=lambda figure: figure.units)
    if fewest.units < MIN_RUNS:
        return sentence(repeat_text(fewest))
    if len(group.points) == 1 and (more := more_ranks(group)):
        return f"Run the same workload at more rank counts, for example --ranks {more}."
    return sentence(account.verdict.next) if account is not None and account.verdict.next else ""


def more_ranks(group: ReportGroup) -> str:
    """Rank counts that a group of one point lacks, as an option takes them; empty where its machine holds no other."""
    counts = rank_counts(group.baseline.ranks, (1, 2, 4), group.most_ranks)
    if len(counts) < 2 and group.baseline.ranks > 1:
        counts = [1, *counts]
    return ",".join(map(str, counts)) if len(counts) > 1 else ""


def rank_counts(ranks: int, factors: Sequence[int], most: int | None) -> list[int]:
    """So many times as many ranks, as far as a machine holds them (`most_ranks`)."""
    return [ranks * factor for factor in factors if factor == 1 or most is None or ranks * factor <= most]


def most_ranks(plan: RunPlan) -> int | None:
    """Ranks that the machine of a run holds, one per GPU or else per core; None: not one machine, or not known."""
    if plan.system.scheduler != "none" or plan.layout.nodes > 1:
        return None
    return plan.system.node.gpus or plan.layout.node_cores


def rerun(group: ReportGroup, options: str) -> str:
    """``dlbench run WORKLOAD --preset PRESET --engine ENGINE OPTIONS`` for the group's workload, preset and engine."""
    workload, preset, engine = (group.condition(name) for name in ("workload", "preset", "engine"))
    return f"dlbench run {workload} --preset {preset} --engine {engine} {options}"


def second_rank(group: ReportGroup, lack: str) -> str:
    """What a group of one rank needs for a view that compares ranks; `lack` says what one rank alone does not show."""
    more = more_ranks(group)
    return (
        f"{lack}: {rerun(group, f'--ranks {more} --repeats {MIN_RUNS}')}."
        if more
        else f"{lack}, and this machine holds no other."
    )
