"""A model specification becomes a network, its forward pass and its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.cosmoflow import CosmoFlow
from dlbench.node.models.density_input import network_volume
from dlbench.node.models.resnet import ResNet
from dlbench.specs.workload import BertModel, ModelSpec, ResNetModel

# Mean and standard deviation of ImageNet's pixels in [0, 1], as the field uses them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

Batch = dict[str, Tensor]
"""Tensors by name, the first dimension N is the sample.

- resnet: image (N, H, W, 3) uint8; label (N,) int64.
- bert: input_ids, token_type_ids, attention_mask (N, S) int64; masked_positions, masked_ids (N, P) int64;
  masked_weights (N, P) float32, 0 for an unused place; next_sentence (N,) int64, 0 if B follows A, 1 if it is random.
  Without attention_mask where nothing is padding, or where `dlbench.node.data.text` gives index arrays.
- cosmoflow: volume (N, C, S, S, S) float32, or on its way to a GPU counts (N, S, S, S, C) int16, whose logarithm is
  taken there; target (N, T) float32.
"""

Outputs = tuple[Tensor, ...]
"""ResNet: class logits (N, classes). BERT: masked-LM logits (N, P, vocabulary), next-sentence logits (N, 2). CosmoFlow:
parameters (N, T)."""

Criterion = Callable[[Outputs, Batch], Tensor]
"""Outputs and batch -> a scalar loss, the mean over the batch, in float32."""

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


def outputs_for(spec: ModelSpec) -> Callable[[nn.Module, Batch], Outputs]:
    """The forward pass of a specification as a function of network and batch (keys as in `Batch`)."""
    if isinstance(spec, ResNetModel):
        channels_last = spec.memory_format == "channels-last"
        return lambda model, batch: (model(normalised(batch["image"], channels_last=channels_last)),)
    if isinstance(spec, BertModel):
        return _pre_training_logits
    channels_last = spec.memory_format == "channels-last"
    return lambda model, batch: (model(network_volume(batch["volume"], channels_last=channels_last)),)


def criterion_for(spec: ModelSpec, label_smoothing: float = 0.0) -> Criterion:
    """The loss of a specification as a function of outputs and batch: a scalar, the mean over the batch, in fp32.

    ResNet: cross-entropy with label smoothing. BERT: masked-LM cross-entropy averaged over the used places plus
    next-sentence cross-entropy (Devlin et al. 2018, section A.2). CosmoFlow: mean squared error.

    Args:
        spec: the model.
        label_smoothing: share of the target spread over all classes (ResNet only).
    """
    if isinstance(spec, ResNetModel):
        return lambda outputs, batch: functional.cross_entropy(
            outputs[0].float(), batch["label"], label_smoothing=label_smoothing
        )
    if isinstance(spec, BertModel):
        return _pre_training_loss
    return lambda outputs, batch: functional.mse_loss(outputs[0].float(), batch["target"])


def loss_for(spec: ModelSpec, label_smoothing: float = 0.0) -> Loss:
    """Forward pass and loss of a specification in one; see `outputs_for` and `criterion_for`."""
    outputs, criterion = outputs_for(spec), criterion_for(spec, label_smoothing)
    return lambda model, batch: criterion(outputs(model, batch), batch)


def normalised(image: Tensor, *, channels_last: bool) -> Tensor:
    """(N, H, W, 3) uint8 pixels -> (N, 3, H, W) with ImageNet's mean and deviation taken out, in one pass.

    It is done where the network computes: 8-bit pixels are a quarter of the bytes to copy, and they are already in
    the order of channels-last. The result is float32, or under autocast the type that the first layer would cast to.
    """
    kind, device = torch.float32, image.device
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        kind = torch.get_autocast_dtype(device.type)
    shift, scale = _pixel_constants(device)
    pixels = image.permute(0, 3, 1, 2)
    order = torch.channels_last if channels_last else torch.contiguous_format
    found = torch.empty(pixels.shape, dtype=kind, device=device, memory_format=order)
    return torch.addcmul(shift, pixels, scale, out=found)


@lru_cache(maxsize=8)
def _pixel_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """-mean / deviation and 1 / (255 deviation), each (3, 1, 1); made once, as a copy would make the host wait."""
    shift = [-mean / deviation for mean, deviation in zip(MEAN, STD, strict=True)]
    scale = [1 / (255 * deviation) for deviation in STD]
    one, other = (torch.tensor(values, device=device).view(3, 1, 1) for values in (shift, scale))
    return one, other


def _pre_training_logits(model: nn.Module, batch: Batch) -> Outputs:
    ids, mask = (batch["input_ids"], batch["token_type_ids"]), batch.get("attention_mask")
    if "tokens" in batch:
        mlm_logits, nsp_logits = model(*ids, None, batch["places"], (batch["tokens"], batch["starts"]))
    else:
        mlm_logits, nsp_logits = model(*ids, mask, batch["masked_positions"])
    return mlm_logits, nsp_logits


def _pre_training_loss(outputs: Outputs, batch: Batch) -> Tensor:
    mlm_logits, nsp_logits = outputs
    per_place = functional.cross_entropy(
        mlm_logits.float().flatten(0, 1), batch["masked_ids"].flatten(), reduction="none"
    )
    weights = batch["masked_weights"].flatten()
    masked_lm: Tensor = (per_place * weights).sum() / weights.sum().clamp(min=1.0)
    return masked_lm + functional.cross_entropy(nsp_logits.float(), batch["next_sentence"])
