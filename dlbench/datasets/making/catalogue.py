"""The kinds of data sets that `dlbench data make` knows: a request, in samples or bytes, becomes a recipe.

How many samples fill a number of bytes is measured: a few of the very samples are written to a temporary folder. The
same request thus gives the same recipe, and a set that was begun by its size is continued by it.

`dlbench data demo` makes three small real data sets for machines without internet by the same recipes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.making.production import Recipe, produce, require_ours
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.splits import Split, train_folder, validation_folder
from dlbench.errors import UserError, nearest

if TYPE_CHECKING:
    from dlbench.datasets.images.shards import ImageSet

KINDS = ("images", "text", "density")
CONTAINERS = {"images": ("tree", "tar"), "text": ("txt",), "density": ("hdf5", "tfrecord")}
"""The first one of each kind is the default."""
VALIDATION_SHARE = 0.1  # of the training samples, where the request does not say
_WIDE_BELOW = 64  # edge, cells. Smaller volumes show too little of a universe to distinguish neighbouring parameters.
_PROBES = 8
_PARALLEL_TEXT = 200_000_000  # bytes


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """What a person asks for; what is None has a default of the kind."""

    samples: int | None = None  # of the training split
    validation: int | None = None
    size_on_disk: int | None = None  # bytes of all files together, about; instead of `samples`
    size: str | None = None  # pixels as 500x375 (images), or the edge of a volume (density)
    classes: int | None = None
    container: str | None = None
    samples_per_file: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class BuildPlan:
    """A recipe and what it will need."""

    recipe: Recipe
    unit: str  # what its samples are called
    estimated_bytes: int
    most_workers: int | None = None  # more would not be faster
    remarks: Sequence[str] = ()  # which files of a source are read, and which are left out


def plan_build(kind: str, request: DatasetRequest) -> BuildPlan:
    """Decides a recipe.

    Raises UserError: an unknown kind, an option that the kind does not have, or a value that does not fit.
    EnvironmentLacksError: a package of the extra `data` or `demo` is not installed.
    """
    if kind not in KINDS:
        raise UserError(f"unknown kind of data {kind!r}: {nearest(kind, KINDS)}")
    if request.container is not None and request.container not in CONTAINERS[kind]:
        raise UserError(f"--container {request.container}: {kind} has {', '.join(CONTAINERS[kind])}")
    if kind == "text":
        return _text(request)
    if (request.samples is None) == (request.size_on_disk is None):
        raise UserError("give one of --samples and --size-on-disk; one of the two decides how much is made")
    return _images(request) if kind == "images" else _density(request)


def _refuse(kind: str, request: DatasetRequest, *names: str) -> None:
    for name in names:
        if getattr(request, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: {kind} has no such choice; leave it out")


def _text(request: DatasetRequest) -> BuildPlan:
    from dlbench.datasets.making.text_recipes import TextRecipe

    for name in ("samples", "validation"):
        if getattr(request, name) is not None:
            share = "a tenth of its documents is for validation"
            raise UserError(f"--{name}: text is counted in bytes, and {share}; give --size-on-disk")
    _refuse("text", request, "size", "classes", "samples_per_file")
    recipe = TextRecipe(num_bytes=request.size_on_disk, seed=request.seed)
    # Each process parses the text anew, which takes longer than writing some files.
    most = 1 if recipe.estimated_bytes < _PARALLEL_TEXT else None
    return BuildPlan(recipe, "documents", recipe.estimated_bytes, most)


def _images(request: DatasetRequest) -> BuildPlan:
    from dlbench.datasets.making.image_recipes import SAMPLES_PER_SHARD, PhotoRecipe

    width, height = _pixels(request.size or "500x375")
    container = request.container or "tree"
    if container == "tree":
        _refuse("a tree of images", request, "samples_per_file")

    def recipe(train: int, validation: int) -> PhotoRecipe:
        return PhotoRecipe(
            train_images=train,
            validation_images=validation,
            num_classes=10 if request.classes is None else request.classes,
            container=container,  # type: ignore[arg-type]  # one of CONTAINERS
            width=width,
            height=height,
            samples_per_shard=request.samples_per_file or SAMPLES_PER_SHARD,
            seed=request.seed,
        )

    least = 10 if request.classes is None else request.classes
    probe = replace(recipe(4 * least, 0), samples_per_shard=16)
    return _sized(request, recipe, probe, "images", least)


def _density(request: DatasetRequest) -> BuildPlan:
    from dlbench.datasets.making.density_recipe import DensityRecipe

    _refuse("density", request, "classes")
    text = request.size or "128"
    if not (text.isascii() and text.isdigit() and 4 <= int(text) <= 1024):
        raise UserError(f"--size {text!r}: not the edge of a volume, a whole number from 4 to 1024")
    size = int(text)

    def recipe(train: int, validation: int) -> DensityRecipe:
        return DensityRecipe(
            num_train=train,
            num_validation=validation,
            size=size,
            container=request.container or "hdf5",  # type: ignore[arg-type]  # one of CONTAINERS
            seed=request.seed,
            samples_per_file=request.samples_per_file or 1,
            wide=size < _WIDE_BELOW,
        )

    return _sized(request, recipe, replace(recipe(_PROBES, 0), samples_per_file=1), "volumes", 1)


def _sized(
    request: DatasetRequest, recipe: Callable[[int, int], Recipe], probe: Recipe, unit: str, least: int
) -> BuildPlan:
    """Numbers of samples from the request, of which each split has `least` or more (or none, for validation)."""
    per_sample = _bytes_per_sample(probe)
    if request.samples is not None:
        train = request.samples
    else:
        assert request.size_on_disk is not None  # one of the two, says `plan_build`
        total = int(request.size_on_disk / per_sample)
        share = VALIDATION_SHARE / (1 + VALIDATION_SHARE)
        train = total - (round(total * share) if request.validation is None else request.validation)
        if train < least:
            of = f"--size-on-disk {request.size_on_disk}"
            raise UserError(f"{of}: too small; a sample takes about {per_sample:.0f} bytes")
    validation = request.validation if request.validation is not None else max(least, round(train * VALIDATION_SHARE))
    return BuildPlan(recipe(train, validation), unit, round((train + validation) * per_sample))


def _bytes_per_sample(probe: Recipe) -> float:
    parts = probe.parts()
    chosen = parts[:: max(1, len(parts) // _PROBES)]
    total = 0
    with tempfile.TemporaryDirectory(prefix="dlbench-") as folder:
        for part in chosen:
            path = Path(folder) / part.name
            path.parent.mkdir(parents=True, exist_ok=True)
            probe.write(part, path)
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(p.stat().st_size for p in files if p.is_file())
    return total / sum(part.count for part in chosen)


def _pixels(text: str) -> tuple[int, int]:
    width, mark, height = text.partition("x")
    if not (width.isascii() and width.isdigit() and (not mark or (height.isascii() and height.isdigit()))):
        raise UserError(f"--size {text!r}: not a size in pixels such as 500x375, or 256 for a square")
    return int(width), int(height or width)


def packing(source: Path, *, samples_per_shard: int, seed: int) -> BuildPlan:
    """Images become tar shards; both splits if the source holds both.

    Raises UserError: the source holds no images, or is damaged.
    """
    from dlbench.datasets.images.image_set import open_image_set
    from dlbench.datasets.making.image_recipes import PackRecipe
    from dlbench.datasets.recognition import TITLES, detect, take_account

    kind = detect(source)
    if kind not in ("images", "image-shards"):
        raise UserError(f"{str(source)!r} holds {TITLES[kind]}, which are not packed; see `dlbench data verify`")
    train, validation = train_folder(source), validation_folder(source)
    recipe = PackRecipe(train=train, validation=validation, samples_per_shard=samples_per_shard, seed=seed)
    expected = 0.0
    remarks = [take_account(source, kind).line()]
    splits: tuple[tuple[Split, Path | None], ...] = (("train", train), ("validation", validation))
    for split, folder in splits:
        if folder is not None:
            images = open_image_set(folder, split)
            step = max(1, images.num_samples // _PROBES)
            sizes = [_size_of(images, index) for index in range(0, images.num_samples, step)]
            expected += images.num_samples * sum(sizes) / len(sizes)
            remarks += [f"{str(folder)!r}: {remark}" for remark in images.remarks]
            images.close()
    return BuildPlan(recipe, "images", round(expected), remarks=remarks)


def _size_of(images: ImageSet, index: int) -> int:
    try:
        # A tar member has a header, and padding to 512 bytes.
        return len(images.read(index)) + 1024
    except (OSError, ValueError) as error:
        raise UserError(f"{images.name(index)}: {getattr(error, 'strerror', None) or error}") from None


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
) -> DemoData:
    """Makes what is missing of `<folder>/images`, `<folder>/text` and `<folder>/density`; `progress` gets a line for
    each.

    Raises UserError: a folder of that name is not ours or was made with another seed, or the disk refuses; nothing is
    made then. EnvironmentLacksError: a package of the extra `demo` is not installed.
    """
    wanted = recipes(seed)
    there = {name: _is_there(recipe, folder / name, seed) for name, recipe in wanted.items()}
    for name, recipe in wanted.items():
        target = folder / name
        if not there[name]:
            if progress is not None:
                progress(f"making {name} in {target}")
            # The text is parsed once in each process, which takes longer than writing it.
            produce(recipe, target, workers=1 if name == "text" else workers)
    return DemoData(images=folder / "images", text=folder / "text", density=folder / "density")


def _is_there(recipe: Recipe, target: Path, seed: int) -> bool:
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is not None and recipe.kind == "text":
        from dlbench.datasets.making.text_recipes import python_version

        # The whole `made_with` has a digest of the text, which takes seconds; the version of Python decides it.
        decisive = {"num_bytes": manifest.distinct_bytes, "python": python_version(), "seed": seed}
        if manifest.kind == recipe.kind and decisive.items() <= manifest.made_with.items():
            return True
    return require_ours(recipe, target)
