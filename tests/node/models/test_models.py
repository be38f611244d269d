"""Networks against published counts and `transformers`, optimizers against NumPy, the schedule at its edges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlbench.cli import cli
from dlbench.node.models import paced
from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.build import Batch, build_model, forward_macs, loss_for, network_of
from dlbench.node.models.cosmoflow import CosmoFlow
from dlbench.node.models.optimizers import LearningRate, build_optimizer
from dlbench.node.models.resnet import ResNet
from dlbench.node.training.loop import _step_seed
from dlbench.records.layer_profile import with_layers
from dlbench.records.scan import read_run
from dlbench.specs.training import OptimizerSpec, ScheduleSpec, TrainSpec
from dlbench.specs.workload import BertModel, CosmoFlowModel, NoData, PacedLayer, PacedModel, ResNetModel
from dlbench.views.doubts import run_doubts
from tests.support.run_factory import Story, constant, exchange_result, plans, write_run

torch.set_num_threads(1)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_published_parameter_counts() -> None:
    with torch.device("meta"):
        assert num_parameters(build_model(ResNetModel(family="resnet"))) == 25_557_032
        assert num_parameters(build_model(BertModel(family="bert"))) == 336_226_108
        assert num_parameters(build_model(CosmoFlowModel(family="cosmoflow"))) == 8_907_556


# What our parameter names are called in transformers; longer prefixes first.
RESNET_NAMES = {
    "stem_conv": "resnet.embedder.embedder.convolution",
    "stem_norm": "resnet.embedder.embedder.normalization",
    "classifier": "classifier.1",
    "conv1": "layer.0.convolution",
    "norm1": "layer.0.normalization",
    "conv2": "layer.1.convolution",
    "norm2": "layer.1.normalization",
    "conv3": "layer.2.convolution",
    "norm3": "layer.2.normalization",
    "shortcut.0": "shortcut.convolution",
    "shortcut.1": "shortcut.normalization",
}
BERT_NAMES = {
    "word_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "type_embedding": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "mlm_transform": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm",
    "mlm_bias": "cls.predictions.bias",
    "nsp_classifier": "cls.seq_relationship",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "reduce": "output.dense",
    "output_norm": "output.LayerNorm",
}


def translated(name: str, names: Mapping[str, str]) -> str:
    """Our parameter name in transformers' words."""
    stage = ""
    if name.startswith("stages."):
        _, index, block, name = name.split(".", 3)
        stage = f"resnet.encoder.stages.{index}.layers.{block}."
    elif name.startswith("layers."):
        _, index, name = name.split(".", 2)
        stage = f"bert.encoder.layer.{index}."
    for ours in sorted(names, key=len, reverse=True):
        if name == ours or name.startswith(ours + "."):
            return stage + names[ours] + name[len(ours) :]
    raise AssertionError(f"{name} has no counterpart")


def copy_weights(theirs: nn.Module, ours: nn.Module, names: Mapping[str, str]) -> None:
    """Loads every parameter and buffer of ours from theirs, and checks that none of theirs is left over."""
    source = theirs.state_dict()
    mapped = {translated(key, names) for key in ours.state_dict()}
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids"}
    assert set(source) - mapped - tied == set()
    ours.load_state_dict({key: source[translated(key, names)] for key in ours.state_dict()})


