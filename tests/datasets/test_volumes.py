"""Density volumes: TFRecord, every container, damage told by name, and universes whose parameters can be read off."""

from __future__ import annotations

import gzip
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlbench.datasets import tfrecord
from dlbench.datasets.kinds import Checking, DensityVolumes
from dlbench.datasets.making import computed_recipes
from dlbench.datasets.making.computed_recipes import (
    NARROW,
    WIDE,
    Cosmology,
    DensityRecipe,
    density_sample,
    matter_power,
    top_hat,
)
from dlbench.datasets.tfrecord import (
    RecordWriter,
    encode_example,
    gunzip,
    masked_crc32c,
    read_record_at,
    read_records,
    record_offsets,
    unframe,
)
from dlbench.datasets.volumes import encode_volume, index_density
from dlbench.errors import UserError
from dlbench.node.data.density import VolumeReader, network_input
from dlbench.node.data.reader import BadSampleError
from tests.support.datasets import decode_example

h5py = pytest.importorskip("h5py")
google_crc32c = pytest.importorskip("google_crc32c")

Counts = NDArray[np.int16]
Targets = NDArray[np.float32]


# TFRecord


def _read(reader: VolumeReader, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    found = reader.read((0, number)).arrays
    return found["volume"], found["target"]


def test_checksum_is_crc32c() -> None:
    assert google_crc32c.value(b"123456789") == 0xE3069283  # RFC 3720's family; the usual check value
    assert google_crc32c.value(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert google_crc32c.value(b"\xff" * 32) == 0x62A8AB43  # RFC 3720, B.4
    rotated = (0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == (rotated + 0xA282EAD8) % 2**32


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    payload = b"123456789"
    head = bytes([9, 0, 0, 0, 0, 0, 0, 0])
    rotated = ((0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF) + 0xA282EAD8
    by_hand = head + struct.pack("<I", masked_crc32c(head)) + payload + struct.pack("<I", rotated % 2**32)
    with RecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(payload)
    assert (tmp_path / "a.tfrecord").read_bytes() == by_hand
    (tmp_path / "b.tfrecord").write_bytes(by_hand)
    assert list(read_records(tmp_path / "b.tfrecord")) == [payload]


def test_an_example_made_by_hand() -> None:
    # Example{features{feature{key: "i", value{int64_list{value: -1, 300}}}, feature{key: "f", float_list 1.0}}}
    integers = b"\x08" + b"\xff" * 9 + b"\x01" + b"\x08\xac\x02"  # not packed: a tag before each number
    entry = b"\x0a\x01i\x12" + bytes([len(integers) + 2]) + b"\x1a" + bytes([len(integers)]) + integers
    floats = b"\x0a\x01f\x12\x07\x12\x05\x0d\x00\x00\x80\x3f"
    features = b"\x0a" + bytes([len(entry)]) + entry + b"\x0a" + bytes([len(floats)]) + floats
    unknown = b"\x18\x05"
    found = decode_example(b"\x0a" + bytes([len(features)]) + features + unknown)
    assert {k: list(v) for k, v in found.items()} == {"i": [-1, 300], "f": [1.0]}
    # The same with packed numbers, as this and TensorFlow's own encoders write them.
    packed = b"\x0a\x11\x0a\x0f\x0a\x01i\x12\x0a\x1a\x08\x0a\x06\x01\xac\x02\x00\x7f\x05"
    assert encode_example({"i": np.array([1, 300, 0, 127, 5])}) == packed
    assert decode_example(packed)["i"].tolist() == [1, 300, 0, 127, 5]  # type: ignore[union-attr]


FEATURES = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.lists(st.binary(max_size=200), min_size=1, max_size=4),
        st.lists(st.floats(width=32), min_size=1, max_size=40).map(lambda v: np.array(v, dtype=np.float32)),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40).map(lambda v: np.array(v, dtype=np.int64)),
    ),
    max_size=4,
)


@given(examples=st.lists(FEATURES, max_size=4), compress=st.booleans())
def test_examples_come_back(
    tmp_path_factory: pytest.TempPathFactory, examples: list[dict[str, Any]], compress: bool
) -> None:
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    with RecordWriter(path, gzip=compress) as writer:
        for features in examples:
            writer.write(encode_example(features))
    payloads = list(read_records(path))
    if compress:
        assert [bytes(v) for v in unframe(gunzip(path.read_bytes()))] == payloads
    else:
        with path.open("rb") as file:
            assert [read_record_at(file, int(at)) for at in record_offsets(path)] == payloads
    found = [decode_example(payload) for payload in payloads]
    assert [set(f) for f in found] == [set(e) for e in examples]
    for one, other in zip(examples, found, strict=True):
        for name, value in one.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(other[name], value)
                assert isinstance(other[name], np.ndarray)
                assert other[name].dtype == value.dtype  # type: ignore[union-attr]
            else:
                assert other[name] == value


@given(payload=st.binary(max_size=60))
def test_any_bytes_are_an_example_or_a_value_error(payload: bytes) -> None:
    try:
        decode_example(payload)
    except ValueError as error:
        told = str(error)
    else:
        told = ""
    assert told == "" or told.startswith("Example: ")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("library", ["isal", "zlib"])
def test_every_flipped_byte_and_every_cut_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool, library: str
) -> None:
    if library == "isal":
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr(tfrecord, "_codec", lambda: ("zlib", zlib, gzip))
    path = tmp_path / "a.tfrecord"
    payloads = [b"first" * 4, b"", b"third"]
    with RecordWriter(path, gzip=compress) as writer:
        for payload in payloads:
            writer.write(payload)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        try:
            found = list(read_records(path, gzip=compress))
        except ValueError as error:
            assert re.match(r"record \d+ at byte \d+: |not an intact gzip file: ", str(error))  # noqa: PT017
        else:  # gzip's header holds a time, and its last bits are padding
            assert compress
            assert found == payloads
    boundaries = set() if compress else {0, *record_offsets(write(path, whole)).tolist()}
    for end in set(range(1, len(whole))) - boundaries:
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"record \d+ at byte \d+|gzip"):
            list(read_records(path, gzip=compress))
        if compress:
            with pytest.raises(ValueError, match="gzip"):
                gunzip(whole[:end])


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_gzip_of_several_members_is_read_whole() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 3, size, dtype=np.uint8).tobytes() for size in (70_000, 0, 70_000, 9)]
    assert gunzip(b"".join(map(gzip.compress, parts)) + b"\0\0") == b"".join(parts)
    with pytest.raises(ValueError, match="gzip: "):
        gunzip(gzip.compress(parts[0]) + b"junk")


