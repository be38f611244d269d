"""Labelled images: trees and shards hold the same samples, bad ones are named, crops are where they should be."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.datasets.images import jpeg_decode
from dlbench.datasets.images import shards as image_shards
from dlbench.datasets.images.image_set import index_jpeg_tree, open_image_set
from dlbench.datasets.images.shards import INDEX, ImageSet, ImageShards, open_image_shards
from dlbench.datasets.kinds import Checking, ImageTree
from dlbench.datasets.making.image_recipes import PHOTOS, PackRecipe, PhotoRecipe, class_labels
from dlbench.datasets.making.production import produce
from dlbench.datasets.tfrecord import RecordWriter, encode_example
from dlbench.datasets.verification import verify
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data import images as jpeg
from dlbench.node.data.images import image_classes, open_images
from dlbench.specs.workload import ResNetModel
from tests.support.datasets import encode, verify_manifest, write_records, write_tree

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("google_crc32c")
torch.set_num_threads(1)

RESNET = ResNetModel(family="resnet", image_size=32, num_classes=3, stage_blocks=(1, 1, 1, 1), base_width=8)
CONTAINERS = ("tar", "tfrecord")


def smooth(width: int, height: int) -> np.ndarray:
    """A picture without fine detail, (height, width, 3)."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 150 + c) + np.cos(y / 120 + 2 * c) for c in range(3)]
    return (127 + 60 * np.stack(waves, axis=2)).astype(np.uint8)


