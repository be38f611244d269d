"""`dlbench history`: where the store is found, what is printed, exit codes, and that foreign text stays text."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.errors import DlbenchError
from dlbench.history.importing import open_history
from tests.support.history_factory import history_plan, write_history
from tests.support.run_factory import Story, constant, edit_json, write_run, write_unfinished

STEP = constant([5, 0, 30, 50, 0, 10])
ESCAPE = "\x1b]0;owned\x07\u202e=cmd"


def call(*arguments: str | Path, **environment: str) -> Result:
    variables = {"DLBENCH_HISTORY": None, **environment}
    return CliRunner().invoke(cli, ["history", *map(str, arguments)], env=variables)


def failed(result: Result) -> str:
    assert isinstance(result.exception, DlbenchError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("history") / "store"
    write_history(
        store,
        [(9.0 * number, 1 + number / 100) for number in range(6)],
        commit=lambda number: f"c{number // 2}",
        host=lambda number, rank: f"n{rank}",
        environment=lambda number: {"variable.SLURM_JOB_ID": str(4000 + number)},
    )
    return store


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


# Where


def test_a_history_must_be_named() -> None:
    message = failed(call("list"))
    assert "--store" in message
    assert "DLBENCH_HISTORY" in message


def test_the_environment_names_the_store(made: Path) -> None:
    result = call("list", DLBENCH_HISTORY=str(made))
    assert result.exit_code == 0
    assert "\n6 runs, 6 valid; step: median" in result.output


def test_stray_folders_are_passed_over_and_told_once(store: Path) -> None:
    (store / "runs" / "2026-03" / "copy of a run").mkdir()
    (store / "runs" / "2026-03" / os.fsdecode(b"x\xff")).mkdir()
    (store / "runs" / os.fsdecode(b"\xfe")).mkdir()
    result = call("list", "--store", store)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("not a name of a run; ignored") == 3
    assert r"'runs/2026-03/x\udcff'" in result.stderr
    assert len(open_history(store).entries()) == 6


# Bringing in


def test_import_says_what_became_of_every_run(tmp_path: Path) -> None:
    runs, store = tmp_path / "runs", tmp_path / "store"
    for number in range(2):
        write_run(runs, history_plan(number, 0, points=(1,)), STEP)
    write_unfinished(runs, history_plan(2, 0, points=(1,)))
    result = call("import", runs, "--store", store)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "2 imported, 1 skipped"
    assert sorted(line.split()[0] for line in lines[:-1]) == ["imported", "imported", "skipped"]
    assert "still running" in result.stdout
    again = call("import", runs, "--store", store)
    assert (again.exit_code, again.stdout.splitlines()[-1]) == (0, "2 already there, 1 skipped")
    edit_json(sorted(runs.iterdir())[0] / "record.json", finished="2027-01-01T00:00:00Z")
    refused = call("import", runs, "--store", store)
    assert refused.exit_code == 2
    assert "refused" in refused.stderr
    (sorted(runs.iterdir())[1] / "plan.json").write_text("{")
    damaged = call("import", runs, "--store", store)
    assert damaged.exit_code == 4
    assert "damaged" in damaged.stderr
    assert damaged.stdout.splitlines()[-1] == "1 skipped, 1 refused, 1 damaged"


def test_import_takes_single_runs_folders_and_archives_at_once(made: Path, tmp_path: Path) -> None:
    entries = open_history(made).entries()
    call("export", "-o", tmp_path / "a.tar.gz", "--store", made, "--where", f"run_id={entries[0].run_id}")
    result = call(
        "import",
        tmp_path / "a.tar.gz",
        made / entries[5].folder,
        made / "runs" / "2026-03",
        "--store",
        tmp_path / "new",
    )
    assert result.exit_code == 0, result.output
    month = [entry for entry in entries if entry.folder.startswith("runs/2026-03/")]
    assert len(open_history(tmp_path / "new").entries()) == len(month) + 1
    assert result.stdout.splitlines()[-1] == f"{len(month) + 1} imported, 1 already there"


def test_import_wants_something_that_is_there(tmp_path: Path) -> None:
    assert "no such folder" in failed(call("import", tmp_path / "none", "--store", tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_an_archive_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    message = failed(call("import", tmp_path / "pipe", "--store", tmp_path / "new"))
    assert message == f"{tmp_path / 'pipe'}: is a named pipe, not a regular file; write the archive to a file first"
    assert "not a regular file" in failed(call("import", "/dev/null", "--store", tmp_path / "new"))


def test_without_permission_one_line_says_so(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom nothing is denied."""
    stat = Path.stat
    denied: list[Path] = []

    def deny(path: Path, **options: bool) -> os.stat_result:
        if path in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", deny)
    for path, command in ((store / "history.json", ["list"]), (tmp_path / "runs", ["import", tmp_path / "runs"])):
        denied[:] = [path]
        assert failed(call(*command, "--store", store)) == f"{path}: cannot be read: Permission denied"


