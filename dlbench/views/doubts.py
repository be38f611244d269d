"""Warnings on a figure, from the runs behind it; they are printed next to the figure, never left out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from dlbench.analysis.environments import (
    Doubt,
    Severity,
    crowded_hosts,
    environment_doubts,
    facts,
    load_doubts,
    loads_of,
    merged,
    network_doubts,
)
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.table import RunTable
from dlbench.records.record import QualityResult, RankResult, Record
from dlbench.records.scan import Run
from dlbench.records.status import last_attempt
from dlbench.report.wording import percent, ranks_text, repeat_text, units_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import MIN_RUNS, between_and_within
from dlbench.units import counted, format_seconds, plural, seconds_between
from dlbench.views.quality.numbers import fit, group_quality, is_resumed, meets_target, until_target
from dlbench.views.utilisation import utilisation

_BROKEN_CUDNN = (90800, 91500)
"""The first version of cuDNN whose 3-D convolutions in 16 bits are wrong, and the first that is correct again
(pytorch#163539; `use_cudnn` in torch's Convolution.cpp). With these, torch 2.9 uses its own kernels, which are at least
four times slower (pytorch#166122, #166643); later versions do so if memory is contiguous."""

NOISY_CV = 0.25  # A run whose steps scatter more than this has a median, but hardly a typical step.
MANY_OVERFLOWS = 0.05  # Share of steps above which overflow is more than the search for the loss scale.
_ORDER = {"inert": 0, "contradiction": 1, "resumed": 2, "few-repeats": 4}  # Within a severity; others 3.
Warnings = Iterator[tuple[str, Severity, str]]  # Codes, severities and texts.


def place_doubts(record: Record) -> Iterator[tuple[str, Severity, str]]:
    """Yields codes, severities and texts: GPU slices, cores far from their GPU, GPUs that cannot reach each other."""
    slices = [rank for rank in record.ranks if rank.gpu is not None and rank.gpu.is_slice]
    if slices:
        subject = f"{_ranks(slices)} computed on MIG slices"
        yield "gpu-slice", "note", f"{subject}: a slice is no whole GPU, and NCCL does not join slices of one"
    far = [rank for rank in record.ranks if _is_outside(rank) and not _has_near(rank)]
    partly_far = [rank for rank in record.ranks if _is_outside(rank) and _has_near(rank) and rank.pinned]
    other = "ran on cores of another NUMA node than the GPU's"
    if far:
        yield "gpu-remote", "serious", f"{_ranks(far)} {other}: launches and copies take longer"
    elif partly_far:
        yield "gpu-remote", "note", f"{_ranks(partly_far)} also {other}, which has too few: lower layout.cores_per_rank"
    unreachable = _unreachable(record)
    if unreachable:
        yield "no-peer-access", "serious", unreachable
    if record.nccl is not None:
        yield from network_doubts(record.nccl, record.environment)


def convolution_doubts(plan: RunPlan, environment: Mapping[str, str]) -> Iterator[tuple[str, Severity, str]]:
    """Yields a warning if 3-D convolutions in 16 bits were wrong or slow, by the versions of torch and cuDNN."""
    cudnn, torch = environment.get("torch.cudnn", ""), environment.get("package.torch", "")
    torch_version = re.match(r"(\d+)\.(\d+)", torch)
    is_16_bits = plan.workload.train.precision in ("bf16", "fp16")
    if not (plan.workload.model.is_3d and is_16_bits and torch_version and cudnn.isdecimal()):
        return
    release, version = (int(torch_version[1]), int(torch_version[2])), int(cudnn)
    if not _BROKEN_CUDNN[0] <= version < _BROKEN_CUDNN[1]:
        return
    subject = f"cuDNN {version // 10000}.{version // 100 % 100} and torch {torch}: 3-D convolutions in 16 bits"
    remedy = "install cuDNN 9.15 or newer, with torch 2.10 or newer"
    if release < (2, 9):
        yield "conv3d", "serious", f"{subject} give wrong results for large volumes (pytorch#163539): {remedy}"
    elif release == (2, 9) or plan.workload.model.order == "contiguous":
        yield "conv3d", "serious", f"{subject} use torch's own, slower kernels (pytorch#166122): {remedy}"


def _is_outside(rank: RankResult) -> bool:
    if rank.gpu is None or rank.gpu.numa_node is None:
        return False
    return bool(set(rank.numa_nodes) - {rank.gpu.numa_node})


def _has_near(rank: RankResult) -> bool:
    return rank.gpu is not None and rank.gpu.numa_node in rank.numa_nodes


def _unreachable(record: Record) -> str:
    num_gpus = Counter(rank.node_rank for rank in record.ranks if rank.gpu is not None)
    if max(num_gpus.values(), default=0) < 2:
        return ""
    if record.nccl is not None and record.nccl.channels:
        if record.nccl.has_peer_access:
            return ""
        return "NCCL reached no GPU of the same node directly (P2P), but by the host's memory or the network"
    with_gpu = [(rank, rank.gpu) for rank in record.ranks if rank.gpu is not None]
    isolated = [rank for rank, gpu in with_gpu if gpu.visible == 1 and num_gpus[rank.node_rank] > 1]
    without_access = [rank for rank, gpu in with_gpu if gpu.no_peer_access]
    if isolated:
        subject = f"{_ranks(isolated)} saw no GPU but their own, as under gpus-per-task"
        return f"{subject}: NCCL may then go by the host's memory; set slurm.gpu_bind none"
    if without_access:
        return f"the GPUs of {_ranks(without_access)} cannot reach all others of their node (no peer access)"
    return ""


def _ranks(ranks: list[RankResult]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"{plural('rank', len(ranks))} {', '.join(str(rank.rank) for rank in ranks)}"


def run_doubts(run: Run) -> list[Doubt]:
    """Returns the warnings on a run with a record, by itself."""
    return [*load_doubts(loads_of([run])), *_run_doubts(run)]


def _run_doubts(run: Run) -> list[Doubt]:
    if run.record is None:
        return []
    ids = (run.plan.run_id,)
    warnings = chain(_data(run, run.record), _machine(run, run.record), _settings(run, run.record))
    return [Doubt(code=code, severity=severity, text=text, runs=ids) for code, severity, text in warnings]


def _data(run: Run, record: Record) -> Warnings:
    plan = run.plan
    for text in record.inert:
        yield "inert", "serious", f"a requested setting had no effect: {text}"
    for text in record.warnings:
        yield "recorded", "serious", text
    if plan.strategy == "asynchronous":
        text = f"{plan.emulated_workers} workers were emulated in one process ({plan.engine.emulated.words})"
        yield "emulated", "serious", f"{text}: throughput and times are of that process, not of as many ranks"
    if not plan.workload.model.computes:
        text = "computing is a pause (model.family paced): only the exchange of gradients is measured"
        yield "paced", "serious", f"{text}; memory, power and losses are of no network"
    elif plan.workload.data.is_synthetic:
        text = "synthetic data: storage and decoding are not part of these figures"
        if plan.workload.data.synthetic_on == "device":
            text += "; nor is the copy to the device"
        yield "synthetic-data", "note", text


def _machine(run: Run, record: Record) -> Warnings:
    plan = run.plan
    shared = shared_nodes(plan)
    if shared:
        yield "shared-nodes", "serious", shared
    on_gpu = any(rank.device.startswith("cuda") for rank in record.ranks)
    for code, text in environment_doubts(plan, record.environment, on_gpu=on_gpu):
        yield code, "serious", text
    yield from place_doubts(record)
    if on_gpu:
        yield from convolution_doubts(plan, record.environment)
    crowded = crowded_hosts(record)
    if crowded:
        text = f"more compute threads than cores ({'; '.join(crowded)}): use fewer ranks per node"
        yield "oversubscribed", "serious", text
    if not all(rank.pinned for rank in record.ranks):
        text = "ranks not bound to cores of their own"
        if not plan.system.launch.pin:
            text += "; turn system.launch.pin on"
        yield "not-pinned", "serious", text


def _settings(run: Run, record: Record) -> Warnings:
    texts = (*record.warnings, *record.inert)
    for setting in record.settings:
        is_reported = any(text.startswith(f"{setting.key}:") for text in texts)
        # At one rank nothing is exchanged: no setting of the exchange can act.
        if len(record.ranks) > 1 and not is_reported and setting.is_without_effect:
            text = f"{setting.requested} was asked for, {setting.effective} was in force ({setting.evidence})"
            yield "inert", "serious", f"{setting.key}: {text}"
    yield from _exchange(record)
    if record.held_nodes:
        nodes = counted(record.held_nodes, "node")
        yield "held-nodes", "note", f"its Slurm job held {nodes} more than it used, which cost node-hours too"
    num_bad = sum(rank.bad_sample_count for rank in record.ranks)
    if num_bad:
        samples = f"{num_bad} unreadable {plural('sample', num_bad)}"
        yield "bad-samples", "serious", f"{samples} skipped: see dlbench data verify"
    for text in record.environment_differences:
        yield "rank-environment", "serious", f"ranks of one run differ: {text}"
    measured_s = max(rank.measured_s for rank in record.ranks)
    if measured_s:
        yield from _training(run, record, sum(rank.samples for rank in record.ranks) / measured_s)


def _exchange(record: Record) -> Warnings:
    result = record.exchange
    if result is None:
        return
    if result.wire_overflows:
        sums = f"{result.wire_overflows} all-reduce {plural('sum', result.wire_overflows)}"
        yield "wire-overflow", "serious", f"{sums} overflowed in {result.wire}: use another sync.wire"
    if result.wire != "fp32":
        text = f"gradients were sent as {result.wire}, which changes the arithmetic: compare the loss too"
        yield "wire", "note", text
    if result.averages_parameters:
        text = f"ranks updated separately ({result.exchange}), which trains differently from averaged gradients"
        yield "local-sgd", "note", f"{text}: compare the loss"
    if result.autotune is not None and not result.autotune.finished:
        remedy = f"set measure.warmup_steps to {result.autotune.planned_steps} or more"
        text = f"Horovod's autotuner was still searching in the measured steps: {remedy}"
        yield "autotune-unfinished", "serious", text


def _training(run: Run, record: Record, throughput: float) -> Warnings:
    if run.plan.measure.noise_scale:
        text = "step times include reading every gradient (measure.noise_scale): no throughput to compare"
        yield "noise-scale", "serious", text
    if record.overflow_steps:
        severity: Severity = "serious" if record.overflow_steps > MANY_OVERFLOWS * record.steps else "note"
        text = f"{record.overflow_steps} of {record.steps} steps were skipped because a gradient overflowed"
        yield "overflow-steps", severity, text
    if record.attempt > 1:
        yield _of_attempt(run, record)
    elif record.first_step:
        before = f"resumed at step {record.first_step:,} from {record.resumed_from or 'a checkpoint'}"
        severity = "serious" if record.quality else "note"
        yield "resumed", severity, f"{before}: losses and times include the training before it"
    if record.quality is not None:
        yield from _of_quality(run, record.quality, throughput)


def _of_attempt(run: Run, record: Record) -> tuple[str, Severity, str]:
    after = f"after interruption (attempt {record.attempt})"
    if not record.goes_on:
        return "attempt", "note", f"started again {after}: nothing of earlier attempts is in its figures"
    text, gap = f"resumed {after} at step {record.first_step:,}", ""
    before = last_attempt(run.folder)
    if before is not None:
        text += f" of {before.step:,} done"
        gap = f", which took {format_seconds(seconds_between(before.at, record.started))} and is in no figure"
    if record.quality is None:
        return "resumed", "note", f"{text}: all measured steps are of this attempt"
    times = f"times add up over the attempts, from checkpoint to checkpoint, without the time between them{gap}"
    return "resumed", "serious", f"{text}: {times}"


def _of_quality(run: Run, result: QualityResult, throughput: float) -> Warnings:
    evaluations = until_target(result)
    if not evaluations:
        yield "no-evaluation", "serious", "the accuracy was never evaluated: evaluate more often, or run longer"
        return
    target, num_samples = run.plan.workload.quality, evaluations[-1].eval_samples
    if target is not None and target.evaluate_samples == num_samples:
        text = f"evaluated on {num_samples:,} samples (quality.evaluate_samples)"
        if result.metric == "top1" and 0 < result.target < 1:
            # Standard error of a share of independent samples (binomial).
            points = math.sqrt(result.target * (1 - result.target) / num_samples) * 100
            text += f": standard error near the target about {points:.1f} points"
        yield "part-evaluated", "note", text
    if len(evaluations) == 1 and meets_target(result, evaluations[0]):
        first = f"met the target at the first evaluation, after {evaluations[0].samples:,} samples"
        text = f"{first}: time to accuracy is an upper bound; evaluate more often"
        yield "first-evaluation", "serious", text
    if not _is_better(result.target, result.predictor_value, higher_is_better=result.higher_is_better):
        skill = f"{result.predictor} ({result.predictor_value:.4g})"
        text = f"the target {result.target:g} is no better than {skill}: meeting it shows nothing"
        yield "target-without-skill", "serious", text
    # Throughput, epochs and time in training steps must fit each other, or one of them is wrong.
    verdict = fit(run, throughput)
    if verdict is None:
        if not is_resumed(run):
            text = "the last evaluation records no epochs or no time: its figures cannot be checked"
            yield "contradiction", "serious", text
    elif verdict.status != "fits":
        text = (
            f"contradiction: training took {format_seconds(verdict.stated_s)}, but at {throughput:,.4g} samples/s its "
            f"epochs take {format_seconds(verdict.expected_s)}"
        )
        if verdict.status == "unexplained":
            text += " (warm-up steps are in the time, not in the rate)"
        yield "contradiction", "serious", text


def _is_better(value: float, reference: float, *, higher_is_better: bool) -> bool:
    return value > reference if higher_is_better else value < reference


def group_doubts(group: Group, table: RunTable) -> list[Doubt]:
    """Returns all warnings on the figures of a group, serious ones first; equal texts once, with their runs."""
    run_facts = {run.plan.run_id: facts(run.record) for run in group.runs if run.record is not None}
    facts_of_points = {}
    for point in group.points:
        facts_of_points[ranks_text(point.ranks)] = {run_id: run_facts[run_id] for run_id in point.run_ids}
    doubts: list[Doubt] = []
    small = [point for point in group.points if len(point.run_ids) < MIN_RUNS]
    if small:
        counts = ", ".join(f"{units_text(point.throughput)} at {ranks_text(point.ranks)}" for point in small)
        remedy = repeat_text(min((point.throughput for point in small), key=attrgetter("units")))
        text = f"too few for a comparison ({counts}): {remedy}"
        doubts.append(Doubt(code="few-repeats", severity="serious", text=text))
    # Differences in the records of averaged runs, and of compared points.
    doubts += [*_cores(group.runs), *_leaf_switches(group.points)]
    doubts += [*mixed_configurations(facts_of_points), *_sessions(group, table)]
    scatter = {run_id: row["step_cv"] for run_id, row in table.figures.items() if row["group"] == group.id}
    noisy = tuple(run_id for run_id, step_cv in scatter.items() if step_cv > NOISY_CV)
    if noisy:
        text = f"step times scatter by up to {max(scatter.values()) * 100:.0f} % within a run: look for other load"
        doubts.append(Doubt(code="noisy-steps", severity="serious", text=text, runs=noisy))
    accuracy = chain(_utilisation(group), _accuracy(group, table))
    doubts += [Doubt(code=code, severity=severity, text=text) for code, severity, text in accuracy]
    doubts += load_doubts(loads_of(group.runs))
    doubts += merged(chain.from_iterable(map(_run_doubts, group.runs)))
    return sorted(doubts, key=lambda doubt: (doubt.severity != "serious", _ORDER.get(doubt.code, 3)))


def _cores(runs: Sequence[Run]) -> Iterator[Doubt]:
    counts: dict[tuple[str, str], set[int]] = {}  # By noun and series.
    for run in runs:
        if run.record:
            series, ranks = run.plan.series.id, run.record.ranks
            counts.setdefault(("cores", series), set()).update(len(rank.cores) for rank in ranks)
            counts.setdefault(("threads", series), set()).update(rank.threads for rank in ranks)
    # Cores before threads; sorting keeps the order of the series.
    for (noun, series), numbers in sorted(counts.items(), key=lambda item: item[0][0]):
        if len(numbers) > 1:
            text = f"ranks of series {series} had {' or '.join(map(str, sorted(numbers)))} {noun}"
            yield Doubt(code="cores-differ", severity="serious", text=f"{text}: part of the loss is that difference")


def _leaf_switches(points: Sequence[Point]) -> Iterator[Doubt]:
    recorded = [point for point in points if point.leaf_switches]
    if len(set(chain.from_iterable(point.leaf_switches for point in recorded))) > 1:
        counts = "; ".join(f"{point.switches_text} at {ranks_text(point.ranks)}" for point in recorded)
        text = f"nodes are below unlike numbers of leaf switches ({counts}), which is part of the difference"
        remedy = "ask Slurm for one number, e.g. --set system.slurm.extra=--switches=1"
        is_within_point = any(len(point.leaf_switches) > 1 for point in recorded)
        severity: Severity = "serious" if is_within_point else "note"
        yield Doubt(code="leaf-switches", severity=severity, text=f"{text}: {remedy}")


def _sessions(group: Group, table: RunTable) -> Iterator[Doubt]:
    unpaired = [point for point in group.points[1:] if not point.paired_with_baseline]
    if unpaired and len({run.plan.series.id for run in group.runs}) > 1:
        counts = f"runs at {', '.join(ranks_text(point.ranks) for point in unpaired)} and at the baseline"
        text = f"{counts} did not run interleaved: drift of the machine is part of the ratio"
        yield Doubt(code="not-interleaved", severity="note", text=text)
    logs_of_points = []
    for point in group.points:
        logs: dict[str, list[float]] = {}
        for run_id in point.run_ids:
            logs.setdefault(table.sessions[run_id], []).append(math.log(table.rates[run_id]))
        if len(logs) > 1:
            logs_of_points.append((point, list(logs.values())))
    if logs_of_points:
        point, session_logs = min(logs_of_points, key=lambda pair: len(pair[1]))
        text = f"{len(session_logs)} sessions are pooled at {ranks_text(point.ranks)}"
        scatter = between_and_within(session_logs)
        if scatter:
            between, within = scatter
            text += f": throughput scatters by {percent(between)} between and {percent(within)} within them"
        if len(session_logs) < MIN_RUNS:
            text += f"; until there are {MIN_RUNS}, intervals are their range: choose one by --where series=NAME"
        yield Doubt(code="pooled-sessions", severity="note", text=text)


def _utilisation(group: Group) -> Warnings:
    use = utilisation(group)
    if use is None:
        return
    for point in use.points:
        if point.mfu and point.mfu.value > 1:
            wrong = "the peak (node.peak_tflops) or the count of FLOPs is wrong"
            yield "impossible-utilisation", "serious", f"MFU above 100 % at {ranks_text(point.ranks)}: {wrong}"


def _accuracy(group: Group, table: RunTable) -> Warnings:
    quality = group_quality(group, table)
    if quality is None:
        return
    points_missed = [point for point in quality.points if not point.all_reached]
    if points_missed:
        counts = (
            f"{point.num_runs - point.num_reached} of {point.num_runs} at {ranks_text(point.ranks)}"
            for point in points_missed
        )
        consequence = "there is no time to accuracy"
        if quality.num_reached:
            consequence = "times to accuracy are of the others alone, and yield no speed-up"
        yield "target-not-reached", "serious", f"runs missed the target ({', '.join(counts)}): {consequence}"
    for point in quality.points:
        place = ranks_text(point.ranks)
        if point.num_lost:
            text = f"{point.num_lost} further {plural('run', point.num_lost)} at {place} ended without a record"
            yield "runs-lost", "serious", f"{text}: the share that met the target may be lower"
        skill, higher_is_better = quality.predictor_value, quality.higher_is_better
        if point.best is not None and not _is_better(point.best.value, skill, higher_is_better=higher_is_better):
            text = f"at {place} the best value is no better than {quality.predictor} ({skill:.4g})"
            yield "no-skill", "serious", text
