"""Emulated workers: the same run twice, synchronous ones against real ranks, and the bound of staleness."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from dlbench.records.rows.steps import read_steps
from tests.support.forked_runs import run_forked

BOUND = 2
SLOW = ("--set", "fault.ranks=1", "--set", "fault.compute_factor=5.0")
SMALL = ("--preset", "ci", "--repeats", "1", "--set", "model.input_size=16", "--set", "model.conv_channels=[8,8,8]")


def figures() -> Iterator[Figure]:
    """All figures of emulated workers, two of them against two real ranks."""
    with tempfile.TemporaryDirectory() as folder:
        where = ("--out", Path(folder) / "runs")
        settings = ("--engine", "ddp", "--set", "train.batch_per_rank=2", *SLOW)
        (real,) = run_forked("cosmoflow", *SMALL, "--ranks", "2", *settings, *where)
        steps = f"engine.emulated.steps_from={real.folder.path}"
        settings = ("--set", "train.gradient_accumulation=2", "--set", "train.batch_per_rank=4", "--set", steps)
        policies = ("--sweep", "engine.emulated.policy=bsp,ssp,asp", "--set", f"engine.emulated.staleness={BOUND}")
        emulated = ("cosmoflow", *SMALL, "--ranks", "1", "--engine", "emulated", *settings, *policies)
        runs = [*run_forked(*emulated, *where), *run_forked(*emulated, *where)]
        losses = [read_steps(run.folder.steps(0)).steps["loss"] for run in runs]
        real_losses = sum(read_steps(real.folder.steps(rank)).steps["loss"] for rank in range(2)) / 2
    clocks = [run.record.emulation for run in runs if run.record is not None]
    num_equal = sum(clocks[i] == clocks[i + 3] and list(losses[i]) == list(losses[i + 3]) for i in range(3))
    most = [len(emulation.staleness) - 1 for emulation in clocks if emulation is not None]
    apart = float(abs(losses[0] / real_losses - 1).max())
    bound = f"at most {BOUND}"
    for name, value, unit, goal, is_met in (
        (
            "emulated policies with equal losses, times and staleness when run twice",
            num_equal,
            "of 3",
            "3",
            num_equal == 3,
        ),
        (
            "largest difference of a step's loss to DDP's, bsp emulated",
            apart,
            "relative",
            "at most 1e-5",
            apart <= 1e-5,
        ),
        (f"largest staleness, ssp {BOUND} emulated", most[1], "clocks", bound, most[1] <= BOUND),
    ):
        reason = f"cosmoflow ci at 16^3, 2 workers, {len(losses[0])} steps; staleness without a bound {most[2]}"
        yield Figure(name=name, value=value, unit=unit, goal=goal, met=bool(is_met), reason=reason)
