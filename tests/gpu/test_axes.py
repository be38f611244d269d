"""On a GPU: precisions, cuDNN's search, channels-last, fused updates and attention act, and change no result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.data.text import arranged
from dlbench.node.devices import lacking_tf32, set_tf32, tf32_products
from dlbench.node.models import bert
from dlbench.node.models.build import Batch, build_model, loss_for
from dlbench.node.models.optimizers import build_optimizer, update_evidence
from dlbench.node.training.precision import Kernels, Precision
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import OptimizerSpec, TrainSpec
from dlbench.specs.workload import BertModel
from tests.support.forked_runs import planned
from tests.support.text_batches import BERT, LENGTH, UNPADDED, text_batch

pytestmark = pytest.mark.gpu

SIZE = 512


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    set_tf32(False)
    yield torch.device("cuda", 0)
    set_tf32(False)
    torch.backends.cudnn.benchmark = False


def plan_of(*words: str) -> RunPlan:
    plans, _ = planned(*words, "--engine", "single", "--ranks", "1", "--data", "synthetic")
    return plans[0]


def precision_of(name: str, device: torch.device) -> Precision:
    given = {"batch_per_rank": 1, "precision": name, "optimizer": {"name": "sgd", "learning_rate": 1}}
    return Precision(TrainSpec.model_validate(given), device)


def errors(kind: str, device: torch.device) -> tuple[float, float]:
    """Largest error of a matrix product and of a convolution, in units of the sum of its terms' sizes."""
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(2, SIZE, SIZE, generator=generator)
    image, kernel = torch.randn(4, 32, 16, 16, generator=generator), torch.randn(32, 32, 3, 3, generator=generator)
    found = []
    with precision_of(kind, device).autocast():
        for of, left, right in ((torch.matmul, one, other), (functional.conv2d, image, kernel)):
            exact, sizes = of(left.double(), right.double()), of(left.double().abs(), right.double().abs())
            result = of(left.to(device), right.to(device)).double().cpu()
            found.append(((result - exact).abs() / sizes).max().item())
    return found[0], found[1]


def test_each_precision_rounds_as_it_should(gpu: torch.device) -> None:
    strict = errors("fp32", gpu)
    # Each factor rounded to 24 bits, sums of at most 512 terms in fp32: far below the 11 bits of TF32.
    assert max(strict) < 2.0**-17
    assert tf32_products() == {"matmul": False, "cudnn": False}
    if lacking_tf32(gpu):
        with pytest.raises(EnvironmentLacksError, match="TF32"):
            precision_of("tf32", gpu)
    else:
        product, convolution = errors("tf32", gpu)
        # 10 bits after the point: a product of two rounded factors is off by 2^-10 at most (2^-9 where truncated).
        assert 10 * strict[0] < product <= 2.0**-9
        # TF32 is allowed and not forced: for so small a convolution cuDNN may take a kernel without it.
        assert convolution <= 2.0**-9
    if torch.cuda.is_bf16_supported(including_emulation=False):
        for plain, bf16 in zip(strict, errors("bf16", gpu), strict=True):
            # 7 bits after the point of both factors and of the result.
            assert 10 * plain < bf16 <= 3 * 2.0**-8


