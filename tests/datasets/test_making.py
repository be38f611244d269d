"""The engine that makes data sets: whatever happens in between, the same bytes; nothing foreign is touched."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dlbench.datasets.making.production import BEGUN, PARTIAL, produce
from dlbench.datasets.manifest import FILES_NAME, NAME, read_files, read_manifest
from dlbench.errors import EnvironmentLacksError, MachineError, UserError
from tests.support.datasets import verify_manifest
from tests.support.noise_recipe import Noise
from tests.support.paths import ROOT


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "set"
    produce(Noise(), folder)
    return contents(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "train/../../secret", "", "train//a", "a\0b"])
def test_a_manifest_that_names_files_outside_of_the_set_is_none(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    produce(Noise(), folder)
    (tmp_path / "secret").write_bytes(b"secret")
    lines = (folder / FILES_NAME).read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "path": name})
    (folder / FILES_NAME).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="is not a path of a file in the set") as raised:
        verify_manifest(folder)
    assert str(raised.value).isprintable()


def test_a_set_has_its_files_a_manifest_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    manifest = produce(Noise(), folder)
    assert sorted(p.name for p in folder.iterdir()) == ["LICENSE", FILES_NAME, NAME, "train", "validation"]
    assert manifest == read_manifest(folder)
    assert (manifest.kind, dict(manifest.made_with)) == ("noise", dict(Noise().made_with))
    assert manifest.counts == {"train": 90, "validation": 21}
    assert (manifest.num_files, manifest.num_bytes) == (12 + 4 + 1, 12 * 5000 + 4 * 10 + 5)
    assert {e.path for e in read_files(folder)} == set(contents(folder)) - {NAME, FILES_NAME}
    assert verify_manifest(folder) == []


def test_a_finished_set_is_left_alone(tmp_path: Path, whole: dict[str, bytes]) -> None:
    produce(Noise(), tmp_path / "set")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "set").rglob("*")}
    told: list[int] = []
    produce(Noise(fail="defect"), tmp_path / "set", workers=4, progress=lambda *state: told.append(1))
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "set").rglob("*")}
    assert told == []


def kill_when(folder: Path, parts: int) -> None:
    """Starts a process that makes a set, and kills it when it has made so many parts."""
    code = (
        "import sys; from pathlib import Path; from tests.support.noise_recipe import Noise, produce\n"
        "produce(Noise(delay_s=0.1, last_s=60.0), Path(sys.argv[1]), workers=3)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT) as process:
        deadline = time.monotonic() + 60
        while len(list((folder / "train").glob("*"))) < parts:
            assert process.poll() is None, "ended too early"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "workers outlive the process that started them"


@pytest.mark.slow
def test_killed_in_the_middle_and_continued_gives_the_same_bytes(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "set"
    for parts in (1, 4):
        kill_when(folder, parts)
        assert (folder / BEGUN).is_file()
        assert read_manifest(folder) is None
    told: list[tuple[int, int, int]] = []
    produce(Noise(), folder, workers=3, progress=lambda *state: told.append(state))
    assert told[0][0] >= 4 * 10  # what was done is not done again
    assert contents(folder) == whole


def half_made(folder: Path) -> None:
    """A folder as a process leaves it that was killed with some parts done, and one half written."""
    left = 8

    def stop(*_state: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        produce(Noise(), folder, progress=stop)
    (folder / PARTIAL / "train").mkdir(parents=True)
    (folder / PARTIAL / "train" / "noise-008").write_bytes(b"torn")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Noise(seed=1), "with seed 0, requested is 1"),
        (Noise(num_bytes=1), "with num_bytes 5000, requested is 1"),
        (Noise(kind="loud"), "with kind 'noise', requested is 'loud'"),
    ],
)
def test_another_recipe_is_refused(tmp_path: Path, finished: bool, other: Noise, told: str) -> None:
    folder = tmp_path / "set"
    if finished:
        produce(Noise(), folder)
    else:
        half_made(folder)
    before = contents(folder)
    with pytest.raises(UserError) as raised:
        produce(other, folder)
    assert told in str(raised.value)
    assert str(folder) in str(raised.value)
    assert contents(folder) == before


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"exists without a manifest.json of dlbench; give another folder"):
        produce(Noise(), tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        produce(Noise(), tmp_path / "notes.txt")
    with pytest.raises(UserError, match="cannot be made: Not a directory"):
        produce(Noise(), tmp_path / "notes.txt" / "below")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_second_maker_and_a_damaged_beginning_are_refused(tmp_path: Path) -> None:
    half_made(tmp_path)
    with (tmp_path / BEGUN).open() as begun:
        fcntl.flock(begun, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being made by another process"):
            produce(Noise(), tmp_path)
    (tmp_path / BEGUN).write_text('{"format": "dlbench.production"}', encoding="ascii")
    with pytest.raises(UserError, match=r"\.production\.json: is damaged"):
        produce(Noise(), tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("fail", "error", "told"),
    [
        ("user", UserError, "train/noise-004: source.jpg is no JPEG"),
        ("lacks", EnvironmentLacksError, "train/noise-004: h5py is not installed; pip install it"),
        ("disk", MachineError, "train/noise-004: cannot be made: No space left on device"),
        ("source", MachineError, "train/noise-004: cannot be made: /mnt/source.txt: Input/output error"),
    ],
)
def test_a_failure_names_part_and_reason(
    tmp_path: Path, whole: dict[str, bytes], workers: int, fail: str, error: type[Exception], told: str
) -> None:
    folder = tmp_path / "set"
    with pytest.raises(error) as raised:
        produce(Noise(fail=fail), folder, workers=workers)
    assert str(raised.value) == told
    assert not (folder / PARTIAL).exists()
    produce(Noise(), folder)
    assert contents(folder) == whole


def test_verification_finds_every_change(tmp_path: Path) -> None:
    produce(Noise(), tmp_path)
    (tmp_path / "train" / "noise-001").write_bytes(b"short")
    flipped = bytearray((tmp_path / "train" / "noise-002").read_bytes())
    flipped[100] ^= 1
    (tmp_path / "train" / "noise-002").write_bytes(flipped)
    shutil.rmtree(tmp_path / "train" / "noise-003" / "inner")
    assert verify_manifest(tmp_path) == [
        "train/noise-001: 5 bytes, expected 5000",
        "train/noise-002: altered (SHA-256 differs)",
        "train/noise-003/inner/b.bin: missing",
    ]
