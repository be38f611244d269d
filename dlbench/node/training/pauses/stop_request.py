"""A run that is told to stop: by SIGUSR1, which Slurm sends before a time limit or a preemption (sbatch(1), --signal).

The signal is blocked in every rank and all that ranks start (`dlbench.supervisor`), so that it interrupts nothing and
ends no helper. It stays pending; ranks look for it where training stands still anyway, and where a time limit is warned
of, so often that there is time left to stop in. Some ranks may have been told later than others, or not at all: they
agree where they look, and all stop after the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from dlbench.node.garbage import COLLECT_EVERY

LOOKS_IN_WARNING = 4
"""How often ranks look, at least, in the time between warning and limit: most of it is left for the checkpoint."""


class StoppedEarlyError(Exception):
    """Training ended after `step` because it was told to; all ranks raise it after the same step."""

    def __init__(self, step: int, checkpoint: str | None) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.checkpoint = checkpoint
        """Name of the checkpoint that was written; None where the run keeps none."""


def was_told() -> bool:
    """Whether this rank was told to stop."""
    return signal.SIGUSR1 in signal.sigpending()


def any_was_told(gather: Callable[[Any], list[Any]]) -> bool:
    """The same of any rank; called by all ranks, between two steps, and it makes them wait for each other."""
    return any(gather(was_told()))


def looks_every(warn_before_s: float, step_s: Sequence[float], gather: Callable[[Any], list[Any]]) -> int:
    """Steps between two looks at most; the same on every rank, by the slowest one's step.

    Args:
        warn_before_s: seconds between warning and limit.
        step_s: of the steps so far, seconds; the first of them sets things up.
        gather: a value of every rank, by rank.
    """
    late = step_s[1:] or step_s
    slowest = max(gather(max(late, default=0.0)))
    fitting = warn_before_s / LOOKS_IN_WARNING / slowest if slowest > 0 else COLLECT_EVERY
    return max(1, min(COLLECT_EVERY, int(fitting)))
