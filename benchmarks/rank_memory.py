"""Memory of a rank beside that of the same training in a plain script of Horovod, and memory of the sampler.

It is the peak of resident memory (VmHWM of `/proc/PID/status`) of the whole life of the process, because limits of
jobs act on the peak. Shared pages count in full on both sides: libraries are the same, and nobody else maps them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.figures import Figure, Interval, median_interval
from benchmarks.known_loops import lacking

ROUNDS, STEPS, BATCH, EDGE = 7, 15, 8, 64  # Steps, batch and edge of images of ResNet-50 in preset ci.
NETWORK = """
from torch import fx
from dlbench.node.models.build import build_model
from dlbench.specs.workload import ResNetModel
model = build_model(ResNetModel(family="resnet", image_size={edge}, num_classes=10, zero_init_residual=True))
traced = fx.symbolic_trace(model)
for node in traced.graph.nodes:
    node.type = None  # The module would not import the types that it names.
traced.recompile()
traced.to_folder({folder!r}, "Network")
"""
"""Writes the network as a Python module that needs only torch."""


def figures() -> Iterator[Figure]:
    """Peak memory of a rank over that of the script, and that of the sampler."""
    about = {"name": "peak memory of a rank over a plain Horovod script, resnet50 ci, 1 rank", "unit": "ratio"}
    why = lacking("horovod", "cpu")
    if why:
        yield Figure(**about, goal="at most 1.02", value=None, reason=why)
        return
    with tempfile.TemporaryDirectory() as temporary:
        network = Path(temporary) / "network"
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NETWORK.format(edge=EDGE, folder=str(network))], check=True
        )
        script = [sys.executable, str(Path(__file__).with_name("plain_horovod.py")), str(network / "module.py")]
        script += [str(number) for number in (BATCH, EDGE, STEPS)]
        run = [sys.executable, "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--ranks", "1"]
        run += ["--engine", "horovod", "--data", "synthetic", "--set", "layout.cores_per_rank=1", "--no-progress"]
        scripts, ranks, samplers = [], [], []
        for number in range(ROUNDS):
            scripts.append(_peak_mb(script, script[1])[0])
            rank, sampler = _peak_mb(
                [*run, "--out", f"{temporary}/{number}"], "dlbench.node", "dlbench.node.watching.sampler"
            )
            ranks.append(rank)
            samplers.append(sampler)
    ratios = [rank / plain for rank, plain in zip(ranks, scripts, strict=True)]
    middles = f"{median_interval(ranks).value:.0f} over {median_interval(scripts).value:.0f} MB"
    yield Figure.of(ratios, **about, goal="at most 1.02", met=_verdict, reason=middles)
    yield Figure.of(samplers, name="peak memory of the sampler of a node", unit="MB", goal="measured")


def _verdict(ratio: Interval) -> bool | None:
    if ratio.low <= 1.02 < ratio.high:
        return None
    return ratio.high <= 1.02


def _peak_mb(command: Sequence[str], *modules: str) -> list[float]:
    """Runs a command; returns the peak memory of the process of each module or script, MB."""
    peaks = dict.fromkeys(modules, 0.0)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
        parent = psutil.Process(started.pid)
        while started.poll() is None:
            for process in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.Error, OSError, TypeError):  # It has ended.
                    words = process.cmdline()[1:4]
                    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
                    peak_mb = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 / 1e6  # type: ignore[index]
                    for module in set(modules) & set(words):
                        peaks[module] = max(peaks[module], peak_mb)
            time.sleep(0.1)
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {started.returncode}")
    return list(peaks.values())
