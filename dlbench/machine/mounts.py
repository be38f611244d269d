"""What kind of file system a folder lies on."""

from __future__ import annotations

import os
from pathlib import Path

from dlbench.opening import read_text

_MAX_FILE = 1 << 22


def file_system_of(folder: Path, root: Path = Path("/")) -> str:
    """Kind of a folder's file system, e.g. ``ext4`` or ``lustre``, by its mount; empty where nobody tells.

    Args:
        folder: it exists.
        root: where `proc` is.
    """
    try:
        real = folder.resolve(strict=True)
        device = real.stat().st_dev
        lines = read_text(root / "proc/self/mountinfo", _MAX_FILE).splitlines()
    except (OSError, ValueError):
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    by_device, by_place = "", ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        if len(words) < 5:
            continue
        kind, place = after.split(" ")[0], _unescaped(words[4])
        if words[2] == number:
            by_device = kind
        # Devices of subvolumes (btrfs) and of overlays may differ from those of their mounts.
        if (str(real) == place or str(real).startswith(place.rstrip("/") + "/")) and len(place) >= len(by_place[0]):
            by_place = (place, kind)
    return by_device or by_place[1]


def _unescaped(text: str) -> str:
    """A path of mountinfo: blanks and such are in octal (proc(5))."""
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text
