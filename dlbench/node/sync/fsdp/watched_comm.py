"""FSDP's collectives, counted and timed one by one, through torch's hooks for custom collectives."""
# On a GPU they run in separate streams (`foreach_all_gather`, `foreach_reduce`; torch 2.13): watched steps record
# events around each, and where the computing stream begins a module or is about to send gradients.

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dlbench.errors import EnvironmentLacksError
from dlbench.node.sync.engine import MessageSpan
from dlbench.node.sync.timing import MessageInFlight, clock_for, covered, spans
from dlbench.records.record import CollectiveWaits

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError as error:
    raise EnvironmentLacksError(
        f"engine fsdp watches collectives by torch's DefaultAllGather and DefaultReduceScatter, which torch "
        f"{torch.__version__} does not have where 2.13 has them ({error}); use that, or --engine ddp"
    ) from None

Phase = Literal["forward", "backward", "exchange", "optimizer"]
GATHER, SCATTER, REDUCE, ACTIVATIONS = "all-gather", "reduce-scatter", "all-reduce", "all-reduce of activations"
HALO, SLABS = "sends of halo activations", "all-gather of activations"
_OF_ACTIVATIONS = (ACTIVATIONS, HALO, SLABS)  # They run in the stream that computes.


@dataclass(kw_only=True)
class Call(MessageInFlight):
    """One collective of a step, of the whole vector with padding; its moments are None if it was not timed."""

    phase: Phase
    module: str  # Name of the module whose parameters or gradients it moves; empty: no module.
    ranks: int
    rounds: int  # Rounds of a ring; in each of them a rank sends all but its share.

    @property
    def of_gradients(self) -> bool:
        return self.method not in (GATHER, HALO, SLABS) and self.phase != "forward"

    @property
    def sent_bytes(self) -> float:
        if self.method == HALO:
            return self.num_bytes
        return self.rounds * (self.ranks - 1) / self.ranks * self.num_bytes


@dataclass(kw_only=True)
class WatchedCalls:
    """The collectives of one step, and when the computing stream of a GPU reached the point that needs them."""

    calls: list[Call] = field(default_factory=list)
    backward: Any = None  # Moment at which the backward pass began.
    arrivals: defaultdict[tuple[str, str], list[Any]] = field(default_factory=partial(defaultdict, list))
    """Moments at which the stream reached a module, by the module's name and `forward`, `backward` or `leave`."""


