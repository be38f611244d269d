"""The network as programs: `train.compile` and `train.cuda_graphs`.

**torch.compile** of the network or, where a plan treats its activations, of each block. A whole network is compiled in
place, so that its parameters keep their names, and within DDP's forward pass, which makes torch cut the backward pass
where a bucket of gradients is full. That is a stage of its own before the first step; blocks are compiled in the first
steps of the warm-up. Evaluations run what was not compiled. On a CPU torch 2.13 knows one mode. reduce-overhead differs
from default by CUDA graphs alone (`list_mode_options`); max-autotune also searches among templates of matrix products,
on a CPU only of weights that are constant (`use_cpp_gemm_template` in _inductor/utils.py), which training changes.

torch keeps programs in files on the node (TORCHINDUCTOR_CACHE_DIR), by their code, shapes, settings and CPU: later runs
of a series load what the first one compiled, and their records say so.

**CUDA graphs**: forward and backward pass captured once, and replayed in every step.
`torch.cuda.make_graphed_callables` captures the network before the engine wraps it, as DDP's notes on CUDA graphs ask
for; casts of autocast lie within, without its cache, which would not outlive the capture. Outside stay the copy of the
batch, the loss and its scaling, gradient synchronisation and the update. Parameters, buffers and inputs keep their
addresses: engines, checkpoints and the optimizer write them in place. Dropout draws anew in each replay, as the
generator stands. Evaluations run what was not captured, since their last batch may be short.
"""

from __future__ import annotations

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
from dlbench.units import format_bytes

NO_COMPILE = "set train.compile to none"
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # Modes in which torch captures CUDA graphs of what it compiled.
GRAPH_PASSES = 3  # Passes until torch replays: one runs without a graph, one is captured (`CUDAGraphTreeManager`).
MOST_BLOCKS = 1024  # Blocks compiled one by one at most; torch's own limit, 8 for one function, is for mistakes.


class Compilation(TrainingPart):
    """What is compiled on one rank."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._mode = plan.workload.train.compile
        require_mode(self._mode, device)
        require_compiler(device, f"train.compile {self._mode}")
        self._plan, self._train, self._device = plan, plan.workload.train, device
        import torch._dynamo.config
        import torch._inductor.config

        # As many as the rank has cores: ranks of one node share it.
        torch._inductor.config.compile_threads = max(1, plan.layout.cores_per_rank)
        # Blocks are one function with other contents each; a block that is left uncompiled would be no comparison.
        torch._dynamo.config.recompile_limit = MOST_BLOCKS
        torch._dynamo.config.accumulated_recompile_limit = MOST_BLOCKS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self._at_measuring: int | None = None
        self._before_steps: tuple[int, float] | None = None
        self._budget_bytes: tuple[int, int] | None = None

    def before_wrap(self, passes: TrialPasses) -> None:
        """Puts `train.activation_budget` in force, and measures what it changes: a compilation without, one with it."""
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
        """Compiles a whole network before the first step: forward and backward pass of one part of a batch.

        No gradient is left, nothing hooked to gradients is called, and what was drawn or counted is given back. Blocks
        of a network whose activations are planned are compiled one by one, in the warm-up.
        """
        if not self._train.is_in_core:
            return
        passes.stage("compiling")
        began, model = time.monotonic(), passes.model
        self._compile(model)
        batch = passes.batch_of(passes.samples)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        repeats = GRAPH_PASSES if self._mode in GRAPH_MODES else 1
        # Within it torch compiles as it does in DDP's forward pass, where DDP wraps the network.
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
        # Shapes are those of every step.
        model.compile(dynamic=False, mode=self._mode)

    def block(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of one block, compiled when it is called first."""
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return compiled

    def evaluating(self) -> AbstractContextManager[object]:
        """Runs what was compiled as it was written: an evaluation needs no second program."""
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance

    def begin_measuring(self) -> None:
        self._at_measuring = _graphs()

    @property
    def warnings(self) -> list[str]:
        found = []
        late = 0 if self._at_measuring is None else _graphs() - self._at_measuring
        if late:
            found.append(
                f"train.compile: {late} graphs were compiled in measured steps, which took longer for it; more warm-up "
                "steps would have had them"
            )
        plan = self._plan
        if plan.layout.ranks > 1 and self._train.is_in_core and not plan.engine.kind.overlaps_compiled:
            found.append(
                "train.compile: the compiled backward pass hands over all gradients at its end, so that their exchange "
                "does not overlap with it"
            )
        if self._budget_bytes is not None and self._budget_bytes[0] == self._budget_bytes[1]:
            found.append(
                f"train.activation_budget {self._train.activation_budget:g} changed nothing: with and without it "
                f"the compiled network keeps {format_bytes(self._budget_bytes[0])} for its backward pass"
            )
        return found

    def result(self) -> Compiling:
        cached, *made = (_counted("inductor", f"fxgraph_cache_{how}") for how in ("hit", "miss", "bypass"))
        seconds = None if self._before_steps is None else self._before_steps[1]
        return Compiling(seconds=seconds, programs=cached + sum(made), from_cache=cached)

    def rank_result(self) -> dict[str, Any]:
        return {"compiling": self.result()}

    def settings(self) -> list[Setting]:
        train, graphs, made = self._train, _graphs(), self.result()
        # The mode, or default where torch made no CUDA graph of anything.
        skipped = _counted("inductor", "cudagraph_skips")
        is_graphed = self._mode != "reduce-overhead" or not skipped or _recorded()
        effective = "none" if not graphs else self._mode if is_graphed else "default"
        evidence = f"torch.compile of {'the network' if train.is_in_core else 'each block'}: {graphs} graphs"
        evidence += f" ({made.programs} programs, {made.from_cache} of them from torch's cache)"
        if self._before_steps is None:
            evidence += ", in the warm-up"
        else:
            evidence += f", {self._before_steps[0]} of them in {self._before_steps[1]:.1f} s before the first step"
        if self._mode in GRAPH_MODES:
            evidence += f"; {_recorded()} CUDA graphs recorded, {skipped} left out by torch"
        found = [Setting(key="train.compile", requested=train.compile, effective=effective, evidence=evidence)]
        if train.activation_budget is not None and self._budget_bytes is not None:
            import torch._functorch.config

            before, after = self._budget_bytes
            found.append(
                Setting(
                    key="train.activation_budget",
                    requested=train.activation_budget,
                    effective=torch._functorch.config.activation_memory_budget,
                    evidence=f"kept for the backward pass: {before} bytes without it, {after} with it",
                )
            )
        return found


