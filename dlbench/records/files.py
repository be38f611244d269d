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
from dlbench.units import utf8_text

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

    Bytes of host names, variables and paths that are not UTF-8 become escapes such as ``\\xff``.

    Raises:
        RunError: as `write_atomic`.
        ValueError: a number is not finite.
    """
    text = _json_text(content)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = _json_text(_in_utf8(content)).encode()
    write_atomic(path, data)


def _json_text(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _in_utf8(content: Any) -> Any:
    """The same with every text fit for UTF-8."""
    if isinstance(content, str):
        return utf8_text(content)
    if isinstance(content, Mapping):
        return {_in_utf8(key): _in_utf8(value) for key, value in content.items()}
    return [_in_utf8(item) for item in content] if isinstance(content, (list, tuple)) else content
