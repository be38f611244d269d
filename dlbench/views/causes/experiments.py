"""What to try next: for each cause of a loss the experiments that make sense, in order, with their conditions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlbench.reading.attribution import Part
from dlbench.reading.causes import CAUSES, EXCHANGE_PHASE
from dlbench.reading.late_ranks import Straggler
from dlbench.reading.scaling import Point
from dlbench.records.data_path import ReadingResult
from dlbench.records.exchange import ExchangeResult
from dlbench.records.memory import MemoryResult
from dlbench.records.scan import Run
from dlbench.report.wording import figure_text
from dlbench.specs.sync import MGWFBP_STEPS, layout_problem
from dlbench.specs.system.hostlist import compressed
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import bytes_option, format_bytes
from dlbench.views.causes.exchange_forecast import AS_IT_RAN, Way
from dlbench.views.reading import WARM_SHARE, complement, fetch_share, storage_share

CAUSE_TITLES: Mapping[str, str] = {
    "compute": "compute",
    "exchange": "exchange on the wire",
    "straggler": "waiting for stragglers",
    "input": "input",
    "host": "host between phases",
    "launch": "waiting for kernel launches",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "rest": "imbalance between ranks",
}
"""By `dlbench.reading.causes.CAUSES`."""

ROW_TITLES: Mapping[str, str] = {
    **CAUSE_TITLES,
    EXCHANGE_PHASE: "gradient exchange after backward",
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
"""The same as lines of a table, below what they are part of."""

NOT_MEASURED = "not measured"
"""Instead of a figure where some run says nothing of a cause: that is not no time at all."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a diagnosis may look at: one scaling point with its causes."""

    runs: tuple[Run, ...]
    """Of the point."""
    point: Point
    is_baseline: bool
    parts: tuple[Part, ...]
    """By `dlbench.reading.causes.CAUSES`."""
    whole: Part
    """Their sum: the mean step."""
    adjusted_p: Mapping[str, float]
    """Of the loss to each cause that was measured, after correction over all causes of the report."""
    compute_parts: tuple[Part, ...]
    """What `compute` consists of: forward, backward, optimizer."""
    hosts: tuple[Straggler, ...]
    """Hosts that were waited for, longest first."""
    main_straggler: Straggler | None
    """The rank, or else the host, for which most of the waiting was; None where they take turns."""
    exclude: tuple[str, ...]
    """Hosts that the history of all runs shows to be slow."""

    def part(self, name: str) -> Part:
        """One of the causes."""
        return self.parts[CAUSES.index(name)]

    @property
    def run(self) -> Run:
        """One run of the point: one that says what its exchange did, if there is one."""
        known = (run for run in self.runs if run.record is not None and run.record.exchange is not None)
        return next(known, self.runs[0])

    @property
    def exchange(self) -> ExchangeResult | None:
        """What the run says of its exchange."""
        return None if self.run.record is None else self.run.record.exchange

    @property
    def is_synthetic(self) -> bool:
        """Whether no file was read."""
        return self.run.plan.workload.data.is_synthetic

    @property
    def batch(self) -> int:
        """Samples per rank and step."""
        return self.run.plan.workload.train.batch_per_rank


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the table."""

    text: Callable[[Case], str]
    """What to do, with the option that does it."""
    when: Callable[[Case], bool] = lambda case: True
    """Whether it makes sense."""
    way: Callable[[Case], Way] | None = None
    """The changed exchange, for a forecast; None where there is nothing to forecast from."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a cause is called and what helps."""

    name: str
    """Of the diagnosis."""
    experiments: tuple[Experiment, ...]


_PACKED_BY = {"jpeg-tree": "dlbench data pack: shards", "text": "dlbench data samples"}
"""What makes another form of a kind of data that is cheaper to read."""


def _may(case: Case, **changes: str) -> bool:
    """Whether settings of the exchange are possible here, and another than now."""
    plan = case.run.plan
    if not plan.engine.kind.synchronises or all(getattr(plan.sync, key) == value for key, value in changes.items()):
        return False
    changed = plan.sync.model_copy(update=changes)
    layout = plan.layout
    return layout_problem(changed, engine=plan.engine.name, ranks=layout.ranks, nodes=layout.nodes) is None


def _way(case: Case, *, exchange: str | None = None, fusion: str = AS_IT_RAN, wire: str | None = None) -> Way:
    plan, result = case.run.plan, case.exchange
    return Way(
        exchange=exchange or (plan.sync.exchange if result is None else result.exchange),
        fusion=fusion,
        wire=wire or (plan.sync.wire if result is None else result.wire),
        group_size=plan.group_size,
    )


