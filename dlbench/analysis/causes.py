"""The causes of a run's step time, in seconds that sum to the whole step (longest measured time of any rank / steps).

Seconds are only moved from phases to causes, never estimated again, and sums are over integers:

* `compute` is forward, backward and optimizer, without the time of other causes within them;
* `exchange`, on the wire, is the gradient exchange without waiting: the minimum over ranks in each step, with
  negotiation and copies. A single rank exchanges nothing: the time of the phase is `host`. Collectives within the
  passes and the update are part of it, taken from the phase in which every rank measured them;
* `gather` is the time on the wire of gathering parameters that other ranks hold;
* `bubble` is the time in which a stage of a pipeline waits for other stages, late ones included, within its passes;
* `straggler` is waiting for late ranks, in the exchange and in all these collectives, with the extra time of those
  ranks (`dlbench.analysis.stragglers`);
* `input` is waiting for data and the copy to the device, divided like the readers' time into fetching and preparing;
* `host` is the time between the phases;
* `launch` is the idle time of GPUs while the host was late with its calls;
* `throttling` is the share of computing that lowered clocks, or a used-up quota of CPU time, cost;
* `memory` is recomputing and waiting for swapped activations, taken from the backward pass first;
* `rest` is the slowest rank's mean step minus the mean of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from dlbench.analysis.measures import UNKNOWN_NS, RunSteps, load_steps
from dlbench.analysis.stragglers import (
    Leaving,
    Waiting,
    leaving,
    saved_without_slowest,
    step_blocks,
    waiting,
    without_waits,
)
from dlbench.analysis.telemetry.node_samples import Interval, node_ranks
from dlbench.analysis.telemetry.throttling import throttled_share
from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times, np
from dlbench.records.data_path import ReadingResult
from dlbench.records.rows.steps import LAUNCHED
from dlbench.records.scan import Run
from dlbench.units import first_of, format_seconds

Key = TypeVar("Key")
CAUSES = (
    *("compute", "exchange", "straggler", "gather", "input", "host", "launch", "throttling", "memory", "rest"),
    "bubble",
)
"""Causes in printing order; together they are the whole step."""
EXCHANGE_PHASE = "exchange_phase"  # The exposed exchange of the step: `exchange` and `straggler`.
COMPUTE_PARTS = ("forward", "backward", "optimizer")  # Components of `compute`.
INPUT_PARTS = ("fetch", "prepare", "copy")  # Components of `input`: fetching, preparing, copying batches to the device.
WAIT_PARTS = ("wait", "copy")  # Components of `input` without a measurement of readers: wait for batches, and copy.
_OUT_OF_COMPUTE = ("launch", "throttling", "memory", "gather", "bubble")
"""Parts whose seconds lie in the phases of computing."""


def waited_for_host(steps: RunSteps, *, synchronised: bool) -> tuple[dict[str, int] | None, str]:
    """Returns the idle nanoseconds of all ranks and measured steps by `LAUNCHED`, with evidence; None and why not."""
    if steps.launch is None:
        return dict.fromkeys(LAUNCHED, 0), ""
    if synchronised:
        return None, "measure.phases synchronised makes the device wait for the host after every phase"
    idle_ns, unknown_ns = dict.fromkeys(LAUNCHED, 0), 0
    for phase in LAUNCHED:
        bounds, kernels = steps.launch.bound_ns[phase], steps.launch.kernel_ns[phase]
        for rank, bound in enumerate(bounds):
            waits = bound > 0
            bound_ns = int(bound.sum())
            if kernels[rank] == UNKNOWN_NS:
                unknown_ns += bound_ns
                continue
            beyond = int(steps.phase_ns[phase][rank][waits].sum()) - int(waits.sum()) * int(kernels[rank])
            idle_ns[phase] += min(bound_ns, max(0, beyond))
    if unknown_ns:
        mean_s = unknown_ns / steps.step_ns.size / 1e9
        return None, (
            f"the device waited for the host for at most {format_seconds(mean_s)} per step; the time of its kernels "
            "alone is not known from any step of the warm-up: it is too short, or a phase has more kernels than fit "
            "into the launch queue"
        )
    bounds_ns = sum(int(bound.sum()) for bound in steps.launch.bound_ns.values())
    if not bounds_ns:
        return idle_ns, "the host was ahead of the device in every phase of every step"
    return idle_ns, "computing phases minus the time of their kernels alone, from steps in which the host was ahead"


@dataclass(frozen=True, kw_only=True)
class Causes:
    """The causes of one run."""

    ranks: int
    steps: int  # Measured steps of every rank.
    sums_ns: dict[str, int]
    """Sums over ranks and steps, by `CAUSES`, nanoseconds; together ranks x the longest measured time of any rank."""
    not_measured: dict[str, str]  # Why causes were not measured, by name; they are 0, their time is part of `compute`.
    evidence: Mapping[str, str]
    """How `throttling`, `launch`, `memory`, `gather`, `bubble` were measured; causes that do not apply are absent."""
    compute_ns: dict[str, int]  # `compute` by `COMPUTE_PARTS`, nanoseconds.
    taken_ns: dict[str, dict[str, int]]
    """`_OUT_OF_COMPUTE` and `exchange` by the `COMPUTE_PARTS` that they were taken from, ns."""
    input_ns: dict[str, int]  # `input` by `WAIT_PARTS`; with `fetch` and `prepare` if readers were measured, ns.
    waiting: Waiting
    work_ns: tuple[int, ...]  # Own work of each rank: all its measured steps without waiting for others.
    saved_ns: int = 0  # `saved_without_slowest`; 0 for a single rank.
    hosts: tuple[str, ...]  # Host of each rank.
    leaving: Mapping[str, Leaving] = field(default_factory=dict)  # By host; empty if clocks were not compared.

    @property
    def knows_readers(self) -> bool:
        return "fetch" in self.input_ns

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds per step, by `CAUSES`; they sum to the longest measured time of any rank / steps."""
        seconds = self.seconds_without(())
        return {name: seconds[name] for name in CAUSES}

    def seconds_without(self, names: Collection[str]) -> dict[str, float]:
        """Returns the mean seconds per step of causes, sums and components; those in `names` count as `compute`."""
        sums, compute = dict(self.sums_ns), dict(self.compute_ns)
        for name in names:
            sums["compute"] += sums[name]
            sums[name] = 0
            for part, taken_ns in self.taken_ns.get(name, {}).items():
                compute[part] += taken_ns
        phase = {EXCHANGE_PHASE: sums["exchange"] + sums["straggler"]}
        nanoseconds = {**sums, **phase, **compute, **self.input_ns}
        return {name: value / (self.ranks * self.steps) / 1e9 for name, value in nanoseconds.items()}


