"""The account of a run's step: the parts that its time goes to, in seconds that sum to the whole.

It is the step as the ranks that are on time see it; what stragglers take longer than those is charged as waiting for
them. From the phases to the parts seconds are only moved, never estimated anew, and sums are taken over integers:

* `compute` is forward, backward and optimizer, without what the parts below take of them;
* `exchange`, on the wire, is the gradient exchange after the backward pass without waiting: the least over ranks in
  each step, with negotiation and copies into buffers. One rank exchanges nothing: what its phase holds is `host`.
  Collectives within the passes and the update (reduce-scatters, sums of activations, updated or averaged parameters)
  are part of it, taken from the phase in which every rank measured them;
* `gather` is the same of parameters that other ranks hold;
* `straggler` is waiting for stragglers, in the exchange phase and in all these collectives, as
  `dlbench.analysis.stragglers` defines it, with what those ranks took longer. Together with `exchange` it is all
  exchange that shows, `EXCHANGE_PHASE`;
* `input` is waiting for data and the copy to the device. Where the run says what its readers did, the wait is shared
  out as their time was: fetching (storage) against preparing (CPU);
* `host` is what lies between the phases;
* `launch` is what GPUs idled within forward, backward and optimizer because the host came late with its calls, as
  `dlbench.analysis.launching` defines it, and is taken from those phases first of all;
* `throttling` is the share of the computing time that lowered clocks, or a used-up quota of CPU time, cost; from the
  samples of the run, and taken from forward, backward and optimizer in proportion;
* `memory` is recomputing, and waiting for activations that are swapped, as every rank measured it; it happens in the
  backward pass, and is taken from there first;
* `rest` is how far the slowest rank's mean step exceeds the mean of all ranks.

    sum over `CAUSES` = longest measured time of any rank / steps
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dlbench.analysis.late_hosts import Leaving, leaving
from dlbench.analysis.launching import waited_for_host
from dlbench.analysis.measures import RunSteps, load_steps
from dlbench.analysis.stragglers import Waiting, waiting, without_waits
from dlbench.analysis.telemetry.node_samples import Interval, node_ranks
from dlbench.analysis.telemetry.throttling import throttled_share
from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times, np
from dlbench.records.data_path import ReadingResult
from dlbench.records.scan import Run

Key = TypeVar("Key")

CAUSES = ("compute", "exchange", "straggler", "gather", "input", "host", "launch", "throttling", "memory", "rest")
"""In the order in which they are printed; together they are the whole step."""

EXCHANGE_PHASE = "exchange_phase"  # All exchange that shows in the step: `exchange` and `straggler`.

COMPUTE_PARTS = ("forward", "backward", "optimizer")  # What `compute` consists of.

INPUT_PARTS = ("fetch", "prepare", "copy")
"""What `input` consists of: fetching samples, preparing them, copying batches to the device."""

WAIT_PARTS = ("wait", "copy")  # The same where a run does not say what its readers did: wait for batches, and copy.

_OUT_OF_COMPUTE = ("launch", "throttling", "memory", "gather")  # Parts whose seconds lie in the phases of computing.


@dataclass(frozen=True, kw_only=True)
class Causes:
    """The causes of one run."""

    ranks: int
    steps: int  # Measured steps of every rank.
    sums_ns: dict[str, int]
    """Of all ranks and steps, by `CAUSES`, nanoseconds; their sum is ranks x the longest measured time of any rank."""
    not_measured: dict[str, str]
    """Causes that this run did not measure, and why; they are 0 here, and their time is part of `compute`."""
    evidence: Mapping[str, str]
    """How `throttling`, `launch`, `memory` and `gather` are known, or why `memory` is 0; empty where they are not
    known, on CPUs, where nothing is launched, and where nothing is gathered."""
    compute_ns: dict[str, int]  # `compute` by `COMPUTE_PARTS`, nanoseconds.
    taken_ns: dict[str, dict[str, int]]
    """`launch`, `throttling`, `memory`, `gather` and what `exchange` has of them by the `COMPUTE_PARTS` that they were
    taken from, nanoseconds."""
    input_ns: dict[str, int]
    """`input` by `WAIT_PARTS`, nanoseconds; with `fetch` and `prepare`, the wait's own parts, where the run says what
    its readers did."""
    waiting: Waiting
    work_ns: tuple[int, ...]  # Each rank's own work, by rank: all its measured steps without what it waited for others.
    hosts: tuple[str, ...]  # Host of each rank.
    leaving: Mapping[str, Leaving] = field(default_factory=dict)
    """Which host leaves the exchange later than the others; empty where the clocks do not say."""

    @property
    def knows_readers(self) -> bool:
        """Whether the run says what its readers did."""
        return "fetch" in self.input_ns

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds per step, by `CAUSES`; they sum to the longest measured time of any rank / steps."""
        found = self.seconds_without(())
        return {name: found[name] for name in CAUSES}

    def seconds_without(self, names: Collection[str]) -> dict[str, float]:
        """Mean seconds per step by `CAUSES`, and of what they are part of and consist of, by name. Causes in `names`
        are taken as if this run had not measured them: 0, and their time is part of `compute`.
        """
        sums, compute = dict(self.sums_ns), dict(self.compute_ns)
        for name in names:
            sums["compute"] += sums[name]
            sums[name] = 0
            for part, taken in self.taken_ns.get(name, {}).items():
                compute[part] += taken
        phase = {EXCHANGE_PHASE: sums["exchange"] + sums["straggler"]}
        found = {**sums, **phase, **compute, **self.input_ns}
        return {name: value / (self.ranks * self.steps) / 1e9 for name, value in found.items()}