def _is_flat_over_nodes(case: Case) -> bool:
    flat = case.run.plan.sync.exchange == "flat" and case.run.plan.sync.inside == "backend"
    return flat and case.point.nodes > 1 and _may(case, exchange="hierarchical")


def _fusion(case: Case) -> str:
    return case.run.plan.sync.fusion_in_force if case.exchange is None else case.exchange.fusion


def _mgwfbp_text(case: Case) -> str:
    short = case.run.plan.measure.warmup_steps < MGWFBP_STEPS
    more = f" --set measure.warmup_steps={MGWFBP_STEPS}" if short else ""
    return f"merge messages by their costs (--set sync.fusion=own:mgwfbp{more})"


def _is_wide_wire(case: Case) -> bool:
    """fp32 on the wire; not Gloo on a CPU, which adds half-precision numbers one by one and is slower with them."""
    if case.run.plan.sync.wire != "fp32" or not _may(case, wire="fp16"):
        return False
    record, result = case.run.record, case.exchange
    on_cpu = record is None or record.ranks[0].device.startswith("cpu")
    return not (on_cpu and (result is None or "gloo" in result.carrier))


def _straggler_text(case: Case) -> str:
    late = case.main_straggler
    if late is None:
        return "look for jitter: ranks take turns at being last (other work on the cores, uneven samples)"
    its = "its ranks'" if late.rank is None else "its"
    where = {
        "input": f"{its} input (storage of that node, loader workers)",
        "compute": f"{its} computing (clocks, temperature, other work on its cores)",
        "host": f"{'the' if late.rank is None else its} host between the steps (other processes, logging)",
        "unexplained": f"its link or other work on its cores, because nothing of {its} own work explains it",
    }
    who = late.host if late.rank is None else f"rank {late.rank} on {late.host}"
    return f"look at {who}: {where[late.late_by]}"


def _without(case: Case) -> str:
    hosts = compressed(case.exclude)
    option = f"--exclude={hosts}" if case.run.plan.system.scheduler == "slurm" else hosts
    return f"run without the slow nodes ({option})"


def throttling_remedy(*, on_gpu: bool) -> str:
    """What keeps clocks up, or a job's CPU quota from being used up."""
    if on_gpu:
        return "raise power and thermal limits (nvidia-smi -q -d POWER,TEMPERATURE shows them)"
    return "raise the CPU quota of the job or container (cpu.max of its control group)"


def _is_waited_host_slow(case: Case) -> bool:
    return any(late.host in case.exclude for late in case.hosts[:1])


def _reading(case: Case) -> list[ReadingResult]:
    records = (run.record for run in case.runs)
    return [record.reading for record in records if record is not None and record.reading is not None]


def _fetching(case: Case) -> Estimate | None:
    """Share of the readers' time that went into fetching, the rest into preparing; None: the runs do not say."""
    return fetch_share({("", number): one for number, one in enumerate(_reading(case))})


def _is_fetch_bound(case: Case) -> bool:
    share = _fetching(case)
    return share is not None and share.value >= 0.5


def _reason(case: Case) -> str:
    """What readers spend their time in, in brackets; empty where the runs do not say."""
    share = _fetching(case)
    if share is None:
        return ""
    if share.value >= 0.5:
        return f"; readers spend {figure_text(share)} of their time in fetching samples"
    return f"; readers spend {figure_text(complement(share))} of their time in preparing samples (decode, augment)"


def _can_be_staged(case: Case) -> bool:
    """Fetching is the larger part, and samples are read in place and not from the page cache, as far as one knows."""
    if case.is_synthetic or not _is_fetch_bound(case) or case.run.plan.workload.data.staging != "none":
        return False
    share = storage_share([epoch for one in _reading(case) for epoch in one.epochs])
    return share is None or share > WARM_SHARE


def _staged_text(case: Case) -> str:
    """The strategy that goes with how the runs shuffle."""
    is_global = case.run.plan.workload.data.shuffle == "global"
    return f"stage samples near the node (--set data.staging={'replicate' if is_global else 'shard'}{_reason(case)})"


def _few_workers(case: Case) -> bool:
    """Another number of readers may help: fewer than the rank has cores, by hand or by measurement."""
    if case.is_synthetic or case.run.plan.workload.data.loader_workers == "auto":
        return False
    return case.run.plan.most_loader_workers < case.run.plan.layout.cores_per_rank


