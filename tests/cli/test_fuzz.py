"""Whole commands with words, files, streams and variables that were never meant: any option of the command tree.

Each ends in time, without a traceback, with a code that is no verdict.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import click
import pytest

from dlbench.cli import cli
from dlbench.errors import ExitCode
from tests.support.forks import Surroundings, call_dlbench
from tests.support.paths import ROOT
from tests.support.run_factory import constant, plans, write_run, write_unfinished

NOT_TRIED = frozenset({"doctor", "setup horovod", "data demo", "box start", "box shape"})
"""They look at the machine, build for minutes, or start a cluster."""

DRY = frozenset({"run", "submit", "comm run", "comm submit"})

PATHS = ("private/runs", "private", "n" * 300, "m/" * 2100, "fifo", "loop", "dangling", "file", "empty", "socket")
PATHS += ("", ".", "no/such", "file/below", "null", "full", "/proc/self/mem", "\x1b]0;pwn\x07", "\u202egnp.exe", "a\nb")
PATHS += (os.fsdecode(b"\xff\xfe"), "-", "--", "~nobody/x", "%s{0}", "$(touch canary)", "runs", "binary", "odd.yaml")

TEXTS = ("", " ", "-1", "0", "1e999", "nan", ".inf", "9" * 400, "1" * 5000, "é", "\x1b[31m", "\u202e", "\ud800", "a\nb")
TEXTS += ("\t", "x" * 100_000, "null", "[1,2]", "{a: b}", "&a *a", "!!python/object:os.system x", "'", '"', "a=b")
TEXTS += ("a.b=c", "=", ",", "1,2", "1,,2", "train.seed=.inf", "train.seed=1e400", "system.python=/bin/false")
TEXTS += ("2024-13-45", "0x10", "1_0", "%n")
TEXTS += ("plain", "\x00"[:0] + "\\0", "../..", "None", "true", "1KiB:64MiB", "99999999999999999999KiB", "٣", "0:0:0")

NUMBERS = ("-1", "0", "1", "2", "3", "x", "1e3", "nan", "inf", "9" * 30, "99999999", "", "0x1", "1.5", "-0")
SMALL = ("-1", "0", "1", "2", "x", "", "nan")
"""For what makes data or starts processes."""

_MAKING = frozenset({"samples", "validation", "size", "classes", "samples_per_file", "workers"})
_MAKING |= frozenset(
    {"samples_per_shard", "duplicates", "sequence_length", "max_predictions", "nodes", "cpus_per_node"}
)

GOOD: dict[str, tuple[str, ...]] = {
    "runs": ("runs",),
    "run": ("runs", "one"),
    "paths": ("runs",),
    "workload": ("cosmoflow", "bert", "odd.yaml"),
    "name": ("cosmoflow", "box", "odd.yaml", "odd-system.yaml"),
    "system": ("local", "box", "odd-system.yaml"),
    "store": ("store",),
    "source": ("empty", "binary-set"),
    "folder": ("new",),
    "kind": ("images", "density", "text"),
    "network": ("network.json",),
    "output": ("out.html", "out.json", "out.csv", "out.md", "out.txt"),
    "baseline": ("base.json", "runs"),
    "candidate": ("runs",),
    "keep_days": ("0", "30"),
    "throughput": ("100",),
    "vocabulary": ("file",),
    "ranks": ("1", "2"),
    "out": ("new",),
}

VARIABLES: dict[str, tuple[str, ...]] = {
    "COLUMNS": ("0", "-1", "x", "99999"),
    "DLBENCH_PATH": ("private", ":", "n" * 300, "fifo:file", "\x1b[2J"),
    "DLBENCH_HISTORY": ("private", "fifo", "n" * 300),
    "HOME": ("", "/nonexistent", "private"),
    "TMPDIR": ("/nonexistent", "private"),
    "CI_COMMIT_SHA": ("\x1b", "x" * 300, " "),
    "TERM": ("", "dumb", "\x1b"),
    "LC_ALL": ("C", "xx_YY.nonsense"),
    "SLURM_JOB_ID": ("1", "x"),
}

STREAMS = (
    *(Surroundings() for _ in range(6)),
    *(Surroundings(full=(1,)), Surroundings(full=(2,)), Surroundings(full=(1, 2))),
    Surroundings(is_gone=True),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    words: tuple[str, ...]
    surroundings: Surroundings = field(default_factory=Surroundings)
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        said = f"dlbench {shlex.join(self.words)}"
        return f"{said[:600]!a} {self.surroundings} {self.variables}"


@cache
def leaves() -> dict[str, click.Command]:
    return dict(_leaves(cli, ()))


def _leaves(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, (*path, name))


def make_world(root: Path) -> None:
    """Files to be pointed at, good ones and hostile ones; `private` may not be entered."""
    good = plans(points=(1, 2), repeats=2)
    for plan in good[:-1]:
        write_run(root / "runs", plan, constant([1, 0, 3, 5, 0, 1]))
    write_unfinished(root / "runs", good[-1], "failed", "out of \x1b[2J memory")
    (root / "one").symlink_to(Path("runs", good[0].run_id))
    for name in ("empty", "binary-set", "store", "private", "private/runs"):
        (root / name).mkdir()
    (root / "binary-set" / "a.jpg").write_bytes(b"\xff\xd8\xff\x00" * 9)
    (root / "binary").write_bytes(bytes(range(256)) * 40)
    (root / "file").write_text("some text\n")
    (root / "base.json").write_text('{"format": "dlbench.baseline", "version": 1}')
    (root / "network.json").write_text("{}")
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nowhere")
    _socket(root / "socket")
    write_odd_files(root, random.Random(0))
    for name, minor in (("null", 3), ("full", 7)):
        # Of its own: what replaces a device would take it from the whole machine.
        with suppress(PermissionError):
            os.mknod(root / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    (root / "private").chmod(0)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def write_odd_files(root: Path, rng: random.Random) -> None:
    """A workload and a system with another value anywhere."""
    for name, source in (("odd.yaml", "workloads/cosmoflow.yaml"), ("odd-system.yaml", "systems/example-gpu.yaml")):
        lines = (ROOT / source).read_text(encoding="utf-8").split("\n")
        place = rng.randrange(len(lines))
        key, colon, _ = lines[place].partition(":")
        value = rng.choice(TEXTS[:-10]).replace("\ud800", "\\ud800")[:3000]
        lines[place] = f"{key}{colon} {value}"
        (root / name).write_bytes("\n".join(lines).encode())


def random_case(rng: random.Random, name: str | None = None) -> Case:
    """A command of the tree, right in most of its words and hostile in some."""
    commands = sorted(set(leaves()) - NOT_TRIED)
    name = name or rng.choice(commands)
    words: list[str] = name.split()
    for parameter in leaves()[name].params:
        words += _words(parameter, rng)
    if name in DRY:
        words.append("--dry-run")
    variables = {}
    if rng.random() < 0.25:
        key = rng.choice(sorted(VARIABLES))
        variables[key] = rng.choice(VARIABLES[key])
    around = replace(rng.choice(STREAMS), is_plain_user=True, largest_file=32 << 20)
    return Case(words=tuple(word.replace("\0", "") for word in words), surroundings=around, variables=variables)


def _words(parameter: click.Parameter, rng: random.Random) -> Sequence[str]:
    name = str(parameter.name)
    is_argument = isinstance(parameter, click.Argument)
    if not (is_argument or parameter.required) and rng.random() > (0.6 if name in ("baseline", "candidate") else 0.2):
        return ()
    if name == "dry_run":
        return ()
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return (rng.choice([*parameter.opts, *parameter.secondary_opts]),)
    count = rng.choice((1, 1, 2)) if parameter.nargs == -1 else parameter.nargs
    values = [_value(parameter, name, rng) for _ in range(count)]
    if is_argument:
        return [value if value.startswith("--") or not value.startswith("-") else f"./{value}" for value in values]
    return (parameter.opts[-1], *values)


def _value(parameter: click.Parameter, name: str, rng: random.Random) -> str:
    if name in GOOD and rng.random() < 0.6:
        return rng.choice(GOOD[name])
    if name in _MAKING:
        return rng.choice(SMALL)
    if isinstance(parameter.type, click.Choice):
        return rng.choice([*map(str, parameter.type.choices), "", "x"])
    if isinstance(parameter.type, click.Path) or name in ("data", "resume", "system", "vocabulary", "workload"):
        return rng.choice(PATHS)
    if parameter.type.name in ("integer", "float", "integer range", "float range"):
        return rng.choice(NUMBERS)
    return rng.choice((*TEXTS, *PATHS))


def leftovers(root: Path) -> list[str]:
    found = [str(path.relative_to(root)) for path in root.rglob("*") if path.name.endswith(".partial")]
    return found + [str(path.relative_to(root)) for path in root.rglob(".write-test-*")]


LIMIT_S = 60.0

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")

MAY_SAY_IMPOSSIBLE = "estimate"
"""Its 1 is a verdict on numbers that were given."""


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    # Not pytest's folder: the name of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        make_world(root)
        yield root
        (root / "private").chmod(0o700)


def problem(case: Case, world: Path) -> str:
    """What a command did that it must not; empty if it ended well, or in one line."""
    try:
        done = call_dlbench(*case.words, cwd=world, timeout=LIMIT_S, surroundings=case.surroundings, **case.variables)
    except subprocess.TimeoutExpired:
        return f"hangs: {case}"
    told = ""
    if "Traceback (most recent call last)" in done.stderr + done.stdout:
        told = "a traceback: " + done.stderr[-1500:]
    elif done.returncode not in set(ExitCode) - {ExitCode.DEFECT, ExitCode.REGRESSION}:
        if not (case.words[0] == MAY_SAY_IMPOSSIBLE and done.returncode == ExitCode.REGRESSION):
            told = f"exit code {done.returncode}: {done.stderr[-300:]}"
    elif CONTROL.search(done.stderr):
        told = f"raw characters on standard error: {done.stderr[-300:]!a}"
    elif max(map(len, done.stderr.split("\n"))) > 2100:
        told = f"an endless line: {done.stderr[:200]!a}"
    elif done.returncode and not (done.stderr or 2 in case.surroundings.full):
        told = f"exit code {done.returncode} without a word" if not done.stdout else ""
    elif found := leftovers(world):
        told = f"half-written: {found}"
    return told and f"{told}\n  of: {case}"


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.nightly] if part else []) for part in range(4)])
def test_every_command_ends_as_documented(world: Path, part: int) -> None:
    """One case of every command, the same each time; the first part of them by day."""
    names = sorted(set(leaves()) - NOT_TRIED)[part::4]
    _require_none(problem(random_case(random.Random(f"{name} 1"), name), world) for name in names)


def _require_none(problems: Iterable[str]) -> None:
    found = list(filter(None, problems))
    assert not found, "\n\n".join(found)
