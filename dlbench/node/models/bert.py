"""BERT with both pre-training heads: token ids to masked-token and next-sentence logits.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), sections 3 and A.2: post-layer-norm
encoder, exact (erf) GELU, learned positions, decoder tied to the word embedding. Query, key and value are three
tensors as published, because LAMB adapts its step per tensor. "Unpadded", the tokens of all samples are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.build import (
    AUTOCAST_TYPES,
    Accuracy,
    Batch,
    Criterion,
    Loss,
    Network,
    Outputs,
    Products,
    autocast_type,
)
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import BertModel, DataSpec, TextData

NORM_EPSILON = 1e-12
INIT_STD = 0.02

_ALIGNED = 8  # Row length of matrices in numbers of 16 bits, a multiple of which tensor cores need.
_FIRST_WORD = 5  # Ids below are [PAD] [UNK] [CLS] [SEP] [MASK], as in the bundled vocabulary.
_CLS, _SEP, _MASK = 2, 3, 4


@dataclass(frozen=True)
class Packing:
    """The boundaries of samples whose tokens are concatenated without padding."""

    starts: Tensor  # (N + 1,) int32: first token of each sample, and the number of all tokens.
    lengths: tuple[int, ...]  # Tokens of each sample; empty on a GPU, to avoid waiting for the device.
    longest: int  # Upper bound of the tokens of a sample.


Keep = Tensor | Packing | None
"""Positions that attention may use: a mask, bool (N, 1, 1, S), those within each sample of a packing, or all."""


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float) -> Tensor:
    """Returns attention within each sample of a packing, (T, heads, width) -> (T, heads, width)."""
    if query.device.type == "cuda":
        # The kernels need only bounds of the lengths; without these torch would wait for the device.
        starts, longest = packing.starts, packing.longest
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x, starts, min_seqlen=1, max_seqlen=longest).transpose(1, 2)
            for x in (query, key, value)
        )
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).values()
    lengths = list(packing.lengths)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # (1, heads, T, width)
    samples = zip(*(torch.split(x, lengths, dim=2) for x in (q, k, v)), strict=True)
    mixed = [functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout) for q, k, v in samples]
    return torch.cat(mixed, dim=2).squeeze(0).transpose(0, 1)


class Attention(nn.Module):
    """Multi-head self-attention with its output projection, (N, S, H) -> (N, S, H), or (T, H) -> (T, H) packed."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        # The residual is fp32. Autocast caches casts of parameters only: it would cast the residual for each of the
        # three products, and cast three gradients back to fp32 before they are added.
        x = x.to(autocast_type(x.device) or x.dtype)
        q, k, v = (y.view(*y.shape[:-1], self.num_heads, -1) for y in (self.query(x), self.key(x), self.value(x)))
        dropout = self.dropout if self.training else 0.0
        if isinstance(keep, Packing):
            mixed = packed_attention(q, k, v, packing=keep, dropout=dropout)
        else:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout).transpose(1, 2)
        projected: Tensor = self.output(mixed.flatten(-2))
        return projected


class EncoderLayer(nn.Module):
    """One encoder layer with norms after the sums (post-LN), (N, S, H) -> (N, S, H), or (T, H) -> (T, H) packed."""

    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.expand = nn.Linear(hidden_size, intermediate_size)
        self.reduce = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, keep)))
        y = self.reduce(functional.gelu(self.expand(x)))
        out: Tensor = self.output_norm(x + self.dropout(y))
        return out


def decoder_padding(vocab_size: int, device: torch.device, kind: torch.dtype | None) -> int:
    """Returns the number of zero rows that pad the decoder's weights; 0 without autocast (`kind` None)."""
    if device.type != "cuda" or kind is None:
        return 0
    # Rows of a multiple of 16 bytes use tensor cores (cuBLAS, "Tensor Core Usage"); NVIDIA's DeepLearningExamples pad
    # the vocabulary for that, here the parameters stay as published.
    return -vocab_size % _ALIGNED


