"""Settings of the gradient exchange: fusion, algorithm and wire format."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from dlbench.specs.base import MAX_COUNT, ActsIf, Bytes, Count, CountOrZero, Flag, Ranks, Spec
from dlbench.units import counted, exact_bytes, format_bytes, parse_bytes

Exchange = Literal["flat", "hierarchical", "leader", "hybrid", "horovod-hierarchical", "horovod-torus", "none"]
Wire = Literal["fp32", "fp16", "bf16", "int8", "topk", "powersgd"]
ERROR_FEEDBACK: tuple[Wire, ...] = ("int8", "topk", "powersgd")  # These add unsent values to the next gradients.
OWN_WIRES: tuple[Wire, ...] = ("int8", "topk")  # Formats of dlbench's own messages.
INT8_BLOCK = 4096  # Most values with one fp32 scale in wire int8, which add 0.1 % to the bytes.
GROUPED: tuple[Exchange, ...] = ("hierarchical", "leader", "hybrid")  # In two levels: within groups, and across.
NOT_OWN: tuple[Exchange, ...] = ("flat", "horovod-hierarchical", "horovod-torus", "none")
"""Exchanges of the engine's library, and none; all others consist of dlbench's own messages."""
UNEXCHANGED = "with sync.exchange none, or sync.average_every from the first update on, no gradient is exchanged"
MGWFBP_STEPS = 4  # Warm-up steps of own:mgwfbp before it merges: one for set-up, three observed.

_RULE_WORDS = {"none": "own message per tensor", "single": "own single message", "mgwfbp": "own buckets by MG-WFBP"}
OWN_AUTO = "own:25MiB"  # Meaning of `auto` if dlbench exchanges: the size of DDP's buckets.
_LEAST_FUSION = 1024  # Bytes; a smaller number is probably in MiB without its unit, as in DDP's bucket_cap_mb.
_FORMER = {"backend": "auto", "single": "own:single", "mgwfbp": "own:mgwfbp"}


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A rule for joining gradients into messages, and who applies it; plans and records store its text."""

    by: Literal["library", "dlbench"]
    rule: Literal["auto", "none", "size", "single", "mgwfbp"]
    bytes: int | None = None  # For rule `size`: the message size; the minimum size if dlbench joins.

    def __str__(self) -> str:
        prefix = "" if self.by == "library" else "own:"
        size = self.rule if self.bytes is None else exact_bytes(self.bytes)
        return f"{prefix}{size}"

    @property
    def words(self) -> str:
        """Returns how dlbench groups gradients, e.g. `own buckets of 64 MiB`."""
        return _RULE_WORDS.get(self.rule) or f"own buckets of {format_bytes(self.bytes or 0)}"


AUTO, UNFUSED = Fusion(by="library", rule="auto"), Fusion(by="library", rule="none")
OWN_NONE, OWN_SINGLE = Fusion(by="dlbench", rule="none"), Fusion(by="dlbench", rule="single")
OWN_MGWFBP = Fusion(by="dlbench", rule="mgwfbp")
_BY_NAME = {str(fusion): fusion for fusion in (AUTO, UNFUSED, OWN_NONE, OWN_SINGLE, OWN_MGWFBP)}


def read_fusion(value: object) -> Fusion:
    """Parses a fusion; 67108864, 65536KiB and 64MiB are the same size. Raises `ValueError`."""
    if isinstance(value, Fusion):
        return value
    text = str(value)
    if text in _BY_NAME:
        return _BY_NAME[text]
    if text in _FORMER:
        raise ValueError(f"{text} was renamed to {_FORMER[text]}")
    prefix = "own:" if text.startswith("own:") else ""
    size = text.removeprefix(prefix).removeprefix("size:")
    num_bytes = -1
    if not isinstance(value, bool | float):
        with contextlib.suppress(ValueError):
            num_bytes = parse_bytes(size)
    if not 0 <= num_bytes <= MAX_COUNT:
        raise ValueError(
            "must be auto, none, or a size such as 64MiB for the fusion of Horovod or DDP; or dlbench's own buckets: "
            f"own:64MiB, own:none, own:single or own:mgwfbp; got {value!r}"
        )
    if num_bytes == 0:
        raise ValueError(f"fusion is switched off by {prefix}none, not by {text}")
    if text.startswith("size:"):
        raise ValueError(f"dlbench's own buckets are written own:{size}; {size} is the fusion of Horovod or DDP")
    if num_bytes < _LEAST_FUSION:
        raise ValueError(f"{text} is {counted(num_bytes, 'byte')}: write {prefix}{num_bytes}MiB (minimum: 1KiB)")
    by: Literal["library", "dlbench"] = "dlbench" if prefix else "library"
    return Fusion(by=by, rule="size", bytes=num_bytes)


