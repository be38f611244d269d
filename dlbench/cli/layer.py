"""`dlbench layer`: times one layer whole and at 1/p of its filters, channels and extent."""

from __future__ import annotations

import json
import socket
import sys
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.errors import UserError, nearest

if TYPE_CHECKING:
    from dlbench.specs.layers import Layer
    from dlbench.specs.plan import RunPlan

MAX_REPEATS = 1000


@click.command()
@click.argument("workload")
@shared.value_option("--layer", "NAME", "Convolution or dense layer (default: the one with the most multiply-adds).")
@shared.value_option("--parts", "2,4", "Numbers of parts, each at most 1,024.", "2,4,8")
@shared.value_option("--repeats", "N", "Samples of each time.", 5, type=click.IntRange(1, MAX_REPEATS))
@shared.PRESET
@shared.KEYS
@shared.SYSTEM
@shared.DRY_RUN
@shared.AS_JSON
def layer(workload: str, parts: str, repeats: int, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Time one layer of WORKLOAD whole and at 1/p of its filters, channels and extent.

    Model parallelism divides layers so. The ideal is 1/p of the time; the result is how near the device comes to it,
    forward and backward, and what copying a part out and joining parts takes. Nothing is sent: a rank alone is timed.

    \b
    Example:
      dlbench layer resnet50 --layer stages.0.0.conv2 --parts 2,4,8 --set train.batch_per_rank=32
    """
    from dlbench.cli.report import emit, require_modules
    from dlbench.jobs.node_program import PROFILE, answer_of, supervised
    from dlbench.jobs.processes import interrupted_by_signals
    from dlbench.records.layer_parts import LayerOrder, LayerTimes
    from dlbench.specs.requests import Request, parse_counts, parse_set
    from dlbench.views.layer_parts import layer_document, timings_of

    request = Request(
        workload=workload,
        preset=options["preset"],
        system=options["system"],
        engine="single",
        launcher="local",
        overrides=parse_set(options["overrides"]),
    )
    (plan,) = shared.expand_request(request, trains=False)
    chosen, counts = _chosen(plan, options["layer"]), parse_counts(parts, "--parts")
    if counts[0] < 2 or counts[-1] > 1024:
        raise UserError(f"--parts {parts}: must be from 2 to 1,024")
    order = LayerOrder(plan=plan, layer=chosen.name, counts=counts, repeats=repeats)
    command = supervised(plan.system.python or sys.executable, PROFILE)
    if dry_run:
        from dlbench.jobs.scripts.words import quoted

        click.echo(f"# measures the request on its standard input:\n# {json.dumps(order.model_dump(mode='json'))}")
        click.echo(quoted(command).encode())
        return
    require_modules("layer", "numpy")
    shared.require_torch(plan.system)
    click.echo(f"timing {chosen.name} of {plan.workload.name}, whole and in parts", err=True)
    with interrupted_by_signals():
        times = answer_of(command, order.model_dump(mode="json"), LayerTimes, "the process that times the layer")
    emit(layer_document(timings_of(plan, chosen, counts, times, socket.gethostname())), "json" if as_json else "text", None)


def _chosen(plan: RunPlan, name: str | None) -> Layer:
    workload = plan.workload
    layers = {layer.name: layer for layer in workload.model.layer_table(workload.data) if layer.is_product}
    if not layers:
        raise UserError(f"layer: layers of {workload.name} are not known (layer_table, docs/architecture.md)")
    if name is None:
        return max(layers.values(), key=lambda layer: layer.macs)
    if name not in layers:
        raise UserError(f"--layer {name}: is no convolution or dense layer of {workload.name}; {nearest(name, layers)}")
    return layers[name]
