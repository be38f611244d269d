"""Commands on folders in which somebody has put something else: nobody waits, what is damaged is named, exit code 4."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli as entry
from dlbench.cli.streams import ending_of
from dlbench.errors import DlbenchError
from dlbench.records import status as record_status
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import STAGE
from tests.support.run_factory import Story, constant, edit_json, exchange_result, plans, write_run
from tests.support.watch_factory import write_samples, write_spans

SUBMITTED = ("--system", "box", "--nodes", "1", "--out", "FULL/runs")
STEP = constant([5, 0, 30, 50, 0, 10])


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """A command that waits for a pipe is interrupted."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError("waited for something that does not come")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(entry, [*map(str, arguments)], env={"DLBENCH_HISTORY": None})


def code(result: Result) -> int:
    """What the command ends with: its errors are made into a line and a code by its caller."""
    return int(result.exception.exit_code) if isinstance(result.exception, DlbenchError) else result.exit_code


def told(result: Result) -> str:
    return f"{result.output}{result.exception or ''}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("planted") / "runs"
    for plan in plans(points=(2,), repeats=2):
        gradients = [(9000, 0.01), (9000, 0.02)]
        result = exchange_result(plan, gradients=gradients, alpha_s=1e-4, beta_s_per_byte=1e-9)
        folder = write_run(runs, plan, STEP, Story(exchange=result))
        for rank in range(2):
            write_spans(folder, rank, [{"lane": STAGE, "name": "building", "start_ns": 0, "end_ns": 10**9}])
        write_samples(folder, 0, ["host.energy.package-0_j"], [(n * 10**7, 1.0 * n) for n in range(300)])
    return runs


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("others")
    for plan in plans(points=(2,), repeats=2, series="s2"):
        write_run(found, plan, STEP)
    return found


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def first(runs: Path) -> RunFolder:
    return RunFolder(sorted(runs.iterdir())[0])


# Read by `status`; by `report` all but the last.
@pytest.mark.parametrize("number", [3_000_000_000, 10**400], ids=["3e9", "1e400"])
@pytest.mark.parametrize(
    "words",
    [
        ("status", "RUNS"),
        ("report", "RUNS"),
        ("diagnose", "RUNS"),
        ("cost", "RUNS"),
        ("trace", "RUN", "-o", "trace.json"),
        ("compare", "RUNS", "OTHERS"),
        ("check", "--baseline", "OTHERS", "--candidate", "RUNS"),
        ("baseline", "RUNS", "-o", "base.json"),
        ("history", "import", "RUNS", "--store", "store"),
        ("export", "mllog", "RUN"),
    ],
    ids=" ".join,
)
def test_a_number_that_no_run_has_is_damage(
    others: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], number: int
) -> None:
    """Nothing is sized by it: a list of three thousand million ranks would take 24 GB."""
    monkeypatch.chdir(tmp_path)
    for one in runs.iterdir():
        plan = RunFolder(one).plan
        plan.write_text(plan.read_text().replace('"ranks": 2', f'"ranks": {number}'))
    one = first(runs)
    names = {"RUNS": str(runs), "RUN": str(one.path), "OTHERS": str(others)}
    done = call(*(names.get(word, word) for word in words))
    assert code(done) == 4, told(done)
    assert re.search(rf"{re.escape(str(one.plan))}: damaged: .*(1,000,000|401 digits)", told(done)), told(done)


def integers(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, int) and not isinstance(content, bool):
        yield place
    elif isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from integers(value, (*place, key))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 40))])
