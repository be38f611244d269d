"""Suggestions of what to try next: for each cause of a loss experiments in order, with their conditions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from dlbench.analysis.attribution import Part
from dlbench.analysis.causes import CAUSES, EXCHANGE_PHASE
from dlbench.analysis.scaling import Point
from dlbench.analysis.slow_nodes import Straggler
from dlbench.lazy import Deferred
from dlbench.records.exchange import ExchangeResult
from dlbench.records.scan import Run
from dlbench.report.wording import figure_text
from dlbench.specs.launch import compressed
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS, OWN_MGWFBP, OWN_NONE, OWN_SINGLE, UNFUSED, layout_problem
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import bytes_option, format_bytes
from dlbench.views.readers import WARM_SHARE, complement, fetch_share, storage_share

CAUSE_TITLES: Mapping[str, str] = {  # By `dlbench.analysis.causes.CAUSES`.
    "compute": "compute",
    "exchange": "exchange on the wire",
    "straggler": "waiting for stragglers",
    "gather": "waiting for parameters",
    "bubble": "waiting for other stages",
    "input": "input",
    "host": "host between phases",
    "launch": "waiting for kernel launches",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "rest": "imbalance between ranks",
}

ROW_TITLES: Mapping[str, str] = {  # Titles of causes and their parts as lines of a table, parts below their whole.
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
"""By kind of data (single JPEGs, raw text that is masked while it is read): how to make a form that is read faster."""
_COMPUTE_PARTS = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer"}

NOT_MEASURED = "not measured"  # Instead of a figure if a run does not report a cause, which is not the same as no time.


@dataclass(frozen=True, kw_only=True)
class CauseShare(Part):
    """A cause at a scaling point; `step` for their sum."""

    is_measured: bool
    """Whether all runs of the point and of the baseline report it. If not, its time is part of `compute` in all of
    them, because seconds that only some report cannot be compared; its 0 s here mean nothing."""
    not_measured: tuple[str, ...]  # Why some of these runs do not report it, each reason once.
    notes: tuple[str, ...]  # How it was measured, or why it is 0.
    adjusted_p: Deferred[float] | None = None
    """The p value of its loss, after Holm over the causes of all rank counts of the group and Bonferroni over the
    groups of the report; None at the baseline, and for unmeasured causes."""
    parts: tuple[Part, ...] = ()
    """Its parts, which sum to it: of `compute` forward, backward and optimizer; of `input` fetching, preparing and the
    copy, or, if runs do not report their readers, the wait and the copy."""

    @property
    def reasons(self) -> str:
        return " | ".join(self.not_measured)

    @property
    def remarks(self) -> str:
        return " | ".join(self.notes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The input of a diagnosis: a scaling point with its causes."""

    runs: tuple[Run, ...]  # Runs of the point.
    point: Point
    parts: tuple[CauseShare, ...]  # By `dlbench.analysis.causes.CAUSES`.
    whole: Part  # The sum of the parts: the mean step.
    hosts: tuple[Straggler, ...]  # Hosts for which others waited, longest first.
    main_straggler: Straggler | None  # The rank, or host, with most of the waiting; None if they take turns.
    exclude: tuple[str, ...]  # Hosts that are slow over all runs.

    def part(self, name: str) -> CauseShare:
        return self.parts[CAUSES.index(name)]

    @property
    def by_loss(self) -> list[CauseShare]:
        """The causes, the largest loss first."""
        return sorted(self.parts, key=attrgetter("lost.value"), reverse=True)

    @property
    def run(self) -> Run:
        """A run of the point; one that recorded its exchange, if there is one."""
        return next((run for run in self.runs if run.record and run.record.exchange), self.runs[0])

    @property
    def exchange(self) -> ExchangeResult | None:
        return self.run.record.exchange if self.run.record else None

    @property
    def batch(self) -> int:
        """Samples per rank and step."""
        return self.run.plan.workload.train.batch_per_rank


