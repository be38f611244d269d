"""Reads BERT samples prepared in HDF5, in the two layouts that NVIDIA published.

- fixed: `input_ids` int32 (n, S), `input_mask` int8 (n, S), `segment_ids` int8 (n, S), `masked_lm_positions` int32
  (n, P), `masked_lm_ids` int32 (n, P), `next_sentence_labels` int8 (n,), 1 if B is random. Unused predictions have
  position 0, that of [CLS]. Written by `create_pretraining_data.py` of NVIDIA's DeepLearningExamples (BERT for PyTorch)
  and of their MLPerf Training submissions.
- variable length: the same without `input_mask`; `input_ids` (int16), `segment_ids` (int8), `masked_lm_positions` and
  `masked_lm_ids` (int16) are HDF5 variable-length types (n,) without padding. Written by `convert_fixed2variable.py`
  and `pick_eval_samples_varlength.py` of their MLPerf submissions from v1.1 on. The packed layout of later rounds
  (several samples per row) is not supported.

Other integer types are read, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.datasets.arrays import OpenFiles, damage_as_oserror, heap_fault, open_hdf5, require_plausible
from dlbench.datasets.splits import Split, sample_names
from dlbench.errors import UserError, first_line
from dlbench.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlbench.specs.workload import TextData

    Rows = Mapping[str, NDArray[Any]]

LAYOUT = "HDF5 files (.h5, .hdf5, .hdf) with input_ids, segment_ids, masked_lm_positions, masked_lm_ids, ..."
SUFFIXES = (".h5", ".hdf5", ".hdf")
PER_TOKEN = ("input_ids", "input_mask", "segment_ids")
PER_PREDICTION = ("masked_lm_positions", "masked_lm_ids")
LABEL = "next_sentence_labels"
_TYPES = {
    "input_ids": "int32",
    "input_mask": "int8",
    "segment_ids": "int8",
    "masked_lm_positions": "int32",
    "masked_lm_ids": "int32",
    LABEL: "int8",
}
_BLOCK = 4096  # rows checked at a time


@dataclass(frozen=True, kw_only=True)
class FileShape:
    """The number and the shape of the samples in a file."""

    num_rows: int
    sequence_length: int | None  # s; None for variable length
    max_predictions: int | None  # p; None for variable length


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplesIndex:
    """The files of a data set and the position of each sample; all samples have one shape."""

    source: Path
    files: tuple[Path, ...]
    offsets: NDArray[np.int64]  # (num_files + 1,) first sample of each file
    shape: FileShape  # of the first file
    sha256: str  # digest of file names, row counts and bytes; contents are not read

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        file = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.files[file], index - int(self.offsets[file])


def sample_files(source: Path, split: Split | None = None) -> list[Path]:
    """Returns the HDF5 files at a path: the file itself or those of a folder, sorted; empty if there are none."""
    if not source.is_dir():
        return [source] if is_sample_file(source.name) else []
    names = [path.name for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
    return [source / name for name in sample_names(source, names, is_sample_file, split, LAYOUT)]


def is_sample_file(name: str) -> bool:
    """Returns whether a file's name is that of an HDF5 file."""
    return name.lower().endswith(SUFFIXES)


def index_samples(source: Path, split: Split | None = None) -> SamplesIndex:
    """Opens each file once for the number and the shape of its samples, which are not read."""
    files = sample_files(source, split)
    if not files:
        raise UserError(f"{str(source)!r} holds no HDF5 file; expected {LAYOUT}")
    digest, shapes = hashlib.sha256(), []
    for path in files:
        try:
            with damage_as_oserror(), open_hdf5(path) as file:
                shapes.append(inspect_samples(file))
        except (OSError, ValueError) as error:
            raise UserError(f"{str(path)!r}: {first_line(error)}") from None
        digest.update(os.fsencode(path.name) + f"\0{shapes[-1].num_rows}\0{path.stat().st_size}\0".encode())
    first = shapes[0]
    for path, shape in zip(files, shapes, strict=True):
        if _form(shape) != _form(first):
            raise UserError(f"{str(path)!r}: samples have {_form(shape)}, those of {files[0].name!r} {_form(first)}")
    return SamplesIndex(
        source=source,
        files=tuple(files),
        offsets=np.cumsum([0, *(shape.num_rows for shape in shapes)], dtype=np.int64),
        shape=first,
        sha256=digest.hexdigest(),
    )


