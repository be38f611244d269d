"""Synthetic batches, made once in memory, to measure training without the cost of input."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from dlbench.node.data.loader import BatchSource
from dlbench.node.data.text import arranged
from dlbench.node.models.build import Batch, network_of
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec, ModelSpec

POOL_BATCHES = 4  # Distinct batches of a rank; several, so that the loss does not collapse within a few steps.


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
