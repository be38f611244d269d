"""Images in the parquet files of Hugging Face become shards: `<split>-00000-of-00294.parquet`, alone or in `data/`.

Columns: `image`, a struct of the encoded `bytes` and a `path`, and `label`, an integer; the names of the classes stand
in the metadata of the schema, under `huggingface`. Labels are read before anything is written, images row group by row
group while their shard is. Rows keep their order. Rows and row groups count from 0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.account import SPLIT_OF, account_below
from dlbench.datasets.making.image_recipes import Container, Packed, index_split, shard_parts, write_shard
from dlbench.datasets.making.production import Part
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import NAMES, Split
from dlbench.errors import EnvironmentLacksError, UserError, first_line
from dlbench.opening import open_file, parse_json

VERSION = 1  # raised whenever packing changes what it writes
LAYOUT = "train-00000-of-00294.parquet, validation-..., all in one folder or in its folder `data`"
_NAME = re.compile(r"(?P<split>\w+)-\d+-of-\d+(-[0-9a-f]+)?\.parquet")
_ROWS_AT_ONCE = 64
_PIECE = 1 << 20  # bytes of a column that are read at once
_METADATA = b"huggingface"
_MOST_CLASSES = 1_000_000  # where they have no names: a label beyond is taken for damage


class ImageTable(NamedTuple):
    """The labels of one parquet file."""

    path: Path
    labels: NDArray[np.int64]  # (num_rows,)
    classes: tuple[str, ...] | None  # names by label; None where the schema has none


def parquet_folder(source: Path) -> Path | None:
    """Returns the folder that holds parquet files: `data` in the source, or the source; None if neither does."""
    for folder in (source / "data", source):
        if any(folder.glob("*.parquet")):
            return folder
    return None


def _split_of(folder: Path, path: Path) -> str | None:
    name = _NAME.fullmatch(path.name)
    if name is None or path.parent != folder:
        return None
    return SPLIT_OF.get(name["split"])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a `pyarrow.parquet.ParquetFile`.

    Raises UserError: the file cannot be read, or pyarrow calls it damaged. EnvironmentLacksError: no pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise EnvironmentLacksError("pyarrow is not installed; pip install 'dlbench[parquet]'") from None
    try:
        with (
            open_file(path) as raw,
            pq.ParquetFile(raw, buffer_size=_PIECE, pre_buffer=False, page_checksum_verification=True) as file,
        ):
            yield file
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{str(path)!r}: not a whole parquet file: {first_line(error)}") from None


def read_labels(path: Path) -> ImageTable:
    """Reads the labels of a file, and the names of its classes.

    Raises UserError: the file is damaged, or its columns have another form; file, column and row are named.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
        _require_columns(path, schema)
        column = file.read(["label"], use_threads=False).column("label")
        if not len(column):
            raise UserError(f"{str(path)!r}: has no rows")
        missing = np.flatnonzero(column.is_null().to_numpy())
        if len(missing):
            raise UserError(f"{str(path)!r}, row {missing[0]}: has no label")
        labels = column.to_numpy().astype(np.int64)
        return ImageTable(path, labels, _class_names(schema.metadata or {}))


