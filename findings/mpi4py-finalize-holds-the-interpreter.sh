#!/usr/bin/env bash
# mpi4py releases the interpreter's lock in every call that waits, so that other threads of a rank go on while it waits
# for another rank. `MPI.Finalize()` is the exception: it waits for all ranks with the lock held, and no other thread of the
# process runs Python meanwhile. A watchdog thread that is to end a rank whose partner never comes therefore does nothing
# in the one call in which every early rank waits for the late ones. (`Comm.Barrier` waits as long and lets threads run;
# `MPI_Finalize` called through ctypes, which releases the lock, does too.)
#
# mpi4py 4.1.2 with the MPI library and `mpirun` of this machine (Open MPI 4.1.4), seen on 2026-11-28.
# Source: `Finalize` in src/mpi4py/MPI.src/MPI.pyx; page: reference of mpi4py.MPI.Finalize.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
command -v mpirun >/dev/null || { echo "there is no mpirun here: nothing was looked at"; exit 0; }
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install mpi4py==4.1.2
cat >"$folder/finding.py" <<'EOF'
"""Counts how often a thread of rank 0 runs while rank 0 waits two seconds for rank 1, in a barrier and in Finalize."""

import sys
import threading
import time

from mpi4py import MPI

WAIT_S, TICK_S = 2.0, 0.1


def ticks_during(wait) -> int:
    ticks = 0
    is_over = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not is_over.wait(TICK_S):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    wait()
    is_over.set()
    thread.join()
    return ticks


def main() -> None:
    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank != 0:
        time.sleep(WAIT_S)
        world.Barrier()
        time.sleep(WAIT_S)
        MPI.Finalize()
        return
    in_barrier, in_finalize = ticks_during(world.Barrier), ticks_during(MPI.Finalize)
    print(f"a thread ran {in_barrier} times in Barrier, {in_finalize} times in Finalize; both waited {WAIT_S:.0f} s")
    if in_barrier < 5 or in_finalize > 2:
        sys.exit("changed: a thread ran many times in Barrier and at most twice in Finalize")


if __name__ == "__main__":
    main()
EOF
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
mpirun --oversubscribe -n 2 "$folder/venv/bin/python" "$folder/finding.py"
