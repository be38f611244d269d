"""FSDP's collectives, counted and timed one by one, through the hooks that torch has for own ones.

torch calls them with `async_op=False`, in streams of their own (`foreach_all_gather`, `foreach_reduce`; torch 2.13).
A CPU has no streams: a call returns when it is done, so the rank waits for all of each, and every step is timed. On a
GPU the computing stream waits where a module begins that needs the parameters, or where its gradients are about to
leave while those before are still under way: there, and around each collective, events are recorded in watched steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dlbench.errors import EnvironmentLacksError
from dlbench.node.sync.engine import MessageSpan
from dlbench.node.sync.timing import MessageInFlight, clock_for, covered, spans

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError as error:
    raise EnvironmentLacksError(
        f"engine fsdp watches collectives by torch's DefaultAllGather and DefaultReduceScatter, which torch "
        f"{torch.__version__} does not have where 2.13 has them ({error}); use that, or --engine ddp"
    ) from None

Phase = Literal["forward", "backward", "exchange", "optimizer"]
GATHER, SCATTER, REDUCE, ACTIVATIONS = "all-gather", "reduce-scatter", "all-reduce", "all-reduce of activations"


@dataclass(kw_only=True)
class Call(MessageInFlight):
    """One collective of a step, of a whole vector, padding included; moments are None where it was not timed."""

    phase: Phase
    module: str  # That the parameters or gradients belong to; empty: of no module.
    ranks: int
    rounds: int  # Of a ring, in each of which a rank sends all but its share.

    @property
    def of_gradients(self) -> bool:
        return self.method != GATHER and self.phase != "forward"

    @property
    def sent_bytes(self) -> float:
        return self.rounds * (self.ranks - 1) / self.ranks * self.num_bytes


@dataclass(kw_only=True)
class WatchedCalls:
    """The collectives of one step, and when the computing stream of a GPU came to where it needs their results."""

    calls: list[Call] = field(default_factory=list)
    backward: Any = None  # Moment at which the backward pass began.
    arrivals: dict[tuple[str, str], list[Any]] = field(default_factory=lambda: defaultdict(list))


class CommWatch:
    """The collectives of one rank. `mark_backward`: called when the step's last reduce-scatter is handed over, which is
    known from the step before; where it was not, `end_backward` calls it.
    """

    def __init__(
        self, device: torch.device, mark_backward: Callable[[], None], beat: Callable[[str], None], backend: str
    ) -> None:
        self.clock = clock_for(device)
        # Gloo's reduce-scatter is an all-reduce of which a rank keeps its share (ProcessGroupGloo.cpp, torch 2.13).
        self.rounds = {GATHER: 1, SCATTER: 2 if backend == "gloo" else 1, REDUCE: 2, ACTIVATIONS: 2}
        self.is_open = self.awaits_release = False
        self.steps: list[WatchedCalls] = []  # Of the window.
        self.last: list[Call] = []  # Of the last whole step, moments or not.
        self.bytes_of_steps: Counter[int] = Counter()  # What the ranks sent in each step, and in how many steps;
        self.bytes_of_activations: Counter[int] = Counter()  # and this of activations, which the other leaves out.
        self._seconds: dict[tuple[str, Phase], float] = defaultdict(float)
        self.measured = 0  # Steps since the window closed.
        self._now = WatchedCalls()
        self._mark_backward, self._is_marked, self._beat = mark_backward, False, beat
        self._scatters = self._expected = 0
        self._is_paused = False
        self._hooks: list[Any] = []
        # Collectives are ordered in streams of their own, but the backward pass ends where it computes.
        self._computing = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def attach(self, module: FSDPModule, name: str, num_tensors: int) -> None:
        module.set_custom_all_gather(_AllGather(self, name, num_tensors))
        module.set_custom_reduce_scatter(_ReduceScatter(self, name, num_tensors))

    def carry(self, call: Callable[[], Any], whole: torch.Tensor, group: Any, **what: Any) -> Any:
        """Makes one collective over a `group`. `whole`: what the ranks share or sum; `what`: fields of `Call`."""
        if self._is_paused:
            return call()
        if what["method"] == SCATTER:
            self._scatters += 1
            if self._scatters == self._expected:
                self.end_backward()
        rounds = self.rounds[what["method"]]
        noted = Call(handed=self._mark(), num_bytes=whole.nbytes, ranks=group.size(), rounds=rounds, **what)
        if noted.phase == "backward" and self._is_marked:
            noted.phase = "exchange"
        self._now.calls.append(noted)
        which = f"{noted.method} of {noted.module or 'the network'}"
        self._beat(f"it entered the {which}, which other ranks did not")
        found = call()
        if self.awaits_release and found is not None:
            # Gloo's thread has its own hold on the message for a while. What it releases last, torch's profiler misses.
            found.wait()
            time.sleep(2e-3)
            found = None
        noted.done = self._mark()
        self._beat(f"the {which}")
        return found

    def all_reduced(self, module: str, num_tensors: int, ranks: int) -> Callable[[torch.Tensor], None]:
        """A hook that torch calls behind the all-reduce across nodes, which follows a module's reduce-scatter."""

        def note(output: torch.Tensor) -> None:
            before = self._now.calls[-1]
            noted = Call(
                method=REDUCE,
                phase=before.phase,
                module=module,
                handed=before.done,
                done=self._mark(),
                num_bytes=output.nbytes,
                num_tensors=num_tensors,
                ranks=ranks,
                rounds=2,
            )
            self._now.calls.append(noted)

        return note

    def _mark(self) -> Any:
        return self.clock.mark() if self.clock.marks_are_free or self.is_open else None

    def begin_backward(self) -> None:
        self._now.backward = self._mark()

    def end_backward(self) -> None:
        """Every gradient is handed over; what follows in this step belongs to the update."""
        if not self._is_marked:
            self._is_marked = True
            with nullcontext() if self._computing is None else torch.cuda.stream(self._computing):
                self._mark_backward()

    def end_step(self) -> None:
        step, self._now = self._now, WatchedCalls()
        self._expected, self._scatters, self._is_marked = self._scatters, 0, False
        self.last = step.calls
        for is_of_them, counter in ((False, self.bytes_of_steps), (True, self.bytes_of_activations)):
            calls = [one for one in of_gradients(step.calls) if (one.method == ACTIVATIONS) == is_of_them]
            counter[round(sum(one.sent_bytes for one in calls))] += 1
        if self.is_open:
            self.steps.append(step)
            return
        self.measured += 1
        if self.clock.marks_are_free:
            for one, seconds in zip(step.calls, self.exposed(step), strict=True):
                self._seconds[one.method, one.phase] += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives within are none of a step's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def open(self, modules: dict[str, nn.Module]) -> None:
        """Watches steps closely from the next one on. `modules`: the sharded ones, by name."""
        self.is_open = True
        self.clock.anchor()
        for name, module in () if self.clock.marks_are_free else modules.items():

            def arrive(kind: str, name: str = name) -> None:
                self._now.arrivals[name, kind].append(self.clock.mark())

            self._hooks += _arrival_hooks(module, arrive)

    def close(self) -> None:
        if self.is_open and self.steps:
            self.clock.anchor()
            self.clock.settle()
        self.is_open = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._seconds.clear()
        self.measured = 0

    def exposed(self, step: WatchedCalls) -> list[float]:
        """Seconds of each call that this rank's computing waited for it."""
        between = self.clock.between
        if self.clock.marks_are_free:
            return [between(one.handed, one.done) for one in step.calls]
        seen: Counter[tuple[str, str]] = Counter()
        found = []
        leaving = [one.module for one in step.calls if one.method == SCATTER][1:]
        for one in step.calls:
            if one.method == ACTIVATIONS or one.phase == "optimizer":  # ordered where the rank computes
                found.append(between(one.handed, one.done))
                continue
            arrivals: list[Any] = []
            if one.method == GATHER:
                key = (one.module, one.phase)
                arrivals = step.arrivals.get(key, [])[seen[key] :]
                seen[key] += 1
            elif one.method == SCATTER and leaving:
                # Gradients of the next module leave while these may still be on their way, of whose memory torch keeps
                # one at a time: there the computing stream waits. Earlier passes of the step sent none.
                arrivals = step.arrivals.get((leaving.pop(0), "leave"), [])[-1:]
            found.append(max(0.0, between(arrivals[0], one.done)) if arrivals else 0.0)
        return found

    def seconds(self) -> dict[tuple[str, Phase], float]:
        """What this rank waited in all measured steps, by method and phase; on a GPU what watched steps waited on
        average, for as many.
        """
        if self.clock.marks_are_free or not self.steps:
            return dict(self._seconds)
        total: dict[tuple[str, Phase], float] = defaultdict(float)
        for step in self.steps:
            for one, seconds in zip(step.calls, self.exposed(step), strict=True):
                total[one.method, one.phase] += seconds
        return {key: seconds / len(self.steps) * self.measured for key, seconds in total.items()}

    def times(self) -> dict[str, float]:
        """Medians over watched steps, seconds: collectives under way, their exposed part, and the rest of it."""
        if not self.steps:
            return {}
        between, found = self.clock.between, []
        for step in self.steps:
            first = step.calls[0].handed if step.calls else None
            ways = [(between(first, one.handed), between(first, one.done)) for one in step.calls]
            all_of_it = covered(ways)
            waited = all_of_it if self.clock.marks_are_free else min(all_of_it, sum(self.exposed(step)))
            found.append((all_of_it, waited))
        total, exposed = (statistics.median(column) for column in zip(*found, strict=True))
        return {"communication_s": total, "exposed_s": exposed, "hidden_s": max(0.0, total - exposed)}

    def spans(self) -> list[MessageSpan]:
        return spans([of_gradients(step.calls) for step in self.steps], self.clock)


