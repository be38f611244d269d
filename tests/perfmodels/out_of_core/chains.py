"""Small chains by hand, and drawn by hypothesis."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, TransferRates, Unit

DECISIONS: tuple[Decision, ...] = ("keep", "swap", "recompute", "recompute-swap")


def unit(number: int, **changed: object) -> Unit:
    """1 s forward, 2 s backward; 100 bytes saved, 10 bytes of input."""
    values: dict[str, object] = {
        "name": f"layers.{number}",
        "forward_s": 1.0,
        "backward_s": 2.0,
        "saved_bytes": 100,
        "input_bytes": 10 if number else 0,
        "input_saved": True,
    }
    return Unit.model_validate(values | changed)


def equal_chain(count: int, **changed: object) -> Chain:
    values: dict[str, object] = {
        "units": tuple(unit(number) for number in range(count)),
        "batch": 4,
        "output_bytes": 10,
    }
    return Chain.model_validate(values | changed)


def link(rate: float, *, latency_s: float = 0.0, drag: float = 0.0) -> TransferRates:
    return TransferRates(tier="test", out_bytes_per_s=rate, in_bytes_per_s=rate, latency_s=latency_s, drag=drag)


def blocks(decisions: str | Sequence[Decision]) -> tuple[PlannedBlock, ...]:
    """A unit a block; k, s, r and R are the decisions in their order."""
    named = dict(zip("ksrR", DECISIONS, strict=True))
    return tuple(
        PlannedBlock(first=number, last=number, decision=named.get(decision, decision))  # type: ignore[arg-type]
        for number, decision in enumerate(decisions)
    )


def drawn_chain(draw: random.Random, most: int = 7) -> Chain:
    """Any chain of up to `most` units: small numbers, many of them 0."""

    def size() -> int:
        return draw.choice((0, 1, draw.randint(0, 200)))

    def time() -> float:
        return draw.choice((0.0, 1.0, draw.uniform(0, 3)))

    made = [size() for _ in range(draw.randint(1, most) + 2)]
    """Gradients: of head, of what is before the chain, of each unit."""
    shared = [draw.random() < 0.7 for _ in made[2:]]
    return Chain(
        units=tuple(
            Unit(
                name=f"layers.{number}",
                forward_s=time(),
                backward_s=time(),
                saved_bytes=size(),
                saved_count=draw.choice((1, 1, 3)),
                input_bytes=size() if number or not shared[0] else 0,
                input_saved=draw.random() < 0.8,
                joins=draw.random() < 0.85,
                input_shared=shared[number],
                gradient_bytes=gradients,
                forward_working_bytes=size(),
                backward_working_bytes=gradients + size(),
                passing_working_bytes=size(),
                recomputing_working_bytes=size(),
                piecemeal_bytes=gradients + size(),
            )
            for number, gradients in enumerate(made[2:])
        ),
        batch=4,
        output_bytes=size(),
        before_s=time(),
        turn_s=time(),
        after_s=time(),
        state_bytes=size(),
        outside_bytes=size(),
        turn_bytes=made[0] + size(),
        turn_gradient_bytes=made[0],
        after_bytes=made[1] + size(),
        after_gradient_bytes=made[1],
        update_bytes=size(),
    )


def drawn_plan(draw: random.Random, chain: Chain) -> tuple[PlannedBlock, ...]:
    found: list[PlannedBlock] = []
    for number, each in enumerate(chain.units):
        if found and each.joins and draw.random() < 0.4:
            found[-1] = PlannedBlock(first=found[-1].first, last=number, decision=found[-1].decision)
        else:
            found.append(PlannedBlock(first=number, last=number, decision=draw.choice(DECISIONS)))
    return tuple(found)


def _chain_and_plan(draw: random.Random) -> tuple[Chain, tuple[PlannedBlock, ...]]:
    chain = drawn_chain(draw)
    return chain, drawn_plan(draw, chain)


seeds = st.integers(0, 2**32).map(random.Random)
"""A chain is drawn at once from a seed: number by number takes hypothesis a hundred times longer."""
chains = seeds.map(drawn_chain)
planned = seeds.map(_chain_and_plan)
links = st.builds(
    link, st.floats(10, 1000), latency_s=st.floats(0, 0.5), drag=st.sampled_from((0.0, 0.0, 0.2, 0.7, 1.0, 2.0))
)
