"""The result of a projection: step, throughput and efficiency of each target with bands, or the refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.lazy import Array, np
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import column
from dlbench.report.wording import sentence
from dlbench.stats.estimates import Estimate
from dlbench.units import and_text

QUANTILES = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975)
"""Quantiles of a band: ends of the middle 95, 90, 80 and 50 % of the draws, and their median."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A projected figure: quantiles of its draws."""

    quantiles: tuple[float, ...]  # By `QUANTILES`.

    @classmethod
    def of(cls, draws: Array) -> Band:
        return cls(quantiles=tuple(float(quantile) for quantile in np.quantile(draws, QUANTILES)))

    @property
    def median(self) -> float:
        return self.quantiles[QUANTILES.index(0.5)]

    def middle(self, percent: Literal[50, 80, 90, 95]) -> tuple[float, float]:
        index = {95: 0, 90: 1, 80: 2, 50: 3}[percent]
        return self.quantiles[index], self.quantiles[-1 - index]


def figure(band: Band, unit: str, level: Literal[80, 95] = 80) -> Estimate:
    """Returns the median of a band with the ends of its middle `level` %."""
    low, high = band.middle(level)
    return Estimate(band.median, low, high, 1, "fit", unit, level=level / 100)


PARTS = ("compute", "optimizer", "input", "host", "straggler", "exchange")
"""Parts of a projected step in the order of printing; they sum to the step in every draw. `compute` is forward and
backward, `host` all causes that have no model (host, launch, throttling, memory, rest)."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step, seconds."""

    name: str  # One of `PARTS`.
    seconds: Band


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A warning on a projected figure."""

    code: str  # F1, F2, ...
    text: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The reason why a target, or all, are not projected."""

    code: str = field(metadata=column("Code"))  # R1, R2, ...
    ranks: int | None = field(metadata=column("Ranks", text="{:,}".format, missing="all"))  # None: all targets.
    text: str = field(metadata=column("Why", value=sentence))
    remedy: str = field(metadata=column("Remedy"))  # What to measure or to change.


@dataclass(frozen=True, kw_only=True)
class Target:
    """The projection of one rank count."""

    ranks: int
    nodes: int
    batch_per_rank: int | None
    doublings: float  # log2(ranks / ranks of the anchor).
    step: Band  # Seconds.
    throughput: Band | None  # Samples per second, all ranks; None: the batch is not known.
    efficiency: Band | None  # Share of the ideal, against the smallest measured point.
    parts: tuple[StepPart, ...]  # Empty for points only.
    model_error: Band  # Factor on the step by the error of the model.
    algorithms: tuple[str, ...]  # Algorithms that the library may use, in words.
    flags: tuple[Flag, ...]
    drawn: Any = field(default_factory=dict, repr=False, compare=False, metadata={HIDDEN: False})
    """Arrays of shape (draws,): `step`, the model's `error` on it, and its parts; empty if written by hand."""

    @property
    def flag_codes(self) -> str | None:
        return " ".join(flag.code for flag in self.flags) or None


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measured point, projected from the points below it."""

    ranks: int
    anchor_ranks: int
    doublings: float
    projected_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.projected_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A projection of all targets."""

    digest: str  # Digest of the ingredients.
    anchor_ranks: int
    anchor_nodes: int
    changes: tuple[str, ...]  # Changes by `--set` and `--system`, in words.
    targets: tuple[Target, ...]
    refused: tuple[Refused, ...]
    held_out: tuple[HeldOut, ...]
    flags: tuple[Flag, ...]  # Flags of all targets.
    # Median of rho of `step`, the factor on the network's costs.
    cost_scale: float = field(default=1.0, metadata={HIDDEN: False})


def counts_text(values: Sequence[int]) -> str:
    """Returns rank counts in words, e.g. `2, 4 and 8`."""
    return and_text([f"{value:,}" for value in values])
