"""The check itself, as machines see it that have no GPU or whose steps fail, and the page that it ends with."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dlbench.report.formats.html import to_html
from dlbench.report.formats.markdown import to_markdown
from dlbench.report.formats.terminal import to_text
from tests.gpu import __main__ as check
from tests.gpu import figures, steps
from tests.gpu.page import GpuCheck, Outcome, document_of
from tests.support.collectives_factory import write_comm_series
from tests.support.run_factory import Story, constant, plans, write_run

A100 = "NVIDIA A100-SXM4-80GB"
TWO = {
    "gpus": 2,
    "name": A100,
    "uuids": ["GPU-a", "GPU-b"],
    "memory_bytes": 79 * 2**30,
    "capability": [8, 0],
    "why": "",
}
# A table as all_reduce_perf prints it: out of place, in place; times in microseconds, GB/s, wrong results.
PERF = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 67108864 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    11.20    0.09    0.09      0    10.90    0.09    0.10      0
        4096          1024     float     sum      -1    11.40    0.36    0.36      0    11.10    0.37    0.50      0
# Avg bus bandwidth    : 12.3
"""


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "build" / "gpu-check.html"
    monkeypatch.setattr(check, "RESULT", path)
    monkeypatch.setattr(check, "_asked", lambda: {"gpu.driver": "570.10", "host": "n0"})
    return path


def ran(
    monkeypatch: pytest.MonkeyPatch, *made: steps.Step, facts: dict[str, object] | None = None, options: str = ""
) -> int:
    """The exit code of a check of these steps."""
    monkeypatch.setattr(check, "gpu_facts", lambda: facts or TWO)
    monkeypatch.setattr(check, "steps", lambda machine, folder, figures: list(made))
    return check.main(options.split())


def script(name: str, code: str, **more: object) -> steps.Step:
    return steps.Step(name=name, words=(sys.executable, "-c", code), **more)  # type: ignore[arg-type]


