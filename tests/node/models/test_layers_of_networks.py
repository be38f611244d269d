"""What front ends know of the layers of each network is what hooks on torch's meta device see of its torch half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dlbench.node.models.build import forward_macs, network_of
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
from dlbench.specs.layers import Layer
from dlbench.specs.workload import CosmoFlowModel, DensityData, ImageData, Model, ResNetModel, Workload

PUBLISHED = {"resnet50": 25_557_032, "bert": 336_226_108, "cosmoflow": 8_907_556}
"""Parameters of `full`: torchvision's ResNet-50; BERT-large (Devlin et al.) with both heads; MLPerf HPC's CosmoFlow."""
WINDOWED = (nn.Conv2d, nn.Conv3d, nn.MaxPool2d, nn.MaxPool3d)
NOT_LISTED = (nn.Dropout, nn.Identity, nn.Flatten)


def preset(name: str, of: str) -> Workload:
    return choose(WorkloadFile(find("workloads", name)), of, {})


def odd() -> Iterator[Any]:
    small: Model = ResNetModel(family="resnet", image_size=101, base_width=24, stage_blocks=(1, 2, 3, 1), num_classes=7)
    yield pytest.param(small, ImageData(format="images"), id="resnet odd")
    small = CosmoFlowModel(family="cosmoflow", input_size=16, conv_channels=(5, 7), dense_sizes=())
    yield pytest.param(small, DensityData(format="density"), id="cosmoflow without dense layers")
    for name in PUBLISHED:
        for of in ("ci", "full"):
            found = preset(name, of)
            yield pytest.param(found.model, found.data, id=f"{name} {of}")


def seen(model: Model, data: Any) -> dict[str, tuple[Any, ...]]:
    """Of each module that computes: its elements, its weights, and where it has a window its form."""
    found: dict[str, tuple[Any, ...]] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            given = arguments[0]
            extents, kernel = tuple(given.shape[2:]), 1
            if isinstance(module, WINDOWED):
                size: Any = module.kernel_size
                kernel = size if isinstance(size, int) else size[0]
            weights = sum(parameter.numel() for parameter in module.parameters())
            parts = [getattr(module, f"{way}_channels", getattr(module, f"{way}_features", 0)) for way in ("in", "out")]
            found[name] = (given.numel(), output.numel(), weights, extents if given.dim() > 3 else (), kernel, *parts)

        return hook

    network = network_of(model)
    with torch.device("meta"), torch.no_grad():
        module = network.build(model).eval()
        for name, one in module.named_modules():
            if not list(one.children()) and not isinstance(one, NOT_LISTED):
                one.register_forward_hook(look(name))
        module(*network.one_sample(model, data))
    return found


def described(layer: Layer) -> tuple[Any, ...]:
    parts = layer.channels, layer.filters
    return layer.inputs, layer.outputs, layer.weights, layer.extents, layer.kernel, *parts


@pytest.mark.parametrize(("model", "data"), tuple(odd()))
def test_each_layer_has_the_elements_weights_and_windows_that_hooks_see(model: Model, data: Any) -> None:
    hooked = seen(model, data)
    layers = {layer.name: layer for layer in model.layer_table(data)}
    in_no_module = {name for name, layer in layers.items() if layer.kind == "attention"} | {"mlm_decoder"}
    assert layers.keys() - in_no_module == hooked.keys()
    for name, (inputs, outputs, weights, extents, *others) in hooked.items():
        own = extents if layers[name].kind in ("conv2d", "conv3d", "norm", "activation", "pool") else ()
        own = () if name == "mean" else own  # all of the image is its window
        assert described(layers[name]) == (inputs, outputs, weights, own, *others), name


@pytest.mark.parametrize(("model", "data"), tuple(odd()))
def test_each_product_has_the_multiply_adds_that_are_counted_on_the_network(model: Model, data: Any) -> None:
    counted = {layer.name: (layer.kind, layer.macs) for layer in forward_macs(model, data)}
    own = {layer.name: (layer.kind, layer.macs) for layer in model.layer_table(data)}
    assert {name: one for name, one in own.items() if one[1] or one[0] == "embedding"} == counted


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_sum_to_the_published_parameters(name: str) -> None:
    found = preset(name, "full")
    layers = found.model.layer_table(found.data)
    assert sum(layer.weights for layer in layers) == PUBLISHED[name]
    assert [layer.block for layer in layers] == sorted(layer.block for layer in layers)
    with torch.device("meta"):
        module = network_of(found.model).build(found.model)
    assert sum(parameter.numel() for parameter in module.parameters()) == PUBLISHED[name]
