"""How much memory the device holds between two marks of a pass: exact, from the allocator itself.

On a GPU that is torch's caching allocator. On a CPU torch keeps no such counters; its profiler reports every allocation
and release of tensor memory, in order. Resident memory would not do: the C library keeps what was released, so that a
unit's peak hides in what the one before left. What oneDNN allocates for itself is seen by neither.

What tensors free on a CPU stays with the process, whatever its size, for the tensors that come next: by itself glibc
maps and unmaps each one above a threshold (which rises to 32 MiB), and trims what is free at its heap's end, and the
kernel fills such pages with zeros again and again (tried: 230 microseconds of the CPU for a MiB that is written to
pages that were kept, 770 to mapped ones, 480 to mapped huge ones). Resident memory then says what the process has
touched, the holes between tensors included, not what training holds: peaks of training are those of live tensors.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.host_memory import peak_resident_bytes, reset_peak
from dlbench.node.models.build import Batch
from dlbench.specs.training import OptimizerSpec
from dlbench.units import format_bytes

_MARK = "dlbench mark "
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"
KEPT_FREED = "keeps what tensors free (mallopt: M_MMAP_MAX 0, M_TRIM_THRESHOLD -1)"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # numbers of mallopt(3)
_CHOOSES = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables that set glibc's allocator, where they say malloc."""

MAX_TRIALS = 12  # halvings of the batch sizes that are still in question: 4,096 of them are distinguished
MAX_S = 60.0


class Held:
    """Memory between two marks, bytes, relative to the beginning of the pass."""

    def __init__(self, begin: int, peak: int, end: int) -> None:
        self.begin, self.peak, self.end = begin, peak, end

    @property
    def growth(self) -> int:
        return self.peak - self.begin


class PeakMeter:
    """Surrounds a pass; `mark` begins the next interval and ends the one before. This one measures nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        return None

    def mark(self, name: str) -> None:
        """From here to the next mark is the interval of that name; each name once."""

    def held(self) -> dict[str, Held]:
        return {}


class CpuPeaks(PeakMeter):
    """Every allocation of a CPU tensor, as torch's profiler reports it."""

    def __init__(self) -> None:
        if not torch.profiler.kineto_available():
            raise EnvironmentLacksError(
                "train.recompute and train.swap: this torch was built without its profiler (Kineto), by which the "
                "memory of a pass is measured; set both to none"
            )
        self._profile = profile(use_kineto=True, profile_memory=True)

    def __enter__(self) -> Self:
        # What is collected meanwhile, of earlier passes, would count as freed by this one.
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        # Kineto, which prints each start to the standard error, looks at this when it is used first.
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
        if self._collects:
            gc.enable()
        self.mark("end of the pass")
        self._profile.__exit__(*raised)  # type: ignore[no-untyped-call]

    def mark(self, name: str) -> None:
        with record_function(_MARK + name):
            pass

    def held(self) -> dict[str, Held]:
        """By the order of events in time; marks are events as well."""
        results = self._profile.kineto_results
        assert results is not None  # the pass is over
        events = sorted(
            (
                (event.start_ns(), 0 if event.name() == "[memory]" else 1, event)
                for event in results.events()
                if event.name() == "[memory]" or event.name().startswith(_MARK)
            ),
            key=lambda found: found[:2],
        )
        live, current, found = 0, Held(0, 0, 0), dict[str, Held]()
        for _, is_mark, event in events:
            if is_mark:
                current = found[event.name().removeprefix(_MARK)] = Held(live, live, live)
            else:
                live += event.nbytes()  # type: ignore[attr-defined]
                current.peak, current.end = max(current.peak, live), live
        return found


