"""One planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.slurm_faults.cluster import Stage


@dataclass(frozen=True)
class Fault:
    """What is planted, in words; what plants it, looks, and returns the line that told; seconds that it may take."""

    name: str
    plant: Callable[[Stage], str]
    limit_s: float
