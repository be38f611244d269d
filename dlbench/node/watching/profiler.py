"""torch.profiler over the window of watched steps, on rank 0: operators and, on a GPU, kernels.

Its times have a zero of their own. An anchor ties them to CLOCK_MONOTONIC: a `record_function` of the name `ANCHOR`
within the profile, and a span of the same name among the rank's spans. The former begins within the latter, whose
length, some 20 microseconds, so bounds the error of taking both beginnings for the same moment.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlbench.errors import EnvironmentLacksError
from dlbench.node.watching.layers import AddSpan
from dlbench.records.rows.spans import COMPUTE

ANCHOR = "dlbench profiler anchor"

_WARM_MARKS = 10
"""Marks before the anchor; the first ones are slow."""

MAX_PROFILE_BYTES = 500_000_000
"""A larger profile is not kept; it is written outside of `watch.max_bytes`."""


class ProfileWindow:
    """One profile: `open`, `stop` and `close` between two steps. What goes wrong is told and ends no run.

    Args:
        path: where it goes, a Chrome trace as torch writes it.
        device: where this rank computes.
        add: where the span of the anchor goes.

    Raises:
        EnvironmentLacksError: this torch was built without its profiler.
    """

    def __init__(self, path: Path, device: torch.device, add: AddSpan) -> None:
        if not torch.profiler.kineto_available():
            raise EnvironmentLacksError(
                "watch.profiler: this torch was built without its profiler (Kineto); set watch.profiler to false"
            )
        self._path = path
        self._add = add
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._is_open = self._has_profile = False
        self.problem = ""
        """Why there is no profile; empty if all went well."""

    def open(self) -> None:
        """Begins; the device must be idle."""
        try:
            self._profile.start()
            self._is_open = True
            for _ in range(_WARM_MARKS):
                with record_function("dlbench"):
                    pass
            start_ns = time.monotonic_ns()
            with record_function(ANCHOR):
                end_ns = time.monotonic_ns()
        except (OSError, RuntimeError) as error:
            self._tell("could not be started", error)
            return
        self._add(COMPUTE, ANCHOR, start_ns, end_ns)

    def stop(self) -> None:
        """Ends the profile, which is kept in memory; the device must be idle. Twice does no harm."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._profile.stop()
            self._has_profile = not self.problem
        except (OSError, RuntimeError) as error:
            self._tell("could not be ended", error)

    def close(self) -> None:
        """Ends it and writes the file, which may take seconds. Twice does no harm."""
        self.stop()
        if not self._has_profile:
            return
        self._has_profile = False
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._profile.export_chrome_trace(str(partial))
            size = partial.stat().st_size
            if size > MAX_PROFILE_BYTES:
                partial.unlink()
                self.problem = f"the profile had {size} bytes and was not kept; set a smaller watch.window_steps"
            else:
                partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            self._tell("could not be written", error)
            with contextlib.suppress(OSError):  # it was told just now
                partial.unlink(missing_ok=True)

    def _tell(self, what: str, error: Exception) -> None:
        self.problem = f"the profile {what}: {' '.join(str(error).split()) or type(error).__name__}"
