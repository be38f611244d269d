"""The training and the validation data of one rank, opened as its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dlbench.datasets.shuffling import ownership_for
from dlbench.datasets.splits import train_folder
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.delivery import Delivery
from dlbench.node.data.loader import BatchSource, EvaluationSource, LoadedSource
from dlbench.node.data.one_lister import Lister
from dlbench.node.data.rank_reader import RankReading, planned_readers
from dlbench.node.data.read_audit import ReadAudit
from dlbench.node.data.reader import DataReader
from dlbench.node.data.sample_exchange import AwaitingReader, SampleExchange
from dlbench.node.data.sharding import HeldOrder, Position, ShardedOrder
from dlbench.node.data.source import open_reader, validation_path
from dlbench.node.data.staging import StagedData
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.data.text import arranged
from dlbench.node.part import Batch
from dlbench.node.rendezvous import own_address
from dlbench.node.training.checkpoint import Progress
from dlbench.node.training.context import RankContext
from dlbench.node.training.staging import Staging
from dlbench.specs.workload import ModelSpec

PATIENCE = 0.8  # Of the stall time-out: how long a sample of another rank is waited for, so that it can be named.


def steps_before(context: RankContext, progress: Progress | None) -> int:
    """Returns the steps done before this run, counted as if they had been taken with the global batch of its plan."""
    return round(progress.samples / context.plan.global_batch) if progress else 0


def reading_of(context: RankContext) -> RankReading | None:
    """Returns how this rank reads, which ranks settle when the data is opened; None where nothing is read."""
    data = context.plan.workload.data
    if data.is_synthetic:
        return None
    return RankReading(
        data,
        cores=context.plan.layout.cores_per_rank,
        is_node_first=context.place.local_rank == 0,
        ranks=context.engine,
        device=context.device,
        beat=context.beat,
    )


def open_training_data(
    context: RankContext, progress: Progress | None, staging: Staging | None, reading: RankReading | None = None
) -> BatchSource:
    """Opens the training data of this rank, from where a checkpoint's `progress` says that training goes on.

    The same seed gives the same samples in the same order and with the same augmentation, whatever the number of loader
    processes. The ranks of a replica read the same samples, a batch for each of them. `reading` settles readers and
    page cache with the other ranks; without one the plan gives the readers in numbers.
    """
    _require_device(context)
    plan, train, replica = context.plan, context.plan.workload.train, context.replica
    data, staged = plan.workload.data, staging.data if staging is not None else None
    model = plan.workload.model.captured(data) if train.cuda_graphs != "none" else plan.workload.model
    if data.is_synthetic:
        return SyntheticSource(
            model,
            data,
            batch_size=train.batch_per_rank,
            ranks=replica.ranks,
            seed=train.seed,
            start_batch=steps_before(context, progress),
            pin_memory=context.on_gpu,
            counts=data.keeps_counts(on_gpu=context.on_gpu),
            device=context.device if data.synthetic_on == "device" else None,
        )
    folder = train_folder(Path(data.source)) if staged is None else staged.train_source()
    reader = _open(context, model, folder, "training")
    if staged is not None:
        reader = staged.reader(reader, context.place.rank)
    start, batch_size = progress.position if progress else Position(), train.batch_per_rank * len(replica.ranks)
    order = _order(context, reader.num_samples, batch_size, start)
    audit = ReadAudit(
        order, num_samples=reader.num_samples, ranks=replica.replicas, labels=reader.labels(), start=start
    )
    readers = planned_readers(data) if reading is None else reading.settle(reader, order, batch_size)
    exchange = None
    if isinstance(order, HeldOrder) and order.ownership.slots:
        exchange, reader = _exchange(context, order, reader, staged, start)
    try:
        return LoadedSource(
            reader,
            order,
            loader_workers=readers.loader_workers,
            prefetch_batches=max(1, readers.prefetch_batches),
            on_bad_sample=data.on_bad_sample,
            # Without page-locked memory a copy to the GPU cannot run alongside computation. What a GPU decodes is read
            # on the host first, and its length is not known beforehand.
            pin_memory=context.on_gpu and data.reader == "dlbench",
            in_slots=data.reader == "dlbench",
            is_held=data.staging == "shard",
            audit=audit,
            exchange=exchange,
            # Where each epoch begins with a cold cache nothing may be read ahead across its border.
            epoch_by_epoch=reading is not None and data.cache == "cold",
            arrange=partial(arranged, model=model, num_parts=train.gradient_accumulation),
        )
    except BaseException:
        if exchange is not None:
            exchange.close()
        raise


def _require_device(context: RankContext) -> None:
    """Proves that the device can do what the plan asks of its input."""
    data = context.plan.workload.data
    if context.on_gpu:
        if data.reader == "nvimagecodec":
            from dlbench.node.data.images import nvimagecodec

            nvimagecodec()
        return
    if data.reader == "nvimagecodec":
        raise EnvironmentLacksError(
            "data.reader is nvimagecodec, but this rank computes on its CPU: set data.reader to dlbench"
        )
    if data.device_prefetch > 1:
        raise EnvironmentLacksError(
            f"data.device_prefetch is {data.device_prefetch}, but this rank computes on its CPU, where nothing is "
            "copied"
        )
    if data.is_synthetic and data.synthetic_on == "device" and context.device.type == "cpu":
        raise EnvironmentLacksError(
            "data.synthetic_on device: this rank computes on its CPU, where samples lie in its memory anyway; use host"
        )


def _open(context: RankContext, model: ModelSpec, folder: Path, split: Literal["training", "evaluation"]) -> DataReader:
    """Opens one split of the data, which the ranks of a node list once for all of them."""
    place, workload = context.place, context.plan.workload
    lister = Lister(
        name=f"{place.token} {place.node_rank} {split}",
        first_rank=place.rank - place.local_rank,
        local_rank=place.local_rank,
        local_size=place.local_size,
        timeout_s=context.plan.measure.stall_timeout_s,
    )
    return open_reader(
        folder,
        model,
        workload.data,
        workload.train.seed,
        training=split == "training",
        lister=lister,
        counts=workload.data.keeps_counts(on_gpu=context.on_gpu),
    )


def _order(context: RankContext, num_samples: int, batch_size: int, start: Position) -> ShardedOrder:
    """Returns which samples this rank reads when: of those that it holds, or of all."""
    seed, replica = context.plan.workload.train.seed, context.replica
    ownership = ownership_for(context.plan.workload.data, num_samples, replica.replicas, seed=seed)
    if ownership is not None:
        return HeldOrder(ownership, batch_size=batch_size, rank=replica.number, start=start)
    return ShardedOrder(
        num_samples, batch_size=batch_size, rank=replica.number, world_size=replica.replicas, seed=seed, start=start
    )


def _exchange(
    context: RankContext, order: HeldOrder, reader: DataReader, staged: StagedData | None, start: Position
) -> tuple[SampleExchange, DataReader]:
    """Begins the exchange of samples between ranks; returns it with a reader that waits for what it brings."""
    plan, place = context.plan, context.place
    if reader.num_bytes(0) == 0:
        raise UserError(
            f"data.shuffle {plan.workload.data.shuffle}: of this data every rank holds all in memory, so there is "
            "nothing to exchange; set data.shuffle to global or local"
        )
    assert staged is not None  # a plan with partial shuffling has staging shard
    store = staged.store(place.rank)
    exchange = SampleExchange(
        order.ownership,
        context.replica.number,
        store,
        batches_per_epoch=order.batches_per_epoch,
        address=own_address(place.num_nodes == 1, plan.system.launch.interface),
        first_epoch=start.epoch,
    )
    try:
        exchange.connect(context.engine.gather)
    except BaseException:
        exchange.close()
        raise
    order.on_batch = exchange.dealt
    return exchange, AwaitingReader(reader, store, patience_s=plan.measure.stall_timeout_s * PATIENCE)


def open_validation_data(
    context: RankContext, staging: Staging | None, reading: RankReading | None = None
) -> EvaluationSource:
    """Opens the validation data of this rank, without augmentation, with the readers that `reading` has settled."""
    workload, replica = context.plan.workload, context.replica
    data, train, quality = workload.data, workload.train, workload.quality
    staged = staging.data.validation_source() if staging is not None else None
    reader = _open(context, workload.model, staged or validation_path(data), "evaluation")
    readers = planned_readers(data) if reading is None else reading.readers
    most = (quality.evaluate_samples if quality else None) or reader.num_samples
    return EvaluationSource(
        reader,
        num_samples=min(reader.num_samples, most),
        # No gradients are kept, so what fits training fits here.
        batch_size=train.batch_per_rank * len(replica.ranks) // train.gradient_accumulation,
        rank=replica.number,
        world_size=replica.replicas,
        loader_workers=readers.loader_workers,
        prefetch_batches=max(1, readers.prefetch_batches),
        on_bad_sample=data.on_bad_sample,
        pin_memory=context.on_gpu,
    )


def delivery_of(context: RankContext, batches: Iterator[Batch], source: BatchSource) -> Delivery | None:
    """Returns what brings batches to a GPU; on a CPU there is nothing to copy."""
    if not context.on_gpu:
        return None
    workload, decode = context.plan.workload, None
    if workload.data.reader == "nvimagecodec":
        from dlbench.node.data.images import RegionDecoder

        network: Any = workload.model  # of images, by the workload's validators
        is_whole = workload.data.decode == "full"
        decode = RegionDecoder(context.device, network.image_size, is_whole=is_whole, name=source.sample_name)
    return Delivery(batches, source.ahead, context.device, workload.data.device_prefetch, decode)
