"""The way of a batch: queues and slots from loader processes, and copies to a GPU, in the order a stand-in notes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node import page_locked
from dlbench.node.data.loader import Ledger, LoadedSource
from dlbench.node.data.node_sharing import LoaderContext, Slots, WorkerSlots
from dlbench.node.data.reader import BatchReader, Fetched, Key, PreparedSample, Raw
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.data.synthetic import BatchCopier, SyntheticSource
from dlbench.specs.workload import ImageData, ResNetModel
from tests.support.training_data import NumberReader

FULL = "unable to allocate shared memory(shm) for file </torch_7_8_0>: No space left on device (28)"


class Unsendable:
    """As a tensor where shared memory is full."""

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(FULL)


def test_a_batch_without_room_in_shared_memory_ends_the_rank_and_not_its_patience(
    capfd: pytest.CaptureFixture[str],
) -> None:
    queue: Any = LoaderContext().Queue()
    batch: dict[str, Any] = {"image": Unsendable()}
    queue.put((3, Fetched(batch=batch)))
    queue.put((4, Fetched(failures=["x"])))
    received = dict([queue.get(timeout=60), queue.get(timeout=60)])
    queue.close()
    queue.join_thread()
    assert received[4].lacks is None
    with pytest.raises(EnvironmentLacksError) as caught:
        Ledger(loader_workers=1).next(iter([received[3]]))
    assert FULL in str(caught.value)
    assert "--shm-size" in str(caught.value)
    assert FULL in capfd.readouterr().err  # all of it, for the log


def put_two(queue: Any) -> None:
    queue.put("small")
    queue.put(b"x" * (1 << 24))
    time.sleep(1000)


def test_a_loader_process_killed_while_it_writes_holds_up_nobody() -> None:
    context = LoaderContext()
    queue: Any = context.Queue()
    loaders = [context.Process(target=put_two, args=(queue,), daemon=True) for _ in range(2)]
    for loader in loaders:
        loader.start()
    assert queue.get(timeout=60) == "small"
    # Nobody reads what is longer than a pipe is: it is half written until it is got.
    loaders[0].kill()
    loaders[0].join()
    with pytest.raises(EOFError):
        [queue.get(timeout=60) for _ in range(4)]
    loaders[1].kill()
    loaders[1].join()


SPECS: Any = {"x": ((3,), np.dtype(np.int16)), "label": ((), np.dtype(np.int64))}


class Numbers(NumberReader):
    """Sample i is [i, epoch, i * i]."""

    def fetch(self, index: int, out: object = None) -> Raw:
        return Raw(bytes(8))

    def prepare(self, key: Key, data: bytes, out: Any = None) -> PreparedSample:
        epoch, index = key
        return PreparedSample(
            {"x": np.array([index, epoch, index * index], dtype=np.int32), "label": np.asarray(index)}
        )


def source(workers: int) -> LoadedSource:
    order = ShardedOrder(10, batch_size=4, rank=0, world_size=1, seed=1, drop_last=False)
    return LoadedSource(Numbers(10), order, loader_workers=workers, on_bad_sample="stop")  # type: ignore[arg-type]


def test_batches_stay_as_they_are_while_anybody_has_a_part_of_them_and_slots_are_used_again() -> None:
    """Epochs of 4, 4 and 2 samples: slots are used for batches of unlike sizes, too."""
    with_slots, plain = source(2), source(0)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    addresses = set()
    try:
        for number in range(30):
            batch, expected = next(with_slots), next(plain)
            assert {name: tensor.tolist() for name, tensor in batch.items()} == {
                name: tensor.tolist() for name, tensor in expected.items()
            }
            addresses.add(batch["x"].data_ptr())
            if number in (2, 3, 11):
                kept.append((batch["x"][1:, 2], expected["x"][1:, 2].clone()))  # a view keeps all of its batch
        assert all(torch.equal(part, then) for part, then in kept)
        # Two processes read two batches ahead; one is in use, three are kept.
        assert len(addresses) <= 2 * 3 + 3
    finally:
        with_slots.close()
        plain.close()


def test_a_slot_crosses_once_and_is_used_again_only_when_all_of_its_tensors_are_gone() -> None:
    made, slots = WorkerSlots(), Slots(1, pin_memory=False)
    turns = slots.turns()

    def read(value: int, slot: int) -> Fetched:
        arrays = made.allocate(slot, 2, SPECS)
        arrays["x"][:], arrays["label"][:] = value, value
        fetched = Fetched(batch={name: torch.from_numpy(array) for name, array in arrays.items()}, asked_slot=slot)
        made.hand_over(fetched, slot)
        return fetched

    first = read(1, next(turns))
    assert set(first.new_slot_tensors) == {"x", "label"}
    slots.take(first)
    x = first.batch.pop("x")
    view = x.permute(1, 0)[:2]
    del x
    first.batch.clear()
    second = next(turns)
    assert second != first.slot
    assert view.tolist() == [[1, 1], [1, 1]]
    del view
    gc.collect()
    assert next(turns) == first.slot
    again = read(3, first.slot or 0)
    assert (again.batch, again.new_slot_tensors) == ({}, {})  # its number is enough
    slots.take(again)
    assert again.batch["label"].tolist() == [3, 3]


def test_what_did_not_use_its_slot_gives_it_back() -> None:
    slots = Slots(1, pin_memory=False)
    turns = slots.turns()
    slot = next(turns)
    slots.take(Fetched(error="unreadable", asked_slot=slot))
    assert next(turns) == slot


class Runtime:
    """cudart as `torch.cuda.cudart()` gives it, for page-locking; from call `until` on it refuses with `error`."""

    def __init__(self, error: int = 0, until: int = 1) -> None:
        self.error, self.until, self.locked, self.calls = error, until, dict[int, int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        self.calls += 1
        if self.error and self.calls >= self.until:
            return self.error
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_slots_are_page_locked_once_and_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(page_locked, "_last_error", lambda: lambda: 0)
    made, slots = WorkerSlots(), Slots(1, pin_memory=True)
    turns = slots.turns()
    for _ in range(5):
        slot = next(turns)
        reader: Any = BatchReader(Numbers(10), "stop")  # type: ignore[arg-type]
        fetched = reader.read([(0, 1), (0, 2)], lambda num, specs, slot=slot: made.allocate(slot, num, specs))
        fetched.asked_slot = slot
        made.hand_over(fetched, slot)
        slots.take(fetched)
        assert set(runtime.locked) >= {tensor.data_ptr() for tensor in fetched.batch.values()}
        assert runtime.locked[fetched.batch["x"].data_ptr()] == fetched.batch["x"].nbytes
        del fetched
        gc.collect()
    assert runtime.calls == 2  # two tensors of one slot
    slots.close()
    assert runtime.locked == {}
    refusing = Slots(1, pin_memory=True)
    runtime, batch = Runtime(error=2, until=2), {"x": torch.zeros(3), "y": torch.zeros(3)}
    with pytest.raises(
        EnvironmentLacksError, match=r"cannot be page-locked for the GPU \(CUDA error 2\): see `ulimit -l`"
    ):
        refusing.take(Fetched(new_slot_tensors=batch, names=("x", "y"), slot=0, num=3, asked_slot=0))
    assert (runtime.calls, runtime.locked) == (2, {})


GPU: Any = "the GPU"


class Streams:
    """What torch.cuda knows of streams; `log` has every operation in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current, self.events, self.passed = "compute", itertools.count(), set[int]()
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copy")
        monkeypatch.setattr(torch.cuda, "stream", self._using)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))

    @contextmanager
    def _using(self, stream: str | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        yield
        self.current = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.number}")


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.number = streams, next(streams.events)

    def record(self, stream: Stream) -> None:
        self.streams.log.append(f"{self.number} in {stream.name}")

    def query(self) -> bool:
        return self.number in self.streams.passed


