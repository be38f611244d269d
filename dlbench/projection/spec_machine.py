"""Times of computing and messages by data sheets: rooflines (Williams et al., CACM 52(4), 2009), alpha + n / rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from dlbench.errors import UserError
from dlbench.perfmodels.data_sheets import TERA, sheet_of, why_no_peak
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.strategies.layers import ELEMENT_BYTES, LayerTimes
from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import percent
from dlbench.specs.base import Precision
from dlbench.specs.comm import DATA_SHEET, Level, NetworkModel, Piece
from dlbench.specs.layers import FLOPS_PER_MAC, WEIGHT_BYTES, Layer
from dlbench.specs.system import LinkSpec, NetworkSpec, SystemSpec
from dlbench.specs.training import TrainSpec
from dlbench.units import format_bytes, format_number

_GIGA = 1e9


def network_of(system: SystemSpec) -> NetworkModel:
    """Returns the network of a system file."""
    stated = system.network
    if stated is None or stated.inside is stated.across is None:
        raise UserError(f"system {system.name}: network.across is missing; a projection by data sheet needs the links")
    beyond = stated.beyond or stated.across
    if stated.nodes_per_leaf is None:
        beyond = None
    elif beyond is not None and (stated.beyond is None or stated.leaf_taper is not None):
        ports = stated.nodes_per_leaf * ((stated.across and stated.across.links) or system.node.default_ranks)
        beyond = beyond.model_copy(update={"links": max(1, round(ports / (stated.leaf_taper or 1.0)))})
    levels = [link for link in (stated.inside, stated.across, beyond) if link is not None]
    return NetworkModel(
        system=system.name,
        transport=DATA_SHEET,
        inside=_level(stated.inside),
        across=_level(stated.across),
        beyond=_level(beyond),
        sources=tuple(dict.fromkeys(link.source for link in levels)),
    )


def layout_of(system: SystemSpec, ranks: int) -> Layout:
    """Returns the layout of ranks on full nodes and full leaves."""
    group = min(ranks, system.node.default_ranks)
    layout = Layout(ranks=ranks, group_size=group)
    if system.network is None or system.network.nodes_per_leaf is None:
        return layout
    return replace(layout, leaf_size=system.network.nodes_per_leaf * group)


def elsewhere(ingredients: Ingredients, system: SystemSpec, network: NetworkModel | None) -> Ingredients:
    """Returns the ingredients on a system by its costs or data sheet; on the runs' own, unknown values are added."""
    stated = system.network or NetworkSpec()
    leaves = {"nodes_per_leaf": stated.nodes_per_leaf, "leaf_taper": stated.leaf_taper}
    if ingredients.system in ("", system.name):
        costs = network or ingredients.network or network_of(system)
        notes = ingredients.notes
        if costs.transport == DATA_SHEET:
            notes = (*notes, f"Costs of messages are those of {system.name} by data sheet.")
        missing = {name: value for name, value in leaves.items() if getattr(ingredients, name) is None}
        return ingredients.model_copy(update={**missing, "network": costs, "notes": notes})
    if ingredients.network is None:
        raise UserError(
            f"--system {system.name}: costs of messages on {ingredients.system} are unknown, and so is the effect of "
            f"another network: dlbench comm submit --system {ingredients.system}, then repeat with its folder"
        )
    per_node = system.node.default_ranks
    ran = ingredients.exchange and ingredients.exchange.model_copy(update={"group_size": per_node})
    points = tuple(point.model_copy(update={"leaves": None}) for point in ingredients.points)
    target = {"system": system.name, "ranks_per_node": per_node, "points": points, "exchange": ran}
    return ingredients.model_copy(
        update={**leaves, **target, "network": network or network_of(system), "slow_hosts": None}
    )


def peak_tflops(system: SystemSpec, precision: Precision) -> float | None:
    """Returns the peak of one device by its system file or its data sheet."""
    peak = system.node.peak_tflops.get(precision)
    sheet = sheet_of((system.device and system.device.name) or "")
    if peak or sheet is None:
        return peak
    return sheet.tflops.get(precision)


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """The forward or backward pass of a layer at the peak of a device, per sample."""

    layer: str = field(metadata=column("Layer"))  # Of equal layers: the first.
    kind: str = field(metadata=column("Kind"))
    count: int = field(default=1, metadata=column("Equal layers"))
    half: str = field(metadata=column("Pass"))  # forward or backward.
    macs: int = field(metadata=column("Multiply-adds", text="{:,}".format))
    moved_bytes: float = field(metadata=column("Bytes", text=format_bytes))
    flops_per_byte: float = field(metadata=column("FLOP/B", text=format_number))
    bound_by: str = field(metadata=column("Bound by"))  # compute or memory.
    seconds: float = field(metadata=column("Time", unit="s"))  # Of one layer.


