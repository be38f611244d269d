"""The figures of a group become two sentences that a person can repeat."""

from __future__ import annotations

from dlbench.reading.hosts.core_load import LOAD_CODES
from dlbench.reading.scaling import Point
from dlbench.report.wording import basis_text, figure_text, percent, place_text
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.verdicts import placed
from dlbench.views.causes.diagnosis import WORTH_EXPLAINING
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.model import Group
from dlbench.views.quality.numbers import Quality


def verdict(unit: str, all_points: tuple[Point, ...], *, is_crowded: bool, causes: LostPercent | None = None) -> str:
    """What the largest scaling point says, in two sentences: the efficiency with its interval, and what it lost.

    Args:
        unit: what a sample is called.
        all_points: points of the group, baseline first.
        is_crowded: whether ranks shared cores, which makes a scaling figure meaningless.
        causes: the account of the lost percent, where there is one.
    """
    base, last = all_points[0], all_points[-1]
    where = place_text(last.ranks, last.nodes)
    if len(all_points) == 1:
        return (
            f"{figure_text(base.throughput)} {unit}/s at {where} ({basis_text(base.throughput)}). "
            "Scaling needs a second rank count."
        )
    sentence = (
        f"Scaling efficiency {figure_text(last.efficiency)} at {where} "
        f"({place_text(base.ranks, base.nodes)} = 100 %; {basis_text(last.efficiency)})."
    )
    if is_crowded:
        return f"{sentence} Ranks shared cores: this says nothing about the scaling of the machine."
    more = _explanation(last, None if causes is None else causes.at(last))
    return f"{sentence} {more}" if more else sentence


def _explanation(point: Point, account: CausePoint | None) -> str:
    """What was lost, as the account says it; without one, whether anything was."""
    if account is not None:
        return sentence(account.verdict.line)
    return {
        "insufficient": f"Fewer than {MIN_RUNS} runs cannot tell a loss from noise.",
        "within": "There is no loss worth explaining.",
        "above": "That is above the ideal: the baseline ran with a handicap, or its runs drifted.",
        "below": "",
        "undecided": f"Whether {percent(WORTH_EXPLAINING, 0)} or more is lost is undecided.",
    }[placed(point.efficiency, 1 - WORTH_EXPLAINING, 1 + WORTH_EXPLAINING)]


def loss_text(group: Group) -> str:
    """The second sentence of the verdict on its own: what the largest point lost; empty where nothing is known."""
    if len(group.points) == 1:
        return ""
    found = group.of(LostPercent)
    return _explanation(group.largest, None if found is None else found.at(group.largest))


def next_step(group: Group) -> str:
    """What to do next, in a sentence; empty where nothing suggests itself.

    Foreign load first, because figures made beside it may be those of the load; then a target that was missed; then
    what the diagnosis of the largest point suggests.
    """
    for doubt in group.doubts:
        if doubt.code in LOAD_CODES:
            what, _, remedy = doubt.text.rpartition(": ")
            return sentence(f"{remedy}: {what}")
    quality = group.of(Quality)
    if quality is not None and any(point.num_reached < point.num_runs for point in quality.points):
        key = "max_epochs" if quality.limit.endswith("epochs") else "max_samples"
        return f"Train longer than {quality.limit} (--set quality.{key}=...): runs ended without meeting the target."
    if len(group.points) == 1:
        more = more_ranks(group)
        return f"Run the same workload at more rank counts, for example --ranks {more}." if "," in more else ""
    found = group.of(LostPercent)
    account = None if found is None else found.at(group.largest)
    if account is not None:
        return sentence(account.verdict.next) if account.verdict.next else ""
    if not group.is_sufficient:
        return f"Repeat every point at least {MIN_RUNS} times (--repeats {MIN_RUNS}) to tell noise apart."
    return ""


def more_ranks(group: Group) -> str:
    """Rank counts that a group of one point lacks, as an option takes them; none that its machine does not hold."""
    ranks = group.baseline.ranks
    counts = [ranks * factor for factor in (1, 2, 4) if group.most_ranks is None or ranks * factor <= group.most_ranks]
    if len(counts) < 2 and ranks > 1:
        counts = [1, ranks]
    return ",".join(map(str, counts or [ranks]))


def sentence(text: str) -> str:
    """A phrase with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
