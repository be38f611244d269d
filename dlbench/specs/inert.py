"""Settings that act only under a condition: what is asked for and acts in no run of a request is a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dlbench.errors import UserError
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import GROUPED
from dlbench.specs.training import DECAYS_TO_AN_END
from dlbench.specs.workload import ImageData

DDP_WRAPPER = ("gradient_as_bucket_view", "static_graph")
"""Settings of DDP's wrapper, which is left out where dlbench exchanges, or nobody."""

_Acts = Callable[[RunPlan], bool]

_NO_READER = "synthetic data has no reader"
_WRAPPER = " ".join(f"engine.ddp.{key}" for key in DDP_WRAPPER)


def _warms_up(plan: RunPlan) -> bool:
    schedule = plan.workload.train.at_batch(plan.global_batch).schedule
    return bool(schedule.warmup_steps or schedule.warmup_epochs)


def _counts_epochs(plan: RunPlan) -> bool:
    quality = plan.workload.quality if plan.measure.until == "quality" else None
    in_quality = quality is not None and (quality.evaluate_every_epochs or quality.max_epochs)
    return bool(plan.workload.train.schedule.counts_epochs or plan.checkpoint.every_epochs or in_quality)


def _has_window(plan: RunPlan) -> bool:
    return plan.watch is not None and plan.watch.window_steps > 0


def _uses_network(plan: RunPlan) -> bool:
    sync = plan.sync
    return sync.fusion.rule == "mgwfbp" or (sync.exchange == "hybrid" and sync.hybrid_threshold_bytes is None)


def _uses_storage(plan: RunPlan) -> bool:
    data, train = plan.workload.data, plan.workload.train
    is_staged = data.staging != "none" and not data.is_synthetic
    return is_staged or (train.swap != "none" and train.memory.swap_folder is None)


def _is_read(plan: RunPlan) -> bool:
    return not plan.workload.data.is_synthetic


def _swaps(plan: RunPlan) -> bool:
    return plan.workload.train.swap != "none"


def _asks_for_gpus(plan: RunPlan) -> bool:
    return plan.system.slurm.gpu_request != "none"


def _by_srun(plan: RunPlan) -> bool:
    return plan.system.launch.launcher != "mpirun"


def _to_quality(plan: RunPlan) -> bool:
    return plan.measure.until == "quality"


def _optimizer(names: tuple[str, ...]) -> tuple[_Acts, str]:
    return lambda plan: plan.workload.train.optimizer.name in names, f"only {' and '.join(names)} read it"


def _decay(forms: tuple[str, ...]) -> tuple[_Acts, str]:
    return lambda plan: plan.workload.train.schedule.decay in forms, f"only decay {' and '.join(forms)} reads it"


def _row(*own: str) -> tuple[_Acts, str]:
    def is_left(plan: RunPlan) -> bool:
        place = plan.workload.train.optimizer.place(plan.global_batch)
        return place is None or all(getattr(place.row, key) is None for key in own)

    why = "the row of train.optimizer.learning_rate_table for this global batch replaces it; set "
    return is_left, f"{why}train.optimizer.learning_rate_scaling to none, linear or sqrt"