def of_gradients(calls: list[Call]) -> list[Call]:
    """Those of parameters and gradients, without the norms that an update and clipping need."""
    return [one for one in calls if one.phase != "optimizer"]


def _arrival_hooks(module: nn.Module, arrive: Callable[[str], None]) -> list[Any]:
    """Hooks that say when the computing stream comes to a module in the forward and the backward pass, each before FSDP
    makes it wait, and to where its gradients leave.
    """

    def on_gradient(values: Any, kind: str) -> None:
        tensors = [one for one in (values if isinstance(values, tuple) else (values,)) if isinstance(one, torch.Tensor)]
        wanted = [one for one in tensors if one.requires_grad][:1]
        for tensor in wanted:
            tensor.register_hook(lambda _: arrive(kind))  # type: ignore[no-untyped-call]

    return [
        module.register_forward_pre_hook(lambda *_: arrive("forward"), prepend=True),
        module.register_forward_pre_hook(lambda _, args: on_gradient(args, "leave")),
        module.register_forward_hook(lambda _, args, output: on_gradient(output, "backward"), prepend=True),
    ]


class _Watched:
    def __init__(self, watch: CommWatch, module: str, num_tensors: int) -> None:
        self._watch, self._what = watch, {"module": module, "num_tensors": num_tensors}


class _AllGather(_Watched, DefaultAllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        call = partial(super().__call__, output_tensor, input_tensor, group, async_op or self._watch.awaits_release)
        # Of the pass of the model that is under way on this thread.
        phase: Phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        return self._watch.carry(call, output_tensor, group, method=GATHER, phase=phase, **self._what)


class _ReduceScatter(_Watched, DefaultReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        call = partial(super().__call__, output_tensor, input_tensor, group, op, async_op or self._watch.awaits_release)
        return self._watch.carry(call, input_tensor, group, method=SCATTER, phase="backward", **self._what)
