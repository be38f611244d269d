"""What a data set consists of and how a piece of it is made: what a recipe tells the engine in production."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dlbench.datasets.splits import Split


@dataclass(frozen=True)
class Part:
    """A piece of a data set that one process writes at once: a file or a folder."""

    name: str
    """Relative path with `/`, such as `train/density-00000.h5`."""
    split: Split
    first: int
    """Number of its first sample within the split."""
    count: int
    """Samples in it."""


class Recipe(Protocol):
    """How a data set is made: picklable, a frozen dataclass.

    It may also have `estimated_bytes` (integer), which is compared with the free space before anything is made, and
    `distinct_bytes` (integer), the bytes of content before it repeats, which the manifest keeps.
    """

    @property
    def kind(self) -> str:
        """One word for what is made."""

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        """Everything that decides the bytes."""

    def parts(self) -> Sequence[Part]:
        """All parts, train before validation."""

    def write(self, part: Part, path: Path) -> None:
        """Writes one part as a whole at `path`, which is not there yet and has the part's last name.

        Runs in a worker process. The bytes depend on the recipe and the part alone.
        """

    def finish(self, folder: Path) -> None:
        """Writes small files beside the parts, once all are there."""
