"""A folder that sets up a machine without network: wheels by pip, Horovod, data, a script, checksums.

The wheels come through the user's own configuration of pip. They are those of the Python and the machine that prepare
them, so the other machine needs the same version of Python and a C library that is not older. `MANIFEST.sha256` lists
every file with its digest, as sha256sum(1) writes and checks it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import dlbench
from dlbench import bundled
from dlbench.errors import RunError, UserError
from dlbench.opening import file_sha256, read_text
from dlbench.setup import horovod

NAME = "MANIFEST.sha256"


def write_manifest(folder: Path) -> int:
    """Writes the list, in the order of names; returns how many bytes the files have together.

    Raises `OSError`: a file cannot be read, or the list not be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    lines = [f"{file_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")
    return sum(path.stat().st_size for path in files)


_TEMPLATE = "install.sh"
_MAX_BYTES = 1 << 16


def extras() -> tuple[str, ...]:
    """Names of dlbench's sets of packages."""
    return tuple(sorted(importlib.metadata.metadata("dlbench").get_all("Provides-Extra") or ()))


def prepare(
    folder: Path, chosen: Sequence[str], *, with_horovod: bool, data: Path | None, say: Callable[[str], None]
) -> int:
    """Makes the folder; returns its bytes.

    `folder`: where to; it must not exist, or be empty. `chosen`: sets of packages besides the core's. `with_horovod`:
    whether the wheel of Horovod for this Python, torch and toolchain comes with it. `data`: a folder of data sets that
    comes with it. Raises `UserError`: the folder is not empty or lies in the data, or a set of packages is not known.
    `RunError`: pip could not fetch or build something, and the line holds the end of what it said; or a file of the
    data cannot be copied. `EnvironmentLacksError`: Horovod cannot be built here.
    """
    unknown = sorted(set(chosen) - set(extras()))
    if unknown:
        raise UserError(f"--extra {unknown[0]}: no such set of packages; there are {', '.join(extras())}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not empty; choose another folder")
    if data is not None and folder.resolve().is_relative_to(data.resolve()):
        raise UserError(f"{folder}: lies in --data {data}, and would be copied into itself; choose a folder elsewhere")
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    what = f"dlbench[{','.join(chosen)}]" if chosen else "dlbench"
    say(f"building dlbench {dlbench.__version__}")
    root = Path(dlbench.__file__).resolve().parents[1]
    source = str(root) if (root / "pyproject.toml").is_file() else f"dlbench=={dlbench.__version__}"
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), source)
    (own,) = wheels.glob("dlbench-*.whl")
    say(f"fetching what {what} needs")
    _pip("wheel", "--wheel-dir", str(wheels), "--prefer-binary", f"{own}[{','.join(chosen)}]" if chosen else str(own))
    if with_horovod:
        facts = horovod.toolchain()
        wheel = horovod.cached_wheel(facts) or horovod.build_wheel(facts, say, source=horovod.given_source(None))
        say(f"taking {wheel.name}, built here for torch {facts['torch']}, MPI {facts['mpi'] or 'none'}")
        (folder / "horovod").mkdir()
        shutil.copy2(wheel, folder / "horovod")
        _pip("wheel", "--wheel-dir", str(wheels), "--prefer-binary", *horovod.BUILD_REQUIREMENTS)
    if data is not None:
        say(f"copying {data}")
        _copy(data, folder / "data")
    _write_script(folder, what, with_horovod=with_horovod)
    say("computing checksums")
    return write_manifest(folder)


def _copy(data: Path, target: Path) -> None:
    try:
        shutil.copytree(data, target)
    except shutil.Error as error:
        source, _, why = error.args[0][0]
        raise RunError(f"--data: {source} cannot be copied: {why}") from None


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RunError(f"pip {words[0]} ended with {done.returncode}: {said[-1].strip() if said else 'without a word'}")


def _write_script(folder: Path, what: str, *, with_horovod: bool) -> None:
    text = read_text(bundled.folder("slurm") / _TEMPLATE, _MAX_BYTES)
    facts = {
        "@WHAT@": what,
        "@PYTHON@": ".".join(map(str, sys.version_info[:2])),
        "@MACHINE@": platform.machine(),
        "@HOROVOD@": "1" if with_horovod else "0",
    }
    for mark, value in facts.items():
        text = text.replace(mark, value)
    script = folder / _TEMPLATE
    script.write_text(text, encoding="utf-8")
    mask = os.umask(0)
    os.umask(mask)
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | (stat.S_IXOTH & ~mask))
