"""Runs of one figure that are no repeats of each other, as a doubt that names the keys with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dlbench.analysis.doubts import Doubt
from dlbench.analysis.environments import NOT_SET, Difference, order_of, side_by_side, without_names
from dlbench.specs.plan import LaunchPlan

CODE = "unlike-runs"

MAX_KEYS = 6  # Keys that a sentence names; it counts the others, and reports list them all.
MAX_VALUES = 4
MAX_LENGTH = 80  # Characters of a value that are shown.

Facts = Mapping[str, str]  # What a run met, by key.


def mixed_configurations(places: Mapping[str, Mapping[str, Facts]]) -> list[Doubt]:
    """At most two serious doubts: one on averages of unlike runs, one on ratios between unlike averages.

    `places`: facts of the runs, by run, of each figure, by what it is called ("2 ranks"). Keys that name the job or the
    host do not count.
    """
    texts = list(filter(None, [averaged_unlike(places)]))
    if between := compared_unlike(places):
        texts.append(f"figures are compared that did not run alike: {named(between)}; their ratio holds that too")
    return [Doubt(code=CODE, severity="serious", text=text) for text in texts]


def averaged_unlike(places: Mapping[str, Mapping[str, Facts]]) -> str:
    """Keys that differ between runs of one figure, in a sentence without a full stop; empty where none does."""
    places_by_key = _averaged(places)
    if not places_by_key:
        return ""
    met = list(dict.fromkeys(place for where in places_by_key.values() for place in where))
    where = "" if len(met) == len(places) else f" (at {', '.join(met)})"
    inside = [one for one in _differences(_all(places)) if one.key in places_by_key]
    return f"runs that are averaged{where} are no repeats: {named(inside)}"


def compared_unlike(places: Mapping[str, Mapping[str, Facts]]) -> list[Difference]:
    """Keys that differ between figures and within none of them."""
    places_by_key = _averaged(places)
    return [difference for difference in _differences(_all(places)) if difference.key not in places_by_key]


def _averaged(places: Mapping[str, Mapping[str, Facts]]) -> dict[str, list[str]]:
    places_by_key: dict[str, list[str]] = {}
    for place, runs in places.items():
        for difference in _differences(runs):
            places_by_key.setdefault(difference.key, []).append(place)
    return places_by_key


def _all(places: Mapping[str, Mapping[str, Facts]]) -> dict[str, Facts]:
    return {run: facts for runs in places.values() for run, facts in runs.items()}


def named(differences: Iterable[Difference]) -> str:
    """Keys with their values and how many runs have each: `kernel: 6.1 in 3, 6.2 in 2`."""
    ordered = sorted(differences, key=lambda difference: order_of(difference.key))
    more = f"; and {len(ordered) - MAX_KEYS} more keys" if len(ordered) > MAX_KEYS else ""
    return "; ".join(f"{one.key}: {_values(one)}" for one in ordered[:MAX_KEYS]) + more


def _values(difference: Difference) -> str:
    texts = []
    for value, runs in difference.values[:MAX_VALUES]:
        text = value if len(value) <= MAX_LENGTH else f"{value[: MAX_LENGTH - 3]}..."
        texts.append(f"{text} in {len(runs)}")
    if len(difference.values) > MAX_VALUES:
        texts.append(f"{len(difference.values) - MAX_VALUES} other values")
    return ", ".join(texts)


_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_WHERE_LOADED = frozenset({"mpi.library", *(f"variable.{name}" for name in _INTERFACES)})
"""Libraries and networks that a run has only where it needs them: a run without one has no other."""


def _differences(runs: Mapping[str, Facts]) -> list[Difference]:
    found = side_by_side({run: without_names(facts) for run, facts in runs.items()}).differences
    set_values = {one.key: [value for value, _ in one.values if value != NOT_SET] for one in found}
    return [one for one in found if one.key not in _WHERE_LOADED or len(set_values[one.key]) != 1]


def shared_nodes(plan: LaunchPlan) -> str:
    """Why nodes that are shared with other jobs make figures doubtful; empty where the job has them for itself."""
    if plan.system.scheduler == "none" or plan.system.slurm.exclusive:
        return ""
    return (
        "nodes may be shared with other jobs (system.slurm.exclusive is off): their load on cores, memory and network "
        "is part of these figures and changes from run to run"
    )
