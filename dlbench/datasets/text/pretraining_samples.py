"""Tokenised documents become BERT samples: sentence pairs for next-sentence prediction, with tokens hidden.

Devlin et al. (2018), sections 3.1 and A.1, and their published `create_pretraining_data.py` (MLPerf Training uses the
same), step by step:

1. A document's sentences are gathered until they reach sequence_length - 3 tokens.
2. A is the first of them, ending behind a random one. In half of the cases B is the rest. In the other half B starts
   at a random sentence of another document and takes as many sentences as fill the sequence.
3. Tokens are cut from the front or the back of the longer of A and B, at random, until [CLS] A [SEP] B [SEP] fits.
4. Tokens are hidden (see below).

Some things are done otherwise. A gathering of a single sentence is cut in its middle, so that B can be its rest; the
reference always gives it a random B, which makes more than half of its pairs random. A random B may come from any
other document of the split; the reference looks into the same input file only. Pairs are drawn anew in every epoch,
which needs a fixed number of samples: a document is cut into full-length gatherings once (`runs`), none is short, and
sentences that a random B displaced are left out of that epoch.

Masking: of n tokens, [CLS] and [SEP] counted, min(max_predictions, max(1, round(0.15 n))) are chosen for prediction,
never [CLS], [SEP] or padding; of these 80 % become [MASK], 10 % a random word, 10 % stay as they are. Hence 20
predictions at 128 tokens (19 used) and 76 at 512 (77 would be). The reference's random word may be any entry of the
vocabulary, even [PAD]; here special tokens are left out.
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
    """How tokens are hidden."""

    mask_id: int
    words: Ids  # ids that may stand in for a hidden token: the vocabulary without its special tokens
    max_predictions: int  # predictions of one sample at most
    probability: float  # share of the tokens chosen for prediction


def num_predictions(num_tokens: int, max_predictions: int, probability: float) -> int:
    """How many of `num_tokens` tokens, special ones counted, are predicted."""
    return min(max_predictions, max(1, round(num_tokens * probability)))


def mask_tokens(
    ids: Ids, candidates: Ids, num_tokens: int, masking: Masking, generator: np.random.Generator
) -> tuple[Ids, Ids, Ids]:
    """Hides tokens of one sequence.

    `ids`: (S,) the sequence, left as it is. `candidates`: places that may be chosen, ascending: all but [CLS], [SEP]
    and padding. Returns the sequence with tokens hidden (S,); the chosen places (k,), ascending; their ids before (k,).
    """
    count = min(num_predictions(num_tokens, masking.max_predictions, masking.probability), len(candidates))
    positions = np.sort(generator.permutation(candidates)[:count])
    labels = ids[positions]
    draw = generator.random(count)
    words = masking.words[generator.integers(len(masking.words), size=count)]
    hidden = ids.copy()
    hidden[positions] = np.where(draw < _MASKED, masking.mask_id, np.where(draw < _RANDOM, words, labels))
    return hidden, positions, labels


@dataclass(frozen=True, kw_only=True)
class SampleRule:
    """The shape of samples and the shares in them."""

    sequence_length: int  # tokens of a sample, special ones and padding counted; S
    max_predictions: int  # hidden tokens of a sample at most; P
    masked_lm_probability: float = 0.15


class Pair(NamedTuple):
    """What A and B of a sample are made of, in tokens of the corpus; A and B are not yet cut to fit."""

    document: int
    begin: int  # first token of A
    split: int  # behind A
    stop: int  # behind the B that follows
    random_next: bool  # whether B is drawn from another document instead


class SampleMaker:
    """Makes the samples of a corpus. Everything drawn comes from the caller's generator."""

    def __init__(self, corpus: TextCorpus, rule: SampleRule) -> None:
        if rule.sequence_length < NUM_SPECIAL + 2:
            raise UserError(f"data.sequence_length {rule.sequence_length} is too short, 5 tokens are the least")
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
            raise UserError(f"data.vocabulary {vocabulary.path} has no word besides {' '.join(SPECIAL)}")
        self._masking = Masking(
            mask_id=vocabulary.id_of(MASK),
            words=words,
            max_predictions=rule.max_predictions,
            probability=rule.masked_lm_probability,
        )
        self._place = np.arange(rule.sequence_length)

    def runs(self) -> tuple[Ids, Ids]:
        """Cuts the documents into runs of sentences that reach full length, the last of a document perhaps shorter.

        Returns (n, 2) first sentence and the one behind the last, and (n,) document of each run.
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
        """Draws where A ends and whether B follows, for the sentences `start` to `end` of a document."""
        offsets = self.corpus.sentence_offsets
        begin, stop = int(offsets[start]), int(offsets[end])
        split = (begin + stop + 1) // 2
        if end - start > 1:
            split = int(offsets[int(generator.integers(start + 1, end))])
        # A single token cannot be cut in two.
        random_next = bool(generator.random() < 0.5) or split == stop
        return Pair(document, begin, split, stop, random_next)

    def sample(self, pair: Pair, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """One sample: cut to fit, joined, with tokens hidden.

        Returns input_ids, token_type_ids, attention_mask (S,) int64; masked_positions, masked_ids (P,) int64, unused
        places 0; masked_weights (P,) float32, 0 for unused places; next_sentence () int64, 1 if B is random.
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
        place = self._place
        candidates = np.concatenate([place[1:middle], place[middle + 1 : used - 1]])
        hidden, positions, labels = mask_tokens(ids, candidates, used, self._masking, generator)
        count, room = len(positions), self.rule.max_predictions
        masked_positions, masked_ids = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        masked_positions[:count], masked_ids[:count] = positions, labels
        return {
            "input_ids": hidden,
            "token_type_ids": ((place > middle) & (place < used)).astype(np.int64),
            "attention_mask": (place < used).astype(np.int64),
            "masked_positions": masked_positions,
            "masked_ids": masked_ids,
            "masked_weights": (np.arange(room) < count).astype(np.float32),
            "next_sentence": np.asarray(pair.random_next, dtype=np.int64),
        }

    def _sentences(self, document: int) -> tuple[int, int]:
        return int(self.corpus.document_offsets[document]), int(self.corpus.document_offsets[document + 1])

    def _gather(self, start: int, stop: int, target: int) -> int:
        """Behind the first sentence from `start` on with which `target` tokens are reached, or `stop`."""
        offsets = self.corpus.sentence_offsets
        # No sentence is empty, so that no more than `target` of them are needed.
        ends = offsets[start + 1 : min(stop, start + target) + 1]
        return min(start + 1 + int(np.searchsorted(ends, offsets[start] + target)), stop)

    def _elsewhere(self, document: int, wanted: int, generator: np.random.Generator) -> NDArray[Any]:
        """`wanted` tokens from a random sentence of another document on, up to a sentence's or its document's end.

        A whole sentence even where less is wanted: a stump would give away that B is random.
        """
        # The last document stands in for the own one, so that all others are equally likely.
        last = self.corpus.num_documents - 1
        other = int(generator.integers(last))
        if other == document:
            other = last
        start, stop = self._sentences(other)
        sentence = int(generator.integers(start, stop))
        end = self._gather(sentence, stop, max(1, wanted))
        offsets = self.corpus.sentence_offsets
        return self.corpus.tokens[int(offsets[sentence]) : int(offsets[end])]

    def _trim(self, first: Ids, second: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
        """Shortens the longer of the two until both fit, from its front and its back at random."""
        excess = len(first) + len(second) - self.room
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
