"""`dlbench check`: the gate that CI runs."""

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
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE|RUNS",
    help="What is compared with: a baseline file (dlbench baseline), a folder of runs, or a history.",
)
@click.option("--candidate", type=click.Path(path_type=Path), metavar="RUNS", help="Folder of the runs to be checked.")
@click.option(
    "--paired",
    type=click.Path(path_type=Path),
    metavar="RUNS",
    help="Instead of both: a folder of interleaved runs (run --ab); side b is checked against side a.",
)
@where_option("--where", "runs of both sides")
@where_option("--where-baseline", "runs of the baseline")
@where_option("--where-candidate", "runs of the candidate")
@rule_options
def check(
    baseline: Path | None,
    candidate: Path | None,
    paired: Path | None,
    where: tuple[str, ...],
    where_baseline: tuple[str, ...],
    where_candidate: tuple[str, ...],
    **options: Any,
) -> None:
    """Gate a candidate against a baseline: end with 1 if it is slower by more than the tolerance, beyond chance.

    The same comparison as dlbench compare, for CI. Every point of the baseline must have runs on the candidate's side;
    a point without them is insufficient. For a verdict make the baseline of runs of five nights or more, or check
    interleaved runs of the old and the new commit (run --ab).

    \b
    Exit codes:
      0  equivalent or improved
      1  regressed
      2  wrong usage, or runs that are not comparable; the keys are named
      4  damaged data, or a side without figures
      6  inconclusive (too noisy, one session per side), or insufficient (fewer
         than five runs on a side)

    In JUnit, regressed is a failure; inconclusive and insufficient are errors.

    \b
    Examples:
      dlbench check --baseline baseline.json --candidate runs
      dlbench check --baseline runs-old --candidate runs-new --junit dlbench.xml
      dlbench check --baseline b.json --candidate runs --summary summary.md
      dlbench check --paired runs --tolerance 1%
    """
    if paired is not None:
        if baseline is not None or candidate is not None:
            raise UserError("--paired: holds both sides; leave out --baseline and --candidate")
        if where_baseline or where_candidate:
            raise UserError("--where-baseline, --where-candidate: have no effect with --paired; use --where")
    elif baseline is None or candidate is None:
        raise UserError("check: give --baseline and --candidate, or --paired")
    prepare("check", options)
    if paired is not None:
        found = paired_comparison(paired, where, options)
    else:
        assert baseline is not None
        assert candidate is not None
        a = read_side(baseline, (*where, *where_baseline), "--where-baseline")
        b = read_side(candidate, (*where, *where_candidate), "--where-candidate")
        found = comparison(a, b, options, ("--where-baseline", "--where-candidate"))
    finish(found, options, exit_zero=False, name="dlbench check")
