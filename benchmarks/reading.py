"""What reading costs: time and memory of the page of few, of many and of large runs, its size, and how fast it opens.

A page is made as a user makes it, `dlbench report RUNS -o report.html`, in a process of its own; the runs were just
written, so they come from memory and not from the disk. Parts: `reading.few`, `reading.many`, `reading.large`,
`reading.wide`, `reading.history`; `reading.rows` reads the rows of a run beside Parquet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, timed
from dlbench.history.history import INDEX, Index, Store
from dlbench.history.importing import VERSION, make_entries
from dlbench.records.folder import RunFolder
from dlbench.records.rows.reader import read_columns
from dlbench.records.rows.shared import read_parts
from dlbench.records.rows.steps import FIELDS, StepReader
from tests.support.browser import FLAGS
from tests.support.run_factory import MS, NOW, StepTimes, Story, plans, write_run
from tests.support.watch_factory import large_run, large_runs, wide_run

RANKS, STEPS, LARGE_RUNS = 1024, 1000, 20
WIDE_RANKS = 16_384
HISTORY_RUNS = 100_000
SMALL_STEPS = 100
LOADS = 7
PARQUET_RATIO, COLUMNS = 1.2, [name for name, _ in FIELDS]

# Sets a mark when the first chart answers the pointer; charts out of sight wait, so the first is brought into sight.
FIRST_LIVE = """
document.addEventListener("DOMContentLoaded", () => document.querySelector("figure[data-chart]")?.scrollIntoView());
new MutationObserver((_, self) => {
  if (document.querySelector("figure.is-live")) { window.firstLive = performance.now(); self.disconnect(); }
}).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["class"] });
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs of one size, and what is wanted of their page."""

    name: str
    write: Callable[[Path], None]
    repeats: int
    seconds: float | None = None
    memory_mb: float | None = None
    page_mb: float | None = None
    command: tuple[str, ...] = ("report",)  # Of dlbench, before the folder.
    is_opened: bool = True  # Whether a browser opens the page.


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    for part in (few, many, large, wide, history, rows):
        yield from part()


def few() -> Iterator[Figure]:
    """Twenty small runs."""
    yield from _measured(Part(name="20 runs", write=lambda out: write_small(out, 20), repeats=7))


def many() -> Iterator[Figure]:
    """Two thousand small runs: two hundred nights of one series."""
    yield from _measured(Part(name="2,000 runs", write=lambda out: write_small(out, 2000), repeats=3))


def large() -> Iterator[Figure]:
    """Twenty runs of a million steps, and five of eight ranks as their baseline."""
    yield from _measured(
        Part(
            name=f"{LARGE_RUNS} runs of {RANKS:,} ranks x {STEPS:,} steps",
            write=write_large,
            repeats=3,
            seconds=10,
            memory_mb=400,
            page_mb=5,
        )
    )


def wide() -> Iterator[Figure]:
    """One run of many ranks."""
    name = f"one run of {WIDE_RANKS:,} ranks x {STEPS:,} steps"
    yield from _measured(Part(name=name, write=write_wide, repeats=1, seconds=60, is_opened=False))


def history() -> Iterator[Figure]:
    """Years of nights in a history whose index is made."""
    command = ("history", "trends", "--store")
    name = f"a history of {HISTORY_RUNS:,} runs"
    yield from _measured(Part(name=name, write=write_history, repeats=3, seconds=10, command=command, is_opened=False))


def rows() -> Iterator[Figure]:
    """All columns of a large run over the same rows as Parquet, each reading in a process of its own."""
    name = f"reading all columns of a run of {RANKS:,} ranks x {STEPS:,} steps, over pyarrow's Parquet LZ4: CPU"
    goal = f"at most {PARQUET_RATIO}"
    if find_spec("pyarrow") is None:
        yield Figure(name=name, value=None, unit="x", goal=goal, reason="pyarrow is not installed")
        return
    ratios: dict[str, list[float]] = {"first reading of a process": [], "third reading": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = large_run(Path(temporary), ranks=RANKS, steps=STEPS).path
        parquet = Path(temporary) / "rows.parquet"
        pyarrow_parquet = import_module("pyarrow.parquet")
        columns = {name: np.concatenate([part[name].ravel() for part in read_rows(folder)]) for name in COLUMNS}
        pyarrow_parquet.write_table(import_module("pyarrow").table(columns), parquet, compression="lz4")
        for _ in range(7):
            ours, theirs = (_cpu_of_readings(path) for path in (folder, parquet))
            for values, own, other in zip(ratios.values(), ours[::2], theirs[::2], strict=True):
                values.append(own / other)
    for which, values in ratios.items():
        figure = Figure.of(values, name=f"{name}, {which}", unit="x", goal=goal)
        if figure.low is not None and figure.high is not None:
            is_open = figure.low <= PARQUET_RATIO < figure.high
            figure = replace(figure, met=None if is_open else figure.high <= PARQUET_RATIO)
        yield figure


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All columns of all ranks, by node."""
    parts = ((path, read_parts(path).values()) for path in sorted(folder.glob("*.steps")))
    return [read_columns([StepReader(path, part) for part in of_node], COLUMNS) for path, of_node in parts]


