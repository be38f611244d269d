"""Sides of a paired comparison: two plans of every point and repeat, which run one right after the other.

Even repeats run side a first, odd ones side b (a b, b a, a b, ...): a machine that grows slower over the series is
slower for both alike, to first order. What the pairs show is `dlbench.analysis`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dlbench.errors import UserError
from dlbench.specs.plan import RunPlan, Side, value_text
from dlbench.specs.requests import PLAIN, Request
from dlbench.specs.system.slurm import OF_SRUN


def in_order(request: Request, repeat: int) -> Sequence[Side | Literal[""]]:
    """The sides of one point in this repeat, in the order in which they run; one of no name without a comparison."""
    if not request.sides:
        return ("",)
    return ("a", "b") if repeat % 2 == 0 else ("b", "a")


def refuse_other_options(request: Request) -> None:
    """Options that make other kinds of runs do not go with sides, nor those that both sides replace.

    Raises `UserError`: one of them is given.
    """
    if not request.sides:
        return
    given = {
        "--sweep": (bool(request.sweep), "compares two settings; sweep in a series of its own"),
        "--decompose": (request.decompose, "run one after the other"),
        "--watch-cost": (request.watch_cost, "run one after the other"),
        "--to-accuracy": (request.to_accuracy, "compares throughput; leave it out"),
    }
    for option, (is_given, why) in given.items():
        if is_given:
            raise UserError(f"--ab: does not go with {option}: {why}")
    replaced = {
        "--engine": ("engine.name", request.engine),
        "--data": ("data.source", request.data),
        "--resume": ("checkpoint.resume_from", request.resume),
        "--launcher": ("system.launch.launcher", request.launcher),
    }
    for option, (key, value) in replaced.items():
        if value is not None and all(key in settings for settings in request.sides.values()):
            raise UserError(f"{option}: has no effect: both sides of --ab set {key}")


def refuse_uneven(plans: Sequence[RunPlan]) -> None:
    """Refuses sides that are not two ways of doing the same thing in the same place.

    Raises `UserError`: a pair differs in ranks, nodes or scheduler, or a side trains to a quality.
    """
    for one, other in pairs(plans):
        for what, left, right in (
            ("ranks", one.layout.ranks, other.layout.ranks),
            ("nodes", one.layout.nodes, other.layout.nodes),
            ("system.scheduler", one.system.scheduler, other.system.scheduler),
        ):
            if left != right:
                raise UserError(
                    f"--ab: both sides of a pair need the same {what}: side a has {left}, side b {right}; rank counts "
                    "are compared in a series of --ranks or --nodes"
                )
        if "quality" in (one.measure.until, other.measure.until):
            raise UserError("--ab: compares throughput; leave out measure.until quality")


def refuse_equal(request: Request, plans: Sequence[RunPlan]) -> None:
    """Refuses settings that leave no difference between the sides in any pair.

    Raises `UserError`: both sides compute the same, though one of them sets something.
    """
    asked = [key for settings in request.sides.values() for key in settings]
    if not asked:
        return
    keys = ", ".join(dict.fromkeys(asked))
    if all(one.configuration_digest() == other.configuration_digest() for one, other in pairs(plans)):
        raise UserError(
            f"--ab: both sides come to the same plan: {keys} is what it is without being set; for two equal sides give "
            f"--ab {PLAIN} {PLAIN}"
        )
    if all(acting_part(one) == acting_part(other) for one, other in pairs(plans)):
        raise UserError(
            f"--ab: {keys}: changes nothing in what the ranks of either side do, nor in how they are started: both "
            "sides run on the nodes of one Slurm job, or on one machine"
        )


def acting_part(plan: RunPlan) -> dict[str, Any]:
    """What of a plan its ranks read, and what the command or script is made of that starts them.

    The rest names the system, describes it to reports, or asks Slurm for nodes, which sides have in common.
    """
    content = plan.model_dump(mode="json", exclude={"run_id", "created", "series", "overrides", "tags", "layout"})
    system = content["system"]
    for key in ("name", "title", "node"):
        del system[key]
    told = (*OF_SRUN, "cpus_per_task", "cpus_per_gpu", "gpu_request", "hint", "threads_per_core")
    system["slurm"] = {key: system["slurm"][key] for key in told}
    del system["storage"]["shared_title"]
    system["launch"]["oversubscribe_yield"] = plan.yields
    layout = plan.layout
    return {**content, "layout": (layout.nodes, layout.ranks, layout.cores_per_rank), "scaling": plan.series.scaling}


def pairs(plans: Sequence[RunPlan]) -> list[tuple[RunPlan, RunPlan]]:
    """The plans of a comparison two by two, side a first, in the order in which they run."""
    found = []
    for first, second in zip(plans[::2], plans[1::2], strict=True):
        found.append((first, second) if first.series.side == "a" else (second, first))
    return found


def side_words(plan: RunPlan) -> str:
    """What a plan's side sets, e.g. ``engine.name=ddp, sync.fusion=own:single``, or `plain`; empty without a side."""
    if not plan.series.side:
        return ""
    settings = plan.series.sides.get(plan.series.side, {})
    return ", ".join(f"{key}={value_text(key, value)}" for key, value in settings.items()) or PLAIN
