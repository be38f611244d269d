"""Spans of one rank: its stages, and layers and a profile in the window of watched steps.

A module's backward pass begins with the gradient of its output, and ends when the last operation of the call has been
differentiated: a node of autograd's graph, behind the output, with a sequence number from the time of the call. Hooks
on nodes, unlike those of modules, allow operations in place, and are freed with the graph of their step. Recomputing
and waits for swapped tensors count for the layer whose operation needed them first. On a GPU times are CUDA events.

A `record_function` named `ANCHOR` in torch.profiler's profile, of rank 0, and a span of this name tie its times to
CLOCK_MONOTONIC: the former begins within the latter, whose length of about 20 microseconds bounds the error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dlbench.errors import EnvironmentLacksError
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import Clock
from dlbench.node.watching.agent import STAGE_BYTES, span_bytes
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import COMPUTE, SPAN_FIELDS, STAGE, SpanWriter
from dlbench.specs.plan import RunPlan

_ROW_BYTES = sum(int(kind[-1]) for _, kind in SPAN_FIELDS)
_HELD_ROWS = 256  # Most rows that a `SpanWriter` buffers.
_NOTE_BYTES = 64  # Most bytes of a new name besides its letters.
_BLOCK_BYTES = 56  # Most bytes of a block besides its rows.
_LAST_BYTES = 3 * (_ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES + 16)
"""Most bytes of the stages after a pause: the one that it interrupts, "measuring" and "finishing"."""

MAX_HELD_CALLS = 20_000  # Calls of modules held in memory until they are written.
_LEAF_NUMBER = 2**64 - 1  # Sequence number of nodes that accumulate gradients in parameters; they belong to no call.

AddSpan = Callable[..., None]  # `RankSpans.add`.

ANCHOR = "dlbench profiler anchor"
_WARM_MARKS = 10  # Marks before the anchor; the first ones are slow.
MAX_PROFILE_BYTES = 500_000_000  # A larger profile is not kept; it is written outside of `watch.max_bytes`.


class RankSpans:
    """Writes the spans of one rank: stages without a gap from `start_ns` on (default: now), and those of the window."""

    def __init__(self, plan: RunPlan, folder: RunFolder, place: RankPlace, *, start_ns: int | None = None) -> None:
        self.problem = ""  # Reason why spans are missing; empty without a problem.
        self._writer: SpanWriter | None = None
        self._num_added = 0
        self._names: set[str] = set()
        self._name_bytes = 0
        self._num_spans = self._num_bytes = 0
        self._is_closed = False
        self._stage = "starting"
        self._since_ns = time.monotonic_ns() if start_ns is None else start_ns
        self._max_bytes = span_bytes(plan, place.rank)
        # The window must leave room for the last stages, even if the buffer is full.
        self._window_bytes = self._max_bytes - STAGE_BYTES - _HELD_ROWS * _ROW_BYTES
        header = {"rank": place.rank, "run_id": plan.run_id}
        try:
            self._writer = SpanWriter(folder.node_spans(place.node_rank), header, self._max_bytes)
        except OSError as error:
            self._give_up(error)

    def stage(self, name: str) -> None:
        self._end_stage(name)
        self._flush()

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Interrupts the current stage by another; if there is no room, only counts the two spans."""
        if not self._has_room_for_pause():
            self._num_added += 2
            yield
            return
        before = self._stage
        self._end_stage(name)
        try:
            yield
        finally:
            self._end_stage(before)

    def _has_room_for_pause(self) -> bool:
        for _ in range(2):
            writer = self._writer
            if writer is None:
                return True
            # Buffered rows count uncompressed.
            buffered = (writer.num_held + 2) * _ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES
            if writer.bytes_written + self._name_bytes + buffered + _LAST_BYTES <= self._max_bytes:
                return True
            self._flush()
        return False

    def _end_stage(self, following: str) -> None:
        now = time.monotonic_ns()
        self.add(STAGE, self._stage, self._since_ns, now)
        self._stage, self._since_ns = following, now

    def add(self, lane: int, name: str, start_ns: int, end_ns: int, **details: int) -> None:
        """Adds a span, CLOCK_MONOTONIC nanoseconds, with `details` of `SpanWriter.add`; only counts it if full."""
        self._num_added += 1
        writer = self._writer
        if writer is None:
            return
        if lane != STAGE:
            if writer.bytes_written + self._name_bytes > self._window_bytes:
                return
            if name not in self._names:
                self._names.add(name)
                self._name_bytes += len(name) + _NOTE_BYTES
        try:
            writer.add(lane, name, start_ns, end_ns, **details)
        except OSError as error:
            self._give_up(error)

    def close(self) -> dict[str, int]:
        """Ends the current stage, closes the file and returns counts of spans and bytes; may be called again."""
        if not self._is_closed:
            self._end_stage(self._stage)
            self._is_closed = True
        self._end_file()
        return {"num": self._num_spans, "dropped": self._num_added - self._num_spans, "bytes": self._num_bytes}

    def _flush(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self.problem:
            self.problem = f"spans could not be written: {error.strerror or error}"
        self._end_file()

    def _end_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)
            self._num_spans, self._num_bytes = writer.num_rows, writer.bytes_written


