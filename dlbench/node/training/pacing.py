"""How many steps fill the wanted seconds: ranks agree on it in the warm-up, so that measured steps wait for nothing.

Before the steps of the warm-up in which something is watched, all ranks tell how long theirs took. While the warm-up is
too short, it is lengthened by so many steps as are missing, but no more than were made so far: the first steps of all
are slow ones. Then the number of measured steps is set, for good, from the median of the later steps of the rank whose
steps are the shortest. Whether they filled the seconds is known when they are over.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dlbench.node.training.step_schedule import Course
from dlbench.records.record import Setting
from dlbench.specs.training import MeasureSpec

SHORT_WINDOW_S = 20.0
"""A GPU's power is read once a second and is the mean of one (`dlbench.machine`): twenty values and fewer say little of
energy, and clocks still follow the temperature."""

_LATE_STEPS = 50
"""Steps of the warm-up, the last ones, whose median counts."""
_SHORT = 0.9
"""Share of the wanted seconds below which it is said that they were not reached."""


class Pacing:
    """The seconds of one rank's run."""

    def __init__(
        self, course: Course, gather: Callable[[Any], list[Any]], on_course: Callable[[int, int], None]
    ) -> None:
        """What is agreed on.

        Args:
            course: lengthened in place.
            gather: a value of every rank, by rank.
            on_course: told the steps of the run and those of its warm-up.
        """
        self._course, self._gather, self._on_course = course, gather, on_course
        self._is_settled = not course.is_timed
        self._step_s: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether ranks agree before this step of the warm-up."""
        return not self._is_settled and step == self._course.settles_at

    def agree(self, step_s: Sequence[float]) -> None:
        """Lengthens the course; called by all ranks, between two steps.

        Args:
            step_s: of every step so far, seconds.
        """
        course = self._course
        late = step_s[len(step_s) // 2 :][-_LATE_STEPS:]
        # In the first step the host sets up, or compiles for a minute, and the device cools down: it warms nothing up.
        told = self._gather([math.fsum(step_s[1:]), statistics.median(late)])
        # All wait for the slowest of them, so times of one step differ where nothing is exchanged only.
        spent_s, step = min(one[0] for one in told), min(one[1] for one in told)
        ahead = course.warmup - len(step_s)
        missing = math.ceil((course.warmup_s - spent_s) / step) - ahead
        if missing > 0:
            course.lengthen(warmup=min(missing, len(step_s)))
        else:
            self._is_settled, self._step_s = True, step
            course.lengthen(measured=max(0, math.ceil(course.measured_s / step) - course.measured))
        self._on_course(course.steps, course.warmup)

    def settings(self, measure: MeasureSpec, step_s: Sequence[float]) -> list[Setting]:
        """What was asked for in seconds and what became of it; nothing where steps alone were.

        Args:
            measure: of the plan.
            step_s: of every step of this rank, seconds.
        """
        course = self._course
        if not course.is_timed:
            return []
        step = f"{self._step_s:.4g} s" if self._step_s else "unknown length"
        lasting = (
            ("measure.warmup_s", measure.warmup_s, course.warmup_s, step_s[: course.warmup], measure.warmup_steps),
            (
                "measure.measured_s",
                measure.measured_s,
                course.measured_s,
                step_s[course.warmup :],
                measure.measured_steps,
            ),
        )
        return [
            Setting(
                key=key,
                requested=asked,
                effective=wanted,
                evidence=f"{len(own)} steps lasted {math.fsum(own):.4g} s; {least} were planned, and steps of {step} "
                "agreed on by all ranks in the warm-up",
            )
            for key, asked, wanted, own, least in lasting
        ]

    def warnings(self, step_s: Sequence[float], *, on_gpu: bool) -> list[str]:
        """Reasons for doubt in how long was measured, a sentence each."""
        lasted = math.fsum(step_s[self._course.warmup :])
        wanted = self._course.measured_s
        if lasted < _SHORT * wanted:
            return [
                f"measured for {lasted:.3g} s instead of {wanted:.3g} s: measured steps were shorter than those of the "
                "warm-up, from which their number was taken"
            ]
        if on_gpu and lasted < SHORT_WINDOW_S:
            return [
                f"short-window: measured for {lasted:.3g} s, less than {SHORT_WINDOW_S:.0f} s, in which a GPU's clocks "
                "settle and its power is known (measure.measured_s)"
            ]
        return []
