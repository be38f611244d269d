"""`dlbench comm`: the collective benchmark; here its runs, in `reading` what is made of them."""

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
from dlbench.cli.choosing import named, read_comm_runs, runs_argument, where_option
from dlbench.cli.options import FILE, F, InOrder, decorated, size_in_bytes, value_option
from dlbench.cli.report import (
    FormatName,
    check_writable,
    emit,
    finish,
    note_counts,
    prepared,
    report_options,
    require_modules,
)
from dlbench.errors import ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.comm.fits import NetworkFit
    from dlbench.specs.base import Precision
    from dlbench.specs.comm import Collective
    from dlbench.specs.expand import CommRuns

TABLES = ("points", "pairs", "costs", "fits", "runs")
SHARDS = click.option("--shards", type=int, metavar="K", help="Servers of parameter-server (default: every rank).")


@click.command()
@report_options
@click.option(
    "--table",
    type=click.Choice(TABLES),
    help="Which table CSV holds: measured points (default), pairs of ranks, costs of algorithms, fits, runs.",
)
def report(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
    table: str | None,
) -> None:
    """Turn runs of the collective benchmark in folders RUNS into a report: rates, best algorithm, fitted costs.

    Runs of training in the same folders are passed over. Ends with 4 if a file is damaged or no run has figures; what
    can be reported is reported all the same.

    \b
    Examples:
      dlbench comm report runs
      dlbench comm report runs -o comm.html
      dlbench comm report runs --format csv --table costs > costs.csv
    """
    chosen = prepared("comm report", output, format_name, table=table, needs=("numpy",))
    from dlbench.comm.document import document_of
    from dlbench.comm.report import assemble

    found = assemble(read_comm_runs(runs, where))
    emit(document_of(found), chosen, output, table or "points", full=full)
    note_counts(output, found)
    problem = f"{named(runs)}: no run of the collective benchmark has figures; the report says why"
    finish(found.damaged, "" if found.groups or found.pairs else problem)


@click.command()
@runs_argument()
@where_option("--where", "runs")
@click.option("-o", "--output", metavar="FILE.network.json", type=FILE, help="File to write.")
@click.option("--system", metavar="NAME", help="Whose runs to fit, where RUNS holds several systems.")
@click.option("--transport", metavar="NAME", help="Which carrier to fit, where RUNS holds several.")
@click.option("--dtype", metavar="NAME", help="Which type of element (default: fp32 where it was measured).")
def fit(runs: tuple[Path, ...], where: tuple[str, ...], output: Path | None, **chosen: str | None) -> None:
    """Fit the costs of a message to the runs in folders RUNS: alpha and beta of each level, and gamma.

    The file holds one system and one carrier; training (sync.network) and `dlbench comm predict` read it. Ends with 4
    if no run has figures, or too few for a fit.

    \b
    Examples:
      dlbench comm fit runs
      dlbench comm fit runs -o box.network.json
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
    found = fit_one(table, fitted=utc_now(), where=named(runs), **chosen)
    _show_fit(found, output)
    if table.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))


def _show_fit(found: NetworkFit, output: Path | None) -> None:
    from dlbench.comm.document import fit_document

    emit(fit_document(found), "text", None, full=True)
    if output is not None:
        shared.write_output((found.network.model_dump_json(indent=2) + "\n").encode("utf-8"), output)
        click.echo(f"{output}: {found.network.num_points} points, {len(found.network.collectives)} lines", err=True)


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--system", metavar="NAME", required=True, help="What to call the system that was measured.")
@click.option("-o", "--output", metavar="FILE.network.json", type=FILE, help="File to write.")
@click.option(
    "--ranks", type=int, multiple=True, metavar="N", help="Ranks of outputs that do not say: for all, or for each."
)
@click.option("--group-size", type=int, metavar="N", help="Ranks per node, of outputs that do not name hosts.")
@click.option(
    "--level",
    "levels",
    type=click.Choice(["inside", "across", "beyond"]),
    multiple=True,
    help="Where the two ranks of osu_latency and osu_bw were: inside a node, across nodes, or beyond a leaf switch.",
)
@click.option("--collective", metavar="NAME", help="What outputs of nccl-tests measured that do not name it.")
@click.option("--type", "dtype", metavar="NAME", help="Which of several types of data, e.g. float.")
@click.option("--op", metavar="NAME", help="Which of several operations, e.g. sum.")
def import_(files: tuple[Path, ...], system: str, output: Path | None, **unsaid: Any) -> None:
    """Make fitted costs of the text that nccl-tests and OSU's micro-benchmarks print, in FILES.

    A collective becomes a line for each rank count; with several rank counts, costs of messages as well, of the
    algorithm that explains the times best. Outputs of equal layouts, and cycles, are repeats: three or more give
    intervals. Programs without costs, and what was not asked for, are listed as left out.

    \b
    Examples:
      dlbench comm import nccl-8.txt nccl-16.txt --system dgx -o dgx.network.json
      dlbench comm import osu-allreduce.txt --ranks 64 --group-size 4 --system big -o big.network.json
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
    found = import_tables(files, system=system, fitted=utc_now(), options=ImportOptions(**unsaid))
    _show_fit(found, output)


