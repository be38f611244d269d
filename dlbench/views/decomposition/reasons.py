"""Why taking something away saves more or less time than its phase holds: likely reasons, by where the gap lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dlbench.report.wording import PART_TITLES
from dlbench.stats.estimates import Estimate
from dlbench.units import format_seconds

What = Literal["input", "exchange"]

WITHOUT: Mapping[What, str] = {"input": "with synthetic input", "exchange": "without exchange"}

_COMPUTE = ("forward", "backward", "optimizer")

REASONS: Mapping[tuple[What, bool], tuple[tuple[tuple[str, ...], str], ...]] = {
    ("input", True): (
        (_COMPUTE, "readers take cores and memory bandwidth from the computation, which no wait for input shows"),
        (("exchange",), "the others wait in the exchange for ranks whose batch was late"),
    ),
    ("input", False): (
        (("input",), "tensors made in memory are not free either"),
        (("exchange",), "ranks that wait no more for input wait longer for each other"),
    ),
    ("exchange", True): (
        (
            _COMPUTE,
            "messages under way take cores and memory bandwidth from the computation, which the phase does not hold",
        ),
        (("input",), "the exchange holds up the reading of batches"),
    ),
    ("exchange", False): (
        (("input",), "batches were read while messages were under way: part of the exchange becomes wait for input"),
        (_COMPUTE, "ranks that no longer wait for each other compute at the same moments, and share cores and memory"),
    ),
}
"""By what was taken away and whether more time went than its phase holds; by the part of the step that holds most of
the gap."""


def reason(what: What, gap: Estimate, moved: Mapping[str, Estimate]) -> str:
    """Where most of a gap lies, and what is likely behind it.

    Args:
        what: was taken away.
        gap: seconds per step by which the difference exceeds the phase.
        moved: what the gap is made of, by part of the step.
    """
    is_more = gap.value > 0
    sign = 1 if is_more else -1
    part = max(moved, key=lambda name: sign * moved[name].value)
    amount = format_seconds(abs(moved[part].value))
    where = (
        f"{amount} of wait for input is left {WITHOUT['input']}"
        if part == what == "input"
        else f"{PART_TITLES[part]} is {amount} {'shorter' if is_more else 'longer'} {WITHOUT[what]}"
    )
    likely = next((text for parts, text in REASONS[what, is_more] if part in parts), None)
    return where if likely is None else f"{where}: {likely}"
