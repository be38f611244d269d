"""Masked language modelling: which tokens are hidden, what stands in their place, and what guessing would reach.

The rule is that of Devlin et al. (2018), section 3.1, with the numbers of their published `create_pretraining_data.py`,
which MLPerf Training took over: of n tokens, [CLS] and [SEP] counted, min(max_predictions, max(1, round(0.15 n))) are
chosen for prediction, never [CLS], [SEP] or padding; of these 80 % become [MASK], 10 % a random word, 10 % stay as they
are. Hence 20 predictions at 128 tokens (19 used) and 76 at 512 (77 would be). One thing is done otherwise: the
reference's random word may be any entry of the vocabulary, even [PAD]; here special tokens are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlbench.datasets.text.vocabulary import MASK, SPECIAL, Vocabulary
from dlbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

_MASKED, _RANDOM = 0.8, 0.9  # cumulative shares: below the first [MASK], below the second a random word


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """How tokens are hidden."""

    mask_id: int
    words: Ids
    """Ids that may stand in for a hidden token: the vocabulary without its special tokens."""
    max_predictions: int
    """Predictions of one sample at most."""
    probability: float
    """Share of the tokens chosen for prediction."""


def masking_for(vocabulary: Vocabulary, max_predictions: int, probability: float) -> Masking:
    """The masking rule of a vocabulary.

    Raises:
        UserError: the vocabulary has special tokens only.
    """
    import numpy as np

    special = [vocabulary.id_of(token) for token in SPECIAL]
    words = np.setdiff1d(np.arange(len(vocabulary), dtype=np.int64), special)
    if not len(words):
        raise UserError(f"data.vocabulary {vocabulary.path} has no word beside {' '.join(SPECIAL)}")
    return Masking(
        mask_id=vocabulary.id_of(MASK), words=words, max_predictions=max_predictions, probability=probability
    )


def num_predictions(num_tokens: int, max_predictions: int, probability: float) -> int:
    """How many of `num_tokens` tokens, special ones counted, are predicted."""
    return min(max_predictions, max(1, round(num_tokens * probability)))


def mask_tokens(
    ids: Ids, candidates: Ids, num_tokens: int, masking: Masking, generator: np.random.Generator
) -> tuple[Ids, Ids, Ids]:
    """Hides tokens of one sequence.

    Args:
        ids: (S,) the sequence, left as it is.
        candidates: places that may be chosen, ascending: all but [CLS], [SEP] and padding.
        num_tokens: tokens of the sequence without padding.
        masking: the rule.
        generator: what is drawn from.

    Returns:
        The sequence with tokens hidden (S,); the chosen places (k,), ascending; their ids before (k,).
    """
    import numpy as np

    count = min(num_predictions(num_tokens, masking.max_predictions, masking.probability), len(candidates))
    positions = np.sort(generator.permutation(candidates)[:count])
    labels = ids[positions]
    draw = generator.random(count)
    words = masking.words[generator.integers(len(masking.words), size=count)]
    hidden = ids.copy()
    hidden[positions] = np.where(draw < _MASKED, masking.mask_id, np.where(draw < _RANDOM, words, labels))
    return hidden, positions, labels


def most_frequent_share(ids: NDArray[Any]) -> float:
    """The share of the most frequent id: the accuracy of a predictor that always says this one token.

    Taken over the hidden tokens of an evaluation set it is the baseline of masked-LM accuracy.

    Raises:
        ValueError: there are no ids.
    """
    import numpy as np

    if not ids.size:
        raise ValueError("no ids, no most frequent one")
    return float(np.unique(ids, return_counts=True)[1].max() / ids.size)
