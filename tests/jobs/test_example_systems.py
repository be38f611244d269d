"""The example systems: each says where its figures are from, and becomes a script that bash and shellcheck accept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts.launch import render_job
from dlbench.records.folder import RunFolder
from dlbench.specs.expand import expand
from dlbench.specs.files import available
from dlbench.specs.requests import Request
from tests.support.paths import GOLDEN, ROOT

EXAMPLES = sorted(name for name in available("systems") if name.startswith("example-") and name != "example-gpu")
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
PYTHON = "/opt/dlbench/bin/python"


def script_of(name: str) -> str:
    asked = Request(workload="resnet50", preset="ci", series="golden", points_are="nodes", points=(2,), system=name)
    (plan,) = expand(asked, machine_cores=4, now=NOW)
    plan = plan.model_copy(update={"dlbench_version": "0.0.0"})
    return render_job(job_of([plan]), [RunFolder(Path("/scratch/runs") / plan.run_id)], PYTHON)


def test_there_are_eight_of_different_kinds() -> None:
    assert [
        f"example-{name}"
        for name in ("alps", "aws-p5", "dgx-h100", "juwels-booster", "lab", "leonardo", "lumi-g", "perlmutter")
    ] == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_names_its_sources_with_a_date(name: str) -> None:
    text = (ROOT / "systems" / f"{name}.yaml").read_text(encoding="utf-8")
    head = text[: text.index("format: ")]
    assert re.search(r"# Sources, 20\d\d-\d\d-\d\d: ", head)
    assert re.search(r"\b[a-z0-9-]+\.(com|ch|de|it|gov|eu)/", head)
    assert "dlbench preflight FILE" in " ".join(head.split())
    assert re.findall(r"^(name|title): .*  # edit", text, re.MULTILINE) == ["name", "title"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_script_is_the_golden_one_and_bash_and_shellcheck_accept_it(name: str) -> None:
    path, script = GOLDEN / "systems" / f"{name}.sbatch", script_of(name)
    if os.environ.get("DLBENCH_UPDATE_GOLDEN") == "1":
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8"), "on purpose? DLBENCH_UPDATE_GOLDEN=1, then read it"
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    command = ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_golden_script_is_left_over() -> None:
    assert sorted(path.stem for path in (GOLDEN / "systems").iterdir()) == EXAMPLES
