"""`dlbench data`: every command as a process, from making a set to naming its bad files."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlbench.datasets.images import image_set
from dlbench.datasets.kinds import KINDS
from dlbench.datasets.making.catalogue import DatasetRequest, packing, plan_build
from dlbench.datasets.making.production import BEGUN, produce
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.recognition import detect
from dlbench.datasets.splits import train_folder, validation_folder
from dlbench.datasets.verification import verify
from tests.conftest import Cli
from tests.support.datasets import verify_manifest, write_samples
from tests.support.paths import ROOT

for package in ("h5py", "PIL", "skimage", "sklearn", "tokenizers", "google_crc32c"):
    pytest.importorskip(package)

SENTENCES = "The {0} value is returned.\nIt is {0} again, and no other.\nNothing else follows {0}.\n\n"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set of each kind; tests copy what they change."""
    root = tmp_path_factory.mktemp("sets")
    for name, kind, wish in (
        ("images", "images", DatasetRequest(samples=20, validation=10, size="32")),
        ("density", "density", DatasetRequest(samples=6, validation=2, size="8", samples_per_file=2)),
        ("records", "density", DatasetRequest(samples=6, validation=2, size="8", container="tfrecord")),
    ):
        produce(plan_build(kind, wish).recipe, root / name)
    produce(packing(root / "images", samples_per_shard=8, seed=0).recipe, root / "image-shards")
    for split, num in (("train", 40), ("validation", 8)):
        (root / "text" / split).mkdir(parents=True)
        (root / "samples" / split).mkdir(parents=True)
        text = "".join(SENTENCES.format(f"{split}{i}") for i in range(num))
        (root / "text" / split / "a.txt").write_text(text, encoding="utf-8")
        write_samples(root / "samples" / split / "a.h5", num)
    return root


@pytest.fixture
def copy(sets: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(sets / name, tmp_path / name))

    return copied


def damage(path: Path) -> None:
    """Flips all bits of a tenth of a file, in its middle, and cuts off its end: a tar has no checksum of contents."""
    content = bytearray(path.read_bytes())
    start, stop = len(content) // 2, len(content) * 6 // 10
    content[start:stop] = bytes(b ^ 0xFF for b in content[start:stop])
    path.write_bytes(content[:-7])


# make


