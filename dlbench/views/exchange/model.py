"""The report's plain data on the gradient exchange and on sweeps; see `model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a step; times in seconds since the start of the backward pass, None where not measured."""

    num_bytes: int
    num_tensors: int
    method: str
    ready_s: float | None
    start_s: float | None
    exchange_s: float | None


@dataclass(frozen=True, kw_only=True)
class Way:
    """What ran: not what was asked for."""

    carrier: str
    by: Literal["engine", "dlbench"]
    exchange: str
    fusion: str
    wire: str
    groups: str
    """In words: `2 groups of 4 ranks`."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How little communication could be exposed, by the overlap model."""

    line: str
    """The cost line, in words."""
    startup_s: float
    per_byte_s: float
    is_fitted: bool
    """Whether the line comes from the run's own messages instead of a measurement apart from them."""
    best_exposed: Estimate
    num_messages: Estimate
    """Of the best merging."""
    as_ran: Estimate | None
    """Exposed communication by the model for the messages as they were, to set beside the measured one."""
    compute_s: float
    """The baseline's mean step without exposed exchange, same samples a rank."""
    efficiency: Estimate
    """Attainable."""


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """The gradient exchange at one rank count; medians over runs."""

    ranks: int
    nodes: int
    ways: tuple[Way, ...]
    """One, unless runs of equal settings ran differently."""
    num_messages: Estimate | None
    message_bytes: Estimate | None
    """Gradients of all messages of a step."""
    bytes_inside: Estimate | None
    """Sent by a rank inside its group, each step."""
    bytes_across: Estimate | None
    communication: Estimate | None
    exposed: Estimate | None
    hidden: Estimate | None
    backward: Estimate | None
    wire_overflows: int
    density: Estimate | None
    dense_switches: int
    evidence: tuple[str, ...]
    window: str
    """Steps that were watched, in words."""
    efficiency: Estimate
    """Measured, of the scaling point."""
    prediction: Prediction | None
    why: str
    """Why there is no prediction; empty where there is one."""
    timeline: tuple[Message, ...]
    """Messages of the run in the middle, by communication time."""
    timeline_run: str
    timeline_backward_s: float | None
    run_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """Horovod's autotuner as a contestant."""

    num_runs: int
    num_finished: int
    """Runs in which it had settled before the measured steps."""
    planned_steps: int
    settled_step: float | None
    evaluations: float
    cost: Estimate | None
    chosen: tuple[str, ...]
    """In words, each choice once."""
    gain_s: float | None
    """Seconds a step against the baseline."""
    break_even_steps: float | None
    words: str
    """All that in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss after equal steps beside that with fp32 on the wire."""

    own: Estimate | None
    reference: Estimate | None
    reference_label: str
    difference: Estimate | None
    why: str
    """Why there is nothing to compare with; empty where there is."""


@dataclass(frozen=True, kw_only=True)
class SweepSetting:
    """One combination of the swept keys."""

    values: tuple[tuple[str, str], ...]
    """Key and value."""
    label: str
    """The values alone, in the order of the sweep's keys."""
    is_baseline: bool
    throughput: Estimate | None
    ratio: Estimate | None
    """To the baseline, in pairs of repeats."""
    adjusted_p: float | None
    verdict: str
    """baseline, faster, slower, equal, undecided, insufficient, no figure."""
    num_runs: int
    num_planned: int
    why: str
    """Why a run has no figure; empty where all have."""
    changes: tuple[str, ...]
    """What it computes otherwise than the baseline."""
    inert: tuple[str, ...]
    autotune: Autotune | None
    losses: Losses | None
    options: str
    """Exact options that ask for it."""
    run_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SweepLevel:
    """One value of an axis."""

    value: str
    effect: Estimate | None
    """Throughput over that of the first value, all else equal."""


@dataclass(frozen=True, kw_only=True)
class SweepAxis:
    """One swept key."""

    key: str
    levels: tuple[SweepLevel, ...]
    verdict: str
    """matters, no effect, undecided, insufficient."""
    words: str
    """The verdict in a sentence."""


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """All settings at one rank count."""

    ranks: int
    nodes: int
    conditions: str
    """Preset, precision and data in words."""
    baseline: str
    """What the settings are measured against, in words."""
    has_default: bool
    settings: tuple[SweepSetting, ...]
    axes: tuple[SweepAxis, ...]
    interaction: str
    """The check of additivity in a sentence; empty where it could not be made."""
    best: str
    """Label of the best setting; empty where none is better than the baseline for certain."""
    verdict: str
    """The finding in a few sentences."""
    advice: str
    """What to do next, in one sentence."""
    needed_repeats: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A swept series and its verdict."""

    id: str
    label: str
    series: str
    keys: tuple[str, ...]
    sample_unit: str
    headline: tuple[str, str]
    """The card's number and what it means, at the largest rank count."""
    verdict: str
    """Of the largest rank count."""
    cells: tuple[SweepCell, ...]
    idle: tuple[str, ...]
    """Rank counts at which no swept key acts, each a sentence."""
    caption: str
    """The conditions in one line."""
