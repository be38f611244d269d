"""Ranks that share one network or its volumes, and workers emulated in one process: against DDP and the formulas.

Pipeline: losses of DDP, bytes of activations, and waiting of stages against (p-1)/(m+p-1). The network is large enough
that computing dominates, and each rank has a thread, so that two cores are enough. Layers are cut by measured times;
embedding and heads make stages unequal, and the formula takes the longest into account.

Spatial: CosmoFlow's volumes shared by 2 and 4 ranks against whole ones: losses, bytes of planes, memory of a rank. On a
CPU ranks wait for every plane: speed is no figure here.

Asynchronous: emulated workers, the same run twice, synchronous ones against real ranks, and the bound of staleness.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures import Figure
from dlbench.projection.strategies.layers import as_counted, counted
from dlbench.records.scan import Run
from dlbench.units import format_bytes
from tests.support.forked_runs import mean_losses, run_forked

STAGES, BATCH, STEPS, HIDDEN = 2, 16, 8, 512
MICROBATCHES = {"gpipe": (1, 2, 4, 8), "1f1b": (2, 4, 8)}
LARGE = {  # Of BERT `ci`, whose sequences have 64 tokens.
    "model.hidden_size": HIDDEN,
    "model.intermediate_size": 4 * HIDDEN,
    "model.num_layers": 8,
    "layout.cores_per_rank": 1,
    "measure.warmup_steps": 3,
    "measure.measured_steps": STEPS,
    "train.optimizer.name": "sgd",
    "train.batch_per_rank": BATCH // STAGES,
    "watch.sampler": "false",
}
VOLUMES = 2  # Per rank; one alone would be computed by other kernels on a CPU.
SHARED_VOLUMES = {
    "model.input_size": 64,
    "train.batch_per_rank": VOLUMES,
    "measure.warmup_steps": 3,
    "measure.measured_steps": 2,
    # Rates at which rounding does not grow within five steps.
    "train.optimizer.learning_rate": 0.001,
    "train.optimizer.learning_rate_scaling": "none",
}
BOUND = 2
SMALL = {"model.input_size": 16, "model.conv_channels": "[8,8,8]"}
SLOW = {"train.batch_per_rank": 2, "fault.ranks": 1, "fault.compute_factor": 5.0}
GOAL = 1e-5  # Of relative differences of losses.


def _trained(out: str, workload: str, engine: str, ranks: int, settings: dict[str, object], *more: str) -> list[Run]:
    words = [workload, "--preset", "ci", "--ranks", str(ranks), "--repeats", "1", "--engine", engine, "--out", out]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return run_forked(*words, *more)


def _difference(name: str, losses: Sequence[float], expected: Sequence[float], reason: str = "") -> Figure:
    """The largest difference of a step's loss."""
    value = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
    goal, num = "at most 1e-5", len(expected)
    return Figure(name=name, value=value, unit="relative", n=num, goal=goal, met=value <= GOAL, reason=reason)


def pipeline() -> Iterator[Figure]:
    """Every figure of pipelines."""
    with tempfile.TemporaryDirectory() as out:
        (whole,) = _trained(out, "bert", "ddp", STAGES, LARGE)
        for schedule, counts in MICROBATCHES.items():
            for num in counts:
                settings = {"engine.pipeline.schedule": schedule, "engine.pipeline.microbatches": num}
                (run,) = _trained(out, "bert", "pipeline", STAGES, LARGE | settings)
                yield from _stages(run, mean_losses(whole), f"{schedule}, {num} microbatches")