def causes_of(run: Run, steps: RunSteps | None = None) -> Causes:
    """Returns the causes of a run, from `steps` if they are loaded already. Raises the errors of `load_steps`."""
    loaded = steps or load_steps(run)
    assert run.record is not None
    share, why = _throttled(run, loaded)
    memory_ns, memory_why = _memory(run)
    launch_ns, launch_why = waited_for_host(loaded, synchronised=run.record.phases == "synchronised")
    waits, gather_why = _collectives(run, loaded.phase_ns)
    bubble_ns, bubble_why = _bubble(run, loaded.phase_ns)
    within: dict[str, Times] = {}
    for (_, phase), waited_ns in waits.items():
        within[phase] = within.get(phase, 0) + waited_ns
    alone, update = without_waits(loaded, within)
    waits_of_run = waiting(alone, update)
    ranks, count = loaded.step_ns.shape
    words = {"throttling": why, "memory": memory_why, "launch": launch_why, "gather": gather_why}
    if bubble_why:
        words["bubble"] = bubble_why
    amounts = {"throttling": share, "memory": memory_ns, "launch": launch_ns}
    unknown = {name for name, amount in amounts.items() if amount is None}
    if gather_why and not within:
        unknown.add("gather")
    exchange = alone.phase_ns["exchange"].sum(axis=1) * (ranks > 1)
    work = (loaded.step_ns.sum(axis=1) - exchange - sum(bubble_ns.values())).tolist()
    bubble = {name: int(stages_ns.sum()) for name, stages_ns in bubble_ns.items()}
    compute, taken_by_cause = _compute_parts(
        *(alone.phase_ns, waits_of_run, bubble, launch_ns or {}, share or 0.0, memory_ns or 0)
    )
    waits["exchange", "exchange"] = exchange - sum(within.values())
    taken_by_cause |= _on_the_wire(waits, int(exchange.sum()) - waits_of_run.waited_ns)
    saved_ns = 0
    if ranks > 1:
        # In blocks, as a copy of all times would be much of the memory of a large run.
        for block in step_blocks(ranks, count):
            saved_ns += saved_without_slowest(loaded.step_ns[:, block] - alone.phase_ns["exchange"][:, block])
    sums = _sums(loaded.step_ns, alone.phase_ns, waits_of_run, compute, taken_by_cause)
    copy = int(loaded.phase_ns["h2d"].sum()) - waits_of_run.moved_phases_ns["h2d"]
    return Causes(
        ranks=ranks,
        steps=count,
        sums_ns=sums,
        compute_ns=compute,
        taken_ns=taken_by_cause,
        input_ns=_input_parts(sums["input"], copy, run.record.reading),
        not_measured={name: words[name] for name in words if name in unknown},
        evidence={name: words[name] for name in words if name not in unknown and (name != "gather" or sums["gather"])},
        waiting=waits_of_run,
        work_ns=tuple(work),
        saved_ns=saved_ns,
        hosts=tuple(rank.host for rank in sorted(run.record.ranks, key=attrgetter("rank"))),
        leaving=leaving(run.record, loaded),
    )


