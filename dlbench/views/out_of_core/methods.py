"""The ways to hold activations: what they are called, in which order, and how runs name theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlbench.specs.memory.settings import MemorySpec, Recompute, Swap
from dlbench.specs.training import TrainSpec

IN_CORE = ("none", "none")
PLANNED = ("planned", "planned")

TITLES: Mapping[tuple[Recompute, Swap], str] = {
    ("none", "none"): "in core",
    ("blocks", "none"): "all recomputed",
    ("none", "offload"): "all offloaded",
    ("none", "streamed"): "all streamed",
    ("blocks", "streamed"): "recomputed, inputs streamed",
    ("planned", "none"): "planned recompute",
    ("none", "planned"): "planned swap",
    ("planned", "planned"): "planned (KARMA)",
}
"""By `train.recompute` and `train.swap`, in the order in which they are shown."""

OTHER_TITLE = "{recompute} recomputed, {swap} swapped"

COLOURS: Mapping[str, str] = {
    "in core": "#1f2328",
    "all recomputed": "#e69f00",
    "all offloaded": "#8a8f98",
    "all streamed": "#56b4e9",
    "recomputed, inputs streamed": "#cc79a7",
    "planned recompute": "#009e73",
    "planned swap": "#0072b2",
    "planned (KARMA)": "#d55e00",
}
"""Of the methods, wherever they are drawn."""
OTHER_COLOUR = "#6b5bb5"

METHOD_KEYS = ("recompute", "swap", "memory", "optimizer_state", "compile", "activation_budget")
"""Settings of `train` that belong to a method."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run holds activations and optimiser state."""

    title: str
    """Of `TITLES`."""
    label: str
    """The same with all that tells methods of one title apart."""
    recompute: str
    swap: str
    capacity: str
    """As asked for; empty where none was."""

    @property
    def colour(self) -> str:
        """Of its title."""
        return COLOURS.get(self.title, OTHER_COLOUR)


def title_of(recompute: Recompute, swap: Swap) -> str:
    """What a method is called."""
    return TITLES.get((recompute, swap)) or OTHER_TITLE.format(recompute=recompute, swap=swap)


def _compiled(train: TrainSpec) -> str:
    if train.compile == "none":
        return ""
    mode = "" if train.compile == "default" else f" {train.compile}"
    budget = "" if train.activation_budget is None else f" keeping {train.activation_budget:g}"
    return f"torch.compile{mode}{budget}"


def method_of(train: TrainSpec) -> Method:
    """The method of a plan."""
    title = title_of(train.recompute, train.swap)
    capacity = train.memory.capacity if train.is_planned and train.memory.capacity is not None else ""
    more = (
        f"in {capacity}" if capacity else "",
        f"blocks from {', '.join(train.memory.blocks)}" if train.memory.blocks else "",
        "verified" if train.memory.verify else "",
        _compiled(train),
        "optimiser on the host" if train.optimizer_state == "host" else "",
        f"{train.gradient_accumulation} parts" if train.gradient_accumulation > 1 else "",
    )
    return Method(
        title=title,
        label=", ".join(filter(None, (title, *more))),
        recompute=train.recompute,
        swap=train.swap,
        capacity=capacity,
    )


def without_method(train: TrainSpec) -> TrainSpec:
    """The same training without a method and with batches of one sample: equal for runs to be compared here."""
    neutral = {key: TrainSpec.model_fields[key].default for key in METHOD_KEYS if key != "memory"}
    return train.model_copy(update={**neutral, "memory": MemorySpec(), "batch_per_rank": 1, "gradient_accumulation": 1})


def rank_of(method: Method) -> int:
    """Its place in the order of `TITLES`."""
    titles = list(TITLES.values())
    return titles.index(method.title) if method.title in titles else len(titles)