def shake_norms(model: nn.Module) -> None:
    """Random scales and statistics, so that a swapped norm would be seen."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


@pytest.mark.slow
def test_resnet50_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)).eval()
    shake_norms(theirs)
    ours = ResNet().eval()
    assert num_parameters(ours) == num_parameters(theirs)
    copy_weights(theirs, ours, RESNET_NAMES)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected, actual = theirs(image).logits, ours(image)
    # Relative to the size of the logits, which random weights let grow.
    torch.testing.assert_close(actual / expected.std(), expected / expected.std(), atol=1e-5, rtol=0)


def test_bert_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=211,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    theirs = transformers.BertForPreTraining(config).eval()
    shake_norms(theirs)
    nn.init.normal_(theirs.cls.predictions.bias)
    ours = BertForPreTraining(211, 32, 3, 4, 64, max_positions=24).eval()
    assert num_parameters(ours) == num_parameters(theirs)
    copy_weights(theirs, ours, BERT_NAMES)
    batch = bert_batch(vocab_size=211, num=3, length=24, places=5)
    inputs = {key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    with torch.no_grad():
        expected = theirs(**inputs)
        mlm, nsp = ours(**inputs, masked_positions=batch["masked_positions"])
    index = batch["masked_positions"][..., None].expand(-1, -1, 211)
    torch.testing.assert_close(mlm, expected.prediction_logits.gather(1, index), atol=1e-5, rtol=0)
    torch.testing.assert_close(nsp, expected.seq_relationship_logits, atol=1e-5, rtol=0)


def bert_batch(vocab_size: int, num: int, length: int, places: int) -> Batch:
    used = torch.arange(length) < torch.randint(length // 2, length + 1, (num, 1))
    return {
        "input_ids": torch.randint(5, vocab_size, (num, length)),
        "token_type_ids": (torch.arange(length) >= length // 3).long().expand(num, -1),
        "attention_mask": used.long(),
        "masked_positions": torch.randint(1, length // 2, (num, places)),
        "masked_ids": torch.randint(5, vocab_size, (num, places)),
        "masked_weights": torch.ones(num, places),
        "next_sentence": torch.arange(num) % 2,
    }


# The published layer table: output shape per sample and parameters.
COSMOFLOW_TABLE = [
    ((32, 128, 128, 128), 3_488),
    ((64, 64, 64, 64), 55_360),
    ((128, 32, 32, 32), 221_312),
    ((256, 16, 16, 16), 884_992),
    ((512, 8, 8, 8), 3_539_456),
    ((128,), 4_194_432),
    ((64,), 8_256),
    ((4,), 260),
]


def test_cosmoflow_follows_the_layer_table() -> None:
    with torch.device("meta"):
        model, volume = CosmoFlow(), torch.empty(1, 4, 128, 128, 128)
        rows: list[tuple[tuple[int, ...], int]] = []
        for module in model.modules():
            if isinstance(module, nn.Conv3d | nn.Linear):
                module.register_forward_hook(
                    lambda m, _args, out: rows.append((tuple(out.shape[1:]), num_parameters(m)))
                )
        model(volume)
    assert rows == COSMOFLOW_TABLE
    assert sum(count for _, count in rows) == 8_907_556
    assert {m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)} == {0.3}
    assert sum(isinstance(m, nn.MaxPool3d) for m in model.modules()) == 5
    assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_loss_smooths_labels(smoothing: float) -> None:
    logits, label = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    target = torch.full((5, 4), smoothing / 4)
    target[torch.arange(5), label] += 1 - smoothing
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    criterion = network_of(ResNetModel(family="resnet")).criterion(smoothing)
    torch.testing.assert_close(criterion((logits,), {"label": label}), expected)


def optimizer_spec(name: Any, **changes: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": name, "learning_rate": 0.1, **changes})


SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4)


def random_tensors(shapes: list[tuple[int, ...]], seed: int) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    rng = np.random.default_rng(seed)
    # Every third tensor is zero: the ratio must fall back to 1.
    return [rng.normal(size=s) * (0.0 if i % 3 == 2 else 1.0) for i, s in enumerate(shapes)]


class Holder(nn.Module):
    """Parameters of given values."""

    def __init__(self, values: list[np.ndarray[Any, np.dtype[np.float64]]]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.from_numpy(v.copy())) for v in values])

    def take(self, grads: list[np.ndarray[Any, np.dtype[np.float64]]]) -> None:
        for p, g in zip(self.values, grads, strict=True):
            p.grad = torch.from_numpy(g.copy())


@given(shapes=SHAPES, decay=st.sampled_from([0.0, 1e-2]), seed=st.integers(0, 99))
def test_lars_against_numpy(shapes: list[tuple[int, ...]], decay: float, seed: int) -> None:
    weights = random_tensors(shapes, seed)
    model = Holder(weights)
    spec = optimizer_spec("lars", momentum=0.8, weight_decay=decay, epsilon=1e-3, trust_coefficient=0.02)
    optimizer = build_optimizer(model, spec)
    velocity = [np.zeros(s) for s in shapes]
    for step in range(3):
        grads = random_tensors(shapes, 1000 * (step + 1) + seed)
        model.take(grads)
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            wd, ratio = (decay, 1.0) if w.ndim > 1 else (0.0, 1.0)
            w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
            if w.ndim > 1 and w_norm > 0 and g_norm > 0:
                ratio = float(0.02 * w_norm / (g_norm + wd * w_norm + 1e-3))
            velocity[i] = 0.8 * velocity[i] + 0.1 * ratio * (g + wd * w)
            weights[i] = w - velocity[i]
    for p, w in zip(model.values, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5, atol=1e-6)


@given(shapes=SHAPES, decay=st.sampled_from([0.0, 1e-2]), seed=st.integers(0, 99))
def test_lamb_against_numpy(shapes: list[tuple[int, ...]], decay: float, seed: int) -> None:
    weights = random_tensors(shapes, seed)
    model = Holder(weights)
    optimizer = build_optimizer(model, optimizer_spec("lamb", weight_decay=decay, betas=(0.9, 0.99), epsilon=1e-4))
    m, v = [np.zeros(s) for s in shapes], [np.zeros(s) for s in shapes]
    for step in range(1, 4):
        grads = random_tensors(shapes, 1000 * step + seed)
        model.take(grads)
        optimizer.step()
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            wd = decay if w.ndim > 1 else 0.0
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g**2
            r = (m[i] / (1 - 0.9**step)) / (np.sqrt(v[i] / (1 - 0.99**step)) + 1e-4) + wd * w
            w_norm, r_norm = np.linalg.norm(w), np.linalg.norm(r)
            ratio = float(w_norm / r_norm) if w.ndim > 1 and w_norm > 0 and r_norm > 0 else 1.0
            weights[i] = w - 0.1 * ratio * r
    for p, w in zip(model.values, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
def test_groups_split_by_dimension(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    optimizer = build_optimizer(model, optimizer_spec(name, weight_decay=0.25))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2, 4}
    assert {p.ndim for p in plain["params"]} == {1}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


def learning_rate(step: int, spec: TrainSpec) -> float:
    return LearningRate(spec, global_batch=1, steps_per_epoch=None).at(step)


def train_spec(peak: float = 2.0, **schedule: Any) -> TrainSpec:
    optimizer = OptimizerSpec(name="sgd", learning_rate=peak)
    return TrainSpec(batch_per_rank=1, optimizer=optimizer, schedule=ScheduleSpec.model_validate(schedule))


def test_schedule_edges() -> None:
    assert learning_rate(10**6, train_spec(decay="constant")) == 2.0
    # The whole run is warm-up: no division by zero at its end.
    spec = train_spec(warmup_steps=5, decay="linear", total_steps=5)
    assert [learning_rate(s, spec) for s in (4, 5)] == [2.0, 0.0]
    spec = train_spec(warmup_steps=5, decay="linear", total_steps=3)
    assert [learning_rate(s, spec) for s in (4, 5)] == [2.0, 0.0]


LAYERS = tuple(
    PacedLayer(bytes=4 * size, forward_s=forward, backward_s=backward)
    for size, forward, backward in ((10, 0.25, 0.5), (1000, 0.125, 1.0), (7, 0.0, 0.0625))
)
NONE = NoData(format="none")


class Clock:
    """Seconds pass by sleeping alone, and each sleep ends `late_s` late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.late_s = 0.0, late_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


