"""Divides a network into a chain of units: modules, called once per forward pass, that pass a tensor on."""
# Blocks are installed by replacing `forward` on module instances, so the network's code needs no knowledge of them.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dlbench.errors import RunError, UserError
from dlbench.node.out_of_core.saved import is_of_parameter

BlockFunction = Callable[..., Any]  # Takes the arguments of a block's first module, returns its last one's output.


@dataclass(frozen=True)
class UnitModule:
    """A unit of a network's chain."""

    name: str  # Name of its first module in the network.
    modules: tuple[nn.Module, ...]
    """Called one after the other: several if a module changes its input in place or returns a view of it."""
    joins: bool  # Whether one block may hold it and the unit before: only it uses that output, other arguments agree.
    shared: bool  # Whether its input is also used elsewhere, so that it cannot be swapped.


def find_units(model: nn.Module, run_once: Callable[[], object]) -> tuple[UnitModule, ...]:
    """Returns the longest chain of modules in a network, each as small as the network's module tree allows."""
    # `run_once`: a forward pass of a small batch with its loss, with grad, no backward pass; it is called twice.
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
        why = "none of its modules takes the tensor that another one returns"
        if repeated:
            why += f" ({', '.join(repeated[:3])}: called more than once per pass)"
        raise UserError(
            f"this network is no chain of modules: {why}; train it with train.recompute none and train.swap none, or "
            "move the code between its modules into modules"
        )
    with undisturbed(model):
        shared = _shared_boundaries(units, run_once)
    unit_modules = []
    for number, calls in enumerate(units):
        joins = number > 0 and number not in shared and _agree(units[number - 1][-1], calls[0])
        unit_modules.append(UnitModule(calls[0].name, tuple(call.module for call in calls), joins, number in shared))
    return tuple(unit_modules)


@contextmanager
def undisturbed(model: nn.Module, *, holds_gradients: bool = False) -> Iterator[None]:
    """Restores gradients, buffers and random states afterwards; within it gradients are None, or zeros if held."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
                if holds_gradients and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@dataclass(eq=False)
class ModuleCall:
    """One call of a module; it keeps its tensors alive, so that their identities stay unique."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    version: int = 0
    output: Any = None
    children: list[ModuleCall] = field(default_factory=list)
    changes_input: bool = False

    def all(self) -> Iterator[ModuleCall]:
        yield self
        for child in self.children:
            yield from child.all()

    @property
    def input(self) -> torch.Tensor | None:
        if self.args and isinstance(self.args[0], torch.Tensor):
            return self.args[0]
        return None

    @property
    def output_tensor(self) -> torch.Tensor | None:
        output = self.output
        if isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, torch.Tensor):
            return output
        return None

    @property
    def is_bound_to_input(self) -> bool:
        """Returns whether the module changes its input in place, or returns a view of it."""
        if self.input is None or self.output_tensor is None:
            return False
        return self.changes_input or _storage(self.input) == _storage(self.output_tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _trace(model: nn.Module, run_once: Callable[[], object]) -> ModuleCall:
    root = ModuleCall(nn.Module(), "", (), {})
    stack = [root]
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, names[id(module)], args, kwargs)
        if call.input is not None:
            call.version = call.input._version
        stack[-1].children.append(call)
        stack.append(call)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = stack.pop()
        call.output = output
        call.changes_input = call.input is not None and call.input._version != call.version

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        run_once()
    return root


def _divided(call: ModuleCall, called: Mapping[int, int]) -> list[ModuleCall]:
    """Returns the chain of calls within a call, each divided in turn, or the call itself if they are no chain."""
    children = call.children
    tensors = [call.input, *(child.output for child in children)]
    is_chain = (
        bool(children)
        and tensors[0] is not None
        and tensors[-1] is call.output
        and all(child.input is before for child, before in zip(children, tensors, strict=False))
        and all(isinstance(child.output, torch.Tensor) and called[id(child.module)] == 1 for child in children)
    )
    if not is_chain:
        return [call]
    return _divided_children(call, called)


def _divided_children(call: ModuleCall, called: Mapping[int, int]) -> list[ModuleCall]:
    return list(chain.from_iterable(_divided(child, called) for child in call.children))


def _longest_run(root: ModuleCall, called: Mapping[int, int]) -> list[ModuleCall]:
    """Returns the longest run of linked calls within any one call; the outermost if several are as long."""
    longest: list[ModuleCall] = []
    for parent in root.all():
        run: list[ModuleCall] = []
        for call in _divided_children(parent, called):
            is_unit = called[id(call.module)] == 1 and call.input is not None and call.output_tensor is not None
            is_linked = bool(run) and call.input is run[-1].output_tensor
            if is_unit and is_linked and not (call.is_bound_to_input and not _agree(run[-1], call)):
                run.append(call)
            elif is_unit and not call.is_bound_to_input:
                run = [call]
            else:  # a call that changes or views the input of the chain cannot begin it
                run = []
            if len(run) > len(longest):
                longest = list(run)
    return longest


