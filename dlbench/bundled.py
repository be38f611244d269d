"""Locates dlbench's data files, next to the package (checkout) or in `_bundled/` (wheel), and identifies its code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Literal

Folder = Literal["workloads", "systems", "slurm", "reports", "patches"]


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
