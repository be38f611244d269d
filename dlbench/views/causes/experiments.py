"""What to try next: for each cause of a loss the experiments that make sense, in order, with their conditions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import CAUSES, EXCHANGE_PHASE
from dlbench.analysis.late_ranks import Straggler
from dlbench.analysis.scaling import Point
from dlbench.records.exchange import ExchangeResult
from dlbench.records.scan import Run
from dlbench.report.wording import figure_text
from dlbench.specs.hostlist import compressed
from dlbench.specs.sync import MGWFBP_STEPS, OWN_MGWFBP, OWN_NONE, OWN_SINGLE, UNFUSED, layout_problem
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import bytes_option, format_bytes
from dlbench.views.readers import WARM_SHARE, complement, fetch_share, storage_share

CAUSE_TITLES: Mapping[str, str] = {  # By `dlbench.analysis.causes.CAUSES`.
    "compute": "compute",
    "exchange": "exchange on the wire",
    "straggler": "waiting for stragglers",
    "gather": "waiting for parameters",
    "input": "input",
    "host": "host between phases",
    "launch": "waiting for kernel launches",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "rest": "imbalance between ranks",
}

ROW_TITLES: Mapping[str, str] = {  # The same as lines of a table, below what they are part of.
    **CAUSE_TITLES,
    EXCHANGE_PHASE: "exposed exchange",
    "exchange": "of it on the wire",
    "straggler": "of it waiting for stragglers",
    "forward": "of it forward",
    "backward": "of it backward",
    "optimizer": "of it optimizer",
    "wait": "of it waiting for batches",
    "fetch": "of it fetching samples",
    "prepare": "of it preparing samples",
    "copy": "of it copy to the device",
}

_PACKED_BY = {
    "jpeg-tree": "dlbench data pack: shards",
    "text": "samples in HDF5, as create_pretraining_data.py of NVIDIA's DeepLearningExamples writes them",
}
"""What makes another form of a kind of data that is cheaper to read: of single JPEGs, and of raw text that is masked
while it is read."""
_COMPUTE_PARTS = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer"}

NOT_MEASURED = "not measured"  # Instead of a figure where some run says nothing of a cause: that is not no time at all.


@dataclass(frozen=True, kw_only=True)
class CauseShare(Part):
    """One cause at one scaling point; `step` for their sum."""

    is_measured: bool
    """Whether all runs of the point and of the baseline say something of it. If not, its time is part of `compute` in
    all of them, because seconds that some report and others hide cannot be compared; its 0 s here mean nothing."""
    not_measured: tuple[str, ...]  # Why some of these runs say nothing of it, each reason once.
    notes: tuple[str, ...]  # How runs know it, or why it is 0.
    adjusted_p: float | None = None
    """Of its loss, after Holm over the causes of all rank counts of the group and Bonferroni over the groups of the
    report; None at the baseline, and for what is not measured."""
    parts: tuple[Part, ...] = ()
    """What it consists of: `compute` of forward, backward and optimizer; `input` of fetching, preparing and the copy,
    or, where runs do not say what their readers did, of the wait and the copy. They sum to its own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a diagnosis may look at: one scaling point with its causes."""

    runs: tuple[Run, ...]  # Of the point.
    point: Point
    parts: tuple[CauseShare, ...]  # By `dlbench.analysis.causes.CAUSES`.
    whole: Part  # Their sum: the mean step.
    hosts: tuple[Straggler, ...]  # Hosts that were waited for, longest first.
    main_straggler: Straggler | None  # The rank, or host, for which most waiting was; None if they take turns.
    exclude: tuple[str, ...]  # Hosts that the history of all runs shows to be slow.

    def part(self, name: str) -> CauseShare:
        return self.parts[CAUSES.index(name)]

    @property
    def run(self) -> Run:
        """One run of the point: one that says what its exchange did, if there is one."""
        known = (run for run in self.runs if run.record is not None and run.record.exchange is not None)
        return next(known, self.runs[0])

    @property
    def exchange(self) -> ExchangeResult | None:
        return None if self.run.record is None else self.run.record.exchange

    @property
    def batch(self) -> int:
        """Samples per rank and step."""
        return self.run.plan.workload.train.batch_per_rank


@dataclass(frozen=True)
class Experiment:
    """Something that makes sense to try."""

    text: str  # What to do, with the option that does it.


def throttling_remedy(*, on_gpu: bool) -> str:
    """What keeps clocks up, or a job's CPU quota from being used up."""
    if on_gpu:
        return "raise power and thermal limits (nvidia-smi -q -d POWER,TEMPERATURE shows them)"
    return "raise the CPU quota of the job or container (cpu.max of its control group)"


