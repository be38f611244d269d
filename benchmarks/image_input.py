"""How fast images are read and prepared by one core, beside loops that do only what cannot be left out.

All loops run in one process on one core, in turns, over the same photographs of 500 x 375 pixels and with the same
crops to 224 pixels. Time is CPU time of the process, so that neighbours on a shared machine disturb less; the files are
in the page cache.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.figures import Figure, median_interval
from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.making.image_recipes import PackRecipe, PhotoRecipe
from dlbench.datasets.making.production import produce
from dlbench.node.data.images import Box, crop_box, open_images, resize
from dlbench.node.data.reader import BatchReader
from dlbench.specs.workload import ResNetModel

IMAGES, SIZE, BATCH, ROUNDS, SEED = 160, 224, 32, 7, 0
Loop = Callable[[int], None]
"""Goes once over all images; is given the number of the round, which decides the crops."""


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    model = ResNetModel(family="resnet", image_size=SIZE)
    with tempfile.TemporaryDirectory() as temporary, one_core():
        folder = Path(temporary)
        produce(PhotoRecipe(train_images=IMAGES, validation_images=0), folder / "tree")
        encoded = _encoded(folder / "tree" / "train")
        loops: dict[str, Loop] = {"bare": _bare(encoded), "bare, torch's resize": _bare(encoded, torchs=True)}
        loops["DataLoader over Pillow"] = _data_loader(folder / "tree" / "train")
        loops["reader, tree"] = _reader(folder / "tree" / "train", model)
        loops["decode"] = _decode(encoded)
        produce(PackRecipe(train=folder / "tree" / "train"), folder / "tar")
        loops["reader, tar"] = _reader(folder / "tar" / "train", model)
        speeds = _measure(loops)
    for name, values in speeds.items():
        yield _figure(f"images, 500x375 to {SIZE}: {name}", values, "images per CPU second of one core", "measured")
    for form in ("tree", "tar"):
        for other, goal in (("bare", 0.9), ("bare, torch's resize", None), ("DataLoader over Pillow", 1.0)):
            ratios = [a / b for a, b in zip(speeds[f"reader, {form}"], speeds[other], strict=True)]
            told = "measured" if goal is None else f"at least {goal:g}"
            yield _figure(f"images: reader, {form}, over {other}", ratios, "ratio of speeds", told, goal)


def _figure(name: str, values: list[float], unit: str, told: str, goal: float | None = None) -> Figure:
    value, low, high = median_interval(values)
    met = None if goal is None or low < goal <= high else low >= goal
    return Figure(name=name, value=value, low=low, high=high, n=len(values), unit=unit, goal=told, met=met)


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


def _measure(loops: dict[str, Loop]) -> dict[str, list[float]]:
    """Images a CPU second of each loop in each round; the first round warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(ROUNDS + 1):
        for name, loop in loops.items():
            start = time.process_time()
            loop(number)
            if number:
                speeds[name].append(IMAGES / (time.process_time() - start))
    return speeds


def _encoded(folder: Path) -> list[bytes]:
    images = open_image_set(folder)
    return [images.read(index) for index in range(images.num_samples)]


def _box(epoch: int, index: int, width: int = 500, height: int = 375) -> Box:
    return crop_box(width, height, np.random.default_rng([SEED, epoch, index]))


def _bare(encoded: list[bytes], *, torchs: bool = False) -> Loop:
    """Simplejpeg's full decode and a resize of the same crops, drawn beforehand; no flip, no batch."""
    import simplejpeg
    from PIL import Image

    boxes = [[_box(number, index) for index in range(IMAGES)] for number in range(ROUNDS + 1)]

    def loop(number: int) -> None:
        for data, (left, top, right, bottom) in zip(encoded, boxes[number], strict=True):
            crop = simplejpeg.decode_jpeg(data, "RGB")[top:bottom, left:right]
            if torchs:
                resize(crop, SIZE, SIZE)
            else:
                np.asarray(Image.fromarray(crop).resize((SIZE, SIZE), Image.Resampling.BILINEAR))

    return loop


def _decode(encoded: list[bytes]) -> Loop:
    import simplejpeg

    def loop(_number: int) -> None:
        for data in encoded:
            simplejpeg.decode_jpeg(data, "RGB")

    return loop


def _reader(folder: Path, model: ResNetModel) -> Loop:
    """The product's reader, batches included, as a loader process runs it."""
    batches = BatchReader(open_images(folder, model, SEED, training=True), "stop")

    def loop(number: int) -> None:
        for first in range(0, IMAGES, BATCH):
            batches[[(number, index) for index in range(first, first + BATCH)]]

    return loop


class Pillow(Dataset[Any]):
    """What a script without further libraries does: Pillow decodes, crops, resizes and mirrors; torch collates."""

    def __init__(self, folder: Path) -> None:
        self._images = open_image_set(folder)
        self.epoch = 0

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        generator = np.random.default_rng([SEED, self.epoch, index])
        with Image.open(io.BytesIO(self._images.read(index))) as opened:
            image = opened.convert("RGB")
        image = image.crop(crop_box(*image.size, generator)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), self._images.label(index)


def _data_loader(folder: Path) -> Loop:
    """Torch's DataLoader without worker processes, on the same core."""
    dataset = Pillow(folder)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH, num_workers=0)

    def loop(number: int) -> None:
        dataset.epoch = number
        for _batch in loader:
            pass

    return loop
