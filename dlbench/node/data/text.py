"""Tokenised documents become BERT samples: sentence pairs for next-sentence prediction, masked anew in every epoch.

Devlin et al. (2018), sections 3.1 and A.1. A sample is a run of sentences of one document, as many as fill the sequence
([CLS] A [SEP] B [SEP]). In half of the cases B is what follows A; otherwise B is drawn from another document. Of the
tokens, 15 % are chosen for prediction: 80 % of them become [MASK], 10 % a random word, 10 % stay. Everything is drawn
from (seed, epoch, sample). Unlike the reference, no short sequences are mixed in, and a document's sentences that a
random B displaces are not used elsewhere in that epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlbench.datasets.text_corpus import TextCorpus
from dlbench.datasets.vocabulary import CLS, MASK, PAD, SEP, SPECIAL
from dlbench.errors import UserError
from dlbench.node.data.reader import Sample, path_text
from dlbench.node.data.sharding import Key
from dlbench.specs.workload import TextData

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

_NUM_SPECIAL = 3  # [CLS] and two [SEP]
_MASKED, _RANDOM = 0.8, 0.9  # cumulative shares: below the first [MASK], below the second a random word


class TextReader:
    """Samples of a corpus, with S = sequence_length and P = max_predictions.

    input_ids, token_type_ids, attention_mask (S,) int64; masked_positions, masked_ids (P,) int64, unused places 0;
    masked_weights (P,) float32; next_sentence () int64, 1 if B is random.

    Raises:
        UserError: the sequence is too short for two segments, the corpus has one document only, or the vocabulary has
            no words.
    """

    def __init__(self, corpus: TextCorpus, spec: TextData, seed: int) -> None:
        if spec.sequence_length < _NUM_SPECIAL + 2:
            raise UserError(f"data.sequence_length {spec.sequence_length} is too short, 5 tokens are the least")
        if corpus.num_documents < 2:
            raise UserError(
                f"{str(corpus.source)!r} holds a single document, next-sentence prediction needs two or more; put a "
                "blank line between documents"
            )
        self._corpus, self._spec, self._seed = corpus, spec, seed
        self._room = spec.sequence_length - _NUM_SPECIAL
        vocabulary = corpus.vocabulary
        self._pad, self._cls, self._sep, self._mask = (vocabulary.id_of(token) for token in (PAD, CLS, SEP, MASK))
        special = [vocabulary.id_of(token) for token in SPECIAL]
        # Words that may stand in for a masked one.
        self._words = np.setdiff1d(np.arange(len(vocabulary), dtype=np.int64), special)
        if not len(self._words):
            raise UserError(f"data.vocabulary {vocabulary.path} has no word beside {' '.join(SPECIAL)}")
        self._starts, self._documents = _runs(corpus, self._room)

    @property
    def num_samples(self) -> int:
        """Runs of sentences."""
        return len(self._starts)

    def read(self, key: Key) -> Sample:
        """One sample; cannot fail, the corpus has been checked when it was tokenised."""
        generator = np.random.default_rng([self._seed, *key])
        first, second, random_next = self._pair(key[1], generator)
        length = self._spec.sequence_length
        ids = np.full(length, self._pad, dtype=np.int64)
        used = len(first) + len(second) + _NUM_SPECIAL
        middle = len(first) + 1
        ids[0], ids[middle], ids[used - 1] = self._cls, self._sep, self._sep
        ids[1:middle] = first
        ids[middle + 1 : used - 1] = second
        place = np.arange(length)
        arrays: dict[str, NDArray[np.generic]] = {
            "input_ids": ids,
            "token_type_ids": ((place > middle) & (place < used)).astype(np.int64),
            "attention_mask": (place < used).astype(np.int64),
            "next_sentence": np.asarray(random_next, dtype=np.int64),
        }
        words = np.concatenate([place[1:middle], place[middle + 1 : used - 1]])
        arrays.update(self._mask_words(ids, words, generator))
        return Sample(arrays)

    def _pair(self, index: int, generator: np.random.Generator) -> tuple[Ids, Ids, bool]:
        """Tokens of A and B, together at most `_room` and each at least one, and whether B is random."""
        sentences = self._corpus.sentence_offsets
        start, end = self._starts[index]
        begin, stop = int(sentences[start]), int(sentences[end])
        # A ends behind one of its sentences, or in the middle of the only one.
        alone = end - start == 1
        split = (begin + stop + 1) // 2 if alone else int(sentences[generator.integers(start + 1, end)])
        random_next = bool(generator.random() < 0.5) or split == stop
        first = self._corpus.tokens[begin:split]
        if random_next:
            second = self._elsewhere(int(self._documents[index]), self._room - len(first), generator)
        else:
            second = self._corpus.tokens[split:stop]
        return (*self._trim(first.astype(np.int64), second.astype(np.int64), generator), random_next)

    def _elsewhere(self, document: int, wanted: int, generator: np.random.Generator) -> Ids:
        """`wanted` tokens from a random sentence of another document on, one sentence at least, or up to its end.

        A whole sentence even where less is wanted: a stump would give away that B is random.
        """
        documents, sentences = self._corpus.document_offsets, self._corpus.sentence_offsets
        other = int(generator.integers(self._corpus.num_documents - 1))
        other += other >= document
        start = int(generator.integers(documents[other], documents[other + 1]))
        begin, sentence_end = int(sentences[start]), int(sentences[start + 1])
        document_end = int(sentences[documents[other + 1]])
        tokens: Ids = self._corpus.tokens[begin : min(document_end, max(sentence_end, begin + wanted))]
        return tokens

    def _trim(self, first: Ids, second: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Shortens the longer of the two until both fit, from its front and its back at random."""
        excess = len(first) + len(second) - self._room
        if excess <= 0:
            return first, second
        lengths = [len(first), len(second)]
        longer = 0 if lengths[0] > lengths[1] else 1
        alone = min(excess, abs(lengths[0] - lengths[1]))
        rest = excess - alone
        cuts = [rest // 2, rest // 2]
        cuts[longer] = alone + rest - rest // 2
        trimmed = []
        for part, cut in zip((first, second), cuts, strict=True):
            front = int(generator.binomial(cut, 0.5))
            trimmed.append(part[front : len(part) - (cut - front)])
        return trimmed[0], trimmed[1]

    def _mask_words(self, ids: Ids, words: Ids, generator: np.random.Generator) -> dict[str, NDArray[np.generic]]:
        """Chooses places among `words` and hides them in `ids`, in place."""
        spec = self._spec
        num = min(spec.max_predictions, max(1, round(len(words) * spec.masked_lm_probability)), len(words))
        chosen = np.sort(generator.choice(words, num, replace=False))
        positions = np.zeros(spec.max_predictions, dtype=np.int64)
        targets = np.zeros(spec.max_predictions, dtype=np.int64)
        weights = np.zeros(spec.max_predictions, dtype=np.float32)
        positions[:num], targets[:num], weights[:num] = chosen, ids[chosen], 1.0
        draw = generator.random(num)
        replacement = np.where(draw < _MASKED, self._mask, generator.choice(self._words, num))
        ids[chosen] = np.where(draw < _RANDOM, replacement, ids[chosen])
        return {"masked_positions": positions, "masked_ids": targets, "masked_weights": weights}

    def describe(self) -> dict[str, object]:
        """Kind, path, sizes and digest of text and vocabulary."""
        corpus = self._corpus
        return {
            "kind": "text",
            "path": path_text(corpus.source),
            "documents": corpus.num_documents,
            "tokens": len(corpus.tokens),
            "vocabulary": path_text(corpus.vocabulary.path),
            "vocabulary_sha256": corpus.vocabulary.sha256,
            "index_sha256": corpus.sha256,
        }

    def close(self) -> None:
        """Nothing is open."""


def _runs(corpus: TextCorpus, room: int) -> tuple[Ids, Ids]:
    """Cuts documents into runs of sentences that reach `room` tokens, the last of a document perhaps fewer.

    Returns (n, 2) first sentence and the one behind the last, and (n,) document of each run.
    """
    runs, documents = [], []
    offsets = corpus.sentence_offsets
    for document in range(corpus.num_documents):
        start, stop = int(corpus.document_offsets[document]), int(corpus.document_offsets[document + 1])
        while start < stop:
            # The first sentence that ends at or behind the room is the last of the run.
            end = start + 1 + int(np.searchsorted(offsets[start + 1 : stop + 1], offsets[start] + room))
            end = min(end, stop)
            runs.append((start, end))
            documents.append(document)
            start = end
    return np.array(runs, dtype=np.int64), np.array(documents, dtype=np.int64)
