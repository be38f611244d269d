"""Measures memory between marks of a pass and, by kind, at the peak of a step; tunes the C library's allocator."""
# Resident memory would not do, as it includes memory that was released and kept. The optimizer allocates its state in
# the update of the first step, so that step's passes need less memory by as much.

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.cgroup import peak_resident_bytes, reset_peak
from dlbench.node.models.build import Batch
from dlbench.node.part import StepSchedule, TrainingPart
from dlbench.records.record import HeldMemory
from dlbench.specs.training import OptimizerSpec
from dlbench.units import format_bytes

_MARK = "dlbench mark "
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"
KEPT_FREED = "keeps what tensors free (mallopt: M_MMAP_MAX 0, M_TRIM_THRESHOLD -1)"  # Recorded, so it stays as it is.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # Numbers of mallopt(3).
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables that tune glibc's allocator, if their name or value has the word malloc."""

MAX_TRIALS = 12  # Bisection steps: enough for 4,096 batch sizes.
MAX_S = 60.0


class MemoryInterval:
    """Memory at the begin and end of an interval and its peak, in bytes above the beginning of the pass."""

    def __init__(self, begin: int, peak: int, end: int) -> None:
        self.begin, self.peak, self.end = begin, peak, end

    @property
    def growth(self) -> int:
        return self.peak - self.begin


class PeakMeter:
    """A context around a pass; `mark` ends one interval and begins the next. This class measures nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        return None

    def mark(self, name: str) -> None:
        """Begins the interval of that name, which ends at the next mark; each name is used once."""

    def intervals(self) -> dict[str, MemoryInterval]:
        return {}


class CpuPeaks(PeakMeter):
    """Counts every allocation of a CPU tensor that torch's profiler reports."""

    def __init__(self) -> None:
        if not torch.profiler.kineto_available():
            raise EnvironmentLacksError(
                "train.recompute and train.swap: this torch was built without its profiler (Kineto), which measures "
                "the memory of a pass; set both to none"
            )
        self._profile = profile(use_kineto=True, profile_memory=True)

    def __enter__(self) -> Self:
        # Garbage of earlier passes that is collected meanwhile would count as freed by this one.
        gc.collect()
        self._was_gc_enabled = gc.isenabled()
        gc.disable()
        # Kineto prints each start to the standard error, unless this is set when it is first used.
        before = os.environ.get(_LOG_LEVEL)
        os.environ[_LOG_LEVEL] = _SILENT
        try:
            self._profile.__enter__()  # type: ignore[no-untyped-call]
        finally:
            if before is None:
                del os.environ[_LOG_LEVEL]
            else:
                os.environ[_LOG_LEVEL] = before
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._was_gc_enabled:
            gc.enable()
        self.mark("end of the pass")
        self._profile.__exit__(*raised)  # type: ignore[no-untyped-call]

    def mark(self, name: str) -> None:
        with record_function(_MARK + name):
            pass

    def intervals(self) -> dict[str, MemoryInterval]:
        """Returns memory by interval, by following allocations and marks, which are events as well, in time."""
        results = self._profile.kineto_results
        assert results is not None  # the pass is over
        events = [event for event in results.events() if event.name() == "[memory]" or event.name().startswith(_MARK)]
        events.sort(key=lambda event: (event.start_ns(), event.name() != "[memory]"))  # a mark after allocations
        live_bytes, current = 0, MemoryInterval(0, 0, 0)
        intervals: dict[str, MemoryInterval] = {}
        for event in events:
            if event.name() == "[memory]":
                live_bytes += event.nbytes()  # type: ignore[attr-defined]
                current.peak, current.end = max(current.peak, live_bytes), live_bytes
            else:
                current = MemoryInterval(live_bytes, live_bytes, live_bytes)
                intervals[event.name().removeprefix(_MARK)] = current
        return intervals