def smooth_jpeg(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(smooth(width, height)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "some 'images'\n")


BAD = {"empty": "empty file", "cut": "", "text": "not an image"}
ODD = {"grey": "grey", "cmyk": "JPEG, CMYK", "png": "PNG, RGB"}


def spoil(folder: Path) -> dict[str, Path]:
    """Makes one file of each kind of bad and odd."""
    folder = folder / "class 1"
    contents = {
        "empty": b"",
        "cut": encode((64, 64, 3))[:1500],
        "text": b"not an image",
        "grey": encode((30, 30), "L"),
        "cmyk": encode((30, 30, 3), "CMYK"),
        "png": encode((30, 30, 3), "RGB", "PNG"),
    }
    for name, content in contents.items():
        (folder / f"{name}.jpg").write_bytes(content)
    return {name: folder / f"{name}.jpg" for name in contents}


def packed(source: Path, folder: Path, container: str, **changes: Any) -> ImageShards:
    if container == "tar":
        produce(PackRecipe(train=source, **{"samples_per_shard": 4, **changes}), folder)
    else:
        write_records(source, folder / "train", changes.get("samples_per_shard", 4))
    return open_image_shards(folder / "train")


def contents(images: ImageSet) -> list[tuple[str, bytes]]:
    return sorted((images.classes[images.label(i)], images.read(i)) for i in range(images.num_samples))


# Forms


@pytest.mark.parametrize("container", CONTAINERS)
def test_shards_hold_the_samples_of_the_tree_mixed(tree: Path, tmp_path: Path, container: str) -> None:
    spoil(tree)
    source = index_jpeg_tree(tree)
    shards = packed(tree, tmp_path / "shards", container)
    assert contents(shards) == contents(source)
    assert (shards.classes, shards.kind, len(shards.index.shards)) == (source.classes, container, 6)
    assert [shards.label(i) for i in range(21)] != sorted(shards.label(i) for i in range(21))
    # A set packed from shards is the same set.
    assert contents(packed(tmp_path / "shards" / "train", tmp_path / "third", "tar")) == contents(source)
    if container == "tar":
        assert packed(tree, tmp_path / "again", container).sha256 == shards.sha256
        assert packed(tree, tmp_path / "other", container, seed=1).sha256 != shards.sha256
        assert verify_manifest(tmp_path / "shards") == []


def test_scanning_finds_what_the_index_says_and_reads_headers_only(tree: Path, tmp_path: Path) -> None:
    shards = packed(tree, tmp_path / "shards", "tar")
    (shards.root / INDEX).unlink()
    for name in shards.index.shards:
        data = bytearray((shards.root / name).read_bytes())
        for i in np.flatnonzero(shards.index.shard == shards.index.shards.index(name)):
            start, length = int(shards.index.offsets[i]), int(shards.index.lengths[i])
            data[start : start + length] = bytes(length)
        (shards.root / name).write_bytes(data)
    scanned = open_image_set(shards.root)
    assert isinstance(scanned, ImageShards)
    for array in ("shard", "records", "offsets", "lengths", "labels"):
        np.testing.assert_array_equal(getattr(scanned.index, array), getattr(shards.index, array))
    assert scanned.classes == ("0", "1", "2")  # a tar has no room for the names of the classes
    image_shards.save_index(scanned.index, shards.root)
    assert open_image_set(shards.root).sha256 == scanned.sha256


def test_tars_are_as_others_read_them(tree: Path, tmp_path: Path) -> None:
    shards = packed(tree, tmp_path / "shards", "tar")
    with tarfile.open(tmp_path / "shards" / "train" / "shard-00001.tar") as tar:
        names = tar.getnames()
        assert names == [f"{n:08d}.{s}" for n in range(4, 8) for s in ("jpg", "cls")]
        label, image = tar.extractfile(names[1]), tar.extractfile(names[0])
        assert label is not None
        assert image is not None
        assert int(label.read()) == shards.label(4)
        assert image.read() == shards.read(4)
    assert shards.name(4).endswith("shard-00001.tar', member '00000004.jpg'")


def write_tar(path: Path, members: dict[str, bytes], **options: Any) -> None:
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_tars_of_others_are_understood(tmp_path: Path) -> None:
    long = "folder/" + "x" * 150
    members = {"a.cls": b"2\n", "a.jpg": b"A", "a.json": b"{}", f"{long}.JPEG": b"BB", f"{long}.cls": b" 0"}
    write_tar(tmp_path / "b-000000.tar", members, format=tarfile.PAX_FORMAT)
    images = open_image_set(tmp_path)
    assert [(images.label(i), images.read(i)) for i in range(images.num_samples)] == [(2, b"A"), (0, b"BB")]
    assert images.classes == ("0", "1", "2")
    assert images.remarks == ("members of the tar files that are neither image nor label, ignored: 1",)


def test_webp_is_read_from_trees_and_shards_and_packed(tmp_path: Path) -> None:
    data = encode((40, 40, 3), form="WEBP", lossless=True)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "1.WEBP").write_bytes(data)
    (tmp_path / "tar").mkdir()
    write_tar(tmp_path / "tar" / "a.tar", {"1.webp": data, "1.cls": b"0"})
    with Image.open(io.BytesIO(data)) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    for images in (
        open_image_set(tmp_path / "tree"),
        open_image_set(tmp_path / "tar"),
        packed(tmp_path / "tree", tmp_path / "packed", "tar"),
    ):
        read, remark = jpeg_decode.decode(images.read(0))
        assert (images.num_samples, images.read(0), remark) == (1, data, "WEBP, RGB, converted to RGB")
        np.testing.assert_array_equal(read, pixels)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"a.jpg": b"A"}, "member 'a.jpg' has no .cls next to it"),
        ({"a.jpg": b"A", "b.jpg": b"B"}, "member 'a.jpg' has no .cls next to it"),
        ({"a.jpg": b"A", "b.cls": b"1"}, "member 'a.jpg' has no .cls next to it"),
        ({"a.jpg": b"A", "a.cls": b"cat"}, "member 'a.cls' holds b'cat', not a label in digits"),
        ({"v.2.jpg": b"A"}, "hold no image: 'v.2.jpg' does not end in .jpg, .jpeg, .png, .webp; an ending begins at"),
    ],
)
def test_wrong_tars_are_named(tmp_path: Path, members: dict[str, bytes], told: str) -> None:
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(UserError) as raised:
        open_image_set(tmp_path)
    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_public_imagenet_records_count_from_one(tmp_path: Path) -> None:
    for number, labels in enumerate(((2, 1), (4, 2))):
        with RecordWriter(tmp_path / f"train-0000{number}-of-00002") as writer:
            for label in labels:
                example = {"image/encoded": b"J%d" % label, "image/class/label": np.array([label])}
                writer.write(encode_example({**example, "image/class/text": b"a dog"}))
    images = open_image_set(tmp_path)
    assert [(images.label(i), images.read(i)) for i in range(4)] == [(1, b"J2"), (0, b"J1"), (3, b"J4"), (1, b"J2")]
    assert images.remarks == (
        "labels in the records count from 1 (0 is the background class); they were lowered by one",
    )
    with RecordWriter(tmp_path / "train-00001-of-00002") as writer:
        writer.write(encode_example({"image/encoded": b"J", "image/class/label": np.array([0])}))
    images = open_image_set(tmp_path)
    assert [images.label(i) for i in range(3)] == [2, 1, 0]
    assert images.remarks == ()