def _workers_text(case: Case) -> str:
    cores = case.run.plan.layout.cores_per_rank
    reason = "" if _is_fetch_bound(case) else _reason(case)
    return f"use more readers (--set data.loader_workers=auto measures how many of up to {cores} per rank{reason})"


def _tiers_text(case: Case) -> str:
    """The series that says by difference what fetching and preparing cost."""
    plan = case.run.plan
    command = f"dlbench io {shlex.quote(plan.workload.name)} --preset {shlex.quote(plan.workload.preset)}"
    command += (
        f" --data {shlex.quote(plan.workload.data.source)} --ranks {case.point.ranks} --tiers --repeats {MIN_RUNS}"
    )
    return f"separate storage from preparing with synthetic, cached and cold data: {command}"


def _can_be_packed(case: Case) -> bool:
    """Trees of single JPEGs, and raw text that is masked while it is read."""
    record = case.run.record
    return not case.is_synthetic and record is not None and record.data.get("kind") in _PACKED_BY


def _packed_text(case: Case) -> str:
    record = case.run.record
    return "" if record is None else f"prepare the data once ({_PACKED_BY[str(record.data.get('kind'))]})"


def _is_weak(case: Case) -> bool:
    """Under strong scaling all points share the batch of all ranks; another one is another question."""
    return case.run.plan.series.scaling == "weak"


def _larger_batch(case: Case) -> str:
    return (
        f"use a larger batch per rank (--set train.batch_per_rank={2 * case.batch}): fewer steps for the same samples"
    )


_COMPUTE_PARTS = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer"}


def _could_be_spread(case: Case) -> bool:
    """Whether the same ranks fit on more nodes: a scheduler gives them, or several were used."""
    plan = case.run.plan
    return plan.layout.ranks_per_node > 1 and (plan.layout.nodes > 1 or plan.system.scheduler != "none")


def _computes_beside_exchange(case: Case) -> bool:
    """Whether threads of the exchange run on the cores that compute: on CPUs, while the backward pass goes on."""
    record = case.run.record
    on_cpu = record is not None and record.clock == "monotonic"
    return on_cpu and case.exchange is not None and bool(case.exchange.hidden_s)


def _less_fixed_work(case: Case) -> str:
    """Under strong scaling a rank's batch shrinks, and what does not depend on it (the optimizer) stays."""
    at_smallest = round(2 * case.batch * case.point.ideal_speedup)
    text = (
        f"use a larger global batch (--set train.batch_per_rank={at_smallest}, that of the smallest rank count) or "
        "weak scaling (--scaling weak), in which work that does not shrink weighs less"
    )
    largest = max(case.compute_parts, key=lambda part: part.lost.value)
    return f"{text}: the largest part is {_COMPUTE_PARTS[largest.name]}" if largest.lost.value > 0 else text


def _launches_singly(case: Case) -> bool:
    """Whether the host hands over each kernel by a call of its own."""
    train = case.run.plan.workload.train
    return train.cuda_graphs == "none" and train.compile not in ("reduce-overhead", "max-autotune")


def _memory(case: Case) -> MemoryResult | None:
    """What a run of the point says of its activations."""
    found = (run.record.memory for run in case.runs if run.record is not None)
    return next((one for one in found if one is not None), None)


def _can_hold_more(case: Case) -> bool:
    """A plan was made for less than training holds in core."""
    told = _memory(case)
    return told is not None and (told.plan.capacity_bytes or told.in_core_bytes) < told.in_core_bytes


def _more_capacity_text(case: Case) -> str:
    told = _memory(case)
    if told is None or told.plan.capacity_bytes is None:
        return ""
    more = min(told.in_core_bytes, round(1.25 * told.plan.capacity_bytes))
    return (
        f"use a larger capacity, if the device has it (--set train.memory.capacity={bytes_option(more)}; in core "
        f"training holds {format_bytes(told.in_core_bytes)})"
    )


def _is_unplanned(case: Case) -> bool:
    train = case.run.plan.workload.train
    return _memory(case) is not None and not (train.recompute == train.swap == "planned")


def _planned_text(case: Case) -> str:
    """A plan for what the method at hand holds."""
    told = _memory(case)
    if told is None:
        return ""
    capacity = told.plan.capacity_bytes or told.plan.predicted.peak_bytes
    return (
        "plan keeping, swapping and recomputing (--set train.recompute=planned --set train.swap=planned --set "
        f"train.memory.capacity={bytes_option(capacity)})"
    )