class CudaPeaks(PeakMeter):
    """Reads the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._intervals: dict[str, MemoryInterval] = {}
        self._begin = 0
        self._current: MemoryInterval | None = None

    def __enter__(self) -> Self:
        gc.collect()
        self._begin = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._end()

    def mark(self, name: str) -> None:
        self._end()
        torch.cuda.reset_peak_memory_stats(self._device)
        now = torch.cuda.memory_allocated(self._device) - self._begin
        self._current = self._intervals[name] = MemoryInterval(now, now, now)

    def _end(self) -> None:
        if self._current is not None:
            self._current.peak = torch.cuda.max_memory_allocated(self._device) - self._begin
            self._current.end = torch.cuda.memory_allocated(self._device) - self._begin
        self._current = None

    def intervals(self) -> dict[str, MemoryInterval]:
        return self._intervals


def peak_bytes(device: torch.device) -> int:
    """Returns the peak since the process began or since `restart_peaks`: allocated on a GPU, otherwise resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restart_peaks(device: torch.device) -> bool:
    """Resets the peaks of this process; returns whether the kernel can reset that of resident memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return reset_peak()


def peaks_on(device: torch.device) -> PeakMeter:
    """Returns the meter for a device."""
    return CudaPeaks(device) if device.type == "cuda" else CpuPeaks()


def keep_freed() -> str:
    """Keeps memory that tensors release for later ones, unless the environment tunes malloc. Returns a sentence for the
    record that says what malloc does with such memory: `KEPT_FREED`, or why it was not tuned.
    """
    names = [name for name in _MALLOC_VARIABLES if name in os.environ]
    variables = [name for name in names if "malloc" in (name + os.environ[name]).lower()]
    if variables:
        return f"as {' and '.join(variables)} of the rank's environment set it"
    try:
        glibc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
    except OSError:
        return "as the C library does, which is not glibc"
    # Another allocator may accept mallopt without effect.
    addresses = [ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (glibc, process)]
    if addresses[0] != addresses[1]:
        return "as the rank's environment has it: malloc is not glibc's"
    if glibc.mallopt(_M_MMAP_MAX, 0) != 1 or glibc.mallopt(_M_TRIM_THRESHOLD, -1) != 1:
        return "as the C library does: mallopt refuses M_MMAP_MAX 0 or M_TRIM_THRESHOLD -1"
    return KEPT_FREED


def trim() -> None:
    """Returns free memory to the kernel once; to be called only if `keep_freed` returned `KEPT_FREED`."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """The largest batch that fits in memory."""

    batch: int  # Samples of one backward pass; 0: not even one fits.
    is_largest: bool  # Whether the next larger batch failed; otherwise trials or time ran out.
    trials: int


def largest_batch(
    fits: Callable[[int], bool], upper_bound: int, clock: Callable[[], float] = time.monotonic
) -> BatchFit:
    """Returns the largest batch smaller than `upper_bound` that fits, by bisection, within `MAX_TRIALS` and `MAX_S`."""
    until = clock() + MAX_S
    largest, too_large, trials = 0, upper_bound, 0
    while too_large - largest > 1 and trials < MAX_TRIALS and clock() < until:
        # Small batches come first while none has fitted: they are quick, and the answer is often a power of two.
        batch = (largest + too_large) // 2
        trials += 1
        if fits(batch):
            largest = batch
        else:
            too_large = batch
    return BatchFit(batch=largest, is_largest=too_large - largest == 1, trials=trials)


def fits_in_memory(
    model: nn.Module,
    loss_of: Callable[[Batch], torch.Tensor],
    batch_of: Callable[[int], Batch],
    device: torch.device,
    reserved_bytes: int,
    beat: Callable[[str], None] = lambda _progress: None,
) -> Callable[[int], bool]:
    """Returns a function that tries whether passes over a batch fit in addition to `reserved_bytes`, which training
    allocates later: optimizer state.
    """
    # Gradients are computed and not accumulated: no hook of an engine runs, no other rank is needed.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def fits(batch: int) -> bool:
        beat(f"trying a batch of {batch} in memory")
        try:
            _trial(batch)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            return False
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    def _trial(batch: int) -> None:
        model.zero_grad(set_to_none=True)
        reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
        torch.autograd.grad(loss_of(batch_of(batch)), parameters, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del reserved

    return fits


def missing_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> int:
    """Returns the bytes of optimizer state that the first update will allocate; 0 after it."""
    if optimizer.state:
        return 0
    return spec.slots * 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def out_of_memory(
    words: str, fit: BatchFit | None, *, rank: int, batch: int, accumulation: int, startup_bytes: int | None = None
) -> RunError:
    """Returns the error of a rank out of memory; `startup_bytes` is the peak in bytes before the measured steps."""
    start = f"rank {rank} is out of memory at train.batch_per_rank {batch}"
    if startup_bytes is not None:
        start += f", which fitted before the measured steps ({format_bytes(startup_bytes)})"
    start += f": {words}"
    if fit is None:
        return RunError(f"{start}; a smaller batch, or train.recompute, needs less")
    if not fit.batch:
        return RunError(f"{start}; not even one sample fits: use train.recompute or a lower train.precision")
    largest = f"{fit.batch * accumulation}"
    if not fit.is_largest:
        largest = f"at least {largest}"
    return RunError(
        f"{start}; {largest} fits (by {fit.trials} trials of forward and backward passes on this rank): set "
        "train.batch_per_rank to that, or to a little less, because fragmentation and exchange buffers need memory too"
    )


def local_bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Returns the bytes of tensors on that kind of device, each counted once; of a `DTensor` this rank's shard."""
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local: torch.Tensor = tensor
            if hasattr(tensor, "to_local"):
                local = tensor.to_local()
            if local.device.type == device.type:
                # A parameter of another rank's stage has a shape and no memory (`PipelineEngine`).
                sizes[id(tensor)] = min(local.numel() * local.element_size(), local.untyped_storage().nbytes())
    return sum(sizes.values())


