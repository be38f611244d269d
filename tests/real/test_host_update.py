"""`train.optimizer_state host` on real ranks: every engine trains the same numbers as with updates by the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_runs import run_forked
from tests.support.run_factory import record_of

SHORT = (
    *("--ranks", "2", "--preset", "ci", "--set", "train.batch_per_rank=2", "--set", "layout.cores_per_rank=1"),
    *("--set", "measure.warmup_steps=5", "--set", "measure.measured_steps=2", "--set", "system.launch.pin=false"),
)
CASES = {
    "ddp": ("--engine", "ddp"),
    "horovod": ("--engine", "horovod"),
    # Buffers that hold gradients are arranged anew in the warm-up, the second time after its fourth step.
    "own exchange": ("--engine", "ddp", "--set", "sync.fusion=own:mgwfbp"),
}


@pytest.mark.horovod
@pytest.mark.usefixtures("horovod_installed")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly) if case == "ddp" else case for case in CASES]
)
def test_two_ranks_train_the_same_numbers(case: str, tmp_path: Path) -> None:
    found = {}
    for where in ("device", "host"):
        setting = ("--set", f"train.optimizer_state={where}")
        (run,) = run_forked("cosmoflow", *SHORT, *CASES[case], *setting, "--series", where, "--out", tmp_path / where)
        found[where] = record_of(run)
    device, host = found["device"], found["host"]
    assert [r.final_parameters_sha256 for r in host.ranks] == [r.final_parameters_sha256 for r in device.ranks]
    assert device.host_update is None
    assert host.host_update.update_s > 0
    assert host.host_update.copied_bytes == 0
    assert any("only the overlap is tested" in text for text in host.warnings)
    assert [s.effective for s in host.settings if s.key == "train.optimizer_state"] == ["host"]
