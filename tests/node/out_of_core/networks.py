"""Small networks for out-of-core training, and training that can be compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dlbench.node.models.bert import BertForPreTraining
from dlbench.node.models.cosmoflow import CosmoFlow
from dlbench.node.models.resnet import ResNet
from dlbench.node.out_of_core.cut import UnitModule, find_units
from dlbench.node.out_of_core.disk_tier import DiskTier
from dlbench.node.out_of_core.saved import BlockBytes
from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, Unit


class Residual(nn.Module):
    """A block with a shortcut: one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.norm(self.inner(x)) + x)


def small_chain(kinds: Sequence[str], width: int = 128) -> nn.Sequential:
    """A chain whose activations at 16 samples are larger than what stays for being small."""
    made = {
        "linear": lambda: nn.Linear(width, width),
        "norm": lambda: nn.BatchNorm1d(width),
        "relu": lambda: nn.ReLU(inplace=True),
        "gelu": nn.GELU,
        "dropout": lambda: nn.Dropout(0.3),
        "residual": lambda: Residual(width),
        "view": lambda: nn.Flatten(),
    }
    return nn.Sequential(*(made[kind]() for kind in kinds))


class Task:
    """A network, its batch and its loss."""

    def __init__(self, build: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]]) -> None:
        self._build = build
        self.inputs = inputs

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self._build()

    def loss(self, model: nn.Module, part: int = 0) -> Tensor:
        output = model(*self.inputs())
        outputs = output if isinstance(output, tuple) else (output,)
        return sum((one.float().square().mean() for one in outputs), torch.zeros(())) * (part + 1)


def chain_task(kinds: Sequence[str], needs_gradient: bool = False) -> Task:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
        return (x.requires_grad_(needs_gradient),)

    return Task(lambda: small_chain(kinds), inputs)


def resnet_task() -> Task:
    images = torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    return Task(lambda: ResNet(10, (1, 2, 1), 8), lambda: (images,))


def cosmoflow_task() -> Task:
    volumes = torch.randn(2, 2, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    return Task(lambda: CosmoFlow(16, 2, (8, 16, 32), (32, 16)), lambda: (volumes,))


def bert_task(layers: int = 24) -> Task:
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    return Task(
        lambda: BertForPreTraining(100, 48, layers, 4, 96, max_positions=32, dropout=0.1),
        lambda: (tokens, torch.zeros_like(tokens), mask, torch.tensor([[1, 3], [2, 0]])),
    )


@dataclass
class Trained:
    """What training left behind, for comparison to the last bit."""

    losses: list[float]
    tensors: list[Tensor]

    def equals(self, other: Trained) -> bool:
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def train(
    task: Task,
    model: nn.Module,
    steps: int = 3,
    parts: int = 1,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Trained:
    """Trains; returns losses, and gradients, parameters and buffers of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for part in range(parts):
            with context():
                loss = task.loss(model, part)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Trained(losses, [*gradients, *(one.detach() for one in (*model.parameters(), *model.buffers()))])


def planned(units: Sequence[UnitModule], decisions: Sequence[Decision] | Decision) -> list[PlannedBlock]:
    """Every unit a block."""
    each = [decisions] * len(units) if isinstance(decisions, str) else decisions
    return [PlannedBlock(first=n, last=n, decision=one) for n, one in enumerate(each)]  # type: ignore[arg-type]


def cut(task: Task, model: nn.Module) -> tuple[UnitModule, ...]:
    return find_units(model, lambda: task.loss(model))


def disk(folder: Path, num_bytes: int = 1 << 20) -> DiskTier:
    return DiskTier(folder, num_bytes)


def measured_chain(units: Sequence[UnitModule], seen: Sequence[BlockBytes]) -> Chain:
    """The chain of a network of which every unit was a block, with times of no meaning."""
    return Chain(
        units=tuple(
            Unit(
                name=unit.name,
                forward_s=1.0,
                backward_s=1.0,
                saved_bytes=one.saved_bytes,
                input_bytes=one.input_bytes,
                input_saved=one.input_saved,
                joins=unit.joins,
                input_shared=unit.shared,
            )
            for unit, one in zip(units, seen, strict=True)
        ),
        batch=16,
        output_bytes=seen[-1].output_bytes,
    )
