"""The cost of each algorithm, by the command and on the page."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.cli.report import render
from dlbench.comm.costs import cost
from dlbench.comm.document import document_of
from dlbench.comm.report import CollectivesReport, assemble
from dlbench.perfmodels.predictions import predict
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import scan_comm
from dlbench.specs.comm import ALGORITHMS
from tests.support import collectives_factory as factory

SIZES = {"sizes": "64KiB,1MiB", "algorithms": "ring,naive", "backends": "gloo", "group_size": None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs")
    for ranks in (2, 4):
        factory.write_comm_series(folder, points=(ranks,), series=f"c{ranks}", **SIZES)
    return folder


@pytest.fixture(scope="module")
def made(runs: Path) -> CollectivesReport:
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


def test_the_page_has_them_and_so_has_csv(made: CollectivesReport) -> None:
    document = document_of(made)
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
def test_wrong_use_is_one_line(runs: Path, arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(cli, ["comm", "table", *(str(runs) if one == "RUNS" else one for one in arguments)])
    assert message in str(found.exception)
    assert "\n" not in str(found.exception)
