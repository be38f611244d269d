"""Batches made once in memory: what training costs when input costs nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch

from dlbench.node.data.loader import EpochReads
from dlbench.node.data.read_audit import ReadAudit
from dlbench.node.data.reader import ReadSpan
from dlbench.node.data.sample_exchange import SampleExchange
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.data.text import arranged
from dlbench.node.models.build import network_of
from dlbench.records.record import Setting
from dlbench.specs.workload import DataSpec, ModelSpec

Batch = dict[str, torch.Tensor]
POOL_BATCHES = 4
"""Distinct batches of a rank; more than one, so that a loss cannot collapse within a few steps."""


class SyntheticSource:
    """An endless cycle of `POOL_BATCHES` batches; see `dlbench.node.data.source.BatchSource`.

    Tensors are handed out again and again: the caller must not change them in place. Values are random and have the
    form and statistics of prepared data; labels are random, so that there is nothing to learn but the pool itself.

    Args:
        model_spec: gives the shapes.
        data_spec: gives sequence_length and max_predictions of text.
        batch_size: samples of a batch.
        rank: ranks draw differently from the same seed.
        seed: of all values.
        start_batch: batches to pass over.
        pin_memory: keep the pool in page-locked memory (needs a GPU).
        counts: volumes stay counts, of which the device takes the logarithm.
        device: keep the pool there instead, so that no batch is copied in a step; None: in the host's memory.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        data_spec: DataSpec,
        *,
        batch_size: int,
        rank: int,
        seed: int,
        start_batch: int = 0,
        pin_memory: bool = False,
        counts: bool = False,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        made = (
            synthetic_batch(model_spec, data_spec, batch_size, generator, counts=counts) for _ in range(POOL_BATCHES)
        )
        pool = [arranged(batch, model_spec) for batch in made]
        if device is not None:
            pool = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in pool]
        elif pin_memory:
            pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
        self.failures: list[str] = []
        self.order: ShardedOrder | None = None
        self.audit: ReadAudit | None = None
        self.exchange: SampleExchange | None = None
        self._batch_size = batch_size
        self._looked: deque[Batch] = deque()
        self._device = next(iter(pool[0].values())).device
        self._lies_on = "host" if self._device.type == "cpu" else "device"
        self._batches: Iterator[Batch] = itertools.cycle(
            pool[start_batch % POOL_BATCHES :] + pool[: start_batch % POOL_BATCHES]
        )

    @property
    def num_samples(self) -> int:
        """Distinct samples of this rank."""
        return POOL_BATCHES * self._batch_size

    def sample_name(self, index: int) -> str:
        """Made samples have no name."""
        return f"sample {index}"

    def recent_reads(self) -> list[ReadSpan]:
        """Nothing is read."""
        return []

    @property
    def is_between_epochs(self) -> bool:
        """Never: it has no epochs."""
        return False

    def begin_epoch(self) -> None:
        """Nothing is read."""

    def epoch_reads(self) -> list[EpochReads]:
        """Nothing is read."""
        return []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch of the pool: the same tensors every `POOL_BATCHES` batches."""
        return self._looked.popleft() if self._looked else dict(next(self._batches))

    def ahead(self) -> Batch | None:
        """The batch after those that were handed out or looked at."""
        self._looked.append(dict(next(self._batches)))
        return self._looked[-1]

    def describe(self) -> dict[str, object]:
        """The kind of source and the size of its pool, ready for JSON."""
        return {
            "kind": "synthetic",
            "num_samples": self.num_samples,
            "pool_batches": POOL_BATCHES,
            "lies_on": self._lies_on,
            "bad_samples": 0,
        }

    def settings(self, spec: DataSpec) -> list[Setting]:
        """Where samples were to lie and lay; nothing where that is the host, as it comes."""
        if spec.synthetic_on == "host":
            return []
        evidence = f"tensors of the pool lie on {self._device}"
        return [Setting(key="data.synthetic_on", requested="device", effective=self._lies_on, evidence=evidence)]

    def close(self) -> None:
        """Nothing is open."""


def synthetic_batch(
    model_spec: ModelSpec, data_spec: DataSpec, num: int, generator: torch.Generator, *, counts: bool = False
) -> Batch:
    """`num` made samples of the shapes that a model takes, on the CPU; `counts`: volumes are counts."""
    return network_of(model_spec).synthetic(model_spec, data_spec, num, generator, counts=counts)
