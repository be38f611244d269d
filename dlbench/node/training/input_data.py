"""The training and the validation data of one rank: staged over all nodes, then opened as its plan says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dlbench.datasets.shuffling import ownership_for
from dlbench.datasets.splits import train_folder
from dlbench.errors import EnvironmentLacksError, PeerLostError, UserError
from dlbench.node.data.loader import BatchSource, EvaluationSource, LoadedSource
from dlbench.node.data.node_sharing import IndexBroadcast
from dlbench.node.data.rank_reader import RankReading, planned_readers
from dlbench.node.data.reader import DataReader
from dlbench.node.data.sample_exchange import AwaitingReader, SampleExchange
from dlbench.node.data.sharding import HeldOrder, Position, ReadAudit, ShardedOrder
from dlbench.node.data.source import open_reader, open_training, validation_path
from dlbench.node.data.staging import NodeStaging, Parts, StagedData
from dlbench.node.data.synthetic import BatchCopier, SyntheticSource
from dlbench.node.data.text import arranged
from dlbench.node.models.cosmoflow import slab
from dlbench.node.part import Batch, TrainingPart
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import own_address
from dlbench.node.training.checkpoint import Progress
from dlbench.node.training.context import RankContext
from dlbench.records.data_path import StagingResult
from dlbench.records.record import RankResult, RankSummary, StagingSummary
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import ModelSpec

PATIENCE = 0.8  # Share of the stall timeout that a rank waits for a sample of another, so that the error can name it.
_PERIOD_S = 0.5  # Seconds between two comparisons of progress while data is staged.


@dataclass(kw_only=True)
class Staging(TrainingPart):
    """The staging of a run, as one rank sees it."""

    plan: RunPlan
    data: StagedData
    seconds: float  # Time until all nodes were ready.
    verification_text: str  # Recorded: "SHA-256 of ..." or "size and time of ..." (replicate), else "CRC-32 of ...".
    node: NodeStaging | None  # On the first rank of each node, else None.
    node_warnings: list[str] = field(default_factory=list)  # On the first rank of each node, else empty.

    @property
    def early_warnings(self) -> list[str]:
        return self.node_warnings

    def summary(self, result: RankResult) -> dict[str, Any]:
        if self.node is None:
            return {}
        node, warnings = self.node.finished()
        return {"staging": StagingSummary(node=node, warnings=tuple(warnings))}

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        data = self.plan.workload.data
        nodes = [rank.staging.node for rank in summaries if rank.staging is not None and rank.staging.node is not None]
        method = "on first read" if data.staging == "lazy" else "copy"
        result = StagingResult(
            strategy=data.staging,
            tier=data.staging_tier,
            method=method,
            streams=data.staging_streams,
            seconds=self.seconds,
            nodes=tuple(nodes),
            verified=self.verification_text,
            kept=data.keep_staged and not any("not kept" in text for rank in summaries for text in rank.warnings),
        )
        return {"staging": result}

    def remove(self) -> None:
        """Removes the staged data of this node, unless it is to be kept; called after the last rank has read."""
        if self.node is not None:
            self.node.close()


def stage_data(context: RankContext, progress: Progress | None) -> Staging | None:
    """Stages the data as the plan says; returns None if it says no staging."""
    plan, place, data = context.plan, context.place, context.plan.workload.data
    if data.is_synthetic or data.staging == "none":
        return None
    context.watch.stage("staging")
    context.events.add("staging_start")
    context.status.on_staging(0, 0)
    begun = time.monotonic()
    work = None
    if place.local_rank == 0:
        work = NodeStaging(
            plan,
            place.node_rank,
            place.host,
            open_reader=partial(open_training, plan.workload.model, data, plan.workload.train.seed),
            parts=partial(first_parts, plan, place, progress),
        )
        work.start()
    try:
        status_by_rank = _all_done(context, work)
    except BaseException:
        if work is not None:
            work.cancel()
        raise
    node_status = status_by_rank[place.rank - place.local_rank]
    staging = Staging(
        plan=plan,
        data=StagedData(plan=plan, folder=Path(node_status["folder"]), evaluates=plan.measure.until == "quality"),
        seconds=time.monotonic() - begun,
        verification_text=node_status["verification_text"],
        node=work,
        node_warnings=node_status["warnings"] if place.local_rank == 0 else [],
    )
    context.events.add("staging_stop")
    if work is not None:
        context.watch.staged(work.tally.moved)
    context.watch.stage("building")
    return staging


def _all_done(context: RankContext, work: NodeStaging | None) -> list[Any]:
    """Waits until all nodes have staged; returns the status of each rank, None for all but the first of a node."""
    num_heartbeats_before = -1
    while True:
        own_status = None
        if work is not None:
            work.wait(_PERIOD_S)
            own_status = work.status()
        status_by_rank = context.engine.gather(own_status)
        nodes = [status for status in status_by_rank if status is not None]
        for rank, status in enumerate(status_by_rank):
            if status is None or status["error"] is None:
                continue
            if rank == context.place.rank and work is not None and work.error is not None:
                raise work.error
            raise PeerLostError(f"rank {rank} could not stage its node: {status['error']}")
        if all(status["done"] for status in nodes):
            context.beat("staging")
            return status_by_rank
        num_heartbeats = sum(status["beats"] for status in nodes)
        if num_heartbeats != num_heartbeats_before:
            num_heartbeats_before = num_heartbeats
            context.beat("a step of staging")
        context.status.on_staging(sum(status["copied"] for status in nodes), sum(status["needed"] for status in nodes))


def first_parts(plan: RunPlan, place: RankPlace, progress: Progress | None, num_samples: int) -> Parts:
    """Returns the samples that each rank of this node holds when this run begins."""
    ownership = ownership_for(plan.workload.data, num_samples, place.size, seed=plan.workload.train.seed)
    assert ownership is not None  # a plan with staging shard does not shuffle globally
    epoch = progress.position.epoch if progress is not None else 0
    first = place.rank - place.local_rank
    return {rank: ownership.part(epoch, rank).tolist() for rank in range(first, first + place.local_size)}


def steps_before(context: RankContext, progress: Progress | None) -> int:
    """Returns the samples trained before resuming, in steps of this plan's global batch."""
    return 0 if progress is None else round(progress.samples / context.plan.global_batch)


