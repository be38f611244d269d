"""The spine's figures: what recording costs, how light the command line is, how long `make demo` takes."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dlbench.datasets.making.catalogue import prepare_demo_data
from dlbench.jobs.scripts.launch import local_environments
from dlbench.records.folder import create, prepare_output
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request, parse_set
from tests.bench import known_loops
from tests.bench.figures import Figure, median_interval

ROOT = Path(__file__).resolve().parents[2]
STEPS_PER_BLOCK = {"resnet50": 8, "bert": 10, "cosmoflow": 15}


def measure() -> Iterator[Figure]:
    """All figures of the area."""
    yield from help_cost()
    yield from loop_cost()
    yield from known_loops.figures()
    yield from known_loops.compiled()
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
    value, low, high = median_interval(values[1:])  # the first one reads the disk
    yield Figure(
        name="dlbench --help",
        value=value,
        low=low,
        high=high,
        n=len(values) - 1,
        unit="s of CPU",
        goal="at most 0.2",
        met=value <= 0.2,
    )
    code = "import sys, dlbench.cli\ntry:\n    dlbench.cli.cli(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "sys.exit(len({'torch', 'pandas'} & set(sys.modules)))"
    heavy = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode
    yield Figure(name="dlbench --help: heavy imports", value=heavy, unit="of torch, pandas", goal="0", met=heavy == 0)


def loop_cost() -> Iterator[Figure]:
    """Throughput of the measured loop over that of a bare loop, same process, in turns."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = prepare_demo_data(folder / "data")
        sources = {"resnet50": data.images, "bert": data.text, "cosmoflow": data.density}
        for workload, source in sources.items():
            for ranks in (1, 2):
                yield _loop_cost(workload, ranks, source, folder)


def _loop_cost(workload: str, ranks: int, source: Path, folder: Path) -> Figure:
    name = f"measured loop over bare loop, {workload} ci, {ranks} ranks, horovod"
    about = {"name": name, "unit": "ratio of throughputs", "goal": "at least 0.99"}
    if importlib.util.find_spec("horovod") is None:
        return Figure(**about, value=None, reason="Horovod is not installed")
    steps = STEPS_PER_BLOCK[workload]
    settings = parse_set((f"measure.measured_steps={steps}", "measure.warmup_steps=0", "layout.cores_per_rank=1"))
    request = Request(
        workload=workload, preset="ci", engine="horovod", points=(ranks,), data=str(source), overrides=settings
    )
    (plan,) = expand(request, machine_cores=len(os.sched_getaffinity(0)))
    run = create(prepare_output(folder / "runs"), plan)
    out = folder / f"{secrets.token_hex(4)}.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.bare_loop", str(run.plan), str(out)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
        for variables in local_environments(plan, secrets.token_hex(8))
    ]
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()  # without effect on those that have ended
    if any(codes):
        return Figure(**about, value=None, reason="a rank failed; its error is above")
    ratios = json.loads(out.read_text())
    value, low, high = median_interval(ratios)
    # Where the interval holds the goal, the benchmark cannot tell.
    met = True if low >= 0.99 else False if high < 0.99 else None
    reason = (
        ""
        if met is not None
        else "the interval holds the goal; the median " + ("reaches it" if value >= 0.99 else "falls short")
    )
    return Figure(**about, value=value, low=low, high=high, n=len(ratios), met=met, reason=reason)


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
        yield _demo(clone, clean, "cold make demo in a fresh clone, no caches", 12)
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
