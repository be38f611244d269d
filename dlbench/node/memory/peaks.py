"""How much memory the device holds between two marks of a pass: exact, from the allocator itself.

On a GPU that is torch's caching allocator. On a CPU torch keeps no such counters; its profiler reports every allocation
and release of tensor memory, in order. Resident memory would not do: the C library keeps what was released, so that a
unit's peak hides in what the one before left. What oneDNN allocates for itself is seen by neither.
"""

from __future__ import annotations

import gc
import os
from types import TracebackType
from typing import Protocol, Self

import torch
from torch.autograd.profiler import profile, record_function

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.memory import reset_peak

_MARK = "dlbench mark "
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"


class Held:
    """Memory between two marks, bytes, relative to the beginning of the pass."""

    def __init__(self, begin: int, peak: int, end: int) -> None:
        self.begin, self.peak, self.end = begin, peak, end

    @property
    def growth(self) -> int:
        """How far it rose above what was held in the beginning."""
        return self.peak - self.begin


class PeakMeter(Protocol):
    """Surrounds a pass; `mark` begins the next interval and ends the one before."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def mark(self, name: str) -> None:
        """From here to the next mark is the interval of that name; each name once."""

    def held(self) -> dict[str, Held]:
        """Every interval by its name, after the pass."""


class NoPeaks:
    """Measures nothing: for the passes that are timed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def mark(self, name: str) -> None:
        """Nothing."""

    def held(self) -> dict[str, Held]:
        """Nothing."""
        return {}


class CpuPeaks(NoPeaks):
    """Every allocation of a CPU tensor, as torch's profiler reports it.

    Raises:
        EnvironmentLacksError: this torch was built without its profiler.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._collects:
            gc.enable()
        self.mark("end of the pass")
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

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


class CudaPeaks(NoPeaks):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def restart_peaks(device: torch.device) -> bool:
    """Peaks of a process are from now on those of what follows: what torch allocated, and what is resident.

    Returns:
        Whether the kernel can do that for what is resident.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return reset_peak()


def peaks_on(device: torch.device) -> PeakMeter:
    """The meter that suits a device."""
    return CudaPeaks(device) if device.type == "cuda" else CpuPeaks()
