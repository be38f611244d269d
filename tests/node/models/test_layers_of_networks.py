"""What front ends know of networks' layers: as torch's halves have them, multiply-adds, and networks from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dlbench.node.models.build import build_model, forward_macs, network_of, training_flops_per_sample
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
from dlbench.specs.layers import Layer
from dlbench.specs.workload import (
    BertModel,
    CosmoFlowModel,
    DataSpec,
    DensityData,
    ImageData,
    Model,
    ModelSpec,
    ResNetModel,
    TextData,
    Workload,
)
from tests.support.paths import ROOT

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


FOLDER = ROOT / "tests" / "support" / "unet3d"
VGG16 = ROOT / "examples" / "vgg16"

COUNTED = """
import torch
from dlbench.node.models.build import build_model, forward_macs, training_flops_per_sample
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
for name in ("unet3d", "vgg16"):
    chosen = choose(WorkloadFile(find("workloads", name)), None, {})
    counted = forward_macs(chosen.model, chosen.data)
    assert training_flops_per_sample(counted) == chosen.model.training_flops(chosen.data) > 0
    with torch.device("meta"):
        print(sum(p.numel() for p in build_model(chosen.model).parameters()), chosen.sample_unit)
table = chosen.model.layer_table(chosen.data)
print(sum(layer.weights for layer in table))
assert {layer.name: layer.macs for layer in counted} == {layer.name: layer.macs for layer in table if layer.macs}
"""


def call(*arguments: str, folder: Path, path: Path | str = FOLDER) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DLBENCH_PATH": str(path)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_both_halves_count_the_same_work(tmp_path: Path) -> None:
    done = call("-c", COUNTED, folder=tmp_path, path=f"{FOLDER}:{VGG16}")
    # 138,357,544: torchvision's VGG16_Weights.IMAGENET1K_V1, num_params.
    assert done.stdout.splitlines() == ["43505 volumes", "138357544 images", "138357544"], done.stderr


def test_vgg16_trains_with_wire_int8(tmp_path: Path) -> None:
    done = call(
        *("-m", "dlbench", "run", "vgg16", "--preset", "ci", "--ranks", "2", "--engine", "ddp", "--out", "runs"),
        *("--set", "measure.warmup_s=0", "--set", "measure.measured_s=0", "--set", "layout.cores_per_rank=1"),
        *("--set", "sync.wire=int8"),
        folder=tmp_path,
        path=VGG16,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "runs").glob("*/record.json"))
    wire = next(setting for setting in record["settings"] if setting["key"] == "sync.wire")
    assert (record["state"], wire["requested"], wire["effective"]) == ("valid", "int8", "int8")
    assert sum(message["num_bytes"] for message in record["exchange"]["messages"]) == 4 * 239_538
    assert record["exchange"]["bytes_inside"] == pytest.approx(239_538, rel=0.002)  # of 2 ranks: 1 byte a value
    assert min(record["exchange"]["packing_s"], record["exchange"]["merging_s"]) > 0


def test_it_trains_and_is_reported(tmp_path: Path) -> None:
    done = call(
        *("-m", "dlbench", "run", "unet3d", "--ranks", "1", "--engine", "single", "--out", "runs"),
        *("--set", "measure.warmup_s=0", "--set", "measure.measured_s=0", "--set", "layout.cores_per_rank=1"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    (rank,) = record["ranks"]
    assert (record["state"], record["steps"]) == ("valid", 12)
    assert rank["last_loss"] < 0.9 * rank["first_loss"]
    assert "volumes/s" in done.stdout
    report = call("-m", "dlbench", "report", "runs", "--format", "json", folder=tmp_path)
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["groups"]


def test_a_module_that_cannot_be_loaded_stops_only_its_own_workload(tmp_path: Path) -> None:
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "unet3d.yaml").write_bytes((FOLDER / "workloads" / "unet3d.yaml").read_bytes())
    (tmp_path / "workloads" / "unet3d.py").write_text("print('loud')\nraise SystemExit(0)\n")
    environment = {**os.environ, "DLBENCH_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "dlbench"]

    def dlbench(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    listed = dlbench("ls", "--json")
    assert json.loads(listed.stdout)
    assert dlbench("run", "resnet50", "--preset", "ci", "--dry-run").returncode == 0
    refused = dlbench("run", "unet3d", "--dry-run")
    assert refused.returncode == 2
    assert "unet3d.py: cannot be loaded: SystemExit" in refused.stderr