def reading_of(context: RankContext) -> RankReading | None:
    """Returns this rank's reader settings; ranks agree on them when they open the data. None for synthetic data."""
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
    """Opens the training data of this rank, at the position of a checkpoint's `progress`. `reading` agrees with
    the other ranks on the number of loader workers; without it the plan must state numbers, not `auto`.
    """
    _require_device(context)
    plan, train, replica = context.plan, context.plan.workload.train, context.replica
    data, model = plan.workload.data, plan.workload.model
    if train.cuda_graphs != "none":
        model = model.captured(data)
    if data.is_synthetic:
        return _synthetic_source(context, progress, model)
    staged = None
    if staging is None:
        reader = _open(context, model, train_folder(Path(data.source)), "training")
    else:
        staged = staging.data
        reader = staged.reader(_open(context, model, staged.train_source(), "training"), context.place.rank)
    start = progress.position if progress is not None else Position()
    batch_size = train.batch_per_rank * len(replica.ranks)
    order = _order(context, reader.num_samples, batch_size, start)
    audit = ReadAudit(
        order, num_samples=reader.num_samples, ranks=replica.replicas, labels=reader.labels(), start=start
    )
    readers = planned_readers(data) if reading is None else reading.prepare(reader, order, batch_size)
    arrange: Callable[[Batch], Batch] = partial(arranged, model=model, num_parts=train.gradient_accumulation)
    if context.plan.engine.spatial_ranks > 1:
        arrange = _cut_of(context)
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
            # Without page-locked memory a copy to the GPU cannot overlap with computation. Images that the GPU decodes
            # are read on the host first, and their lengths are not known beforehand.
            pin_memory=context.on_gpu and data.reader == "dlbench",
            in_slots=data.reader == "dlbench",
            is_held=data.staging == "shard",
            audit=audit,
            exchange=exchange,
            # If each epoch begins with a cold cache, nothing may be read ahead across its border.
            epoch_by_epoch=reading is not None and data.cache == "cold",
            arrange=arrange,
        )
    except BaseException:
        if exchange is not None:
            exchange.close()
        raise


def _synthetic_source(context: RankContext, progress: Progress | None, model: ModelSpec) -> SyntheticSource:
    data, train = context.plan.workload.data, context.plan.workload.train
    workers, ranks = context.plan.emulated_workers, context.replica.ranks
    if workers > 1:
        ranks = range(workers)
    return SyntheticSource(
        model,
        data,
        batch_size=train.batch_per_rank // workers,
        ranks=ranks,
        seed=train.seed,
        start_batch=steps_before(context, progress),
        pin_memory=context.on_gpu,
        voxel_counts=data.keeps_voxel_counts(on_gpu=context.on_gpu),
        device=context.device if data.synthetic_on == "device" else None,
        cut=_cut_of(context),
    )