@dataclass(frozen=True)
class Experiment:
    """Something to try."""

    text: str  # The action, with the option for it.


def throttling_remedy(*, on_gpu: bool) -> str:
    """Returns how to keep clocks high, or a job's CPU quota from being used up."""
    if on_gpu:
        return "raise power and thermal limits (nvidia-smi -q -d POWER,TEMPERATURE shows them)"
    return "raise the CPU quota of the job or container (cpu.max of its control group)"


def _for_exchange(case: Case) -> Iterator[str]:
    plan, result = case.run.plan, case.exchange
    every = plan.sync.average_every
    if every is not None:
        yield f"average less often (--set sync.average_every={2 * every}; check the loss too)"
        yield from _larger_batch(case)
        return

    if plan.sync.exchange == "flat" and case.point.nodes > 1 and _can_change(plan, "exchange", "hierarchical"):
        yield "use the hierarchical exchange (--set sync.exchange=hierarchical)"
    fusion = plan.sync.fusion_in_force if result is None else result.fusion_rule
    if fusion in (OWN_NONE, OWN_SINGLE) and _can_change(plan, "fusion", OWN_MGWFBP):
        option = "--set sync.fusion=own:mgwfbp"
        if plan.measure.warmup_steps < MGWFBP_STEPS:
            option += f" --set measure.warmup_steps={MGWFBP_STEPS}"
        yield f"merge messages by their costs ({option})"
    if fusion == OWN_NONE and _can_change(plan, "fusion", OWN_SINGLE):
        yield "send one message (--set sync.fusion=own:single)"
    if fusion == UNFUSED:
        yield "fuse gradients (--set sync.fusion=auto)"
    record = case.run.record
    on_cpu = record is None or record.ranks[0].device.startswith("cpu")
    # Gloo on a CPU adds half-precision numbers one by one and is slower with them.
    is_gloo = on_cpu and (result is None or "gloo" in result.carrier)
    if plan.sync.wire == "fp32" and _can_change(plan, "wire", "fp16") and not is_gloo:
        yield "send half the bytes (--set sync.wire=fp16; check the loss too)"
    yield from _larger_batch(case)


def _can_change(plan: RunPlan, key: str, value: object) -> bool:
    if plan.engine.name == "single" or getattr(plan.sync, key) == value:
        return False
    changed = plan.sync.model_copy(update={key: value})
    layout = plan.layout
    return layout_problem(changed, engine=plan.engine.name, ranks=layout.ranks, nodes=layout.nodes) is None


def _for_stragglers(case: Case) -> Iterator[str]:
    if case.hosts and case.hosts[0].host in case.exclude:
        option = compressed(case.exclude)
        if case.run.plan.system.scheduler == "slurm":
            option = f"--exclude={option}"
        yield f"run without the slow nodes ({option})"
    late = case.main_straggler
    if late is None:
        yield "look for jitter: ranks take turns at being last (other work on the cores, uneven samples)"
        return
    subject, whose, which_host = f"rank {late.rank} on {late.host}", "its", "its"
    if late.rank is None:
        subject, whose, which_host = late.host, "its ranks'", "the"
    where = {
        "input": f"{whose} input (storage of that node, loader workers)",
        "compute": f"{whose} computing (clocks, temperature, other work on its cores)",
        "host": f"{which_host} host between the steps (other processes, logging)",
        "unexplained": f"its link or other work on its cores, because nothing of {whose} own work explains it",
    }
    yield f"look at {subject}: {where[late.late_by]}"