def _graphs() -> int:
    return _counted("stats", "unique_graphs")


def _counted(what: str, name: str) -> int:
    from torch._dynamo.utils import counters

    return int(counters[what][name])


def _recorded() -> int:
    """CUDA graphs that torch's compiler recorded on this rank's GPU."""
    if not torch.cuda.is_available():
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    roots = manager.roots if manager is not None else None  # None again once its graphs are gone
    waiting = [node for nodes in roots.values() for node in nodes] if roots else []
    found = 0
    while waiting:
        node = waiting.pop()
        found += 1
        waiting += [child for children in node.children.values() for child in children]
    return found


def _saved_bytes(model: nn.Module, loss_of: Callable[[Batch], Tensor], batch: Batch) -> int:
    """Activations that a forward pass keeps for the backward pass, each storage once."""
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
    """Proves that a mode does more than default on a device."""
    if device.type == "cuda" or mode not in GRAPH_MODES:
        return
    why = "it differs from default by CUDA graphs alone, and this rank computes on a CPU"
    if mode == "max-autotune":
        why = (
            "on a CPU torch searches only among products with constant weights, which training changes, and captures "
            "no CUDA graphs: nothing would differ from default"
        )
    raise EnvironmentLacksError(f"train.compile {mode}: {why}; use default")


