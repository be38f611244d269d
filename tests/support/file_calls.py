"""How often ranks call the file system that their run's folder is on, as strace(1) of them tells it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dlbench.records.folder import RunFolder
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run

STRACE = ("strace", "-f", "-qq", "-y", "-ttt", "-e", "trace=%file", "-e", "signal=none")

_CALL = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\((.*)$")
_FOLDER = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def calls_in(trace: Path, shared: Sequence[Path]) -> list[tuple[float, str, str]]:
    """Time (seconds since 1970), call and path of each call on one of the folders."""
    roots = tuple(f"{root}/" for root in shared)
    found = []
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        told = _CALL.match(line)
        if told is None:
            continue
        for path in _paths(told[3].partition(", [")[0] if told[2].startswith("execve") else told[3]):
            if f"{path}/".startswith(roots):
                found.append((float(told[1]), told[2], path))
                break
    return found


def _paths(arguments: str) -> Iterable[str]:
    """Absolute paths of a call's arguments; a relative one belongs to the folder that stands before it."""
    folder = _FOLDER.search(arguments)
    texts = _TEXT.findall(arguments)
    for text in texts or [""]:
        yield text if text.startswith("/") else os.path.normpath(f"{folder[1] if folder else ''}/{text}")


def periods(run: Run, rank: int) -> tuple[float, float, float]:
    """When a rank's first step began, and its first measured one, and when the last ended: seconds since 1970."""
    # The trace has the clock of the day, steps have CLOCK_MONOTONIC; one machine has all nodes.
    offset_s = time.time() - time.monotonic()
    steps = read_steps(RunFolder(run.folder.path).steps(rank)).steps
    measured = steps[steps["warmup"] == 0]
    end_ns = measured["start_ns"][-1] + measured["step_ns"][-1]
    first, begin, end = (float(ns) / 1e9 + offset_s for ns in (steps["start_ns"][0], measured["start_ns"][0], end_ns))
    return first, begin, end