FusionSetting = Annotated[
    Fusion, PlainValidator(read_fusion), PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})
]


class SyncSpec(Spec):
    """Settings of the gradient exchange; by default the engine's library does everything."""

    acting = (
        ActsIf("fusion", "engine.autotunes", False, why="engine.horovod.autotune tunes fusion and cycle time"),
        ActsIf("fusion wire", "sync.exchanges_gradients", why=UNEXCHANGED),
        ActsIf("average_from average_momentum", "sync.averages", why="only sync.average_every reads it"),
        ActsIf("average_momentum", "recipe.optimizer.slots", why="sgd without momentum has no state to average"),
        ActsIf("topk_density", "sync.wire", "topk", why="only sync.wire topk reads it"),
        ActsIf("powersgd_rank", "sync.wire", "powersgd", why="only sync.wire powersgd reads it"),
        ActsIf("hybrid_threshold_bytes", "sync.exchange", "hybrid", why="only sync.exchange hybrid reads it"),
        ActsIf("group_size", "sync.exchange", *GROUPED, why="exchanges hierarchical, leader and hybrid have groups"),
        ActsIf("network", "sync.needs_costs", why="only sync.fusion own:mgwfbp and hybrid without a threshold read it"),
    )

    exchange: Exchange = Field(
        "flat",
        description="flat: one all-reduce over all ranks. hierarchical: reduce-scatter in the group, all-reduce across "
        "groups for each local rank, all-gather in the group. leader: reduce to the group's first rank, all-reduce "
        "among the first ranks, broadcast. hybrid: hierarchical for messages below a size, flat for larger ones. "
        "horovod-hierarchical and horovod-torus: Horovod's flags, which only NCCL builds support. none: no gradients "
        "are exchanged and ranks diverge; only to measure what the exchange costs.",
    )
    fusion: FusionSetting = Field(
        AUTO,
        json_schema_extra={"default": str(AUTO)},
        description="Tensor fusion of Horovod or DDP, as a size such as 64MiB (HOROVOD_FUSION_THRESHOLD, "
        "bucket_cap_mb). none: off. auto: the library's default (Horovod 128MiB; DDP 25MiB, after a first bucket of "
        "1MiB); own:25MiB if dlbench exchanges the gradients itself. own:64MiB: buckets of dlbench of at least this "
        "size. own:none: one message per tensor. own:single: one message after the backward pass. own:mgwfbp: tensors "
        "are merged so that, in the model of MG-WFBP, the exchange ends earliest.",
    )
    wire: Wire = Field(
        "fp32",
        description="fp32, fp16, bf16; with error feedback: int8 (8 bits, a scale per block), topk (only the largest "
        "entries); powersgd: low rank (DDP's hook).",
    )
    topk_density: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(0.01, description="Share of entries (topk).")
    powersgd_rank: Count = Field(1, description="Rank of the approximation of powersgd.")
    group_size: Ranks | None = Field(None, description="Ranks per group; none: the ranks of a node.")
    hybrid_threshold_bytes: Bytes | None = Field(None, description="Size from which hybrid is flat; none: computed.")
    network: str | None = Field(None, min_length=1, description="File of costs for own:mgwfbp, hybrid; none: measured.")

    average_every: Count | None = Field(
        None,
        description="Local SGD: ranks update independently and average their parameters every this many updates; with "
        "exchange hierarchical, gradients are still averaged inside the node in each update. none: gradients are "
        "exchanged.",
    )
    average_from: CountOrZero = Field(0, description="Post-local SGD: first update, from 0, with averaging.")
    average_momentum: Flag = Field(True, description="Average the optimizer state along with parameters.")

    @model_validator(mode="before")
    @classmethod
    def _without_former_key(cls, values: Any) -> Any:
        """Drops the only value of `inside` that plans of earlier versions may have."""
        if isinstance(values, dict) and values.get("inside") == "backend":
            return {key: value for key, value in values.items() if key != "inside"}
        return values

    @property
    def averages(self) -> bool:
        return self.average_every is not None

    @property
    def needs_costs(self) -> bool:
        """Returns whether messages are arranged or routed by network costs."""
        return self.fusion.rule == "mgwfbp" or (self.exchange == "hybrid" and self.hybrid_threshold_bytes is None)

    @property
    def exchanges_gradients(self) -> bool:
        """Returns whether ranks exchange gradients in any step, not only parameters or nothing."""
        is_averaged = self.average_every is not None and not self.average_from and self.exchange == "flat"
        return self.exchange != "none" and not is_averaged

    @property
    def is_own(self) -> bool:
        """Returns whether dlbench groups and exchanges gradients, and the engine only transports the messages."""
        return self.average_every is None and (
            self.exchange not in NOT_OWN or self.fusion.by == "dlbench" or self.wire in OWN_WIRES
        )

    @property
    def fusion_in_force(self) -> Fusion:
        """The fusion, with `auto` resolved if dlbench exchanges; otherwise `auto` means the library's size."""
        if self.is_own and self.fusion == AUTO:
            return read_fusion(OWN_AUTO)
        return self.fusion

    @property
    def library_fusion(self) -> Fusion:
        return AUTO if self.is_own else self.fusion

    @property
    def library_wire(self) -> str:
        """The wire format that the engine's library is asked for; fp32 if dlbench packs the messages."""
        return "fp32" if self.wire in OWN_WIRES else self.wire

    @property
    def own_words(self) -> str:
        """The grouping by dlbench, e.g. `own buckets of 64 MiB`; empty if the library groups gradients."""
        return self.fusion_in_force.words if self.is_own else ""


