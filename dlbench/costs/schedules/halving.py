"""Phases in log2 p steps by halving and doubling; surplus ranks are folded onto a power of two first.

With p = 2^k + r ranks, member 2j < 2r sends its vector to member 2j + 1, rests, and gets the result at the end
(Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005): 2 alpha + 2 n beta + n gamma on top.
"""

from __future__ import annotations

from collections.abc import Callable

from dlbench.costs.schedules.transfers import Span, Step, Team, moves


def power_below(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def folded(team: Team, span: Span, core: Callable[[Team, Span], list[Step]]) -> list[Step]:
    """An allreduce for a power of two of ranks, `core`, for any number of ranks."""
    whole = moves(team.rank(_partner(team)), span)
    return _between(team, core, span, Step(sends=whole), Step(receives=whole))


def _between(
    team: Team, core: Callable[[Team, Span], list[Step]], span: Span, give: Step, take: Step, *, reduce: bool = True
) -> list[Step]:
    """The core between the steps in which surplus members give their data away and take the result.

    `give` and `take` are seen by the surplus member; its partner does the opposite.
    """
    surplus = team.size - power_below(team.size)
    rests = team.index < 2 * surplus and team.index % 2 == 0
    helps = team.index < 2 * surplus and team.index % 2 == 1
    steps = core(_core_team(team), span)
    if rests:
        return [give, *[Step() for _ in steps], take]
    if helps:
        return [
            Step(sends=give.receives, receives=give.sends, reduce=reduce),
            *steps,
            Step(sends=take.receives, receives=take.sends),
        ]
    return [Step(), *steps, Step()] if surplus else steps


def _partner(team: Team) -> int:
    return team.index + 1 if team.index % 2 == 0 else team.index - 1


def _core_team(team: Team) -> Team:
    """The members that work in the core; a resting one is given its partner's place."""
    surplus = team.size - power_below(team.size)
    members = [team.members[i] for i in range(team.size) if i >= 2 * surplus or i % 2 == 1]
    index = team.index // 2 if team.index < 2 * surplus else team.index - surplus
    return Team(members, index)


def recursive_doubling(team: Team, span: Span) -> list[Step]:
    """log2 p steps; in each, partners exchange and add whole vectors. For a power of two of ranks."""
    steps = []
    distance = 1
    while distance < team.size:
        whole = moves(team.rank(team.index ^ distance), span)
        steps.append(Step(sends=whole, receives=whole, reduce=True))
        distance *= 2
    return steps


def halving_doubling(team: Team, span: Span) -> list[Step]:
    """Rabenseifner's allreduce: 2 log2 p steps, 2 (p - 1) / p of the span sent. For a power of two of ranks.

    Neighbours exchange the largest halves, so that these stay inside groups.
    """
    p, low, high = team.size, 0, team.size
    scatter: list[Step] = []
    gather: list[Step] = []
    distance = 1
    while distance < p:
        peer, middle = team.rank(team.index ^ distance), (low + high) // 2
        lower, upper = moves(peer, span.cover(p, low, middle)), moves(peer, span.cover(p, middle, high))
        if team.index & distance:
            kept, given, low = upper, lower, middle
        else:
            kept, given, high = lower, upper, middle
        scatter.append(Step(sends=given, receives=kept, reduce=True))
        gather.append(Step(sends=kept, receives=given))
        distance *= 2
    return [*scatter, *reversed(gather)]


def shifted_halving_doubling(team: Team, span: Span) -> list[Step]:
    """Halving and doubling by cyclic shifts instead of exchanges (Nguyen & Wahib, CCGRID 2021). For a power of two.

    Each step uses one length of shortcut of a distributed loop network, in one direction; steps and bytes are those
    of halving and doubling. Runs of parts that go around the end travel as two transfers.
    """
    p, i = team.size, team.index
    scatter: list[Step] = []
    gather: list[Step] = []
    distance = p // 2
    while distance:
        after, before = team.rank(i + distance), team.rank(i - distance)
        far, near = _around(span, p, i + distance, distance), _around(span, p, i, distance)
        scatter.append(Step(sends=moves(after, *far), receives=moves(before, *near), reduce=True))
        gather.append(Step(sends=moves(before, *near), receives=moves(after, *far)))
        distance //= 2
    return [*scatter, *reversed(gather)]


def _around(span: Span, parts: int, start: int, length: int) -> list[Span]:
    """Parts start, ..., start + length - 1 counted around the end, as one or two runs."""
    start %= parts
    end = start + length
    if end <= parts:
        return [span.cover(parts, start, end)]
    return [span.cover(parts, start, parts), span.cover(parts, 0, end - parts)]


def halving_reduce_scatter(team: Team, span: Span) -> list[Step]:
    """log2 p steps, (p - 1) / p of the span sent, for a power of two of ranks; others fold.

    A member that takes over a surplus one works for both of their parts, and sends its part back at the end.
    """
    partner = team.rank(_partner(team))
    own = span.part(team.size, team.index - team.index % 2)
    give, take = Step(sends=moves(partner, span)), Step(receives=moves(partner, own))
    return _between(team, lambda core, _: _halve(team, core, span)[0], span, give, take)


def doubling_all_gather(team: Team, span: Span) -> list[Step]:
    """log2 p steps, (p - 1) / p of the span sent, for a power of two of ranks; others fold.

    A surplus member gives its part away at the start and gets all others at the end.
    """
    p, partner = team.size, team.rank(_partner(team))
    surplus_index = team.index - team.index % 2
    own = span.part(p, surplus_index)
    rest = (span.cover(p, 0, surplus_index), span.cover(p, surplus_index + 1, p))
    give, take = Step(sends=moves(partner, own)), Step(receives=moves(partner, *rest))
    return _between(team, lambda core, _: _halve(team, core, span)[1], span, give, take, reduce=False)


def _halve(team: Team, core: Team, span: Span) -> tuple[list[Step], list[Step]]:
    """Halving over the members of the core, each for its own part and that of the member it took over; and back."""
    p, low, high = team.size, 0, core.size
    surplus = p - core.size

    def first_part(place: int) -> int:
        return 2 * place if place < surplus else place + surplus

    halving: list[Step] = []
    doubling: list[Step] = []
    distance = core.size // 2
    while distance:
        peer, middle = core.rank(core.index ^ distance), (low + high) // 2
        lower = moves(peer, span.cover(p, first_part(low), first_part(middle)))
        upper = moves(peer, span.cover(p, first_part(middle), first_part(high)))
        if core.index & distance:
            kept, given, low = upper, lower, middle
        else:
            kept, given, high = lower, upper, middle
        halving.append(Step(sends=given, receives=kept, reduce=True))
        doubling.append(Step(sends=kept, receives=given))
        distance //= 2
    return halving, doubling[::-1]
