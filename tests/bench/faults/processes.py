"""Processes ended or stopped while a run trains: the run says who went first, and nothing of it is left after 5 s."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.workshop import CannotPlantError, DidNotHoldError, Done, Workshop, await_that, finish, short
from tests.support.leftovers import Leftovers

READY_S = 200.0
END_S = 300.0
"""Of the command, once something of it was ended: the time of a stall, which counts from the last word of any rank."""
STALL_S = 20
LATER_S = 20.0
"""How long after the command's end something of it may be there: 5 s are promised, of a machine that is not busy."""

ENGINES = {
    "ddp": ("ddp", ()),
    "horovod": ("horovod", ()),
    "horovod under mpirun": ("horovod", ("--launcher", "mpirun")),
}


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for engine, victims in _BY_ENGINE.items():
        for victim in victims:
            for numbers in _VICTIMS[victim]:
                yield _fault(engine, victim, numbers)
    for milliseconds in (20, 100, 200, 300, 500, 2000):
        name = f"launcher SIGKILLed {milliseconds} ms after its start"
        yield Fault(family="processes", name=name, replay=partial(_early, name, milliseconds / 1000))
    for engine in ("ddp", "horovod under mpirun"):
        for milliseconds in (0, 50, 200, 500, 1000, 3000):
            name = f"{engine}: all SIGKILLed at once {milliseconds} ms after the first loader"
            yield Fault(family="processes", name=name, replay=partial(_at_once, name, engine, milliseconds / 1000))


def _fault(engine: str, victim: str, numbers: Sequence[signal.Signals]) -> Fault:
    how = " and ".join(number.name for number in numbers)
    name = f"{engine}: {victim} gets {how}"
    return Fault(family="processes", name=name, replay=partial(_end, name, engine, victim, numbers))


KILL, TERM, STOP, INT = (signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGSTOP,), (signal.SIGINT,)

_VICTIMS: dict[str, Sequence[Sequence[signal.Signals]]] = {
    "rank 0": (KILL, TERM, (signal.SIGSEGV,)),
    "rank 1": (KILL, TERM, STOP),
    "both ranks": (KILL, STOP),
    "launcher": (KILL, TERM, (signal.SIGHUP,)),
    "Ctrl-C": (INT, (signal.SIGINT, signal.SIGINT)),
    "loader": (KILL, STOP),
    "fork server": (KILL,),
    "resource tracker": (KILL,),
    "sampler": (KILL, STOP),
    "supervisor of rank 1": (KILL,),
    "launcher and all supervisors": (KILL,),
    "mpirun": (KILL, TERM),
}
_BY_ENGINE = {
    "ddp": [victim for victim in _VICTIMS if victim != "mpirun"],
    # What the others are told from is how the engine and the launcher see a death.
    "horovod": ["rank 1", "launcher"],
    "horovod under mpirun": ["rank 1", "launcher", "Ctrl-C", "loader", "mpirun", "launcher and all supervisors"],
}

_NO_EFFECT = ("sampler", "resource tracker")
"""A run goes on without these."""
GO_ON_S = 5.0


def _end(name: str, engine: str, victim: str, numbers: Sequence[signal.Signals], shop: Workshop) -> None:
    out = shop.folder(name) / "runs"
    with Leftovers(shop.environment) as leftovers:
        process = train(shop, engine, out, leftovers)
        try:
            found = await_ranks(process, out)
            _send(_pick(victim, process, found), numbers)
            if victim in _NO_EFFECT:
                _go_on(process)
            done = _finish(process)
        finally:
            end_by_force(process)
        if "supervisors" in victim:
            _next_run(leftovers)
        require_nothing_left(leftovers)
    if victim.startswith("launcher"):
        return
    _require_story(shop, out, victim, numbers, done)


def _require_story(shop: Workshop, out: Path, victim: str, numbers: Sequence[signal.Signals], done: Done) -> None:
    if victim in _NO_EFFECT:
        done.require((130,))
        return
    if victim == "Ctrl-C":
        done.require((130,))
        shop.call("status", out).require((0, 3, 4, 130), "interrupted")
        return
    # Only the launcher sees that a rank was stopped; the watchdog ends what stands still.
    done.require((124,) if numbers == STOP else (3, 124), "0 of 1 runs valid")
    if "rank 1" in victim and numbers == KILL and not victim.startswith("supervisor"):
        done.require((3,), "rank 1", "SIGKILL")
    if victim == "rank 0" and numbers == KILL:
        done.require((3,), "rank 0", "SIGKILL")
    shop.call("status", out).require((0, 3, 4))


def _early(name: str, seconds: float, shop: Workshop) -> None:
    out = shop.folder(name) / "runs"
    with Leftovers(shop.environment) as leftovers:
        process = train(shop, "ddp", out, leftovers)
        time.sleep(seconds)
        process.kill()
        process.communicate()
        require_nothing_left(leftovers)


def _at_once(name: str, engine: str, seconds: float, shop: Workshop) -> None:
    """Nobody is left who could clean up: what has a name then stays, but for the folders that the next run removes."""
    with Leftovers(shop.environment) as leftovers:
        process = train(shop, engine, shop.folder(name) / "runs", leftovers)
        await_that(lambda: _forked(leftovers) or process.poll() is not None, READY_S, "a loader process")
        time.sleep(seconds)
        while living := leftovers.processes():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()
        _next_run(leftovers)
        require_nothing_left(leftovers)