def causes_of(run: Run, steps: RunSteps | None = None) -> Causes:
    """The causes of a run with a valid record.

    `steps`: what `load_steps` gave for it, if that is at hand. Raises IncompleteDataError: as
    `dlbench.analysis.measures.load_steps`; or ValueError: the run has no valid record and so no figures.
    """
    loaded = steps or load_steps(run)
    assert run.record is not None
    share, why = _throttled(run, loaded)
    memory_ns, memory_why = _memory(run)
    launch_ns, launch_why = waited_for_host(loaded, synchronised=run.record.phases == "synchronised")
    waits, gather_why = _collectives(run, loaded.phase_ns)
    within: dict[str, Times] = {}
    for (_, phase), own in waits.items():
        within[phase] = within.get(phase, 0) + own
    alone, update = without_waits(loaded, within)
    found = waiting(alone, update)
    ranks, count = loaded.step_ns.shape
    words = {"throttling": why, "memory": memory_why, "launch": launch_why, "gather": gather_why}
    amounts = {"throttling": share, "memory": memory_ns, "launch": launch_ns}
    unknown = {name for name, amount in amounts.items() if amount is None}
    if gather_why and not within:
        unknown.add("gather")
    exchange = alone.phase_ns["exchange"].sum(axis=1) * (ranks > 1)
    work = (loaded.step_ns.sum(axis=1) - exchange).tolist()
    compute, taken = _compute_parts(alone.phase_ns, found, launch_ns or {}, share or 0.0, memory_ns or 0)
    waits["exchange", "exchange"] = exchange - sum(within.values())
    taken |= _on_the_wire(waits, int(exchange.sum()) - found.waited_ns)
    sums = _sums(loaded.step_ns, alone.phase_ns, found, compute, taken)
    copy = int(loaded.phase_ns["h2d"].sum()) - found.moved_phases_ns["h2d"]
    return Causes(
        ranks=ranks,
        steps=count,
        sums_ns=sums,
        compute_ns=compute,
        taken_ns=taken,
        input_ns=_input_parts(sums["input"], copy, run.record.reading),
        not_measured={name: words[name] for name in words if name in unknown},
        evidence={name: words[name] for name in words if name not in unknown and (name != "gather" or sums["gather"])},
        waiting=found,
        work_ns=tuple(work),
        hosts=tuple(rank.host for rank in sorted(run.record.ranks, key=lambda rank: rank.rank)),
        leaving=leaving(run.record, loaded),
    )


def _input_parts(input_ns: int, copy_ns: int, reading: ReadingResult | None) -> dict[str, int]:
    """The copy is measured; the wait for batches is shared out as readers shared their time, in whole nanoseconds."""
    # Shares of what was moved are rounded.
    copy = min(max(copy_ns, 0), input_ns)
    parts = {"wait": input_ns - copy, "copy": copy}
    epochs = () if reading is None else reading.epochs
    fetch = sum(epoch.fetch_s for epoch in epochs)
    readers = fetch + sum(epoch.prepare_s for epoch in epochs)
    if not readers:
        return parts
    fetched = round(parts["wait"] * fetch / readers)
    return {**parts, "fetch": fetched, "prepare": parts["wait"] - fetched}


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
    train, memory = run.plan.workload.train, run.record.memory
    if train.activation_budget is not None:
        return None, "torch.compile recomputes within its own kernels (train.activation_budget)"
    if memory is None:
        if train.is_in_core:
            return 0, "nothing recomputes or swaps in these runs"
        return None, "the record does not say what recomputing and swapping took"
    ranks = sorted(one.rank for one in memory.ranks)
    if len(ranks) != run.plan.layout.ranks or ranks != list(range(len(ranks))):
        return None, "not every rank says what recomputing and swapping took"
    seconds = sum(one.recompute_s + one.swap_wait_s + one.room_wait_s for one in memory.ranks)
    return round(seconds * 1e9), "recomputing and waiting for room or tensors, measured by every rank"


