"""Phases along trees, rooted at the first member of the team."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dlbench.costs.schedules.transfers import Span, Step, Team, Transfer, moves


def binomial_reduce(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps; the first member then holds the sum."""
    i, steps = team.index, []
    distance = 1
    while distance < team.size:
        step = Step()
        if i % (2 * distance) == distance:
            step = Step(sends=moves(team.rank(i - distance), span))
        elif i % (2 * distance) == 0 and i + distance < team.size:
            step = Step(receives=moves(team.rank(i + distance), span), reduce=True)
        steps.append(step)
        distance *= 2
    return steps


def binomial_broadcast(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps: the reduction backwards."""
    return [Step(sends=step.receives, receives=step.sends) for step in reversed(binomial_reduce(team, span))]


def binomial_scatter(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps; member i then holds part i, sent with all parts of the members behind it."""
    p, i = team.size, team.index
    steps = []
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        step = Step()
        if i % (2 * distance) == distance:
            step = Step(receives=moves(team.rank(i - distance), span.cover(p, i, min(i + distance, p))))
        elif i % (2 * distance) == 0 and i + distance < p:
            behind = span.cover(p, i + distance, min(i + 2 * distance, p))
            step = Step(sends=moves(team.rank(i + distance), behind))
        steps.append(step)
        distance //= 2
    return steps


@dataclass(frozen=True)
class Tree:
    """A binary tree over places 0 to p - 1: for each its parent (the root's is -1), its children and its depth."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...]


@cache
def in_order_tree(size: int) -> Tree:
    """The tree whose in-order walk is 0, 1, ...: even places are leaves and odd ones are not; depth floor(log2 p)."""
    parents, depths = [-1] * size, [0] * size
    children: list[list[int]] = [[] for _ in range(size)]
    ranges = [(0, size, -1, 0)]
    while ranges:
        low, high, parent, depth = ranges.pop()
        if low == high:
            continue
        root = low + (1 << ((high - low).bit_length() - 1)) - 1
        parents[root], depths[root] = parent, depth
        if parent >= 0:
            children[parent].append(root)
        ranges += [(root + 1, high, root, depth + 1), (low, root, root, depth + 1)]
    return Tree(tuple(parents), tuple(tuple(c) for c in children), tuple(depths))


def double_tree_place(ranks: int, tree: int, index: int) -> int:
    """Place of a member in the first (0) or second (1) of the two trees.

    The second is the mirror image of the first for an even number of members, and the first shifted by one for an odd
    number: then what is inside one tree is a leaf of the other. Of an odd number one member is a leaf of both.
    """
    if tree == 0:
        return index
    return ranks - 1 - index if ranks % 2 == 0 else (index - 1) % ranks


def _member(ranks: int, tree: int, place: int) -> int:
    if tree == 0:
        return place
    return ranks - 1 - place if ranks % 2 == 0 else (place + 1) % ranks


def double_binary_tree(team: Team, span: Span, chunks: int) -> list[Step]:
    """Two trees, each for one half of the span, in chunks one behind the other (Sanders, Speck & Träff 2009).

    Reduction to both roots, then broadcast: 2 (depth + chunks - 1) steps with depth floor(log2 p). In a step a member
    takes from two children in the one tree and gives to its parents in both, so that both directions are used.
    """
    p = team.size
    if p == 1:
        return []
    shape = in_order_tree(p)
    depth = max(shape.depths)
    length = depth + chunks - 1
    sends: list[list[Transfer]] = [[] for _ in range(length)]
    receives: list[list[Transfer]] = [[] for _ in range(length)]
    for tree in range(2):
        half = span.part(2, tree)
        place = double_tree_place(p, tree, team.index)
        for chunk in range(chunks):
            piece = half.part(chunks, chunk)
            # A member at depth d passes chunk c on in step depth - d + c, one step after its children did.
            start = depth - shape.depths[place] + chunk
            if shape.parents[place] >= 0:
                sends[start] += moves(team.rank(_member(p, tree, shape.parents[place])), piece)
            for child in shape.children[place]:
                receives[start - 1] += moves(team.rank(_member(p, tree, child)), piece)
    up = [Step(sends=tuple(s), receives=tuple(r), reduce=True) for s, r in zip(sends, receives, strict=True)]
    return [*up, *_back(up)]


def _back(up: list[Step]) -> list[Step]:
    """The broadcast: the reduction with time and direction reversed."""
    return [Step(sends=step.receives, receives=step.sends) for step in reversed(up)]
