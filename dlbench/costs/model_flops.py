"""FLOPs of training by the formulas of the three families of networks: for the desk, which loads no torch.

The same multiply-adds that `dlbench.node.models.flops` counts on the network itself: products of tensors alone.
"""

from __future__ import annotations

from itertools import pairwise

from dlbench.specs.workload import BertModel, CosmoFlowModel, DataSpec, ModelSpec, ResNetModel, TextData

FLOPS_PER_MAC = 2
"""One multiplication and one addition."""
TRAINING_PASSES = 3
"""Forward, and backward twice: one product for the gradient of the weight, one for that of the input (Kaplan et al.,
"Scaling Laws for Neural Language Models" (2020), section 2.1)."""
_EXPANSION = 4
"""Channels of a bottleneck's output over those of its inner convolutions."""


def training_flops(model: ModelSpec, data: DataSpec) -> int:
    """Floating-point operations of training on one sample, forward and backward.

    A first convolution reads the image or the volume, whose gradient nobody computes: it has 2 passes, not 3.
    """
    if isinstance(model, ResNetModel):
        first, rest = _resnet(model)
    elif isinstance(model, BertModel):
        assert isinstance(data, TextData)  # `Workload` holds that data fits the model
        first, rest = 0, _bert(model, data)
    else:
        first, rest = _cosmoflow(model)
    return FLOPS_PER_MAC * (TRAINING_PASSES * rest + (TRAINING_PASSES - 1) * first)


def _resnet(model: ResNetModel) -> tuple[int, int]:
    """Multiply-adds of a forward pass: of the first convolution, and of the rest."""
    edge = -(-model.image_size // 2)
    first = 7 * 7 * 3 * model.base_width * edge**2
    edge, channels, macs = -(-edge // 2), model.base_width, 0
    for stage, blocks in enumerate(model.stage_blocks):
        width = model.base_width * 2**stage
        for block in range(blocks):
            inner = edge
            if block == 0 and stage > 0:
                edge = -(-edge // 2)  # v1.5: the 3x3 convolution has the stride
            macs += channels * width * inner**2 + (9 * width + width * _EXPANSION) * width * edge**2
            if block == 0:
                macs += channels * width * _EXPANSION * edge**2
            channels = width * _EXPANSION
    return first, macs + channels * model.num_classes


def _bert(model: BertModel, data: TextData) -> int:
    """Multiply-adds of a forward pass; the masked-LM head for max_predictions positions."""
    hidden, tokens = model.hidden_size, data.sequence_length
    layer = tokens * (4 * hidden**2 + 2 * hidden * model.intermediate_size) + 2 * tokens**2 * hidden
    heads = data.max_predictions * hidden * (hidden + model.vocab_size) + hidden**2 + 2 * hidden
    return model.num_layers * layer + heads


def _cosmoflow(model: CosmoFlowModel) -> tuple[int, int]:
    """As `_resnet`; each convolution of edge 3 is followed by a pooling of 2."""
    edge, channels, macs = model.input_size, model.input_channels, []
    for out_channels in model.conv_channels:
        macs.append(27 * channels * out_channels * edge**3)
        edge, channels = edge // 2, out_channels
    widths = (channels * edge**3, *model.dense_sizes, model.num_targets)
    dense = sum(before * after for before, after in pairwise(widths))
    return (macs[0], sum(macs[1:]) + dense) if macs else (0, dense)
