"""A small BERT, and made batches of text whose padding is chosen."""

from __future__ import annotations

import torch

from dlbench.node.models.build import Batch
from dlbench.specs.workload import BertModel

BERT = BertModel(
    family="bert",
    vocab_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    max_positions=12,
    dropout=0.0,
)
UNPADDED = BERT.model_copy(update={"attention": "unpadded"})
LENGTH, PLACES = 12, 3


def text_batch(lengths: list[int], seed: int) -> Batch:
    """A batch of `BERT` with so many tokens in each sample; the last place of each is unused."""
    generator = torch.Generator().manual_seed(seed)
    num = len(lengths)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    weights = torch.ones(num, PLACES)
    weights[:, -1] = 0
    positions = torch.stack([torch.randint(0, length, (PLACES,), generator=generator) for length in lengths])
    return {
        "input_ids": torch.randint(5, 61, (num, LENGTH), generator=generator),
        "token_type_ids": (torch.arange(LENGTH) > 4).long().repeat(num, 1),
        "attention_mask": mask.long(),
        "masked_positions": positions * weights.long(),
        "masked_ids": torch.randint(5, 61, (num, PLACES), generator=generator),
        "masked_weights": weights,
        "next_sentence": torch.randint(2, (num,), generator=generator),
    }