class CommWatch:
    """Counts and times one rank's collectives; calls `mark_backward` when a step's last reduce-scatter begins."""

    # Which one is the last is known from the step before; in a first step `end_backward` calls it.

    def __init__(
        self, device: torch.device, mark_backward: Callable[[], None], beat: Callable[[str], None], backend: str
    ) -> None:
        self.clock = clock_for(device)
        # Gloo's reduce-scatter is an all-reduce of which a rank keeps its share (ProcessGroupGloo.cpp, torch 2.13).
        self.rounds = {GATHER: 1, SCATTER: 2 if backend == "gloo" else 1, REDUCE: 2, ACTIVATIONS: 2}
        self.rounds |= {HALO: 1, SLABS: 1}
        self.is_open = self.awaits_release = False
        self.steps: list[WatchedCalls] = []  # Watched steps.
        self.last: list[Call] = []  # Collectives of the last completed step, timed or not.
        self.bytes_of_steps: Counter[int] = Counter()  # Steps by the bytes that a rank sent, without activations.
        self.bytes_of_activations: Counter[int] = Counter()  # Steps by the bytes of activations that a rank sent.
        self._seconds: dict[tuple[str, Phase], float] = defaultdict(float)
        self.measured = 0  # Steps since the window closed.
        self._now = WatchedCalls()
        self._mark_backward, self._is_marked, self._beat = mark_backward, False, beat
        self._scatters = self._expected_scatters = 0
        self._is_paused = False
        self._hooks = ExitStack()
        # Collectives run in other streams, but the backward pass ends in the one that computes.
        self._compute_stream: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":
            self._compute_stream = torch.cuda.stream(torch.cuda.current_stream(device))

    def attach(self, module: FSDPModule, name: str, num_tensors: int) -> None:
        module.set_custom_all_gather(_AllGather(self, name, num_tensors))
        module.set_custom_reduce_scatter(_ReduceScatter(self, name, num_tensors))

    def run_collective(self, run: Callable[[], Any], vector: torch.Tensor, group: Any, **fields: Any) -> Any:
        """Runs one collective over a `group`. `vector`: the whole of what ranks share or sum; `fields`: of `Call`."""
        if self._is_paused:
            return run()
        if fields["method"] == SCATTER:
            self._scatters += 1
            if self._scatters == self._expected_scatters:
                self.end_backward()
        rounds = self.rounds[fields["method"]]
        fields = {"num_bytes": vector.nbytes, **fields}
        call = Call(handed=self._mark(), ranks=group.size(), rounds=rounds, **fields)
        if call.phase == "backward" and self._is_marked:
            call.phase = "exchange"
        self._now.calls.append(call)
        title = f"{call.method} of {call.module or 'the network'}"
        self._beat(f"it entered the {title}, which other ranks did not")
        work = run()
        if self.awaits_release and work is not None:
            # Gloo's thread keeps a reference to the message for a while, whose release torch's profiler would miss.
            work.wait()
            time.sleep(2e-3)
            work = None
        call.done = self._mark()
        self._beat(f"the {title}")
        return work

    def all_reduced(self, module: str, num_tensors: int, ranks: int) -> Callable[[torch.Tensor], None]:
        """Returns a hook for torch to call after the all-reduce across nodes that follows a module's reduce-scatter."""

        def record(output: torch.Tensor) -> None:
            scatter = self._now.calls[-1]
            call = Call(
                method=REDUCE,
                phase=scatter.phase,
                module=module,
                handed=scatter.done,
                done=self._mark(),
                num_bytes=output.nbytes,
                num_tensors=num_tensors,
                ranks=ranks,
                rounds=self.rounds[REDUCE],
            )
            self._now.calls.append(call)

        return record

    def _mark(self) -> Any:
        if self.clock.marks_are_free or self.is_open:
            return self.clock.mark()
        return None

    def begin_backward(self) -> None:
        self._now.backward = self._mark()

    def end_backward(self) -> None:
        """Marks the end of the backward pass: collectives after it belong to exchange and update."""
        if not self._is_marked:
            self._is_marked = True
            with self._compute_stream:
                self._mark_backward()

    def end_step(self) -> None:
        step, self._now = self._now, WatchedCalls()
        self._expected_scatters, self._scatters, self._is_marked = self._scatters, 0, False
        self.last = step.calls
        sent_bytes = activation_bytes = 0.0
        for call in of_gradients(step.calls):
            if call.method in _OF_ACTIVATIONS:
                activation_bytes += call.sent_bytes
            else:
                sent_bytes += call.sent_bytes
        self.bytes_of_steps[round(sent_bytes)] += 1
        self.bytes_of_activations[round(activation_bytes)] += 1
        if self.is_open:
            self.steps.append(step)
            return
        self.measured += 1
        if self.clock.marks_are_free:
            for call, seconds in zip(step.calls, self.exposed(step), strict=True):
                self._seconds[call.method, call.phase] += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves collectives inside this context out of the step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def open(self, modules: dict[str, nn.Module]) -> None:
        """Times single collectives from the next step on. `modules`: the sharded modules by name."""
        self.is_open = True
        self.clock.anchor()
        if self.clock.marks_are_free:
            return
        for name, module in modules.items():

            def arrive(kind: str, name: str = name) -> None:
                self._now.arrivals[name, kind].append(self.clock.mark())

            for hook in _arrival_hooks(module, arrive):
                self._hooks.enter_context(hook)

    def close(self) -> None:
        if self.is_open and self.steps:
            self.clock.anchor()
            self.clock.settle()
        self.is_open = False
        self._hooks.close()
        self._seconds.clear()
        self.measured = 0

    def exposed(self, step: WatchedCalls) -> list[float]:
        """Returns, for each call, the seconds that this rank's computing waited for it."""
        between = self.clock.between
        if self.clock.marks_are_free:
            return [between(call.handed, call.done) for call in step.calls]
        gathers: Counter[tuple[str, str]] = Counter()
        exposed_s = []
        next_scatters = [call.module for call in step.calls if call.method == SCATTER][1:]
        for call in step.calls:
            if call.method in _OF_ACTIVATIONS or call.phase == "optimizer":  # these run in the computing stream
                exposed_s.append(between(call.handed, call.done))
                continue
            arrivals: list[Any] = []
            if call.method == GATHER:
                key = (call.module, call.phase)
                arrivals = step.arrivals.get(key, [])[gathers[key] :]
                gathers[key] += 1
            elif call.method == SCATTER and next_scatters:
                # torch keeps the memory of one reduce-scatter at a time: if this one is still in flight when the next
                # module's gradients are ready, the computing stream waits. Earlier passes of the step sent none.
                arrivals = step.arrivals.get((next_scatters.pop(0), "leave"), [])[-1:]
            wait_s = max(0.0, between(arrivals[0], call.done)) if arrivals else 0.0
            exposed_s.append(wait_s)
        return exposed_s

    def seconds(self) -> dict[tuple[str, Phase], float]:
        """Returns this rank's waiting in all measured steps by method and phase; on a GPU scaled from watched steps."""
        if self.clock.marks_are_free or not self.steps:
            return dict(self._seconds)
        total: dict[tuple[str, Phase], float] = defaultdict(float)
        for step in self.steps:
            for call, seconds in zip(step.calls, self.exposed(step), strict=True):
                total[call.method, call.phase] += seconds
        return {key: seconds / len(self.steps) * self.measured for key, seconds in total.items()}

    def waits(self, on_cpu: str, on_gpu: str) -> CollectiveWaits:
        """Returns this rank's waiting in measured steps, by pass, with the evidence of its device."""
        gather_s, exchange_s = defaultdict[str, float](float), defaultdict[str, float](float)
        for (method, phase), seconds in self.seconds().items():
            if phase != "exchange":
                by_phase = gather_s if method == GATHER else exchange_s
                by_phase[phase] += seconds
        how = on_cpu
        if not self.clock.marks_are_free:
            how = f"CUDA events of {len(self.steps)} watched warm-up steps, scaled to the measured steps{on_gpu}"
        return CollectiveWaits(gather_s=gather_s, exchange_s=exchange_s, evidence=how)

    def times(self) -> dict[str, float]:
        """Returns medians over watched steps, in seconds: communication, its exposed part, and its hidden part."""
        if not self.steps:
            return {}
        between = self.clock.between
        totals_s, exposed_s = [], []
        for step in self.steps:
            total_s = 0.0
            if step.calls:
                first = step.calls[0].handed
                total_s = covered([(between(first, call.handed), between(first, call.done)) for call in step.calls])
            totals_s.append(total_s)
            # On a CPU calls follow each other, and each is waited for.
            exposed_s.append(total_s if self.clock.marks_are_free else min(total_s, sum(self.exposed(step))))
        total, exposed = statistics.median(totals_s), statistics.median(exposed_s)
        return {"communication_s": total, "exposed_s": exposed, "hidden_s": max(0.0, total - exposed)}

    def spans(self) -> list[MessageSpan]:
        return list(spans([of_gradients(step.calls) for step in self.steps], self.clock))


