"""What is told of a data set before a rank is started: its kind, its form, its size, and nothing that takes long."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.cli.options import require_fitting_data
from dlbench.datasets import kinds, recognition
from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.datasets.images.shards import INDEX
from dlbench.datasets.making.image_recipes import PackRecipe
from dlbench.datasets.making.production import produce
from dlbench.datasets.recognition import require_fitting
from dlbench.datasets.splits import split_names
from dlbench.datasets.volumes import index_density
from dlbench.errors import UserError
from dlbench.specs.workload import NoData
from tests.support.datasets import write_records, write_samples, write_tree, write_volumes
from tests.support.run_factory import plans

pytest.importorskip("h5py")
pytest.importorskip("google_crc32c")

TEXT = "The value is returned.\nIt is back again.\n\n" * 40


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set of each form, each with both splits."""
    root = tmp_path_factory.mktemp("sets")
    for split in ("train", "validation"):
        write_tree(root / "tree" / split)
        write_volumes(root / "hdf5" / split, 3, seed=1)
        for name in ("npy", "text", "samples"):
            (root / name / split).mkdir(parents=True)
        for name in ("a", "b"):
            np.save(root / "npy" / split / f"{name}_data.npy", np.ones((32, 32, 32, 4), np.int16))
            np.save(root / "npy" / split / f"{name}_label.npy", np.ones(4, np.float32))
        (root / "text" / split / "a.txt").write_text(TEXT)
        write_samples(root / "samples" / split / "a.hdf5", 5)
        write_records(root / "tree" / split, root / "tfrecord" / split)
    produce(PackRecipe(train=root / "tree/train", validation=root / "tree/validation"), root / "tar")
    return root


SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "bert": {"data.sequence_length": 64, "data.max_predictions": 10},
    "cosmoflow": {},
}


def refusal(workload: str, source: Path, ranks: int = 1, **overrides: Any) -> str | None:
    """Why a workload's data is refused while its run is planned; None if it is not."""
    changes = {**SMALL[workload], "train.batch_per_rank": 1, **overrides}
    (plan,) = plans(workload=workload, preset="ci", data=str(source), overrides=changes, points=(ranks,), repeats=1)
    try:
        answered = require_fitting(plan.workload, ranks=plan.layout.ranks, evaluated=plan.measure.until == "quality")
    except UserError as error:
        return str(error)
    assert answered
    return None


FITTING = {
    "resnet50": {"tree": "a tree of images", "tar": "shards of images", "tfrecord": "shards of images"},
    "bert": {"text": "text", "samples": "BERT samples"},
    "cosmoflow": {"hdf5": "density volumes", "npy": "density volumes"},
}


@pytest.mark.parametrize("workload", sorted(FITTING))
def test_only_data_of_its_kind_is_taken(workload: str, sets: Path) -> None:
    for titles in FITTING.values():
        for name, title in titles.items():
            for source in (sets / name, sets / name / "train"):
                found = refusal(workload, source)
                if name in FITTING[workload]:
                    assert found is None, name
                    continue
                assert found is not None, (workload, name)
                assert found.startswith(f"data.source {str(source)!r} holds {title}"), found
                assert f"{workload} trains on " in found


