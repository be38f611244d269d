"""The page cache as data.cache asks for it: emptied of the data set or filled with it, and what the kernel says then.

One process of each node acts, the others wait with it; what it did and found goes to all ranks, so that all of them
know what the record will say. The caches of file servers and of disks are out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

from dlbench.machine.page_cache import COLD_AT_MOST, DROP_CACHES, WARM_AT_LEAST, cached_pages, evict, fill
from dlbench.node.data.reading.trials import Ranks

_TURN_S = 5.0
"""After so long all ranks say that they are alive."""

_MORE_ATTEMPTS = 2

Wanted = Literal["any", "cold", "warm"]


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """What became of the page cache."""

    wanted: Wanted
    share: float | None
    """Of the data set's pages in the page cache: of the node that is farthest from what is wanted; None: unknown."""
    told: str
    in_force: bool
    known: bool = True
    """Whether that can be told; otherwise `in_force` is false."""


class NodeCache:
    """The page caches of all nodes, for one data set.

    Args:
        files: of the data set, as the ranks of this node read them; none where nothing is read from files.
        wanted: data.cache.
        acts: whether this rank acts for its node.
        ranks: all of them.
        beat: told that something moves.
        drop_caches: the kernel's file for dropping caches; None: where it has it.
    """

    def __init__(
        self,
        files: Sequence[Path],
        wanted: Wanted,
        *,
        acts: bool,
        ranks: Ranks,
        beat: Callable[[str], None],
        drop_caches: Path | None = None,
    ) -> None:
        self._files, self._wanted, self._acts, self._ranks, self._beat = files, wanted, acts, ranks, beat
        self._drop_caches = drop_caches or DROP_CACHES

    def settle(self) -> CacheState:
        """Empties or fills the cache as wanted, and looks; called by all ranks, with the same result on all."""
        state = self._try()
        for _ in range(_MORE_ATTEMPTS):
            # A page that some core holds in a list of its own is not evicted; the next time it is.
            if self._wanted != "cold" or state.in_force or state.share is None:
                break
            state = self._try()
        return state

    def _try(self) -> CacheState:
        told: list[str] = []
        if self._wanted == "cold":
            self._in_turns(evict(self._files, told, self._drop_caches), "emptying the page cache")
        elif self._wanted == "warm":
            self._in_turns(fill(self._files, told), "filling the page cache")
        seen = cached_pages(self._files) if self._acts and self._files else None
        mine = None if seen is None else [seen.share, seen.evidence, "; ".join(told)]
        everyone = [one for one in self._ranks.gather(mine) if one is not None]
        if not everyone:
            return CacheState(
                wanted=self._wanted,
                share=None,
                told="no file is read while training: the samples are in memory",
                in_force=self._wanted != "cold",
            )
        return _state(self._wanted, [(share, evidence, did) for share, evidence, did in everyone])

    def _in_turns(self, work: Iterator[None], what: str) -> None:
        """Goes through the work of the acting ranks, a few seconds at a time; no rank stands still for longer."""
        goes_on = self._acts and bool(self._files)
        while any(self._ranks.gather(goes_on)):
            deadline = monotonic() + _TURN_S
            while goes_on and monotonic() < deadline:
                goes_on = next(work, self) is not self
            self._beat(what)


def _state(wanted: Wanted, nodes: Sequence[tuple[float | None, str, str]]) -> CacheState:
    """Of share, evidence and deeds of each node."""
    shares = [share for share, _, _ in nodes if share is not None]
    known = len(shares) == len(nodes)
    worst = max(shares) if wanted == "cold" else min(shares, default=0.0)
    share = worst if known else None
    at = next((node for node in nodes if node[0] == share), nodes[0])
    if wanted == "any":
        in_force = True
    else:
        in_force = known and (worst <= COLD_AT_MOST if wanted == "cold" else worst >= WARM_AT_LEAST)
    seen = at[1] if share is None else f"{100 * share:.1f} % of its pages were cached ({at[1]})"
    deed = at[2] or "left as it was"
    where = f", the farthest of {len(nodes)} nodes" if len(nodes) > 1 else ""
    return CacheState(
        wanted=wanted, share=share, told=f"{deed}; {seen}{where}", in_force=in_force, known=known or wanted == "any"
    )
