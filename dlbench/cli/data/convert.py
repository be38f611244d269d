"""`dlbench data pack`, `vocab` and `samples`: data sets from data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from dlbench.cli.data.make import WORKERS, manufacture
from dlbench.errors import UserError

_PATH = click.Path(path_type=Path)
_SEED = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of everything random."
)
_COUNT = click.IntRange(min=1)


def _require(source: Path) -> None:
    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")


@click.command()
@click.argument("source", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option(
    "--container", type=click.Choice(["tar", "tfrecord"]), default="tar", show_default=True, help="Form of a shard."
)
@click.option("--samples-per-shard", type=_COUNT, metavar="N", help="Images in each (default 1252).")
@_SEED
@WORKERS
def pack(
    source: Path,
    folder: Path,
    container: Literal["tar", "tfrecord"],
    samples_per_shard: int | None,
    seed: int,
    workers: int | None,
) -> None:
    """Pack images into shards: few large files instead of a million small ones.

    SOURCE is a tree (<class>/<image>.jpg) or shards, with train and validation if it holds both. The encoded images
    are copied as they are, in an order that mixes the classes. tar shards are read by webdataset, too, TFRecords by
    TensorFlow. Interrupted, the same command continues.

    \b
    Example:
      dlbench data pack /data/imagenet /scratch/imagenet-shards
    """
    from dlbench.datasets.making.catalogue import packing

    _require(source)
    ordered = packing(source, container=container, samples_per_shard=samples_per_shard, seed=seed)
    manufacture(ordered, folder, workers)


@click.command()
@click.argument("source", type=_PATH)
@click.argument("out", type=_PATH, metavar="OUT.txt")
@click.option("--size", type=_COUNT, default=30522, show_default=True, metavar="N", help="Entries.")
@click.option("--cased", is_flag=True, help="Keep capitals and accents.")
def vocab(source: Path, out: Path, size: int, cased: bool) -> None:
    """Train a WordPiece vocabulary on text, once; a file is never overwritten.

    SOURCE is a text file or a folder of .txt files; of a set with train and validation, train is taken.

    \b
    Example:
      dlbench data vocab /data/wiki wiki.txt
    """
    from dlbench.datasets.splits import train_folder
    from dlbench.datasets.text.vocabulary_training import train_vocabulary

    _require(source)
    made = train_vocabulary(train_folder(source), size, not cased, out)
    click.echo(out)
    click.echo(f"{len(made):,} entries, SHA-256 {made.sha256}", err=True)


@click.command()
@click.argument("source", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--vocabulary", required=True, metavar="NAME|FILE", help="WordPiece vocabulary.")
@click.option("--sequence-length", type=_COUNT, default=128, show_default=True, metavar="N", help="Tokens of a sample.")
@click.option("--max-predictions", type=_COUNT, metavar="N", help="Hidden tokens at most (default: 15 %, rounded up).")
@click.option(
    "--duplicates", type=_COUNT, default=10, show_default=True, metavar="N", help="Passes over the training text."
)
@_SEED
@WORKERS
def samples(
    source: Path,
    folder: Path,
    vocabulary: str,
    sequence_length: int,
    max_predictions: int | None,
    duplicates: int,
    seed: int,
    workers: int | None,
) -> None:
    """Turn text into BERT's pre-training samples in HDF5, as the published recipe does.

    SOURCE is text; if it holds train and validation they stay apart, otherwise a tenth of its documents becomes
    validation. Words are hidden once, here, not anew in every epoch. Interrupted, the same command continues.

    \b
    Example:
      dlbench data samples /data/wiki /scratch/samples --vocabulary wiki.txt
    """
    from dlbench.datasets.making.catalogue import pretraining

    _require(source)
    ordered = pretraining(
        source,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        max_predictions=max_predictions,
        duplicates=duplicates,
        seed=seed,
    )
    manufacture(ordered, folder, workers)
