"""Builds the points of a series: its name, the order of its runs, sides of a comparison, and variants.

The two sides of a comparison run directly after each other in every point and repeat. Even repeats begin with side a,
odd ones with side b (a b, b a, a b, ...), so that a machine that slows down over time affects both equally, to first
order. A variant is a plan without one part (input or exchange); the difference shows what that part costs.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from dlbench.errors import UserError
from dlbench.specs.base import MAX_RUNS
from dlbench.specs.launch import OF_SRUN
from dlbench.specs.plan import RunPlan, Side, Variant, value_text
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import KEY_OF, PLAIN, Request, shown_count
from dlbench.units import plural

PointT = TypeVar("PointT")

SUFFIXES: dict[Variant, str] = {
    "plain": "",
    "synthetic-input": "-synthetic",
    "cached-input": "-cached",
    "no-exchange": "-apart",
}
"""Suffixes of run names by variant."""


def refuse_too_many(runs: int, option: str) -> None:
    """Raises `UserError` for a series with too many runs to plan, run or read."""
    if runs > MAX_RUNS:
        raise UserError(
            f"{option}: makes a series of {shown_count(runs)} runs; the limit is {MAX_RUNS:,}, because all are planned "
            "before the first starts: split it into several --series"
        )


def series_name(name: str | None, now: datetime) -> str:
    """Returns the name given by `--series`, or a new one of UTC time and four random hexadecimal digits."""
    if name is None:
        return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UserError(f"--series {name!a}: must have up to 64 letters, digits and . _ -, the first a letter or digit")
    return name


def interleaved(points: Sequence[PointT], repeats: int) -> Iterator[tuple[int, int, PointT]]:
    """Yields repeat, index and point of each run in the order of execution."""
    for repeat in range(repeats):
        order = list(enumerate(points))
        if repeat % 2:
            # In alternating order, a drift of the machine affects all points equally.
            order.reverse()
        for index, point in order:
            yield repeat, index, point


def in_order(request: Request, repeat: int) -> Sequence[Side | Literal[""]]:
    """Returns the sides of one point in this repeat in the order of execution; one empty name without a comparison."""
    if not request.sides:
        return ("",)
    return ("a", "b") if repeat % 2 == 0 else ("b", "a")


def refuse_other_options(request: Request) -> None:
    """Raises `UserError` for options that cannot be combined with --ab or --ladder."""
    if not request.sides and not request.ladder:
        return
    option = "--ab" if request.sides else "--ladder"
    excluded = {
        "--ladder": (request.ladder and option == "--ab", "run one after the other"),
        "--sweep": (bool(request.sweep), "compares its own settings; use a separate series for the sweep"),
        "--decompose": (request.decompose, "run one after the other"),
        "--to-accuracy": (request.to_accuracy, "compares throughput; leave it out"),
    }
    for other, (is_given, why) in excluded.items():
        if is_given:
            raise UserError(f"{option}: cannot be combined with {other}: {why}")
    if not request.sides:
        return
    for field, key in KEY_OF.items():
        if getattr(request, field) is not None and all(key in settings for settings in request.sides.values()):
            raise UserError(f"--{field}: has no effect: both sides of --ab set {key}")


def refuse_uneven(plans: Sequence[RunPlan]) -> None:
    """Raises `UserError` if the sides differ in layout, goal or recording, so that they cannot be compared."""
    for plan_a, plan_b in pairs(plans):
        for quantity, value_a, value_b in (
            ("ranks", plan_a.layout.ranks, plan_b.layout.ranks),
            ("nodes", plan_a.layout.nodes, plan_b.layout.nodes),
            ("system.scheduler", plan_a.system.scheduler, plan_b.system.scheduler),
        ):
            if value_a != value_b:
                raise UserError(
                    f"--ab: both sides of a pair need the same {quantity}: side a has {value_a}, side b {value_b}; "
                    "compare rank counts by --ranks or --nodes"
                )
        if "quality" in (plan_a.measure.until, plan_b.measure.until):
            raise UserError("--ab: compares throughput; leave out measure.until quality")


def refuse_equal(request: Request, plans: Sequence[RunPlan]) -> None:
    """Raises `UserError` for settings that leave no difference between the sides in any pair."""
    side_keys = list(itertools.chain.from_iterable(request.sides.values()))
    if not side_keys:
        return
    keys = ", ".join(dict.fromkeys(side_keys))
    if all(plan_a.configuration_digest() == plan_b.configuration_digest() for plan_a, plan_b in pairs(plans)):
        raise UserError(
            f"--ab: both sides give the same plan: {keys} is set to its present value; for two equal sides use --ab "
            f"{PLAIN} {PLAIN}"
        )
    if all(acting_part(plan_a) == acting_part(plan_b) for plan_a, plan_b in pairs(plans)):
        raise UserError(
            f"--ab: {keys}: has no effect on the ranks or on how they are started: both sides run on the nodes of one "
            "Slurm job, or on one machine"
        )


def acting_part(plan: RunPlan) -> dict[str, Any]:
    """Returns the part of a plan that ranks or the launcher read."""
    content = plan.model_dump(mode="json", exclude={"run_id", "created", "series", "overrides", "tags", "layout"})
    system = content["system"]
    for key in ("name", "title", "node"):
        del system[key]
    stated = (*OF_SRUN, "cpus_per_task", "cpus_per_gpu", "gpu_request", "hint", "threads_per_core")
    system["slurm"] = {key: system["slurm"][key] for key in stated}
    del system["storage"]["shared_title"]
    system["launch"]["oversubscribe_yield"] = plan.yields
    layout = plan.layout
    return {**content, "layout": (layout.nodes, layout.ranks, layout.cores_per_rank), "scaling": plan.series.scaling}


def pairs(plans: Sequence[RunPlan]) -> list[tuple[RunPlan, RunPlan]]:
    """Returns the plans of a comparison in pairs, side a first, in the order of execution."""
    two_by_two = zip(plans[::2], plans[1::2], strict=True)
    return [(first, second) if first.series.side == "a" else (second, first) for first, second in two_by_two]


def side_words(plan: RunPlan) -> str:
    """Returns the settings of a plan's side, e.g. ``engine.name=ddp, sync.fusion=own:single``, or `plain`; or ""."""
    if not plan.series.side:
        return ""
    settings = plan.series.sides.get(plan.series.side, {})
    return ", ".join(f"{key}={value_text(key, value)}" for key, value in settings.items()) or PLAIN


