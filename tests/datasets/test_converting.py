"""Parquet of Hugging Face and npy pairs of CosmoFlow become shards and volumes; what is left out is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.making.catalogue import BuildPlan, packing
from dlbench.datasets.making.npy_recipe import PairRecipe
from dlbench.datasets.making.parquet_recipe import ParquetRecipe
from dlbench.datasets.making.production import Part, produce
from dlbench.datasets.verification import verify
from dlbench.datasets.volumes import CONTAINERS, index_density
from dlbench.errors import EnvironmentLacksError, MachineError, UserError
from tests.conftest import Cli
from tests.support.jpeg_files import encode, write_tree

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
for package in ("PIL", "h5py", "google_crc32c"):
    pytest.importorskip(package)

Row = dict[str, Any]
NAMES = ("tench, Tinca tinca", "goldfish", "shark")


def write_parquet(path: Path, rows: list[Row], names: tuple[str, ...] | None = NAMES, **columns: Any) -> None:
    """Writes a file as Hugging Face does; `columns`: other types than those of ImageNet."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    types = {"image": image, "label": pa.int64(), **columns}
    about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    schema = pa.schema(list(types.items()), {"huggingface": json.dumps(about)} if names else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=4)


def row(number: int, label: int | None = None) -> Row:
    data = encode((20, 20 + number % 7, 3), seed=number)
    return {"image": {"bytes": data, "path": f"{number}.JPEG"}, "label": number % 3 if label is None else label}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    source = tmp_path / "imagenet-1k"
    for number in range(3):
        rows = [row(10 * number + i) for i in range(10)]
        write_parquet(source / "data" / f"train-{number:05d}-of-00003.parquet", rows)
    write_parquet(source / "data" / "validation-00000-of-00001.parquet", [row(i) for i in range(40, 45)])
    write_parquet(source / "data" / "test-00000-of-00002.parquet", [row(50, -1)])
    for name in ("README.md", "classes.py", ".gitattributes"):
        (source / name).write_text("text")
    return source


def volume(number: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(number)
    return generator.integers(0, 99, (4, 4, 4, 2)).astype(np.int16), generator.uniform(-1, 1, 3).astype(np.float32)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    source = tmp_path / "npy"
    for split, numbers in (("train", range(7)), ("validation", range(7, 9)), ("test", range(9, 10))):
        (source / split).mkdir(parents=True)
        for number in numbers:
            for ending, array in zip(("data", "label"), volume(number), strict=True):
                np.save(source / split / f"u{number}_{ending}.npy", array)
        (source / split / "files_data.lst").write_text("")
    return source


def plan(source: Path, container: str | None = None, samples: int | None = 4, seed: int = 0) -> BuildPlan:
    return packing(source, container=container, samples_per_shard=samples, seed=seed)


@pytest.mark.parametrize("container", ["tar", "tfrecord"])
def test_shards_hold_the_rows_of_parquet_in_their_order(parquet: Path, tmp_path: Path, container: str) -> None:
    build = plan(parquet, container)
    produce(build.recipe, tmp_path / "out")
    for split, numbers in (("train", range(30)), ("validation", range(40, 45))):
        images = open_image_set(tmp_path / "out" / split)
        assert images.classes == NAMES
        expected = [(number % 3, row(number)["image"]["bytes"]) for number in numbers]
        assert [(images.label(i), images.read(i)) for i in range(images.num_samples)] == expected
    (line,) = build.remarks
    assert line == (
        "train 3 files, validation 1 (data/validation-00000-of-00001.parquet), test 1 left out "
        "(neither training nor validation), 2 passed over: README.md, classes.py"
    )
    assert verify(tmp_path / "out").faults == []


@pytest.mark.parametrize("container", ["hdf5", "tfrecord"])
def test_files_of_volumes_hold_the_pairs(pairs: Path, tmp_path: Path, container: str) -> None:
    build = plan(pairs, container)
    produce(build.recipe, tmp_path / "out")
    for split, numbers in (("train", range(7)), ("validation", range(7, 9))):
        index = index_density(tmp_path / "out" / split)
        reader = CONTAINERS[index.container]
        stored = [sample for path in index.paths() for sample in reader.samples(path)]
        expected = [volume(number) for number in numbers]
        assert sorted((x.tobytes(), y.tobytes()) for x, y in stored) == sorted(
            (x.tobytes(), y.tobytes()) for x, y in expected
        )
    (line,) = build.remarks
    assert line.startswith("train 14 files, validation 4, test 2 left out (neither training nor validation), 3 passed ")
    assert verify(tmp_path / "out").faults == []


@pytest.mark.parametrize(("form", "recipe"), [("parquet", ParquetRecipe), ("pairs", PairRecipe)])
def test_converting_goes_on_where_it_stopped_and_workers_change_no_byte(
    form: str, recipe: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    source, write, written = request.getfixturevalue(form), recipe.write, []
    build = plan(source)
    expected = produce(build.recipe, tmp_path / "straight", workers=2)

    def interrupted(self: Any, part: Part, path: Path) -> None:
        if len(written) == 1:
            raise OSError(28, "No space left on device")
        written.append(part.name)
        write(self, part, path)

    monkeypatch.setattr(recipe, "write", interrupted)
    with pytest.raises(MachineError, match="No space left on device"):
        produce(build.recipe, tmp_path / "out")
    monkeypatch.undo()
    first = (tmp_path / "out" / written[0]).stat().st_mtime_ns
    assert produce(plan(source).recipe, tmp_path / "out").files_sha256 == expected.files_sha256
    assert (tmp_path / "out" / written[0]).stat().st_mtime_ns == first
    with pytest.raises(UserError, match="holds a data set with samples_per_"):
        produce(plan(source, samples=5).recipe, tmp_path / "out")


TRAIN = "train-00001-of-00003.parquet"
WITHOUT = {"image": {"bytes": None, "path": "a.JPEG"}, "label": 0}
ROWS: dict[str, tuple[list[Row], dict[str, Any], str]] = {
    "bytes": ([row(0), WITHOUT], {}, ", row 1: has no bytes of an image"),
    "image": ([{"label": 0}], {}, ", row 0: has no bytes of an image"),
    "null": ([{**row(0), "label": None}], {}, ", row 0: has no label"),
    "negative": ([row(0), row(1, -1)], {}, ", row 1: label -1, expected 0 to 2"),
    "type": ([], {"label": pa.string()}, " has the columns image: struct<bytes: binary, path: string>, label: string;"),
    "names": ([row(0)], {"names": NAMES[:2]}, ": its class names are not those of 'train-00000-of-00003.parquet'"),
    "empty": ([], {}, ": has no rows"),
}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_of_parquet_are_refused_by_file_and_row(parquet: Path, tmp_path: Path, name: str) -> None:
    rows, changes, told = ROWS[name]
    write_parquet(parquet / "data" / TRAIN, rows, **changes)
    with pytest.raises(UserError, match=re.escape(f"{TRAIN}'{told}")):
        produce(plan(parquet, samples=100).recipe, tmp_path / "out")
    assert not (tmp_path / "out" / "train").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"data/{TRAIN}", "not a whole parquet file: "),
        ("data/dev-00000-of-00001.parquet", "no sample file of a split; expected train-00000-of-00294.parquet"),
    ],
)
def test_files_that_are_no_samples_are_refused_by_name(parquet: Path, name: str, told: str) -> None:
    (parquet / name).write_bytes(b"")
    with pytest.raises(UserError, match=told):
        plan(parquet)


