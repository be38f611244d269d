"""One side of a comparison: the points of some runs, each run with one number for every metric."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError, UserError, nearest
from dlbench.gate.content import TITLES, Content, KeyDifference, content_of, digest
from dlbench.reading import environments
from dlbench.reading.comparability import AFTER_INTERRUPTION, system_content
from dlbench.reading.environments import facts, side_by_side
from dlbench.reading.hosts.core_load import load_doubts, loads_of
from dlbench.reading.metrics import metrics_by_run
from dlbench.reading.repeats import named, shared_nodes, unlike_runs
from dlbench.reading.selection import select
from dlbench.reading.sessions import Circumstances, circumstances_of, sessions_of, wall_s
from dlbench.reading.table import RunTable, tabulate
from dlbench.records.scan import Run, Scan
from dlbench.report.formats.terminal import shorten
from dlbench.report.wording import ENGINE_TITLES, place_text, ranks_text, runs_text
from dlbench.stats.pairing import RunKey

_VALUE_WIDTH = 30


def setting_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """Workload, preset, engine, precision, batch and scaling; keys in `without` are left out."""
    told = {key: value for key, value in point.content.registered.items() if key not in without}
    batch = f"batch {told['batch_per_rank']} per rank" if "batch_per_rank" in told else ""
    batch = batch or (f"batch {told['global_batch']} in all" if "global_batch" in told else "")
    words = (
        told.get("workload", ""),
        f"{told['preset']} preset" if "preset" in told else "",
        ENGINE_TITLES.get(told.get("engine", ""), told.get("engine", "")),
        told.get("precision", ""),
        batch,
        f"{told['scaling']} scaling" if "scaling" in told else "",
    )
    return ", ".join(filter(None, words))


def point_label(point: SidePoint, without: Collection[str] = ()) -> str:
    """The same with the ranks."""
    return ", ".join([setting_label(point, without), place_text(point.ranks, point.nodes)])


def versus(allowed: Sequence[KeyDifference]) -> str:
    """What the sides are, where they differ on purpose, e.g. ``Horovod (B) against PyTorch DDP (A)``."""
    if not allowed:
        return ""
    first = min(allowed, key=lambda one: one.key != "engine")
    a, b = (
        ENGINE_TITLES.get(value, value) if first.key == "engine" else f"{first.title} {shorten(value, _VALUE_WIDTH)}"
        for value in (first.a or "none", first.b or "none")
    )
    return f"{b} (B) against {a} (A)"


def settings_of(points: Sequence[SidePoint]) -> dict[str, list[SidePoint]]:
    """Points by the label of their setting; where labels are equal, keys that differ stand behind them."""
    by_content: dict[str, list[SidePoint]] = {}
    for point in points:
        by_content.setdefault(digest(point.content), []).append(point)
    groups = list(by_content.values())
    labels = [setting_label(group[0]) for group in groups]
    found: dict[str, list[SidePoint]] = {}
    for group, label in zip(groups, labels, strict=True):
        twins = [other[0] for other, same in zip(groups, labels, strict=True) if same == label and other is not group]
        more = _apart(group[0], twins)
        found.setdefault(", ".join([label, *more]), []).extend(group)
    return found


def _apart(point: SidePoint, twins: Sequence[SidePoint]) -> list[str]:
    """Up to two keys on which a point differs from others of the same label, with its values."""
    contents: list[Mapping[str, object]] = [{**one.content.plan, **one.content.registered} for one in (point, *twins)]
    own = contents[0]
    keys = [key for key in own if any(other.get(key) != own[key] for other in contents[1:])]
    keys.sort(key=lambda key: key not in point.content.registered)
    return [f"{TITLES.get(key, key)} {shorten(str(own[key]) or 'none', _VALUE_WIDTH)}" for key in keys[:2]]


def counts_text(points: Sequence[SidePoint], sessions: Mapping[str, str] | None = None) -> str:
    """Runs of the points of one setting, e.g. ``5 runs at 1 and 2 ranks, 4 runs at 4 ranks``.

    Args:
        points: of one setting.
        sessions: of the runs; where they are given, their number is told.
    """
    by_count: dict[str, list[SidePoint]] = {}
    for point in points:
        count = len({sessions[run.run_id] for run in point.runs}) if sessions else 0
        held = f" in {count} session{'s' * (count > 1)}" if sessions else ""
        by_count.setdefault(f"{runs_text(len(point.runs))}{held}", []).append(point)
    return ", ".join(f"{count} at {_places(found)}" for count, found in by_count.items())


def _places(points: Sequence[SidePoint]) -> str:
    if any(point.nodes > 1 for point in points) or len(points) == 1:
        return ", ".join(place_text(point.ranks, point.nodes) for point in points)
    ranks = [point.ranks for point in points]
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks_text(ranks[-1])}"


@dataclass(frozen=True, kw_only=True)
class SideRun:
    """One run."""

    run_id: str
    figures: Mapping[str, float]
    """By name of `dlbench.reading.metrics.METRICS`; absent where the run does not tell."""
    circumstances: Circumstances
    """What tells its session."""
    command: str
    """Equal for runs that one command planned, which interleaves them; empty in a baseline file."""
    pair: RunKey
    """Block and repeat: a run of the other side with the same one ran beside it; ("", 0) in a baseline file."""
    throughput: float | None = None
    """Samples per second of all ranks; None in a baseline file."""
    wall_s: float | None = None
    """From the start of rank 0 to the end of the run, seconds; None in a baseline file."""

    @property
    def finished(self) -> str:
        """UTC, ISO 8601."""
        return self.circumstances.finished


@dataclass(frozen=True, kw_only=True)
class SidePoint:
    """Comparable runs with one rank and node count."""

    content: Content
    ranks: int
    nodes: int
    sample_unit: str
    notice: str
    """What the workload must not be mistaken for."""
    runs: tuple[SideRun, ...]
    """In the order in which they were planned."""
    environment: Mapping[str, str]
    """Keys with one value in all runs, without those that name the job or the place in it."""
    tags: Mapping[str, str]
    """Tags that all runs share."""
    doubts: tuple[str, ...] = ()
    """Why its runs are no clean repeats of each other, or not of them alone, a sentence each without full stop."""

    @property
    def place(self) -> tuple[int, int]:
        """Ranks and nodes."""
        return self.ranks, self.nodes


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison."""

    name: str
    """What a person calls it: a path."""
    points: tuple[SidePoint, ...]
    left_out: tuple[str, ...]
    """Runs without figures, runs that went on after an interruption, and those from which something was taken away on
    purpose, a line each."""
    damaged: tuple[str, ...]


