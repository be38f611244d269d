"""One report, one value for one quantity: every sentence, table and chart of generated runs agrees with every other."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import scan
from dlbench.report.charts.chart import Chart
from dlbench.report.document import Document, Section
from dlbench.report.table import Sheet
from dlbench.report.wording import value_text
from dlbench.views.causes.experiments import CAUSE_TITLES, ROW_TITLES
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.exchange import ExchangePoint
from dlbench.views.model import Group, Report
from dlbench.views.scaling_report import assemble, document_of
from tests.support.collectives_factory import Story as CommStory
from tests.support.collectives_factory import network, write_comm_series
from tests.support.run_factory import MS, Story, exchange_result, plans, write_run

PHASE_MS = {
    "input": 5.0,
    "h2d": 1.0,
    "forward": 30.0,
    "backward": 50.0,
    "exchange": 0.0,
    "optimizer": 8.0,
    "other": 3.0,
}
GRADIENTS = ((4_000_000, 0.02), (2_000_000, 0.03), (500_000, 0.05))

ROUNDED = 0.051
"""Points by which a printed number may be off."""

NUMBER = r"(-?\d+(?:\.\d+)?)"
TITLES = "|".join(map(re.escape, CAUSE_TITLES.values()))


@dataclass(frozen=True)
class Shape:
    """What a generated series is like; milliseconds."""

    scaling: str
    ranks: tuple[int, ...]
    repeats: int
    slower: Mapping[str, float]
    """What phases take longer with more than one rank, below 0 where less."""
    straggler: float
    """How late the last rank is."""
    noise: float
    message_s: float
    seed: int
    launch: float = -1.0
    """How much longer GPUs wait for their hosts with more than one rank; below 0 on CPUs."""


shapes = st.builds(
    Shape,
    scaling=st.sampled_from(["weak", "strong"]),
    ranks=st.sampled_from([(1,), (1, 2), (1, 2), (1, 2, 4), (2, 4)]),
    repeats=st.sampled_from([1, 3, 5]),
    slower=st.fixed_dictionaries(
        {
            "input": st.sampled_from([0.0, -4.0, 20.0]),
            "forward": st.sampled_from([0.0, -20.0, 10.0]),
            "backward": st.sampled_from([0.0, -30.0, 15.0]),
            "exchange": st.sampled_from([0.3, 5.0, 25.0]),
            "other": st.sampled_from([0.0, 6.0]),
        }
    ),
    straggler=st.sampled_from([0.0, 15.0]),
    noise=st.sampled_from([0.0, 0.02, 0.2]),
    launch=st.sampled_from([-1.0, 0.0, 12.0]),
    message_s=st.sampled_from([1e-5, 1e-3, 2e-2]),
    seed=st.integers(0, 10**6),
)


def write(out: Path, shape: Shape) -> None:
    for plan in plans(
        points=shape.ranks, repeats=shape.repeats, scaling=shape.scaling, overrides={"train.batch_per_rank": 8}
    ):
        rng = random.Random(f"{shape.seed} {plan.series.position}")
        ranks = plan.layout.ranks
        share = shape.ranks[0] / ranks if shape.scaling == "strong" else 1.0
        own = {name: ms * share * rng.lognormvariate(0, shape.noise) for name, ms in PHASE_MS.items()}
        if ranks > 1:
            own = {name: max(0.0, ms + shape.slower.get(name, 0.0) * share) for name, ms in own.items()}
        late = shape.straggler if ranks > 1 else 0.0
        waits = max(0.0, shape.launch) * share * (ranks > 1)
        # The whole phase: the host is just behind the device. The warm-up shows what kernels take.
        most = round((own["forward"] + waits) * MS) if waits else 0

        def bounds(rank: int, step: int, most: int = most) -> Any:
            return most * (step > 0), 0, 0

        def times(
            rank: int,
            step: int,
            own: dict[str, float] = own,
            late: float = late,
            last: int = ranks - 1,
            waits: float = waits,
        ) -> Any:
            row = dict(own)
            row["forward"] += waits * (step > 0)
            row["backward"] += late * (rank == last)
            row["exchange"] += late * (rank != last)
            return [round(row[name] * MS) for name in PHASES], round(row["other"] * MS)

        told = exchange_result(plan, gradients=GRADIENTS, alpha_s=shape.message_s, beta_s_per_byte=1e-9)
        write_run(
            out, plan, times, Story(exchange=told if ranks > 1 else None, launch=bounds if shape.launch >= 0 else None)
        )


# What a document says


def strings(value: Any) -> Iterator[str]:
    """Every text that people may read, of whatever part of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Sheet):
        table = value.to_display()
        yield from (value.title, value.caption, *table.header)
        yield from (str(cell) for row in table.rows for cell in row.cells)
    elif isinstance(value, Section):
        for field in dataclasses.fields(value):
            if field.name not in ("charts", "id", "where"):
                yield from strings(getattr(value, field.name))
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from strings(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from strings(one)


def sections_of(document: Document, group: Group) -> Iterator[Section]:
    outer = next(section for section in document.sections if section.id == f"group-{group.id}")
    yield outer
    yield from outer.sections


def drawn(section: Section) -> tuple[Chart, ...]:
    return tuple(section.charts())


# What is wrong with it


def contradictions(report: Report, document: Document) -> list[str]:
    """Statements that disagree with each other, each with its text."""
    found = []
    for group in report.groups:
        account = group.of(LostPercent)
        points = {point.ranks: point for point in account.diagnosed.points}
        found += [f"account of {ranks} ranks: {why}" for ranks, point in points.items() for why in _numbers(point)]
        found += [why for point in group.all_of(ExchangePoint) for why in _bounds(point)]
        for point in group.points:
            if value_text(point.mean_step) != value_text(points[point.ranks].whole.seconds):
                found.append(f"two mean steps at {point.ranks} ranks")
        for section in sections_of(document, group):
            for text in strings(dataclasses.replace(section, sections=())):
                found += [f"{why}: {text}" for why in _sentence(text, points, group.largest.ranks)]
            found += [why for sheet in section.sheets for why in _table(sheet, points)]
            if section.id.startswith("causes"):
                found += [why for chart in drawn(section) for why in _chart(chart, points[group.largest.ranks])]
    cards = [card for section in document.sections for card in section.cards]
    for group, card in zip(report.groups, cards, strict=True):
        account = group.of(LostPercent)
        last = account.diagnosed.points[-1]
        for text in strings(card):
            found += [f"card, {why}: {text}" for why in _sentence(text, {last.ranks: last}, last.ranks)]
        if len(group.points) > 1 and card.big != value_text(group.largest.efficiency):
            found.append(f"card says {card.big}")
    return found


def _numbers(point: CausePoint) -> Iterator[str]:
    whole = sum(share.lost.value for share in point.causes)
    if abs(whole - (1 - point.efficiency.value)) > 1e-9:
        yield f"parts lose {whole}, efficiency is {point.efficiency.value}"
    if abs(sum(share.seconds.value for share in point.causes) / point.whole.seconds.value - 1) > 1e-9:
        yield "seconds do not sum"
    for share in point.causes:
        if share.parts and abs(sum(part.lost.value for part in share.parts) - share.lost.value) > 1e-9:
            yield f"{share.name} does not consist of its parts"
    pair = sum(point.cause(name).lost.value for name in ("exchange", "straggler"))
    if abs(pair - point.exchange_phase.lost.value) > 1e-9:
        yield "the exchange phase is not its parts"


def _bounds(point: ExchangePoint) -> Iterator[str]:
    least = point.prediction
    if point.communication is not None and point.hidden is not None and point.exposed is not None:
        both = point.hidden.value + point.exposed.value
        if abs(both - point.communication.value) > 1e-9:
            yield f"messages take {point.communication.value} s, during and after the pass {both} s"
    if least is None:
        return
    if point.exposed is not None and least.best_exposed.value > point.exposed.value * (1 + 1e-6):
        yield f"a minimum of {least.best_exposed.value} s above the measured {point.exposed.value} s"
    if not point.efficiency.value <= least.efficiency.value <= 1 + 1e-12:
        yield f"an efficiency of {least.efficiency.value} that could be had, {point.efficiency.value} measured"


def _place(number: str) -> float:
    """How far a printed number may be from what it was printed of: half of its last place."""
    return 0.51 * 10.0 ** -len(number.partition(".")[2])


def _sentence(text: str, points: Mapping[int, CausePoint], largest: int) -> Iterator[str]:
    """What a text says of efficiencies, lost points, and parts of them; without a place it is of the largest."""
    place = re.match(r"(\d+) ranks?(?: on \d+ nodes)?: ", text)
    point = points.get(int(place[1]) if place else largest)
    for match in re.finditer(rf"(?:^E|Scaling e)fficiency {NUMBER} %(?: [\[(][^\])]*[\])])? at (\d+) rank", text):
        if f"{match[1]} %" != value_text(points[int(match[2])].efficiency):
            yield "another efficiency"
    for match in re.finditer(r"(\d+(?:\.\d+)?) %[^.;]*attainable|attainable[^.;]*?(\d+(?:\.\d+)?) %", text):
        if float(match[1] or match[2]) > 100:
            yield "more than 100 % is called attainable"
    for match in re.finditer(
        rf"{NUMBER}(?: points)?(?: [\[(][^\])]*[\])])? of (?:the )?{NUMBER}(?: points|\s*lost)", text
    ):
        if float(match[1]) > float(match[2]) + 1e-9:
            yield "a part beyond the whole"
    if point is None or point.is_baseline:
        return
    net = 100 * point.whole.lost.value
    most = max(100 * share.lost.value for share in point.causes)
    for number in re.findall(rf"{NUMBER} points lost\b", text):
        if abs(float(number) - net) > _place(number):
            yield f"another sum of what was lost, {net:.2f}"
    gained = -sum(100 * share.lost.value for share in point.causes if share.lost.value < 0)
    for number in re.findall(rf"other parts gain {NUMBER} points", text):
        if abs(float(number) - gained) > _place(number):
            yield f"another gain, {gained:.2f}"
    by_title = {CAUSE_TITLES[share.name]: 100 * share.lost.value for share in point.causes}
    named = [
        *re.findall(rf"({TITLES})(?:,|:) {NUMBER} points", text),
        *((title, number) for number, title in re.findall(rf"{NUMBER} (?:are )?({TITLES})\b", text)),
    ]
    for title, number in named:
        if abs(by_title[title] - float(number)) > _place(number):
            yield f"another loss to {title}, {by_title[title]:.2f}"
    for pattern in (
        rf"largest part is ({TITLES})",
        rf"most to ({TITLES})",
        rf"lost(?: \([^)]*\))?, \S+ are ({TITLES})",
    ):
        for title in re.findall(pattern, text):
            if by_title[title] < most - ROUNDED:
                yield "not the largest part"


def _table(sheet: Sheet[Any], points: Mapping[int, CausePoint]) -> Iterator[str]:
    """Of the table of the account: what it shows is what the account holds, and sums."""
    if sheet.name != "parts":
        return
    table = sheet.to_display()
    for place, title in enumerate(table.header[1:], start=1):
        point = points[int(re.findall(r"(\d+) rank", title)[0])]
        is_lost = title.startswith("Lost")
        rows = {row.cells[0].text: row for row in table.rows}
        parts = {ROW_TITLES[part.name]: part for part in (*point.causes, point.exchange_phase)}
        for name, row in rows.items():
            part = point.whole if row.kind == "sum" else parts.get(name)
            if part is None:
                continue
            wanted = value_text(part.lost.in_unit("points") if is_lost else part.seconds)
            if row.cells[place].text != wanted:
                yield f"{name} is {row.cells[place].text} in the table and {wanted} in the account"
        shown = [row.cells[place].number or 0.0 for row in table.rows if row.kind == ""]
        whole = next(row.cells[place].number or 0.0 for row in table.rows if row.kind == "sum")
        if abs(sum(shown) - whole) > 1e-9:
            yield f"{title}: lines sum to {sum(shown)}, not to {whole}"
    for record in sheet.records():
        point = points[int(str(record["ranks"]))]
        if record["part"] == "step" and record["lost_fraction"] != point.whole.lost.value:
            yield "programs get another loss than people"


def _chart(chart: Chart, point: CausePoint) -> Iterator[str]:
    if not chart.id.endswith("-waterfall"):
        return
    efficiency = 100 * point.efficiency.value
    said = re.findall(rf"From 100 % to {NUMBER} %", chart.title)
    if [value_text(point.efficiency).removesuffix(" %")] != said:
        yield f"the waterfall ends at {said}"
    rows = [row for values in chart.spec.get("datasets", {}).values() for row in values]
    rows += [row for layer in chart.spec.get("layer", []) for row in (layer.get("data") or {}).get("values", [])]
    rows += (chart.spec.get("data") or {}).get("values", [])
    bars = {row["name"]: row for row in rows if "name" in row}
    if abs(bars["measured"]["to"] - efficiency) > ROUNDED:
        yield "the last bar is not the efficiency"
    for share in point.causes:
        bar = bars.get(CAUSE_TITLES[share.name])
        width = 0.0 if bar is None else bar["to"] - bar["from"]
        if abs(width - abs(100 * share.lost.value)) > ROUNDED:
            yield f"the bar of {share.name} is {width} wide"


# The property


@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes)
def test_every_statement_of_a_report_agrees_with_every_other(
    tmp_path_factory: pytest.TempPathFactory, shape: Shape
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    write(folder, shape)
    report = assemble(scan(folder))
    assert contradictions(report, document_of(report)) == []


# That it can fail


# Of ranks that were not measured


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 1 to 8 nodes of two ranks whose messages cost what a planted network says, and runs that measured it."""
    out = tmp_path_factory.mktemp("machine")
    nodes = {"system": "box", "points_are": "nodes", "ranks_per_node": 2, "launcher": "mpirun"}
    for plan in plans(**nodes, points=(1, 2, 4, 8), repeats=5):
        costs, end = planted_exchange(plan.layout.ranks)
        drift = 1 + 0.002 * plan.series.repeat
        rest = round(3 * drift * MS)
        phases = [round(one * drift * MS) for one in (5.0, 1.0, 30.0, 50.0, 1e3 * end - 50.0, 8.0)]
        gradients = exchange_result(plan, gradients=MESSAGES, alpha_s=0.0, beta_s_per_byte=0.0)
        story = Story(
            exchange={**gradients, "communication_s": sum(costs)},
            host=lambda rank: f"n{rank // 2}",
            cores=lambda rank: (rank % 2,),
        )
        write_run(out, plan, lambda rank, step, phases=phases, rest=rest: (phases, rest), story)
    own = {"backends": "none", "algorithms": "ring,hierarchical", "sizes": "64KiB:16MiB", "repeats": 3}
    write_comm_series(out, CommStory(network=PLANTED, noise=0.005), **nodes, **own, points=(2, 4))
    said("comm", "fit", out, "-o", out / "box.network.json")
    return out


MESSAGES = ((4_000_000, 0.02), (1_000_000, 0.05))
PLANTED = network(across=(100e-6, 4e-9))


def planted_exchange(ranks: int) -> tuple[list[float], float]:
    """Seconds of each message at so many ranks, and when the last is through."""
    layout, end = Layout(ranks=ranks, group_size=2), 0.0
    costs = [predict("allreduce", "ring", size, layout, PLANTED) for size, _ in MESSAGES]
    for (_, ready), cost in zip(MESSAGES, costs, strict=True):
        end = max(end, ready) + cost
    return costs, end


def said(*words: object) -> Any:
    """What a command prints, as JSON if it is any."""
    found = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout) if "json" in words else None


def test_all_commands_say_the_same_of_ranks_that_were_not_measured(machine: Path) -> None:
    costs = ("--network", machine / "box.network.json", "--format", "json")
    (group,) = said("project", machine, "--to", "16,32,64", *costs)["groups"]
    told = {one["ranks"]: one for one in group["projection"]["targets"]}
    # The report shows the numbers of the command.
    forecast = said("report", machine, *costs)["groups"][0]["forecast"]["projection"]["targets"]
    assert forecast == [told[32], told[64]]
    for ranks in (32, 64):
        step = told[ranks]["step"]["quantiles"]
        assert step[2] < 0.047 + planted_exchange(ranks)[1] < step[6]
        # Messages cost what `comm predict` says of them; at the anchor they took what the network says.
        sizes = ",".join(str(size) for size, _ in reversed(MESSAGES))
        asked = ("--ranks", ranks, "--group-size", 2, "--sizes", sizes, "--algorithms", "ring", "--format", "json")
        series = said("comm", "predict", costs[1], *asked)["predictions"][0]["series"][0]
        assert sum(seconds for _, seconds in told[ranks]["exchange_by_level"]) == pytest.approx(
            sum(series["seconds"]), rel=0.01
        )


def test_without_a_network_the_report_says_what_the_points_say(machine: Path) -> None:
    (group,) = said("report", machine, "--format", "json")["groups"]
    with_costs = said("project", machine, "--to", "32,64", "--format", "json")["groups"][0]["projection"]["targets"]
    for one, other in zip(group["forecast"]["projection"]["targets"], with_costs, strict=True):
        assert one["step"] == other["second"]
        assert "continues the measured step times alone" in one["flags"][0]["text"]
