"""Batches on their device: synthetic ones, made once to measure training without input, and copies ahead of time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from dlbench.node.data.loader import BatchSource
from dlbench.node.data.text import arranged
from dlbench.node.models.build import Batch, network_of
from dlbench.node.part import TrainingPart
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec, ModelSpec

POOL_BATCHES = 4  # Distinct batches of a rank; several, so that the loss does not collapse within a few steps.
Decode = Callable[[Batch], tuple[Batch, object]]
"""Decodes a batch on the device's current stream; also returns objects that must live until that is done."""

_KEY = "data.device_prefetch"


class SyntheticSource(BatchSource):
    """An endless cycle of `POOL_BATCHES` batches of random samples with random labels, which are not to be changed. A
    batch has `batch_size` different samples for each of `ranks`, those of a replica. With `voxel_counts` the device
    computes the logarithm of volumes. With `device` the pool is on it, so that steps copy no batch. `cut`
    returns the part of a batch that this rank computes.
    """

    def __init__(  # noqa: PLR0913  (each option of the data is an argument)
        self,
        model_spec: ModelSpec,
        data_spec: DataSpec,
        *,
        batch_size: int,
        ranks: Sequence[int],
        seed: int,
        start_batch: int = 0,
        pin_memory: bool = False,
        voxel_counts: bool = False,
        device: torch.device | None = None,
        cut: Callable[[Batch], Batch] = dict,
    ) -> None:
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + rank) for rank in ranks]
        pool = []
        for _ in range(POOL_BATCHES):
            batch: Batch = {}
            for generator in generators:
                rank_batch = synthetic_batch(model_spec, data_spec, batch_size, generator, voxel_counts=voxel_counts)
                for name, tensor in cut(rank_batch).items():
                    batch[name] = torch.cat([batch[name], tensor]) if name in batch else tensor
            pool.append(arranged(batch, model_spec))
        if device is not None:
            pool = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in pool]
        elif pin_memory:
            pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
        self.num_samples = POOL_BATCHES * batch_size
        self._ahead: deque[Batch] = deque()  # batches that `ahead` returned and that are not yet handed out
        self._device = next(iter(pool[0].values())).device
        self._lies_on = "host" if self._device.type == "cpu" else "device"
        self._batches: Iterator[Batch] = itertools.cycle(
            pool[start_batch % POOL_BATCHES :] + pool[: start_batch % POOL_BATCHES]
        )

    def __next__(self) -> Batch:
        return self._ahead.popleft() if self._ahead else dict(next(self._batches))

    def ahead(self) -> Batch | None:
        self._ahead.append(dict(next(self._batches)))
        return self._ahead[-1]

    def describe(self) -> dict[str, object]:
        return {
            "kind": "synthetic",
            "num_samples": self.num_samples,
            "pool_batches": POOL_BATCHES,
            "lies_on": self._lies_on,
            "bad_samples": 0,
        }

    def settings(self, spec: DataSpec) -> list[Setting]:
        if spec.synthetic_on == "host":
            return []
        evidence = f"tensors of the pool are on {self._device}"
        return [Setting(key="data.synthetic_on", requested="device", effective=self._lies_on, evidence=evidence)]


def synthetic_batch(
    model_spec: ModelSpec, data_spec: DataSpec, num: int, generator: torch.Generator, *, voxel_counts: bool = False
) -> Batch:
    """Returns `num` random samples of a model's shapes, on the CPU; with `voxel_counts`, volumes are counts."""
    return network_of(model_spec).synthetic(model_spec, data_spec, num, generator, counts=voxel_counts)


class BatchCopier(TrainingPart):
    """Copies the batches of one rank to its GPU while it computes, `prefetch` of them ahead, and keeps the host's
    memory until its copy is done. With 0, each is copied in its step, on the stream that computes. `decode` replaces
    copying.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        ahead: Callable[[], Batch | None],
        device: torch.device,
        prefetch: int,
        decode: Decode | None = None,
    ) -> None:
        self._batches, self._ahead, self._device, self._prefetch = batches, ahead, device, prefetch
        self._decode = decode
        self._stream = torch.cuda.Stream(device) if prefetch else None  # type: ignore[no-untyped-call]
        self._coming: deque[tuple[object, Batch, torch.cuda.Event | None]] = deque()
        """Source and result of each copy, and the event of its end; None if nothing was copied."""
        self._copying: deque[tuple[object, torch.cuda.Event]] = deque()  # sources that copies may still read
        self._batch: Batch = {}
        self._copies = self._copies_ahead = 0

    def fetch(self) -> None:
        """Takes the next batch; blocks until it is on the host."""
        while self._copying and self._copying[0][1].query():  # type: ignore[no-untyped-call]
            self._copying.popleft()
        self._batch = next(self._batches)

    def deliver(self) -> Batch:
        """Returns the taken batch on the device; later work of the current stream may read it."""
        batch, self._batch = self._batch, {}
        if not self._coming:
            self._copy(batch)
        source, moved, copied = self._coming.popleft()
        if copied is None:
            return moved
        compute = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            compute.wait_event(copied)
            for tensor in moved.values():
                # Its memory belongs to the copy stream, which must not reuse it before the step has ended.
                tensor.record_stream(compute)
        self._copying.append((source, copied))
        return moved

    def look_ahead(self) -> bool:
        """Starts copies of next batches; blocks until they are on the host. Returns whether there were any."""
        has_copied = False
        while len(self._coming) < self._prefetch:
            batch = self._ahead()
            if batch is None:
                break
            before = self._copies
            self._copy(batch)
            self._copies_ahead += self._copies - before
            has_copied = True
        return has_copied

    def _copy(self, host: Batch) -> None:
        if all(tensor.device == self._device for tensor in host.values()):
            self._coming.append((host, host, None))
            return
        # None: the current stream.
        with torch.cuda.stream(self._stream):
            source: object = host
            if self._decode is None:
                moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in host.items()}
            else:
                moved, decoded = self._decode(host)
                source = (host, decoded)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
        self._coming.append((source, moved, copied))
        self._copies += 1

    def settings(self) -> list[Setting]:
        if not self._copies:
            effective, evidence = None, "samples are on the GPU, so that nothing is copied"
        else:
            effective = self._prefetch if self._copies_ahead else 0
            evidence = f"{self._copies_ahead} of {self._copies} batches were copied on a separate stream"
        return [Setting(key=_KEY, requested=self._prefetch, effective=effective, evidence=evidence)]
