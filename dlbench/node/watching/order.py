"""What the sampler of a node is told at its start: the first line on its standard input, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplerOrder:
    """One node's sampler."""

    run_id: str
    samples: str
    """Path of the file of samples, which does not exist yet."""
    clock: str
    """Path of `clock.json`."""
    node_rank: int
    num_nodes: int
    host: str
    token: str
    """The same on all nodes of one start of the run."""
    period_s: float
    max_bytes: int
    """Limit of the file of samples."""
    cores: tuple[int, ...]
    """Cores the sampler binds itself to; none: those it has."""
    interface: str | None
    """Network interface at which node 0 answers about its clock; none: the one that routes."""
    parent: int = 0
    """Number of the process that starts it and without which it ends; 0: it is not started directly."""

    def to_line(self) -> bytes:
        """The order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> SamplerOrder:
        """The order of a line.

        Raises:
            ValueError: not a line of `to_line`.
        """
        try:
            content: dict[str, Any] = json.loads(line)
            return cls(**{**content, "cores": tuple(content["cores"])})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"not a sampler's order: {error}") from None
