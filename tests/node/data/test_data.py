"""From data sets to batches: who reads what, what a batch holds, unreadable samples, nvImageCodec's images."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.node.data import images as gpu_images
from dlbench.node.data import images as jpeg
from dlbench.node.data import reader
from dlbench.node.data.images import RegionDecoder, nvimagecodec, open_images
from dlbench.node.data.loader import BatchSource, LoadedSource, LoaderCores
from dlbench.node.data.reader import BatchReader, Key, PreparedSample, Raw
from dlbench.node.data.sharding import Position, ShardedOrder
from dlbench.node.data.synthetic import POOL_BATCHES
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.models.cosmoflow import network_volume
from dlbench.specs.workload import CosmoFlowModel, DensityData, ImageData, ModelSpec, ResNetModel, TextData
from tests.datasets.test_text import BERT, sentences, text_spec
from tests.support.datasets import encode, write_tree
from tests.support.paths import ROOT
from tests.support.training_data import NumberReader, training_data

h5py = pytest.importorskip("h5py")
Image = pytest.importorskip("PIL.Image")
torch.set_num_threads(1)

Batch = dict[str, torch.Tensor]


def take(source: BatchSource, num: int) -> list[Batch]:
    return list(itertools.islice(source, num))


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True)
    )


# Sharding


@given(
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    extra=st.integers(0, 60),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
    drop_last=st.booleans(),
)
def test_each_sample_once_an_epoch_and_equal_ranks(
    world_size: int, batch_size: int, extra: int, seed: int, epoch: int, drop_last: bool
) -> None:
    num = world_size * batch_size + extra
    orders = [
        ShardedOrder(
            num,
            batch_size=batch_size,
            rank=r,
            world_size=world_size,
            seed=seed,
            drop_last=drop_last,
            start=Position(epoch=epoch),
        )
        for r in range(world_size)
    ]
    taken: list[int] = []
    sizes = set()
    for order in orders:
        batches = list(itertools.islice(order.batches(), order.batches_per_epoch))
        assert {key[0] for batch in batches for key in batch} == {epoch}
        taken += [key[1] for batch in batches for key in batch]
        sizes.add(tuple(map(len, batches)))
    assert len(sizes) == 1
    assert len(set(taken)) == len(taken) == num - orders[0].dropped_per_epoch
    assert set(taken) <= set(range(num))
    (size,) = sizes
    assert set(size[:-1]) <= {batch_size}
    assert orders[0].dropped_per_epoch < (world_size * batch_size if drop_last else world_size)
    if drop_last:
        assert size[-1] == batch_size


def test_epochs_differ_and_a_start_is_reached_directly() -> None:
    about: dict[str, Any] = {"batch_size": 2, "rank": 1, "world_size": 3, "seed": 5}
    order = ShardedOrder(23, **about)
    assert order.batches_per_epoch == 3
    assert order.dropped_per_epoch == 5
    assert not np.array_equal(order.epoch(0), order.epoch(1))
    all_batches = list(itertools.islice(order.batches(), 9))
    for num in range(7):
        later = ShardedOrder(23, **about, start=order.position(num))
        assert list(itertools.islice(later.batches(), 2)) == all_batches[num : num + 2]


def test_too_few_samples_name_the_counts() -> None:
    with pytest.raises(UserError) as raised:
        ShardedOrder(11, batch_size=3, rank=0, world_size=4, seed=0)
    assert "11 samples, but a step needs 12 (train.batch_per_rank 3 x 4 ranks)" in str(raised.value)


# JPEG


@pytest.fixture
def jpeg_folder(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "some 'images'\n")


RESNET = ResNetModel(family="resnet", image_size=32, num_classes=3, stage_blocks=(1, 1, 1, 1), base_width=8)


def jpeg_source(
    folder: Path, workers: int = 0, on_bad: Literal["stop", "skip"] = "stop", **changes: Any
) -> BatchSource:
    data = ImageData(format="jpeg-tree", source=str(folder), loader_workers=workers, on_bad_sample=on_bad)
    return training_data(RESNET, data, **{"batch_size": 4, "seed": 3, **changes})


def test_jpeg_batches_fit_the_model(jpeg_folder: Path) -> None:
    source = jpeg_source(jpeg_folder)
    (batch,) = take(source, 1)
    assert batch["image"].shape == (4, 32, 32, 3)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].dtype == torch.int64
    assert torch.isfinite(loss_for(RESNET)(build_model(RESNET), batch))
    about = source.describe()
    json.dumps(about)
    assert (about["num_samples"], about["batches_per_epoch"], about["dropped_per_epoch"]) == (15, 3, 3)
    assert (about["kind"], about["classes"]) == ("jpeg-tree", 3)


def spoil(folder: Path) -> dict[str, Path]:
    """Makes four of fifteen images unreadable or odd."""
    paths = {name: folder / "class 1" / f'"{i}".jpg' for i, name in enumerate(("empty", "cut", "text", "grey"))}
    paths["empty"].write_bytes(b"")
    paths["cut"].write_bytes(paths["cut"].read_bytes()[:200])
    paths["text"].write_text("not an image", encoding="utf-8")
    paths["grey"].write_bytes(encode((30, 30), "L"))
    return paths


def test_bad_images_stop_with_their_name(jpeg_folder: Path) -> None:
    spoil(jpeg_folder)
    source = jpeg_source(jpeg_folder)
    with pytest.raises(UserError) as raised:
        take(source, 3 * 20)
    assert "class 1" in str(raised.value)
    assert "set data.on_bad_sample to skip" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(source.failures) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_counted_and_named(jpeg_folder: Path, workers: int) -> None:
    paths = spoil(jpeg_folder)
    source = jpeg_source(jpeg_folder, workers, on_bad="skip", batch_size=5)
    batches = take(source, 6)
    source.close()
    assert all(b["image"].shape[0] == 5 for b in batches)
    for name, reason in (("empty", "empty file"), ("cut", ""), ("text", "not an image")):
        named = [f for f in source.failures if repr(str(paths[name])) in f]
        assert len(named) >= 2  # once an epoch, more often if it was also asked for as a replacement
        assert all(reason in f for f in named)
    assert {f.split("'", 2)[1] for f in source.failures}  # no entry without a name
    about = source.describe()
    assert about["bad_samples"] == len(source.failures)
    assert about["converted_names"] == [f"{str(paths['grey'])!r}: grey, converted to RGB"]
    assert isinstance(about["converted_samples"], int)
    assert about["converted_samples"] >= 2
    json.dumps(about)


def test_a_wholly_broken_set_ends(jpeg_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in jpeg_folder.glob("*/*.jpg"):
        path.write_bytes(b"")
    monkeypatch.setattr(reader, "_SKIP_AT_MOST", 7)
    source = jpeg_source(jpeg_folder, on_bad="skip")
    with pytest.raises(UserError, match="7 samples in a row are unreadable"):
        take(source, 1)


# Loader processes


def test_the_same_batches_from_any_number_of_processes(jpeg_folder: Path) -> None:
    reference = take(jpeg_source(jpeg_folder), 7)
    before = torch.random.get_rng_state()
    for workers in (1, 2):
        source = jpeg_source(jpeg_folder, workers)
        batches = take(source, 7)
        source.close()
        assert same(batches, reference)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not same(take(jpeg_source(jpeg_folder, seed=4), 7), reference)
    order = jpeg_source(jpeg_folder).order
    assert same(take(jpeg_source(jpeg_folder, start=order.position(4)), 3), reference[4:])


def test_augmentation_belongs_to_epoch_and_sample_not_to_the_rank(jpeg_folder: Path) -> None:
    data = jpeg.JpegReader(index_jpeg_tree(jpeg_folder), 32, seed=3)
    one, two, other = (data.read(key).arrays["image"] for key in ((0, 5), (0, 5), (1, 5)))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    order = ShardedOrder(15, batch_size=2, rank=1, world_size=3, seed=3)
    keys = next(order.batches())
    (batch,) = take(jpeg_source(jpeg_folder, batch_size=2, rank=1, world_size=3), 1)
    for image, key in zip(batch["image"], keys, strict=True):
        np.testing.assert_array_equal(image.numpy(), data.read(key).arrays["image"])


class Probe(NumberReader):
    """A data set whose samples tell about the process that read them."""

    def fetch(self, index: int, out: object = None) -> Raw:
        return Raw(b"x" * (index + 1))

    def prepare(self, key: Key, data: bytes, out: object = None) -> PreparedSample:
        assert len(data) == self.num_bytes(key[1])
        if key == (1, 0):
            raise MemoryError("a defect")
        about = [os.getpid(), torch.get_num_threads(), len(os.sched_getaffinity(0))]
        return PreparedSample({"about": np.array(about)})

    def num_bytes(self, index: int) -> int:
        return index + 1


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def probe(workers: int) -> LoadedSource:
    order = ShardedOrder(8, batch_size=2, rank=0, world_size=1, seed=0)
    return LoadedSource(Probe(8), order, loader_workers=workers, on_bad_sample="stop")


def in_shared_memory(pids: Iterable[int]) -> list[str]:
    """Names in /dev/shm of what these processes map; by inodes, as glibc maps a semaphore under another name."""
    maps = [line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {int(words[4]) for words in maps if len(words) > 5 and words[5].startswith("/dev/shm/")}
    return [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in mapped]


def test_loader_processes_have_one_thread_and_one_core_and_end_and_nothing_of_theirs_has_a_name() -> None:
    source = probe(2)
    seen = torch.cat([b["about"] for b in take(source, 4)])
    pids = set(seen[:, 0].tolist())
    assert len(pids) == 2
    # What has no name stays behind no kill, whoever is killed and when.
    assert in_shared_memory([os.getpid(), *pids]) == []
    assert set(seen[:, 1].tolist()) == {1}
    assert set(seen[:, 2].tolist()) == {1}
    assert all(map(is_alive, pids))
    source.close()
    source.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))
    with pytest.raises(RunError, match="closed"):
        next(source)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_reads_are_known(workers: int) -> None:
    source = probe(workers)
    before = time.monotonic_ns()
    take(source, 3)
    after = time.monotonic_ns()
    reads = source.recent_reads()
    source.close()
    assert [read.number for read in reads] == [0, 1, 2]
    # Processes take turns, and their clock is this one's.
    assert [read.worker for read in reads] == ([0, 1, 0] if workers else [0, 0, 0])
    assert all(read.start_ns < read.end_ns < after for read in reads)
    assert reads[0].end_ns <= reads[2].start_ns
    if not workers:
        assert before < reads[0].start_ns


def test_a_killed_loader_process_is_told() -> None:
    source = probe(1)
    pid = int(next(source)["about"][0, 0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"a loader process of the rank ended: ."):
        take(source, 4)
    source.close()


# Text


@pytest.mark.parametrize("workers", [0, 2])
def test_text_batches_fit_the_model(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a.txt").write_text(sentences(20), encoding="utf-8")
    source = training_data(
        BERT, text_spec(str(tmp_path), loader_workers=workers), batch_size=3, rank=1, world_size=2, seed=0
    )
    batches = take(source, 4)
    source.close()
    (batch,) = batches[:1]
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in batch.items()}
    assert shapes == {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), ((3, 64), torch.int64)),
        **dict.fromkeys(("masked_positions", "masked_ids"), ((3, 10), torch.int64)),
        "masked_weights": ((3, 10), torch.float32),
        "next_sentence": ((3,), torch.int64),
    }
    assert torch.isfinite(loss_for(BERT)(build_model(BERT), batch))
    about = source.describe()
    json.dumps(about)
    assert about["documents"] == 20
    reference = training_data(BERT, text_spec(str(tmp_path)), batch_size=3, rank=1, world_size=2, seed=0)
    assert same(batches, take(reference, 4))


# Density volumes

COSMOFLOW = CosmoFlowModel(family="cosmoflow", input_size=8, conv_channels=(4, 4), dense_sizes=(8,))


def write_volumes(folder: Path, num: int, **changes: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3000, (num, 8, 8, 8, 4), dtype=np.int16)
    content = {"x": x, "y": rng.uniform(-1, 1, (num, 4)).astype(np.float32), **changes}
    with h5py.File(folder / "a.h5", "w") as file:
        for key, value in content.items():
            file[key] = value


@pytest.mark.parametrize("memory_format", ["contiguous", "channels-last"])
def test_counts_on_their_way_to_a_gpu_give_the_same_network_input_to_the_bit(
    tmp_path: Path, memory_format: str
) -> None:
    """int16 volumes, of files up to the largest count, and synthetic; and their loss."""
    write_volumes(tmp_path, 4, x=(np.arange(8192).reshape(4, 8, 8, 8, 4) * 4 + 3).astype(np.int16))
    model = COSMOFLOW.model_copy(update={"memory_format": memory_format})
    for data in (
        DensityData(format="density", source=str(tmp_path)),
        DensityData(format="density", source=str(tmp_path), loader_workers=1),
        DensityData(format="density"),
    ):
        sources = [
            training_data(model, data.model_copy(update={"volumes": volumes}), seed=4)
            for volumes in ("float32", "int16")
        ]
        network = build_model(model).eval()
        for _ in range(2):
            plain, counted = (next(source) for source in sources)
            assert counted["volume"].dtype == torch.int16
            assert 2 * counted["volume"].nbytes == plain["volume"].nbytes
            found = network_volume(counted["volume"], channels_last=memory_format == "channels-last")
            assert (
                found.stride() == network_volume(plain["volume"], channels_last=memory_format != "contiguous").stride()
            )
            assert torch.equal(found, plain["volume"])
            assert torch.equal(loss_for(model)(network, counted), loss_for(model)(network, plain))
        for source in sources:
            source.close()


@pytest.mark.parametrize(("key", "value"), [("input_size", 16), ("input_channels", 2), ("num_targets", 3)])
def test_volumes_that_do_not_fit_the_model(tmp_path: Path, key: str, value: int) -> None:
    write_volumes(tmp_path, 2)
    model = COSMOFLOW.model_copy(update={key: value})
    data = DensityData(format="hdf5-density", source=str(tmp_path))
    with pytest.raises(UserError, match=rf"has {key} \d+, model.{key} is {value}"):
        training_data(model, data, batch_size=1)


def test_formats_that_do_not_fit_the_family(tmp_path: Path) -> None:
    data = DensityData(format="hdf5-density", source=str(tmp_path))
    with pytest.raises(UserError, match=r"data.format 'hdf5-density' does not fit model.family 'resnet'"):
        training_data(RESNET, data, batch_size=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_looking_ahead_counts_nothing_as_read_and_changes_no_batch(tmp_path: Path, workers: int) -> None:
    write_volumes(tmp_path, 6)
    data = DensityData(format="density", source=str(tmp_path), loader_workers=workers)
    plain, looking = (training_data(COSMOFLOW, data, seed=4) for _ in range(2))
    looked = [looking.ahead(), looking.ahead()]
    assert looking.recent_reads() == []
    assert looking.epoch_reads() == []
    assert looking.audit is not None
    for number in range(7):
        expected, batch = next(plain), next(looking)
        assert torch.equal(expected["volume"], batch["volume"])
        assert number >= 2 or batch is looked[number]
        looking.ahead()
        assert len(looking.recent_reads()) == number + 1
    for source in (plain, looking):
        source.close()


def test_what_is_wrong_with_a_batch_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    x = np.zeros((2, 8, 8, 8, 4), dtype=np.int16)
    x[:, 0, 0, 0, 0] = -1
    write_volumes(tmp_path, 2, x=x)
    data = DensityData(format="density", source=str(tmp_path))
    source = training_data(COSMOFLOW, data, batch_size=1, seed=4)
    assert source.ahead() is None
    assert source.ahead() is None  # nothing is read after it
    assert source.failures == []
    with pytest.raises(UserError, match="negative count"):
        next(source)
    assert len(source.failures) == 1
    source.close()


@pytest.mark.parametrize(
    ("workers", "own", "training"), [(2, [3, 2], [0, 1]), (3, [3, 2, 1], [0]), (5, [3, 2, 1], None)]
)
def test_loader_processes_and_the_training_process_of_a_gpu_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, workers: int, own: list[int], training: list[int] | None
) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cores: bound.append(sorted(cores)))
    cores = LoaderCores()
    assert [cores.of_worker(worker, spares_first=True) for worker in range(len(own))] == own
    assert [cores.of_worker(worker, spares_first=False) for worker in range(5)] == [3, 2, 1, 0, 3]
    cores.bind_training(workers)
    assert bound == ([] if training is None else [training])
    assert LoaderCores().all == [0, 1, 2, 3]  # of loaders that start later, too
    LoaderCores.release()
    assert bound == ([] if training is None else [training, [0, 1, 2, 3]])


# Synthetic


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (RESNET, ImageData(format="jpeg-tree")),
        (BERT, text_spec("synthetic")),
        (BERT, text_spec("synthetic", sequence_length=5, max_predictions=9, masked_lm_probability=1.0)),
        (COSMOFLOW, DensityData(format="hdf5-density")),
    ],
)
def test_synthetic_batches_fit_the_model(model: ModelSpec, data: Any) -> None:
    source = training_data(model, data, batch_size=3, world_size=2, seed=9)
    batches = take(source, POOL_BATCHES + 2)
    assert source.num_samples == 3 * POOL_BATCHES
    assert torch.isfinite(loss_for(model)(build_model(model), batches[0]))
    first = next(iter(batches[0]))
    assert batches[0][first] is batches[POOL_BATCHES][first]
    assert not same(batches[:1], batches[1:2])
    again, other_rank, later = (
        training_data(model, data, batch_size=3, rank=r, world_size=2, seed=9, start_batch=b)
        for r, b in ((0, 0), (1, 0), (0, 5))
    )
    assert same(take(again, 6), batches)
    assert not same(take(other_rank, 1), batches[:1])
    assert same(take(later, 1), batches[5:])
    about = source.describe()
    json.dumps(about)
    assert about["kind"] == "synthetic"
    assert source.failures == []
    source.close()


MODEL = ResNetModel(family="resnet", image_size=32, num_classes=2)
KEYS = [(1, index) for index in (3, 0, 2, 1, 4)]


def tree(folder: Path) -> None:
    """Five images of two classes, among them a grey one, one of four colours and a PNG under the name of a JPEG."""
    rng = np.random.default_rng(0)
    for number, (mode, form) in enumerate(
        [("RGB", "jpeg"), ("L", "jpeg"), ("CMYK", "jpeg"), ("RGB", "png"), ("RGB", "jpeg")]
    ):
        (folder / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        image = coarse.resize((96 + number, 70), Image.Resampling.BICUBIC).convert(mode)
        image.save(folder / "ab"[number % 2] / f"{number}.jpg", form)


@pytest.mark.parametrize("decoding", ["region", "full"])
def test_the_same_samples_crops_flips_and_pixels(tmp_path: Path, decoding: str) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed (extra gpu-input)")
    tree(tmp_path)
    ours = BatchReader(open_images(tmp_path, MODEL, 5, training=True, decoding="full"), "stop")[KEYS].batch
    reader = open_images(tmp_path, MODEL, 5, training=True, decoding=decoding, by_gpu=True)  # type: ignore[arg-type]
    encoded = BatchReader(reader, "stop")[KEYS]
    decode = RegionDecoder(torch.device("cpu"), 32, is_whole=decoding == "full", name=reader.name)
    batch, _kept = decode(encoded.batch)
    assert list(batch) == ["image", "label"]
    assert batch["label"].tolist() == ours["label"].tolist()
    assert batch["image"].dtype == torch.uint8
    # The same decoder beneath: only resizing in floating point rounds otherwise.
    assert (batch["image"].int() - ours["image"].int()).abs().max() <= 1
    assert len(encoded.converted) == 3
    assert str(reader.describe()["decoder"]).startswith("nvImageCodec ")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed (extra gpu-input)")
    tree(tmp_path)
    whole = (tmp_path / "a" / "0.jpg").read_bytes()
    (tmp_path / "a" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    reader = open_images(tmp_path, MODEL, 5, training=True, decoding="full", by_gpu=True)
    decode = RegionDecoder(torch.device("cpu"), 32, is_whole=True, name=reader.name)
    with pytest.raises(UserError, match=r"0\.jpg.*nvImageCodec cannot decode it"):
        decode(BatchReader(reader, "stop")[[(0, 0), (0, 1)]].batch)


def test_what_a_gpu_decodes_keeps_its_bytes_and_draws_the_crops_of_the_reader(tmp_path: Path) -> None:
    """Without the library: batches of unlike lengths, and the same crop as dlbench decodes."""
    tree(tmp_path)
    reader = open_images(tmp_path, MODEL, 5, training=True, by_gpu=True)
    fetched = BatchReader(reader, "stop")[KEYS]
    ours = BatchReader(open_images(tmp_path, MODEL, 5, training=True, decoding="full"), "stop")[KEYS].batch
    ends = [0, *fetched.batch["ends"].tolist()]
    assert fetched.batch["index"].tolist() == [index for _, index in KEYS]
    for place, (_epoch, index) in enumerate(KEYS):
        data = fetched.batch["encoded"][ends[place] : ends[place + 1]].numpy().tobytes()
        assert data == reader.fetch(index).data
        image = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        left, top, right, bottom = fetched.batch["box"][place].tolist()
        region = torch.from_numpy(image[top:bottom, left:right].copy())
        expected = gpu_images._resized_float(region, 32)
        if fetched.batch["is_mirrored"][place]:
            expected = expected.flip(1)
        assert (expected.int() - ours["image"][place].int()).abs().max() <= 1


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(EnvironmentLacksError, match=r"pip install 'dlbench\[gpu-input\]'"):
        gpu_images.nvimagecodec()


def test_only_images_that_are_read_can_be_decoded_by_a_gpu() -> None:
    ImageData(format="images", source="/x", reader="nvimagecodec")
    with pytest.raises(ValueError, match="synthetic data has none"):
        ImageData(format="images", reader="nvimagecodec")
    with pytest.raises(ValueError, match="this format has none"):
        TextData(format="text", source="/x", reader="nvimagecodec")


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "gpu-input"), ("12.6", "gpu-input-cu12")])
def test_the_package_for_torch_s_cuda_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    with pytest.raises(
        EnvironmentLacksError, match=rf"pip install 'dlbench\[{extra}\]', or set data\.reader to dlbench"
    ):
        nvimagecodec()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert declared[extra][0].startswith(f"nvidia-nvimgcodec-cu{cuda[:2]}[nvjpeg]")
