"""A block put on a network: its first module runs all of the block, the others hand on what they are given.

Only `forward` of the block's modules is replaced, on the instances. The network's own code calls each of them as
before; so what stands between two blocks, or around the chain, needs no knowledge of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dlbench.errors import RunError
from dlbench.node.memory.cut import UnitModule, are_same

BlockFunction = Callable[..., Any]
"""Takes what the first module of a block is called with, returns what the last one returns."""


class Block:
    """Consecutive units as one function.

    Args:
        number: in the order of the forward pass, from 0.
        units: its units.
        run: called in place of the first module's `forward`, with the block and the arguments.
        wrap: applied to `function`, e.g. torch.compile; None: nothing.
    """

    def __init__(
        self,
        number: int,
        units: Sequence[UnitModule],
        run: Callable[[Block, tuple[Any, ...], dict[str, Any]], Any],
        wrap: Callable[[BlockFunction], BlockFunction] | None = None,
    ) -> None:
        self.number = number
        self.name = units[0].name
        self.modules = [module for unit in units for module in unit.modules]
        self._run = run
        self._forwards = [module.forward for module in self.modules]
        self.function: BlockFunction = wrap(self._directly) if wrap is not None else self._modules_called
        """The block's computation, and nothing else."""
        self._is_running = False
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        self._output: Any = None

    def install(self) -> None:
        """Replaces `forward` of its modules."""
        first, *others = self.modules
        first.forward = self._first
        for position, module in enumerate(others, 1):
            module.forward = partial(self._other, position)

    def remove(self) -> None:
        """Its modules are as they were."""
        for module, forward in zip(self.modules, self._forwards, strict=True):
            vars(module).pop("forward", None)
            if module.forward != forward:  # it stood on the instance before
                module.forward = forward
        self._output, self._given = None, ((), {})

    @property
    def is_running(self) -> bool:
        """Whether its modules are being computed now: other calls of them only begin the block or hand on."""
        return self._is_running

    def buffers(self) -> list[torch.Tensor]:
        """Buffers of its modules."""
        return [buffer for module in self.modules for buffer in module.buffers()]

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_running:
            return self._forwards[0](*args, **kwargs)
        output = self._run(self, args, kwargs)
        if len(self.modules) > 1:
            self._output, self._given = output, (args[1:], kwargs)
        return output

    def _other(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """`forward` of a module behind the first: computes within the block, hands on where the network calls it."""
        if self._is_running:
            return self._forwards[position](*args, **kwargs)
        if not args or args[0] is not self._output or not _are_same((args[1:], kwargs), self._given):
            raise RunError(
                f"{self.name}: a module of its block is now called with other arguments than when the network was cut "
                "into blocks; set train.memory.blocks so that a block begins with it"
            )
        if position == len(self.modules) - 1:
            self._output, self._given = None, ((), {})
        return args[0]

    def _modules_called(self, *args: Any, **kwargs: Any) -> Any:
        self._is_running = True
        try:
            x = args[0]
            for module in self.modules:
                x = module(x, *args[1:], **kwargs)
            return x
        finally:
            self._is_running = False

    def _directly(self, *args: Any, **kwargs: Any) -> Any:
        """The same without hooks of modules, for a compiler."""
        x = args[0]
        for forward in self._forwards:
            x = forward(x, *args[1:], **kwargs)
        return x


def _are_same(
    first: tuple[tuple[Any, ...], Mapping[str, Any]], second: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> bool:
    return are_same(first[0], second[0]) and are_same(
        [first[1].get(key, nn.Module) for key in second[1]], list(second[1].values())
    )
