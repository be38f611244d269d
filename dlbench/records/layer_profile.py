"""Makes the layers of a paced network from a run: ready times of its gradients, times of its passes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import DlbenchError, UserError
from dlbench.lazy import np
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import PacedLayer, PacedModel
from dlbench.units import format_bytes, format_seconds

if TYPE_CHECKING:  # It is imported where a run is read, as `dlbench run` calls `with_layers` for every plan.
    from dlbench.records.scan import Run


def with_layers(plan: RunPlan) -> tuple[RunPlan, str | None]:
    """Returns the plan with the layers of the run in `model.layers_from`, and a note. Raises UserError: it has none."""
    model = plan.workload.model
    if not isinstance(model, PacedModel) or model.layers_from is None:
        return plan, None
    key = f"model.layers_from {model.layers_from}"
    run = run_of(key, model.layers_from)
    try:
        layers = _layers(run)
    except DlbenchError as error:
        raise UserError(f"{key}: {error}") from None
    run_batch = run.plan.workload.train.batch_per_rank
    forward_s, backward_s = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    note = (
        f"model.layers_from: {len(layers)} gradients of {run.plan.run_id}, "
        f"{format_bytes(sum(layer.bytes for layer in layers))}; at its batch of {run_batch} forward took "
        f"{format_seconds(forward_s * run_batch)} and backward {format_seconds(backward_s * run_batch)}"
    )
    batch = plan.workload.train.batch_per_rank
    if batch != run_batch:
        factor = f"{batch / run_batch:.3g}"
        note += f"; at {batch} they take {factor} times as long: --set train.batch_per_rank={run_batch} repeats it"
    with_layers_of_run = model.model_copy(update={"layers": layers, "layers_from": run.plan.run_id})
    workload = plan.workload.model_copy(update={"model": with_layers_of_run})
    return plan.model_copy(update={"workload": workload}), note


def run_of(key: str, folder: str) -> Run:
    """Returns the run in a folder, or of a file in it. Raises UserError, with the key and its value: there is none."""
    from dlbench.records.scan import read_run

    path = Path(folder)
    try:
        return read_run(path.parent if path.is_file() else path)
    except DlbenchError as error:
        raise UserError(f"{key}: has no run to read: {error}") from None


def _layers(run: Run) -> tuple[PacedLayer, ...]:
    record, train = run.record, run.plan.workload.train
    exchange = record.exchange if record is not None and record.state == "valid" else None
    if record is None or exchange is None:
        why = "a run of one rank has no exchange" if run.state == "valid" else f"its run is {run.state}"
        raise UserError(f"no profile of gradients: {why}; name a valid run of two ranks or more")
    if not exchange.gradients:
        raise UserError(
            "no profile of gradients: it was not recorded; record one with measure.warmup_steps of 10 or more"
        )
    gradients = sorted(exchange.gradients, key=lambda gradient: gradient.ready_s)
    ready = [0.0, *(gradient.ready_s for gradient in gradients)]
    ready[-1] = max(ready[-1], exchange.backward_s or 0.0)  # The rest of the backward pass belongs to the last.
    passes = [after - before for before, after in pairwise(ready)]
    from dlbench.records.rows.steps import read_steps

    steps = read_steps(run.folder.steps(0)).measured
    # Ready times are of the last micro-batch, the forward phase is of all of them.
    part = train.batch_per_rank / train.gradient_accumulation
    per_backward = float(np.median(steps["forward_ns"])) / 1e9 / train.batch_per_rank / (ready[-1] or 1.0)
    return tuple(
        PacedLayer(bytes=gradient.num_bytes, forward_s=spent * per_backward, backward_s=spent / part)
        for gradient, spent in reversed(list(zip(gradients, passes, strict=True)))
    )
