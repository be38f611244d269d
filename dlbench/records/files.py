"""Files that are never half there: written under a temporary name beside the target, synced, renamed."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlbench.errors import RunError

TEMPORARY_SUFFIX = ".partial"


def write_atomic(path: Path, content: bytes | str, *, private: bool = False) -> None:
    """Puts `content` at `path` as a whole, or leaves what was there.

    Args:
        path: the file.
        content: all of it.
        private: for the owner alone (mode 0600) from its first byte on, whatever the umask; else as the umask says.

    Raises:
        RunError: the file system refuses (no space, no permission); nothing is left behind.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: Path, content: Mapping[str, Any], *, private: bool = False) -> None:
    """`write_atomic` of JSON; NaN and infinity are refused, because JSON has none.

    Raises:
        RunError: as `write_atomic`.
        ValueError: a number is not finite.
    """
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text + "\n", private=private)
