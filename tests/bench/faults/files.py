"""Files of a finished run in another form than they were written in: named, never believed, never waited for."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.workshop import (
    NOBODY,
    RUN_S,
    WITHOUT_RIGHTS,
    CannotPlantError,
    DidNotHoldError,
    Workshop,
    short,
)

FILES: dict[str, Sequence[str]] = {
    "plan.json": ("status", "report"),
    "record.json": ("status", "report"),
    "node-0000.status.json": ("status",),
    "failure.json": ("status",),
    "submission.json": ("status",),
    "rank-0001.steps": ("report", "diagnose"),
    "rank-0001.spans": ("diagnose", "trace"),
    "node-0000.samples": ("report", "diagnose"),
}
"""Which commands read them first."""

TEXT_ONLY = ("deep", "long number", "NaN")


def _truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _random(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(4096))


def _socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    try:  # names of sockets are short
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def do(path: Path) -> None:
        path.unlink()
        make(path)

    return do


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


MUTATIONS: dict[str, Callable[[Path], object]] = {
    "truncated": _truncated,
    "empty": lambda path: path.write_bytes(b""),
    "random bytes": _random,
    "a folder": _instead(lambda path: path.mkdir()),
    "a named pipe": _instead(lambda path: os.mkfifo(path)),
    "a socket": _socket,
    "a link to /dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    "deep": _text("[" * 200_000),
    "long number": _text('{"format": ' + "9" * 6000 + "}"),
    "NaN": _text('{"format": NaN}'),
}

_TORN = {("rank-0001.spans", "truncated")}
"""What a killed rank leaves: `trace` says so, and it is no damage."""

_MAY_BE_ABSENT = ("failure.json", "submission.json")

OTHER_NAMES = (
    *("attempt-0001", "checkpoints", "clock.json", "interrupted.json", "job.sbatch", "launch.log", "launch.sh"),
    *("node-0001.samples", "node-0001.status.json", "rank-0000.log", "rank-0002.spans", "rank-0002.status.json"),
    *("rank-0002.steps", "rendezvous.json", "slurm-1.out", "watch-cost.json", "accounting.json", "anything"),
)
"""What may lie in a run's folder, too."""


def _long_reason(run: Path) -> str:
    (run / "record.json").unlink()
    content = {"format": "dlbench.failure", "version": 1, "reason": "x y " * (50 << 18), "rank": 0, "at": ""}
    (run / "failure.json").write_text(json.dumps(content), encoding="utf-8")
    return "failure.json"


def _many_facts(run: Path) -> str:
    content = json.loads((run / "record.json").read_text(encoding="utf-8"))
    content["environment"] |= {f"variable.NUMBER_{number}": "1" for number in range(10**6)}
    (run / "record.json").write_text(json.dumps(content), encoding="utf-8")
    return "record.json"


def _renamed(file: str, run: Path) -> str:
    """The file of another run of the same request."""
    content = json.loads((run / file).read_text(encoding="utf-8"))
    content["run_id"] = content["run_id"][:-2] + "99"
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    return file


_LARGE_OR_FOREIGN: dict[str, Callable[[Path], str]] = {
    "failure.json with a reason of 50 MB": _long_reason,
    "record.json with a million facts of the environment": _many_facts,
    "record.json of another run": partial(_renamed, "record.json"),
    "plan.json of another run": partial(_renamed, "plan.json"),
}


def faults() -> Iterator[Fault]:
    """Every file in every form."""
    for file in FILES:
        for mutation in MUTATIONS:
            if mutation in TEXT_ONLY and not file.endswith(".json"):
                continue
            name = f"{file}: {mutation}"
            yield Fault(family="files", name=name, replay=partial(_damaged, name, file, mutation))
    for kind in _LARGE_OR_FOREIGN:
        yield Fault(family="files", name=kind, replay=partial(_large_or_foreign, kind))
    for command in ("status", "report", "diagnose", "logs", "cost", "trace", "run"):
        name = f"named pipes of every other name: {command}"
        yield Fault(family="files", name=name, replay=partial(_pipes, name, command))
    for file in FILES:
        if file not in _MAY_BE_ABSENT:
            name = f"{file}: may not be read"
            yield Fault(family="files", name=name, replay=partial(_unreadable, name, file))
    for number in (3_000_000_000, 10**400):
        name = f"plan.json: a number of ranks with {len(str(number))} digits"
        yield Fault(family="files", name=name, replay=partial(_ranks, name, number))
    for log in ("/etc/passwd", "../../secret"):
        name = f"submission.json: log {log}"
        yield Fault(family="files", name=name, replay=partial(_log_elsewhere, name, log))
    for mutation in ("a named pipe", "a link to /dev/zero", "truncated", "random bytes", "empty"):
        for file, words in _OTHERS.items():
            name = f"{file}: {mutation}"
            yield Fault(family="files", name=name, replay=partial(_other, name, mutation, words))


