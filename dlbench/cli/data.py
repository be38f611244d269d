"""`dlbench data`: makes, converts and verifies data sets."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.options import FILE, InOrder, value_option
from dlbench.cli.streams import cleaned, terminal
from dlbench.errors import ExitCode, UserError
from dlbench.units import counted, format_bytes

if TYPE_CHECKING:
    from dlbench.datasets.making.catalogue import BuildPlan
    from dlbench.datasets.verification import DatasetCheck

_LINE_EVERY_S = 10.0
Meter = Callable[[str, int, int], None]
"""Reports progress: name of the task, number done, total; a new name begins a new task."""
_SEED = value_option("--seed", "N", "Seed of all random choices.", 0, type=click.IntRange(min=0))
_COUNT = click.IntRange(min=1)
WORKERS = value_option("--workers", "N", "Number of processes (default: one per core).", type=_COUNT)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def meter() -> Iterator[Meter]:
    """Yields a function that shows progress on standard error; SIGTERM and SIGHUP act like Ctrl-C meanwhile."""
    from dlbench.jobs.processes import interrupted_by_signals

    with interrupted_by_signals():
        if not sys.stderr.isatty():
            told_s = time.monotonic()

            def say(task: str, done: int, total: int) -> None:
                nonlocal told_s
                if time.monotonic() - told_s >= _LINE_EVERY_S:
                    told_s = time.monotonic()
                    click.echo(f"{task}: {done:,} of {total:,}", err=True)

            yield say
            return
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=terminal(), refresh_per_second=2) as progress:
            tasks: dict[str, Any] = {}

            def report(task: str, done: int, total: int) -> None:
                if task not in tasks:
                    tasks[task] = progress.add_task(escape(cleaned(task)), total=total)
                progress.update(tasks[task], completed=done)

            yield report


@click.command()
@click.argument("folder", type=FILE)
@_SEED
def demo(folder: Path, seed: int) -> None:
    """Make a small real data set for each workload in FOLDER.

    Images are crops of photographs of scikit-image and scikit-learn, text is Python's documentation, and volumes are
    log-normal random fields. Existing data is kept. Prints the three paths, for --data.

    \b
    Example:
      dlbench data demo data/demo
    """
    from dlbench.datasets.making.catalogue import prepare_demo_data

    folder_by_workload = prepare_demo_data(
        folder, seed=seed, workers=min(4, available_cores()), progress=lambda line: click.echo(line, err=True)
    )
    for path in folder_by_workload.values():
        click.echo(path)


@click.command()
@click.argument("kind", metavar="images|text|density")
@click.argument("folder", type=FILE)
@value_option("--samples", "N", "Number of training images or volumes.", type=_COUNT)
@value_option("--validation", "N", "Validation samples (default: a tenth of --samples).", type=click.IntRange(min=0))
@value_option("--size", "SIZE", "Image size in pixels (default: 500x375), or edge length of volumes (default: 128).")
@value_option("--classes", "N", "Number of image classes, 2 to 10 (default: 10).", type=_COUNT)
@value_option("--container", "NAME", "density: file format, hdf5 or tfrecord (default: hdf5).")
@value_option("--samples-per-file", "N", "density: number of volumes per file.", type=_COUNT)
@_SEED
@WORKERS
def make(kind: str, folder: Path, workers: int | None, **request: Any) -> None:
    """Make a data set in FOLDER, without a download.

    Images are crops of photographs with added grain, as large as ImageNet's files. Text is Python's documentation (1.5
    MB). Volumes are log-normal random fields. If interrupted, the same command continues.

    \b
    Example:
      dlbench data make images /scratch/images --samples 100000
      dlbench data make density /scratch/volumes --samples 1024 --size 128
    """
    from dlbench.datasets.making.catalogue import DatasetRequest, plan_build

    build = plan_build(kind, DatasetRequest(**request))
    manufacture(build, folder, workers)


def manufacture(build: BuildPlan, folder: Path, workers: int | None) -> None:
    """Makes a data set; prints its path on standard output and a summary on standard error."""
    from dlbench.datasets.making.production import produce

    remarks = iter(build.remarks)  # printed when work begins, so that an error before stays a single line
    workers = workers or build.most_workers or available_cores()
    begun = False
    with meter() as report:

        def progress(done: int, total: int, _num_bytes: int) -> None:
            nonlocal begun
            _remark(remarks)
            if done and not begun:
                click.echo(f"{build.unit}: {done:,} of {total:,} exist already", err=True)
            begun = True
            report(build.unit, done, total)

        try:
            manifest = produce(build.recipe, folder, workers=workers, progress=progress)
        except KeyboardInterrupt:
            click.echo(f"{folder}: not finished; the same command continues", err=True)
            raise
    _remark(remarks)
    click.echo(folder)
    counts = " and ".join(f"{num:,} {build.unit} in {split}" for split, num in manifest.counts.items())
    text = f"{counts}; {format_bytes(manifest.num_bytes)} in {manifest.num_files:,} files"
    click.echo(text, err=True)


@click.command()
@click.argument("source", type=FILE)
@value_option("--vocabulary", "NAME|FILE", "Check text or BERT samples against this vocabulary.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@WORKERS
def verify(source: Path, vocabulary: str | None, as_json: bool, workers: int | None) -> None:
    """Read a whole data set and list every bad file.

    Compares files with the manifest's checksums, decodes every image, reads every sample, and reports whether this is
    the complete public data set (ImageNet-2012, cosmoUniverse). Exits with 4 if a file is bad.

    \b
    Example:
      dlbench data verify /scratch/imagenet-shards
    """
    from dlbench.datasets import verification

    with meter() as report:
        verdict = verification.verify(
            source, vocabulary=vocabulary, workers=workers or available_cores(), progress=report
        )
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        from dlbench.report.wording import clean

        for line in verdict.faults:
            click.echo(clean(line))
        for line in (*verdict.remarks, *summary(verdict)):
            click.echo(clean(line), err=True)
    if verdict.faults:
        sys.exit(int(ExitCode.INCOMPLETE))


def summary(verdict: DatasetCheck) -> list[str]:
    """Returns the summary of a check, without the list of bad files."""
    from dlbench.datasets.kinds import KINDS

    counts = ", ".join(f"{num:,} in {split}" for split, num in verdict.samples.items())
    checksums = {"none": "no manifest", "whole": "all checksums agree", "altered": "checksums differ"}
    lines = [f"{verdict.source}: {', '.join(filter(None, (KINDS[verdict.kind].title, counts)))}"]
    if verdict.account is not None:
        lines.append(verdict.account.line())
    if verdict.public_set is not None:
        if verdict.lacking or verdict.faults:
            lines += [f"not the complete {verdict.public_set}: {line}" for line in verdict.lacking or ["see above"]]
        else:
            lines.append(f"by its counts the complete {verdict.public_set}")
    result = f"{counted(len(verdict.faults), 'bad file')}, listed above" if verdict.faults else "all files are good"
    lines.append(f"{result} ({checksums[verdict.manifest]})")
    return lines


def _remark(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(cleaned(line), err=True)


@click.command(short_help="Pack images into tar shards: few large files.")
@click.argument("source", type=FILE)
@click.argument("folder", type=FILE)
@value_option("--samples-per-shard", "N", "Number of images per shard.", 1252, type=_COUNT)
@_SEED
@WORKERS
def pack(source: Path, folder: Path, workers: int | None, **choices: Any) -> None:
    """Pack images into tar shards: few large files instead of many small ones.

    SOURCE is a tree <class>/<image>.jpg or a folder of shards, with subfolders train and validation if it has both.
    Encoded images are copied unchanged, classes mixed, as webdataset reads them. If interrupted, repeat the command.

    \b
    Example:
      dlbench data pack /data/imagenet /scratch/imagenet-shards
    """
    from dlbench.datasets.making.catalogue import packing

    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")
    manufacture(packing(source, **choices), folder, workers)


@click.group(cls=InOrder)
def data() -> None:
    """Make, pack and verify data sets."""


for command in (demo, make, pack, verify):
    data.add_command(command)