def layout_problem(sync: SyncSpec, *, engine: str, ranks: int, nodes: int) -> str | None:
    """Returns why these settings cannot work on this layout, with a remedy; None if they can."""
    if ranks == 1:
        return None
    if sync.exchange == "none":
        for key in ("fusion", "wire", "group_size"):
            if getattr(sync, key) != SyncSpec.model_fields[key].default:
                return f"sync.exchange none: no gradient is exchanged, so that sync.{key} has no effect; leave it out"
        return None
    group = sync.group_size or ranks // nodes
    if sync.exchange in GROUPED or sync.group_size is not None:
        if (ranks // nodes) % group:
            return f"sync.group_size: groups of {group} do not divide the {ranks // nodes} ranks of a node"
        if group == 1 or group == ranks:
            return (
                f"sync.exchange {sync.exchange}: needs two groups of two ranks or more, here are {ranks // group} of "
                f"{group}; use more nodes or ranks per node, or set sync.group_size"
            )
    return _engine_problem(sync, engine)


def _engine_problem(sync: SyncSpec, engine: str) -> str | None:
    if sync.exchange.startswith("horovod-"):
        if engine != "horovod":
            return f"sync.exchange {sync.exchange}: is a flag of Horovod; use --engine horovod"
        if sync.is_own:
            return f"sync.exchange {sync.exchange}: leave out sync.fusion own:... and sync.wire int8 or topk"
    if sync.is_own and sync.fusion_in_force.by == "library":
        return f"sync.fusion {sync.fusion}: is for Horovod or DDP, but dlbench exchanges here; use own:{sync.fusion}"
    if sync.wire == "bf16" and engine == "horovod":
        return "sync.wire bf16: Horovod has no bfloat16; use fp16, or --engine ddp"
    if sync.wire == "powersgd" and (engine != "ddp" or sync.is_own or sync.exchange != "flat"):
        return "sync.wire powersgd: is a DDP hook; use --engine ddp, sync.exchange flat and no sync.fusion own:..."
    if sync.wire in OWN_WIRES and sync.exchange != "flat":
        return f"sync.wire {sync.wire}: its messages are no dense sums; use sync.exchange flat"
    return None
