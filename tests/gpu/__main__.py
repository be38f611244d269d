"""``python -m tests.gpu [--figures]``: the first check of dlbench on a machine with GPUs, ``make gpu-check``.

It goes on after a step that fails, and writes ``build/gpu-check.html`` and the same as JSON after each: one page that a
person can send back. Ends with 0 if everything that was reached passed, 3 if something failed, 5 without a GPU. This
process itself never begins with CUDA: in exclusive-process mode a GPU takes one process at a time.

A GPU is often lent for minutes: ``--minutes N`` stops when they are over, and ``--continue`` reads the JSON of the page
and runs the steps that it calls not reached, here or on another machine with the same GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dlbench.errors import ExitCode, first_line
from dlbench.records.scan import scan
from dlbench.report.formats.data import to_json
from dlbench.report.formats.html import to_html
from tests.gpu import figures
from tests.gpu.outcomes import FILE
from tests.gpu.page import FAILED, NOT_MEASURED, PASSED, GpuCheck, Outcome, Warned, document_of
from tests.gpu.steps import DLBENCH, GIB, PYTHON, ROOT, Machine, Step, seconds, steps
from tests.support.gpus import gpu_facts

RESULT = ROOT / "build" / "gpu-check.html"
"""The page; the JSON is next to it, and so is the folder of the runs, which the next check begins anew."""
TAIL = 400
"""Lines kept of the end of what a step or a test printed."""
LOG_LINES = "80"
"""Of each log of a run that failed."""

NOT_REACHED = "not reached"
"""What `why` of a step begins with that `--continue` runs."""
DID_NOT_END = "did not end"
"""Of a test that was running when its process was gone."""
GIVEN_UP = "given up"
"""What the end of a step begins with whose time was over."""

T = TypeVar("T")


def main(arguments: Sequence[str]) -> int:
    """Runs the steps of this machine until they, or the minutes, are over; returns the exit code."""
    options = _options(arguments)
    if options.environment:
        print(json.dumps(_environment()))
        return 0
    machine = machine_here()
    earlier: GpuCheck | None = None
    if options.goes_on:
        try:
            earlier = _earlier(machine)
        except ValueError as error:
            print(f"gpu-check: --continue: {error}", file=sys.stderr)
            return int(ExitCode.USAGE)
    folder = RESULT.with_suffix("")
    if earlier is None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    todo = steps(machine, folder, figures=options.figures)
    ends = time.monotonic() + 60 * options.minutes
    outcomes = _reached(earlier, todo)
    to_run = [step for step in todo if step.name not in outcomes]
    print(f"gpu-check: {in_words(machine)}; about {seconds(to_run) / 60:.0f} minutes", flush=True)
    environment = _asked()
    try:
        for step in todo:
            if step.name not in outcomes:
                outcomes[step.name] = _within(ends, step, folder)
            if outcomes[step.name].seconds is not None or step is todo[-1]:
                check = _check(machine, _in_order(todo, outcomes), todo, environment, folder, earlier)
                write(check)
    finally:
        print(f"gpu-check: written to {RESULT}", flush=True)
    for failure in check.failed:
        print(f"gpu-check: FAILED {failure.name}: {failure.why}")
    if not_reached := sum(one.why.startswith(NOT_REACHED) for one in check.steps):
        print(f"gpu-check: {not_reached} of {len(todo)} steps not reached; go on with --continue")
    if machine.why:
        print(f"gpu-check: not measured here: {machine.why}")
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.RUN_FAILED) if check.failed else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="The first check on a machine with GPUs.")
    parser.add_argument("--figures", action="store_true", help="measure every axis of precision and speed: hours")
    parser.add_argument("--minutes", type=_minutes, default=math.inf, metavar="N", help="stop when N minutes are over")
    parser.add_argument(
        "--continue", dest="goes_on", action="store_true", help=f"run what {RESULT.name} calls {NOT_REACHED}"
    )
    parser.add_argument("--environment", action="store_true", help="print the machine's environment alone, as JSON")
    return parser.parse_args(arguments)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not minutes > 0:
        raise ValueError
    return minutes


def _earlier(machine: Machine) -> GpuCheck:
    """Returns the check that is to go on. Raises `ValueError`: there is none, or it is of other GPUs."""
    path = RESULT.with_suffix(".json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("version", None)
        content.pop("dlbench_version", None)
        check = TypeAdapter(GpuCheck).validate_python(content)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; begin without it") from None
    except (OSError, ValidationError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path}: {first_line(error)}; begin without it") from None
    if check.machine != in_words(machine):
        raise ValueError(f"{path} is of {check.machine}, here: {in_words(machine)}; a page is of one kind of GPU")
    return check


def _reached(earlier: GpuCheck | None, todo: Sequence[Step]) -> dict[str, Outcome]:
    """Returns outcomes by step of an earlier check, without steps to be run now.

    These are those not reached, and those whose result a step not reached needs and this machine does not have.
    """
    if earlier is None:
        return {}
    outcomes = {one.name: one for one in earlier.steps if not one.why.startswith(NOT_REACHED)}
    needed = [step.needs for step in todo if step.needs is not None and step.name not in outcomes]
    for step in todo:
        if step.makes is not None and any(not path.exists() and path.is_relative_to(step.makes) for path in needed):
            outcomes.pop(step.name, None)
    return outcomes


def _within(ends: float, step: Step, folder: Path) -> Outcome:
    """Runs a step if its seconds by arithmetic are left until `ends` on the monotonic clock; gives it up then."""
    left_s = ends - time.monotonic()
    if step.why or left_s >= step.limit_s:
        outcome = _run(step, folder)
    elif left_s < step.about_s:
        return Outcome(name=step.name, outcome=NOT_MEASURED, why=NOT_REACHED)
    else:
        outcome = _run(replace(step, limit_s=left_s), folder)
        if outcome.why.startswith(GIVEN_UP):
            outcome = replace(outcome, outcome=NOT_MEASURED, why=f"{NOT_REACHED}: {outcome.why}")
            end_tests(folder / "tests.jsonl", outcome.why)
    if outcome.seconds is not None:
        print(f"gpu-check: {step.name}: {outcome.outcome}, {outcome.seconds:g} s", flush=True)
    return outcome


def _in_order(todo: Sequence[Step], outcomes: dict[str, Outcome]) -> list[Outcome]:
    """Returns an outcome for each step; steps without one were not reached, unless they cannot be run here."""
    missing = (Outcome(name=step.name, outcome=NOT_MEASURED, why=step.why or NOT_REACHED) for step in todo)
    return [outcomes.get(one.name, one) for one in missing]


def machine_here() -> Machine:
    """What torch sees, asked in a process of its own."""
    facts = gpu_facts()
    if facts["why"]:
        return Machine(why=facts["why"])
    return Machine(
        gpus=facts["gpus"],
        name=facts["name"],
        uuids=tuple(facts["uuids"]) if len(facts["uuids"]) == facts["gpus"] else (),
        memory_bytes=facts["memory_bytes"],
        capability=(facts["capability"][0], facts["capability"][1]),
        nccl_tests=shutil.which("all_reduce_perf") or "",
    )


def in_words(machine: Machine) -> str:
    """``2 x NVIDIA L40S with 44 GiB, compute capability 8.9``."""
    if machine.why:
        return "no GPU"
    major, minor = machine.capability
    memory = f"{machine.memory_bytes / GIB:.0f} GiB"
    return f"{machine.gpus} x {machine.name} with {memory}, compute capability {major}.{minor}"


def _run(step: Step, folder: Path) -> Outcome:
    """A step in a session of its own, so that nothing of it is left on the GPU where it is given up."""
    if step.why:
        return Outcome(name=step.name, outcome=NOT_MEASURED, why=step.why)
    if step.needs is not None and not step.needs.exists():
        return Outcome(name=step.name, outcome=NOT_MEASURED, why=f"a step before it has not made {step.needs.name}")
    print(f"gpu-check: {step.name} ...", flush=True)
    began = time.monotonic()
    environment = {**os.environ, FILE: str(folder / "tests.jsonl"), **step.environment}
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                step.words, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )
        except OSError as error:
            return Outcome(name=step.name, outcome=FAILED, seconds=0.0, why=f"{step.words[0]}: {error.strerror}")
        try:
            end = f"exit code {process.wait(timeout=step.limit_s)}"
        except subprocess.TimeoutExpired:
            end = f"{GIVEN_UP} after {step.limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        text = printed.read().decode("utf-8", "replace")
    took = round(time.monotonic() - began, 1)
    if process.returncode in step.passes_with and not end.startswith(GIVEN_UP):
        if not (elsewhere := _not_on_gpu(step)):
            return Outcome(name=step.name, outcome=PASSED, seconds=took, log=_tail(text) if step.is_told else ())
        return Outcome(name=step.name, outcome=FAILED, seconds=took, why=elsewhere, log=_tail(text))
    lacks = process.returncode == ExitCode.ENVIRONMENT and bool(step.may_lack)
    last = next((line.strip() for line in reversed(text.splitlines()) if _says_something(line)), "")
    return Outcome(
        name=step.name,
        outcome=NOT_MEASURED if lacks else FAILED,
        seconds=took,
        why=f"{end}: {last}" if last else end,
        log=(*_tail(text), *_logs_of_runs(step)),
    )


def _says_something(line: str) -> bool:
    """The line of an error: not the count of valid runs that dlbench ends with, and no rule of pytest's."""
    return bool(line.strip(" =-")) and " runs valid, in " not in line


