"""Stages of a pipeline: what is refused, how they are cut, and the formula of their waiting."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlbench.errors import UserError
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.sync.pipeline import NetworkPart, unit_seconds
from dlbench.node.sync.timing import Clock
from dlbench.specs.engine import PipelineSettings
from tests.support.forked_runs import planned

PIPELINE = ("--preset", "ci", "--ranks", "2", "--engine", "pipeline")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--ranks", "3"), "stages 2: each stage needs a rank of every replica, and there are 3"),
        (("--ranks", "1"), "stages 2: each stage needs a rank of every replica, and there are 1"),
        (("--set", "engine.pipeline.stages=1"), "stages 1: one stage is no pipeline"),
        (("--ranks", "5", "--set", "engine.pipeline.stages=5"), "the network has 4 parts .*set it to 4 or less"),
        (("--set", "engine.pipeline.microbatches=3"), "microbatches 3: .* 16 samples .* set it to 2 or 4$"),
        (("--set", "engine.pipeline.microbatches=32"), "microbatches 32: .*set it to 16$"),
        (("--set", "engine.pipeline.microbatches=5000"), "engine.pipeline.microbatches"),
        (("--set", "engine.pipeline.microbatches=1"), "schedule 1f1b needs as many as stages"),
        (("--set", "train.compile=default"), "cannot be combined with train.compile"),
        (("--set", "train.cuda_graphs=network"), "cannot be combined with train.cuda_graphs"),
        (("--set", "train.recompute=blocks"), "cannot be combined with train.recompute and train.swap"),
        (("--set", "train.optimizer_state=host"), "cannot be combined with train.optimizer_state host"),
        (("--set", "train.precision=fp16"), "cannot be combined with train.precision fp16"),
        (("--set", "train.gradient_accumulation=2"), "cannot be combined with train.gradient_accumulation"),
        (("--set", "measure.noise_scale=true"), "cannot be combined with measure.noise_scale"),
        (("--set", "model.attention=unpadded"), "cannot be combined with model.attention unpadded"),
        (("--set", "sync.exchange=none"), "cannot be combined with sync.exchange none"),
        (("--set", "sync.fusion=own:64MiB"), "cannot be combined with sync.fusion own:64MiB"),
        (("--set", "sync.wire=bf16"), "cannot be combined with sync.wire bf16"),
        (("--set", "sync.average_every=2"), "cannot be combined with sync.average_every"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_with_the_reason(words: tuple[str, ...], why: str) -> None:
    ranks = PIPELINE if "--ranks" not in words else (*PIPELINE[:2], *PIPELINE[4:])
    with pytest.raises(UserError, match=why):
        planned("bert", *ranks, *words)


@pytest.mark.parametrize("workload", ["resnet50", "cosmoflow"])
def test_networks_that_are_no_chain_of_layers_are_refused(workload: str) -> None:
    with pytest.raises(UserError, match=f"{workload} cannot be cut into stages"):
        planned(workload, *PIPELINE)


@given(stage_s=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=5), microbatches=st.integers(1, 9))
def test_the_bubble_is_that_of_microbatches_that_pass_all_stages_one_by_one(
    stage_s: list[float], microbatches: int
) -> None:
    free = [0.0] * len(stage_s)  # Time at which each stage has ended its last microbatch.
    for _ in range(microbatches):
        arrived = 0.0
        for number, seconds in enumerate(stage_s):
            arrived = free[number] = max(arrived, free[number]) + seconds
    mean_s = sum(stage_s) / len(stage_s)
    settings = PipelineSettings(stages=len(stage_s), microbatches=microbatches, schedule="gpipe")
    bubble = 1 - microbatches * mean_s / free[-1]
    assert settings.bubble(max(stage_s) / mean_s) == pytest.approx(bubble, abs=1e-12)
    equal = (len(stage_s) - 1) / (microbatches + len(stage_s) - 1)
    assert settings.bubble() == pytest.approx(equal, abs=1e-12)


def test_units_hold_every_parameter_and_compute_what_the_network_does() -> None:
    plan = planned("bert", *PIPELINE)[0][0]
    spec = plan.workload.model
    model, loss_of = build_model(spec), loss_for(spec)
    assert isinstance(model, BertForPreTraining)
    batch = synthetic_batch(spec, plan.workload.data, 8, torch.Generator().manual_seed(0), voxel_counts=False)
    batch["masked_weights"][0] = 0.0  # Microbatches of unequal numbers of words.
    loss = loss_of(model, batch)
    loss.backward()
    whole_loss, expected = float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    num_units = spec.num_units

    def run(module: nn.Module, part: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(module, part)

    parts, total = model.microbatches(batch, 4), torch.zeros(())
    for part in parts:
        stage = NetworkPart(model, range(0))
        for begin, end in ((0, 2), (2, num_units)):
            stage.units = range(begin, end)
            stage.received = run(stage, part)
        assert stage.received is not None
        (stage.received / len(parts)).backward()
        total += stage.received.detach() / len(parts)
    assert float(total) == pytest.approx(whole_loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-4, atol=1e-6), name
    seconds, names, shape = unit_seconds(model, num_units, parts[0], run, Clock())
    assert [unit_s > 0 for unit_s in seconds] == [True] * num_units
    assert sorted([*expected, "word_embedding.weight"]) == sorted(itertools.chain.from_iterable(names))
    assert all(name.startswith("layers.0.") for name in names[1])
    assert {"word_embedding.weight", "pooler.weight"} < set(names[-1])
    assert shape == [2, 64, 128]
    assert all(parameter.grad is None for parameter in model.parameters())
