"""Recognises mpirun programs other than Open MPI's, whose options launcher mpirun uses."""

from __future__ import annotations

import subprocess

FOREIGN = {"HYDRA": "MPICH's or MVAPICH's", "Intel(R) MPI": "Intel MPI's"}
"""MPI libraries whose mpirun cannot start ranks, by a text in the output of `mpirun --version`."""

REMEDY = "load Open MPI's module or put its mpirun first on PATH, or use another launcher (local, srun-gloo, srun-mpi)"


def foreign_owner(answer: str) -> str:
    """Returns whose mpirun printed this for `--version`; empty if it is Open MPI's or unknown."""
    return next((owner for mark, owner in FOREIGN.items() if mark in answer), "")


def refusal_of(mpirun: str) -> str:
    """Returns why this mpirun cannot start ranks, with a remedy; empty if it can, or does not answer."""
    try:
        words = (mpirun, "--version")
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    owner = foreign_owner(done.stdout + done.stderr)
    return f"mpirun is {owner}, and dlbench needs Open MPI's: {REMEDY}" if owner else ""
