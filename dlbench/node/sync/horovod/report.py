"""What Horovod did, from its own timeline, log and library: settings in force, and the gradient synchronisation of a
run.

The autotuner's chain of parameters is the fusion threshold (0 to 64 MiB) with the cycle time (1 to 100 ms), searched
together, and four switches (parameter_manager.cc of Horovod 0.28). A variable that is set leaves the search, so
threshold and cycle time are not set, and the switches are: two act on no CPU build and would double the search each,
the cache is on by default. The default threshold of 128 MiB lies outside of what is searched, and the search begins
with cycles of 5 to 50 ms: tuning steps are slow ones.
"""

from __future__ import annotations

import csv
import ctypes
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import DlbenchError, EnvironmentLacksError
from dlbench.machine.cuda_parts import find_cuda_parts
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.horovod.timeline import TimelineSummary
from dlbench.records.exchange import AutotuneResult, ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.engine import HorovodSettings
from dlbench.specs.horovod_build import REMEDY, HorovodBuild
from dlbench.specs.sync import Fusion
from dlbench.units import exact_bytes

_ROUNDING = 8 * 64  # The threshold in force is a multiple of this times ranks of a node, bytes (controller.cc, 0.28).

_TYPES = {"float32": "fp32", "float16": "fp16"}

READ = "read back from Horovod"
NOT_READ = "cannot be read back: this Horovod was not built by dlbench; its variable was set as requested"

NOT_WATCHED = "no step was profiled: set measure.warmup_steps to 1 or more"

SEARCHED = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")  # If set, Horovod does not search their values.

TRACES_ALWAYS = (
    "not measured here: with its timeline at hand this Horovod waits for the GPU on the host of rank 0 in every step, "
    "so it was left out; `dlbench setup horovod` builds one that does so only while it is open"
)
"""Why there are no messages of a Horovod on GPUs without dlbench's patch."""


def exchange_of(methods: Iterable[str]) -> str:
    """The exchange that Horovod's operations make up, e.g. flat of GLOO_ALLREDUCE alone."""
    parts = {part for method in methods for part in method.split("+")}
    if not parts & {"NCCL_REDUCESCATTER", "NCCL_REDUCE"}:
        return "flat"
    return "horovod-hierarchical" if "MPI_ALLREDUCE" in parts else "horovod-torus"


def wire_of(types: Iterable[str]) -> str:
    """The format of elements that Horovod names by their type."""
    return "+".join(_TYPES.get(name, name) for name in types)


