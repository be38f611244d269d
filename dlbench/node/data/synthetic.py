"""Batches made once in memory: what training costs when input costs nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch

from dlbench.node.data.loader import BatchSource
from dlbench.node.data.text import arranged
from dlbench.node.models.density_input import network_volume
from dlbench.records.record import Setting
from dlbench.specs.workload import BertModel, DataSpec, ModelSpec, ResNetModel, TextData

Batch = dict[str, torch.Tensor]
POOL_BATCHES = 4  # distinct batches of a rank; more than one, so that a loss cannot collapse within a few steps
_FIRST_WORD = 5
"""Ids below are [PAD] [UNK] [CLS] [SEP] [MASK] in the bundled vocabulary; here they only need to be five ids."""
_CLS, _SEP, _MASK = 2, 3, 4


class SyntheticSource(BatchSource):
    """An endless cycle of `POOL_BATCHES` batches.

    Tensors are handed out again and again: the caller must not change them in place. Values are random and have the
    form and statistics of prepared data; labels are random, so that there is nothing to learn but the pool itself.
    `rank`: ranks draw differently from the same seed. `pin_memory`: keep the pool in page-locked memory (needs a GPU).
    `counts`: volumes stay counts, of which the device takes the logarithm. `device`: keep the pool there instead, so
    that no batch is copied in a step; None: in the host's memory.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        data_spec: DataSpec,
        *,
        batch_size: int,
        rank: int,
        seed: int,
        start_batch: int = 0,
        pin_memory: bool = False,
        counts: bool = False,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        made = (
            synthetic_batch(model_spec, data_spec, batch_size, generator, counts=counts) for _ in range(POOL_BATCHES)
        )
        pool = [arranged(batch, model_spec) for batch in made]
        if device is not None:
            pool = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in pool]
        elif pin_memory:
            pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
        self.num_samples = POOL_BATCHES * batch_size
        self._looked: deque[Batch] = deque()
        self._device = next(iter(pool[0].values())).device
        self._lies_on = "host" if self._device.type == "cpu" else "device"
        self._batches: Iterator[Batch] = itertools.cycle(
            pool[start_batch % POOL_BATCHES :] + pool[: start_batch % POOL_BATCHES]
        )

    def __next__(self) -> Batch:
        return self._looked.popleft() if self._looked else dict(next(self._batches))

    def ahead(self) -> Batch | None:
        self._looked.append(dict(next(self._batches)))
        return self._looked[-1]

    def describe(self) -> dict[str, object]:
        return {
            "kind": "synthetic",
            "num_samples": self.num_samples,
            "pool_batches": POOL_BATCHES,
            "lies_on": self._lies_on,
            "bad_samples": 0,
        }

    def settings(self, spec: DataSpec) -> list[Setting]:
        """Where samples were to lie and lay; nothing where that is the host, as it comes."""
        if spec.synthetic_on == "host":
            return []
        evidence = f"tensors of the pool lie on {self._device}"
        return [Setting(key="data.synthetic_on", requested="device", effective=self._lies_on, evidence=evidence)]


def synthetic_batch(
    model_spec: ModelSpec, data_spec: DataSpec, num: int, generator: torch.Generator, *, counts: bool = False
) -> Batch:
    """`num` made samples of the shapes that a model takes, on the CPU; `counts`: volumes are counts."""
    if isinstance(model_spec, ResNetModel):
        size = model_spec.image_size
        return {
            "image": torch.randint(256, (num, size, size, 3), dtype=torch.uint8, generator=generator),
            "label": torch.randint(model_spec.num_classes, (num,), generator=generator),
        }
    if isinstance(model_spec, BertModel):
        assert isinstance(data_spec, TextData)  # the workload's validator holds this
        return _text_batch(model_spec.vocab_size, data_spec, num, generator)
    size, channels = model_spec.input_size, model_spec.input_channels
    # A few particles per cell; of a normal number's exponential, as far as torch draws them, int16 holds all.
    volume = torch.randn(num, size, size, size, channels, generator=generator).exp_().round_().to(torch.int16)
    return {
        "volume": volume if counts else network_volume(volume, channels_last=False),
        "target": torch.rand(num, model_spec.num_targets, generator=generator) * 2 - 1,
    }


def _text_batch(vocab_size: int, data: TextData, num: int, generator: torch.Generator) -> Batch:
    length = data.sequence_length
    places = min(data.max_predictions, max(1, round(length * data.masked_lm_probability)))
    first_word = min(_FIRST_WORD, vocab_size - 1)
    ids = torch.randint(first_word, vocab_size, (num, length), generator=generator)
    middle = length // 2
    ids[:, 0] = _CLS % vocab_size
    ids[:, [middle, length - 1]] = _SEP % vocab_size
    # Every position but 0 may be chosen; unused places point at 0 and weigh nothing, as with real text.
    order = torch.rand(num, max(length - 1, 1), generator=generator).argsort(1)[:, :places].sort(1).values + 1
    positions = torch.zeros(num, data.max_predictions, dtype=torch.int64)
    positions[:, : order.shape[1]] = order.clamp(max=length - 1)
    weights = torch.zeros(num, data.max_predictions)
    weights[:, : order.shape[1]] = 1.0
    masked = ids.gather(1, positions) * weights.long()
    ids.scatter_(1, order.clamp(max=length - 1), _MASK % vocab_size)
    return {
        "input_ids": ids,
        "token_type_ids": (torch.arange(length) > middle).long().repeat(num, 1),
        "attention_mask": torch.ones(num, length, dtype=torch.int64),
        "masked_positions": positions,
        "masked_ids": masked,
        "masked_weights": weights,
        "next_sentence": torch.randint(2, (num,), generator=generator),
    }