# Listing


def test_the_list_fits_a_terminal(made: Path) -> None:
    result = call("list", "--store", made)
    assert max(map(len, result.stdout.splitlines())) <= 80
    for entry in open_history(made).entries():
        assert entry.run_id in result.stdout
    text = " ".join(result.stdout.split())
    assert "step 95 ms" not in text
    assert "step 100 ms; 2 ranks (n0, n1); Slurm job 4000; commit c0" in text


def test_the_list_can_be_narrowed(made: Path) -> None:
    result = call("list", "--store", made, "--where", "tag.commit=c1", "--where", "host=n1", "--format", "json")
    assert [run["commit"] for run in json.loads(result.stdout)["runs"]] == ["c1", "c1"]
    assert call("list", "--store", made, "--where", "slurm_job_id=4003").stdout.count("\n1 run, 1 valid") == 1
    assert "did you mean" in failed(call("list", "--store", made, "--where", "comit=c1"))
    assert "tag.NAME" in failed(call("list", "--store", made, "--where", "tag.=1"))
    assert "environment.NAME" in failed(call("list", "--store", made, "--where", "environment.=x"))


def test_csv_and_json_hold_the_same(made: Path) -> None:
    entries = open_history(made).entries()
    found = json.loads(call("list", "--store", made, "--format", "json").stdout)
    assert (found["format"], found["version"]) == ("dlbench.history-list", 1)
    assert found["runs"] == [json.loads(json.dumps(entry.to_dict())) for entry in entries]
    rows = list(csv.DictReader(io.StringIO(call("list", "--store", made, "--format", "csv").stdout)))
    for row, entry in zip(rows, entries, strict=True):
        assert row["run_id"] == entry.run_id
        assert int(row["ranks"]) == entry.ranks
        assert row["hosts"] == "n0 n1"
        assert json.loads(row["tags"]) == entry.tags
        assert {name: float(row[name]) for name in entry.figures} == dict(entry.figures)


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    plan = history_plan(0, 0, {"commit": ESCAPE}, points=(2,))
    environment = {"variable.SLURM_JOB_ID": ESCAPE, "host": ESCAPE}
    write_run(runs, plan, STEP, Story(environment=environment, host=lambda rank: f"{ESCAPE}{rank}"))
    broken = write_run(runs, history_plan(1, 0, points=(1,)), STEP)
    (runs / f"x{ESCAPE}").mkdir()
    check = [{"name": ESCAPE, "passed": False, "detail": ESCAPE}]
    edit_json(broken.record, state="invalid", checks=check)
    brought = call("import", runs, "--store", tmp_path / "store")
    texts = [brought.output, call("list", "--store", tmp_path / "store").output]
    texts.append(call("list", "--store", tmp_path / "store", "--format", "csv").output)
    for text in texts:
        assert all(c.isprintable() for c in text.replace("\n", "")), text
    rows = list(csv.DictReader(io.StringIO(texts[2])))
    assert not any(value.startswith(("=", "+", "-", "@")) for row in rows for value in row.values())
    kept = json.loads(call("list", "--store", tmp_path / "store", "--format", "json").stdout)["runs"]
    assert ESCAPE in {run["commit"] for run in kept}


# Exporting


def test_export_leaves_damaged_runs_out(store: Path, tmp_path: Path) -> None:
    entry = open_history(store).entries()[0]
    (store / entry.folder / "record.json").unlink()
    (store / entry.folder / "record.json").write_text("{")
    result = call("export", "-o", tmp_path / "a.tar", "--store", store)
    assert result.exit_code == 0
    assert entry.run_id in result.stderr
    assert "5 runs" in result.stderr