def require_compiler(device: torch.device, asked: str = "train.compile default", instead: str = NO_COMPILE) -> None:
    """Proves that torch can compile for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        raise EnvironmentLacksError(
            f"{asked}: torch.compile needs a C++ compiler, and none works here; install g++, name one in CXX, or "
            f"{instead}"
        ) from None
    if lacks := compiler_lacks(on_gpu=device.type == "cuda"):
        reason, remedy = lacks
        raise EnvironmentLacksError(f"{asked}: {reason}; {remedy}, or {instead}")
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise EnvironmentLacksError(
                f"{asked}: torch.compile needs Triton on a GPU, and there is none that knows this one; install it, or "
                f"{instead}"
            )


Forward = Callable[..., Any]


class NetworkGraphs(TrainingPart):
    """The captured network of one rank."""

    def __init__(self, plan: RunPlan, device: torch.device, precision: Precision) -> None:
        if device.type != "cuda":
            raise EnvironmentLacksError(
                "train.cuda_graphs network: this rank computes on a CPU, and CUDA graphs are launches on a "
                "GPU; set train.cuda_graphs to none"
            )
        self._plan, self._device, self._precision = plan, device, precision
        self._is_replayed = False
        self._held_bytes = 0
        self._seconds = 0.0

    def before_wrap(self, passes: TrialPasses) -> None:
        """Captures the network in place; gradients, buffers and random states are then as they were before."""
        passes.stage("compiling")
        passes.beat("capturing CUDA graphs of the network")
        model, batch = passes.model, passes.batch_of(self._plan.workload.train.batch_per_rank)
        began = time.monotonic()
        with undisturbed(model):
            calls: list[tuple[Any, ...]] = []
            handle = model.register_forward_pre_hook(lambda _module, arguments: calls.append(arguments))
            passes.loss_of(batch)
            handle.remove()
            given = calls[0]  # What the network is called with in a step.
            shapes = _shapes(given)
            samples = tuple(one.detach().clone() for one in given if isinstance(one, Tensor))
            eager = model.forward
            before = torch.cuda.memory_reserved(self._device)
            model.forward = _tensors_only(eager, given, self._precision)
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
            self._held_bytes = torch.cuda.memory_reserved(self._device) - before
            model.forward = _replaying(model, eager, model.forward, shapes)
            self._is_replayed = _is_replayed(model(*given))
        torch.cuda.synchronize(self._device)
        self._seconds = time.monotonic() - began
        passes.stage("building")

    @property
    def warnings(self) -> list[str]:
        if self._plan.layout.ranks == 1 or self._plan.sync.exchange == "none":
            return []
        return [
            "train.cuda_graphs: the captured backward pass hands over all gradients at its end, so that their exchange "
            "does not overlap with it"
        ]

    def settings(self) -> list[Setting]:
        return [
            Setting(
                key="train.cuda_graphs",
                requested="network",
                effective="network" if self._is_replayed else "none",
                evidence=f"torch.cuda.make_graphed_callables captured forward and backward in {self._seconds:.1f} s "
                f"and holds {format_bytes(self._held_bytes)} of the GPU's memory; outputs of the network come from the "
                f"{'replayed graph' if self._is_replayed else 'network itself'}",
            )
        ]


def _tensors_only(eager: Forward, given: Sequence[Any], precision: Precision) -> Forward:
    """The forward pass as a function of its tensors, which is all that can be captured; what else was given stays."""

    def forward(*tensors: Tensor) -> Any:
        left = iter(tensors)
        arguments = [next(left) if isinstance(one, Tensor) else one for one in given]
        # Its cache would hold casts that lie in the capture's memory.
        with precision.autocast(is_cached=False):
            return eager(*arguments)

    return forward


def _replaying(model: nn.Module, eager: Forward, replayed: Forward, shapes: tuple[object, ...]) -> Forward:
    """The captured forward pass in training, the network itself in evaluations.

    The function raises RunError where training gives it other inputs than were captured: a replay would spread them
    over the captured shape without a word.
    """

    def forward(*arguments: Any) -> Any:
        if not model.training:
            return eager(*arguments)
        if _shapes(arguments) != shapes:
            raise RunError(
                f"train.cuda_graphs network: the network was captured for inputs of {_text(shapes)}, and a step gives "
                f"it {_text(_shapes(arguments))}; set train.cuda_graphs to none"
            )
        return replayed(*[one for one in arguments if isinstance(one, Tensor)])

    return forward


def _shapes(arguments: Sequence[Any]) -> tuple[object, ...]:
    return tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in arguments)


def _text(shapes: tuple[object, ...]) -> str:
    return ", ".join("x".join(map(str, one[0])) if isinstance(one, tuple) else str(one) for one in shapes)


def _is_replayed(outputs: Any) -> bool:
    """Whether outputs come from a captured graph: `make_graphed_callables` names its autograd function Graphed."""
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return type(first.grad_fn).__name__ == "GraphedBackward"
