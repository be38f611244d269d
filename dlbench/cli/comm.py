"""`dlbench comm`: runs the collective benchmark, reports it, fits network costs and predicts."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from dlbench.cli import options as shared
from dlbench.cli.options import FILE, F, InOrder, decorated, require_room, size_in_bytes, value_option
from dlbench.cli.report import (
    FormatName,
    check_writable,
    emit,
    finish,
    named,
    note_counts,
    prepared,
    read_comm_runs,
    report_options,
    require_modules,
    runs_argument,
    where_option,
)
from dlbench.errors import ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.comm.fits import NetworkFit
    from dlbench.specs.base import Precision
    from dlbench.specs.comm import Collective
    from dlbench.specs.expand import CommRuns

TABLES = ("points", "pairs", "costs", "fits", "runs")
SIZES = value_option(
    "--sizes",
    "LOW:HIGH[:COUNT]|A,B",
    "Buffer sizes per rank; a range LOW:HIGH is stepped by factors of 4; LOW:HIGH:COUNT has COUNT sizes.",
    "1KiB:64MiB",
)
SHARDS = value_option("--shards", "K", "Servers of parameter-server (default: every rank).", type=int)


@click.command(short_help="Report collective benchmark runs: rates, algorithms, costs.")
@report_options
@value_option("--table", None, "Table to write as CSV (default: points).", type=click.Choice(TABLES))
def report(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
    table: str | None,
) -> None:
    """Write a report of the collective benchmark runs in RUNS: rates, best algorithm, fitted costs.

    Training runs in the same folders are ignored. Exits with 4 if a file is damaged or no run has figures; the rest is
    reported anyway.

    \b
    Example:
      dlbench comm report runs --format csv --table costs > costs.csv
    """
    chosen = prepared("comm report", output, format_name, table=table, needs=("numpy",))
    from dlbench.comm.document import document_of
    from dlbench.comm.report import assemble

    comm_report = assemble(read_comm_runs(runs, where))
    emit(document_of(comm_report), chosen, output, table or "points", full=full)
    note_counts(output, comm_report)
    problem = f"{named(runs)}: no run of the collective benchmark has figures; the report says why"
    finish(comm_report.damaged, problem, unless=comm_report.groups or comm_report.pairs)


@click.command(short_help="Fit message costs (alpha, beta, gamma) to runs.")
@runs_argument()
@where_option("--where", "runs")
@value_option("-o --output", "FILE.network.json", "File to write.", type=FILE)
@value_option("--system", "NAME", "System to fit, if RUNS contains several.")
@value_option("--transport", "NAME", "Transport to fit, if RUNS contains several.")
@value_option("--dtype", "NAME", "Element type to fit (default: fp32, if it was measured).")
@value_option(
    "--of fitted_to",
    None,
    "Time of a point: median over runs, or minimum of all iterations, which leaves out congestion.",
    "median",
    type=click.Choice(["median", "minimum"]),
)
def fit(runs: tuple[Path, ...], where: tuple[str, ...], output: Path | None, **chosen: Any) -> None:
    """Fit the message costs alpha and beta of each level, and gamma, to the runs in RUNS.

    alpha is the start-up time of a message, beta its time per byte, gamma the time to add a byte. Training
    (sync.network) and `dlbench comm predict` read the file. Exits with 4 if no run has figures, or too few for a fit.

    \b
    Example:
      dlbench comm fit runs --system box --transport torch-gloo -o box.network.json
    """
    check_writable(output)
    require_modules("comm fit", "numpy", "scipy")
    from dlbench.comm.fits import fit_one
    from dlbench.comm.measurements import tabulate
    from dlbench.units import utc_now

    table = tabulate(read_comm_runs(runs, where))
    for line in table.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    network_fit = fit_one(table, fitted=utc_now(), where=named(runs), **chosen)
    _show_fit(network_fit, output)
    if table.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))


def _show_fit(network_fit: NetworkFit, output: Path | None) -> None:
    from dlbench.comm.document import fit_document

    emit(fit_document(network_fit), "text", None, full=True)
    network = network_fit.network
    if output is not None:
        shared.write_output((network.model_dump_json(indent=2) + "\n").encode("utf-8"), output)
        click.echo(f"{output}: {network.num_points} points, {len(network.collectives)} lines", err=True)


@click.command("import", short_help="Fit network costs to output of nccl-tests or OSU benchmarks.")
@click.argument("files", nargs=-1, required=True, type=FILE)
@value_option("--system", "NAME", "Name of the measured system.", required=True)
@value_option("-o --output", "FILE.network.json", "File to write.", type=FILE)
@value_option("--ranks", "N", "Rank count of outputs without one: for all, or per file.", type=int, multiple=True)
@value_option("--group-size", "N", "Ranks per node of outputs that do not name hosts.", type=int)
@value_option(
    "--level levels",
    None,
    "Position of the two ranks of osu_latency and osu_bw: inside a node, across nodes, or beyond a leaf switch.",
    type=click.Choice(["inside", "across", "beyond"]),
    multiple=True,
)
@value_option("--collective", "NAME", "Collective of nccl-tests outputs that do not name it.")
@value_option("--type dtype", "NAME", "Data type to fit, if an output contains several, e.g. float.")
@value_option("--op", "NAME", "Reduction operation to fit, if an output contains several, e.g. sum.")
def import_(files: tuple[Path, ...], system: str, output: Path | None, **unsaid: Any) -> None:
    """Fit network costs to FILES, which contain the output of nccl-tests or of OSU's micro-benchmarks.

    Each collective and rank count gets a fitted line. With several rank counts, message costs are fitted too, for the
    algorithm that fits best. Outputs of equal layouts, and cycles, are repeats; three or more give intervals.

    \b
    Examples:
      dlbench comm import nccl-8.txt nccl-16.txt --system dgx -o dgx.network.json
      dlbench comm import lat.txt bw.txt --level across --system big -o big.network.json
    """
    check_writable(output)
    require_modules("comm import", "numpy", "scipy")
    from dlbench.comm.imports import ImportOptions, import_tables
    from dlbench.specs.comm import ALGORITHMS
    from dlbench.units import utc_now

    if unsaid["collective"] is not None:
        _require_known("--collective", unsaid["collective"], ALGORITHMS)
    for count in unsaid["ranks"]:
        _require_counts({"ranks": count}, "ranks")
    _require_counts(unsaid, "group_size")
    network_fit = import_tables(files, system=system, fitted=utc_now(), options=ImportOptions(**unsaid))
    _show_fit(network_fit, output)


def _require_known(option: str, name: str, valid_names: Collection[str]) -> None:
    if name not in valid_names:
        raise UserError(f"{option}: unknown name {name!r}: {nearest(name, valid_names)}")


def _require_counts(options: Mapping[str, Any], *names: str) -> None:
    for name in names:
        minimum = 0 if name == "warmup" else 1
        if options[name] is not None and options[name] < minimum:
            raise UserError(f"--{name.replace('_', '-')} {options[name]}: must be {minimum} or more")


@click.command("table", short_help="Print steps, volume and predicted time of each algorithm.")
@click.argument("network", type=FILE, required=False)
@value_option("--ranks", "8,64", "Rank counts.", "8")
@value_option("--group-size", "N", "Ranks per group, e.g. per node (default: one group).", type=int)
@value_option("--size", "BYTES", "Buffer size per rank.", "64MiB", callback=size_in_bytes)
@value_option("--collective", "NAME", "Collective.", "allreduce")
@SHARDS
def table_(
    network: Path | None, ranks: str, group_size: int | None, size: int, collective: str, shards: int | None
) -> None:
    """Print the cost of each algorithm: steps, volume, predicted time, and ratio to the ideal time.

    Times are predicted from NETWORK, a file of fitted costs; without it, only steps and volume are printed. `dlbench
    comm report` prints the same table with measured times.

    \b
    Example:
      dlbench comm table box.network.json --ranks 8,64 --group-size 4 --size 100MB
    """
    require_modules("comm table", "numpy", "scipy")
    from dlbench.comm.costs import cost
    from dlbench.comm.document import costs_document
    from dlbench.comm.predictions import PredictionRequest, layout_asked, permitted
    from dlbench.comm.wording import COLLECTIVE_TITLES
    from dlbench.records.comm import read_network
    from dlbench.specs.comm import ALGORITHMS
    from dlbench.specs.requests import parse_counts

    _require_known("--collective", collective, ALGORITHMS)
    _require_counts({"group_size": group_size, "shards": shards}, "group_size", "shards")
    if network is not None and network.is_dir():
        raise UserError(f"{network}: is a folder; `dlbench comm report RUNS --full` prints the costs of runs")
    fitted = None if network is None else read_network(network)
    request = PredictionRequest(collective=cast("Collective", collective), sizes=(size,), group_size=group_size)
    tables = {}
    for count in parse_counts(ranks, "--ranks"):
        layout = layout_asked(count, request)
        title = f"{count} ranks"
        if layout.num_groups > 1:
            title += f" in {layout.num_groups} groups of {layout.group_size}"
        tables[title] = [
            cost(request.collective, name, layout, size, "fp32", fitted, shards) for name in permitted(request, layout)
        ]
    emit(costs_document(f"Cost of {COLLECTIVE_TITLES[collective]}", tables, size), "text", None)


@click.command(short_help="Predict the time of collectives from fitted costs.")
@click.argument("network", type=FILE, required=False)
@value_option("--topology", "FILE", "Topology (YAML) to predict from, instead of NETWORK.", type=FILE)
@value_option("--ranks", "8,64", "Rank counts to predict for.", required=True)
@value_option("--group-size", "N", "Ranks per group, e.g. per node (default: one group).", type=int)
@value_option("--leaf-size", "N", "Ranks per leaf switch (default: all on one switch).", type=int)
@SIZES
@value_option("--collective", "NAME", "Collective.", "allreduce")
@value_option("--algorithms", "A,B", "Algorithms of dlbench (default: all that support the layout).")
@value_option("--dtype", "NAME", "Element type: fp32, fp16 or bf16.", "fp32")
@SHARDS
@value_option(
    "--workload-bytes",
    "BYTES",
    "Gradient size of a training step, e.g. 94MB: also predict its exchange time and message sizes.",
    callback=size_in_bytes,
)
@value_option("--format format_name", None, "Output format.", "text", type=click.Choice(["text", "json"]))
@click.option("--full", is_flag=True, help="Print every algorithm as text (default: the fastest per size).")
def predict(
    network: Path | None,
    topology: Path | None,
    ranks: str,
    sizes: str,
    algorithms: str | None,
    dtype: str,
    format_name: Literal["text", "json"],
    full: bool,
    **options: Any,
) -> None:
    """Predict the time of collectives from NETWORK, a file of fitted costs.

    Ranks, groups and sizes outside the fitted range are marked as extrapolated, with the error that a fit without the
    largest rank count has there. Libraries are only predicted at measured rank counts. With `--algorithms
    dedicated-servers`, the last ranks (--shards, default 1) are parameter servers that do not train.

    \b
    Examples:
      dlbench comm predict box.network.json --ranks 16 --group-size 4 --workload-bytes 94MB
      dlbench comm predict --topology fat-tree.yaml --ranks 64 --sizes 1MiB:64MiB
    """
    require_modules("comm predict", "numpy", "scipy")
    from dlbench.comm.prediction_page import predictions_document
    from dlbench.comm.predictions import CABLES, PredictionRequest, predict_all
    from dlbench.perfmodels.topology import read_topology
    from dlbench.records.comm import read_network
    from dlbench.specs.comm import ALGORITHMS, ELEMENT_BYTES, NetworkModel
    from dlbench.specs.requests import parse_counts, parse_sizes

    if (network is None) == (topology is None):
        raise UserError("give either a file NETWORK of fitted costs, or --topology FILE")
    if topology is not None and options["leaf_size"] is not None:
        raise UserError("--leaf-size has no effect with --topology, which defines the leaf switches")
    _require_known("--collective", options["collective"], ALGORITHMS)
    _require_known("--dtype", dtype, ELEMENT_BYTES)
    precision = cast("Precision", dtype)
    _require_counts(options, "group_size", "leaf_size", "shards")
    counts = parse_counts(ranks, "--ranks")
    request = PredictionRequest(
        algorithms=tuple(algorithms.split(",") if algorithms else ()),
        sizes=parse_sizes(sizes, precision),
        dtype=precision,
        topology=None if topology is None else read_topology(topology),
        **options,
    )
    if network is not None:
        costs = read_network(network)
    else:
        costs = NetworkModel(system=str(topology), transport=CABLES)
    predictions = predict_all(costs, counts, request)
    emit(predictions_document(predictions), format_name, None, full=full)


def measure_options(function: F) -> F:
    """Adds the options that say what to measure; `runs_of` reads them."""
    decorators = [
        value_option(
            "--collective",
            "NAME",
            "Collective: allreduce, reduce-scatter, all-gather, broadcast, reduce, scatter, gather, all-to-all, or p2p "
            "(point to point).",
            "allreduce",
        ),
        value_option("--victims --pairs victims", "auto|0:1,0:2", "p2p: pairs to measure (default: by the layout)."),
        value_option("--congestors", "auto|1:3", "p2p: pairs that send at the same time; auto: all other ranks."),
        value_option("--algorithms", "all|A,B|none", "Algorithms of dlbench; all: those for the layout.", "all"),
        value_option("--backends", "auto|A,B|none", "Libraries to compare: gloo, mpi, nccl; auto: installed.", "auto"),
        SIZES,
        value_option("--dtype", "NAME", "Element type: fp32, fp16 or bf16.", "fp32"),
        value_option("--transport", "torch|mpi", "Transport of messages: torch.distributed or mpi4py.", "torch"),
        value_option("--iterations", "N", "Timed iterations per point.", 10, type=int),
        value_option("--warmup", "N", "Untimed iterations before them.", 2, type=int),
        value_option("--group-size", "N", "Ranks per group (default: the ranks of a node).", type=int),
        SHARDS,
        shared.REPEATS,
        shared.LAUNCHER,
        shared.RANKS_PER_NODE,
        value_option("--set overrides", "system.KEY=VALUE", "Set a key of the system, repeatable.", multiple=True),
        value_option("--timeout", "SECONDS", "Maximum time of an iteration; then the run ends.", 60.0, type=float),
        shared.SERIES,
        shared.output_folder(),
        shared.DRY_RUN,
    ]
    return decorated(function, decorators)


def runs_of(
    options: dict[str, Any], *, system: str, points: tuple[int, ...], points_are: Literal["ranks", "nodes"]
) -> CommRuns:
    """Returns the plans for the options of `measure_options`. Raises `UserError`: one of them is invalid."""
    from dlbench.specs.comm import PAIRS
    from dlbench.specs.expand import expand_comm
    from dlbench.specs.requests import CommRequest, parse_set

    _require_counts(options, "iterations", "warmup", "group_size", "shards", "ranks_per_node", "repeats")
    if not 0 < options["timeout"] < float("inf"):
        raise UserError(f"--timeout {options['timeout']:g}: must be a number of seconds above 0")
    source = click.get_current_context().get_parameter_source("collective")
    if (options["victims"] or options["congestors"]) and source is click.core.ParameterSource.DEFAULT:
        options["collective"] = PAIRS
    settings = {field.name: options[field.name] for field in fields(CommRequest) if field.name in options}
    settings["overrides"] = parse_set(options["overrides"])
    request = CommRequest(**settings, timeout_s=options["timeout"], system=system, points=points, points_are=points_are)
    installed = [name for name in ("mpi4py",) if importlib.util.find_spec(name) is not None]
    return expand_comm(request, machine_cores=len(os.sched_getaffinity(0)), installed=installed)


@click.group(cls=InOrder)
def comm() -> None:
    """Measure collectives: dlbench's own algorithms, and libraries for comparison.

    Every result is compared with a sum that is computed independently; steps and bytes are counted.
    """


@click.command(short_help="Measure a collective on this machine or in an allocation.")
@measure_options
@value_option("--ranks", "2,4", "Rank counts; each is a point.", "2")
@shared.SYSTEM
@shared.NO_PROGRESS
def run(ranks: str, system: str, no_progress: bool, **options: Any) -> None:
    """Measure a collective on this machine, or inside an allocation, at each rank count.

    \b
    Example:
      dlbench comm run --ranks 2,4 --algorithms ring,direct --sizes 1KiB:64MiB
    """
    from dlbench.cli.run import print_commands, require_here, run_all, shown
    from dlbench.specs.requests import parse_counts

    comm_runs = runs_of(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    require_here(comm_runs.plans[0].system)
    require_room(comm_runs.plans)
    shared.require_ranks_needs(comm_runs.plans, is_dry=options["dry_run"])
    _print_notes(comm_runs)
    if options["dry_run"]:
        print_commands(comm_runs.plans, options["out"])
        return
    next_command = f"dlbench comm report {shown(options['out'])}"
    bar = sys.stderr.isatty() and not no_progress
    sys.exit(int(run_all(comm_runs.plans, options["out"], fail_fast=False, bar=bar, next_command=next_command)))


@click.command(short_help="Measure a collective in Slurm jobs, one per node count.")
@measure_options
@shared.submit_options("2,4")
def submit(system: str, nodes: str | None, ranks: str | None, all_scripts: bool, **options: Any) -> None:
    """Measure a collective in Slurm jobs, one per node count; --dry-run lists the jobs.

    \b
    Example:
      dlbench comm submit --system box --nodes 2,4 --repeats 3 --dry-run
    """
    from dlbench.cli.run import campaign_from, print_scripts, require_scheduler, submit_all

    points, points_are = shared.parse_points(nodes, ranks)
    comm_runs = runs_of(options, system=system, points=points, points_are=points_are)
    require_scheduler(comm_runs.plans[0].system, options["out"], "dlbench comm run")
    campaign = campaign_from(comm_runs.plans, options)
    shared.require_ranks_needs(comm_runs.plans, is_dry=options["dry_run"])
    _print_notes(comm_runs)
    if options["dry_run"]:
        print_scripts(campaign, options["out"], all_scripts=all_scripts)
        return
    submit_all(campaign, options)


def _print_notes(comm_runs: CommRuns) -> None:
    for note in comm_runs.notes:
        for line in textwrap.wrap(f"note: {note}", 80, subsequent_indent="  ", break_on_hyphens=False):
            click.echo(line, err=True)


# In the order of work.
for command in (run, submit, report, table_, fit, import_, predict):
    comm.add_command(command)
