"""The root file system of a container that holds nothing of its own: places where this machine's files are mounted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def made(root: Path) -> Path:
    """The folder `root`, with a file that no machine has beside those places: /etc/only-in-the-image."""
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "run", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "only-in-the-image").touch()
    return root


def packed(root: Path) -> Path:
    """The same as one file."""
    image = root.with_suffix(".sqsh")
    subprocess.run(
        ["mksquashfs", root, image, "-quiet", "-no-progress"], check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    return image


def mounts() -> list[str]:
    """What this Python needs of the machine, as `container.mounts` has it; each once."""
    places = dict.fromkeys(
        str(Path(place).resolve())
        for place in ("/usr", "/etc/ssl", sys.prefix, sys.base_prefix)
        if Path(place).exists()
    )
    inner = [one for one in places if any(one != other and Path(one).is_relative_to(other) for other in places)]
    return [f"{one}:{one}:ro" for one in places if one not in inner]
