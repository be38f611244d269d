"""Formats on the wire against NumPy. Ranks are threads; their group is faked at the boundary."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dlbench.node.sync.wire import ErrorFeedback, TopkWire, WireFormat, build_wire, entries_to_send, is_dense_cheaper
from dlbench.specs.sync import Wire

T = TypeVar("T")


class ThreadGroup:
    """Ranks of one process; what a rank puts on the table the others read."""

    carrier = "threads"

    def __init__(self, index: int, table: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.ranks = tuple(range(len(table)))
        self.index = index
        self._table, self._barrier = table, barrier
        self.calls: list[str] = []

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.index] = tensor.clone()
        self._barrier.wait(60)
        everything = [other.clone() for other in self._table]
        self._barrier.wait(60)
        return everything

    def sum(self, vector: torch.Tensor) -> None:
        self.calls.append("sum")
        total, *rest = self._all(vector)
        for other in rest:
            total += other
        vector.copy_(total)

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        self.calls.append("gather_all")
        return self._all(tensor)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_to_all")
        return torch.stack([others[self.index] for others in self._all(rows)])


def on_ranks(num_ranks: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    table, barrier = [torch.empty(0)] * num_ranks, threading.Barrier(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, [ThreadGroup(index, table, barrier) for index in range(num_ranks)]))


class Exchanged(NamedTuple):
    """What a rank has after some steps."""

    sums: list[np.ndarray]
    residuals: list[np.ndarray]  # After each step; none of formats without error feedback.
    wire: WireFormat
    calls: list[str]


def exchanged(name: Wire, rows: np.ndarray, density: float = 0.1) -> list[Exchanged]:
    """`rows`, shape (steps, ranks, elements), are the ranks' contributions; returns what each rank has then."""
    _, num_ranks, elements = rows.shape

    def work(group: ThreadGroup) -> Exchanged:
        wire = build_wire(name, density=density, world_size=num_ranks)
        wire.reset([[("a", elements)]])
        found = Exchanged([], [], wire, group.calls)
        for contributions in rows.astype(np.float32):
            vector = torch.from_numpy(contributions[group.index].copy())
            wire.exchange(0, vector, group.sum, group)
            found.sums.append(vector.numpy())
            if isinstance(wire, ErrorFeedback):
                found.residuals.append(wire.residuals()["a"].numpy().copy())
        return found

    return on_ranks(num_ranks, work)


def gradients(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "overflows"),
    [
        ([[40000.0, 1.0], [40000.0, 1.0]], 1),  # the sum leaves the range
        ([[70000.0, 1.0], [0.0, 1.0]], 1),  # one rank's value does, by the cast alone
        ([[70000.0, 1.0], [-70000.0, 1.0]], 1),  # inf - inf
        ([[65504.0, 1.0], [-65504.0, 1.0]], 0),
        ([[np.inf, 1.0], [2.0, 1.0]], 0),  # the gradients' own, on one rank only
        ([[1.0, np.nan], [70000.0, 1.0]], 0),
    ],
)
def test_overflows_of_fp16_are_counted_and_those_of_gradients_are_not(rows: list[list[float]], overflows: int) -> None:
    found = exchanged("fp16", np.array([rows], dtype=np.float32))
    assert min(each.wire.overflows for each in found) == overflows  # what the ranks agree on at the end
    for (result,), _, _, calls in found:
        assert calls == ["sum"]  # nobody asks the others
        assert np.isfinite(result).all() == (rows[0][0] == 65504.0)


@given(
    seed=st.integers(0, 2**32 - 1),
    elements=st.integers(1, 60),
    density=st.sampled_from([0.001, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0]),
    num_ranks=st.integers(1, 3),
    steps=st.integers(1, 5),
)
def test_topk_sends_the_largest_and_loses_nothing(
    seed: int, elements: int, density: float, num_ranks: int, steps: int
) -> None:
    """Oracle: error feedback written out in NumPy. Whole numbers, so that sums are exact; all different in size."""
    random = np.random.default_rng(seed)
    size = (steps, num_ranks)
    rows = np.array([[random.permutation(elements) + 1 for _ in range(num_ranks)] for _ in range(steps)])
    rows = rows * random.choice([-1, 1], (*size, elements)) * 1000.0 + random.integers(0, 999, (*size, elements))

    results = exchanged("topk", rows, density)
    entries = max(1, math.ceil(density * elements))
    rest = np.zeros((num_ranks, elements))
    nonzero = 0
    for step in range(steps):
        rest += rows[step]
        sent = np.zeros_like(rest)
        for rank in range(num_ranks):
            largest = np.sort(np.abs(rest[rank]))[-entries]
            chosen = np.abs(rest[rank]) >= largest
            assume(chosen.sum() == entries)  # of equal sizes any may be chosen
            sent[rank, chosen] = rest[rank, chosen]
        rest -= sent
        nonzero += int(np.count_nonzero(sent.sum(axis=0)))
        for sums, *_ in results:
            assert np.array_equal(sums[step], sent.sum(axis=0))
    for rank, (_, waiting, wire, calls) in enumerate(results):
        assert np.array_equal(waiting[-1], rest[rank])
        assert wire.density == nonzero / (steps * elements)
        dense = num_ranks * entries > elements
        assert calls == ["sum" if dense else "gather_all"] * steps
        assert wire.dense_switches == (steps if dense else 0)
        assert wire.bytes_per_element == pytest.approx(4 if dense else 4 * num_ranks * entries / elements)
    waiting_everywhere = np.sum([each.residuals[-1] for each in results], axis=0)
    assert np.array_equal(np.sum(results[0][0], axis=0) + waiting_everywhere, rows.sum(axis=(0, 1)))


