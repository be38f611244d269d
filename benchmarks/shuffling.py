"""What shuffling costs and what it is worth.

**Time.** Two ranks read volumes of 262 kB in step, each with one reader process, and wait in every step as long as an
accelerator would compute: nothing else uses the cores. Under global shuffling they read from a file system throttled to
20 MB/s, each sample cold, as if the data set did not fit into the page cache; under local and partial shuffling from a
staged part on the local disk. All in turns.

**Accuracy.** A small ResNet with batch norm trains by `dlbench run --to-accuracy` on photographs whose classes lie one
after another: a rank that keeps what it first held sees some classes only, and so do its batch-norm statistics.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from dlbench.datasets.shuffling import Ownership
from dlbench.datasets.staging.samples import SampleStore
from dlbench.datasets.volumes import targets_name
from dlbench.records.scan import scan
from tests.support.slow_storage import SlowStorage, slow_storage, why_no_storage

RANKS, SAMPLES, BATCH, SEED = 2, 192, 4, 0
COMPUTE_S = 0.025
SHARED_BYTES_PER_S = 20e6
ROUNDS = 7
EPOCHS = {"global": 2, "local": 6, "partial:0.1": 6}
SMALL_RESNET = Path(__file__).with_name("small-resnet.yaml")
TRAINED_BY = 4
"""Ranks that train for accuracy, more than cores: the fewer classes each holds, the more local shuffling loses."""
TRAININGS = ("local", "partial:0.1", "partial:0.3")
SEEDS = (0, 1)
LAST = 3
"""Evaluations whose mean counts: one alone scatters by some per cent."""


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from times()
    yield from accuracies()


# Time


def times() -> Iterator[Figure]:
    """Epoch times of global, local and partial shuffling, and what the audit takes of them."""
    reason = why_no_storage()
    if reason is None and len(os.sched_getaffinity(0)) < RANKS:
        reason = "one core"
    if reason is not None:
        yield Figure(name="shuffling: epoch time", value=None, unit="", goal="measured", reason=reason)
        return
    with (
        slow_storage(SHARED_BYTES_PER_S, size_bytes=SAMPLES * (300 << 10) + (32 << 20)) as shared,
        tempfile.TemporaryDirectory() as temporary,
    ):
        _write(shared.path)
        seconds, audit = _measure(shared, Path(temporary))
    for mode, values in seconds.items():
        yield _figure(f"{mode} shuffling, one epoch", values, "s", "measured")
    for mode in ("local", "partial:0.1"):
        factors = [a / b for a, b in zip(seconds["global"], seconds[mode], strict=True)]
        yield _figure(
            f"global from the shared file system over {mode} from the local disk", factors, "times", "measured"
        )
    ratios = [a / b for a, b in zip(seconds["partial:0.1"], seconds["local"], strict=True)]
    yield _figure("partial:0.1 over local shuffling", ratios, "ratio of epoch times", "at most 1.05", most=1.05)
    yield _figure("audit, of the epoch time under local shuffling", audit, "share", "under 0.01", most=0.01)


def _figure(name: str, values: Sequence[float], unit: str, goal: str, most: float | None = None) -> Figure:
    return Figure.of(
        values, name=name, unit=unit, goal=goal, met=lambda one: None if most is None else one.value <= most
    )


def _write(folder: Path) -> None:
    generator = np.random.default_rng(SEED)
    for number in range(SAMPLES):
        path = folder / f"volume-{number:04d}_data.npy"
        np.save(path, generator.integers(0, 30, (32, 32, 32, 4), dtype=np.int16))
        np.save(path.with_name(targets_name(path.name)), generator.uniform(-1, 1, 4).astype(np.float32))


def _measure(shared: SlowStorage, folder: Path) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of an epoch in each round, and the audit's share of them."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    barrier = context.Barrier(RANKS)
    ranks = [
        context.Process(target=_rank, args=(pipes[rank][1], barrier, rank, str(shared.path), str(folder)), daemon=False)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for _, there in pipes:
        there.close()  # so that a rank that dies is noticed
    here = [pipe[0] for pipe in pipes]
    seconds: dict[str, list[float]] = {mode: [] for mode in EPOCHS}
    audit: list[float] = []
    try:
        _stage(here)
        for number in range(ROUNDS):
            modes = list(EPOCHS)
            for mode in modes[number % 3 :] + modes[: number % 3]:
                told = _ask(here, mode)
                seconds[mode].append(max(each[0] for each in told))
                if mode == "local":
                    audit.append(statistics.fmean(each[1] for each in told) / seconds[mode][-1])
    finally:
        for pipe in here:
            with suppress(OSError):
                pipe.send("end")
        for process in ranks:
            process.join(60)
            process.kill()
    return seconds, audit


def _stage(pipes: Sequence[Connection]) -> None:
    _ask(pipes, "stage")


def _ask(pipes: Sequence[Connection], what: str) -> list[Any]:
    """What all ranks answer; in between, what they gather from each other."""
    for pipe in pipes:
        pipe.send(what)
    while True:
        answers = []
        for pipe in pipes:
            if not pipe.poll(300):
                raise RuntimeError(f"no answer to {what}")
            answers.append(pipe.recv())
        if answers[0][0] != "gather":
            return [value for _, value in answers]
        for pipe in pipes:
            pipe.send([value for _, value in answers])


def _rank(pipe: Connection, barrier: Any, rank: int, shared: str, folder: str) -> None:
    """One rank, in a process of its own: does what it is asked for until the end."""
    import torch

    from dlbench.node.data.density import open_density
    from dlbench.specs.workload import CosmoFlowModel

    torch.set_num_threads(1)
    model = CosmoFlowModel(family="cosmoflow", input_size=32, conv_channels=(8, 8), dense_sizes=(8,))
    reader = open_density(Path(shared), model, training=True)
    staged = Path(folder, f"staged-{rank}")
    while (what := pipe.recv()) != "end":
        if what == "stage":
            store = SampleStore(staged)
            for index in _ownership(0.0).part(0, rank):
                store.put(int(index), reader.fetch(int(index)).data)
            pipe.send(("done", None))
        else:
            pipe.send(("done", _epochs(what, EPOCHS[what], pipe, barrier, rank, reader, staged)))


def _ownership(share: float) -> Ownership:
    return Ownership(SAMPLES, RANKS, seed=SEED, partition="shuffled", share=share)


def _epochs(
    mode: str, epochs: int, pipe: Connection, barrier: Any, rank: int, reader: Any, staged: Path
) -> tuple[float, float]:
    """Seconds of an epoch, and of the audit in it."""
    from dlbench.node.data.loader import LoadedSource
    from dlbench.node.data.sample_exchange import AwaitingReader, SampleExchange
    from dlbench.node.data.sharding import HeldOrder, ReadAudit, ShardedOrder
    from dlbench.node.data.staging import HeldReader

    store = SampleStore(staged.with_name(f"now-{rank}"))
    exchange = None
    order: ShardedOrder
    if mode == "global":
        reader = ColdReader(reader)
        order = ShardedOrder(SAMPLES, batch_size=BATCH, rank=rank, world_size=RANKS, seed=SEED)
    else:
        shutil.copytree(staged, store.folder)
        reader = HeldReader(reader, store, "local")
        order = HeldOrder(_ownership(0.1 if mode == "partial:0.1" else 0.0), batch_size=BATCH, rank=rank)
        if mode == "partial:0.1":

            def gather(value: Any) -> Any:
                pipe.send(("gather", value))
                return pipe.recv()

            exchange = SampleExchange(
                order.ownership, rank, store, batches_per_epoch=order.batches_per_epoch, address="127.0.0.1"
            )
            exchange.connect(gather)
            order.on_batch = exchange.on_batch_assigned
            reader = AwaitingReader(reader, store, patience_s=60)
    audit = ReadAudit(order, num_samples=SAMPLES, ranks=RANKS, labels=None)
    source = LoadedSource(
        reader, order, loader_workers=1, on_bad_sample="stop", is_held=True, audit=audit, exchange=exchange
    )
    try:
        steps = order.batches_per_epoch * epochs
        for step in range(steps + 1):
            next(source)
            barrier.wait(120)
            if step == 0:  # reader processes have started
                begun = time.monotonic()
            time.sleep(COMPUTE_S)
        seconds = time.monotonic() - begun - COMPUTE_S
    finally:
        source.close()
        barrier.wait(120)
        if exchange is not None:
            exchange.close()
        shutil.rmtree(store.folder, ignore_errors=True)
    return seconds / epochs, audit.summary()["audit_s"] / epochs


class ColdReader:
    """A reader of volumes that leaves nothing of them in the page cache."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._reader, name)

    def fetch(self, index: int) -> Any:
        """The sample, whose file is cold again afterwards."""
        raw = self._reader.fetch(index)
        path, _ = self._reader._index.locate(index)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return raw