def spec(**more: Any) -> PacedModel:
    return PacedModel.model_validate({"family": "paced", "layers": LAYERS, **more})


def step(model: PacedModel, clock: Clock, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> list[tuple[str, float]]:
    """When the forward pass ended, and when each gradient was there."""
    monkeypatch.setattr(paced, "time", clock)
    network, seen = build_model(model), []
    batch = paced.NETWORK.synthetic(model, NONE, 2, torch.Generator().manual_seed(1_000_003 + rank), counts=False)
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: seen.append((name, clock.now)))
    loss = loss_for(model)(network, batch)
    seen.append(("forward", clock.now))
    loss.backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        # Of (mean - target)^2 by each layer's share in the mean, in all of its entries.
        assert torch.allclose(parameter.grad, torch.full_like(parameter, -2 / 3 * float(batch["target"].mean())))
    return seen


def test_gradients_become_ready_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = step(spec(), Clock(), monkeypatch)
    names = [f"layers.{number}.weight" for number in (2, 1, 0)]
    # A batch of two.
    assert seen == [("forward", 0.75), *zip(names, (0.875, 2.875, 3.875), strict=True)]
    assert step(spec(speed=2.0), Clock(), monkeypatch)[-1] == (names[-1], 3.875 / 2)


def test_jitter_is_of_a_rank_and_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(rank: int, number: int, **jitter: float) -> float:
        torch.manual_seed(_step_seed(0, rank, number))
        return math.log(step(spec(**jitter), Clock(), monkeypatch, rank)[-1][1] / 3.875)

    by_rank = [[took(rank, number, rank_jitter=0.1) for number in range(2)] for rank in range(40)]
    assert all(one == two for one, two in by_rank)
    assert torch.tensor(by_rank)[:, 0].std().item() == pytest.approx(0.1, rel=0.3)
    by_step = [took(0, number, step_jitter=0.2) for number in range(40)]
    assert torch.tensor(by_step).std().item() == pytest.approx(0.2, rel=0.3)
    assert took(3, 5, rank_jitter=0.1, step_jitter=0.2) == took(3, 5, rank_jitter=0.1, step_jitter=0.2)


