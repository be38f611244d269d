"""BERT samples prepared in HDF5, in the two layouts that NVIDIA published, become an index and single rows.

- fixed: `input_ids` int32 (n, S), `input_mask` int8 (n, S), `segment_ids` int8 (n, S), `masked_lm_positions` int32
  (n, P), `masked_lm_ids` int32 (n, P), `next_sentence_labels` int8 (n,), 1 if B is random. Unused predictions have
  position 0, which [CLS] holds. Written by `create_pretraining_data.py` of NVIDIA's DeepLearningExamples (BERT for
  PyTorch) and of their MLPerf Training submissions.
- variable length: the same without `input_mask`; `input_ids` (int16), `segment_ids` (int8), `masked_lm_positions` and
  `masked_lm_ids` (int16) are HDF5 variable-length types (n,) without padding. Written by `convert_fixed2variable.py`
  and `pick_eval_samples_varlength.py` of their MLPerf submissions from v1.1 on. The packed layout of later rounds
  (several samples a row) is not read.

Other integer types than those named are read, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.datasets.account import sample_names
from dlbench.datasets.arrays import OpenFiles, damage_as_oserror, heap_fault, open_hdf5, require_plausible
from dlbench.datasets.splits import Split
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
    """What one file holds."""

    num_rows: int
    sequence_length: int | None  # s; none: of variable length
    max_predictions: int | None  # p; none: of variable length


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplesIndex:
    """Which samples there are, all of one shape."""

    source: Path
    files: tuple[Path, ...]
    offsets: NDArray[np.int64]  # (num_files + 1,) first sample of each file
    shape: FileShape  # of a row; `num_rows` is that of the first file
    sha256: str  # digest of file names, row counts and bytes; contents are not read

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        file = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.files[file], index - int(self.offsets[file])


def sample_files(source: Path, split: Split | None = None) -> list[Path]:
    """The HDF5 files at a path: the file itself or those of a folder, sorted; empty if there are none."""
    if not source.is_dir():
        return [source] if is_sample_file(source.name) else []
    names = [path.name for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
    return [source / name for name in sample_names(source, names, is_sample_file, split, LAYOUT)]


def is_sample_file(name: str) -> bool:
    """Returns whether a file's name is one of HDF5."""
    return name.lower().endswith(SUFFIXES)


def index_samples(source: Path, split: Split | None = None) -> SamplesIndex:
    """Opens each file once, to learn how many samples of which shape it holds; samples are not read."""
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
        mine, others = _form(shape), _form(first)
        if mine != others:
            raise UserError(f"{str(path)!r}: samples have {mine}, those of {files[0].name!r} {others}")
    return SamplesIndex(
        source=source,
        files=tuple(files),
        offsets=np.cumsum([0, *(s.num_rows for s in shapes)], dtype=np.int64),
        shape=first,
        sha256=digest.hexdigest(),
    )


def require_length(shape: FileShape, data: TextData, where: str) -> None:
    """Raises UserError: samples have another fixed length than the plan says. `where`: key and path."""
    if shape.sequence_length not in (None, data.sequence_length):
        raise UserError(
            f"{where} has samples of {shape.sequence_length} tokens, data.sequence_length is {data.sequence_length}"
        )


def _form(shape: FileShape) -> str:
    if shape.sequence_length is None:
        return "variable length"
    return f"{shape.sequence_length} tokens and {shape.max_predictions} predictions"


def inspect_samples(file: Any) -> FileShape:
    """The shape of an open file. Raises ValueError: it has neither layout; the message names the dataset."""
    import h5py

    def found(key: str) -> Any:
        if key in file and isinstance(dataset := file[key], h5py.Dataset):  # not `get`, which would hide damage
            return dataset
        raise ValueError(f"no dataset {key!r}; expected {LAYOUT}")

    if "packed_input_len" in file:
        raise ValueError("samples are packed (packed_input_len); unpacked ones are expected")
    variable = h5py.check_vlen_dtype(found("input_ids").dtype) is not None
    keys = [key for key in _TYPES if not (variable and key == "input_mask")]
    sizes: dict[str, tuple[int, ...]] = {}
    for key in keys:
        dataset = found(key)
        ragged = variable and key != LABEL
        dtype = h5py.check_vlen_dtype(dataset.dtype) if ragged else dataset.dtype
        dimensions = 1 if ragged or key == LABEL else 2
        if dtype is None or dtype.kind not in "iu" or dataset.ndim != dimensions:
            form = "variable-length integers" if ragged else f"{_TYPES[key]} of {dimensions} dimensions"
            raise ValueError(f"{key} is {dataset.dtype} of shape {dataset.shape}; expected {form}")
        require_plausible(file, dataset)
        sizes[key] = dataset.shape
    rows = sizes["input_ids"][0]
    for key, size in sizes.items():
        alike = "input_ids" if key in PER_TOKEN else "masked_lm_positions"
        if size[0] != rows or (key != LABEL and size != sizes[alike]):
            raise ValueError(f"{key} has shape {size}, which does not fit {alike} of shape {sizes[alike]}")
    if not rows:
        raise ValueError("no samples in it")
    if variable:
        return FileShape(num_rows=rows, sequence_length=None, max_predictions=None)
    return FileShape(
        num_rows=rows, sequence_length=sizes["input_ids"][1], max_predictions=sizes["masked_lm_positions"][1]
    )


