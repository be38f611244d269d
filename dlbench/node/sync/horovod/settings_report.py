"""What Horovod did, from its own timeline, log and library: settings in force, and the exchange of a run."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.gradient_times import BackwardWatch, ring_bytes
from dlbench.node.sync.horovod.library import loaded_library
from dlbench.node.sync.horovod.window import TimelineSummary
from dlbench.records.exchange import AutotuneResult, ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.engine import HorovodSettings
from dlbench.specs.sync import fusion_bytes
from dlbench.units import exact_bytes

_ROUNDING = 8 * 64
"""The threshold in force is a multiple of this and the ranks of a node, bytes (controller.cc of Horovod 0.28)."""

_TYPES = {"float32": "fp32", "float16": "fp16"}

_READ = "read back from Horovod"
_NOT_READ = "cannot be read back: this Horovod was not built by dlbench; its variable was set as requested"

NOT_WATCHED = "no step was profiled: set measure.warmup_steps to 1 or more"


def exchange_of(methods: Iterable[str]) -> str:
    """The exchange that Horovod's operations make up, e.g. flat of GLOO_ALLREDUCE alone."""
    parts = {part for method in methods for part in method.split("+")}
    if not parts & {"NCCL_REDUCESCATTER", "NCCL_REDUCE"}:
        return "flat"
    return "horovod-hierarchical" if "MPI_ALLREDUCE" in parts else "horovod-torus"


def wire_of(types: Iterable[str]) -> str:
    """The format of elements that Horovod names by their type."""
    return "+".join(_TYPES.get(name, name) for name in types)


def exchange_result(
    seen: TimelineSummary | None,
    watch: BackwardWatch,
    place: RankPlace,
    *,
    carrier: str,
    fusion: str,
    wire: str,
    exchange: str,
    overflows: int,
    autotune: AutotuneResult | None,
    calm_text: str,
    why_unseen: str = NOT_WATCHED,
) -> ExchangeResult:
    """The exchange as rank 0 saw it.

    Args:
        seen: what the timeline had; None if no step was watched.
        watch: gradients and steps of the window.
        place: this rank.
        carrier: gloo, mpi or nccl.
        fusion: as it was in force.
        wire: the format that was given to Horovod.
        exchange: the exchange that was asked of it; believed only where no step was watched.
        overflows: sums that left the range of fp16.
        autotune: what the autotuner did.
        calm_text: what was done about the timeline's thread.
        why_unseen: why no step was watched, where none was.
    """
    inside = across = None
    if seen is not None and carrier == "gloo" and seen.wire_bytes is not None:
        # Horovod's Gloo always takes the ring; MPI and NCCL choose by themselves.
        inside, across = ring_bytes(seen.wire_bytes, ranks=place.size, groups=place.num_nodes)
    return ExchangeResult(
        carrier=carrier,
        by="backend",
        exchange=exchange if seen is None else exchange_of(seen.timeline.methods),
        fusion=fusion,
        wire=wire if seen is None or not seen.timeline.types else wire_of(seen.timeline.types),
        group_size=place.local_size,
        num_groups=place.num_nodes,
        messages=() if seen is None else seen.messages,
        bytes_inside=inside,
        bytes_across=across,
        communication_s=None if seen is None else seen.communication_s,
        exposed_s=None if seen is None else seen.exposed_s,
        hidden_s=None if seen is None else seen.hidden_s,
        backward_s=watch.backward_s(),
        wire_overflows=overflows,
        window_steps=0 if seen is None else len(seen.counts),
        evidence=_evidence(seen, carrier, calm_text, why_unseen),
        gradients=watch.gradients(),
        autotune=autotune,
    )


