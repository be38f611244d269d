"""Warnings on a figure, found in the runs behind it; printed next to the figure, never left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dlbench.analysis.core_load import crowded_hosts, load_doubts, loads_of
from dlbench.analysis.doubts import Doubt, Severity, merged
from dlbench.analysis.environments import environment_doubts, facts
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.analysis.scaling import Group
from dlbench.analysis.table import RunTable
from dlbench.records.interrupted import last_attempt
from dlbench.records.record import QualityResult, Record
from dlbench.records.scan import Run
from dlbench.report.wording import percent, ranks_text, repeat_text, units_text
from dlbench.stats.estimates import MIN_RUNS, between_and_within
from dlbench.units import format_seconds, seconds_between
from dlbench.views.placement import convolution_doubts, place_doubts
from dlbench.views.quality.numbers import fit, group_quality, is_resumed, meets_target, until_target
from dlbench.views.utilisation import utilisation

NOISY_CV = 0.25  # A run whose steps scatter more than this has a median, but hardly a typical step.
MANY_OVERFLOWS = 0.05  # Share of steps above which overflow is more than the loss scale finding its place.

_PLACES = {"inert": 0, "contradiction": 1, "resumed": 2, "few-repeats": 4}
"""Of warnings of one severity, 3 for the others: first why figures may not be those of what was asked for."""

Found = Iterator[tuple[str, Severity, str]]  # Codes, severities and texts.


def run_doubts(run: Run) -> list[Doubt]:
    """What one run with a record gives reason to doubt, by itself."""
    return [*load_doubts(loads_of([run])), *_run_doubts(run)]


def _run_doubts(run: Run) -> list[Doubt]:
    """The same but for what is said once for all runs of a group."""
    if run.record is None:
        return []
    ids = (run.plan.run_id,)
    return [
        Doubt(code=code, severity=severity, text=text, runs=ids) for code, severity, text in _found(run, run.record)
    ]


def _found(run: Run, record: Record) -> Found:
    plan = run.plan
    for text in record.inert:
        yield "inert", "serious", f"a requested setting had no effect: {text}"
    for text in record.warnings:
        yield "recorded", "serious", text
    if not plan.workload.model.computes:
        text = "computing is a pause (model.family paced): only the exchange of gradients is measured"
        yield "paced", "serious", f"{text}; memory, power and losses are of no network"
    elif plan.workload.data.is_synthetic:
        copy = "; nor is the copy to the device" * (plan.workload.data.synthetic_on == "device")
        yield "synthetic-data", "note", f"synthetic data: storage and decoding are not part of these figures{copy}"
    if shared := shared_nodes(plan):
        yield "shared-nodes", "serious", shared
    on_gpu = any(rank.device.startswith("cuda") for rank in record.ranks)
    for code, text in environment_doubts(plan, record.environment, on_gpu=on_gpu):
        yield code, "serious", text
    yield from place_doubts(record)
    yield from convolution_doubts(plan, record.environment if on_gpu else {})
    if crowded := crowded_hosts(record):
        text = f"more compute threads than cores ({'; '.join(crowded)}): use fewer ranks per node"
        yield "oversubscribed", "serious", text
    if not all(rank.pinned for rank in record.ranks):
        why = "" if plan.system.launch.pin else "; turn system.launch.pin on"
        yield "not-pinned", "serious", f"ranks not bound to cores of their own{why}"
    for setting in record.settings:
        is_said = any(text.startswith(f"{setting.key}:") for text in (*record.warnings, *record.inert))
        # At one rank nothing is exchanged: no setting of the exchange can act.
        if len(record.ranks) > 1 and not is_said and setting.is_without_effect:
            what = f"{setting.requested} was asked for, {setting.effective} was in force ({setting.evidence})"
            yield "inert", "serious", f"{setting.key}: {what}"
    yield from _exchange(record)
    if record.held_nodes:
        nodes = f"{record.held_nodes} node{'s' * (record.held_nodes > 1)}"
        yield "held-nodes", "note", f"its Slurm job held {nodes} more than it used, which cost node-hours too"
    bad = sum(rank.bad_sample_count for rank in record.ranks)
    if bad:
        yield "bad-samples", "serious", f"{bad} unreadable sample{'s' * (bad > 1)} skipped: see dlbench data verify"
    for text in record.environment_differences:
        yield "rank-environment", "serious", f"ranks of one run differ: {text}"
    measured_s = max(rank.measured_s for rank in record.ranks)
    if measured_s:
        yield from _training(run, record, sum(rank.samples for rank in record.ranks) / measured_s)


def _exchange(record: Record) -> Found:
    result = record.exchange
    if result is None:
        return
    if result.wire_overflows:
        sums = f"{result.wire_overflows} all-reduce sum{'s' * (result.wire_overflows > 1)}"
        yield "wire-overflow", "serious", f"{sums} overflowed in {result.wire}: use another sync.wire"
    if result.wire != "fp32":
        text = f"gradients travelled as {result.wire}, which changes the arithmetic: compare the loss too"
        yield "wire", "note", text
    if result.averages_parameters:
        text = (
            f"ranks updated apart ({result.exchange}), which trains otherwise than averaged gradients: compare the loss"
        )
        yield "local-sgd", "note", text
    if result.autotune is not None and not result.autotune.finished:
        remedy = f"set measure.warmup_steps to {result.autotune.planned_steps} or more"
        text = f"Horovod's autotuner was still searching in the measured steps: {remedy}"
        yield "autotune-unfinished", "serious", text


def _training(run: Run, record: Record, throughput: float) -> Found:
    """Of the noise scale, of what ran before, and of accuracy; the throughput is that of the measured steps."""
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
        yield "resumed", severity, f"{before}: losses and times include what ran before"
    if record.quality is not None:
        yield from _of_quality(run, record.quality, throughput)


def _of_attempt(run: Run, record: Record) -> tuple[str, Severity, str]:
    """That earlier attempts at the run ended before their end, and what of them is in its figures."""
    after = f"after interruption (attempt {record.attempt})"
    if not record.goes_on:
        return "attempt", "note", f"begun anew {after}: nothing of earlier attempts is in its figures"
    before = last_attempt(run.folder)
    lost, gap = "", ""
    if before is not None:
        lost = f" of {before.step:,} done"
        gap = f", which took {format_seconds(seconds_between(before.at, record.started))} and is in no figure"
    resumed = f"resumed {after} at step {record.first_step:,}{lost}"
    if record.quality is None:
        return "resumed", "note", f"{resumed}: all measured steps are of this attempt"
    times = f"times add up over the attempts, from checkpoint to checkpoint, without the time between them{gap}"
    return "resumed", "serious", f"{resumed}: {times}"


def _of_quality(run: Run, result: QualityResult, throughput: float) -> Found:
    wanted = run.plan.workload.quality
    seen = until_target(result)
    if not seen:
        yield "no-evaluation", "serious", "the accuracy was never evaluated: evaluate more often, or run longer"
        return
    count = seen[-1].eval_samples
    if wanted is not None and wanted.evaluate_samples == count:
        share, error = result.target, ""
        if result.metric == "top1" and 0 < share < 1:
            # Of a share of independent samples (binomial).
            points = math.sqrt(share * (1 - share) / count) * 100
            error = f": standard error near the target about {points:.1f} points"
        yield "part-evaluated", "note", f"evaluated on {count:,} samples (quality.evaluate_samples){error}"
    if len(seen) == 1 and meets_target(result, seen[0]):
        first = f"met the target at the first evaluation, after {seen[0].samples:,} samples"
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
        hint = " (warm-up steps are in the time, not in the rate)" if verdict.status == "unexplained" else ""
        yield (
            "contradiction",
            "serious",
            f"contradiction: training took {format_seconds(verdict.stated_s)}, but at {throughput:,.4g} samples/s its "
            f"epochs take {format_seconds(verdict.expected_s)}{hint}",
        )


def _is_better(value: float, than: float, *, higher_is_better: bool) -> bool:
    return value > than if higher_is_better else value < than


def group_doubts(group: Group, table: RunTable) -> list[Doubt]:
    """All reasons to doubt the figures of a group, serious ones first; equal texts once, with their runs."""
    met = {run.plan.run_id: facts(run.record) for run in group.runs if run.record is not None}
    of_points = {ranks_text(point.ranks): {run_id: met[run_id] for run_id in point.run_ids} for point in group.points}
    few = [point for point in group.points if len(point.run_ids) < MIN_RUNS]
    found: list[Doubt] = []
    if few:
        counts = ", ".join(f"{units_text(point.throughput)} at {ranks_text(point.ranks)}" for point in few)
        remedy = repeat_text(min((point.throughput for point in few), key=lambda figure: figure.units))
        text = f"too few for a comparison ({counts}): {remedy}"
        found.append(Doubt(code="few-repeats", severity="serious", text=text))
    # What the records of averaged runs, and of compared points, show to be unequal.
    found += [*_cores(group.runs), *mixed_configurations(of_points), *_sessions(group, table)]
    scatter = {run_id: row["step_cv"] for run_id, row in table.figures.items() if row["group"] == group.id}
    noisy = tuple(run_id for run_id, step_cv in scatter.items() if step_cv > NOISY_CV)
    if noisy:
        most = max(scatter.values())
        text = f"step times scatter by up to {most * 100:.0f} % within a run: look for other load"
        found.append(Doubt(code="noisy-steps", severity="serious", text=text, runs=noisy))
    accuracy = _of_accuracy(group, table)
    found += [Doubt(code=code, severity=severity, text=text) for code, severity, text in accuracy]
    found += load_doubts(loads_of(group.runs))
    found += merged(doubt for run in group.runs for doubt in _run_doubts(run))
    return sorted(found, key=lambda doubt: (doubt.severity != "serious", _PLACES.get(doubt.code, 3)))


def _cores(runs: Sequence[Run]) -> Iterator[Doubt]:
    """Ranks of one series must compute with the same cores, or the series measures that too."""
    cores: dict[str, set[int]] = {}
    threads: dict[str, set[int]] = {}
    for run in runs:
        for rank in run.record.ranks if run.record else ():
            cores.setdefault(run.plan.series.id, set()).add(len(rank.cores))
            threads.setdefault(run.plan.series.id, set()).add(rank.threads)
    for what, seen in (("cores", cores), ("threads", threads)):
        for series, counts in seen.items():
            if len(counts) > 1:
                had = f"ranks of series {series} had {' or '.join(map(str, sorted(counts)))} {what}"
                text = f"{had}: part of the loss is that difference"
                yield Doubt(code="cores-differ", severity="serious", text=text)


def _sessions(group: Group, table: RunTable) -> Iterator[Doubt]:
    """Intervals hold within a session; of several they are made of sessions, which are few."""
    apart = [point for point in group.points[1:] if not point.paired_with_baseline]
    if apart and len({run.plan.series.id for run in group.runs}) > 1:
        counts = f"runs at {', '.join(ranks_text(point.ranks) for point in apart)} and at the baseline"
        text = f"{counts} did not run interleaved: drift of the machine is part of the ratio"
        yield Doubt(code="not-interleaved", severity="note", text=text)
    found = []
    rates = table.rates
    for point in group.points:
        logs: dict[str, list[float]] = {}
        for run_id in point.run_ids:
            logs.setdefault(table.sessions[run_id], []).append(math.log(rates[run_id]))
        if len(logs) > 1:
            found.append((len(logs), point.ranks, between_and_within(list(logs.values()))))
    if found:
        count, ranks, parts = min(found, key=lambda one: one[0])
        text = f"{count} sessions are pooled at {ranks_text(ranks)}"
        if parts:
            text += f": throughput scatters by {percent(parts[0])} between and {percent(parts[1])} within them"
        if count < MIN_RUNS:
            text += f"; until there are {MIN_RUNS}, intervals are their range: choose one by --where series=NAME"
        yield Doubt(code="pooled-sessions", severity="note", text=text)


def _of_accuracy(group: Group, table: RunTable) -> Found:
    """What the runs of a group together give reason to doubt of the hardware's use and of accuracy."""
    used = utilisation(group)
    for point in used.points if used else ():
        if point.mfu and point.mfu.value > 1:
            wrong = "the peak (node.peak_tflops) or the count of FLOPs is wrong"
            text = f"MFU above 100 % at {ranks_text(point.ranks)}: {wrong}"
            yield "impossible-utilisation", "serious", text
    quality = group_quality(group, table)
    if quality is None:
        return
    missing = [point for point in quality.points if not point.all_reached]
    if missing:
        counts = ", ".join(
            f"{one.num_runs - one.num_reached} of {one.num_runs} at {ranks_text(one.ranks)}" for one in missing
        )
        left = "there is no time to accuracy"
        if any(point.num_reached for point in quality.points):
            left = "times to accuracy are of the others alone, and yield no speed-up"
        yield "target-not-reached", "serious", f"runs missed the target ({counts}): {left}"
    for at in quality.points:
        if at.num_lost:
            lost = f"{at.num_lost} further run{'s' * (at.num_lost > 1)} at {ranks_text(at.ranks)}"
            text = f"{lost} ended without a record: the share that met the target may be lower"
            yield "runs-lost", "serious", text
        skill, better = quality.predictor_value, quality.higher_is_better
        if at.best is not None and not _is_better(at.best.value, skill, higher_is_better=better):
            best = f"at {ranks_text(at.ranks)} the best value is no better than {quality.predictor}"
            yield "no-skill", "serious", f"{best} ({skill:.4g})"
