"""What a reader of a trace must know beside the events: files that are damaged, things that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from dlbench.errors import IncompleteDataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Rows = npt.NDArray[np.void]

T = TypeVar("T")


@dataclass(kw_only=True)
class Notes:
    """Collected while a run is read; can be sent to other processes."""

    problems: dict[str, None] = field(default_factory=dict)
    """Missing or damaged data, a sentence each, in the order in which they were met."""
    counts: Counter[str] = field(default_factory=Counter)
    """Things to know, a sentence each that goes on after a number."""
    num_events: int = 0

    def problem(self, text: str) -> None:
        """Something is missing or damaged; the same text counts once."""
        self.problems.setdefault(text)

    def count(self, what: str, number: int) -> None:
        """Something happened so often; nothing is noted for zero."""
        if number:
            self.counts[what] += number

    def torn(self, num_bytes: int) -> None:
        """A file was read that ends with so many bytes of a block that is not whole."""
        self.count("files end in the middle of a block, as who wrote them was killed", int(num_bytes > 0))

    def add(self, other: Notes) -> None:
        """What another reader met."""
        self.problems.update(other.problems)
        self.counts.update(other.counts)
        self.num_events += other.num_events

    @property
    def sentences(self) -> list[str]:
        """The counts in words."""
        return [f"{number} {what}" for what, number in sorted(self.counts.items())]

    def guarded(self, items: Iterator[T]) -> Iterator[T]:
        """The items up to where a file is damaged, which is noted."""
        try:
            yield from items
        except IncompleteDataError as error:
            self.problem(str(error))


def merged(blocks: Iterator[Rows], num_rows: int) -> Iterator[Rows]:
    """The same rows in arrays of at least `num_rows`, but for the last; many small arrays would cost more time."""
    import numpy as np

    held: list[Rows] = []
    count = 0
    try:
        for block in blocks:
            held.append(block)
            count += len(block)
            if count >= num_rows:
                yield np.concatenate(held)
                held, count = [], 0
    except IncompleteDataError:
        # What came before the damage is good.
        if held:
            yield np.concatenate(held)
        raise
    if held:
        yield np.concatenate(held)


def clean(text: str) -> str:
    """A name from outside, without control characters and halves of characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