def _for_exchange(case: Case) -> Iterator[Experiment]:
    plan, result = case.run.plan, case.exchange
    if (every := plan.sync.average_every) is not None:
        yield Experiment(f"average less often (--set sync.average_every={2 * every}; check the loss too)")
        yield from _larger_batch(case)
        return

    def may(**changes: Any) -> bool:
        """Whether settings of the exchange are possible here, and another than now."""
        if plan.engine.name == "single" or all(getattr(plan.sync, key) == value for key, value in changes.items()):
            return False
        changed = plan.sync.model_copy(update=changes)
        layout = plan.layout
        return layout_problem(changed, engine=plan.engine.name, ranks=layout.ranks, nodes=layout.nodes) is None

    is_flat = plan.sync.exchange == "flat"
    if is_flat and case.point.nodes > 1 and may(exchange="hierarchical"):
        yield Experiment("use the hierarchical exchange (--set sync.exchange=hierarchical)")
    fusion = plan.sync.fusion_in_force if result is None else result.fusion_rule
    if fusion in (OWN_NONE, OWN_SINGLE) and may(fusion=OWN_MGWFBP):
        short = plan.measure.warmup_steps < MGWFBP_STEPS
        more = f" --set measure.warmup_steps={MGWFBP_STEPS}" if short else ""
        yield Experiment(f"merge messages by their costs (--set sync.fusion=own:mgwfbp{more})")
    if fusion == OWN_NONE and may(fusion=OWN_SINGLE):
        yield Experiment("send one message (--set sync.fusion=own:single)")
    if fusion == UNFUSED:
        yield Experiment("fuse gradients (--set sync.fusion=auto)")
    record = case.run.record
    on_cpu = record is None or record.ranks[0].device.startswith("cpu")
    # Gloo on a CPU adds half-precision numbers one by one and is slower with them.
    is_gloo = on_cpu and (result is None or "gloo" in result.carrier)
    if plan.sync.wire == "fp32" and may(wire="fp16") and not is_gloo:
        yield Experiment("send half the bytes (--set sync.wire=fp16; check the loss too)")
    yield from _larger_batch(case)


def _for_stragglers(case: Case) -> Iterator[Experiment]:
    if any(late.host in case.exclude for late in case.hosts[:1]):
        hosts = compressed(case.exclude)
        option = f"--exclude={hosts}" if case.run.plan.system.scheduler == "slurm" else hosts
        yield Experiment(f"run without the slow nodes ({option})")
    late = case.main_straggler
    if late is None:
        yield Experiment("look for jitter: ranks take turns at being last (other work on the cores, uneven samples)")
        return
    its = "its ranks'" if late.rank is None else "its"
    where = {
        "input": f"{its} input (storage of that node, loader workers)",
        "compute": f"{its} computing (clocks, temperature, other work on its cores)",
        "host": f"{'the' if late.rank is None else its} host between the steps (other processes, logging)",
        "unexplained": f"its link or other work on its cores, because nothing of {its} own work explains it",
    }
    who = late.host if late.rank is None else f"rank {late.rank} on {late.host}"
    yield Experiment(f"look at {who}: {where[late.late_by]}")