def _input_parts(input_ns: int, copy_ns: int, reading: ReadingResult | None) -> dict[str, int]:
    """Divides the wait for batches like the time of the readers, in whole nanoseconds; the copy is measured."""
    # Shares of moved time are rounded.
    copy = min(max(copy_ns, 0), input_ns)
    parts = {"wait": input_ns - copy, "copy": copy}
    if reading is None:
        return parts
    fetch_s = sum(epoch.fetch_s for epoch in reading.epochs)
    readers_s = fetch_s + sum(epoch.prepare_s for epoch in reading.epochs)
    if not readers_s:
        return parts
    fetched = round(parts["wait"] * fetch_s / readers_s)
    return {**parts, "fetch": fetched, "prepare": parts["wait"] - fetched}


def _throttled(run: Run, steps: RunSteps) -> tuple[float | None, str]:
    """Returns `throttled_share`; damaged samples are reported and do not affect other causes."""

    def window(node: int) -> Interval:
        rank = node_ranks(run, node)[0].rank
        return int(steps.begin_ns[rank]), int(steps.end_ns[rank])

    try:
        return throttled_share(run, window)
    except IncompleteDataError as error:
        return None, str(error)


def _memory(run: Run) -> tuple[int | None, str]:
    assert run.record is not None
    train, memory = run.plan.workload.train, run.record.memory
    if train.activation_budget is not None:
        return None, "torch.compile recomputes within its own kernels (train.activation_budget)"
    if memory is None:
        if train.is_in_core:
            return 0, "nothing recomputes or swaps in these runs"
        return None, "the record has no times of recomputing and swapping"
    ranks = sorted(rank.rank for rank in memory.ranks)
    if len(ranks) != run.plan.layout.ranks or ranks != list(range(len(ranks))):
        return None, "not every rank measured recomputing and swapping"
    seconds = sum(rank.recompute_s + rank.swap_wait_s + rank.room_wait_s for rank in memory.ranks)
    return round(seconds * 1e9), "recomputing and waiting for room or tensors, measured by every rank"


def _collectives(run: Run, phase_ns: Mapping[str, Times]) -> tuple[dict[tuple[str, str], Times], str]:
    """Returns the waiting for collectives within passes and update, and how it was measured or why it is not known.

    Nanoseconds of all steps, by cause and `COMPUTE_PARTS`, shape (ranks,); empty without such collectives.
    """
    assert run.record is not None
    waits_by_rank = [result.waits for result in sorted(run.record.ranks, key=attrgetter("rank"))]
    waits = [rank_waits for rank_waits in waits_by_rank if rank_waits is not None]
    if len(waits_by_rank) == 1 or not (waits or run.plan.engine.name == "fsdp"):
        return {}, ""
    if len(waits) < len(waits_by_rank):
        return {}, "not every rank measured its waiting for collectives within its passes"
    causes = {
        "gather": [rank_waits.gather_s for rank_waits in waits],
        "exchange": [rank_waits.exchange_s for rank_waits in waits],
    }
    waited_ns = {}
    for name in COMPUTE_PARTS:
        unassigned_ns = phase_ns[name].sum(axis=1)
        for cause, seconds in causes.items():
            waited_ns[cause, name] = np.minimum(
                [round(1e9 * rank_seconds.get(name, 0.0)) for rank_seconds in seconds], unassigned_ns
            )
            unassigned_ns = unassigned_ns - waited_ns[cause, name]
    return waited_ns, f"{waits[0].evidence}; without waiting for stragglers"


def _bubble(run: Run, phase_ns: Mapping[str, Times]) -> tuple[dict[str, Times], str]:
    """Returns the waiting for other stages of a pipeline by phase, shape (ranks,), ns, and how it was measured."""
    record, pipeline = run.record, run.plan.engine.pipeline
    assert record is not None
    ranks = sorted(record.ranks, key=attrgetter("rank"))
    bubble, imbalance = record.bubble, record.stage_imbalance
    if bubble is None or imbalance is None:
        return {}, ""
    bubble_ns = {}
    for name in ("forward", "backward"):
        waited_s = [rank.waits.stages_s.get(name, 0.0) if rank.waits is not None else 0.0 for rank in ranks]
        bubble_ns[name] = np.minimum([round(1e9 * seconds) for seconds in waited_s], phase_ns[name].sum(axis=1))
    stages = [f"{1 - rank.stage.busy_s / rank.stage.passes_s:.1%}" for rank in ranks if rank.stage is not None]
    return bubble_ns, (
        f"measured by every rank in every step; {bubble:.1%} of the passes, by rank {first_of(stages, 8)}; "
        f"(p-1)/(m+p-1) = {pipeline.bubble():.1%} for equal stages, {pipeline.bubble(imbalance):.1%} with the longest "
        f"{imbalance:.3f} times the mean"
    )