def _for_input(case: Case) -> Iterator[str]:
    if case.run.plan.workload.data.is_synthetic:
        yield "look at what else uses the ranks' cores: synthetic data is made in memory"
        return
    plan = case.run.plan
    data, cores = plan.workload.data, plan.layout.cores_per_rank
    records = [run.record for run in case.runs if run.record is not None]
    readings = [record.reading for record in records if record.reading is not None]
    # Share of the readers' time; preparing takes the rest. None: the runs did not record it.
    share = fetch_share({("", index): reading for index, reading in enumerate(readings)})
    is_fetch_bound = share is not None and share.value >= 0.5
    reason = ""
    if share is not None and is_fetch_bound:
        reason = f"; readers spend {figure_text(share)} of their time fetching samples"
    elif share is not None:
        reason = f"; readers spend {figure_text(complement(share))} of their time preparing samples (decode, augment)"
    # Samples that are read in place and, as far as is known, not from the page cache.
    stored = storage_share(list(chain.from_iterable(reading.epochs for reading in readings)))
    if is_fetch_bound and data.staging == "none" and (stored is None or stored > WARM_SHARE):
        strategy = "replicate" if data.shuffle == "global" else "shard"
        yield f"stage samples near the node (--set data.staging={strategy}{reason})"
    if data.loader_workers != "auto" and plan.most_loader_workers < cores:
        text = f"--set data.loader_workers=auto measures how many of those that {cores} cores per rank allow"
        if not is_fetch_bound:
            text += reason
        yield f"use more readers ({text})"
    limited = next((reading for reading in readings if reading.limited_by_cores), None)
    if limited is not None:
        why = f"training keeps {limited.training_cores} of {cores}, which left {limited.loader_workers} to readers"
        yield f"give each rank more cores (--set layout.cores_per_rank={2 * cores}; {why})"
    record = case.run.record
    if record is not None and record.data.get("kind") in _PACKED_BY:
        yield f"prepare the data once ({_PACKED_BY[str(record.data['kind'])]})"
    name, preset, source = map(shlex.quote, (plan.workload.name, plan.workload.preset, data.source))
    tiers = f"--data {source} --ranks {case.point.ranks} --tiers --repeats {MIN_RUNS}"
    command = f"dlbench io {name} --preset {preset} {tiers}"
    yield f"separate storage from preparing with synthetic, cached and cold data: {command}"


def _larger_batch(case: Case) -> Iterator[str]:
    # Under strong scaling all points share the global batch; another one answers another question.
    if case.run.plan.series.scaling == "weak":
        option = f"--set train.batch_per_rank={2 * case.batch}"
        yield f"use a larger batch per rank ({option}): fewer steps for the same samples"


def _for_gathering(case: Case) -> Iterator[str]:
    fsdp = case.run.plan.engine.fsdp
    if fsdp.shard == "parameters":
        yield "keep parameters from the forward to the backward pass, if they fit (--set engine.fsdp.shard=gradients)"
    if fsdp.shard_ranks == "all" and case.point.nodes > 1:
        yield "gather within nodes alone, if a node holds the state (--set engine.fsdp.shard_ranks=node)"
    record = case.run.record
    if record is not None and record.clock != "monotonic":
        yield f"gather further ahead (--set engine.fsdp.prefetch={fsdp.prefetch + 1})"
    yield from _larger_batch(case)
    yield "replicate the state, if a rank holds it (--engine ddp): nothing is gathered then"


def _for_bubble(case: Case) -> Iterator[str]:
    pipeline = case.run.plan.engine.pipeline
    more = 2 * pipeline.microbatches
    if case.batch * pipeline.stages % more == 0:
        yield f"divide the batch into more microbatches (--set engine.pipeline.microbatches={more})"
    yield from _larger_batch(case)
    yield "use fewer stages, or replicate the network, if a rank holds it (--engine ddp): no rank waits then"


def _for_launches(case: Case) -> Iterator[str]:
    yield from _larger_batch(case)
    train = case.run.plan.workload.train
    # Otherwise the host does not launch each kernel separately.
    if train.cuda_graphs == "none" and train.compile not in ("reduce-overhead", "max-autotune"):
        options = "--set train.compile=reduce-overhead, or --set train.cuda_graphs=network"
        yield f"launch fewer kernels, or a whole step at once ({options})"


