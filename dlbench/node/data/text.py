"""Text to BERT batches: raw text, masked differently in every epoch, or samples prepared in HDF5.

Padding is determined on the host, so that nothing waits for the device. `model.attention auto` removes the mask from
batches without padding. `unpadded` adds index arrays for each part of a batch (`train.gradient_accumulation`), with `@`
and the number of the part after their names. For a part of n samples with T tokens that are no padding:

- tokens (T,) int64: indices of the tokens in the flattened (n, S) arrays, sample by sample;
- starts (n + 1,) int32: index of the first token of each sample among them, and T;
- places (n, P) int64: indices of the masked positions among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dlbench.datasets.splits import Split
from dlbench.datasets.text.corpus import TextCorpus, Vocabulary, load_vocabulary, read_corpus
from dlbench.datasets.text.pretraining_hdf5 import (
    LABEL,
    PER_PREDICTION,
    PER_TOKEN,
    FileShape,
    SampleRows,
    SamplesIndex,
    index_samples,
    require_length,
    row_faults,
    sample_files,
)
from dlbench.datasets.text.pretraining_samples import SampleMaker, SampleRule
from dlbench.errors import UserError
from dlbench.node.data.node_sharing import ALONE, IndexBroadcast
from dlbench.node.data.reader import Arrays, BadSampleError, DataReader, Key, PreparedSample, Raw, path_text
from dlbench.opening import why_unreadable
from dlbench.specs.workload import BertModel, ModelSpec, TextData

Batch = dict[str, torch.Tensor]
_PART = "@"


def arranged(batch: Batch, model: ModelSpec, num_parts: int = 1) -> Batch:
    """Returns a batch for `model.attention`: unchanged, without its mask, or with index arrays instead of it."""
    if model.padding == "masked" or "attention_mask" not in batch:
        return batch
    mask = batch["attention_mask"]
    arrays = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    if bool(mask.all()):
        return arrays
    if model.padding == "auto":
        return batch
    size = len(mask) // num_parts
    for number in range(num_parts):
        rows = slice(number * size, (number + 1) * size)
        for name, tensor in _packed(mask[rows] != 0, batch["masked_positions"][rows]).items():
            arrays[f"{name}{_PART}{number}"] = tensor
    return arrays


def _packed(mask: torch.Tensor, positions: torch.Tensor) -> Batch:
    """Returns the index arrays of one part, from `mask` (n, S), true for tokens, and masked `positions` (n, P)."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.int32)
    starts[1:] = mask.sum(1).cumsum(0)
    token_index = (mask.flatten().cumsum(0) - 1).view(mask.shape)
    return {
        "tokens": mask.flatten().nonzero().squeeze(1),
        "starts": starts,
        # Unused positions are 0, the first token of each sample.
        "places": token_index.gather(1, positions),
    }


