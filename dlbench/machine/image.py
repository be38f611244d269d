"""What a rank knows of the image that its environment came in: which, and how long its node took to unpack it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dlbench.opening import read_text

_MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """An image on this node."""

    sha256: str
    """As the node found it."""
    seconds: float
    """What fetching, checking and unpacking took on this node."""


def unpacked(prefix: Path | None = None) -> Unpacked | None:
    """The image that this Python came in (see slurm/image.j2); None where it came in none.

    Args:
        prefix: of the Python; None: this one's.
    """
    folder = (prefix or Path(sys.prefix)).parent
    try:
        sha256, nanoseconds = read_text(folder.with_name(f"{folder.name}.unpacked"), _MAX_BYTES).split()
        return Unpacked(sha256=sha256, seconds=int(nanoseconds) / 1e9)
    except (OSError, ValueError):
        return None
