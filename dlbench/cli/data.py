"""`dlbench data`: prepares data sets."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def data() -> None:
    """Prepare data sets."""


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Seed of crops and fields.")
def demo(folder: Path, seed: int) -> None:
    """Make one small real data set for each workload in FOLDER; at once if they are there already.

    JPEGs cropped from the photographs that scikit-image and scikit-learn ship, English text from Python's own
    documentation, and log-normal density fields. Prints the three paths, for --data.

    \b
    Example:
      dlbench data demo data
      dlbench run resnet50 --preset ci --ranks 1,2 --data data/jpeg
    """
    from dlbench.datasets.demo import prepare_demo_data

    made = prepare_demo_data(folder, seed=seed, progress=lambda line: click.echo(line, err=True))
    for path in (made.jpeg, made.text, made.density):
        click.echo(path)