def _for_input(case: Case) -> Iterator[Experiment]:
    if case.run.plan.workload.data.is_synthetic:
        yield Experiment("look at what else uses the ranks' cores: synthetic data is made in memory")
        return
    plan = case.run.plan
    data, cores = plan.workload.data, plan.layout.cores_per_rank
    records = [run.record for run in case.runs if run.record is not None]
    reading = [record.reading for record in records if record.reading is not None]
    # Of the readers' time, the rest goes into preparing; None: the runs do not say.
    share = fetch_share({("", number): one for number, one in enumerate(reading)})
    is_fetch_bound = share is not None and share.value >= 0.5
    reason = ""
    if share is not None and is_fetch_bound:
        reason = f"; readers spend {figure_text(share)} of their time in fetching samples"
    elif share is not None:
        spent = figure_text(complement(share))
        reason = f"; readers spend {spent} of their time in preparing samples (decode, augment)"
    # Samples that are read in place and not from the page cache, as far as one knows.
    stored = storage_share([epoch for one in reading for epoch in one.epochs])
    if is_fetch_bound and data.staging == "none" and (stored is None or stored > WARM_SHARE):
        strategy = "replicate" if data.shuffle == "global" else "shard"
        yield Experiment(f"stage samples near the node (--set data.staging={strategy}{reason})")
    if data.loader_workers != "auto" and plan.most_loader_workers < cores:
        why = "" if is_fetch_bound else reason
        up_to = f"--set data.loader_workers=auto measures how many of those that {cores} cores per rank allow"
        yield Experiment(f"use more readers ({up_to}{why})")
    limited = next((one for one in reading if one.limited_by_cores), None)
    if limited is not None:
        why = f"training keeps {limited.training_cores} of {cores}, which left {limited.loader_workers} to readers"
        yield Experiment(f"give each rank more cores (--set layout.cores_per_rank={2 * cores}; {why})")
    record = case.run.record
    if record is not None and record.data.get("kind") in _PACKED_BY:
        yield Experiment(f"prepare the data once ({_PACKED_BY[str(record.data['kind'])]})")
    name, preset, source = map(shlex.quote, (plan.workload.name, plan.workload.preset, data.source))
    tiers = f"--data {source} --ranks {case.point.ranks} --tiers --repeats {MIN_RUNS}"
    command = f"dlbench io {name} --preset {preset} {tiers}"
    yield Experiment(f"separate storage from preparing with synthetic, cached and cold data: {command}")


def _larger_batch(case: Case) -> Iterator[Experiment]:
    """Under strong scaling all points share the batch of all ranks; another one is another question."""
    if case.run.plan.series.scaling == "weak":
        option = f"--set train.batch_per_rank={2 * case.batch}"
        yield Experiment(f"use a larger batch per rank ({option}): fewer steps for the same samples")


def _for_gathering(case: Case) -> Iterator[Experiment]:
    fsdp = case.run.plan.engine.fsdp
    if fsdp.shard == "parameters":
        text = "keep parameters from the forward to the backward pass, if they fit (--set engine.fsdp.shard=gradients)"
        yield Experiment(text)
    if fsdp.shard_ranks == "all" and case.point.nodes > 1:
        yield Experiment("gather within nodes alone, if a node holds the state (--set engine.fsdp.shard_ranks=node)")
    record = case.run.record
    if record is not None and record.clock != "monotonic":
        yield Experiment(f"gather further ahead (--set engine.fsdp.prefetch={fsdp.prefetch + 1})")
    yield from _larger_batch(case)
    yield Experiment("replicate the state, if a rank holds it (--engine ddp): nothing is gathered then")


def _for_launches(case: Case) -> Iterator[Experiment]:
    yield from _larger_batch(case)
    train = case.run.plan.workload.train
    # Where the host hands over each kernel by a call of its own.
    if train.cuda_graphs == "none" and train.compile not in ("reduce-overhead", "max-autotune"):
        options = "--set train.compile=reduce-overhead, or --set train.cuda_graphs=network"
        yield Experiment(f"launch fewer kernels, or a whole step at once ({options})")


