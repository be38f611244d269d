"""BERT with both pre-training heads: token ids become masked-token and next-sentence logits.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), sections 3 and A.2: post-layer-norm
encoder, exact (erf) GELU, learned positions, decoder tied to the word embedding. Query, key and value are three
tensors as published, because LAMB adapts its step per tensor. Parameter names are our own.

Padding may be left out of all layers ("unpadded"): the tokens of all samples follow each other in one dimension, and
only attention knows where a sample begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPSILON = 1e-12
INIT_STD = 0.02


@dataclass(frozen=True)
class Packing:
    """Where the samples lie that follow each other without padding."""

    starts: Tensor
    """(N + 1,) int32, where each begins, and the tokens of all."""
    lengths: tuple[int, ...]
    """Tokens of each; none on a GPU, which is not asked for them."""
    longest: int
    """No sample has more tokens."""


Keep = Tensor | Packing | None
"""What attention may look at: a mask, bool (N, 1, 1, S), true where a token is, at least one a row; within each sample
of a packing; or everything."""


def jagged_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float) -> Tensor:
    """The same as `packed_attention` by torch's tensors of samples of different lengths."""
    # Bounds of the lengths are enough for the kernels; without them torch would ask the device.
    starts, most = packing.starts, packing.longest
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, starts, min_seqlen=1, max_seqlen=most).transpose(1, 2)
        for x in (query, key, value)
    )
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).values()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, dropout: float) -> Tensor:
    """Attention within each sample of a packing, (T, heads, width) -> the same.

    On a GPU torch's kernels for jagged tensors do it, flash attention in bf16 and fp16. On a CPU, whose kernels know no
    such tensors, it is sample by sample.
    """
    if query.device.type == "cuda":
        return jagged_attention(query, key, value, packing, dropout)
    flat = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    each = zip(*(torch.split(x, list(packing.lengths), dim=2) for x in flat), strict=True)
    mixed = [functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout) for q, k, v in each]
    return torch.cat(mixed, dim=2).squeeze(0).transpose(0, 1)


class Attention(nn.Module):
    """Multi-head self-attention with its output projection, (N, S, H) -> (N, S, H), or (T, H) -> (T, H) packed."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        """`keep` as in `Keep`."""
        q, k, v = (y.view(*y.shape[:-1], self.num_heads, -1) for y in (self.query(x), self.key(x), self.value(x)))
        dropout = self.dropout if self.training else 0.0
        if isinstance(keep, Packing):
            mixed = packed_attention(q, k, v, packing=keep, dropout=dropout)
        else:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout).transpose(1, 2)
        projected: Tensor = self.output(mixed.flatten(-2))
        return projected


class Layer(nn.Module):
    """One encoder layer with the norms behind the sums (post-LN), (N, S, H) -> (N, S, H), or (T, H) packed."""

    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.expand = nn.Linear(hidden_size, intermediate_size)
        self.reduce = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Keep) -> Tensor:
        """One layer; `keep` as in `Keep`."""
        x = self.attention_norm(x + self.dropout(self.attention(x, keep)))
        y = self.reduce(functional.gelu(self.expand(x)))
        out: Tensor = self.output_norm(x + self.dropout(y))
        return out


class BertForPreTraining(nn.Module):
    """BERT with the masked-LM and the next-sentence head.

    BERT-large (vocabulary 30,522, 24 layers of 1,024, 16 heads, 4,096 feed-forward) has 336,226,108 parameters.
    Weights start from N(0, 0.02), biases at 0 (the published initializer_range, here not truncated), from torch's
    global generator: seed it before.

    Raises:
        ValueError: num_heads does not divide hidden_size.
    """

    def __init__(
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
            Layer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)
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

    def encode(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Three (N, S) int64 tensors (the mask: 1 is a token, 0 is padding; None: all are tokens) -> (N, S, H)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        keep = None if attention_mask is None else attention_mask.to(torch.bool)[:, None, None, :]
        return self._layers(input_ids, token_type_ids, positions, keep)

    def _layers(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor, keep: Keep) -> Tensor:
        x = self.word_embedding(input_ids) + self.position_embedding(positions) + self.type_embedding(token_type_ids)
        x = self.dropout(self.embedding_norm(x))
        for layer in self.layers:
            x = layer(x, keep)
        encoded: Tensor = x
        return encoded

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor | None,
        masked_positions: Tensor,
        packed: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits of both heads; the vocabulary is scored at the masked positions only.

        Args:
            input_ids: (N, S) int64, S at most max_positions, [CLS] first.
            token_type_ids: (N, S) int64 segment of each token.
            attention_mask: (N, S) int64, 1 for a token, 0 for padding; None: nothing is padding.
            masked_positions: (N, P) int64 positions in the sequence, or among all tokens where `packed` is given;
                unused ones point at the first token of the sample.
            packed: `tokens` and `starts` of `dlbench.node.data.text`, to leave padding out of all layers; the mask
                is not read.

        Returns:
            masked-LM logits (N, P, vocab_size) and next-sentence logits (N, 2).
        """
        if packed is None:
            encoded = self.encode(input_ids, token_type_ids, attention_mask)
            index = masked_positions.unsqueeze(-1).expand(-1, -1, encoded.shape[-1])
            masked, first = encoded.gather(1, index), encoded[:, 0]
        else:
            tokens, starts = packed
            longest = input_ids.shape[1]
            lengths = tuple(starts.diff().tolist()) if starts.device.type == "cpu" else ()
            encoded = self._layers(
                input_ids.flatten()[tokens],
                token_type_ids.flatten()[tokens],
                tokens % longest,
                Packing(starts, lengths, longest),
            )
            masked, first = encoded[masked_positions], encoded[starts[:-1]]
        masked = self.mlm_norm(functional.gelu(self.mlm_transform(masked)))
        mlm_logits = functional.linear(masked, self.word_embedding.weight, self.mlm_bias)
        nsp_logits = self.nsp_classifier(torch.tanh(self.pooler(first)))
        return mlm_logits, nsp_logits
