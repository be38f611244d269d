"""A Python's environment becomes one file that can be moved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from pydantic import ValidationError

import dlbench
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.machine.environment import unpacked
from dlbench.setup.image import Contents, Survey, contents_of, pack, survey
from dlbench.specs.container import ImageSpec, description_of, with_digest
from tests.support.paths import ROOT

SITE = Path("lib/python3.11/site-packages")


def virtual(root: Path) -> Survey:
    """A virtual environment, its interpreter beside it, and a checkout."""
    base, env, checkout = root / "base", root / "my env", root / "checkout"
    for folder in (base / "bin", base / "lib/python3.11/site-packages", base / "lib/python3.11/lib-dynload"):
        folder.mkdir(parents=True)
    (base / "bin/python3.11").write_bytes(b"\x7fELF\0" + os.fsencode(base / "lib") + b"\0rest")
    (base / "lib/libpython3.11.so.1.0").write_bytes(b"\x7fELF")
    (base / "lib/python3.11/os.py").write_text("")
    (base / "lib/python3.11/site-packages/unseen.py").write_text("")
    (base / "lib/python3.11/lib-dynload/_ssl.so").write_bytes(b"\0" + os.fsencode(base / "lib") + b"\0")
    (env / "bin").mkdir(parents=True)
    (env / SITE / "torch/lib").mkdir(parents=True)
    (env / "lib64").symlink_to("lib")
    (env / "bin/python").symlink_to("python3")
    (env / "bin/python3").symlink_to(base / "bin/python3.11")
    (env / "bin/python3.11").symlink_to("python3")
    (env / "bin/tool").write_text(f"#!{env}/bin/python3\nprint('tool')\n")
    (env / "bin/tool").chmod(0o755)
    (env / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
    (env / SITE / "torch/__init__.py").write_text("version = 1\n")
    (env / SITE / "torch/lib/libtorch.so").symlink_to(env / SITE / "torch/lib/libtorch.so.2")
    (env / SITE / "torch/lib/libtorch.so.2").write_bytes(b"torch")
    (env / SITE / "editable.pth").write_text(f"{checkout}\n")
    for name in ("dlbench", "workloads", "systems", "slurm", "reports", "elsewhere"):
        (checkout / name).mkdir(parents=True)
        (checkout / name / "__init__.py").write_text(f"# {name}\n")
    (env / SITE / "other.pth").write_text(f"{checkout / 'elsewhere'}\n")
    return Survey(
        executable=Path(sys.executable),
        prefix=env,
        base_prefix=base,
        base_executable=base / "bin/python3.11",
        stdlib=base / "lib/python3.11",
        site=env / SITE,
        version="3.11.7",
        machine="x86_64",
        libc="glibc 2.36",
        dlbench=checkout / "dlbench",
        dlbench_version=dlbench.__version__,
        commit="0123456789ab",
    )


def links(contents: Contents) -> dict[str, str]:
    return {entry.name: entry.link for entry in contents.entries if entry.link is not None}


def test_an_environment_can_be_moved_with_its_interpreter(tmp_path: Path) -> None:
    found = virtual(tmp_path)
    contents = contents_of(found)
    names = {entry.name: entry for entry in contents.entries}
    assert names.keys() == {
        *("env/bin/python", "env/bin/python3", "env/bin/python3.11", "env/bin/tool", "env/lib64"),
        *("env/lib/libpython3.11.so.1.0", "env/lib/python3.11/os.py", "env/lib/python3.11/lib-dynload/_ssl.so"),
        *(f"env/{SITE}/torch/__init__.py", f"env/{SITE}/torch/lib/libtorch.so", f"env/{SITE}/torch/lib/libtorch.so.2"),
        *(f"env/{SITE}/other.pth", f"env/{SITE}/dlbench/__init__.py"),
        f"env/{SITE}/dlbench/_bundled/COMMIT",
        *(f"env/{SITE}/dlbench/_bundled/{name}/__init__.py" for name in ("workloads", "systems", "slurm", "reports")),
    }
    assert links(contents) == {
        "env/bin/python": "python3.11",
        "env/bin/python3": "python3.11",
        "env/lib64": "lib",
        f"env/{SITE}/torch/lib/libtorch.so": "libtorch.so.2",
    }
    # Libraries are looked for where the interpreter is, not where it was.
    for name, place in (
        ("env/bin/python3.11", b"$ORIGIN/../lib"),
        ("env/lib/python3.11/lib-dynload/_ssl.so", b"$ORIGIN/../.."),
    ):
        content = names[name].content
        assert content is not None
        assert place + b"\0" in content
        assert len(content) == names[name].path.stat().st_size  # type: ignore[union-attr]
        assert os.fsencode(found.base_prefix) not in content
    assert (names["env/bin/tool"].content or b"").startswith(b"#!/bin/sh\n'''exec'")
    assert contents.outside == [str(tmp_path / "checkout/elsewhere")]


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst", ".sqsh"])
def test_the_same_environment_is_the_same_image(tmp_path: Path, suffix: str) -> None:
    program = {".tar.zst": "zstd", ".sqsh": "mksquashfs"}.get(suffix)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    found = virtual(tmp_path)
    one, two = (pack(found, tmp_path / f"{name}{suffix}", lambda line: None) for name in ("one", "two"))
    assert one.sha256 == hashlib.sha256((tmp_path / f"one{suffix}").read_bytes()).hexdigest()
    if suffix != ".sqsh":  # which holds the time at which it was made
        assert one.sha256 == two.sha256
    assert one.bytes == (tmp_path / f"one{suffix}").stat().st_size
    assert (one.holds_interpreter, one.dlbench) == (True, f"{dlbench.__version__} 0123456789ab")
    assert with_digest(ImageSpec(file=str(tmp_path / f"one{suffix}"))).sha256 == one.sha256


def test_an_unpacked_image_tells_what_it_is_and_runs_without_what_it_was_made_of(tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    pack(virtual(tmp_path), image, lambda line: None)
    folder = tmp_path / "node" / "1"
    with tarfile.open(image) as tar:
        tar.extractall(folder, filter="fully_trusted")
    assert unpacked(folder / "env") is None  # a folder that no job unpacked
    (tmp_path / "node" / "1.unpacked").write_text(f"{'ab' * 32} 1500000000\n")
    told = unpacked(folder / "env")
    assert (told.sha256, told.seconds) == ("ab" * 32, 1.5)
    # No rank compiles a module: each has its compiled form, which no change of a time makes worthless.
    cached = folder / "env" / SITE / "torch/__pycache__" / "__init__.cpython-311.pyc"
    assert cached.read_bytes()[4] == 0b01
    # Programs find the Python beside them.
    (folder / "env/bin/python3.11").unlink()
    (folder / "env/bin/python3.11").symlink_to(sys.executable)
    shutil.rmtree(tmp_path / "my env")
    assert subprocess.run([folder / "env/bin/tool"], capture_output=True, text=True, check=True).stdout == "tool\n"


def test_a_python_says_what_it_is() -> None:
    found = survey(sys.executable)
    assert found.dlbench == ROOT / "dlbench"
    assert (found.prefix, found.version) == (Path(sys.prefix), sys.version.split()[0])


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacksError, match="cannot be executed"):
        survey(str(tmp_path / "python"))
    with pytest.raises(UserError, match="its name says its kind"):
        pack(virtual(tmp_path), tmp_path / "image.zip", lambda line: None)
    found = virtual(tmp_path / "second")
    os.mkfifo(found.prefix / "pipe")
    with pytest.raises(UserError, match=r"/my env/pipe: cannot be read: "):
        pack(found, tmp_path / "image.tar", lambda line: None)
    assert not list(tmp_path.glob("*image.tar*"))


def test_an_image_that_is_not_the_planned_one_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    with pytest.raises(UserError, match=r"no such file; `dlbench image build -o .*image.tar` makes one"):
        with_digest(ImageSpec(file=str(image)))
    pack(virtual(tmp_path), image, lambda line: None)
    with pytest.raises(UserError, match="another image"):
        with_digest(ImageSpec(file=str(image), sha256="0" * 64))
    description = description_of(image)
    told = json.loads(description.read_text())
    description.write_text(json.dumps({**told, "dlbench": "0.0.1"}))
    with pytest.raises(UserError, match=r"holds dlbench 0\.0\.1, and this is"):
        with_digest(ImageSpec(file=str(image)))
    description.write_text(json.dumps(told))
    image.write_bytes(b"short")
    with pytest.raises(UserError, match="has 5 bytes"):
        with_digest(ImageSpec(file=str(image)))
    description.unlink()
    with pytest.raises(UserError, match=r"no image\.tar\.json next to it"):
        with_digest(ImageSpec(file=str(image)))
    with pytest.raises(ValidationError, match="there is none"):
        ImageSpec(sha256="0" * 64)
