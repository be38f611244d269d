"""A projection made by hand: figures that no model gave, for what is printed, drawn and recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.projected import PARTS, QUANTILES, Band, Flag, HeldOut, Projection, Refused, StepPart, Target
from dlbench.specs.comm import Level, NetworkModel, Piece

STEPS = {1: 0.1, 2: 0.104, 4: 0.109, 8: 0.115}
SHARES = dict(zip(PARTS, (0.67, 0.05, 0.02, 0.03, 0.06, 0.17), strict=True))


def band(median: float, width: float = 0.05) -> Band:
    """Quantiles around a median, 80 % of the draws within `width` of it."""
    return Band(quantiles=tuple(median * (1 + width * (share - 0.5) / 0.4) for share in QUANTILES))


def network() -> NetworkModel:
    level = Level(pieces=(Piece(up_to_bytes=None, alpha_s=2e-5, beta_s_per_byte=8e-10),), links=1)
    return NetworkModel(system="box", transport="torch-gloo", inside=level, across=level, num_points=48)


def ingredients(**changes: Any) -> Ingredients:
    """Of five runs at each of 1, 2, 4 and 8 ranks, one rank per node."""
    points = tuple(
        PointFigures(
            ranks=ranks,
            nodes=ranks,
            batch_per_rank=32,
            runs=tuple(RunFigures(run_id=f"r{ranks}-{n}", step_s=step * (1 + n / 500)) for n in range(5)),
        )
        for ranks, step in STEPS.items()
    )
    given: dict[str, Any] = {
        "title": "resnet50 ci, DDP over Gloo, system box",
        "source": "runs",
        "configuration": "c0ffee",
        "system": "box",
        "sample_unit": "images",
        "engine": "ddp",
        "data": "synthetic data",
        "points": points,
        "network": network(),
    }
    return Ingredients(**(given | changes))


def target(ranks: int, step: float = 0.14, **changes: Any) -> Target:
    made = Target(
        ranks=ranks,
        nodes=ranks,
        batch_per_rank=32,
        doublings=math.log2(ranks / 8),
        step=band(step),
        throughput=band(32 * ranks / step),
        efficiency=band(0.1 / step),
        parts=tuple(StepPart(name=name, seconds=band(step * share)) for name, share in SHARES.items()),
        model_error=band(1.0),
        algorithms=("ring",),
        flags=(),
    )
    return replace(made, **changes)


FAR = Flag(code="F2", text="far: 32 times the largest measured rank count")


def projection(*targets: Target, **changes: Any) -> Projection:
    """Of 64 and 256 ranks, the second one flagged, and 1,024 refused."""
    made = Projection(
        digest=ingredients().digest,
        anchor_ranks=8,
        anchor_nodes=8,
        changes=(),
        targets=targets or (target(64), target(256, 0.152, flags=(FAR,))),
        refused=(
            Refused(
                code="R7",
                ranks=1024,
                text="1024 ranks are more than 64 times the largest measured count, 8",
                remedy="measure 16 ranks or more",
            ),
        ),
        held_out=(HeldOut(ranks=8, anchor_ranks=4, doublings=1.0, projected_s=0.117, measured_s=0.1155),),
        flags=(),
    )
    return replace(made, **changes)