class Host:
    device = "cpu"

    def __init__(self, streams: Streams, number: int, alive: set[int]) -> None:
        self.streams, self.number, self.alive = streams, number, alive
        alive.add(number)

    def __del__(self) -> None:
        self.alive.discard(self.number)

    def to(self, device: Any, non_blocking: bool) -> Moved:
        assert device is GPU
        assert non_blocking
        self.streams.log.append(f"copy {self.number} on {self.streams.current}")
        return Moved(self.streams, self.number)


class Moved:
    device = GPU

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number

    def record_stream(self, stream: Stream) -> None:
        self.streams.log.append(f"{self.number} used by {stream.name}")


class Source:
    def __init__(self, streams: Streams, most: int) -> None:
        self.streams, self.most, self.alive = streams, most, set[int]()
        self.read, self.looked, self.handed = 0, list[Any](), 0

    def _new(self) -> Any:
        self.read += 1
        return {"image": Host(self.streams, self.read - 1, self.alive)}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.handed += 1
        return self.looked.pop(0) if self.looked else self._new()

    def ahead(self) -> Any:
        if self.read >= self.most:
            return None
        self.looked.append(self._new())
        return self.looked[-1]


def step(batch_copier: BatchCopier, streams: Streams) -> Any:
    batch_copier.fetch()
    batch = batch_copier.deliver()
    streams.log.append("compute")
    batch_copier.look_ahead()
    return batch["image"].number


