"""A data specification becomes an endless stream of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from dlbench.errors import UserError
from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.reader import SampleReader
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.specs.workload import (
    BertModel,
    CosmoFlowModel,
    DataSpec,
    DensityData,
    JpegTreeData,
    ModelSpec,
    ResNetModel,
    TextData,
)


class BatchSource(Protocol):
    """Batches of one rank on the CPU, without end: epochs follow each other.

    The names and shapes in a batch are those of `dlbench.node.models.build.Batch`.
    """

    failures: list[str]
    """File and reason of each unreadable sample met so far; a file met twice is there twice."""

    @property
    def num_samples(self) -> int:
        """Samples in the data set, or in a synthetic pool."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Itself."""

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch.

        Raises:
            UserError: a sample is unreadable and data.on_bad_sample is stop.
            RunError: a loader process died, or the source is closed.
        """

    def describe(self) -> dict[str, object]:
        """What was read and what went wrong, for the record; ready for JSON, also after `close`."""

    def close(self) -> None:
        """Ends loader processes and closes files."""


def build_source(
    model_spec: ModelSpec,
    data_spec: DataSpec,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    drop_last: bool = True,
    start_batch: int = 0,
    pin_memory: bool = False,
) -> BatchSource:
    """The source of one rank.

    The same seed gives the same samples in the same order and with the same augmentation, whatever the number of
    loader processes.

    Args:
        model_spec: of the workload; gives the shapes.
        data_spec: of the workload; must fit the model.
        batch_size: samples of this rank in one batch.
        rank: this rank's number.
        world_size: ranks in all.
        seed: of order and augmentation; the same on all ranks.
        drop_last: see `ShardedOrder`.
        start_batch: batches of this rank to pass over, for a run that continues another.
        pin_memory: hand out page-locked tensors, whose copy to a GPU does not hold up the host (needs a GPU).

    Raises:
        UserError: the data set is missing, empty, damaged, too small, or does not fit the model.
    """
    if data_spec.is_synthetic:
        return SyntheticSource(
            model_spec,
            data_spec,
            batch_size=batch_size,
            rank=rank,
            seed=seed,
            start_batch=start_batch,
            pin_memory=pin_memory,
        )
    reader = _reader(model_spec, data_spec, seed)
    order = ShardedOrder(
        reader.num_samples,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        drop_last=drop_last,
    )
    return LoadedSource(
        reader,
        order,
        loader_workers=data_spec.loader_workers,
        on_bad_sample=data_spec.on_bad_sample,
        start_batch=start_batch,
        pin_memory=pin_memory,
    )


def _reader(model_spec: ModelSpec, data_spec: DataSpec, seed: int) -> SampleReader:
    # Each format's libraries are imported only where it is read.
    folder = Path(data_spec.source).expanduser()
    if isinstance(data_spec, JpegTreeData) and isinstance(model_spec, ResNetModel):
        return _jpeg(folder, model_spec, seed)
    if isinstance(data_spec, TextData) and isinstance(model_spec, BertModel):
        return _text(folder, model_spec, data_spec, seed)
    if isinstance(data_spec, DensityData) and isinstance(model_spec, CosmoFlowModel):
        return _density(folder, model_spec)
    raise UserError(f"data.format {data_spec.format!r} does not fit model.family {model_spec.family!r}")


def _jpeg(folder: Path, model: ResNetModel, seed: int) -> SampleReader:
    from dlbench.datasets.jpeg_tree import index_jpeg_tree
    from dlbench.node.data.jpeg import JpegReader

    tree = index_jpeg_tree(folder)
    if len(tree.classes) > model.num_classes:
        raise UserError(
            f"data.source {str(folder)!r} has {len(tree.classes)} classes, model.num_classes is {model.num_classes}"
        )
    return JpegReader(tree, model.image_size, seed)


def _text(source: Path, model: BertModel, spec: TextData, seed: int) -> SampleReader:
    from dlbench.datasets.text_corpus import read_corpus
    from dlbench.datasets.vocabulary import load_vocabulary
    from dlbench.node.data.text import TextReader

    vocabulary = load_vocabulary(spec.vocabulary)
    if len(vocabulary) > model.vocab_size:
        raise UserError(
            f"data.vocabulary {spec.vocabulary} has {len(vocabulary)} entries, model.vocab_size is {model.vocab_size}"
        )
    return TextReader(read_corpus(source, vocabulary), spec, seed)


def _density(folder: Path, model: CosmoFlowModel) -> SampleReader:
    from dlbench.datasets.density_hdf5 import index_density
    from dlbench.node.data.density import VolumeReader

    index = index_density(folder)
    for key, stored in (
        ("input_size", index.size),
        ("input_channels", index.channels),
        ("num_targets", index.num_targets),
    ):
        if stored != getattr(model, key):
            raise UserError(f"data.source {str(folder)!r} has {key} {stored}, model.{key} is {getattr(model, key)}")
    return VolumeReader(index)