def _require_known(option: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise UserError(f"{option}: unknown name {name!r}: {nearest(name, known)}")


def _require_counts(options: Mapping[str, Any], *names: str) -> None:
    for name in names:
        value, least = options[name], 0 if name == "warmup" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")


@click.command("table")
@click.argument("network", type=FILE, required=False)
@click.option("--ranks", metavar="8,64", default="8", show_default=True, help="Rank counts.")
@click.option("--group-size", type=int, metavar="N", help="Ranks of a group, e.g. of a node (default: one group).")
@value_option("--size", "BYTES", "A rank's buffer.", "64MiB", callback=size_in_bytes)
@click.option("--collective", metavar="NAME", default="allreduce", show_default=True, help="The collective.")
@SHARDS
def table_(
    network: Path | None, ranks: str, group_size: int | None, size: int, collective: str, shards: int | None
) -> None:
    """Print what each algorithm costs: steps, volume, predicted by file NETWORK of fitted costs, over the ideal.

    Without NETWORK steps and volume alone. The report of runs has the same table with what was measured.

    \b
    Examples:
      dlbench comm table --ranks 8 --shards 2
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
        raise UserError(f"{network}: folders of runs have their costs in `dlbench comm report RUNS --full`")
    fitted = None if network is None else read_network(network)
    wanted = PredictionRequest(collective=cast("Collective", collective), sizes=(size,), group_size=group_size)
    tables = {}
    for count in parse_counts(ranks, "--ranks"):
        layout = layout_asked(count, wanted)
        groups = f" in {layout.num_groups} groups of {layout.group_size}" if layout.num_groups > 1 else ""
        tables[f"{count} ranks{groups}"] = [
            cost(wanted.collective, name, layout, size, "fp32", fitted, shards) for name in permitted(wanted, layout)
        ]
    emit(costs_document(f"Cost of {COLLECTIVE_TITLES[collective]}", tables, size), "text", None)


@click.command()
@click.argument("network", type=FILE, required=False)
@click.option("--topology", metavar="FILE", type=FILE, help="Cables to price instead, YAML.")
@click.option("--ranks", metavar="8,64", required=True, help="Rank counts.")
@click.option("--group-size", type=int, metavar="N", help="Ranks of a group, e.g. of a node (default: one group).")
@click.option("--leaf-size", type=int, metavar="N", help="Ranks below a leaf switch (default: all below one).")
@value_option("--sizes", "LOW:HIGH[:COUNT]|A,B", "Bytes of each rank's buffer.", "1KiB:64MiB")
@click.option("--collective", metavar="NAME", default="allreduce", show_default=True, help="The collective.")
@click.option("--algorithms", metavar="A,B", help="dlbench's own (default: all that the layout permits).")
@click.option("--dtype", metavar="NAME", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@SHARDS
@value_option(
    "--workload-bytes", "BYTES", "Gradients of a step, e.g. 94MB: how long, in which messages.", callback=size_in_bytes
)
@click.option("--format", "format_name", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--full", is_flag=True, help="Text with every algorithm; default: the fastest of each size.")
def predict(
    network: Path | None,
    topology: Path | None,
    ranks: str,
    sizes: str,
    algorithms: str | None,
    dtype: str,
    format_name: Literal["text", "json"],
    full: bool,
    **more: Any,
) -> None:
    """Predict collectives by the fitted costs in file NETWORK, at rank counts that need not have been measured.

    Ranks, groups and sizes beyond those fitted are named as extrapolated, with the error at the largest rank count when
    it is held out. Library times are lines through measured sizes, at measured rank counts alone.

    \b
    Examples:
      dlbench comm predict box.network.json --ranks 8,64 --group-size 4 --sizes 1KiB:100MiB
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
    if topology is not None and more["leaf_size"] is not None:
        raise UserError("--leaf-size: the topology says which hosts share a switch")
    _require_known("--collective", more["collective"], ALGORITHMS)
    _require_known("--dtype", dtype, ELEMENT_BYTES)
    precision = cast("Precision", dtype)
    _require_counts(more, "group_size", "leaf_size", "shards")
    counts = parse_counts(ranks, "--ranks")
    wanted = PredictionRequest(
        algorithms=tuple(algorithms.split(",")) if algorithms else (),
        sizes=parse_sizes(sizes, precision),
        dtype=precision,
        topology=None if topology is None else read_topology(topology),
        **more,
    )
    modelled = NetworkModel(system=str(topology), transport=CABLES)
    found = predict_all(modelled if network is None else read_network(network), counts, wanted)
    emit(predictions_document(found), format_name, None, full=full)


def measure_options(function: F) -> F:
    """Options that say what to measure; `runs_of` reads them."""
    decorators = [
        value_option(
            "--collective",
            "NAME",
            "allreduce, reduce-scatter, all-gather, broadcast, reduce, scatter, gather, all-to-all, or p2p.",
            "allreduce",
        ),
        value_option(
            "--victims --pairs victims", "auto|0:1,0:2", "p2p: pairs of ranks to measure (default: by the layout)."
        ),
        value_option("--congestors", "auto|1:3", "p2p: pairs that send meanwhile; auto: all other ranks, two by two."),
        value_option("--algorithms", "all|A,B|none", "dlbench's own; all: those that the layout permits.", "all"),
        value_option(
            "--backends",
            "auto|A,B|none",
            "Libraries timed as references: gloo, mpi, nccl; auto: those at hand.",
            "auto",
        ),
        value_option(
            "--sizes",
            "LOW:HIGH[:COUNT]|A,B",
            "Bytes of each rank's buffer; a range takes factor 4, or COUNT sizes.",
            "1KiB:64MiB",
        ),
        click.option("--dtype", metavar="NAME", default="fp32", show_default=True, help="fp32, fp16 or bf16."),
        value_option(
            "--transport", "torch|mpi", "What carries the algorithms' messages: torch.distributed, or mpi4py.", "torch"
        ),
        value_option("--iterations", "N", "Timed iterations of a point.", 10, type=int),
        click.option("--warmup", type=int, metavar="N", default=2, show_default=True, help="Iterations before them."),
        click.option("--group-size", type=int, metavar="N", help="Ranks of a group (default: those of a node)."),
        SHARDS,
        value_option("--repeats", "N", "Runs of each count, interleaved.", 1, type=int),
        shared.LAUNCHER,
        click.option("--ranks-per-node", type=int, metavar="N", help="Ranks on each node (default: the system's)."),
        click.option("--set", "overrides", multiple=True, metavar="system.KEY=VALUE", help="Change a system's key."),
        value_option(
            "--timeout", "SECONDS", "Longest time of one iteration; then the run is given up.", 60.0, type=float
        ),
        shared.SERIES,
        shared.output_folder(),
        shared.DRY_RUN,
    ]
    return decorated(function, decorators)


def runs_of(
    options: dict[str, Any], *, system: str, points: tuple[int, ...], points_are: Literal["ranks", "nodes"]
) -> CommRuns:
    """The options of `measure_options` as plans. Raises `UserError`: anything wrong with them, in one line."""
    from dlbench.specs.comm import PAIRS
    from dlbench.specs.expand import expand_comm
    from dlbench.specs.requests import CommRequest, parse_set

    _require_counts(options, "iterations", "warmup", "group_size", "shards", "ranks_per_node", "repeats")
    if not 0 < options["timeout"] < float("inf"):
        raise UserError(f"--timeout {options['timeout']:g}: must be a number of seconds above 0")
    source = click.get_current_context().get_parameter_source("collective")
    if (options["victims"] or options["congestors"]) and source is click.core.ParameterSource.DEFAULT:
        options["collective"] = PAIRS
    named_alike = {field.name: options[field.name] for field in fields(CommRequest) if field.name in options}
    named_alike["overrides"] = parse_set(options["overrides"])
    request = CommRequest(
        **named_alike, timeout_s=options["timeout"], system=system, points=points, points_are=points_are
    )
    installed = [name for name in ("mpi4py",) if importlib.util.find_spec(name) is not None]
    return expand_comm(request, machine_cores=len(os.sched_getaffinity(0)), installed=installed)


@click.group(cls=InOrder)
def comm() -> None:
    """Measure collectives: dlbench's own algorithms, message by message, and libraries for comparison.

    Every result is checked against the sum computed apart, and steps and bytes are counted.
    """


@click.command()
@measure_options
@click.option("--ranks", default="2", show_default=True, metavar="2,4", help="Rank counts.")
@shared.SYSTEM
@shared.NO_PROGRESS
def run(ranks: str, system: str, no_progress: bool, **options: Any) -> None:
    """Measure a collective on this machine, or inside an allocation, at each rank count.

    \b
    Example:
      dlbench comm run --ranks 2,4 --algorithms ring,direct --sizes 1KiB:64MiB
      dlbench comm run --ranks 4 --launcher mpirun --transport mpi --group-size 2
    """
    from dlbench.cli.run import print_commands, require_here, require_room, run_all, shown
    from dlbench.specs.requests import parse_counts

    made = runs_of(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    require_here(made.plans[0].system)
    require_room(made.plans)
    shared.require_ranks_needs(made.plans, is_dry=options["dry_run"])
    _print_notes(made)
    if options["dry_run"]:
        print_commands(made.plans, options["out"])
        return
    following = f"dlbench comm report {shown(options['out'])}"
    bar = sys.stderr.isatty() and not no_progress
    sys.exit(int(run_all(made.plans, options["out"], following, fail_fast=False, bar=bar)))


@click.command()
@measure_options
@shared.submit_options("2,4")
def submit(system: str, nodes: str | None, ranks: str | None, all_scripts: bool, **options: Any) -> None:
    """Measure a collective in Slurm jobs, one per node count; --dry-run lists them.

    \b
    Example:
      dlbench comm submit --system box --nodes 2,4 --repeats 3 --dry-run
      dlbench comm submit --system my-cluster.yaml --nodes 2,4,8 --algorithms ring,hierarchical
    """
    from dlbench.cli.submit import campaign_from, print_scripts, require_scheduler, submit_all
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 2,4")
    points = parse_counts(nodes, "--nodes") if nodes is not None else parse_counts(ranks or "", "--ranks")
    made = runs_of(options, system=system, points=points, points_are="ranks" if nodes is None else "nodes")
    require_scheduler(made.plans[0].system, options["out"], "dlbench comm run")
    campaign = campaign_from(made.plans, options)
    shared.require_ranks_needs(made.plans, is_dry=options["dry_run"])
    _print_notes(made)
    if options["dry_run"]:
        print_scripts(campaign, options["out"], all_scripts=all_scripts)
        return
    submit_all(campaign, options)


def _print_notes(made: CommRuns) -> None:
    """What was chosen for lack of an option, once nothing is wrong any more."""
    for note in made.notes:
        for line in textwrap.wrap(f"note: {note}", 80, subsequent_indent="  ", break_on_hyphens=False):
            click.echo(line, err=True)


# In the order of work.
for command in (run, submit, report, table_, fit, import_, predict):
    comm.add_command(command)