class CudaPeaks(PeakMeter):
    """Counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, Held] = {}
        self._begin = 0
        self._current: Held | None = None

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
        self._current = self._found[name] = Held(now, now, now)

    def _end(self) -> None:
        if self._current is not None:
            self._current.peak = torch.cuda.max_memory_allocated(self._device) - self._begin
            self._current.end = torch.cuda.memory_allocated(self._device) - self._begin
        self._current = None

    def held(self) -> dict[str, Held]:
        return self._found


def peak_bytes(device: torch.device) -> int:
    """Most that this process held since it began, or since `restart_peaks`: allocated on a GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restart_peaks(device: torch.device) -> bool:
    """Starts the peaks of this process anew; returns whether the kernel can do that for what is resident."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return reset_peak()


def peaks_on(device: torch.device) -> PeakMeter:
    """The meter that suits a device."""
    return CudaPeaks(device) if device.type == "cuda" else CpuPeaks()


def keep_freed() -> str:
    """Keeps what tensors free for the next, unless the environment chose an allocator; returns what is in force."""
    chosen = [name for name in _CHOOSES if name in os.environ and "malloc" in (name + os.environ[name]).lower()]
    if chosen:
        return f"as {' and '.join(chosen)} of the rank's environment set it"
    try:
        glibc, used = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
    except OSError:
        return "as the C library does, which is not glibc"
    # Another allocator may answer mallopt, and do nothing.
    if len({ctypes.cast(one.malloc, ctypes.c_void_p).value for one in (glibc, used)}) > 1:
        return "as the rank's environment has it: malloc is not glibc's"
    if glibc.mallopt(_M_MMAP_MAX, 0) != 1 or glibc.mallopt(_M_TRIM_THRESHOLD, -1) != 1:
        return "as the C library does: mallopt refuses M_MMAP_MAX 0 or M_TRIM_THRESHOLD -1"
    return KEPT_FREED


def trim() -> None:
    """Gives back once what is free now, wherever it lies; for where `keep_freed` found glibc."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """The largest batch that passed."""

    batch: int  # samples of one backward pass; 0: not even one
    is_largest: bool  # whether the next larger one failed; otherwise time was up before that was known
    trials: int


def largest_batch(passes: Callable[[int], bool], below: int, clock: Callable[[], float] = time.monotonic) -> BatchFit:
    """Returns the largest batch below `below` that passes, by halving, in `MAX_TRIALS` trials and `MAX_S` seconds."""
    until = clock() + MAX_S
    fits, fails, trials = 0, below, 0
    while fails - fits > 1 and trials < MAX_TRIALS and clock() < until:
        # Small ones first while none has passed: each is quick, and the answer is often a power of two.
        batch = (fits + fails) // 2
        trials += 1
        if passes(batch):
            fits = batch
        else:
            fails = batch
    return BatchFit(batch=fits, is_largest=fails - fits == 1, trials=trials)


def fits_in_memory(
    model: nn.Module,
    loss_of: Callable[[Batch], torch.Tensor],
    batch_of: Callable[[int], Batch],
    device: torch.device,
    kept_bytes: int,
    beat: Callable[[str], None] = lambda _what: None,
) -> Callable[[int], bool]:
    """Whether forward and backward pass of a batch fit besides `kept_bytes`, which training does not hold yet.

    Gradients are asked for and not accumulated: no hook of an engine acts, no other rank is needed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def passes(batch: int) -> bool:
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
        kept = torch.empty(kept_bytes, dtype=torch.uint8, device=device)
        torch.autograd.grad(loss_of(batch_of(batch)), parameters, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del kept

    return passes


def missing_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> int:
    """Bytes that the optimizer will keep from its first update on; 0 once it has them."""
    if optimizer.state:
        return 0
    return spec.slots * 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def out_of_memory(
    words: str, fit: BatchFit | None, *, rank: int, batch: int, accumulation: int, startup_bytes: int | None = None
) -> RunError:
    """Returns the one line of a rank that ran out of memory.

    `fit`: of a pass's batch; None where none was tried. `startup_bytes`: the peak before the measured steps.
    """
    when = "" if startup_bytes is None else f", which fitted before the measured steps ({format_bytes(startup_bytes)})"
    start = f"rank {rank} is out of memory at train.batch_per_rank {batch}{when}: {words}"
    if fit is None:
        return RunError(f"{start}; a smaller batch, or train.recompute, needs less")
    if not fit.batch:
        return RunError(f"{start}; not even one sample fits: use train.recompute or a lower train.precision")
    most = "" if fit.is_largest else "at least "
    return RunError(
        f"{start}; {most}{fit.batch * accumulation} fits (by {fit.trials} trials of forward and backward passes on "
        "this rank): set train.batch_per_rank to that, or to a little less, as fragments and the exchange take some"
    )
