"""`dlbench data demo` and `dlbench data make`: data sets that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.data.progress import available_cores, meter
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.datasets.making.catalogue import Order
    from dlbench.datasets.making.manifest import Manifest

WORKERS = click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes (default: one a core of this machine)."
)


def size_in_bytes(_ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Text such as 10GB as bytes, above zero."""
    from dlbench.units import parse_bytes

    if text is None:
        return None
    try:
        num = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{param.opts[0]}: {error}") from None
    if num < 1:
        raise UserError(f"{param.opts[0]} {text}: must be above zero")
    return num


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of everything random."
)
def demo(folder: Path, seed: int) -> None:
    """Make one small real data set for each workload in FOLDER.

    JPEGs cut from the photographs that scikit-image and scikit-learn ship, English text from Python's own
    documentation, and volumes of random universes; each with training and validation data. What is there already is
    left alone. Prints the three paths, for --data.

    \b
    Example:
      dlbench data demo data/demo
      dlbench run resnet50 --preset ci --ranks 1,2 --data data/demo/images
    """
    from dlbench.datasets.making.demo import prepare_demo_data

    made = prepare_demo_data(
        folder, seed=seed, workers=min(4, available_cores()), progress=lambda line: click.echo(line, err=True)
    )
    for path in (made.images, made.text, made.density):
        click.echo(path)


@click.command()
@click.argument("kind", metavar="images|text|density")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Training samples.")
@click.option(
    "--validation", type=click.IntRange(min=0), metavar="N", help="Validation samples (default: a tenth as many)."
)
@click.option(
    "--size-on-disk", callback=size_in_bytes, metavar="BYTES", help="Instead of --samples: about so much, e.g. 10GB."
)
@click.option("--size", metavar="SIZE", help="Pixels (default 500x375), or edge of a volume (default 128).")
@click.option("--classes", type=click.IntRange(min=1), metavar="N", help="Classes of images (default 10).")
@click.option(
    "--container", metavar="NAME", help="images: tree, tar, tfrecord; density: hdf5, tfrecord (default: the first)."
)
@click.option("--samples-per-file", type=click.IntRange(min=1), metavar="N", help="In a shard, or a file of volumes.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of everything random."
)
@WORKERS
def make(kind: str, folder: Path, workers: int | None, **wish: Any) -> None:
    """Make a data set of any size in FOLDER, without a download.

    Images are cuts from photographs with grain, so that each is another file of the size of ImageNet's. Text is that
    of Python's documentation, in other orders where it repeats. Volumes are random universes. FOLDER gets train and
    validation, and a manifest with checksums. Interrupted, the same command continues.

    \b
    Example:
      dlbench data make images /scratch/images --size-on-disk 150GB --classes 1000
      dlbench data make density /scratch/volumes --samples 1024 --size 128
      dlbench data make text /scratch/text --size-on-disk 2GB
    """
    from dlbench.datasets.making.catalogue import Wish, order

    ordered = order(kind, Wish(**wish))
    manufacture(ordered, folder, workers)


def manufacture(ordered: Order, folder: Path, workers: int | None) -> None:
    """Makes a data set and says so: its path on standard output, what is in it on standard error."""
    from dlbench.datasets.making.production import produce

    most = available_cores() if ordered.most_workers is None else ordered.most_workers
    with meter(resumes=True) as tell:

        def progress(done: int, total: int, num_bytes: int) -> None:
            tell(ordered.unit, done, total, num_bytes)

        try:
            manifest = produce(
                ordered.recipe,
                folder,
                workers=workers or most,
                progress=progress,
                estimated_bytes=ordered.estimated_bytes,
            )
        except KeyboardInterrupt:
            click.echo(f"{folder}: not finished; the same command continues", err=True)
            raise
    click.echo(folder)
    click.echo(_described(manifest, ordered.unit), err=True)


def _described(manifest: Manifest, unit: str) -> str:
    from dlbench.units import format_bytes

    counts = " and ".join(f"{num:,} {unit} in {split}" for split, num in manifest.counts.items())
    text = f"{counts}; {format_bytes(manifest.num_bytes)} in {manifest.num_files:,} files"
    if manifest.distinct_bytes is not None and manifest.distinct_bytes < manifest.num_bytes:
        text += f", of which {format_bytes(manifest.distinct_bytes)} do not repeat"
    return text
