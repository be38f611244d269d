"""Where dlbench's own files are, and which they are.

`workloads/`, `systems/`, `slurm/` and `reports/` stand next to the package in a checkout and inside
it, as `_bundled/`, in a wheel (see `[tool.hatch.build.targets.wheel.force-include]`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Literal

Folder = Literal["workloads", "systems", "slurm", "reports"]


def folder(name: Folder) -> Path:
    """The absolute path of one bundled folder. Raises `FileNotFoundError`: the installation is damaged."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "_bundled" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"dlbench is not installed whole: its folder {name!r} is missing beside {package}")


def code() -> str:
    """Which code this is, more closely than by its version: a commit, or a digest of what was installed; else empty."""
    return commit() or installed_files()


@functools.cache
def commit() -> str:
    """The commit of the checkout dlbench runs from, with `+dirty` where tracked files were changed; else empty."""
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
    return head.stdout.strip() + ("+dirty" if state.stdout.strip() else "")


@functools.cache
def installed_files() -> str:
    """Returns twelve digits of the SHA-256 of RECORD, the installer's list of files; empty in a checkout."""
    package = Path(__file__).resolve().parent
    try:
        found = importlib.metadata.distribution("dlbench")
        listed = found.read_text("RECORD") or ""
        if Path(str(found.locate_file("dlbench"))).resolve() != package:
            return ""  # another one is installed next to this
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    own = sorted(line for line in listed.splitlines() if line.startswith("dlbench/"))
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:12] if own else ""
