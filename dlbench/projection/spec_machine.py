"""A machine by data sheet: what its links and devices should do, where nothing was measured. What comes of it is ideal.

Computing is the roofline (Williams et al., "Roofline", CACM 52(4), 2009): each layer takes as long as its operations at
peak or its bytes at the memory's rate, whichever is longer; each operand travels once. Messages take alpha + bytes /
rate of the links that carry them.
"""

from __future__ import annotations

from dlbench.errors import UserError
from dlbench.perfmodels.data_sheets import TERA, sheet_of, why_no_peak
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.strategies.layers import ELEMENT_BYTES, WEIGHT_BYTES, LayerTimes
from dlbench.specs.base import Precision
from dlbench.specs.comm import DATA_SHEET, Level, NetworkModel, Piece
from dlbench.specs.layers import FLOPS_PER_MAC, Layer
from dlbench.specs.system import LinkSpec, NetworkSpec, SystemSpec

_GIGA = 1e9


def network_of(system: SystemSpec) -> NetworkModel:
    """The network that a system file states."""
    stated = system.network
    if stated is None or stated.inside is stated.across is None:
        raise UserError(f"system {system.name}: network.across: is missing; a projection by data sheet needs its links")
    beyond = stated.beyond or stated.across
    if stated.nodes_per_leaf is None:
        beyond = None
    elif beyond is not None and (stated.beyond is None or stated.leaf_taper is not None):
        ports = stated.nodes_per_leaf * ((stated.across and stated.across.links) or system.node.default_ranks)
        beyond = beyond.model_copy(update={"links": max(1, round(ports / (stated.leaf_taper or 1.0)))})
    levels = [one for one in (stated.inside, stated.across, beyond) if one is not None]
    return NetworkModel(
        system=system.name,
        transport=DATA_SHEET,
        inside=_level(stated.inside),
        across=_level(stated.across),
        beyond=_level(beyond),
        sources=tuple(dict.fromkeys(one.source for one in levels)),
    )


def layout_of(system: SystemSpec, ranks: int) -> Layout:
    """Where so many ranks are: full nodes, full leaves."""
    group = min(ranks, system.node.default_ranks)
    leaf = None if system.network is None else system.network.nodes_per_leaf
    return Layout(ranks=ranks, group_size=group, leaf_size=None if leaf is None else leaf * group)


def elsewhere(given: Ingredients, system: SystemSpec, network: NetworkModel | None) -> Ingredients:
    """The same training on the nodes, leaves and network of a system. `network`: its measured costs; None: by data
    sheet. Of the system of the runs itself only what these do not know is filled in.
    """
    stated = system.network or NetworkSpec()
    leaves = {"nodes_per_leaf": stated.nodes_per_leaf, "leaf_taper": stated.leaf_taper}
    if given.system in ("", system.name):
        known = network or given.network or network_of(system)
        notes = (*given.notes, f"Costs of messages are those of {system.name} by data sheet.")
        missing = {name: value for name, value in leaves.items() if getattr(given, name) is None}
        update = {**missing, "network": known, "notes": notes if known.transport == DATA_SHEET else given.notes}
        return given.model_copy(update=update)
    if given.network is None:
        raise UserError(
            f"--system {system.name}: costs of messages on {given.system} are not known, so neither is what another "
            f"network changes: dlbench comm submit --system {given.system}, then the same command with its folder"
        )
    per_node = system.node.default_ranks
    ran = given.exchange and given.exchange.model_copy(update={"group_size": per_node})
    points = tuple(point.model_copy(update={"leaves": None}) for point in given.points)
    own = {"system": system.name, "ranks_per_node": per_node, "points": points, "exchange": ran}
    return given.model_copy(update={**leaves, **own, "network": network or network_of(system), "slow_hosts": None})


def peak_tflops(system: SystemSpec, precision: Precision) -> float | None:
    """Of one device, as its system or its data sheet states it."""
    sheet = sheet_of((system.device and system.device.name) or "")
    return system.node.peak_tflops.get(precision) or (None if sheet is None else sheet.tflops.get(precision))


def ideal_times(
    layers: tuple[Layer, ...], system: SystemSpec, precision: Precision, *, batch: int, optimizer_slots: int
) -> LayerTimes:
    """What the layers take on one device at its peak. `batch`: samples of a rank, which share the weights that are
    read.
    """
    device, name = system.device, (system.device and system.device.name) or ""
    sheet, tflops = sheet_of(name), peak_tflops(system, precision)
    if not tflops:
        raise UserError(
            f"system {system.name}: node.peak_tflops: no {precision} there, and no device.name that has one"
            f"{f' ({why_no_peak(name, precision)})' * bool(name)}; give {{{precision}: TFLOP/s}} and peak_source"
        )
    if device is not None and device.memory_gb_per_s is not None:
        rate = device.memory_gb_per_s * _GIGA
    elif sheet is not None and sheet.memory_bytes_per_s is not None:
        rate = sheet.memory_bytes_per_s
    else:
        raise UserError(f"system {system.name}: device.memory_gb_per_s: is missing, and no data sheet on file says it")
    flops = tflops * TERA
    width = ELEMENT_BYTES[precision]

    def seconds(layer: Layer, *, backward: bool) -> float:
        # Forward reads x, writes y; backward reads y's gradient and x, and writes x's gradient where anybody needs it.
        elements = layer.outputs + layer.inputs * (1 + layer.has_gradient if backward else 1)
        weights = (layer.weights + layer.shared_weights) * (2 if backward else 1) / batch
        moved = (elements + weights) * width / rate
        return max(FLOPS_PER_MAC * layer.passes(backward=backward) / flops, moved)

    weights = sum(layer.weights for layer in layers)
    return LayerTimes(
        forward=tuple(seconds(layer, backward=False) for layer in layers),
        backward=tuple(seconds(layer, backward=True) for layer in layers),
        # Weight, gradient and the optimizer's values are read; weight and values are written.
        update_s=weights * (3 + 2 * optimizer_slots) * WEIGHT_BYTES / rate,
    )


def _level(link: LinkSpec | None) -> Level | None:
    if link is None:
        return None
    piece = Piece(alpha_s=link.alpha_s, beta_s_per_byte=1 / (link.gb_per_s * _GIGA))
    return Level(pieces=(piece,), links=link.links)