def evidence(seen: TimelineSummary | None, carrier: str, calm_text: str, why_unseen: str) -> str:
    """What the result of a run rests on."""
    if seen is None:
        parts = [f"Horovod's timeline: {why_unseen}"]
    else:
        few, many = min(seen.counts), max(seen.counts)
        count = f"{few}" if few == many else f"{few} to {many}"
        operations = ", ".join(f"{times} {name}" for name, times in seen.timeline.methods.items())
        ring = "bytes by the formula of Gloo's ring"
        parts = [
            f"Horovod's timeline of rank 0 over {len(seen.counts)} warm-up step{'s' * (len(seen.counts) > 1)}: "
            f"{operations}",
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


def fusion_in_force(requested: Fusion | None, seen: TimelineSummary | None, place: RankPlace) -> Setting:
    """Tensor fusion as the library has it, or as a larger message shows; nothing is requested of the autotuner."""
    found, evidence = read_back("horovod_effective_fusion_threshold_bytes", ctypes.c_longlong), READ
    if requested is not None and seen is not None:
        unit = _ROUNDING * place.local_size
        allowed = math.ceil((requested.bytes or 0) / unit) * unit
        if seen.largest_fused_bytes > allowed:
            found, evidence = seen.largest_fused_bytes, "Horovod's timeline has a fused message of this size"
    effective = None if found is None else exact_bytes(int(found)) if found else "none"
    return Setting(
        key="sync.fusion",
        requested=None if requested is None else str(requested),
        effective=effective,
        evidence=NOT_READ if found is None else evidence,
    )


def read_back(symbol: str, kind: Any) -> float | None:
    """One value in force, by the function that dlbench's build adds to Horovod; None in other builds."""
    function = getattr(loaded_library(), symbol, None)
    if function is None:
        return None
    function.restype = kind
    function.argtypes = []
    value: float = function()
    return value


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One row of the log."""

    cycle_time_ms: float
    fusion_threshold_bytes: float
    score: float  # Bytes per microsecond.


def parse_log(text: str) -> tuple[TuningRow, ...]:
    """The complete rows of a log; a row that is still being written is left out. Horovod writes a blank after one comma
    of its rows, but not of its header.
    """
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = []
    for row in csv.DictReader(lines, skipinitialspace=True):
        try:
            found = TuningRow(
                cycle_time_ms=float(row["cycle_time_ms"]),
                fusion_threshold_bytes=float(row["tensor_fusion_threshold"]) * 2**20,
                score=float(row["score"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        rows.append(found)
    return tuple(rows)


class TuningWatch:
    """Follows the log on rank 0, from step to step."""

    def __init__(self, settings: HorovodSettings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._size = -1
        self._rows: tuple[TuningRow, ...] = ()
        self._settled_step: int | None = None

    @property
    def _evaluations(self) -> int:
        """Settings that a whole search tries; its log then holds one row more, with the choice."""
        return self._settings.autotune_max_samples + 1

    @property
    def has_settled(self) -> bool:
        return self._settled_step is not None

    def look(self, steps: int) -> None:
        """Reads what the log has got since, after this many steps of the run."""
        if self.has_settled or not self._log.exists():
            return
        size = self._log.stat().st_size
        if size == self._size:
            return
        self._size = size
        self._rows = parse_log(self._log.read_text(encoding="utf-8", errors="replace"))
        if len(self._rows) > self._evaluations:
            self._settled_step = steps

    def result(self) -> AutotuneResult:
        """As of the last look; the cost is not known here (see `tuning_cost_s`)."""
        chosen = self._rows[-1] if self.has_settled else None
        return AutotuneResult(
            evaluations=min(len(self._rows), self._evaluations),
            planned_steps=self._settings.autotune_steps,
            finished=self.has_settled,
            settled_step=self._settled_step,
            **{key: getattr(chosen, key, None) for key in ("fusion_threshold_bytes", "cycle_time_ms")},
            score=None if chosen is None or not math.isfinite(chosen.score) else chosen.score,
        )


def tuning_cost_s(step_s: Sequence[float], settled_step: int | None) -> float | None:
    """What tuning took beyond training: its steps, less as many at the median of those afterwards; not below zero.
    `settled_step`: steps until the search was over; None: it was not.
    """
    if settled_step is None or not step_s[settled_step:]:
        return None
    after = statistics.median(step_s[settled_step:])
    return max(0.0, sum(step_s[:settled_step]) - settled_step * after)


def with_tuning_cost(exchange: ExchangeResult, step_s: Sequence[float]) -> ExchangeResult:
    """The result of a run whose exchange was tuned, with what the autotuner took from its steps."""
    tuned = exchange.autotune
    assert tuned is not None
    cost_s = tuning_cost_s(step_s, tuned.settled_step)
    return exchange.model_copy(update={"autotune": tuned.model_copy(update={"cost_s": cost_s})})


def loaded_library() -> ctypes.CDLL | None:
    """Horovod's own shared library, already in memory."""
    try:
        from horovod.torch import mpi_lib_v2

        return ctypes.CDLL(mpi_lib_v2.__file__)
    except (ImportError, OSError, AttributeError):
        return None


def closed_timeline_is_free() -> bool:
    """Whether a timeline that can be opened, but is not, leaves operations on GPUs as they are without it."""
    return bool(read_back("horovod_closed_timeline_is_free", ctypes.c_bool))


def require_import(error: ImportError) -> EnvironmentLacksError:
    """The error of a Horovod that cannot be imported; it names the library that it lacks, where it is one."""
    said = " ".join(str(error).split())
    if missing := re.search(r"(\S+\.so[.\d]*): cannot open shared object file", said):
        return EnvironmentLacksError(
            f"engine horovod: Horovod was built with {missing[1]}, which the loader does not find here; load the "
            f"module that brings it, or {REMEDY}; or use --engine ddp"
        )
    return EnvironmentLacksError(f"engine horovod: Horovod cannot be imported ({said}); {REMEDY}, or use --engine ddp")


def base_variables(exchange: str, *, is_watched: bool) -> dict[str, str]:
    """Variables of every run, so that those of the caller's shell do not act. `is_watched`: whether the timeline can be
    opened later. All ranks must agree, because what they negotiate in depends on it.
    """
    found = {
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(exchange == "horovod-hierarchical")),
        "HOROVOD_TORUS_ALLREDUCE": str(int(exchange == "horovod-torus")),
    }
    return {**found, "HOROVOD_TIMELINE": "DYNAMIC"} if is_watched else found


def refusal(hvd: Any, place: RankPlace, *, use_mpi: bool, on_gpu: bool, **words: str) -> DlbenchError | None:
    """Why this rank refuses the imported `horovod.torch`; `words`: see `HorovodBuild.refusal`."""
    build = HorovodBuild(gloo=bool(hvd.gloo_built()), mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
    ranks, nodes = place.size, place.num_nodes
    return build.refusal(use_mpi=use_mpi, ranks=ranks, nodes=nodes, on_gpu=on_gpu, way_to_nccl=way_to_nccl, **words)


def way_to_nccl() -> str:
    """What leads to a Horovod with NCCL here, in a clause: what such a build lacks, or how to make one."""
    cuda = torch.version.cuda
    if cuda is None:
        return "this torch is not built for CUDA, the only GPUs that `dlbench setup horovod` builds for"
    lacks = find_cuda_parts(cuda, Path(torch.__file__).parent.parent)
    return f"a build with it lacks this here: {lacks}" if isinstance(lacks, str) else f"for one with it, {REMEDY}"
