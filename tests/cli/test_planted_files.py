"""Commands on folders in which somebody has put something else: nobody waits, what is damaged is named, exit code 4."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli as entry
from dlbench.cli.streams import ending_of
from dlbench.errors import DlbenchError
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import STAGE
from tests.support.paths import DATA
from tests.support.run_factory import Story, constant, exchange_result, plans, write_run
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


FILES: dict[str, Callable[[RunFolder], Path]] = {
    "plan": lambda folder: folder.plan,
    "record": lambda folder: folder.record,
    "failure": lambda folder: folder.failure,
    "status": lambda folder: folder.status(1),
    "steps": lambda folder: folder.steps(1),
    "spans": lambda folder: folder.spans(1),
    "samples": lambda folder: folder.samples(0),
    "submission": lambda folder: folder.submission,
}
# Read by `status`; by `report` all but the last.
OF_STATUS = ("plan", "record", "failure", "status", "submission")


@pytest.mark.parametrize("instead", ["a named pipe", "a device"])
@pytest.mark.parametrize("name", FILES)
def test_nobody_waits_for_what_is_no_file(runs: Path, name: str, instead: str) -> None:
    path = FILES[name](first(runs))
    path.unlink(missing_ok=True)
    if instead == "a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    done = call("status", runs) if name in OF_STATUS else call("report", runs)
    assert code(done) == 4, told(done)
    assert f"{path}: " in told(done)
    assert f"is {'a link' if instead == 'a device' else instead}, not a regular file" in told(done)
    assert "Traceback" not in told(done)


def integers(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, int) and not isinstance(content, bool):
        yield place
    elif isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from integers(value, (*place, key))


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
        ("check", "--baseline", "OTHERS", "--candidate", "RUNS", "--json", "FULL/check.json"),
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


@pytest.mark.parametrize(
    "command",
    [
        ("check", "--candidate", "RUNS", "--baseline"),
        ("comm", "predict", "--ranks", "2"),
        ("data", "verify"),
        ("run", "cosmoflow", "--dry-run", "--system"),
    ],
    ids=" ".join,
)
def test_a_pipe_that_a_person_names_is_not_waited_for(runs: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    done = call(*(str(runs) if word == "RUNS" else word for word in command), path)
    assert code(done) in (2, 4), told(done)
    assert str(path) in told(done)


def test_a_data_set_with_a_pipe_is_verified(tmp_path: Path) -> None:
    shutil.copytree(DATA / "formats" / "dataset" / "v1", tmp_path / "set")
    (tmp_path / "set" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "set" / "manifest.json")
    done = call("data", "verify", tmp_path / "set")
    assert code(done) in (2, 4)
    assert "manifest.json: not a manifest of dlbench: is a named pipe" in told(done)
    shutil.rmtree(tmp_path / "set")
    shutil.copytree(DATA / "formats" / "dataset" / "v1", tmp_path / "set")
    (tmp_path / "set" / "train" / "a.txt").unlink()
    os.mkfifo(tmp_path / "set" / "train" / "a.txt")
    done = call("data", "verify", tmp_path / "set")
    assert code(done) in (2, 4)
    assert "a.txt: " in told(done)
