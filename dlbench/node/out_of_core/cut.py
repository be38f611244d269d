"""Units of a network: modules, each called once per forward pass, that hand one tensor from one to the next.

They are found by looking at a forward pass, not at the module tree alone: a module is divided into its children where
these hand the very tensor that it is given from one to the next and return the last one's; else it is one unit, such as
a residual block. The longest run of units is the chain. A second forward pass, in which every operation is seen, shows
whether anything but the next unit uses what a unit returns (a skip connection).

A block is put on a network: its first module runs all of the block, the others hand on what they are given. Only
`forward` of the block's modules is replaced, on the instances. The network's own code calls each of them as before; so
what stands between two blocks, or around the chain, needs no knowledge of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dlbench.errors import RunError, UserError
from dlbench.node.out_of_core.saved import is_of_parameter

BlockFunction = Callable[..., Any]  # From the arguments of a block's first module to the result of its last one.


@dataclass(frozen=True)
class UnitModule:
    """One link of a network's chain."""

    name: str  # name of its first module in the network
    modules: tuple[nn.Module, ...]
    """Called one after the other: more than one where a module changes its input in place or returns a view of it."""
    joins: bool  # Whether a block may hold it and the unit before, whose output only it uses: other arguments agree.
    shared: bool  # Whether others hold its input as well, or, of the first, are given it: then it cannot leave.


def find_units(model: nn.Module, run_once: Callable[[], object]) -> tuple[UnitModule, ...]:
    """Returns the longest chain of modules in a network, each as small as the network's module tree allows.

    `run_once`: one forward pass of a small batch with its loss, with grad, no backward pass; it is called twice.
    """
    with undisturbed(model):
        root = _trace(model, run_once)
    called = Counter(id(call.module) for call in root.all())
    units: list[list[ModuleCall]] = []
    for call in _longest_run(root, called):
        if units and call.is_bound_to_input:
            units[-1].append(call)
        else:
            units.append([call])
    if len(units) < 2:
        repeated = sorted({call.name for call in root.all() if call.name and called[id(call.module)] > 1})
        why = "none of its modules is given the very tensor that another one returns"
        if repeated:
            why += f" ({', '.join(repeated[:3])}: called more than once per pass)"
        raise UserError(
            f"this network is no chain of modules: {why}; train it with train.recompute none and train.swap none, or "
            "make what stands between its modules modules of their own"
        )
    with undisturbed(model):
        shared = _shared_boundaries(units, run_once)
    found = []
    for number, calls in enumerate(units):
        joins = number > 0 and number not in shared and _agree(units[number - 1][-1], calls[0])
        found.append(UnitModule(calls[0].name, tuple(call.module for call in calls), joins, number in shared))
    return tuple(found)


@contextmanager
def undisturbed(model: nn.Module, *, holds_gradients: bool = False) -> Iterator[None]:
    """Gives back gradients, buffers and random states as they were; meanwhile gradients are zeros, or are not there."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = torch.zeros_like(parameter) if holds_gradients and parameter.requires_grad else None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@dataclass(eq=False)
class ModuleCall:
    """One call of a module. It holds tensors, so that their identities last."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    version: int = 0
    output: Any = None
    children: list[ModuleCall] = field(default_factory=list)
    changes_input: bool = False

    def all(self) -> Iterator[ModuleCall]:
        """It and all calls within it, outermost first."""
        yield self
        for child in self.children:
            yield from child.all()

    @property
    def given(self) -> torch.Tensor | None:
        return self.args[0] if self.args and isinstance(self.args[0], torch.Tensor) else None

    @property
    def returned(self) -> torch.Tensor | None:
        """Its output or, where that is a tuple, the first of it."""
        output = self.output
        if isinstance(output, tuple | list) and output:
            output = output[0]
        return output if isinstance(output, torch.Tensor) else None

    @property
    def is_bound_to_input(self) -> bool:
        """Whether its input is not as it was, or is where its output is."""
        given, returned = self.given, self.returned
        if given is None or returned is None:
            return False
        return self.changes_input or _storage(given) == _storage(returned)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _trace(model: nn.Module, run_once: Callable[[], object]) -> ModuleCall:
    """All calls of modules in one forward pass; those of a pass in several calls of the model as one."""
    root = ModuleCall(nn.Module(), "", (), {})
    stack = [root]
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, names[id(module)], args, kwargs)
        if call.given is not None:
            call.version = call.given._version
        stack[-1].children.append(call)
        stack.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = stack.pop()
        call.output = output
        call.changes_input = call.given is not None and call.given._version != call.version

    hooks: list[Any] = []
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, with_kwargs=True))
        run_once()
    finally:
        for hook in hooks:
            hook.remove()
    return root


def _divided(call: ModuleCall, called: Mapping[int, int]) -> list[ModuleCall]:
    """A call as the chain of calls within it, each divided in turn; itself where these are no chain."""
    children = call.children
    tensors = [call.given, *(child.output for child in children)]
    is_chain = (
        bool(children)
        and tensors[0] is not None
        and tensors[-1] is call.output
        and all(child.given is before for child, before in zip(children, tensors, strict=False))
        and all(isinstance(child.output, torch.Tensor) and called[id(child.module)] == 1 for child in children)
    )
    return [unit for child in children for unit in _divided(child, called)] if is_chain else [call]


