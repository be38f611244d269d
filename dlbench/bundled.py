"""Locates dlbench's files: data next to the package (checkout) or in `_bundled/` (wheel), the commit of its code, and
the user's cache of results that take long to compute.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dlbench.opening import read_text

Folder = Literal["workloads", "systems", "slurm", "reports", "patches"]
_MAX_BYTES = 1 << 21


def folder(name: Folder) -> Path:
    """Returns the absolute path of a bundled folder. Raises `FileNotFoundError`: the installation is damaged."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "_bundled" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the installation of dlbench is incomplete: folder {name!r} is missing in {package}")


def code() -> str:
    """Returns the commit of this code, or a digest of the installed files; empty if neither is known."""
    return commit() or installed_files()


@functools.cache
def commit() -> str:
    """Returns the commit of the checkout, with `+dirty` if tracked files were changed; empty outside of a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    git = ["git", "-C", str(root), "-c", f"safe.directory={root}"]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        state = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if head.returncode != 0:
        return ""
    if state.stdout.strip():
        return f"{head.stdout.strip()}+dirty"
    return head.stdout.strip()


@functools.cache
def installed_files() -> str:
    """Returns twelve digits of the SHA-256 of RECORD, the installer's list of files; empty in a checkout."""
    package = Path(__file__).resolve().parent
    try:
        distribution = importlib.metadata.distribution("dlbench")
        listed = distribution.read_text("RECORD") or ""
        if Path(str(distribution.locate_file("dlbench"))).resolve() != package:
            return ""  # another dlbench is installed
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    package_lines = sorted(line for line in listed.splitlines() if line.startswith("dlbench/"))
    if not package_lines:
        return ""
    return hashlib.sha256("\n".join(package_lines).encode()).hexdigest()[:12]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns ``DLBENCH_CACHE``, ``$XDG_CACHE_HOME/dlbench`` or ``~/.cache/dlbench``; raises RuntimeError: no home."""
    folder = environment.get("DLBENCH_CACHE")
    if folder:
        return Path(folder)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlbench"


def cached(kind: str, name: str, state: str, find: Callable[[], str | None]) -> str | None:
    """Returns the result of `find`, cached for the newest `state` (size, time) of `name`; None is not cached."""
    try:
        file = cache_folder() / kind / hashlib.sha256(os.fsencode(name)).hexdigest()
    except RuntimeError:
        return find()
    head = f"{name!a} {state!a}\n"
    with suppress(OSError, ValueError):
        text = read_text(file, _MAX_BYTES)
        if text.startswith(head):
            return text.removeprefix(head)
    content = find()
    if content is not None:
        with suppress(OSError):  # without a writable cache the result is computed each time
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(head + content, encoding="utf-8")
            part.replace(file)
    return content
