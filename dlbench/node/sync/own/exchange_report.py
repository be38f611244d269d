"""What dlbench's own exchange did, from what it counted: settings in force, and the result of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.node.sync.own.exchange_times import Moments
from dlbench.node.sync.own.route import Route
from dlbench.records.exchange import ExchangeResult, GradientTime, Message
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import fusion_bytes


@dataclass(frozen=True, kw_only=True)
class Account:
    """The messages in force at the end, and how each went."""

    names: Sequence[str]
    """Of the parameters."""
    sizes: Sequence[int]
    """Bytes of their gradients."""
    messages: Sequence[Sequence[int]]
    """Numbers of the parameters of each message, in the order of sending."""
    ways: Sequence[Counter[str]]
    """How often each message went which way, measured steps."""
    elements: Sequence[int]
    """Of each message, padding included."""
    fusion: str
    """As decided."""
    num_ranks: int
    route: Route
    moments: Moments
    gradient_times: Sequence[float]
    """When each gradient was ready, by number of the parameter; empty where it was never noted."""
    overflows: int
    """Of fp16 on the wire; the least of all ranks' counts, known after the last step."""

    @property
    def message_bytes(self) -> list[int]:
        """Bytes of gradients of each message."""
        return [sum(self.sizes[n] for n in one) for one in self.messages]

    @property
    def all_ways(self) -> Counter[str]:
        """How often a message went which way."""
        return sum(self.ways, Counter[str]())

    @property
    def exchange(self) -> str:
        """By what messages went: hybrid only if some went one way and some the other."""
        dense = {way for way in self.all_ways if way != "sparse"}
        if dense == {"flat", "hierarchical"}:
            return "hybrid"
        return next(iter(dense), "flat")

    @property
    def wire(self) -> str:
        """The format of messages; topk only if some message was sparse."""
        wire = self.route.wire.name
        return "fp32" if wire == "topk" and self.all_ways and not self.all_ways["sparse"] else wire

    @property
    def ways_text(self) -> str:
        """How messages of measured steps went, for a person."""
        total = sum(self.all_ways.values())
        parts = ", ".join(f"{count} {way}" for way, count in sorted(self.all_ways.items()))
        return f"{total} messages in measured steps: {parts}" if total else "no message in a measured step"

    def result(self, sums: Sequence[dict[str, Any] | None]) -> ExchangeResult:
        """The result of the run.

        Args:
            sums: for each rank, its times of a step (fields of `StepSums`); None where no step was watched.
        """
        route, window = self.route, len(self.moments.steps)
        known = [each for each in sums if each is not None]
        inside, across = self._sent()
        return ExchangeResult(
            carrier=route.carrier,
            by="dlbench",
            exchange=self.exchange,
            fusion=self.fusion,
            wire=self.wire,
            group_size=route.group_size,
            num_groups=self.num_ranks // route.group_size,
            messages=self._messages(),
            bytes_inside=inside,
            bytes_across=across,
            **{key: statistics.fmean(each[key] for each in known) for key in (known[0] if known else ())},
            wire_overflows=self.overflows,
            density=route.wire.density,
            dense_switches=route.wire.dense_switches,
            window_steps=window,
            evidence=(
                f"counted by dlbench in every step; times from the last {window} measured steps; bytes by the closed "
                "form of each exchange"
            ),
            gradients=self._gradients(),
            costs=route.costs,
            hybrid_threshold_bytes=route.threshold_bytes,
        )

    def _sent(self) -> tuple[float, float]:
        """Bytes that a rank sends in a step, inside its group and across, mean over ranks."""
        width = self.route.wire.bytes_per_element
        each = [self.route.method.sent(count * width) for count in self.elements]
        return sum(inside for inside, _ in each), sum(across for _, across in each)

    def _messages(self) -> tuple[Message, ...]:
        times = self.moments.messages() if self.moments.steps else [None] * len(self.messages)
        return tuple(
            Message(
                num_bytes=num_bytes,
                num_tensors=len(one),
                method=ways.most_common(1)[0][0] if ways else self.route.method.way(num_bytes),
                ready_s=None if time is None else time.ready_s,
                start_s=None if time is None else time.start_s,
                exchange_s=None if time is None else time.exchange_s,
            )
            for one, num_bytes, ways, time in zip(self.messages, self.message_bytes, self.ways, times, strict=True)
        )

    def _gradients(self) -> tuple[GradientTime, ...]:
        ready = self.gradient_times
        order = sorted(range(len(ready)), key=lambda n: (ready[n], n))
        return tuple(GradientTime(name=self.names[n], num_bytes=self.sizes[n], ready_s=ready[n]) for n in order)


def exchange_settings(plan: RunPlan, base: Sequence[Setting], account: Account) -> list[Setting]:
    """What was asked of the exchange and what was in force, after the engine's own settings.

    Args:
        plan: what was asked.
        base: settings of the engine that carried the messages.
        account: what was counted.
    """
    sync, sizes = plan.sync, account.message_bytes
    how = f"{len(sizes)} messages per step, of {min(sizes)} to {max(sizes)} bytes, counted"
    group = f"ranks of the group that rank 0 exchanged in; {account.ways_text}"
    rows = [
        ("sync.exchange", sync.exchange, account.exchange, account.ways_text),
        ("sync.fusion", sync.fusion_in_force, _fusion_as_counted(account), how),
        ("sync.wire", sync.wire, account.wire, f"what was handed to {account.route.carrier}; {account.ways_text}"),
        ("sync.inside", sync.inside, account.route.inside, f"carried by {account.route.carrier}"),
        ("sync.group_size", sync.group_size, account.route.group_size, group),
    ]
    own = [Setting(key=k, requested=asked, effective=found, evidence=evidence) for k, asked, found, evidence in rows]
    return [*base, *own]


def _fusion_as_counted(account: Account) -> str:
    """The fusion that the messages of the run agree with."""
    counts, sizes, least = [len(one) for one in account.messages], account.message_bytes, fusion_bytes(account.fusion)
    agrees = {"own:none": set(counts) == {1}, "own:single": len(counts) == 1}
    if agrees.get(account.fusion, all(size >= (least or 0) for size in sizes[:-1])):
        return account.fusion
    return f"{len(counts)} messages"
