"""What every rank puts in, and what must come out: known on every rank without a message.

All inputs repeat one random pattern of entries of a small table; each rank has a table of its own, so the sum of all
ranks' inputs repeats the same pattern of the sum of the tables. That is cheap for any size, and nothing cancels. Sums
back to back in one buffer sum sums: after n of them it holds the total times ranks^(n - 1).

Entries are whole numbers from 1, so small that the sum of all ranks still is an exact number of the type: then sums
are exact in any order, and every difference is a mistake. fp32 holds whole numbers up to 2^24 exactly, fp16 up to 2^11,
bf16 up to 2^8. Only with more ranks than half of that must rounding be allowed; see `Inputs.tolerance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dlbench.perfmodels.schedules import all_to_all_block, block
from dlbench.specs.base import Precision
from dlbench.specs.comm import Collective

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EXACT: dict[Precision, int] = {"fp32": 2**24, "fp16": 2**11, "bf16": 2**8}  # Whole numbers up to here are exact.

PATTERN_LENGTH = 1_048_573  # A prime, so that no block of a vector begins where the pattern does.
ENTRIES = 1021
SEED = 20211

_LARGEST_ENTRY = 1000
_LOOSEST = 1 / 16
"""Rounding that the result of sums of sums may have, relative: one contribution too many or too few is seen with up to
16 ranks, one sum too many or too few with any number."""


@dataclass(frozen=True)
class Expected:
    """What a run of elements must hold."""

    at: int  # First element, in the buffer.
    first: int  # First element of the input that it comes from: where in the pattern it begins.
    count: int
    table: torch.Tensor  # float64, `ENTRIES`.


class Inputs:
    """Inputs and results of one collective."""

    def __init__(self, collective: Collective, rank: int, ranks: int, elements: int, dtype: Precision) -> None:
        self.collective = collective
        self.rank, self.ranks, self.elements = rank, ranks, elements
        self.dtype = dtype
        self._largest = max(2, min(_LARGEST_ENTRY, EXACT[dtype] // ranks))  # Entry with which sums are exact.
        generator = torch.Generator().manual_seed(SEED)
        self._pattern = torch.randint(ENTRIES, (min(max(1, elements), PATTERN_LENGTH),), generator=generator)

    @property
    def is_sum(self) -> bool:
        return self.collective in ("allreduce", "reduce-scatter", "reduce")

    @property
    def tolerance(self) -> float:
        """Largest relative error of a right result.

        0 where sums are exact. Otherwise ranks x u, u the type's unit round-off: (ranks - 1) u bounds a sum of this
        many positive terms in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), and u
        its rounding of the inputs.
        """
        if not self.is_sum or self.ranks * self._largest <= EXACT[self.dtype]:
            return 0.0
        return self.rounding

    @property
    def rounding(self) -> float:
        """Bound of the relative error of one sum over ranks that need not be exact."""
        return self.ranks / (2 * EXACT[self.dtype])

    @property
    def longest_chain(self) -> int | None:
        """Most sums back to back in one buffer, 1 or more: what more would make could not be distinguished from a wrong
        result. Limits are the largest number of the type and the rounding of all of them. None: any number.
        """
        if not self.is_sum or self.ranks == 1:
            return None
        room = torch.finfo(DTYPES[self.dtype]).max / self._largest
        return max(1, min(int(math.log(room) / math.log(self.ranks)), int(_LOOSEST / self.rounding)))

    def table(self, rank: int) -> torch.Tensor:
        """A rank's entries, float64, as they are in the type."""
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        entries = torch.randint(1, self._largest + 1, (ENTRIES,), generator=generator)
        return entries.to(DTYPES[self.dtype]).to(torch.float64)

    def given(self) -> torch.Tensor:
        result = torch.empty(self.elements, dtype=DTYPES[self.dtype])
        pattern = self.table(self.rank).to(result.dtype)[self._pattern]
        for at, low, high in self._pieces(0, self.elements):
            result[at : at + high - low] = pattern[low:high]
        return result

    def reset(self, data: torch.Tensor, given: torch.Tensor) -> None:
        """Makes `data` what the collective starts from; elements that it must fill are not numbers."""
        if self.is_sum or (self.collective in ("broadcast", "scatter") and self.rank == 0):
            data.copy_(given)
            return
        data.fill_(float("nan"))
        if self.collective in ("all-gather", "gather"):
            first, count = block(self.elements, self.ranks, self.rank)
            data[first : first + count] = given[first : first + count]

    def expected(self, chained: int = 1) -> list[Expected]:
        """What must be where in the end: after this many operations, each on the result of the one before."""
        n, p, r = self.elements, self.ranks, self.rank
        if self.collective in ("gather", "reduce") and r > 0:
            return []  # The result is on rank 0.
        if self.collective in ("broadcast", "scatter"):
            first, count = (0, n) if self.collective == "broadcast" else block(n, p, r)
            return [Expected(first, first, count, self.table(0))]
        if self.collective in ("all-gather", "gather"):
            parts = [block(n, p, i) for i in range(p)]
            return [Expected(first, first, count, self.table(i)) for i, (first, count) in enumerate(parts)]
        if self.collective == "all-to-all":
            pieces = [all_to_all_block(n, p, i, r) for i in range(p)]
            return [Expected(into, first, count, self.table(i)) for i, (first, into, count) in enumerate(pieces)]
        total = torch.stack([self.table(i) for i in range(p)]).sum(dim=0) * float(p) ** (chained - 1)
        first, count = block(n, p, r) if self.collective == "reduce-scatter" else (0, n)
        return [Expected(first, first, count, total)]

    def wanted(self, part: Expected) -> Iterator[tuple[int, torch.Tensor]]:
        """What a run of elements must hold, in float64 and in pieces: first element in the buffer, values."""
        for at, low, high in self._pieces(part.first, part.count):
            yield part.at + at, part.table[self._pattern[low:high]]

    def _pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Elements first, first + 1, ... of the repeated pattern: offset, and from where to where in the pattern."""
        length = len(self._pattern)
        done = 0
        while done < count:
            low = (first + done) % length
            high = min(length, low + count - done)
            yield done, low, high
            done += high - low


@dataclass(frozen=True, kw_only=True)
class ResultCheck:
    """On one rank's result."""

    max_error: float | None  # Largest relative error; None where an element is not a number.
    problem: str  # What is wrong, in words; empty if nothing is.


def check(inputs: Inputs, data: torch.Tensor, chained: int = 1) -> ResultCheck:
    """The verdict on this rank's buffer after `chained` operations, each on the result of the one before."""
    tolerance = inputs.tolerance
    if chained > 1 and inputs.is_sum:
        tolerance = chained * inputs.rounding
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
    problem = f"{wrong} wrong elements of {inputs.elements}; {example}" if wrong else ""
    if wrong and infinite and inputs.is_sum:
        largest = torch.finfo(DTYPES[inputs.dtype]).max
        problem = f"{inputs.dtype} overflow: {infinite} sums exceed its largest number, {largest:g}; {example}"
    return ResultCheck(max_error=max_error, problem=problem)
