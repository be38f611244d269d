"""An installation in one folder: what the command and the folder's script refuse, and one without a network."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.errors import RunError, UserError
from dlbench.setup.prepare import extras, prepare, write_manifest
from tests.support.paths import ROOT

VERSION = ".".join(map(str, sys.version_info[:2]))


def silent(line: str) -> None:
    """Takes what is said."""


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(UserError, match="is not empty"):
        prepare(tmp_path, (), with_horovod=False, data=None, say=silent)
    with pytest.raises(UserError, match="nod: no such set of packages; there are analysis, "):
        prepare(tmp_path / "new", ("nod",), with_horovod=False, data=None, say=silent)
    assert {"node", "analysis"} <= set(extras())


def test_data_that_cannot_be_copied_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UserError, match="copied into itself"):
        prepare(data / "new", (), with_horovod=False, data=data, say=silent)
    assert not (data / "new").exists()
    (data / "gone").symlink_to("nowhere")
    pip = tmp_path / "pip"
    pip.mkdir()
    # What stands for pip makes the wheel that is looked for, and fetches nothing.
    (pip / "pip.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'new/wheels/dlbench-0.whl').touch()")
    monkeypatch.setenv("PYTHONPATH", str(pip))
    with pytest.raises(RunError, match=r"data/gone cannot be copied: .*No such file"):
        prepare(tmp_path / "new", (), with_horovod=False, data=data, say=silent)


def installed(folder: Path, target: Path, *before: str) -> subprocess.CompletedProcess[str]:
    command = [*before, str(folder / "install.sh"), str(target), sys.executable]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_the_script_installs_nothing_that_was_changed_or_is_for_another_python(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / "x.whl").write_bytes(b"x")
    text = (ROOT / "slurm" / "install.sh").read_text()
    for mark, value in (("@WHAT@", "dlbench"), ("@MACHINE@", platform.machine()), ("@HOROVOD@", "0")):
        text = text.replace(mark, value)
    script = folder / "install.sh"
    for version in ("2.7", VERSION):
        script.write_text(text.replace("@PYTHON@", version))
        script.chmod(0o755)
        assert write_manifest(folder) > 0
        if version == VERSION:
            (folder / "wheels" / "x.whl").write_bytes(b"y")
        done = installed(folder, tmp_path / "new")
        (line,) = done.stderr.splitlines()
        wanted = {"2.7": (5, "wheels are for 2.7"), VERSION: (4, "the folder is damaged: wheels/x.whl: FAILED")}
        assert (done.returncode, wanted[version][1] in line) == (wanted[version][0], True), line
    (tmp_path / "new").mkdir()
    assert installed(folder, tmp_path / "new").returncode == 2
    # It holds no dlbench, which pip finds out when the environment is made.
    assert write_manifest(folder) > 0
    done = installed(folder, tmp_path / "half")
    assert done.returncode not in (0, 2, 4, 5)
    assert done.stderr.splitlines()[-1] == f"install.sh: error: {tmp_path}/half is not complete, and is removed"
    assert not (tmp_path / "half").exists()


def test_the_script_installs_from_its_own_folder(tmp_path: Path) -> None:
    """Wherever the shell looks for folders besides."""
    text = (ROOT / "slurm" / "install.sh").read_text()
    for mark, value in (("@PYTHON@", VERSION), ("@MACHINE@", platform.machine()), ("@HOROVOD@", "0")):
        text = text.replace(mark, value)
    for folder in (tmp_path / "made", tmp_path / "other" / "made"):
        (folder / "wheels").mkdir(parents=True)
        (folder / "wheels" / "x.whl").write_bytes(b"x")
        (folder / "install.sh").write_text(text)
        assert write_manifest(folder) > 0
    (tmp_path / "made" / "wheels" / "x.whl").write_bytes(b"y")
    done = subprocess.run(
        ["bash", "made/install.sh", "new", sys.executable],
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "CDPATH": str(tmp_path / "other")},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, "wheels/x.whl: FAILED" in done.stderr) == (4, True), done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, and root for it")
def test_an_installation_without_a_network(tmp_path: Path) -> None:
    folder, moved = tmp_path / "made", tmp_path / "moved"
    data = tmp_path / "data"
    data.mkdir()
    (data / "sample").write_text("1")
    assert prepare(folder, (), with_horovod=False, data=data, say=silent) > 1_000_000
    folder.rename(moved)
    done = installed(moved, tmp_path / "venv", "unshare", "--net", "--")
    assert done.returncode == 0, done.stderr
    assert f"data: {moved}/data" in done.stdout
    program = str(tmp_path / "venv" / "bin" / "dlbench")
    for words in (["--version"], ["ls"], ["doctor"]):
        found = subprocess.run(["unshare", "--net", "--", program, *words], capture_output=True, text=True, check=False)
        assert found.returncode in (0, 5), found.stderr


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, and root for it")
def test_a_run_of_horovod_without_a_network(tmp_path: Path) -> None:
    assert prepare(tmp_path / "made", ("node",), with_horovod=True, data=None, say=silent) > 100_000_000
    done = installed(tmp_path / "made", tmp_path / "venv", "unshare", "--net", "--")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "made")
    words = ["run", "cosmoflow", "--preset", "ci", "--ranks", "1", "--set", "measure.measured_steps=2"]
    command = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command += [str(tmp_path / "venv" / "bin" / "dlbench"), *words, "--out", str(tmp_path / "runs")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
