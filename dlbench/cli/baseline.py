"""`dlbench baseline`: the file that `dlbench check` compares with."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.choosing import named, parse_where, runs_argument, runs_at, where_option
from dlbench.cli.report import check_writable, require_modules
from dlbench.errors import IncompleteDataError


@click.command()
@runs_argument()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write, e.g. baseline.json."
)
@where_option("--where", "runs")
@click.option("--allow-few", is_flag=True, help="Take points with fewer than five runs, which allow no verdict.")
def baseline(runs: tuple[Path, ...], output: Path, where: tuple[str, ...], allow_few: bool) -> None:
    """Write the figures of RUNS (folders of runs, single runs, histories) as what dlbench check compares with.

    A small JSON file for a repository: the metrics of every run, when and in which job and boot it ran, and all that
    decides whether other runs may be compared with them. Take runs of five nights or more: from fewer sessions nobody
    can tell how far nights differ. Equal runs give equal bytes. Refuses points with fewer than five runs, and damaged
    data.

    \b
    Examples:
      dlbench baseline runs -o baseline.json
      dlbench baseline "$DLBENCH_HISTORY" --where workload=bert -o baseline.json
      dlbench baseline runs --where series=nightly -o baseline.json
    """
    check_writable(output)
    chosen = parse_where(where, "--where")
    require_modules("baseline", "numpy", "pandas")
    from dlbench.gate.baseline import baseline_of, write_baseline
    from dlbench.gate.sides import counts_text, sessions_at, settings_of, side_of_runs
    from dlbench.reading.sessions import MIN_SESSIONS

    name = named(runs)
    side = side_of_runs(runs_at(*runs), name, chosen, "--where")
    if side.damaged:
        raise IncompleteDataError(f"{name}: a baseline is not made of damaged data: {'; '.join(side.damaged[:3])}")
    made = baseline_of(side, allow_few=allow_few)
    write_baseline(output, made)
    for line in side.left_out:
        click.echo(f"dlbench: left out: {line}", err=True)
    sessions = sessions_at(side.points)
    for label, points in settings_of(side.points).items():
        click.echo(f"{output}: {label}: {counts_text(points, sessions)}", err=True)
    if min(len({sessions[run.run_id] for run in point.runs}) for point in made.points) < MIN_SESSIONS:
        click.echo(
            f"dlbench: fewer than {MIN_SESSIONS} sessions do not tell how far sessions scatter: dlbench check will be "
            "inconclusive without --history; add runs of other nights, or compare by run --ab",
            err=True,
        )
