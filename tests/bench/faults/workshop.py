"""What every planted fault needs: a command with a time limit, a finished run to damage, and what may be said of it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.paths import ROOT

LIMIT_S = 180.0
"""Of a command that trains nothing. It takes 2 s on an idle machine, and half a minute on a busy one."""

RUN_S = 400.0
"""Of a short run, which takes 10 s on an idle machine."""

NOBODY = 65534
_CLONE_NEWNS = 0x00020000  # sched.h

WITHOUT_RIGHTS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--")
"""Before a command of root's: file modes count for it as for any user. Another user might not reach this Python."""

REGRESSION = 1
_RAW_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")


class DidNotHoldError(AssertionError):
    """What dlbench did that it must not do."""


class CannotPlantError(Exception):
    """This machine does not allow the fault: no root, no name spaces, no Open MPI."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    words: Sequence[str]
    code: int | None
    """None: it was ended after its limit."""
    out: str
    errors: str

    @property
    def text(self) -> str:
        """All it said."""
        return self.out + self.errors

    def require(self, codes: Sequence[int], *said: str) -> Done:
        """That it ended in time, with one of the codes, without a traceback and saying these words.

        Raises:
            DidNotHoldError: it did not.
        """
        name = "dlbench " + " ".join(self.words[:3])
        if self.code is None:
            raise DidNotHoldError(f"{name}: hangs")
        if "Traceback (most recent call last)" in self.text or self.code < 0:
            last = (self.errors.strip().splitlines() or [""])[-1]
            raise DidNotHoldError(f"{name}: ended with {self.code} and a traceback: {last[:160]}")
        if self.code not in codes:
            allowed = ", ".join(map(str, codes)) if len(codes) < 9 else f"{min(codes)} to {max(codes)}"
            raise DidNotHoldError(f"{name}: ended with {self.code}, not {allowed}: {self.text.strip()[-200:]!r}")
        if raw := _RAW_CONTROL.search(self.text.replace("\r", "").replace("\t", " ")):
            raise DidNotHoldError(f"{name}: printed the raw character {raw[0]!r}")
        for words in said:
            if words not in self.text:
                raise DidNotHoldError(f"{name}: does not say {words!r}: {self.text.strip()[-300:]!r}")
        return self


@dataclass
class Workshop:
    """A folder to plant faults in; every fault gets its own below it."""

    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DLBENCH_", "PYTHONSAFE"))},
            "PYTHONPATH": str(ROOT),
            # Open MPI asks root for it; what a root may break here is the fault's own folder.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **self.environment,
        }

    @property
    def finished(self) -> Path:
        """A folder with one valid, watched run of 2 ranks that read files; never damaged itself."""
        return self.root / "finished"

    @property
    def images(self) -> Path:
        """The demonstration's images."""
        return self.root / "data" / "images"

    def prepare(self) -> None:
        """Makes what faults are planted in.

        Raises:
            CannotPlantError: a sound run does not end well here.
        """
        for words in (
            ["data", "demo", str(self.root / "data")],
            ["run", *self.training("ddp"), "--out", str(self.finished), *short(4)],
        ):
            done = self.call(*words, limit_s=300)
            if done.code != 0:
                raise CannotPlantError(f"a sound {' '.join(words[:2])} fails here: {done.text[-300:]}")

    def training(self, engine: str, *, loaders: int = 1) -> list[str]:
        """The arguments of a run of ResNet-50 on 2 ranks that reads files in loader processes."""
        chosen = ["--data", str(self.images), "--set", f"data.loader_workers={loaders}"]
        return ["resnet50", "--preset", "ci", "--engine", engine, "--ranks", "2", "--no-progress", *chosen]

    def folder(self, name: str) -> Path:
        """A new, empty folder."""
        path = self.root / "faults" / re.sub(r"[^A-Za-z0-9]+", "-", name)[:80]
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def copy(self, name: str) -> tuple[Path, Path]:
        """A copy of the finished run: the folder of runs, and the run's own."""
        out = self.folder(name) / "runs"
        shutil.copytree(self.finished, out)
        (run,) = (path for path in out.iterdir() if (path / "plan.json").exists())
        return out, run

    def command(self, *words: str | Path) -> list[str]:
        """As the console script: the working directory is not searched for modules. Ranks see to that themselves."""
        return [sys.executable, "-P", "-m", "dlbench", *map(str, words)]

    def start(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        wrapped: Sequence[str] = (),
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command in a process group of its own; `wrapped` words stand before it (`unshare ...`)."""
        return subprocess.Popen(
            [*wrapped, *self.command(*words)],
            cwd=cwd or self.root,
            env={**self.environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def call(
        self,
        *words: str | Path,
        limit_s: float = LIMIT_S,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        wrapped: Sequence[str] = (),
    ) -> Done:
        """Runs a command to its end, or to its limit."""
        process = self.start(*words, cwd=cwd, variables=variables, wrapped=wrapped)
        return finish(process, words, limit_s)

    def shell(self, script: str, *words: str | Path, limit_s: float = LIMIT_S) -> Done:
        """Runs `script` with the command as "$@", for what only a shell can plant (`>&-`, `ulimit`)."""
        process = self.start(*words, wrapped=["sh", "-c", script, "sh"])
        return finish(process, words, limit_s)


def finish(process: subprocess.Popen[bytes], words: Sequence[str | Path], limit_s: float) -> Done:
    """The end of a started command; ended by force, with its group, after the limit."""
    code: int | None
    try:
        out, errors = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        code = None
    return Done(
        words=[str(word) for word in words],
        code=code,
        out=(out or b"").decode("utf-8", "backslashreplace"),
        errors=(errors or b"").decode("utf-8", "backslashreplace"),
    )


def own_shared_memory() -> bool:
    """Gives this process, and all that it starts from now on, a /dev/shm of its own; whether it could.

    What lies there afterwards is of the faults: other work on the machine neither hides anything nor is blamed.
    """
    if os.getuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False
    commands = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"])
    return all(subprocess.run(words, check=False).returncode == 0 for words in commands)


def short(steps: int) -> list[str]:
    """Settings of a run of so many measured steps, one repeat."""
    chosen = {"measure.warmup_steps": 1, "measure.measured_steps": steps, "train.batch_per_rank": 2}
    return [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]


def await_that(is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    """Waits until something is so.

    Raises:
        CannotPlantError: it never is.
    """
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise CannotPlantError(f"{what} did not happen within {limit_s:.0f} s")
        time.sleep(0.05)
