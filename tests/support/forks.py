"""Processes without the seconds that imports take: each is forked from one that has torch and dlbench loaded."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from dlbench.cli import COMMANDS

_FORKS = multiprocessing.get_context("forkserver")
# Nothing that starts threads: a fork would lose them. torch._dynamo is what the first optimizer would import.
_FORKS.set_forkserver_preload(
    [
        *(
            "tests.support.collective_ranks",
            "tests.support.exchange_ranks",
            "torch._dynamo",
            "scipy.stats",
            "pandas",
            "altair",
        ),
        *(f"dlbench.cli.{module}" for _, module, *_ in COMMANDS),
    ]
)


def run_ranks(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    log_folder: Path,
    *,
    limit_s: float = 240,
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
    _await([process for rank, process in enumerate(processes) if rank != stopped], limit_s, processes)
    return [process.exitcode or 0 for process in processes], [log.read_text(encoding="utf-8") for log in logs]


def call_dlbench(
    *arguments: str | Path, cwd: Path, timeout: float = 300, **variables: str
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
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = _FORKS.Process(target=_dlbench, args=(words, environment, str(cwd), str(out), str(errors)))
        process.start()
        if not _await([process], timeout, [process]):
            raise subprocess.TimeoutExpired(["dlbench", *words], timeout)
        code = process.exitcode or 0
        return subprocess.CompletedProcess(["dlbench", *words], code, out.read_text("utf-8"), errors.read_text("utf-8"))


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


def _dlbench(arguments: list[str], environment: dict[str, str], cwd: str, out: str, errors: str) -> None:
    from dlbench.cli import main

    _become(environment, out, errors)
    os.chdir(cwd)
    sys.argv = ["dlbench", *arguments]
    main()