@given(
    seed=st.integers(0, 2**32 - 1),
    elements=st.one_of(st.integers(1, 60), st.integers(4000, 13000)),
    num_ranks=st.integers(1, 3),
    exponent=st.integers(-44, 30),
)
def test_int8_is_within_half_a_step_of_its_scale_and_loses_nothing(
    seed: int, elements: int, num_ranks: int, exponent: int
) -> None:
    steps = 3
    rows = np.random.default_rng(seed).standard_normal((steps, num_ranks, elements)) * 10.0**exponent
    rows = rows.astype(np.float32)

    results = exchanged("int8", rows)
    blocks = math.ceil(elements / num_ranks / 4096)
    message_bytes = num_ranks * blocks * (math.ceil(elements / num_ranks / blocks) + 4)
    is_dense = message_bytes >= 4 * elements
    waiting = np.zeros((num_ranks, elements))
    for step in range(steps):
        wanted = (waiting + rows[step]).sum(0)
        largest = np.abs(waiting + rows[step]).max()
        waiting = np.stack([residuals[step].astype(float) for _, residuals, _, _ in results])
        received = results[0][0][step].astype(float)
        assert all(np.array_equal(sums[step], results[0][0][step]) for sums, *_ in results)  # to the bit
        most_wrong = (num_ranks * largest + np.abs(wanted).max() * 1.02) / 254
        assert np.abs(received - wanted).max() <= most_wrong * 1.001 + 1e-37
        assert np.allclose(received + waiting.sum(0), wanted, rtol=0, atol=1e-5 * num_ranks * largest + 1e-43)
        assert is_dense != bool(waiting.any()) or elements < 60
    for _, _, wire, calls in results:
        assert calls == (["sum"] if is_dense else ["all_to_all", "gather_all"]) * steps
        assert wire.dense_switches == (steps if is_dense else 0)
        assert wire.bytes_per_element == pytest.approx(4 if is_dense else message_bytes / elements)


@given(elements=st.integers(1, 10**9), density=st.floats(1e-6, 1), num_ranks=st.integers(2, 2000))
def test_the_dense_switch_is_the_byte_rule(elements: int, density: float, num_ranks: int) -> None:
    entries = entries_to_send(elements, density)
    assert 1 <= entries <= elements
    assert entries == max(1, math.ceil(density * elements))
    gathered = (num_ranks - 1) * entries * 8 * num_ranks  # both times p, to stay with whole numbers
    ring = 2 * (num_ranks - 1) * elements * 4
    assert is_dense_cheaper(elements, entries, num_ranks) == (ring < gathered)


def test_what_waits_survives_other_buckets() -> None:
    a, b, c = gradients(3, 4), gradients(4, 6), gradients(5, 5)
    wire = TopkWire(0.01, 1)

    def exchange(number: int, *parts: np.ndarray) -> None:
        vector = torch.from_numpy(np.concatenate(parts))
        on_ranks(1, lambda group: wire.exchange(number, vector, group.sum, group))

    def waiting() -> dict[str, np.ndarray]:
        return {name: piece.numpy().copy() for name, piece in wire.residuals().items()}

    wire.reset([[("a", 4)], [("b", 6), ("c", 5)]])
    exchange(0, a)
    exchange(1, b, c)
    before = waiting()
    assert sum(np.count_nonzero(piece) for piece in before.values()) == 15 - 2
    wire.reset([[("c", 5), ("a", 4), ("new", 2)], [("b", 6)]])
    after = waiting()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    exchange(0, 0 * c, 0 * a, np.array([100, 0], dtype=np.float32))  # the largest is new: all others go on waiting
    after = waiting()
    assert all(np.array_equal(before[name], after[name]) for name in ("a", "b", "c"))
    assert not after["new"].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "count", "lost"), [("topk", 1, 1), ("topk", 8, 2), ("int8", 1, 10), ("int8", 8, 20)])
def test_gradients_that_are_not_finite_are_seen_everywhere_and_once(
    name: Wire, bad: float, count: int, lost: int
) -> None:
    """Of topk the entries sent are lost, of int8 the blocks, here the shares of two ranks."""
    first = gradients(6, 2, 20)
    poisoned = gradients(7, 2, 20)
    poisoned[1, 3 : 3 + count] = bad
    results = exchanged(name, np.stack([first, poisoned]))
    assert [np.count_nonzero(~np.isfinite(each.sums[-1])) for each in results] == [lost, lost]
    healthy, ill = (each.residuals for each in results)
    assert np.array_equal(ill[0], ill[1])  # as if the step had not been
    # Of int8 it adds a share that is lost.
    assert np.array_equal(healthy[0], healthy[1]) == (name == "int8")
    assert all(np.isfinite(rest).all() for rest in (*healthy, *ill))