# Containers


def samples(num: int, size: int = 8, seed: int = 0) -> tuple[Counts, Targets]:
    rng = np.random.default_rng(seed)
    x = rng.poisson(rng.gamma(0.5, 4, (num, size, size, size, 4))).astype(np.int16)
    return x, rng.uniform(-1, 1, (num, 4)).astype(np.float32)


def as_hdf5(folder: Path, x: Counts, y: Targets) -> None:
    for number in range(0, len(x), 2):
        with h5py.File(folder / f"{number:03d}.h5", "w") as file:
            chosen = x[number : number + 2]
            file.create_dataset("x", data=chosen, chunks=(1, *x.shape[1:]), compression="gzip", fletcher32=True)
            file["y"] = y[number : number + 2]


def as_tfrecord(folder: Path, x: Counts, y: Targets, *, compress: bool = True) -> None:
    for number, (counts, targets) in enumerate(zip(x, y, strict=True)):
        with RecordWriter(folder / f"{number:03d}.tfrecord", gzip=compress) as writer:
            writer.write(encode_volume(counts, targets))


def as_npy(folder: Path, x: Counts, y: Targets) -> None:
    for number, (counts, targets) in enumerate(zip(x, y, strict=True)):
        np.save(folder / f"{number}_data.npy", counts)
        np.save(folder / f"{number}_label.npy", targets)