def _for_throttling(case: Case) -> Iterator[str]:
    record = case.run.record
    on_gpu = record is not None and record.ranks[0].device.startswith("cuda")
    yield throttling_remedy(on_gpu=on_gpu)


def _for_memory(case: Case) -> Iterator[str]:
    train = case.run.plan.workload.train
    memory = next((run.record.memory for run in case.runs if run.record and run.record.memory), None)
    if memory is not None:
        capacity_bytes, in_core_bytes = memory.plan.capacity_bytes, memory.in_core_bytes
        if not train.recompute == train.swap == "planned":
            # A plan for the memory of the present method.
            capacity = bytes_option(capacity_bytes or memory.plan.predicted.peak_bytes)
            options = "--set train.recompute=planned --set train.swap=planned --set train.memory.capacity="
            yield f"plan keeping, swapping and recomputing ({options}{capacity})"
        if capacity_bytes is not None and 0 < capacity_bytes < in_core_bytes:
            larger = bytes_option(min(in_core_bytes, round(1.25 * capacity_bytes)))
            option = f"--set train.memory.capacity={larger}; in core training holds {format_bytes(in_core_bytes)}"
            yield f"use a larger capacity, if the device has it ({option})"
    if case.batch > 1:
        parts = train.gradient_accumulation
        if case.batch % (2 * parts) == 0:
            yield f"split the batch into smaller passes (--set train.gradient_accumulation={2 * parts})"
        else:
            smaller = max(parts, case.batch // 2 // parts * parts)
            yield f"use a smaller batch per rank (--set train.batch_per_rank={smaller})"


def _for_compute(case: Case) -> Iterator[str]:
    plan, record = case.run.plan, case.run.record
    if plan.series.scaling != "weak":
        # A rank's batch shrinks, and the work that does not depend on it (the optimizer) stays.
        at_smallest = round(2 * case.batch * case.point.ideal_speedup)
        text = (
            f"use a larger global batch (--set train.batch_per_rank={at_smallest}, that of the smallest rank count) or "
            "weak scaling (--scaling weak), in which work that does not shrink weighs less"
        )
        largest = max(case.part("compute").parts, key=attrgetter("lost.value"))
        if largest.lost.value > 0:
            text += f": the largest part is {_COMPUTE_PARTS[largest.name]}"
        yield text
    elif plan.layout.ranks_per_node > 1 and (plan.layout.nodes > 1 or plan.system.scheduler != "none"):
        # The same ranks fit on more nodes.
        yield "place fewer ranks per node, to see whether they share memory or caches (--ranks-per-node)"
    if record is not None and record.clock == "monotonic" and case.exchange is not None and case.exchange.hidden_s:
        # On CPUs threads of the exchange run on the cores that compute, while the backward pass goes on.
        yield (
            "measure how much the exchange slows the backward pass, since both share the ranks' cores "
            "(--decompose runs pairs without exchange)"
        )
    yield "look at clocks and memory of these nodes, and at other work on their cores"


def _for_the_rest(case: Case) -> Iterator[str]:
    option = f"--set measure.measured_steps={2 * case.run.plan.measure.measured_steps}"
    yield f"measure longer, so that ends weigh less ({option})"


RULES: Mapping[str, tuple[str, Callable[[Case], Iterator[str]]]] = {
    "exchange": ("network-bound", _for_exchange),
    "straggler": ("straggler-bound", _for_stragglers),
    "gather": ("gather-bound", _for_gathering),
    "bubble": ("pipeline-bound", _for_bubble),
    "input": ("input-bound", _for_input),
    "host": ("host-bound", _larger_batch),
    "launch": ("launch-bound", _for_launches),
    "throttling": ("throttled", _for_throttling),
    "memory": ("memory-bound", _for_memory),
    "compute": ("compute-bound", _for_compute),
    "rest": ("unbalanced", _for_the_rest),
}
"""By cause: the name of the diagnosis, and experiments in order."""