def _smaller_batch(case: Case) -> str:
    parts = case.run.plan.workload.train.gradient_accumulation
    if case.batch % (2 * parts) == 0:
        return f"split the batch into smaller passes (--set train.gradient_accumulation={2 * parts})"
    return f"use a smaller batch per rank (--set train.batch_per_rank={max(parts, case.batch // 2 // parts * parts)})"


RULES: Mapping[str, Rule] = {
    "exchange": Rule(
        name="network-bound",
        experiments=(
            Experiment(
                text=lambda case: "use the hierarchical exchange (--set sync.exchange=hierarchical)",
                when=_is_flat_over_nodes,
                way=lambda case: _way(case, exchange="hierarchical"),
            ),
            Experiment(
                text=_mgwfbp_text,
                when=lambda case: _fusion(case) in ("own:none", "own:single") and _may(case, fusion="own:mgwfbp"),
                way=lambda case: _way(case, fusion="mgwfbp"),
            ),
            Experiment(
                text=lambda case: "send one message (--set sync.fusion=own:single)",
                when=lambda case: _fusion(case) == "own:none" and _may(case, fusion="own:single"),
                way=lambda case: _way(case, fusion="single"),
            ),
            Experiment(
                text=lambda case: "fuse gradients (--set sync.fusion=auto)", when=lambda case: _fusion(case) == "none"
            ),
            Experiment(
                text=lambda case: "send half the bytes (--set sync.wire=fp16; check the loss too)",
                when=_is_wide_wire,
                way=lambda case: _way(case, wire="fp16"),
            ),
            Experiment(text=_larger_batch, when=_is_weak),
        ),
    ),
    "straggler": Rule(
        name="straggler-bound",
        experiments=(Experiment(text=_without, when=_is_waited_host_slow), Experiment(text=_straggler_text)),
    ),
    "input": Rule(
        name="input-bound",
        experiments=(
            Experiment(text=_staged_text, when=_can_be_staged),
            Experiment(text=_workers_text, when=_few_workers),
            Experiment(text=_packed_text, when=_can_be_packed),
            Experiment(text=_tiers_text, when=lambda case: not case.is_synthetic),
            Experiment(
                text=lambda case: "look at what else uses the ranks' cores: synthetic data is made in memory",
                when=lambda case: case.is_synthetic,
            ),
        ),
    ),
    "host": Rule(name="host-bound", experiments=(Experiment(text=_larger_batch, when=_is_weak),)),
    "launch": Rule(
        name="launch-bound",
        experiments=(
            Experiment(text=_larger_batch, when=_is_weak),
            Experiment(
                text=lambda case: (
                    "launch fewer kernels, or a whole step at once (--set train.compile=reduce-overhead, or --set "
                    "train.cuda_graphs=network)"
                ),
                when=_launches_singly,
            ),
        ),
    ),
    "throttling": Rule(
        name="throttled",
        experiments=(
            Experiment(
                text=lambda case: throttling_remedy(
                    on_gpu=case.run.record is not None and case.run.record.ranks[0].device.startswith("cuda")
                )
            ),
        ),
    ),
    "memory": Rule(
        name="memory-bound",
        experiments=(
            Experiment(text=_planned_text, when=_is_unplanned),
            Experiment(text=_more_capacity_text, when=_can_hold_more),
            Experiment(text=_smaller_batch, when=lambda case: case.batch > 1),
        ),
    ),
    "compute": Rule(
        name="compute-bound",
        experiments=(
            Experiment(text=_less_fixed_work, when=lambda case: not _is_weak(case)),
            Experiment(
                text=lambda case: (
                    "place fewer ranks per node, to see whether they share memory or caches (--ranks-per-node)"
                ),
                when=lambda case: _is_weak(case) and _could_be_spread(case),
            ),
            Experiment(
                text=lambda case: (
                    "measure what the exchange takes from the backward pass, since both share the ranks' cores "
                    "(--decompose runs pairs without exchange)"
                ),
                when=_computes_beside_exchange,
            ),
            Experiment(text=lambda case: "look at clocks and memory of these nodes, and at other work on their cores"),
        ),
    ),
    "rest": Rule(
        name="unbalanced",
        experiments=(
            Experiment(
                text=lambda case: (
                    "measure longer, so that ends weigh less (--set measure.measured_steps="
                    f"{2 * case.run.plan.measure.measured_steps})"
                )
            ),
        ),
    ),
}
"""By cause."""
