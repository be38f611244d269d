"""Tables of a sweep at one rank count: its settings, its axes, and the losses where the arithmetic changes."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.report.table import Column, Sheet, times_cell
from dlbench.stats.estimates import Estimate
from dlbench.views.sweep.axes import Axis, Level
from dlbench.views.sweep.numbers import Sweep, SweepCell
from dlbench.views.sweep.settings import Losses, Setting
from dlbench.views.sweep.words import short_keys

MAX_LABELS = 3
"""Settings named beside a remark; the others are counted."""

VERDICT_TITLES = {
    "baseline": "baseline",
    "faster": "faster",
    "slower": "slower",
    "equal": "equal within 2 %",
    "undecided": "undecided",
    "insufficient": "insufficient",
    "no figure": "no figure",
}

AXES_CAPTION = "Matters: the interval leaves 1 out, also after Holm. No effect: all within 2 %."
LOSSES_CAPTION = "Last loss of a run, medians over runs."


def settings_sheet(sweep: Sweep, cell: SweepCell) -> Sheet[Setting]:
    """Every setting with its throughput, its ratio to the baseline, and what must be said of it."""
    columns: tuple[Column[Setting], ...] = (
        Column("setting", "", lambda one: one.label),
        *(_value_column(place, title) for place, title in enumerate(short_keys(sweep.keys))),
        Column("options", "", lambda one: one.options),
        Column("is_baseline", "", lambda one: one.is_baseline),
        Column("throughput_per_s", f"Throughput, {sweep.sample_unit}/s", lambda one: one.throughput, has_interval=True),
        Column(
            "ratio",
            "Over the baseline",
            lambda one: one.ratio,
            lambda one: times_cell(one.ratio),
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "verdict",
            "Verdict",
            lambda one: one.verdict,
            lambda one: VERDICT_TITLES[one.verdict] + (", best" if one.label == cell.best else ""),
            is_brief=True,
        ),
        Column("adjusted_p", "", lambda one: one.adjusted_p),
        Column("runs", "Runs", lambda one: one.num_runs, is_brief=True),
        Column("planned_runs", "", lambda one: one.num_planned),
        Column("inert", "", lambda one: " | ".join(one.inert)),
        Column("changes", "", lambda one: " | ".join(one.changes)),
        Column("why", "", lambda one: one.why),
        Column("", "Remarks" if any(map(_remarks, cell.settings)) else "", lambda one: "; ".join(_remarks(one))),
    )
    return Sheet(
        name="sweep",
        title="Settings",
        columns=columns,
        rows=cell.settings,
        in_terminal=True,
    )


def _value_column(place: int, title: str) -> Column[Setting]:
    """The value of one swept key."""
    return Column("", title, lambda one: one.values[place][1], is_brief=True, limit=80)


def _remarks(setting: Setting) -> list[str]:
    """What must be said of a setting beside its speed."""
    found = [f"a setting had no effect: {text}" for text in setting.inert]
    if setting.changes:
        found.append(f"changes the arithmetic ({', '.join(setting.changes)})")
    if setting.num_runs < setting.num_planned:
        why = f" ({setting.why})" if setting.why else ""
        found.append(f"{setting.num_runs} of {setting.num_planned} runs have figures{why}")
    if setting.autotune is not None:
        found.append(f"autotuner: {setting.autotune.words}")
    return found


def remark_lines(cell: SweepCell) -> list[str]:
    """The same for a terminal, whose table has no room for them: equal remarks once, with their settings."""
    found: dict[str, list[str]] = {}
    for setting in cell.settings:
        for text in _remarks(setting):
            found.setdefault(text, []).append(setting.label)
    return [f"{_counted(labels)}: {text}." for text, labels in found.items()]


def _counted(labels: list[str]) -> str:
    more = f"; and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    return "; ".join(labels[:MAX_LABELS]) + more


@dataclass(frozen=True)
class _AxisRow:
    """A value of an axis."""

    axis: Axis
    level: Level

    @property
    def is_first(self) -> bool:
        """Whether the others are compared with it."""
        return self.level is self.axis.levels[0]


AXIS_COLUMNS: tuple[Column[_AxisRow], ...] = (
    Column("axis", "Axis", lambda row: row.axis.key),
    Column("value", "Value", lambda row: row.level.value, limit=80),
    Column(
        "effect",
        "Effect on throughput",
        lambda row: row.level.effect,
        lambda row: "compared with" if row.is_first else times_cell(row.level.effect),
        has_interval=True,
    ),
    Column("verdict", "Verdict", lambda row: row.axis.verdict, lambda row: row.axis.words if row.is_first else ""),
)


def axes_sheet(cell: SweepCell) -> Sheet[_AxisRow]:
    """The effect of every value of every axis, and the verdict."""
    return Sheet(
        name="sweep-axes",
        title="Which axes matter",
        columns=AXIS_COLUMNS,
        rows=[_AxisRow(axis, level) for axis in cell.axes for level in axis.levels],
        caption=AXES_CAPTION,
    )


LOSS_COLUMNS: tuple[Column[tuple[Setting, Losses]], ...] = (
    Column("setting", "Setting", lambda row: row[0].label),
    Column(
        "loss",
        "Loss after equal steps",
        lambda row: row[1].own,
        lambda row: row[1].own or "not finite",
        has_interval=True,
    ),
    Column(
        "reference_loss",
        "With fp32 on the wire",
        lambda row: row[1].reference,
        lambda row: _reference(row[1]),
        has_interval=True,
    ),
    Column("reference", "That is", lambda row: row[1].reference_label or None),
    Column("loss_difference", "Difference", lambda row: row[1].difference, has_interval=True),
)


def _reference(found: Losses) -> Estimate | str:
    return found.reference or (f"not compared: {found.why}" if found.why else "not finite")


def losses_sheet(cell: SweepCell) -> Sheet[tuple[Setting, Losses]]:
    """The loss of settings that change the arithmetic beside that with fp32 on the wire."""
    return Sheet(
        name="sweep-losses",
        title="What the changed arithmetic does to the loss",
        columns=LOSS_COLUMNS,
        rows=[(setting, setting.losses) for setting in cell.settings if setting.losses],
        caption=LOSSES_CAPTION,
    )
