"""What every container of density volumes says of a file, and gives for a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Volume: TypeAlias = tuple[NDArray[np.int16], NDArray[np.float32]]
    """Counts (S, S, S, C) and parameters (T,) of one sample."""
else:
    Volume = tuple


@dataclass(frozen=True, kw_only=True)
class FileShape:
    """How many samples of which shape one file holds."""

    num: int
    size: int
    """Edge of a volume, voxels."""
    channels: int
    num_targets: int
    spans: bool
    """Whether reading one sample decompresses others."""

    def fits(self, other: FileShape) -> bool:
        """Whether volumes and targets have the same shapes."""
        return (self.size, self.channels, self.num_targets) == (other.size, other.channels, other.num_targets)

    def __str__(self) -> str:
        """Words for a message."""
        return f"volumes of {self.size}^3 x {self.channels} with {self.num_targets} targets"


class Volumes(Protocol):
    """Reads single samples of one container; picklable while nothing has been read."""

    def read(self, path: Path, place: int, num: int) -> Volume:
        """The sample at a place of a file that holds `num` of them.

        Raises:
            OSError, KeyError, ValueError or IndexError: the file is damaged or has gone.
        """

    def close(self) -> None:
        """Closes open files; reading again opens them again."""
