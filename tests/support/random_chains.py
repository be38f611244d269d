"""Chains of units drawn at random: networks of several shapes, links from slow to fast."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.perfmodels.out_of_core.search import smallest_capacity
from dlbench.specs.out_of_core import Chain, TransferRates, Unit

SHAPES = ("equal", "cnn", "growing", "random", "spiky")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    chain: Chain
    rates: TransferRates
    capacity_bytes: int


def random_case(seed: int, *, units: int | None = None, most: int = 10) -> Case:
    """A chain with rates and a capacity between what just fits and what training in core holds.

    The link moves all activations in 0.1 to 10 times the pass, in each direction by itself; a fifth of the cases have
    just the smallest capacity.
    """
    draw = random.Random(seed)
    count = units or draw.randint(2, most)
    shape = SHAPES[seed % len(SHAPES)]
    chain = _chain(draw, count, shape)
    in_core = fixed_plan(chain, None, "none", "none").predicted.peak_bytes
    smallest = smallest_capacity(chain, recompute=True, swap=True)
    activations = in_core - chain.fixed_bytes
    slowness = 10 ** draw.uniform(-1, 1)
    rates = TransferRates(
        tier="drawn",
        out_bytes_per_s=max(1.0, activations / (chain.useful_s * slowness)),
        in_bytes_per_s=max(1.0, activations / (chain.useful_s * slowness * 2 ** draw.uniform(-1, 1))),
        latency_s=draw.choice((0.0, 1e-3 * chain.useful_s / count, 0.05 * chain.useful_s / count)),
        drag=draw.choice((0.0, 0.0, 0.1, 0.3, 1.0)),
    )
    share = 0.0 if draw.random() < 0.2 else draw.random()
    return Case(shape=shape, chain=chain, rates=rates, capacity_bytes=smallest + round(share * (in_core - smallest)))


def _chain(draw: random.Random, count: int, shape: str) -> Chain:
    units = []
    largest = 10 ** draw.uniform(4, 9)
    ratio = draw.uniform(1, 3)
    """Backward over forward pass."""
    halves = draw.choice((2, 3, 4))
    """Stages of a convolutional network; each halves what is saved."""
    inner = draw.choice((0.0, 1.0, 3.0, 8.0))
    """Bytes that a unit saves beside its boundaries, over these."""
    for number in range(count):
        place = number / max(1, count - 1)
        size, time = {
            "equal": (1.0, 1.0),
            "cnn": (0.5 ** int(place * halves), 1.0),
            "growing": (0.1 + place, 1.0),
            "random": (draw.random(), draw.expovariate(1.0)),
            "spiky": (1.0 if draw.random() < 0.3 else 0.05, draw.choice((0.1, 1.0, 4.0))),
        }[shape]
        boundary = 0 if number == 0 else max(1, round(largest * size * draw.choice((1.0, 1.0, 0.25))))
        units.append(
            Unit(
                name=f"layers.{number}",
                forward_s=1e-3 * time,
                backward_s=1e-3 * time * (ratio if shape != "random" else draw.uniform(0.5, 3)),
                saved_bytes=round(largest * size * inner),
                input_bytes=boundary,
                input_saved=draw.random() < 0.9,
                joins=draw.random() < 0.95,
                gradient_bytes=round(largest * draw.random() * 0.1),
                backward_working_bytes=round(largest * size * draw.random()),
            )
        )
    return Chain(
        units=tuple(units),
        batch=32,
        output_bytes=round(largest * draw.choice((0.0, 0.1, 1.0))),
        before_s=1e-3 * draw.choice((0.0, 0.5)),
        turn_s=1e-3 * draw.choice((0.0, 0.2, 1.0)),
        after_s=1e-3 * draw.choice((0.0, 0.5)),
        state_bytes=round(largest * draw.random()),
        outside_bytes=round(largest * draw.random()),
        turn_bytes=round(largest * draw.random()),
    )
