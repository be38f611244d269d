"""All that a node tells while it trains: its GPUs by NVML, its cores, memory, networks, disks and energy.

`open_sources` gives one `Source` for the sampler of a node; it reads and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlbench.machine.gpu.nvml import open_nvml
from dlbench.machine.host import open_host
from dlbench.machine.source import Field, Source

__all__ = ["Field", "Source", "open_sources"]


def open_sources(root: Path = Path("/")) -> Source:
    """GPUs and host of this machine in one source; what it lacks is in `unavailable`, and is no error.

    Args:
        root: where the host's `proc` and `sys` are.
    """
    return _Together([open_nvml(), open_host(root)])


class _Together:
    """Several sources as one, their fields one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = tuple(parts)
        self.fields: tuple[Field, ...] = tuple(field for part in parts for field in part.fields)
        self.unavailable: dict[str, str] = {}
        for part in parts:
            self.unavailable |= part.unavailable

    def read(self, *, slow: bool) -> list[float]:
        return [value for part in self._parts for value in part.read(slow=slow)]

    @property
    def keep_up_s(self) -> float:
        return min(part.keep_up_s for part in self._parts)

    def keep_up(self) -> None:
        for part in self._parts:
            part.keep_up()

    def drain_failures(self) -> list[tuple[str, str]]:
        return [failure for part in self._parts for failure in part.drain_failures()]

    def describe(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        for part in self._parts:
            facts |= part.describe()
        return facts

    def close(self) -> None:
        for part in self._parts:
            part.close()
