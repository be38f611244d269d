"""How fast samples become batches, against torch's DataLoader and WebDataset with dlbench's own decode calls, so that
only what stands around them differs.

All ways take turns over the same files, which are in the page cache: photographs of 500 x 375 pixels as a tree and as
tar shards; with two reader processes each, in seconds. `input_rate` has what one core reads.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.figures import Figure, median_interval
from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.making.image_recipes import PackRecipe, PhotoRecipe
from dlbench.datasets.making.production import produce
from dlbench.node.data.images import open_images, training_image
from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.sharding import ShardedOrder
from dlbench.specs.workload import ResNetModel

IMAGES, SIZE, BATCH, ROUNDS, SEED = 160, 224, 32, 9, 0
VOLUMES, EDGE = 4, 128
WORKERS = 2
SECONDS = 1.5
"""Of each way with reader processes in each round."""
Loop = Callable[[int], None]
"""Goes once over all samples; is given the number of the round."""


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        produce(PhotoRecipe(train_images=IMAGES, validation_images=0), folder / "tree")
        produce(PackRecipe(train=folder / "tree" / "train"), folder / "tar")
        web, why = _webdataset(folder / "packages")
        yield from _images_of_processes(folder, web, why)


@contextmanager
def one_core() -> Iterator[None]:
    """This process on one core, with one thread."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def _webdataset(packages: Path) -> tuple[Any, str]:
    """WebDataset, installed for this bench alone if need be; or why not."""
    try:
        import webdataset
    except ImportError:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        done = subprocess.run([*command, "webdataset", "braceexpand"], capture_output=True, text=True, check=False)
        if done.returncode:
            return None, "WebDataset is not installed, and pip cannot get it"
        # Loader processes are to find it, too.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
        sys.path.insert(0, str(packages))
        import webdataset
    return webdataset, ""


def written_volumes(folder: Path) -> Path:
    """An HDF5 file of volumes, alone in its folder."""
    import h5py

    generator = np.random.default_rng(SEED)
    (folder / "volumes").mkdir()
    path = folder / "volumes" / "density.h5"
    shape = (VOLUMES, EDGE, EDGE, EDGE, 4)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=generator.poisson(2, shape).astype("int16"), chunks=(1, *shape[1:]))
        file["y"] = generator.uniform(-1, 1, (VOLUMES, 4)).astype("float32")
    return path


def _images_of_processes(folder: Path, web: Any, why: str) -> Iterator[Figure]:
    """With reader processes, as training takes batches: in order, ahead of time."""
    model = ResNetModel(family="resnet", image_size=SIZE)
    tree, tar = folder / "tree" / "train", folder / "tar" / "train"
    order = ShardedOrder(IMAGES, batch_size=BATCH, rank=0, world_size=1, seed=SEED)
    open_source = partial(LoadedSource, loader_workers=WORKERS, on_bad_sample="stop")
    sources = [open_source(open_images(path, model, SEED, training=True), order) for path in (tree, tar)]
    ways: dict[str, Iterator[Any]] = {
        "reader, tree": sources[0],
        "reader, tar": sources[1],
        "DataLoader, tree": _endless(_loader(_Decoding(tree))),
        "DataLoader, tar": _endless(_loader(_Decoding(tar))),
    }
    if web is not None:
        ways["WebDataset, tar"] = _endless(_web(web, tar))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(ROUNDS + 1):
            for name, batches in ways.items():
                speed = _wall_speed(batches)
                if number:  # the first round starts the processes
                    speeds[name].append(speed)
    finally:
        for source in sources:
            source.close()
    what = f"500x375 to {SIZE}, {WORKERS} reader processes"
    yield from _rates(speeds, what, f"images per second, {len(os.sched_getaffinity(0))} cores")
    yield _ratio(speeds, "reader, tree", "DataLoader, tree", what)
    yield _ratio(speeds, "reader, tar", "DataLoader, tar", what)
    yield _ratio(speeds, "reader, tar", "WebDataset, tar", what, why=why)


def _wait_for_rest() -> None:
    """Returns when processes and threads of the way before have read ahead as far as they may."""
    process = psutil.Process()
    readers = [process, *process.children(recursive=True)]
    before = -1.0
    for _ in range(100):
        spent = sum(reader.cpu_times().user + reader.cpu_times().system for reader in readers)
        if spent - before < 0.02:
            return
        before = spent
        time.sleep(0.2)


def _wall_speed(batches: Iterator[Any]) -> float:
    """Images a second, once what was read ahead is gone."""
    _wait_for_rest()
    for _ in range(2 * WORKERS):
        next(batches)
    taken, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        next(batches)
        taken += BATCH
    return taken / (time.perf_counter() - start)


def _cpu_speeds(loops: dict[str, Loop], samples: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Samples a CPU second of each way in each round; the first round warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name, loop in loops.items():
            start = time.process_time()
            loop(number)
            if number:
                speeds[name].append(samples / (time.process_time() - start))
    return speeds


def _rates(speeds: dict[str, list[float]], what: str, unit: str) -> Iterator[Figure]:
    for name, values in speeds.items():
        yield Figure.of(values, name=f"{what}: {name}", unit=unit, goal="measured")


def _ratio(
    speeds: dict[str, list[float]], one: str, other: str, what: str, goal: float | None = None, why: str = ""
) -> Figure:
    name, told = f"{what}: {one} over {other}", "measured" if goal is None else f"at least {goal:g}"
    if other not in speeds:
        return Figure(name=name, value=None, unit="ratio of speeds", goal=told, reason=why)
    ratios = [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]
    value, low, high = median_interval(ratios)
    met = None if goal is None or low < goal <= high else low >= goal
    return Figure(name=name, value=value, low=low, high=high, n=len(ratios), unit="ratio of speeds", goal=told, met=met)


class _Decoding(Dataset[Any]):
    """A plain dataset of torch with dlbench's decode calls; the crop is drawn from numpy's global generator."""

    def __init__(self, folder: Path) -> None:
        self._images = open_image_set(folder)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, _ = training_image(self._images.read(index), SIZE, _generator())(None)
        return torch.from_numpy(image), self._images.label(index)


def _generator() -> np.random.Generator:
    return np.random.default_rng(random.getrandbits(64))


def _loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        worker_init_fn=_one_thread,
        multiprocessing_context="forkserver",
    )


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def _loop_of(batches: Any) -> Loop:
    def loop(_number: int) -> None:
        for _batch in batches:
            pass

    return loop


def _endless(batches: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


def _web(web: Any, folder: Path) -> Any:
    """WebDataset over the shards, shuffled in a buffer of one batch, with the same decode calls."""
    shards = sorted(map(str, folder.glob("*.tar")))
    dataset = (
        # Every process takes all shards, so that passes are equally long with any number of them.
        web.WebDataset(shards, shardshuffle=False, workersplitter=_all_shards)
        .shuffle(BATCH)
        .to_tuple("jpg", "cls")
        .map_tuple(_decoded, int)
        .batched(BATCH)
    )
    return web.WebLoader(
        dataset,
        batch_size=None,
        num_workers=WORKERS,
        persistent_workers=True,
        worker_init_fn=_one_thread,
        multiprocessing_context="forkserver",
    )


def _all_shards(found: Any) -> Any:
    return found


def _decoded(data: bytes) -> torch.Tensor:
    return torch.from_numpy(training_image(data, SIZE, _generator())(None)[0])