def _on_the_wire(waits: Mapping[tuple[str, str], Times], wire_ns: int) -> dict[str, dict[str, int]]:
    """Returns the time on the wire by cause and phase: the minimum over ranks of each, the remainder in proportion."""
    least_ns = {key: len(waited_ns) * int(waited_ns.min()) for key, waited_ns in waits.items()}
    beyond_ns = {key: int(waited_ns.sum()) - least_ns[key] for key, waited_ns in waits.items()}
    over = wire_ns - sum(least_ns.values())
    extra_ns = _shared_out(max(0, over), beyond_ns)
    if over < 0:
        least_ns = _shared_out(wire_ns, least_ns)
    wire_by_cause: dict[str, dict[str, int]] = {"gather": {}, "exchange": {}}
    for cause, phase in waits:
        wire_by_cause[cause][phase] = least_ns[cause, phase] + extra_ns[cause, phase]
    return wire_by_cause


def _compute_parts(
    phase_ns: Mapping[str, Times],
    waits: Waiting,
    bubble_ns: Mapping[str, int],
    launch_ns: Mapping[str, int],
    throttled: float,
    memory_ns: int,
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Returns the nanoseconds of all ranks and steps by `COMPUTE_PARTS`, and those of causes taken out of each."""
    remaining_ns = {
        name: int(phase_ns[name].sum()) - waits.moved_phases_ns[name] - bubble_ns.get(name, 0) for name in COMPUTE_PARTS
    }
    for name in COMPUTE_PARTS:
        # Moved time is rounded to a nanosecond per step.
        if remaining_ns[name] < 0:
            largest = max(remaining_ns, key=remaining_ns.__getitem__)
            remaining_ns[largest], remaining_ns[name] = remaining_ns[largest] + remaining_ns[name], 0
    launch = {name: min(value, launch_ns.get(name, 0)) for name, value in remaining_ns.items()}
    remaining_ns = {name: value - launch[name] for name, value in remaining_ns.items()}
    memory: dict[str, int] = {}
    for name in ("backward", "forward", "optimizer"):
        memory[name] = min(remaining_ns[name], max(0, memory_ns) - sum(memory.values()))
        remaining_ns[name] -= memory[name]
    throttling = _shared_out(round(throttled * sum(remaining_ns.values())), remaining_ns)
    remaining_ns = {name: value - throttling[name] for name, value in remaining_ns.items()}
    return remaining_ns, {
        "bubble": dict(bubble_ns),
        "launch": launch,
        "throttling": throttling,
        "memory": {name: memory[name] for name in COMPUTE_PARTS},
    }


def _shared_out(amount: int, among: Mapping[Key, int]) -> dict[Key, int]:
    """Divides an amount in proportion to the terms of a sum, in whole numbers; no share exceeds its term."""
    total = max(1, sum(among.values()))
    shares: dict[Key, int] = {}
    reached = assigned = 0
    for name, value in among.items():
        reached += value
        shares[name] = amount * reached // total - assigned
        assigned += shares[name]
    return shares


def _sums(
    step_ns: Times,
    phase_ns: Mapping[str, Times],
    waits: Waiting,
    compute: Mapping[str, int],
    taken_by_cause: Mapping[str, Mapping[str, int]],
) -> dict[str, int]:
    """Returns the nanoseconds of all ranks and steps, by cause, as Python integers, so that no sum is rounded."""
    phases = {name: int(times.sum()) for name, times in phase_ns.items()}
    if len(step_ns) == 1:
        phases["exchange"] = 0
    total = int(step_ns.sum())
    sums = {
        "compute": sum(compute.values()),
        "exchange": sum(taken_by_cause["exchange"].values()),
        "straggler": waits.total_ns,
        "input": phases["input"] + phases["h2d"] - waits.moved_ns["input"],
        "host": total - sum(phases.values()) - waits.moved_ns["host"],
        **{name: sum(taken_by_cause[name].values()) for name in _OUT_OF_COMPUTE},
        "rest": len(step_ns) * int(step_ns.sum(axis=1).max()) - total,
    }
    return {name: sums[name] for name in CAUSES}
