"""Labelled images become shards: tar as webdataset reads it, or TFRecords as TensorFlow's ImageNet scripts make them.

The encoded bytes are copied as they are. Samples are written in an order that mixes the classes, drawn from a seed, so
that reading a shard from front to back sees all of them. Sample k of the order is called k in its shard, 8 digits.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dlbench.datasets.images.image_set import ImageSet, open_image_set
from dlbench.datasets.images.shard_scan import FILENAME, IMAGE, LABEL, LABEL_SUFFIX, SYNSET, scan_shards
from dlbench.datasets.images.shards import INDEX, ImageShards, save_index
from dlbench.datasets.making.production import Part
from dlbench.datasets.splits import Split
from dlbench.errors import UserError, refused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Container = Literal["tar", "tfrecord"]
SAMPLES_PER_SHARD = 1252
"""ImageNet's 1,281,167 training images in 1,024 shards."""
FIRST_LABEL: dict[Container, int] = {"tar": 0, "tfrecord": 1}
"""Number of the first class in a shard; the public ImageNet records keep 0 for the background."""
VERSION = 1
"""Raised whenever packing changes what it writes."""


class Packed(NamedTuple):
    """One sample on its way into a shard."""

    key: str
    data: bytes
    label: int
    """Counted from 0."""
    filename: str


def shard_parts(split: Split, num_samples: int, container: Container, samples_per_shard: int) -> list[Part]:
    """The shards of one split, `<split>/shard-00000.<container>`, ...; the last may be smaller."""
    return [
        Part(f"{split}/shard-{number:05d}.{container}", split, first, min(samples_per_shard, num_samples - first))
        for number, first in enumerate(range(0, num_samples, samples_per_shard))
    ]


def write_shard(path: Path, container: Container, samples: Iterable[Packed], classes: Sequence[str]) -> None:
    """Writes one shard; the same samples give the same bytes. One sample at a time is in memory.

    Raises:
        OSError: it cannot be written.
        EnvironmentLacksError: google-crc32c is not installed (TFRecord).
    """
    if container == "tar":
        _write_tar(path, samples)
    else:
        _write_records(path, samples, classes)


