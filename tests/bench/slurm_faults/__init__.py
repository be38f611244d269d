"""Faults planted on a real Slurm: does each end in bounded time, with a true line and no finished run lost?

`make bench AREA=slurm.faults`. Three rows of faults run side by side on nodes of their own, then those that take
the box's daemons away, one after the other.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dlbench.jobs.box.box import Box, check_requirements
from tests.bench.figures import Figure
from tests.bench.slurm_faults import daemons, desk, limits, ranks
from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import HAS, DidNotHoldError, Site, Stage

_BUSY = 2.0
"""So much longer than on a machine with nothing else to do may each take."""
NAME = "faults planted on a real Slurm that ended as they should"


def figures() -> Iterator[Figure]:
    """How many did."""
    if missing := check_requirements(HAS):
        yield Figure(name=NAME, value=None, unit="", goal="all", reason="; ".join(missing))
        return
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlbench-faults-", dir="/tmp") as folder, _small(Path(folder, "small")):
        ended = _all(Path(folder))
    yield Figure(
        name=NAME,
        value=sum(ended),
        unit=f"of {len(ended)}",
        n=len(ended),
        goal="all",
        met=all(ended),
        reason=f"{time.monotonic() - start:.0f} s",
    )


def _all(root: Path) -> list[bool]:
    with Box.start(root / "box", nodes=3, cpus_per_node=4, has=HAS) as box:
        site = Site(box, root)
        _prepare(site)
        rows = [list(family.faults()) for family in (ranks, limits, desk)]
        with ThreadPoolExecutor(len(rows)) as pool:
            ended = [held for row in pool.map(lambda row: _row(site, row), rows) for held in row]
        for fault in daemons.faults():
            site.heal()
            ended.append(_planted(site, fault))
        site.heal()
    return ended


@contextmanager
def _small(path: Path) -> Iterator[None]:
    """A file system that is soon full; mounted before the nodes start, which have mounts of their own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def _prepare(site: Site) -> None:
    stage = Stage(site, site.root / "finished", "finished", 300)
    stage.submit("--set", "measure.measured_steps=4", nodes="1")
    code, told = stage.waited()
    if code != 0:
        raise DidNotHoldError(f"a sound run fails here: {told[-500:]}")


def _row(site: Site, faults: list[Fault]) -> list[bool]:
    return [_planted(site, fault) for fault in faults]


def _planted(site: Site, fault: Fault) -> bool:
    """Whether it ended as it should; says so at once."""
    name = re.sub(r"[^a-z0-9]+", "-", fault.name.lower()).strip("-")[:40].strip("-")
    limit_s = _BUSY * fault.limit_s
    stage = Stage(site, site.root / name / "runs", name, limit_s)
    stage.prepare()
    stage.started = time.monotonic()
    held, line = True, ""
    try:
        line = fault.plant(stage)
        stage.require_kept()
    except DidNotHoldError as error:
        held, line = False, str(error)
    except Exception as error:  # the fault's own code must not end the others
        held, line = False, f"the fault itself failed: {type(error).__name__}: {error}"
    seconds = time.monotonic() - stage.started
    stage.clear()
    print(f"  {'ok' if held else 'NOT ok'}: {fault.name}: {seconds:.0f} s of {limit_s:.0f}: {line}", flush=True)
    return held
