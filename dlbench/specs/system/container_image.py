"""What an image file of a container is, found where a run is planned: a thousand ranks must not read it for that."""

from __future__ import annotations

import functools
from pathlib import Path

from dlbench.errors import UserError
from dlbench.opening import file_sha256, why_unreadable
from dlbench.specs.system.container import ContainerSpec
from dlbench.specs.user_cache import kept


def with_image(container: ContainerSpec) -> ContainerSpec:
    """The same with the digest of the image's file, and by what nodes know it again; a folder or a name stays as it is.

    The digest is computed once for each state of a file (its path, size, time of change) and kept in the user's cache.

    Raises `UserError`: there is no such file, or it is another than the system file says.
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
    return kept("containers", path, f"{size} {changed_ns}", lambda: file_sha256(Path(path))) or ""