def parts(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Yields equal parts of a batch, as views, each with its own index arrays."""
    size = next(iter(batch.values())).size(0) // num_parts
    for number in range(num_parts):
        part, suffix = {}, f"{_PART}{number}"
        for name, tensor in batch.items():
            if _PART not in name:
                part[name] = tensor if num_parts == 1 else tensor[number * size : (number + 1) * size]
            elif name.endswith(suffix):
                part[name.removesuffix(suffix)] = tensor
        yield part


def open_text(
    source: Path, model: BertModel, spec: TextData, seed: int, *, training: bool, lister: IndexBroadcast = ALONE
) -> DataReader:
    """Opens HDF5 samples or raw text; its pairs and masks, by `seed`, differ between epochs only in `training`."""
    content = lister.index(
        lambda: _listed(source, model, spec, training), (SamplesIndex, FileShape, TextCorpus, Vocabulary)
    )
    if isinstance(content, SamplesIndex):
        return PretrainingHdf5Reader(content, spec, model.vocab_size)
    return TextReader(content, spec, seed, training=training)


def _listed(source: Path, model: BertModel, spec: TextData, training: bool) -> SamplesIndex | TextCorpus:
    split: Split = "train" if training else "validation"
    if source.exists() and sample_files(source, split):
        return index_samples(source, split)
    vocabulary = load_vocabulary(spec.vocabulary)
    if len(vocabulary) > model.vocab_size:
        raise UserError(
            f"data.vocabulary {spec.vocabulary} has {len(vocabulary)} entries, but model.vocab_size is "
            f"{model.vocab_size}"
        )
    return read_corpus(source, vocabulary, split)


class TextReader(DataReader):
    """Samples of a corpus: one per epoch from each of its full-length runs of sentences (`SampleMaker.runs`)."""

    def __init__(self, corpus: TextCorpus, spec: TextData, seed: int, *, training: bool = True) -> None:
        rule = SampleRule(
            sequence_length=spec.sequence_length,
            max_predictions=spec.max_predictions,
            masked_lm_probability=spec.masked_lm_probability,
        )
        self._maker, self._seed, self._training = SampleMaker(corpus, rule), seed, training
        self._runs, self._documents = self._maker.runs()
        self.num_samples = len(self._runs)

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """Returns no bytes: every rank has the whole corpus in memory, since pairs are drawn from all of it."""
        return Raw(b"", "memory")

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        epoch, index = key
        if not self._training:
            epoch = 0
        generator = np.random.default_rng([self._seed, epoch, index])
        start, end = self._runs[index]
        document = int(self._documents[index])
        pair = self._maker.draw_pair(document, int(start), int(end), generator)
        return PreparedSample(self._maker.sample(pair, generator))

    def num_bytes(self, index: int) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"{str(self._maker.corpus.source)!r}, run of sentences {index}"

    def files(self) -> list[Path]:
        return []  # the text was read completely when it was opened

    def describe(self) -> dict[str, object]:
        corpus = self._maker.corpus
        return {
            "kind": "text",
            "path": path_text(corpus.source),
            "documents": corpus.num_documents,
            "tokens": len(corpus.tokens),
            "vocabulary": path_text(corpus.vocabulary.path),
            "vocabulary_sha256": corpus.vocabulary.sha256,
            "index_sha256": corpus.sha256,
        }


class PretrainingHdf5Reader(DataReader):
    """Samples prepared in HDF5, the same in every epoch; predictions beyond P of `spec` are left out."""

    def __init__(self, index: SamplesIndex, spec: TextData, vocab_size: int) -> None:
        require_length(index.shape, spec, f"data.source {str(index.source)!r}")
        self._index, self._vocab_size = index, vocab_size
        self.num_samples = index.num_samples
        self._rows = SampleRows(index, spec.sequence_length, spec.max_predictions)
        self._layout = (
            *((name, spec.sequence_length) for name in PER_TOKEN),
            *((name, spec.max_predictions) for name in PER_PREDICTION),
            (LABEL, 1),
        )

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """Reads the arrays of a row in the order of `_layout`, as little-endian int32."""
        try:
            rows = self._rows.read(index)
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise self._bad(index, why_unreadable(error)) from None
        for _, fault in row_faults(rows, self._vocab_size):
            raise self._bad(index, fault)
        return Raw(b"".join(rows[name].astype("<i4").tobytes() for name, _ in self._layout))

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        if len(data) != self.num_bytes(key[1]):
            raise self._bad(key[1], f"{len(data)} of {self.num_bytes(key[1])} bytes are there")
        values, row, start = np.frombuffer(data, "<i4").astype(np.int64), {}, 0
        for name, length in self._layout:
            row[name] = values[start : start + length]
            start += length
        positions = row["masked_lm_positions"]
        used = positions > 0
        return PreparedSample(
            {
                "input_ids": row["input_ids"],
                "token_type_ids": row["segment_ids"],
                "attention_mask": row["input_mask"],
                "masked_positions": positions,
                # NVIDIA's files hold 0 at unused places, but others need not.
                "masked_ids": np.where(used, row["masked_lm_ids"], 0),
                "masked_weights": used.astype(np.float32),
                "next_sentence": row[LABEL][0],
            }
        )

    def num_bytes(self, index: int) -> int:
        return 4 * sum(length for _, length in self._layout)

    def name(self, index: int) -> str:
        path, row = self._index.locate(index)
        return f"{str(path)!r}, row {row}"

    def _bad(self, index: int, fault: str) -> BadSampleError:
        return BadSampleError(f"{self.name(index)}: {fault}")

    def files(self) -> list[Path]:
        return list(self._index.files)

    def describe(self) -> dict[str, object]:
        shape = self._index.shape
        return {
            "kind": "text-samples",
            "path": path_text(self._index.source),
            "files": len(self._index.files),
            "sequence_length": shape.sequence_length,
            "max_predictions": shape.max_predictions,
            "index_sha256": self._index.sha256,
        }

    def close(self) -> None:
        self._rows.close()
