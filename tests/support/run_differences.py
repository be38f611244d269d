"""Which registered properties of two runs keep them from being compared."""

from __future__ import annotations

from dlbench.records.registry import KEYS
from dlbench.records.scan import Run


def differences(one: Run, other: Run) -> list[str]:
    """Why two runs must not be compared: each differing key with both values; empty if they may."""
    return [
        f"{key.title}: {key.value(one) or 'none'} against {key.value(other) or 'none'}"
        for key in KEYS
        if key.comparable and key.value(one) != key.value(other)
    ]
