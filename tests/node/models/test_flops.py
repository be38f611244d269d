"""Multiply-adds of the networks, against published counts, closed forms and torch's own counter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlbench.node.models.build import build_model, forward_macs, training_flops_per_sample
from dlbench.specs.workload import (
    BertModel,
    CosmoFlowModel,
    DataSpec,
    DensityData,
    ImageData,
    ModelSpec,
    ResNetModel,
    TextData,
)

IMAGES = ImageData(format="jpeg-tree")
VOLUMES = DensityData(format="density")
SEQUENCES = TextData(format="text")
SMALL_TEXT = TextData(format="text", sequence_length=24, max_predictions=5)
SMALL_BERT = BertModel(
    family="bert", vocab_size=97, hidden_size=32, num_layers=3, num_heads=4, intermediate_size=48, max_positions=32
)
SMALL: list[Any] = [
    pytest.param(ResNetModel(family="resnet", image_size=64, num_classes=10), IMAGES, id="resnet"),
    pytest.param(SMALL_BERT, SMALL_TEXT, id="bert"),
    pytest.param(CosmoFlowModel(family="cosmoflow", input_size=32), VOLUMES, id="cosmoflow"),
]


def total(spec: ModelSpec, data: DataSpec) -> int:
    return sum(layer.macs for layer in forward_macs(spec, data))


def inputs(spec: ModelSpec, batch: int) -> tuple[torch.Tensor, ...]:
    if isinstance(spec, ResNetModel):
        return (torch.rand(batch, 3, spec.image_size, spec.image_size),)
    if isinstance(spec, CosmoFlowModel):
        return (torch.rand(batch, spec.input_channels, *[spec.input_size] * 3),)
    tokens = torch.ones(batch, SMALL_TEXT.sequence_length, dtype=torch.int64)
    return tokens, tokens * 0, tokens, torch.zeros(batch, SMALL_TEXT.max_predictions, dtype=torch.int64)


def test_resnet_50_has_the_published_4_1_billion() -> None:
    """Goyal et al. (2017) and torchvision's table: 4.1 (4.09) billion multiply-adds for v1.5 at 224 x 224."""
    assert total(ResNetModel(family="resnet"), IMAGES) / 1e9 == pytest.approx(4.09, abs=0.005)


def test_cosmoflow_has_34_4_billion() -> None:
    spec = CosmoFlowModel(family="cosmoflow")
    # By hand: 27 in out / 8^k (128^3) for each convolution, then the dense layers.
    channels = (4, 32, 64, 128, 256, 512)
    by_hand = sum(27 * a * b * (128 >> k) ** 3 for k, (a, b) in enumerate(pairwise(channels)))
    by_hand += 32768 * 128 + 128 * 64 + 64 * 4
    assert total(spec, VOLUMES) == by_hand
    assert by_hand / 1e9 == pytest.approx(34.4, abs=0.05)


def test_bert_large_follows_the_rule_of_6_n_d() -> None:
    """Kaplan et al. (2020): 6 N a token with N the weights outside embeddings, plus 12 L H S for attention.

    The heads are left out of N, because they see 76 positions and 1 of 512 and not all: they add 1.0 %.
    """
    layers, hidden, length = 24, 1024, 512
    weights = layers * (4 * hidden**2 + 2 * hidden * 4096)
    by_rule = length * (6 * weights + 12 * layers * hidden * length)
    counted = training_flops_per_sample(forward_macs(BertModel(family="bert"), SEQUENCES))
    heads = 6 * (76 * (hidden * 30522 + hidden**2) + hidden**2 + 2 * hidden)
    assert counted == by_rule + heads
    assert counted == pytest.approx(by_rule, rel=0.02)


@pytest.mark.parametrize(("spec", "data"), [SMALL[0], SMALL[2]])
def test_training_flops_are_those_that_torch_runs(spec: ModelSpec, data: DataSpec) -> None:
    torch.manual_seed(0)
    model = build_model(spec).train()
    with FlopCounterMode(display=False) as counter:
        model(*inputs(spec, 2)).sum().backward()
    # Nobody computes the gradient of the image or the volume.
    assert 2 * training_flops_per_sample(forward_macs(spec, data)) == counter.get_total_flops()
