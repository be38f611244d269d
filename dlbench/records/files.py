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


def write_atomic(path: Path, content: bytes | str) -> None:
    """Puts `content` at `path` as a whole, or leaves what was there.

    Raises:
        RunError: the file system refuses (no space, no permission); nothing is left behind.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`write_atomic` of JSON; NaN and infinity are refused, because JSON has none.

    Raises:
        RunError: as `write_atomic`.
        ValueError: a number is not finite.
    """
    write_atomic(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")