def _forked(leftovers: Leftovers) -> bool:
    """Whether a fork server has forked: two processes of one rank have its command line."""
    servers = [pid for pid, words in leftovers.processes().items() if "multiprocessing.forkserver" in words]
    parents = []
    for pid in servers:
        with suppress(psutil.NoSuchProcess):
            parents.append(psutil.Process(pid).ppid())
    return any(parent in servers for parent in parents)


def train(shop: Workshop, engine: str, out: Path, leftovers: Leftovers) -> subprocess.Popen[bytes]:
    """Starts a run that goes on until it is ended."""
    chosen, more = ENGINES[engine]
    length = [*short(100_000), "--set", f"measure.stall_timeout_s={STALL_S}"]
    return shop.start("run", *shop.training(chosen), *more, *length, "--out", out, variables=leftovers.environment)


def await_measuring(process: subprocess.Popen[bytes], out: Path) -> None:
    """Returns when both ranks train.

    Raises:
        CannotPlantError: they never do.
    """

    def trains() -> bool:
        if process.poll() is not None:
            done = finish(process, ["run"], 10)
            raise CannotPlantError(f"the run ended before anything was planted: {done.text[-300:]}")
        # On a busy machine the second rank comes too late to be in the file, which is not written while steps count.
        told = [path.read_text(encoding="utf-8") for path in out.glob("*/node-0000.status.json")]
        return any('"stage": "measuring"' in text for text in told) and len(list(out.glob("*/node-*.steps"))) == 1

    await_that(trains, READY_S, "training on both ranks")


def await_ranks(process: subprocess.Popen[bytes], out: Path) -> dict[str, list[psutil.Process]]:
    """The run's processes by what they are, once both ranks train."""
    await_measuring(process, out)
    found: dict[str, list[psutil.Process]] = {}
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.setdefault(_role(one), []).append(one)
    found["rank"].sort(key=_rank_of)
    return found


def _role(one: psutil.Process) -> str:
    words = " ".join(one.cmdline())
    if "multiprocessing.forkserver" in words:
        parent = one.parent()
        is_fork = parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
        return "loader" if is_fork else "fork server"
    if "mpirun" in one.name() or "orterun" in one.name():
        return "mpirun"
    for mark, role in _ROLES:
        if mark in words:
            return role
    return words


_ROLES = (
    ("resource_tracker", "resource tracker"),
    ("watching.sampler", "sampler"),
    ("dlbench.supervisor", "supervisor"),
    ("dlbench.node ", "rank"),
)


def _rank_of(one: psutil.Process) -> int:
    variables = one.environ()
    return int(variables.get("DLBENCH_RANK") or variables["OMPI_COMM_WORLD_RANK"])


def _pick(
    victim: str, process: subprocess.Popen[bytes], found: dict[str, list[psutil.Process]]
) -> Sequence[psutil.Process]:
    launcher = psutil.Process(process.pid)
    ranks = found["rank"]
    chosen: dict[str, Callable[[], Sequence[psutil.Process]]] = {
        "rank 0": lambda: ranks[:1],
        "rank 1": lambda: ranks[1:2],
        "both ranks": lambda: ranks,
        "launcher": lambda: [launcher],
        "Ctrl-C": lambda: [launcher],
        "supervisor of rank 1": lambda: [one for one in found["supervisor"] if _rank_of(one) == 1],
        "launcher and all supervisors": lambda: [launcher, *found["supervisor"]],
    }
    try:
        return chosen[victim]() if victim in chosen else found[victim][:1]
    except KeyError:
        raise CannotPlantError(f"this run has no {victim}; it has {sorted(found)}") from None


def _send(victims: Sequence[psutil.Process], numbers: Sequence[signal.Signals]) -> None:
    for index, number in enumerate(numbers):
        if index:
            time.sleep(0.5)
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(number)


def _go_on(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(GO_ON_S)
        raise DidNotHoldError("the run ended, which can do without it")
    process.terminate()


def _finish(process: subprocess.Popen[bytes]) -> Done:
    done = finish(process, ["run"], END_S)
    if done.code is None:
        raise DidNotHoldError(f"dlbench run: still there {END_S:.0f} s later")
    return done


def _next_run(leftovers: Leftovers) -> None:
    """Nobody was left who could take the folders away, but no process may be there; whatever runs next removes them."""
    deadline = time.monotonic() + LATER_S
    while living := leftovers.processes():
        if time.monotonic() > deadline:
            raise DidNotHoldError(f"still there after {LATER_S:.0f} s: {living}")
        time.sleep(0.05)
    subprocess.run([sys.executable, "-P", "-m", "dlbench.supervisor", "true"], env=leftovers.environment, check=True)


def require_nothing_left(leftovers: Leftovers) -> None:
    """That nothing started with its environment is there any more.

    Raises:
        DidNotHoldError: something is.
    """
    if left := leftovers.within(LATER_S):
        raise DidNotHoldError(f"left behind after {LATER_S:.0f} s: {'; '.join(left)[:400]}")


def end_by_force(process: subprocess.Popen[bytes]) -> None:
    """Ends a run that still goes on as a closed terminal does, and by force if it does not."""
    if process.poll() is None:
        process.terminate()
        finish(process, ["run"], END_S)
