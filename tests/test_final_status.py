"""What a rank's supervisor writes when the rank ends without a word."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlbench.final_status import TIME, FinalStatus

# A program that notes how far it is, as a rank does, and then does what stands at the end.
RANK = """
import os, signal, sys
from dlbench.final_status import STEP, TIME, FinalStatus
final = FinalStatus.inherited(os.environ)
assert final is not None
path = os.fsencode(sys.argv[2])
final.set_file(path, b'{"step": ' + STEP + b', "updated": "' + TIME + b'"}')
for step in range(8):
    final.step(step)
"""


def end(folder: Path, how: str) -> int:
    """Exit code of a supervisor whose rank ends like this."""
    words = [sys.executable, "-P", "-m", "dlbench.supervisor", sys.executable, "-c", RANK + how, "dlbench.node"]
    return subprocess.run([*words, str(folder / "status.json")], check=False, timeout=60).returncode


@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "os.abort()", "os.environ.clear(); sys.exit(3)"]
)
def test_the_supervisor_says_what_its_rank_could_not(tmp_path: Path, how: str) -> None:
    end(tmp_path, how)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["step"] == 7
    assert told["updated"].endswith("Z")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_rank_that_said_all_itself_is_left_alone(tmp_path: Path) -> None:
    assert end(tmp_path, "final.clear()") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    assert end(tmp_path / "gone", "os.rmdir(os.path.dirname(sys.argv[2])); os._exit(5)") == 5
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_folder_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "status.json").write_text("another's")
    swap = "run = os.path.dirname(sys.argv[2]); os.rename(run, run + '-moved'); os.symlink('victim', run); os._exit(5)"
    assert end(tmp_path / "run", swap) == 5
    assert {path.name: path.read_text() for path in (tmp_path / "victim").iterdir()} == {"status.json": "another's"}
    assert json.loads((tmp_path / "run-moved" / "status.json").read_text())["step"] == 7


def test_no_word_of_a_rank_is_older_than_its_last_though_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    final = FinalStatus.make()
    final.set_file(b"/nowhere/status.json", TIME)
    told = []
    for seconds in (0, -3600, 86_400, -86_400):
        now = time.time() + seconds
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            final.touch()
        left = final.missing_file()
        assert left is not None
        told.append(left[1])
    assert told == sorted(told)
