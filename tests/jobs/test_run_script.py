"""What `dlbench run` starts where a system has modules or setup lines: the text of a job, with the same effects."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts.launch import has_script, render_job, render_run_script
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import BOX, plans

SETUP = "export SIDE='b and c'"
PYTHON = "/opt/python"


def plan_of(launcher: str, **overrides: Any) -> RunPlan:
    local = {"system": "local", "points_are": "ranks"} if launcher == "local" else {}
    return plans(**{**BOX, **local}, repeats=1, launcher=launcher, overrides=overrides)[0]


@pytest.mark.parametrize("launcher", ["srun-gloo", "srun-mpi", "mpirun"])
def test_a_run_loads_and_sets_what_its_job_does(launcher: str) -> None:
    wanted = {"system.modules": "gcc/12,openmpi/4", "system.setup": SETUP, "system.launch.environment.X": "1"}
    plan = plan_of(launcher, **wanted)
    folder = RunFolder(Path("/runs/x"))
    script = render_run_script(plan, folder, PYTHON)
    lines = script[script.index("\nmodule purge") : script.index("\nexec ")].strip().splitlines()
    own = "# Different in every start of this script, also after a requeue."
    job = render_job(job_of([plan]), [folder], PYTHON).splitlines()
    assert lines == [line for line in job[job.index("module purge") : job.index(")") - 2] if line not in (own, TOKEN)]
    last = job[job.index(")") - 1].replace('"${dlbench_run##*/}"', "x").replace('"$dlbench_run"', "/runs/x")
    assert script.splitlines()[-1] == f"exec {last}"


TOKEN = 'export DLBENCH_LAUNCH_TOKEN="${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"'
"""Of a run it is made anew for each start."""


def test_a_rank_of_this_machine_gets_them_too(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s|" "$SIDE" "$LOADED" "$X" "$$" > {seen}\n')
    python.chmod(0o755)
    wanted = {"system.modules": "a/1", "system.setup": SETUP, "system.launch.environment.X": "it's"}
    plan = plan_of("local", **wanted)
    script = tmp_path / "launch.sh"
    script.write_text(render_run_script(plan, RunFolder(tmp_path), str(python)))
    module = {"BASH_FUNC_module%%": '() { [ "$1" = purge ] || export LOADED="$2" LOADEDMODULES="$2"; }'}
    process = subprocess.Popen(["bash", str(script)], env={**os.environ, **module})
    assert process.wait(timeout=60) == 0
    # It becomes the rank: signals, and the end of whoever started it, reach it.
    assert seen.read_text().split("|")[:4] == ["b and c", "a/1", "it's", str(process.pid)]


def test_a_system_without_them_needs_no_shell() -> None:
    assert not has_script(plan_of("local"))
    assert has_script(plan_of("local", **{"system.setup": "true"}))
