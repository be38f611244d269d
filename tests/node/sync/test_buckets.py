"""Buckets of dlbench's own exchange, the cost line that is timed before training, values of ranks as JSON."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import RunError
from dlbench.node.sync.engine import RankGroup
from dlbench.node.sync.own import buckets, route
from dlbench.node.sync.own.buckets import ExchangeMoments, ExchangeThread, StepMoments, gradient_times
from dlbench.node.sync.own.route import Flat, Hierarchical, Hybrid, Leader, given_line, sizes_up_to
from dlbench.node.sync.run_store import MAX_BYTES, GroupRanks, RankGroups, gather_json
from dlbench.node.sync.timing import Clock
from dlbench.perfmodels.schedules import Layout, level_chunks
from dlbench.specs.comm import Level, LineCost, NetworkModel, Piece

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 3000))
def test_messages_hold_the_least_size_and_no_tensor_more_than_it_takes(sizes: list[int], least: int) -> None:
    messages = buckets.split(range(len(sizes)), buckets.at_least(sizes, least))
    assert [n for one in messages for n in one] == list(range(len(sizes)))
    for one in messages[:-1]:
        held = [sizes[n] for n in one]
        assert sum(held) >= least > sum(held[:-1])
    last = [sizes[n] for n in messages[-1]]
    assert sum(last[:-1]) < least


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8), st.integers(1, 7), st.data()
)
def test_gradients_go_into_their_own_part_of_the_arena(
    shapes: list[tuple[int, ...]], multiple: int, data: st.DataObject
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    cuts = data.draw(st.lists(st.integers(1, len(shapes)), unique=True)) if len(shapes) > 1 else []
    ends = sorted({*cuts, len(shapes)})
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    arena = torch.full((buckets.arena_elements([p.numel() for p in parameters], multiple),), torch.nan)
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    made = buckets.StepMessages(arena, named, buckets.split(range(len(shapes)), counts), multiple).buckets
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full(parameter.shape, 2.0 * (number + 1))
    for bucket in made:
        for place in range(len(bucket.parameters)):
            bucket.take(place, 0.5)
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full(parameter.shape, float(number + 1)))
    for bucket in made:
        assert bucket.missing == 0
        assert bucket.vector.numel() % multiple == 0
        assert bucket.num_bytes == 4 * sum(p.numel() for p in bucket.parameters)
        assert torch.equal(bucket.vector[bucket.num_elements :], torch.zeros_like(bucket.vector[bucket.num_elements :]))
        # What is exchanged is what the optimizer reads: no copy lies between.
        bucket.vector.fill_(9.0)
        assert all(bool((p.grad == 9.0).all()) for p in bucket.parameters if p.grad is not None)


def test_a_gradient_that_never_came_counts_as_zeros() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    bucket = buckets.Bucket([parameter], 1, torch.full((64,), torch.nan))
    bucket.take(0, 0.25)
    assert parameter.grad.tolist() == [0.0] * 3


def test_gradients_keep_the_memory_order_of_their_parameters() -> None:
    weight = torch.empty(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(weight)
    parameter.grad = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    before = parameter.grad.clone()
    bucket = buckets.Bucket([parameter], 1, torch.zeros(128))
    bucket.take(0, 1.0)
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, before)


def test_gradients_of_another_type_are_refused() -> None:
    with pytest.raises(RunError, match=r"weight is torch\.float64"):
        buckets.require_fp32([("weight", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))])


@given(st.permutations(range(6)))
def test_messages_go_in_the_agreed_order_however_they_come(order: list[int]) -> None:
    gone: list[int] = []
    thread = ExchangeThread(lambda: None, gone.append, str)
    try:
        for step in (1, 2):
            thread.begin()
            for number in order:
                thread.hand_over(number)
            thread.wait()
            assert gone == list(range(6)) * step
    finally:
        thread.stop()


def test_an_error_on_the_thread_ends_the_step_and_names_the_message() -> None:
    def exchange(number: int) -> None:
        if number == 1:
            raise RuntimeError("connection closed\nby peer")

    thread = ExchangeThread(lambda: None, exchange, lambda n: f"message {n + 1} of 3")
    thread.begin()
    for number in range(3):
        thread.hand_over(number)
    with pytest.raises(RunError, match="the exchange of message 2 of 3 failed: connection closed by peer") as caught:
        thread.wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    thread.stop()


@dataclass
class Recorded:
    """A group that only knows its ranks and remembers what was called."""

    ranks: tuple[int, ...]
    index: int = 0
    carrier: str = "nothing"
    calls: list[str] = field(default_factory=list)

    def sum(self, vector: torch.Tensor) -> None:
        self.calls.append(f"sum {vector.numel()}")

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        self.sum(vector)
        return lambda: self.calls.append("waited")

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        self.calls.append(f"scatter {vector.numel()}")
        return vector[: vector.numel() // len(self.ranks)]

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        self.calls.append(f"gather {share.numel()}")

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        self.calls.append(f"reduce to {root}")

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        self.calls.append(f"broadcast from {root}")

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        raise NotImplementedError

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def groups_of(size: int, group_size: int, place: int = 0) -> tuple[RankGroups, Recorded, Recorded, Recorded]:
    who = GroupRanks(size=size, group_size=group_size)
    world, inside, across = (
        Recorded(tuple(range(who.size))),
        Recorded(who.inside[0], place),
        Recorded(who.across[place]),
    )
    group: RankGroup = world  # the protocol is met
    return RankGroups(world=group, inside=inside, across=across), world, inside, across


@pytest.mark.parametrize(
    ("engine", "carrier", "overlap"), [("ddp", "gloo", True), ("ddp", "nccl", False), ("horovod", "gloo", False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_is_scattered_before_the_one_ahead_of_it_is_waited_for(
    engine: str, carrier: str, overlap: bool, dtype: torch.dtype
) -> None:
    """Over NCCL, and where one thread of a library serves both levels, there is nothing to overlap and one chunk. Bytes
    count, as in prices, whatever the type on the wire.
    """
    groups, _, inside, across = groups_of(8, 4)
    across.calls = inside.calls
    layout = Layout(ranks=8, group_size=4)
    share = 16385 * (4 // dtype.itemsize)
    method, message = Hierarchical(groups, partial(level_chunks, engine, carrier, layout)), torch.zeros(4 * share)
    message = message.to(dtype)
    method.sum(message)
    assert method.chunks(message.nbytes) == 1 + overlap
    first, last = share - share // 2, share // 2
    ends = [f"sum {first}", f"scatter {4 * last}", f"sum {last}", "waited", f"gather {first}"]
    assert inside.calls == (
        [f"scatter {4 * first}", *ends, "waited", f"gather {last}"]
        if overlap
        else [f"scatter {4 * share}", f"sum {share}", "waited", f"gather {share}"]
    )


def test_a_predicted_line_is_that_of_the_chunks_that_are_sent(tmp_path: Path) -> None:
    def level(alpha_s: float, beta_s_per_byte: float) -> Level:
        return Level(pieces=(Piece(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte),))

    network = NetworkModel(system="box", transport="torch-gloo", inside=level(1e-6, 1e-9), across=level(1e-6, 1e-9))
    (tmp_path / "box.network.json").write_text(network.model_dump_json(), encoding="utf-8")
    layout = Layout(ranks=8, group_size=4)

    def line(engine: str) -> LineCost:
        chunks = partial(level_chunks, engine, "gloo", layout)
        file = str(tmp_path / "box.network.json")
        return given_line(file, "gloo hierarchical", "hierarchical", layout, largest_bytes=2**26, chunks=chunks)

    size = 2**26
    # One after the other: each level's ring by itself.
    bare = (2 * 3 + 2) * 1e-6 + (2 * 3 / 4 * size + 2 * 1 / 2 * size / 4) * 1e-9
    assert line("horovod").time(size) == pytest.approx(bare, rel=1e-3)
    assert line("ddp").time(size) < 0.95 * bare


def test_hybrid_goes_by_the_bytes_of_the_message() -> None:
    groups, world, inside, _ = groups_of(8, 4)
    hybrid = Hybrid(Flat(world, 4), Hierarchical(groups, lambda _: 1), 100)
    assert hybrid.sum(torch.zeros(24)) == "hierarchical"
    assert hybrid.sum(torch.zeros(25)) == "flat"
    assert hybrid.sum(torch.zeros(48, dtype=torch.float16)) == "hierarchical"
    assert world.calls == ["sum 25"]
    assert hybrid.name_for(99) == "hierarchical"
    assert (hybrid.chunks(99), hybrid.chunks(100)) == (1, None)
    assert hybrid.sent(100) == Flat(world, 4).sent(100)
    assert hybrid.sent(96) == Hierarchical(groups, lambda _: 1).sent(96)
    assert len(inside.calls) == 4


@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 100))
def test_bytes_by_counting_messages_of_rings(groups: int, size: int, blocks: int) -> None:
    """Volumes against a count over all ranks of what ring schedules send, inside and across."""
    ranks = groups * size
    num_bytes = blocks * ranks
    made, world, *_ = groups_of(ranks, size)

    def ring(members: list[int], length: float) -> tuple[float, float]:
        inside = across = 0.0
        for place, rank in enumerate(members):
            sent = 2 * (len(members) - 1) * length / len(members)
            peer = members[(place + 1) % len(members)]
            if rank // size == peer // size:
                inside += sent
            else:
                across += sent
        return inside / ranks, across / ranks

    assert Flat(world, size).sent(num_bytes) == pytest.approx(ring(list(range(ranks)), num_bytes))
    who = GroupRanks(size=ranks, group_size=size)
    within = [ring(list(group), num_bytes) for group in who.inside]
    shares = [ring(list(place), num_bytes / size) for place in who.across]
    inside, across = (sum(values) for values in zip(*within, *shares, strict=True))
    assert Hierarchical(made, lambda _: 1).sent(num_bytes) == pytest.approx((inside, across))
    # A tree sends the vector to or from each rank but the first, twice; leaders ring.
    tree = 2 * (size - 1) * num_bytes * groups / ranks
    assert Leader(made, reduce_is_sum=False).sent(num_bytes) == pytest.approx(
        (tree, ring(list(who.across[0]), num_bytes)[1])
    )
    assert Leader(made, reduce_is_sum=True).sent(num_bytes)[0] > tree


SECOND = 1_000_000_000


def step(ready: list[int], spans: list[tuple[int, int]], backward: int) -> StepMoments:
    return StepMoments(
        begin=0,
        gradients=[r * SECOND for r in ready],
        ready=[r * SECOND for r in ready],
        start=[start * SECOND for start, _ in spans],
        end=[end * SECOND for _, end in spans],
        backward_end=backward * SECOND,
    )


def test_exposed_is_what_comes_after_the_backward_pass() -> None:
    moments = ExchangeMoments(clock=Clock())
    moments.add(step([1, 4, 9], [(2, 5), (6, 12), (13, 15)], backward=10))
    sums = moments.sums()
    assert sums == {"communication_s": 11, "exposed_s": 4, "hidden_s": 7, "backward_s": 10}
    packed = step([1, 4, 9], [(2, 5), (6, 12), (13, 15)], backward=10)
    apart = ExchangeMoments(clock=Clock())
    apart.add(packed)
    packed.carried = [[(3 * SECOND, 5 * SECOND)], [(8 * SECOND, 9 * SECOND), (10 * SECOND, 11 * SECOND)]]
    packed.carried.append([(13 * SECOND, 14 * SECOND)])
    assert apart.sums() == {**sums, "packing_s": 3, "merging_s": 3}  # between two parts of a message is merging
    moments.add(step([1, 4, 9], [(2, 5), (6, 12), (13, 15)], backward=10))
    moments.add(step([3, 5, 9], [(9, 20), (20, 30), (30, 40)], backward=10))
    assert moments.sums() == sums  # medians
    assert gradient_times(moments.steps, moments.clock) == [1, 4, 9]
    assert [tuple(m.values()) for m in moments.messages()] == [(1, 2, 3), (4, 6, 6), (9, 13, 2)]


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_calibration_takes_two_sizes_or_more_up_to_the_largest(largest: int, multiple: int) -> None:
    counts = sizes_up_to(largest, multiple)
    assert counts == sorted(set(counts))
    assert len(counts) >= 2
    assert all(count % multiple == 0 for count in counts)
    assert counts[-1] * 4 >= largest
    assert counts[-1] * 4 <= max(largest, 4 * 4096) + 4 * multiple


STARTUP_S, PER_BYTE_S, SKEW_S = 20e-6, 1e-9, 100e-6


class SkewedRanks:
    """Two ranks, of which this one leaves every start too early and waits in the first message for the other."""

    def __init__(self) -> None:
        self.now_s, self.waits_s, self.most_at_once, self.at_once = 0.0, 0.0, 0, 0
        self.index, self.ranks = 0, (0, 1)
        self.seen: list[torch.Tensor] = []

    def sum(self, vector: torch.Tensor) -> None:
        self.waits_s, self.at_once, self.seen = SKEW_S, 0, []

    def exchange(self, number: int, vector: torch.Tensor) -> None:
        assert not any(torch.equal(vector, other) for other in self.seen)
        self.seen.append(vector.clone())
        vector.fill_(float("inf"))  # nobody may go on with what a message left
        self.now_s += self.waits_s + STARTUP_S + PER_BYTE_S * 4 * len(vector)
        self.waits_s = 0.0
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)


@pytest.mark.parametrize("largest_bytes", [2**20, 2**24])
def test_the_start_up_of_a_message_holds_no_wait_for_the_start(
    monkeypatch: pytest.MonkeyPatch, largest_bytes: int
) -> None:
    ranks = SkewedRanks()
    monkeypatch.setattr(route, "time", SimpleNamespace(monotonic=lambda: ranks.now_s))
    counts = route.sizes_up_to(largest_bytes, 1)
    calibration = route.Calibration(
        exchange=ranks.exchange,
        world=cast(Any, ranks),
        clock=Clock(),
        arena=torch.zeros(counts[-1]),
        # The other rank starts last, and waits for nobody.
        gather=lambda value: [value, value - SKEW_S] if isinstance(value, float) else [value],
    )
    line = calibration.measure("planted", counts, budget_s=1000.0)
    assert line.startup_s == pytest.approx(STARTUP_S, rel=0.25)
    assert line.per_byte_s == pytest.approx(PER_BYTE_S, rel=0.1)
    assert 1 < ranks.most_at_once <= counts[-1] // counts[0]


class OtherRanks:
    """Stands for the other ranks: they send the same lengths and then these bytes."""

    def __init__(self, *others: bytes, sizes: list[int] | None = None) -> None:
        self._others = others
        self._sizes = sizes or [len(other) for other in others]
        self._calls = 0

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            return torch.cat([own, torch.tensor(self._sizes, dtype=torch.int64)])
        width = own.numel()
        rows = [torch.frombuffer(bytearray(other.ljust(width)[:width]), dtype=torch.uint8) for other in self._others]
        return torch.cat([own, *rows])


@pytest.mark.parametrize("value", [None, 0, "", "é\udcff", [1, 2.5], {"a": {"b": [True, None]}}, 10**30, "x" * 100_000])
def test_values_come_back_as_they_were(value: Any) -> None:
    other = json.dumps(["the other's"]).encode()
    assert gather_json(value, 2, OtherRanks(other).all_gather) == [value, ["the other's"]]


def test_numbers_that_are_not_finite_and_tuples() -> None:
    (own, other) = gather_json((math.inf, math.nan), 2, OtherRanks(b"[-Infinity]").all_gather)
    assert own[0] == math.inf
    assert math.isnan(own[1])
    assert other == [-math.inf]


def test_nothing_that_a_rank_sends_is_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return canary.touch, ()

    with pytest.raises(RunError, match="a rank sent bytes that are not JSON"):
        gather_json("x" * 200, 2, OtherRanks(pickle.dumps(Touch())).all_gather)
    assert not canary.exists()


@pytest.mark.parametrize("size", [0, -1, MAX_BYTES + 1, 2**62])
def test_a_size_that_cannot_be_is_refused_before_memory_is_taken(size: int) -> None:
    with pytest.raises(RunError, match="ranks sent values of"):
        gather_json("x", 2, OtherRanks(b"1", sizes=[size]).all_gather)


def test_what_json_cannot_hold_is_a_defect() -> None:
    with pytest.raises(TypeError):
        gather_json(object(), 2, OtherRanks(b"1").all_gather)
