"""Tables of a sweep as rows of text, header first; see `tabular`."""

from __future__ import annotations

from dlbench.report.tabular import Table
from dlbench.report.wording import DASH, basis_text, optional_figure, times_text
from dlbench.views.sweep.numbers import Cell, Sweep
from dlbench.views.sweep.settings import Setting
from dlbench.views.sweep.words import short_keys

MARKS = "* changes the arithmetic; ! a requested value had no effect."

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


def settings(sweep: Sweep, cell: Cell) -> Table:
    """Every setting with its throughput, its ratio to the baseline, and what must be said of it."""
    header = (*short_keys(sweep.keys), f"Throughput, {sweep.sample_unit}/s", "Over the baseline", "Verdict", "Interval")
    rows: Table = [(*header, "Remarks")]
    rows += [
        (
            *(value for _, value in setting.values),
            optional_figure(setting.throughput),
            DASH if setting.ratio is None else times_text(setting.ratio),
            VERDICT_TITLES[setting.verdict] + (", best" if setting.label == cell.best else ""),
            DASH if setting.ratio is None else basis_text(setting.ratio),
            "; ".join(remarks(setting)),
        )
        for setting in cell.settings
    ]
    return rows


def remarks(setting: Setting) -> list[str]:
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


def axes(cell: Cell) -> Table:
    """The effect of every value of every axis, and the verdict."""
    rows: Table = [("Axis", "Value", "Effect on throughput", "Verdict")]
    for axis in cell.axes:
        for number, level in enumerate(axis.levels):
            effect = "compared with" if number == 0 else DASH if level.effect is None else times_text(level.effect)
            rows.append((axis.key, level.value, effect, axis.words if number == 0 else ""))
    return rows


def losses(cell: Cell) -> Table:
    """The loss of settings that change the arithmetic beside that with fp32 on the wire; only a header without any."""
    rows: Table = [("Setting", "Loss after equal steps", "With fp32 on the wire", "That is", "Difference")]
    for setting in cell.settings:
        found = setting.losses
        if found is None:
            continue
        own = "not finite" if found.own is None else optional_figure(found.own)
        against = optional_figure(found.reference) if found.reference else f"not compared: {found.why}"
        if not found.why and found.reference is None:
            against = "not finite"
        rows.append((setting.label, own, against, found.reference_label or DASH, optional_figure(found.difference)))
    return rows


def short(sweep: Sweep, cell: Cell) -> Table:
    """What a terminal has room for."""
    rows: Table = [(" / ".join(short_keys(sweep.keys)), "over the baseline", "verdict", "runs")]
    rows += [
        (
            marked(setting),
            DASH if setting.ratio is None else times_text(setting.ratio),
            VERDICT_TITLES[setting.verdict] + (", best" if setting.label == cell.best else ""),
            str(setting.num_runs),
        )
        for setting in cell.settings
    ]
    return rows


def marked(setting: Setting) -> str:
    """Its label, with the marks that `MARKS` explains."""
    return setting.label + (" *" if setting.changes else "") + (" !" if setting.inert else "")


def remark_lines(cell: Cell) -> list[str]:
    """The same for formats whose table has no room for them: equal remarks once, with their settings."""
    found: dict[str, list[str]] = {}
    for setting in cell.settings:
        for text in remarks(setting):
            found.setdefault(text, []).append(setting.label)
    return [f"{_counted(labels)}: {text}." for text, labels in found.items()]


def _counted(labels: list[str]) -> str:
    more = f"; and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    return "; ".join(labels[:MAX_LABELS]) + more


def chart_name(sweep: Sweep, cell: Cell) -> str:
    """Tells a rank count's chart from the sweep's others."""
    return f"{sweep.cells.index(cell) + 1}-n{cell.ranks}"


def chart_id(sweep: Sweep, cell: Cell) -> str:
    """Where the page finds that chart."""
    return f"chart-{sweep.id}-{chart_name(sweep, cell)}"


Section = tuple[str, Table, str]
"""Title, table, and a line on what it holds."""


def sections(sweep: Sweep, cell: Cell) -> list[Section]:
    """All tables of a rank count, for formats without views."""
    found = [
        ("Settings", settings(sweep, cell), f"Baseline: {cell.baseline}; {cell.conditions}; {sweep.caption}"),
        ("Which axes matter", axes(cell), AXES_CAPTION),
        ("What the changed arithmetic does to the loss", losses(cell), LOSSES_CAPTION),
    ]
    return [section for section in found if len(section[1]) > 1]


AXES_CAPTION = (
    "Ratios of throughput between values of one key, paired by repeat and by the values of all other keys. Matters: "
    "the interval leaves 1 out, also after Holm over all pairs. No effect: all within 2 %."
)
LOSSES_CAPTION = "Last loss of a run, mean over ranks; medians over runs; the difference in pairs of repeats."
