"""What the parts of a step are called: one vocabulary, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Mapping

from dlbench.reading.causes import EXCHANGE_PHASE

CAUSE_TITLES: Mapping[str, str] = {
    "compute": "compute",
    "exchange": "exchange on the wire",
    "straggler": "waiting for stragglers",
    "input": "input",
    "host": "host between phases",
    "launch": "waiting for kernel launches",
    "throttling": "clock throttling",
    "memory": "recompute and swap",
    "rest": "imbalance between ranks",
}
"""By `dlbench.reading.causes.CAUSES`."""

ROW_TITLES: Mapping[str, str] = {
    **CAUSE_TITLES,
    EXCHANGE_PHASE: "gradient exchange after backward",
    "exchange": "of it on the wire",
    "straggler": "of it waiting for stragglers",
    "forward": "of it forward",
    "backward": "of it backward",
    "optimizer": "of it optimizer",
    "wait": "of it waiting for batches",
    "fetch": "of it fetching samples",
    "prepare": "of it preparing samples",
    "copy": "of it copy to the device",
}
"""The same as lines of a table, below what they are part of."""

NOT_MEASURED = "not measured"
"""Instead of a figure where some run says nothing of a cause: that is not no time at all."""
