"""The data of one rank among others, opened as training opens it; places of ranks; readers of numbered samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.datasets.staging.samples import SampleStore
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.reader import BadSampleError, DataReader, PreparedSample, Raw
from dlbench.node.data.sharding import Key, Position
from dlbench.node.ranks import RankPlace
from dlbench.node.training.context import RankContext
from dlbench.node.training.input_data import open_training_data
from dlbench.specs.workload import DataSpec, ModelSpec
from tests.support.one_rank import CPU, context_of
from tests.support.run_factory import plans


def rank_place(
    rank: int = 0, size: int = 1, per_node: int | None = None, *, host: str | None = None, token: str = "t"
) -> RankPlace:
    """Where every node has `per_node` ranks, by default all; hosts are n0, n1, ... unless one is named."""
    local = per_node or size
    node = rank // local
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=rank % local,
        local_size=local,
        node_rank=node,
        num_nodes=-(-size // local),
        host=host or f"n{node}",
        token=token,
    )


def number_bytes(index: int) -> bytes:
    """What is stored of a sample: longer for some than for others."""
    return str(index).encode() * (1 + index % 7)


class NumberReader(DataReader):
    """Samples with their number in them, of four classes in the order of storage; some may be unreadable."""

    def __init__(self, num_samples: int, bad: frozenset[int] = frozenset()) -> None:
        self.num_samples, self._bad = num_samples, bad

    def fetch(self, index: int, out: object = None) -> Raw:
        if index in self._bad:
            raise BadSampleError(f"{self.name(index)}: unreadable")
        return Raw(number_bytes(index))

    def prepare(self, key: Key, data: bytes, out: object = None) -> PreparedSample:
        assert data == number_bytes(key[1])
        return PreparedSample({"number": np.array(key[1])})

    def num_bytes(self, index: int) -> int:
        return len(number_bytes(index))

    def labels(self) -> NDArray[np.int32] | None:
        return (np.arange(self.num_samples, dtype=np.int32) * 4) // self.num_samples

    def name(self, index: int) -> str:
        return f"number {index}"

    def files(self) -> list[Path]:
        return []

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


class StoreReader(NumberReader):
    """The same from a store."""

    def __init__(self, store: SampleStore) -> None:
        super().__init__(1000)
        self._store = store

    def fetch(self, index: int, out: object = None) -> Raw:
        data = self._store.get(index)
        if data is None:
            raise BadSampleError(f"{self.name(index)}: not there")
        return Raw(data, "local")


def data_context(
    model: ModelSpec,
    data: DataSpec,
    *,
    batch_size: int = 2,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    device: torch.device = CPU,
    token: str | None = None,
    patience_s: float = 60.0,
) -> RankContext:
    """`token`: of ranks that list the data once for all of them; None: each lists it for itself."""
    overrides: dict[str, Any] = {
        "train.batch_per_rank": batch_size,
        "train.seed": seed,
        "measure.stall_timeout_s": patience_s,
    }
    (plan,) = plans(points=(world_size,), repeats=1, engine="ddp", overrides=overrides)
    workload = plan.workload.model_copy(update={"model": model, "data": data})
    place = rank_place(rank, world_size, world_size if token else 1, token=token or "t")
    return context_of(plan.model_copy(update={"workload": workload}), device=device, place=place)


def training_data(
    model: ModelSpec, data: DataSpec, *, start: Position | None = None, start_batch: int = 0, **about: Any
) -> BatchSource:
    """`start`: where to begin in the data set; `start_batch`: batches of this rank that were trained before."""
    context = data_context(model, data, **about)
    progress: Any = SimpleNamespace(samples=start_batch * context.plan.global_batch, position=start or Position())
    return open_training_data(context, progress, None)
