"""The spine's figures: what recording costs, how light the command line and a rank are, how long `make demo` takes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import known_loops, rank_memory
from benchmarks.figures import Figure

ROOT = Path(__file__).resolve().parents[1]


def measure() -> Iterator[Figure]:
    """All figures of the area."""
    yield from help_cost()
    yield from known_loops.figures()
    yield from known_loops.compiled()
    yield from rank_memory.figures()
    yield from demo_time()


def help_cost() -> Iterator[Figure]:
    """CPU seconds of ``dlbench --help``."""
    program = Path(sys.executable).with_name("dlbench")
    values = []
    for _ in range(11):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        values.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    yield Figure.of(
        values[1:], name="dlbench --help", unit="s of CPU", goal="at most 0.2", met=lambda one: one.value <= 0.2
    )
    code = "import sys, dlbench.cli\ntry:\n    dlbench.cli.cli(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "sys.exit(len({'torch', 'pandas'} & set(sys.modules)))"
    heavy = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode
    yield Figure(name="dlbench --help: heavy imports", value=heavy, unit="of torch, pandas", goal="0", met=heavy == 0)


def demo_time() -> Iterator[Figure]:
    """Wall time of ``make demo`` in a fresh clone, without any cache, and once more in the same clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        yield Figure(name="make demo", value=None, unit="min", goal="at most 12", reason="not a git checkout")
        return
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "clone"
        subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(clone)], check=True)
        clean = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MAKE_STAGES")
        }
        clean |= {"DLBENCH_CACHE": str(Path(temporary) / "cache"), "PIP_NO_CACHE_DIR": "1"}
        yield _demo(clone, clean, "cold make demo in a fresh clone, no caches", 6)
        yield _demo(clone, clean, "warm make demo", 3)


def _demo(clone: Path, environment: dict[str, str], name: str, goal_min: float) -> Figure:
    start = time.monotonic()
    done = subprocess.run(
        ["make", "demo"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    minutes = (time.monotonic() - start) / 60
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    goal = f"at most {goal_min:g}"
    if done.returncode != 0:
        last = lines[-1] if lines else ""
        return Figure(name=name, value=None, unit="min", goal=goal, reason=f"ended with {done.returncode}: {last}")
    stages = next(line.removeprefix("all stages: ") for line in reversed(lines) if line.startswith("all stages: "))
    return Figure(name=name, value=minutes, unit="min", goal=goal, met=minutes <= goal_min, reason=stages)