CONTAINERS: dict[str, Callable[[Path, Counts, Targets], None]] = {
    "hdf5": as_hdf5,
    "tfrecord gzip": as_tfrecord,
    "tfrecord plain": lambda f, x, y: as_tfrecord(f, x, y, compress=False),
    "npy": as_npy,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_give_the_same_samples(tmp_path: Path, name: str) -> None:
    x, y = samples(5)
    CONTAINERS[name](tmp_path, x, y)
    (tmp_path / "README").write_text("passed over", encoding="utf-8")
    index = index_density(tmp_path)
    assert (index.container, index.num_samples) == (name.split()[0], 5)
    assert (index.size, index.channels, index.num_targets) == (8, 4, 4)
    assert not index.chunks_span_samples
    reader = pickle.loads(pickle.dumps(VolumeReader(index)))
    for number in (4, 0, 3, 1, 2, 4):
        arrays = reader.read((0, number)).arrays
        expected = np.log1p(x[number].astype(np.float64)).astype(np.float32).transpose(3, 0, 1, 2)
        np.testing.assert_array_equal(arrays["volume"], expected)
        np.testing.assert_array_equal(arrays["target"], y[number])
        torch.from_numpy(np.stack([arrays["target"]]))
    about = reader.describe()
    assert about["kind"] == f"{index.container}-density"
    assert about.get("decompressor") in ((None,) if index.container != "tfrecord" else ("isal", "zlib"))
    reader.close()
    assert DensityVolumes().verify(tmp_path, Checking()) == []


@pytest.mark.parametrize("name", [n for n in CONTAINERS if n != "npy"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_told_by_name_and_never_trained(tmp_path: Path, name: str, damage: str) -> None:
    x, y = samples(6)
    CONTAINERS[name](tmp_path, x, y)
    index = index_density(tmp_path)
    victim = tmp_path / index.files[1]
    whole = victim.read_bytes()
    half = len(whole) // 2 - 3  # not between two records
    if name == "hdf5":  # what lies between its pieces is of no account
        with h5py.File(victim) as file:
            half = file["x"].id.get_chunk_info(0).byte_offset + 9
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(
            whole[:half] + (bytes([whole[half] ^ 0x10]) + whole[half + 1 :] if damage == "flip" else b"")
        )
    reader = VolumeReader(index)
    told, good = [], []
    for number in range(6):
        try:
            volume = reader.read((0, number)).arrays["volume"]
            np.testing.assert_array_equal(volume, network_input(x[number]))
            good.append(number)
        except BadSampleError as error:
            told.append(str(error))
    assert told
    assert all(victim.name in line and "\n" not in line for line in told)
    assert len(good) >= 4
    reader.close()
    if damage != "gone":
        (line,) = DensityVolumes().verify(tmp_path, Checking())
        assert line.startswith(f"{victim.name}: ")


def test_a_pair_of_npy_without_its_half_or_of_another_type_is_named(tmp_path: Path) -> None:
    as_npy(tmp_path, *samples(3))
    np.save(tmp_path / "1_data.npy", np.ones((8, 8, 8, 4), np.float32))
    with pytest.raises(UserError, match=r"1_data.npy': _data.npy is float32 of shape \(8, 8, 8, 4\); expected "):
        index_density(tmp_path)
    (tmp_path / "0_label.npy").unlink()
    with pytest.raises(UserError, match=r"0_data.npy' has no file of targets next to it"):
        index_density(tmp_path)


def test_verification_reads_everything_in_several_processes(tmp_path: Path) -> None:
    x, y = samples(6, size=4)
    x[1, 0, 0, 0, 0], y[4, 2] = -1, np.inf
    as_tfrecord(tmp_path, x, y)
    with RecordWriter(tmp_path / "003.tfrecord") as writer:
        writer.write(encode_volume(*(a[0] for a in samples(1, size=2))))
    with RecordWriter(tmp_path / "005.tfrecord") as writer:
        writer.write(encode_example({"x": b"12"}))
    seen: list[tuple[int, int]] = []
    checking = Checking(workers=2, on_progress=lambda done, total: seen.append((done, total)))
    lines = DensityVolumes().verify(tmp_path, checking)
    assert lines == [
        "001.tfrecord: sample 0: x has a negative count",
        "003.tfrecord: volumes of 2^3 x 4 with 4 targets, but '000.tfrecord' has volumes of 4^3 x 4 with 4 targets",
        "004.tfrecord: sample 0: y is not finite",
        "005.tfrecord: sample 0: no y of floats in it; expected " + lines[3].split("expected ")[1],
    ]
    assert seen == [(n, 6) for n in range(1, 7)]


def test_half_a_million_files_are_not_all_opened(tmp_path: Path) -> None:
    x, y = samples(3, size=2)
    as_tfrecord(tmp_path, x, y)
    payload = (tmp_path / "000.tfrecord").read_bytes()
    for number in range(7):
        (tmp_path / f"{number:03d}.tfrecord").write_bytes(payload)
    (tmp_path / "001.tfrecord").write_bytes(b"")  # neither first, middle nor last
    with RecordWriter(tmp_path / "005.tfrecord", gzip=True) as writer:
        for place in range(2):
            writer.write(encode_volume(x[place], y[place]))
    index = index_density(tmp_path)
    assert index.num_samples == 7
    reader = VolumeReader(index)
    with pytest.raises(BadSampleError, match=r"001.tfrecord', sample 0: holds 0 records; expected"):
        reader.read((0, 1))
    with pytest.raises(BadSampleError, match=r"005.tfrecord', sample 0: holds 2 records"):
        reader.read((0, 5))
    (tmp_path / "001.tfrecord").write_bytes(b"")
    assert [line.partition(";")[0] for line in DensityVolumes().verify(tmp_path, Checking())] == [
        "001.tfrecord: sample 0: holds 0 records",
        "005.tfrecord: sample 0: holds 2 records",
    ]


def test_subfolders_mixtures_and_splits(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    as_tfrecord(tmp_path / "sub", *samples(2, size=2))
    as_tfrecord(tmp_path / ".hidden", *samples(2, size=2))
    assert index_density(tmp_path).files == ("sub/000.tfrecord", "sub/001.tfrecord")
    as_hdf5(tmp_path, *samples(1, size=2))
    with pytest.raises(UserError, match=r"holds '000.h5' and 'sub/000.tfrecord': a data set has one container"):
        index_density(tmp_path)
    (tmp_path / "sub").rename(tmp_path / "train")
    with pytest.raises(UserError, match=r"holds the folder 'train' of a split; give that folder"):
        index_density(tmp_path)


def test_logarithms_are_exact_for_every_count() -> None:
    counts = np.arange(32768, dtype=np.int16).reshape(32, 32, 32, 1)
    expected = np.log1p(np.arange(32768, dtype=np.float64)).astype(np.float32)
    np.testing.assert_array_equal(network_input(counts).ravel(), expected)


# HDF5


def write_hdf5(path: Path, **datasets: object) -> None:
    with h5py.File(path, "w") as file:
        for key, value in datasets.items():
            file[key] = value


def volumes(*shape: int) -> object:
    return np.arange(np.prod(shape)).astype(np.int16).reshape(shape)


def test_several_and_single_samples_a_file(tmp_path: Path) -> None:
    x, y = volumes(3, 2, 2, 2, 4), np.arange(12, dtype=np.float32).reshape(3, 4) / 16
    write_hdf5(tmp_path / "a.h5", x=x, y=y)
    write_hdf5(tmp_path / "b.hdf5", x=volumes(2, 2, 2, 4), y=np.ones(4, dtype=np.float32))
    (tmp_path / "README.txt").write_text("not a volume", encoding="utf-8")
    index = index_density(tmp_path)
    assert (index.num_samples, index.size, index.channels, index.num_targets) == (4, 2, 4, 4)
    reader = pickle.loads(pickle.dumps(VolumeReader(index, voxel_counts=True)))
    for number in (3, 0, 2):
        volume, target = _read(reader, number)
        assert volume.shape == (2, 2, 2, 4)
        assert volume.dtype == np.int16
        expected = volumes(2, 2, 2, 4) if number == 3 else np.asarray(x)[number]
        np.testing.assert_array_equal(volume, expected)
        np.testing.assert_array_equal(target, np.ones(4) if number == 3 else y[number])
    reader.close()
    assert _read(reader, 0)[1][1] == 1 / 16
    reader.close()


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"chunks": (1, 4, 4, 4, 2)},
        {"chunks": (2, 4, 4, 4, 2)},
        {"chunks": (1, 2, 4, 4, 2)},
        {"chunks": (1, 4, 4, 4, 2), "compression": "gzip"},
        {"chunks": (1, 4, 4, 4, 2), "fletcher32": True},
        {"chunks": (1, 4, 4, 4, 2), "shuffle": True},
    ],
)
@pytest.mark.parametrize("user_block", [0, 512])
def test_counts_are_read_into_the_batch_however_hdf5_stores_them(
    tmp_path: Path, stored: dict[str, Any], user_block: int
) -> None:
    x: NDArray[Any] = np.asarray(volumes(3, 4, 4, 4, 2))
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=user_block) as file:
        file.create_dataset("x", data=x, **stored)
        file["y"] = np.arange(6, dtype=np.float32).reshape(3, 2) / 8
    reader = VolumeReader(index_density(tmp_path), voxel_counts=True)
    out: dict[str, NDArray[Any]] = {"volume": np.empty(x.shape[1:], np.int16), "target": np.empty(2, np.float32)}
    for number in (2, 0, 1):
        raw = reader.fetch(number, out)
        assert len(raw.data) + raw.num_bytes_in_place == reader.num_bytes(number)
        sample = reader.prepare((0, number), raw.data, out).arrays
        assert sample["volume"] is out["volume"]
        np.testing.assert_array_equal(out["volume"], x[number])
        np.testing.assert_array_equal(sample["target"], [number / 4, number / 4 + 1 / 8])
    reader.close()
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["x"][1, 3, 3, 3, 1] = -1
    with pytest.raises(BadSampleError, match="x has a negative count"):
        reader.fetch(1, out)
    reader.fetch(2, out)
    reader.close()


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ({"x": volumes(2, 2, 2, 4)}, "no dataset 'y'"),
        ({"y": np.zeros(4, np.float32)}, "no dataset 'x'"),
        ({"x": np.zeros((2, 2, 2, 4), np.float32), "y": np.zeros(4, np.float32)}, "x is float32 of shape (2, 2, 2, 4)"),
        ({"x": volumes(2, 2, 2, 4), "y": np.zeros(4)}, "y is float64 of shape (4,)"),
        ({"x": volumes(2, 2, 3, 4), "y": np.zeros(4, np.float32)}, "x has shape (2, 2, 3, 4)"),
        ({"x": volumes(3, 2, 2, 2, 4), "y": np.zeros((2, 4), np.float32)}, "y has shape (2, 4)"),
        ({"x": volumes(3, 2, 2, 2, 4), "y": np.zeros(4, np.float32)}, "y has shape (4,)"),
        ({"x": volumes(8), "y": np.zeros(4, np.float32)}, "x is int16 of shape (8,)"),
    ],
)
def test_wrong_hdf5_files_name_file_and_key(tmp_path: Path, datasets: dict[str, object], told: str) -> None:
    write_hdf5(tmp_path / "wrong.h5", **datasets)
    with pytest.raises(UserError) as raised:
        index_density(tmp_path)
    assert told in str(raised.value)
    assert "wrong.h5" in str(raised.value)


