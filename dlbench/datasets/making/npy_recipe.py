"""CosmoFlow as pairs of .npy files, one sample each, becomes a folder of density volumes.

A pair is `<name>_data.npy`, int16 counts (S, S, S, C), and `<name>_label.npy`, float32 parameters (T,) in [-1, 1].
Pairs lie in the folders of splits, or all in one folder, which is then the training split. Samples are written in an
order drawn from a seed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlbench.datasets.account import SPLIT_OF, account_below
from dlbench.datasets.making.density_recipe import Container, volume_parts, write_volumes
from dlbench.datasets.making.production import Part
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import NAMES, Split
from dlbench.datasets.volumes import Volume, npy_pair, require_counts, target_fault
from dlbench.errors import UserError
from dlbench.opening import why_unreadable

VERSION = 1  # raised whenever packing changes what it writes
SAMPLES_PER_FILE: Mapping[Container, int] = {"hdf5": 64, "tfrecord": 1}
"""A gigabyte of volumes of 128^3 x 4; a gzip file of several records is read whole for each of them."""
DATA, LABEL = "_data.npy", "_label.npy"
LAYOUT = f"<name>{DATA} (int16, (S, S, S, C)) next to <name>{LABEL} (float32, (T,)), in train/ and validation/"


def holds_pairs(source: Path) -> bool:
    """Returns whether a folder, or the folder of a split in it, holds such files."""
    folders = (source, *(source / name for names in NAMES.values() for name in names))
    return any(next(folder.glob(f"*{ending}"), None) is not None for folder in folders for ending in (DATA, LABEL))


def _split_of(path: Path) -> str | None:
    if not path.name.endswith((DATA, LABEL)):
        return None
    return "train" if path.parent == Path() else SPLIT_OF.get(str(path.parent))


@dataclass(frozen=True, kw_only=True, eq=False)
class PairRecipe:
    """Turns pairs of .npy files into volumes; a `Recipe` of dlbench.datasets.making.production."""

    source: Path
    names: Mapping[Split, Sequence[str]]  # of the files of counts, relative to the source, in the order of the samples
    shape: tuple[int, ...]  # (S, S, S, C)
    num_targets: int
    container: Container
    samples_per_file: int
    kind: str = "density"

    @property
    def made_with(self) -> MadeWith:
        """Returns what decides the bytes; of the source the names, not the contents of its files."""
        digest = hashlib.sha256()
        for split, names in self.names.items():
            digest.update(os.fsencode("\0".join((split, *names, ""))))
        return {
            "version": VERSION,
            "source": "npy pairs",
            "source_sha256": digest.hexdigest(),
            "container": self.container,
            "samples_per_file": self.samples_per_file,
        }

    def parts(self) -> Sequence[Part]:
        parts: list[Part] = []
        for split, names in self.names.items():
            parts += volume_parts(split, len(names), self.container, self.samples_per_file)
        return parts

    def write(self, part: Part, path: Path) -> None:
        names = self.names[part.split][part.first : part.first + part.count]
        samples = (self._sample(self.source / name) for name in names)
        write_volumes(path, self.container, samples, (part.count, *self.shape), self.num_targets)

    def finish(self, folder: Path) -> None:
        """Nothing stands next to the volumes."""

    def _sample(self, path: Path) -> Volume:
        x, y = read_pair(path)
        if (x.shape, len(y)) != (self.shape, self.num_targets):
            first = f"the first has {self.shape} with {self.num_targets}"
            raise UserError(f"{str(path)!r}: volume of shape {x.shape} with {len(y)} targets, {first}")
        return x, y


def read_pair(path: Path) -> Volume:
    """Returns the counts (S, S, S, C), mapped, and the parameters (T,) of the pair of a file of counts.

    Raises UserError: a file is damaged, or of another type or shape, or a value is out of range; the file is named.
    """
    labels = _counterpart(path)
    try:
        x, y = npy_pair(path, labels, LAYOUT)
        require_counts(x)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} with {labels.name!r}: {why_unreadable(error)}") from None
    if len(x) != 1:
        raise UserError(f"{str(path)!r}: {len(x)} volumes in one file; expected {LAYOUT}")
    fault = target_fault(y[0])
    if fault is not None:
        raise UserError(f"{str(labels)!r}: {fault}")
    return x[0], np.array(y[0])


def _counterpart(path: Path) -> Path:
    """Returns the file of parameters of a file of counts, or the reverse."""
    ending, other = (DATA, LABEL) if path.name.endswith(DATA) else (LABEL, DATA)
    return path.with_name(path.name.removesuffix(ending) + other)


def pair_packing(source: Path, container: Container, samples_per_file: int | None, seed: int) -> tuple[PairRecipe, str]:
    """Returns how the pairs of a folder become volumes, and which of its files are read, in one line.

    `samples_per_file`: None: one a TFRecord, 64 in HDF5. `seed`: of the order.
    Raises UserError: a file is no sample file or has no counterpart, or the first pair is wrong.
    """
    account = account_below(source, _split_of, LAYOUT)
    names: dict[str, list[str]] = {}
    for split, files in account.splits.items():
        counterparts = {str(_counterpart(Path(name))) for name in files}
        alone = sorted(set(files) - counterparts)
        if alone:
            other = _counterpart(Path(alone[0])).name
            raise UserError(f"{str(source / alone[0])!r} has no {other!r} next to it; expected {LAYOUT}")
        names[split] = [name for name in files if name.endswith(DATA)]
    x, y = read_pair(source / names["train"][0])
    ordered: dict[Split, Sequence[str]] = {}
    for split in NAMES:
        if split in names:
            order = np.random.default_rng([seed, len(split)]).permutation(len(names[split]))
            ordered[split] = [names[split][number] for number in order.tolist()]
    recipe = PairRecipe(
        source=source,
        names=ordered,
        shape=x.shape,
        num_targets=len(y),
        container=container,
        samples_per_file=samples_per_file or SAMPLES_PER_FILE[container],
    )
    return recipe, account.line()
