"""Ranks without the seconds that importing torch takes: each is forked from one process that has it loaded."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# Nothing that starts threads: a fork would lose them. torch._dynamo is what the first optimizer would import.
_FORKS.set_forkserver_preload(["tests.collective_ranks", "tests.exchange_ranks", "torch._dynamo"])


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
    processes: list[BaseProcess] = [
        _FORKS.Process(target=_rank, args=(main, list(arguments), dict(environment), str(log)))
        for environment, log in zip(environments, logs, strict=True)
    ]
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != stopped:
                process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes], [log.read_text(encoding="utf-8") for log in logs]


def _rank(main: Callable[[Sequence[str]], int], arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In the forked process: as if it had been started with `environment`."""
    import torch

    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    warnings.simplefilter("ignore")
    # OMP_NUM_THREADS was read when torch was loaded.
    torch.set_num_threads(1)
    raise SystemExit(main(arguments))
