"""Prints the progress of a series: a line per finished run, and on a terminal a live line of the current run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.options import describe_plan
from dlbench.cli.streams import cleaned, terminal
from dlbench.errors import ExitCode
from dlbench.specs.comm import CommPlan, CommSeries
from dlbench.specs.plan import LaunchPlan, RunPlan, SeriesSpec
from dlbench.units import counted, format_number, format_seconds

if TYPE_CHECKING:
    from dlbench.jobs.local import RunOutcome
    from dlbench.jobs.processes import OnProgress

DRAWN_PER_S = 1.0  # The line is drawn on the cores that the ranks compute on.
WIDE = 110  # Columns of a terminal that has room for a bar next to the words.
_MEASURING = "measuring"


class SeriesProgress:
    """Records the duration of runs and the progress of the current one, which another thread reports."""

    def __init__(self, plans: Sequence[LaunchPlan], clock: Callable[[], float] = time.monotonic) -> None:
        self._plans = plans
        self._lock = threading.RLock()
        self._clock = clock
        self._took: list[tuple[LaunchPlan, float]] = []
        self._begun = clock()
        self._first: tuple[float, int] | None = None  # Moment and number of the first measured step.
        self._last: tuple[float, int] | None = None
        self._of = 0
        self._stage = ""

    @property
    def num_done(self) -> int:
        return len(self._took)

    def begin(self) -> None:
        with self._lock:
            self._begun = self._clock()
            self._first = self._last = None
            self._of, self._stage = 0, ""

    def report(self, number: int, of: int, stage: str) -> None:
        """Notes that the run is at step (or point) `number` of `of`; ignored after the end of the last run."""
        with self._lock:
            if self.num_done == len(self._plans):
                return
            self._of, self._stage = of, stage
            if stage != _MEASURING and not isinstance(self._plans[self.num_done], CommPlan):
                self._first = self._last = None
                return
            self._last = self._clock(), number
            self._first = self._first or self._last

    def end(self) -> float:
        """Notes the end of the current run and its duration."""
        with self._lock:
            took = self._clock() - self._begun
            self._took.append((self._plans[self.num_done], took))
            return took

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of the current run; None before the first measurement."""
        if self._first is None or self._last is None:
            return None
        (first_s, first_step), (last_s, last_step) = self._first, self._last
        if last_s <= first_s or last_step <= first_step:
            return None
        return (last_step - first_step) / (last_s - first_s)

    @property
    def left_of_run_s(self) -> float | None:
        """Seconds until the end of the current run, from its steps or from similar runs; None if neither is known."""
        rate = self.steps_per_s
        # The points of a collective benchmark differ in duration.
        is_training = isinstance(self._plans[self.num_done], RunPlan)
        if rate is not None and self._last is not None and self._of and is_training:
            return max(0.0, self._of - self._last[1]) / rate
        expected_s = self._expected_s(self._plans[self.num_done])
        if expected_s is None:
            return None
        return max(0.0, expected_s - (self._clock() - self._begun))

    def left_s(self, *, is_between: bool) -> float | None:
        """Returns the seconds until the end of the series; `is_between`: no run is active. None if not known."""
        later = self._plans[self.num_done + (not is_between) :]
        run_left_s = 0.0 if is_between else self.left_of_run_s
        if run_left_s is None:
            return None
        left_s = run_left_s
        for plan in later:
            expected_s = self._expected_s(plan)
            if expected_s is None:
                # No run has ended: the current one is the best estimate.
                expected_s = run_left_s + self._clock() - self._begun
            left_s += expected_s
        return left_s

    def _expected_s(self, plan: LaunchPlan) -> float | None:
        """Returns the mean duration of similar runs, else of all runs; None before the first has ended."""
        if not self._took:
            return None
        similar = [took_s for ended_plan, took_s in self._took if _kind(ended_plan) == _kind(plan)]
        return mean(similar or [took_s for _, took_s in self._took])

    def now(self, plan: LaunchPlan) -> str:
        """The progress of the current run as text: ``step 37 of 60, 301 images/s, 20 s left; all: 2 min``."""
        with self._lock:
            if self.num_done == len(self._plans):
                return ""
            parts = [self._stage or "starting"]
            if self._last is not None and self._last[1] and self._of:
                parts = [f"step {self._last[1]} of {self._of}"]
                if isinstance(plan, CommPlan):
                    parts = [f"point {self._last[1]} of {self._of} ({self._stage})"]
            rate = self.steps_per_s
            if rate is not None and isinstance(plan, RunPlan):
                parts.append(_throughput(plan, rate * plan.global_batch))
            run_left_s, series_left_s = self.left_of_run_s, self.left_s(is_between=False)
            ends_early = isinstance(plan, RunPlan) and plan.measure.until == "quality"
            if run_left_s is not None and ends_early:
                parts.append(f"at most {_roughly(run_left_s)} left")
            elif run_left_s is not None:
                parts.append(f"{_roughly(run_left_s)} left")
            text = ", ".join(parts)
            if series_left_s is not None and self.num_done + 1 < len(self._plans):
                text += f"; all: {_roughly(series_left_s)}"
            return text