def decoder_logits(masked: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns logits, (N, P, H) x (vocabulary, H) -> (N, P, vocabulary); cuts off those of padding rows."""
    kind = autocast_type(masked.device)
    rows = decoder_padding(len(weight), masked.device, kind)
    if not rows:
        return functional.linear(masked, weight, bias)
    padded = functional.pad(weight.to(kind), (0, 0, 0, rows)), functional.pad(bias.to(kind), (0, rows))
    return functional.linear(masked, *padded)[..., : len(weight)]


class BertForPreTraining(nn.Module):
    """BERT with the masked-LM and the next-sentence head; BERT-large has 336,226,108 parameters. Weights start from
    N(0, 0.02) (the published initializer_range, here not truncated), biases at 0, from torch's global generator.
    """

    def __init__(  # noqa: PLR0913  (each field of the model specification is an argument)
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        max_positions: int = 512,
        type_vocab_size: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(max_positions, hidden_size)
        self.type_embedding = nn.Embedding(type_vocab_size, hidden_size)
        self.embedding_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)
        )
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.mlm_transform = nn.Linear(hidden_size, hidden_size)
        self.mlm_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.mlm_bias = nn.Parameter(torch.zeros(vocab_size))
        self.nsp_classifier = nn.Linear(hidden_size, 2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        """Modules that are sharded and gathered one at a time, in the order of computing (`FsdpEngine`)."""
        return list(self.layers)

    def run_units(
        self,
        units: range,
        x: Tensor | None,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor | None,
        masked_positions: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs consecutive units: embedding, layers, heads. `x` (N, S, H) is the output of the unit before, if any.

        Returns encoded tokens (N, S, H), or what `forward` returns if the heads are among the units.
        """
        if x is None:
            x = self._embed(input_ids, token_type_ids, torch.arange(input_ids.shape[1], device=input_ids.device))
        keep = attention_mask.to(torch.bool)[:, None, None, :] if attention_mask is not None else None
        for unit in units:
            if 0 < unit <= len(self.layers):
                x = self.layers[unit - 1](x, keep)
        if units[-1] <= len(self.layers):
            return x
        index = masked_positions.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        return self._heads(x.gather(1, index), x[:, 0])

    def _embed(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Tensor:
        positioned = self.word_embedding(input_ids) + self.position_embedding(positions)
        x: Tensor = self.dropout(self.embedding_norm(positioned + self.type_embedding(token_type_ids)))
        return x

    def _heads(self, masked: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        masked = self.mlm_norm(functional.gelu(self.mlm_transform(masked)))
        mlm_logits = decoder_logits(masked, self.word_embedding.weight, self.mlm_bias)
        return mlm_logits, self.nsp_classifier(torch.tanh(self.pooler(first)))

    @staticmethod
    def microbatches(batch: Batch, num: int) -> list[Batch]:
        """Returns equal parts of a batch, the mean of whose losses is the loss of the whole."""
        whole = batch | {"masked_total": (batch["masked_weights"].sum().clamp(min=1.0) / num).expand(num)}
        chunks = [tensor.chunk(num) for tensor in whole.values()]
        return [dict(zip(whole, parts, strict=True)) for parts in zip(*chunks, strict=True)]

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor | None,
        masked_positions: Tensor,
        packed: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns masked-LM logits (N, P, vocabulary), at masked positions only, and next-sentence logits (N, 2).

        Inputs are those of `build.Batch`. `packed` holds `tokens` and `starts` of `dlbench.node.data.text`; then
        `masked_positions` (N, P) count among all tokens, and the mask is not read.
        """
        if packed is None:
            units = range(len(self.layers) + 2)
            mlm_logits, nsp_logits = self.run_units(
                units, None, input_ids, token_type_ids, attention_mask, masked_positions
            )
            return mlm_logits, nsp_logits
        tokens, starts = packed
        longest = input_ids.shape[1]
        lengths: tuple[int, ...] = tuple(starts.diff().tolist()) if starts.device.type == "cpu" else ()
        x = self._embed(input_ids.flatten()[tokens], token_type_ids.flatten()[tokens], tokens % longest)
        packing = Packing(starts, lengths, longest)
        for layer in self.layers:
            x = layer(x, packing)
        return self._heads(x[masked_positions], x[starts[:-1]])


class MaskedLmAccuracy(Accuracy):
    """Share of masked positions whose most likely token is right."""

    name = "masked_lm_accuracy"
    predictor = "always the most frequent token"

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        used = batch["masked_weights"] > 0
        self._tally(batch["masked_ids"], used, outputs[0].shape[2])
        right = (outputs[0].argmax(2) == batch["masked_ids"]) & used
        return right.sum(), used.sum()


class AttentionWatch:
    """Counts the forward passes of a rank by the mask that attention gets."""

    def __init__(self, loss: Loss, plan: RunPlan, device: torch.device) -> None:
        self._loss, self._plan, self._device = loss, plan, device
        self._batches = {"masked": 0, "unmasked": 0, "unpadded": 0}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        kinds = {"tokens": "unpadded", "attention_mask": "masked"}
        self._batches[next((kind for key, kind in kinds.items() if key in batch), "unmasked")] += 1
        return self._loss(model, batch)

    def settings(self) -> list[Setting]:
        """Returns attention and padding of the vocabulary, requested and effective; none before the first batch."""
        batches = {name: num for name, num in self._batches.items() if num}
        if not batches:
            return []
        spec = self._plan.workload.model
        assert isinstance(spec, BertModel)
        counts = ", ".join(f"{num} {name}" for name, num in batches.items())
        effective: str = spec.attention
        if spec.attention == "auto":
            effective = "masked" if list(batches) == ["masked"] else "no mask where there is no padding"
        evidence = f"forward passes by mask: {counts}"
        settings = [Setting(key="model.attention", requested=spec.attention, effective=effective, evidence=evidence)]
        kind = AUTOCAST_TYPES.get(self._plan.workload.train.precision)
        rows = decoder_padding(spec.vocab_size, self._device, kind)
        if rows:
            key, padded = "model.vocab_size.padded", spec.vocab_size + rows
            evidence = f"the decoder's weights are padded with {rows} rows of zeros: tensor cores need multiples of 8"
            settings.append(Setting(key=key, requested=None, effective=padded, evidence=evidence))
        return settings


def _text_batch(vocab_size: int, data: TextData, num: int, generator: torch.Generator) -> Batch:
    """Returns `num` random samples of two sentences, without padding."""
    length = data.sequence_length
    places = min(data.max_predictions, max(1, round(length * data.masked_lm_probability)))
    first_word = min(_FIRST_WORD, vocab_size - 1)
    ids = torch.randint(first_word, vocab_size, (num, length), generator=generator)
    middle = length // 2
    ids[:, 0] = _CLS % vocab_size
    ids[:, [middle, length - 1]] = _SEP % vocab_size
    # Any position but 0 may be masked; unused places point at 0 and have weight 0, as with real text.
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


def _pre_training_logits(model: nn.Module, batch: Batch) -> Outputs:
    ids, mask = (batch["input_ids"], batch["token_type_ids"]), batch.get("attention_mask")
    if "tokens" in batch:
        packed: Outputs = model(*ids, None, batch["places"], (batch["tokens"], batch["starts"]))
        return packed
    outputs: Outputs = model(*ids, mask, batch["masked_positions"])
    return outputs


def _pre_training_loss(outputs: Outputs | Tensor, batch: Batch) -> Tensor:
    """Returns the mean masked-LM cross-entropy of used places plus that of the next sentence (section A.2)."""
    if isinstance(outputs, Tensor):
        return outputs  # of a stage of a pipeline, which the next one receives
    mlm_logits, nsp_logits = outputs
    per_place = functional.cross_entropy(
        mlm_logits.float().flatten(0, 1), batch["masked_ids"].flatten(), reduction="none"
    )
    weights = batch["masked_weights"].flatten()
    # A microbatch has its share of the places of the whole batch.
    total = batch["masked_total"].sum() if "masked_total" in batch else weights.sum().clamp(min=1.0)
    masked_lm: Tensor = (per_place * weights).sum() / total
    return masked_lm + functional.cross_entropy(nsp_logits.float(), batch["next_sentence"])


class BertNetwork(Network[BertModel]):
    """BERT, with batches as described at `build.Batch`."""

    meter = MaskedLmAccuracy

    def build(self, spec: BertModel) -> nn.Module:
        return BertForPreTraining(**spec.model_dump(exclude={"family", "attention"}))

    def outputs(self, spec: BertModel) -> Callable[[nn.Module, Batch], Outputs]:
        return _pre_training_logits

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        return _pre_training_loss

    def synthetic(
        self, spec: BertModel, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool
    ) -> Batch:
        assert isinstance(data, TextData)  # the workload's validator holds this
        return _text_batch(spec.vocab_size, data, num, generator)

    def one_sample(self, spec: BertModel, data: DataSpec) -> tuple[Tensor, ...]:
        assert isinstance(data, TextData)  # the workload's validator holds this
        tokens = torch.zeros(1, data.sequence_length, dtype=torch.int64)
        return tokens, tokens, tokens, torch.zeros(1, data.max_predictions, dtype=torch.int64)

    def products(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> Products:
        if isinstance(module, Attention):
            # Scores and mixture: (heads, S, S) times the width of a head; widths sum to H. Padding is counted too.
            _, length, width = arguments[0].shape
            return [(part, "attention", length * length * width) for part in ("scores", "mixture")]
        if isinstance(module, BertForPreTraining):
            # The decoder is the word embedding used as a matrix, not a module.
            return [("mlm_decoder", "linear", output[0].numel() * module.word_embedding.embedding_dim)]
        return []

    def observed(self, loss: Loss, plan: RunPlan, device: torch.device) -> tuple[Loss, Callable[[], list[Setting]]]:
        watch = AttentionWatch(loss, plan, device)
        return watch.loss, watch.settings


NETWORK = BertNetwork()