def test_without_a_gpu_the_page_says_why_nothing_was_measured(
    result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "torch sees no GPU: too new for the driver"
    monkeypatch.setattr(check, "gpu_facts", lambda: {"gpus": 0, "why": why})
    asked = steps.steps(steps.Machine(why=why), result.parent, figures=False)
    doctor = script("doctor", "print('PROBLEM PyTorch: CUDA 13 needs driver 580')", is_told=True)
    assert ran(monkeypatch, doctor, *asked[1:], facts={"gpus": 0, "why": why}) == 5
    content = json.loads(result.with_suffix(".json").read_text())
    assert {step["why"] for step in content["steps"][1:]} == {why}
    assert content["not_measured"] == why
    page = result.read_text()
    assert "Nothing was measured" in page
    assert why in page
    assert "CUDA 13 needs driver 580" in page
    assert f"not measured here: {why}" in capsys.readouterr().out


def test_a_step_that_fails_is_kept_with_what_it_printed_and_the_rest_goes_on(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ran(
        monkeypatch,
        script("breaks", "import sys; print('half way\\n    <b>indented</b>'); sys.exit(4)"),
        script("hangs", "import time; print('waits', flush=True); time.sleep(60)", limit_s=1.0),
        script("lacks", "import sys; print('no Horovod'); sys.exit(5)", may_lack="Horovod"),
        script("must not lack", "import sys; sys.exit(5)"),
        script("needs", "print()", needs=result.parent / "nothing"),
        steps.Step(name="no program", words=("/no/such/program",)),
        script("also good", "import sys; print('is told'); sys.exit(6)", passes_with=(0, 6), is_told=True),
        script("elsewhere", "print()", why="one GPU"),
    )
    assert code == 3
    content = json.loads(result.with_suffix(".json").read_text())
    assert [(step["name"], step["outcome"]) for step in content["steps"]] == [
        ("breaks", "failed"),
        ("hangs", "failed"),
        ("lacks", "not measured"),
        ("must not lack", "failed"),
        ("needs", "not measured"),
        ("no program", "failed"),
        ("also good", "passed"),
        ("elsewhere", "not measured"),
    ]
    assert content["steps"][0]["log"] == ["half way", "    <b>indented</b>"]
    assert content["steps"][1]["why"] == "given up after 1 s: waits"
    assert content["steps"][2]["why"] == "exit code 5: no Horovod"
    page = result.read_text()
    assert "half way\n    &lt;b&gt;indented" in page
    assert "1 of 8" in page
    assert "4 failed, 3 not measured" in page
    for text in (
        "Failed: breaks",
        "given up after 1\N{NO-BREAK SPACE}s: waits",
        "one GPU",
        "Printed by: also good",
        "is told",
        "570.10",
    ):
        assert text in page


def test_a_check_that_is_stopped_leaves_a_page_of_what_was_done(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StoppedError(Exception):
        pass

    def run(step: steps.Step, folder: Path) -> Outcome:
        if step.name == "second":
            raise StoppedError
        return Outcome(name=step.name, outcome="passed", seconds=1.0)

    monkeypatch.setattr(check, "_run", run)
    with pytest.raises(StoppedError):
        ran(monkeypatch, script("first", ""), script("second", ""))
    content = json.loads(result.with_suffix(".json").read_text())
    assert [(step["outcome"], step["why"]) for step in content["steps"]] == [
        ("passed", ""),
        ("not measured", "not reached"),
    ]


def outcomes(result: Path) -> dict[str, str]:
    """What the page says of each step: its reason, else its outcome."""
    content = json.loads(result.with_suffix(".json").read_text())
    return {step["name"]: step["why"] or step["outcome"] for step in content["steps"]}


def test_a_check_of_some_minutes_goes_on_later_with_what_it_has_not_reached(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second time on another machine with the same GPUs, to which the page alone was brought."""
    folder, journal = result.with_suffix(""), tmp_path / "journal"
    data = folder / "data"

    def noted(name: str, code: str = "", **more: object) -> steps.Step:
        return script(name, f"open({str(journal)!r}, 'a').write('{name} '); {code}", **more)

    made = (
        noted("makes", f"import os; os.makedirs({str(data / 'images')!r})", about_s=0.0, makes=data),
        noted("fails", "import sys; sys.exit(4)", about_s=0.0),
        noted("long", about_s=1e4, limit_s=1e5, needs=data / "images"),
        noted("short", about_s=0.0),
    )
    assert ran(monkeypatch, *made, options="--minutes 60") == 3
    assert journal.read_text() == "makes fails short "
    assert outcomes(result) == {"makes": "passed", "fails": "exit code 4", "long": "not reached", "short": "passed"}
    assert "1 of 4 steps not reached" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert ran(monkeypatch, *made, options="--continue") == 3
    assert journal.read_text() == "makes fails short makes long "
    assert outcomes(result) == {"makes": "passed", "fails": "exit code 4", "long": "passed", "short": "passed"}


def test_a_step_that_is_running_when_the_minutes_are_over_is_not_reached(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = script("sleeps", "import time; time.sleep(60)", about_s=0.0)
    assert ran(monkeypatch, sleeps, options="--minutes 0.02") == 0
    assert outcomes(result)["sleeps"].startswith("not reached")
    tests = result.with_suffix("") / "tests.jsonl"
    tests.write_text('{"name": "test_one", "outcome": "running"}\n')
    check.end_tests(tests, "not reached: given up after 1 s")
    (test,) = check.told(tests)[0]
    assert (test.outcome, test.why) == ("not measured", "not reached: given up after 1 s")


def test_figures_of_an_earlier_part_stay_on_the_page(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = result.with_suffix("")

    def run(step: steps.Step, _folder: Path) -> Outcome:
        write_comm_series(folder / "comm", backends="nccl", algorithms="none", sizes="1KiB:64KiB", repeats=1)
        (plan,) = plans(workload="resnet50", preset="gpu", engine="single", points=(1,), repeats=1)
        write_run(folder / "gpu", plan, constant([0, 0, 48.0, 70.0, 0, 10.0]), Story(device=f"cuda:0 ({A100})"))
        return Outcome(name=step.name, outcome="passed", seconds=1.0)

    monkeypatch.setattr(check, "_run", run)
    made = (script("trains", "", about_s=0.0), script("long", "", about_s=1e4, limit_s=1e5))
    assert ran(monkeypatch, *made, options="--minutes 60") == 0
    first = json.loads(result.with_suffix(".json").read_text())
    assert first["rates"]
    assert first["messages"]
    shutil.rmtree(folder)
    monkeypatch.setattr(check, "_run", lambda step, _: Outcome(name=step.name, outcome="passed", seconds=1.0))
    assert ran(monkeypatch, *made, options="--continue") == 0
    second = json.loads(result.with_suffix(".json").read_text())
    assert second["rates"] == first["rates"]
    assert second["messages"] == first["messages"]
    assert second["runs"] == first["runs"]


def test_a_check_goes_on_only_where_there_is_one_of_the_same_gpus(
    result: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, script("one", ""), options="--continue") == 2
    assert "there is no " in capsys.readouterr().err
    assert ran(monkeypatch, script("one", "")) == 0
    page = result.read_bytes()
    assert ran(monkeypatch, script("one", ""), facts={**TWO, "gpus": 1}, options="--continue") == 2
    said = capsys.readouterr().err
    assert "is of 2 x NVIDIA A100" in said
    assert "here: 1 x NVIDIA A100" in said
    assert result.read_bytes() == page


PYTEST = """
import warnings
import pytest

def test_passes(): warnings.warn("cuDNN SDPA backward got strides")
def test_fails(): assert 1 == 2
def test_lacks(): pytest.skip("needs two GPUs")
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
def test_errs(broken): pass
def test_kills(): import os; os._exit(9)
"""


def test_tests_are_told_one_by_one_with_warnings_even_where_pytest_dies(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_made.py").write_text(PYTEST)
    words = ("-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "tests.gpu.outcomes")
    step = steps.Step(name="tests of made", words=(sys.executable, *words, str(tmp_path / "test_made.py")))
    assert ran(monkeypatch, step) == 3
    content = json.loads(result.with_suffix(".json").read_text())
    found = {test["name"].partition("::")[2]: test for test in content["tests"]}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_lacks": "not measured",
        "test_errs": "failed",
        "test_kills": "failed",
    }
    assert found["test_lacks"]["why"] == "needs two GPUs"
    assert "assert 1 == 2" in found["test_fails"]["why"]
    assert any("RuntimeError: no fixture" in line for line in found["test_errs"]["log"])
    assert found["test_kills"]["why"] == "did not end"
    (warning,) = content["warnings"]
    assert warning["text"] == "UserWarning: cuDNN SDPA backward got strides"
    assert warning["tests"] == ["test_made.py::test_passes"]
    page = result.read_text()
    assert "cuDNN SDPA backward got strides" in page
    assert "1 of 5" in page


def test_figures_stand_next_to_what_is_published(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made card of 256 images in 128 ms: 2,000 a second, of 2,470 published by NVIDIA for PyTorch."""
    folder = result.with_suffix("")
    done = steps.training("trains", folder / "gpu", "resnet50")

    def run(step: steps.Step, _folder: Path) -> Outcome:
        story = Story(device=f"cuda:0 ({A100})", record={"training_flops_per_sample": 24_000_000_000})
        for plan in plans(workload="resnet50", preset="gpu", engine="single", points=(1,), repeats=3):
            write_run(folder / "gpu", plan, constant([0, 0, 48.0, 70.0, 0, 10.0]), story)
        write_comm_series(folder / "comm", backends="nccl", algorithms="none", sizes="1KiB:64KiB", repeats=1)
        return Outcome(name="nccl-tests, 2 GPUs", outcome="passed", seconds=1.0, log=tuple(PERF.splitlines()))

    monkeypatch.setattr(check, "_run", run)
    assert ran(monkeypatch, done) == 0
    content = json.loads(result.with_suffix(".json").read_text())
    (dle, mxnet) = content["rates"]
    assert dle["here"]["value"] == pytest.approx(2000)
    assert dle["ratio"]["value"] == pytest.approx(2000 / 2470)
    assert mxnet["ratio"]["value"] == pytest.approx(2000 / 3410.52)
    assert "DeepLearningExamples, ResNet50 v1.5 for PyTorch" in dle["source"]
    assert "data (real published, synthetic here)" in dle["differences"]
    by_size = {row["num_bytes"]: row for row in content["messages"]}
    assert by_size[1024]["nccl_tests_busbw"] == 0.10
    assert by_size[1024]["ratio"] == pytest.approx(by_size[1024]["busbw"]["value"] / 0.10)
    assert by_size[16384]["nccl_tests_busbw"] is None
    page = result.read_text()
    for text in ("0.81x", "2,470", "Published", "nccl-tests, busbw", "What differs"):
        assert text in page


def test_a_card_without_published_rates_says_so(tmp_path: Path) -> None:
    for plan in plans(workload="cosmoflow", preset="gpu", engine="single", points=(1,), repeats=1):
        write_run(tmp_path / "gpu", plan, constant([0, 0, 30.0, 60.0, 0, 10.0]), Story(device="cuda:0 (NVIDIA L40S)"))
    (report,) = figures.reports(tmp_path)
    (row,) = figures.rates(report, "NVIDIA L40S")
    assert row.published is None
    assert row.ratio is None
    assert row.source == "none in reports/rates.yaml for NVIDIA L40S in bf16"


def test_a_run_that_trained_on_the_host_is_no_success(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = result.with_suffix("") / "ci"
    step = steps.training("trains", out, "resnet50")
    (plan,) = plans(workload="resnet50", preset="ci", engine="single", points=(1,), repeats=1, series="trains")
    write = f"""
import sys; sys.path.insert(0, {str(steps.ROOT)!r})
from pathlib import Path
from tests.support.run_factory import *
(plan,) = plans(workload="resnet50", preset="ci", engine="single", points=(1,), repeats=1, series="trains")
write_run(Path({str(out)!r}), plan, constant([0, 0, 30.0, 60.0, 0, 10.0]))
"""
    words = (sys.executable, "-c", write, "run", "--series", "trains", "--out", str(out))
    assert ran(monkeypatch, steps.Step(name="trains", words=words)) == 3
    assert step.words[-4:] == ("trains", "--out", str(out), "--no-progress")
    content = json.loads(result.with_suffix(".json").read_text())
    assert content["steps"][0]["why"] == "ran on cpu"
    assert content["runs"][0]["run_id"] == plan.run_id


def test_a_log_keeps_its_lines_in_every_format() -> None:
    failed = Outcome(name="breaks", outcome="failed", why="no", log=("Traceback:", "\tat </pre> | *here*"))
    made = GpuCheck(created="", machine="no GPU", not_measured="", about_s=0, steps=(failed,), environment={})
    document = document_of(made)
    assert ">Traceback:\n        at &lt;/pre&gt; | *here*\n</pre>" in to_html(document)
    assert "\n    Traceback:\n            at </pre> | *here*\n" in to_markdown(document)
    assert "\nTraceback:\n        at </pre> | *here*\n" in to_text(document, full=True)