def of_gradients(calls: list[Call]) -> list[Call]:
    """Returns the calls that move parameters or gradients, without the norms that an update and clipping need."""
    return [call for call in calls if call.phase != "optimizer"]


def _arrival_hooks(module: nn.Module, arrive: Callable[[str], None]) -> list[Any]:
    """Registers hooks that call `arrive` when the computing stream reaches a module, before FSDP makes it wait."""
    # With `forward` and `backward` at the module's passes, and `leave` when its gradients are ready to be sent.

    def on_gradient(values: Any, kind: str) -> None:
        if not isinstance(values, tuple):
            values = (values,)
        for value in values:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda _: arrive(kind))  # type: ignore[no-untyped-call]
                return

    return [
        module.register_forward_pre_hook(lambda *_: arrive("forward"), prepend=True),
        module.register_forward_pre_hook(lambda _, args: on_gradient(args, "leave")),
        module.register_forward_hook(lambda _, args, output: on_gradient(output, "backward"), prepend=True),
    ]


class _Watched:
    def __init__(self, watch: CommWatch, module: str, num_tensors: int) -> None:
        self._watch, self._fields = watch, {"module": module, "num_tensors": num_tensors}


class _AllGather(_Watched, DefaultAllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        call = partial(super().__call__, output_tensor, input_tensor, group, async_op or self._watch.awaits_release)
        is_in_backward = torch._C._current_graph_task_id() != -1  # on this thread
        phase: Phase = "backward" if is_in_backward else "forward"
        return self._watch.run_collective(call, output_tensor, group, method=GATHER, phase=phase, **self._fields)


class _ReduceScatter(_Watched, DefaultReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        call = partial(super().__call__, output_tensor, input_tensor, group, op, async_op or self._watch.awaits_release)
        return self._watch.run_collective(call, input_tensor, group, method=SCATTER, phase="backward", **self._fields)
