"""Which parameters the forward pass needs first: seen by hooks in its first run, and where it must wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

GROUPS = 16
"""Groups of parameters at most, by bytes: each costs some fixed time, and the last one's update hides nothing."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Parameters that are updated together, and the modules before whose call they must be ready."""

    parameters: tuple[nn.Parameter, ...]
    places: tuple[nn.Module, ...]


class ForwardOrder:
    """Hooks in front of all modules that own trained parameters; the first forward pass tells their order.

    The parameters of a module that is never called itself (torch's attention reads the weights of its output
    projection) are waited for by the nearest module around it that is, at the latest before the network is called.
    Blocks of an out-of-core network call their modules as the network itself does.

    Args:
        model: the network.
        reach: called before every call of such a module.
        is_hooked: False: nothing is hooked and order is that of definition (a compiled network has no such moments).
    """

    def __init__(self, model: nn.Module, reach: Callable[[nn.Module], None], *, is_hooked: bool = True) -> None:
        self._model = model
        self._reach = reach
        self._modules = dict(model.named_modules())
        self._owners: dict[nn.Parameter, list[str]] = {}
        for name, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self._owners.setdefault(parameter, []).append(name)
        self._calls: dict[str, int] = {}
        self._hooks = []
        for name in dict.fromkeys(("", *(name for names in self._owners.values() for name in names))):
            if is_hooked:
                self._hooks.append(self._modules[name].register_forward_pre_hook(partial(self._called, name)))
            else:
                self._calls[name] = len(self._calls)

    def _called(self, name: str, module: nn.Module, inputs: object) -> None:
        self._calls.setdefault(name, len(self._calls))
        self._reach(module)

    def _place(self, owner: str) -> str:
        return next(name for name in _around(owner) if name in self._calls or not name)

    def groups(self) -> list[Needed]:
        """All trained parameters in the order in which the forward pass needs them; after its first run."""
        held: dict[str, list[nn.Parameter]] = {}
        for parameter, owners in self._owners.items():
            first = min(map(self._place, owners), key=lambda name: self._calls.get(name, -1))
            held.setdefault(first, []).append(parameter)
        total = sum(p.numel() * p.element_size() for p in self._owners)
        found: list[Needed] = []
        parameters: list[nn.Parameter] = []
        places: list[nn.Module] = []
        for name in sorted(held, key=lambda name: self._calls.get(name, -1)):
            parameters += held[name]
            places.append(self._modules[name])
            if sum(p.numel() * p.element_size() for p in parameters) * GROUPS >= total:
                found.append(Needed(parameters=tuple(parameters), places=tuple(places)))
                parameters, places = [], []
        if parameters:
            found.append(Needed(parameters=tuple(parameters), places=tuple(places)))
        return found

    def close(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _around(name: str) -> Iterator[str]:
    """A module's name, and those of the modules around it, inside out; "" is the network."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
