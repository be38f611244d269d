"""Each file of a data set is a sample of a named split, a known companion or named: nothing is left out silently."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from dlbench.datasets import kinds
from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.recognition import detect, require_fitting, take_account
from dlbench.datasets.splits import Account, Split, split_word, validation_folder
from dlbench.datasets.tfrecord import RecordWriter, encode_example
from dlbench.datasets.verification import verify
from dlbench.errors import UserError
from dlbench.node.data.source import files_account, open_reader, open_training, validation_path
from dlbench.specs.plan import RunPlan
from tests.support.datasets import encode, write_samples
from tests.support.run_factory import plans

h5py = pytest.importorskip("h5py")
pytest.importorskip("google_crc32c")

SEED = 3
DOCUMENT = "The value is returned to the caller.\nIt is back again, and nothing is lost.\n\n"


def write_text(path: Path, num: int) -> None:
    path.write_text(DOCUMENT * num, encoding="utf-8")


def write_tar(path: Path, num: int) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(num):
            for name, content in ((f"{number}.jpg", encode((8, 8, 3))), (f"{number}.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


def write_images(path: Path, num: int, labels: tuple[int, ...] = (1, 2)) -> None:
    with RecordWriter(path) as writer:
        for number in range(num):
            label = labels[number % len(labels)]
            features = {"image/encoded": encode((8, 8, 3)), "image/class/label": np.array([label])}
            writer.write(encode_example(features))


def write_hdf5(path: Path, num: int) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.ones((num, 32, 32, 32, 4), np.int16)
        file["y"] = np.zeros((num, 4), np.float32)


def write_npy(path: Path, num: int) -> None:
    del num  # one sample a pair
    np.save(path, np.ones((32, 32, 32, 4), np.int16))
    np.save(path.with_name(path.name.replace("_data", "_label")), np.zeros(4, np.float32))


Names = tuple[str, ...]
Case = tuple[str, str, Callable[[Path, int], None], Names, Names]
CASES: tuple[Case, ...] = (
    ("bert", "text", write_text, ("part-00000-of-00500", "part-00001-of-00500"), ("eval.txt",)),
    ("bert", "text", write_text, ("wiki_train_0.txt", "wiki_train_1.txt"), ("wiki_valid.txt",)),
    ("bert", "samples", write_samples, ("wiki_training_0.hdf5", "wiki_training_1.hdf5"), ("wiki_test_0.hdf5",)),
    ("resnet50", "image-shards", write_tar, ("synsets-train-0.tar", "synsets-train-1.tar"), ("synsets-val-00.tar",)),
    ("resnet50", "image-shards", write_images, ("train-0-of-2", "train-1-of-2"), ("validation-0-of-1",)),
    ("cosmoflow", "density", write_hdf5, ("train.h5",), ("validation.h5",)),
    ("cosmoflow", "density", write_npy, ("a-train_data.npy", "b-train_data.npy"), ("a-val_data.npy",)),
)


def plan_of(workload: str, source: Path) -> RunPlan:
    changes = {"train.batch_per_rank": 1}
    if workload == "bert":
        changes |= {"data.sequence_length": 64, "data.max_predictions": 10}
    (plan,) = plans(workload=workload, preset="ci", data=str(source), overrides=changes, points=(1,), repeats=1)
    return plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]} {case[3][0]}")
def test_two_splits_in_one_folder_are_told_apart_by_their_names(case: Case, tmp_path: Path) -> None:
    workload, kind, write, train, validation = case
    for name in train:
        write(tmp_path / name, 3)
    for name in validation:
        write(tmp_path / name, 2)
    (tmp_path / "eval.md5").write_text("0  eval.txt\n", encoding="utf-8")
    assert detect(tmp_path) == kind
    assert validation_folder(tmp_path) == tmp_path
    verdict = verify(tmp_path)
    assert verdict.faults == []
    assert verdict.account is not None
    assert verdict.account.splits == {"train": train, "validation": validation}
    num, num_held_out = 3 * len(train), 2
    if write is write_npy:
        num, num_held_out = 2, 1
    if kind == "text":
        assert verdict.remarks == ["train: 6 documents in 2 files", "validation: 2 documents in 1 file"]
    else:
        assert verdict.samples == {"train": num, "validation": num_held_out}
    plan = plan_of(workload, tmp_path)
    accounts: list[Account] = []
    assert require_fitting(plan.workload, ranks=1, evaluated=True, on_account=accounts.append)
    assert accounts[0].splits == verdict.account.splits
    assert files_account(plan.workload.data) == {"account": verdict.account.as_json()}
    data, model = plan.workload.data, plan.workload.model
    training = open_training(model, data, SEED)
    held_out = open_reader(validation_path(data), model, data, SEED, training=False)
    if kind == "text":
        assert (training.describe()["documents"], held_out.describe()["documents"]) == (6, 2)
    else:
        assert (training.num_samples, held_out.num_samples) == (num, num_held_out)
        names = {path.name for path in training.files()}
        assert {name for name in names if not name.endswith("_label.npy")} == set(train)
    training.close()
    held_out.close()


def test_an_account_is_one_line_and_json(cli: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, num in (("part-0-of-2", 3), ("part-1-of-2", 3), ("eval.txt", 2), ("eval.md5", 0), ("COUNTS", 0)):
        write_text(tmp_path / "set" / name, num)
    done = cli("data", "verify", "set")
    assert "train 2 files, validation 1 (eval.txt), 2 not read: COUNTS, eval.md5\n" in done.stderr
    told = json.loads(cli("data", "verify", "set", "--json").stdout)["account"]
    assert told["splits"] == {"train": 2, "validation": 1}
    assert (told["companions"], told["passed_over"], told["not_read"]) == (["eval.md5"], ["COUNTS"], 2)


REFUSED: dict[str, tuple[Callable[[Path, int], None], Names, str]] = {
    "validation beside files of no split": (
        write_hdf5,
        ("a.h5", "b.h5", "validation.h5"),
        "holds, by the names, 1 of validation ('validation.h5') and 2 of no split ('a.h5', ...); put the word train",
    ),
    "some of train, some of none": (
        write_tar,
        ("train-0.tar", "val-0.tar", "extra.tar"),
        "holds, by the names, 1 of validation ('val-0.tar') and 1 of no split ('extra.tar')",
    ),
    "another ending": (
        write_samples,
        ("a.hdf5", "b.he5"),
        "holds 1 file that would not be read, e.g. 'b.he5', next to 'a.hdf5'",
    ),
    "compressed text": (write_text, ("a.txt", "b.txt.gz"), "e.g. 'b.txt.gz', next to 'a.txt'"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_files_that_would_be_left_out_or_mixed_up_are_refused(what: str, tmp_path: Path) -> None:
    write, names, told = REFUSED[what]
    for name in names:
        write(tmp_path / name, 2)
    workload = {write_hdf5: "cosmoflow", write_tar: "resnet50"}.get(write, "bert")
    plan = plan_of(workload, tmp_path)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: verify(tmp_path),
        lambda: require_fitting(plan.workload, ranks=1),
        lambda: open_training(plan.workload.model, plan.workload.data, SEED),
    )
    for attempt in attempts:
        assert told in outcome(attempt)


def outcome(attempt: Callable[[], object]) -> str:
    """Returns the message of the refusal, or the faults of the verdict."""
    try:
        return str(getattr(attempt(), "faults", "nothing is wrong"))
    except UserError as error:
        return str(error)


def test_words_of_splits() -> None:
    assert split_word("val2017-3.tar") == "validation"
    assert split_word("test-train-1.h5") == "train"  # the last word counts
    assert split_word("training-manual.txt") is None  # a document
    assert split_word("constraint-1.h5") is None


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("data/train-00000-of-00002.parquet",), "is a Hugging Face file; write the images as <class>/"),
        (("shard-0.tar.gz",), "is compressed, which prevents random access; decompress it to .tar"),
        (("train.rec", "train.idx"), "is an MXNet RecordIO file"),
    ],
)
def test_known_forms_that_are_not_read_are_named_with_the_way_out(names: Names, told: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_text(tmp_path / name, 2)
    with pytest.raises(UserError, match=re.escape(told)):
        detect(tmp_path)


def test_class_tars_and_compressed_shards_say_how_to_unpack(tmp_path: Path) -> None:
    for name in ("n01440764.tar", "n01443537.tar"):
        write_tar(tmp_path / name, 1)
    told = "holds ImageNet's class tars, one for each class: unpack each into a folder of its name"
    with pytest.raises(UserError, match=told):
        open_image_set(tmp_path)
    (tmp_path / "gzip").mkdir()
    with tarfile.open(tmp_path / "gzip" / "a.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match=r"a.tar': not an intact shard of images: it is compressed with gzip"):
        open_image_set(tmp_path / "gzip")


SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.mark.parametrize(
    ("train", "validation", "classes"),
    [((2, 3), (1, 2, 3), 3), ((1, 2, 3), (2, 3), 3), ((1, 2), (0, 2), 3), ((2, 3), (2, 3), 4)],
)
@pytest.mark.parametrize("in_folders", [True, False])
def test_where_labels_begin_is_one_decision_of_both_splits(
    train: tuple[int, ...], validation: tuple[int, ...], classes: int, in_folders: bool, tmp_path: Path
) -> None:
    folders = {split: tmp_path / split if in_folders else tmp_path for split in SPLITS}
    for split, labels in zip(SPLITS, (train, validation), strict=True):
        folders[split].mkdir(exist_ok=True)
        write_images(folders[split] / f"{split}-0-of-1", len(labels), labels)
    first = int(0 not in train + validation and 1 in train + validation)
    for split, labels in zip(SPLITS, (train, validation), strict=True):
        images = open_image_set(folders[split], split)
        assert images.labels.tolist() == [label - first for label in labels]
        assert ("count from 1" in str(images.remarks)) == bool(first)
        if min(labels):
            assert len(images.classes) == classes
        images.close()


def test_lists_beside_classes_and_folders_of_storage_are_passed_over_with_a_remark(tmp_path: Path) -> None:
    for split in SPLITS:
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.jpg").write_bytes(encode((8, 8), "L"))
        (tmp_path / split / "cat" / "b.jpg").write_bytes(encode((8, 8), "L"))
        for name in ("lost+found", "@eaDir"):
            (tmp_path / split / name).mkdir()
        write_text(tmp_path / split / "synsets.txt", 1)
    assert detect(tmp_path) == "images"
    assert require_fitting(plan_of("resnet50", tmp_path).workload, ranks=1)
    verdict = verify(tmp_path)
    assert verdict.faults == []
    assert verdict.samples == {"train": 2, "validation": 2}
    assert sum("'@eaDir', 'lost+found'" in line for line in verdict.remarks) == 2
    assert [line for line in verdict.remarks if line.endswith("and 1 more: grey, converted to RGB")] != []
    assert verdict.public_set is None


def test_volumes_of_other_types_and_ranges_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(1).poisson(2, (8, 8, 8, 4)).astype(np.float32)
    for split in SPLITS:
        (tmp_path / "floats" / split).mkdir(parents=True)
        with RecordWriter(tmp_path / "floats" / split / "a.tfrecord") as writer:
            writer.write(encode_example({"x": x.tobytes(), "y": np.zeros(4, np.float32)}))
    (fault, _) = verify(tmp_path / "floats").faults
    assert fault.startswith("train/a.tfrecord: sample 0: x is float32 by its values")
    for split in ("train", "val"):
        (tmp_path / "physical" / split).mkdir(parents=True)
        write_hdf5(tmp_path / "physical" / split / "a.h5", 1)
        with h5py.File(tmp_path / "physical" / split / "a.h5", "r+") as file:
            file["y"][0] = [0.3, 0.8, 0.96, 70]
    told = "a.h5: sample 0: y holds 70, outside -1..1; give the scaled parameters (unitPar), not the physical ones"
    for folder, line in zip(("train", "val"), verify(tmp_path / "physical").faults, strict=True):
        assert line.startswith(f"{folder}/{told}")
    plan = plan_of("cosmoflow", tmp_path / "physical")
    reader = open_training(plan.workload.model, plan.workload.data, SEED)
    with pytest.raises(Exception, match=r"y holds 70, outside -1\.\.1"):
        reader.read((0, 0))
    reader.close()


@pytest.mark.parametrize(("key", "told"), [("data", "it holds data and label instead"), ("full", "a whole universe")])
def test_other_hdf5_of_cosmoflow_is_named(key: str, told: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file[key] = np.ones((2, 8, 8, 8, 4), np.int16)
    (fault,) = verify(tmp_path).faults
    assert told in fault


def test_an_account_of_too_many_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        write_npy(tmp_path / name / "0_data.npy", 1)
    for most in (6, 3):
        monkeypatch.setattr(kinds, "MAX_NAMES", most)
        assert take_account(tmp_path, "density").is_partial == (most == 3)


def test_files_that_lack_by_their_own_numbers_are_counted() -> None:
    whole = ("validation-00000-of-00001.parquet",)
    account = Account(splits={"train": ("train-00000-of-00294", "train-00002-of-00294"), "validation": whole})
    assert account.line() == f"train 2 files of 294 by their names, validation 1 ({whole[0]})"