def option_of(request: Request) -> str:
    """Returns the option that asks for variants, or "". Raises `UserError`: another option excludes it."""
    option = ""
    if request.tiers:
        option = "--tiers"
    elif request.decompose:
        option = "--decompose"
    if option and request.to_accuracy:
        raise UserError(f"{option}: measures throughput; leave out --to-accuracy")
    if option and request.sweep:
        raise UserError(f"{option}: cannot be combined with --sweep; give one value at a time with --set")
    if request.tiers and "data.cache" in request.overrides:
        raise UserError("--set data.cache: has no effect: --tiers runs with a cold and with a warm cache")
    return option


def arranged(request: Request, plans: Sequence[RunPlan]) -> list[RunPlan]:
    """Returns all runs in order, each next to its variants; every second repeat has the opposite order."""
    option = option_of(request)
    if option:
        _refuse(request, option, plans)
    result: list[RunPlan] = []
    for plan in plans:
        group = [plan, *(_variant(plan, variant, option) for variant in _variants_of(request, plan))]
        if plan.series.repeat % 2:
            group.reverse()
        for member in group:
            series = member.series.model_copy(update={"position": len(result)})
            result.append(member.model_copy(update={"series": series}))
    return result


def left_out(request: Request, plans: Sequence[RunPlan]) -> list[str]:
    """Returns sentences on the variants of `--decompose` and ladder steps that a series leaves out, with reasons."""
    lines = [f"--ladder: {text}" for text in idle_steps(plans)]
    if not request.decompose:
        return lines
    if all(plan.workload.data.is_synthetic for plan in plans):
        lines.append("--decompose: data is synthetic already: no runs with synthetic input; give --data for them")
    if any(plan.layout.ranks == 1 for plan in plans):
        lines.append("--decompose: one rank exchanges nothing: no runs without exchange there")
    return lines


