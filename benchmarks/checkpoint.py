"""What a checkpoint costs training: written while training stands still, and by a thread while it goes on, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figures import Figure

WORKLOAD, IMAGE_SIZE, BATCH = "resnet50", 64, 4
"""ResNet-50 as published, with momentum: 205 MB of state. Small images, so that some steps fit into a write."""
ROUNDS = 9
STEPS = 12  # Of one stretch of training, which has one checkpoint.
WARMUP_STEPS = 3


def figures() -> Iterator[Figure]:
    """Time that training stands still, of a stretch with one checkpoint, and of steps beside a write."""
    import torch

    from dlbench.node.data.sharding import Position
    from dlbench.node.models.build import build_model, loss_for
    from dlbench.node.models.optimizers import build_optimizer
    from dlbench.node.sync.engine import SingleEngine
    from dlbench.node.training.activations import trial_passes
    from dlbench.node.training.checkpoint import CheckpointWriter, Progress, snapshot, write_snapshot
    from dlbench.node.training.precision import Precision
    from dlbench.specs.expand import expand
    from dlbench.specs.requests import Request, parse_set

    settings = parse_set((f"model.image_size={IMAGE_SIZE}", f"train.batch_per_rank={BATCH}"))
    request = Request(workload=WORKLOAD, preset="full", engine="single", points=(1,), overrides=settings)
    (plan,) = expand(request, machine_cores=1)
    torch.manual_seed(0)
    model, loss_of = build_model(plan.workload.model), loss_for(plan.workload.model)
    optimizer = build_optimizer(model, plan.workload.train.at_batch(plan.global_batch).optimizer)
    cpu = torch.device("cpu")
    batch = trial_passes(plan, model, cpu, Precision(plan.workload.train, cpu), loss_of).batch_of(BATCH)
    state = Progress(
        step=1, samples=1, epoch=0.0, position=Position(), train_s=0.0, wall_s=0.0, loss_scaling={}, evaluations=()
    )

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(work: Callable[[], object]) -> float:
        start = time.monotonic()
        work()
        return time.monotonic() - start

    for _ in range(WARMUP_STEPS):
        step()
    whole = SingleEngine().whole_state(model, optimizer)
    num_bytes = snapshot(whole, state, {}).num_bytes
    still: dict[str, list[float]] = {"waits": [], "thread": []}
    stretches: dict[str, list[float]] = {"waits": [], "thread": []}
    beside: list[float] = []  # Each a step within a write, seconds.
    without: list[float] = []  # Each the mean step of a stretch without a write beside it.
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        writer, path = CheckpointWriter(keep=1), Path(folder) / "checkpoints" / "step-00000001.safetensors"
        for number in range(ROUNDS + 1):  # the first sets memory up and is not counted
            alone = 0.0
            for kind in ("waits", "thread") if number % 2 else ("thread", "waits"):
                start = time.monotonic()
                if kind == "waits":
                    blocked = timed(lambda: write_snapshot(path, snapshot(whole, state, {})))
                else:
                    blocked = timed(lambda: writer.begin(path, whole, state, {}))
                during = []
                for _ in range(STEPS):
                    is_beside = not writer.wait(0)
                    took = timed(step)
                    if is_beside and not writer.wait(0):
                        during.append(took)
                    alone += took if kind == "waits" else 0.0
                blocked += timed(lambda: writer.wait(600))
                if number:
                    still[kind].append(blocked)
                    stretches[kind].append(time.monotonic() - start)
                    beside += during if kind == "thread" else []
            if number:
                without.append(alone / STEPS)
    megabytes = f"{num_bytes / 1e6:.0f} MB"
    for kind, how in (("waits", "written while training waits"), ("thread", "written by the thread")):
        yield Figure.of(
            still[kind],
            name=f"training stands still for a checkpoint of {megabytes}, {how}",
            unit="s",
            goal="none" if kind == "waits" else "below the one before",
            met=None if kind == "waits" else lambda one: one.high < min(still["waits"]),
        )
    ratios = [own / other for own, other in zip(stretches["waits"], stretches["thread"], strict=True)]
    yield Figure.of(
        ratios,
        name=f"{STEPS} steps and one checkpoint, waiting over thread, {WORKLOAD} at {IMAGE_SIZE} pixels",
        unit="ratio of times",
        goal="at least 1",
        met=lambda one: True if one.low >= 1 else False if one.high < 1 else None,
    )
    mean_step = sum(without) / len(without)
    about = {"name": "a step while a checkpoint is written, over a step without", "unit": "ratio of times"}
    if len(beside) < 2:
        yield Figure(**about, value=None, goal="none", reason="no step fitted into a write: the disk is too fast")
        return
    yield Figure.of([took / mean_step for took in beside], **about, goal="none")
