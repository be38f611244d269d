"""Units of a network: which modules form its chain, and which of them may be one block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlbench.errors import UserError
from dlbench.node.out_of_core.cut import UnitModule, find_units
from tests.node.out_of_core.networks import bert_task, chain_task, cosmoflow_task, resnet_task


def cut_of(model: nn.Module, *inputs: Tensor) -> tuple[UnitModule, ...]:
    return find_units(model, lambda: model(*inputs))


def names(units: tuple[UnitModule, ...]) -> list[str]:
    return [unit.name for unit in units]


def test_resnet_is_one_chain_from_image_to_logits() -> None:
    task = resnet_task()
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    stages = ["stages.0.0", "stages.1.0", "stages.1.1", "stages.2.0"]
    assert names(units) == ["stem_conv", "stem_norm", "stem_pool", *stages, "mean", "classifier"]
    # The stem's ReLU overwrites what the normalisation returns: one unit.
    assert [len(unit.modules) for unit in units] == [1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert [unit.joins for unit in units] == [False] + [True] * 8


def test_cosmoflow_is_divided_into_its_layers() -> None:
    task = cosmoflow_task()
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    assert names(units)[:4] == ["features.0", "features.1", "features.2", "features.3"]
    flattened = next(unit for unit in units if len(unit.modules) == 2)
    assert flattened.name == "features.8"  # pooling, and the flat view of what it returns
    assert all(unit.joins for unit in units[1:])


def test_bert_is_a_chain_of_its_layers_with_embeddings_and_heads_outside() -> None:
    task = bert_task(3)
    model = task.model()
    units = find_units(model, lambda: task.loss(model))
    assert names(units) == ["embedding_norm", "dropout", "layers.0", "layers.1", "layers.2"]
    # The first layer is given a mask that the dropout before it is not given.
    assert [unit.joins for unit in units] == [False, True, False, True, True]
    assert not any(unit.shared for unit in units)  # nobody else holds what is given to it, nor the sum of embeddings


def test_a_network_that_asks_for_gradients_in_its_forward_pass_is_divided() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.chain = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, given: Tensor) -> Tensor:
            out = self.chain(self.first(given)).pow(2).sum()
            (slope,) = torch.autograd.grad(out, self.first.weight, create_graph=True)
            return out + slope.pow(2).sum()

    assert names(cut_of(Penalised(), torch.randn(2, 4)))[-2:] == ["chain.1", "chain.2"]


def test_looking_changes_neither_buffers_nor_random_numbers() -> None:
    task = chain_task(["linear", "norm", "dropout", "linear"])
    model = task.model()
    torch.manual_seed(7)
    before = [buffer.clone() for buffer in model.buffers()]
    find_units(model, lambda: task.loss(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


class UNet(nn.Module):
    """Down, down, up with a skip connection around the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        y = self.up(self.middle(skipped))
        return self.last(y) + skipped


def test_a_boundary_that_others_use_is_not_within_a_block() -> None:
    units = cut_of(UNet(), torch.randn(4, 64))
    assert names(units) == ["down", "middle", "up", "last"]
    assert [unit.joins for unit in units] == [False, False, True, True]


class Entered(UNet):
    """What enters the chain is made by the network; `saved`: and what made it needs it again."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self._saved = saved

    def forward(self, x: Tensor) -> Tensor:
        entering = self.last(x) * 2
        return self.up(self.middle(self.down(torch.tanh(entering) if self._saved else entering)))


@pytest.mark.parametrize("saved", [False, True])
def test_the_first_input_is_shared_if_what_is_before_the_chain_holds_it(saved: bool) -> None:
    units = cut_of(Entered(saved=saved), torch.randn(4, 64))
    assert names(units) == ["down", "middle", "up"]
    assert [unit.shared for unit in units] == [saved, False, False]


class Twice(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.up(self.middle(self.down(x)))))


def test_a_module_called_twice_is_no_unit() -> None:
    with pytest.raises(UserError, match=r"no chain of modules.*middle: called more than once"):
        cut_of(Twice(), torch.randn(4, 64))


class Glued(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.middle(self.down(x) * 2) + 1)


def test_a_network_without_a_chain_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="none of its modules takes the tensor that another one returns"):
        cut_of(Glued(), torch.randn(4, 64))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.mean()


class WithPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(64, 64), Pair(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y, extra = self.pair(self.first(x))
        return self.last(y) + extra
