"""`dlbench data verify`: is a data set whole?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.data.make import WORKERS
from dlbench.cli.data.progress import available_cores, meter
from dlbench.errors import ExitCode

if TYPE_CHECKING:
    from dlbench.datasets.verification import Verdict


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--kind", metavar="NAME", help="images, image-shards, text, samples or density (default: recognised).")
@click.option("--vocabulary", metavar="NAME|FILE", help="Hold text or BERT samples to this vocabulary.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@WORKERS
def verify(source: Path, kind: str | None, vocabulary: str | None, as_json: bool, workers: int | None) -> None:
    """Read everything in a data set and name every bad file.

    Compares the checksums of the manifest, if there is one, decodes every image, reads every sample, and says whether
    it is the whole public set (ImageNet-2012, cosmoUniverse). Bad files are printed one a line. Exit code: 0 whole,
    4 if anything is bad.

    \b
    Example:
      dlbench data verify /scratch/imagenet-shards
      dlbench data verify data/demo/density --json
    """
    from dlbench.datasets import verification

    with meter() as tell:
        verdict = verification.verify(
            source, kind=kind, vocabulary=vocabulary, workers=workers or available_cores(), progress=tell
        )
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        _print(verdict)
    if verdict.faults:
        sys.exit(int(ExitCode.INCOMPLETE))


def _print(verdict: Verdict) -> None:
    from dlbench.report.wording import clean

    for line in verdict.faults:
        click.echo(clean(line))
    for line in verdict.remarks:
        click.echo(clean(line), err=True)
    for line in summary(verdict):
        click.echo(clean(line), err=True)


def summary(verdict: Verdict) -> list[str]:
    """What a person should know of a verdict, apart from the single bad files."""
    from dlbench.datasets.verification import TITLES

    counts = ", ".join(f"{num:,} in {split}" for split, num in verdict.samples.items())
    checksums = {"none": "no manifest", "whole": "all checksums agree", "altered": "checksums differ"}
    lines = [f"{verdict.source}: {TITLES[verdict.kind]}" + (f", {counts}" if counts else "")]
    if verdict.public_set is not None:
        if verdict.lacking or verdict.faults:
            lines += [f"not the whole {verdict.public_set}: {line}" for line in verdict.lacking or ["see above"]]
        else:
            lines.append(f"by its counts the whole {verdict.public_set}")
    bad = len(verdict.faults)
    whole = "whole" if not bad else f"{bad:,} fault{'s' if bad > 1 else ''}, listed above"
    lines.append(f"{whole} ({checksums[verdict.manifest]})")
    return lines
