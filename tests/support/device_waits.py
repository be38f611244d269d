"""Finds what would make the host wait for a GPU, without one: tensors on torch's device `meta` stand for the GPU's.

Code runs as it is, forward and backward pass included; nothing is computed. Reported are the operations on such tensors
whose answer the host needs (a scalar read, a shape that depends on values) and copies from the host's memory that are
not asked to run beside it, among them `torch.tensor(..., device=...)`. What a library's kernel does inside is not seen:
that is for the tests under `tests/gpu`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
"""Stands for the GPU."""

_ASKING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_SHAPES_ONLY = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::t",
    "aten::transpose.int",
    "aten::permute",
    "aten::slice.Tensor",
}
_SHAPES_ONLY |= {
    "aten::select.int",
    "aten::expand",
    "aten::unsqueeze",
    "aten::squeeze.dim",
    "aten::detach",
    "aten::alias",
}
_SHAPES_ONLY |= {"aten::as_strided", "aten::unbind.int", "aten::split.Tensor", "aten::split_with_sizes"}
_SHAPES_ONLY |= {"aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::lift_fresh"}


class Waits:
    def __init__(self) -> None:
        self.found: list[str] = []
        """Each an operation and the place in dlbench or torch that called it."""
        self.launches: Counter[str] = Counter()
        """Operations on the device that compute or move something, by name."""
        self.crossings = 0
        """Copies between host and device, whether they wait or not."""


class _Constants(TorchFunctionMode):
    """Sees `torch.tensor` and its like: inside, they copy without asking the dispatcher."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and isinstance(result, torch.Tensor) and result.device == DEVICE:
            self._waits.found.append(f"torch.tensor on the device: {_place()}")
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_here = any(tensor.device == DEVICE for tensor in given) or kwargs.get("device") == DEVICE
        if not is_here:
            return func(*args, **kwargs)
        if name not in _SHAPES_ONLY:
            self._waits.launches[name] += 1
        if name in _ASKING or _has_mask(name, args):
            self._waits.found.append(f"{name}: {_place()}")
            if name == "aten::_local_scalar_dense":
                return 0.0 if args[0].is_floating_point() else 0
        elif name in _COPIES and _crosses(name, args, kwargs):
            self._waits.crossings += 1
            if not _is_asynchronous(name, args, kwargs):
                self._waits.found.append(f"{name} between host and device: {_place()}")
        return func(*args, **kwargs)


def _has_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose entries must be counted first; a mask that is written with a scalar is not."""
    if name == "aten::index.Tensor":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return False


def _crosses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0].device if name == "aten::copy_" else kwargs.get("device", source.device)
    # A scalar of the host travels with the launch.
    return source.device != target and (source.device == DEVICE or source.dim() > 0)


def _is_asynchronous(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "aten::copy_":
        return bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
    return bool(kwargs.get("non_blocking"))


def _place() -> str:
    """The innermost lines outside of torch and of this file."""
    here = Path(__file__)
    torch_folder = Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_stack()
        if Path(frame.filename) != here and torch_folder not in Path(frame.filename).parents
    ]
    return " < ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in frames[:-4:-1])


@contextmanager
def watched() -> Iterator[Waits]:
    """Within it everything that would wait is noted, in the backward pass too."""
    waits = Waits()
    with _Constants(waits), _Operations(waits):
        yield waits
