"""Tables of methods to hold activations: speed and memory, where their steps go, and the blocks of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import DASH, percent, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.views.out_of_core.numbers import MethodPoint, OutOfCore
from dlbench.views.out_of_core.passes import PlannedPart
from dlbench.views.view import place_of

METHODS_CAPTION = (
    "Peak: of the rank that held most in the measured steps, beyond the process itself; predicted: by the simulator, "
    "of pass and update. In core is predicted by the chain that runs of the other methods measured."
)
STEPS_CAPTION = "Predicted: the simulated passes plus what warm-up steps spent beside them."
DECISION_TITLES = {
    "keep": "keep",
    "swap": "swap",
    "recompute": "recompute",
    "recompute-swap": "recompute, input swapped",
}


def _place_columns(found: OutOfCore) -> tuple[Column[MethodPoint], ...]:
    """Ranks and nodes; people see them where there are several."""
    are_several = len({(one.ranks, one.nodes) for one in found.points}) > 1
    return (
        Column("ranks", "", lambda one: one.ranks),
        Column("nodes", "", lambda one: one.nodes),
        Column("", "At" if are_several else "", place_of, is_brief=True),
    )


def methods_sheet(found: OutOfCore) -> Sheet[MethodPoint]:
    """Speed and memory of every method and batch."""
    columns: tuple[Column[MethodPoint], ...] = (
        *_place_columns(found),
        Column("method", "", lambda one: one.method),
        Column("label", "Activations", lambda one: one.label, is_brief=True),
        Column("recompute", "", lambda one: one.recompute),
        Column("swap", "", lambda one: one.swap),
        Column("capacity", "", lambda one: one.capacity),
        Column("batch_per_rank", "Batch", lambda one: one.batch, is_brief=True),
        Column("parts", "", lambda one: one.parts),
        Column(
            "throughput_per_s",
            f"{found.sample_unit}/s",
            lambda one: one.throughput,
            _throughput,
            has_interval=True,
            is_brief=True,
        ),
        Column("peak_bytes", "Peak", lambda one: one.device_peak, has_interval=True, is_brief=True),
        Column(
            "predicted_peak_bytes", "Peak, predicted", lambda one: one.predicted_peak_bytes, unit="bytes", is_brief=True
        ),
        Column("peak_error_fraction", "Error", lambda one: one.peak_error, lambda one: _error(one.peak_error)),
        Column("capacity_bytes", "Capacity", lambda one: one.capacity_bytes, unit="bytes"),
        Column("in_core_bytes", "In core", lambda one: one.in_core_bytes, unit="bytes"),
        Column("process_peak_bytes", "Whole process", lambda one: one.process_peak, has_interval=True),
        Column(
            "over_budget_bytes",
            "Over the plan",
            lambda one: one.over_budget_bytes,
            lambda one: Cell("no") if one.over_budget_bytes == 0 else one.over_budget_bytes,
            unit="bytes",
        ),
        Column("runs", "Runs", lambda one: one.num_runs),
        Column(
            "runs_without_memory",
            "Did not fit",
            lambda one: one.num_without_memory,
            lambda one: runs_text(one.num_without_memory) if one.num_without_memory else "none",
        ),
    )
    return Sheet(
        name="out-of-core",
        title="Methods: speed and memory",
        columns=columns,
        rows=found.points,
        caption=METHODS_CAPTION,
        in_terminal=True,
    )


def _throughput(one: MethodPoint) -> Estimate | Cell:
    if one.throughput is not None:
        return one.throughput
    return Cell("does not fit" if one.num_without_memory else DASH)


def steps_sheet(found: OutOfCore) -> Sheet[MethodPoint]:
    """Where the steps of every method go, predicted and measured."""
    on_host = any(one.host_update_s is not None for one in found.points)
    verified = any(one.checksum_share is not None for one in found.points)
    columns: tuple[Column[MethodPoint], ...] = (
        *_place_columns(found),
        Column("label", "Activations", lambda one: one.label, is_brief=True),
        Column("batch_per_rank", "Batch", lambda one: one.batch, is_brief=True),
        Column("step_s", "Step, measured", lambda one: one.step, has_interval=True, is_brief=True),
        Column("predicted_step_s", "Step, predicted", lambda one: one.predicted_step, has_interval=True, is_brief=True),
        Column(
            "step_error_fraction",
            "Error",
            lambda one: one.step_error,
            lambda one: _error(one.step_error),
            is_brief=True,
        ),
        Column("recompute_fraction", "Recomputing", lambda one: one.recompute_share, has_interval=True),
        Column("swap_wait_s", "Waited for tensors", lambda one: one.swap_wait_s, has_interval=True),
        Column("room_wait_s", "Waited for room", lambda one: one.room_wait_s, has_interval=True),
        Column("swapped_bytes", "Moved out", lambda one: one.swapped_bytes, has_interval=True),
        Column("tier", "To", lambda one: one.tier, lambda one: one.tier or None),
        Column(
            "checksum_fraction",
            "Verified" if verified else "",
            lambda one: one.checksum_share,
            lambda one: None if one.checksum_share is None else percent(one.checksum_share),
        ),
        Column(
            "host_update_wait_s",
            "Waited for the host's update" if on_host else "",
            lambda one: one.host_update_s,
            has_interval=True,
        ),
        Column(
            "host_update_bytes",
            "Copied for it" if on_host else "",
            lambda one: one.host_update_bytes,
            has_interval=True,
        ),
    )
    return Sheet(
        name="out-of-core-steps",
        title="Steps: predicted and measured",
        columns=columns,
        rows=[one for one in found.points if one.num_runs],
        caption=STEPS_CAPTION,
    )


def _error(error: float | None) -> Cell | None:
    return None if error is None else Cell(f"{'+' if error > 0 else ''}{percent(error)}", number=error)


def blocks_sheet(blocks: Sequence[PlannedPart], title: str, *, in_terminal: bool = False) -> Sheet[PlannedPart]:
    """The blocks of a plan, first to last."""
    columns: tuple[Column[PlannedPart], ...] = (
        Column("block", "Block", lambda one: one.number, is_brief=True),
        Column("modules", "Modules", lambda one: one.modules, is_brief=True, limit=60),
        Column("units", "Units", lambda one: one.num_units),
        Column(
            "decision", "Decision", lambda one: one.decision, lambda one: DECISION_TITLES[one.decision], is_brief=True
        ),
        Column("own_bytes", "Saves", lambda one: one.own_bytes, unit="bytes", is_brief=True),
        Column("input_bytes", "Input", lambda one: one.input_bytes, unit="bytes", is_brief=True),
        Column("moved_bytes", "Moves", lambda one: one.moved_bytes, unit="bytes"),
        Column("forward_s", "Forward", lambda one: one.forward_s, unit="s", is_brief=True),
        Column("backward_s", "Backward", lambda one: one.backward_s, unit="s", is_brief=True),
    )
    return Sheet(
        name="out-of-core-blocks",
        title=title,
        columns=columns,
        rows=blocks,
        caption="Saves: kept for the backward pass, without the input. Moves: out of the device and back.",
        in_terminal=in_terminal,
        is_folded=not in_terminal and len(blocks) > 16,
    )
