"""`train.recompute`, `train.swap` and `train.memory`: which activations stay, and where the others are meanwhile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dlbench.specs.base import Flag, Form, FromText, Spec
from dlbench.specs.system import FolderOfNode
from dlbench.units import parse_bytes

Recompute = Literal["none", "blocks", "planned"]
Swap = Literal["none", "offload", "streamed", "planned"]


Capacity = Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z. ]*%?$"), Form("a size or a share, e.g. 8GiB or 50%")]


class MemorySpec(Spec):
    """What a plan of recomputing and swapping may use."""

    capacity: Capacity | None = Field(
        None,
        description="What a rank's training may hold on its device: parameters, gradients, optimizer state and "
        "activations, e.g. 8GiB, or a share of what it holds in core, e.g. 50%; for planned.",
    )
    blocks: Annotated[tuple[str, ...], FromText] = Field(
        (),
        description="Names of the modules with which blocks begin, as a list, or as text: layers.0,layers.8; none: the "
        "plan chooses (planned), or every module of the chain is a block (blocks, offload, streamed).",
    )
    swap_folder: FolderOfNode | None = Field(
        None,
        description="Folder of the swap file of a rank that trains on a CPU; none: system.storage.local. On a GPU "
        "tensors are swapped to page-locked host memory.",
    )
    verify: Flag = Field(
        False, description="Compare a checksum of every tensor that comes back with that of what went out."
    )

    @field_validator("capacity", mode="after")
    @classmethod
    def _capacity_can_be_read(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.endswith("%"):
            try:
                share = float(value[:-1])
            except ValueError:
                share = 0.0
            if not 0 < share <= 1000:
                raise ValueError(f"{value} is no share of what training holds in core; give one such as 50%")
            return value
        if parse_bytes(value) < 1:
            raise ValueError(f"{value}: must be more than no bytes")
        return value

    def capacity_bytes(self, in_core_bytes: int) -> int | None:
        """The capacity in bytes, where training holds `in_core_bytes` in core."""
        if self.capacity is None:
            return None
        if self.capacity.endswith("%"):
            return round(float(self.capacity[:-1]) / 100 * in_core_bytes)
        return parse_bytes(self.capacity)
