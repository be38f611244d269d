"""Stages of a pipeline: losses of DDP, bytes of activations, and their waiting against (p-1)/(m+p-1).

The network is large enough that computing dominates, and each rank has a thread, so that two cores are enough. Layers
are cut by measured times; embedding and heads make stages unequal, and the formula takes the longest into account.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from tests.support.forked_runs import run_forked

STAGES, BATCH, STEPS, HIDDEN = 2, 16, 8, 256
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


def figures() -> Iterator[Figure]:
    """Every figure of pipelines."""
    with tempfile.TemporaryDirectory() as folder:
        expected = _losses(_trained(Path(folder), "ddp", {}))
        for schedule, counts in MICROBATCHES.items():
            for num in counts:
                settings = {"engine.pipeline.schedule": schedule, "engine.pipeline.microbatches": num}
                run = _trained(Path(folder), "pipeline", settings)
                yield from _figures_of(run, expected, f"{schedule}, {num} microbatches")


def _trained(out: Path, engine: str, settings: dict[str, object]) -> Run:
    words = ["bert", "--preset", "ci", "--ranks", str(STAGES), "--repeats", "1", "--engine", engine, "--out", str(out)]
    for key, value in (LARGE | settings).items():
        words += ["--set", f"{key}={value}"]
    (run,) = run_forked(*words)
    return run


def _losses(run: Run) -> list[float]:
    by_rank = [read_steps(run.folder.steps(rank)).steps["loss"].tolist() for rank in range(STAGES)]
    return [sum(losses) / STAGES for losses in zip(*by_rank, strict=True)]


def _figures_of(run: Run, expected: list[float], name: str) -> Iterator[Figure]:
    record, pipeline = run.record, run.plan.engine.pipeline
    assert record is not None
    assert record.exchange is not None
    bubble, imbalance = record.bubble or 0.0, record.stage_imbalance or 1.0
    difference = max(abs(loss / of_ddp - 1) for loss, of_ddp in zip(_losses(run), expected, strict=True))
    sends = sum(message.num_bytes for message in record.exchange.messages if message.method == "send of activations")
    by_formula = BATCH * 64 * HIDDEN * 4
    yield Figure(
        name=f"largest difference of a step's loss to DDP's, pipeline of {STAGES} stages, {name}",
        value=difference,
        unit="relative",
        n=len(expected),
        goal="at most 1e-5, with the bytes of the formula",
        met=difference <= 1e-5 and sends == by_formula,
        reason=f"a stage sent {sends} bytes of activations in a step, by the formula {by_formula}",
    )
    formula = pipeline.bubble(imbalance)
    yield Figure(
        name=f"waiting of stages for one another, measured over the formula, {STAGES} stages, {name}",
        value=bubble / formula,
        unit="times",
        n=STEPS,
        goal="within 10 %",
        met=abs(bubble / formula - 1) <= 0.1,
        reason=f"{bubble:.1%} of the passes; (p-1)/(m+p-1) {pipeline.bubble():.1%}, with a longest stage of "
        f"{imbalance:.3f} times the mean {formula:.1%}",
    )
