"""What dlbench's loop itself takes of the host in a step: CPU time of its thread, with nothing to train.

In it are the loop, the timer, the seed of a step, the copy of a loss, the row of a step file, signs of life, and what a
standstill every 100 steps costs, rows compressed and written and garbage collected. Not in it are
the network, the optimizer, the engine, reading, and what CUDA's driver takes for an event or a launch: events are
stand-ins whose calls cost next to nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.figures import Figure

STEPS, WARMUP = 1000, 12
BLOCKS = 15
GOAL_US = 150


class FreeEvent:
    """Passed as soon as it is recorded, at a moment of the device's clock that costs nothing to know."""

    ticks = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def record(self) -> None:
        FreeEvent.ticks = self.at = FreeEvent.ticks + 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FreeEvent) -> float:
        return (end.at - self.at) * 0.01


def figures() -> Iterator[Figure]:
    """Microseconds per step, with the clock of a CPU and with that of a GPU over stand-ins."""
    import torch

    from dlbench.node.training.phases import CpuTimer, CudaTimer, PhaseTimer

    empty = torch.empty
    timers: tuple[tuple[str, type[PhaseTimer]], ...] = (("CPU's clock", CpuTimer), ("GPU's events", CudaTimer))
    torch.set_num_threads(1)
    for name, timer in timers:
        for parts in (1, 8):
            with (
                tempfile.TemporaryDirectory() as folder,
                patch("torch.cuda.Event", FreeEvent),
                patch("torch.cuda._sleep", lambda cycles: None),
                patch("torch.empty", lambda *a, pin_memory=False, **k: empty(*a, **k)),
            ):
                yield _figure(f"host work of the loop, {name}, {parts} parts", timer(), parts, Path(folder))


def _figure(name: str, timer: Any, parts: int, folder: Path) -> Figure:
    from dlbench.node.training.loop import TrainingLoop
    from dlbench.node.training.progress import ProgressReporter, Watchdog
    from dlbench.records.folder import RunFolder
    from tests.support.one_rank import empty_training

    class Measured(TrainingLoop):
        """The CPU time from the first measured step to the end of the last, with what lies between them."""

        began_ns = took_ns = 0

        def _enter_measurement(self) -> None:
            super()._enter_measurement()
            spent.clear()
            self.began_ns = time.thread_time_ns()

        def _all_steps(self) -> None:
            super()._all_steps()
            self.took_ns = time.thread_time_ns() - self.began_ns

    spent: dict[str, int] = {}
    state = empty_training(timer, warmup=WARMUP, measured=STEPS, parts=parts)
    context = state.context
    context.watchdog = Watchdog(600, lambda reason: None)
    with patch("sys.stdout"):  # which a rank writes to twice a second at most
        context.status = ProgressReporter(context.plan, RunFolder(folder), context.place)
        blocks = []
        for number in range(BLOCKS + 1):
            loop = Measured(state, timer)
            loop.run(folder / f"{number}.steps")
            blocks.append(loop.took_ns / STEPS / 1e3)
        _by_part(spent, Measured(state, timer), context, timer, folder)
        context.status.enter("done")
    known = ", ".join(f"{part} {ns / STEPS / 1e3:.0f}" for part, ns in spent.items())
    return Figure.of(
        blocks[1:],
        name=name,
        unit="us of CPU per step",
        goal=f"at most {GOAL_US} with 1 part",
        met=lambda one: one.value <= GOAL_US if parts == 1 else None,
        reason=f"by part, in a run whose parts are timed, which costs some: {known}",
    )


def _by_part(spent: dict[str, int], loop: Any, context: Any, timer: Any, folder: Path) -> None:
    """CPU time of each part of the loop without the parts within it, nanoseconds, in one run."""
    from dlbench.node.training import loop as loop_module

    inner = [0]

    def timed(part: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time_ns()
            inner.append(0)
            found = plain(*arguments, **named)
            took = time.thread_time_ns() - began
            spent[part] = spent.get(part, 0) + took - inner.pop()
            inner[-1] += took
            return found

        return call

    places: dict[str, tuple[tuple[Any, str], ...]] = {
        "signs of life": ((context.watchdog, "beat"), (context.status, "on_step")),
        "seed": ((loop_module, "_seed"), (loop_module, "_step_seed")),
        "events": ((timer, "begin"), (timer, "mark"), (timer, "hold_back")),
        "loss": ((timer, "finish"),),
        "times": ((timer, "collect"),),
        "row": ((loop, "_keep"),),
        "batch": ((loop, "_batch"),),
        "passes": ((loop, "_gradients"),),
        "update": ((loop, "_update"),),
        "between steps": ((loop, "_ends_after"),),
        "rest": ((loop, "_step"),),
    }
    with ExitStack() as stack:
        for part, calls in places.items():
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        loop.run(folder / "parts.steps")
