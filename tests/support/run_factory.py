"""Run folders with known times, written by the real writers: oracles for everything that reads runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder, create
from dlbench.records.record import Record
from dlbench.records.registry import KEYS
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.steps import LAUNCHED, PHASES, StepWriter
from dlbench.records.scan import Run
from dlbench.records.status import RankStatus, write_status
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.support.paths import DATA

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
MS = 1_000_000
StepTimes = Callable[[int, int], tuple[Sequence[int], int]]
"""Rank and step -> nanoseconds of each phase (in the order of `PHASES`) and of the rest of the step."""

BOX: dict[str, Any] = {"workload": "cosmoflow", "preset": "ci", "system": "box", "points": (1,), "points_are": "nodes"}
"""What is asked of `plans` for a small series of jobs."""

WORKLOAD = DATA / "report-workload.yaml"
QUALITY_WORKLOAD = DATA / "quality-workload.yaml"
LAUNCH_MS = {"input": 1.0, "h2d": 0.0, "forward": 12.0, "backward": 20.0, "exchange": 0.0, "optimizer": 6.0}
"""What the kernels of a step take alone, where `write_launch_bound` makes it."""


@dataclass(kw_only=True)
class Story:
    """What is special about a run; the defaults make a healthy one on one CPU node."""

    state: str = "valid"
    warnings: Sequence[str] = ()
    checks: Sequence[Mapping[str, Any]] = ({"name": "finite loss", "passed": True, "detail": "every loss is finite"},)
    settings: Sequence[Mapping[str, Any]] = ()
    environment: Mapping[str, str] = field(
        default_factory=lambda: {"host": "n0", "python": "3.11.7", "os": "Debian 12"}
    )
    environment_differences: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=lambda: {"kind": "synthetic"})
    host: Callable[[int], str] = lambda rank: "n0"
    cores: Callable[[int], Sequence[int]] = lambda rank: (rank,)
    threads: int = 1
    pinned: bool = True
    bad_sample_count: int = 0
    finished: datetime = NOW
    device: str = "cpu"
    gpu: Mapping[str, Any] = field(default_factory=dict)
    """What ranks of a `cuda` device say of their GPUs, over what the factory makes up."""
    numa_nodes: Sequence[int] = ()
    """Of the cores of each rank."""
    last_loss: float | None = 1.9
    exchange: Mapping[str, Any] | None = None
    """What the run says of its gradient exchange, see `exchange_result`; None for one that says nothing."""
    inert: Sequence[str] = ()
    training: Training | None = None
    """How a run to a quality went; None for a run of speed."""
    begin_ns: Callable[[int], int] = lambda rank: 1_000_000_000 * (rank + 1)
    """When a rank begins its first step, on the clock of its node."""
    pause_ns: Callable[[int, int], int] = lambda rank, step: 0
    """What lies before a step of a rank and belongs to none."""
    job: str = ""
    """Slurm job that it ran in: a session of its own; empty outside of Slurm."""
    launch: Callable[[int, int], Sequence[int]] | None = None
    """Rank and step -> how long the GPU waited for the host in forward, backward and optimizer, at most, nanoseconds;
    None on CPUs."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the record, as they are."""
    of_rank: Callable[[int], Mapping[str, Any]] = lambda rank: {}
    """The same of what a rank says of itself."""


@dataclass(kw_only=True)
class Training:
    """A training to the target of its plan: the value of each evaluation, in order."""

    values: Sequence[float | None]
    every: int = 80
    """Samples between two evaluations, over all ranks; a multiple of the global batch."""
    eval_s: float = 0.5
    wait_s: float = 0.0
    """Checkpoints and waits before each evaluation."""
    train_samples: int = 160
    predictor_value: float = 0.1
    eval_samples: int = 100
    metric: str = "top1"


def plans(**request: Any) -> list[RunPlan]:
    """Plans of a weak series of the sample workload on this machine, with one core per rank, unless said otherwise."""
    asked = {"workload": str(WORKLOAD), "points": (1, 2), "repeats": 5, "series": "s1", **request}
    return expand(Request(**asked), machine_cores=max(asked["points"]), now=NOW)


def quality_plans(**request: Any) -> list[RunPlan]:
    """The same for runs that train to the quality of a workload of their own."""
    overrides = {"measure.until": "quality", **request.pop("overrides", {})}
    return plans(workload=str(QUALITY_WORKLOAD), data="/data/pictures", overrides=overrides, **request)