def _require_columns(path: Path, schema: Any) -> None:
    import pyarrow as pa

    types = {field.name: field.type for field in schema}
    image, label = types.get("image", pa.null()), types.get("label", pa.null())
    parts = {}
    if pa.types.is_struct(image):
        parts = {field.name: field.type for field in image}
    if parts.get("bytes") in (pa.binary(), pa.large_binary()) and pa.types.is_integer(label):
        return
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    raise UserError(
        f"{str(path)!r} has the columns {columns}; expected image: struct<bytes: binary, path: string> and label: int64"
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> tuple[str, ...] | None:
    try:
        names = parse_json(metadata[_METADATA])["info"]["features"]["label"]["names"]
        return tuple(str(name) for name in names)
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class ParquetRecipe:
    """Turns parquet files into shards; a `Recipe` of dlbench.datasets.making.production."""

    tables: Mapping[Split, Sequence[ImageTable]]
    classes: tuple[str, ...]
    container: Container
    samples_per_shard: int
    kind: str = "image-shards"

    @property
    def made_with(self) -> MadeWith:
        """Returns what decides the bytes; of the source names, sizes and labels, not the images themselves."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for split, tables in self.tables.items():
            for table in tables:
                digest.update(f"\0{split}/{table.path.name}\0{table.path.stat().st_size}\0".encode())
                digest.update(table.labels.tobytes())
        return {
            "version": VERSION,
            "source": "parquet",
            "source_sha256": digest.hexdigest(),
            "container": self.container,
            "samples_per_shard": self.samples_per_shard,
        }

    def parts(self) -> Sequence[Part]:
        parts: list[Part] = []
        for split, tables in self.tables.items():
            num_samples = sum(len(table.labels) for table in tables)
            parts += shard_parts(split, num_samples, self.container, self.samples_per_shard)
        return parts

    def write(self, part: Part, path: Path) -> None:
        write_shard(path, self.container, self._samples(part), self.classes)

    def finish(self, folder: Path) -> None:
        for split in self.tables:
            index_split(folder / split, self.container, self.classes)

    def _samples(self, part: Part) -> Iterator[Packed]:
        sample, first = part.first, 0  # numbers in the split; `first` is that of a file's first row
        for table in self.tables[part.split]:
            stop = min(len(table.labels), part.first + part.count - first)
            for row, data in _images(table.path, range(sample - first, stop)):
                yield Packed(f"{sample:08d}", data, int(table.labels[row]), f"{table.path.name}, row {row}")
                sample += 1
            first += len(table.labels)


def _images(path: Path, rows: range) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the encoded image of each of the rows; other row groups are not read."""
    if not rows:
        return
    with _opened(path) as file:
        row = 0
        for group in range(file.num_row_groups):
            after = row + file.metadata.row_group(group).num_rows
            if after <= rows.start or row >= rows.stop:
                row = after
                continue
            for batch in file.iter_batches(_ROWS_AT_ONCE, [group], columns=["image"], use_threads=False):
                for image in batch.column(0).field("bytes"):
                    if row in rows:
                        data = image.as_py()
                        if not data:
                            raise UserError(f"{str(path)!r}, row {row}: has no bytes of an image")
                        yield row, data
                    row += 1


def parquet_packing(source: Path, container: Container, samples_per_shard: int) -> tuple[ParquetRecipe, str]:
    """Returns how the parquet files of a folder become shards, and which of its files are read, in one line.

    Raises UserError: a file is no sample file, damaged or of another form, or a label is no class.
    EnvironmentLacksError: pyarrow is not installed.
    """
    folder = parquet_folder(source) or source
    account = account_below(source, partial(_split_of, folder.relative_to(source)), LAYOUT)
    tables: dict[Split, list[ImageTable]] = {}
    for split in NAMES:
        if split in account.splits:
            tables[split] = [read_labels(source / name) for name in account.splits[split]]
    recipe = ParquetRecipe(
        tables=tables,
        classes=_classes(list(chain.from_iterable(tables.values()))),
        container=container,
        samples_per_shard=samples_per_shard,
    )
    return recipe, account.line()


def _classes(tables: Sequence[ImageTable]) -> tuple[str, ...]:
    """Returns the names of all classes by label; digits where the files have none.

    Raises UserError: files name them differently, or a label is none of them.
    """
    first = tables[0]
    for table in tables:
        if table.classes != first.classes:
            raise UserError(f"{str(table.path)!r}: its class names are not those of {first.path.name!r}")
    classes = first.classes
    if classes is None:
        most = max(int(table.labels.max()) for table in tables)
        classes = tuple(str(label) for label in range(min(most + 1, _MOST_CLASSES)))
    if len(set(classes)) < len(classes):
        raise UserError(f"{str(first.path)!r}: two classes have the same name")
    for table in tables:
        wrong = np.flatnonzero((table.labels < 0) | (table.labels >= len(classes)))
        if len(wrong):
            label = table.labels[wrong[0]]
            raise UserError(f"{str(table.path)!r}, row {wrong[0]}: label {label}, expected 0 to {len(classes) - 1}")
    return classes
