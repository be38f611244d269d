"""What an image file of a container is, found where a run is planned: a thousand ranks must not read it for that."""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from dlbench.errors import UserError
from dlbench.opening import file_sha256, read_text, why_unreadable
from dlbench.specs.system.container import ContainerSpec

_MAX_BYTES = 1 << 12
_PIECE = 1 << 20


def with_image(container: ContainerSpec) -> ContainerSpec:
    """The same with the digest of the image's file, and by what nodes know it again; a folder or a name stays as it is.

    The digest is computed once for each state of a file (its path, size, time of change) and kept in the user's cache.

    Raises:
        UserError: there is no such file, or it is another than the system file says.
    """
    if not container.is_used or not container.is_path:
        return container
    path = Path(container.image or "")
    try:
        if path.is_dir():
            if container.kind == "pyxis":
                raise UserError(f"container.image {path}: is a folder; pyxis takes a .sqsh file")
            return container
        state = path.stat()
        if container.is_podman:
            raise UserError(f"container.image {path}: podman takes a name or a folder; `podman load` the file first")
        sha256 = _digest(str(path), state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise UserError(f"container.image {path}: {why_unreadable(error)}") from None
    if container.sha256 not in (None, sha256):
        raise UserError(f"container.sha256 is {container.sha256}, and {path} has {sha256}: another image")
    planned = f"{state.st_size} {state.st_mtime_ns // 10**9}"
    return container.model_copy(update={"sha256": sha256, "as_planned": planned})


@functools.cache
def _digest(path: str, size: int, changed_ns: int) -> str:
    state = f"{path}\n{size} {changed_ns}\n"
    kept = _cache() / "containers" / hashlib.sha256(os.fsencode(path)).hexdigest()
    with suppress(OSError, ValueError):
        text = read_text(kept, _MAX_BYTES)
        if text.startswith(state) and len(text) == len(state) + 64:
            return text[-64:]
    digest = file_sha256(Path(path))
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        part.write_text(state + digest, encoding="utf-8", errors="surrogateescape")
        part.replace(kept)
    return digest


def _cache() -> Path:
    """As `dlbench setup` has it: ``DLBENCH_CACHE``, else ``$XDG_CACHE_HOME/dlbench``, else ``~/.cache/dlbench``."""
    if explicit := os.environ.get("DLBENCH_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlbench"
