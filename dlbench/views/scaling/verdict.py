"""The figures of a group become two sentences that a person can repeat."""

from __future__ import annotations

from dlbench.reading.attribution import Part
from dlbench.reading.scaling import Point
from dlbench.report.wording import basis_text, figure_text, percent, place_text, points
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.verdicts import placed
from dlbench.views.causes.diagnosis import WORTH_EXPLAINING
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.titles import CAUSE_TITLES
from dlbench.views.model import Group

MOST_NAMED = 3
"""Parts of a loss that are named."""


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
    loss = 1 - point.efficiency.value
    low, high = point.efficiency.low, point.efficiency.high
    is_noise = low is not None and high is not None and low <= 1 <= high
    if abs(loss) < WORTH_EXPLAINING:
        if placed(point.efficiency, 1 - WORTH_EXPLAINING, 1 + WORTH_EXPLAINING) == "undecided":
            return f"Whether {percent(WORTH_EXPLAINING, 0)} or more is lost is undecided."
        return "There is no loss worth explaining."
    if loss < 0:
        why = "its interval includes 100 %" if is_noise else "the baseline ran with a handicap, or its runs drifted"
        return f"That is above the ideal: {why}."
    doubt = "; the interval includes 100 %, so it may be noise" if is_noise else ""
    if account is None:
        return f"{doubt.removeprefix('; ').capitalize()}." if doubt else ""
    return f"{_losses(account)}{doubt}."


def _losses(account: CausePoint) -> str:
    """The largest parts of a loss, the largest first; gains apart."""
    lost = sorted((one for one in account.causes if one.lost.value >= 0.0005), key=lambda one: -one.lost.value)
    if len(lost) == 1:
        balance = account.balance
        title = f"{CAUSE_TITLES[lost[0].name]}{_whose(account, lost[0])}"
        if balance.has_gains:
            return f"{balance.lost_text} lost to {title}{balance.gains_text}"
        return f"{balance.lost_text} lost, all to {title}"
    first, *others = lost[:MOST_NAMED]
    named = [f"{_points(first)} are {CAUSE_TITLES[first.name]}{_whose(account, first)}"]
    named += [f"{_points(one)} {CAUSE_TITLES[one.name]}" for one in others]
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    whole = account.balance
    gains = f" ({whole.gains_text.removeprefix(', ')})" if whole.has_gains else ""
    return f"Of {whole.lost_text} lost{gains}, {listed}"


def _points(part: Part) -> str:
    return points(part.lost.value).removesuffix(" points")


def _whose(account: CausePoint, part: Part) -> str:
    """The rank that is waited for most."""
    if part.name != "straggler" or not account.waiting_ranks:
        return ""
    first = account.waiting_ranks[0]
    return f" ({percent(first.waited_share, 0)} for rank {first.rank})" if first.waited_share >= 0.5 else ""


def loss_text(group: Group) -> str:
    """The second sentence of the verdict on its own: what the largest point lost; empty where nothing is known."""
    if len(group.points) == 1:
        return ""
    found = group.of(LostPercent)
    return _explanation(group.largest, None if found is None else found.at(group.largest))


def next_step(group: Group) -> str:
    """What to do next, in a sentence; empty where nothing suggests itself.

    The first experiment of the diagnosis of the largest point; more repeats only where the loss cannot be told from
    noise, or nothing else is known.
    """
    if len(group.points) == 1:
        return f"Run the same workload at more rank counts, for example --ranks {more_ranks(group)}."
    found = group.of(LostPercent)
    account = None if found is None else found.at(group.largest)
    if account is not None and account.verdict.experiments:
        confirm = f"; confirm with --repeats {MIN_RUNS}" if account.verdict.finding == "likely" else ""
        return sentence(f"{account.verdict.experiments[0].text}{confirm}")
    if not group.is_sufficient:
        return f"Repeat every point at least {MIN_RUNS} times (--repeats {MIN_RUNS}) to tell noise apart."
    if account is not None and account.verdict.finding == "within noise":
        return f"Repeat more often to tell noise apart (--repeats {2 * MIN_RUNS})."
    return ""


def more_ranks(group: Group) -> str:
    """Rank counts that a group of one point lacks, as an option takes them."""
    ranks = group.baseline.ranks
    return ",".join(str(ranks * factor) for factor in (1, 2, 4))


def sentence(text: str) -> str:
    """A phrase with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
