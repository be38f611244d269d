"""`dlbench io` with a program at its boundary that answers as the readers would, and wrong input in one line."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import EnvironmentLacksError, ExitCode, IncompleteDataError, RunError, UserError
from tests.support.datasets import write_volumes
from tests.support.out_of_core_factory import data_story, reading_result
from tests.support.paths import GOLDEN
from tests.support.programs import Answering, answer_with, one_line
from tests.support.run_factory import constant, plans, write_run

ANSWER = """
import json, sys
order = json.load(sys.stdin)
cold = order["data"]["cache"] == "cold"
fetch, prepare = (3.0, 1.0) if cold else (0.5, 1.5)
rate = (200.0 if cold else 400.0) * order["processes"]
def repeat(factor):
    samples = round(rate * factor * 5)
    return {"cached_share": 0.0 if cold else 1.0, "cache_in_force": IN_FORCE, "processes": [], "together": {
        "samples": samples, "seconds": 5.0, "samples_per_s": rate * factor, "raw_bytes": samples * 100000,
        "bytes_per_s": rate * factor * 100000, "tier_bytes": {"shared": samples * 100000},
        "storage_bytes": samples * 100000 if cold else 0, "fetch_s": fetch * order["processes"],
        "prepare_s": prepare * order["processes"], "passes": 1.0, "is_short": False}}
print(json.dumps({"format": "dlbench.reading-rate", "kind": "jpeg-tree", "num_samples": 4096, "set_bytes": 1,
    "processes": order["processes"], "cores_per_process": 1, "batch": order["batch"], "seconds": order["seconds"],
    "loader_workers": 1, "prefetch_batches": 2, "trials": [], "cache": order["data"]["cache"],
    "cache_state": "by the book" if IN_FORCE else "no right to drop it", "cache_in_force": IN_FORCE, "warnings": [],
    "repeats": [repeat(1 + k / 100) for k in range(order["repeats"])]}))
"""


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answering:
    return partial(answer_with, monkeypatch, tmp_path / "readers.py")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Names of images, which planning looks at; the program that answers does not."""
    folder = tmp_path / "pictures"
    (folder / "cats").mkdir(parents=True)
    for number in range(300):
        (folder / "cats" / f"{number}.jpg").touch()
    return folder


def io(*words: object) -> Result:
    return CliRunner().invoke(cli, ["io", *map(str, words)])


def refused(*words: object) -> str:
    return one_line(io(*words), ExitCode.USAGE)


