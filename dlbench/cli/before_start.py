"""What a series of runs on this machine would run into, said before anything is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.plan import RunPlan
    from dlbench.specs.requests import Request
    from dlbench.specs.system.system import SystemSpec


def require_this_machine(request: Request, plans: Sequence[RunPlan], cores: int) -> None:
    """Proves of plans without a scheduler that this machine is one for them.

    Args:
        request: what was asked for.
        plans: of the series.
        cores: that ranks may use here.

    Raises:
        UserError: no preset was chosen, and the default is for GPUs that are not here, or a preset for GPUs was.
        EnvironmentLacksError: a plan's precision is not this CPU's.
    """
    from dlbench.jobs.this_machine import require_precision

    here = [plan for plan in plans if plan.system.scheduler == "none"]
    if here:
        _require_chosen_preset(request, here, cores)
        _require_meant_for_here(request, here)
    for plan in here:
        require_precision(plan)


def _require_chosen_preset(request: Request, plans: Sequence[RunPlan], cores: int) -> None:
    from dlbench.jobs.this_machine import has_gpu
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.resolve import find

    if request.preset is not None or has_gpu():
        return
    file = WorkloadFile(find("workloads", request.workload))
    other = _for_cpus(file)
    if other is None:
        return
    raise UserError(
        f"{request.workload}: no --preset is given, and this machine has no GPU: preset {file.default_preset}, the "
        f"default, {_duration(plans, cores)}did you mean --preset {other}? --preset {file.default_preset} runs it "
        "all the same"
    )


def _for_cpus(file: WorkloadFile) -> str | None:
    """The preset that a person without a GPU means: the last that is neither the default nor made for GPUs."""
    others = [name for name in file.presets if name != file.default_preset and not file.is_meant_for_gpus(name)]
    return others[-1] if others else None


def _require_meant_for_here(request: Request, plans: Sequence[RunPlan]) -> None:
    from dlbench.jobs.this_machine import has_gpu
    from dlbench.specs.choices import WorkloadFile
    from dlbench.specs.resolve import find

    workload = next((plan.workload for plan in plans if plan.workload.meant_for == "gpu"), None)
    if workload is None or has_gpu():
        return
    other = _for_cpus(WorkloadFile(find("workloads", request.workload)))
    raise UserError(
        f"{request.workload}: preset {workload.preset} is made for GPUs, and this machine has none: "
        f"{f'did you mean --preset {other}? ' if other else ''}--set meant_for=any runs it all the same"
    )


def preset_notes(plans: Sequence[RunPlan]) -> list[str]:
    """What a person should know of presets and recipes where they are to run, in sentences, each once."""
    from dlbench.specs.recipes.reach import recipe_note

    found = [
        recipe_note(plan.workload.train, global_batch=plan.global_batch, to_quality=plan.measure.until == "quality")
        for plan in plans
    ]
    missing = [note for plan in plans for note in (_variable_missing(plan.system), _variables_unused(plan.system))]
    return list(dict.fromkeys(f"note: {note}" for note in (*map(_asks_for_no_gpus, plans), *missing, *found) if note))


def _variables_unused(system: SystemSpec) -> str | None:
    """Which of sbatch's settings in this shell it will not see, the account that a site's profile sets among them."""
    names = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if system.scheduler != "slurm" or not names:
        return None
    return f"{', '.join(names)}: set here and not used: jobs are asked for as system {system.name} says (slurm.*)"


def _variable_missing(system: SystemSpec) -> str | None:
    """Which variable that a job refers to it will not get from here."""
    for name, given in system.launch.environment.items():
        source = None if isinstance(given, str) else given.variable
        if system.scheduler == "slurm" and source is not None and source not in os.environ:
            return (
                f"launch.environment.{name}: {source} is not set here: a job fails where its modules and setup do not "
                "set it"
            )
    return None


def _asks_for_no_gpus(plan: RunPlan) -> str | None:
    """What is odd about a preset for GPUs on a cluster whose system file has none."""
    system, workload = plan.system, plan.workload
    if workload.meant_for != "gpu" or system.scheduler == "none" or system.node.gpus:
        return None
    if system.slurm.gpu_request != "none":
        return None
    return (
        f"preset {workload.preset} of {workload.name} is made for GPUs, and system {system.name} has none (node.gpus) "
        "and asks for none (slurm.gpu_request)"
    )


def _duration(plans: Sequence[RunPlan], cores: int) -> str:
    """``takes at least 2 h 05 min on 2 cores (...); ``; empty where that is not known."""
    from dlbench.costs.model_flops import training_flops
    from dlbench.jobs.this_machine import product_rate
    from dlbench.units import format_seconds

    if any(plan.measure.until != "steps" for plan in plans):
        return ""
    rate = product_rate()
    if rate is None:
        return ""
    seconds = 0.0
    for plan in plans:
        steps = plan.measure.warmup_steps + plan.measure.measured_steps
        flops = training_flops(plan.workload.model, plan.workload.data) * plan.global_batch * steps
        seconds += max(flops / (rate * cores), plan.least_training_s)
    runs = "" if len(plans) == 1 else f" for {len(plans)} runs"
    return (
        f"takes at least {format_seconds(seconds)} on {cores} core{'s' * (cores > 1)}{runs} (its model "
        f"FLOPs at the rate of a matrix product here); "
    )
