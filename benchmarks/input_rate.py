"""What one core reads: images and volumes a CPU second, against bare loops and against what scripts do with torch.

Images: photographs of 500 x 375 pixels in a tree, crops to 224. The bare loop has the encoded images in memory and the
crops drawn beforehand, and makes dlbench's own calls to decode and to resize; the script is torch's DataLoader over
Pillow with the transforms of torch's ImageNet example, written out. Volumes: 128^3 in HDF5.

NVIDIA DALI on the CPU, which needs no driver, is measured where it is installed, for example in a folder of its own:
`pip install --target FOLDER nvidia-dali-cuda130 nvidia-nvimgcodec-cu13`, then PYTHONPATH=FOLDER (it has numpy, too).

All ways take turns in the same files, which are in the page cache; times are CPU times, so that neighbours on a shared
machine disturb less. With one loader process each they are those of that process and of the one that takes its batches.
"""

from __future__ import annotations

import io
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.figures import Figure
from benchmarks.reader_rate import (
    BATCH,
    EDGE,
    IMAGES,
    SEED,
    SIZE,
    VOLUMES,
    Loop,
    _cpu_speeds,
    _endless,
    _loop_of,
    _one_thread,
    _rates,
    _ratio,
    _wait_for_rest,
    one_core,
    written_volumes,
)
from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.images.jpeg_decode import build_region, inspect, region_function
from dlbench.datasets.making.image_recipes import PhotoRecipe
from dlbench.datasets.making.production import produce
from dlbench.datasets.volumes import index_density
from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.density import VolumeReader, network_input
from dlbench.node.data.images import AREA, ASPECT, decode_factor, open_images, resize, scaled_box, training_crop
from dlbench.node.data.loader import LoadedSource
from dlbench.node.data.node_sharing import WorkerSlots
from dlbench.node.data.reader import BatchReader, DataReader
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.models.resnet import MEAN, STD
from dlbench.specs.workload import ResNetModel

ROUNDS, VOLUME_ROUNDS, PROCESS_ROUNDS = 21, 31, 17
MODEL = ResNetModel(family="resnet", image_size=SIZE)
TAKEN = 2 * IMAGES // BATCH
"""Batches of a round with a loader process."""
CPU_RATE = "images per CPU second"


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    with suppress(EnvironmentLacksError):  # the name of the decoder says it
        build_region()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        produce(PhotoRecipe(train_images=IMAGES, validation_images=0), folder / "tree")
        tree = folder / "tree" / "train"
        with one_core():
            yield from _images_of_one_core(tree)
            yield from _volumes_of_one_core(folder)
        yield from _images_of_one_process(tree)


def _images_of_one_core(tree: Path) -> Iterator[Figure]:
    loops: dict[str, Loop] = {
        "bare loop": _round_of(_bare(tree, is_whole=False)),
        "bare loop, decode full": _round_of(_bare(tree, is_whole=True)),
        "reader": _in_slots(open_images(tree, MODEL, SEED, training=True), IMAGES, BATCH),
        "reader, decode full": _in_slots(open_images(tree, MODEL, SEED, training=True, decoding="full"), IMAGES, BATCH),
    }
    dali_loop, why = _dali(tree)
    if dali_loop is not None:
        loops["DALI"] = dali_loop
    speeds = _cpu_speeds(loops, IMAGES, ROUNDS)
    what = f"input, images 500x375 to {SIZE}, one core"
    yield from _rates(speeds, what, CPU_RATE)
    yield replace(_ratio(speeds, "reader", "bare loop", what, 0.9), reason=region_function()[1])
    yield _ratio(speeds, "reader", "bare loop, decode full", what)
    yield _ratio(speeds, "reader", "reader, decode full", what)
    yield replace(_ratio(speeds, "reader", "DALI", what, 1.6), reason=why)


def _dali(tree: Path) -> tuple[Loop | None, str]:
    """Returns DALI's pipeline of the same crops and flips on the CPU, and its settings; or None, and why there is none.

    Settings are the fastest of those tried that compute the same: decoding of whole images, queues of 1 and 3 batches,
    synchronous execution, batches of 64 and 128 and reading without mapping were slower or equal.
    """
    try:
        import nvidia.dali as dali
        from nvidia.dali import fn, types
    except ImportError as error:
        return None, f"DALI is not installed ({error})"

    @dali.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=SEED, prefetch_queue_depth=2)  # type: ignore[untyped-decorator]
    def crops_and_labels() -> tuple[Any, Any]:
        encoded, labels = fn.readers.file(file_root=str(tree), random_shuffle=True)
        crops = fn.decoders.image_random_crop(
            encoded, output_type=types.RGB, random_area=AREA, random_aspect_ratio=ASPECT, hw_decoder_load=0
        )
        # As the reader's: bilinear with anti-aliasing, 8-bit.
        crops = fn.resize(crops, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(crops, horizontal=fn.random.coin_flip()), labels

    pipeline = crops_and_labels()
    pipeline.build()

    def loop(_number: int) -> None:
        for _ in range(IMAGES // BATCH):
            pipeline.run()
        _wait_for_rest()  # for its threads, which work ahead

    return loop, f"DALI {dali.__version__}, image_random_crop, resize, flip; one thread, two batches ahead"


def _round_of(batches: Iterator[None]) -> Loop:
    def loop(_number: int) -> None:
        for _ in range(IMAGES // BATCH):
            next(batches)

    return loop


def _in_slots(reader: DataReader, samples: int, batch: int) -> Loop:
    """The product's reader as a loader process runs it: into a slot that is used again."""
    batches, allocate = BatchReader(reader, "stop"), partial(WorkerSlots().allocate, 0)

    def loop(number: int) -> None:
        for first in range(0, samples, batch):
            batches.read([(number, index) for index in range(first, min(first + batch, samples))], allocate)

    return loop


def _bare(tree: Path, *, is_whole: bool) -> Iterator[None]:
    """Decodes and resizes one image after another, for ever; a batch of them at a time."""
    images = open_image_set(tree)
    encoded = [images.read(index) for index in range(IMAGES)]
    sizes = [(image.width, image.height) for image in map(inspect, encoded)]
    crops = [
        [training_crop(*size, np.random.default_rng([SEED, number, index]))[0] for index, size in enumerate(sizes)]
        for number in range(ROUNDS + 1)
    ]
    for boxes in itertools.cycle(crops):
        for done, (data, box) in enumerate(zip(encoded, boxes, strict=True), 1):
            if is_whole:
                left, top, right, bottom = box
                pixels = inspect(data).pixels()[0][top:bottom, left:right]
            else:
                factor = decode_factor(box[2] - box[0], box[3] - box[1], SIZE, SIZE)
                pixels = inspect(data).pixels(factor, scaled_box(box, factor))[0]
            resize(pixels, SIZE, SIZE)
            if done % BATCH == 0:
                yield


class _Script(Dataset[Any]):
    """Pillow and the transforms of torch's ImageNet example: crop, flip, float32 in [0, 1], normalised."""

    def __init__(self, folder: Path) -> None:
        self._images = open_image_set(folder)
        self._mean, self._std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self._images.read(index))) as opened:
            image = opened.convert("RGB")
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        box, is_mirrored = training_crop(*image.size, np.random.default_rng(seed))
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self._mean).div_(self._std), self._images.label(index)


