"""Training out of core: to the last bit what training in core gives, within its budget."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlbench.errors import RunError
from dlbench.node.out_of_core.disk_tier import DiskTicket, DiskTier
from dlbench.node.out_of_core.executor import OutOfCore, Prefetch
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.specs.out_of_core import Decision, PlannedBlock
from tests.node.out_of_core.networks import (
    Task,
    bert_task,
    chain_task,
    cosmoflow_task,
    cut,
    measured_chain,
    planned,
    resnet_task,
    train,
)
from tests.node.out_of_core.test_profile import Pair, UNet, WithPair

TASKS = {
    "resnet": resnet_task,
    "cosmoflow": cosmoflow_task,
    "bert": partial(bert_task, 4),
    "bert of 24 layers": bert_task,
}
METHODS: list[tuple[Decision, Prefetch]] = [
    ("recompute", "room"),
    ("swap", "room"),
    ("swap", "one-block"),
    ("swap", "blocking"),
    ("recompute-swap", "one-block"),
]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, 8 << 20)
    yield tier
    tier.close()


@pytest.mark.parametrize("name", [*list(TASKS)[:3], pytest.param("bert of 24 layers", marks=pytest.mark.nightly)])
def test_every_method_gives_what_core_gives(name: str, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    task, sent = TASKS[name](), list[str]()
    # What is sent, for on a busy machine nothing may have left before it is wanted back, and then it counts as kept.
    swap_out = tier.swap_out
    monkeypatch.setattr(tier, "swap_out", lambda *args, **named: (sent.append("swap"), swap_out(*args, **named))[1])
    in_core = train(task, task.model(), steps=2, parts=2)
    for decision, prefetch in METHODS:
        model = task.model()
        units = cut(task, model)
        out_of_core = OutOfCore(model, units, planned(units, decision), tier=tier, prefetch=prefetch, verify=True)
        out_of_core.install()
        assert train(task, model, steps=2, parts=2).equals(in_core), (decision, prefetch)
        told = out_of_core.summary()
        assert told["passes"] == 4
        assert (len(sent) > 0) == ("swap" in decision)
        sent.clear()
        out_of_core.remove()


KINDS = st.lists(
    # In core, too, a ReLU in place may only stand behind what does not need its own output again.
    st.sampled_from(["linear", "norm", "linear relu", "norm relu", "gelu", "dropout", "residual", "view"]),
    min_size=3,
    max_size=7,
)
DECISIONS: st.SearchStrategy[Decision] = st.sampled_from(["keep", "swap", "recompute", "recompute-swap"])


@settings(max_examples=25, deadline=None)
@given(kinds=KINDS, data=st.data(), needs_gradient=st.booleans())
def test_any_plan_gives_what_core_gives(
    kinds: list[str], data: st.DataObject, needs_gradient: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    task = chain_task(" ".join(["linear", *kinds, "linear"]).split(), needs_gradient)
    in_core = train(task, task.model(), steps=2, parts=2)
    model = task.model()
    units = cut(task, model)
    starts = [0, *(n for n in range(1, len(units)) if not units[n].joins or data.draw(st.booleans()))]
    blocks = [
        PlannedBlock(first=first, last=after - 1, decision=data.draw(DECISIONS))
        for first, after in zip(starts, [*starts[1:], len(units)], strict=True)
    ]
    budget = data.draw(st.sampled_from([None, 20_000, 60_000]))
    prefetch = data.draw(st.sampled_from(["room", "one-block", "blocking"]))
    tier = DiskTier(tmp_path_factory.getbasetemp(), 1 << 20)
    try:
        counting = OutOfCore(model, units, planned(units, "recompute"), count=True)
        counting.install()
        task.loss(model)
        chain = measured_chain(units, list(counting._room.counted))
        counting.remove()
        model = task.model()
        units = cut(task, model)
        costs = BlockCosts(chain, blocking=prefetch == "blocking").of_plan(blocks)
        out_of_core = OutOfCore(
            *(model, units, blocks), tier=tier, budget_bytes=budget, costs=costs, prefetch=prefetch, verify=True
        )
        out_of_core.install()
        assert train(task, model, steps=2, parts=2).equals(in_core)
    finally:
        tier.close()


def deep_chain() -> Task:
    return chain_task(["linear", "gelu"] * 6)


def test_the_budget_is_kept_and_what_exceeds_it_is_counted(tier: DiskTier) -> None:
    task = deep_chain()
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    counting = OutOfCore(model, units, planned(units, "keep"), count=True)
    counting.install()
    train(task, model, steps=1)
    # Eleven inputs of 8 KiB each that lie between two units, and the output; GELU saves nothing else.
    assert counting.summary()["activation_peak_bytes"] == 12 * 8192
    bytes_ = list(counting._room.counted)
    assert [one.input_saved for one in bytes_] == [False] + [True] * 11
    counting.remove()
    chain = measured_chain(units, bytes_)
    for budget in (6 * 8192, 4 * 8192, 8192):
        for decision in ("swap", "recompute-swap"):
            model = task.model()
            units = cut(task, model)
            blocks = planned(units, decision)  # type: ignore[arg-type]
            costs = BlockCosts(chain).of_plan(blocks)
            limited = OutOfCore(model, units, blocks, tier=tier, budget_bytes=budget, costs=costs)
            limited.install()
            assert train(task, model).equals(in_core)
            told = limited.summary()
            # Input and output are there at a time: a budget below that is exceeded and counted; nothing waits for it.
            assert told["over_budget_bytes"] == max(0, 2 * 8192 - budget)
            assert told["activation_peak_bytes"] <= max(2 * 8192, budget)
            limited.remove()


def test_removed_the_network_is_as_it_was(tier: DiskTier) -> None:
    task = resnet_task()
    model = task.model()
    units = cut(task, model)
    out_of_core = OutOfCore(model, units, planned(units, "swap"), tier=tier)
    out_of_core.install()
    assert any("forward" in vars(module) for module in model.modules())
    out_of_core.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert train(task, model).equals(train(task, task.model()))


def test_blocks_of_several_units_run_once_per_pass(tier: DiskTier) -> None:
    task = bert_task(6)
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    blocks = [
        PlannedBlock(first=0, last=1, decision="recompute"),
        PlannedBlock(first=2, last=4, decision="recompute-swap"),
        PlannedBlock(first=5, last=6, decision="swap"),
        PlannedBlock(first=7, last=7, decision="keep"),
    ]
    calls = []
    OutOfCore(model, units, blocks, tier=tier).install()
    model.layers[1].attention.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, index, operator]
    assert train(task, model).equals(in_core)
    assert len(calls) == 3 * 2  # and once more, to recompute


def test_a_pass_that_ends_midway_harms_no_other(tier: DiskTier) -> None:
    task = deep_chain()
    in_core = train(task, task.model())
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, ["swap", "recompute"] * 6), tier=tier).install()
    task.loss(model)  # no backward pass follows
    abandoned = task.loss(model)
    fails = model[7].register_forward_hook(lambda *_: 1 / 0)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        task.loss(model)
    fails.remove()
    loss = task.loss(model)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss
    assert train(task, model).equals(in_core)
    abandoned.backward()  # its tensors are still there


def test_activations_are_freed_when_they_are_away(tmp_path: Path, tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier).install()
    others = _tickets()
    loss = task.loss(model)
    all_out(tier)
    sent = _tickets(but=others)
    assert len(sent) >= 10
    assert all(tier.is_out(ticket) and ticket.storage is None for ticket in sent)
    del sent
    loss.backward()
    gc.collect()
    assert _tickets(but=others) == []


def all_out(tier: DiskTier) -> None:
    """Waits until everything that was to go out has gone: the thread does one thing after the other."""
    reached = threading.Event()
    tier._put(0, reached.set)
    assert reached.wait(60)


def _tickets(but: Sequence[DiskTicket] = ()) -> list[DiskTicket]:
    """All that there are, those of other tests too."""
    known = set(map(id, but))
    return [one for one in gc.get_objects() if type(one) is DiskTicket and id(one) not in known]


class Halves(nn.Module):
    """Saves two views of one storage; the second does not begin where that does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return torch.cat([first * first, second * second])


