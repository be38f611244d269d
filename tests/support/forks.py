"""Processes without the seconds that imports take: each is forked from one that has torch and dlbench loaded."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# Nothing that starts threads: a fork would lose them.
_FORKS.set_forkserver_preload(["tests.support.preloaded"])


_AFTER_DEATH_S = 60.0
"""Longer than ranks take to notice by themselves that one of them is gone."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What else a command may find: see `call_dlbench`."""

    closed: tuple[int, ...] = ()
    """Descriptors of 0 to 2 that are closed."""
    full: tuple[int, ...] = ()
    """Those of 1 and 2 that are /dev/full."""
    is_plain_user: bool = False
    """Whether root may only what its files' modes allow, as everybody else."""
    largest_file: int | None = None
    """Bytes of a file at most (RLIMIT_FSIZE)."""
    is_gone: bool = False
    """Whether the working directory was deleted."""


def start_forks() -> int:
    """Process id of the one that all are forked from."""
    forkserver.ensure_running()
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def run_ranks(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    log_folder: Path,
    *,
    limit_s: float = 600,
    stopped: int | None = None,
) -> tuple[list[int], list[str]]:
    """Exit codes and output of one process for each environment, which calls `main` with the arguments.

    Args:
        main: a function of a preloaded module; what it returns is the exit code.
        arguments: of all ranks.
        environments: what is added to the environment of each rank.
        log_folder: where their output goes.
        limit_s: after which ranks that have not ended are killed.
        stopped: a rank that will not end by itself; it is killed when the others have ended.
    """
    logs = [log_folder / f"rank-{rank}.log" for rank in range(len(environments))]
    processes = [
        _FORKS.Process(target=_rank, args=(main, list(arguments), {**os.environ, **environment}, str(log)))
        for environment, log in zip(environments, logs, strict=True)
    ]
    for process in processes:
        process.start()
    _await_ranks([process for rank, process in enumerate(processes) if rank != stopped], limit_s, processes)
    return [process.exitcode or 0 for process in processes], [log.read_text(encoding="utf-8") for log in logs]


def call_dlbench(
    *arguments: str | Path, cwd: Path, timeout: float = 300, surroundings: Surroundings | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``dlbench`` in a process of its own, which is new where variables are meant for Python itself."""
    words = [str(word) for word in arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("DLBENCH_PATH", "COLUMNS")} | variables
    if any(name.startswith("PYTHON") for name in variables):
        return subprocess.run(
            [sys.executable, "-m", "dlbench", *words],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    around = surroundings or Surroundings()
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = _FORKS.Process(target=_dlbench, args=(words, environment, str(cwd), str(out), str(errors), around))
        process.start()
        if not _await([process], timeout, [process]):
            raise subprocess.TimeoutExpired(["dlbench", *words], timeout)
        code = process.exitcode or 0
        return subprocess.CompletedProcess(["dlbench", *words], code, out.read_text("utf-8"), errors.read_text("utf-8"))


def _await_ranks(awaited: Sequence[BaseProcess], limit_s: float, everyone: Sequence[BaseProcess]) -> None:
    """As `_await`, but once a rank died of an exception the others have `_AFTER_DEATH_S`: they may wait for it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(process.is_alive() for process in awaited):
        multiprocessing.connection.wait([process.sentinel for process in awaited if process.is_alive()], 1.0)
        if any(process.exitcode == 1 for process in awaited):
            deadline = min(deadline, time.monotonic() + _AFTER_DEATH_S)
            break
    _await(awaited, max(0.0, deadline - time.monotonic()), everyone)


def _await(awaited: Sequence[BaseProcess], limit_s: float, everyone: Sequence[BaseProcess]) -> bool:
    """Whether the awaited processes ended in time; none is left in any case."""
    deadline = time.monotonic() + limit_s
    try:
        for process in awaited:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in awaited)
    finally:
        for process in everyone:
            if process.is_alive():
                process.kill()
            process.join()


def _become(environment: Mapping[str, str], out: str, errors: str) -> None:
    """In the forked process: as if it had been started with this environment and these streams."""
    gc.freeze()  # what was loaded before is never garbage, and looking at it would copy its memory
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _rank(main: Callable[[Sequence[str]], int], arguments: list[str], environment: dict[str, str], log: str) -> None:
    import torch

    _become(environment, log, log)
    warnings.simplefilter("ignore")
    # OMP_NUM_THREADS was read when torch was loaded.
    torch.set_num_threads(1)
    raise SystemExit(main(arguments))


def _dlbench(
    arguments: list[str], environment: dict[str, str], cwd: str, out: str, errors: str, around: Surroundings
) -> None:
    from dlbench.cli import main

    _become(environment, out, errors)
    os.chdir(cwd)
    _surround(around)
    sys.argv = ["dlbench", *arguments]
    main()


def _surround(around: Surroundings) -> None:
    if around.is_gone:
        gone = tempfile.mkdtemp(dir=".")
        os.chdir(gone)
        Path("..", gone).rmdir()
    for number in around.full:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if around.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (around.largest_file, around.largest_file))
    if around.is_plain_user:
        _heed_modes()
    for number in around.closed:
        os.close(number)
        # As Python starts with them.
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)


_CAPABILITIES_V3 = 0x20080522
_PR_CAPBSET_DROP = 24
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
"""capabilities(7), capset(2), prctl(2)."""


def _heed_modes() -> None:
    """Takes from root what lets it pass over the modes of files, for this process and all that it starts."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        for place in range(3):  # effective, permitted, inheritable
            sets[place] &= ~(1 << capability)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
