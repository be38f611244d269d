"""Warnings about runs of one figure that are not repeats of each other, with the differing keys and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dlbench.analysis.doubts import Doubt
from dlbench.analysis.environments import NOT_SET, Difference, order_of, side_by_side, without_names
from dlbench.specs.plan import LaunchPlan

CODE = "unlike-runs"

MAX_KEYS = 6  # Keys that a sentence names; it counts the others, and reports list them all.
MAX_VALUES = 4
MAX_LENGTH = 80  # Characters of a value that are shown.

Facts = Mapping[str, str]  # The recorded environment and settings of a run, by key.


def mixed_configurations(places: Mapping[str, Mapping[str, Facts]]) -> list[Doubt]:
    """Returns at most two warnings: on averages of different runs, and on ratios between different averages.

    `places`: facts of the runs, by run, for each figure, by its name ("2 ranks"). Keys that name the job or the host do
    not count.
    """
    texts = []
    averaged = averaged_unlike(places)
    if averaged:
        texts.append(averaged)
    between = compared_unlike(places)
    if between:
        texts.append(f"compared figures are of different configurations: {named(between)}; their ratio includes that")
    return [Doubt(code=CODE, severity="serious", text=text) for text in texts]


def averaged_unlike(places: Mapping[str, Mapping[str, Facts]]) -> str:
    """Returns the keys that differ within a figure, as a sentence without full stop; empty if none does."""
    inside, places_of_keys = [], []
    for difference, key_places in _differences_with_places(places):
        if key_places:
            inside.append(difference)
            places_of_keys += key_places
    if not inside:
        return ""
    differing_places = [place for place in places if place in places_of_keys]
    where = ""
    if len(differing_places) < len(places):
        where = f" (at {', '.join(differing_places)})"
    return f"runs that are averaged{where} are not repeats: {named(inside)}"


def compared_unlike(places: Mapping[str, Mapping[str, Facts]]) -> list[Difference]:
    """Returns the keys that differ between figures and within none of them."""
    return [difference for difference, key_places in _differences_with_places(places) if not key_places]


def _differences_with_places(places: Mapping[str, Mapping[str, Facts]]) -> list[tuple[Difference, list[str]]]:
    """Returns the differences of all runs, each with the figures within which its key differs."""
    places_by_key: dict[str, list[str]] = {}
    all_runs: dict[str, Facts] = {}
    for place, runs in places.items():
        all_runs |= runs
        for difference in _differences(runs):
            places_by_key.setdefault(difference.key, []).append(place)
    return [(difference, places_by_key.get(difference.key, [])) for difference in _differences(all_runs)]


def named(differences: Iterable[Difference]) -> str:
    """Returns keys with their values and how many runs have each: `kernel: 6.1 in 3, 6.2 in 2`."""
    ordered = sorted(differences, key=lambda difference: order_of(difference.key))
    texts = [f"{difference.key}: {_values(difference)}" for difference in ordered[:MAX_KEYS]]
    if len(ordered) > MAX_KEYS:
        texts.append(f"and {len(ordered) - MAX_KEYS} more keys")
    return "; ".join(texts)


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
"""Libraries and networks that a run records only if it uses them: a run without one does not differ."""


def _differences(runs: Mapping[str, Facts]) -> list[Difference]:
    different = []
    for difference in side_by_side({run: without_names(facts) for run, facts in runs.items()}).differences:
        set_values = [value for value, _ in difference.values if value != NOT_SET]
        if difference.key not in _WHERE_LOADED or len(set_values) != 1:
            different.append(difference)
    return different


def shared_nodes(plan: LaunchPlan) -> str:
    """Returns a warning about nodes that are shared with other jobs; empty for exclusive nodes."""
    if plan.system.scheduler == "none" or plan.system.slurm.exclusive:
        return ""
    return (
        "nodes may be shared with other jobs (system.slurm.exclusive is off): their load on cores, memory and network "
        "is part of these figures and changes from run to run"
    )