@pytest.mark.parametrize(
    ("workload", "kind"),
    [("resnet50", "npy"), ("resnet50", "text"), ("resnet50", "samples"), ("bert", "tar"), ("bert", "npy")],
)
def test_folders_of_too_many_names_are_judged_by_the_first(
    workload: str, kind: str, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "set"
    shutil.copytree(sets / kind / "train", source, ignore=shutil.ignore_patterns("index*", "*.json"))
    for number in range(5):
        for path in list(source.iterdir())[:2]:
            (source / f"{number} {path.name}").symlink_to(path)
    monkeypatch.setattr(kinds, "MAX_NAMES", 4)
    assert f"; {workload} trains on " in (refusal(workload, source) or "")


def test_shards_without_an_index_or_a_manifest_are_known_by_their_first_record(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes((sets / "tfrecord/train/shard-00000.tfrecord").read_bytes())
    assert refusal("resnet50", tmp_path) is None
    found = refusal("cosmoflow", tmp_path)
    assert found is not None
    assert "holds shards of images; cosmoflow trains on density volumes" in found


@pytest.mark.parametrize(
    "names",
    [
        ("train", "test"),
        ("valid", "cat", "dog"),
        ("train", "cat"),
        ("test", "cat"),
        ("Train", "Test"),
        ("training", "dev", "extra"),
        ("train2017", "val2017"),
        ("TRAIN", "eval"),
    ],
)
def test_splits_are_never_classes(names: tuple[str, ...], sets: Path, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        for image in (sets / "tree/train/class 0").iterdir():
            (tmp_path / name / image.name).write_bytes(image.read_bytes())
    found = refusal("resnet50", tmp_path)
    assert found is not None
    assert f"{str(tmp_path)!r} holds splits: " in found
    assert "give one of them, or name them `train` and `validation` (or `val`, `valid`)" in found
    with pytest.raises(UserError, match="holds splits"):
        index_jpeg_tree(tmp_path)


def test_text_and_volumes_in_splits_of_other_names_say_so(sets: Path, tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "a.txt").write_text(TEXT)
        write_volumes(tmp_path / "hdf5" / name.title(), 1, seed=0)
    assert "holds splits: 'test', 'train'" in (refusal("bert", tmp_path / "text") or "")
    assert "holds splits: 'Test', 'Train'" in (refusal("cosmoflow", tmp_path / "hdf5") or "")
    with pytest.raises(UserError, match="of a split; give that folder"):
        index_density(tmp_path / "hdf5")


def test_a_class_may_bear_the_name_of_a_split() -> None:
    assert split_names(["dev", "bus", "boat"]) == []
    assert split_names(["evaluation", "bus"]) == []
    assert split_names(["validity", "trainer"]) == []
    assert split_names(["trains", "values"]) == []
    assert split_names([]) == []
    assert split_names(["bus", "train", "Valid"]) == ["Valid", "train"]
    assert split_names(["train"]) == ["train"]


def test_too_few_samples_are_told_with_both_numbers(sets: Path) -> None:
    for workload, name, num in (
        ("resnet50", "tree", 15),
        ("resnet50", "tar", 15),
        ("cosmoflow", "hdf5", 3),
        ("cosmoflow", "npy", 2),
        ("bert", "samples", 5),
    ):
        assert refusal(workload, sets / name, **{"train.batch_per_rank": num}) is None
        found = refusal(workload, sets / name, **{"train.batch_per_rank": num + 1})
        assert found is not None, name
        assert f"has {num} samples, one step needs {num + 1} (train.batch_per_rank {num + 1} x 1 ranks)" in found


def test_data_must_fit_the_model(sets: Path, tmp_path: Path) -> None:
    for name in ("tree", "tar"):
        assert "has 3 classes, model.num_classes is 2" in (
            refusal("resnet50", sets / name, **{"model.num_classes": 2}) or ""
        )
    for name in ("hdf5", "npy"):
        changes = {"model.input_size": 64}
        assert "has input_size 32, model.input_size is 64" in (refusal("cosmoflow", sets / name, **changes) or "")
        changes = {"model.num_targets": 3}
        assert "has num_targets 4, model.num_targets is 3" in (refusal("cosmoflow", sets / name, **changes) or "")
    changes = {"data.sequence_length": 32}
    assert "has samples of 64 tokens, data.sequence_length is 32" in (
        refusal("bert", sets / "samples", **changes) or ""
    )


def test_validation_data_is_looked_at_as_well(sets: Path) -> None:
    found = refusal("resnet50", sets / "tree", **{"measure.until": "quality", "data.validation": str(sets / "text")})
    assert found.startswith(f"data.validation {str(sets / 'text')!r} holds text")


def test_damage_is_told(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"not HDF5")
    assert f"{str(tmp_path / 'a.h5')!r}" in (refusal("cosmoflow", tmp_path) or "")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_bytes("é".encode("latin-1") * 99)
    assert "holds 'a.txt', which is not UTF-8; bert trains on text" in (refusal("bert", tmp_path / "t") or "")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / INDEX).write_bytes(b"PK\3\4 no archive")
    assert "not an intact index of images" in (refusal("resnet50", tmp_path / "s") or "")


def test_what_is_not_there_is_left_to_the_nodes(tmp_path: Path) -> None:
    assert refusal("bert", tmp_path / "nowhere") is None
    assert refusal("bert", Path("synthetic")) is None


def test_a_large_set_is_not_listed(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "MAX_NAMES", 50)
    for label in range(3):
        (tmp_path / f"c{label}").mkdir()
        for number in range(100):
            (tmp_path / f"c{label}" / f"{number}.jpg").touch()
    seen: Counter[str] = Counter()
    scandir = os.scandir

    def counted(path: Any) -> Any:
        seen[str(path)] += 1
        return scandir(path)

    changes = {"train.batch_per_rank": 1000}
    (plan,) = plans(workload="resnet50", preset="ci", data=str(tmp_path), overrides=changes, points=(1,), repeats=1)
    monkeypatch.setattr(os, "scandir", counted)
    assert require_fitting(plan.workload, ranks=1)
    assert set(seen) == {str(tmp_path), str(tmp_path / "c0")}, "the first folder has more names than are looked at"


def test_a_file_system_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sets: Path
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(recognition, "_judge", lambda *_, **__: answers.wait(60))
    monkeypatch.setattr(recognition, "LIMIT_S", 0.2)
    made = plans(workload="bert", preset="ci", data=str(sets / "tree"), overrides=SMALL["bert"], points=(1,), repeats=2)
    began = time.monotonic()
    require_fitting_data(made)
    assert time.monotonic() - began < 30
    assert "does not answer: not checked before the run" in capsys.readouterr().err
    answers.set()


def test_commands_refuse_before_anything_is_made(sets: Path, tmp_path: Path) -> None:
    for words in (
        ["run", "bert", "--data", str(sets / "tree")],
        ["run", "resnet50", "--sweep", f"data.source={sets / 'tree'},{sets / 'hdf5'}"],
        ["submit", "bert", "--system", "box", "--nodes", "1", "--data", str(sets / "tree"), "--dry-run"],
        ["submit", "bert", "--system", "box", "--nodes", "1", "--data", str(sets / "tree")],
    ):
        out = tmp_path / "runs"
        done = CliRunner().invoke(cli, [*words, "--preset", "ci", "--out", str(out)])
        assert isinstance(done.exception, UserError), (words, done.output)
        assert " trains on " in str(done.exception)
        assert not out.exists()


def test_a_manifest_of_another_set_is_told(sets: Path, tmp_path: Path) -> None:
    content = json.loads((sets / "tar" / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "kind": "density"}))
    found = refusal("resnet50", tmp_path)
    assert found is not None
    assert "holds density volumes (by its manifest); resnet50 trains on images" in found


def test_data_for_a_network_that_reads_none_are_refused(tmp_path: Path) -> None:
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1)
    nothing = NoData(format="none", source=str(tmp_path))
    workload = plan.workload.model_copy(update={"data": nothing})
    with pytest.raises(UserError, match="cosmoflow reads no data; leave it out"):
        require_fitting(workload, ranks=1, evaluated=False)
