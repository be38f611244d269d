"""Batches made once in memory: what training costs when input costs nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from dlbench.node.data.loader import BatchSource
from dlbench.node.data.text import arranged
from dlbench.node.models.build import Batch, network_of
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec, ModelSpec

POOL_BATCHES = 4  # distinct batches of a rank; more than one, so that a loss cannot collapse within a few steps


class SyntheticSource(BatchSource):
    """An endless cycle of `POOL_BATCHES` batches.

    Tensors are handed out again and again: the caller must not change them in place. Values are random and have the
    form and statistics of prepared data; labels are random, so that there is nothing to learn but the pool itself.
    `batch_size`: samples of a batch for each of `ranks`, of which one draws other samples than another from the same
    seed: those of a replica read the samples of all, and count their own. `pin_memory`: keep the pool in page-locked
    memory (needs a GPU). `counts`: volumes stay counts, of which the device takes the logarithm. `device`: keep the
    pool there instead, so that no batch is copied in a step; None: in the host's memory.
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
        counts: bool = False,
        device: torch.device | None = None,
    ) -> None:
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + rank) for rank in ranks]
        pool = []
        for _ in range(POOL_BATCHES):
            rank_batches = [
                synthetic_batch(model_spec, data_spec, batch_size, generator, counts=counts) for generator in generators
            ]
            batch = (
                {name: torch.cat([part[name] for part in rank_batches]) for name in rank_batches[0]}
                if rank_batches[1:]
                else rank_batches[0]
            )
            pool.append(arranged(batch, model_spec))
        if device is not None:
            pool = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in pool]
        elif pin_memory:
            pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
        self.num_samples = POOL_BATCHES * batch_size
        self._looked: deque[Batch] = deque()
        self._device = next(iter(pool[0].values())).device
        self._lies_on = "host" if self._device.type == "cpu" else "device"
        self._batches: Iterator[Batch] = itertools.cycle(
            pool[start_batch % POOL_BATCHES :] + pool[: start_batch % POOL_BATCHES]
        )

    def __next__(self) -> Batch:
        return self._looked.popleft() if self._looked else dict(next(self._batches))

    def ahead(self) -> Batch | None:
        self._looked.append(dict(next(self._batches)))
        return self._looked[-1]

    def describe(self) -> dict[str, object]:
        return {
            "kind": "synthetic",
            "num_samples": self.num_samples,
            "pool_batches": POOL_BATCHES,
            "lies_on": self._lies_on,
            "bad_samples": 0,
        }

    def settings(self, spec: DataSpec) -> list[Setting]:
        """Returns where samples were requested and are; none if on the host."""
        if spec.synthetic_on == "host":
            return []
        evidence = f"tensors of the pool lie on {self._device}"
        return [Setting(key="data.synthetic_on", requested="device", effective=self._lies_on, evidence=evidence)]


def synthetic_batch(
    model_spec: ModelSpec, data_spec: DataSpec, num: int, generator: torch.Generator, *, counts: bool = False
) -> Batch:
    """`num` made samples of the shapes that a model takes, on the CPU; `counts`: volumes are counts."""
    return network_of(model_spec).synthetic(model_spec, data_spec, num, generator, counts=counts)