def _kind(plan: LaunchPlan) -> tuple[object, ...]:
    """Returns a key that is equal for runs of about the same duration."""
    size = plan.layout.ranks, plan.layout.nodes
    if not isinstance(plan, RunPlan):
        return size
    series = plan.series
    return (*size, tuple(sorted(series.axes.items())), series.variant, series.side)


def _roughly(seconds: float) -> str:
    """Formats an estimated time, to the minute at most, e.g. ``54 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return format_seconds(seconds)


def _throughput(plan: RunPlan, per_s: float) -> str:
    return f"{format_number(per_s, 3)} {plan.workload.sample_unit}/s"


class ProgressLines:
    """Prints a line for each finished run."""

    def __init__(self, plans: Sequence[LaunchPlan]) -> None:
        self._plans = plans
        self.progress = SeriesProgress(plans)

    def begin(self, plan: LaunchPlan) -> OnProgress:
        if self.progress.num_done == 0:
            self._say(f"{counted(len(self._plans), 'run')} of {_description(plan)}, series {_series(plan).id}")
        self.progress.begin()
        return self.progress.report

    def end(self, plan: LaunchPlan, outcome: RunOutcome) -> None:
        took = self.progress.end()
        self._say(self._ended(plan, outcome, took), is_bad=bool(outcome.detail))

    def _ended(self, plan: LaunchPlan, outcome: RunOutcome, took: float) -> str:
        head = f"[{self.progress.num_done}/{len(self._plans)}] {self._place(plan)}"
        if outcome.detail:
            how = "INTERRUPTED" if outcome.exit_code is ExitCode.REQUEUE else "FAILED"
            return f"{head}: {how} after {format_seconds(took)}: {outcome.detail}"
        parts = [format_seconds(took)]
        if outcome.throughput is not None and isinstance(plan, RunPlan):
            parts.insert(0, _throughput(plan, outcome.throughput))
        if outcome.quality:
            parts.append(outcome.quality)
        line = f"{head}: {', '.join(parts)}"
        series_left_s = self.progress.left_s(is_between=True)
        if series_left_s is not None and self.progress.num_done < len(self._plans):
            line += f"; about {_roughly(series_left_s)} left"
        return line

    def _place(self, plan: LaunchPlan) -> str:
        words = describe_plan(plan).removeprefix(f"{_description(plan)}, ").rpartition(", repeat ")[0]
        series = _series(plan)
        if series.repeats > 1:
            words += f", repeat {series.repeat + 1}"
        return words

    def _say(self, text: str, *, is_bad: bool = False) -> None:
        click.echo(text, err=True)


class Bar(ProgressLines):
    """Prints a line for each finished run, and below them a live line of the current run."""

    def __init__(self, plans: Sequence[LaunchPlan], bar: Any) -> None:
        super().__init__(plans)
        self._bar = bar
        self._task = bar.add_task("", total=len(plans))

    def begin(self, plan: LaunchPlan) -> OnProgress:
        report = super().begin(plan)
        self._show(plan)

        def show(number: int, of: int, stage: str) -> None:
            report(number, of, stage)
            share = number / of if of else 0.0
            self._show(plan, share)

        return show

    def _show(self, plan: LaunchPlan, share: float = 0.0) -> None:
        from rich.markup import escape

        number = self.progress.num_done + 1
        text = f"[{number}/{len(self._plans)}] {self._place(plan)}: {self.progress.now(plan)}"
        self._bar.update(self._task, description=escape(cleaned(text)), completed=number - 1 + 0.99 * min(1.0, share))

    def _say(self, text: str, *, is_bad: bool = False) -> None:
        from rich.text import Text

        self._bar.update(self._task, completed=self.progress.num_done)
        style = "red" if is_bad else ""
        self._bar.console.print(Text(cleaned(text), style=style), soft_wrap=True)


def _description(plan: LaunchPlan) -> str:
    if isinstance(plan, RunPlan):
        return f"{plan.workload.name} ({plan.workload.preset}), {plan.engine.name}"
    return plan.title


def _series(plan: LaunchPlan) -> SeriesSpec | CommSeries:
    assert isinstance(plan, RunPlan | CommPlan)
    return plan.series


@contextmanager
def progress(plans: Sequence[LaunchPlan], *, bar: bool) -> Iterator[ProgressLines]:
    """Yields the printer of a series' progress on standard error; `bar`: draw a live line."""
    if not bar:
        yield ProgressLines(plans)
        return
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    console = terminal()
    columns = (BarColumn(bar_width=20), text) if console.width >= WIDE else (text,)
    # The live line disappears at the end; the lines of the runs and the result stay.
    with Progress(
        *columns, console=console, refresh_per_second=DRAWN_PER_S, expand=True, transient=True
    ) as progress_bar:
        yield Bar(plans, progress_bar)