def _passes(
    layers: Sequence[Layer], system: SystemSpec, precision: Precision, batch: int, half: Literal["forward", "backward"]
) -> list[LayerPass]:
    """Returns a pass of each layer on one device at its peak. `batch`: samples of a rank, which share the weights."""
    flops_per_s, bytes_per_s = device_peak(system, precision), _memory_rate(system)
    is_backward, passes = half == "backward", []
    for layer in layers:
        # Forward reads x and writes y; backward reads y's gradient and x, and writes x's gradient if it is needed.
        elements = layer.outputs + layer.inputs
        weights = (layer.weights + layer.shared_weights) / batch
        if is_backward:
            elements += layer.inputs * layer.has_gradient
            weights *= 2
        macs, moved_bytes = layer.passes(backward=is_backward), (elements + weights) * ELEMENT_BYTES[precision]
        compute_s, memory_s = FLOPS_PER_MAC * macs / flops_per_s, moved_bytes / bytes_per_s
        layer_pass = LayerPass(
            layer=layer.name,
            kind=layer.kind,
            half=half,
            macs=macs,
            moved_bytes=moved_bytes,
            flops_per_byte=FLOPS_PER_MAC * macs / moved_bytes,
            bound_by="memory" if memory_s > compute_s else "compute",
            seconds=max(compute_s, memory_s),
        )
        passes.append(layer_pass)
    return passes


def ideal_times(
    layers: Sequence[Layer], system: SystemSpec, precision: Precision, *, batch: int, optimizer_slots: int
) -> LayerTimes:
    """Returns the times of layers on one device at its peak. `batch`: samples of a rank, which share the weights."""
    weights = sum(layer.weights for layer in layers)
    return LayerTimes(
        forward=tuple(row.seconds for row in _passes(layers, system, precision, batch, "forward")),
        backward=tuple(row.seconds for row in _passes(layers, system, precision, batch, "backward")),
        # Weight, gradient and the optimizer's values are read; weight and values are written.
        update_s=weights * (3 + 2 * optimizer_slots) * WEIGHT_BYTES / _memory_rate(system),
    )


def layer_rows(layers: Sequence[Layer], system: SystemSpec, train: TrainSpec) -> tuple[LayerPass, ...]:
    """Returns forward and backward pass of each layer at the workload's batch per rank, equal layers once."""
    first_layers: dict[Layer, Layer] = {}
    counts: Counter[str] = Counter()  # By name of the first of equal layers.
    for layer in layers:
        first = first_layers.setdefault(replace(layer, name="", block=0), layer)
        counts[first.name] += 1
    distinct, precision, batch = list(first_layers.values()), train.precision, train.batch_per_rank
    forward = _passes(distinct, system, precision, batch, "forward")
    backward = _passes(distinct, system, precision, batch, "backward")
    pairs = chain.from_iterable(zip(forward, backward, strict=True))
    return tuple(replace(layer_pass, count=counts[layer_pass.layer]) for layer_pass in pairs)


def layers_section(rows: Sequence[LayerPass]) -> Section:
    """Returns the products and bytes of layers, and which of them the memory bounds."""
    total_s = sum(row.count * row.seconds for row in rows)
    bound_s = sum(row.count * row.seconds for row in rows if row.bound_by == "memory")
    num_bound = sum(row.count for row in rows if row.bound_by == "memory")
    headline = f"Memory bounds {num_bound} of {sum(row.count for row in rows)} passes of layers, "
    headline += f"{percent(bound_s / total_s)} of their time"
    return Section(
        id="layers",
        title="Layers: products, bytes, and what bounds them",
        short_title="Layers",
        headline=headline,
        sheets=(Sheet(name="layers", title="Layers", columns=columns_of(LayerPass), rows=rows),),
        notes=("Per sample; inputs and outputs move once per pass, weights once per batch; fused kernels move less.",),
    )


def device_peak(system: SystemSpec, precision: Precision) -> float:
    """Returns FLOP/s of one device. Raises `UserError`: neither the system's file nor a data sheet has them."""
    name, tflops = (system.device and system.device.name) or "", peak_tflops(system, precision)
    if not tflops:
        reason = ""
        if name:
            reason = f" ({why_no_peak(name, precision)})"
        raise UserError(
            f"system {system.name}: node.peak_tflops has no {precision}, and there is no data sheet with it{reason}; "
            f"give {{{precision}: TFLOP/s}} and peak_source"
        )
    return tflops * TERA


def _memory_rate(system: SystemSpec) -> float:
    """Returns bytes/s of the memory of one device."""
    device = system.device
    sheet = sheet_of((device and device.name) or "")
    if device is not None and device.memory_gb_per_s is not None:
        return device.memory_gb_per_s * _GIGA
    if sheet is not None and sheet.memory_bytes_per_s is not None:
        return sheet.memory_bytes_per_s
    raise UserError(f"system {system.name}: device.memory_gb_per_s is missing, and no data sheet has it")


def _level(link: LinkSpec | None) -> Level | None:
    if link is None:
        return None
    piece = Piece(alpha_s=link.alpha_s, beta_s_per_byte=1 / (link.gb_per_s * _GIGA))
    return Level(pieces=(piece,), links=link.links)