@dataclass(slots=True, kw_only=True)
class WatchedCall:
    """One call of one module, with marks of the clock; None for passes that did not happen."""

    name: str
    step: int
    module: nn.Module
    is_repeated: bool  # True if it recomputes activations in a backward pass.
    first_node: int  # Sequence number of autograd at its begin.
    forward_start: Any
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class LayerWatch:
    """Watches a network's leaf modules: `open`, `enter` before each step, `leave` after it, `close`."""

    def __init__(
        self, model: nn.Module, clock: Clock, add: AddSpan, computes: Callable[[nn.Module], bool] = lambda _module: True
    ) -> None:
        self._model = model
        self._computes = computes
        self._clock = clock
        self._add = add
        self._hooks: list[Any] = []
        self._calls: list[WatchedCall] = []
        self._running: list[WatchedCall] = []
        self._step: int | None = None

    def open(self) -> None:
        self._clock.anchor()
        for name, module in self._model.named_modules():
            if next(module.children(), None) is None:
                self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name)))
                self._hooks.append(module.register_forward_hook(self._end))

    def enter(self, step: int) -> None:
        if len(self._calls) > MAX_HELD_CALLS:
            self._write()
        self._running.clear()
        self._step = step

    def leave(self) -> None:
        """Stops watching until the next step, e.g. for an evaluation."""
        self._step = None

    def close(self) -> None:
        """Removes all hooks and adds the spans; a second call does nothing."""
        self.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._running.clear()
        self._write()

    def _begin(self, name: str, module: nn.Module, inputs: object) -> None:
        if self._step is None or not self._computes(module):
            return
        call = WatchedCall(
            name=name,
            step=self._step,
            module=module,
            is_repeated=torch._C._current_graph_task_id() >= 0,
            first_node=torch._C._autograd._get_sequence_nr(),
            forward_start=self._clock.mark(),
        )
        self._running.append(call)

    def _end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._step is None or not self._computes(module):
            return
        # Drops calls that ended with an exception: torch ends recomputing early so.
        while self._running and self._running[-1].module is not module:
            self._running.pop()
        if not self._running:
            return
        call = self._running.pop()
        call.forward_end = self._clock.mark()
        self._calls.append(call)
        if call.is_repeated:
            return
        behind = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
        heads = [node for node in behind if _belongs(node, call.first_node)]
        for node in heads:
            node.register_prehook(partial(self._begin_backward, call))
        for node in _nodes_of_call(heads, call.first_node):
            node.register_hook(partial(self._end_backward, call))

    def _begin_backward(self, call: WatchedCall, gradients: object) -> None:
        if call.backward_start is None and self._step == call.step:
            call.backward_start = self._clock.mark()

    def _end_backward(self, call: WatchedCall, inputs: object, outputs: object) -> None:
        if call.backward_start is not None and self._step == call.step:
            call.backward_end = self._clock.mark()

    def _write(self) -> None:
        calls, self._calls = self._calls, []
        if not calls:
            return
        self._clock.settle()
        for call in calls:
            forward = "recompute" if call.is_repeated else "forward"
            self._add_pass(call, forward, call.forward_start, call.forward_end)
            if call.backward_end is not None:
                self._add_pass(call, "backward", call.backward_start, call.backward_end)

    def _add_pass(self, call: WatchedCall, direction: str, start: Any, end: Any) -> None:
        start_ns, end_ns = self._clock.monotonic_ns(start), self._clock.monotonic_ns(end)
        self._add(COMPUTE, f"{direction} {call.name}", start_ns, end_ns, step=call.step)


def _belongs(node: Any, first: int) -> bool:
    number: int = node._sequence_nr()
    return first <= number < _LEAF_NUMBER


def _nodes_of_call(heads: Iterable[Any], first: int) -> Iterator[Any]:
    visited = set()
    waiting = list(heads)
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        waiting += [behind for behind, _ in node.next_functions if behind is not None and _belongs(behind, first)]


def _tensors(outputs: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a module's outputs, also in dicts, lists and tuples."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for part in outputs.values():
            yield from _tensors(part)
    elif isinstance(outputs, list | tuple):
        for part in outputs:
            yield from _tensors(part)


class ProfileWindow:
    """One profile by torch.profiler: `open`, `stop` and `close` between two steps; an error does not end the run."""

    def __init__(self, path: Path, device: torch.device, add: AddSpan) -> None:
        if not torch.profiler.kineto_available():
            raise EnvironmentLacksError(
                "watch.profiler: this torch was built without its profiler (Kineto); set watch.profiler to false"
            )
        self._path = path
        self._add = add
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._is_open = self._has_profile = False
        self.problem = ""  # Reason why there is no profile; empty without a problem.

    def open(self) -> None:
        """Starts the profile; the device must be idle."""
        try:
            self._profile.start()
            self._is_open = True
            for _ in range(_WARM_MARKS):
                with record_function("dlbench"):
                    pass
            start_ns = time.monotonic_ns()
            with record_function(ANCHOR):
                end_ns = time.monotonic_ns()
        except (OSError, RuntimeError) as error:
            self._fail("could not be started", error)
            return
        self._add(COMPUTE, ANCHOR, start_ns, end_ns)

    def stop(self) -> None:
        """Ends the profile, which stays in memory; the device must be idle. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._profile.stop()
            self._has_profile = not self.problem
        except (OSError, RuntimeError) as error:
            self._fail("could not be ended", error)

    def close(self) -> None:
        """Ends the profile and writes its file, which may take seconds. A second call does nothing."""
        self.stop()
        if not self._has_profile:
            return
        self._has_profile = False
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._profile.export_chrome_trace(str(partial))
            size = partial.stat().st_size
            if size > MAX_PROFILE_BYTES:
                partial.unlink()
                self.problem = f"the profile had {size} bytes and was not kept; set a smaller watch.window_steps"
            else:
                partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            self._fail("could not be written", error)
            with contextlib.suppress(OSError):  # it was reported just now
                partial.unlink(missing_ok=True)

    def _fail(self, failure: str, error: Exception) -> None:
        self.problem = f"the profile {failure}: {' '.join(str(error).split()) or type(error).__name__}"
