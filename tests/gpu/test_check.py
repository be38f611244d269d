"""The check itself, as a machine without a GPU and one whose steps fail see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import __main__ as check

WAITS = "import time; print('waits', flush=True); time.sleep(60)"


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "build" / "gpu-check.json"
    monkeypatch.setattr(check, "RESULT", path)
    return path


def test_without_a_gpu_every_step_says_why_it_was_not_run(
    result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "lacking", lambda: "GPU: torch sees none")
    assert check.main([]) == 5
    content = json.loads(result.read_text())
    assert {step["outcome"] for step in content["steps"]} == {"not measured"}
    assert {step["why"] for step in content["steps"]} == {"GPU: torch sees none"}
    assert "not measured here: GPU: torch sees none" in capsys.readouterr().out


def test_a_step_that_fails_is_kept_with_what_it_printed_and_the_rest_goes_on(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="test_b" time="0.5"/>
    <testcase classname="tests.gpu.test_a" name="test_c" time="0.1"><failure message="no">line</failure></testcase>
    <testcase classname="tests.gpu.test_a" name="test_d" time="0"><skipped message="needs two GPUs"/></testcase>
    </testsuite></testsuites>"""

    def steps(folder: Path, *, figures: bool) -> Iterator[check.Step]:
        yield check.Step(name="breaks", words=("-c", "import sys; print('half way'); sys.exit(4)"))
        yield check.Step(
            name="hangs", words=("-c", "import time; print('waits', flush=True); time.sleep(60)"), limit_s=1
        )
        yield check.Step(name="lacks", words=("-c", "import sys; sys.exit(5)"))
        yield check.Step(name="tests", words=("-c", f"open({str(folder / 'tests.xml')!r}, 'w').write({suite!r})"))

    monkeypatch.setattr(check, "lacking", lambda: "")
    monkeypatch.setattr(check, "steps", steps)
    monkeypatch.setattr(check, "_environment", lambda _device: {})
    assert check.main([]) == 3
    content = json.loads(result.read_text())
    assert [step["outcome"] for step in content["steps"]] == ["failed", "failed", "not measured", "passed"]
    assert "exit code 4\nhalf way" in content["steps"][0]["why"]
    assert "given up after 1 s\nwaits" in content["steps"][1]["why"]
    assert [(test["name"], test["outcome"]) for test in content["tests"]] == [
        ("tests.gpu.test_a::test_b", "passed"),
        ("tests.gpu.test_a::test_c", "failed"),
        ("tests.gpu.test_a::test_d", "not measured"),
    ]
