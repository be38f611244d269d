"""Runs of a workload file that has no notice: reports print none, and nothing in its place."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from dlbench.cli import cli
from tests.specs.test_keys import SHORT
from tests.support.run_factory import constant, plans, write_run


def test_a_report_of_runs_without_a_notice_has_none(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(SHORT)
    for plan in plans(workload=str(mine), engine="ddp", repeats=1):
        write_run(tmp_path / "runs", plan, constant([1, 0, 3, 5, 0, 1]))
    result = CliRunner().invoke(cli, ["report", str(tmp_path / "runs"), "--format", "md"])
    assert result.exit_code == 0, result.output
    assert "mine, gpu preset" in result.output
    assert not re.search(r"MLPerf result|;\s*$|; ;|; \.|^\s*\.\s*$|\*\*\*\*", result.output, re.MULTILINE)
