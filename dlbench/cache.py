"""The user's cache of results that take long to compute."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from dlbench.opening import read_text

_MAX_BYTES = 1 << 21


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns ``DLBENCH_CACHE``, or ``$XDG_CACHE_HOME/dlbench``, or ``~/.cache/dlbench``.

    Raises `RuntimeError`: this user has no home.
    """
    folder = environment.get("DLBENCH_CACHE")
    if folder:
        return Path(folder)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlbench"


def kept(kind: str, name: str, state: str, find: Callable[[], str | None]) -> str | None:
    """Returns the result of `find`, cached for the newest state of a thing; None is not cached.

    `kind`: folder of the cache; `name`: of the thing, e.g. a path; `state`: e.g. its size and time of last change.
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
    content = find()
    if content is not None:
        with suppress(OSError):  # without a writable cache the result is computed each time
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}.{os.getpid()}")
            part.write_text(head + content, encoding="utf-8")
            part.replace(file)
    return content
