"""Settings that act only under a condition: what is asked for and acts in no run of a request is a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dlbench.errors import UserError
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import GROUPED
from dlbench.specs.training import DECAYS_TO_AN_END
from dlbench.specs.workload import ImageData


def _warms_up(plan: RunPlan) -> bool:
    schedule = plan.workload.train.at_batch(plan.global_batch).schedule
    return bool(schedule.warmup_steps or schedule.warmup_epochs)


def _is_left_by_row(plan: RunPlan, *keys: str) -> bool:
    """Whether the row of learning_rate_table that is in force leaves these keys alone."""
    place = plan.workload.train.optimizer.place(plan.global_batch)
    return place is None or all(getattr(place.row, key) is None for key in keys)


def _counts_epochs(plan: RunPlan) -> bool:
    quality = plan.workload.quality if plan.measure.until == "quality" else None
    in_quality = quality is not None and (quality.evaluate_every_epochs or quality.max_epochs)
    return bool(plan.workload.train.schedule.counts_epochs or plan.checkpoint.every_epochs or in_quality)


def _exchanges(plan: RunPlan) -> bool:
    return plan.engine.kind.synchronises and plan.layout.ranks > 1


def _hands_over(plan: RunPlan) -> bool:
    return plan.sync.exchange != "none"


def _has_window(plan: RunPlan) -> bool:
    return plan.watch is not None and plan.watch.window_steps > 0


def _leaves_padding_out(plan: RunPlan) -> bool:
    return plan.workload.model.padding == "unpadded"


def _samples(plan: RunPlan) -> bool:
    return plan.watch is not None and plan.watch.sampler


DDP_WRAPPER = ("gradient_as_bucket_view", "static_graph")
"""Settings of DDP's wrapper, which is left out where dlbench exchanges, or nobody."""