def are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Returns whether tensors are the same objects, and other arguments equal."""
    if len(first) != len(second):
        return False
    return all(
        a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b))
        for a, b in zip(first, second, strict=True)
    )


def _agree(before: ModuleCall, call: ModuleCall) -> bool:
    if not isinstance(before.output, torch.Tensor) or not isinstance(call.output, torch.Tensor):
        return False
    has_equal_keys = list(before.kwargs) == list(call.kwargs)
    values_before, values = list(before.kwargs.values()), list(call.kwargs.values())
    return has_equal_keys and are_same(before.args[1:], call.args[1:]) and are_same(values_before, values)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and records which units' inputs are also used outside of the unit."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: int | None = None  # Number of the unit that is being computed.
        self.boundaries: dict[int, int] = {}  # Number of the unit by the storage of its input.
        self.alive: list[torch.Tensor] = []  # Tensors kept alive, so that their storages' identities stay unique.
        self.shared: set[int] = set()  # Numbers of the units whose inputs are used elsewhere.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                number = self.boundaries.get(_storage(value))
                if number is not None and self.inside != number:
                    self.shared.add(number)
        return func(*args, **(kwargs or {}))

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Is called when autograd saves a tensor, which before the chain may become the first unit's input."""
        saved = tensor.detach() if tensor.grad_fn is not None else tensor
        if not self.boundaries and tensor.layout is torch.strided:
            self.alive.append(saved)
        return saved


def _shared_boundaries(units: Sequence[Sequence[ModuleCall]], run_once: Callable[[], object]) -> set[int]:
    uses = _Uses()

    def enter(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            uses.inside = number
            if not uses.boundaries:
                chain_input, key = args[0], _storage(args[0])
                if chain_input.grad_fn is None or is_of_parameter(chain_input) or key in map(_storage, uses.alive):
                    uses.shared.add(0)
                uses.alive.append(chain_input)
                uses.boundaries[key] = 0

        return hook

    def leave(number: int, is_last: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            uses.inside = None
            if isinstance(output, tuple | list):
                output = output[0]
            if is_last and number + 1 < len(units):
                uses.alive.append(output)
                uses.boundaries[_storage(output)] = number + 1

        return hook

    with ExitStack() as hooks:
        for number, calls in enumerate(units):
            for call in calls:
                hooks.enter_context(call.module.register_forward_pre_hook(enter(number)))
                hooks.enter_context(call.module.register_forward_hook(leave(number, call is calls[-1])))
        with uses, saved_tensors_hooks(uses.save, lambda tensor: tensor):
            run_once()
    return uses.shared


class ModuleBlock:
    """Consecutive units as one function; `run` replaces the first module's `forward`, `wrap` may compile the block."""

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
        self.function: BlockFunction = self._modules_called  # The block's computation.
        if wrap is not None:
            self.function = wrap(self._directly)
        # Collected once: walking through all modules in each pass takes longer than everything else of a small block.
        submodules = chain.from_iterable(module.modules() for module in self.modules)
        self._modules_with_buffers = [submodule for submodule in submodules if submodule._buffers]
        self.is_running = False
        """Whether its modules compute now; other calls of them only begin the block or return their input."""
        self._other_arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        self._output: Any = None

    def install(self) -> None:
        first, *others = self.modules
        first.forward = self._first
        for position, module in enumerate(others, 1):
            module.forward = partial(self._other, position)

    def remove(self) -> None:
        for module, forward in zip(self.modules, self._forwards, strict=True):
            vars(module).pop("forward", None)
            if module.forward != forward:  # it was an attribute of the instance before
                module.forward = forward
        self._output, self._other_arguments = None, ((), {})

    def buffers(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(module.buffers(recurse=False) for module in self._modules_with_buffers))

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_running:
            return self._forwards[0](*args, **kwargs)
        output = self._run(self, args, kwargs)
        if len(self.modules) > 1:
            self._output, self._other_arguments = output, (args[1:], kwargs)
        return output

    def _other(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """Replaces `forward` of a later module: computes within the block, returns its input to the network."""
        if self.is_running:
            return self._forwards[position](*args, **kwargs)
        first_args, first_kwargs = self._other_arguments
        is_block_output = bool(args) and args[0] is self._output and are_same(args[1:], first_args)
        values = [kwargs.get(key, nn.Module) for key in first_kwargs]
        if not is_block_output or not are_same(values, list(first_kwargs.values())):
            raise RunError(
                f"{self.name}: a module of its block is now called with other arguments than when the network was cut "
                "into blocks; set train.memory.blocks so that a block begins with it"
            )
        if position == len(self.modules) - 1:
            self._output, self._other_arguments = None, ((), {})
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
        x = args[0]
        for forward in self._forwards:
            x = forward(x, *args[1:], **kwargs)
        return x