def test_a_batch_is_copied_beside_the_step_before_it_and_waited_for_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    source = Source(streams, most=3)
    batch_copier = BatchCopier(source, source.ahead, GPU, 1)
    assert [step(batch_copier, streams) for _ in range(3)] == [0, 1, 2]
    assert streams.log == [
        *("copy 0 on copy", "0 in copy", "compute waits for 0", "0 used by compute", "compute"),
        *("copy 1 on copy", "1 in copy", "compute waits for 1", "1 used by compute", "compute"),
        *("copy 2 on copy", "2 in copy", "compute waits for 2", "2 used by compute", "compute"),
    ]
    assert (source.handed, source.read) == (3, 3)
    (told,) = batch_copier.settings()
    assert (told.requested, told.effective, told.evidence) == (1, 1, "2 of 3 batches were copied on a separate stream")


def test_host_memory_is_let_go_when_its_copy_is_done_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    source = Source(streams, most=9)
    batch_copier = BatchCopier(source, source.ahead, GPU, 1)
    for _ in range(3):
        step(batch_copier, streams)
    assert source.alive == {0, 1, 2, 3}
    streams.passed |= {0, 1}
    step(batch_copier, streams)
    assert source.alive == {2, 3, 4}


def test_without_look_ahead_the_stream_that_computes_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    source = Source(streams, most=9)
    batch_copier = BatchCopier(source, source.ahead, GPU, 0)
    assert [step(batch_copier, streams) for _ in range(2)] == [0, 1]
    assert streams.log == [
        *("copy 0 on compute", "0 in compute", "compute"),
        *("copy 1 on compute", "1 in compute", "compute"),
    ]
    assert source.alive == {0, 1}
    assert batch_copier.settings()[0].effective == 0


def test_batches_that_lie_on_the_device_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    lying = {"image": Moved(streams, 7)}
    batch_copier = BatchCopier(itertools.repeat(lying), lambda: lying, GPU, 1)  # type: ignore[arg-type]
    assert [step(batch_copier, streams) for _ in range(2)] == [7, 7]
    assert streams.log == ["compute", "compute"]
    assert batch_copier.settings()[0].effective is None


def test_looking_ahead_changes_no_batch() -> None:
    def made() -> SyntheticSource:
        model = ResNetModel(family="resnet", image_size=8)
        return SyntheticSource(model, ImageData(format="images"), batch_size=2, ranks=[0], seed=3)

    plain, looking = made(), made()
    for number in range(6):
        if number % 3 == 1:
            looking.ahead()
        assert torch.equal(next(plain)["image"], next(looking)["image"])
