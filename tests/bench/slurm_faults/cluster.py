"""What every fault on Slurm needs: a box of three nodes, runs of a second, a finished run that must stay, a bound."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlbench.errors import DlbenchError
from dlbench.jobs.box import config, host
from dlbench.jobs.box.box import Box
from dlbench.jobs.box.config import Equipment
from dlbench.records.scan import Run, scan
from tests.support.paths import ROOT

HAS = Equipment(
    accounting=True,
    accounts=("lab",),
    qos=("low",),
    preempt="partition",
    partitions=("box PriorityTier=1 PreemptMode=REQUEUE GraceTime=20", "urgent PriorityTier=10"),
)
"""The box: jobs of its first partition yield to those of the second."""

LONG = ("--set", "measure.measured_steps=100000", "--set", "fault.step_delay_s=0.2")
RESUMED = (
    *("--set", "measure.measured_steps=60", "--set", "fault.step_delay_s=0.1", "--set", "checkpoint.every_steps=3"),
    *("--set", "system.slurm.requeue=true", "--set", "system.slurm.warn_before_s=60"),
)
"""A run that is interrupted and goes on to its end."""


class DidNotHoldError(AssertionError):
    """What happened that must not."""


@dataclass
class Site:
    """The box, and a folder with one finished run that every fault gets a copy of."""

    box: Box
    root: Path

    @property
    def small(self) -> Path:
        """A file system of a few MiB that all nodes see."""
        return self.root / "small"

    @property
    def variables(self) -> dict[str, str]:
        """Of every command."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DLBENCH_", "SLURM_"))}
        return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.box.environment}

    def slurm(self, *words: str) -> str:
        """What a program of Slurm's says."""
        return host.call(list(words), 60, self.box.environment)

    def kill(self, role: str) -> None:
        """Ends a daemon as a crash does."""
        for process in self.box.processes:
            if process.role == role:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                host.reap([process])

    def start(self, role: str) -> None:
        """Starts a daemon again; the controller reads the state that it had."""
        plan = self.box.plan
        if role == "slurmctld":
            command = ["slurmctld", "-D", "-f", str(plan.conf)]
            argv = config.in_own_mounts(plan, config.CONTROLLER_HOST, command)
        elif role == "slurmdbd":
            argv = config.slurmdbd_argv(plan)
        else:
            argv = next(config.slurmd_argv(plan, node) for node in plan.nodes if role.endswith(node.name))
        self.box.processes[:] = [process for process in self.box.processes if process.role != role]
        self.box.processes.append(host.spawn(role, argv, plan.output(role), plan.mark))
        host.save_state(plan, self.box.processes)

    def heal(self, limit_s: float = 60) -> None:
        """Every daemon runs, no job is left, every node is idle."""
        for role in self.box.plan.roles:
            if not any(process.role == role and process.is_alive() for process in self.box.processes):
                self.start(role)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with suppress(Exception):
                left = self.slurm("squeue", "--noheader", "--format=%i").split()
                if left:
                    self.slurm("scancel", *left)
                states = self.box.node_states()
                for node, word in states.items():
                    if word.strip("*").startswith(("down", "drain")):
                        self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
                if not left and set(states.values()) == {"idle"}:
                    return
            time.sleep(0.5)
        raise DidNotHoldError(f"the box is not idle again within {limit_s:.0f} s: {self.box.node_states()}")


