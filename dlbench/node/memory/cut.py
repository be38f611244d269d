"""Units of a network: modules, each called once per forward pass, that hand one tensor from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class UnitModule:
    """One link of a network's chain."""

    name: str
    """Name of its first module in the network."""
    modules: tuple[nn.Module, ...]
    """Called one after the other: more than one where a module changes or views its input in place."""
    joins: bool
    """Whether a block may hold it and the unit before: only it uses that unit's output, and their other arguments
    agree."""


@dataclass(frozen=True)
class Cut:
    """The units of a network, and what is not among them."""

    units: tuple[UnitModule, ...]
    outside: tuple[str, ...]
    """Modules with parameters that are in no unit, each with why."""


def find_units(model: nn.Module, run_once: Callable[[], object]) -> Cut:
    """The longest chain of modules in a network, each as small as the network's module tree allows.

    Args:
        model: in training mode.
        run_once: one forward pass with its loss, autocast included, with grad, no backward pass. Called twice; a small
            batch will do. Buffers and random generators are afterwards as they were before.

    Raises:
        UserError: there are fewer than two units; says why.
    """
    raise NotImplementedError