def at_where(points: Sequence[SidePoint], where: Mapping[str, str], name: str, option: str) -> list[int]:
    """Places of the points with these registered properties.

    Args:
        points: to choose from.
        where: properties, values as text.
        name: what the side is called, for errors.
        option: the option that chooses, for errors.

    Raises:
        UserError: no point has them, or there is no such property.
    """
    found = list(range(len(points)))
    for key, wanted in where.items():
        if key not in TITLES:
            raise UserError(f"{option} {key}: points have no such property; {nearest(key, TITLES)}")
        places = {"ranks": "ranks", "nodes": "nodes"}
        values = [
            str(getattr(points[i], places[key])) if key in places else points[i].content.registered.get(key, "")
            for i in found
        ]
        if wanted not in values:
            raise UserError(
                f"{option} {key}={wanted}: no point of {name} has it; {nearest(wanted, filter(None, values))}"
            )
        found = [i for i, value in zip(found, values, strict=True) if value == wanted]
    return found


def sessions_at(points: Iterable[SidePoint]) -> dict[str, str]:
    """Run -> its session, over points of all sides together: what one side ran, another may have run beside it."""
    return sessions_of({run.run_id: run.circumstances for point in points for run in point.runs})


def side_of_runs(scan: Scan, name: str, where: Mapping[str, str], option: str) -> Side:
    """The side that a folder of runs is.

    Args:
        scan: the runs.
        name: what to call the side.
        where: properties that a run must have; see `chosen`.
        option: the option that chose them, for errors.

    Raises:
        UserError: no run has these properties.
        IncompleteDataError: no run that was chosen has figures; names why.
    """
    runs, left_out = chosen(scan, name, where, option)
    plain = [run for run in runs if not run.plan.series.side]
    if plain and len(plain) < len(runs) and "side" not in where:
        left_out.append(f"{len(runs) - len(plain)} runs of run --ab, which compare --paired compares")
        runs = plain
    damaged: list[str] = []
    table = tabulate(Scan(root=scan.root, runs=runs, problems=list(scan.problems)))
    points = points_of(table, damaged)
    left_out += [
        f"{item.run.plan.run_id}: {item.state}: {item.why}" for item in table.without if item.state != "damaged"
    ]
    refuse_no_figures(name, points, left_out, table.damaged)
    return Side(name=name, points=points, left_out=tuple(left_out), damaged=(*table.damaged, *damaged))


