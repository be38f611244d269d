"""Schedules of collectives, executed here for all ranks at once with real numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import UserError
from dlbench.perfmodels.algorithms import schedule
from dlbench.perfmodels.schedules import Layout, Schedule, all_to_all_block, block, pipeline_chunks
from dlbench.specs.comm import ALGORITHMS, Collective

Vectors = list[npt.NDArray[np.float64]]
NAMES = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]


def execute(schedules: list[Schedule], inputs: Vectors, buffers: Vectors) -> None:
    """All ranks, step by step: sends read the state before the step; transfers of a pair match in order."""
    assert len({len(steps) for steps in schedules}) == 1
    for number in range(len(schedules[0])):
        steps = [steps[number] for steps in schedules]
        sources = [inputs[r] if step.from_input else buffers[r].copy() for r, step in enumerate(steps)]
        wire: dict[tuple[int, int], list[npt.NDArray[np.float64]]] = {}
        for r, step in enumerate(steps):
            for send in step.sends:
                assert send.peer != r
                assert send.count > 0
                assert send.first >= 0
                assert send.first + send.count <= len(sources[r])
                wire.setdefault((r, send.peer), []).append(sources[r][send.first : send.first + send.count])
        for r, step in enumerate(steps):
            for receive in step.receives:
                message = wire[receive.peer, r].pop(0)
                assert len(message) == receive.count
                place = slice(receive.first, receive.first + receive.count)
                assert receive.first + receive.count <= len(buffers[r])
                buffers[r][place] = buffers[r][place] + message if receive.is_added else message
        assert not any(wire.values())


def check(collective: Collective, algorithm: str, ranks: int, elements: int, **options: Any) -> None:
    schedules = [schedule(collective, algorithm, r, ranks, elements, **options) for r in range(ranks)]
    rng = np.random.default_rng(elements)
    inputs = [rng.integers(-1000, 1000, elements).astype(np.float64) for _ in range(ranks)]
    total = sum(inputs, np.zeros(elements))
    nothing = [np.full(elements, np.nan) for _ in range(ranks)]
    blocks = [slice(first, first + count) for first, count in (block(elements, ranks, r) for r in range(ranks))]
    buffers = [vector.copy() for vector in inputs]
    if collective in ("all-gather", "gather"):
        buffers = nothing
        for r in range(ranks):
            buffers[r][blocks[r]] = inputs[r][blocks[r]]
    elif collective in ("broadcast", "scatter"):
        buffers = [inputs[0].copy(), *nothing[1:]]
    elif collective == "all-to-all":
        buffers = nothing
        for r in range(ranks):
            out, into, count = all_to_all_block(elements, ranks, r, r)
            buffers[r][into : into + count] = inputs[r][out : out + count]
    execute(schedules, inputs, buffers)
    for r in range(ranks):
        if collective in ("gather", "reduce") and r > 0:
            continue
        if collective in ("allreduce", "reduce"):
            assert np.array_equal(buffers[r], total)
        elif collective == "reduce-scatter":
            assert np.array_equal(buffers[r][blocks[r]], total[blocks[r]])
        elif collective in ("all-gather", "gather"):
            assert np.array_equal(buffers[r], np.concatenate([inputs[i][blocks[i]] for i in range(ranks)]))
        elif collective == "broadcast":
            assert np.array_equal(buffers[r], inputs[0])
        elif collective == "scatter":
            assert np.array_equal(buffers[r][blocks[r]], inputs[0][blocks[r]])
        else:
            parts = [all_to_all_block(elements, ranks, i, r) for i in range(ranks)]
            expected = [inputs[i][out : out + count] for i, (out, _, count) in enumerate(parts)]
            assert np.array_equal(buffers[r], np.concatenate(expected))


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@given(ranks=st.integers(1, 17), elements=st.integers(0, 200), data=st.data())
def test_every_algorithm_gives_the_result(
    collective: Collective, algorithm: str, ranks: int, elements: int, data: st.DataObject
) -> None:
    divisors = [g for g in range(1, ranks + 1) if ranks % g == 0]
    group_size = data.draw(st.sampled_from(divisors), label="group_size")
    shards = data.draw(st.none() | st.integers(1, ranks), label="shards")
    chunks = data.draw(st.none() | st.integers(1, 9), label="chunks")
    check(collective, algorithm, ranks, elements, group_size=group_size, shards=shards, chunks=chunks)


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_large_vectors_are_pipelined_and_right(collective: Collective, algorithm: str) -> None:
    check(collective, algorithm, 12, 200_003, group_size=4)


@pytest.mark.parametrize("ranks", range(2, 70))
def test_inner_ranks_of_one_tree_are_leaves_of_the_other(ranks: int) -> None:
    """Whoever adds to one half of the vector, in the reduction of a chunk, adds to no other."""
    steps = [schedule("allreduce", "double-binary-tree", r, ranks, 2, chunks=1) for r in range(ranks)]
    assert {len(one) for one in steps} == {2 * (ranks.bit_length() - 1)}
    inner = [len({t.first for step in one for t in step.receives if t.is_added}) for one in steps]
    assert Counter(inner) == ({1: ranks} if ranks % 2 == 0 else {1: ranks - 1, 0: 1})


def test_chunks_grow_with_the_root_of_the_size() -> None:
    layout = Layout(ranks=16, group_size=4)
    tree = [pipeline_chunks("allreduce", "double-binary-tree", layout, n) for n in (1000, 2**20, 2**22, 2**40)]
    assert tree == [1, 8, 16, 64]
    levels = [pipeline_chunks("allreduce", "hierarchical", layout, n) for n in (1000, 2**18, 12_500_000, 2**40)]
    assert levels == [1, 4, 32, 64]
    assert pipeline_chunks("broadcast", "chain", Layout(ranks=2, group_size=1), 2**30) == 1  # one link: nothing to fill
    assert pipeline_chunks("allreduce", "ring", layout, 2**30) == 1
    for group_size in (1, 16):  # one level: nothing beside which it could travel
        assert pipeline_chunks("allreduce", "hierarchical", Layout(ranks=16, group_size=group_size), 2**30) == 1


@pytest.mark.parametrize("halves", [1, 2, 3, 4])
def test_shifts_use_one_length_a_step(halves: int) -> None:
    ranks = 2**halves
    for number in range(2 * halves):
        steps = [schedule("allreduce", "shifted-halving-doubling", r, ranks, 64)[number] for r in range(ranks)]
        lengths = {(send.peer - r) % ranks for r, step in enumerate(steps) for send in step.sends}
        assert len(lengths) == 1


@pytest.mark.parametrize(
    ("algorithm", "ranks", "options", "says"),
    [
        ("rings", 4, {}, "did you mean ring?"),
        ("hierarchical", 6, {"group_size": 4}, "groups of 4 do not divide 6 ranks"),
        ("leader", 6, {"group_size": 0}, "groups of 0 do not divide 6 ranks"),
        ("parameter-server", 4, {"shards": 5}, "5 shards; needs 1 to 4"),
        ("dedicated-servers", 4, {"shards": 4}, "4 servers of 4 ranks; needs at least one worker"),
        ("ring", 0, {}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(algorithm: str, ranks: int, options: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        schedule("allreduce", algorithm, 0, ranks, 10, **options)


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (5, 2), (7, 3), (6, 5)])
def test_dedicated_servers_sum_the_vectors_of_the_workers(ranks: int, servers: int) -> None:
    schedules = [schedule("allreduce", "dedicated-servers", r, ranks, 11, shards=servers) for r in range(ranks)]
    workers = ranks - servers
    inputs = [np.arange(11.0) * (r + 1) for r in range(workers)] + [np.zeros(11)] * servers
    buffers = [vector.copy() for vector in inputs]
    execute(schedules, inputs, buffers)
    assert all((buffer == sum(inputs)).all() for buffer in buffers[:workers])