def _evidence(seen: TimelineSummary | None, carrier: str, calm_text: str, why_unseen: str) -> str:
    if seen is None:
        parts = [f"Horovod's timeline: {why_unseen}"]
    else:
        few, many = min(seen.counts), max(seen.counts)
        count = f"{few}" if few == many else f"{few} to {many}"
        operations = ", ".join(f"{times} {name}" for name, times in seen.timeline.methods.items())
        ring = "bytes by the formula of Gloo's ring"
        parts = [
            f"Horovod's timeline of rank 0 over {len(seen.counts)} warm-up steps: {operations}",
            f"{count} messages per step, listed are those of one step",
            ring if carrier == "gloo" else f"bytes unknown: {carrier} chooses the algorithm",
        ]
        if seen.timeline.cycle_us is not None:
            parts.append(f"a cycle every {seen.timeline.cycle_us / 1e3:.1f} ms (median)")
        if carrier == "nccl":
            parts.append("while it is open rank 0 waits on the host for each message, which measured steps do not")
        if seen.clock_error_s:
            parts.append(f"clocks of host and GPU compared to {seen.clock_error_s * 1e6:.0f} µs")
        if seen.reason:
            parts.append(f"exposed and hidden part unknown: {seen.reason}")
        if seen.timeline.is_torn:
            parts.append("the timeline was damaged, what could not be read is left out")
    return "; ".join(filter(None, [*parts, calm_text]))


def settings_in_force(settings: HorovodSettings, place: RankPlace, *, carrier: str) -> list[Setting]:
    """The cycle time as the running library has it, and what carries the messages."""
    # The autotuner chooses: nothing is set then.
    asked = None if settings.autotune and place.size > 1 else settings.cycle_time_ms
    found = _read_back("horovod_effective_cycle_time_ms", ctypes.c_double)
    # Horovod reads the cycle time as a 32-bit number, which rounds 0.1 in the eighth digit.
    same = asked is not None and found is not None and math.isclose(found, asked, rel_tol=1e-6)
    return [
        Setting(
            key="engine.horovod.cycle_time_ms",
            requested=asked,
            effective=asked if same else found,
            evidence=_READ if found is not None else _NOT_READ,
        ),
        Setting(
            key="engine.horovod.operations",
            requested=None,
            effective=carrier,
            evidence="controller started, operations built",
        ),
    ]


def settings_as_seen(
    seen: TimelineSummary | None,
    settings: HorovodSettings,
    place: RankPlace,
    *,
    wire: str,
    exchange: str,
    autotune: AutotuneResult | None,
    why_unseen: str = NOT_WATCHED,
) -> list[Setting]:
    """What of the requested exchange the timeline and the autotuner's log show; nothing is exchanged at one rank."""
    if place.size == 1:
        return []
    travelled = None if seen is None or not seen.timeline.types else wire_of(seen.timeline.types)
    how = f"types in Horovod's timeline: {', '.join(seen.timeline.types)}" if seen is not None and travelled else None
    given = "compressor given to DistributedOptimizer"
    found = [Setting(key="sync.wire", requested=wire, effective=travelled or wire, evidence=how or given)]
    methods = {} if seen is None else seen.timeline.methods
    found.append(
        Setting(
            key="sync.exchange",
            requested=exchange,
            effective=exchange_of(methods) if methods else None,
            evidence=f"operations in Horovod's timeline: {', '.join(methods)}" if methods else why_unseen,
        )
    )
    if settings.autotune:
        tried = 0 if autotune is None else autotune.evaluations
        found.append(
            Setting(
                key="engine.horovod.autotune",
                requested=True,
                effective=tried > 0,
                evidence=f"{tried} settings in the autotuner's log",
            )
        )
    return found


def fusion_in_force(requested: str | None, seen: TimelineSummary | None, place: RankPlace) -> Setting:
    """Tensor fusion as the library has it, or as a larger message shows; nothing is requested of the autotuner."""
    found, evidence = _read_back("horovod_effective_fusion_threshold_bytes", ctypes.c_longlong), _READ
    if requested is not None and seen is not None:
        unit = _ROUNDING * place.local_size
        allowed = math.ceil((fusion_bytes(requested) or 0) / unit) * unit
        if seen.largest_fused_bytes > allowed:
            found, evidence = seen.largest_fused_bytes, "Horovod's timeline has a fused message of so many bytes"
    effective = None if found is None else exact_bytes(int(found)) if found else "none"
    return Setting(
        key="sync.fusion", requested=requested, effective=effective, evidence=_NOT_READ if found is None else evidence
    )


def _read_back(symbol: str, kind: Any) -> float | None:
    """One value in force, by the function that dlbench's build adds to Horovod; None in other builds."""
    function = getattr(loaded_library(), symbol, None)
    if function is None:
        return None
    function.restype = kind
    function.argtypes = []
    value: float = function()
    return value