def idle_steps(plans: Sequence[RunPlan]) -> list[str]:
    """Returns sentences on the ladder steps that cannot act at some rank counts, with reasons."""
    steps: dict[tuple[str, str], set[int]] = {}
    for plan in plans:
        for step in plan.series.ladder:
            steps.setdefault((step.name, step.skipped), set()).add(plan.layout.ranks)
    return [
        f"{name} is left out at {' and '.join(map(str, sorted(counts)))} {plural('rank', max(counts))}: {why}"
        for (name, why), counts in steps.items()
        if why
    ]


def unexchanged_problem(plan: RunPlan) -> str | None:
    """Returns why a run without exchange contradicts the plan, in one sentence; None if it does not."""
    if plan.sync.exchange != "none" or plan.layout.ranks == 1:
        return None
    if plan.measure.until == "quality":
        return "sync.exchange none: ranks diverge and reach no target; leave out --to-accuracy"
    if plan.checkpoint.is_on:
        return "sync.exchange none: ranks diverge, so that rank 0's state is incomplete; leave out checkpoints"
    if plan.measure.noise_scale:
        return "sync.exchange none: measure.noise_scale needs averaged gradients; leave it out"
    return None


def _refuse(request: Request, option: str, plans: Sequence[RunPlan]) -> None:
    if any(plan.measure.until == "quality" for plan in plans):
        raise UserError(f"{option}: measures throughput; leave out measure.until quality")
    if request.tiers:
        if any(plan.workload.data.is_synthetic for plan in plans):
            raise UserError("--tiers: synthetic data is not read from storage; give --data")
        if any(plan.checkpoint.is_on or plan.checkpoint.resume_from for plan in plans):
            raise UserError("--tiers: cannot be combined with checkpoints: synthetic data trains another model")
        return
    if any(plan.sync.exchange == "none" for plan in plans):
        raise UserError("--decompose: sync.exchange none has no exchange that could be left out")
    if any(plan.checkpoint.is_on or plan.checkpoint.resume_from for plan in plans):
        raise UserError("--decompose: cannot be combined with checkpoints: variants train another model")
    if not any(_variants_of(request, plan) for plan in plans):
        raise UserError(
            "--decompose: nothing can be left out: data is synthetic, and one rank exchanges nothing; give --data or "
            "more ranks"
        )


def _variants_of(request: Request, plan: RunPlan) -> list[Variant]:
    variants: list[Variant] = ["cached-input", "synthetic-input"] if request.tiers else []
    if request.decompose and not plan.workload.data.is_synthetic:
        variants.append("synthetic-input")
    if request.decompose and plan.layout.ranks > 1:
        variants.append("no-exchange")
    return variants


def _variant(plan: RunPlan, variant: Variant, option: str) -> RunPlan:
    content: dict[str, Any] = plan.model_dump(mode="json")
    content["run_id"] += SUFFIXES[variant]
    content["series"]["variant"] = variant
    if variant == "synthetic-input":
        content["workload"]["data"] |= {"source": "synthetic", "cache": "any", "staging": "none"}
        fault = content["fault"]
        if fault is not None:
            # An injected delay of batches is part of the reader, which synthetic input does not use.
            fault["input_delay_s"] = 0.0
            if not fault["step_delay_s"] and fault["compute_factor"] == 1.0:
                content["fault"] = None
    elif variant == "cached-input":
        content["workload"]["data"]["cache"] = "warm"
    else:
        content["sync"] = {"exchange": "none"}
        # Autotuning would never end without messages to time.
        content["engine"]["horovod"]["autotune"] = False
    try:
        variant_plan = RunPlan.model_validate(content)
    except ValidationError as error:
        reason = str(problem_of(RunPlan, error)).removeprefix("workload: ")  # the message names the keys
        raise UserError(f"{option}: a run of variant {variant} is not possible: {reason}") from None
    problem = unexchanged_problem(variant_plan)
    if problem is not None:
        raise UserError(f"{option}: a run of variant {variant} is not possible: {problem}")
    return variant_plan