def _folders(step: Step) -> list[Path]:
    """Of the runs of a step that trains or measures collectives."""
    if "--series" not in step.words:
        return []
    series, out = (step.words[step.words.index(key) + 1] for key in ("--series", "--out"))
    return sorted(Path(out).glob(f"{series}-*/"))


def _not_on_gpu(step: Step) -> str:
    """Which ranks of a step trained on another device than a GPU; empty where none did, or it does not train."""
    found = [run for run in scan(*_folders(step)).runs if run.record] if "run" in step.words and _folders(step) else []
    devices = {rank.device for run in found for rank in (run.record.ranks if run.record else ())}
    return ", ".join(f"ran on {device}" for device in sorted(devices) if not device.startswith("cuda"))


def _tail(text: str) -> tuple[str, ...]:
    return tuple(text.splitlines()[-TAIL:])


def _logs_of_runs(step: Step) -> tuple[str, ...]:
    """What the runs of a step that failed have said themselves."""
    lines: list[str] = []
    for run in _folders(step):
        words = (*DLBENCH, "logs", str(run), "--lines", LOG_LINES)
        said = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=120, check=False)
        lines += ["", f"-- dlbench logs {run.name}", *(said.stdout + said.stderr).splitlines()]
    return tuple(lines[-TAIL:])