def _for_throttling(case: Case) -> Iterator[Experiment]:
    record = case.run.record
    on_gpu = record is not None and record.ranks[0].device.startswith("cuda")
    yield Experiment(throttling_remedy(on_gpu=on_gpu))


def _for_memory(case: Case) -> Iterator[Experiment]:
    train = case.run.plan.workload.train
    records = (run.record.memory for run in case.runs if run.record is not None)
    memory = next((one for one in records if one is not None), None)
    if memory is not None:
        asked, in_core = memory.plan.capacity_bytes, memory.in_core_bytes
        if not train.recompute == train.swap == "planned":
            # A plan for what the method at hand holds.
            capacity = bytes_option(asked or memory.plan.predicted.peak_bytes)
            options = "--set train.recompute=planned --set train.swap=planned --set train.memory.capacity="
            yield Experiment(f"plan keeping, swapping and recomputing ({options}{capacity})")
        if asked is not None and 0 < asked < in_core:
            more = bytes_option(min(in_core, round(1.25 * asked)))
            option = f"--set train.memory.capacity={more}; in core training holds {format_bytes(in_core)}"
            yield Experiment(f"use a larger capacity, if the device has it ({option})")
    if case.batch > 1:
        parts = train.gradient_accumulation
        if case.batch % (2 * parts) == 0:
            yield Experiment(f"split the batch into smaller passes (--set train.gradient_accumulation={2 * parts})")
        else:
            smaller = max(parts, case.batch // 2 // parts * parts)
            yield Experiment(f"use a smaller batch per rank (--set train.batch_per_rank={smaller})")


def _for_compute(case: Case) -> Iterator[Experiment]:
    plan, record = case.run.plan, case.run.record
    if plan.series.scaling != "weak":
        # A rank's batch shrinks, and what does not depend on it (the optimizer) stays.
        at_smallest = round(2 * case.batch * case.point.ideal_speedup)
        text = (
            f"use a larger global batch (--set train.batch_per_rank={at_smallest}, that of the smallest rank count) or "
            "weak scaling (--scaling weak), in which work that does not shrink weighs less"
        )
        largest = max(case.part("compute").parts, key=lambda part: part.lost.value)
        more = f": the largest part is {_COMPUTE_PARTS[largest.name]}" if largest.lost.value > 0 else ""
        yield Experiment(text + more)
    elif plan.layout.ranks_per_node > 1 and (plan.layout.nodes > 1 or plan.system.scheduler != "none"):
        # The same ranks fit on more nodes.
        yield Experiment("place fewer ranks per node, to see whether they share memory or caches (--ranks-per-node)")
    if record is not None and record.clock == "monotonic" and case.exchange is not None and case.exchange.hidden_s:
        # On CPUs threads of the exchange run on the cores that compute, while the backward pass goes on.
        yield Experiment(
            "measure what the exchange takes from the backward pass, since both share the ranks' cores "
            "(--decompose runs pairs without exchange)"
        )
    yield Experiment("look at clocks and memory of these nodes, and at other work on their cores")


def _for_the_rest(case: Case) -> Iterator[Experiment]:
    option = f"--set measure.measured_steps={2 * case.run.plan.measure.measured_steps}"
    yield Experiment(f"measure longer, so that ends weigh less ({option})")


RULES: Mapping[str, tuple[str, Callable[[Case], Iterator[Experiment]]]] = {
    "exchange": ("network-bound", _for_exchange),
    "straggler": ("straggler-bound", _for_stragglers),
    "gather": ("gather-bound", _for_gathering),
    "input": ("input-bound", _for_input),
    "host": ("host-bound", _larger_batch),
    "launch": ("launch-bound", _for_launches),
    "throttling": ("throttled", _for_throttling),
    "memory": ("memory-bound", _for_memory),
    "compute": ("compute-bound", _for_compute),
    "rest": ("unbalanced", _for_the_rest),
}
"""By cause: the name of the diagnosis, and what makes sense to try, in order."""
