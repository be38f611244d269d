"""`dlbench preflight` on a real Slurm: a node that fails is named; the example systems are what Slurm accepts."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest

from dlbench.jobs.preflight.check import job_of, plan_of, render_preflight, trial
from dlbench.records.preflight import PreflightFolder, PreflightReport
from dlbench.specs.choices import choose_system
from tests.conftest import Cli
from tests.jobs.test_example_systems import EXAMPLES
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment
from tests.support.paths import ROOT

NOW = datetime(2026, 3, 1, tzinfo=UTC)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def system(folder: Path, **lines: str) -> Path:
    """The box with Gloo alone, whose local scratch is a folder of each node's own; `lines` replace others."""
    text = (ROOT / "systems" / "box.yaml").read_text()
    text = text.replace("name: box", "name: trial").replace("path: $TMPDIR", f"path: {folder}/{{host}}")
    text = text.replace("launcher: srun-mpi", "launcher: srun-gloo")
    for key in ("mpi_plugin", "oversubscribe_yield"):
        text = "\n".join(line for line in text.split("\n") if key not in line)
    file = folder / "trial.yaml"
    file.write_text(text + "".join(f"{key}: {value}\n" for key, value in lines.items()))
    return file


def report_of(folder: Path) -> PreflightReport:
    (file,) = folder.glob("preflight/*/preflight.json")
    content = json.loads(file.read_text())
    jsonschema.validate(content, PreflightReport.model_json_schema())
    return PreflightReport.model_validate(content)


def test_a_node_without_scratch_is_named_for_exclude(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    (tmp_path / "n1").mkdir()
    done = cli("preflight", system(tmp_path), **slurm_box.environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "--exclude=n2" in done.stdout
    assert len(done.stdout.splitlines()) <= 24
    report = report_of(tmp_path)
    assert report.exclude == "n2"
    first, second = report.nodes
    assert (first.host, first.problems) == ("n1", ())
    assert "No such file" in second.problems[0]
    # All else of it works: it saw the folder, and sums are right.
    assert len(second.ranks) == 1
    exchange = {one.subject: one for one in report.job}["all-reduce"]
    assert exchange.state == "ok", exchange.found
    assert "torch-gloo" in exchange.found


@pytest.mark.nightly
def test_a_node_without_python_is_named_and_nobody_waits_for_it(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    for host in ("n1", "n2"):
        (tmp_path / host).mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = cli("preflight", system(tmp_path, python=str(python)), **slurm_box.environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "--exclude=n1" in done.stdout
    exchange = {one.subject: one for one in report_of(tmp_path).job}["all-reduce"]
    assert "not tried, because the check of n1 failed" in exchange.found


@pytest.mark.nightly
def test_a_job_that_does_not_start_is_cancelled(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    file = system(tmp_path)
    file.write_text(file.read_text().replace("  exclusive: false", "  exclusive: false\n  extra: [begin=now+1hour]"))
    begun = time.monotonic()
    done = cli("preflight", file, "--timeout", "3", **slurm_box.environment)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "was pending (BeginTime)" in " ".join(done.stdout.split())
    assert time.monotonic() - begun < 60
    report = report_of(tmp_path)
    assert report.job_id
    assert report.nodes == ()


SITES = {
    "gres": ("gpu:a100:4,gpu:h100:8,gpu:rtx4090:4",),
    "features": ("gpu",),
    "memory_mb": 480 * 1024,
    "partitions": ("box", "batch", "standard-g", "booster", "boost_usr_prod", "normal", "p5", "gpu"),
}
"""What the example systems ask for, devices counted only."""


def accepts_every_example(folder: Path, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    for name in EXAMPLES:
        plan = plan_of(choose_system(name, {}), 2, machine_cores=1, now=NOW)
        where = PreflightFolder(folder / name)
        where.path.mkdir()
        where.run.script.write_text(render_preflight(job_of(plan), where, "/usr/bin/python3"))
        finding = trial(job_of(plan), where, {**box.environment, "PATH": "/usr/bin:/bin"})
        assert finding.state == "ok", f"{name}: {finding.found}"


def test_slurm_accepts_every_example(slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Box.start(slurm_folder, cpus_per_node=288, has=Equipment(**SITES)) as box:
        accepts_every_example(tmp_path, box, monkeypatch)


@pytest.mark.nightly
def test_their_accounts_and_qos_are_enforced(
    slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = {
        "accounting": True,
        "accounts": ("my-account", "project_465000000", "m0000_g", "my-project", "g000"),
        "qos": ("regular",),
    }
    with Box.start(slurm_folder, cpus_per_node=288, has=Equipment(**SITES, **books)) as box:
        accepts_every_example(tmp_path, box, monkeypatch)
