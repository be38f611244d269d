"""Sizes of the collective benchmark, as text: a range, spaced evenly in the logarithm, or a list."""

from __future__ import annotations

import re

from dlbench.errors import UserError
from dlbench.specs.base import Precision
from dlbench.specs.collectives.plan import ELEMENT_BYTES
from dlbench.units import parse_bytes

STEP = 4
"""Factor between two sizes of a range that names no count."""

MAX_COUNT = 1000
MAX_BYTES = 2**44
"""More than any rank holds: such a size is a slip of the unit."""


def parse_sizes(text: str, dtype: Precision) -> tuple[int, ...]:
    """`LOW:HIGH` (factor 4, the last step shorter), `LOW:HIGH:COUNT` (evenly spaced in the logarithm), or `A,B,C`.

    Sizes between the ends of a range with a count are rounded down to whole elements.

    Returns:
        Sizes in bytes, ascending, each once.

    Raises:
        UserError: a malformed size or range, 0 bytes, a size that is no whole number of elements.
    """
    shown = f"--sizes {text[:80]!r}"
    parts = text.split(":")
    if len(parts) == 1:
        sizes = [_size(part, dtype) for part in text.split(",")]
        if len(set(sizes)) != len(sizes):
            raise UserError(f"{shown}: a size is given twice")
        return tuple(sorted(sizes))
    if len(parts) > 3:
        raise UserError(f"{shown}: must be LOW:HIGH, LOW:HIGH:COUNT or A,B,C, e.g. 1KiB:64MiB")
    low, high = _size(parts[0], dtype), _size(parts[1], dtype)
    if low >= high:
        raise UserError(f"{shown}: a range must begin below its end")
    if len(parts) == 2:
        return _by_steps(low, high)
    count = int(parts[2]) if re.fullmatch(r"[0-9]{1,9}", parts[2]) else 0
    if not 2 <= count <= MAX_COUNT:
        raise UserError(f"{shown}: the count must be a whole number from 2 to {MAX_COUNT}")
    width = ELEMENT_BYTES[dtype]
    between = (int(low * (high / low) ** (i / (count - 1))) // width * width for i in range(1, count - 1))
    spaced = (low, *between, high)
    if len(set(spaced)) != count:
        raise UserError(f"{shown}: holds fewer than {count} sizes of whole {dtype} elements")
    return spaced


def _by_steps(low: int, high: int) -> tuple[int, ...]:
    made = []
    while low < high:
        made.append(low)
        low *= STEP
    return (*made, high)


def _size(text: str, dtype: Precision) -> int:
    try:
        size = parse_bytes(text)
    except OverflowError:
        size = MAX_BYTES + 1
    except ValueError as error:
        raise UserError(f"--sizes: {error}") from None
    width = ELEMENT_BYTES[dtype]
    if size == 0:
        raise UserError("--sizes: a message of 0 bytes has nothing to carry; give one element or more")
    if size > MAX_BYTES:
        raise UserError(f"--sizes: {text[:40]!r} is more than a rank can hold")
    if size % width:
        raise UserError(f"--sizes: {size} bytes are no whole number of {dtype} elements of {width} bytes")
    return size