@pytest.mark.parametrize("container", CONTAINERS)
def test_few_files_stay_open_and_copies_open_their_own(tree: Path, tmp_path: Path, container: str) -> None:
    shards = packed(tree, tmp_path / "shards", container, samples_per_shard=1)
    few = ImageShards(shards.root, shards.index, open_at_most=3)
    everything = [few.read(i) for i in (*range(15), *range(15))]
    assert len(few._descriptors) == 3
    copy = pickle.loads(pickle.dumps(few))
    few.close()
    assert [copy.read(i) for i in (*range(15), *range(15))] == everything


def test_splits_instead_of_classes_are_told(tree: Path, tmp_path: Path) -> None:
    produce(PackRecipe(train=tree, validation=tree, samples_per_shard=8), tmp_path / "shards")
    with pytest.raises(UserError, match=r"holds splits, not classes; give '.*train' or the other one"):
        open_image_set(tmp_path / "shards")
    assert open_image_set(tmp_path / "shards" / "validation").num_samples == 15


# Hostile archives


def archive(path: Path, *members: tuple[str, bytes, dict[str, Any]], form: int = tarfile.GNU_FORMAT) -> None:
    """A tar of the members in order: name, content, and what else its header says."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content, about in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in about.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))


def pair(name: str) -> list[tuple[str, bytes, dict[str, Any]]]:
    return [(f"{name}.jpg", encode((8, 8, 3)), {}), (f"{name}.cls", b"1", {})]


HOSTILE = {
    "symbolic link": ("a.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is a link, a device"),
    "hard link": ("a.jpg", {"type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"}, "is a link, a device"),
    "device": ("a.cls", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "is a link, a device"),
    "absolute": ("/etc/a.jpg", {}, "points outside of the archive"),
    "climbing": ("x/../../a.jpg", {}, "points outside of the archive"),
    "climbing, other": ("../notes.txt", {}, "points outside of the archive"),
    "terminal": ("\x1b]0;pwned\x07\n/../a.jpg", {}, "points outside of the archive"),
    "sparse": ("a.jpg", {"type": tarfile.GNUTYPE_SPARSE}, "or sparse"),
    "long name": ("../" + "n" * 5000 + ".jpg", {}, "points outside of the archive"),
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_archives_that_lead_elsewhere_are_refused_and_never_followed(what: str, tmp_path: Path) -> None:
    name, about, reason = HOSTILE[what]
    folder = tmp_path / "shards"
    folder.mkdir()
    archive(folder / "a.tar", *pair("0"), (name, b"", about), ("a.cls", b"1", {}), *pair("1"))
    before = sorted(tmp_path.rglob("*"))
    opening: tuple[Callable[[], object], ...] = (
        lambda: open_image_set(folder),
        lambda: image_shards.scan_shards(folder),
    )
    packing = PackRecipe(train=folder)
    for call in (*opening, lambda: produce(packing, tmp_path / "packed")):
        with pytest.raises(UserError, match=reason) as raised:
            call()
        said = str(raised.value)
        assert said.isprintable(), "no name of a member reaches a terminal as it is"
        assert len(said) < 1000
    assert reason in str(verify(folder).faults)
    assert [path for path in sorted(tmp_path.rglob("*")) if "packed" not in path.parts] == before


def test_links_in_a_tree_are_read_but_no_device_is(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    store = tmp_path / "store.jpg"
    store.write_bytes(encode((8, 8, 3)))
    (tree / "class 0" / "a-linked.jpg").symlink_to(store)
    (tree / "class 0" / "b-device.jpg").symlink_to("/dev/zero")
    (tree / "class 0" / "c-loop.jpg").symlink_to("c-loop.jpg")
    images = index_jpeg_tree(tree)
    named = {images.path(i).relative_to(tree).as_posix(): i for i in range(images.num_samples)}
    assert images.read(named["class 0/a-linked.jpg"]) == store.read_bytes()
    for name, reason in (("b-device", "is a device, not a regular file"), ("c-loop", "symbolic links")):
        with pytest.raises(OSError, match=reason):
            images.read(named[f"class 0/{name}.jpg"])


# Packing


def test_packing_names_what_it_cannot_read(tree: Path, tmp_path: Path) -> None:
    recipe = PackRecipe(train=tree, samples_per_shard=100)
    (part,) = recipe.parts()
    (tree / "class 2" / '"3".jpg').unlink()
    with pytest.raises(UserError, match=r"class 2/\"3\".jpg': No such file or directory; repair or remove it"):
        recipe.write(part, tmp_path / "x.tar")


def test_validation_classes_are_those_of_training(tree: Path, tmp_path: Path) -> None:
    validation = tmp_path / "validation"
    (validation / "class 2").mkdir(parents=True)
    (validation / "class 2" / "x.jpg").write_bytes(encode((40, 40, 3)))
    produce(PackRecipe(train=tree, validation=validation), tmp_path / "shards")
    assert open_image_set(tmp_path / "shards" / "validation").label(0) == 2
    reader = open_images(validation, RESNET, 0, training=False, classes=image_classes(tree))
    assert reader.read((0, 0)).arrays["label"] == 2
    (validation / "class 2").rename(validation / "class x")
    told = r"not among the 3 training classes: 'class x'; give each class the same name"
    with pytest.raises(UserError, match=told):
        open_images(validation, RESNET, 0, training=False, classes=image_classes(tree))
    with pytest.raises(UserError, match=told):
        PackRecipe(train=tree, validation=validation).parts()
    assert class_labels(open_image_set(tree), ("z", "class 2", "class 0", "class 1")) == (2, 3, 1)


# Bad samples


@pytest.mark.parametrize("form", ["tree", *CONTAINERS])
@pytest.mark.parametrize("workers", [1, 3])
def test_verification_names_every_bad_file(
    tree: Path, tmp_path: Path, form: Literal["tree", "tar", "tfrecord"], workers: int
) -> None:
    seen: list[tuple[int, int]] = []
    assert ImageTree().verify(tree, Checking()) == []
    paths = spoil(tree)
    folder, names = tree, {name: repr(str(path)) for name, path in paths.items()}
    if form != "tree":
        shards = packed(tree, tmp_path / "shards", form)
        folder = shards.root
        places = {shards.read(i): shards.name(i) for i in range(shards.num_samples)}
        names = {name: places[path.read_bytes()] for name, path in paths.items()}
    odd: list[str] = []
    checking = Checking(None, None, workers, lambda done, total: seen.append((done, total)), odd.append)
    bad = ImageTree().verify(folder, checking)
    assert len(bad) == len(BAD)
    assert len([line for line in odd if "converted to RGB" in line]) == len(ODD)
    for expected, lines in ((BAD, bad), (ODD, odd)):
        for name, reason in expected.items():
            (line,) = [line for line in lines if line.startswith(f"{names[name]}: ")]
            assert reason in line
    assert seen[-1] == (21, 21)


@pytest.mark.parametrize("container", CONTAINERS)
def test_verification_finds_a_changed_bit(tree: Path, tmp_path: Path, container: str) -> None:
    shards = packed(tree, tmp_path / "shards", container)
    assert ImageTree().verify(shards.root, Checking()) == []
    place = int(shards.index.offsets[6]) + int(shards.index.lengths[6]) // 2
    path = shards.root / f"shard-00001.{container}"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    told = "train/shard-00001.tar: altered (SHA-256 differs)"
    if container == "tfrecord":
        told = f"{shards.name(6)}: record at byte {shards.index.records[6]}: the checksum of its payload differs"
    assert verify(shards.root).faults[0] == told


@pytest.mark.parametrize("with_simplejpeg", [True, False])
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encode((9, 7, 3)), None),
        (encode((9, 7, 3), progressive=True), None),
        (encode((9, 7), "L"), "grey"),
        (encode((9, 7, 3), "CMYK"), "JPEG, CMYK"),
        (encode((9, 7, 3), "RGBA", "PNG"), "PNG, RGBA"),
    ],
)
def test_other_colours_are_converted_and_named(
    data: bytes, kind: str | None, with_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_simplejpeg:
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg_decode, "_simplejpeg", lambda: None)
    pixels, found = jpeg_decode.decode(data)
    assert pixels.shape == (9, 7, 3)
    assert pixels.dtype == np.uint8
    assert found == (None if kind is None else f"{kind}, converted to RGB")


@pytest.mark.parametrize("with_simplejpeg", [True, False])
def test_decoders_agree_and_refuse_the_same(with_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode((40, 50, 3), quality=95)
    with Image.open(io.BytesIO(whole)) as opened:
        expected = np.asarray(opened)
    if not with_simplejpeg:
        monkeypatch.setattr(jpeg_decode, "_simplejpeg", lambda: None)
    assert np.abs(jpeg_decode.decode(whole)[0].astype(int) - expected).max() <= 4
    for bad in (b"", whole[: len(whole) // 2], whole[:20], b"\xff\xd8", b"GIF89a", b"text", whole[:2] + bytes(99)):
        with pytest.raises(ValueError, match=r"."):
            jpeg_decode.decode(bad)
    # A header that claims 60,000 x 60,000 pixels.
    place = whole.index(b"\xff\xc0") + 5
    with pytest.raises(ValueError, match="178956970 pixels"):
        jpeg_decode.decode(whole[:place] + b"\xea\x60\xea\x60" + whole[place + 4 :])


def test_extraneous_bytes_are_told_not_refused() -> None:
    pytest.importorskip("simplejpeg")
    whole = smooth_jpeg(64, 48)
    pixels, remark = jpeg_decode.decode(whole[:-2] + b"\x01" * 20 + whole[-2:])
    assert remark is not None
    assert "extraneous bytes" in remark
    np.testing.assert_array_equal(pixels, jpeg_decode.decode(whole)[0])


# Crops


@pytest.mark.parametrize("training", [True, False])
def test_samples_are_eight_bit_channels_last_and_equal_in_all_forms(tree: Path, tmp_path: Path, training: bool) -> None:
    reference = open_images(tree, RESNET, 3, training=training)
    by_content = {}
    for index in range(15):
        sample = reference.read((1, index)).arrays
        assert sample["image"].shape == (32, 32, 3)
        assert sample["image"].dtype == np.uint8
        assert sample["image"].flags.c_contiguous
        assert sample["label"].dtype == np.int64
        assert sample["label"].shape == ()
        by_content[index_jpeg_tree(tree).read(index)] = int(sample["label"])
    for container in CONTAINERS:
        shards = packed(tree, tmp_path / container, container)
        reader = open_images(shards.root, RESNET, 3, training=training)
        json.dumps(reader.describe())
        for index in range(15):
            sample, data = reader.read((1, index)), shards.read(index)
            assert sample.arrays["label"] == by_content[data]
            generator = np.random.default_rng([3, 1, index])
            image, _remark = (
                jpeg.training_image(data, 32, generator)(None) if training else jpeg.evaluation_image(data, 32)
            )
            np.testing.assert_array_equal(sample.arrays["image"], image)


@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(0, 10**6))
def test_crops_lie_inside_and_keep_their_bounds(width: int, height: int, seed: int) -> None:
    box = jpeg.crop_box(width, height, np.random.default_rng(seed))
    left, top, right, bottom = box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if min(width, height) >= 100 and 0.5 < width / height < 2:
        assert 0.07 < w * h / (width * height) <= 1
        assert 0.7 < w / h < 1.4
    for factor in jpeg_decode.FACTORS:
        if w >= factor <= h:
            left, top, right, bottom = jpeg.scaled_box(box, factor)
            assert 0 <= left < right <= -(-width // factor)
            assert 0 <= top < bottom <= -(-height // factor)
            edges = np.array([left, top, right, bottom])
            assert np.abs(edges * factor - box).max() <= factor / 2


def test_half_of_the_images_are_mirrored() -> None:
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[None, :, None] * 4, 64, axis=0).repeat(3, axis=2)
    buffer = io.BytesIO()
    Image.fromarray(ramp).save(buffer, "JPEG", quality=95)
    mirrored = 0
    for seed in range(400):
        row = jpeg.training_image(buffer.getvalue(), 8, np.random.default_rng(seed))(None)[0][4, :, 0]
        mirrored += int(row[0] > row[-1])
    assert 150 < mirrored < 250


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (90, 90), (1100, 900), (33, 400)])
def test_evaluation_is_resize_and_centre_crop(width: int, height: int) -> None:
    data = smooth_jpeg(width, height)
    image, remark = jpeg.evaluation_image(data, 56)
    assert remark is None
    # The same with Pillow, step by step: shorter edge 64, centre of 56.
    whole = Image.fromarray(jpeg_decode.decode(data)[0])
    edge = min(width, height)
    resized = whole.resize((64 * width // edge, 64 * height // edge), Image.Resampling.BILINEAR)
    left, top = (resized.width - 56) // 2, (resized.height - 56) // 2
    expected = np.asarray(resized.crop((left, top, left + 56, top + 56))).astype(int)
    difference = np.abs(image - expected)
    assert difference.max() <= 1


def test_resizing_is_as_pillow_does() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    for part, size in ((pixels, (40, 56)), (pixels[5:60, 11:99], (64, 80)), (pixels[:1, :1], (3, 3))):
        expected = Image.fromarray(np.ascontiguousarray(part)).resize(size[::-1], Image.Resampling.BILINEAR)
        assert np.abs(jpeg.resize(part, *size).astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("with_simplejpeg", [True, False])
def test_decoding_smaller_changes_little(with_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_simplejpeg:
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg_decode, "_simplejpeg", lambda: None)
    data = smooth_jpeg(811, 603)
    encoded = jpeg_decode.inspect(data)
    for factor in jpeg_decode.FACTORS:
        assert encoded.pixels(factor)[0].shape == (-(-603 // factor), -(-811 // factor), 3)
    used = set()
    for seed in range(30):
        small, _remark = jpeg.training_image(data, 64, np.random.default_rng(seed))(None)
        box = jpeg.crop_box(811, 603, np.random.default_rng(seed))
        used.add(jpeg.decode_factor(box[2] - box[0], box[3] - box[1], 64, 64))
        with monkeypatch.context() as patch:
            patch.setattr(jpeg, "FACTORS", (1,))
            full, _remark = jpeg.training_image(data, 64, np.random.default_rng(seed))(None)
        assert np.abs(small.astype(int) - full).mean() < 1.5
    assert used >= {2, 4}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The function that decodes crops, in a cache of its own."""
    pytest.importorskip("simplejpeg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        jpeg_decode.region_function.cache_clear()
        try:
            jpeg_decode.build_region()
        except EnvironmentLacksError as error:
            if not re.search(r"'cc'|jpeglib\.h|-ljpeg\b", str(error)):
                raise  # everything that it needs is here
            pytest.skip(str(error))
        yield
    jpeg_decode.region_function.cache_clear()


@given(
    st.tuples(st.integers(1, 90), st.integers(1, 150)),
    st.sampled_from([0, 1, 2, "4:1:1", "grey"]),
    st.sampled_from(jpeg_decode.FACTORS),
    st.sampled_from([{}, {"restart_marker_rows": 1}, {"progressive": True}, {"optimize": True}]),
    st.data(),
)
@settings(max_examples=400)
@pytest.mark.usefixtures("built")
def test_only_a_crop_is_decoded_and_no_pixel_of_it_changes(
    size: tuple[int, int], colours: Any, factor: int, form: dict[str, Any], data: st.DataObject
) -> None:
    image = Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    buffer = io.BytesIO()
    if colours == "grey":
        image.convert("L").save(buffer, "jpeg", **form)
    else:
        image.save(buffer, "jpeg", subsampling=colours, **form)
    stored, is_progressive = buffer.getvalue(), "progressive" in form
    if is_progressive and data.draw(st.booleans()):  # bits are missing, and libjpeg smooths
        scans = [found.start() for found in re.finditer(b"\xff\xda", stored)]
        stored = stored[: data.draw(st.sampled_from(scans[1:]))] + b"\xff\xd9"
    encoded = jpeg_decode.inspect(stored)
    factor = factor if factor < min(size) and encoded.scalable else 1
    whole = encoded.pixels(factor)[0]
    assert whole.shape[:2] == tuple(-(-side // factor) for side in size[::-1])
    high, wide = whole.shape[:2]
    left, top = data.draw(st.integers(0, wide - 1)), data.draw(st.integers(0, high - 1))
    right, bottom = data.draw(st.integers(left + 1, wide)), data.draw(st.integers(top + 1, high))
    part = encoded.pixels(factor, (left, top, right, bottom))[0]
    np.testing.assert_array_equal(part, whole[top:bottom, left:right])
    assert (part.base.nbytes == whole.nbytes) is is_progressive  # a view of the whole, which was decoded for it


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_region", [True, False])
@pytest.mark.usefixtures("built")
def test_the_region_of_a_crop_gives_the_image_that_the_whole_gives(
    seed: int, with_region: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crops of less than twice the wanted size, which are not decoded smaller."""
    if not with_region:
        monkeypatch.setattr(jpeg_decode, "region_function", lambda: (None, ""))
    data = smooth_jpeg(300, 220)
    region, full = (
        jpeg.training_image(data, 160, np.random.default_rng(seed), decoding)(None)[0]
        for decoding in ("region", "full")  # type: ignore[arg-type]
    )
    np.testing.assert_array_equal(region, full)
    out = np.zeros_like(full)
    assert jpeg.training_image(data, 160, np.random.default_rng(seed))(out)[0] is out
    np.testing.assert_array_equal(out, full)


@pytest.mark.usefixtures("built")
def test_an_image_without_its_end_is_bad_wherever_the_crop_lies() -> None:
    data = smooth_jpeg(300, 220)
    for cut in (data[:-2], data[: len(data) * 3 // 4]):
        with pytest.raises(ValueError, match="remature end"):
            jpeg_decode.inspect(cut).pixels(1, (0, 0, 300, 8))


@pytest.mark.usefixtures("built")
def test_damaged_codes_of_a_crop_are_named_as_those_of_the_whole() -> None:
    data = smooth_jpeg(300, 220)
    middle = len(data) * 3 // 4
    damaged = data[:middle] + b"\x7f" * 64 + data[middle + 64 :]
    assert jpeg_decode.region_function()[1] == "simplejpeg, crops by libjpeg-turbo"
    with pytest.raises(ValueError, match="orrupt JPEG data") as whole:
        jpeg_decode.decode(damaged)
    with pytest.raises(ValueError, match=re.escape(str(whole.value))):
        jpeg_decode.inspect(damaged).pixels(1, (10, 10, 290, 215))
    jpeg_decode.inspect(damaged).pixels(1, (10, 10, 290, 20))  # it lies below


def test_without_a_compiler_crops_are_cut_from_the_whole_and_the_decoder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    monkeypatch.setenv("DLBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    jpeg_decode.region_function.cache_clear()
    with pytest.raises(EnvironmentLacksError, match="install a C compiler and libjpeg-turbo's header"):
        jpeg_decode.build_region()
    assert jpeg_decode.region_function() == (None, "simplejpeg, before `dlbench setup images`")
    jpeg_decode.region_function.cache_clear()


@given(*[st.integers(1, 4000)] * 4)
def test_decoding_smaller_never_enlarges_a_crop(width: int, height: int, wide: int, high: int) -> None:
    factor = jpeg.decode_factor(width, height, wide, high)
    assert factor == 1 or (width / factor >= wide and height / factor >= high)
    assert factor == 8 or width < 2 * factor * wide or height < 2 * factor * high


# Photographs


@pytest.fixture
def photographs() -> None:
    for package in ("skimage", "sklearn"):
        pytest.importorskip(package)


SMALL: dict[str, Any] = {"width": 48, "height": 36, "train_images": 25, "validation_images": 13}


def test_photographs_are_a_whole_tree_with_its_licences(photographs: None, tmp_path: Path) -> None:
    assert produce(PhotoRecipe(**SMALL), tmp_path / "tree").counts == {"train": 25, "validation": 13}
    assert open_image_set(tmp_path / "tree" / "train").classes == tuple(sorted(p.class_name for p in PHOTOS))
    licences = (tmp_path / "tree" / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(photo.licence in licences for photo in PHOTOS)
    assert verify(tmp_path / "tree").faults == []


def test_photographs_differ_between_splits_seeds_and_numbers(photographs: None) -> None:
    recipe, other = PhotoRecipe(**SMALL), PhotoRecipe(**SMALL, seed=1)
    images = [
        r.image(split, label, n)
        for r in (recipe, other)
        for split in ("train", "validation")
        for label in (0, 9)
        for n in range(5)
    ]
    assert len(set(images)) == len(images)
    assert recipe.image("train", 3, 2) == PhotoRecipe(**SMALL).image("train", 3, 2)