@pytest.mark.parametrize("kind", ["virtual", "external", "a link"])
def test_values_in_other_files_are_refused(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    write_hdf5(other, x=volumes(64, 8, 8, 8, 4))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.zeros((64, 4), np.float32)
        if kind == "virtual":
            layout = h5py.VirtualLayout((64, 8, 8, 8, 4), "i2")
            layout[:] = h5py.VirtualSource(other, "x", (64, 8, 8, 8, 4))
            file.create_virtual_dataset("x", layout)
        elif kind == "external":
            file.create_dataset("x", (64, 8, 8, 8, 4), "i2", external=[(str(other), 0, 64 * 8**3 * 4 * 2)])
        else:
            file["x"] = h5py.ExternalLink(other, "x")
    told = f"a.h5': x is {kind}: its values are in other files, e.g. {str(other)!r}; write them into this one"
    with pytest.raises(UserError, match=re.escape(told)):
        index_density(tmp_path)


def test_other_folders_and_volumes_of_other_shapes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        index_density(tmp_path / "missing")
    with pytest.raises(UserError, match=r"holds no file that ends in .h5, .hdf5, .tfrecord"):
        index_density(tmp_path)
    write_hdf5(tmp_path / "a.h5", x=volumes(2, 2, 2, 4), y=np.zeros(4, np.float32))
    write_hdf5(tmp_path / "b.h5", x=volumes(2, 2, 2, 1), y=np.zeros(4, np.float32))
    told = r"b.h5': volumes of 2\^3 x 1 with 4 targets, but 'a.h5' has volumes of 2\^3 x 4"
    with pytest.raises(UserError, match=told):
        index_density(tmp_path)


# Cosmology


PLANCK = Cosmology(omega_m=0.31, sigma_8=0.81, n_s=0.965, h=0.677)


def test_spectrum_has_the_sigma_8_it_was_asked_for() -> None:
    k = np.geomspace(1e-6, 300, 200_001)
    for cosmology in (PLANCK, Cosmology(omega_m=0.1, sigma_8=1.1, n_s=1.3, h=0.9)):
        integrand = k**2 * matter_power(k, cosmology) / (2 * np.pi**2) * top_hat(k * 8 / cosmology.h) ** 2
        variance = float((np.diff(k) * (integrand[1:] + integrand[:-1]) / 2).sum())
        assert np.sqrt(variance) == pytest.approx(cosmology.sigma_8, rel=1e-3)


def test_density_follows_its_targets() -> None:
    def sample(*targets: float) -> Counts:
        return density_sample(targets, 32, np.random.default_rng(3))

    middle = sample(0, 0, 0, 0)
    assert (middle.shape, middle.dtype) == ((32, 32, 32, 4), np.int16)
    assert middle.min() >= 0
    mean = computed_recipes.MEAN_COUNT * 0.35 * 0.7**2 / (0.3 * 0.7**2)
    assert middle[..., 0].mean() == pytest.approx(mean, rel=0.1)  # the earliest channel is the smoothest
    spreads = [float(middle[..., c].std()) for c in range(4)]
    assert spreads == sorted(spreads)
    assert sample(1, 0, 0, 0)[..., 0].mean() > middle[..., 0].mean() > sample(0, 0, 0, -1)[..., 0].mean()
    logs = [float(np.log1p(sample(0, s, 0, 0)[..., 0].astype(float)).std()) for s in (-1, 0, 1)]
    assert logs == sorted(logs)


def test_recipes_are_deterministic_and_splits_never_meet(tmp_path: Path) -> None:
    recipe = DensityRecipe(num_train=5, num_validation=3, size=8, container="hdf5", seed=4, samples_per_file=2)
    parts = recipe.parts()
    assert [(p.name, p.split, p.first, p.count) for p in parts] == [
        ("train/density-00000.h5", "train", 0, 2),
        ("train/density-00001.h5", "train", 2, 2),
        ("train/density-00002.h5", "train", 4, 1),
        ("validation/density-00000.h5", "validation", 0, 2),
        ("validation/density-00001.h5", "validation", 2, 1),
    ]
    recipe = pickle.loads(pickle.dumps(recipe))
    everything = [recipe.sample(p.split, p.first + i) for p in parts for i in range(p.count)]
    assert len({x.tobytes() for x, _ in everything}) == len({y.tobytes() for _, y in everything}) == 8
    other = DensityRecipe(num_train=5, num_validation=3, size=8, container="tfrecord", seed=4)
    for number, made in enumerate((recipe, recipe, other)):
        for part in made.parts():
            (tmp_path / str(number) / part.split).mkdir(parents=True, exist_ok=True)
            made.write(part, tmp_path / str(number) / part.name)
    for part in parts:
        assert (tmp_path / "0" / part.name).read_bytes() == (tmp_path / "1" / part.name).read_bytes()
    readers = [VolumeReader(index_density(tmp_path / n / "train"), voxel_counts=True) for n in ("0", "2")]
    for number in range(5):
        (x, y), (x2, y2) = (_read(reader, number) for reader in readers)
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    for reader in readers:
        reader.close()
    assert recipe.made_with["range_n_s"] == f"{NARROW['n_s'][0]:g} to {NARROW['n_s'][1]:g}"
    assert all(isinstance(v, str | int | float | bool) for v in recipe.made_with.values())


def summary(x: Counts) -> list[float]:
    """Mean, spread and power in bands of each channel, logarithmic."""
    squares = computed_recipes._squared_waves(x.shape[0])
    band = np.digitize(squares, np.array([1, 3, 7, 21, 57, 133, 257])).ravel()
    numbers: list[float] = []
    for channel in range(4):
        counts = x[..., channel]
        logs = np.log1p(counts.astype(np.float32))
        power = np.abs(np.fft.rfftn(logs)) ** 2
        bands = np.bincount(band, power.ravel())[1:7] / np.bincount(band)[1:7]
        numbers += [float(np.log(counts.mean())), float(np.log(logs.var())), *np.log(bands).tolist()]
    return numbers


def test_parameters_can_be_read_from_small_volumes() -> None:
    recipe = DensityRecipe(num_train=220, num_validation=80, size=32, wide=True, seed=11)
    assert recipe.made_with["range_h"] == f"{WIDE['h'][0]:g} to {WIDE['h'][1]:g}"
    features, targets = [], []
    for split, num in (("train", 220), ("validation", 80)):
        drawn = [recipe.sample(split, n) for n in range(num)]  # type: ignore[arg-type]
        features.append(np.array([summary(x) for x, _ in drawn]))
        targets.append(np.array([y for _, y in drawn]))
    mean, spread = features[0].mean(axis=0), features[0].std(axis=0)
    train, held_out = (np.hstack([np.ones((len(f), 1)), z := (f - mean) / spread, z**2]) for f in features)
    weights = np.linalg.solve(train.T @ train + 0.01 * np.eye(train.shape[1]), train.T @ targets[0])
    error = np.abs(held_out @ weights - targets[1]).mean(axis=0)
    trivial = np.abs(targets[0].mean(axis=0) - targets[1]).mean(axis=0)
    ratios = error / trivial
    assert (ratios < 0.45).all(), ratios  # no parameter is hidden
    assert ratios.mean() < 0.3, ratios
