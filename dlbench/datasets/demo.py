"""Three small real data sets for machines without internet: photographs, English text, density fields.

Each is made in a folder of a temporary name and renamed when it is whole, so that a half one never stands at its
place. A second call finds the manifests and returns at once.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.density_fields import write_density_fields
from dlbench.datasets.manifest import NAME, read_manifest, write_manifest
from dlbench.datasets.photo_crops import write_photo_tree
from dlbench.datasets.python_topics import write_python_topics
from dlbench.errors import UserError

VERSION = 1
"""Raised whenever a generator changes what it makes."""
IMAGES_PER_CLASS = 40
NUM_VOLUMES = 64
VOLUME_SIZE = 32
VOLUME_FILES = 4


@dataclass(frozen=True, kw_only=True)
class DemoData:
    """The folders of the three data sets, each with a manifest."""

    jpeg: Path
    text: Path
    density: Path


def prepare_demo_data(folder: Path, seed: int = 0, progress: Callable[[str], None] | None = None) -> DemoData:
    """Makes what is missing of `<folder>/jpeg`, `<folder>/text` and `<folder>/density`: about 8 MB in a few seconds.

    - jpeg: 10 classes of 40 images of 96 to 128 pixels, see photo_crops.
    - text: the reference topics of the running Python, see python_topics; the seed has no effect on it.
    - density: 64 volumes of 32^3 x 4 in 4 files, see density_fields.

    Args:
        folder: made if it is not there.
        seed: of cuts and fields.
        progress: told one line before each set that is made.

    Raises:
        UserError: a folder of that name is not ours or was made with another seed, or the disk refuses.
        EnvironmentLacksError: a package of the extra `demo` is not installed.
    """
    say = progress or (lambda _line: None)

    def jpeg(target: Path) -> dict[str, int]:
        return write_photo_tree(target, images_per_class=IMAGES_PER_CLASS, seed=seed)

    def density(target: Path) -> dict[str, int]:
        return write_density_fields(
            target, num_samples=NUM_VOLUMES, size=VOLUME_SIZE, num_files=VOLUME_FILES, seed=seed
        )

    return DemoData(
        jpeg=_prepare(folder / "jpeg", "demo-jpeg", {"version": VERSION, "seed": seed}, jpeg, say),
        text=_prepare(folder / "text", "demo-text", {"version": VERSION}, write_python_topics, say),
        density=_prepare(folder / "density", "demo-density", {"version": VERSION, "seed": seed}, density, say),
    )


def _prepare(
    target: Path,
    kind: str,
    made_with: Mapping[str, str | int],
    write: Callable[[Path], dict[str, int]],
    say: Callable[[str], None],
) -> Path:
    if _is_there(target, kind, made_with):
        return target
    say(f"making {kind} in {target}")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        temporary.mkdir(parents=True)
        counts = write(temporary)
        write_manifest(temporary, kind=kind, made_with=made_with, counts=counts)
        temporary.rename(target)
    except OSError as error:
        # Another process may have been faster; its result is as good.
        if not _is_there(target, kind, made_with):
            raise UserError(f"{str(target)!r}: cannot be made: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _is_there(target: Path, kind: str, made_with: Mapping[str, str | int]) -> bool:
    if not target.exists():
        return False
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is None:
        raise UserError(f"{str(target)!r} exists without a {NAME} of dlbench; give another folder")
    if manifest.kind != kind or dict(manifest.made_with) != dict(made_with):
        raise UserError(
            f"{str(target)!r} holds {manifest.kind} made with {dict(manifest.made_with)}, asked for {kind} with "
            f"{dict(made_with)}; give another folder or remove it"
        )
    return True
