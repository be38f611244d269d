"""Which gradients travel together, by which exchange and in which format: the axes of communication, one name each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dlbench.errors import UserError
from dlbench.specs.base import Bytes, Count, Ranks, Spec
from dlbench.units import parse_bytes

Exchange = Literal["flat", "hierarchical", "leader", "hybrid", "horovod-hierarchical", "horovod-torus", "none"]
Wire = Literal["fp32", "fp16", "bf16", "topk", "powersgd"]

GROUPED: tuple[Exchange, ...] = ("hierarchical", "leader", "hybrid")
"""Exchanges that treat the ranks of a group apart from the rest."""

DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
"""What `fusion: auto` collects where dlbench itself buckets; as large as PyTorch DDP's own bucket."""


MGWFBP_STEPS = 4
"""Warm-up steps that fusion mgwfbp needs before it can merge: one that sets things up, three that are watched."""


class SyncSpec(Spec):
    """How gradients are exchanged, beyond the settings of the engine; the defaults leave all to the engine."""

    exchange: Exchange = Field(
        "flat",
        description="flat: one all-reduce over all ranks. hierarchical: reduce-scatter in the group, all-reduce across "
        "groups for each local rank, all-gather in the group. leader: reduce to the group's first rank, all-reduce "
        "among these, broadcast. hybrid: hierarchical below a message size, flat from it on. horovod-hierarchical and "
        "horovod-torus: Horovod's own flags, which only its NCCL builds obey. none: no gradient is exchanged and ranks "
        "drift apart, only to see what the exchange costs.",
    )
    fusion: Annotated[str, Field(pattern=r"^(auto|backend|none|single|mgwfbp|size:[0-9A-Za-z. ]+)$")] = Field(
        "auto",
        description="backend: as Horovod or DDP group gradients. none: a message a tensor. single: one message, after "
        "the backward pass. size:BYTES: buckets of at least so much, e.g. size:25MiB. mgwfbp: merged so that, in the "
        "model of MG-WFBP, all are through earliest. auto: backend where the exchange is theirs, otherwise "
        "size:25MiB.",
    )
    wire: Wire = Field(
        "fp32",
        description="Format on the wire: fp32, fp16, bf16; topk: the largest entries with error feedback; powersgd: "
        "low rank (DDP's hook).",
    )
    topk_density: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        0.01, description="Share of a bucket's entries that wire topk sends."
    )
    powersgd_rank: Count = Field(1, description="Rank of wire powersgd's approximation.")
    group_size: Ranks | None = Field(None, description="Ranks of a group; none: the ranks of a node.")
    inside: Literal["backend", "shared-memory"] = Field(
        "backend",
        description="How ranks of a group exchange: by Horovod or DDP, or through memory they share (CPU).",
    )
    hybrid_threshold_bytes: Bytes | None = Field(
        None, description="Message size from which hybrid is flat, bytes; none: found from the fitted costs."
    )
    network: str | None = Field(
        None,
        min_length=1,
        description="File of fitted costs (dlbench comm fit) for mgwfbp and hybrid; none: measured at the start.",
    )

    @field_validator("fusion", mode="after")
    @classmethod
    def _size_is_one(cls, value: str) -> str:
        if value.startswith("size:"):
            try:
                size = parse_bytes(value.removeprefix("size:"))
            except UserError as error:
                raise ValueError(str(error)) from None
            if size < 1:
                raise ValueError("a bucket holds at least a byte: size:25MiB")
        return value

    @property
    def is_own(self) -> bool:
        """Whether dlbench itself groups and exchanges gradients, and the engine only carries the messages."""
        return (
            self.exchange in GROUPED
            or self.fusion not in ("auto", "backend")
            or self.wire == "topk"
            or self.inside == "shared-memory"
        )

    @property
    def fusion_in_force(self) -> str:
        """`fusion` with `auto` decided."""
        if self.fusion != "auto":
            return self.fusion
        return f"size:{DEFAULT_BUCKET_BYTES}" if self.is_own else "backend"

    @property
    def bucket_bytes(self) -> int | None:
        """Least size of a bucket, bytes; None where the fusion is not by size."""
        fusion = self.fusion_in_force
        return parse_bytes(fusion.removeprefix("size:")) if fusion.startswith("size:") else None


def layout_problem(sync: SyncSpec, *, engine: str, ranks: int, nodes: int) -> str | None:
    """Why these settings cannot act on this layout, in one sentence with what would be right; None if they can.

    One rank is no problem: it is the baseline of a series, and exchanges nothing whatever is asked.
    """
    if ranks == 1:
        return None
    if sync.exchange == "none":
        return _apart_problem(sync)
    group = sync.group_size or ranks // nodes
    if sync.exchange in GROUPED or sync.group_size is not None:
        if (ranks // nodes) % group:
            return f"sync.group_size: groups of {group} do not divide the {ranks // nodes} ranks of a node"
        if group == 1 or group == ranks:
            return (
                f"sync.exchange {sync.exchange}: needs two groups of two ranks or more, here are {ranks // group} of "
                f"{group}; use more nodes or ranks per node, or set sync.group_size"
            )
    if sync.inside == "shared-memory" and sync.exchange == "flat" and nodes > 1:
        return "sync.inside shared-memory: ranks of several nodes share no memory; use exchange hierarchical or leader"
    return _engine_problem(sync, engine)


def _apart_problem(sync: SyncSpec) -> str | None:
    for key in ("fusion", "wire", "inside", "group_size"):
        if getattr(sync, key) != SyncSpec.model_fields[key].default:
            return f"sync.exchange none: no gradient is exchanged, so that sync.{key} has no effect; leave it out"
    return None


def _engine_problem(sync: SyncSpec, engine: str) -> str | None:
    if sync.exchange.startswith("horovod-"):
        if engine != "horovod":
            return f"sync.exchange {sync.exchange}: is a flag of Horovod; use --engine horovod"
        if sync.is_own:
            return f"sync.exchange {sync.exchange}: Horovod groups and exchanges here; leave sync.fusion and wire to it"
    if sync.fusion == "backend" and sync.is_own:
        return "sync.fusion backend: is not possible where dlbench exchanges; use none, single, size:25MiB or mgwfbp"
    if sync.wire == "bf16" and engine == "horovod":
        return "sync.wire bf16: Horovod has no bfloat16; use fp16, or --engine ddp"
    if sync.wire == "powersgd" and (engine != "ddp" or sync.is_own or sync.exchange != "flat"):
        return "sync.wire powersgd: is a hook of DDP; use --engine ddp with sync.exchange flat and sync.fusion backend"
    if sync.wire == "topk" and sync.exchange != "flat":
        return "sync.wire topk: sparse messages go flat only; use sync.exchange flat"
    if sync.wire == "topk" and sync.inside == "shared-memory":
        return "sync.wire topk: sparse messages do not go through shared memory; use sync.inside backend"
    return None
