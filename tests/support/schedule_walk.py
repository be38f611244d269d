"""The loads of a collective by walking the schedules of all ranks, step by step: the oracle of the patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dlbench.perfmodels.algorithms import schedule
from dlbench.perfmodels.schedules import Layout, Schedule, Transfer
from dlbench.perfmodels.topology import Flows, Load, Sharing, Starts, StepLoads
from dlbench.specs.comm import Collective, LevelName


def walked(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    shards: int | None,
    chunks: int,
    sharing: Sharing,
) -> Counter[StepLoads]:
    """Kinds of steps, each with how many there are; steps without a message are left out."""
    schedules = [
        schedule(
            collective,
            algorithm,
            rank,
            layout.ranks,
            elements,
            group_size=layout.group_size,
            shards=shards,
            chunks=chunks,
        )
        for rank in range(layout.ranks)
    ]
    steps = [_step_loads(schedules, number, layout, sharing) for number in range(len(schedules[0]))]
    return Counter(step for step in steps if step.loads)


def _step_loads(schedules: list[Schedule], number: int, layout: Layout, sharing: Sharing) -> StepLoads:
    loads: set[Load] = set()
    shared: dict[tuple[LevelName, int, bool], list[Starts]] = {}
    reduced = 0
    for rank, steps in enumerate(schedules):
        step = steps[number]
        reduced = max(reduced, sum(t.count for t in step.receives if t.is_added))
        node, leaf = rank // layout.node_size, layout.leaf(rank)
        for outwards, transfers in ((True, step.sends), (False, step.receives)):
            starts = _starts(transfers, layout, rank)
            crossing: dict[LevelName, tuple[Starts, int | None, int]] = {
                "inside": (tuple(one for one in starts if one[0] == "inside"), sharing.inside, node),
                "across": (tuple(one for one in starts if one[0] != "inside"), sharing.across, node),
                "beyond": (tuple(one for one in starts if one[0] == "beyond"), sharing.beyond, leaf),
            }
            for level, (through, links, block) in crossing.items():
                if through and links != 1:
                    loads.add(Load(level, through, _flows([through])))
                # A message inside a group is sent and received through the same memory.
                if through and links is not None and (outwards or level != "inside"):
                    shared.setdefault((level, block, outwards), []).append(through)
    for (level, _, _), together in shared.items():
        links = getattr(sharing, level)
        loads.update(Load(level, starts, _flows(together), links) for starts in set(together))
    return StepLoads(tuple(sorted(loads, key=lambda load: (load.level, load.starts, load.flows, load.links))), reduced)


def _flows(together: Sequence[Starts]) -> Flows:
    found: Counter[int] = Counter()
    for starts in together:
        for _, count, how_many in starts:
            found[count] += how_many
    return tuple(sorted(found.items()))


def _starts(transfers: Sequence[Transfer], layout: Layout, rank: int) -> Starts:
    """Messages of a rank; transfers of a step with one rank are one message."""
    sizes: Counter[int] = Counter()
    for transfer in transfers:
        sizes[transfer.peer] += transfer.count
    return tuple(
        sorted(
            (level, count, n)
            for (level, count), n in Counter((layout.level(rank, peer), size) for peer, size in sizes.items()).items()
        )
    )