def record_of(run: Run, state: str = "valid") -> Record:
    assert run.record is not None, run.detail
    assert run.state == state, run.detail
    return run.record


def constant(milliseconds: Sequence[float], other: float = 0.0) -> StepTimes:
    times = [round(value * MS) for value in milliseconds]
    return lambda rank, step: (times, round(other * MS))


def write_run(out: Path, plan: RunPlan, times: StepTimes, story: Story | None = None) -> RunFolder:
    story = story or Story()
    out.mkdir(parents=True, exist_ok=True)
    folder = create(out, plan)
    ranks = [_write_rank(folder, plan, times, story, rank) for rank in range(plan.layout.ranks)]
    content: dict[str, Any] = {
        "run_id": plan.run_id,
        "configuration": plan.configuration_digest(),
        "state": story.state,
        "started": _utc(story.finished - timedelta(minutes=1)),
        "finished": _utc(story.finished),
        "clock": "monotonic" if story.launch is None else "cuda-events",
        "phases": plan.measure.phases,
        "num_parameters": 23_528_522,
        "gradient_bytes": 94_114_088,
        "ranks": ranks,
        "checks": list(story.checks),
        "settings": list(story.settings),
        "warnings": list(story.warnings),
        "data": dict(story.data),
        "environment": {**story.environment, **({"variable.SLURM_JOB_ID": story.job} if story.job else {})},
        "environment_differences": list(story.environment_differences),
        "steps": _num_steps(plan, story),
        "exchange": story.exchange,
        "inert": list(story.inert),
    }
    if story.training is not None:
        content["quality"] = _quality(plan, times, story.training)
    content |= story.record
    record = Record.model_validate(content)
    write_json(folder.record, record.model_dump(mode="json"))
    return folder


def _write_rank(folder: RunFolder, plan: RunPlan, times: StepTimes, story: Story, rank: int) -> dict[str, Any]:
    batch = plan.workload.train.batch_per_rank
    now_ns = story.begin_ns(rank)
    measured_ns = samples = 0
    header = {"rank": rank, "clock": "monotonic", "device": "cpu", "run_id": plan.run_id}
    launch = story.launch
    with StepWriter(file_of(folder.steps(rank)), header, launches=launch is not None) as writer:
        for step in range(_num_steps(plan, story)):
            phases, other = times(rank, step)
            now_ns += story.pause_ns(rank, step)
            assert len(phases) == len(PHASES)
            warmup = step < plan.measure.warmup_steps
            step_ns = sum(phases) + other
            bounds = () if launch is None else launch(rank, step)
            writer.append((step, int(warmup), now_ns, step_ns, *phases, batch, 2.0 - 0.01 * step, *bounds))
            now_ns += step_ns
            if not warmup:
                measured_ns += step_ns
                samples += batch
    write_status(folder, status(rank, story.host(rank), "done"))
    return {
        "rank": rank,
        "node_rank": rank // plan.layout.ranks_per_node,
        "host": story.host(rank),
        "device": story.device,
        "gpu": _gpu(rank, plan, story),
        "numa_nodes": list(story.numa_nodes),
        "cores": list(story.cores(rank)),
        "threads": story.threads,
        "pinned": story.pinned,
        "samples": samples,
        "measured_s": measured_ns / 1e9,
        "first_loss": 2.0,
        "last_loss": story.last_loss,
        "losses_finite": True,
        "initial_parameters_sha256": "0" * 64,
        "final_parameters_sha256": "1" * 64,
        "peak_memory_bytes": 500 * 1024**2,
        "startup_s": 3.5,
        "bad_sample_count": story.bad_sample_count,
        **story.of_rank(rank),
    }


def _gpu(rank: int, plan: RunPlan, story: Story) -> dict[str, Any] | None:
    """GPU N for device cuda:N on the first rank of a node, and the following ones for the others."""
    number = re.match(r"cuda:(\d+)", story.device)
    if number is None:
        return None
    uuid = f"GPU-{int(number[1]) + rank % plan.layout.ranks_per_node}"
    return {"uuid": uuid, "visible": plan.layout.ranks_per_node, **story.gpu}


def _num_steps(plan: RunPlan, story: Story) -> int:
    if story.training is None:
        return plan.measure.warmup_steps + plan.measure.measured_steps
    return len(story.training.values) * story.training.every // plan.global_batch


