"""Memory of this process that is really in memory (resident), and its peak, which can be made to begin anew."""

from __future__ import annotations

from pathlib import Path

from dlbench.opening import read_text

_MAX_FILE = 1 << 20
_RESET_PEAK = "5"
"""What clear_refs takes for it (proc(5), since Linux 4.0)."""


def resident_bytes() -> int | None:
    """Resident now (VmRSS); None where the kernel does not tell."""
    return _field("VmRSS")


def peak_resident_bytes() -> int | None:
    """The peak since the process began or `reset_peak` (VmHWM); None where the kernel does not tell."""
    return _field("VmHWM")


def reset_peak() -> bool:
    """The peak is from now on that of what follows; whether the kernel can do that."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        lines = read_text(Path("/proc/self/status"), _MAX_FILE).splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except (OSError, ValueError, IndexError):
        return None
