"""Whether the places of a node that a system file names can be written, and what they are."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlbench.datasets.staging.place import tier_path
from dlbench.errors import EnvironmentLacksError
from dlbench.machine.storage import file_system_of
from dlbench.opening import read_bytes
from dlbench.records.answers.preflight import SeenScratch
from dlbench.specs.system import StagingTier, StorageSpec

_TRIAL_BYTES = 1 << 20


def scratch(storage: StorageSpec, key: StagingTier, variables: Mapping[str, str], host: str) -> SeenScratch:
    """Writes a MiB there, syncs it, reads it back and takes it away again."""
    try:
        path = tier_path(storage.tier(key), key, variables, host)
    except EnvironmentLacksError as error:
        return SeenScratch(key=key, path=storage.tier(key).path, problem=str(error))
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        free = None
    return SeenScratch(
        key=key, path=str(path), file_system=file_system_of(path), free_bytes=free, problem=_trial(path, key)
    )


def _trial(folder: Path, key: str) -> str:
    """Why nothing can be kept there; empty if it can."""
    content = secrets.token_bytes(_TRIAL_BYTES)
    file = folder / f".dlbench-preflight-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if read_bytes(file, _TRIAL_BYTES) != content:
            return f"storage.{key}.path {str(folder)!r}: what was written is not what is read back"
    except OSError as error:
        return f"storage.{key}.path {str(folder)!r}: cannot be written: {error.strerror or error}"
    finally:
        with suppress(OSError):
            file.unlink()
    return ""
