"""Daemons of Slurm that end while a job is submitted or runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import RESUMED, DidNotHoldError, Stage, said

SHORT = ("--set", "measure.measured_steps=30", "--set", "fault.step_delay_s=0.2")


def faults() -> Iterator[Fault]:
    """One after the other: each takes the whole box."""
    yield Fault("slurmd of the first node killed, started again", lambda stage: _node(stage, "slurmd.n1"), 240)
    yield Fault("slurmd of the other node killed, started again", lambda stage: _node(stage, "slurmd.n2"), 240)
    yield Fault("node lost during a run (slurmd killed, node down), requeued", _lost, 360)
    yield Fault("slurmctld killed during a run, started again", lambda stage: _node(stage, "slurmctld"), 240)
    yield Fault("slurmctld killed before submit", _submit, 240)
    yield Fault("slurmdbd killed during a run", lambda stage: _node(stage, "slurmdbd"), 240)


def _node(stage: Stage, role: str) -> str:
    stage.submit(*SHORT)
    stage.measuring()
    stage.site.kill(role)
    time.sleep(1)
    if role != "slurmdbd":
        stage.site.start(role)
    code, told = stage.waited()
    if code != 0:
        raise DidNotHoldError(f"wait ends with {code}: {told[-300:]}")
    return said(told, "1 of 1 run valid")


def _lost(stage: Stage) -> str:
    stage.submit(*RESUMED)
    stage.has_checkpoint()
    stage.site.kill("slurmd.n2")
    stage.site.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    time.sleep(2)
    stage.site.start("slurmd.n2")
    stage.site.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    return stage.ends_valid(attempt=2)


def _submit(stage: Stage) -> str:
    stage.site.kill("slurmctld")
    process = stage.start(*stage.order(*SHORT))
    time.sleep(3)
    stage.site.start("slurmctld")
    code, told = stage.finish(process, "submit")
    if code != 0:
        line = said(told, "dlbench: error: ")
        code, told = stage.call("submit", "--resume", stage.name, "--out", stage.out)
        if code != 0:
            raise DidNotHoldError(f"--resume ends with {code}: {told[-200:]} after {line}")
    code, told = stage.waited()
    if code != 0 or len(stage.runs()) != 1:
        raise DidNotHoldError(f"wait ends with {code}: {told[-200:]}")
    return said(told, "1 of 1 run valid")
