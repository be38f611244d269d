"""The swap file: what it gives back, where it may lie, and how it fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlbench.errors import RunError
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.executor import OutOfCore
from tests.node.out_of_core.networks import chain_task, cut, planned, train


@pytest.fixture
def close() -> Iterator[Callable[[DiskTier], DiskTier]]:
    opened: list[DiskTier] = []

    def note(tier: DiskTier) -> DiskTier:
        opened.append(tier)
        return tier

    yield note
    for tier in opened:
        tier.close()


Note = Callable[[DiskTier], DiskTier]


def storage(count: int, seed: int = 0) -> torch.UntypedStorage:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).untyped_storage()


def test_bytes_come_back_and_no_file_has_a_name(tmp_path: Path, close: Note) -> None:
    tier = close(DiskTier(tmp_path, 64 << 20))
    assert list(tmp_path.iterdir()) == []
    sent = [storage(count, seed) for seed, count in enumerate((1, 1023, 1024, 1025, 3_000_001))]
    wanted = [bytes(one) for one in sent[:4]]
    tickets = [tier.swap_out(one, block=n) for n, one in enumerate(sent)]
    for ticket in reversed(tickets):
        tier.swap_in(ticket, block=0)
    back = [tier.take(ticket) for ticket in tickets]
    assert [bytes(one)[: len(text)] for one, text in zip(back, wanted, strict=False)] == wanted
    large = torch.empty(0).set_(back[4], 0, (3_000_001,), (1,))
    assert torch.equal(large, torch.rand(3_000_001, generator=torch.Generator().manual_seed(4)))
    assert os.fstat(tier._file).st_size == 64 << 20


def test_direct_io_that_is_refused_is_replaced_and_told(
    tmp_path: Path, close: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **by_name: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # nor files without a name: made and unlinked at once
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **by_name)

    monkeypatch.setattr(os, "open", refusing)
    tier = close(DiskTier(tmp_path, 1 << 20))
    assert list(tmp_path.iterdir()) == []
    assert tier.words == f"file in {tmp_path} (through the page cache, pages dropped again)"
    assert "no direct I/O" in " ".join(tier.warnings)
    ticket = tier.swap_out(storage(5000), block=0)
    tier.swap_in(ticket, block=0)
    assert bytes(tier.take(ticket))[:20000] == bytes(storage(5000))


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_midway_ends_training_with_one_line(
    call: str, tmp_path: Path, close: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = close(DiskTier(tmp_path, 1 << 20, rank=4))
    task = chain_task(["linear", "gelu"] * 6)
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=tier, prefetch="one-block", rank=4).install()
    train(task, model, steps=1)
    real, left = getattr(os, call), [5]

    def failing(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "Input/output error")
        return int(real(*arguments))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(RunError, match=rf"^rank 4: swap file in {tmp_path}: input/output error$"):
        train(task, model, steps=20)


def test_closing_ends_its_threads(tmp_path: Path) -> None:
    import threading

    tier = DiskTier(tmp_path, 1 << 20)
    tier.swap_out(storage(5000), block=0)
    assert any(thread.name == "swap out" for thread in threading.enumerate())
    tier.close()
    tier.close()
    assert not any(thread.name.startswith("swap ") for thread in threading.enumerate())


def test_offload_on_a_gpu_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Seen(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            asked.append(pin_memory)
            super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor)

    monkeypatch.setattr("dlbench.node.out_of_core.executor.save_on_cpu", Seen)
    task = chain_task(["linear", "gelu"] * 2)
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=None, prefetch="blocking").install()
    assert train(task, model, steps=1).equals(train(task, task.model(), steps=1))
    assert asked == [True] * len(units)
