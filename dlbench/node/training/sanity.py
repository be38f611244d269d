"""Sanity before numbers: a run that fails here yields no performance figure."""

from __future__ import annotations

import hashlib

from torch import nn

from dlbench.records.record import Check, RankResult
from dlbench.specs.plan import RunPlan


def parameters_digest(model: nn.Module) -> str:
    """SHA-256 over all parameters in order, as bytes. Buffers (batch-norm statistics) are a rank's own."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def check(plan: RunPlan, ranks: list[RankResult], *, measured_steps: int) -> list[Check]:
    """All sanity checks of a run, from what its ranks say; `measured_steps` are those that rank 0 made."""
    work = _equal_work(plan, ranks, measured_steps)
    return [_finite(ranks), _same_start(ranks), _same_end(ranks), _trained(ranks), work]


def _finite(ranks: list[RankResult]) -> Check:
    bad = [r.rank for r in ranks if not r.losses_finite]
    detail = f"loss not finite on ranks {_some(bad)}" if bad else "every loss on every rank is finite"
    return Check(name="finite loss", passed=not bad, detail=detail)


def _same_start(ranks: list[RankResult]) -> Check:
    return _same("identical start", [r.initial_parameters_sha256 for r in ranks], "before the first step")


def _same_end(ranks: list[RankResult]) -> Check:
    return _same("identical parameters", [r.final_parameters_sha256 for r in ranks], "after the last step")


def _same(name: str, digests: list[str], when: str) -> Check:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    detail = (
        f"{when}, the parameters of ranks {_some(odd)} differ from rank 0's"
        if odd
        else f"{when}, SHA-256 {digests[0][:16]} on all {len(digests)} ranks"
    )
    return Check(name=name, passed=not odd, detail=detail)


def _trained(ranks: list[RankResult]) -> Check:
    idle = [r.rank for r in ranks if r.initial_parameters_sha256 == r.final_parameters_sha256]
    detail = f"parameters of ranks {_some(idle)} never changed" if idle else "the parameters changed"
    return Check(name="trained", passed=not idle, detail=detail)


def _equal_work(plan: RunPlan, ranks: list[RankResult], measured_steps: int) -> Check:
    # Training to a quality ends when it is met, everywhere after the same step.
    steps = plan.measure.measured_steps if plan.measure.until == "steps" else measured_steps
    expected = plan.workload.train.batch_per_rank * steps
    odd = [r.rank for r in ranks if r.samples != expected]
    whole = len(ranks) == plan.layout.ranks
    if not whole:
        detail = f"{len(ranks)} ranks reported, the plan has {plan.layout.ranks}"
    elif odd:
        detail = f"ranks {_some(odd)} did not process the planned {expected} samples"
    else:
        detail = f"{expected} samples on each of {len(ranks)} ranks, as planned"
    return Check(name="equal work", passed=whole and not odd, detail=detail)


def _some(ranks: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:limit]))
    return shown + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")