def test_both_halves_count_no_work() -> None:
    assert forward_macs(spec(), NONE) == []
    assert spec().training_flops(NONE) == 0


def run_cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, str(result.exception) if result.exit_code else result.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.precision=bf16", "train.precision bf16: has no effect on a paced network"),
        ("train.compile=default", "train.compile default"),
        ("train.recompute=blocks", "train.recompute blocks"),
        ("train.optimizer_state=host", "set it to device"),
        ("data.source=/tmp", "reads no data"),
        ("train.label_smoothing=0.1", "no effect on model.family 'paced'"),
        ("measure.until=quality", "no `quality` section"),
        ("measure.noise_scale=true", "have no noise"),
        ("model.layers=[]", "model.layers: is empty"),
        ("model.speed=0", "model.speed"),
        ("model.layers_from=/nowhere", "/nowhere: no plan.json"),
    ],
)
def test_what_a_paced_network_cannot_do_is_refused(setting: str, said: str) -> None:
    code, error = run_cli("run", "paced", "--preset", "ci", "--ranks", "2", "--dry-run", "--set", setting)
    assert code
    assert said in error


def recorded(folder: Path, **exchange: Any) -> str:
    """The folder of a run of cosmoflow at 2 ranks, batch 4, 200 ms of forward pass, with three gradients."""
    ready = [{"name": name, "num_bytes": size, "ready_s": at} for name, size, at in GRADIENTS]
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(2,), repeats=1, engine="ddp")
    result = exchange_result(plan, gradients=[one[1:] for one in GRADIENTS], alpha_s=0.0, beta_s_per_byte=0.0)
    result |= {"gradients": ready, "backward_s": 0.5, **exchange}
    write_run(folder, plan, constant((1, 0, 200, 500, 50, 3)), Story(exchange=result))
    return str(folder / plan.run_id)


GRADIENTS = [("dense.weight", 4000, 0.1), ("dense.bias", 40, 0.1), ("conv.weight", 800, 0.4)]


def test_layers_are_those_of_a_run(tmp_path: Path) -> None:
    where = recorded(tmp_path)
    for path in (where, f"{where}/record.json"):
        (asked,) = plans(workload="paced", preset="ci", points=(2,), repeats=1, overrides={"model.layers_from": path})
        plan, note = with_layers(asked)
        model = plan.workload.model
        assert isinstance(model, PacedModel)
        assert [layer.bytes for layer in model.layers] == [800, 40, 4000]
        # The rest of the backward pass is the last gradient's; the forward pass is shared out as the backward pass.
        assert [4 * layer.backward_s for layer in model.layers] == pytest.approx([0.4, 0.0, 0.1])
        assert [4 * layer.forward_s for layer in model.layers] == pytest.approx([0.16, 0.0, 0.04])
        assert model.layers_from == Path(where).name
        assert note is not None
        assert "train.batch_per_rank=4 repeats it" in note


def test_every_run_says_that_its_computing_is_a_pause(tmp_path: Path) -> None:
    (plan,) = plans(workload="paced", preset="ci", points=(2,), repeats=1, engine="ddp")
    write_run(tmp_path, plan, constant((1, 0, 5, 10, 5, 1)))
    found = {doubt.code: doubt for doubt in run_doubts(read_run(tmp_path / plan.run_id))}
    assert found["paced"].severity == "serious"
    assert "computing is a pause" in found["paced"].text
    assert "synthetic-data" not in found
