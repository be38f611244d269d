"""The network as programs: `train.compile` and `train.cuda_graphs`. Evaluations run the eager network.

**torch.compile** compiles the network or, if a plan swaps or recomputes activations, each block. A whole network is
compiled in place, so that its parameters keep their names, and within DDP's forward pass, which makes torch split the
backward pass where a bucket of gradients is full; that is a stage before the first step. Blocks are compiled in the
first steps of the warm-up. On a CPU torch 2.13 has one mode: reduce-overhead differs from default only by CUDA graphs
(`list_mode_options`), and max-autotune searches templates of matrix products on a CPU only for constant weights
(`use_cpp_gemm_template` in _inductor/utils.py). torch caches programs in files on the node (TORCHINDUCTOR_CACHE_DIR),
so that later runs of a series load those of the first, and their records say so.

**CUDA graphs** capture forward and backward pass once and replay them in every step.
`torch.cuda.make_graphed_callables` captures the network before the engine wraps it, as DDP's notes on CUDA graphs
require, with autocast's casts but without its cache, which would not outlive the capture. The copy of the batch, the
loss, gradient synchronisation and the update are not captured; they write parameters, buffers and inputs in place.
Dropout draws new numbers in each replay.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.cuda_parts import compiler_lacks
from dlbench.node.out_of_core.cut import undisturbed
from dlbench.node.out_of_core.saved import HeldByOthers, activation_storage
from dlbench.node.part import Batch, TrainingPart, TrialPasses
from dlbench.node.training.precision import Precision
from dlbench.records.record import Compiling, Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, format_bytes

NO_COMPILE = "set train.compile to none"
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # Modes in which torch captures CUDA graphs of compiled code.
GRAPH_PASSES = 3  # Passes until torch replays: one runs without a graph, one is captured (`CUDAGraphTreeManager`).
MOST_BLOCKS = 1024  # Most blocks that are compiled one by one; torch's own limit of 8 per function detects mistakes.


class Compilation(TrainingPart):
    """Compiles the network of one rank."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._mode = plan.workload.train.compile
        require_mode(self._mode, device)
        require_compiler(device, f"train.compile {self._mode}")
        self._plan, self._train, self._device = plan, plan.workload.train, device
        import torch._dynamo.config
        import torch._inductor.config

        # As many as the rank has cores: ranks of one node share it.
        torch._inductor.config.compile_threads = max(1, plan.layout.cores_per_rank)
        # All blocks are one function to torch; runs with some blocks left uncompiled could not be compared.
        torch._dynamo.config.recompile_limit = MOST_BLOCKS
        torch._dynamo.config.accumulated_recompile_limit = MOST_BLOCKS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self._at_measuring: int | None = None
        self._before_steps: tuple[int, float] | None = None
        self._budget_bytes: tuple[int, int] | None = None

    def before_wrap(self, passes: TrialPasses) -> None:
        """Sets `train.activation_budget`, and measures its effect by compiling without and with it."""
        budget = self._train.activation_budget
        if budget is None:
            return
        import torch._functorch.config

        model, saved_bytes = passes.model, list[int]()
        batch = passes.batch_of(passes.samples)
        for share in (torch._functorch.config.activation_memory_budget, budget):
            passes.beat(f"compiling with an activation budget of {share:g}")
            torch._functorch.config.activation_memory_budget = share
            with undisturbed(model):
                self._compile(model)
                saved_bytes.append(_saved_bytes(model, passes.loss_of, batch))
            model._compiled_call_impl = None
            torch._dynamo.reset()
        self._budget_bytes = saved_bytes[0], saved_bytes[1]

    def after_wrap(self, passes: TrialPasses, wrapped: nn.Module) -> None:
        """Compiles a whole network before the first step, by one pass without side effects."""
        if not self._train.is_in_core:
            return
        passes.stage("compiling")
        began, model = time.monotonic(), passes.model
        self._compile(model)
        batch = passes.batch_of(passes.samples)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        repeats = GRAPH_PASSES if self._mode in GRAPH_MODES else 1
        # In this context torch compiles as it does in DDP's forward pass.
        inside: Callable[[], AbstractContextManager[object]] = nullcontext
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            inside = wrapped._inside_ddp_forward
        for number in range(repeats):
            passes.beat(f"compiling the network, pass {number + 1} of {repeats}")
            with undisturbed(model), inside():
                loss = passes.loss_of(batch)
                # Not backward(): engines hook themselves to the accumulation of gradients.
                torch.autograd.grad(loss, parameters, allow_unused=True)
                del loss
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._before_steps = _graphs(), time.monotonic() - began
        passes.stage("building")

    def _compile(self, model: nn.Module) -> None:
        # Not dynamic: all steps have the same shapes.
        model.compile(dynamic=False, mode=self._mode)

    def block(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of one block, compiled at its first call."""
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return compiled

    def evaluating(self) -> AbstractContextManager[object]:
        """Returns a context in which the network runs eagerly, since an evaluation needs no second program."""
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance

    def begin_measuring(self) -> None:
        self._at_measuring = _graphs()

    @property
    def warnings(self) -> list[str]:
        warnings = []
        if self._at_measuring is not None and _graphs() > self._at_measuring:
            warnings.append(
                f"train.compile: {counted(_graphs() - self._at_measuring, 'graph')} were compiled in measured steps, "
                "which made these longer; use more warm-up steps"
            )
        plan = self._plan
        if plan.layout.ranks > 1 and self._train.is_in_core and not plan.engine.kind.overlaps_compiled:
            warnings.append(
                "train.compile: the compiled backward pass returns all gradients at its end, so that their exchange "
                "does not overlap with it"
            )
        if self._budget_bytes is not None and self._budget_bytes[0] == self._budget_bytes[1]:
            warnings.append(
                f"train.activation_budget {self._train.activation_budget:g} had no effect: with and without it the "
                f"compiled network keeps {format_bytes(self._budget_bytes[0])} for its backward pass"
            )
        return warnings

    def result(self) -> Compiling:
        hits = _counter("inductor", "fxgraph_cache_hit")
        compiled = _counter("inductor", "fxgraph_cache_miss") + _counter("inductor", "fxgraph_cache_bypass")
        seconds = self._before_steps[1] if self._before_steps is not None else None
        return Compiling(seconds=seconds, programs=hits + compiled, from_cache=hits)

    def rank_result(self) -> dict[str, Any]:
        return {"compiling": self.result()}

    def settings(self) -> list[Setting]:
        train, graphs, compiling = self._train, _graphs(), self.result()
        skipped = _counter("inductor", "cudagraph_skips")
        effective: str = self._mode
        if not graphs:
            effective = "none"
        elif self._mode == "reduce-overhead" and skipped and not _recorded():
            effective = "default"  # torch made no CUDA graph of anything
        unit = "the network" if train.is_in_core else "each block"
        evidence = f"torch.compile of {unit}: {graphs} graphs"
        evidence += f" ({compiling.programs} programs, {compiling.from_cache} of them from torch's cache)"
        if self._before_steps is None:
            evidence += ", in the warm-up"
        else:
            evidence += f", {self._before_steps[0]} of them in {self._before_steps[1]:.1f} s before the first step"
        if self._mode in GRAPH_MODES:
            evidence += f"; {_recorded()} CUDA graphs recorded, {skipped} skipped by torch"
        settings = [Setting(key="train.compile", requested=train.compile, effective=effective, evidence=evidence)]
        if train.activation_budget is not None and self._budget_bytes is not None:
            import torch._functorch.config

            before, after = self._budget_bytes
            settings.append(
                Setting(
                    key="train.activation_budget",
                    requested=train.activation_budget,
                    effective=torch._functorch.config.activation_memory_budget,
                    evidence=f"kept for the backward pass: {before} bytes without it, {after} with it",
                )
            )
        return settings


def _graphs() -> int:
    return _counter("stats", "unique_graphs")


def _counter(table: str, name: str) -> int:
    from torch._dynamo.utils import counters

    return int(counters[table][name])


def _recorded() -> int:
    """Returns the number of CUDA graphs that torch's compiler recorded on this rank's GPU."""
    if not torch.cuda.is_available():
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or manager.roots is None:  # roots are None again after its graphs were freed
        return 0
    waiting = list(itertools.chain.from_iterable(manager.roots.values()))
    num_graphs = 0
    while waiting:
        node = waiting.pop()
        num_graphs += 1
        waiting += itertools.chain.from_iterable(node.children.values())
    return num_graphs


def _saved_bytes(model: nn.Module, loss_of: Callable[[Batch], Tensor], batch: Batch) -> int:
    """Returns the bytes of activations that a forward pass keeps for the backward pass."""
    others = HeldByOthers(model)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = activation_storage(tensor, others)
        if storage is not None:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return sum(storages.values())


def require_mode(mode: str, device: torch.device) -> None:
    """Raises EnvironmentLacksError if a mode is the same as default on a device."""
    if device.type == "cuda" or mode not in GRAPH_MODES:
        return
    reason = "it differs from default only by CUDA graphs, and this rank computes on a CPU"
    if mode == "max-autotune":
        reason = (
            "on a CPU torch searches only among products with constant weights, which training changes, and captures "
            "no CUDA graphs: nothing would differ from default"
        )
    raise EnvironmentLacksError(f"train.compile {mode}: {reason}; use default")


def require_compiler(device: torch.device, setting: str = "train.compile default", instead: str = NO_COMPILE) -> None:
    """Raises EnvironmentLacksError if torch cannot compile for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise EnvironmentLacksError(
            f"{setting}: torch.compile needs a C++ compiler, and none works here; install g++, name one in CXX, or "
            f"{instead}"
        ) from None
    if lacks := compiler_lacks(on_gpu=device.type == "cuda"):
        reason, remedy = lacks
        raise EnvironmentLacksError(f"{setting}: {reason}; {remedy}, or {instead}")
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise EnvironmentLacksError(
                f"{setting}: torch.compile needs Triton on a GPU, and none is installed that supports this GPU; "
                f"install it, or {instead}"
            )


Forward = Callable[..., Any]


class NetworkGraphs(TrainingPart):
    """Captures the network of one rank as CUDA graphs."""

    def __init__(self, plan: RunPlan, device: torch.device, precision: Precision) -> None:
        if device.type != "cuda":
            raise EnvironmentLacksError(
                "train.cuda_graphs network: this rank computes on a CPU, and CUDA graphs are launches on a "
                "GPU; set train.cuda_graphs to none"
            )
        self._plan, self._device, self._precision = plan, device, precision
        self._is_replayed = False
        self._graph_bytes = 0
        self._seconds = 0.0

    def before_wrap(self, passes: TrialPasses) -> None:
        """Captures the network in place; restores gradients, buffers and random states."""
        passes.stage("compiling")
        passes.beat("capturing CUDA graphs of the network")
        model, batch = passes.model, passes.batch_of(self._plan.workload.train.batch_per_rank)
        began = time.monotonic()
        with undisturbed(model):
            calls: list[tuple[Any, ...]] = []
            handle = model.register_forward_pre_hook(lambda _module, arguments: calls.append(arguments))
            passes.loss_of(batch)
            handle.remove()
            inputs = calls[0]  # Arguments of the network in a step.
            shapes = _shapes(inputs)
            samples = tuple(argument.detach().clone() for argument in inputs if isinstance(argument, Tensor))
            eager = model.forward
            before = torch.cuda.memory_reserved(self._device)
            model.forward = _tensors_only(eager, inputs, self._precision)
            try:
                repeats = self._plan.engine.kind.capture_passes
                torch.cuda.make_graphed_callables(model, samples, num_warmup_iters=repeats)
            except RuntimeError as error:
                model.forward = eager
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = str(error).splitlines()[0]
                raise EnvironmentLacksError(
                    f"train.cuda_graphs network: torch cannot capture the network here ({reason}); set it to none"
                ) from error
            self._graph_bytes = torch.cuda.memory_reserved(self._device) - before
            model.forward = _replaying(model, eager, model.forward, shapes)
            self._is_replayed = _is_replayed(model(*inputs))
        torch.cuda.synchronize(self._device)
        self._seconds = time.monotonic() - began
        passes.stage("building")

    @property
    def warnings(self) -> list[str]:
        if self._plan.layout.ranks == 1 or self._plan.sync.exchange == "none":
            return []
        return [
            "train.cuda_graphs: the captured backward pass returns all gradients at its end, so that their exchange "
            "does not overlap with it"
        ]

    def settings(self) -> list[Setting]:
        effective, origin = "none", "network itself"
        if self._is_replayed:
            effective, origin = "network", "replayed graph"
        evidence = (
            f"torch.cuda.make_graphed_callables captured forward and backward in {self._seconds:.1f} s and uses "
            f"{format_bytes(self._graph_bytes)} of the GPU's memory; outputs of the network come from the {origin}"
        )
        return [Setting(key="train.cuda_graphs", requested="network", effective=effective, evidence=evidence)]


def _tensors_only(eager: Forward, inputs: Sequence[Any], precision: Precision) -> Forward:
    """Returns the forward pass as a function of its tensors, which a capture needs; other inputs are constants."""

    def forward(*tensors: Tensor) -> Any:
        arguments, remaining = list(inputs), iter(tensors)
        for position, argument in enumerate(inputs):
            if isinstance(argument, Tensor):
                arguments[position] = next(remaining)
        # Autocast's cache would keep casts in the capture's memory.
        with precision.autocast(is_cached=False):
            return eager(*arguments)

    return forward


def _replaying(model: nn.Module, eager: Forward, replayed: Forward, shapes: tuple[object, ...]) -> Forward:
    """Returns a function that replays the captured forward pass in training; raises RunError for other shapes."""

    def forward(*arguments: Any) -> Any:
        if not model.training:
            return eager(*arguments)
        if _shapes(arguments) != shapes:
            raise RunError(
                f"train.cuda_graphs network: the network was captured for inputs of {_text(shapes)}, and a step gives "
                f"it {_text(_shapes(arguments))}; set train.cuda_graphs to none"
            )
        return replayed(*[argument for argument in arguments if isinstance(argument, Tensor)])

    return forward


def _shapes(arguments: Sequence[Any]) -> tuple[object, ...]:
    """Returns shape and type of tensors, and other arguments as they are."""
    shapes = list(arguments)
    for position, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            shapes[position] = argument.shape, argument.dtype
    return tuple(shapes)


def _text(shapes: tuple[object, ...]) -> str:
    texts = []
    for shape in shapes:
        if isinstance(shape, tuple):
            texts.append("x".join(map(str, shape[0])))
        else:
            texts.append(str(shape))
    return ", ".join(texts)


def _is_replayed(outputs: Any) -> bool:
    """Tells whether outputs come from a captured graph, whose autograd function torch calls Graphed."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    return type(outputs.grad_fn).__name__ == "GraphedBackward"
