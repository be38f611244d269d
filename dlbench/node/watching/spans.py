"""What one rank did when: its stages from start to end, and what the window of watched steps saw.

Spans must never end a run: where they cannot be written, the rest is left out and the reason reported.

**Layer by layer**, forward and backward: forward is seen by hooks around a module's call. Backward begins when the
gradient of the module's output is there, and ends when the last operation of the call has been differentiated. Those
operations are found in autograd's graph: they are the nodes behind the output whose sequence numbers were given out
during the call. Hooks on nodes look on and change nothing; unlike full backward hooks of modules they do not stand in
the way of operations in place. They die with the graph of their step, hooks on modules are removed when the window
closes. A forward pass that is repeated within the backward pass is marked as such. It lies within the time of the layer
whose operation asked for it first, as waits for what was swapped do. On a GPU moments are CUDA events, set on the clock
of the host when the window closes (not measured here).

**torch.profiler** over the same window, on rank 0. Its times have a zero of their own. An anchor ties them to
CLOCK_MONOTONIC: a `record_function` of the name `ANCHOR` within the profile, and a span of the same name among the
rank's spans. The former begins within the latter, whose length, some 20 microseconds, so bounds the error of taking
both beginnings for the same moment.
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
_HELD_ROWS = 256  # Rows that a `SpanWriter` holds at most before it writes them.
_NOTE_BYTES = 64  # What a new name takes besides its letters, at most.
_BLOCK_BYTES = 32  # What a block takes besides its rows, at most, where they cannot be made smaller.
_LAST_BYTES = 3 * (_ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES + 16)
"""What the stages take that follow a pause, at most: the one it interrupts, "measuring" and "finishing"."""

MAX_HELD_CALLS = 20_000  # Calls of modules held in memory until they are written.
_LEAF_NUMBER = 2**64 - 1  # Sequence number of nodes that add gradients up in parameters; they belong to no call.

AddSpan = Callable[..., None]  # `RankSpans.add`.

ANCHOR = "dlbench profiler anchor"
_WARM_MARKS = 10  # Marks before the anchor; the first ones are slow.
MAX_PROFILE_BYTES = 500_000_000  # A larger profile is not kept; it is written outside of `watch.max_bytes`.


class RankSpans:
    """Spans of one rank: stages without a gap from `start_ns` (None: now) on, and single spans of the window."""

    def __init__(self, plan: RunPlan, folder: RunFolder, place: RankPlace, *, start_ns: int | None = None) -> None:
        self.problem = ""  # Why spans are missing, if the file could not be written; else empty.
        self._writer: SpanWriter | None = None
        self._given = 0
        self._names: set[str] = set()
        self._name_bytes = 0
        self._num_spans = self._num_bytes = 0
        self._is_closed = False
        self._stage = "starting"
        self._since_ns = time.monotonic_ns() if start_ns is None else start_ns
        self._max_bytes = span_bytes(plan, place.rank)
        # Stages come last as well as first: the window must leave room for them, whatever waits in memory.
        self._window_bytes = self._max_bytes - STAGE_BYTES - _HELD_ROWS * _ROW_BYTES
        header = {"rank": place.rank, "run_id": plan.run_id}
        try:
            self._writer = SpanWriter(folder.node_spans(place.node_rank), header, self._max_bytes)
        except OSError as error:
            self._give_up(error)

    def stage(self, name: str) -> None:
        """The stage in force ends and this one begins; what is known so far is then in the file."""
        self._end_stage(name)
        self._flush()

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Interrupts the stage in force by another; where room is left for the last stages only, both are counted."""
        if not self._has_room_for_pause():
            self._given += 2
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
            # What is held in memory counts as it is; once written it is smaller.
            held = (writer.num_held + 2) * _ROW_BYTES + _BLOCK_BYTES + _NOTE_BYTES
            if writer.bytes_written + self._name_bytes + held + _LAST_BYTES <= self._max_bytes:
                return True
            self._flush()
        return False

    def _end_stage(self, following: str) -> None:
        now = time.monotonic_ns()
        self.add(STAGE, self._stage, self._since_ns, now)
        self._stage, self._since_ns = following, now

    def add(self, lane: int, name: str, start_ns: int, end_ns: int, **details: int) -> None:
        """One span, CLOCK_MONOTONIC nanoseconds; `details`: as of `SpanWriter.add`. What does not fit is counted."""
        self._given += 1
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
        """Ends the stage in force and the file, and says how much was written; twice does no harm."""
        if not self._is_closed:
            self._end_stage(self._stage)
            self._is_closed = True
        self._end_file()
        return {"num": self._num_spans, "dropped": self._given - self._num_spans, "bytes": self._num_bytes}

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
    """One call of one module, in moments of the clock; None where there was none."""

    name: str
    step: int
    module: nn.Module
    is_repeated: bool  # Whether it computes activations again, for a backward pass that has begun.
    first_node: int  # Sequence number of autograd at the beginning.
    forward_start: Any
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None


class LayerWatch:
    """The window on one network's leaf modules: `open`, `enter` before each step, `leave` behind it, `close`."""

    def __init__(
        self,
        model: nn.Module,
        clock: Clock,
        add: AddSpan,
        computes: Callable[[nn.Module], bool] = lambda _module: True,
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
        """A step begins; outside of its time."""
        if len(self._calls) > MAX_HELD_CALLS:
            self._write()
        self._running.clear()
        self._step = step

    def leave(self) -> None:
        """The step has ended; what follows (an evaluation) is not watched."""
        self._step = None

    def close(self) -> None:
        """Takes every hook away and hands over the spans; twice does no harm."""
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
        # Calls that an error ended are passed over: a repeated forward pass ends where nothing more is needed.
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
        at = self._clock.monotonic_ns
        for call in calls:
            forward = "recompute" if call.is_repeated else "forward"
            self._add(COMPUTE, f"{forward} {call.name}", at(call.forward_start), at(call.forward_end), step=call.step)
            if call.backward_end is not None:
                self._add(
                    COMPUTE, f"backward {call.name}", at(call.backward_start), at(call.backward_end), step=call.step
                )


def _belongs(node: Any, first: int) -> bool:
    number: int = node._sequence_nr()
    return first <= number < _LEAF_NUMBER


def _nodes_of_call(heads: Iterable[Any], first: int) -> Iterator[Any]:
    seen = set()
    waiting = list(heads)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [behind for behind, _ in node.next_functions if behind is not None and _belongs(behind, first)]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class ProfileWindow:
    """One profile: `open`, `stop` and `close` between two steps; what goes wrong is reported and ends no run."""

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
        self.problem = ""  # Why there is no profile; empty if all went well.

    def open(self) -> None:
        """Begins; the device must be idle."""
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
            self._tell("could not be started", error)
            return
        self._add(COMPUTE, ANCHOR, start_ns, end_ns)

    def stop(self) -> None:
        """Ends the profile, which is kept in memory; the device must be idle. Twice does no harm."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._profile.stop()
            self._has_profile = not self.problem
        except (OSError, RuntimeError) as error:
            self._tell("could not be ended", error)

    def close(self) -> None:
        """Ends it and writes the file, which may take seconds. Twice does no harm."""
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
            self._tell("could not be written", error)
            with contextlib.suppress(OSError):  # it was reported just now
                partial.unlink(missing_ok=True)

    def _tell(self, what: str, error: Exception) -> None:
        self.problem = f"the profile {what}: {' '.join(str(error).split()) or type(error).__name__}"
