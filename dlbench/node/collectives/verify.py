"""Holds what a collective left against what it should have left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dlbench.node.collectives.inputs import DTYPES, Inputs


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """On one rank's result."""

    max_error: float | None
    """Largest relative error; None where an element is not a number."""
    problem: str
    """What is wrong, in words; empty if nothing is."""

    @property
    def is_right(self) -> bool:
        """Whether the result is right."""
        return not self.problem


def check(inputs: Inputs, data: torch.Tensor, chained: int = 1) -> Verdict:
    """The verdict on this rank's buffer after the collective.

    Args:
        inputs: what was put in.
        data: `elements` of the type.
        chained: operations since, each on the result of the one before.
    """
    tolerance = inputs.tolerance_of(chained)
    worst, wrong, infinite = 0.0, 0, 0
    example = ""
    for part in inputs.expected(chained):
        for at, want in inputs.wanted(part):
            got = data[at : at + len(want)].to(device="cpu", dtype=torch.float64)
            error = (got - want).abs() / want
            bad = ~(error <= tolerance)  # so that what is not a number counts
            infinite += int(torch.isinf(got).sum())
            finite = error[torch.isfinite(error)]
            worst = max(worst, float(finite.max()) if len(finite) else 0.0)
            count = int(bad.sum())
            if count and not example:
                index = int(bad.nonzero()[0])
                example = f"element {at + index} is {float(got[index]):g} instead of {float(want[index]):g}"
            wrong += count
            if not bool(torch.isfinite(got).all()):
                worst = math.inf
    max_error = worst if math.isfinite(worst) else None
    if not wrong:
        return Verdict(max_error=max_error, problem="")
    if infinite and inputs.is_sum:
        largest = torch.finfo(DTYPES[inputs.dtype]).max
        return Verdict(
            max_error=max_error,
            problem=f"{inputs.dtype} overflow: {infinite} sums exceed its largest number, {largest:g}; {example}",
        )
    return Verdict(max_error=max_error, problem=f"{wrong} wrong elements of {inputs.elements}; {example}")
