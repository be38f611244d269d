"""Text to BERT batches: raw text, paired and masked differently in every epoch, or samples prepared in HDF5.

Padding is determined on the host, so that nothing waits for the device. `model.attention auto` removes the mask from
batches without padding. `unpadded` adds index arrays for each part of a batch (`train.gradient_accumulation`), with `@`
and the number of the part after their names. For a part of n samples with T tokens that are no padding:

- tokens (T,) int64: indices of the tokens in the flattened (n, S) arrays, sample by sample;
- starts (n + 1,) int32: index of the first token of each sample among them, and T;
- places (n, P) int64: indices of the masked positions among them.

Pairs and masks after Devlin et al. (2018), sections 3.1 and A.1, and their `create_pretraining_data.py` (also used by
MLPerf Training): sentences of a document are collected until they have sequence_length - 3 tokens. A is a random number
of the first of them. In half of the cases B is the rest, else it starts at a random sentence of another document and
has as many sentences as fill the sequence. Tokens are cut at random from the front or the back of the longer of A and
B, until [CLS] A [SEP] B [SEP] fits. Of n tokens, including [CLS] and [SEP], min(max_predictions, max(1, round(0.15 n)))
are predicted, never [CLS], [SEP] or padding; of these 80 % become [MASK], 10 % a random word, 10 % are unchanged.

Differences: a single sentence is cut in its middle, so that B can be its second half; the reference gives it a random
B. A random B may come from any other document of the split; the reference uses only the same input file. Pairs are
drawn in every epoch, which needs a fixed number of samples: documents are cut once into full-length sequences of
sentences (`runs`), and sentences that a random B replaces are left out of that epoch. A random word is never a special
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.datasets.splits import Split
from dlbench.datasets.text.corpus import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    TextCorpus,
    Vocabulary,
    load_vocabulary,
    read_corpus,
)
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
from dlbench.errors import UserError
from dlbench.node.data.node_sharing import ALONE, IndexBroadcast
from dlbench.node.data.reader import Arrays, DataReader, Key, PreparedSample, Raw, path_text
from dlbench.opening import why_unreadable
from dlbench.specs.workload import BertModel, ModelSpec, TextData

Ids = NDArray[np.int64]
_MASKED, _RANDOM = 0.8, 0.9  # cumulative shares: below the first [MASK], below the second a random word
NUM_SPECIAL = 3  # [CLS] and two [SEP]
Batch = dict[str, torch.Tensor]
_PART = "@"


def num_predictions(num_tokens: int, max_predictions: int, probability: float) -> int:
    """Returns how many of `num_tokens` tokens, including special ones, are predicted."""
    return min(max_predictions, max(1, round(num_tokens * probability)))


def mask_tokens(
    ids: Ids, candidates: Ids, num: int, generator: np.random.Generator, *, mask_id: int, words: Ids
) -> tuple[Ids, Ids, Ids]:
    """Masks `num` of the candidates, with random words out of `words`. Returns the masked sequence (S,), the predicted
    positions (k,), ascending, and their original ids (k,).
    """
    count = min(num, len(candidates))
    positions = np.sort(generator.permutation(candidates)[:count])
    labels = ids[positions]
    draw = generator.random(count)
    drawn = words[generator.integers(len(words), size=count)]
    masked = ids.copy()
    masked[positions] = np.where(draw < _MASKED, mask_id, np.where(draw < _RANDOM, drawn, labels))
    return masked, positions, labels


class Pair(NamedTuple):
    """The tokens of A and B of a sample in the corpus, before they are cut to fit."""

    document: int
    begin: int  # first token of A
    split: int  # end of A
    stop: int  # end of the B that follows A
    random_next: bool  # whether B is drawn from another document instead


class SampleMaker:
    """Makes the samples of a corpus. All random numbers come from the caller's generator."""

    def __init__(self, corpus: TextCorpus, spec: TextData) -> None:
        if spec.sequence_length < NUM_SPECIAL + 2:
            raise UserError(f"data.sequence_length {spec.sequence_length} is too short, give at least 5 tokens")
        self.corpus, self.spec = corpus, spec
        if corpus.num_documents < 2:
            raise UserError(
                f"{str(corpus.source)!r} holds a single document, next-sentence prediction needs two or more; put a "
                "blank line between documents"
            )
        self.room = spec.sequence_length - NUM_SPECIAL
        vocabulary = corpus.vocabulary
        self._pad, self._cls, self._sep, self._mask = (vocabulary.id_of(token) for token in (PAD, CLS, SEP, MASK))
        special = [vocabulary.id_of(token) for token in SPECIAL]
        self._words = np.setdiff1d(np.arange(len(vocabulary), dtype=np.int64), special)
        if not len(self._words):
            raise UserError(f"data.vocabulary {vocabulary.path} has no word except {' '.join(SPECIAL)}")
        self._positions = np.arange(spec.sequence_length)

    def runs(self) -> tuple[Ids, Ids]:
        """Cuts documents into runs of sentences of full length: sentences begin and end (n, 2), document (n,)."""
        runs, documents = [], []
        for document in range(self.corpus.num_documents):
            start, stop = self._sentences(document)
            while start < stop:
                end = self._gather(start, stop, self.room)
                runs.append((start, end))
                documents.append(document)
                start = end
        return np.array(runs, dtype=np.int64), np.array(documents, dtype=np.int64)

    def draw_pair(self, document: int, start: int, end: int, generator: np.random.Generator) -> Pair:
        """Draws the end of A, and whether B is random, for the sentences `start` to `end` of a document."""
        offsets = self.corpus.sentence_offsets
        begin, stop = int(offsets[start]), int(offsets[end])
        split = (begin + stop + 1) // 2
        if end - start > 1:
            split = int(offsets[int(generator.integers(start + 1, end))])
        # A single token cannot be cut in two.
        random_next = bool(generator.random() < 0.5) or split == stop
        return Pair(document, begin, split, stop, random_next)

    def sample(self, pair: Pair, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Makes one sample: cuts A and B to fit, joins them, and masks tokens. Returns input_ids, token_type_ids,
        attention_mask (S,) int64; masked_positions, masked_ids (P,) int64, 0 if unused; masked_weights (P,) float32, 0
        if unused; next_sentence () int64, 1 if B is random.
        """
        first = self.corpus.tokens[pair.begin : pair.split].astype(np.int64)
        if pair.random_next:
            second = self._elsewhere(pair.document, self.room - len(first), generator)
        else:
            second = self.corpus.tokens[pair.split : pair.stop]
        first, second = self._trim(first, second.astype(np.int64), generator)
        ids = np.full(self.spec.sequence_length, self._pad, dtype=np.int64)
        used, middle = len(first) + len(second) + NUM_SPECIAL, len(first) + 1
        ids[0], ids[middle], ids[used - 1] = self._cls, self._sep, self._sep
        ids[1:middle] = first
        ids[middle + 1 : used - 1] = second
        all_positions = self._positions
        candidates = np.concatenate([all_positions[1:middle], all_positions[middle + 1 : used - 1]])
        num = num_predictions(used, self.spec.max_predictions, self.spec.masked_lm_probability)
        masked, positions, labels = mask_tokens(ids, candidates, num, generator, mask_id=self._mask, words=self._words)
        count, room = len(positions), self.spec.max_predictions
        masked_positions, masked_ids = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        masked_positions[:count], masked_ids[:count] = positions, labels
        return {
            "input_ids": masked,
            "token_type_ids": ((all_positions > middle) & (all_positions < used)).astype(np.int64),
            "attention_mask": (all_positions < used).astype(np.int64),
            "masked_positions": masked_positions,
            "masked_ids": masked_ids,
            "masked_weights": (np.arange(room) < count).astype(np.float32),
            "next_sentence": np.asarray(pair.random_next, dtype=np.int64),
        }

    def _sentences(self, document: int) -> tuple[int, int]:
        return int(self.corpus.document_offsets[document]), int(self.corpus.document_offsets[document + 1])

    def _gather(self, start: int, stop: int, target: int) -> int:
        """Returns the end of the first sentences from `start` on that have `target` tokens together, at most `stop`."""
        offsets = self.corpus.sentence_offsets
        # No sentence is empty, so that at most `target` of them are needed.
        ends = offsets[start + 1 : min(stop, start + target) + 1]
        return min(start + 1 + int(np.searchsorted(ends, offsets[start] + target)), stop)

    def _elsewhere(self, document: int, num_tokens: int, generator: np.random.Generator) -> NDArray[Any]:
        """Returns whole sentences, at least one, from another document: `num_tokens` tokens, or fewer at its end."""
        # The last document replaces the given one, so that all others are equally likely.
        last = self.corpus.num_documents - 1
        other = int(generator.integers(last))
        if other == document:
            other = last
        start, stop = self._sentences(other)
        sentence = int(generator.integers(start, stop))
        end = self._gather(sentence, stop, max(1, num_tokens))
        offsets = self.corpus.sentence_offsets
        return self.corpus.tokens[int(offsets[sentence]) : int(offsets[end])]

    def _trim(self, first: Ids, second: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Shortens the longer of the two until both fit, at random from its front and its back."""
        excess = len(first) + len(second) - self.room
        if excess <= 0:
            return first, second
        longer = 0 if len(first) > len(second) else 1
        longer_only = min(excess, abs(len(first) - len(second)))  # tokens to cut until both have equal lengths
        shared = excess - longer_only
        cuts = [shared // 2, shared // 2]
        cuts[longer] = longer_only + shared - shared // 2
        trimmed = []
        for part, cut in zip((first, second), cuts, strict=True):
            front = int(generator.binomial(cut, 0.5))
            trimmed.append(part[front : len(part) - (cut - front)])
        return trimmed[0], trimmed[1]


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
        self._maker, self._seed, self._training = SampleMaker(corpus, spec), seed, training
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