def _cpu_of_readings(path: Path) -> list[float]:
    """CPU seconds of three readings, one after the other, in a process that has imported what reads."""
    read = "pyarrow.parquet.read_table(path, use_threads=False)" if path.is_file() else "reading.read_rows(path)"
    lines = ["import sys, time, pathlib, numpy", "from benchmarks import reading", "path = pathlib.Path(sys.argv[1])"]
    lines += ["import pyarrow.parquet, pyarrow.dataset"] * path.is_file()
    lines += ["begin = time.process_time()", f"columns = {read}", "print(time.process_time() - begin)", "del columns"]
    program = "\n".join([*lines, *lines[-4:] * 2])
    return [float(line) for line in subprocess.check_output([sys.executable, "-c", program, str(path)]).split()]


def write_small(out: Path, count: int) -> None:
    """Series of 1 and 2 ranks with 5 repeats each, one a night: runs scatter by 2 %, steps by 5 %."""
    rng = np.random.default_rng(6)
    for number in range(0, count, 10):
        night = f"night{number // 10:03d}"
        for plan in plans(series=night, repeats=5, overrides={"measure.measured_steps": SMALL_STEPS}):
            finished = NOW + timedelta(days=number // 10, minutes=plan.series.position)
            write_run(out, plan, _times(rng, plan.layout.ranks), Story(finished=finished))


def _times(rng: np.random.Generator, ranks: int) -> StepTimes:
    run = rng.lognormal(0, 0.02)
    exchange = 20.0 if ranks > 1 else 0.0

    def of(rank: int, step: int) -> tuple[Sequence[int], int]:
        scatter = run * rng.lognormal(0, 0.05)
        times = (5.0, 0.0, 30.0, 45.0, exchange, 10.0)
        return [round(scatter * value * MS) for value in times], round(5 * scatter * MS)

    return of


def write_large(out: Path) -> None:
    """Every file that watching leaves is there."""
    large_runs(out, ranks=8, steps=STEPS, runs=5)
    large_runs(out, ranks=RANKS, steps=STEPS, runs=LARGE_RUNS)


def write_wide(out: Path) -> None:
    """The times of a run of `RANKS` ranks again and again: made anew they would take longer than all that is read."""
    with tempfile.TemporaryDirectory() as temporary:
        wide_run(out, large_run(Path(temporary), ranks=RANKS, steps=STEPS), WIDE_RANKS)


def write_history(out: Path) -> None:
    """Two configurations at four rank counts, five repeats, three nights a day; folders are empty, the index whole."""
    rng, start = np.random.default_rng(6), datetime(2024, 1, 1, tzinfo=UTC)
    store, rows = Store.at(out, create=True), {}
    with tempfile.TemporaryDirectory() as temporary:
        for plan in plans(points=(1, 2, 4, 8), repeats=5):
            write_run(Path(temporary), plan, _times(rng, plan.layout.ranks), Story(finished=NOW))
        made = make_entries([RunFolder(path) for path in sorted(Path(temporary).iterdir())])
    for number in range(HISTORY_RUNS):
        night, place = divmod(number, 2 * len(made))
        like, created = made[place % len(made)], start + timedelta(hours=8 * night)
        name, factor = f"n{night:05d}-{place:02d}", float(rng.lognormal(0, 0.02))
        folder = store.place_of(name, created.isoformat())
        (out / folder).mkdir(parents=True)
        entry = replace(
            like,
            run_id=name,
            folder=folder,
            series=f"n{night:05d}",
            created=f"{created:%Y-%m-%dT%H:%M:%SZ}",
            finished=f"{created + timedelta(minutes=place + 1):%Y-%m-%dT%H:%M:%SZ}",
            group=f"{like.group}{place // len(made)}",
            figures={metric: value * factor for metric, value in like.figures.items()},
        )
        rows[folder] = ((out / folder).stat().st_mtime_ns, entry)
    Index(out / INDEX, VERSION).write(rows, rows)


def _measured(part: Part) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as temporary:
        runs, page = Path(temporary) / "runs", Path(temporary) / "report.html"
        runs.mkdir()
        part.write(runs)
        taken = [timed(*part.command, str(runs), "-o", str(page)) for _ in range(part.repeats)]
        seconds, peaks, spent = zip(*taken, strict=True)
        cores = f"range; {len(os.sched_getaffinity(0))} usable cores"
        yield _figure(f"page of {part.name}: time to render", seconds, "s", part.seconds, cores)
        yield _figure(f"page of {part.name}: CPU time", spent, "s", None, "range; of all processes")
        memory = "range; sum over all processes, what they share is counted for each"
        yield _figure(f"page of {part.name}: peak memory", [peak / 1e6 for peak in peaks], "MB", part.memory_mb, memory)
        yield _figure(f"page of {part.name}: size", [page.stat().st_size / 1e6], "MB", part.page_mb, "")
        if part.is_opened:
            yield from _opened(part, page)


def _figure(name: str, values: Sequence[float], unit: str, most: float | None, reason: str) -> Figure:
    """The median with its interval, which is the range of up to eight values."""
    if most is None:
        return Figure.of(values, name=name, unit=unit, goal="measured", reason=reason)
    goal = f"below {most:g} {unit}"
    return Figure.of(values, name=name, unit=unit, goal=goal, met=lambda it: it.value < most, reason=reason)


def _opened(part: Part, page: Path) -> Iterator[Figure]:
    """From the navigation to the load event, and to the first chart that answers the pointer."""
    names = {"load event": "load event in headless Chromium", "first live": "first live chart in headless Chromium"}
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None or find_spec("playwright") is None:
        reason = "no Chromium on PATH" if program is None else "playwright is not installed"
        for name in names.values():
            yield Figure(name=f"page of {part.name}: {name}", value=None, unit="s", goal="measured", reason=reason)
        return
    from playwright.sync_api import sync_playwright

    loads: list[float] = []
    lives: list[float] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        version = browser.version
        for _ in range(LOADS + 1):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.add_init_script(FIRST_LIVE)
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_function("() => window.firstLive !== undefined", timeout=60_000)
            loads.append(tab.evaluate("() => performance.getEntriesByType('navigation')[0].loadEventEnd") / 1e3)
            lives.append(tab.evaluate("() => window.firstLive") / 1e3)
            context.close()
        browser.close()
    # The first visit also starts the browser's own processes.
    for name, values in zip(names.values(), (loads[1:], lives[1:]), strict=True):
        yield _figure(f"page of {part.name}: {name}", values, "s", None, f"range; Chromium {version}")