def test_what_readers_give_and_how_many_accelerators_that_feeds(
    answering: Answering, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(f"IN_FORCE = True\n{ANSWER}")
    monkeypatch.setattr("socket.gethostname", lambda: "n0")
    monkeypatch.chdir(data.parent)
    result = io("resnet50", "--data", "pictures", "--ranks", "1,4", "--repeats", 5)
    assert result.exit_code == 0
    # A path may be longer than a line.
    text = re.sub(r"Read from\s.*?\n(?=Each)", "Read from FOLDER.\n", result.stdout, flags=re.DOTALL)
    assert max(map(len, text.splitlines())) <= 80
    assert text == (GOLDEN / "io-readers.txt").read_text(encoding="utf-8")


def test_counts_are_rates_over_demands(answering: Answering, data: Path) -> None:
    answering(f"IN_FORCE = True\n{ANSWER}")
    found = json.loads(io("resnet50", "--data", data, "--repeats", 5, "--json").stdout)
    assert (found["format"], found["version"]) == ("dlbench.io", 1)
    supplies = {one["cache"]: one for one in found["supplies"]}
    assert supplies["cold"]["samples_per_s"]["value"] == pytest.approx(204)
    assert supplies["cold"]["limit"] == "fetch"
    assert supplies["warm"]["limit"] == "prepare"
    assert supplies["cold"]["fetch_share"]["value"] + supplies["cold"]["prepare_share"]["value"] == pytest.approx(1)
    # One reader fetched 1,020 samples in 3 s.
    assert supplies["cold"]["fetch_samples_per_s"]["value"] == pytest.approx(340)
    h100 = found["needs"][0]
    assert h100["demand"]["accelerator"] == "H100"
    fed = {one["cache"]: one for one in h100["fed"]}
    assert fed["cold"]["accelerators"]["value"] == pytest.approx(204 / (400 / 0.224))
    # It spent 60 % of 5 s in fetching, 20 % in preparing, and 20 % in neither: what is printed gives by_fetching.
    shares = [supplies["cold"][name]["value"] for name in ("fetching", "preparing", "neither")]
    assert shares == pytest.approx([0.6, 0.2, 0.2])
    assert fed["cold"]["by_fetching"]["value"] == pytest.approx(fed["cold"]["accelerators"]["value"] / shares[0])


def test_opens_stats_and_listings_and_how_long_a_listing_takes(answering: Answering, data: Path) -> None:
    calls = '"opens_per_s": 1000.0 * order["processes"], "stats_per_s": 4000.0, "names_per_s": 2e5 * order["processes"]'
    known = '"num_files": 1000000, "names_from": ".dlbench-index", "open_s": 0.25'
    program = ANSWER.replace('"is_short": False', f'"is_short": False, {calls}').replace('"set_bytes": 1', known)
    dropped = "by the book; names and attributes of files stay cached (not root); 0 % of its pages"
    answering(f"IN_FORCE = True\n{program}".replace("by the book", dropped))
    result = io("resnet50", "--data", data, "--ranks", "1,4", "--repeats", 5)
    assert result.exit_code == 0, result.exception
    text = " ".join(result.stdout.split())
    assert "Opening files Page cache Ranks Opens/s Stats/s Names listed/s cold 1 1,000 4,000 200,000" in text
    assert "warm 4 4,000 4,000 800,000" in text
    assert "The names of 1,000,000 files came from .dlbench-index in 250 ms; " in text
    told = "names and attributes of files stay cached (not root)"
    assert f"listing them would take one rank 5 s, by the cold listing rate ({told})." in text
    found = json.loads(io("resnet50", "--data", data, "--repeats", 5, "--json").stdout)["supplies"][0]
    assert (found["opens_per_s"]["value"], found["num_files"], found["open_s"]) == (1000, 1000000, 0.25)


def test_a_cache_that_was_not_emptied_gives_no_figure_and_says_why(answering: Answering, data: Path) -> None:
    answering(f"IN_FORCE = False\n{ANSWER}")
    result = io("resnet50", "--data", data)
    assert result.exit_code == 0
    assert "Cold at 1 rank: not measured: no right to drop it." in result.stdout
    assert "How many" not in result.stdout


def test_the_demand_of_a_rate_and_of_a_run(answering: Answering, data: Path, tmp_path: Path) -> None:
    answering(f"IN_FORCE = True\n{ANSWER}")
    found = json.loads(io("resnet50", "--data", data, "--rate", 102, "--repeats", 5, "--json").stdout)
    assert found["needs"][0]["fed"][0]["accelerators"]["value"] == pytest.approx(2)
    (plan,) = plans(workload="resnet50", preset="ci", points=(1,), repeats=1)
    folder = write_run(tmp_path / "runs", plan, constant([0.0, 0.0, 30.0, 60.0, 0.0, 10.0]))
    found = json.loads(io("resnet50", "--data", data, "--like", folder.path, "--json").stdout)
    assert found["needs"][0]["demand"]["samples_per_s"] == pytest.approx(plan.workload.train.batch_per_rank / 0.1)
    assert plan.run_id in found["needs"][0]["demand"]["source"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, UserError), (3, RunError), (4, IncompleteDataError), (5, EnvironmentLacksError), (70, RunError)],
)
def test_errors_of_the_readers_are_those_of_the_command(
    answering: Answering, data: Path, code: int, kind: type[Exception]
) -> None:
    answering(f"import sys\nprint('noise')\nprint('dlbench: error: a.jpeg: torn', file=sys.stderr)\nsys.exit({code})")
    found = io("resnet50", "--data", data).exception
    assert type(found) is kind
    assert str(found) == "a.jpeg: torn"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("", "gave an answer that cannot be read"),
        ("print('[]')", "gave an answer that cannot be read"),
        ("print('{}')", "gave an answer that cannot be read: format"),
        ("raise SystemExit(9)", "ended with 9"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by signal SIGKILL"),
    ],
)
def test_readers_that_die_or_talk_nonsense_are_one_line(
    answering: Answering, data: Path, program: str, words: str
) -> None:
    answering(program)
    found = io("resnet50", "--data", data).exception
    assert isinstance(found, RunError)
    assert words in str(found)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["resnet50"], "give --data PATH"),
        (["resnet50", "--data", "/nope"], "data.source /nope: no such file"),
        (["resnet50", "--data", "/", "--rate", "0"], "--rate 0.0: must be a number above zero"),
        (["resnet50", "--data", "/", "--rate", "nan"], "--rate nan: must be a number above zero"),
        (["resnet50", "--data", "/", "--seconds", "1e9"], "--seconds 1e+09: must be at most"),
        (["resnet50", "--data", "/", "--repeats", "0"], "--repeats 0: must be from 1"),
        (["resnet50", "--data", "/", "--ranks", "0"], "--ranks '0': must be 1 or more"),
        (["resnet50", "--data", "/", "--like", "/", "--rate", "5"], "--like and --rate exclude each other"),
        (
            ["resnet50", "--data", "/", "--series", "a"],
            "--series: needs --tiers: without it nothing is trained or stored",
        ),
        (
            ["resnet50", "--data", "/", "--out", "a"],
            "--out: needs --tiers: without it nothing is trained or stored (use --json > FILE)",
        ),
        (["resnet50", "--data", "/", "--tiers", "--seconds", "5"], "--seconds: has no effect with --tiers"),
        (["resnet50", "--data", "/", "--set", "data.cache=cold"], "--set data.cache: has no effect"),
        (["resnet50", "--tiers"], "--tiers: synthetic data is not read from storage"),
        (["nope", "--data", "/"], "unknown workload"),
    ],
)
def test_wrong_requests_are_one_line(words: list[str], answer: str) -> None:
    assert answer in refused(*words)


