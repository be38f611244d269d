"""Chooses the recipe for `dlbench data make`, `dlbench data pack` and `dlbench data demo` (three small data sets)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.making.production import Recipe, produce, require_ours
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.splits import Split, train_folder, validation_folder
from dlbench.errors import UserError, nearest

CONTAINERS = {"images": ("tree",), "text": ("txt",), "density": ("hdf5", "tfrecord")}
"""Containers by kind of data; the first is the default."""
VALIDATION_SHARE = 0.1  # default number of validation samples, relative to the training samples
_WIDE_BELOW = 64  # edge in cells below which volumes use WIDE parameters: they cannot distinguish similar universes


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """The options of `dlbench data make`; None means the default of the kind."""

    samples: int | None = None  # training images or volumes
    validation: int | None = None
    size: str | None = None  # pixels as 500x375 (images), or the edge of a volume (density)
    classes: int | None = None
    container: str | None = None
    samples_per_file: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class BuildPlan:
    """A recipe with options of its execution."""

    recipe: Recipe
    unit: str  # name of its samples, plural
    most_workers: int | None = None  # more processes would not be faster
    remarks: Sequence[str] = ()  # which files of a source are read, and which are not


def plan_build(kind: str, request: DatasetRequest) -> BuildPlan:
    """Returns the recipe for a kind of data."""
    if kind not in CONTAINERS:
        raise UserError(f"unknown kind of data {kind!r}: {nearest(kind, CONTAINERS)}")
    container = request.container or CONTAINERS[kind][0]
    if container not in CONTAINERS[kind]:
        raise UserError(f"--container {container}: {kind} has {', '.join(CONTAINERS[kind])}")
    makers = {"images": _images, "text": _text, "density": _density}
    return makers[kind](request, container)


def _text(request: DatasetRequest, container: str) -> BuildPlan:
    from dlbench.datasets.making.computed_recipes import TextRecipe

    _refuse("text", request, "samples", "validation", "size", "classes", "samples_per_file")
    # Each process would parse the text again, which takes longer than writing it.
    return BuildPlan(TextRecipe(seed=request.seed), "documents", most_workers=1)


def _samples(kind: str, request: DatasetRequest) -> int:
    if request.samples is None:
        raise UserError(f"--samples is missing: give the number of training {kind}")
    return request.samples


def _refuse(kind: str, request: DatasetRequest, *names: str) -> None:
    for name in names:
        if getattr(request, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: not an option of {kind}; leave it out")


def _images(request: DatasetRequest, container: str) -> BuildPlan:
    from dlbench.datasets.making.image_recipes import PhotoRecipe

    samples = _samples("images", request)
    size = re.fullmatch(r"([0-9]+)(?:x([0-9]+))?", request.size or "500x375")
    if size is None:
        raise UserError(f"--size {request.size!r}: not a size in pixels such as 500x375, or 256 for a square")
    _refuse("images", request, "samples_per_file")
    classes = request.classes or 10
    recipe = PhotoRecipe(
        train_images=samples,
        validation_images=_validation(request, samples, classes),
        num_classes=classes,
        width=int(size[1]),
        height=int(size[2] or size[1]),
        seed=request.seed,
    )
    return BuildPlan(recipe, "images")


def _density(request: DatasetRequest, container: str) -> BuildPlan:
    from dlbench.datasets.making.computed_recipes import DensityRecipe

    samples = _samples("density", request)
    _refuse("density", request, "classes")
    text = request.size or "128"
    if not (text.isascii() and text.isdigit() and 4 <= int(text) <= 1024):
        raise UserError(f"--size {text!r}: not the edge of a volume, a whole number from 4 to 1024")
    if container == "tfrecord":
        _refuse("a TFRecord of a volume", request, "samples_per_file")
    recipe = DensityRecipe(
        num_train=samples,
        num_validation=_validation(request, samples, 1),
        size=int(text),
        container=container,  # type: ignore[arg-type]  # one of CONTAINERS
        seed=request.seed,
        samples_per_file=request.samples_per_file or 1,
        wide=int(text) < _WIDE_BELOW,
    )
    return BuildPlan(recipe, "volumes")


def _validation(request: DatasetRequest, train: int, minimum: int) -> int:
    if request.validation is not None:
        return request.validation
    return max(minimum, round(train * VALIDATION_SHARE))


def packing(source: Path, *, samples_per_shard: int, seed: int) -> BuildPlan:
    """Returns the recipe that packs images into tar shards; both splits if the source has both."""
    from dlbench.datasets.images.image_set import open_image_set
    from dlbench.datasets.kinds import KINDS
    from dlbench.datasets.making.image_recipes import PackRecipe
    from dlbench.datasets.recognition import detect, take_account

    kind = detect(source)
    if kind not in ("images", "image-shards"):
        raise UserError(f"{str(source)!r} holds {KINDS[kind].title}, which are not packed; see `dlbench data verify`")
    train, validation = train_folder(source), validation_folder(source)
    remarks = [take_account(source, kind).line()]
    splits: tuple[tuple[Split, Path | None], ...] = (("train", train), ("validation", validation))
    for split, folder in splits:
        if folder is not None:
            images = open_image_set(folder, split)
            remarks += [f"{str(folder)!r}: {remark}" for remark in images.remarks]
            images.close()
    recipe = PackRecipe(train=train, validation=validation, samples_per_shard=samples_per_shard, seed=seed)
    return BuildPlan(recipe, "images", remarks=remarks)


def recipes(seed: int = 0) -> dict[str, Recipe]:
    """Returns the recipes of the demo data, by the name of the folder."""
    from dlbench.datasets.making.computed_recipes import DensityRecipe, TextRecipe
    from dlbench.datasets.making.image_recipes import PhotoRecipe

    return {
        "images": PhotoRecipe(
            train_images=400, validation_images=100, width=128, height=128, vary=0.25, quality=90, seed=seed
        ),
        "text": TextRecipe(seed=seed),
        "density": DensityRecipe(num_train=128, num_validation=32, size=32, samples_per_file=16, wide=True, seed=seed),
    }


def prepare_demo_data(
    folder: Path, seed: int = 0, workers: int = 1, progress: Callable[[str], None] | None = None
) -> dict[str, Path]:
    """Makes the missing data sets of `recipes`, and returns their folders by name."""
    recipe_by_name = recipes(seed)
    missing = [name for name, recipe in recipe_by_name.items() if not _is_made(recipe, folder / name, seed)]
    for name in missing:
        target = folder / name
        if progress is not None:
            progress(f"making {name} in {target}")
        # Each process would parse the text again, which takes longer than writing it.
        num_workers = 1 if name == "text" else workers
        produce(recipe_by_name[name], target, workers=num_workers)
    return {name: folder / name for name in recipe_by_name}


def _is_made(recipe: Recipe, target: Path, seed: int) -> bool:
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is not None and recipe.kind == "text":
        from dlbench.datasets.making.computed_recipes import python_version

        # `made_with` contains a digest of the text, which takes seconds; it depends only on the version of Python.
        decisive = {"python": python_version(), "seed": seed}
        if manifest.kind == recipe.kind and decisive.items() <= manifest.made_with.items():
            return True
    return require_ours(recipe, target)