def require_length(shape: FileShape, data: TextData, where: str) -> None:
    """Raises UserError if samples have another fixed length than the plan. `where`: key and path."""
    if shape.sequence_length not in (None, data.sequence_length):
        raise UserError(
            f"{where} has samples of {shape.sequence_length} tokens, data.sequence_length is {data.sequence_length}"
        )


def _form(shape: FileShape) -> str:
    if shape.sequence_length is None:
        return "variable length"
    return f"{shape.sequence_length} tokens and {shape.max_predictions} predictions"


def inspect_samples(file: Any) -> FileShape:
    """Returns the shape of an open file. Raises ValueError: it has neither layout; the message names the dataset."""
    import h5py

    def dataset_named(key: str) -> Any:
        if key in file and isinstance(dataset := file[key], h5py.Dataset):  # not `get`, which would hide damage
            return dataset
        raise ValueError(f"no dataset {key!r}; expected {LAYOUT}")

    if "packed_input_len" in file:
        raise ValueError("samples are packed (packed_input_len), which is not supported; give unpacked ones")
    variable = h5py.check_vlen_dtype(dataset_named("input_ids").dtype) is not None
    sizes: dict[str, tuple[int, ...]] = {}
    for key, type_name in _TYPES.items():
        if variable and key == "input_mask":
            continue
        dataset = dataset_named(key)
        dtype, dimensions, expected = dataset.dtype, 2, f"{type_name} of 2 dimensions"
        if key == LABEL:
            dimensions, expected = 1, f"{type_name} of 1 dimensions"
        elif variable:
            dtype, dimensions = h5py.check_vlen_dtype(dataset.dtype), 1
            expected = "variable-length integers"
        if dtype is None or dtype.kind not in "iu" or dataset.ndim != dimensions:
            raise ValueError(f"{key} is {dataset.dtype} of shape {dataset.shape}; expected {expected}")
        require_plausible(file, dataset)
        sizes[key] = dataset.shape
    rows = sizes["input_ids"][0]
    _require_consistent(sizes)
    if not rows:
        raise ValueError("no samples in it")
    if variable:
        return FileShape(num_rows=rows, sequence_length=None, max_predictions=None)
    return FileShape(
        num_rows=rows, sequence_length=sizes["input_ids"][1], max_predictions=sizes["masked_lm_positions"][1]
    )


def _require_consistent(sizes: Mapping[str, tuple[int, ...]]) -> None:
    rows = sizes["input_ids"][0]
    for key, size in sizes.items():
        reference = "input_ids" if key in PER_TOKEN else "masked_lm_positions"
        if size[0] != rows or (key != LABEL and size != sizes[reference]):
            raise ValueError(f"{key} has shape {size}, which does not fit {reference} of shape {sizes[reference]}")