def _cut_of(context: RankContext) -> Callable[[Batch], Batch]:
    """Returns a function that returns the part of a replica's batch that this rank computes, and can be pickled."""
    shared = context.plan.engine.spatial_ranks
    if shared == 1:
        return dict
    return partial(slab, number=context.place.rank % shared, parts=shared)


def _require_device(context: RankContext) -> None:
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
            f"data.device_prefetch is {data.device_prefetch}, but this rank computes on its CPU and copies no batches; "
            "set data.device_prefetch to 1"
        )
    if data.is_synthetic and data.synthetic_on == "device" and context.device.type == "cpu":
        raise EnvironmentLacksError(
            "data.synthetic_on device: this rank computes on its CPU and has samples in its memory anyway; use host"
        )


def _open(context: RankContext, model: ModelSpec, folder: Path, split: Literal["training", "evaluation"]) -> DataReader:
    """Opens one split of the data, whose files one rank of each node lists for all."""
    place, workload = context.place, context.plan.workload
    lister = IndexBroadcast(
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
        voxel_counts=workload.data.keeps_voxel_counts(on_gpu=context.on_gpu),
    )


def _order(context: RankContext, num_samples: int, batch_size: int, start: Position) -> ShardedOrder:
    seed, replica = context.plan.workload.train.seed, context.replica
    ownership = ownership_for(context.plan.workload.data, num_samples, replica.replicas, seed=seed)
    if ownership is not None:
        return HeldOrder(ownership, batch_size=batch_size, rank=replica.number, start=start)
    order = ShardedOrder(
        num_samples, batch_size=batch_size, rank=replica.number, world_size=replica.replicas, seed=seed, start=start
    )
    order.workers = context.plan.emulated_workers
    return order


def _exchange(
    context: RankContext, order: HeldOrder, reader: DataReader, staged: StagedData | None, start: Position
) -> tuple[SampleExchange, DataReader]:
    """Starts the exchange of samples between ranks; returns it with a reader that waits for received samples."""
    plan, place = context.plan, context.place
    if reader.num_bytes(0) == 0:
        raise UserError(
            f"data.shuffle {plan.workload.data.shuffle}: every rank holds all samples of this data in memory, so there "
            "is nothing to exchange; set data.shuffle to global or local"
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
    order.on_batch = exchange.on_batch_assigned
    return exchange, AwaitingReader(reader, store, patience_s=plan.measure.stall_timeout_s * PATIENCE)


def open_validation_data(
    context: RankContext, staging: Staging | None, reading: RankReading | None = None
) -> EvaluationSource:
    """Opens the validation data of this rank, without augmentation."""
    workload, replica = context.plan.workload, context.replica
    data, train, quality = workload.data, workload.train, workload.quality
    staged_folder = staging.data.validation_source() if staging is not None else None
    reader = _open(context, workload.model, staged_folder or validation_path(data), "evaluation")
    readers = planned_readers(data) if reading is None else reading.readers
    num_samples = reader.num_samples
    if quality is not None and quality.evaluate_samples:
        num_samples = min(num_samples, quality.evaluate_samples)
    return EvaluationSource(
        reader,
        num_samples=num_samples,
        # No gradients are kept, so what fits training fits here.
        batch_size=train.batch_per_rank * len(replica.ranks) // train.gradient_accumulation,
        rank=replica.number,
        world_size=replica.replicas,
        loader_workers=readers.loader_workers,
        prefetch_batches=max(1, readers.prefetch_batches),
        on_bad_sample=data.on_bad_sample,
        pin_memory=context.on_gpu,
        cut=_cut_of(context),
    )


def batch_copier_of(context: RankContext, batches: Iterator[Batch], source: BatchSource) -> BatchCopier | None:
    """Returns the copier of this rank's batches to its GPU; None on a CPU."""
    if not context.on_gpu:
        return None
    workload, decode = context.plan.workload, None
    if workload.data.reader == "nvimagecodec":
        from dlbench.node.data.images import RegionDecoder

        network: Any = workload.model  # of images, by the workload's validators
        is_whole = workload.data.decode == "full"
        decode = RegionDecoder(context.device, network.image_size, is_whole=is_whole, name=source.sample_name)
    return BatchCopier(batches, source.ahead, context.device, workload.data.device_prefetch, decode)
