"""A request becomes the ordered list of runs: axes x points x repeats, repeats interleaved over points."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

from pydantic import ValidationError

import dlbench
from dlbench.errors import UserError
from dlbench.specs.choices import WorkloadFile, choose, choose_system
from dlbench.specs.engine import EngineSpec
from dlbench.specs.plan import AxisValue, RunPlan, SeriesSpec
from dlbench.specs.points import Counts, interleaved, series_name
from dlbench.specs.requests import Request
from dlbench.specs.resolve import find
from dlbench.specs.sync import GROUPED
from dlbench.specs.system import SystemSpec
from dlbench.specs.workload import Workload


def _by_mpi(plan: RunPlan) -> bool:
    return plan.system.launch.launcher in ("mpirun", "srun-mpi")


def _warms_up(plan: RunPlan) -> bool:
    schedule = plan.workload.train.schedule
    return bool(schedule.warmup_steps or schedule.warmup_epochs)


def _counts_epochs(plan: RunPlan) -> bool:
    quality = plan.workload.quality if plan.measure.until == "quality" else None
    in_quality = quality is not None and (quality.evaluate_every_epochs or quality.max_epochs)
    return bool(plan.workload.train.schedule.counts_epochs or plan.checkpoint.every_epochs or in_quality)


def _exchanges(plan: RunPlan) -> bool:
    return plan.engine.name != "single" and plan.layout.ranks > 1


INERT: tuple[tuple[str, Callable[[RunPlan], bool], str], ...] = (
    (
        "engine.horovod.",
        lambda plan: plan.engine.name == "horovod" and plan.layout.ranks > 1,
        "only engine horovod with two ranks or more reads it",
    ),
    (
        "system.launch.interface",
        lambda plan: plan.engine.name == "ddp" or (plan.engine.name == "horovod" and not _by_mpi(plan)),
        "MPI chooses its own, and one rank alone needs none",
    ),
    ("system.launch.oversubscribe_yield", lambda plan: _by_mpi(plan), "only MPI launchers read it"),
    (
        "engine.horovod.fusion_threshold_bytes",
        lambda plan: not plan.sync.is_own,
        "dlbench's own exchange does not use Horovod's fusion",
    ),
    (
        "engine.horovod.autotune_",
        lambda plan: plan.engine.horovod.autotune,
        "only engine.horovod.autotune reads it",
    ),
    ("engine.ddp.", lambda plan: plan.engine.name == "ddp", "only engine ddp reads it"),
    (
        "engine.ddp.bucket_cap_bytes",
        lambda plan: not plan.sync.is_own,
        "dlbench's own exchange does not use DDP's buckets",
    ),
    ("sync.", _exchanges, "one rank, or engine single, exchanges nothing"),
    ("sync.topk_density", lambda plan: plan.sync.wire == "topk", "only sync.wire topk reads it"),
    ("sync.powersgd_rank", lambda plan: plan.sync.wire == "powersgd", "only sync.wire powersgd reads it"),
    (
        "sync.hybrid_threshold_bytes",
        lambda plan: plan.sync.exchange == "hybrid",
        "only sync.exchange hybrid reads it",
    ),
    (
        "sync.group_size",
        lambda plan: plan.sync.exchange in GROUPED,
        "only sync.exchange hierarchical, leader and hybrid have groups",
    ),
    (
        "sync.network",
        lambda plan: (
            plan.sync.fusion == "mgwfbp"
            or (plan.sync.exchange == "hybrid" and plan.sync.hybrid_threshold_bytes is None)
        ),
        "only sync.fusion mgwfbp, and hybrid without a threshold, read it",
    ),
    ("data.loader_workers", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no reader"),
    ("data.on_bad_sample", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no reader"),
    ("data.vocabulary", lambda plan: not plan.workload.data.is_synthetic, "synthetic data has no text"),
    ("data.validation", lambda plan: plan.measure.until == "quality", "only measure.until quality evaluates"),
    ("quality.", lambda plan: plan.measure.until == "quality", "only measure.until quality reads it"),
    ("measure.measured_steps", lambda plan: plan.measure.until == "steps", "measure.until quality ends by its target"),
    ("checkpoint.keep", lambda plan: plan.checkpoint.is_on, "no checkpoint is written: give checkpoint.every_steps"),
    (
        "train.allow_emulation",
        lambda plan: plan.workload.train.precision != "fp32",
        "only precisions bf16 and fp16 read it",
    ),
    ("train.initial_loss_scale", lambda plan: plan.workload.train.precision == "fp16", "only precision fp16 scales"),
    ("train.loss_scale_growth", lambda plan: plan.workload.train.precision == "fp16", "only precision fp16 scales"),
    (
        "train.optimizer.reference_batch",
        lambda plan: plan.workload.train.optimizer.learning_rate_scaling != "none",
        "only learning_rate_scaling reads it",
    ),
    ("train.schedule.warmup_from", lambda plan: _warms_up(plan), "only a warm-up reads it"),
    ("train.schedule.epoch_samples", lambda plan: _counts_epochs(plan), "nothing in this plan counts in epochs"),
    ("system.slurm.", lambda plan: plan.system.scheduler == "slurm", "only scheduler slurm reads it"),
    *(
        (
            key,
            lambda plan, names=names: plan.workload.train.optimizer.name in names,
            f"only {' and '.join(names)} read it",
        )
        for key, names in {
            "train.optimizer.momentum": ("sgd", "lars"),
            "train.optimizer.betas": ("lamb",),
            "train.optimizer.epsilon": ("lars", "lamb"),
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
            "train.schedule.end_learning_rate": ("polynomial", "linear"),
            "train.schedule.total_": ("polynomial", "linear"),
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


def expand(request: Request, *, machine_cores: int, now: datetime | None = None) -> list[RunPlan]:
    """All runs of a request, in the order in which they should run.

    Args:
        request: what a person asked for.
        machine_cores: cores of this machine, used where the system YAML leaves a node's cores open
            and no scheduler is involved.
        now: time stamp of the plans (default: now).

    Raises:
        UserError: anything wrong with the request, in one line.
    """
    moment = now or datetime.now(timezone.utc)
    series = series_name(request.series, moment)
    file = WorkloadFile(find("workloads", request.workload))
    combinations = list(_combinations(request))
    points = [(axes, count) for axes in combinations for count in request.points]
    plans: list[RunPlan] = []
    for repeat, index, (axes, count) in interleaved(points, request.repeats):
        place = SeriesSpec(
            id=series,
            scaling=request.scaling,
            repeat=repeat,
            repeats=request.repeats,
            position=len(plans),
            axes=axes,
        )
        plans.append(_plan(request, file, place, (index, count), machine_cores, moment))
    _refuse_inert(request, plans)
    return plans


def _counts(request: Request) -> Counts:
    return Counts(values=request.points, are=request.points_are, ranks_per_node=request.ranks_per_node)


def _combinations(request: Request) -> Iterator[dict[str, AxisValue]]:
    keys = list(request.sweep)
    for values in itertools.product(*(request.sweep[key] for key in keys)):
        yield dict(zip(keys, values, strict=True))


def _refuse_inert(request: Request, plans: list[RunPlan]) -> None:
    """A setting that acts in no run of the series is a mistake, not a wish."""
    _counts(request).refuse_without_effect(plans[0].system)
    asked = [(key, "--set") for key in request.overrides] + [(key, "--sweep") for key in request.sweep]
    for key, option in asked:
        for prefix, acts, why in INERT:
            if key.startswith(prefix) and not any(acts(plan) for plan in plans):
                raise UserError(f"{option} {key}: has no effect in any run of this request: {why}")


def _plan(
    request: Request,
    file: WorkloadFile,
    place: SeriesSpec,
    point: tuple[int, int],
    machine_cores: int,
    moment: datetime,
) -> RunPlan:
    index, count = point
    settings, system_settings = _split_overrides(request, place.axes)
    system = choose_system(request.system, system_settings)
    choices = choose(file, request.preset, settings)
    layout = _counts(request).layout(
        system, count, cores_per_rank=choices.layout.cores_per_rank, machine_cores=machine_cores
    )
    workload = choices.workload()
    if request.scaling == "strong":
        workload = _share_out(workload, request, system, layout.ranks)
    engine = choices.engine
    name = f"{place.id}-{workload.name}-{workload.preset}-p{index:02d}-n{layout.ranks:04d}-k{place.repeat:02d}"
    try:
        return RunPlan(
            run_id=name,
            created=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            dlbench_version=dlbench.__version__,
            workload=workload,
            engine=EngineSpec.model_validate(engine.model_dump()),
            sync=choices.sync,
            measure=choices.measure,
            checkpoint=choices.checkpoint,
            watch=choices.watch,
            fault=choices.fault,
            layout=layout,
            series=place,
            system=system,
            overrides={**request.overrides},
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{file.path.name} on {system.name}: {where + ': ' if where else ''}{message}") from None


def _split_overrides(
    request: Request, axes: dict[str, AxisValue]
) -> tuple[dict[str, tuple[AxisValue, str]], dict[str, tuple[AxisValue, str]]]:
    """Dedicated options first, then --set, then the axis values; those of the system apart."""
    merged: dict[str, tuple[AxisValue, str]] = {}
    if request.engine is not None:
        merged["engine.name"] = (request.engine, "--engine")
    if request.data is not None:
        merged["data.source"] = (request.data, "--data")
    if request.to_quality:
        merged["measure.until"] = ("quality", "--to-quality")
    if request.resume is not None:
        merged["checkpoint.resume_from"] = (request.resume, "--resume")
    if request.launcher is not None:
        merged["system.launch.launcher"] = (request.launcher, "--launcher")
    for option, values in (("--set", request.overrides), ("--sweep", axes)):
        for key, value in values.items():
            if option == "--sweep" and key in request.overrides:
                raise UserError(f"--sweep {key}: also given to --set")
            if key in ("preset", "name"):
                raise UserError(f"{option} {key}: is chosen by its own option or argument, not here")
            merged[key] = (value, option)
    system = {k.removeprefix("system."): v for k, v in merged.items() if k.startswith("system.")}
    return {k: v for k, v in merged.items() if not k.startswith("system.")}, system


def _share_out(workload: Workload, request: Request, system: SystemSpec, ranks: int) -> Workload:
    """Strong scaling: the global batch is the preset's batch times the smallest rank count, at every point."""
    smallest = _counts(request).ranks(system, min(request.points))
    total = workload.train.batch_per_rank * smallest
    if total % ranks:
        raise UserError(
            f"--scaling strong: the global batch {total} ({workload.train.batch_per_rank} x {smallest} ranks) does "
            f"not divide by {ranks} ranks; choose train.batch_per_rank so that it does"
        )
    share, parts = total // ranks, workload.train.gradient_accumulation
    if share % parts:
        raise UserError(
            f"--scaling strong: {share} samples a rank at {ranks} ranks do not divide into "
            f"train.gradient_accumulation {parts} parts"
        )
    train = workload.train.model_copy(update={"batch_per_rank": share})
    return workload.model_copy(update={"train": train})
