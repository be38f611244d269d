"""A published table of learning rates: a row for each global batch that somebody trained to the target with.

Rules that scale a rate with the batch hold up to some batch and not beyond it (Goyal et al. 2017, figure 1; You et al.
2017, table 2). A table has what was found to work: its rows are used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Fraction, NonNegative, Positive, Spec


class RatePoint(Spec):
    """One row: the rate of a global batch, and what else differs there. Steps are those of the row's batch."""

    batch: Count = Field(description="Global batch, samples.")
    learning_rate: Positive = Field(description="Peak learning rate at it.")
    warmup_steps: CountOrZero | None = Field(None, description="Replaces schedule.warmup_steps.")
    warmup_epochs: Positive | None = Field(None, description="Replaces schedule.warmup_epochs.")
    total_steps: Count | None = Field(None, description="Replaces schedule.total_steps.")
    total_epochs: Positive | None = Field(None, description="Replaces schedule.total_epochs.")
    momentum: Fraction | None = Field(None, description="Replaces momentum.")
    betas: tuple[Fraction, Fraction] | None = Field(None, description="Replaces betas.")
    weight_decay: NonNegative | None = Field(None, description="Replaces weight_decay.")


Where = Literal["row", "below", "between", "beyond"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a global batch lies in a table."""

    where: Where
    row: RatePoint
    """That batch's row, else the nearest below it; below the first row, the first."""
    above: RatePoint | None
    """The next row, where the batch lies between two."""
    learning_rate: float
    """As the table has it; see `place_in`."""


def place_in(table: Sequence[RatePoint], batch: int, *, below: Literal["linear", "sqrt"]) -> Place:
    """The rate of a global batch.

    A row's batch has the row's rate. Between two rows the rate is interpolated linearly in the batch, so it never
    leaves what was published on either side, and the rest is the lower row's. Below the first row the rate is scaled
    down from it. Beyond the last one it is the last row's: no published rule holds there.

    Args:
        table: rows, batches ascending.
        batch: samples of one step over all ranks.
        below: how rates are scaled below the first row: linear (Goyal et al. 2017, section 2.1) or with the square
            root (You et al. 2019, section 4, for LAMB).
    """
    first, last = table[0], table[-1]
    for row in table:
        if row.batch == batch:
            return Place(where="row", row=row, above=None, learning_rate=row.learning_rate)
    if batch < first.batch:
        ratio = batch / first.batch
        rate = first.learning_rate * (ratio if below == "linear" else math.sqrt(ratio))
        return Place(where="below", row=first, above=None, learning_rate=rate)
    for row, above in pairwise(table):
        if row.batch < batch < above.batch:
            share = (batch - row.batch) / (above.batch - row.batch)
            rate = row.learning_rate + (above.learning_rate - row.learning_rate) * share
            return Place(where="between", row=row, above=above, learning_rate=rate)
    return Place(where="beyond", row=last, above=None, learning_rate=last.learning_rate)


def table_problem(table: Sequence[RatePoint], reference_batch: int | None) -> str | None:
    """What is wrong with a table, in one sentence; None if nothing is."""
    batches = [row.batch for row in table]
    if not batches:
        return "learning_rate_scaling table needs learning_rate_table"
    if batches != sorted(set(batches)):
        return "the batches of learning_rate_table must ascend"
    if reference_batch is not None and reference_batch not in batches:
        return f"reference_batch {reference_batch} is no row of learning_rate_table"
    for row in table:
        for steps, epochs in (("warmup_steps", "warmup_epochs"), ("total_steps", "total_epochs")):
            if getattr(row, steps) is not None and getattr(row, epochs) is not None:
                return f"{steps} and {epochs} exclude each other (row {row.batch} of learning_rate_table)"
    return None
