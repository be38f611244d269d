"""The user's cache: what takes long to find out, for as long as the thing it was found out of stays as it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from dlbench.opening import read_text

_MAX_BYTES = 1 << 21


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where all of it is: ``DLBENCH_CACHE``, else ``$XDG_CACHE_HOME/dlbench``, else ``~/.cache/dlbench``.

    Raises `RuntimeError`: this user has no home.
    """
    if explicit := environment.get("DLBENCH_CACHE"):
        return Path(explicit)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlbench"


def kept(kind: str, name: str, state: str, find: Callable[[], str | None]) -> str | None:
    """What `find` finds of a thing, found once for each of its states, of which the newest is kept; None is not.

    `kind` is a folder of the cache, `name` the thing's, e.g. a path, `state` e.g. its size and time of last change.
    """
    try:
        file = cache_folder() / kind / hashlib.sha256(os.fsencode(name)).hexdigest()
    except RuntimeError:
        return find()
    head = f"{name!a} {state!a}\n"
    with suppress(OSError, ValueError):
        text = read_text(file, _MAX_BYTES)
        if text.startswith(head):
            return text.removeprefix(head)
    found = find()
    if found is not None:
        with suppress(OSError):  # a cache that cannot be written is none
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(head + found, encoding="utf-8")
            part.replace(file)
    return found
