"""Messages of watched steps as spans on CLOCK_MONOTONIC: from DDP's hook, and from dlbench's own exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.node.sync.clocks import Clock
from dlbench.node.sync.engine import MessageSpan
from dlbench.node.sync.gradient_times import WatchedStep
from dlbench.node.sync.own.exchange_times import StepMoments


def passage_spans(steps: Sequence[WatchedStep], clock: Clock) -> list[MessageSpan]:
    """Buckets of a closed window.

    DDP hands a bucket over when its last gradient is there, so nothing is known of a wait before the start.
    """
    return [
        MessageSpan(
            step=number,
            number=place,
            ready_ns=handed_ns,
            start_ns=handed_ns,
            end_ns=clock.monotonic_ns(passage.done),
            num_bytes=passage.num_bytes,
            num_tensors=passage.num_tensors,
            method=passage.method,
        )
        for number, step in enumerate(steps)
        for place, passage in enumerate(step.passages)
        if passage.done is not None
        for handed_ns in [clock.monotonic_ns(passage.handed)]
    ]


@dataclass(frozen=True, kw_only=True)
class SentStep:
    """One watched step of dlbench's own exchange, with the messages as they were then: they may be arranged anew."""

    moments: StepMoments
    num_bytes: tuple[int, ...]
    """Of gradients, by message; as the rest."""
    num_tensors: tuple[int, ...]
    methods: tuple[str, ...]


def moment_spans(steps: Sequence[SentStep], clock: Clock) -> list[MessageSpan]:
    """Messages of steps whose moments can be read."""
    return [
        MessageSpan(
            step=number,
            number=place,
            ready_ns=clock.monotonic_ns(step.moments.ready[place]),
            start_ns=clock.monotonic_ns(step.moments.start[place]),
            end_ns=clock.monotonic_ns(step.moments.end[place]),
            num_bytes=step.num_bytes[place],
            num_tensors=step.num_tensors[place],
            method=step.methods[place],
        )
        for number, step in enumerate(steps)
        for place in range(len(step.num_bytes))
    ]