@pytest.mark.parametrize("decision", ["recompute", "swap", "recompute-swap"])
def test_networks_that_are_not_only_a_chain(decision: Decision, tier: DiskTier) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))

    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), Halves(), nn.Linear(64, 64))

    for build in (UNet, WithPair, halves, lambda: nn.Sequential(nn.Linear(64, 64), Pair())):
        task = Task(build, lambda: (x,))
        in_core = train(task, task.model())
        model = task.model()
        units = cut(task, model)
        OutOfCore(model, units, planned(units, decision), tier=tier).install()
        assert train(task, model).equals(in_core)


def test_a_changed_byte_is_found_and_named(tmp_path: Path, tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier, verify=True, rank=3).install()
    loss = task.loss(model)
    all_out(tier)
    overwritten = os.pwrite(tier._file, _page(tier._file, lambda page: page[:100] + b"\x01" + page[101:]), 0)
    assert overwritten == 4096
    with pytest.raises(RunError, match=r"rank 3: a swapped tensor of block \d+ \(shape 16x128, float32\) .*checksum"):
        loss.backward()


def _page(file: int, changed):  # type: ignore[no-untyped-def]
    """The first page of a file, changed; in memory that direct I/O can write."""
    import mmap

    memory = mmap.mmap(-1, 4096)
    os.preadv(file, [memory], 0)
    memory[:] = changed(bytes(memory))
    return memory


def test_watched_passes_are_told_operation_by_operation(tier: DiskTier) -> None:
    task = deep_chain()
    model = task.model()
    units = cut(task, model)
    out_of_core = OutOfCore(model, units, planned(units, ["swap", "recompute", "keep"] * 4), tier=tier)
    out_of_core.install()
    train(task, model, steps=1)
    assert out_of_core.take_spans() == []
    # What has not left when it is needed again stays; here all has left.
    model[-1].register_forward_hook(lambda *_: all_out(tier))  # type: ignore[index]
    out_of_core.watch(True)
    train(task, model, steps=2)
    out_of_core.watch(False)
    train(task, model, steps=1)
    spans = out_of_core.take_spans()
    assert {span.number for span in spans} == {0, 1}
    for number in (0, 1):
        mine = [span for span in spans if span.number == number]
        forward = [span.block for span in mine if span.kind == "forward"]
        backward = list(dict.fromkeys(span.block for span in mine if span.kind == "backward"))
        assert (forward, backward) == (list(range(12)), list(range(11, -1, -1)))
        assert [span.block for span in mine if span.kind == "recompute"] == [10, 7, 4, 1]
        assert {span.block for span in mine if span.lane == "out"} == {3, 6, 9}
        assert sorted(span.block for span in mine if span.lane == "in") == [3, 6, 9]
        assert all(span.start_ns <= span.end_ns for span in mine)
    compute = [span for span in spans if span.lane == "compute"]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(compute))
