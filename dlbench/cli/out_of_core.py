"""`dlbench memory` plans which activations are kept, swapped or recomputed; `dlbench layer` times a layer in parts."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.cli.report import FORMAT_MODULES, FormatName, check_writable, emit, format_by_suffix, require_modules
from dlbench.errors import UserError, nearest

if TYPE_CHECKING:
    from dlbench.specs.out_of_core import Chain, TransferRates
    from dlbench.specs.plan import RunPlan
    from dlbench.views.out_of_core.plan import CapacityPlan

_SUFFIXES: dict[str, FormatName] = {".html": "html", ".htm": "html", ".json": "json", ".md": "md", ".txt": "text"}
_DECIDED = ("train.recompute", "train.swap", "train.memory.capacity", "train.batch_per_rank")
"""Keys that this command sets by its options, or compares."""


@click.group()
def memory() -> None:
    """Plan which activations stay in device memory, are swapped, or are recomputed."""


@memory.command("plan", short_help="Plan the training of a workload within a memory capacity.")
@click.argument("subject", metavar="WORKLOAD|RUN")
@shared.value_option("--batch", None, "Samples per rank and step (default: workload's).", type=click.IntRange(min=1))
@shared.value_option(
    "--capacity", "BYTES|SHARE", "Memory a rank may use: 8GiB, or 50% of the peak of ordinary training."
)
@shared.PRESET
@shared.KEYS
@shared.SYSTEM
@shared.value_option("-o --output", None, "File to write: .html, .md, .json, .txt (default: stdout).", type=shared.FILE)
@shared.AS_JSON
@click.option("--dry-run", is_flag=True, help="Print what would be measured; start and write nothing.")
def plan(subject: str, batch: int | None, capacity: str | None, **options: Any) -> None:
    """Plan the training of WORKLOAD within a memory capacity, and predict its memory and time.

    A process measures each module alone on this machine, which needs little memory; the rest is predicted: the plan,
    other methods, other capacities and batches. A finished RUN that recomputed or swapped has these measurements.
    Exits with 5 if no plan fits.

    \b
    Examples:
      dlbench memory plan resnet50 --batch 64 --capacity 8GiB
      dlbench memory plan runs/RUN --capacity 1GiB --batch 128
    """
    output = options["output"]
    if options["as_json"] and output is not None:
        raise UserError("--json and -o exclude each other: a file name that ends in .json selects JSON as well")
    check_writable(output)
    chosen: FormatName = "json" if options["as_json"] else format_by_suffix(output, None, _SUFFIXES, "text")
    if not options["dry_run"]:
        require_modules("memory plan", "numpy", *FORMAT_MODULES.get(chosen, ()))
    if Path(subject).is_dir():
        capacity_plan = _of_run(Path(subject), batch, capacity)
    else:
        run_plan = _asked(subject, batch, capacity, options)
        if options["dry_run"]:
            from dlbench.jobs.node_program import PROFILE, supervised
            from dlbench.jobs.scripts.containers import quoted

            click.echo("# measures the plan on its standard input:")
            click.echo(f"# {json.dumps(run_plan.model_dump(mode='json'))}")
            click.echo(quoted(supervised(run_plan.system.python or sys.executable, PROFILE)).encode())
            return
        capacity_plan = _of_workload(run_plan)
    from dlbench.views.out_of_core.plan import memory_plan_document

    emit(memory_plan_document(capacity_plan), chosen, output)


def _asked(workload: str, batch: int | None, capacity: str | None, options: dict[str, Any]) -> RunPlan:
    from dlbench.specs.requests import Request, parse_set

    if capacity is None:
        raise UserError("give --capacity, e.g. 8GiB, or 50% of the peak of ordinary training")
    overrides = parse_set(options["overrides"])
    for key in overrides:
        if key in _DECIDED:
            raise UserError(f"--set {key}: is set by this command (--batch, --capacity); all methods are compared")
    decided = {"train.recompute": "planned", "train.swap": "planned", "train.memory.capacity": capacity}
    if batch is not None:
        decided["train.batch_per_rank"] = batch  # type: ignore[assignment]
    request = Request(
        workload=workload,
        preset=options["preset"],
        system=options["system"],
        engine="single",
        launcher="local",
        overrides={**overrides, **decided},
    )
    return shared.expand_request(request, trains=False)[0]


def _of_workload(run_plan: RunPlan) -> CapacityPlan:
    from dlbench.jobs.node_program import PROFILE, answer_of, supervised
    from dlbench.jobs.processes import interrupted_by_signals
    from dlbench.perfmodels.out_of_core.planner import in_core_bytes
    from dlbench.records.out_of_core import MemoryProfile

    shared.require_torch(run_plan.system)
    train, workload = run_plan.workload.train, run_plan.workload
    click.echo(
        f"measuring {workload.name} ({workload.preset}), {train.batch_per_rank} {workload.sample_unit} per step",
        err=True,
    )
    command = supervised(run_plan.system.python or sys.executable, PROFILE)
    with interrupted_by_signals():
        profile = answer_of(command, run_plan.model_dump(mode="json"), MemoryProfile, "the profile's process")
    capacity = train.memory.capacity_bytes(in_core_bytes(profile.chain))
    assert capacity is not None
    where, parts = f"this machine ({socket.gethostname()})", train.gradient_accumulation
    of = {"where": where, "device": profile.device, "parts": parts, "warnings": profile.warnings}
    return _planned(run_plan, profile.chain, profile.rates, capacity, **of)


def _planned(plan: RunPlan, chain: Chain, rates: TransferRates | None, capacity: int, **of: Any) -> CapacityPlan:
    """Returns the plan of a measured chain; `of`: where and how it was measured, see `Measured`."""
    from dlbench.perfmodels.out_of_core.blocks import block_starts
    from dlbench.views.out_of_core.plan import Measured, memory_plan

    workload = plan.workload
    of |= {"workload": workload.name, "preset": workload.preset, "sample_unit": workload.sample_unit}
    starts = block_starts(workload.train.memory.blocks, [unit.name for unit in chain.units])
    return memory_plan(Measured(**of), chain, rates, capacity, starts=starts)


def _of_run(folder: Path, batch: int | None, capacity: str | None) -> CapacityPlan:
    from dlbench.perfmodels.out_of_core.planner import in_core_bytes, scaled
    from dlbench.records.scan import read_run
    from dlbench.specs.out_of_core import MemorySpec

    for option in shared.given_options("preset", "overrides", "system", "dry_run"):
        raise UserError(f"{option}: has no effect on a finished run, which has fixed it")
    run = read_run(folder)
    memory = None if run.record is None else run.record.memory
    if run.record is None or memory is None:
        reason = f"is {run.state}" if run.record is None else "did not recompute or swap"
        raise UserError(
            f"{folder}: the run {reason} and has no measurements of activations; measure its workload: dlbench memory "
            f"plan {run.plan.workload.name} --preset {run.plan.workload.preset} --capacity {capacity or '50%'}"
        )
    chain, warnings = memory.chain, []
    if batch is not None:
        if batch % memory.parts:
            raise UserError(f"--batch {batch}: the run computes a batch in {memory.parts} equal parts")
        samples = batch // memory.parts
        if samples != chain.batch:
            warnings.append(
                f"Scaled from the measured {chain.batch} to {samples} samples of a pass: times and activations are "
                "taken as proportional."
            )
            chain = scaled(chain, samples)
    capacity_bytes = memory.plan.capacity_bytes
    if capacity is not None:
        in_core = in_core_bytes(chain)
        try:
            capacity_bytes = MemorySpec(capacity=capacity).capacity_bytes(in_core)
        except ValueError:
            raise UserError(f"--capacity {capacity}: is no size such as 8GiB, and no share such as 50%") from None
    if capacity_bytes is None:
        raise UserError("give --capacity, e.g. 8GiB, or 50%: the run was planned for none")
    of = {"where": f"run {run.plan.run_id}", "device": run.record.ranks[0].device, "parts": memory.parts}
    return _planned(run.plan, chain, memory.rates, capacity_bytes, warnings=tuple(warnings), **of)


@click.command(short_help="Time a layer whole and at 1/p of its filters, channels and extent.")
@click.argument("workload")
@shared.value_option("--layer", "NAME", "Convolution or dense layer (default: the one with the most multiply-adds).")
@shared.value_option("--parts", "2,4", "Numbers of parts p.", "2,4,8")
@shared.value_option("--repeats", "N", "Samples of each time.", 5, type=click.IntRange(1, 1000))
@shared.PRESET
@shared.KEYS
@shared.SYSTEM
@shared.AS_JSON
def layer(workload: str, parts: str, repeats: int, as_json: bool, **options: Any) -> None:
    """Time one layer of WORKLOAD whole and at 1/p of its filters, channels and extent, on one rank of this machine.

    Model parallelism divides layers so, and models of it assume 1/p of the time. The result is how near the device
    comes to it, forward and backward, and what it takes to copy a part out and to join parts. Nothing is sent.

    \b
    Example:
      dlbench layer resnet50 --layer stages.0.0.conv2 --parts 2,4,8 --set train.batch_per_rank=32
    """
    from dlbench.jobs.node_program import PROFILE, answer_of, supervised
    from dlbench.jobs.processes import interrupted_by_signals
    from dlbench.records.out_of_core import LayerOrder, LayerPartTimes
    from dlbench.specs.requests import Request, parse_counts, parse_set
    from dlbench.views.layer_parts import layer_document

    where = {"preset": options["preset"], "system": options["system"], "engine": "single", "launcher": "local"}
    request = Request(workload=workload, overrides=parse_set(options["overrides"]), **where)
    (run_plan,) = shared.expand_request(request, trains=False)
    network = run_plan.workload
    layers = {layer.name: layer for layer in network.model.layer_table(network.data) if layer.is_product}
    name = options["layer"] or max(layers, key=lambda name: layers[name].macs, default="")
    if name not in layers:
        raise UserError(f"--layer: {name!r} is no convolution or dense layer of {workload}; {nearest(name, layers)}")
    require_modules("layer", "numpy")
    shared.require_torch(run_plan.system)
    click.echo(f"timing {name} of {network.name} ({network.preset}), whole and in parts", err=True)
    order = LayerOrder(plan=run_plan, layer=name, counts=parse_counts(parts, "--parts"), repeats=repeats)
    command = supervised(run_plan.system.python or sys.executable, PROFILE)
    with interrupted_by_signals():
        times = answer_of(command, order.model_dump(mode="json"), LayerPartTimes, "the process that times the layer")
    emit(layer_document(order, times), "json" if as_json else "text", None)
