"""Multiply-adds of one sample, counted on the network itself; no data, no memory, no device (torch's meta tensors).

Counted are the products of tensors: convolutions, dense layers, the two products of attention. Norms, activations,
pooling, softmax and look-ups are not, as in MLPerf and in Chowdhery et al., "PaLM" (2022), appendix B: model FLOPs,
nothing that is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dlbench.costs.model_flops import FLOPS_PER_MAC, TRAINING_PASSES
from dlbench.node.models.bert import Attention, BertForPreTraining
from dlbench.node.models.build import build_model
from dlbench.records.record import LayerMacs
from dlbench.specs.workload import CosmoFlowModel, DataSpec, ModelSpec, ResNetModel, TextData

_CONVOLUTIONS = ("conv2d", "conv3d")


def forward_macs(spec: ModelSpec, data: DataSpec) -> list[LayerMacs]:
    """Every layer of the network with its multiply-adds for one sample, in the order of the forward pass.

    Kinds are conv2d, conv3d, linear, embedding (0: it looks up) and attention (the two products, each a row).

    Takes well under a second in a process that has made an optimizer, as every rank has; the first of the two loads
    torch's compiler, which costs seconds.

    Args:
        spec: the network; also gives the shape of an image or a volume.
        data: gives sequence_length and max_predictions of text. The masked-LM head is counted for max_predictions
            positions, which is what it computes, however many of them are used.
    """
    layers: list[LayerMacs] = []
    with torch.device("meta"), torch.no_grad():
        # Batch norm in training would refuse one sample where a map has shrunk to one place.
        model = build_model(spec).eval()
        for name, module in model.named_modules():
            count = _counter(name, module, layers)
            if count is not None:
                module.register_forward_hook(count)
        model(*_one_sample(spec, data))
    return layers


def training_flops_per_sample(layers: Sequence[LayerMacs]) -> int:
    """Floating-point operations of training on one sample: 3 passes x 2 operations x multiply-adds.

    A first convolution reads the image or the volume itself, whose gradient nobody computes: it has 2 passes.
    """
    unneeded = layers[0].macs if layers and layers[0].kind in _CONVOLUTIONS else 0
    return FLOPS_PER_MAC * (TRAINING_PASSES * sum(layer.macs for layer in layers) - unneeded)


def _one_sample(spec: ModelSpec, data: DataSpec) -> tuple[Tensor, ...]:
    """Inputs of the network's forward, N = 1, shapes as in `dlbench.node.models.build.Batch`."""
    if isinstance(spec, ResNetModel):
        return (torch.empty(1, 3, spec.image_size, spec.image_size),)
    if isinstance(spec, CosmoFlowModel):
        return (torch.empty(1, spec.input_channels, *[spec.input_size] * 3),)
    assert isinstance(data, TextData)  # `Workload` holds that data fits the model
    tokens = torch.zeros(1, data.sequence_length, dtype=torch.int64)
    return tokens, tokens, tokens, torch.zeros(1, data.max_predictions, dtype=torch.int64)


Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, ...]], None]


def _counter(name: str, module: nn.Module, layers: list[LayerMacs]) -> Hook | None:
    """A forward hook that notes what a module computes; None for modules without products of their own."""

    def note(kind: str, macs: int, part: str = "") -> None:
        layers.append(LayerMacs(name=f"{name}.{part}".strip("."), kind=kind, macs=macs))

    def convolution(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d | nn.Conv3d)
        assert isinstance(output, Tensor)
        per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
        note("conv2d" if isinstance(module, nn.Conv2d) else "conv3d", output.numel() * per_output)

    def linear(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        assert isinstance(output, Tensor)
        note("linear", output.numel() * module.in_features)

    def embedding(_module: nn.Module, _inputs: object, _output: object) -> None:
        note("embedding", 0)

    def attention(_module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
        # Scores and mixture, each (heads, S, S) by head width: the heads' widths sum to H. Padding is computed too.
        _, length, width = inputs[0].shape
        note("attention", length * length * width, "scores")
        note("attention", length * length * width, "mixture")

    def tied_decoder(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        # The decoder is the word embedding used as a matrix, in no module of its own.
        logits = output[0]
        assert isinstance(module, BertForPreTraining)
        note("linear", logits.numel() * module.word_embedding.embedding_dim, "mlm_decoder")

    hooks: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Hook], ...] = (
        ((nn.Conv2d, nn.Conv3d), convolution),
        (nn.Linear, linear),
        (nn.Embedding, embedding),
        (Attention, attention),
        (BertForPreTraining, tied_decoder),
    )
    return next((hook for kinds, hook in hooks if isinstance(module, kinds)), None)
