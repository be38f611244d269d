"""The kinds of data sets that `dlbench data make` knows: a request becomes a recipe; and images that become shards.

`dlbench data demo` makes three small real data sets for machines without internet by the same recipes.
"""

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
"""By the kinds that are made; the first one of each kind is the default."""
VALIDATION_SHARE = 0.1  # of the training samples, where the request does not say
_WIDE_BELOW = 64  # edge, cells. Smaller volumes show too little of a universe to distinguish neighbouring parameters.


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """What a person asks for; what is None has a default of the kind."""

    samples: int | None = None  # of the training split; of images and volumes
    validation: int | None = None
    size: str | None = None  # pixels as 500x375 (images), or the edge of a volume (density)
    classes: int | None = None
    container: str | None = None
    samples_per_file: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class BuildPlan:
    """A recipe and how it is to be made."""

    recipe: Recipe
    unit: str  # what its samples are called
    most_workers: int | None = None  # more would not be faster
    remarks: Sequence[str] = ()  # which files of a source are read, and which are left out


def plan_build(kind: str, request: DatasetRequest) -> BuildPlan:
    """Returns how data of a kind is made as requested."""
    if kind not in CONTAINERS:
        raise UserError(f"unknown kind of data {kind!r}: {nearest(kind, CONTAINERS)}")
    container = request.container or CONTAINERS[kind][0]
    if container not in CONTAINERS[kind]:
        raise UserError(f"--container {container}: {kind} has {', '.join(CONTAINERS[kind])}")
    makers = {"images": _images, "text": _text, "density": _density}
    return makers[kind](request, container)


def _text(request: DatasetRequest, container: str) -> BuildPlan:
    from dlbench.datasets.making.text_recipes import TextRecipe

    _refuse("text", request, "samples", "validation", "size", "classes", "samples_per_file")
    # Each process would parse the text anew, which takes longer than writing it.
    return BuildPlan(TextRecipe(seed=request.seed), "documents", most_workers=1)


def _samples(kind: str, request: DatasetRequest) -> int:
    if request.samples is None:
        raise UserError(f"--samples is missing: it decides how many {kind} are made")
    return request.samples


def _refuse(kind: str, request: DatasetRequest, *names: str) -> None:
    for name in names:
        if getattr(request, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: {kind} has no such choice; leave it out")


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
    from dlbench.datasets.making.density_recipe import DensityRecipe

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


def _validation(request: DatasetRequest, train: int, least: int) -> int:
    """Validation samples: as asked, or a tenth of the training samples and at least so many."""
    if request.validation is not None:
        return request.validation
    return max(least, round(train * VALIDATION_SHARE))


def packing(source: Path, *, samples_per_shard: int, seed: int) -> BuildPlan:
    """Images become tar shards; both splits if the source holds both."""
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
    """What is made, by the name of its folder.

    - images: 10 classes of 40 training and 10 validation images of 96 to 128 pixels.
    - text: the documentation of the running Python, nine tenths of its documents for training; once.
    - density: 128 training and 32 validation volumes of 32^3 x 4, 16 per file.
    """
    from dlbench.datasets.making.density_recipe import DensityRecipe
    from dlbench.datasets.making.image_recipes import PhotoRecipe
    from dlbench.datasets.making.text_recipes import TextRecipe

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
    """Makes what is missing of the three data sets of `recipes`, and returns the folder of each, by its name."""
    wanted = recipes(seed)
    there = {name: _is_there(recipe, folder / name, seed) for name, recipe in wanted.items()}
    for name, recipe in wanted.items():
        target = folder / name
        if not there[name]:
            if progress is not None:
                progress(f"making {name} in {target}")
            # The text is parsed once in each process, which takes longer than writing it.
            produce(recipe, target, workers=1 if name == "text" else workers)
    return {name: folder / name for name in wanted}


def _is_there(recipe: Recipe, target: Path, seed: int) -> bool:
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is not None and recipe.kind == "text":
        from dlbench.datasets.making.text_recipes import python_version

        # The whole `made_with` has a digest of the text, which takes seconds; the version of Python decides it.
        decisive = {"python": python_version(), "seed": seed}
        if manifest.kind == recipe.kind and decisive.items() <= manifest.made_with.items():
            return True
    return require_ours(recipe, target)