class SampleRows:
    """Reads single rows, padded to one length whatever the layout. It may be pickled or forked."""

    def __init__(self, index: SamplesIndex, sequence_length: int, max_predictions: int) -> None:
        self.index, self._files = index, OpenFiles()
        self._sequence_length = sequence_length
        self._max_predictions = max_predictions

    def read(self, index: int) -> dict[str, NDArray[np.int64]]:
        """One sample as arrays (1, S), (1, P) and (1,) int64, by the names of the fixed layout.

        Raises OSError: the file is damaged or has gone. ValueError: a row of variable length is too long.
        """
        path, row = self.index.locate(index)
        with damage_as_oserror():
            datasets = self._files.content(path, _datasets)
            return read_rows(datasets, row, row + 1, self._sequence_length, self._max_predictions)

    def close(self) -> None:
        self._files.close()


def _datasets(file: Any) -> dict[str, Any]:
    """Returns the datasets of an open file: to look them up takes as long as reading a row."""
    return {key: file[key] for key in _TYPES if key in file}


def read_rows(
    file: Any, start: int, stop: int, sequence_length: int, max_predictions: int
) -> dict[str, NDArray[np.int64]]:
    """Rows of an open file, or of its datasets by name, as (stop - start, S), (.., P) and (..,) int64.

    Predictions beyond P are cut off, missing ones are 0; the number of tokens of the fixed layout is left as it is.
    Raises ValueError: a row of variable length has more than S tokens, or parts of different lengths.
    """
    import h5py

    if h5py.check_vlen_dtype(file["input_ids"].dtype) is not None:
        return _read_variable(file, start, stop, sequence_length, max_predictions)
    rows = {key: file[key][start:stop].astype(np.int64) for key in _TYPES}
    for key in PER_PREDICTION:
        kept = rows[key][:, :max_predictions]
        missing = max_predictions - kept.shape[1]
        rows[key] = np.pad(kept, ((0, 0), (0, missing))) if missing else kept
    return rows


def _read_variable(
    file: Any, start: int, stop: int, sequence_length: int, max_predictions: int
) -> dict[str, NDArray[np.int64]]:
    count = stop - start
    rows = {
        key: np.zeros((count, sequence_length if key in PER_TOKEN else max_predictions), dtype=np.int64)
        for key in _TYPES
        if key != LABEL
    }
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
            kept = part[:max_predictions]
            rows[key][i, : len(kept)] = kept
    return rows


def row_faults(rows: Rows, vocab_size: int | None) -> Iterator[tuple[int, str]]:
    """What is wrong in rows (as `read_rows` gives them): number within the block and reason, one fault a row."""
    ids, mask, segments = (rows[key] for key in PER_TOKEN)
    positions, labels = (rows[key] for key in PER_PREDICTION)
    used = mask.sum(axis=1)
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    size = "" if vocab_size is None else f" of a vocabulary of {vocab_size}"
    place = np.arange(ids.shape[1])
    checks = (
        ((mask != (place < used[:, None])).any(axis=1) | (used == 0), "input_mask is not ones and then zeros"),
        (((ids < 0) | (ids >= limit)).any(axis=1), f"input_ids holds an id out of range{size}"),
        (((segments < 0) | (segments > 1)).any(axis=1), "segment_ids holds other than 0 and 1"),
        (((positions < 0) | (positions >= used[:, None])).any(axis=1), "masked_lm_positions lies outside the tokens"),
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
    """Reads a whole file; what is wrong with it, or none. Counts bad rows and describes the first."""
    try:
        with damage_as_oserror(), open_hdf5(path) as file:
            shape = inspect_samples(file)
            if shape.sequence_length is None and (fault := heap_fault(path)) is not None:
                return fault
            longest = shape.sequence_length or max(len(ids) for ids in file["input_ids"])
            predictions = shape.max_predictions or max(1, *(len(p) for p in file["masked_lm_positions"]))
            bad: list[tuple[int, str]] = []
            block = _BLOCK if shape.sequence_length else 1
            for start in range(0, shape.num_rows, block):
                stop = min(start + block, shape.num_rows)
                try:
                    rows = read_rows(file, start, stop, longest, predictions)
                except ValueError as error:  # of a row of variable length
                    bad.append((start, str(error)))
                    continue
                bad += [(start + row, reason) for row, reason in row_faults(rows, vocab_size)]
    except (OSError, ValueError) as error:
        return first_line(error)
    if not bad:
        return None
    row, reason = min(bad)
    more = f" (and {len(bad) - 1} more rows of {shape.num_rows})" if len(bad) > 1 else ""
    return f"row {row}: {reason}{more}"
