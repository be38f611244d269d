"""Which MPI the mpirun on PATH belongs to: launcher mpirun gives it options that Open MPI's alone knows."""

from __future__ import annotations

import subprocess

FOREIGN = {"HYDRA": "MPICH's or MVAPICH's", "Intel(R) MPI": "Intel MPI's"}
"""Whose an mpirun is that cannot start ranks, by what stands in its answer to `--version`."""

REMEDY = "load Open MPI's module or put its mpirun first on PATH, or use another launcher (local, srun-gloo, srun-mpi)"


def foreign_owner(answer: str) -> str:
    """Returns whose mpirun gave this answer to `--version`; empty where it is Open MPI's, or not known."""
    return next((owner for mark, owner in FOREIGN.items() if mark in answer), "")


def refusal_of(mpirun: str) -> str:
    """Returns why this mpirun cannot start ranks, and what to do; empty where it can, or gives no answer."""
    try:
        words = (mpirun, "--version")
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    owner = foreign_owner(done.stdout + done.stderr)
    return f"mpirun is {owner}, and dlbench needs Open MPI's: {REMEDY}" if owner else ""