def _stages(run: Run, expected: list[float], name: str) -> Iterator[Figure]:
    record, settings = run.record, run.plan.engine.pipeline
    assert record is not None
    assert record.exchange is not None
    bubble, imbalance = record.bubble or 0.0, record.stage_imbalance or 1.0
    sends = sum(message.num_bytes for message in record.exchange.messages if message.method == "send of activations")
    by_formula = BATCH * 64 * HIDDEN * 4
    reason = f"a stage sent {sends} bytes of activations in a step, by the formula {by_formula}"
    name_of_loss = f"largest difference of a step's loss to DDP's, pipeline of {STAGES} stages, {name}"
    difference = _difference(name_of_loss, mean_losses(run), expected, reason)
    goal, is_met = f"{difference.goal}, with the bytes of the formula", bool(difference.met) and sends == by_formula
    yield dataclasses.replace(difference, goal=goal, met=is_met)
    formula = settings.bubble(imbalance)
    yield Figure(
        name=f"waiting of stages for one another, measured over the formula, {STAGES} stages, {name}",
        value=bubble / formula,
        unit="times",
        n=STEPS,
        goal="within 10 %",
        met=abs(bubble / formula - 1) <= 0.1,
        reason=f"{bubble:.1%} of the passes; (p-1)/(m+p-1) {settings.bubble():.1%}, with a longest stage of "
        f"{imbalance:.3f} times the mean {formula:.1%}",
    )


def spatial() -> Iterator[Figure]:
    """Yields the figures of spatial parallelism at 2 and 4 ranks."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as out:
            sweep = ("--sweep", f"engine.ddp.spatial_ranks=1,{ranks}")
            whole, cut = _trained(out, "cosmoflow", "ddp", ranks, SHARED_VOLUMES, *sweep)
            where = f"volumes of 64^3 cut over {ranks} ranks"
            name = f"largest difference of a step's loss to whole volumes, {where}"
            yield _difference(name, mean_losses(cut), mean_losses(whole))
        assert whole.record is not None
        assert cut.record is not None
        layers = whole.plan.workload.model.layer_table(whole.plan.workload.data)
        memory = counted(layers, whole.plan, whole.record)
        assert memory is not None
        shape = {"slots": 1, "batch": VOLUMES * ranks, "ranks": ranks, "slabs": ranks}
        predicted, held = as_counted(layers, memory, "spatial", **shape), cut.record.held_bytes or 0
        (setting,) = [setting for setting in cut.record.settings if setting.key == "engine.ddp.spatial_ranks"]
        ratio = predicted / held
        name, met = f"all ranks sent planes of the bytes of the formula, {where}", setting.effective == ranks
        yield Figure(name=name, value=float(met), unit="", goal="1", met=met, reason=setting.evidence)
        name = f"memory of a rank, projected from whole volumes over measured, {where}"
        reason = f"measured {format_bytes(held)}, projected {format_bytes(predicted)}"
        met = abs(ratio - 1) <= 0.1
        yield Figure(name=name, value=ratio, unit="times", goal="within 10 %", met=met, reason=reason)


def asynchronous() -> Iterator[Figure]:
    """All figures of emulated workers, two of them against two real ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "runs")
        (real,) = _trained(out, "cosmoflow", "ddp", 2, SMALL | SLOW)
        steps_from = {"engine.emulated.steps_from": real.folder.path, "engine.emulated.staleness": BOUND}
        settings = SMALL | {"train.gradient_accumulation": 2, "train.batch_per_rank": 4} | steps_from
        policies = ("--sweep", "engine.emulated.policy=bsp,ssp,asp")
        runs = _trained(out, "cosmoflow", "emulated", 1, settings, *policies)
        runs += _trained(out, "cosmoflow", "emulated", 1, settings, *policies)
        losses = [mean_losses(run) for run in (*runs, real)]
    clocks = [run.record.emulation for run in runs if run.record is not None]
    num_equal = sum(clocks[i] == clocks[i + 3] and losses[i] == losses[i + 3] for i in range(3))
    most = [len(emulation.staleness) - 1 for emulation in clocks if emulation is not None]
    reason = f"cosmoflow ci at 16^3, 2 workers, {len(losses[0])} steps; staleness without a bound {most[2]}"
    name = "emulated policies with equal losses, times and staleness when run twice"
    yield Figure(name=name, value=num_equal, unit="of 3", goal="3", met=num_equal == 3, reason=reason)
    name = "largest difference of a step's loss to DDP's, bsp emulated"
    yield _difference(name, losses[0], losses[-1], reason)
    name, goal = f"largest staleness, ssp {BOUND} emulated", f"at most {BOUND}"
    yield Figure(name=name, value=most[1], unit="clocks", goal=goal, met=most[1] <= BOUND, reason=reason)
