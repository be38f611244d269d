"""dlbench's measured loop against loops that users know, rewritten plainly, in turns, in one process.

- synthetic: one fixed batch, `hvd.DistributedOptimizer`, nothing but zero, forward, loss, backward, step; what
  Horovod's synthetic benchmark of PyTorch measures.
- timm-style: a loop over a loader's batches in memory, moved to the device, under autocast where the precision is bf16;
  the learning rate is set in each step.
- without dlbench: as synthetic, with a network, an optimizer and a `DistributedDataParallel` of its own, of which no
  part of dlbench's loop, engine, hooks or data knows.

Each trains the workload's own network, loss and optimizer with every axis as `FASTEST` has it, on batches of the same
size with the same threads. Usage, one rank: ``python -m benchmarks.known_loops PLAN OUT KIND PAIRS``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.figures import Figure, median_interval
from dlbench.analysis.measures import measured_or_why
from dlbench.jobs.scripts.launch import local_environments
from dlbench.node.__main__ import load_plan
from dlbench.node.ranks import bind, detect
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.scan import scan
from dlbench.specs.expand import expand
from dlbench.specs.plan import value_text
from dlbench.specs.requests import Request, parse_set

if TYPE_CHECKING:
    import torch

    from dlbench.node.training.context import TrainState
    from dlbench.records.record import Compiling
    from dlbench.specs.plan import RunPlan

ROOT = Path(__file__).resolve().parents[1]
PAIRS = 20
REPEATS = 5
_FUSED = ("train.optimizer.implementation=fused",)
AXES = {
    "resnet50": (
        _FUSED,
        ("model.memory_format=channels-last",),
        ("train.precision=bf16", "model.memory_format=channels-last"),
    ),
    "bert": (_FUSED, ("train.precision=bf16",), ("train.precision=bf16", "train.compile=default")),
    "cosmoflow": (
        _FUSED,
        ("model.memory_format=channels-last",),
        ("train.precision=bf16", "model.memory_format=channels-last"),
    ),
}
"""What is tried of each workload: a setting, and what is set besides."""
WARMUP_STEPS = 10
"""Batches before the first timed one, as in Horovod's benchmark."""
STEPS = {"resnet50": 8, "bert": 20, "cosmoflow": 15}
"""Of a block."""
GOAL, LOW_GOAL = 0.99, 0.97  # Of the median, and of the lower end of its interval.
LIMIT_S = 1500


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop that people know."""

    kind: str
    title: str
    engines: dict[int, str]  # Of dlbench's loop, by ranks.


LOOPS = (
    Loop(kind="synthetic", title="a plain Horovod benchmark", engines={1: "horovod", 2: "horovod"}),
    Loop(kind="timm", title="a plain timm-style loop", engines={1: "ddp", 2: "ddp"}),
    Loop(kind="bare", title="the same loop without dlbench", engines={1: "single", 2: "ddp"}),
)

_ON_GPUS = ("train.precision=bf16", "train.compile=default", "data.synthetic_on=device")

FASTEST: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "resnet50": ("model.memory_format=channels-last", "train.precision=bf16"),
        "bert": ("train.compile=default", "train.precision=bf16"),
        "cosmoflow": ("model.memory_format=channels-last", "train.precision=bf16"),
    },
    "cuda": {
        "resnet50": (*_ON_GPUS, "model.memory_format=channels-last"),
        "bert": _ON_GPUS,
        "cosmoflow": (*_ON_GPUS, "model.memory_format=channels-last"),
    },
}
"""Settings with which each workload is fastest, by `python -m benchmarks spine.axes`."""


def figures(
    device: str = "cpu", ranks: Sequence[int] = (1, 2), pairs: int = PAIRS, workloads: Sequence[str] = tuple(STEPS)
) -> Iterator[Figure]:
    """Every workload against every known loop.

    Args:
        device: cpu; or cuda, where preset `gpu` is taken and one rank.
        ranks: rank counts, 1 and 2.
        pairs: blocks of each side.
        workloads: which.
    """
    for workload in workloads:
        for num in ranks if device == "cpu" else (1,):
            for loop in LOOPS:
                yield against(loop, workload, num, device, pairs)


def against(loop: Loop, workload: str, ranks: int, device: str, pairs: int = PAIRS) -> Figure:
    """One workload against one loop: throughput of the measured loop over that of the known one."""
    preset, engine = "ci" if device == "cpu" else "gpu", loop.engines[ranks]
    name = f"measured loop over {loop.title}, {workload} {preset}, {ranks} rank{'s' * (ranks > 1)}, {engine}"
    about = {"name": name, "unit": "ratio of throughputs", "goal": f"median {GOAL:g}, lower end {LOW_GOAL:g}"}
    why = lacking(engine, device)
    if why:
        return Figure(**about, value=None, reason=why)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # One more before those that are timed, and one to end them.
        fixed = (f"measure.measured_steps={STEPS[workload] + 2}", "measure.warmup_steps=0")
        fixed = (*fixed, "measure.warmup_s=0", "measure.measured_s=0")
        if device == "cpu":
            fixed = (*fixed, "layout.cores_per_rank=1")
        request = Request(
            workload=workload,
            preset=preset,
            engine=engine,
            points=(ranks,),
            overrides=parse_set((*fixed, *fastest(workload, device))),
        )
        (plan,) = expand(request, machine_cores=len(os.sched_getaffinity(0)))
        run = create(prepare_output(folder / "runs"), plan)
        out = folder / "ratios.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.known_loops"]
        command += [str(run.plan), str(out), loop.kind, str(pairs)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        environments = [
            {**os.environ, **hidden, **variables} for variables in local_environments(plan, secrets.token_hex(8))
        ]
        if not _ends_well(command, environments):
            return Figure(**about, value=None, reason="a rank failed; its error is above")
        found = json.loads(out.read_text())
    # An interval that holds a goal tells neither.
    median = median_interval(found)
    met = True if median.low >= LOW_GOAL and median.value >= GOAL else False if median.high < GOAL else None
    # The process of both keeps freed pages on a CPU, as every rank of dlbench does.
    settings = ", ".join([*fastest(workload, device), *["freed pages kept on both sides"] * (device == "cpu")])
    return Figure.of(found, **about, met=met, reason=settings)


def fastest(workload: str, device: str) -> tuple[str, ...]:
    """The settings of `FASTEST` that this machine has the arithmetic for."""
    from dlbench.machine.arithmetic import native_precisions

    chosen = FASTEST[device][workload]
    if device == "cpu" and "bf16" not in (native_precisions() or ()):
        return tuple(setting for setting in chosen if setting != "train.precision=bf16")
    return chosen


def axes() -> Iterator[Figure]:
    """What each axis does to each workload on this CPU, in turns: throughput over that of the plain run."""
    for workload, (setting, *others) in ((name, axis) for name in STEPS for axis in AXES[name]):
        key, _, value = setting.partition("=")
        yield axis(workload, key, value, tuple(others))


def compiled(workloads: Sequence[str] = tuple(STEPS)) -> Iterator[Figure]:
    """What torch.compile does to each workload on this CPU: the ratio compile default to none, and the seconds that the
    first run of the series compiles for, and later ones, which load what it compiled.
    """
    for workload in workloads:
        with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
            took: list[Compiling] = []
            yield axis(workload, "train.compile", "default", (), took=took)
        for name, cache in (("cold", "cold"), ("from torch's cache", "warm")):
            seconds = [one.seconds or 0.0 for one in took if one.cache == cache]
            about = {"name": f"{workload} ci, compiling, {name}", "unit": "s", "goal": "measured"}
            if seconds:
                yield Figure.of(seconds, **about)
            else:
                yield Figure(**about, value=None, reason="no run of the series did so")


PLAIN = {
    "train.compile": "none",
    "train.precision": "fp32",
    "model.memory_format": "contiguous",
    "train.optimizer.implementation": "foreach",
    "engine.ddp.gradient_as_bucket_view": "false",
}


def axis(
    workload: str,
    key: str,
    value: str,
    others: tuple[str, ...],
    *,
    engine: str = "single",
    ranks: int = 1,
    took: list[Compiling] | None = None,
) -> Figure:
    """Two values of one key as a series of runs whose order takes turns; a ratio is of runs of the same repeat.

    `took`: gets what rank 0 of each run that compiled says of it.
    """
    plain = PLAIN[key]
    many = f", {ranks} ranks" if ranks > 1 else ""
    name = f"{workload} ci{many}, {key} {value} over {plain}{''.join(f', {one}' for one in others)}"
    about = {"name": name, "unit": "ratio of throughputs", "goal": "measured"}
    with tempfile.TemporaryDirectory() as out:
        words = ["run", workload, "--preset", "ci", "--engine", engine, "--ranks", str(ranks)]
        words += ["--repeats", str(REPEATS)]
        words += ["--sweep", f"{key}={plain},{value}", "--out", out, "--no-progress"]
        words += [word for setting in others for word in ("--set", setting)]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dlbench", *words],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        rates: dict[tuple[str, int], float] = {}
        for run in scan(Path(out)).runs:
            measures, _ = measured_or_why(run)
            if measures is not None and run.record is not None:
                if took is not None and run.record.ranks[0].compiling is not None:
                    took.append(run.record.ranks[0].compiling)
                rates[value_text(key, run.plan.series.axes[key]), run.plan.series.repeat] = measures.throughput
    ratios = [rates[value, k] / rates[plain, k] for k in range(REPEATS) if {(value, k), (plain, k)} <= rates.keys()]
    if not ratios:
        return Figure(**about, value=None, reason=(done.stderr or done.stdout)[-300:])
    return Figure.of(ratios, **about)


def lacking(engine: str, device: str) -> str:
    """Why a loop cannot be run here; empty where it can."""
    import torch

    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    return "torch sees no GPU" if device == "cuda" and not torch.cuda.is_available() else ""


def _ends_well(command: Sequence[str], environments: Sequence[dict[str, str]]) -> bool:
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) for environment in environments
    ]
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
        return not any(codes)
    finally:
        for process in processes:
            process.kill()  # without effect on those that have ended


# One rank


def main(plan_file: Path, out: Path, kind: str, pairs: int) -> None:
    """Both loops in turns; rank 0 writes the ratios."""
    plan = load_plan(plan_file)
    place = detect(plan)
    binding = bind(plan, place)

    import torch

    from dlbench.node.devices import device_for
    from dlbench.node.sync.build_engine import build_engine
    from dlbench.node.training import phases
    from dlbench.node.training.loop import TrainingLoop
    from dlbench.node.training.progress import ProgressReporter, Watchdog
    from dlbench.node.training.run import Rank
    from tests.support.one_rank import context_of

    torch.set_num_threads(binding.threads)
    folder = RunFolder(plan_file.parent)
    device = device_for(plan, place)
    engine = build_engine(plan, folder, place, device)
    engine.start()
    timer = phases.timer_for(device, synchronise=False)
    marks: dict[int, float] = {}
    last = plan.measure.measured_steps - 1

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    class Marking(ProgressReporter):
        def on_step(self, step: int) -> None:
            super().on_step(step)
            if step in (1, last):
                marks[step] = now()

    watchdog = Watchdog(LIMIT_S, lambda reason: None)
    watchdog.start()
    status = Marking(plan, folder, place)
    context = context_of(plan, engine=engine, device=device, place=place, status=status, watchdog=watchdog)
    state = Rank(context, timer).prepare()
    known = {"synthetic": synthetic, "timm": timm_style, "bare": without_dlbench}[kind](plan, state, device)

    def of_measured() -> float:
        """All that happens from the end of one step to the end of a later one, its recording included."""
        name = f"block-{place.rank}-{time.monotonic_ns()}.steps"
        TrainingLoop(state, timer).run(folder.path / name)
        return marks[last] - marks[1]

    def of_known() -> float:
        known(1)
        began = now()
        known(last - 1)
        return now() - began

    known(WARMUP_STEPS)
    ratios = []
    for pair in range(pairs):
        # Which goes first alternates, so that a drift falls on both alike.
        blocks = (of_known, of_measured) if pair % 2 == 0 else (of_measured, of_known)
        times = {}
        for block in blocks:
            engine.barrier()
            times[block] = block()
        ratios.append(times[of_known] / times[of_measured])
    watchdog.stop()
    if place.rank == 0:
        out.write_text(json.dumps(ratios))
    state.source.close()
    engine.barrier()
    engine.stop()


def synthetic(plan: RunPlan, state: TrainState, device: torch.device) -> Callable[[int], None]:
    """One batch that stays on the device, and the five lines of training that everybody writes."""
    import torch

    model, optimizer, loss_of = state.wrapped, state.optimizer, state.loss
    batch = {name: tensor.to(device) for name, tensor in next(state.batches).items()}
    clip, precision = plan.workload.train.optimizer.clip_norm, plan.workload.train.precision

    def steps(num: int) -> None:
        for _ in range(num):
            with _autocast(precision, device):
                loss = loss_of(model, batch)
            optimizer.zero_grad()  # here their memory serves the forward pass
            loss.backward()
            if clip is None:
                optimizer.step()
                continue
            optimizer.synchronize()  # type: ignore[attr-defined]  # Horovod's
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()

    return steps


def without_dlbench(plan: RunPlan, state: TrainState, device: torch.device) -> Callable[[int], None]:
    """A network and an optimizer of its own on one batch; of several ranks in torch's own DDP.

    Optimizers are dlbench's classes here too: torch's own but for the import of its compiler, and LAMB.
    """
    import torch

    from dlbench.node.models.build import build_model, loss_for, network_of
    from dlbench.node.models.optimizers import build_optimizer

    train, spec = plan.workload.train, plan.workload.model
    torch.manual_seed(train.seed)
    network = build_model(spec).to(device)
    if spec.order == "channels-last":
        network.to(memory_format=network_of(spec).channels_last)  # type: ignore[call-overload]  # in place
    optimizer = build_optimizer(network, train.at_batch(plan.global_batch).optimizer)
    if train.compile != "none":
        network.compile(dynamic=False, mode=train.compile)
    model: torch.nn.Module = network
    if plan.layout.ranks > 1:
        views = plan.engine.ddp.views_buckets(on_gpu=device.type == "cuda")
        model = torch.nn.parallel.DistributedDataParallel(
            network, broadcast_buffers=False, gradient_as_bucket_view=views
        )
    loss_of, clip, precision = (
        loss_for(spec, label_smoothing=train.label_smoothing),
        train.optimizer.clip_norm,
        train.precision,
    )
    batch = {name: tensor.to(device) for name, tensor in next(state.batches).items()}

    def steps(num: int) -> None:
        for _ in range(num):
            with _autocast(precision, device):
                loss = loss_of(model, batch)
            optimizer.zero_grad()  # here their memory serves the forward pass
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return steps


def timm_style(plan: RunPlan, state: TrainState, device: torch.device) -> Callable[[int], None]:
    """A loader's batches, autocast, a rate that follows a schedule; gradients go after the update, as in timm."""
    import torch

    model, optimizer, loss_of = state.wrapped, state.optimizer, state.loss
    clip, precision = plan.workload.train.optimizer.clip_norm, plan.workload.train.precision

    def steps(num: int) -> None:
        for number in range(num):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(state.batches).items()}
            with _autocast(precision, device):
                loss = loss_of(model, batch)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = state.rate.at(number)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def _autocast(precision: str, device: torch.device) -> torch.autocast | nullcontext[None]:
    import torch

    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
