"""Makes BERT samples from tokenised documents: sentence pairs for next-sentence prediction, with masked tokens.

After Devlin et al. (2018), sections 3.1 and A.1, and their `create_pretraining_data.py` (also used by MLPerf Training):

1. Sentences of a document are collected until they have sequence_length - 3 tokens.
2. A is a random number of the first of them. In half of the cases B is the rest. In the other half B starts at a random
   sentence of another document and has as many sentences as fill the sequence.
3. Tokens are cut at random from the front or the back of the longer of A and B, until [CLS] A [SEP] B [SEP] fits.
4. Tokens are masked (see below).

Differences: a single sentence is cut in its middle, so that B can be its second half; the reference always gives it a
random B, so that more than half of its pairs are random. A random B may come from any other document of the split; the
reference uses only the same input file. Pairs are drawn in every epoch, which needs a fixed number of samples:
documents are cut once into full-length sequences of sentences (`runs`), and sentences that a random B replaces are left
out of that epoch.

Masking: of n tokens, including [CLS] and [SEP], min(max_predictions, max(1, round(0.15 n))) are predicted, never [CLS],
[SEP] or padding; of these 80 % become [MASK], 10 % a random word, 10 % are unchanged. So there are 20 predictions at
128 tokens (19 used) and 76 at 512 (without the maximum 77). The reference's random word may be any entry of the
vocabulary, even [PAD]; here special tokens are excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.text.corpus import CLS, MASK, PAD, SEP, SPECIAL, TextCorpus
from dlbench.errors import UserError

Ids = NDArray[np.int64]

_MASKED, _RANDOM = 0.8, 0.9  # cumulative shares: below the first [MASK], below the second a random word
NUM_SPECIAL = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """The parameters of masking."""

    mask_id: int
    words: Ids  # ids of random words: the vocabulary without its special tokens
    max_predictions: int  # most predictions of one sample
    probability: float  # share of the tokens that are predicted


def num_predictions(num_tokens: int, max_predictions: int, probability: float) -> int:
    """Returns how many of `num_tokens` tokens, including special ones, are predicted."""
    return min(max_predictions, max(1, round(num_tokens * probability)))


def mask_tokens(
    ids: Ids, candidates: Ids, num_tokens: int, masking: Masking, generator: np.random.Generator
) -> tuple[Ids, Ids, Ids]:
    """Masks tokens of one sequence.

    `ids`: (S,) the sequence, which is not changed. `candidates`: positions that may be masked, ascending: all but
    [CLS], [SEP] and padding. Returns the masked sequence (S,), the predicted positions (k,), ascending, and their
    original ids (k,).
    """
    count = min(num_predictions(num_tokens, masking.max_predictions, masking.probability), len(candidates))
    positions = np.sort(generator.permutation(candidates)[:count])
    labels = ids[positions]
    draw = generator.random(count)
    words = masking.words[generator.integers(len(masking.words), size=count)]
    masked = ids.copy()
    masked[positions] = np.where(draw < _MASKED, masking.mask_id, np.where(draw < _RANDOM, words, labels))
    return masked, positions, labels


@dataclass(frozen=True, kw_only=True)
class SampleRule:
    """The shape of samples."""

    sequence_length: int  # tokens of a sample, including special ones and padding; S
    max_predictions: int  # most predicted tokens of a sample; P
    masked_lm_probability: float = 0.15


class Pair(NamedTuple):
    """The tokens of A and B of a sample in the corpus, before they are cut to fit."""

    document: int
    begin: int  # first token of A
    split: int  # end of A
    stop: int  # end of the B that follows A
    random_next: bool  # whether B is drawn from another document instead


class SampleMaker:
    """Makes the samples of a corpus. All random numbers come from the caller's generator."""

    def __init__(self, corpus: TextCorpus, rule: SampleRule) -> None:
        if rule.sequence_length < NUM_SPECIAL + 2:
            raise UserError(f"data.sequence_length {rule.sequence_length} is too short, give at least 5 tokens")
        self.corpus, self.rule = corpus, rule
        if corpus.num_documents < 2:
            raise UserError(
                f"{str(corpus.source)!r} holds a single document, next-sentence prediction needs two or more; put a "
                "blank line between documents"
            )
        self.room = rule.sequence_length - NUM_SPECIAL
        self._pad, self._cls, self._sep = (corpus.vocabulary.id_of(token) for token in (PAD, CLS, SEP))
        vocabulary = corpus.vocabulary
        special = [vocabulary.id_of(token) for token in SPECIAL]
        words = np.setdiff1d(np.arange(len(vocabulary), dtype=np.int64), special)
        if not len(words):
            raise UserError(f"data.vocabulary {vocabulary.path} has no word except {' '.join(SPECIAL)}")
        self._masking = Masking(
            mask_id=vocabulary.id_of(MASK),
            words=words,
            max_predictions=rule.max_predictions,
            probability=rule.masked_lm_probability,
        )
        self._positions = np.arange(rule.sequence_length)

    def runs(self) -> tuple[Ids, Ids]:
        """Cuts the documents into runs of sentences of full length; the last one of a document may be shorter.

        Returns first sentence and end (n, 2), and the document (n,), of each run.
        """
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
        """Makes one sample: cuts A and B to fit, joins them, and masks tokens.

        Returns input_ids, token_type_ids, attention_mask (S,) int64; masked_positions, masked_ids (P,) int64, 0 if
        unused; masked_weights (P,) float32, 0 if unused; next_sentence () int64, 1 if B is random.
        """
        first = self.corpus.tokens[pair.begin : pair.split].astype(np.int64)
        if pair.random_next:
            second = self._elsewhere(pair.document, self.room - len(first), generator)
        else:
            second = self.corpus.tokens[pair.split : pair.stop]
        first, second = self._trim(first, second.astype(np.int64), generator)
        ids = np.full(self.rule.sequence_length, self._pad, dtype=np.int64)
        used, middle = len(first) + len(second) + NUM_SPECIAL, len(first) + 1
        ids[0], ids[middle], ids[used - 1] = self._cls, self._sep, self._sep
        ids[1:middle] = first
        ids[middle + 1 : used - 1] = second
        all_positions = self._positions
        candidates = np.concatenate([all_positions[1:middle], all_positions[middle + 1 : used - 1]])
        masked, positions, labels = mask_tokens(ids, candidates, used, self._masking, generator)
        count, room = len(positions), self.rule.max_predictions
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
        """Returns whole sentences with `num_tokens` tokens, or fewer at a document's end, from another document.

        It is at least one whole sentence, because a partial one would show that B is random.
        """
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
