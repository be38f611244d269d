"""`dlbench data` makes, converts and verifies data sets; `io` measures storage, readers, and the cost of input."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.cli.options import FILE, InOrder, require_room, value_option
from dlbench.cli.report import emit, require_modules
from dlbench.cli.streams import cleaned, terminal
from dlbench.errors import ExitCode, UserError
from dlbench.units import counted, format_bytes

if TYPE_CHECKING:
    from dlbench.datasets.making.catalogue import BuildPlan
    from dlbench.datasets.verification import DatasetCheck
    from dlbench.perfmodels.data_sheets import Demand
    from dlbench.report.document import Document
    from dlbench.specs.plan import RunPlan
    from dlbench.specs.requests import Request

_LINE_EVERY_S = 10.0
Meter = Callable[[str, int, int], None]
"""Reports progress: name of the task, number done, total; a new name begins a new task."""

_SEED = value_option("--seed", "N", "Seed of all random choices.", 0, type=click.IntRange(min=0))
_COUNT = click.IntRange(min=1)
WORKERS = value_option("--workers", "N", "Number of processes (default: one per core).", type=_COUNT)
DEFAULT_REPEATS = 3
DEFAULT_SECONDS = 5.0
MAX_SECONDS = 3600.0
MAX_REPEATS = 1000
_TIERS_OPTIONS = ("engine", "launcher", "ranks_per_node", "series", "out", "no_progress")
_READER_OPTIONS = ("seconds", "like", "rate")


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


def _above_zero(_ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1e15:
        raise UserError(f"{param.opts[0]} {value}: must be a number above zero")
    return value


@click.command()
@click.argument("workload")
@shared.PRESET
@shared.value_option("--data", "PATH", "Folder of the data set.")
@shared.value_option("--ranks", "1,2", "Rank counts: ranks that read (or train, with --tiers) at the same time.", "1")
@shared.value_option("--repeats", None, "Number of repeats of every measurement.", DEFAULT_REPEATS, type=int)
@shared.KEYS
@shared.SYSTEM
@click.option("--tiers", is_flag=True, help="Train with synthetic data, a warm and a cold page cache; report stalls.")
@shared.value_option(
    "--seconds",
    None,
    f"Without --tiers: seconds per repeat (default: {DEFAULT_SECONDS:g}).",
    type=float,
    callback=_above_zero,
)
@shared.value_option("--like", "RUN", "Without --tiers: compare with a rank of this run, instead of published rates.")
@shared.value_option(
    "--rate", None, "Without --tiers: compare with this rate, samples/s per GPU.", type=float, callback=_above_zero
)
@shared.value_option("--engine", "NAME", f"With --tiers: {shared.ENGINE_NAMES} (default: the workload's).")
@shared.value_option("--launcher", "NAME", "With --tiers: local, mpirun, srun-mpi, srun-gloo (default: the system's).")
@shared.value_option("--ranks-per-node", None, "With --tiers: ranks per node (default: the system's).", type=int)
@shared.value_option("--series", "NAME", "With --tiers: name of the series (default: time and a random suffix).")
@shared.output_folder()
@shared.DRY_RUN
@click.option("--no-progress", is_flag=True, help="With --tiers: print lines instead of a progress bar.")
@shared.AS_JSON
def io(workload: str, ranks: str, repeats: int, system: str, tiers: bool, as_json: bool, **options: Any) -> None:
    """Measure how fast storage and data loading feed WORKLOAD, and what input costs.

    By default nothing is trained: this node reads and prepares samples of --data, with a cold and with a warm page
    cache. The result is compared with the need of an H100, A100 or V100: how many of them can be fed.

    With --tiers the workload is trained with synthetic data, from the page cache and from cold storage, interleaved.
    The result is the maximum input rate (ingestion ceiling) and the preparation and fetch stalls per step.

    \b
    Examples:
      dlbench io resnet50 --data /scratch/imagenet --ranks 1,4
      dlbench io resnet50 --preset ci --data data/demo/images --tiers --repeats 5
    """
    if tiers:
        for option in shared.given_options(*_READER_OPTIONS):
            raise UserError(f"{option}: has no effect with --tiers")
    else:
        for option in shared.given_options(*_TIERS_OPTIONS):
            raise UserError(f"{option}: needs --tiers: without it nothing is trained or stored (use --json > FILE)")
    if options["like"] is not None and options["rate"] is not None:
        raise UserError("--like and --rate exclude each other: both set the required rate")
    if options["seconds"] is not None and options["seconds"] > MAX_SECONDS:
        raise UserError(f"--seconds {options['seconds']:g}: must be at most {MAX_SECONDS:g}")
    if not 1 <= repeats <= MAX_REPEATS:
        raise UserError(f"--repeats {repeats}: must be from 1 to {MAX_REPEATS}")
    request = _request(workload, ranks, repeats, system, tiers, options)
    if tiers:
        code = _tiers(request, options, as_json=as_json)
        sys.exit(code)
    _readers(request, repeats, options, as_json=as_json)


def _request(workload: str, ranks: str, repeats: int, system: str, tiers: bool, options: dict[str, Any]) -> Request:
    from dlbench.specs.requests import Request, parse_counts, parse_set

    per_node = options["ranks_per_node"]
    if per_node is not None and per_node < 1:
        raise UserError(f"--ranks-per-node {per_node}: must be 1 or more")
    return Request(
        workload=workload,
        system=system,
        points=parse_counts(ranks, "--ranks"),
        repeats=repeats if tiers else 1,
        overrides=parse_set(options["overrides"]),
        tiers=tiers,
        **{name: options[name] for name in ("preset", "engine", "data", "ranks_per_node", "launcher", "series")},
    )


def _tiers(request: Request, options: dict[str, Any], *, as_json: bool) -> int:
    from dlbench.cli.run import print_commands, require_here, run_all, runs_found, shown

    plans = shared.expand_request(request)
    for system in shared.systems_of(plans):
        require_here(system)
    require_room(plans)
    shared.require_data(plans)
    if options["dry_run"]:
        print_commands(plans, options["out"])
        return 0
    require_modules("io --tiers", "numpy")
    shared.require_ranks_needs(plans)
    next_command = f"dlbench report {shown(options['out'])} -o report.html"
    bar = sys.stderr.isatty() and not options["no_progress"]
    code = run_all(plans, options["out"], fail_fast=False, bar=bar, next_command=next_command)
    from dlbench.views.stalls import stalls, stalls_document

    document = stalls_document(stalls(runs_found(plans, options["out"]).runs))
    emit(document, "json" if as_json else "text", None)
    return int(code)


def _readers(request: Request, repeats: int, options: dict[str, Any], *, as_json: bool) -> None:
    plans = shared.expand_request(request, trains=False)
    first = plans[0]
    if first.workload.data.is_synthetic:
        raise UserError("io: synthetic data is not read from storage: give --data PATH")
    if "data.cache" in request.overrides:
        raise UserError("--set data.cache: has no effect; io measures a cold and a warm cache")
    shared.require_data(plans)
    demands = _demands(first, options)
    seconds = options["seconds"] or DEFAULT_SECONDS
    orders = [_order(plan, cache, seconds, repeats) for plan, cache in itertools.product(plans, ("cold", "warm"))]
    if options["dry_run"]:
        from dlbench.jobs.node_program import READING, supervised
        from dlbench.jobs.scripts.containers import quoted

        for order in orders:
            click.echo(f"# {order['processes']} ranks read, page cache {order['data']['cache']}; standard input:")
            click.echo(f"# {json.dumps(order)}")
            click.echo(quoted(supervised(sys.executable, READING)).encode())
        return
    require_modules("io", "numpy")
    shared.require_torch(first.system)
    emit(_measured(first, orders, demands), "json" if as_json else "text", None)


def _order(plan: RunPlan, cache: str, seconds: float, repeats: int) -> dict[str, Any]:
    """Returns the request to the reader process, see `dlbench.node.data.reader_rate`."""
    workload = plan.workload.model_dump(mode="json")
    return {
        "model": workload["model"],
        "data": {**workload["data"], "source": str(Path(plan.workload.data.source).absolute()), "cache": cache},
        "seed": plan.workload.train.seed,
        "batch": plan.workload.train.batch_per_rank,
        "processes": plan.layout.ranks,
        "cores_per_process": plan.layout.cores_per_rank,
        "seconds": seconds,
        "repeats": repeats,
    }


def _measured(plan: RunPlan, orders: list[dict[str, Any]], demands: tuple[Demand, ...]) -> Document:
    from dlbench.jobs.node_program import READING, answer_of, supervised
    from dlbench.jobs.processes import interrupted_by_signals
    from dlbench.records.data_path import ReadingRate
    from dlbench.views.storage import Io, io_document, need_of, supply_of

    answers = []
    command = supervised(plan.system.python or sys.executable, READING)
    with interrupted_by_signals():
        for number, order in enumerate(orders, 1):
            cache = order["data"]["cache"]
            ranks = counted(order["processes"], "rank")
            click.echo(f"[{number}/{len(orders)}] reading, {ranks}, page cache {cache}", err=True)
            answers.append(answer_of(command, order, ReadingRate, "the readers' process"))
    supplies = tuple(map(supply_of, answers))
    return io_document(
        Io(
            workload=plan.workload.name,
            preset=plan.workload.preset,
            source=plan.workload.data.source,
            kind=answers[0].kind,
            num_samples=answers[0].num_samples,
            sample_unit=plan.workload.sample_unit,
            host=socket.gethostname(),
            supplies=supplies,
            needs=tuple(need_of(demand, supplies) for demand in demands),
        )
    )


def _demands(plan: RunPlan, options: dict[str, Any]) -> tuple[Demand, ...]:
    from dlbench.perfmodels.data_sheets import Demand, published_demands

    if options["rate"] is not None:
        return (Demand(accelerator="accelerator", samples_per_s=options["rate"], source="--rate"),)
    if options["like"] is None:
        return published_demands(plan.workload.model.family)
    from dlbench.records.scan import read_run

    path = Path(options["like"])
    if not path.is_dir():
        raise UserError(f"--like {options['like']}: no such folder; give a run's folder")
    run = read_run(path)
    record = run.record
    if record is None or run.state != "valid":
        raise UserError(f"--like {options['like']}: the run is {run.state} and has no figures")
    if run.plan.workload.model.family != plan.workload.model.family:
        raise UserError(
            f"--like {options['like']}: is a run of {run.plan.workload.name}, not of {plan.workload.name}; their rates "
            "cannot be compared"
        )
    longest = max(rank.measured_s for rank in record.ranks)
    samples = sum(rank.samples for rank in record.ranks)
    if not longest or not samples:
        raise UserError(f"--like {options['like']}: the run measured no samples")
    source = f"measured by run {run.plan.run_id} on {record.ranks[0].device}"
    if not run.plan.workload.data.is_synthetic:
        source += "; it read real data: a run with --data synthetic never waits"
    rate = samples / longest / len(record.ranks)
    return (Demand(accelerator="rank of that run", samples_per_s=rate, source=source),)
