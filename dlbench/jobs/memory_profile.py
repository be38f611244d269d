"""The profile of a network's activations, measured by a process of its own: an order goes in, a chain comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlbench.jobs.node_program import answer_of, supervised
from dlbench.records.answers.memory_profile import MemoryProfile

MODULE = "dlbench.node.memory_profile"


def profile_command(python: str) -> list[str]:
    """The program under its supervisor."""
    return supervised(python, MODULE)


def memory_profile(order: Mapping[str, Any], python: str) -> MemoryProfile:
    """Measures what the order names.

    Args:
        order: as `dlbench.node.memory_profile` wants it, ready for JSON.
        python: the interpreter of the compute side.

    Raises:
        UserError: the network is no chain, or the folder of the swap file is none.
        EnvironmentLacksError: the machine lacks memory or room for the swap file; else as `answer_of`.
        RunError, KeyboardInterrupt: as `answer_of`.
    """
    return answer_of(profile_command(python), order, MemoryProfile, "the profile's process")
