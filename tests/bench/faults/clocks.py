"""The machine's clock jumps while a run trains: times are monotonic, and who ended first is still told.

The clock itself stays as it is. A library before the C library's answers for CLOCK_REALTIME, in the processes of one
run, with a jump from the moment at which a file appears.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.faults.catalogue import Fault
from tests.bench.faults.processes import END_S, await_ranks, end_by_force, require_nothing_left
from tests.bench.faults.workshop import CannotPlantError, DidNotHoldError, Done, Workshop, finish, short
from tests.support.leftovers import Leftovers

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (code || clock != CLOCK_REALTIME) return code;
    const char *file = getenv("JUMP_FILE"), *seconds = getenv("JUMP_S");
    const char *only = getenv("JUMP_RANK"), *rank = getenv("DLBENCH_RANK");
    if (!file || !seconds || (only && (!rank || strcmp(only, rank)))) return code;
    if (!access(file, F_OK)) now->tv_sec += atol(seconds);
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return code;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
"""
_JUMPS_S = {"an hour back": -3600, "a day ahead": 86400}
_STEPS = 60


def faults() -> Iterator[Fault]:
    """Every jump, of a run that goes on and of one that is ended after it."""
    for jump in _JUMPS_S:
        name = f"the clock jumps {jump} in mid-run"
        yield Fault(family="clocks", name=name, replay=partial(_valid, name, jump))
        name = f"the clock jumps {jump}, then rank 1 is SIGKILLed"
        yield Fault(family="clocks", name=name, replay=partial(_killed, name, jump))
        name = f"the clock of rank 1 alone jumps {jump}, then rank 0 is SIGKILLed"
        yield Fault(family="clocks", name=name, replay=partial(_killed, name, jump, victim=0, only="1"))
        name = f"the clock jumps {jump}, then rank 1 stalls"
        yield Fault(family="clocks", name=name, replay=partial(_stalled, name, jump))


def _valid(name: str, jump: str, shop: Workshop) -> None:
    out, done = _run(name, jump, shop, _STEPS, None)
    done.require((0,))
    (record,) = out.glob("*/record.json")
    content = json.loads(record.read_text(encoding="utf-8"))
    seconds = [rank["measured_s"] for rank in content["ranks"]]
    if any(not 0 < value < END_S for value in seconds):
        raise DidNotHoldError(f"the measured steps took {seconds} s")
    for words in (("status", out), ("report", out), ("diagnose", out)):
        shop.call(*words).require((0, 6))


def _killed(name: str, jump: str, shop: Workshop, *, victim: int = 1, only: str = "") -> None:
    out, done = _run(name, jump, shop, 100_000, signal.SIGKILL, victim=victim, only=only)
    done.require((3,), f"rank {victim}", "SIGKILL", "0 of 1 runs valid")
    shop.call("status", out).require((3,), f"rank {victim}")


def _stalled(name: str, jump: str, shop: Workshop) -> None:
    out, done = _run(name, jump, shop, 100_000, signal.SIGSTOP)
    done.require((124,), "rank 1", "0 of 1 runs valid")
    shop.call("status", out).require((3, 124), "rank 1")


def _run(
    name: str,
    jump: str,
    shop: Workshop,
    steps: int,
    number: signal.Signals | None,
    *,
    victim: int = 1,
    only: str = "",
) -> tuple[Path, Done]:
    """A run whose clock, or that of one rank `only`, jumps when it measures; then a rank gets a signal."""
    folder = shop.folder(name)
    out, file = folder / "runs", folder / "jump"
    with Leftovers(shop.environment) as leftovers:
        variables = {
            **leftovers.environment,
            "LD_PRELOAD": str(_library(shop)),
            "JUMP_FILE": str(file),
            "JUMP_S": str(_JUMPS_S[jump]),
            **({"JUMP_RANK": only} if only else {}),
        }
        length = [*short(steps), "--set", "measure.stall_timeout_s=30", "--set", "fault.step_delay_s=0.1"]
        process = shop.start("run", *shop.training("ddp"), *length, "--out", out, variables=variables)
        try:
            found = await_ranks(process, out)
            file.touch()
            time.sleep(1)
            if number is not None:
                os.kill(found["rank"][victim].pid, number)
            done = finish(process, ["run"], END_S)
        finally:
            end_by_force(process)
        require_nothing_left(leftovers)
    return out, done


def _library(shop: Workshop) -> Path:
    made = shop.root / "jump.so"
    if not made.exists():
        if shutil.which("cc") is None:
            raise CannotPlantError("needs a C compiler")
        source = made.with_suffix(".c")
        source.write_text(_SOURCE, encoding="utf-8")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True, timeout=60)
    return made
