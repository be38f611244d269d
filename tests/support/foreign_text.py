"""Folders of runs whose every word was written by somebody else: markup, terminal codes and the start of formulas."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import EXCHANGE, STAGE
from dlbench.specs.plan import RunPlan
from tests.support import collectives_factory
from tests.support.history_factory import history_plan
from tests.support.run_factory import (
    NOW,
    WORKLOAD,
    Story,
    Training,
    constant,
    edit_json,
    exchange_result,
    plans,
    quality_plans,
    write_run,
    write_unfinished,
)
from tests.support.watch_factory import clock_line, node_watch, watch_result, write_samples, write_spans

PAYLOAD = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
HOSTILE = f"=cmd {PAYLOAD}\"'><svg onload=pwned=1>|`*[x](javascript:pwned)*"
HOSTILE += "\x1b]0;title\x07\x9b\u202e\u2028\r\n#SBATCH --wrap=id\n=1+1"
HOSTILE_NAME = PAYLOAD.replace("/", "_") + "|`*"
STEP = (5, 0, 30, 50, 10, 10)


def hostile_plan(plan: RunPlan) -> RunPlan:
    """Returns the plan as somebody may have written it by hand: dlbench takes no control characters into one."""
    content = plan.to_json().replace('"HOSTILE"', json.dumps(HOSTILE))
    return RunPlan.model_validate(json.loads(content))


def write_hostile(out: Path) -> None:
    """Runs at 1, 2 and 4 ranks, runs to a quality, and invalid, failed and damaged ones."""
    workload = _hostile_workload(out)
    request: dict[str, Any] = {"workload": str(workload), "tags": {"note": "HOSTILE", "branch": PAYLOAD}}
    request["overrides"] = {"data.source": "HOSTILE"}
    made = [hostile_plan(plan) for plan in plans(points=(1, 2, 4), repeats=2, **request)]
    for plan in made[:4]:
        _write_watched_run(out, plan)
    story = _story()
    kernel = {**story.environment, "kernel": "other"}
    write_run(out, made[4], constant(STEP), replace(story, environment=kernel))
    checks = [{"name": HOSTILE, "passed": False, "detail": HOSTILE}]
    folder = write_run(out, made[5], constant(STEP), replace(story, checks=checks, state="invalid"))
    edit_json(folder.record, finished=HOSTILE)
    for plan in plans(points=(1, 2), repeats=1, series="s2", **request):
        write_unfinished(out, hostile_plan(plan), "failed", HOSTILE, host=HOSTILE)
    _write_training(out)
    broken = out / f"{HOSTILE_NAME}\x1b]0;title\x07"
    broken.mkdir()
    (broken / "plan.json").write_text("{}", encoding="utf-8")


def _hostile_workload(out: Path) -> Path:
    source = WORKLOAD.read_text(encoding="utf-8")
    source = re.sub(r"^(title|sample_unit|notice|    about): .*$", r"\1: HOSTILE", source, flags=re.M)
    out.mkdir(parents=True)
    path = out.parent / f"{out.name}-hostile.yaml"
    path.write_text(source, encoding="utf-8")
    return path


def _story() -> Story:
    return Story(
        warnings=[HOSTILE],
        settings=[{"key": HOSTILE, "requested": HOSTILE, "effective": 1, "evidence": HOSTILE}],
        environment={HOSTILE: HOSTILE, "kernel": HOSTILE, "os": HOSTILE, f"variable.NCCL_{HOSTILE}": HOSTILE},
        environment_differences=[HOSTILE],
        data={HOSTILE: HOSTILE, "decoder": HOSTILE},
        inert=[HOSTILE],
        host=lambda rank: HOSTILE,
        threads=2,
        pinned=False,
        bad_sample_count=1,
        record={"precision": HOSTILE},
    )


def _write_watched_run(out: Path, plan: RunPlan) -> RunFolder:
    node = node_watch(
        host=HOSTILE,
        unavailable={HOSTILE: HOSTILE, "gpu.0.energy_j": HOSTILE},
        failures=[HOSTILE],
        clock=clock_line(host=HOSTILE, problem=HOSTILE),
    )
    watch = watch_result(nodes=[node], overhead={**watch_result()["overhead"], "evidence": HOSTILE})
    story = replace(_story(), exchange=_exchange(plan), record={"watch": watch})
    folder = write_run(out, plan, constant([5, 0, 30, 50, 20 * (plan.layout.ranks - 1), 10]), story)
    columns = ["host.cpu.0.busy", "gpu.0.power_w", "gpu.0.sm_clock_hz", f"net.{HOSTILE}.received_bytes"]
    write_samples(
        folder,
        0,
        columns,
        [(1_000_000_000 * second, 0.5, 200.0, 1.4e9, 1e9) for second in range(10)],
        unavailable={"gpu.0.energy_j": HOSTILE},
        failures=[{"failed": HOSTILE, "time_ns": 3_000_000_000, "reason": HOSTILE}],
        host=HOSTILE,
        facts={"gpu.0.name": HOSTILE, HOSTILE: HOSTILE},
    )
    begin_ns = story.begin_ns(0)
    names = {"start_ns": begin_ns, "end_ns": begin_ns + 1_000_000, "name": HOSTILE}
    write_spans(folder, 0, [{"lane": STAGE, **names}, {"lane": EXCHANGE, "step": 0, "track": 0, **names}])
    ranks = json.loads(folder.record.read_text())["ranks"]
    edit_json(folder.record, ranks=[{**rank, "device": f"cuda:0 ({HOSTILE})"} for rank in ranks], finished=HOSTILE)
    return folder


def _exchange(plan: RunPlan) -> dict[str, Any] | None:
    if plan.layout.ranks == 1:
        return None
    gradients = [(1_000_000, 0.01), (2_000_000, 0.03), (4_000_000, 0.05)]
    names: dict[str, Any] = dict.fromkeys(("carrier", "fusion", "exchange", "wire", "evidence"), HOSTILE)
    made = exchange_result(plan, gradients=gradients, alpha_s=1e-4, beta_s_per_byte=1e-9, **names)
    for message in made["messages"]:
        message["method"] = HOSTILE
    for gradient in made["gradients"]:
        gradient["name"] = HOSTILE
    return made


def _write_training(out: Path) -> None:
    (plan,) = quality_plans(points=(1,), repeats=1)
    system = plan.system.model_copy(update={"peak_tflops": {"fp32": 1.0}, "peak_source": HOSTILE})
    plan = plan.model_copy(update={"system": system})
    record = {"layers": [{"name": HOSTILE, "kind": HOSTILE, "macs": 5}], "training_flops_per_sample": 10**9}
    record |= {"first_step": 3, "resumed_from": HOSTILE}
    story = replace(_story(), training=Training(values=[0.2, 0.4, 0.6, 0.8]), record=record)
    folder = write_run(out, plan, constant([100, 0, 0, 0, 0, 0]), story)
    quality = json.loads(folder.record.read_text())["quality"]
    edit_json(folder.record, quality={**quality, "predictor": HOSTILE})


def write_hostile_nights(out: Path, count: int) -> None:
    """Runs of two ranks on hosts that are named alike, a night each; from the middle on a tenth slower."""
    for night in range(count):
        plan = history_plan(night, night, points=(2,))
        half = "new" if night >= count // 2 else "old"
        plan = plan.model_copy(update={"tags": {"commit": f"{HOSTILE}{half}", "half": half}})
        environment = {"variable.SLURM_JOB_ID": f"{HOSTILE}{night}", "host": HOSTILE, "os": f"{HOSTILE}{half}"}
        story = replace(_story(), environment=environment, host=lambda rank: f"{HOSTILE}{rank}", record={})
        story.finished = NOW + timedelta(days=night)
        factor = {"old": 1.0, "new": 1.1}[half] * (1 + night % 3 / 1000)
        write_run(out, plan, constant([ms * factor for ms in STEP]), story)


def write_hostile_collectives(out: Path) -> None:
    """Runs of the collective benchmark with a rejected point, a failed run and a damaged one."""

    def change(point: dict[str, Any]) -> dict[str, Any]:
        if point["num_bytes"] == 1024:
            return {"times_s": [], "correct": None, "problem": HOSTILE}
        return {"carrier": HOSTILE if point["algorithm"] == "ring" else point["carrier"], "problem": HOSTILE}

    for plan in collectives_factory.comm_plans(algorithms="ring", backends="gloo", repeats=2, sizes="1KiB:64KiB"):
        story = collectives_factory.Story(
            change=change,
            warnings=[HOSTILE],
            not_measured=[HOSTILE],
            environment={HOSTILE: HOSTILE, "kernel": f"{HOSTILE} {plan.series.repeat}"},
            host=lambda node: HOSTILE,
            device=HOSTILE,
        )
        collectives_factory.write_comm_run(out, plan, story)
    (plan,) = collectives_factory.comm_plans(series="c2", repeats=1)
    collectives_factory.write_unfinished_comm(out, plan, "failed", HOSTILE)
    broken = out / f"{HOSTILE_NAME}\x1b]0;title\x07"
    broken.mkdir()
    (broken / "plan.json").write_text("{}", encoding="utf-8")