def _longest_run(root: ModuleCall, called: Mapping[int, int]) -> list[ModuleCall]:
    """The longest run of linked calls within any one call; the outermost of several."""
    best: list[ModuleCall] = []
    for parent in root.all():
        run: list[ModuleCall] = []
        for call in (unit for child in parent.children for unit in _divided(child, called)):
            is_unit = called[id(call.module)] == 1 and call.given is not None and call.returned is not None
            linked = bool(run) and call.given is run[-1].returned
            if is_unit and linked and not (call.is_bound_to_input and not _agree(run[-1], call)):
                run.append(call)
            else:
                # What changes or views the input of the chain itself cannot begin it.
                run = [call] if is_unit and not call.is_bound_to_input else []
            if len(run) > len(best):
                best = list(run)
    return best


def are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether arguments are the same objects or, where they are no tensors, equal."""
    if len(first) != len(second):
        return False
    return all(
        a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b))
        for a, b in zip(first, second, strict=True)
    )


def _agree(before: ModuleCall, call: ModuleCall) -> bool:
    if not isinstance(before.output, torch.Tensor) or not isinstance(call.output, torch.Tensor):
        return False
    keys = list(before.kwargs)
    if keys != list(call.kwargs):
        return False
    return are_same(before.args[1:], call.args[1:]) and are_same(
        list(before.kwargs.values()), list(call.kwargs.values())
    )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and which units' outputs others than the next unit work on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: int | None = None
        self.boundaries: dict[int, int] = {}  # number of the unit that is given it, by storage
        self.held: list[torch.Tensor] = []
        self.shared: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                number = self.boundaries.get(_storage(value))
                if number is not None and self.inside != number:
                    self.shared.add(number)
        return func(*args, **(kwargs or {}))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd does; before the chain that may be what becomes the first unit's input."""
        saved = tensor if tensor.grad_fn is None else tensor.detach()
        if not self.boundaries and tensor.layout is torch.strided:
            self.held.append(saved)
        return saved


def _shared_boundaries(units: Sequence[Sequence[ModuleCall]], run_once: Callable[[], object]) -> set[int]:
    uses = _Uses()

    def enter(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            uses.inside = number
            if not uses.boundaries:
                given, key = args[0], _storage(args[0])
                if given.grad_fn is None or is_of_parameter(given) or key in map(_storage, uses.held):
                    uses.shared.add(0)
                uses.held.append(given)
                uses.boundaries[key] = 0

        return hook

    def leave(number: int, is_last: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            uses.inside = None
            first = output[0] if isinstance(output, tuple | list) else output
            if is_last and number + 1 < len(units):
                uses.held.append(first)
                uses.boundaries[_storage(first)] = number + 1

        return hook

    hooks: list[Any] = []
    try:
        for number, calls in enumerate(units):
            for call in calls:
                hooks.append(call.module.register_forward_pre_hook(enter(number)))
                hooks.append(call.module.register_forward_hook(leave(number, call is calls[-1])))
        with uses, saved_tensors_hooks(uses.save, lambda tensor: tensor):
            run_once()
    finally:
        for hook in hooks:
            hook.remove()
    return uses.shared


class ModuleBlock:
    """Consecutive units as one function; `run` is called in place of the first's `forward`, `wrap` on `function`."""

    def __init__(
        self,
        number: int,
        units: Sequence[UnitModule],
        run: Callable[[ModuleBlock, tuple[Any, ...], dict[str, Any]], Any],
        wrap: Callable[[BlockFunction], BlockFunction] | None = None,
    ) -> None:
        self.number = number
        self.name = units[0].name
        self.modules = [module for unit in units for module in unit.modules]
        self._run = run
        self._forwards = [module.forward for module in self.modules]
        self.function: BlockFunction = wrap(self._directly) if wrap is not None else self._modules_called
        """The block's computation, and nothing else."""
        # Looked for once: to walk through all modules in each pass takes longer than all else around a small block.
        self._holders = [one for module in self.modules for one in module.modules() if one._buffers]
        self.is_running = False
        """Whether its modules are being computed now: other calls of them only begin the block or hand on."""
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        self._output: Any = None

    def install(self) -> None:
        first, *others = self.modules
        first.forward = self._first
        for position, module in enumerate(others, 1):
            module.forward = partial(self._other, position)

    def remove(self) -> None:
        for module, forward in zip(self.modules, self._forwards, strict=True):
            vars(module).pop("forward", None)
            if module.forward != forward:  # it stood on the instance before
                module.forward = forward
        self._output, self._given = None, ((), {})

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for one in self._holders for buffer in one.buffers(recurse=False)]

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_running:
            return self._forwards[0](*args, **kwargs)
        output = self._run(self, args, kwargs)
        if len(self.modules) > 1:
            self._output, self._given = output, (args[1:], kwargs)
        return output

    def _other(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """`forward` of a module behind the first: computes within the block, hands on where the network calls it."""
        if self.is_running:
            return self._forwards[position](*args, **kwargs)
        others, named = self._given
        is_handed_on = bool(args) and args[0] is self._output and are_same(args[1:], others)
        if not is_handed_on or not are_same([kwargs.get(key, nn.Module) for key in named], list(named.values())):
            raise RunError(
                f"{self.name}: a module of its block is now called with other arguments than when the network was cut "
                "into blocks; set train.memory.blocks so that a block begins with it"
            )
        if position == len(self.modules) - 1:
            self._output, self._given = None, ((), {})
        return args[0]

    def _modules_called(self, *args: Any, **kwargs: Any) -> Any:
        self.is_running = True
        try:
            x = args[0]
            for module in self.modules:
                x = module(x, *args[1:], **kwargs)
            return x
        finally:
            self.is_running = False

    def _directly(self, *args: Any, **kwargs: Any) -> Any:
        """The same without hooks of modules, for a compiler."""
        x = args[0]
        for forward in self._forwards:
            x = forward(x, *args[1:], **kwargs)
        return x
