"""`dlbench baseline`: the file that `dlbench check` compares with."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.comparing import parse_where, runs_at, where_option
from dlbench.cli.report import check_writable, require_modules
from dlbench.errors import IncompleteDataError


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write, e.g. baseline.json."
)
@where_option("--where", "runs")
@click.option("--allow-few", is_flag=True, help="Take points with fewer than five runs, which allow no verdict.")
def baseline(runs: Path, output: Path, where: tuple[str, ...], allow_few: bool) -> None:
    """Write the figures of the runs in folder RUNS, or in a history, as what dlbench check compares with.

    A small JSON file for a repository: the metrics of every run with its session (Slurm job or command), and all that
    decides whether other runs may be compared with them. Take runs of five nights or more: from fewer sessions nobody
    can tell how far nights differ. Equal runs give equal bytes. Refuses points with fewer than five runs, and damaged
    data.

    \b
    Examples:
      dlbench baseline runs -o baseline.json
      dlbench baseline "$DLBENCH_HISTORY" --where workload=resnet50 -o baseline.json
      dlbench baseline runs --where series=nightly --where ranks=2 -o baseline.json
    """
    check_writable(output)
    chosen = parse_where(where, "--where")
    require_modules("baseline", "numpy", "pandas")
    from dlbench.gate.baseline import write_baseline
    from dlbench.gate.baseline_values import baseline_of
    from dlbench.gate.sides import side_of_runs
    from dlbench.reading.sessions import MIN_SESSIONS
    from dlbench.report.wording import place_text, runs_text

    side = side_of_runs(runs_at(runs), str(runs), chosen, "--where")
    if side.damaged:
        raise IncompleteDataError(f"{runs}: a baseline is not made of damaged data: {'; '.join(side.damaged[:3])}")
    made = baseline_of(side, allow_few=allow_few)
    write_baseline(output, made)
    for line in side.left_out:
        click.echo(f"dlbench: left out: {line}", err=True)
    sessions = [(one, len({run.session for run in one.runs})) for one in made.points]
    counts = ", ".join(
        f"{runs_text(len(one.runs))} in {count} session{'s' * (count > 1)} at {place_text(one.ranks, one.nodes)}"
        for one, count in sessions
    )
    click.echo(f"{output}: {counts}", err=True)
    if min(count for _, count in sessions) < MIN_SESSIONS:
        click.echo(
            f"dlbench: fewer than {MIN_SESSIONS} sessions do not tell how far sessions scatter: dlbench check will be "
            "inconclusive without --history; add runs of other nights, or compare by run --ab",
            err=True,
        )
