"""BERT with both pre-training heads: token ids become masked-token and next-sentence logits.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), sections 3 and A.2: post-layer-norm
encoder, exact (erf) GELU, learned positions, decoder tied to the word embedding. Query, key and value are three
tensors as published, because LAMB adapts its step per tensor. Parameter names are our own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPSILON = 1e-12
INIT_STD = 0.02


class Attention(nn.Module):
    """Multi-head self-attention with its output projection, (N, S, H) -> (N, S, H)."""

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

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """`keep` is bool (N, 1, 1, S), true where a token may be looked at; at least one a row."""
        mixed = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(x)),
            self._split(self.value(x)),
            attn_mask=keep,
            dropout_p=self.dropout if self.training else 0.0,
        )
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    """One encoder layer with the norms behind the sums (post-LN), (N, S, H) -> (N, S, H)."""

    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.expand = nn.Linear(hidden_size, intermediate_size)
        self.reduce = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """One layer; `keep` as in `Attention`."""
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

    def encode(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Three (N, S) int64 tensors (the mask: 1 is a token, 0 is padding) -> (N, S, hidden_size)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embedding(input_ids) + self.position_embedding(positions) + self.type_embedding(token_type_ids)
        x = self.dropout(self.embedding_norm(x))
        keep = attention_mask.to(torch.bool)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, keep)
        encoded: Tensor = x
        return encoded

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, masked_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of both heads; the vocabulary is scored at the masked positions only.

        Args:
            input_ids: (N, S) int64, S at most max_positions, [CLS] first.
            token_type_ids: (N, S) int64 segment of each token.
            attention_mask: (N, S) int64, 1 for a token, 0 for padding.
            masked_positions: (N, P) int64 positions in the sequence; unused ones point at 0.

        Returns:
            masked-LM logits (N, P, vocab_size) and next-sentence logits (N, 2).
        """
        encoded = self.encode(input_ids, token_type_ids, attention_mask)
        index = masked_positions.unsqueeze(-1).expand(-1, -1, encoded.shape[-1])
        masked = encoded.gather(1, index)
        masked = self.mlm_norm(functional.gelu(self.mlm_transform(masked)))
        mlm_logits = functional.linear(masked, self.word_embedding.weight, self.mlm_bias)
        nsp_logits = self.nsp_classifier(torch.tanh(self.pooler(encoded[:, 0])))
        return mlm_logits, nsp_logits