def chosen(scan: Scan, name: str, where: Mapping[str, str], option: str) -> tuple[list[Run], list[str]]:
    """Runs with all these properties, and a line for each kind, or run, that is left out.

    For properties see `dlbench.reading.selection`. Runs of another variant than `plain` are left out unless they were
    asked for: they ran to be subtracted. Always left out are runs that went on after an interruption: they are no
    repeats of those that ran through.

    Raises:
        UserError: no run has them; names the values that there are.
    """
    runs = select(scan.runs, name, where, option)
    resumed = [run.plan.run_id for run in runs if run.record is not None and run.record.goes_on]
    left_out = [f"{run_id}: resumed {AFTER_INTERRUPTION}" for run_id in resumed]
    through = [run for run in runs if run.record is None or not run.record.goes_on]
    if "variant" in where:
        return through, left_out
    plain = [run for run in through if run.plan.series.variant == "plain"]
    twins = len(through) - len(plain)
    return plain, left_out + [f"{twins} control runs (run --decompose, --watch-cost)"] * bool(twins)


def points_of(table: RunTable, damaged: list[str]) -> tuple[SidePoint, ...]:
    """The points of runs with figures, by ranks in the order in which their kinds are first met.

    Raises:
        UserError: runs of one point were asked for unlike of the system; names the keys.
    """
    figures = metrics_by_run(table, damaged=damaged)
    rates = dict(zip(table.figures["run_id"], table.figures["throughput"], strict=True)) if table.runs else {}
    contents = {run_id: content_of(run) for run_id, run in table.runs.items()}
    found: dict[tuple[str, int, int], list[Run]] = {}
    for run_id, run in table.runs.items():
        layout = run.plan.layout
        found.setdefault((digest(contents[run_id]), layout.ranks, layout.nodes), []).append(run)
    order = {kind: number for number, kind in enumerate(dict.fromkeys(key[0] for key in found))}
    members = {
        run_id: SideRun(
            run_id=run_id,
            figures=figures[run_id],
            circumstances=circumstances_of(run),
            command=f"{run.plan.series.id} {run.plan.created}",
            pair=table.keys[run_id],
            throughput=float(rates[run_id]),
            wall_s=wall_s(run),
        )
        for run_id, run in table.runs.items()
    }
    return tuple(
        _point(found[key], contents[found[key][0].plan.run_id], members)
        for key in sorted(found, key=lambda key: (order[key[0]], *key[1:]))
    )


def _point(runs: Sequence[Run], content: Content, members: Mapping[str, SideRun]) -> SidePoint:
    plan = runs[0].plan
    _refuse_unlike(runs)
    tags = [run.plan.tags for run in runs]
    return SidePoint(
        content=content,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        sample_unit=plan.workload.sample_unit,
        notice=plan.workload.notice,
        runs=tuple(members[run.plan.run_id] for run in runs),
        environment={
            key: value
            for key, value in environments.compare(runs).common.items()
            if not environments.names_the_job(key)
        },
        tags={key: value for key, value in tags[0].items() if all(other.get(key) == value for other in tags)},
        doubts=tuple(_doubts(runs)),
    )


def _refuse_unlike(runs: Sequence[Run]) -> None:
    """Other modules or nodes are compared between the sides; within one their runs would be averaged."""
    found = side_by_side({run.plan.run_id: system_content(run.plan) for run in runs}).differences
    if found:
        layout = runs[0].plan.layout
        raise UserError(
            f"runs of one side at {layout.ranks} rank{'s' * (layout.ranks > 1)} are no repeats of each other "
            f"({named(found)}); choose those of each side with --where, e.g. --where {found[0].key}="
            f"{found[0].values[0][0]}"
        )


def _doubts(runs: Sequence[Run]) -> Iterator[str]:
    met = {run.plan.run_id: facts(run.record) for run in runs if run.record is not None}
    yield from (doubt.text for doubt in unlike_runs({"": met}))
    yield from sorted({text for run in runs if (text := shared_nodes(run.plan))})
    yield from (doubt.text for doubt in load_doubts(loads_of(runs)))


def refuse_no_figures(name: str, points: Sequence[SidePoint], left_out: Sequence[str], damaged: Sequence[str]) -> None:
    """A side without figures cannot be compared.

    Raises:
        IncompleteDataError: there is no point; names the first reasons.
    """
    if points:
        return
    reasons = [*damaged, *left_out][:3] or ["there is no run"]
    raise IncompleteDataError(f"{name}: no run has figures: {'; '.join(reasons)}")
