"""Standard streams that are full, closed or gone: a line if there is anywhere to say it, and never the code 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.workshop import REGRESSION, RUN_S, DidNotHoldError, Workshop, short

COMMANDS: dict[str, Callable[[Path], Sequence[str | Path]]] = {
    "status": lambda runs: ("status", runs),
    "report": lambda runs: ("report", runs),
    "diagnose": lambda runs: ("diagnose", runs),
    "ls": lambda runs: ("ls",),
    "show": lambda runs: ("show", "bert", "--preset", "ci"),
    "doctor": lambda runs: ("doctor",),
    "run --dry-run": lambda runs: ("run", "bert", "--preset", "ci", "--dry-run"),
    "--help": lambda runs: ("--help",),
}

STDOUT = {"full": '"$@" > /dev/full', "closed": '"$@" >&-'}
STDERR = {
    "full": '"$@" 2>/dev/full',
    "closed": '"$@" 2>&-',
    "a pipe that ended": '{ "$@" 2>&1 >/dev/null; echo $? >code; } | head -1',
}
FAILED = range(2, 130)
OK = (0,)


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for command in COMMANDS:
        for state in STDOUT:
            name = f"{command}: standard output is {state}"
            yield Fault(family="streams", name=name, replay=partial(_output, command, state))
    for command in ("status", "report", "diagnose", "ls"):
        name = f"{command}: the reader of its output has ended"
        yield Fault(family="streams", name=name, replay=partial(_reader_ended, command))
    for command in ("status", "report", "show"):
        name = f"{command}: all three streams are closed"
        yield Fault(family="streams", name=name, replay=partial(_all_closed, command))
    for state in STDERR:
        name = f"a series of 2 runs: standard error is {state}"
        yield Fault(family="streams", name=name, replay=partial(_series, name, state))


def _output(command: str, state: str, shop: Workshop) -> None:
    done = shop.shell(STDOUT[state], *COMMANDS[command](shop.finished))
    done.require(FAILED, "standard output")


def _reader_ended(command: str, shop: Workshop) -> None:
    words = COMMANDS[command](shop.finished)
    done = shop.shell('{ "$@"; echo "ended with $?" >&2; } | head -c 1 >/dev/null', *words)
    done.require((0,))
    if not any(f"ended with {code}" in done.errors for code in OK):
        raise DidNotHoldError(f"dlbench {command}: {done.errors.strip()[-200:]}")


def _all_closed(command: str, shop: Workshop) -> None:
    done = shop.shell('"$@" <&- >&- 2>&-', *COMMANDS[command](shop.finished))
    done.require(FAILED)


def _series(name: str, state: str, shop: Workshop) -> None:
    out = shop.folder(name) / "runs"
    words = ("run", "bert", "--preset", "ci", "--engine", "single", "--data", "synthetic", "--repeats", "2")
    script = f"cd {out.parent}; {STDERR[state]}"
    done = shop.shell(script, *words, *short(2), "--out", out, limit_s=RUN_S)
    code = int((out.parent / "code").read_text()) if state == "a pipe that ended" else done.code
    if code == REGRESSION:
        raise DidNotHoldError("the series ended with 1, the code of a regression")
    records = list(out.glob("*/record.json"))
    if len(records) != 2:
        raise DidNotHoldError(f"{len(records)} of 2 runs have a record; the series ended with {code}")