def _write_tar(path: Path, samples: Iterable[Packed]) -> None:
    # A TarInfo made by hand has time, owner and group 0.
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for sample in samples:
            label = str(sample.label + FIRST_LABEL["tar"]).encode("ascii")
            for suffix, content in (("jpg", sample.data), (LABEL_SUFFIX, label)):
                member = tarfile.TarInfo(f"{sample.key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps all members it has written


def _write_records(path: Path, samples: Iterable[Packed], classes: Sequence[str]) -> None:
    import numpy as np

    from dlbench.datasets.containers.tf_example import encode_example
    from dlbench.datasets.containers.tfrecord import RecordWriter

    with RecordWriter(path) as writer:
        for sample in samples:
            features: dict[str, bytes | NDArray[np.int64]] = {
                IMAGE: sample.data,
                LABEL: np.array([sample.label + FIRST_LABEL["tfrecord"]], dtype=np.int64),
                SYNSET: classes[sample.label].encode("utf-8", "surrogateescape"),
                FILENAME: sample.filename.encode("utf-8", "surrogateescape"),
            }
            writer.write(encode_example(features))


def index_split(folder: Path, container: Container, classes: Sequence[str]) -> None:
    """Scans the shards of one split, which `write_shard` has written, and writes their index.

    Raises:
        UserError: a shard is damaged.
        OSError: the index cannot be written.
    """
    save_index(scan_shards(folder, classes=classes, first_label=FIRST_LABEL[container]), folder)


def index_foreign(folder: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Writes the index of shards that dlbench did not write, so that opening them need not read all headers.

    Args:
        folder: with the shards of one split.
        progress: told the number of shards read, and of all.

    Returns:
        The number of samples.

    Raises:
        UserError: a shard is damaged or not of a known form, or the folder cannot be written.
    """
    index = scan_shards(folder, progress=progress)
    try:
        save_index(index, folder)
    except OSError as error:
        raise refused(error, f"{str(folder / INDEX)!r}: cannot be written: {error.strerror}", UserError) from None
    return len(index.labels)


@dataclass(frozen=True, kw_only=True)
class PackRecipe:
    """How one image set, a tree or shards, becomes shards; a `Recipe` of dlbench.datasets.making.production."""

    train: Path
    """The training images: a folder that `open_image_set` takes."""
    validation: Path | None = None
    """The validation images; their classes must be among those of the training images."""
    container: Container = "tar"
    samples_per_shard: int = SAMPLES_PER_SHARD
    seed: int = 0
    """Of the order."""

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise UserError(f"samples_per_shard is {self.samples_per_shard}, 1 is the least")

    @property
    def kind(self) -> str:
        """`image-shards`."""
        return "image-shards"

    @property
    def estimated_bytes(self) -> int | None:
        """Bytes of all shards, where the source knows the sizes of its images without looking at each file."""
        if not all(isinstance(images, ImageShards) for images in self._sets.values()):
            return None
        return sum(sum(images.index.sizes) for images in self._sets.values() if isinstance(images, ImageShards))

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        """Container, shard size, seed, version, and for each split the digest of its index.

        The digests of trees are over names; a file that changes under its name is not noticed.
        """
        digests = {f"{split}_index_sha256": images.sha256 for split, images in self._sets.items()}
        return {
            "version": VERSION,
            "container": self.container,
            "samples_per_shard": self.samples_per_shard,
            "seed": self.seed,
            **digests,
        }

    def parts(self) -> Sequence[Part]:
        """All shards of all splits.

        Raises:
            UserError: a source is missing or damaged, or a validation class is not among the training classes.
        """
        parts: list[Part] = []
        for split, images in self._sets.items():
            self._labels(split)  # wrong classes are told before the first shard is written
            parts += shard_parts(split, images.num_samples, self.container, self.samples_per_shard)
        return parts

    def write(self, part: Part, path: Path) -> None:
        """Writes one shard.

        Raises:
            UserError: a source file is missing, cannot be read, or is damaged where its container shows it.
            OSError: the shard cannot be written.
        """
        order = self._orders[part.split][part.first : part.first + part.count]
        samples = _samples(self._sets[part.split], order, part.first, self._labels(part.split))
        write_shard(path, self.container, samples, self._sets["train"].classes)

    def finish(self, folder: Path) -> None:
        """Writes the index of each split."""
        for split in self._sets:
            index_split(folder / split, self.container, self._sets["train"].classes)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens the sources itself, once.
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    @cached_property
    def _sets(self) -> dict[Split, ImageSet]:
        return {split: open_image_set(path) for split, path in self._sources().items()}

    @cached_property
    def _orders(self) -> dict[Split, NDArray[np.int64]]:
        import numpy as np

        generators = {split: np.random.default_rng([self.seed, len(split)]) for split in self._sets}
        return {split: generators[split].permutation(images.num_samples) for split, images in self._sets.items()}

    def _sources(self) -> dict[Split, Path]:
        found: dict[Split, Path] = {"train": self.train}
        if self.validation is not None:
            found["validation"] = self.validation
        return found

    def _labels(self, split: Split) -> tuple[int, ...]:
        """Of each label of a split's own, the label in the training classes."""
        return class_labels(self._sets[split], self._sets["train"].classes)


def class_labels(images: ImageSet, classes: Sequence[str]) -> tuple[int, ...]:
    """Of each class of a set, its label among other classes, by name.

    Raises:
        UserError: a class is not among them; up to three are named.
    """
    known = {name: label for label, name in enumerate(classes)}
    strange = [name for name in images.classes if name not in known]
    if strange:
        named = ", ".join(map(repr, strange[:3])) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise UserError(
            f"{str(images.root)!r}: not among the {len(classes)} training classes: {named}; "
            "give each class the same name in both splits"
        )
    return tuple(known[name] for name in images.classes)


def _samples(source: ImageSet, order: NDArray[np.int64], first: int, labels: Sequence[int]) -> Iterable[Packed]:
    for place, index in enumerate(order.tolist()):
        try:
            data = source.read(index)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UserError(f"{source.name(index)}: {reason}; repair or remove it, then pack again") from None
        yield Packed(f"{first + place:08d}", data, labels[source.label(index)], source.filename(index))
