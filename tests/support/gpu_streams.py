"""A GPU of several streams far behind its host, and the memory that its allocator has given out; without a GPU.

Stands in for `dlbench.node.out_of_core.tiers.Calls`. Tensors lie on the CPU and computing is done at once, as nothing
notices it; copies are done as late as streams allow: when the computing stream, or the host, waits for an event behind
them. So a wait that is missing shows as bytes that are wrong, or as memory that was given away under a copy
(`violations`).

Time is simulated. The host takes none for a call, so that it is ahead of all that it orders until it waits; a stream
does one thing after the other; computing takes `drag` longer for each second in which a copy runs.

Memory is counted as torch's caching allocator counts it, in the order of the host's calls: what is freed is free for
whatever the computing stream does next, whether that stream has come so far or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dlbench.node.out_of_core.tiers import Calls

CPU = torch.device("cpu")


class GpuEvent:
    """Done when its stream has come to where it was recorded."""

    def __init__(self, gpu: StreamsGpu) -> None:
        self._gpu = gpu
        self.stream: GpuStream | None = None
        self.position = 0
        self.at_ns = 0
        self.name = "nothing"

    def record(self, stream: GpuStream) -> None:
        self.stream, self.position, self.at_ns = stream, stream.ordered, stream.free_ns
        stream.recorded += 1
        self.name = f"{stream.name} {stream.recorded}"
        self._gpu.log.append(f"event {self.name}")

    def query(self) -> bool:
        return self.at_ns <= self._gpu.host_ns

    def synchronize(self) -> None:
        self._gpu.log.append("host waits")
        self._gpu.host_ns = max(self._gpu.host_ns, self.at_ns)
        if self.stream is not None:
            self.stream.run(self.position)

    def elapsed_time(self, other: GpuEvent) -> float:
        return (other.at_ns - self.at_ns) / 1e6


class GpuStream:
    """One after the other; `free_ns` is when all that was ordered is done."""

    def __init__(self, gpu: StreamsGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.free_ns = 0
        self.recorded = 0
        self.ordered = 0
        self._done = 0
        self._work: list[Callable[[], object]] = []

    def put(self, work: Callable[[], object], duration_ns: int = 0) -> tuple[int, int]:
        """Orders work; when it begins and ends."""
        begin = max(self.free_ns, self.gpu.host_ns)
        self.free_ns = begin + duration_ns
        self._work.append(work)
        self.ordered += 1
        if self is self.gpu.compute:
            self.run(self.ordered)
        return begin, self.free_ns

    def run(self, until: int) -> None:
        """Does what was ordered first."""
        while self._done < until:
            self._done += 1
            self._work.pop(0)()

    def wait_event(self, event: GpuEvent) -> None:
        self.gpu.log.append(f"{self.name} waits for {event.name}")
        self.free_ns = max(self.free_ns, event.at_ns)
        stream, position = event.stream, event.position  # as it is now: it may be recorded again
        if stream is not None:
            self.put(lambda: stream.run(position))

    def synchronize(self) -> None:
        self.gpu.log.append("host waits")
        self.gpu.host_ns = max(self.gpu.host_ns, self.free_ns)
        self.run(self.ordered)


class StreamsGpu(Calls):
    """See above. `bytes_per_s`: of copies, each way. `drag`: of copies on computing."""

    def __init__(self, *, bytes_per_s: float = 1e9, drag: float = 0.0) -> None:
        self.host_ns = 0
        self.log: list[str] = []
        """Events, waits, copies and memory, in the order of the host's calls."""
        self.violations: list[str] = []
        self.locked: list[int] = []
        self.copied = {"out": 0, "in": 0}
        """Bytes by stream, each as it was ordered."""
        self.events = 0
        self.peak = 0
        self.compute = GpuStream(self, "compute")
        self._streams = [self.compute]
        self._current = self.compute
        self._bytes_per_s, self._drag = bytes_per_s, drag
        self._copies: list[tuple[int, int]] = []
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def new_stream(self, device: torch.device) -> GpuStream:
        self._streams.append(GpuStream(self, ("compute", "out", "in")[len(self._streams)]))
        return self._streams[-1]

    def new_event(self, timing: bool) -> GpuEvent:
        self.events += 1
        return GpuEvent(self)

    def current_stream(self, device: torch.device) -> GpuStream:
        return self._current

    @contextmanager
    def _on(self, stream: GpuStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def on(self, stream: GpuStream) -> AbstractContextManager[object]:
        return self._on(stream)

    def synchronize(self, device: torch.device) -> None:
        self.log.append("host waits")
        for stream in self._streams:
            self.host_ns = max(self.host_ns, stream.free_ns)
            stream.run(stream.ordered)

    def page_lock(self, address: int, num_bytes: int) -> int:
        self.locked.append(num_bytes)
        return 0

    def page_unlock(self, address: int) -> None:
        pass

    def on_device(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.log.append(f"memory on {self._current.name}")
        made = torch.full((num_bytes,), 0x55, dtype=torch.uint8)
        self.seen(made.untyped_storage())
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._current
        self.log.append(f"copy on {stream.name}")
        self.copied[stream.name] += target.nbytes
        here = [one.untyped_storage() for one in (target, source) if one.untyped_storage()._cdata in self._memory]
        if stream.name == "out" and not here:
            here = [source.untyped_storage()]
            self.seen(here[0])
        # A copy holds no memory: who orders it must.
        sides = [(_weak(one), one.storage_offset(), one.size()) for one in (target, source)]
        span = stream.put(lambda: self._copied(stream.name, sides), round(target.nbytes / self._bytes_per_s * 1e9))
        self._copies.append(span)

    def _copied(self, name: str, sides: list[tuple[StorageWeakRef, int, torch.Size]]) -> None:
        found = [torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak, _, _ in sides]
        if any(one is None for one in found):
            self.violations.append(f"a copy {name} found its memory given away")
            return
        target, source = (
            torch.empty(0, dtype=torch.uint8).set_(one, offset, size)
            for one, (_, offset, size) in zip(found, sides, strict=True)
        )
        target.copy_(source)

    def seen(self, storage: torch.UntypedStorage) -> None:
        """Memory of the device, from now on counted until it is freed."""
        self._memory[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.held())

    def held(self) -> int:
        """Bytes given out and not freed."""
        self._memory = {key: one for key, one in self._memory.items() if not one[0].expired()}
        return sum(num_bytes for _, num_bytes in self._memory.values())

    def busy(self, duration_ns: int) -> None:
        """Orders computing that alone takes so long."""
        begin = max(self.compute.free_ns, self.host_ns)
        taken = float(duration_ns)
        for _ in range(20):  # what it takes longer may be beside copies as well
            beside, reach = 0.0, float(begin)
            for first, last in sorted(self._copies):
                beside += max(0.0, min(last, begin + taken) - max(first, reach))
                reach = max(reach, min(last, begin + taken))
            taken = duration_ns + self._drag * beside
        self.compute.put(lambda: None, round(taken))

    def clock(self) -> Any:
        """The module `time` by the host's clock."""
        return SimpleNamespace(perf_counter=lambda: self.host_ns / 1e9, monotonic_ns=lambda: self.host_ns)


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