def _quality(plan: RunPlan, times: StepTimes, training: Training) -> dict[str, Any]:
    wanted = plan.workload.quality
    assert training.every % plan.global_batch == 0
    better = training.metric != "mae"
    per_evaluation = training.every // plan.global_batch
    evaluations: list[dict[str, Any]] = []
    hit: dict[str, Any] | None = None
    train_s = 0.0
    for number, value in enumerate(training.values, start=1):
        for step in range((number - 1) * per_evaluation, number * per_evaluation):
            phases, other = times(0, step)
            train_s += (sum(phases) + other) / 1e9
        samples = number * training.every
        evaluations.append(
            {
                "step": number * per_evaluation,
                "epoch": samples / training.train_samples,
                "samples": samples,
                "train_s": train_s,
                "wall_s": train_s + number * (training.eval_s + training.wait_s),
                "value": value,
                "loss": 1.0 / number,
                "eval_s": training.eval_s,
                "eval_samples": training.eval_samples,
            }
        )
        met = value is not None and (value >= wanted.target if better else value <= wanted.target)
        hit = hit or (evaluations[-1] if met else None)
    return {
        "metric": training.metric,
        "higher_is_better": better,
        "target": wanted.target,
        "reached": hit is not None,
        "predictor": "the most frequent class",
        "predictor_value": training.predictor_value,
        "evaluations": evaluations,
        "train_samples": training.train_samples,
        "time_to_quality_s": hit["wall_s"] if hit else None,
        "samples_to_quality": hit["samples"] if hit else None,
        "epochs_to_quality": hit["epoch"] if hit else None,
    }


def status(rank: int, host: str, stage: str, reason: str = "", **more: object) -> RankStatus:
    """The last words of a rank; `more` are further keys."""
    return RankStatus.model_validate(
        {
            "rank": rank,
            "host": host,
            "pid": 100 + rank,
            "stage": stage,
            "step": 7,
            "updated": _utc(NOW),
            "reason": reason,
            "exit_code": 3 if stage == "failed" else None,
            **more,
        }
    )


def write_unfinished(
    out: Path, plan: RunPlan, stage: str = "measuring", reason: str = "", host: str = "n0"
) -> RunFolder:
    """A run without a record: killed (`measuring`) or failed (`failed`, with a reason)."""
    out.mkdir(parents=True, exist_ok=True)
    folder = create(out, plan)
    for rank in range(plan.layout.ranks):
        write_status(folder, status(rank, host, stage, reason))
    return folder


def write_scaling(out: Path, base_ms: float = 100.0, exchange_ms: float = 25.0, **request: Any) -> list[RunPlan]:
    """A weak series whose step is `base_ms` at one rank and `exchange_ms` longer at every other count.

    Repeat k of every point is slowed by the same factor 1 + k/1000, as by a drifting machine.
    """
    made = plans(**request)
    for plan in made:
        drift = 1 + plan.series.repeat / 1000
        exchange = exchange_ms if plan.layout.ranks > 1 else 0.0
        share = base_ms / 100.0
        phases = [share * part for part in (5.0, 0.0, 30.0, 50.0, 0.0, 10.0)]
        phases[PHASES.index("exchange")] = exchange
        write_run(
            out,
            plan,
            constant([part * drift for part in phases], other=5.0 * share * drift),
            Story(finished=NOW + timedelta(minutes=plan.series.position)),
        )
    return made


