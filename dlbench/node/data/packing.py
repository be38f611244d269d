"""Padding of text batches, told where batches are made: the device is never asked for it.

`model.attention auto` leaves the mask away where a batch has no padding. `unpadded` gives index arrays beside the
padded ones, for each part that a batch is computed in (`train.gradient_accumulation`); names end in `@` and the number
of the part. With T tokens that are no padding in a part of n samples:

- tokens (T,) int64: their places in the flattened (n, S) arrays, sample by sample;
- starts (n + 1,) int32: where each sample begins among them, and T;
- places (n, P) int64: where the masked positions are among them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dlbench.specs.workload import BertModel, ModelSpec

Batch = dict[str, torch.Tensor]
_PART = "@"


def arranged(batch: Batch, model: ModelSpec, num_parts: int = 1) -> Batch:
    """A batch as `model.attention` wants it: itself, or without a mask, or with index arrays instead of it."""
    if not isinstance(model, BertModel) or model.attention == "masked" or "attention_mask" not in batch:
        return batch
    mask = batch["attention_mask"]
    rest = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    if bool(mask.all()):
        return rest
    if model.attention == "auto":
        return batch
    size = len(mask) // num_parts
    for number in range(num_parts):
        of_part = slice(number * size, (number + 1) * size)
        for name, tensor in _packed(mask[of_part] != 0, batch["masked_positions"][of_part]).items():
            rest[f"{name}{_PART}{number}"] = tensor
    return rest


def _packed(mask: torch.Tensor, positions: torch.Tensor) -> Batch:
    """Index arrays of one part: `mask` (n, S) bool, true for a token; `positions` (n, P) of masked tokens."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.int32)
    starts[1:] = mask.sum(1).cumsum(0)
    place = (mask.flatten().cumsum(0) - 1).view(mask.shape)
    return {
        "tokens": mask.flatten().nonzero().squeeze(1),
        "starts": starts,
        # Unused ones point at position 0, the first token of each sample.
        "places": place.gather(1, positions),
    }


def parts(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """A batch in equal parts, as views, each with the index arrays of its own."""
    size = len(next(iter(batch.values()))) // num_parts
    for number in range(num_parts):
        part, own = {}, f"{_PART}{number}"
        for name, tensor in batch.items():
            if _PART not in name:
                part[name] = tensor[number * size : (number + 1) * size]
            elif name.endswith(own):
                part[name.removesuffix(own)] = tensor
        yield part
