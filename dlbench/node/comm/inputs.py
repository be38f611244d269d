"""Inputs and expected results of a collective, which every rank computes without a message."""
# All inputs repeat one random pattern of entries of a small table, a different one on each rank. Entries are positive
# integers, so small that the sum over ranks is exact in any order (but see `Inputs.tolerance`).

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dlbench.perfmodels.schedules import all_to_all_block, block
from dlbench.specs.base import Precision
from dlbench.specs.comm import Collective

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EXACT: dict[Precision, int] = {"fp32": 2**24, "fp16": 2**11, "bf16": 2**8}  # Integers up to this are exact.

PATTERN_LENGTH = 1_048_573  # A prime, so that blocks of a vector do not begin at the start of the pattern.
ENTRIES = 1021
SEED = 20211

_LARGEST_ENTRY = 1000
_MAX_ROUNDING = 1 / 16
"""Largest relative rounding of sums of sums: shows one wrong contribution with up to 16 ranks, one wrong sum always."""


@dataclass(frozen=True)
class Expected:
    """The expected values of consecutive elements of the buffer."""

    at: int  # First element in the buffer.
    first: int  # First element of the input that they come from, which gives the offset in the pattern.
    count: int
    table: torch.Tensor  # Values by entry, float64, shape (ENTRIES,).


class Inputs:
    """The inputs and expected results of one collective."""

    def __init__(self, collective: Collective, rank: int, ranks: int, elements: int, dtype: Precision) -> None:
        self.collective = collective
        self.rank, self.ranks, self.elements = rank, ranks, elements
        self.dtype = dtype
        self._largest = max(2, min(_LARGEST_ENTRY, EXACT[dtype] // ranks))  # Largest entry; sums of it are exact.
        generator = torch.Generator().manual_seed(SEED)
        self.pattern = torch.randint(ENTRIES, (min(max(1, elements), PATTERN_LENGTH),), generator=generator)

    @property
    def is_sum(self) -> bool:
        return self.collective in ("allreduce", "reduce-scatter", "reduce")

    @property
    def tolerance(self) -> float:
        """Largest relative error of a correct result: 0 if sums are exact, otherwise ranks x the unit round-off u."""
        # (ranks - 1) u bounds a sum of ranks positive terms in any order (Higham, Accuracy and Stability of Numerical
        # Algorithms, section 4.2), and u the rounding of the inputs.
        if not self.is_sum or self.ranks * self._largest <= EXACT[self.dtype]:
            return 0.0
        return self.rounding

    @property
    def rounding(self) -> float:
        """Bound of the relative error of one sum over ranks that need not be exact."""
        return self.ranks / (2 * EXACT[self.dtype])

    @property
    def longest_chain(self) -> int | None:
        """Most sums back to back in one buffer (None: any) before its type overflows, or rounding hides a wrong sum."""
        if not self.is_sum or self.ranks == 1:
            return None
        largest_factor = torch.finfo(DTYPES[self.dtype]).max / self._largest
        return max(1, min(int(math.log(largest_factor) / math.log(self.ranks)), int(_MAX_ROUNDING / self.rounding)))

    def table(self, rank: int) -> torch.Tensor:
        """Returns a rank's entries, rounded to the type, in float64."""
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        entries = torch.randint(1, self._largest + 1, (ENTRIES,), generator=generator)
        return entries.to(DTYPES[self.dtype]).to(torch.float64)

    def source(self) -> torch.Tensor:
        vector = torch.empty(self.elements, dtype=DTYPES[self.dtype])
        pattern = self.table(self.rank).to(vector.dtype)[self.pattern]
        for at, low, high in self.pieces(0, self.elements):
            vector[at : at + high - low] = pattern[low:high]
        return vector

    def reset(self, data: torch.Tensor, source: torch.Tensor) -> None:
        """Sets `data` to the start of the collective; elements that it must write become NaN."""
        if self.is_sum or (self.collective in ("broadcast", "scatter") and self.rank == 0):
            data.copy_(source)
            return
        data.fill_(float("nan"))
        if self.collective in ("all-gather", "gather"):
            first, count = block(self.elements, self.ranks, self.rank)
            data[first : first + count] = source[first : first + count]

    def expected(self, chained: int = 1) -> list[Expected]:
        """Returns the expected result after `chained` operations, each on the result of the one before."""
        n, p, r = self.elements, self.ranks, self.rank
        if self.collective in ("gather", "reduce") and r > 0:
            return []  # the result is on rank 0
        if self.collective in ("all-gather", "gather"):
            parts = [block(n, p, i) for i in range(p)]
            return [Expected(first, first, count, self.table(i)) for i, (first, count) in enumerate(parts)]
        if self.collective == "all-to-all":
            pieces = [all_to_all_block(n, p, i, r) for i in range(p)]
            return [Expected(into, first, count, self.table(i)) for i, (first, into, count) in enumerate(pieces)]
        first, count = 0, n
        if self.collective in ("scatter", "reduce-scatter"):
            first, count = block(n, p, r)
        table = self.table(0)
        if self.is_sum:
            table = torch.stack([self.table(i) for i in range(p)]).sum(dim=0) * float(p) ** (chained - 1)
        return [Expected(first, first, count, table)]

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields pieces of the repeated pattern from element `first` on: offset, begin and end in the pattern."""
        length = len(self.pattern)
        done = 0
        while done < count:
            low = (first + done) % length
            high = min(length, low + count - done)
            yield done, low, high
            done += high - low


@dataclass(frozen=True, kw_only=True)
class ResultCheck:
    """The check of one rank's result."""

    max_error: float | None  # Largest relative error; None if an element is infinite or NaN.
    problem: str  # The error in words; empty if the result is correct.


def check(inputs: Inputs, data: torch.Tensor, chained: int = 1) -> ResultCheck:
    """Checks this rank's buffer after `chained` operations, each on the result of the one before."""
    tolerance = inputs.tolerance
    if chained > 1 and inputs.is_sum:
        tolerance = chained * inputs.rounding
    max_error: float | None = 0.0
    num_wrong = num_infinite = 0
    example = ""
    for part in inputs.expected(chained):
        for offset, low, high in inputs.pieces(part.first, part.count):
            at, expected = part.at + offset, part.table[inputs.pattern[low:high]]
            values = data[at : at + len(expected)].to(device="cpu", dtype=torch.float64)
            errors = (values - expected).abs() / expected
            is_wrong = ~(errors <= tolerance)  # also for NaN
            num_infinite += int(torch.isinf(values).sum())
            if not bool(torch.isfinite(values).all()):
                max_error = None
            elif max_error is not None:
                max_error = max(max_error, float(errors.max()))
            if bool(is_wrong.any()) and not example:
                index = int(is_wrong.nonzero()[0])
                example = f"element {at + index} is {float(values[index]):g} instead of {float(expected[index]):g}"
            num_wrong += int(is_wrong.sum())
    problem = ""
    if num_wrong:
        problem = f"{num_wrong} wrong elements of {inputs.elements}; {example}"
    if num_wrong and num_infinite and inputs.is_sum:
        largest = torch.finfo(DTYPES[inputs.dtype]).max
        problem = f"{inputs.dtype} overflow: {num_infinite} sums exceed its largest number, {largest:g}; {example}"
    return ResultCheck(max_error=max_error, problem=problem)