@pytest.mark.parametrize(
    ("kind", "options", "unit", "counts"),
    [
        ("images", ("--samples", "20", "--size", "32x24"), "images", {"train": 20, "validation": 10}),
        ("images", ("--samples", "12", "--size", "32", "--classes", "3"), "images", None),
        ("density", ("--samples", "5", "--validation", "2", "--size", "8"), "volumes", {"train": 5, "validation": 2}),
    ],
)
@pytest.mark.slow
def test_made_sets_are_whole_and_a_second_call_finds_them(
    cli: Cli, tmp_path: Path, kind: str, options: tuple[str, ...], unit: str, counts: dict[str, int] | None
) -> None:
    done = cli("data", "make", kind, "set", *options, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "set\n"
    folder = tmp_path / "set"
    manifest = read_manifest(folder)
    assert counts is None or manifest.counts == counts
    assert f"{unit} in train and {manifest.counts['validation']} {unit} in validation" in done.stderr
    assert verify_manifest(folder) == []
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = cli("data", "make", kind, "set", *options)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


WRONG = {
    "unknown kind": (("make", "imagse", "set"), "unknown kind of data 'imagse': did you mean images?"),
    "no number": (("make", "images", "set"), "--samples is missing"),
    "no pixels": (("make", "images", "set", "--samples", "20", "--size", "big"), "--size 'big': not a size in pixels"),
    "no edge": (("make", "density", "set", "--samples", "20", "--size", "8x8"), "--size '8x8': not the edge"),
    "container": (("make", "density", "set", "--samples", "2", "--container", "tar"), "density has hdf5, tfrecord"),
    "classes": (("make", "density", "set", "--samples", "2", "--classes", "3"), "--classes: not an option of density"),
    "text samples": (("make", "text", "set", "--samples", "3"), "--samples: not an option of text"),
    "few images": (("make", "images", "set", "--samples", "3", "--size", "32"), "train_images is 3"),
    "no source": (("pack", "nowhere", "set"), "'nowhere': no such file or folder"),
    "nothing": (("verify", "nowhere"), "'nowhere': no such file or folder"),
    "no data": (("verify", "."), "unknown kind of data"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_end_in_one_line_and_leave_nothing(cli: Cli, tmp_path: Path, sets: Path, name: str) -> None:
    arguments, told = WRONG[name]
    done = cli("data", *(str(sets / "text") if a == "TEXT" else a for a in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_says_how_to_continue_and_continuing_ends_whole(cli: Cli, tmp_path: Path) -> None:
    words = ["data", "make", "density", "set", "--samples", "200", "--size", "16", "--workers", "2"]
    command = [sys.executable, "-m", "dlbench", *words]
    for _ in range(3):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list((tmp_path / "set" / "train").glob("*"))) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
        if process.returncode:
            break
        shutil.rmtree(tmp_path / "set")  # done before this process had a core to end it
    assert process.returncode == 130
    assert said.split("\n") == ["set: not finished; the same command continues", "", "dlbench: interrupted", ""]
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    assert "exist already" in done.stderr
    assert verify_manifest(tmp_path / "set") == []


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dlbench", "data", "make", "density", "set", "--samples", "3", "--size", "8"]
    done = subprocess.run(words, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    os.close(theirs)
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.stdout == "set\n"
    assert "volumes" in said
    assert "4/4" in said


# pack


def test_packed_shards_hold_both_splits(cli: Cli, sets: Path, tmp_path: Path) -> None:
    done = cli("data", "pack", sets / "images", "out", "--samples-per-shard", "8")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out" / "train").glob("*.tar"))) == 3
    for split in ("train", "validation"):
        packed, tree = (
            image_set.open_image_set(tmp_path / "out" / split),
            image_set.open_image_set(sets / "images" / split),
        )
        assert sorted((packed.label(i), packed.read(i)) for i in range(packed.num_samples)) == sorted(
            (tree.label(i), tree.read(i)) for i in range(tree.num_samples)
        )
    assert verify(tmp_path / "out").faults == []


# verify

MADE = ["images", "image-shards", "density", "records", "samples", "text"]


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_kinds_are_recognised_and_whole(
    sets: Path, copy: Callable[[str], Path], name: str, with_manifest: bool
) -> None:
    folder = sets / name
    if not with_manifest:
        folder = copy(name)
        (folder / "manifest.json").unlink(missing_ok=True)
    kind = {"records": "density"}.get(name, name)
    assert kind in KINDS
    for source in (folder, folder / "train"):
        assert detect(source) == kind
        verdict = verify(source, workers=1)
        assert verdict.faults == []
        assert verdict.manifest == ("whole" if with_manifest and name not in ("text", "samples") else "none")
    counts = {"images": (20, 10), "image-shards": (20, 10), "density": (6, 2), "records": (6, 2)}
    if name in counts:
        assert tuple(verify(folder).samples.values()) == counts[name]


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_every_bad_file_is_named(cli: Cli, copy: Callable[[str], Path], name: str, with_manifest: bool) -> None:
    folder = copy(name)
    suffixes = (".jpg", ".tar", ".h5", ".tfrecord", ".txt")
    files = sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.parent != folder)
    bad = [files[0], files[-1]]
    for path in bad:
        damage(path)
    if not with_manifest:
        (folder / "manifest.json").unlink(missing_ok=True)
    done = cli("data", "verify", folder, "--workers", "2")
    assert done.returncode == 4, done.stderr
    for path in bad:
        assert any(path.name in line for line in done.stdout.splitlines()), done.stdout
    whole = [p.name for p in files if p not in bad]
    if len({p.name for p in files}) == len(files):
        assert not any(w in done.stdout for w in whole)
    assert "listed above" in done.stderr


def test_missing_and_added_files_are_found(copy: Callable[[str], Path]) -> None:
    density = copy("density")
    (density / "train" / "density-00001.h5").unlink()
    assert "train/density-00001.h5: missing" in verify(density).faults
    images = copy("images")
    folder = next(p for p in (images / "train").iterdir())
    shutil.copy(next(folder.iterdir()), folder / "added.jpg")
    assert verify(images).faults == ["train: 21 samples in its files, 20 in manifest.json; remove added files"]


def test_an_unfinished_set_is_not_whole(copy: Callable[[str], Path]) -> None:
    folder = copy("density")
    (folder / "manifest.json").unlink()
    (folder / BEGUN).touch()
    assert verify(folder).faults == [".production.json: the set is not finished; repeat the command that makes it"]


def test_json_is_for_programs(cli: Cli, copy: Callable[[str], Path]) -> None:
    folder = copy("density")
    damage(folder / "train" / "density-00002.h5")
    done = cli("data", "verify", folder, "--json")
    assert done.returncode == 4
    told = json.loads(done.stdout)
    wanted = {"kind": "density", "whole": False, "manifest": "altered", "is_public_set": False}
    assert {name: told[name] for name in wanted} == wanted
    assert told["public_set"] is None  # volumes of 8^3 are no try at it
    assert told["account"]["splits"] == {"train": 3, "validation": 1}
    assert [line.partition(":")[0] for line in told["faults"]] == ["train/density-00002.h5"]


def test_the_whole_public_set_is_told(monkeypatch: pytest.MonkeyPatch, sets: Path) -> None:
    told = verify(sets / "images").as_json()
    assert (told["public_set"], told["is_public_set"], told["lacking"]) == (None, False, [])
    monkeypatch.setattr(image_set, "IMAGENET_CLASSES", 10)
    assert "1,281,167" in str(verify(sets / "images").as_json()["lacking"])
    monkeypatch.setattr(image_set, "IMAGENET", {"train": 20, "validation": 10})
    assert verify(sets / "images").as_json()["is_public_set"] is True
    assert verify(sets / "images" / "train").as_json()["is_public_set"] is False


# demo


@pytest.mark.slow
def test_demo_is_made_once_with_both_splits(cli: Cli, tmp_path: Path) -> None:
    done = cli("data", "demo", "d")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["d/images", "d/text", "d/density"]
    for name in ("images", "text", "density"):
        folder = tmp_path / "d" / name
        assert train_folder(folder) == folder / "train"
        assert validation_folder(folder) == folder / "validation"
        assert verify(folder).faults == []
    files = [p for p in (tmp_path / "d").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 20e6
    # Nothing is made again, and the text is not parsed: it could not be.
    for path in (tmp_path / "d" / "text").rglob("*.txt"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    made = {path: path.stat().st_mtime_ns for path in files}
    again = cli("data", "demo", "d")
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert {path: path.stat().st_mtime_ns for path in files} == made


# help


def test_help_imports_no_library_of_data() -> None:
    code = "import sys, dlbench.cli.io; print({'numpy', 'torch', 'h5py', 'PIL', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
