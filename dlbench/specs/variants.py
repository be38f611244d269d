"""Variants of a run: the same plan with one thing taken away, so that the difference shows what that thing costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dlbench.errors import UserError
from dlbench.specs.plan import RunPlan, Variant
from dlbench.specs.problems import problem_of
from dlbench.specs.requests import Request

SUFFIXES: dict[Variant, str] = {
    "plain": "",
    "synthetic-input": "-synthetic",
    "cached-input": "-cached",
    "no-exchange": "-apart",
    "unwatched": "-unwatched",
}
"""What a run's name ends with."""

MIN_WATCH_REPEATS = 2
"""One pair of watched and unwatched runs has no interval."""


def option_of(request: Request) -> str:
    """The option that asks for variants; empty where none does.

    Raises `UserError`: two such options, or one with another that it does not go with.
    """
    if request.decompose and request.watch_cost:
        raise UserError("--decompose and --watch-cost exclude each other: run one after the other")
    option = "--decompose" if request.decompose else "--watch-cost" if request.watch_cost else ""
    option = "--tiers" if request.tiers else option
    if option and request.to_accuracy:
        raise UserError(f"{option}: measures throughput; leave out --to-accuracy")
    if option and request.sweep:
        raise UserError(f"{option}: does not go with --sweep; give one value at a time with --set")
    if request.tiers and "data.cache" in request.overrides:
        raise UserError("--set data.cache: --tiers runs everything with a cold and with a warm cache")
    return option


def arranged(request: Request, plans: Sequence[RunPlan]) -> list[RunPlan]:
    """All runs of a request in the order in which they should run, each beside its variants.

    Every second repeat has the variants in the opposite order: a drift of the machine falls on all of them alike.

    `request`: says which variants.
    Raises `UserError`: the request does not go with variants, or one of them is not possible.
    """
    option = option_of(request)
    if option:
        _refuse(request, option, plans)
    result: list[RunPlan] = []
    for plan in plans:
        group = [plan, *(_variant(plan, which, option) for which in _variants_of(request, plan))]
        for one in group if plan.series.repeat % 2 == 0 else reversed(group):
            series = one.series.model_copy(update={"position": len(result)})
            result.append(one.model_copy(update={"series": series}))
    return result


def left_out(request: Request, plans: Sequence[RunPlan]) -> list[str]:
    """Which variants of `--decompose` a series does not have, and why, in sentences; empty for other series."""
    if not request.decompose:
        return []
    found = []
    if all(plan.workload.data.is_synthetic for plan in plans):
        found.append("--decompose: data is synthetic already: no runs with synthetic input; give --data for them")
    if any(plan.layout.ranks == 1 for plan in plans):
        found.append("--decompose: one rank exchanges nothing: no runs without exchange there")
    return found


def apart_problem(plan: RunPlan) -> str | None:
    """Why a run without exchange cannot do what the plan asks, in one sentence; None if it can."""
    if plan.sync.exchange != "none" or plan.layout.ranks == 1:
        return None
    if plan.measure.until == "quality":
        return "sync.exchange none: ranks drift apart and reach no target; leave out --to-accuracy"
    if plan.checkpoint.is_on:
        return (
            "sync.exchange none: ranks drift apart, so that rank 0's state is not the training's; leave out checkpoints"
        )
    if plan.measure.noise_scale:
        return "sync.exchange none: measure.noise_scale needs averaged gradients; leave it out"
    return None


def _refuse(request: Request, option: str, plans: Sequence[RunPlan]) -> None:
    if any(plan.measure.until == "quality" for plan in plans):
        raise UserError(f"{option}: measures throughput; leave out measure.until quality")
    if request.watch_cost:
        if request.repeats < MIN_WATCH_REPEATS:
            raise UserError(
                f"--watch-cost: one pair of runs has no interval: use --repeats {MIN_WATCH_REPEATS} or more"
            )
        if any(plan.watch is None or not plan.watch.is_on for plan in plans):
            raise UserError("--watch-cost: nothing is watched: watch.sampler is off and watch.window_steps is 0")
        return
    if request.tiers:
        if any(plan.workload.data.is_synthetic for plan in plans):
            raise UserError("--tiers: synthetic data is read from nowhere; give --data")
        if any(plan.checkpoint.is_on or plan.checkpoint.resume_from for plan in plans):
            raise UserError("--tiers: does not go with checkpoints: synthetic data trains something else")
        return
    if any(plan.sync.exchange == "none" for plan in plans):
        raise UserError("--decompose: sync.exchange none leaves no exchange to take away")
    if any(plan.checkpoint.is_on or plan.checkpoint.resume_from for plan in plans):
        raise UserError("--decompose: does not go with checkpoints: variants train something else")
    if not any(_variants_of(request, plan) for plan in plans):
        raise UserError(
            "--decompose: nothing can be taken away: data is synthetic and one rank exchanges nothing; give --data, or "
            "more ranks"
        )


def _variants_of(request: Request, plan: RunPlan) -> list[Variant]:
    found: list[Variant] = ["cached-input", "synthetic-input"] if request.tiers else []
    if request.decompose and not plan.workload.data.is_synthetic:
        found.append("synthetic-input")
    if request.decompose and plan.layout.ranks > 1:
        found.append("no-exchange")
    if request.watch_cost:
        found.append("unwatched")
    return found


def _variant(plan: RunPlan, which: Variant, option: str) -> RunPlan:
    """The same run with one thing taken away. Raises `UserError`: the run is not possible without it."""
    content: dict[str, Any] = plan.model_dump(mode="json")
    content["run_id"] += SUFFIXES[which]
    content["series"]["variant"] = which
    if which == "synthetic-input":
        content["workload"]["data"] |= {"source": "synthetic", "cache": "any", "staging": "none"}
        content["fault"] = _without_input_delay(content["fault"])
    elif which == "cached-input":
        content["workload"]["data"]["cache"] = "warm"
    elif which == "no-exchange":
        content["sync"] = {"exchange": "none"}
        # Its search would never end, as there is no message to time.
        content["engine"]["horovod"]["autotune"] = False
    else:
        content["watch"] |= {"sampler": False, "window_steps": 0, "profiler": False}
    try:
        made = RunPlan.model_validate(content)
    except ValidationError as error:
        why = str(problem_of(RunPlan, error)).removeprefix("workload: ")  # which names the keys itself
        raise UserError(f"{option}: a run of variant {which} is not possible: {why}") from None
    problem = apart_problem(made)
    if problem is not None:
        raise UserError(f"{option}: a run of variant {which} is not possible: {problem}")
    return made


def _without_input_delay(fault: dict[str, Any] | None) -> dict[str, Any] | None:
    """A planted delay of batches belongs to the reader, and goes with it."""
    if fault is None:
        return None
    rest = {**fault, "input_delay_s": 0.0}
    return rest if rest["step_delay_s"] or rest["compute_factor"] != 1.0 else None
