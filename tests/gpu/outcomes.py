"""A plugin of pytest that writes each test's outcome, and each warning, when it is known: `-p tests.gpu.outcomes`.

A line of JSON each, into the file that DLBENCH_GPU_OUTCOMES names, so that a run which is given up has told what ended
before, and which test was running. An outcome has the fields of `tests.gpu.__main__.Outcome`.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

FILE = "DLBENCH_GPU_OUTCOMES"


def _write(**content: object) -> None:
    if name := os.environ.get(FILE):
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(name=nodeid, outcome="running")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What a test itself says; of what makes and clears up for it, failures and reasons to skip."""
    if report.when != "call" and report.passed:
        return
    why, log = "", ""
    if report.skipped:
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix(
            "Skipped: "
        )
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(getattr(crash, "message", "")).strip().partition("\n")[0] or f"failed in its {report.when}"
        log = "\n".join([report.longreprtext, *(f"-- {title}\n{text}" for title, text in report.sections)])
    outcome = "passed" if report.passed else "not measured" if report.skipped else "failed"
    _write(name=report.nodeid, outcome=outcome, seconds=round(report.duration, 1), why=why, log=log)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that does not import is a failure that no test tells."""
    if report.failed:
        _write(name=report.nodeid, outcome="failed", why="does not import", log=report.longreprtext)


def pytest_warning_recorded(
    warning_message: warnings.WarningMessage, nodeid: str, location: tuple[str, int, str] | None
) -> None:
    _write(warning=f"{warning_message.category.__name__}: {warning_message.message}", name=nodeid)
