"""A data specification becomes an endless stream of training batches, and passes over the validation data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlbench.datasets.images.image_set import IMAGENET, IMAGENET_CLASSES
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.recognition import account_for
from dlbench.datasets.shuffling import ownership_for
from dlbench.datasets.splits import NAMES, train_folder, validation_folder
from dlbench.datasets.volumes import PUBLIC
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.loader import BatchSource, EvaluationSource, LoadedSource
from dlbench.node.data.one_lister import ALONE, Lister
from dlbench.node.data.rank_reader import RankReading, planned_readers
from dlbench.node.data.read_audit import ReadAudit
from dlbench.node.data.reader import SampleReader
from dlbench.node.data.reader_trials import Readers
from dlbench.node.data.sample_exchange import AwaitingReader, ExchangeEndpoint, SampleExchange
from dlbench.node.data.sharding import HeldOrder, Position, ShardedOrder
from dlbench.node.data.staging import StagedData
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.data.text import arranged
from dlbench.specs.workload import DataSpec, DensityData, ImageData, ModelSpec, TextData


def build_source(
    model_spec: ModelSpec,
    data_spec: DataSpec,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    start: Position | None = None,
    start_batch: int = 0,
    counts: bool = False,
    staged: StagedData | None = None,
    endpoint: ExchangeEndpoint | None = None,
    lister: Lister = ALONE,
    reading: RankReading | None = None,
    num_parts: int = 1,
    device: torch.device | None = None,
    ranks_per_replica: int = 1,
) -> BatchSource:
    """The training data of one rank.

    The same seed gives the same samples in the same order and with the same augmentation, whatever the number of loader
    processes. `start`: where to begin in the data set; `start_batch`: in synthetic data, batches of this rank.
    `counts`: hand out volumes as counts, of which the device takes the logarithm. `staged`: what of the data set is on
    this node. `endpoint`: how samples are exchanged under partial shuffling. `lister`: through which the ranks of a
    node list the data set once. `num_parts`: in which each batch is computed. `reading`: settles readers and page cache
    with the other ranks; None: the specification gives the readers in numbers. `ranks_per_replica`: neighbouring ranks
    that read the same, `batch_size` samples for each of them.
    """
    # Without page-locked memory a copy to the GPU cannot run alongside computation.
    on_gpu = device is not None and device.type == "cuda"
    if data_spec.is_synthetic:
        first_rank = rank - rank % ranks_per_replica
        return SyntheticSource(
            model_spec,
            data_spec,
            batch_size=batch_size,
            ranks=range(first_rank, first_rank + ranks_per_replica),
            seed=seed,
            start_batch=start_batch,
            pin_memory=on_gpu,
            counts=counts,
            device=_device_of_samples(data_spec, device),
        )
    opened = partial(open_reader, model_spec=model_spec, data_spec=data_spec, seed=seed, training=True, counts=counts)
    reader = opened(train_folder(Path(data_spec.source)) if staged is None else staged.train_source(), lister=lister)
    if staged is not None:
        reader = staged.reader(reader, rank)
    batch_size *= ranks_per_replica
    rank //= ranks_per_replica
    world_size //= ranks_per_replica
    ownership = ownership_for(data_spec, reader.num_samples, world_size, seed=seed)
    order: ShardedOrder
    if ownership is not None:
        order = HeldOrder(ownership, batch_size=batch_size, rank=rank, start=start)
    else:
        order = ShardedOrder(
            reader.num_samples, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed, start=start
        )
    audit = ReadAudit(
        order, num_samples=reader.num_samples, ranks=world_size, labels=reader.labels(), start=start or Position()
    )
    readers = planned_readers(data_spec) if reading is None else reading.settle(reader, order, batch_size)
    exchange = None
    if isinstance(order, HeldOrder) and order.ownership.slots:
        exchange, reader = _exchange(order, reader, data_spec, rank, endpoint, start or Position())
    try:
        return LoadedSource(
            reader,
            order,
            loader_workers=readers.loader_workers,
            prefetch_batches=max(1, readers.prefetch_batches),
            on_bad_sample=data_spec.on_bad_sample,
            # What a GPU decodes is read on the host first, and its length is not known beforehand.
            pin_memory=on_gpu and data_spec.reader == "dlbench",
            in_slots=data_spec.reader == "dlbench",
            is_held=data_spec.staging == "shard",
            audit=audit,
            exchange=exchange,
            epoch_by_epoch=reading is not None and reading.is_epoch_by_epoch,
            arrange=partial(arranged, model=model_spec, num_parts=num_parts),
        )
    except BaseException:
        if exchange is not None:
            exchange.close()
        raise


def _exchange(
    order: HeldOrder,
    reader: SampleReader,
    data: DataSpec,
    rank: int,
    endpoint: ExchangeEndpoint | None,
    start: Position,
) -> tuple[SampleExchange, SampleReader]:
    """The exchange, begun, and a reader that waits for what it brings."""
    if reader.num_bytes(0) == 0:
        raise UserError(
            f"data.shuffle {data.shuffle}: of this data every rank holds all in memory, so there is nothing to "
            "exchange; set data.shuffle to global or local"
        )
    assert endpoint is not None  # a plan with partial shuffling has staging shard
    exchange = SampleExchange(
        order.ownership,
        rank,
        endpoint.store,
        batches_per_epoch=order.batches_per_epoch,
        address=endpoint.address,
        first_epoch=start.epoch,
    )
    try:
        exchange.connect(endpoint.gather)
    except BaseException:
        exchange.close()
        raise
    order.on_batch = exchange.dealt
    return exchange, AwaitingReader(reader, endpoint.store, patience_s=endpoint.patience_s)


def open_training(model_spec: ModelSpec, data_spec: DataSpec, seed: int) -> SampleReader:
    """A reader of the training data where it lies; errors as of `build_source`."""
    return open_reader(train_folder(Path(data_spec.source)), model_spec, data_spec, seed, training=True, lister=ALONE)


def validation_path(data_spec: DataSpec) -> Path:
    """Where the validation data of a plan is."""
    if data_spec.validation is not None:
        path = Path(data_spec.validation)
        return validation_folder(path) or path
    found = validation_folder(Path(data_spec.source))
    if found is None:
        raise UserError(
            f"data.source {data_spec.source!r} has no validation data: put `train` and `validation` into one folder, "
            "or give data.validation"
        )
    return found


def build_evaluation(
    model_spec: ModelSpec,
    data_spec: DataSpec,
    *,
    max_samples: int | None,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    pin_memory: bool = False,
    counts: bool = False,
    staged: StagedData | None = None,
    lister: Lister = ALONE,
    readers: Readers | None = None,
) -> EvaluationSource:
    """The validation data of one rank, without augmentation.

    `max_samples`: evaluate that many samples at most, over all ranks. `seed`: of masks that are drawn once. `readers`:
    those of training; None: as the specification says, in numbers.
    """
    folder = (staged.validation_source() if staged is not None else None) or validation_path(data_spec)
    reader = open_reader(folder, model_spec, data_spec, seed, training=False, lister=lister, counts=counts)
    readers = planned_readers(data_spec) if readers is None else readers
    return EvaluationSource(
        reader,
        num_samples=min(reader.num_samples, max_samples or reader.num_samples),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        loader_workers=readers.loader_workers,
        prefetch_batches=max(1, readers.prefetch_batches),
        on_bad_sample=data_spec.on_bad_sample,
        pin_memory=pin_memory,
    )


def _device_of_samples(spec: DataSpec, device: torch.device | None) -> torch.device | None:
    if spec.synthetic_on == "host":
        return None
    if device is None or device.type == "cpu":
        raise EnvironmentLacksError(
            "data.synthetic_on device: this rank computes on its CPU, where samples lie in its memory anyway; use host"
        )
    return device


def open_reader(
    folder: Path,
    model_spec: ModelSpec,
    data_spec: DataSpec,
    seed: int,
    *,
    training: bool,
    lister: Lister = ALONE,
    counts: bool = False,
) -> SampleReader:
    """The reader of one split."""
    if data_spec.format not in model_spec.formats:
        raise UserError(f"data.format {data_spec.format!r} does not fit model.family {model_spec.family!r}")
    # Each format's libraries are imported only where it is read.
    network: Any = model_spec  # has the sizes that its formats of data are read in
    if isinstance(data_spec, ImageData):
        from dlbench.node.data.images import image_classes, open_images

        # A validation tree may lack a class; its labels are still those of the training data.
        classes = None if training else image_classes(train_folder(Path(data_spec.source)), lister)
        return open_images(
            folder,
            network,
            seed,
            training=training,
            classes=classes,
            lister=lister,
            decoding=data_spec.decode,
            by_gpu=training and data_spec.reader == "nvimagecodec",
        )
    if isinstance(data_spec, TextData):
        from dlbench.node.data.text import open_text

        return open_text(folder, network, data_spec, seed, training=training, lister=lister)
    from dlbench.node.data.density import open_density

    return open_density(folder, network, training=training, lister=lister, counts=counts)


_PUBLIC_VOLUME = [128, 128, 128, 4]  # shape of a sample of cosmoUniverse


def data_set(spec: DataSpec, described: Mapping[str, object]) -> dict[str, str]:
    """The name of the training data, for the record.

    Returns `made_by` and `set_sha256` (of the manifest's list of files) where dlbench made the set, all of which is
    there; `public_set` where the counts are those of a public one; empty where neither is so.
    """
    if spec.is_synthetic:
        return {}
    source, manifest = Path(spec.source), None
    with suppress(UserError):  # one that cannot be read counts as none
        manifest = read_manifest(source)
        if manifest is None and source.name in NAMES["train"]:
            manifest = read_manifest(source.parent)
    # A set of text is counted in documents.
    if manifest is not None and manifest.counts.get("train") == described.get("documents", described["num_samples"]):
        return {"made_by": "dlbench", "set_sha256": manifest.files_sha256}
    num = described["num_samples"]
    if isinstance(spec, ImageData) and (num, described.get("classes")) == (IMAGENET["train"], IMAGENET_CLASSES):
        return {"public_set": "ImageNet-2012"}
    is_volume = isinstance(spec, DensityData) and described.get("shape") == _PUBLIC_VOLUME
    return {"public_set": "cosmoUniverse"} if is_volume and num in PUBLIC["train"] else {}


def files_account(spec: DataSpec) -> dict[str, object]:
    """Returns which files of the data set are read and which are not, for the record; empty where that is not known."""
    with suppress(UserError, OSError):  # the source may have gone since it was read
        account = account_for(spec)
        if account is not None:
            return {"account": account.as_json()}
    return {}