def _collectives(run: Run, phase_ns: Mapping[str, Times]) -> tuple[dict[tuple[str, str], Times], str]:
    """Nanoseconds of all measured steps that ranks waited for collectives within passes and update, by cause and
    `COMPUTE_PARTS`, shape (ranks,), and how they are known. None of either where there are none; no nanoseconds and why
    where it is not known.
    """
    assert run.record is not None
    known = [one.waits for one in sorted(run.record.ranks, key=lambda one: one.rank)]
    waits = [one for one in known if one is not None]
    if len(known) == 1 or not (waits or run.plan.engine.name == "fsdp"):
        return {}, ""
    if len(waits) < len(known):
        return {}, "not every rank says what it waited for collectives within its passes"
    causes = {"gather": [one.gather_s for one in waits], "exchange": [one.exchange_s for one in waits]}
    found = {}
    for name in COMPUTE_PARTS:
        left = phase_ns[name].sum(axis=1)
        for cause, seconds in causes.items():
            found[cause, name] = np.minimum([round(1e9 * own.get(name, 0.0)) for own in seconds], left)
            left = left - found[cause, name]
    return found, f"{waits[0].evidence}; without waiting for stragglers"


def _on_the_wire(waits: Mapping[tuple[str, str], Times], wire_ns: int) -> dict[str, dict[str, int]]:
    """What is nobody's lateness, by cause and phase: of each first what the rank that waited least did, of the rest in
    proportion.
    """
    least = {key: len(own) * int(own.min()) for key, own in waits.items()}
    beyond = {key: int(own.sum()) - least[key] for key, own in waits.items()}
    over = wire_ns - sum(least.values())
    more = _shared_out(max(0, over), beyond)
    if over < 0:
        least = _shared_out(wire_ns, least)
    found: dict[str, dict[str, int]] = {"gather": {}, "exchange": {}}
    for cause, phase in waits:
        found[cause][phase] = least[cause, phase] + more[cause, phase]
    return found


def _compute_parts(
    phase_ns: Mapping[str, Times], found: Waiting, launch_ns: Mapping[str, int], throttled: float, memory_ns: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Nanoseconds of all ranks and steps by `COMPUTE_PARTS`, and what is taken out of each; whole numbers."""
    left = {name: int(phase_ns[name].sum()) - found.moved_phases_ns[name] for name in COMPUTE_PARTS}
    for name in COMPUTE_PARTS:
        # What was moved is shared out to a nanosecond per step.
        if left[name] < 0:
            most = max(left, key=lambda one: left[one])
            left[most], left[name] = left[most] + left[name], 0
    launch = {name: min(value, launch_ns.get(name, 0)) for name, value in left.items()}
    left = {name: value - launch[name] for name, value in left.items()}
    memory: dict[str, int] = {}
    for name in ("backward", "forward", "optimizer"):
        memory[name] = min(left[name], max(0, memory_ns) - sum(memory.values()))
        left[name] -= memory[name]
    throttling = _shared_out(round(throttled * sum(left.values())), left)
    left = {name: value - throttling[name] for name, value in left.items()}
    return left, {"launch": launch, "throttling": throttling, "memory": {name: memory[name] for name in COMPUTE_PARTS}}


def _shared_out(amount: int, among: Mapping[Key, int]) -> dict[Key, int]:
    """A part of a sum, taken of its terms in proportion; none beyond its own."""
    whole, reached, before, found = sum(among.values()), 0, 0, {}
    for name, value in among.items():
        reached += value
        upto = amount * reached // whole if whole else 0
        found[name] = upto - before
        before = upto
    return found


def _sums(
    step_ns: Times,
    phase_ns: Mapping[str, Times],
    found: Waiting,
    compute: Mapping[str, int],
    taken: Mapping[str, Mapping[str, int]],
) -> dict[str, int]:
    """Nanoseconds of all ranks and steps, by cause; Python's integers, so that no sum is rounded."""
    phases = {name: int(times.sum()) for name, times in phase_ns.items()}
    if len(step_ns) == 1:
        phases["exchange"] = 0
    total = int(step_ns.sum())
    sums = {
        "compute": sum(compute.values()),
        "exchange": sum(taken["exchange"].values()),
        "straggler": found.total_ns,
        "input": phases["input"] + phases["h2d"] - found.moved_ns["input"],
        "host": total - sum(phases.values()) - found.moved_ns["host"],
        **{name: sum(taken[name].values()) for name in _OUT_OF_COMPUTE},
        "rest": len(step_ns) * int(step_ns.sum(axis=1).max()) - total,
    }
    return {name: sums[name] for name in CAUSES}