@dataclass
class Stage:
    """What one fault works with: a runs folder with a finished run in it, and a time at which all has to be over."""

    site: Site
    out: Path
    name: str
    limit_s: float
    started: float = field(default_factory=time.monotonic)
    kept: dict[Path, bytes] = field(default_factory=dict)

    def move(self, out: Path) -> None:
        """To another runs folder, with the finished run in it."""
        out.parent.mkdir(exist_ok=True)
        self.out = out
        self.prepare()

    @property
    def left_s(self) -> float:
        """Until the limit."""
        return max(self.started + self.limit_s - time.monotonic(), 0.1)

    def prepare(self) -> None:
        """Copies the finished run."""
        shutil.copytree(self.site.root / "finished", self.out)
        self.kept = {path: path.read_bytes() for path in self.out.rglob("record.json")}

    def require_kept(self) -> None:
        """That the finished run is as it was, and read as valid."""
        for path, content in self.kept.items():
            if not path.exists() or path.read_bytes() != content:
                raise DidNotHoldError(f"the finished run's {path.name} is lost or changed")
            if not any(run.folder.record == path and run.state == "valid" for run in scan(self.out).runs):
                raise DidNotHoldError("the finished run is not valid any more")

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """A command of dlbench, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dlbench", *map(str, words)],
            cwd=self.out.parent,
            env=self.site.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], words: str) -> tuple[int, str]:
        """Exit code and all that it said."""
        try:
            out, errors = process.communicate(timeout=self.left_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise DidNotHoldError(f"dlbench {words} does not end within {self.limit_s:.0f} s") from None
        if "Traceback (most recent" in errors:
            raise DidNotHoldError(f"dlbench {words}: a traceback: {errors.strip().splitlines()[-1]}")
        return process.returncode, out + errors

    def call(self, *words: str | Path) -> tuple[int, str]:
        """Runs a command to its end."""
        return self.finish(self.start(*words), str(words[0]))

    def order(self, *more: str | Path, nodes: str = "2", series: str = "") -> list[str | Path]:
        """Words of a submission of a small run."""
        engine = "ddp" if nodes != "1" or "--ranks-per-node" in more else "single"
        return [
            *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", nodes, "--engine", engine),
            *("--launcher", "srun-gloo", "--data", "synthetic", "--out", self.out, "--set", "measure.warmup_steps=1"),
            *("--series", series or self.name, "--time", "00:05:00", *more),
        ]

    def submit(self, *more: str | Path, nodes: str = "2", series: str = "") -> str:
        """The id of the (last) job of a small run."""
        process = self.start(*self.order(*more, nodes=nodes, series=series))
        code, told = self.finish(process, "submit")
        if code != 0:
            raise DidNotHoldError(f"submit ended with {code}: {told.strip().splitlines()[-1]}")
        found = re.findall(r"\] job (\S+):", told)
        return str(found[-1])

    def runs(self, series: str = "") -> list[Run]:
        """Of the fault's own series."""
        wanted = series or self.name
        return [run for run in scan(self.out).runs if run.plan is not None and run.plan.series.id == wanted]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits, at most to the fault's limit."""
        while not condition():
            if self.left_s <= 0.1:
                raise DidNotHoldError(f"after {self.limit_s:.0f} s not yet: {what}; {self.told()[-300:]}")
            time.sleep(0.3)

    def measuring(self) -> Run:
        """The first run of the series, when all its ranks measure."""

        def measures() -> bool:
            # All go into the stage together; on a busy machine the word of one may be too late for its node's file.
            found = self.runs()
            stages = [status.stage for status in found[0].statuses] if found else []
            return "measuring" in stages and len(stages) == found[0].plan.layout.ranks

        self.until(measures, "all ranks measure")
        return self.runs()[0]

    def has_checkpoint(self) -> None:
        """Waits for a checkpoint of the first run."""
        run = self.measuring()
        self.until(lambda: any(run.folder.checkpoints.glob("step-*.safetensors")), "a checkpoint")

    def clear(self) -> None:
        """Ends the jobs that are left, so that the next fault finds the nodes free."""
        with suppress(DlbenchError):
            queue = self.site.slurm("squeue", "--noheader", "--format=%i %Z").splitlines()
            if left := [line.split()[0] for line in queue if str(self.out.parent) in line]:
                self.site.slurm("scancel", *left)

    def told(self) -> str:
        """What `dlbench status` says now; without the name of the series, which names the fault."""
        return self.call("status", self.out)[1].replace(self.name, "SERIES")

    def line(self, pattern: str) -> str:
        """The line of `dlbench status` that says it, waited for."""
        found: list[str] = []

        def says() -> bool:
            found[:] = [line.strip() for line in self.told().splitlines() if re.search(pattern, line)]
            return bool(found)

        self.until(says, f"status says {pattern!r}")
        return found[0]

    def waited(self, series: str = "") -> tuple[int, str]:
        """What `dlbench wait` ends with and says."""
        code, told = self.call("wait", series or self.name, "--out", self.out, "--every", "1s")
        return code, told.replace(self.name, "SERIES")

    def ends_valid(self, attempt: int = 1) -> str:
        """Waits for a valid end of the first run; returns what is said of it."""
        self.until(lambda: self.runs()[0].record is not None, "a record")
        run = self.runs()[0]
        if run.state != "valid" or run.record is None or run.record.attempt != attempt:
            raise DidNotHoldError(f"{run.state}, attempt {run.record and run.record.attempt}: {run.detail}")
        return f"valid, attempt {attempt}, from step {run.record.first_step}"


def said(told: str, pattern: str) -> str:
    """The line that matches.

    Raises:
        DidNotHoldError: none does.
    """
    for line in told.splitlines():
        if re.search(pattern, line):
            return line.strip()
    raise DidNotHoldError(f"nothing says {pattern!r}: {told.strip()[-300:]}")


def processes(words: Sequence[str]) -> list[int]:
    """Pids of those whose command line holds all of these words."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in line for word in words):
                    found.append(int(entry.name))
    return found