def test_a_run_of_another_workload_or_without_figures_is_no_measure(data: Path, tmp_path: Path) -> None:
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1)
    folder = write_run(tmp_path / "runs", plan, constant([0.0, 0.0, 30.0, 60.0, 0.0, 10.0]), data_story())
    assert "--like /nope: no such folder" in refused("resnet50", "--data", data, "--like", "/nope")
    assert "is a run of cosmoflow, not of resnet50" in refused("resnet50", "--data", data, "--like", folder.path)
    folder.record.unlink()
    write_volumes(tmp_path / "volumes", 8, seed=0)
    words = ("cosmoflow", "--preset", "ci", "--data", tmp_path / "volumes")
    assert "has no figures" in refused(*words, "--like", folder.path)


def test_what_would_be_read_is_shown_and_nothing_is_made(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    result = io("resnet50", "--preset", "ci", "--data", data, "--dry-run")
    assert result.exit_code == 0
    orders = [json.loads(line[2:]) for line in result.stdout.splitlines() if line.startswith("# {")]
    assert [order["data"]["cache"] for order in orders] == ["cold", "warm"]
    assert {order["data"]["source"] for order in orders} == {str(data)}
    result = io("resnet50", "--preset", "ci", "--data", data, "--tiers", "--repeats", 1, "--dry-run")
    assert [word in result.stdout for word in ("cached-input", "synthetic-input")] == [True, True]
    assert [path.name for path in data.iterdir()] == ["cats"]


def test_the_series_of_tiers_is_told_at_its_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs themselves are made; what starts them is at the boundary."""

    def run_all(made: list[Any], out: Path, **more: object) -> ExitCode:
        waits = {"plain": 70.0, "cached-input": 20.0, "synthetic-input": 0.0}
        for plan in made:
            told = reading_result() if plan.series.variant != "synthetic-input" else None
            wait = waits[plan.series.variant]
            write_run(out, plan, constant([wait, 0.0, 30.0, 60.0, 0.0, 10.0]), data_story(reading=told))
        return ExitCode.OK

    monkeypatch.setattr("dlbench.cli.run.run_all", run_all)
    monkeypatch.setattr("dlbench.cli.options.require_ranks_needs", lambda plans: None)
    words = ("resnet50", "--preset", "ci", "--data", data, "--tiers", "--repeats", 2, "--out", tmp_path / "runs")
    result = io(*words, "--engine", "ddp")
    assert result.exit_code == 0, result.exception
    assert re.search(r"fetch stall \(storage\) +50 ms ", result.stdout)
    (point,) = json.loads(io(*words, "--engine", "ddp", "--series", "again", "--json").stdout)["points"]
    assert [part["seconds"]["value"] for part in point["parts"]] == pytest.approx([0.1, 0.02, 0.05])
