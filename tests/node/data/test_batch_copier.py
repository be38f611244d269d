"""The order in which a batch reaches a GPU: stand-ins for streams and events write down what is asked of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dlbench.node.data.batch_copier import BatchCopier
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.specs.workload import ImageData, ResNetModel

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
    assert (told.requested, told.effective, told.evidence) == (
        1,
        1,
        "2 of 3 batches were copied on a separate stream",
    )


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
