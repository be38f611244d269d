"""Runs chosen by their properties, for `--where KEY=VALUE` of every command that reads runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dlbench.analysis.comparability import system_content
from dlbench.errors import UserError, nearest
from dlbench.records.registry import describe
from dlbench.records.scan import LaunchedRun, Run
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import first_of

RunT = TypeVar("RunT", bound=LaunchedRun)

MAX_VALUES = 12  # Values of a key that an error lists.


def properties(run: LaunchedRun) -> dict[str, str]:
    """What a run can be chosen by, tags aside.

    `series`, `state`, `ranks`, `nodes`, `system` and `launcher`; of training also `side`, `variant`, every name of
    the registry, and keys of the system that shape speed (`system.modules`).
    """
    plan = run.plan
    assert isinstance(plan, RunPlan | CommPlan)
    values = {
        "series": plan.series.id,
        "state": run.state,
        "ranks": str(plan.layout.ranks),
        "nodes": str(plan.layout.nodes),
        "system": plan.system.name,
        "launcher": plan.system.launch.launcher,
    }
    if isinstance(run, Run):
        series = run.plan.series
        values |= {"side": series.side, "variant": series.variant, **describe(run), **system_content(plan)}
    return values


def select(runs: Sequence[RunT], name: str, where: Mapping[str, str], option: str) -> list[RunT]:
    """Runs with all these properties, in their order.

    `where`: the properties, values as text; see `properties`, and `tag.NAME` for a tag. Errors call the runs `name`,
    and name the option. Raises UserError: no run has such a key, or none has these values; names what there is.
    """
    if not where:
        return list(runs)
    chosen = [(run, properties(run)) for run in runs]
    for number, (key, expected) in enumerate(where.items()):
        values = [known.get(key) for _, known in chosen]
        if key.startswith("tag."):
            tags = [run.plan.tags if isinstance(run.plan, RunPlan) else {} for run, _ in chosen]
            values = [of_run.get(key.removeprefix("tag."), "") for of_run in tags]
        if chosen and all(value is None for value in values):
            names = {name for _, known in chosen for name in known}
            raise UserError(f"{option} {key}: no such property of runs; {nearest(key, [*names, 'tag.NAME'])}")
        if expected not in values:
            also = f" with {', '.join(f'{k}={v}' for k, v in [*where.items()][:number])}" if number else ""
            existing = sorted({value for value in values if value})
            hint = f"values there: {first_of(existing, MAX_VALUES)}" if existing else "none has any value of it"
            for close in difflib.get_close_matches(expected, existing, n=1):
                hint += f"; did you mean {close}?"
            raise UserError(f"{option} {key}={expected}: no run of {name}{also} has it; {hint}")
        chosen = [one for one, value in zip(chosen, values, strict=True) if value == expected]
    return [run for run, _ in chosen]