INERT: tuple[tuple[str, Callable[[RunPlan], bool], str], ...] = (
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
    *(
        (key, lambda plan: not plan.engine.autotunes, "engine.horovod.autotune searches fusion and cycle time itself")
        for key in ("sync.fusion", "engine.horovod.cycle_time_ms")
    ),
    ("engine.horovod.autotune_", lambda plan: plan.engine.horovod.autotune, "only engine.horovod.autotune reads it"),
    ("engine.ddp.", lambda plan: plan.engine.name == "ddp", "only engine ddp reads it"),
    *(
        (f"engine.ddp.{key}", lambda plan: not plan.sync.is_own, "dlbench's own exchange does not use DDP's buckets")
        for key in DDP_WRAPPER
    ),
    ("sync.", _exchanges, "one rank, or engine single, exchanges nothing"),
    *(
        (key, _hands_over, "with sync.exchange none no gradient is exchanged")
        for key in (
            *("sync.fusion", "sync.wire", "sync.inside", "engine.horovod."),
            *(f"engine.ddp.{key}" for key in DDP_WRAPPER),
        )
    ),
    ("sync.topk_density", lambda plan: plan.sync.wire == "topk", "only sync.wire topk reads it"),
    ("sync.powersgd_rank", lambda plan: plan.sync.wire == "powersgd", "only sync.wire powersgd reads it"),
    ("sync.hybrid_threshold_bytes", lambda plan: plan.sync.exchange == "hybrid", "only sync.exchange hybrid reads it"),
    (
        "sync.group_size",
        lambda plan: plan.sync.exchange in GROUPED,
        "only sync.exchange hierarchical, leader and hybrid have groups",
    ),
    (
        "sync.network",
        lambda plan: (
            plan.sync.fusion == "own:mgwfbp"
            or (plan.sync.exchange == "hybrid" and plan.sync.hybrid_threshold_bytes is None)
        ),
        "only sync.fusion own:mgwfbp, and hybrid without a threshold, read it",
    ),
    ("data.loader_workers", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no reader"),
    *(
        (f"data.{key}", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no reader")
        for key in ("prefetch_batches", "staging", "keep_staged", "shuffle", "partition", "cache")
    ),
    (
        "data.decode",
        lambda plan: isinstance(plan.workload.data, ImageData) and not plan.workload.data.is_synthetic,
        "only images that are read are decoded",
    ),
    (
        "data.prefetch_batches",
        lambda plan: plan.workload.data.loader_workers != 0,
        "data.loader_workers is 0: the training process reads each batch when it is asked for",
    ),
    *(
        (f"data.{key}", lambda plan: plan.workload.data.staging != "none", "data.staging is none")
        for key in ("staging_", "keep_staged")
    ),
    (
        "data.partition",
        lambda plan: plan.workload.data.shuffle != "global",
        "under data.shuffle global no rank holds samples of its own",
    ),
    (
        "system.storage.",
        lambda plan: (
            (plan.workload.data.staging != "none" and not plan.workload.data.is_synthetic)
            or (plan.workload.train.swap != "none" and plan.workload.train.memory.swap_folder is None)
        ),
        "data.staging is none, and nothing is swapped to a file there",
    ),
    ("data.on_bad_sample", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no reader"),
    ("data.vocabulary", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no text"),
    ("data.synthetic_on", lambda plan: plan.workload.data.is_synthetic, "data is read from files"),
    ("data.validation", lambda plan: plan.measure.until == "quality", "only measure.until quality evaluates"),
    ("quality.", lambda plan: plan.measure.until == "quality", "only measure.until quality reads it"),
    *(
        (f"measure.{key}", lambda plan: plan.measure.until == "steps", "measure.until quality ends by its target")
        for key in ("measured_steps", "measured_s", "warmup_s")
    ),
    ("checkpoint.keep", lambda plan: plan.checkpoint.is_on, "no checkpoint is written: give checkpoint.every_steps"),
    (
        "train.allow_emulation",
        lambda plan: plan.workload.train.precision in ("bf16", "fp16"),
        "only precisions bf16 and fp16 read it",
    ),
    ("train.cudnn_benchmark", lambda plan: plan.workload.model.has_convolutions, "the network has no convolutions"),
    (
        "model.attention",
        lambda plan: not (plan.workload.data.is_synthetic and _leaves_padding_out(plan)),
        "synthetic text has no padding",
    ),
    ("train.initial_loss_scale", lambda plan: plan.workload.train.precision == "fp16", "only precision fp16 scales"),
    ("train.loss_scale_growth", lambda plan: plan.workload.train.precision == "fp16", "only precision fp16 scales"),
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
    *(
        (
            key,
            lambda plan, own=own: _is_left_by_row(plan, *own),
            "the row of train.optimizer.learning_rate_table for this global batch replaces it; set "
            "train.optimizer.learning_rate_scaling to none, linear or sqrt",
        )
        for key, own in {
            "train.optimizer.momentum": ("momentum",),
            "train.optimizer.betas": ("betas",),
            "train.optimizer.weight_decay": ("weight_decay",),
            "train.schedule.warmup_steps": ("warmup_steps", "warmup_epochs"),
            "train.schedule.warmup_epochs": ("warmup_steps", "warmup_epochs"),
            "train.schedule.total_": ("total_steps", "total_epochs"),
        }.items()
    ),
    ("train.schedule.warmup_from", lambda plan: _warms_up(plan), "only a warm-up reads it"),
    ("train.schedule.epoch_samples", lambda plan: _counts_epochs(plan), "nothing in this plan counts in epochs"),
    ("watch.period_s", _samples, "watch.sampler is off, and nothing else has a period"),
    *(
        (key, _has_window, "watch.window_steps is 0: no step is watched closely")
        for key in ("watch.window_ranks", "watch.profiler")
    ),
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
    *(
        (f"train.memory.{key}", lambda plan: plan.workload.train.swap != "none", "train.swap is none")
        for key in ("swap_folder", "verify")
    ),
    ("system.slurm.", lambda plan: plan.system.scheduler == "slurm", "only scheduler slurm reads it"),
    *(
        (f"system.slurm.{key}", lambda plan: plan.system.launch.launcher != "mpirun", "only srun reads it")
        for key in ("cpu_bind", "mem_bind", "distribution", "srun_args")
    ),
    *(
        (f"system.slurm.{key}", lambda plan: plan.system.slurm.gpu_request != "none", "slurm.gpu_request is none")
        for key in ("gpu_type", "gpu_count")
    ),
    ("system.modules_", lambda plan: bool(plan.system.modules), "no modules are loaded"),
    (
        "system.slurm.gpu_bind",
        lambda plan: plan.system.slurm.gpu_request != "none" and plan.system.launch.launcher != "mpirun",
        "only srun with a slurm.gpu_request reads it",
    ),
    *(
        (
            key,
            lambda plan, names=names: plan.workload.train.optimizer.name in names,
            f"only {' and '.join(names)} read it",
        )
        for key, names in {
            "train.optimizer.momentum": ("sgd", "lars"),
            "train.optimizer.betas": ("adamw", "lamb"),
            "train.optimizer.epsilon": ("adamw", "lars", "lamb"),
            "train.optimizer.trust_coefficient": ("lars",),
        }.items()
    ),
    *(
        (
            key,
            lambda plan, forms=forms: plan.workload.train.schedule.decay in forms,
            f"only decay {' and '.join(forms)} reads it",
        )
        for key, forms in {
            "train.schedule.power": ("polynomial",),
            "train.schedule.end_learning_rate": DECAYS_TO_AN_END,
            "train.schedule.decay_from": DECAYS_TO_AN_END,
            "train.schedule.total_": DECAYS_TO_AN_END,
            "train.schedule.step_": ("step",),
            "train.schedule.epoch_boundaries": ("step",),
        }.items()
    ),
    (
        "system.launch.mpi_plugin",
        lambda plan: plan.system.launch.launcher == "srun-mpi",
        "only launcher srun-mpi reads it",
    ),
)
"""Settings that act only under a condition: key or prefix, the condition, why not."""


def refuse_inert(asked: Iterable[tuple[str, str]], plans: Sequence[RunPlan]) -> None:
    """Refuses keys that act in no run.

    `asked`: keys and the options that they were given to.
    Raises `UserError`: one of them acts in none of the plans.
    """
    for key, option in asked:
        for prefix, acts, why in INERT:
            if key.startswith(prefix) and not any(acts(plan) for plan in plans):
                raise UserError(f"{option} {key}: has no effect in any run of this request: {why}")


def refuse_absent_ranks(plans: Sequence[RunPlan]) -> None:
    """Refuses a injected fault on a rank that no run has. Raises `UserError`: some fault names such a rank."""
    for fault in [plan.fault for plan in plans if plan.fault is not None]:
        largest = max(plan.layout.ranks for plan in plans if plan.fault == fault)
        absent = [rank for rank in fault.ranks or () if rank >= largest]
        if absent:
            raise UserError(
                f"fault.ranks: rank {absent[0]} is in no run of this request: ranks count from 0, and the largest run "
                f"has {largest}"
            )