def _images_of_one_process(tree: Path) -> Iterator[Figure]:
    order = ShardedOrder(IMAGES, batch_size=BATCH, rank=0, world_size=1, seed=SEED)
    reader = open_images(tree, MODEL, SEED, training=True)
    source = LoadedSource(reader, order, loader_workers=1, on_bad_sample="stop")
    script: DataLoader[Any] = DataLoader(
        _Script(tree),
        batch_size=BATCH,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=_one_thread,
        multiprocessing_context="forkserver",
    )
    name = "DataLoader, Pillow, ToTensor, Normalize"
    ways: dict[str, Iterator[Any]] = {
        "reader": source,
        name: _endless(script),
        "bare loop": _bare(tree, is_whole=False),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of the bare loop, as the loader processes have one
    try:
        for number in range(PROCESS_ROUNDS + 1):
            for way, batches in ways.items():
                speed = _taken_speed(batches)
                if number:  # the first round starts the processes
                    speeds[way].append(speed)
    finally:
        source.close()
        torch.set_num_threads(threads)
    what = f"input, images 500x375 to {SIZE}, one loader process"
    yield from _rates(speeds, what, CPU_RATE)
    yield replace(_ratio(speeds, "reader", name, what, 2.5), reason=region_function()[1])
    # What no reader of these images with this decoder can pass.
    yield _ratio(speeds, "bare loop", name, what)


def _taken_speed(batches: Iterator[Any]) -> float:
    """Images a CPU second of this process and its loaders; as many are read ahead at the end as at the start."""
    next(batches)
    _wait_for_rest()
    loaders, mine = _loaders_s(), time.process_time()
    for _ in range(TAKEN):
        next(batches)
    mine = time.process_time() - mine
    _wait_for_rest()
    return TAKEN * BATCH / (mine + _loaders_s() - loaders)


def _loaders_s() -> float:
    """CPU seconds of the processes that this one has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(one.user + one.system for one in times))


class _VolumeScript(Dataset[Any]):
    """h5py and numpy: counts to float32, the logarithm, channels first."""

    def __init__(self, path: Path) -> None:
        import h5py

        self._file = h5py.File(path, locking=False)

    def __len__(self) -> int:
        return VOLUMES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        volume = np.log1p(self._file["x"][index].astype(np.float32)).transpose(3, 0, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(volume)), torch.from_numpy(self._file["y"][index])


def _volumes_of_one_core(folder: Path) -> Iterator[Figure]:
    import h5py

    path = written_volumes(folder)
    index = index_density(path.parent)
    # Locked by nobody: the product's reader has it open as well.
    with h5py.File(path, locking=False) as file:
        x, y = file["x"], file["y"]

        def bare(_number: int) -> None:
            for place in range(VOLUMES):
                network_input(x[place])
                np.asarray(y[place])

        def bare_counts(_number: int) -> None:
            for place in range(VOLUMES):
                np.asarray(x[place])
                np.asarray(y[place])

        script = DataLoader(_VolumeScript(path), batch_size=1)
        loops: dict[str, Loop] = {
            "bare loop": bare,
            "reader": _in_slots(VolumeReader(index), VOLUMES, 1),
            "bare loop of counts": bare_counts,
            "reader for a GPU": _in_slots(VolumeReader(index, voxel_counts=True), VOLUMES, 1),
            "DataLoader, h5py, log1p": _loop_of(script),
        }
        speeds = _cpu_speeds(loops, VOLUMES, VOLUME_ROUNDS)
    what = f"input, HDF5 volumes of {EDGE}^3, one core"
    yield from _rates(speeds, what, "volumes per CPU second")
    yield _ratio(speeds, "reader", "bare loop", what, 0.9)
    yield _ratio(speeds, "reader for a GPU", "bare loop of counts", what, 0.9)
    yield _ratio(speeds, "reader", "DataLoader, h5py, log1p", what, 2.0)
    yield _ratio(speeds, "reader for a GPU", "DataLoader, h5py, log1p", what, 2.0)