# Accuracy


def accuracies() -> Iterator[Figure]:
    """What class-sorted parts cost in accuracy under local shuffling, and what partial shuffling wins back."""
    with tempfile.TemporaryDirectory() as temporary:
        data, out = Path(temporary, "images"), Path(temporary, "runs")
        _dlbench(
            *("data", "make", "images", data, "--samples", "480", "--validation", "200", "--size", "48x48"),
            *("--classes", "10"),
        )
        held = ("--set", "data.staging=shard", "--set", "data.partition=contiguous")
        _train(data, out, "held", *held, "--sweep", f"data.shuffle={','.join(TRAININGS)}")
        _train(data, out, "global")
        curves = _curves(out)
        _dlbench("report", out, "--format", "json", "-o", Path(temporary, "report.json"))
    for mode, runs in curves.items():
        for number, curve in enumerate(runs):
            print(f"  {mode}, seed {number}: top-1 after each epoch {' '.join(f'{value:.2f}' for value in curve)}")
    ends = {mode: [statistics.fmean(curve[-LAST:]) for curve in runs] for mode, runs in curves.items()}
    for mode, values in ends.items():
        yield _figure(f"{mode} shuffling of class-sorted data: top-1, last {LAST} epochs", values, "", "measured")
    lost = statistics.median(ends["global"]) - statistics.median(ends["local"])
    yield Figure(
        name="top-1 that local shuffling of class-sorted parts loses against global shuffling",
        value=lost,
        n=len(SEEDS),
        unit="",
        goal="visible: no seed of local reaches the worst of global",
        met=max(ends["local"]) < min(ends["global"]),
    )
    for mode in TRAININGS[1:]:
        won = statistics.median(ends[mode]) - statistics.median(ends["local"])
        yield Figure(
            name=f"of that, {mode} wins back",
            value=won / lost if lost else None,
            n=len(SEEDS),
            unit="share",
            goal="more than half",
            met=lost > 0 and won / lost > 0.5,
            reason="" if lost else "nothing was lost",
        )


def _dlbench(*arguments: object) -> None:
    words = [sys.executable, "-m", "dlbench", *map(str, arguments)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _train(data: Path, out: Path, series: str, *arguments: object) -> None:
    for seed in SEEDS:
        _dlbench(
            *("run", SMALL_RESNET, "--data", data, "--to-accuracy", "--ranks", TRAINED_BY, "--engine", "ddp"),
            *("--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false"),
            *("--set", f"train.seed={seed}", "--out", out, "--series", f"{series}-{seed}", "--no-progress", *arguments),
        )


def _curves(out: Path) -> dict[str, list[list[float]]]:
    """Top-1 after each epoch, of each seed, by data.shuffle; a run that is not valid ends the benchmark."""
    found: dict[str, list[list[float]]] = {}
    for run in sorted(scan(out).runs, key=lambda run: (run.plan.workload.data.shuffle, run.plan.workload.train.seed)):
        if run.record is None or run.record.quality is None or run.state != "valid":
            raise RuntimeError(run.detail)
        values = [evaluation.value or 0.0 for evaluation in run.record.quality.evaluations]
        found.setdefault(run.plan.workload.data.shuffle, []).append(values)
    return found
