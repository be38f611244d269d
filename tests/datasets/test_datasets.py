"""Index and reading of data sets."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench import bundled
from dlbench.datasets.arrays import Files
from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.datasets.making import catalogue
from dlbench.datasets.making.catalogue import prepare_demo_data
from dlbench.datasets.making.computed_recipes import topic_sentences
from dlbench.datasets.making.image_recipes import PHOTOS, Photo, photo_path
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.text.corpus import SPECIAL, TextCorpus, Vocabulary, load_vocabulary, read_corpus
from dlbench.datasets.volumes import index_density
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.machine import storage
from dlbench.machine.storage import call_rates
from tests.support.datasets import verify_manifest, write_tree
from tests.support.paths import DATA

h5py = pytest.importorskip("h5py")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    for package in ("PIL", "skimage", "sklearn"):
        pytest.importorskip(package)
    return prepare_demo_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary("english-4096")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_packages_import_without_numpy_and_torch() -> None:
    modules = ("recognition", "verification", "making.catalogue", "making.production")
    code = "import sys\n" + "".join(f"import dlbench.datasets.{module}\n" for module in modules)
    code += "print([m for m in ('numpy', 'torch', 'h5py', 'PIL', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# JPEG trees


def test_classes_and_files_are_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.jpg", "b/10.JPEG", "a/x.jpeg", "a/notes.txt", "LICENSES.txt", ".hidden/y.jpg", "a/.z.jpg")
    tree = index_jpeg_tree(tmp_path)
    assert tree.classes == ("a", "b")
    assert [(tree.path(i).relative_to(tmp_path).as_posix(), tree.label(i)) for i in range(tree.num_samples)] == [
        ("a/x.jpeg", 0),
        ("b/10.JPEG", 1),
        ("b/2.jpg", 1),
    ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "holds no class folders; expected <folder>/<class>/<image>.jpg"),
        (["loose.jpg"], "holds no class folders"),
        (["a/1.jpg", "b/1.png"], "/b' holds no .jpg, .jpeg or .webp file"),
    ],
)
def test_wrong_jpeg_trees_are_named(tmp_path: Path, names: list[str], told: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(UserError) as raised:
        index_jpeg_tree(tmp_path)
    assert told in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_index_digest_sees_renames(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg")
    before = index_jpeg_tree(tmp_path).sha256
    (tmp_path / "a" / "1.jpg").rename(tmp_path / "a" / "2.jpg")
    assert index_jpeg_tree(tmp_path).sha256 != before


# Text


def sentences_of(corpus: TextCorpus) -> list[list[str]]:
    """Documents as lists of sentences, decoded again."""
    entries, offsets = corpus.vocabulary.entries, corpus.sentence_offsets
    return [
        [
            " ".join(entries[t] for t in corpus.tokens[offsets[s] : offsets[s + 1]]).replace(" ##", "")
            for s in range(corpus.document_offsets[d], corpus.document_offsets[d + 1])
        ]
        for d in range(corpus.num_documents)
    ]


def test_documents_sentences_and_lines(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (tmp_path / "b.txt").write_bytes(b"Return the value. The value is None!\nOne more line\n\n \n\nA function\r\n")
    (tmp_path / "a.txt").write_text("e.g. version 3.11 is fine. But not this? (Yes)", encoding="utf-8")
    (tmp_path / "LICENSES").write_text("not text of the corpus", encoding="utf-8")
    corpus = read_corpus(tmp_path, vocabulary)
    assert sentences_of(corpus) == [
        ["e . g . version 3 . 11 is fine .", "but not this ?", "( yes )"],
        ["return the value .", "the value is none !", "one more line"],
        ["a function"],
    ]
    assert corpus.tokens.dtype == np.uint16
    assert (corpus.num_documents, len(corpus.sentence_offsets)) == (3, 8)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n\t\n", "holds no text"),
        ("a.md", b"text", "holds no .txt file"),
        ("a.txt", b"fine\nnot \xff fine\n", "a.txt', line 2: not UTF-8"),
    ],
)
def test_wrong_texts_are_named(tmp_path: Path, vocabulary: Vocabulary, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_corpus(tmp_path, vocabulary)
    assert told in str(raised.value)
    with pytest.raises(UserError, match="no such file or folder"):
        read_corpus(tmp_path / "missing", vocabulary)


# Vocabularies


def test_bundled_vocabulary_is_frozen(vocabulary: Vocabulary) -> None:
    assert len(vocabulary) == 4096
    assert vocabulary.entries[:5] == SPECIAL
    assert vocabulary.lowercase
    folder = bundled.folder("workloads") / "vocabularies"
    assert vocabulary.path == folder / "english-4096.txt"
    assert (folder / "english-4096.txt.sha256").read_text(encoding="utf-8").split() == [
        hashlib.sha256(vocabulary.path.read_bytes()).hexdigest(),
        "english-4096.txt",
    ]
    assert vocabulary.tokenizer().encode("The Functions!", add_special_tokens=False).tokens == ["the", "functions", "!"]


def test_vocabularies_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "workloads" / "vocabularies"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("\n".join([*SPECIAL, "Word"]) + "\n", encoding="utf-8")
    monkeypatch.setenv("DLBENCH_PATH", str(tmp_path))
    mine = load_vocabulary("mine")
    assert (len(mine), mine.lowercase) == (6, False)
    with pytest.raises(UserError, match=r"unknown vocabulary 'english-4069': did you mean english-4096\?"):
        load_vocabulary("english-4069")


def test_damaged_vocabularies_are_named(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    with pytest.raises(UserError, match="cannot be read"):
        load_vocabulary(str(path))
    path.write_text("[PAD]\n[UNK]\n[CLS]\nword\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"\[SEP\], \[MASK\] missing"):
        load_vocabulary(str(path))
    path.write_text("\n".join([*SPECIAL, "twice", "twice"]), encoding="utf-8")
    with pytest.raises(UserError, match="entry 'twice' occurs twice"):
        load_vocabulary(str(path))
    path.write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8 at byte 6"):
        load_vocabulary(str(path))


# Demonstration data


def test_demo_data_are_whole_and_licensed(demo_data: dict[str, Path]) -> None:
    licences = (demo_data["images"] / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(f"{photo.class_name}: " in licences for photo in PHOTOS)
    assert "Python Software Foundation License" in (demo_data["text"] / "LICENSES").read_text(encoding="utf-8")
    for split, images, volumes in (("train", 400, 128), ("validation", 100, 32)):
        tree = index_jpeg_tree(demo_data["images"] / split)
        assert (len(tree.classes), tree.num_samples) == (10, images)
        index = index_density(demo_data["density"] / split)
        assert (index.num_samples, index.size, index.channels, index.num_targets) == (volumes, 32, 4, 4)
        assert not index.chunks_span_samples
    for folder in (demo_data["images"], demo_data["text"], demo_data["density"]):
        assert verify_manifest(folder) == []
    manifest = read_manifest(demo_data["images"])
    assert manifest.counts == {"train": 400, "validation": 100}
    everything = demo_data["images"].parent
    assert sorted(p.name for p in everything.iterdir()) == ["density", "images", "text"]


def test_second_call_makes_nothing_and_other_seeds_are_refused(
    demo_data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = demo_data["images"].parent, list[str]()
    monkeypatch.setattr(catalogue, "produce", None)
    assert prepare_demo_data(folder, progress=lines.append) == demo_data
    with pytest.raises(UserError, match=r"images' holds a data set with seed 0, requested is 1"):
        prepare_demo_data(folder, seed=1)
    assert lines == []


def test_missing_photographs_name_the_remedy() -> None:
    for package in ("skimage", "no_such_package"):
        with pytest.raises(EnvironmentLacksError, match=r"of x is not installed; pip install 'dlbench\[demo\]'"):
            photo_path(Photo("x", package, "x", "data/missing.png", ""))


def test_topics_are_unwrapped_and_split() -> None:
    topic = 'Title\n*****\n\nA sentence\nover lines. Another: "quoted".\n\n   code()\n   more\n\n----\n'
    assert topic_sentences(topic) == ["Title", "A sentence over lines.", "Another:", '"quoted".', "code() more"]


# Manifests


# Made by the writer of its time; see tests/data/formats
FORMATS = DATA / "formats" / "dataset"


def test_a_saved_manifest_still_reads(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(FORMATS / "v1", folder)
    content = json.loads((folder / "manifest.json").read_text(encoding="ascii"))
    assert (content["format"], content["version"]) == ("dlbench.dataset", 1)
    manifest = read_manifest(folder)
    assert (manifest.kind, dict(manifest.made_with), dict(manifest.counts)) == (
        "test",
        {"generator": "by hand", "seed": 7},
        {"train": 2, "validation": 1},
    )
    assert (manifest.num_files, manifest.num_bytes) == (3, 3)
    assert manifest.files_sha256 == "62bd8b8b6c7d0b9821b1f70f702127590f1ad901b2f2244435c2b0bb72280b92"
    assert verify_manifest(folder) == []
    (folder / "train" / "b.txt").write_bytes(b"x")
    assert verify_manifest(folder) == ["train/b.txt: altered (SHA-256 differs)"]


def test_folder_without_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    with pytest.raises(UserError, match=r"has no manifest.json"):
        verify_manifest(tmp_path)


@given(num=st.integers(0, 20), at=st.slices(20) | st.integers(-20, 19))
def test_files_are_a_sequence_of_paths(num: int, at: slice | int) -> None:
    plain = [Path(str(n)) for n in range(num)]
    files = Files(num, lambda n: Path(str(n)))
    assert list(files) == plain
    assert len(files) == num
    if isinstance(at, slice):
        assert list(files[at]) == plain[at]
    elif -num <= at < num:
        assert files[at] == plain[at]
    else:
        with pytest.raises(IndexError):
            files[at]


# Calls


def test_nothing_is_asked_twice_and_rates_are_calls_over_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = index_jpeg_tree(write_tree(tmp_path / "train")).files()
    clock = iter(range(10**6))
    monkeypatch.setattr(storage, "perf_counter", lambda: 0.25 * next(clock))
    asked: dict[str, list[str]] = {"open": [], "stat": [], "scandir": []}
    for name in asked:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, n=name, r=real: (asked[n].append(path), r(path, *a))[1])
    found = call_rates(files, 100.0, seed=1)
    monkeypatch.undo()
    # Each call takes a quarter of a second; a folder has five names.
    assert found == {"opens_per_s": 4.0, "stats_per_s": 4.0, "names_per_s": 20.0}
    assert sorted(asked["open"] + asked["stat"]) == sorted(map(str, files))
    assert sorted(asked["scandir"]) == sorted(str(tmp_path / "train" / f"class {n}") for n in range(3))
    assert set(call_rates(files[:1], 100.0, seed=1)) == set(found), "one file is asked for both"
