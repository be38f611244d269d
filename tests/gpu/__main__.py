"""``python -m tests.gpu [--figures]``: the first check of dlbench on a machine with a GPU, ``make gpu-check``.

It goes on after a step that fails, and writes ``build/gpu-check.json`` after each: what was run, how it ended and how
long it took, the outcome of every test marked `gpu`, and what one machine cannot show. Ends with 0 if everything
passed, 3 if something failed, 5 without a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlbench.errors import ExitCode
from dlbench.machine.environment import capture
from dlbench.node.torch_facts import torch_facts
from tests.bench.gpu import AXES, SECONDS, lacking

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build" / "gpu-check.json"
TAIL = 4000
"""Characters kept of the end of what a step printed."""

SEVERAL = (
    "NCCL between GPUs: exchange, tensor fusion and its timeline, peer access, NUMA binding of several ranks",
    "NCCL between nodes: transports, hierarchical exchange, rendezvous of many nodes",
)
"""What needs more than one GPU or node."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the check."""

    name: str
    words: tuple[str, ...]
    """Arguments of Python."""
    limit_s: float = 1200.0
    """After which it is given up."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a step or a test ended."""

    name: str
    outcome: str
    """passed, failed or not measured."""
    seconds: float | None = None
    why: str = ""
    """The end of what it printed, where it did not pass; or why it was not run."""


def steps(folder: Path, *, figures: bool) -> Iterator[Step]:
    """What is run, in order: what breaks first stands first."""
    dlbench = ("-P", "-m", "dlbench")
    yield Step(name="doctor", words=(*dlbench, "doctor"))
    for workload in AXES:
        for engine in ("single", "ddp", "horovod"):
            out = ("--out", str(folder / "ci"), "--no-progress")
            words = (*dlbench, "run", workload, "--preset", "ci", "--engine", engine, *out)
            yield Step(name=f"{workload}, preset ci, {engine}", words=words)
    for workload in AXES:
        settings = [word for setting in SECONDS for word in ("--set", setting)]
        words = (*dlbench, "run", workload, "--preset", "gpu", "--engine", "single", "--repeats", "3", "--no-progress")
        words = (*words, *settings, "--out", str(folder / "gpu"))
        yield Step(name=f"{workload}, preset gpu, 3 runs", words=words)
    yield Step(name="report", words=(*dlbench, "report", str(folder / "gpu"), "-o", str(RESULT.with_suffix(".html"))))
    yield Step(
        name="tests",
        words=(
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "tests/gpu",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={_junit(folder)}",
        ),
        # All outcomes are written at the end: given up earlier, none would be known.
        limit_s=3600.0,
    )
    if figures:
        yield Step(name="figures", words=("-m", "tests.bench", "gpu"), limit_s=6 * 3600.0)


def main(arguments: Sequence[str]) -> int:
    """Runs everything that this machine can; returns the exit code."""
    why = lacking()
    done: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        for step in steps(Path(temporary), figures="--figures" in arguments):
            if why:
                outcome = Outcome(name=step.name, outcome="not measured", why=why)
            else:
                print(f"gpu-check: {step.name}", flush=True)
                outcome = _run(step)
            done.append(outcome)
            if not why:
                print(f"gpu-check: {outcome.name}: {outcome.outcome}, {outcome.seconds:g} s", flush=True)
            _write(done, _tests(Path(temporary)), why)
        failed = [one for one in (*done, *_tests(Path(temporary))) if one.outcome == "failed"]
    for one in failed:
        print(f"gpu-check: FAILED {one.name}\n{one.why}")
    if why:
        print(f"gpu-check: not measured here: {why}")
    print(f"gpu-check: written to {RESULT}")
    return int(ExitCode.ENVIRONMENT) if why else int(ExitCode.RUN_FAILED) if failed else 0


def _run(step: Step) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        # A session of its own, so that nothing of it is left on the GPU where it is given up.
        process = subprocess.Popen(
            [sys.executable, *step.words], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = f"exit code {process.wait(timeout=step.limit_s)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = f"given up after {step.limit_s:g} s"
        printed.seek(0)
        text = printed.read().decode("utf-8", "replace")[-TAIL:]
    seconds = round(time.monotonic() - began, 1)
    if process.returncode == 0:
        return Outcome(name=step.name, outcome="passed", seconds=seconds)
    lacks = process.returncode == ExitCode.ENVIRONMENT
    return Outcome(name=step.name, outcome="not measured" if lacks else "failed", seconds=seconds, why=f"{end}\n{text}")


def _junit(folder: Path) -> Path:
    return folder / "tests.xml"


def _tests(folder: Path) -> list[Outcome]:
    """Every test that pytest reported; none before it ran."""
    if not _junit(folder).is_file():
        return []
    found = []
    for case in ElementTree.parse(_junit(folder)).iter("testcase"):
        why = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not why else "not measured" if why[0].tag == "skipped" else "failed"
        text = "\n".join(f"{child.get('message', '')}\n{child.text or ''}".strip()[-TAIL:] for child in why)
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append(Outcome(name=name, outcome=outcome, seconds=float(case.get("time", "0")), why=text))
    return found


def _write(done: Sequence[Outcome], tests: Sequence[Outcome], why: str) -> None:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": "dlbench.gpu-check",
        "version": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "not_measured": why,
        "environment": _environment("cpu" if why else "cuda"),
        "steps": [asdict(one) for one in done],
        "tests": [asdict(one) for one in tests],
        "needs_more_than_one_gpu": SEVERAL,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _environment(device_type: str) -> dict[str, str]:
    import torch

    problems: list[str] = []
    return {**capture(problems), **torch_facts(problems, torch.device(device_type)), "problems": "; ".join(problems)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
