"""CosmoFlow's volumes shared by 2 and 4 ranks against whole ones: losses, bytes of planes, memory of a rank.

On a CPU ranks wait for every plane: speed is no figure here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from benchmarks.figures import Figure
from dlbench.projection.strategies.layers import as_counted, counted
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.units import format_bytes
from tests.support.forked_runs import run_forked

BATCH = 2  # Volumes per rank; one alone would be computed by other kernels on a CPU.
WORDS = (
    *("cosmoflow", "--preset", "ci", "--engine", "ddp", "--repeats", "1", "--set", "model.input_size=64"),
    *("--set", f"train.batch_per_rank={BATCH}", "--set", "measure.warmup_steps=3", "--set", "measure.measured_steps=2"),
    # Rates at which rounding does not grow within five steps.
    *("--set", "train.optimizer.learning_rate=0.001", "--set", "train.optimizer.learning_rate_scaling=none"),
)


def figures() -> Iterator[Figure]:
    """Yields the figures of spatial parallelism at 2 and 4 ranks."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as out:
            words = (*WORDS, "--ranks", str(ranks), "--sweep", f"engine.ddp.spatial_ranks=1,{ranks}", "--out", out)
            whole, cut = run_forked(*words)
            difference = max(abs(a / b - 1) for a, b in zip(_losses(cut), _losses(whole), strict=True))
        assert whole.record is not None
        assert cut.record is not None
        layers = whole.plan.workload.model.layer_table(whole.plan.workload.data)
        memory = counted(layers, whole.plan, whole.record)
        assert memory is not None
        shape = {"slots": 1, "batch": BATCH * ranks, "ranks": ranks, "slabs": ranks}
        predicted, held = as_counted(layers, memory, "spatial", **shape), cut.record.held_bytes or 0
        (setting,) = [setting for setting in cut.record.settings if setting.key == "engine.ddp.spatial_ranks"]
        ratio, where = predicted / held, f"volumes of 64^3 cut over {ranks} ranks"
        name = f"largest difference of a step's loss to whole volumes, {where}"
        goal = "at most 1e-5"
        yield Figure(name=name, value=difference, unit="relative", n=5, goal=goal, met=difference <= 1e-5)
        name, met = f"all ranks sent planes of the bytes of the formula, {where}", setting.effective == ranks
        yield Figure(name=name, value=float(met), unit="", goal="1", met=met, reason=setting.evidence)
        name = f"memory of a rank, projected from whole volumes over measured, {where}"
        reason = f"measured {format_bytes(held)}, projected {format_bytes(predicted)}"
        met = abs(ratio - 1) <= 0.1
        yield Figure(name=name, value=ratio, unit="times", goal="within 10 %", met=met, reason=reason)


def _losses(run: Run) -> list[float]:
    """Returns the loss of each step, the mean over ranks."""
    by_rank = [read_steps(run.folder.steps(rank)).steps["loss"] for rank in range(run.plan.layout.ranks)]
    return [float(loss) for loss in sum(by_rank) / len(by_rank)]
