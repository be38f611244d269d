"""Reads Horovod's settings in force and its gradient exchange from its timeline, log and library."""

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
from dlbench.specs.engine import REMEDY, HorovodBuild, HorovodSettings
from dlbench.specs.sync import Fusion
from dlbench.units import counted, exact_bytes

_ROUNDING = 8 * 64  # The threshold in force is a multiple of this times ranks of a node, bytes (controller.cc, 0.28).

_TYPES = {"float32": "fp32", "float16": "fp16"}

READ = "read back from Horovod"
NOT_READ = "cannot be read back: this Horovod was not built by dlbench; its variable was set as requested"

NOT_WATCHED = "no step was profiled: set measure.warmup_steps to 1 or more"

SEARCHED = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")  # If set, Horovod does not search their values.

TRACES_ALWAYS = (
    "not measured here: with its timeline enabled this Horovod waits for the GPU on the host of rank 0 in every step, "
    "so it was disabled; `dlbench setup horovod` builds one that waits only while the timeline is open"
)
"""Reason why there are no messages of a Horovod on GPUs without dlbench's patch."""


def exchange_of(methods: Iterable[str]) -> str:
    """Returns the exchange that Horovod's operations make up, e.g. flat for GLOO_ALLREDUCE alone."""
    operations: set[str] = set()
    for method in methods:
        operations.update(method.split("+"))
    if not operations & {"NCCL_REDUCESCATTER", "NCCL_REDUCE"}:
        return "flat"
    return "horovod-hierarchical" if "MPI_ALLREDUCE" in operations else "horovod-torus"


def wire_of(types: Iterable[str]) -> str:
    """Returns the wire format of element types that Horovod names, e.g. fp16 for float16."""
    return "+".join(_TYPES.get(name, name) for name in types)


def evidence(summary: TimelineSummary, carrier: str) -> str:
    """Describes in words how the exchange of a run was measured."""
    fewest, most = min(summary.counts), max(summary.counts)
    count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    operations = ", ".join(f"{times} {name}" for name, times in summary.timeline.methods.items())
    parts = [
        f"Horovod's timeline of rank 0 over {counted(len(summary.counts), 'warm-up step')}: {operations}",
        f"{count} messages per step, of which those of one step are listed",
    ]
    if carrier == "gloo":
        parts.append("bytes by the formula of Gloo's ring")
    else:
        parts.append(f"bytes unknown: {carrier} chooses the algorithm")
    if summary.timeline.cycle_us is not None:
        parts.append(f"a cycle every {summary.timeline.cycle_us / 1e3:.1f} ms (median)")
    if carrier == "nccl":
        parts.append("while the timeline is open, unlike in measured steps, rank 0 waits on the host for each message")
    if summary.clock_error_s:
        parts.append(f"clocks of host and GPU compared to {summary.clock_error_s * 1e6:.0f} µs")
    if summary.reason:
        parts.append(f"exposed and hidden part unknown: {summary.reason}")
    if summary.timeline.is_torn:
        parts.append("the timeline was damaged; unreadable entries are left out")
    return "; ".join(parts)


def fusion_in_force(requested: Fusion | None, summary: TimelineSummary | None, place: RankPlace) -> Setting:
    """Returns fusion read back from Horovod, or by a larger message; `requested` None: the autotuner chooses."""
    threshold = read_back("horovod_effective_fusion_threshold_bytes", ctypes.c_longlong)
    evidence = NOT_READ if threshold is None else READ
    if requested is not None and summary is not None:
        unit = _ROUNDING * place.local_size
        allowed_bytes = math.ceil((requested.bytes or 0) / unit) * unit
        if summary.largest_fused_bytes > allowed_bytes:
            threshold = summary.largest_fused_bytes
            evidence = "Horovod's timeline has a fused message of this size"
    effective = requested_text = None
    if threshold is not None:
        effective = exact_bytes(int(threshold)) if threshold else "none"
    if requested is not None:
        requested_text = str(requested)
    return Setting(key="sync.fusion", requested=requested_text, effective=effective, evidence=evidence)


def read_back(symbol: str, kind: Any) -> float | None:
    """Returns a value in force, by a function that dlbench's build adds to Horovod; None in other builds."""
    function = getattr(loaded_library(), symbol, None)
    if function is None:
        return None
    function.restype = kind
    function.argtypes = []
    value: float = function()
    return value


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One row of the autotuner's log."""

    cycle_time_ms: float
    fusion_threshold_bytes: float
    score: float  # Bytes per microsecond.