def _damaged(name: str, file: str, mutation: str, shop: Workshop) -> None:
    out, run = shop.copy(name)
    path = run / file
    if not path.exists():
        path.write_text("{}", encoding="utf-8")
    MUTATIONS[mutation](path)
    for command in FILES[file]:
        done = shop.call(*_words(command, out, run))
        if mutation == "a link to nothing":
            done.require((0, 3, 4) if file in _MAY_BE_ABSENT else (3, 4))  # as if it were not there
        elif (file, mutation) in _TORN:
            done.require((0, 4))
        else:
            done.require((4,), file)


def _large_or_foreign(kind: str, shop: Workshop) -> None:
    out, run = shop.copy(kind)
    file = _LARGE_OR_FOREIGN[kind](run)
    for command in ("status", "report", "diagnose"):
        # Which of two files that name different runs is the wrong one nobody can tell.
        shop.call(command, out).require((4,), file if file != "plan.json" else "record.json", "damaged")


def _pipes(name: str, command: str, shop: Workshop) -> None:
    """Nobody writes to them: who opens one as a file waits for ever."""
    out, run = shop.copy(name)
    for other in OTHER_NAMES:
        (run / other).unlink(missing_ok=True)
        os.mkfifo(run / other)
    if command == "run":
        words = ("run", "bert", "--preset", "ci", "--engine", "single", "--data", "synthetic", *short(2), "--out", out)
        shop.call(*words, limit_s=RUN_S).require((0,))
        return
    done = shop.call(*(_words(command, out, run) if command not in ("logs", "cost") else (command, run)))
    done.require((0, 2, 4, 6))


def _ranks(name: str, number: int, shop: Workshop) -> None:
    out, run = shop.copy(name)
    plan = run / "plan.json"
    plan.write_text(re.sub(r'"ranks": 2\b', f'"ranks": {number}', plan.read_text(encoding="utf-8")), encoding="utf-8")
    for command in ("status", "report", "diagnose", "trace", "cost"):
        shop.shell('ulimit -v 6000000; "$@"', *_words(command, out, run)).require((4,), "plan.json: damaged")


def _log_elsewhere(name: str, log: str, shop: Workshop) -> None:
    out, run = shop.copy(name)
    content = {"format": "dlbench.submission", "version": 1, "job_id": "7", "command": ["sbatch"], "log": log}
    text = json.dumps({**content, "submitted": "2026-03-01T12:00:00Z"})
    (run / "submission.json").write_text(text, encoding="utf-8")
    (out.parent / "secret").write_text("of nobody else\n", encoding="utf-8")
    done = shop.call("logs", run).require((4,), "submission.json: damaged")
    if "root:" in done.text or "of nobody else" in done.text:
        raise DidNotHoldError("printed a file outside of the run")


def _unreadable(name: str, file: str, shop: Workshop) -> None:
    out, run = shop.copy(name)
    give_away(run / file)
    command = FILES[file][0]
    done = shop.call(*_words(command, out, run), wrapped=WITHOUT_RIGHTS)
    if file.endswith(".status.json"):
        done.require((0,))  # a run with a record is valid, whatever a rank said of itself on the way
    elif file in ("plan.json", "record.json"):
        done.require((0,), "not readable")  # another user's, who lets nobody read it
    else:
        done.require((4,), file)


def _words(command: str, out: Path, run: Path) -> Sequence[str | Path]:
    return (command, run, "-o", out.parent / "written.json") if command == "trace" else (command, out)


_OTHERS: dict[str, Callable[[Path, Workshop], Sequence[str | Path]]] = {
    "a workload's YAML": lambda path, shop: ("show", path),
    "a system's YAML": lambda path, shop: ("run", "bert", "--preset", "ci", "--dry-run", "--system", path),
    "a baseline": lambda path, shop: ("check", "--candidate", shop.finished, "--baseline", path),
    "a network of comm": lambda path, shop: ("comm", "predict", path, "--ranks", "4"),
}


def _other(name: str, mutation: str, words: Callable[[Path, Workshop], Sequence[str | Path]], shop: Workshop) -> None:
    path = shop.folder(name) / "given.yaml"
    path.write_text('{"format": "dlbench"}\n', encoding="utf-8")
    MUTATIONS[mutation](path)
    shop.call(*words(path, shop)).require((2, 4), path.name)


def give_away(path: Path) -> None:
    """Makes it another user's, who lets nobody in.

    Raises:
        CannotPlantError: only root can.
    """
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        raise CannotPlantError("needs root and setpriv")
    path.chmod(0o700)
    os.chown(path, NOBODY, NOBODY)


def require_whole(path: Path, files: int) -> None:
    """That nothing was deleted.

    Raises:
        DidNotHoldError: files are gone.
    """
    found = sum(1 for one in path.rglob("*") if one.is_file()) if path.is_dir() else 0
    if found < files:
        raise DidNotHoldError(f"{path.name}: {files - found} of {files} files are gone")


def copy_store(shop: Workshop, name: str) -> Path:
    """A history of the finished run."""
    source = shop.root / "store"
    if not source.exists():
        shop.call("history", "import", shop.finished, "--store", source).require((0,))
    store = shop.folder(name) / "store"
    shutil.copytree(source, store)
    return store
