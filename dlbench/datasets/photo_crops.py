"""Photographs that Python packages carry in their wheels become a small JPEG tree: which photograph is this cut from?

The photographs are read from the installed packages scikit-image and scikit-learn; nothing is downloaded. Each class
is one photograph, each image a square cut at a random place and scale, so that a network has something to learn.
"""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import EnvironmentLacksError

if TYPE_CHECKING:
    from PIL.Image import Image

_QUALITY = 90
_SIZES = (96, 128)
"""Smallest and largest edge of an image, pixels."""
_SHARES = (0.25, 0.75)
"""Smallest and largest edge of the cut, as a share of the photograph's shorter edge."""


@dataclass(frozen=True)
class Photo:
    """A photograph in an installed package and what its own documentation says about rights."""

    class_name: str
    package: str
    distribution: str
    file: str
    licence: str


_SKIMAGE = ("skimage", "scikit-image")
_CC0 = "Creative Commons CC0 1.0"
_CC_BY = "Creative Commons Attribution 2.0 (https://creativecommons.org/licenses/by/2.0/)"
PHOTOS = (
    Photo("astronaut", *_SKIMAGE, "data/astronaut.png", "NASA; no known copyright restrictions, public domain"),
    Photo("brick-wall", *_SKIMAGE, "data/brick.png", f"{_CC0}, from CC0Textures, Bricks25"),
    Photo("cat", *_SKIMAGE, "data/chelsea.png", f"{_CC0} by the photographer, Stefan van der Walt"),
    Photo("coffee-cup", *_SKIMAGE, "data/coffee.png", f"{_CC0} by the photographer, Rachel Michetti"),
    Photo("galaxies", *_SKIMAGE, "data/hubble_deep_field.jpg", "NASA, Hubble eXtreme Deep Field; public domain"),
    Photo("retina", *_SKIMAGE, "data/retina.jpg", f"{_CC0}, Mikael Haggstrom, Wikimedia Commons"),
    Photo("rocket", *_SKIMAGE, "data/rocket.jpg", "SpaceX, launch of DSCOVR; released into the public domain"),
    Photo("tissue", *_SKIMAGE, "data/ihc.png", "Center for Microscopy and Molecular Imaging; no known restrictions"),
    Photo(
        "flower",
        "sklearn",
        "scikit-learn",
        "datasets/images/flower.jpg",
        f"{_CC_BY}; the package's note names danielbuechele and links to flickr.com/photos/vultilion/6056698931",
    ),
    Photo(
        "temple",
        "sklearn",
        "scikit-learn",
        "datasets/images/china.jpg",
        f"{_CC_BY}; by danielbuechele, flickr.com/photos/danielbuechele/6061409035",
    ),
)


def photo_path(photo: Photo) -> Path:
    """Where an installed package keeps a photograph; the package itself is not imported.

    Raises:
        EnvironmentLacksError: the package is not installed, or its wheel lacks the file.
    """
    spec = importlib.util.find_spec(photo.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / photo.file
        if path.is_file():
            return path
    raise EnvironmentLacksError(
        f"the photograph {photo.file} of {photo.distribution} is not installed; pip install 'dlbench[demo]'"
    )


def write_photo_tree(folder: Path, *, images_per_class: int, seed: int) -> dict[str, int]:
    """Writes `<class>/<class>-<number>.jpg` and LICENSES.txt into an existing folder; returns counts.

    The same seed gives the same cuts; the bytes of the files depend on the installed Pillow, too.

    Raises:
        EnvironmentLacksError: Pillow or a package with photographs is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise EnvironmentLacksError("Pillow is not installed; pip install 'dlbench[demo]'") from None

    for photo in PHOTOS:
        generator = random.Random(f"{seed} {photo.class_name}")
        target = folder / photo.class_name
        target.mkdir()
        with Image.open(photo_path(photo)) as opened:
            picture = opened.convert("RGB")
        for number in range(images_per_class):
            cut = _cut(picture, generator)
            cut.save(target / f"{photo.class_name}-{number:03d}.jpg", quality=_QUALITY)
    (folder / "LICENSES.txt").write_text(_licences(), encoding="utf-8")
    return {"classes": len(PHOTOS), "images": len(PHOTOS) * images_per_class}


def _cut(picture: Image, generator: random.Random) -> Image:
    from PIL import Image

    edge = generator.uniform(*_SHARES) * min(picture.size)
    left = generator.uniform(0, picture.width - edge)
    top = generator.uniform(0, picture.height - edge)
    size = generator.randint(*_SIZES)
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge))


def _licences() -> str:
    lines = [f"{p.class_name}: {p.package}/{p.file} of {p.distribution}. {p.licence}" for p in PHOTOS]
    head = [
        "The images in this folder are cuts from the photographs below: cropped, resized and encoded as JPEG again.",
        "Rights as stated by the package that carries each photograph.",
        "",
    ]
    return "\n".join(head + lines) + "\n"
