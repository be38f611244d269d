"""Energy of comparable runs in words for the terminal, and as a structure for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dlbench.reading.samples.energy import RunEnergy
from dlbench.reading.samples.energy_sources import Kind
from dlbench.reading.samples.node_samples import STAGES
from dlbench.report.tabular import aligned
from dlbench.report.wording import DASH, ENGINE_TITLES, basis_text, clean, percent, place_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import figure_of
from dlbench.units import format_number
from dlbench.views.energy.of_runs import KINDS, EnergyPoint, KindEnergy, check_slurm

WIDTH = 80


def energy_lines(points: Sequence[EnergyPoint], slurm: Mapping[str, float] | None = None) -> list[str]:
    """Energy of every group of comparable runs and rank count, in lines of at most 80 columns.

    Args:
        points: groups and rank counts.
        slurm: joules that Slurm counted for the job of each run, by run id; None: it was not asked.
    """
    if not points:
        return ["energy: no run has figures"]
    if not any(point.kinds for point in points):
        return [*_wrapped(f"energy: not measured here: {_why_none(points)}"), *_slurm(points, slurm or {})]
    lines: list[str] = []
    for point in points:
        lines += [*_wrapped(f"energy: {_label(point)}", indent=2)]
        for kind in KINDS:
            lines += _kind(point, kind)
        lines += aligned([tuple(f"  {cell}" if not i else cell for i, cell in enumerate(row)) for row in _table(point)])
        for sort, texts in (("doubt", (*point.doubts, *point.damaged)), ("note", point.notes)):
            lines += [line for text in texts for line in _wrapped(f"  {sort}: {text}", indent=4)]
    return [*lines, *_slurm(points, slurm or {})]


def energy_json(points: Sequence[EnergyPoint], slurm: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """The same with raw numbers: one entry for each group and rank count; energy in joules, power in watts."""
    return [_plain(point, slurm or {}) for point in points]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _why_none(points: Sequence[EnergyPoint]) -> str:
    """Reasons of the single nodes, each once, with what they stop."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        for reason in dict.fromkeys(reason for point in points for reason in point.why.get(kind, ())):
            found.setdefault(reason, []).append(kind)
    texts = [f"{' and '.join(kinds)}: {reason}" if len(kinds) < 2 else reason for reason, kinds in found.items()]
    return "; ".join([*texts, *(text for point in points for text in point.damaged)])


def _label(point: EnergyPoint) -> str:
    plan = point.sample.plan
    variant = "" if point.variant == "plain" else f", {point.variant}"
    variant += f", side {plan.series.side}" if plan.series.side else ""
    where = place_text(point.ranks, point.nodes)
    return f"{plan.workload.name} ({plan.workload.preset}), {ENGINE_TITLES[plan.engine.name]}{variant}, {where}"


def _number(estimate: Estimate) -> str:
    ends = (estimate.low, estimate.high)
    if None in ends:
        return format_number(estimate.value)
    low, high = (format_number(end) for end in ends if end is not None)
    return f"{format_number(estimate.value)} [{low}, {high}]"


def _kind(point: EnergyPoint, kind: Kind) -> Iterator[str]:
    told = point.kinds.get(kind)
    title = kind
    if told is None:
        yield from _wrapped(f"  {title}: not measured: {'; '.join(point.why.get(kind, ('nothing tells',)))}", indent=4)
        return
    if told.energy_per_sample is None:
        yield from _wrapped(f"  {title}: too little of the measured steps was sampled for a figure", indent=4)
    else:
        inverse = f" = {_number(told.samples_per_joule)} samples per J" if told.samples_per_joule else ""
        basis = basis_text(figure_of(told.energy_per_sample, "J"))
        yield from _wrapped(f"  {title}: {_number(told.energy_per_sample)} J per sample{inverse} ({basis})", indent=4)
    yield from _wrapped(f"    {_how(told, kind)}", indent=4)
    if kind in point.why:
        yield from _wrapped(f"    some runs tell nothing: {'; '.join(point.why[kind])}", indent=4)


def _how(told: KindEnergy, kind: Kind) -> str:
    counts = " or ".join(map(str, told.num_sources))
    one = told.num_sources == (1,)
    what = {"GPUs": "GPU" if one else "GPUs", "processors": "RAPL source" if one else "RAPL sources"}[kind]
    power = f"mean power {format_number(told.mean_power.value)} W, " if told.mean_power else ""
    return f"{power}{counts} {what}; {', '.join(told.methods)}; {percent(told.sampled_share, 0)} of the time sampled"


def _table(point: EnergyPoint) -> list[tuple[str, ...]]:
    """Joules by stage; medians over runs, so they sum to the whole of a single run only."""
    kinds = [kind for kind in KINDS if kind in point.kinds]
    if not kinds:
        return []
    rows = [("stage", *(f"{kind}, J" for kind in kinds))]
    for stage in STAGES:
        cells = [point.kinds[kind].stages_j.get(stage) for kind in kinds]
        if any(cells):
            rows.append((stage, *(DASH if cell is None else format_number(cell.value) for cell in cells)))
    rows.append(("whole run", *(format_number(point.kinds[kind].whole_j.value) for kind in kinds)))
    return rows


def _slurm(points: Sequence[EnergyPoint], slurm: Mapping[str, float]) -> list[str]:
    checks = [check for point in points for check in check_slurm(point.runs, slurm)]
    return [line for check in checks for line in _wrapped(check.text)]


def _plain(point: EnergyPoint, slurm: Mapping[str, float]) -> dict[str, Any]:
    plan = point.sample.plan
    return {
        "group": point.group,
        "workload": plan.workload.name,
        "preset": plan.workload.preset,
        "engine": plan.engine.name,
        "variant": point.variant,
        "ranks": point.ranks,
        "nodes": point.nodes,
        **{kind: _plain_kind(point.kinds[kind]) if kind in point.kinds else None for kind in KINDS},
        "why_not": {kind: list(reasons) for kind, reasons in point.why.items()},
        "doubts": [*point.doubts, *point.damaged],
        "notes": list(point.notes),
        "runs": [_plain_run(energy) for energy in point.runs],
        "slurm": [asdict(check) for check in check_slurm(point.runs, slurm)],
    }


def _plain_kind(told: KindEnergy) -> dict[str, Any]:
    def plain(estimate: Estimate | None) -> dict[str, Any] | None:
        return None if estimate is None else asdict(estimate)

    return {
        "energy_per_sample_j": plain(told.energy_per_sample),
        "samples_per_joule": plain(told.samples_per_joule),
        "mean_power_w": plain(told.mean_power),
        "whole_j": plain(told.whole_j),
        "stages_j": {stage: plain(estimate) for stage, estimate in told.stages_j.items()},
        "num_sources": list(told.num_sources),
        "methods": list(told.methods),
        "sampled_share": told.sampled_share,
    }


def _plain_run(energy: RunEnergy) -> dict[str, Any]:
    return {
        "run_id": energy.run_id,
        "samples": energy.num_samples,
        "sources": [
            {
                "node": source.node_rank,
                "host": source.host,
                "name": source.name,
                "kind": source.kind,
                "method": source.method,
                "counter_over_power": source.check,
                "samples_in_window": source.samples_in_window,
                "stages": {
                    stage: {"joules": amount.value, "seconds": amount.length_ns / 1e9, "sampled_share": amount.coverage}
                    for stage, amount in source.stages.items()
                },
            }
            for source in energy.sources
        ],
    }