def test_rows_that_pad_the_decoder_change_no_loss_and_are_in_the_record(gpu: torch.device) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16 arithmetic")
    assert BERT.vocab_size % 8
    batch = text_batch([LENGTH] * 4, 8)
    loss, gradients = trained(batch, "bf16", gpu)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bert, "decoder_padding", lambda *_arguments: 0)
        plain, others = trained(batch, "bf16", gpu)
    # The same sums by other kernels, each result rounded to 8 bits.
    assert loss == pytest.approx(plain, rel=2.0**-7)
    largest = max(gradient.abs().max().item() for gradient in others)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-2 * largest)
    vocabulary = ("--set", f"model.vocab_size={BERT.vocab_size}", "--set", "train.precision=bf16")
    plan = plan_of("bert", "--preset", "ci", *vocabulary)
    kernels = Kernels(plan, gpu)
    kernels.around_loss(lambda _model, _batch: torch.zeros(()))(torch.nn.Identity(), batch)
    told = {setting.key: setting.effective for setting in kernels.settings()}
    assert told["model.vocab_size.padded"] == -(-BERT.vocab_size // 8) * 8


def test_cudnn_searches_and_says_so(gpu: torch.device) -> None:
    told = {setting.key: setting for setting in Kernels(plan_of("resnet50", "--preset", "ci"), gpu).settings()}
    assert told["train.cudnn_benchmark"].effective == "on"
    image, kernel = torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3)
    for _ in range(2):  # the search, and what it found
        found = functional.conv2d(image.to(gpu), kernel.to(gpu)).cpu()
        torch.testing.assert_close(found, functional.conv2d(image, kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", ["resnet50", "cosmoflow"])
def test_gradients_lie_as_channels_last_weights_for_fused_updates(workload: str, gpu: torch.device) -> None:
    plan = plan_of(workload, "--preset", "ci", "--set", "model.memory_format=channels-last")
    work, ends = plan.workload, []
    for implementation in ("foreach", "fused"):
        torch.manual_seed(2)
        model = Kernels(plan, gpu).placed(build_model(work.model))
        optimizer = build_optimizer(
            model,
            OptimizerSpec.model_validate({"name": "sgd", "learning_rate": 0.01, "implementation": implementation}),
        )
        made = synthetic_batch(work.model, work.data, 2, torch.Generator().manual_seed(3))
        for _ in range(2):
            torch.manual_seed(4)
            optimizer.zero_grad()
            loss_for(work.model)(model, on(gpu, made)).backward()  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters():
                # Fused kernels take equal orders alone; strides of dimensions of one entry say nothing.
                assert parameter.grad is not None
                strides = zip(parameter.shape, parameter.grad.stride(), parameter.stride(), strict=True)
                assert all(size == 1 or one == other for size, one, other in strides), name
            optimizer.step()
        ends.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_fused_updates_are_the_same_and_wait_for_nothing(name: str, gpu: torch.device) -> None:
    if name in ("lars", "lamb"):
        from torch.utils._triton import has_triton

        if not has_triton():
            pytest.skip("torch has no Triton that knows this GPU: train.optimizer.implementation fused is refused")
    ends = []
    for implementation in ("foreach", "fused"):
        spec = OptimizerSpec.model_validate(
            {"name": name, "learning_rate": 0.1, "weight_decay": 0.01, "implementation": implementation}
        )
        generator = torch.Generator().manual_seed(5)
        model = torch.nn.ParameterList(
            [
                torch.nn.Parameter(torch.randn(shape, generator=generator).to(gpu))
                for shape in ((64, 33), (7,), (5, 4, 3))
            ]
        )
        gradients = [[torch.randn(p.shape, generator=generator).to(gpu) for p in model] for _ in range(4)]
        optimizer = build_optimizer(model, spec)
        for step, of_step in enumerate(gradients):
            for parameter, gradient in zip(model, of_step, strict=True):
                parameter.grad = gradient
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 + step)
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        ends.append([parameter.detach() for parameter in model])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    if name in ("lars", "lamb"):
        assert update_evidence(spec) == "torch.compile of the update: 2 graphs"


def on(device: torch.device, batch: Batch) -> Batch:
    """Copies of a batch, as the training loop hands out its one part."""
    return {name.removesuffix("@0"): tensor.to(device) for name, tensor in batch.items()}


def trained(batch: Batch, kind: str, device: torch.device) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the same network each time; the second pass must not wait for the device."""
    torch.manual_seed(6)
    model, loss = build_model(BERT).to(device), loss_for(BERT)
    precision, given = precision_of(kind, device), on(device, batch)
    found: Any = None
    for mode in ("default", "error"):
        model.zero_grad()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with precision.autocast():
                found = loss(model, given)
            found.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found.item(), [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("kind", "bound"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_attention_without_mask_and_without_padding_is_the_same(kind: str, bound: float, gpu: torch.device) -> None:
    if kind == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16 arithmetic")
    padded, whole = text_batch([LENGTH, 3, 7, 5], 7), text_batch([LENGTH] * 4, 8)
    for batch, model in ((padded, UNPADDED), (whole, BERT)):
        loss, gradients = trained(batch, kind, gpu)
        found, others = trained(arranged(batch, model), kind, gpu)
        assert found == pytest.approx(loss, rel=bound)
        largest = max(gradient.abs().max().item() for gradient in gradients)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=bound * largest)


def test_the_record_counts_what_attention_was_given(gpu: torch.device) -> None:
    plan = plan_of("bert", "--preset", "ci", "--set", "train.precision=bf16")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16 arithmetic")
    kernels, work = Kernels(plan, gpu), plan.workload
    assert isinstance(work.model, BertModel)
    precision = precision_of("bf16", gpu)
    model, loss = kernels.placed(build_model(work.model)), kernels.around_loss(loss_for(work.model))
    made = synthetic_batch(work.model, work.data, 2, torch.Generator().manual_seed(9))
    made["attention_mask"][0, -1] = 0
    unpadded = work.model.model_copy(update={"attention": "unpadded"})
    for batch in (made, arranged(made, unpadded), {k: v for k, v in made.items() if k != "attention_mask"}):
        with precision.autocast():
            loss(model, on(gpu, batch))
    (setting,) = kernels.settings()
    for how in ("masked", "unmasked", "unpadded"):
        assert f"1 {how}" in setting.evidence
