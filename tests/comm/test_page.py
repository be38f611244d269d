"""The report of the collective benchmark: formats agree, foreign text stays text, the page reads without scripts; fit,
predict and their wrong use on the command line. Pairs of ranks: which are chosen, what is refused, and figures, factors
and costs against planted times; and the cost of each algorithm, by the command and on the page.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.cli.report import FormatName, render
from dlbench.comm.costs import cost
from dlbench.comm.document import document_of
from dlbench.comm.measurements import Measurement, rate
from dlbench.comm.pairs import PairsReport
from dlbench.comm.report import CollectivesReport, assemble
from dlbench.errors import UserError
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import CommPoint, scan_comm
from dlbench.records.folder import RunFolder
from dlbench.report.formats import terminal
from dlbench.report.wording import clean, figure_text, optional, value_text
from dlbench.specs.comm import ALGORITHMS, NetworkModel
from tests.support import collectives_factory as factory
from tests.support.browser import Visit, assert_well_formed
from tests.support.run_factory import constant, edit_json, plans, write_run

SMALL: dict[str, Any] = {"algorithms": "ring,recursive-doubling,leader", "sizes": "1KiB:1MiB"}


def write_sample(out: Path) -> None:
    """Five runs with two libraries beside, a single run on two nodes, an invalid, a failed and a killed run."""
    factory.write_comm_series(out, launcher="mpirun", backends="gloo,mpi", **SMALL)
    nodes: dict[str, Any] = {"points": (2,), "points_are": "nodes", "ranks_per_node": 2, "group_size": None}
    story = factory.Story(not_measured=["nccl: no GPU here"])
    factory.write_comm_series(out, story, series="c2", system="box", backends="gloo", repeats=1, **nodes, **SMALL)
    wrong = factory.Story(state="invalid", change=lambda point: {"correct": False, "max_error": 0.25})
    invalid, failed, killed = factory.comm_plans(series="c3", repeats=3, backends="none", **SMALL)
    factory.write_comm_run(out, invalid, wrong)
    factory.write_unfinished_comm(out, failed, "failed", "no memory left")
    factory.write_unfinished_comm(out, killed)
    # A training run lies beside them, and is passed over.
    write_run(out, plans(points=(1,), repeats=1)[0], constant([1, 1, 1, 1, 1, 1]))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "runs"
    write_sample(folder)
    return folder


@pytest.fixture(scope="module")
def made(sample: Path) -> CollectivesReport:
    return assemble(scan_comm(sample))


@pytest.fixture(scope="module")
def page(made: CollectivesReport) -> str:
    return written(made, "html")


def written(report: CollectivesReport, chosen: FormatName, table: str = "") -> str:
    return render(document_of(report), chosen, table)


def table_rows(report: CollectivesReport, table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(written(report, "csv", table))))


def rows(report: CollectivesReport) -> Iterator[Measurement]:
    for group in report.groups:
        for series in group.series:
            yield from series.rows


def run_cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["comm", *(str(argument) for argument in arguments)])


def test_every_time_and_rate_stands_in_markdown_and_html(made: CollectivesReport, page: str) -> None:
    texts = {value_text(row.time) for row in rows(made)}
    texts |= {value_text(row.busbw) for row in rows(made) if row.busbw}
    assert len(texts) > 60
    assert_well_formed(page)
    plain = page.replace("\N{NO-BREAK SPACE}", " ")
    markdown = written(made, "md")
    assert [text for text in texts if text not in plain] == []
    assert [text for text in texts if text not in markdown] == []


def test_terminal_prints_the_fastest_of_each_size_in_eighty_columns(made: CollectivesReport) -> None:
    brief, text = (terminal.to_text(document_of(made), full=full) for full in (False, True))
    for group in made.groups:
        assert group.verdict in " ".join(brief.split())
        for fastest in group.best:
            assert figure_text(fastest.time) in text
            assert value_text(rate(fastest.time, fastest.num_bytes)) in text
            assert value_text(fastest.rate) in text
    # The other points stand in the page and in CSV, and the last lines say so.
    assert "Times by size and algorithm (points)" in " ".join(text.split())
    assert max(map(len, [*brief.splitlines(), *text.splitlines()])) <= 80


def test_the_single_run_is_labelled_within_run(made: CollectivesReport, page: str) -> None:
    single, several = (next(g for g in made.groups if g.system == name) for name in ("box", "local"))
    assert {row.time.kind for found in single.series for row in found.rows} == {"within-run"}
    assert {row.time.kind for found in several.series for row in found.rows} == {"order statistics"}
    assert "No recommendation from 1 run" in single.verdict
    assert "No advice" not in several.verdict
    told = "within-run: middle half of the iterations of a single run"
    assert told in page
    assert told in " ".join(terminal.to_text(document_of(made), full=True).split())


def test_runs_without_figures_stand_with_their_reasons(made: CollectivesReport, page: str) -> None:
    assert {run.state for run in made.without_figures} == {"invalid", "failed", "incomplete"}
    assert [run.run_id for run in made.runs if run.run_id.startswith("s1")] == []
    for text in (page, written(made, "md"), " ".join(terminal.to_text(document_of(made), full=True).split())):
        plain = text.replace("\N{NO-BREAK SPACE}", " ").replace("\\", "")
        assert "wrong result, largest relative error 0.25" in plain
        assert "no memory left" in plain
        assert "nccl: no GPU here" in plain


def test_report_recommends_by_size_and_names_the_rule(made: CollectivesReport) -> None:
    group = next(group for group in made.groups if group.system == "local")
    assert group.recommended[0].low == 1024
    assert group.recommended[-1].high == 2**20
    # Libraries with one planted line: neither is faster.
    libraries = {f"library of mpi ({place})" for place in ("in place", "out of place")}
    assert {group.recommended[-1].title, *group.recommended[-1].tied} >= {"", *libraries}
    assert "keep the library's choice" in group.advice
    told = " ".join(written(made, "text").split())
    # Two libraries with one line: neither is clearly the fastest.
    assert "the intervals of library of mpi" in told
    assert "overlap, or they differ by less than 5 %" in told


def test_csv_holds_every_point(made: CollectivesReport) -> None:
    points = table_rows(made, "points")
    assert [float(point["time_s"]) for point in points] == [row.time.value for row in rows(made)]
    assert {point["fastest"] for point in points} == {"True", "False"}
    ratios = [float(point["predicted_s"]) / float(point["time_s"]) for point in points if point["predicted_s"]]
    assert ratios == [float(point["predicted_over_measured"]) for point in points if point["predicted_s"]] != []
    fits = table_rows(made, "fits")
    assert {row["name"] for row in fits} >= {"inside", "across", "reduction", "gloo ring", "mpi flat"}
    assert [row["run_id"] for row in table_rows(made, "runs")] == [run.run_id for run in made.runs]


# The commands


def test_damaged_runs_are_named_and_the_rest_is_reported(tmp_path: Path) -> None:
    made = factory.write_comm_series(tmp_path, algorithms="ring", backends="none", sizes="4KiB", repeats=3)
    (tmp_path / made[0].run_id / "comm.json").write_text('{"format": "dlbench.co', encoding="utf-8")
    found = run_cli("report", tmp_path)
    assert found.exit_code == 4
    assert f"dlbench: damaged: {tmp_path / made[0].run_id / 'comm.json'}" in found.stderr
    assert "2 runs" in found.stdout.splitlines()[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "RUNS/nowhere"], "no such folder of runs"),
        (["report", "RUNS", "-o", "TMP/report.pdf"], "no --format"),
        (["fit", "RUNS", "-o", "TMP/none/x.network.json"], "there is no folder"),
        (["fit", "RUNS"], "a file contains one of box, local; choose with --system"),
        (["predict", "TMP/none.json", "--ranks", "8"], "cannot be read"),
        (["predict", "NET", "--ranks", "0"], "--ranks '0': must be 1 or more"),
        (["predict", "NET", "--ranks", "8", "--collective", "reduce-sca"], "did you mean reduce-scatter"),
        (["predict", "NET", "--ranks", "8", "--workload-bytes", "much"], "--workload-bytes: 'much' is not a number"),
    ],
)
def test_wrong_use_is_one_line(sample: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    network = tmp_path / "net.json"
    network.write_text(factory.network().model_dump_json(), encoding="utf-8")
    places = {"RUNS": str(sample), "TMP": str(tmp_path), "NET": str(network)}
    found = run_cli(*(re.sub("RUNS|TMP|NET", lambda match: places[match[0]], part) for part in arguments))
    assert isinstance(found.exception, UserError), found.output
    assert message in str(found.exception)
    assert "\n" not in str(found.exception)
    assert list(tmp_path.iterdir()) == [network]


def test_fit_writes_a_file_that_predict_reads(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "box.network.json"
    found = run_cli("fit", sample, "--system", "box", "-o", out)
    assert found.exit_code == 0, found.output
    assert "Fitted costs of box, torch-gloo, fp32" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert NetworkModel.model_validate_json(out.read_text(encoding="utf-8")).median_error < 0.05
    options = "--ranks 4,64 --group-size 2 --sizes 1KiB:1MiB --workload-bytes 94MB"
    asked = ["predict", out, *options.split()]
    brief, text = run_cli(*asked).stdout, run_cli(*asked, "--full").stdout
    assert max(map(len, [*brief.splitlines(), *text.splitlines()])) <= 80
    assert len(brief.splitlines()) < len(text.splitlines())
    small, _, large = text.partition("64 ranks in 32 groups of 2")
    # One rank count foretells no other: nothing says how far the fit holds beyond it but experience with models.
    assert (
        "At 64 ranks the error of the model may be a factor of 1.29 in either direction (95 %), by experience (3 % per "
        "doubling), as no rank count was held out; single runs have no intervals." in " ".join(large.split())
    )
    assert "Extrapolated: 89.65 MiB, fitted from 1 KiB to 1 MiB." in small
    assert "gloo flat (line)" in small
    assert "Recommended fusion size" in small
    content = json.loads(run_cli(*asked, "--format", "json").stdout)
    assert [len(one["extrapolated"]) for one in content["predictions"]] == [1, 3]
    assert [one["model_error"] is None for one in content["predictions"]] == [True, False]
    for one in content["predictions"]:
        for series in one["series"]:
            assert clean(series["name"]) in text
            assert optional(series["seconds"][0], "s") in text


# The page in a browser


@pytest.mark.browser
def test_charts_come_alive_without_a_request_or_a_complaint(browser: Any, page: str, tmp_path: Path) -> None:
    path = tmp_path / "comm.html"
    path.write_text(page, encoding="utf-8")
    with Visit(browser, path) as visit:
        assert visit.page.locator("figure[data-chart]").count() == 4
        visit.see_all_charts()
        assert visit.requests == [path.as_uri()]
        assert visit.complaints == []


ALPHA, BETA = {"inside": 10e-6, "across": 100e-6}, {"inside": 0.25e-9, "across": 8e-9}
FACTORS = (2.0, 3.0)  # Of the mean, and of the slowest tenth.


def chosen(ranks: int, **request: Any) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    (plan, *_) = factory.comm_plans(collective="p2p", points=(ranks,), backends="auto", repeats=1, **request)
    return plan.comm.pairs, plan.comm.congestors


def write_pairs(out: Path, repeats: int = 5, **request: Any) -> None:
    """Runs with planted costs; beside congestors one operation in ten takes three times as long, on average two."""
    asked = {"collective": "p2p", "backends": "auto", "sizes": "8,4KiB,1MiB", "repeats": repeats, **request}
    for plan in factory.comm_plans(**asked):
        folder: RunFolder = factory.write_comm_run(out, plan)
        points = []
        for size in plan.comm.sizes:
            for pair in plan.comm.pairs:
                level = "inside" if pair[0] // 2 == pair[1] // 2 else "across"
                for way in plan.comm.algorithms:
                    for is_beside in (False, True)[: 1 + bool(plan.comm.congestors)]:
                        seconds = (ALPHA[level] + size * BETA[level]) * (1 + 0.01 * plan.series.repeat)
                        slow, usual = (FACTORS[1], (FACTORS[0] * 10 - FACTORS[1]) / 9) if is_beside else (1.0, 1.0)
                        made = CommPoint(
                            collective="p2p", algorithm=way, carrier="torch-gloo", num_bytes=size, dtype="fp32",
                            times_s=(*[seconds * usual] * 90, *[seconds * slow] * 10), correct=True, max_error=None,
                            pair=pair, congestors=(1e9,) * len(plan.comm.congestors) if is_beside else (),
                        )  # fmt: skip
                        points.append(made.model_dump(mode="json"))
        edit_json(folder.comm, points=points)


def only(folder: Path) -> PairsReport:
    (found,) = assemble(scan_comm(folder)).pairs
    return found


def test_pairs_follow_the_layout() -> None:
    assert chosen(4, group_size=4) == (((0, 1),), ())
    assert chosen(4, group_size=1) == (((0, 1), (2, 3), (0, 3)), ())
    assert chosen(6, group_size=2) == (((0, 1), (2, 3), (4, 5), (0, 2), (0, 4)), ())
    # Beside congestors those between groups alone: the other ranks send from one half to the other.
    assert chosen(4, group_size=2, congestors="auto") == (((0, 2),), ((1, 3),))
    assert chosen(8, group_size=2, congestors="auto") == (((0, 2), (4, 6), (0, 6)), ((1, 5), (3, 7)))
    assert chosen(4, group_size=4, congestors="auto") == (((0, 1),), ((2, 3),))
    assert chosen(8, group_size=4, victims="3:4,2:5", congestors="7:0") == (((3, 4), (2, 5)), ((7, 0),))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"victims": "0:4"}, "--victims 0:4: must be two of 4 ranks, numbered from 0"),
        ({"victims": "1:1"}, "--victims 1:1: must be two"),
        ({"victims": "0:1,0:1"}, "--victims: a pair is given twice"),
        ({"victims": "0-1"}, "--victims '0-1': must be auto or pairs of ranks"),
        ({"victims": "0:1", "congestors": "1:9"}, "--congestors 1:9: must be two"),
        ({"victims": "0:1", "congestors": "1:2"}, "rank 1 is already in another pair"),
        ({"victims": "0:1,2:3", "congestors": "auto"}, "the victims leave 0 of 4 ranks"),
        ({"backends": "gloo"}, "no --backends"),
        ({"algorithms": "ring"}, "'ring' is not a known algorithm of p2p"),
        ({"collective": "allreduce", "victims": "0:1"}, "--victims: has no effect on allreduce"),
        ({"collective": "allreduce", "congestors": "auto"}, "--congestors: has no effect on allreduce"),
    ],
)
def test_what_no_pair_can_be_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        factory.comm_plans(**{"collective": "p2p", "backends": "auto", "points": (4,), **request_})


def test_costs_of_a_level_are_those_planted(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    found = only(tmp_path)
    assert [level_costs.level for level_costs in found.costs] == ["inside", "across"]
    for level_costs in found.costs:
        assert level_costs.alpha.value == pytest.approx(ALPHA[level_costs.level] * 1.02)
        assert level_costs.beta.value == pytest.approx(BETA[level_costs.level] * 1.02)
        assert level_costs.alpha.low < level_costs.alpha.value < level_costs.alpha.high  # type: ignore[operator]
    assert all(one.beside is None and one.factor is None for one in found.figures)
    (figure,) = [f for f in found.figures if (f.pair, f.way, f.at.num_bytes) == ("0:2", "window", 2**20)]
    assert figure.at.time.value == pytest.approx((ALPHA["across"] + 2**20 * BETA["across"]) * 1.02)
    assert figure.at.minimum_s == pytest.approx(figure.at.time.value / 1.02)  # of all runs
    assert figure.at.algbw.value == pytest.approx(2**20 / figure.at.time.value * 1e-9)
    assert [words.split(",")[0] for words in found.words] == ["Within a group", "Between groups"]


def test_factors_are_of_the_same_run(tmp_path: Path) -> None:
    write_pairs(tmp_path, congestors="auto")
    found = only(tmp_path)
    assert {one.name: one.value for one in found.conditions}["congestors"] == "1:3"
    for one in found.figures:
        assert one.factor is not None
        assert one.factor_p99 is not None
        # What runs differ by cancels: the interval has no width.
        assert (one.factor.value, one.factor.low, one.factor.high) == pytest.approx((FACTORS[0],) * 3)
        assert one.factor_p99.value == pytest.approx(FACTORS[1])
    assert any("2.00x" in words and "1 of 1 pairs are certainly affected" in words for words in found.words)
    page = document_of(assemble(scan_comm(tmp_path)))
    text = terminal.to_text(page)
    assert "the pair affected most; 1 of 1 pairs are certainly affected, over 5 runs." in " ".join(text.split())


def test_pairs_and_collectives_stand_side_by_side(tmp_path: Path) -> None:
    factory.write_comm_series(tmp_path, algorithms="ring,direct", backends="none", sizes="1KiB:1MiB")
    write_pairs(tmp_path, series="c2")
    report = assemble(scan_comm(tmp_path))
    assert [group.collective for group in report.groups] == ["allreduce"]
    (found,) = report.pairs
    assert found.fit is report.fits[0]  # pairs are in no fit to collectives
    assert report.fits[0].network.num_points == sum(len(series.rows) for series in report.groups[0].series)
    assert not any(row.get("group") for row in document_of(report).tables()["fits"].rows)  # for people alone
    assert {run.group for run in report.runs} == {found.id, report.groups[0].id}


SIZES = {"sizes": "64KiB,1MiB", "algorithms": "ring,naive", "backends": "gloo", "group_size": None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs")
    for ranks in (2, 4):
        factory.write_comm_series(folder, points=(ranks,), series=f"c{ranks}", **SIZES)
    return folder


@pytest.fixture(scope="module")
def assembled(runs: Path) -> CollectivesReport:
    return assemble(scan_comm(runs))


def printed(*arguments: str | Path) -> str:
    return CliRunner().invoke(cli, ["comm", "table", *map(str, arguments)], catch_exceptions=False).output


def test_counts_need_no_runs() -> None:
    text = printed("--ranks", "8", "--shards", "2")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    assert rows["ring"] == ["14", "1.75", "1x"]
    assert rows["naive"] == ["1", "7", "4x"]  # (p - 1) n over 2 (p - 1) / p n
    assert rows["parameter-server,"] == ["k", "=", "2", "2", "4", "4x"]
    groups = printed("--ranks", "8", "--group-size", "4")
    assert "8 ranks in 2 groups of 4" in groups
    assert all(name in groups for name in ALGORITHMS["allreduce"])
    assert "hierarchical, c = 32 " in groups
    assert "parameter-server, k = 8 " in groups  # A server on every rank, as `run` and `predict` have.


def test_fitted_costs_price_them(tmp_path: Path) -> None:
    network = factory.network()
    file = tmp_path / "box.network.json"
    file.write_text(network.model_dump_json(), encoding="utf-8")
    text = printed(file, "--ranks", "4,6", "--group-size", "2", "--size", "256KiB")
    assert text.count("hierarchical, c = 2 ") == 2
    layout = Layout(ranks=4, group_size=2)
    for name in ALGORITHMS["allreduce"]:
        one = cost("allreduce", name, layout, 2**20, "fp32", network, 1)
        assert one.predicted_s == predict("allreduce", name, 2**20, layout, network, shards=1)
        assert one.over_ideal >= 1
        assert one.measured is None


def test_the_page_has_them_and_so_has_csv(assembled: CollectivesReport) -> None:
    document = document_of(assembled)
    sheets = [sheet for section, _ in document.walk() for sheet in section.sheets if sheet.name == "costs"]
    assert [sheet.title for sheet in sheets] == ["Cost of each algorithm, n = 1 MiB"] * 2
    assert all(len(sheet.to_display().rows) == 2 for sheet in sheets)  # of the largest size; programs get all
    lines = list(csv.DictReader(io.StringIO(render(document, "csv", "costs"))))
    assert {(line["ranks"], line["algorithm"], line["num_bytes"]) for line in lines} == {
        (ranks, name, size) for ranks in "24" for name in ("ring", "naive") for size in ("65536", "1048576")
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "6", "--group-size", "4"], "does not divide 6 ranks"),
        (["--collective", "allredus"], "did you mean allreduce"),
        (["--shards", "9", "--ranks", "8"], "9 shards; needs 1 to 8"),
        (["RUNS"], "`dlbench comm report RUNS --full` prints the costs of runs"),
    ],
)
def test_wrong_use_of_the_table_is_one_line(runs: Path, arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(cli, ["comm", "table", *(str(runs) if one == "RUNS" else one for one in arguments)])
    assert message in str(found.exception)
    assert "\n" not in str(found.exception)