DATA, LABEL = "train/u3_data.npy", "train/u3_label.npy"
COUNTS, TARGETS = volume(3)
ARRAYS: dict[str, tuple[str, Any, str]] = {
    "no label": (LABEL, None, f"{DATA}' has no 'u3_label.npy' next to it; expected <name>_data.npy"),
    "type": (DATA, COUNTS.astype(np.float32), "u3_data.npy is float32; expected <name>_data.npy"),
    "shape": (DATA, COUNTS[:2, :2, :2], f"{DATA}': volume of shape (2, 2, 2, 2) with 3 targets, the first has (4, 4"),
    "count": (DATA, -COUNTS, f"{DATA}' with 'u3_label.npy': x has a negative count"),
    "range": (LABEL, np.float32([0, 70, 0]), f"{LABEL}': y holds 70, outside -1..1"),
    "other": ("train/u3.npy", COUNTS, "train/u3.npy': no sample file of a split; expected <name>_data.npy"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_wrong_pairs_are_refused_by_file(pairs: Path, tmp_path: Path, name: str) -> None:
    file, array, told = ARRAYS[name]
    if array is None:
        (pairs / file).unlink()
    else:
        np.save(pairs / file, array)
    with pytest.raises(UserError, match=re.escape(told)):
        produce(plan(pairs, samples=100).recipe, tmp_path / "out")
    assert not (tmp_path / "out" / "train").exists()


def test_choices_without_effect_and_a_missing_library_are_refused(
    parquet: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--seed 1: rows of parquet files keep their order"):
        plan(parquet, seed=1)
    with pytest.raises(UserError, match=r"--container tar: .* becomes hdf5 or tfrecord"):
        plan(pairs, "tar")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentLacksError, match=r"pyarrow is not installed; pip install 'dlbench\[parquet\]'"):
        plan(parquet)


def test_commands_say_what_they_leave_out(cli: Cli, tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write_tree(tmp_path / "images" / split)
        (tmp_path / "text" / split).mkdir(parents=True)
        for name in ("a.txt", "notes.csv"):
            (tmp_path / "text" / split / name).write_text("One sentence here.\n\nAnother one is there.\n" * 9)
    (tmp_path / "images" / "train" / "class 0" / "notes.md").write_text("text")
    classes, texts = "3 class folders, validation 3, 1 passed over: test", "3 passed over: test, train/notes.csv, "
    inside = "'images/train': passed over, not .jpg, .jpeg or .webp in a class folder: 1 ('class 0/notes.md')"
    for words, told in (
        (("pack", "images", "out"), (classes, inside)),
        (("index", "images"), (classes, inside)),
        (("vocab", "text", "v.txt", "--size", "40"), (texts,)),
        (("samples", "text", "samples", "--vocabulary", "english-4096", "--duplicates", "1"), (texts,)),
    ):
        done = cli("data", *words)
        assert done.returncode == 0, done.stderr
        assert [line in done.stderr for line in told] == [True] * len(told), done.stderr
