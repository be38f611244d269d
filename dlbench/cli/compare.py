"""`dlbench compare`: is B slower than A, by how much, and how sure is that?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlbench.cli.choosing import where_option
from dlbench.cli.comparing import (
    comparison,
    finish,
    paired_comparison,
    prepare,
    read_side,
    rule_options,
)
from dlbench.errors import UserError


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="A B | RUNS --paired")
@click.option("--paired", is_flag=True, help="Compare sides a and b of interleaved runs (run --ab) in one folder.")
@where_option("--where", "runs of both sides")
@where_option("--where-a", "runs of A")
@where_option("--where-b", "runs of B")
@rule_options
@click.option("--exit-zero", is_flag=True, help="Only inform: end with 0 whatever the verdict is.")
def compare(
    paths: tuple[Path, ...],
    paired: bool,
    where: tuple[str, ...],
    where_a: tuple[str, ...],
    where_b: tuple[str, ...],
    exit_zero: bool,
    **options: Any,
) -> None:
    """Say whether the runs of B are slower than those of A, by how much, and how sure that is.

    A and B are folders of runs, single runs, histories, or baseline files (dlbench baseline). Points are matched by all
    that decides what was computed, and by ranks and nodes; runs that differ in more than --allow names are refused,
    with the differing keys. Five runs a side are needed for a verdict, and interleaved pairs (run --ab), or five
    sessions (runs of different days or nights) of A, of B or of --history: what differs from night to night does not
    show within one.

    \b
    Verdicts and exit codes:
      regressed     1  slower by more than the tolerance, beyond chance
      equivalent    0  shown to be within the tolerance
      improved      0  faster by more than the tolerance, beyond chance
      inconclusive  6  neither is shown, or too few sessions to say
      insufficient  6  fewer than five runs on a side
    Also: 2 wrong usage, equal sides or runs that are not comparable; 4 damaged
    data, or a side without figures.

    \b
    Examples:
      dlbench compare runs-old runs-new
      dlbench compare runs runs --where-a series=old --where-b series=new
      dlbench compare runs-old runs-new --allow system -o comparison.md
      dlbench compare runs --paired
    """
    if len(paths) != (1 if paired else 2):
        wanted = "one folder of runs with --paired" if paired else "two sides, A and B (or one folder with --paired)"
        raise UserError(f"compare: takes {wanted}, not {len(paths)}")
    if paired and (where_a or where_b):
        raise UserError("--where-a, --where-b: have no effect with --paired; use --where")
    prepare("compare", options)
    if paired:
        found = paired_comparison(paths[0], where, options)
    else:
        sides = [
            read_side(path, (*where, *own), option)
            for path, own, option in ((paths[0], where_a, "--where-a"), (paths[1], where_b, "--where-b"))
        ]
        found = comparison(sides[0], sides[1], options, ("--where-a", "--where-b"))
    finish(found, options, exit_zero=exit_zero, name="dlbench compare")
