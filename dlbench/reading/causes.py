"""The step of a run by causes: what it waits for and what holds it up, in seconds that sum to the whole.

From the phases to the causes seconds are only moved, never estimated anew, and sums are taken over integers:

* `exchange` is the exposed exchange without waiting, the least over ranks in each step;
* `straggler` is waiting for ranks that come late, as `dlbench.reading.stragglers` defines it, with what those ranks
  took longer;
* `input` is waiting for data and the copy to the device; `host` what lies between the phases. Where the run says what
  its readers did, the wait is shared out as their time was: fetching (storage) against preparing (CPU);
* `throttling` is the share of the computing time that lowered clocks, or a used-up quota of CPU time, cost; from the
  samples of the run;
* `memory` is recomputing, and waiting for activations that are swapped, as every rank measured it; `compute` is the
  rest of forward, backward and optimiser;
* `rest` is how far the slowest rank's mean step exceeds the mean of all ranks.

    sum over causes = longest measured time of any rank / steps
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError
from dlbench.reading.leaving import Leaving, leaving
from dlbench.reading.measures import RunSteps, load_steps
from dlbench.reading.samples.node_samples import Interval, node_ranks
from dlbench.reading.samples.throttling import throttled_share
from dlbench.reading.stragglers import Waiting, waiting
from dlbench.records.data_path import ReadingResult
from dlbench.records.scan import Run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INPUT_PARTS = ("fetch", "prepare", "copy")
"""What `input` consists of: fetching samples, preparing them, copying batches to the device."""

CAUSES = ("exchange", "straggler", "input", "host", "throttling", "memory", "compute", "rest")
"""In the order in which they are printed; together they are the whole step."""


@dataclass(frozen=True, kw_only=True)
class Causes:
    """The causes of one run."""

    ranks: int
    steps: int
    """Measured steps of every rank."""
    sums_ns: dict[str, int]
    """Of all ranks and steps, by `CAUSES`, nanoseconds; their sum is ranks x the longest measured time of any rank."""
    not_measured: dict[str, str]
    """Causes that this run did not measure, and why; they are 0 here, and their time is part of `compute`."""
    throttling_evidence: str
    """How the share of lowered clocks is known; empty where it is not."""
    memory_evidence: str = ""
    """How `memory` is known, or why it is 0; empty where it is not known."""
    input_ns: dict[str, int]
    """`input` by `INPUT_PARTS`, nanoseconds; empty where the run does not say what its readers did."""
    waiting: Waiting
    work_ns: tuple[int, ...]
    """Each rank's own work, by rank: all its measured steps without the exchange."""
    hosts: tuple[str, ...]
    """Host of each rank."""
    leaving: Mapping[str, Leaving] = field(default_factory=dict)
    """Which host leaves the exchange later than the others; empty where the clocks do not say."""

    @property
    def input_seconds(self) -> dict[str, float]:
        """Mean seconds per step of `INPUT_PARTS`; they sum to those of `input`."""
        return {name: value / (self.ranks * self.steps) / 1e9 for name, value in self.input_ns.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds per step, by `CAUSES`; they sum to the longest measured time of any rank / steps."""
        return self.seconds_without(())

    def seconds_without(self, names: Collection[str]) -> dict[str, float]:
        """The same as if this run had not measured these causes: 0, and their time is part of `compute`."""
        sums = dict(self.sums_ns)
        for name in names:
            sums["compute"] += sums[name]
            sums[name] = 0
        return {name: value / (self.ranks * self.steps) / 1e9 for name, value in sums.items()}


def causes_of(run: Run, steps: RunSteps | None = None) -> Causes:
    """The causes of a run with a valid record.

    Args:
        run: the run.
        steps: what `load_steps` gave for it, if that is at hand; read otherwise.

    Raises:
        IncompleteDataError: as `dlbench.reading.measures.load_steps`.
        ValueError: the run has no valid record and so no figures.
    """
    loaded = steps or load_steps(run)
    assert run.record is not None
    share, why = _throttled(run, loaded)
    memory_ns, memory_why = _memory(run)
    found = waiting(loaded)
    ranks, count = loaded.step_ns.shape
    work = loaded.step_ns.sum(axis=1) - loaded.phase_ns["exchange"].sum(axis=1)
    sums = _sums(loaded.step_ns, loaded.phase_ns, found, share or 0.0, memory_ns or 0)
    return Causes(
        ranks=ranks,
        steps=count,
        sums_ns=sums,
        input_ns=_input_parts(sums["input"], int(loaded.phase_ns["h2d"].sum()), run.record.reading),
        not_measured={
            **({"throttling": why} if share is None else {}),
            **({"memory": memory_why} if memory_ns is None else {}),
        },
        throttling_evidence="" if share is None else why,
        memory_evidence="" if memory_ns is None else memory_why,
        waiting=found,
        work_ns=tuple(int(value) for value in work),
        hosts=tuple(rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)),
        leaving=leaving(run.record, loaded),
    )


def _input_parts(input_ns: int, copy_ns: int, reading: ReadingResult | None) -> dict[str, int]:
    """The copy is measured; the wait for batches is shared out as readers shared their time, in whole nanoseconds."""
    epochs = () if reading is None else reading.epochs
    fetch = sum(epoch.fetch_s for epoch in epochs)
    readers = fetch + sum(epoch.prepare_s for epoch in epochs)
    if not readers:
        return {}
    copy = min(copy_ns, input_ns)
    fetched = round((input_ns - copy) * fetch / readers)
    return {"fetch": fetched, "prepare": input_ns - copy - fetched, "copy": copy}


def _throttled(run: Run, steps: RunSteps) -> tuple[float | None, str]:
    """`throttled_share`; damaged samples take no figure from the steps, but are reported."""

    def window(node: int) -> Interval:
        rank = node_ranks(run, node)[0].rank
        return int(steps.begin_ns[rank]), int(steps.end_ns[rank])

    try:
        return throttled_share(run, window)
    except IncompleteDataError as error:
        return None, str(error)


def _memory(run: Run) -> tuple[int | None, str]:
    """Nanoseconds of all ranks and measured steps, and how they are known; None and why where they are not."""
    assert run.record is not None
    train, told = run.plan.workload.train, run.record.memory
    if train.activation_budget is not None:
        return None, "torch.compile recomputes within its own kernels (train.activation_budget)"
    if told is None:
        if train.is_in_core:
            return 0, "nothing recomputes or swaps in these runs"
        return None, "the record does not say what recomputing and swapping took"
    if sorted(one.rank for one in told.ranks) != list(range(run.plan.layout.ranks)):
        return None, "not every rank says what recomputing and swapping took"
    seconds = sum(one.recompute_s + one.swap_wait_s + one.room_wait_s for one in told.ranks)
    return round(seconds * 1e9), "recomputing and waiting for room or tensors, measured by every rank"


def _sums(
    step_ns: npt.NDArray[np.int64],
    phase_ns: Mapping[str, npt.NDArray[np.int64]],
    found: Waiting,
    throttled: float,
    memory_ns: int,
) -> dict[str, int]:
    """Nanoseconds of all ranks and steps, by cause; Python's integers, so that no sum is rounded."""
    phases = {name: int(times.sum()) for name, times in phase_ns.items()}
    total = int(step_ns.sum())
    compute = phases["forward"] + phases["backward"] + phases["optimizer"] - found.moved_ns["compute"]
    # What late ranks took longer is charged to them, whatever it was.
    memory = max(0, min(memory_ns, compute))
    compute -= memory
    slow_clocks = round(throttled * compute)
    return {
        "exchange": phases["exchange"] - found.waited_ns,
        "straggler": found.total_ns,
        "input": phases["input"] + phases["h2d"] - found.moved_ns["input"],
        "host": total - sum(phases.values()) - found.moved_ns["host"],
        "throttling": slow_clocks,
        "memory": memory,
        "compute": compute - slow_clocks,
        "rest": len(step_ns) * int(step_ns.sum(axis=1).max()) - total,
    }
