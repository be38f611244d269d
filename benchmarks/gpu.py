"""What each axis of precision and speed does on this machine's GPU: throughput over that of preset `gpu` as it is.

Runs of one rank on one GPU, by the command that users run; the values of an axis take turns within a series, and a
ratio is of runs of the same repeat. Without a GPU nothing is measured, and each figure says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure
from dlbench.analysis.measures import measured_or_why
from dlbench.records.scan import Run, scan

REPEATS = 3
SECONDS = ("measure.warmup_s=5.0", "measure.measured_s=10.0")
"""Shorter than a run whose figure is quoted: neighbours of one session are compared."""
RUN_S = 900
"""After which a series is given up, for each run."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key, and the values that are compared; the first is what the others are divided by."""

    key: str
    values: tuple[str, ...]


_EVERYWHERE = (
    Axis(key="train.precision", values=("bf16", "fp32", "tf32", "fp16")),
    Axis(key="train.compile", values=("none", "default", "reduce-overhead", "max-autotune")),
    Axis(key="train.cuda_graphs", values=("none", "network")),
    Axis(key="train.optimizer.implementation", values=("foreach", "fused")),
    Axis(key="data.synthetic_on", values=("host", "device")),
)
_CONVOLUTIONS = (
    Axis(key="model.memory_format", values=("contiguous", "channels-last")),
    Axis(key="train.cudnn_benchmark", values=("off", "on")),
)
AXES = {
    "resnet50": (*_EVERYWHERE, *_CONVOLUTIONS),
    "bert": (*_EVERYWHERE, Axis(key="model.attention", values=("masked", "auto"))),
    "cosmoflow": (*_EVERYWHERE, *_CONVOLUTIONS),
}


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    for workload in AXES:
        yield from axes(workload)


def axes(workload: str) -> Iterator[Figure]:
    """Every axis of one workload."""
    why = lacking()
    with tempfile.TemporaryDirectory() as temporary:
        for number, axis in enumerate(AXES[workload]):
            if why:
                yield from (_unmeasured(workload, axis, value, why) for value in axis.values[1:])
            else:
                yield from _along(workload, axis, Path(temporary) / str(number))


def lacking() -> str:
    """Why nothing can be measured here; empty where a GPU is."""
    import torch

    if torch.cuda.is_available():
        return ""
    built = "torch sees no GPU" if torch.version.cuda or torch.version.hip else "this torch was built without CUDA"
    return f"GPU: {built}"


def _along(workload: str, axis: Axis, out: Path) -> Iterator[Figure]:
    words = ["run", workload, "--preset", "gpu", "--engine", "single", "--repeats", str(REPEATS), "--no-progress"]
    words += ["--sweep", f"{axis.key}={','.join(axis.values)}", "--out", str(out)]
    words += [word for setting in SECONDS for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlbench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=RUN_S * REPEATS * len(axis.values),
    )
    runs = scan(out).runs if out.exists() else []
    rates, reasons = _rates(runs, axis)
    print("  " + "; ".join(f"{value}: {_rounded(found)}" for value, found in rates.items()), flush=True)
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    for value in axis.values[1:]:
        pairs = [(rates[value][k], rates[axis.values[0]][k]) for k in rates[value] if k in rates[axis.values[0]]]
        if not pairs:
            yield _unmeasured(workload, axis, value, reasons.get(value) or f"ended with {done.returncode}: {last}")
            continue
        yield Figure.of(
            [one / base for one, base in pairs],
            name=_name(workload, axis, value),
            unit="ratio of throughputs",
            goal="measured",
            reason=_batch_norm(runs, axis),
        )


def _rates(runs: list[Run], axis: Axis) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Samples per second by value and repeat; why a value has none."""
    rates: dict[str, dict[int, float]] = {value: {} for value in axis.values}
    reasons: dict[str, str] = {}
    for run in runs:
        value = str(run.plan.series.axes.get(axis.key))
        measures, why = measured_or_why(run)
        if measures is not None:
            rates[value][run.plan.series.repeat] = measures.throughput
        else:
            reasons[value] = why
    return rates, reasons


def _batch_norm(runs: list[Run], axis: Axis) -> str:
    """Whose kernels computed batch norm, by value: torch leaves bf16 to its own, and fp16 and fp32 to cuDNN."""
    found = {
        str(run.plan.series.axes.get(axis.key)): setting.effective
        for run in runs
        for setting in (run.record.settings if run.record else ())
        if setting.key == "model.batch_norm"
    }
    how = ", ".join(f"{value}: {kernels}" for value, kernels in found.items())
    return f"batch norm by {how}" if len(set(found.values())) > 1 else ""


def _rounded(found: dict[int, float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in found.values()) or "none"


def _name(workload: str, axis: Axis, value: str) -> str:
    return f"{workload}, preset gpu, {axis.key}: {value} over {axis.values[0]}"


def _unmeasured(workload: str, axis: Axis, value: str, why: str) -> Figure:
    return Figure(
        name=_name(workload, axis, value), value=None, unit="ratio of throughputs", goal="measured", reason=why
    )