_ROWS: tuple[tuple[str, _Acts, str], ...] = (
    (
        "engine.horovod.",
        lambda plan: plan.engine.name == "horovod" and plan.layout.ranks > 1,
        "only engine horovod with two ranks or more reads it",
    ),
    (
        "system.launch.interface",
        lambda plan: plan.layout.nodes > 1 and not (plan.engine.name == "horovod" and plan.system.launch.by_mpi),
        "ranks of one node meet on loopback, and MPI chooses its own",
    ),
    ("system.launch.oversubscribe_yield", lambda plan: plan.system.launch.by_mpi, "only MPI launchers read it"),
    (
        "sync.fusion engine.horovod.cycle_time_ms",
        lambda plan: not plan.engine.autotunes,
        "engine.horovod.autotune searches fusion and cycle time itself",
    ),
    ("engine.horovod.autotune_", lambda plan: plan.engine.horovod.autotune, "only engine.horovod.autotune reads it"),
    ("engine.ddp.", lambda plan: plan.engine.name == "ddp", "only engine ddp reads it"),
    ("engine.ddp.shard_optimizer", lambda plan: plan.layout.ranks > 1, "one rank keeps all of the optimizer's state"),
    ("engine.fsdp.", lambda plan: plan.engine.name == "fsdp", "only engine fsdp reads it"),
    (
        "engine.fsdp.shard engine.fsdp.wrap engine.fsdp.prefetch",
        lambda plan: plan.layout.ranks > plan.ranks_per_replica,
        "one rank, or the ranks of one replica, share no parameters that are gathered",
    ),
    ("engine.fsdp.shard_ranks", lambda plan: plan.layout.nodes > 1, "the ranks of one node are all ranks"),
    ("engine.fsdp.prefetch", lambda plan: plan.engine.fsdp.wrap == "blocks", "engine.fsdp.wrap network has no blocks"),
    (_WRAPPER, lambda plan: not plan.sync.is_own, "dlbench's own exchange does not use DDP's buckets"),
    (
        "sync.",
        lambda plan: plan.engine.kind.synchronises and plan.layout.ranks > 1,
        "one rank, or engine single, exchanges nothing",
    ),
    (
        f"sync.fusion sync.wire engine.horovod. {_WRAPPER}",
        lambda plan: plan.sync.exchanges_gradients,
        "with sync.exchange none, or sync.average_every from the first update on, no gradient is exchanged",
    ),
    (
        "sync.average_from sync.average_momentum",
        lambda plan: plan.sync.average_every is not None,
        "only sync.average_every reads it",
    ),
    (
        "sync.average_momentum",
        lambda plan: plan.workload.train.at_batch(plan.global_batch).optimizer.slots > 0,
        "sgd without momentum has no state to average",
    ),
    ("sync.topk_density", lambda plan: plan.sync.wire == "topk", "only sync.wire topk reads it"),
    ("sync.powersgd_rank", lambda plan: plan.sync.wire == "powersgd", "only sync.wire powersgd reads it"),
    ("sync.hybrid_threshold_bytes", lambda plan: plan.sync.exchange == "hybrid", "only sync.exchange hybrid reads it"),
    (
        "sync.group_size",
        lambda plan: plan.sync.exchange in GROUPED,
        "only sync.exchange hierarchical, leader and hybrid have groups",
    ),
    ("sync.network", _uses_network, "only sync.fusion own:mgwfbp, and hybrid without a threshold, read it"),
    (
        "data.loader_workers data.prefetch_batches data.staging data.keep_staged data.shuffle data.partition "
        "data.cache",
        _is_read,
        _NO_READER,
    ),
    (
        "data.decode",
        lambda plan: isinstance(plan.workload.data, ImageData) and _is_read(plan),
        "only images that are read are decoded",
    ),
    (
        "data.prefetch_batches",
        lambda plan: plan.workload.data.loader_workers != 0,
        "data.loader_workers is 0: the training process reads each batch when it is asked for",
    ),
    ("data.staging_ data.keep_staged", lambda plan: plan.workload.data.staging != "none", "data.staging is none"),
    (
        "data.partition",
        lambda plan: plan.workload.data.shuffle != "global",
        "under data.shuffle global no rank holds samples of its own",
    ),
    ("system.device system.network", lambda _: False, "only dlbench project reads it, and from the system's file"),
    ("system.storage.", _uses_storage, "data.staging is none, and nothing is swapped to a file there"),
    ("data.on_bad_sample", _is_read, _NO_READER),
    ("data.vocabulary", _is_read, "synthetic data has no text"),
    ("data.synthetic_on", lambda plan: plan.workload.data.is_synthetic, "data is read from files"),
    ("data.validation", _to_quality, "only measure.until quality evaluates"),
    ("quality.", _to_quality, "only measure.until quality reads it"),
    (
        "measure.measured_steps measure.measured_s measure.warmup_s",
        lambda plan: plan.measure.until == "steps",
        "measure.until quality ends by its target",
    ),
    ("checkpoint.keep", lambda plan: plan.checkpoint.is_on, "no checkpoint is written: give checkpoint.every_steps"),
    (
        "train.allow_emulation",
        lambda plan: plan.workload.train.precision in ("bf16", "fp16"),
        "only precisions bf16 and fp16 read it",
    ),
    ("train.cudnn_benchmark", lambda plan: plan.workload.model.has_convolutions, "the network has no convolutions"),
    (
        "measure.noise_scale",
        lambda plan: plan.workload.model.computes,
        "gradients of a paced network are made up, and have no noise",
    ),
    (
        "model.attention",
        lambda plan: _is_read(plan) or plan.workload.model.padding != "unpadded",
        "synthetic text has no padding",
    ),
    (
        "train.initial_loss_scale train.loss_scale_growth",
        lambda plan: plan.workload.train.precision == "fp16",
        "only precision fp16 scales",
    ),
    (
        "train.optimizer.reference_batch",
        lambda plan: plan.workload.train.optimizer.learning_rate_scaling != "none",
        "only learning_rate_scaling reads it",
    ),
    (
        "train.optimizer.learning_rate_table",
        lambda plan: plan.workload.train.optimizer.learning_rate_scaling == "table",
        "only learning_rate_scaling table reads it",
    ),
    ("train.optimizer.momentum", *_row("momentum")),
    ("train.optimizer.betas", *_row("betas")),
    ("train.optimizer.weight_decay", *_row("weight_decay")),
    ("train.schedule.warmup_steps train.schedule.warmup_epochs", *_row("warmup_steps", "warmup_epochs")),
    ("train.schedule.total_", *_row("total_steps", "total_epochs")),
    ("train.schedule.warmup_from", _warms_up, "only a warm-up reads it"),
    ("train.schedule.epoch_samples", _counts_epochs, "nothing in this plan counts in epochs"),
    (
        "watch.period_s",
        lambda plan: plan.watch is not None and plan.watch.sampler,
        "watch.sampler is off, and nothing else has a period",
    ),
    ("watch.window_ranks watch.profiler", _has_window, "watch.window_steps is 0: no step is watched closely"),
    (
        "watch.window_steps",
        lambda plan: plan.measure.warmup_steps > 0 or not _has_window(plan),
        "the window lies in the warm-up, and measure.warmup_steps is 0",
    ),
    (
        "watch.max_bytes",
        lambda plan: plan.watch is not None and plan.watch.is_on,
        "nothing is watched: watch.sampler is off and watch.window_steps is 0",
    ),
    (
        "train.memory.capacity",
        lambda plan: plan.workload.train.is_planned,
        "neither train.recompute nor swap is planned",
    ),
    ("train.memory.blocks", lambda plan: not plan.workload.train.is_in_core, "train.recompute and train.swap are none"),
    ("train.memory.swap_folder train.memory.verify", _swaps, "train.swap is none"),
    ("system.slurm.", lambda plan: plan.system.scheduler == "slurm", "only scheduler slurm reads it"),
    (
        "system.slurm.cpu_bind system.slurm.mem_bind system.slurm.distribution system.slurm.srun_args",
        _by_srun,
        "only srun reads it",
    ),
    ("system.slurm.gpu_type system.slurm.gpu_count", _asks_for_gpus, "slurm.gpu_request is none"),
    ("system.modules_", lambda plan: bool(plan.system.modules), "no modules are loaded"),
    (
        "system.slurm.gpu_bind",
        lambda plan: _asks_for_gpus(plan) and _by_srun(plan),
        "only srun with a slurm.gpu_request reads it",
    ),
    ("train.optimizer.momentum", *_optimizer(("sgd", "lars"))),
    ("train.optimizer.betas", *_optimizer(("adamw", "lamb"))),
    ("train.optimizer.epsilon", *_optimizer(("adamw", "lars", "lamb"))),
    ("train.optimizer.trust_coefficient", *_optimizer(("lars",))),
    ("train.schedule.power", *_decay(("polynomial",))),
    ("train.schedule.end_learning_rate train.schedule.decay_from train.schedule.total_", *_decay(DECAYS_TO_AN_END)),
    ("train.schedule.step_ train.schedule.epoch_boundaries", *_decay(("step",))),
    (
        "system.launch.mpi_plugin",
        lambda plan: plan.system.launch.launcher == "srun-mpi",
        "only launcher srun-mpi reads it",
    ),
)
INERT = tuple((key, acts, why) for keys, acts, why in _ROWS for key in keys.split())
"""Settings that act only under a condition: key or prefix, the condition, why not."""


def refuse_inert(asked: Iterable[tuple[str, str]], plans: Sequence[RunPlan]) -> None:
    """Refuses keys, given with the options that set them, that act in no run."""
    for key, option in asked:
        for prefix, acts, why in INERT:
            if key.startswith(prefix) and not any(acts(plan) for plan in plans):
                raise UserError(f"{option} {key}: has no effect in any run of this request: {why}")


def why_inert(key: str, plan: RunPlan) -> str:
    """Why a key acts not in a run; empty where it does."""
    return next((why for prefix, acts, why in INERT if key.startswith(prefix) and not acts(plan)), "")
