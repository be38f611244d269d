"""What a projection says: of each target its step, throughput and efficiency with bands, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.lazy import Array, np
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import column
from dlbench.report.wording import sentence
from dlbench.stats.estimates import Estimate

QUANTILES = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975)
"""Of every band: ends of the middle 95, 90, 80 and 50 % of the draws, and their median."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A projected figure: quantiles of its draws."""

    quantiles: tuple[float, ...]  # By `QUANTILES`.

    @classmethod
    def of(cls, draws: Array) -> Band:
        """Of draws of shape (draws,)."""
        return cls(quantiles=tuple(float(one) for one in np.quantile(draws, QUANTILES)))

    @property
    def median(self) -> float:
        return self.quantiles[QUANTILES.index(0.5)]

    def middle(self, percent: Literal[50, 80, 90, 95]) -> tuple[float, float]:
        """Ends of the middle `percent` of the draws."""
        place = {95: 0, 90: 1, 80: 2, 50: 3}[percent]
        return self.quantiles[place], self.quantiles[-1 - place]


def figure(band: Band, unit: str, level: Literal[80, 95] = 80) -> Estimate:
    """The median of a band with the ends of its middle `level` %."""
    low, high = band.middle(level)
    return Estimate(band.median, low, high, 1, "fit", unit, level=level / 100)


PARTS = ("compute", "optimizer", "input", "host", "straggler", "exchange")
"""Parts of a projected step, in the order in which they are printed; they sum to the step in every draw. `compute` is
forward and backward, `host` all causes of the account that have no model (host, launch, throttling, memory,
rest)."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step, seconds."""

    name: str  # One of `PARTS`.
    seconds: Band


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Something to know beside a figure; it does not forbid it."""

    code: str  # F1, F2, ...
    text: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why nothing is said."""

    code: str = field(metadata=column("Code"))  # R1, R2, ...
    ranks: int | None = field(metadata=column("Ranks", text=lambda ranks: f"{ranks:,}", missing="all"))  # Of a target.
    text: str = field(metadata=column("Why", value=sentence))
    remedy: str = field(metadata=column("Remedy"))  # What would measure what is missing, or what to change.


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is projected of one rank count."""

    ranks: int
    nodes: int
    batch_per_rank: int | None
    doublings: float  # log2(ranks / ranks of the anchor).
    step: Band  # Seconds.
    throughput: Band | None  # Samples per second, all ranks; None: the batch is not known.
    efficiency: Band | None  # Share of the ideal, against the smallest measured point.
    parts: tuple[StepPart, ...]  # Empty: points only.
    model_error: Band  # Factor on the step (1) that the model's own error puts there.
    algorithms: tuple[str, ...]  # That may stand for a library's own all-reduce, in words.
    flags: tuple[Flag, ...]
    drawn: Any = field(default_factory=dict, repr=False, compare=False, metadata={HIDDEN: False})
    """By draw, arrays of shape (draws,): `step`, the model's `error` on it, and its parts. Empty: written by hand."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measured point as projected from the points below it."""

    ranks: int
    anchor_ranks: int
    doublings: float
    projected_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Projected over measured, less 1."""
        return self.projected_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The whole answer."""

    digest: str  # Of the ingredients.
    anchor_ranks: int
    anchor_nodes: int
    changes: tuple[str, ...]  # What `--set` and `--system` changed, in words.
    targets: tuple[Target, ...]
    refused: tuple[Refused, ...]
    held_out: tuple[HeldOut, ...]
    flags: tuple[Flag, ...]  # Of all targets.
    # rho of `step`, in the middle of its draws: factor on the network's costs.
    cost_scale: float = field(default=1.0, metadata={HIDDEN: False})


def counted(values: Sequence[int]) -> str:
    """Rank counts in words, e.g. `2, 4 and 8`."""
    texts = [f"{one:,}" for one in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