def _check(
    machine: Machine,
    outcomes: Sequence[Outcome],
    todo: Sequence[Step],
    environment: dict[str, str],
    folder: Path,
    earlier: GpuCheck | None,
) -> GpuCheck:
    tests, warned = told(folder / "tests.jsonl")
    printed = "\n".join(next((one.log for one in outcomes if one.name.startswith("nccl-tests")), ()))
    reports = list(figures.reports(folder))
    check = GpuCheck(
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=in_words(machine),
        not_measured=machine.why,
        about_s=seconds(todo),
        steps=tuple(outcomes),
        tests=tests,
        warnings=warned,
        rates=tuple(one for found in reports for one in figures.rates(found, machine.name)),
        messages=tuple(figures.messages(folder / "comm", printed)),
        axes=tuple(figures.axes()) if any("benchmarks" in step.words for step in todo) and not machine.why else (),
        runs=tuple(one for found in reports for one in figures.runs(found)),
        environment=environment,
    )
    if earlier is None:
        return check
    return replace(
        check,
        tests=_merged(earlier.tests, check.tests, lambda test: test.name),
        warnings=_merged(earlier.warnings, check.warnings, lambda warning: warning.text),
        rates=_merged(earlier.rates, check.rates, lambda rate: (rate.what, rate.gpus, rate.source)),
        messages=_merged(earlier.messages, check.messages, lambda message: message.num_bytes),
        axes=_merged(earlier.axes, check.axes, lambda figure: figure.name),
        runs=_merged(earlier.runs, check.runs, lambda run: run.run_id),
    )


def _merged(earlier: Sequence[T], now: Sequence[T], key: Callable[[T], Hashable]) -> tuple[T, ...]:
    """Returns the rows of both; of two with the same key the one of now."""
    return tuple({key(row): row for row in (*earlier, *now)}.values())


def told(file: Path) -> tuple[tuple[Outcome, ...], tuple[Warned, ...]]:
    """What pytest has written of tests and warnings; a test that began and did not end has failed."""
    tests: dict[str, Outcome] = {}
    warned: dict[str, list[str]] = {}
    lines: Iterable[dict[str, Any]] = (
        map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    )
    for line in lines:
        if "warning" in line:
            warned.setdefault(line["warning"], []).append(line["name"])
        elif line["outcome"] == "running":
            tests[line["name"]] = Outcome(name=line["name"], outcome=FAILED, why=DID_NOT_END)
        else:
            tests[line["name"]] = Outcome(**{**line, "log": _tail(line["log"])})
    return tuple(tests.values()), tuple(Warned(text=text, tests=tuple(of)) for text, of in warned.items())


def end_tests(file: Path, why: str) -> None:
    """Notes for tests that began and did not end that they were not measured, and why."""
    not_ended = [test.name for test in told(file)[0] if test.why == DID_NOT_END]
    with file.open("a", encoding="utf-8") as lines:
        for name in not_ended:
            lines.write(json.dumps({"name": name, "outcome": NOT_MEASURED, "why": why, "log": ""}) + "\n")


def write(check: GpuCheck) -> None:
    """The page and the JSON; what is there is replaced at once, so that a check that is stopped leaves whole files."""
    document = document_of(check)
    for path, text in ((RESULT, to_html(document)), (RESULT.with_suffix(".json"), to_json(document))):
        new = path.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def _asked() -> dict[str, str]:
    """The environment, by a process of its own: it begins with CUDA."""
    words = (PYTHON, "-m", "tests.gpu", "--environment")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        return {"problems": (done.stderr.strip().splitlines() or ["nothing was said"])[-1]}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    import torch

    from dlbench.machine.environment import capture
    from dlbench.node.devices import torch_facts

    problems: list[str] = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {**capture(problems), **torch_facts(problems, device)}
    return {**found, "problems": "; ".join(problems)} if problems else found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
