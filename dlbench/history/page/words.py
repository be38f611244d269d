"""Words of trends: amounts, changes, verdicts; the same in every format."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.history.page.model import ChangeRow, HostRow, NewestNights, TrendSeries, TrendsReport
from dlbench.history.trends.rank_sums import SMALLEST_P
from dlbench.report.wording import number_text
from dlbench.stats.estimates import Estimate

MOST_COMMITS = 3
MOST_HOSTS = 6


def nights_text(count: int) -> str:
    """``1 night``, ``5 nights``."""
    return f"{count} night" if count == 1 else f"{count} nights"


def amount_text(value: float, unit: str) -> str:
    """One number with its unit, e.g. ``12.3 ms``, ``4.1 J``."""
    text = number_text(value, unit)
    return text if unit in ("s", "fraction") else f"{text} {unit}"


def level_text(figure: Estimate) -> str:
    """A level with its interval, e.g. ``101 ms [100 ms, 102 ms]``."""
    if figure.low is None or figure.high is None:
        return amount_text(figure.value, figure.unit)
    ends = f"{amount_text(figure.low, figure.unit)}, {amount_text(figure.high, figure.unit)}"
    return f"{amount_text(figure.value, figure.unit)} [{ends}]"


def basis_text(figure: Estimate, what: str = "night") -> str:
    """What the interval is and how many nights (or runs) stand behind it."""
    count = f"{figure.n} {what}{'' if figure.n == 1 else 's'}"
    return {"bootstrap 95 %": f"95 % bootstrap, {count}", "range": f"range of {count}"}.get(
        figure.kind, f"{count}, no interval"
    )


def percent_change(ratio: float) -> str:
    """A ratio as a change, e.g. ``+4.8 %``."""
    return f"{(ratio - 1) * 100:+.1f} %"


def change_text(ratio: Estimate) -> str:
    """The same with its interval, e.g. ``+4.8 % [+3.9, +5.6]``."""
    if ratio.low is None or ratio.high is None:
        return percent_change(ratio.value)
    ends = ", ".join(percent_change(end).removesuffix(" %") for end in (ratio.low, ratio.high))
    return f"{percent_change(ratio.value)} [{ends}]"


def times_text(ratio: Estimate) -> str:
    """A ratio near 1, e.g. ``1.048 [1.031, 1.060]``."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def p_text(p: float) -> str:
    """``p = 0.003``, or ``p <= 0.0002`` where no smaller one can be told."""
    return f"p {'<=' if p <= SMALLEST_P else '='} {p:.2g}"


def day(moment: str) -> str:
    """The day of a moment in UTC, e.g. ``2026-03-04``."""
    return moment[:10]


def between_text(change: ChangeRow) -> str:
    """``between the nights of 2026-03-01 and 2026-03-03``: the interval of the place."""
    return f"between the nights of {day(change.last_before)} and {day(change.first_after)}"


def commits_text(change: ChangeRow) -> str:
    """``1a2b3c -> 4d5e6f``, or that nothing is known."""
    if not change.commits_before and not change.commits_after:
        return "commit not known"
    before, after = (_some(side, MOST_COMMITS) or "not known" for side in (change.commits_before, change.commits_after))
    return f"commit {before} on both sides" if change.has_equal_commits else f"commit {before} -> {after}"


def differences_text(change: ChangeRow) -> list[str]:
    """Everything else that differs, a line each; one line that says so where nothing does."""
    lines = [f"{one.key}: {one.before} -> {one.after}" for one in change.differences]
    if change.new_hosts:
        lines.append(f"hosts used only since: {_some(change.new_hosts, MOST_HOSTS)}")
    if change.gone_hosts:
        lines.append(f"hosts used only before: {_some(change.gone_hosts, MOST_HOSTS)}")
    return lines or ["no recorded key of the environment differs between all runs before and all runs after"]


def newest_text(newest: NewestNights, title: str, unit: str) -> str:
    """What the newest nights say, and how long to wait."""
    what = "The newest night lies" if newest.num_beyond == 1 else f"The newest {newest.num_beyond} nights lie"
    usual = f"{amount_text(newest.low, unit)} to {amount_text(newest.high, unit)}"
    word = "worse" if newest.is_worse else "better"
    return (
        f"{what} beyond the usual range ({title.lower()} {percent_change(newest.ratio)}, {word}; usual: {usual}). That "
        f"is not yet a change point: wait for {newest.wait_for} or more such nights."
    )


def verdict(series: TrendSeries, fewest: int) -> str:
    """The finding of a series in one sentence.

    Args:
        series: all of it but the verdict.
        fewest: nights below which no change can be shown.
    """
    count = nights_text(len(series.nights))
    if not series.is_long_enough:
        return f"Too short to tell: {count}; {fewest} or more are needed."
    level = series.levels[-1]
    if not series.changes:
        return f"No change in {count}; level {level_text(level.value)}."
    last = series.changes[-1]
    more = f" ({len(series.changes)} changes in all)" if len(series.changes) > 1 else ""
    return (
        f"{last.kind.capitalize()} on {day(last.time)}: {series.title.lower()} {change_text(last.ratio)}{more}; since "
        f"then {level_text(level.value)} over {nights_text(level.num_nights)}."
    )


def host_sentence(host: HostRow) -> str:
    """Why a host is to be excluded."""
    assert host.current is not None
    more = (host.current.value - 1) * 100
    return (
        f"{host.host}: {more:.1f} % more own work than the other hosts of its runs ({times_text(host.current)}, "
        f"{basis_text(host.current, 'run')}) since {day(host.since)}"
    )


def telling_first(report: TrendsReport) -> list[TrendSeries]:
    """Series with the newest change first, then those without one, then those that are too short."""
    """Series with the newest change first, then those without one, then those that are too short."""
    return sorted(
        report.series,
        key=lambda one: (
            not one.is_long_enough,
            not one.changes,
            # Newest first: every digit of the time is turned round.
            tuple(-ord(sign) for sign in one.changes[-1].time) if one.changes else (),
        ),
    )


def _some(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