class StepMemory(TrainingPart):
    """Watches one step of the warm-up, on this rank."""

    def __init__(
        self,
        watch: Callable[[bool], None],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        exchange: tuple[int, bool],
    ) -> None:
        """Takes what the engine prepared. `watch`: `Engine.watch_memory`; `exchange`: from `exchange_memory`."""
        self._watch, self._model, self._optimizer, self._device = watch, model, optimizer, device
        self._exchange, self._gradients_stay = exchange
        self._meter: PeakMeter | None = None
        self._result: HeldMemory | None = None

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Begins to watch the first step on a CPU; on a GPU the last of the warm-up, as cuDNN searches in the first."""
        self.close()
        watched_step = max(1, schedule.warmup - 1) if self._device.type == "cuda" else 0
        if step != watched_step:
            return
        try:
            meter = peaks_on(self._device)
        except EnvironmentLacksError:
            return  # a torch without its profiler
        self.peak_before = peak_bytes(self._device)
        self._hook = self._optimizer.register_step_pre_hook(self._at_update)
        self._kinds = self._persistent(self._device)
        self._gradients = self._in_buffers = 0
        self._base = sum(self._kinds.values()) + self._exchange
        if self._device.type == "cuda":
            self._base = torch.cuda.memory_allocated(self._device)
        self._watch(True)
        self._meter = meter.__enter__()
        meter.mark("passes")

    def _persistent(self, device: torch.device) -> dict[str, int]:
        # ZeroRedundancyOptimizer keeps the state of its part in a local optimizer.
        state = getattr(self._optimizer, "optim", self._optimizer).state
        state_tensors = chain.from_iterable(values.values() for values in state.values())
        return {
            "weights": local_bytes(self._model.parameters(), device),
            "optimizer": local_bytes(state_tensors, device),
            "buffers": local_bytes(self._model.buffers(), device),
        }

    def _at_update(self, *_: Any) -> None:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._gradients = local_bytes(gradients, self._device)
        views = [gradient for gradient in gradients if gradient.untyped_storage().nbytes() > gradient.nbytes]
        self._in_buffers = min(self._exchange, local_bytes(views, self._device))
        assert self._meter is not None
        self._meter.mark("update")

    def close_window(self) -> None:
        self.close()

    def close(self) -> None:
        """Stops watching, and computes the result if a step was watched; also called after a failed step."""
        # With torch's profiler open, Python would crash at its end and lose the exit code.
        if self._meter is None:
            return
        self._hook.remove()
        self._watch(False)
        self._meter.__exit__(None, None, None)
        intervals, self._meter = self._meter.intervals(), None
        if "update" not in intervals:
            return  # a loss scale overflowed: nothing was updated
        on_cpu = self._device.type == "cpu"
        base = self._base
        if self._gradients_stay and on_cpu:
            base += self._gradients
        kinds = self._persistent(self._device) | {"gradients": self._gradients}
        new_state = kinds["optimizer"] - self._kinds["optimizer"]
        kinds["buffers"] += self._exchange - self._in_buffers
        passes_peak = base + new_state + intervals["passes"].peak
        update_peak = base + intervals["update"].peak
        peak = max(passes_peak, update_peak)
        how = "torch's allocator in the last warm-up step"
        if on_cpu:
            how = "every allocation of the first step by torch's profiler; optimizer state counted from its start"
            if (unreleased := intervals["update"].end - new_state) > peak // 100:
                how += f"; no release of {unreleased} bytes was seen, which other threads may have released"
        cpu_kinds, on_host = self._persistent(torch.device("cpu")), None
        if not on_cpu and cpu_kinds["weights"]:
            # Parameters, gradients and optimizer state in host memory.
            on_host = 2 * cpu_kinds["weights"] + cpu_kinds["optimizer"]
        self._result = HeldMemory(
            **kinds,
            activations=max(0, peak - sum(kinds.values())),
            peak=peak,
            passes_peak=passes_peak,
            update_peak=update_peak,
            host=on_host,
            evidence=how,
        )

    def rank_result(self) -> dict[str, Any]:
        return {"held": self.result}

    @property
    def result(self) -> HeldMemory | None:
        if self._result is None or self._device.type != "cuda":
            return self._result
        return self._result.model_copy(update={"retries": torch.cuda.memory_stats(self._device)["num_alloc_retries"]})