def parse_log(text: str) -> tuple[TuningRow, ...]:
    """Returns the complete rows of an autotuner's log; rows have a blank after one comma, the header has not."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = []
    for fields in csv.DictReader(lines, skipinitialspace=True):
        try:
            row = TuningRow(
                cycle_time_ms=float(fields["cycle_time_ms"]),
                fusion_threshold_bytes=float(fields["tensor_fusion_threshold"]) * 2**20,
                score=float(fields["score"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        rows.append(row)
    return tuple(rows)


class TuningWatch:
    """Follows the autotuner's log on rank 0, from step to step."""

    def __init__(self, settings: HorovodSettings, log: Path) -> None:
        self._settings = settings
        self._log = log
        self._size = -1
        self._rows: tuple[TuningRow, ...] = ()
        self._settled_step: int | None = None

    @property
    def _evaluations(self) -> int:
        return self._settings.autotune_max_samples + 1

    @property
    def has_settled(self) -> bool:
        return self._settled_step is not None

    def read_log(self, steps: int) -> None:
        """Reads new rows of the log, after this many steps of the run."""
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
        """Returns the search as of the last `read_log`; its cost is computed later (see `tuning_cost_s`)."""
        chosen: dict[str, float] = {}
        if self.has_settled:
            row = self._rows[-1]
            chosen = {"fusion_threshold_bytes": row.fusion_threshold_bytes, "cycle_time_ms": row.cycle_time_ms}
            if math.isfinite(row.score):
                chosen["score"] = row.score
        return AutotuneResult(
            evaluations=min(len(self._rows), self._evaluations),
            planned_steps=self._settings.autotune_steps,
            finished=self.has_settled,
            settled_step=self._settled_step,
            **chosen,
        )


def tuning_cost_s(step_s: Sequence[float], settled_step: int | None) -> float | None:
    """Returns seconds of tuning steps above the later median, 0 or more; None if the search did not end."""
    if settled_step is None or not step_s[settled_step:]:
        return None
    after = statistics.median(step_s[settled_step:])
    return max(0.0, sum(step_s[:settled_step]) - settled_step * after)


def with_tuning_cost(exchange: ExchangeResult, step_s: Sequence[float]) -> ExchangeResult:
    """Returns the result of an autotuned exchange with the cost of the search."""
    autotune = exchange.autotune
    assert autotune is not None
    cost_s = tuning_cost_s(step_s, autotune.settled_step)
    return exchange.model_copy(update={"autotune": autotune.model_copy(update={"cost_s": cost_s})})


def loaded_library() -> ctypes.CDLL | None:
    """Returns Horovod's shared library, which is already in memory; None if there is none."""
    try:
        from horovod.torch import mpi_lib_v2

        return ctypes.CDLL(mpi_lib_v2.__file__)
    except (ImportError, OSError, AttributeError):
        return None


def require_import(error: ImportError) -> EnvironmentLacksError:
    """Returns the error for a Horovod that cannot be imported; it names a missing shared library."""
    message = " ".join(str(error).split())
    if missing := re.search(r"(\S+\.so[.\d]*): cannot open shared object file", message):
        return EnvironmentLacksError(
            f"engine horovod: Horovod was built with {missing[1]}, which the loader does not find here; load the "
            f"module that provides it, or {REMEDY}; or use --engine ddp"
        )
    return EnvironmentLacksError(
        f"engine horovod: Horovod cannot be imported ({message}); {REMEDY}, or use --engine ddp"
    )


def base_variables(exchange: str, *, is_watched: bool) -> dict[str, str]:
    """Returns variables that every run sets, so that those of the caller's shell have no effect."""
    # `is_watched`: whether the timeline can be opened later; all ranks must agree, as their negotiation depends on it.
    variables = {
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(exchange == "horovod-hierarchical")),
        "HOROVOD_TORUS_ALLREDUCE": str(int(exchange == "horovod-torus")),
    }
    if is_watched:
        variables["HOROVOD_TIMELINE"] = "DYNAMIC"
    return variables


def refusal(hvd: Any, place: RankPlace, *, use_mpi: bool, on_gpu: bool, **words: str) -> DlbenchError | None:
    """Returns the error if this rank cannot use the imported `horovod.torch`; `words`: see `HorovodBuild.refusal`."""
    build = HorovodBuild(gloo=bool(hvd.gloo_built()), mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
    ranks, nodes = place.size, place.num_nodes
    return build.refusal(use_mpi=use_mpi, ranks=ranks, nodes=nodes, on_gpu=on_gpu, way_to_nccl=way_to_nccl, **words)


def way_to_nccl() -> str:
    """Returns, as a clause, what a build of Horovod with NCCL lacks here, or how to build it."""
    cuda = torch.version.cuda
    if cuda is None:
        return "this torch is not built for CUDA, the only GPUs that `dlbench setup horovod` builds for"
    cuda_parts = find_cuda_parts(cuda, Path(torch.__file__).parent.parent)
    if isinstance(cuda_parts, str):
        return f"to build one with NCCL, install what is missing: {cuda_parts}"
    return f"for one with it, {REMEDY}"
