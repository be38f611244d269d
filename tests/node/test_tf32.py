"""TF32: on where it was asked for, off elsewhere, and readable by both of torch's interfaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node import torch_facts as facts_module
from dlbench.node.torch_facts import torch_facts
from dlbench.node.training.precision import Precision
from dlbench.specs.training import TrainSpec

GPU = torch.device("cuda", 0)


def train_of(precision: str, **changes: object) -> TrainSpec:
    given = {"batch_per_rank": 1, "precision": precision, "optimizer": {"name": "sgd", "learning_rate": 1}}
    return TrainSpec.model_validate({**given, **changes})


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    facts_module.set_tf32(False)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize("is_on", [True, False])
def test_both_interfaces_tell_what_was_set(is_on: bool) -> None:
    facts_module.set_tf32(is_on)
    assert facts_module.tf32_products() == {"matmul": is_on, "cudnn": is_on}
    # torch raises here where one interface was written and the other is read.
    assert torch.backends.cuda.matmul.allow_tf32 is is_on
    assert torch.backends.cudnn.allow_tf32 is is_on
    problems: list[str] = []
    facts = torch_facts(problems, GPU)
    word = "on" if is_on else "off"
    assert (facts["torch.tf32.matmul"], facts["torch.tf32.cudnn"]) == (word, word)
    assert not [problem for problem in problems if "tf32" in problem]


@pytest.mark.usefixtures("ampere")
def test_a_precision_switches_it() -> None:
    precision = Precision(train_of("tf32"), GPU)
    assert facts_module.tf32_products() == {"matmul": True, "cudnn": True}
    assert "TF32" in precision.text
    assert Precision(train_of("fp32"), GPU).text == "fp32, TF32 off"
    assert facts_module.tf32_products() == {"matmul": False, "cudnn": False}


@pytest.mark.parametrize("emulates", [False, True])
def test_a_cpu_has_none_and_emulates_none(emulates: bool) -> None:
    with pytest.raises(EnvironmentLacksError, match="TF32 is arithmetic of NVIDIA GPUs since Ampere; use fp32"):
        Precision(train_of("tf32", allow_emulation=emulates), torch.device("cpu"))


def test_older_gpus_and_nvidias_switch_refuse_it(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(facts_module.OVERRIDE, "0")
    with pytest.raises(EnvironmentLacksError, match="NVIDIA_TF32_OVERRIDE=0 switches it off"):
        Precision(train_of("tf32"), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(EnvironmentLacksError, match="Tesla V100 is older: TF32 is"):
        Precision(train_of("tf32"), GPU)
