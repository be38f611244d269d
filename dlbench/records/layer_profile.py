"""The layers of a paced network from a run that computed: when its gradients were ready, what its passes took."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import DlbenchError, UserError
from dlbench.lazy import np
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import PacedLayer, PacedModel
from dlbench.units import format_bytes, format_seconds

if TYPE_CHECKING:  # imported where a run is read: `dlbench run` asks this of every plan
    from dlbench.records.scan import Run


def with_layers(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """The plan with the layers of the run that `model.layers_from` names, and what they are, in a sentence.

    Every other plan as it is, and None. Raises UserError: there is no such run, or its record has no profile.
    """
    model = plan.workload.model
    if not isinstance(model, PacedModel) or model.layers_from is None:
        return plan, None
    from dlbench.records.scan import read_run

    key, path = f"model.layers_from {model.layers_from}", Path(model.layers_from)
    try:
        run = read_run(path.parent if path.is_file() else path)
        layers = _layers(run)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    except DlbenchError as error:
        raise UserError(f"{key}: holds no run whose layers could be taken: {error}") from None
    own = run.plan.workload.train.batch_per_rank
    forward_s, backward_s = sum(one.forward_s for one in layers), sum(one.backward_s for one in layers)
    note = (
        f"model.layers_from: {len(layers)} gradients of {run.plan.run_id}, "
        f"{format_bytes(sum(one.bytes for one in layers))}; at its batch of {own} forward took "
        f"{format_seconds(forward_s * own)} and backward {format_seconds(backward_s * own)}"
    )
    if (batch := plan.workload.train.batch_per_rank) != own:
        note += f"; at {batch} they take {batch / own:.3g} times as long: --set train.batch_per_rank={own} repeats it"
    taken = model.model_copy(update={"layers": layers, "layers_from": run.plan.run_id})
    workload = plan.workload.model_copy(update={"model": taken})
    return plan.model_copy(update={"workload": workload}), note


def _layers(run: Run) -> tuple[PacedLayer, ...]:
    """In the order of the forward pass; a layer's share of the forward pass is that of the backward pass."""
    record, train = run.record, run.plan.workload.train
    exchange = record.exchange if record is not None and record.state == "valid" else None
    if record is None or exchange is None:
        why = f"its run is {run.state}" if run.state != "valid" else "one rank exchanges nothing"
        raise UserError(f"no profile of gradients: {why}; name a valid run of two ranks or more")
    if not exchange.gradients:
        raise UserError(
            "no profile of gradients: none was watched; record one with a measure.warmup_steps of 10 or more"
        )
    gradients = sorted(exchange.gradients, key=lambda one: one.ready_s)
    ready = [0.0, *(one.ready_s for one in gradients)]
    ready[-1] = max(ready[-1], exchange.backward_s or 0.0)  # what backward does after its last gradient delays it here
    passes = [after - before for before, after in pairwise(ready)]
    from dlbench.records.rows.steps import read_steps

    steps = read_steps(run.folder.steps(0)).measured
    # Gradients are ready in the last part of a batch; the forward phase is that of all parts.
    part = train.batch_per_rank / train.gradient_accumulation
    per_backward = float(np.median(steps["forward_ns"])) / 1e9 / train.batch_per_rank / (ready[-1] or 1.0)
    return tuple(
        PacedLayer(bytes=one.num_bytes, forward_s=spent * per_backward, backward_s=spent / part)
        for one, spent in reversed(list(zip(gradients, passes, strict=True)))
    )
