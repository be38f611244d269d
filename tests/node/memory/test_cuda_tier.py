"""The GPU's far tier without a GPU: which stream waits for what, before memory is used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node.memory.executor import OutOfCore
from dlbench.node.memory.tiers import PinnedTier
from tests.node.memory.networks import chain_task, cut, planned, train

CPU = torch.device("cpu")


class FakeEvent:
    """Notes on which stream it was recorded; done when its work was ordered and the fake device ran."""

    def __init__(self, calls: FakeCalls) -> None:
        self._calls = calls
        self.name = ""

    def record(self, stream: FakeStream) -> None:
        self.name = self._calls.name(stream)

    def query(self) -> bool:
        return self._calls.device_is_fast

    def synchronize(self) -> None:
        self._calls.log.append("host waits")

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class FakeStream:
    def __init__(self, calls: FakeCalls, name: str) -> None:
        self.calls, self.name = calls, name

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.log.append(f"{self.name} waits for {event.name}")


class FakeCalls:
    """Streams that compute at once, on the host, and note the order of waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.device_is_fast = False
        self.locked: list[int] = []
        self._names = iter(("out", "in"))
        self._current = FakeStream(self, "compute")
        self._count: dict[str, int] = {}

    def name(self, stream: FakeStream) -> str:
        self._count[stream.name] = self._count.get(stream.name, 0) + 1
        name = f"{stream.name} {self._count[stream.name]}"
        self.log.append(f"event {name}")
        return name

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, next(self._names))

    def new_event(self, timing: bool) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        self.log.append(f"copy on {stream.name}")
        yield
        self._current = before

    def on(self, stream: FakeStream) -> AbstractContextManager[object]:
        return self._on(stream)

    def synchronize(self, device: torch.device) -> None:
        self.log.append("host waits")

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.locked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def on_device(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.log.append(f"memory on {self._current.name}")
        return torch.empty(num_bytes, dtype=torch.uint8)


def storage_of(value: float, count: int = 2048) -> torch.UntypedStorage:
    return torch.full((count,), value).untyped_storage()


def test_streams_wait_in_the_order_that_memory_needs() -> None:
    calls = FakeCalls()
    tier = PinnedTier(CPU, 1 << 16, calls=calls)
    ticket = tier.swap_out(storage_of(1.0), block=0)
    # The copy out comes after what was computed.
    assert calls.log == ["event compute 1", "out waits for compute 1", "copy on out", "event out 1"]
    calls.log.clear()
    assert not tier.is_out(ticket)
    tier.wait_out(ticket)
    # What is computed next may use the memory, so it comes after the copy; the host goes on.
    assert calls.log == ["compute waits for out 1"]
    assert tier.is_out(ticket)
    calls.log.clear()
    tier.swap_in(ticket, block=0)
    waits = ["event compute 2", "in waits for compute 2", "in waits for out 1"]
    assert calls.log == ["memory on compute", *waits, "copy on in", "event in 1"]
    calls.log.clear()
    back = tier.take(ticket)
    assert calls.log == ["compute waits for in 1"]
    assert bytes(back) == bytes(storage_of(1.0))
    tier.discard(ticket)
    calls.log.clear()
    # The place is written to again: not before it was read.
    tier.swap_out(storage_of(2.0), block=1)
    assert calls.log[:3] == ["event compute 3", "out waits for compute 3", "out waits for in 1"]
    assert calls.locked == [1 << 16]


def test_what_has_not_left_stays() -> None:
    calls = FakeCalls()
    tier = PinnedTier(CPU, 1 << 16, calls=calls)
    storage = storage_of(1.0)
    ticket = tier.swap_out(storage, block=0)
    kept = tier.recall(ticket)
    assert kept is not None
    assert kept.data_ptr() == storage.data_ptr()
    assert calls.log[-1] == "event out 1"  # nothing waits for the copy that still reads it
    gone = tier.swap_out(storage_of(2.0), block=0)
    calls.device_is_fast = True
    assert tier.recall(gone) is None


def test_training_through_the_pool_is_as_in_core_and_never_waits_on_the_host() -> None:
    task = chain_task(["linear", "gelu"] * 5)
    in_core = train(task, task.model())
    for fast in (False, True):
        calls = FakeCalls()
        calls.device_is_fast = fast
        tier = PinnedTier(CPU, 20 * 8192, calls=calls)
        model = task.model()
        units = cut(task, model)
        OutOfCore(model, units, planned(units, "swap"), tier=tier).install()
        assert train(task, model).equals(in_core)
        assert "host waits" not in calls.log
        assert len(calls.locked) == 1  # the same places in every pass
        tier.close()


def test_a_pool_that_is_too_small_grows_and_says_so() -> None:
    calls = FakeCalls()
    tier = PinnedTier(CPU, 8192, calls=calls)
    for number in range(3):
        tier.swap_out(storage_of(float(number)), block=number)
    assert tier.warnings == ("the pool of page-locked memory grew 2 times: more was swapped than planned",)


def test_memory_that_cannot_be_locked_is_a_lack_of_the_machine() -> None:
    class Refusing(FakeCalls):
        def pinned(self, num_bytes: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    with pytest.raises(EnvironmentLacksError, match=r"rank 2: cannot lock 1 GiB .* CUDA error: out of memory$"):
        PinnedTier(CPU, 1 << 30, rank=2, calls=Refusing())


def test_offload_on_a_gpu_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Seen(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            asked.append(pin_memory)
            super().__init__(lambda tensor: tensor.detach(), lambda tensor: tensor)

    monkeypatch.setattr("dlbench.node.memory.executor.save_on_cpu", Seen)
    task = chain_task(["linear", "gelu"] * 2)
    model = task.model()
    units = cut(task, model)
    OutOfCore(model, units, planned(units, "swap"), tier=None, prefetch="blocking").install()
    assert train(task, model, steps=1).equals(train(task, task.model(), steps=1))
    assert asked == [True] * len(units)