def exchange_result(
    plan: RunPlan, *, gradients: Sequence[tuple[int, float]], alpha_s: float, beta_s_per_byte: float, **more: Any
) -> dict[str, Any]:
    """The exchange of a run whose every gradient travels alone, one after the other, each as soon as it may.

    Args:
        plan: the run.
        gradients: bytes and second of readiness of each, in order.
        alpha_s: seconds of an empty message.
        beta_s_per_byte: seconds a byte.
        more: further keys of the result, as they are.
    """
    messages: list[dict[str, Any]] = []
    free = 0.0
    for num_bytes, ready in gradients:
        start = max(free, ready)
        took = alpha_s + num_bytes * beta_s_per_byte
        free = start + took
        messages.append(
            {
                "num_bytes": num_bytes,
                "num_tensors": 1,
                "method": "flat",
                "ready_s": ready,
                "start_s": start,
                "exchange_s": took,
            }
        )
    busy = sum(message["exchange_s"] for message in messages)
    backward = gradients[-1][1]
    exposed = sum(max(0.0, m["start_s"] + m["exchange_s"] - max(m["start_s"], backward)) for m in messages)
    return {
        "carrier": "gloo",
        "by": "dlbench",
        "exchange": plan.sync.exchange,
        "fusion": "own:none",
        "wire": plan.sync.wire,
        "group_size": plan.group_size,
        "num_groups": plan.layout.ranks // plan.group_size,
        "messages": messages,
        "bytes_inside": 1e6,
        "bytes_across": 0.0,
        "communication_s": busy,
        "exposed_s": exposed,
        "hidden_s": busy - exposed,
        "backward_s": backward,
        "window_steps": 12,
        "evidence": "counted by the exchange itself",
        "gradients": [
            {"name": f"layer{i}.weight", "num_bytes": num_bytes, "ready_s": ready}
            for i, (num_bytes, ready) in enumerate(gradients)
        ],
        **more,
    }


def autotune_result(**changes: Any) -> dict[str, Any]:
    """What Horovod's autotuner says after a search that came to its end."""
    return {
        "evaluations": 21,
        "planned_steps": 1224,
        "finished": True,
        "settled_step": 1230,
        "cost_s": 60.0,
        "fusion_threshold_bytes": 16 * 1024**2,
        "cycle_time_ms": 2.5,
        "score": 400.0,
        **changes,
    }


def write_launch_bound(out: Path, waits_ms: Callable[[RunPlan], Sequence[float]], **request: Any) -> list[RunPlan]:
    """A weak series on GPUs whose devices wait for their host in every measured step; the last warm-up shows it.

    Args:
        out: the folder of runs.
        waits_ms: of one run, by forward, backward and optimizer.
        request: the series.
    """
    made = plans(**request)
    for plan in made:
        drift, warmup, waits = 1 + plan.series.repeat / 1000, plan.measure.warmup_steps, waits_ms(plan)

        def times(
            rank: int, step: int, drift: float = drift, warmup: int = warmup, waits: Sequence[float] = waits
        ) -> tuple[list[int], int]:
            late = dict(zip(LAUNCHED, waits, strict=True)) if step >= warmup else {}
            return [round((ms + late.get(name, 0.0)) * drift * MS) for name, ms in LAUNCH_MS.items()], 0

        def bounds(
            rank: int, step: int, drift: float = drift, warmup: int = warmup, waits: Sequence[float] = waits
        ) -> list[int]:
            # All of the phase, as where the host is just behind the device: the marks alone say no more.
            kernels = (LAUNCH_MS[name] for name in LAUNCHED)
            return [
                round((ms + late) * drift * MS) * (step >= warmup) * (late > 0)
                for ms, late in zip(kernels, waits, strict=True)
            ]

        story = Story(
            device="cuda:0 (NVIDIA H200)", launch=bounds, finished=NOW + timedelta(minutes=plan.series.position)
        )
        write_run(out, plan, times, story)
    return made


def write_sweep(
    out: Path,
    speed: Callable[[RunPlan], float],
    *,
    drift: float = 0.02,
    story: Callable[[RunPlan], Story] = lambda plan: Story(),
    skip: Callable[[RunPlan], bool] = lambda plan: False,
    **request: Any,
) -> list[RunPlan]:
    """A swept series whose runs are `speed` times as fast as 100 ms per step.

    Args:
        out: the folder of runs.
        speed: of one run.
        drift: repeat k of every setting is slowed by the same factor 1 + k x this, as by a drifting machine.
        story: of one run.
        skip: runs that are never written.
        request: the series; its `sweep` is by keys.
    """
    made = plans(**{"points": (2,), **request})
    for plan in made:
        if skip(plan):
            continue
        factor = (1 + drift * plan.series.repeat) / speed(plan)
        phases = [part * factor for part in (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)]
        write_run(out, plan, constant(phases), story(plan))
    return made


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file behind the writers' back."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def _utc(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def differences(one: Run, other: Run) -> list[str]:
    """Why two runs must not be compared: each differing key with both values; empty if they may."""
    return [
        f"{key.title}: {key.value(one) or 'none'} against {key.value(other) or 'none'}"
        for key in KEYS
        if key.comparable and key.value(one) != key.value(other)
    ]