def test_any_whole_number_of_a_run_is_read_or_is_damage(runs: Path, tmp_path: Path, seed: int) -> None:
    """Never a defect, and never more than the machine has."""
    rng = random.Random(seed)
    one = first(runs)
    for path in (one.plan, one.record):
        before = path.read_text()
        content = json.loads(before)
        *outer, last = rng.choice([*integers(content)])
        reduce(lambda value, key: value[key], outer, content)[last] = rng.choice(
            (-1, 0, 999_999, 3_000_000_000, 2**53 - 1, 2**62, 2**63, 10**400)
        )
        path.write_text(json.dumps(content))
        for words in (("report", runs), ("trace", one.path, "-o", tmp_path / "trace.json"), ("diagnose", runs)):
            done = call(*words)
            assert ending_of(done.exception or SystemExit(0)).code in (0, 2, 4), told(done)
        path.write_text(before)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("full")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    "words",
    [
        *(("report", "RUNS", "-o", f"FULL/report{suffix}") for suffix in (".txt", ".md", ".csv", ".json")),
        ("diagnose", "RUNS", "-o", "FULL/x.json"),
        ("baseline", "RUNS", "--allow-few", "-o", "FULL/base.json"),
        ("check", "--baseline", "OTHERS", "--candidate", "RUNS", "--junit", "FULL/check.xml"),
        ("check", "--baseline", "OTHERS", "--candidate", "RUNS", "--summary", "FULL/filler"),
        ("trace", "RUN", "-o", "FULL/trace.json"),
        ("trace", "RUN", "-o", "FULL/trace.json.gz"),
        ("export", "mllog", "RUN", "-o", "FULL/mllog.txt"),
        ("history", "import", "RUNS", "--store", "FULL/store"),
        ("data", "make", "images", "FULL/data", "--samples", "20", "--validation", "10"),
        ("run", "cosmoflow", "--preset", "ci", "--data", "synthetic", "--out", "FULL/runs"),
        (*("submit", "cosmoflow", "--preset", "ci", "--engine", "ddp"), *SUBMITTED),
    ],
    ids=" ".join,
)
def test_a_full_disk_is_the_machine_s_lack(made: Path, others: Path, full_disk: Path, words: tuple[str, ...]) -> None:
    names = {"RUNS": str(made), "OTHERS": str(others), "RUN": str(first(made).path)}
    done = call(*(names.get(word, word.replace("FULL", str(full_disk))) for word in words))
    assert ending_of(done.exception or SystemExit(0)).code == 5, (told(done), done.exc_info)
    assert "No space left on device" in told(done) or "its disk has 0 B free" in told(done)
    assert [path.name for path in full_disk.rglob("*") if path.is_file()] == ["filler"]


def test_a_status_that_may_not_be_read_spoils_no_record(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, limit: int) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(record_status, "read_json", refuse)
    assert "2 runs, 2 valid" in call("status", runs).output
    one = first(runs)
    one.record.unlink()
    done = call("status", runs)
    assert code(done) == 4
    assert f"{one.status(0)}: cannot be read: Permission denied\n" in done.output


@pytest.mark.parametrize(
    ("put", "what"),
    [(os.mkfifo, "a named pipe"), (Path.touch, "a file"), (lambda path: path.symlink_to("../../runs"), "a link")],
    ids=["pipe", "file", "link"],
)
def test_what_stands_in_place_of_a_month_is_named(
    runs: Path, tmp_path: Path, put: Callable[[Path], None], what: str
) -> None:
    one = first(runs)
    edit_json(one.plan, created="2027-02-03T12:00:00Z")
    (tmp_path / "store").mkdir()
    assert code(call("history", "import", tmp_path / "runs" / one.path.name, "--store", tmp_path / "store")) == 0
    month = tmp_path / "store" / "runs" / "2027-02"
    shutil.rmtree(month)
    put(month)
    done = call("history", "import", runs, "--store", tmp_path / "store")
    assert code(done) == 4, told(done)
    assert f"{month}: is {what}, not a folder of this history; remove it" in done.output
    assert "1 imported, 1 damaged" in done.output


def test_a_unit_is_text_and_no_pattern(tmp_path: Path) -> None:
    for side in ("a", "b"):
        plan = plans(points=(1,), repeats=1, series=side)[0]
        folder = write_run(tmp_path / side, plan, STEP)
        content = plan.model_dump(mode="json")
        content["workload"]["sample_unit"] = "img {x} {0.__class__}"
        write_json(folder.plan, content)
    done = call("compare", tmp_path / "a", tmp_path / "b", "--full")
    assert "KeyError" not in told(done)
    assert done.exception is None or isinstance(done.exception, SystemExit | DlbenchError), done.exception
    assert "img {x} {0.__class__} per rank" in " ".join(told(done).split())
