"""Three small real data sets for machines without internet: photographs, English text, density fields.

They are made by the same recipes as large ones (see catalogue), each with training and validation data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.images.photo_crops import PhotoRecipe
from dlbench.datasets.making.manifest import read_manifest
from dlbench.datasets.making.production import Recipe, produce, require_ours
from dlbench.datasets.text.python_text import python_version
from dlbench.datasets.text.recipes import TextRecipe
from dlbench.datasets.volumes.fields import DensityRecipe
from dlbench.errors import UserError

_OLD_KIND = "demo-"
"""How the kinds of demonstration data began before they were made by recipes."""


@dataclass(frozen=True, kw_only=True)
class DemoData:
    """The folders of the three data sets, each with `train`, `validation` and a manifest."""

    images: Path
    text: Path
    density: Path


def recipes(seed: int = 0) -> dict[str, Recipe]:
    """What is made, by the name of its folder.

    - images: 10 classes of 40 training and 10 validation images of 96 to 128 pixels.
    - text: the documentation of the running Python, nine tenths of its documents for training; once.
    - density: 128 training and 32 validation volumes of 32^3 x 4, 16 a file.
    """
    return {
        "images": PhotoRecipe(
            train_images=400, validation_images=100, width=128, height=128, vary=0.25, quality=90, seed=seed
        ),
        "text": TextRecipe(seed=seed),
        "density": DensityRecipe(num_train=128, num_validation=32, size=32, samples_per_file=16, wide=True, seed=seed),
    }


def prepare_demo_data(
    folder: Path, seed: int = 0, workers: int = 1, progress: Callable[[str], None] | None = None
) -> DemoData:
    """Makes what is missing of `<folder>/images`, `<folder>/text` and `<folder>/density`.

    Args:
        folder: made if it is not there.
        seed: of cuts, of the documents' order and of fields.
        workers: processes that write.
        progress: told one line before each set that is made.

    Raises:
        UserError: a folder of that name is not ours or was made with another seed or by an older dlbench, or the disk
            refuses. Nothing is made then.
        EnvironmentLacksError: a package of the extra `demo` is not installed.
    """
    say = progress or (lambda _line: None)
    wanted = recipes(seed)
    there = {name: _is_there(recipe, folder / name, seed) for name, recipe in wanted.items()}
    for name, recipe in wanted.items():
        target = folder / name
        if not there[name]:
            say(f"making {name} in {target}")
            # The text is parsed once in each process, which takes longer than writing it.
            produce(recipe, target, workers=1 if name == "text" else workers)
    return DemoData(images=folder / "images", text=folder / "text", density=folder / "density")


def _is_there(recipe: Recipe, target: Path, seed: int) -> bool:
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is not None and manifest.kind.startswith(_OLD_KIND):
        raise UserError(
            f"{str(target)!r} holds demonstration data of an older dlbench; give another folder or remove it"
        )
    if manifest is not None and isinstance(recipe, TextRecipe):
        # The whole `made_with` has a digest of the text, which takes seconds; the version of Python decides it.
        told, once = manifest.made_with, {"num_bytes": manifest.distinct_bytes, "python": python_version()}
        if manifest.kind == recipe.kind and all(told.get(k) == v for k, v in {**once, "seed": seed}.items()):
            return True
    return require_ours(recipe, target)
