"""The report of the collective benchmark: formats agree, foreign text stays text, the page reads without scripts; fit,
predict and their wrong use on the command line."""

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
from dlbench.comm.document import document_of
from dlbench.comm.measurements import Measurement, rate
from dlbench.comm.report import CollectivesReport, assemble
from dlbench.errors import UserError
from dlbench.records.comm import scan_comm
from dlbench.report.formats import terminal
from dlbench.report.wording import clean, figure_text, optional, value_text
from dlbench.specs.comm import NetworkModel
from tests.support import collectives_factory as factory
from tests.support.browser import Visit, assert_well_formed
from tests.support.run_factory import constant, plans, write_run

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