class SampleRows:
    """Reads single rows of either layout, padded to one length. Can be pickled or forked."""

    def __init__(self, index: SamplesIndex, sequence_length: int, max_predictions: int) -> None:
        self.index, self._files = index, OpenFiles()
        self._sequence_length = sequence_length
        self._max_predictions = max_predictions

    def read(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Reads one sample as int64 arrays (1, S), (1, P), (1,). Raises OSError, or ValueError: the row is too long."""
        path, row = self.index.locate(index)
        with damage_as_oserror():
            datasets = self._files.content(path, _datasets)
            return read_rows(datasets, row, row + 1, self._sequence_length, self._max_predictions)

    def close(self) -> None:
        self._files.close()


def _datasets(file: Any) -> dict[str, Any]:
    """Returns the datasets of an open file, because a lookup takes as long as reading a row."""
    return {key: file[key] for key in _TYPES if key in file}


def read_rows(
    file: Any, start: int, stop: int, sequence_length: int, max_predictions: int
) -> dict[str, NDArray[np.int64]]:
    """Reads rows of an open file, or of its datasets by name, as (stop - start, S), (.., P) and (..,) int64.
    Predictions beyond P are dropped, missing ones are 0. Raises ValueError: a row of variable length has more than S
    tokens, or parts of different lengths.
    """
    import h5py

    if h5py.check_vlen_dtype(file["input_ids"].dtype) is not None:
        return _read_variable(file, start, stop, sequence_length, max_predictions)
    rows = {key: file[key][start:stop].astype(np.int64) for key in _TYPES}
    for key in PER_PREDICTION:
        predictions = rows[key][:, :max_predictions]
        missing = max_predictions - predictions.shape[1]
        if missing:
            predictions = np.pad(predictions, ((0, 0), (0, missing)))
        rows[key] = predictions
    return rows


def _read_variable(
    file: Any, start: int, stop: int, sequence_length: int, max_predictions: int
) -> dict[str, NDArray[np.int64]]:
    count = stop - start
    rows = {key: np.zeros((count, sequence_length), dtype=np.int64) for key in PER_TOKEN}
    rows |= {key: np.zeros((count, max_predictions), dtype=np.int64) for key in PER_PREDICTION}
    rows[LABEL] = file[LABEL][start:stop].astype(np.int64)
    for i in range(count):
        row = start + i
        ids, segments = file["input_ids"][row], file["segment_ids"][row]
        positions, labels = (file[key][row] for key in PER_PREDICTION)
        if len(ids) > sequence_length:
            raise ValueError(f"{len(ids)} tokens, at most {sequence_length} are expected")
        if len(ids) != len(segments) or len(positions) != len(labels):
            raise ValueError("parts of different lengths")
        rows["input_ids"][i, : len(ids)] = ids
        rows["segment_ids"][i, : len(ids)] = segments
        rows["input_mask"][i, : len(ids)] = 1
        for key, part in zip(PER_PREDICTION, (positions, labels), strict=True):
            predictions = part[:max_predictions]
            rows[key][i, : len(predictions)] = predictions
    return rows


def row_faults(rows: Rows, vocab_size: int | None) -> Iterator[tuple[int, str]]:
    """Yields the first fault of each bad row of `read_rows`: its number within the block, and the reason."""
    ids, mask, segments = (rows[key] for key in PER_TOKEN)
    positions, labels = (rows[key] for key in PER_PREDICTION)
    used = mask.sum(axis=1)
    limit, size = np.iinfo(np.int32).max, ""
    if vocab_size is not None:
        limit, size = vocab_size, f" of a vocabulary of {vocab_size}"
    columns = np.arange(ids.shape[1])
    checks = (
        ((mask != (columns < used[:, None])).any(axis=1) | (used == 0), "input_mask is not ones and then zeros"),
        (((ids < 0) | (ids >= limit)).any(axis=1), f"input_ids holds an id out of range{size}"),
        (((segments < 0) | (segments > 1)).any(axis=1), "segment_ids holds other than 0 and 1"),
        (((positions < 0) | (positions >= used[:, None])).any(axis=1), "masked_lm_positions is outside the tokens"),
        (~(positions > 0).any(axis=1), "masked_lm_positions holds no prediction"),
        (((labels < 0) | (labels >= limit)).any(axis=1), f"masked_lm_ids holds an id out of range{size}"),
        ((rows[LABEL] < 0) | (rows[LABEL] > 1), f"{LABEL} is neither 0 nor 1"),
    )
    reported: set[int] = set()
    for wrong, reason in checks:
        for row in np.flatnonzero(wrong).tolist():
            if row not in reported:
                reported.add(row)
                yield row, reason


def file_fault(path: Path, vocab_size: int | None) -> str | None:
    """Reads a whole file; returns the number of bad rows and the fault of the first, or None."""
    try:
        with damage_as_oserror(), open_hdf5(path) as file:
            shape = inspect_samples(file)
            if shape.sequence_length is None and (fault := heap_fault(path)) is not None:
                return fault
            longest = shape.sequence_length or max(map(len, file["input_ids"]))
            predictions = shape.max_predictions or max(1, *map(len, file["masked_lm_positions"]))
            faults: list[tuple[int, str]] = []
            block = _BLOCK if shape.sequence_length else 1
            for start in range(0, shape.num_rows, block):
                stop = min(start + block, shape.num_rows)
                try:
                    rows = read_rows(file, start, stop, longest, predictions)
                except ValueError as error:  # a row of variable length
                    faults.append((start, str(error)))
                    continue
                faults += [(start + row, reason) for row, reason in row_faults(rows, vocab_size)]
    except (OSError, ValueError) as error:
        return first_line(error)
    if not faults:
        return None
    row, reason = min(faults)
    if len(faults) == 1:
        return f"row {row}: {reason}"
    return f"row {row}: {reason} (and {len(faults) - 1} more rows of {shape.num_rows})"
