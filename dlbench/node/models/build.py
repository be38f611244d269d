"""A model specification becomes a network and its loss."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.cosmoflow import CosmoFlow
from dlbench.node.models.resnet import ResNet
from dlbench.specs.workload import BertModel, ModelSpec, ResNetModel

Batch = dict[str, Tensor]
"""Tensors by name, the first dimension N is the sample.

- resnet: image (N, 3, H, W) float32; label (N,) int64.
- bert: input_ids, token_type_ids, attention_mask (N, S) int64; masked_positions, masked_ids (N, P) int64;
  masked_weights (N, P) float32, 0 for an unused place; next_sentence (N,) int64, 0 if B follows A, 1 if it is random.
- cosmoflow: volume (N, C, S, S, S) float32; target (N, T) float32.
"""

Loss = Callable[[nn.Module, Batch], Tensor]
"""Forward pass and loss: a scalar, the mean over the batch, in float32."""


def build_model(spec: ModelSpec) -> nn.Module:
    """The network of a specification, on the CPU, in fp32, with weights from torch's global generator."""
    if isinstance(spec, ResNetModel):
        return ResNet(spec.num_classes, spec.stage_blocks, spec.base_width, spec.zero_init_residual)
    if isinstance(spec, BertModel):
        return BertForPreTraining(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            intermediate_size=spec.intermediate_size,
            max_positions=spec.max_positions,
            type_vocab_size=spec.type_vocab_size,
            dropout=spec.dropout,
        )
    return CosmoFlow(
        spec.input_size, spec.input_channels, spec.conv_channels, spec.dense_sizes, spec.dropout, spec.num_targets
    )


def loss_for(spec: ModelSpec, label_smoothing: float = 0.0) -> Loss:
    """The loss of a specification as a function of network and batch (keys as in `Batch`).

    ResNet: cross-entropy with label smoothing. BERT: masked-LM cross-entropy averaged over the used places plus
    next-sentence cross-entropy (Devlin et al. 2018, section A.2). CosmoFlow: mean squared error.

    Args:
        spec: the model.
        label_smoothing: share of the target spread over all classes (ResNet only).
    """
    if isinstance(spec, ResNetModel):

        def classification(model: nn.Module, batch: Batch) -> Tensor:
            logits: Tensor = model(batch["image"])
            return functional.cross_entropy(logits.float(), batch["label"], label_smoothing=label_smoothing)

        return classification
    return _pre_training if isinstance(spec, BertModel) else _regression


def _pre_training(model: nn.Module, batch: Batch) -> Tensor:
    mlm_logits, nsp_logits = model(
        batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], batch["masked_positions"]
    )
    per_place = functional.cross_entropy(
        mlm_logits.float().flatten(0, 1), batch["masked_ids"].flatten(), reduction="none"
    )
    weights = batch["masked_weights"].flatten()
    masked_lm: Tensor = (per_place * weights).sum() / weights.sum().clamp(min=1.0)
    return masked_lm + functional.cross_entropy(nsp_logits.float(), batch["next_sentence"])


def _regression(model: nn.Module, batch: Batch) -> Tensor:
    predicted: Tensor = model(batch["volume"])
    return functional.mse_loss(predicted.float(), batch["target"])
