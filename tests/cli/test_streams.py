"""Standard streams that are closed, full or without a reader, as real processes meet them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli.streams import MAX_LINE, cleaned
from tests.conftest import Cli
from tests.support.forks import Surroundings
from tests.support.run_factory import constant, plans, write_run

LS = "import sys; from dlbench.cli import main; sys.argv = ['dlbench', 'ls']; main()"

# Three runs whose ranks are not started, and what the command was about to say.
SERIES = """
import sys
from pathlib import Path
from dlbench.cli import main
from dlbench.errors import ExitCode
from dlbench.jobs import local
from dlbench.jobs.verdict import Outcome

def run(plan, folder, tell):
    with open("started", "a") as file:
        file.write("1")
    print("a word of a library", file=sys.stderr)
    return Outcome(exit_code=ExitCode.OK, story="")

local.run = run
sys.argv = ["dlbench", "run", "cosmoflow", "--preset", "ci", "--engine", "single", "--data", "synthetic"]
sys.argv += ["--repeats", "3", "--out", "runs"]
main()
"""


def shell(code: str, redirection: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.join([sys.executable, "-c", code])
    script = f"{words} {redirection}"
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("around", "words"), [({"full": (1,)}, "No space left"), ({"closed": (1,)}, "closed")])
@pytest.mark.parametrize("command", ["ls", "status", "compare", "--help"])
def test_results_that_cannot_be_written_are_no_success(
    cli: Cli, tmp_path: Path, command: str, around: dict[str, tuple[int, ...]], words: str
) -> None:
    for plan in plans(points=(1,), repeats=1):
        write_run(tmp_path / "runs", plan, constant([1, 0, 3, 5, 0, 1]))
    arguments = {"status": ("runs",), "compare": ("runs", "runs")}.get(command, ())
    done = cli(command, *arguments, surroundings=Surroundings(**around))
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("dlbench: error: standard output: ")
    assert words in line


@pytest.mark.parametrize("around", [Surroundings(closed=(0, 1, 2)), Surroundings(full=(1, 2))])
def test_nothing_to_speak_to(cli: Cli, around: Surroundings) -> None:
    assert cli("ls", surroundings=around).returncode == 5
    assert cli("no-command", surroundings=around).returncode == 2


def test_closed_streams_of_a_process(tmp_path: Path) -> None:
    """The next file that is opened would take the number of a closed stream."""
    code = LS.replace("main()", "sys.argv[1:] = ['report', 'runs', '-o', 'x.csv']; main()")
    for plan in plans(points=(1,), repeats=1):
        write_run(tmp_path / "runs", plan, constant([1, 0, 3, 5, 0, 1]))
    done = shell(code, "<&- >&- 2>&-; echo $?", tmp_path)
    assert done.stdout == "0\n", done.stderr
    assert (tmp_path / "x.csv").read_text().startswith("group,")


def test_a_reader_who_has_enough_is_no_failure(tmp_path: Path) -> None:
    done = shell(LS, "| head -c 5 >/dev/null; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    "redirection", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | head -1 >/dev/null; exit ${PIPESTATUS[0]}"]
)
def test_a_series_goes_on_without_standard_error(tmp_path: Path, redirection: str) -> None:
    done = shell(SERIES, redirection, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").read_text() == "111"
    assert len(list((tmp_path / "runs").glob("*/plan.json"))) == 3


def test_what_an_encoding_lacks_is_written_out(tmp_path: Path) -> None:
    code = "import sys; from dlbench.cli.streams import Streams; Streams()\n"
    code += "print('µ ≥ \\udcff'); print('≥ \\udcff', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"\xb5 \\u2265 \xff\n"
    assert done.stderr == b"\\u2265 \n"


@given(text=st.text(max_size=300) | st.text(alphabet="\x1b\u202e\n\tab]", max_size=300), limit=st.integers(8, 200))
def test_a_cleaned_text_moves_no_cursor(text: str, limit: int) -> None:
    lines = cleaned(text, limit).split("\n")
    assert len(lines) == text.count("\n") + 1
    for line in lines:
        assert not set(line) & set("\x1b\x07\x08\r\u202e\u2066\u200f\x9b")
        assert len(line) <= limit + 40
    "".join(lines).encode()  # no half of a surrogate pair


def test_harmless_text_stays(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("a\tb\n", "Größe ≥ 5 µs\n", "x" * MAX_LINE, ""):
        assert cleaned(text) == text
    assert cleaned("a" * 150_000) == "a" * 1600 + " [148,000 characters left out] " + "a" * 400
