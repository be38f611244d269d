"""The command line as a person starts it, timed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT

BOUND_S = 300


def timed(
    folder: Path, variables: Mapping[str, str], *words: str
) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """Seconds of `dlbench WORDS`, from its start to its end; seconds of CPU time; and what it said."""
    start, before = time.monotonic(), _cpu_s()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlbench", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    return time.monotonic() - start, _cpu_s() - before, done


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
