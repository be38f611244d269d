"""`dlbench comm report | fit | predict`: what runs of the collective benchmark say, and what follows from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from dlbench.cli.choosing import named, read_comm_runs, runs_argument, where_option
from dlbench.cli.options import write_output
from dlbench.cli.report import FormatName, check_writable, emit, format_of, report_options, require_modules
from dlbench.errors import ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.specs.base import Precision
    from dlbench.specs.collectives.plan import Collective

# What each needs beside the login node's set.
_NUMBERS = ("numpy",)
_CHARTS = ("altair", "vl_convert")


@click.command()
@report_options
@click.option(
    "--table",
    type=click.Choice(["points", "ratios", "fits", "runs"]),
    help="Which table CSV holds: measured points (default), speed over libraries, fitted costs, or runs.",
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
      dlbench comm report runs --format csv --table ratios > ratios.csv
    """
    if output is not None:
        check_writable(output)
    chosen = format_of(output, format_name)
    if table is not None and chosen != "csv":
        raise UserError(f"--table {table}: has no effect on --format {chosen}; only csv holds one table")
    require_modules("comm report", *_NUMBERS, *(_CHARTS if chosen == "html" else ()))
    from dlbench.collectives.page.document import document_of
    from dlbench.collectives.page.report import assemble

    found = assemble(read_comm_runs(runs, where))
    emit(document_of(found), chosen, output, table or "points", full=full)
    if output is not None:
        without = len(found.without_figures)
        counts = f"runs with figures: {len(found.runs) - without}, without: {without}; groups: {len(found.groups)}"
        click.echo(f"{output}: {counts}", err=True)
    for line in found.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if not found.groups:
        click.echo(
            f"dlbench: {named(runs)}: no run of the collective benchmark has figures; the report says why", err=True
        )
    if found.damaged or not found.groups:
        sys.exit(int(ExitCode.INCOMPLETE))


@click.command()
@runs_argument()
@where_option("--where", "runs")
@click.option("-o", "--output", metavar="FILE.network.json", type=click.Path(path_type=Path), help="File to write.")
@click.option("--system", metavar="NAME", help="Whose runs to fit, where RUNS holds several systems.")
@click.option("--transport", metavar="NAME", help="Which carrier to fit, where RUNS holds several.")
@click.option("--dtype", metavar="NAME", help="Which type of element (default: fp32 where it was measured).")
def fit(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    system: str | None,
    transport: str | None,
    dtype: str | None,
) -> None:
    """Fit the costs of a message to the runs in folders RUNS: alpha, beta and gamma, inside groups and across.

    The file holds one system and one carrier; training (sync.network) and `dlbench comm predict` read it. Ends with 4
    if no run has figures, or too few for a fit.

    \b
    Examples:
      dlbench comm fit runs
      dlbench comm fit runs -o box.network.json
      dlbench comm fit runs --system box --transport torch-gloo -o box.network.json
    """
    if output is not None:
        check_writable(output)
    require_modules("comm fit", *_NUMBERS)
    from dlbench.collectives.page.document import fit_document
    from dlbench.collectives.results.fits import fit_one
    from dlbench.collectives.results.measurements import tabulate
    from dlbench.units import utc_now

    table = tabulate(read_comm_runs(runs, where))
    for line in table.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    found = fit_one(table, system=system, transport=transport, dtype=dtype, fitted=utc_now(), where=named(runs))
    emit(fit_document(found), "text", None, full=True)
    if output is not None:
        write_output((found.network.model_dump_json(indent=2) + "\n").encode("utf-8"), output)
        click.echo(f"{output}: {found.network.num_points} points, {len(found.network.collectives)} lines", err=True)
    if table.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))


@click.command()
@click.argument("network", type=click.Path(path_type=Path))
@click.option("--ranks", metavar="8,64", required=True, help="Rank counts.")
@click.option("--group-size", type=int, metavar="N", help="Ranks of a group, e.g. of a node (default: one group).")
@click.option(
    "--sizes",
    metavar="LOW:HIGH[:COUNT]|A,B",
    default="1KiB:64MiB",
    show_default=True,
    help="Bytes of each rank's buffer.",
)
@click.option("--collective", metavar="NAME", default="allreduce", show_default=True, help="The collective.")
@click.option("--algorithms", metavar="A,B", help="dlbench's own (default: all that the layout permits).")
@click.option("--dtype", metavar="NAME", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@click.option("--shards", type=int, metavar="N", help="Servers of parameter-server (default: every rank).")
@click.option("--workload-bytes", metavar="BYTES", help="Gradients of a step, e.g. 94MB: how long, in which messages.")
@click.option("--format", "format_name", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--full", is_flag=True, help="Text with every algorithm; default: the fastest of each size.")
def predict(
    network: Path,
    ranks: str,
    group_size: int | None,
    sizes: str,
    collective: str,
    algorithms: str | None,
    dtype: str,
    shards: int | None,
    workload_bytes: str | None,
    format_name: Literal["text", "json"],
    full: bool,
) -> None:
    """Predict collectives by the fitted costs in file NETWORK, at rank counts that need not have been measured.

    Ranks, groups and sizes beyond those fitted are named as extrapolated, with the error at the largest rank count when
    it is held out. Library times are lines through measured sizes, at measured rank counts alone.

    \b
    Examples:
      dlbench comm predict box.network.json --ranks 8,64 --group-size 4 --sizes 1KiB:100MiB
      dlbench comm predict box.network.json --ranks 16 --group-size 4 --workload-bytes 94MB
    """
    require_modules("comm predict", *_NUMBERS)
    from dlbench.collectives.page.document import predictions_document
    from dlbench.collectives.results.predictions import Wanted, predict_all
    from dlbench.records.network import read_network
    from dlbench.specs.collectives.plan import ALGORITHMS, ELEMENT_BYTES
    from dlbench.specs.collectives.sizes import parse_sizes
    from dlbench.specs.requests import parse_counts

    for option, name, known in (("--collective", collective, set(ALGORITHMS)), ("--dtype", dtype, set(ELEMENT_BYTES))):
        if name not in known:
            raise UserError(f"{option}: unknown name {name!r}: {nearest(name, known)}")
    precision = cast("Precision", dtype)
    for option, count in (("--group-size", group_size), ("--shards", shards)):
        if count is not None and count < 1:
            raise UserError(f"{option} {count}: must be 1 or more")
    counts = parse_counts(ranks, "--ranks")
    wanted = Wanted(
        collective=cast("Collective", collective),
        algorithms=tuple(algorithms.split(",")) if algorithms else (),
        sizes=parse_sizes(sizes, precision),
        dtype=precision,
        group_size=group_size,
        shards=shards,
        workload_bytes=_bytes("--workload-bytes", workload_bytes),
    )
    found = predict_all(read_network(network), counts, wanted)
    emit(predictions_document(found), format_name, None, full=full)


def _bytes(option: str, text: str | None) -> int | None:
    """Text such as 94MB as bytes, above zero."""
    if text is None:
        return None
    from dlbench.units import parse_bytes

    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
    if value < 1:
        raise UserError(f"{option} {text!r}: must be more than nothing")
    return value
