"""Ways to share a training out over ranks, side by side: equal work, bytes, and time where it says something.

On a CPU nothing of what ranks gather for FSDP and tensor parallelism is hidden: their speed is no figure here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import shared_work
from benchmarks.figures import Figure
from benchmarks.shaped_cluster import all_ended, lacking, shaped_cluster, submit, wait_for
from dlbench.analysis.table import tabulate
from dlbench.projection.strategies.layers import as_counted, counted
from dlbench.records.scan import Run, scan
from dlbench.units import format_bytes
from dlbench.views.sweep.numbers import sweeps
from tests.support.forked_runs import mean_losses, run_forked

ALIKE = ("bert", "--preset", "ci", "--ranks", "2")
SHORT = ("--set", "measure.warmup_steps=3")
SAME_MATHEMATICS: dict[str, tuple[str, ...]] = {
    "ddp": ("--engine", "ddp"),
    "zero-1": ("--engine", "ddp", "--set", "engine.ddp.shard_optimizer=true"),
    "fsdp": ("--engine", "fsdp"),
    "fsdp, gradients": ("--engine", "fsdp", "--set", "engine.fsdp.shard=gradients"),
    "tensor": ("--engine", "fsdp", "--set", "engine.fsdp.tensor_ranks=2"),
}
"""What `dlbench run` is asked for; BERT has LAMB and clips."""
EQUAL_STEPS = 5
COUNTED_STEPS = (5, 25)
UPDATE_REPEATS, UPDATE_STEPS = 5, 10
LARGER = {"model.hidden_size": 512, "model.intermediate_size": 2048, "model.num_heads": 8, "train.batch_per_rank": 2}
"""Of BERT `ci`, so that the update is a part of the step that can be timed."""

LINK = "100mbit"
EVERY = (4, 16)
"""Updates between two averages; DDP beside them."""
LOCAL_REPEATS = 2
UPDATES, LOOK_EVERY, GLOBAL_BATCH = 96, 12, 16


def sharded_memory() -> Iterator[Figure]:
    """Memory of a rank under FSDP over that under DDP: as the projection has it from the DDP run, and measured."""
    for name in ("bert", "resnet50"):
        found: dict[str, Run] = {}
        with tempfile.TemporaryDirectory() as out:
            for engine in ("ddp", "fsdp"):
                words = ("--preset", "ci", "--ranks", "2", "--repeats", "1", "--engine", engine, "--out", out)
                settings = ("--set", "measure.warmup_steps=6", "--set", "measure.measured_steps=1")
                (found[engine],) = run_forked(name, *words, *settings)
        plan, record = found["ddp"].plan, found["ddp"].record
        assert record is not None
        train, layers = plan.workload.train, plan.workload.model.layer_table(plan.workload.data)
        seen = counted(layers, plan, record)
        assert seen is not None
        alike = {"slots": train.optimizer.slots, "batch": train.batch_per_rank, "ranks": 2}
        predicted = {one: as_counted(layers, seen, one, **alike) for one in ("data", "fsdp")}
        measured = {engine: _most_held(run) for engine, run in found.items()}
        ratio = predicted["fsdp"] / predicted["data"]
        yield Figure(
            name=f"FSDP over DDP, memory of a rank, predicted over measured; {name} ci, 2 ranks",
            value=ratio / (measured["fsdp"] / measured["ddp"]),
            unit="times",
            goal="within 10 %",
            met=abs(ratio * measured["ddp"] / measured["fsdp"] - 1) <= 0.1,
            reason=f"measured {' over '.join(format_bytes(measured[one]) for one in ('fsdp', 'ddp'))}, "
            f"predicted {ratio:.3f}",
        )


def _most_held(run: Run) -> int:
    assert run.record is not None
    return max(rank.held.peak for rank in run.record.ranks if rank.held is not None)


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from equal_work()
    yield from counted_bytes()
    yield from shared_work.spatial()
    yield from sharded_update()
    yield from local_sgd()
    yield from shared_work.pipeline()
    yield from shared_work.asynchronous()


def _trained(name: str, out: Path, steps: int, *more: str) -> Run:
    sets = ("--set", f"measure.measured_steps={steps}", "--repeats", "1")
    (run,) = run_forked(*ALIKE, *SHORT, *sets, *SAME_MATHEMATICS[name], *more, "--out", out)
    return run


def equal_work() -> Iterator[Figure]:
    """Losses of each step and parameters after the last one, of every strategy of DDP's mathematics, against DDP's."""
    from safetensors.torch import load_file

    total = EQUAL_STEPS + 3
    words = ("--set", "train.gradient_accumulation=2", "--set", f"checkpoint.every_steps={total}")
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _trained(name, Path(folder) / "runs", EQUAL_STEPS, *words) for name in SAME_MATHEMATICS}
        losses = {name: mean_losses(run) for name, run in runs.items()}
        ends = {name: load_file(run.folder.checkpoint(total)) for name, run in runs.items()}
    for name in list(SAME_MATHEMATICS)[1:]:
        apart = max(abs(loss / other - 1) for loss, other in zip(losses[name], losses["ddp"], strict=True))
        tensors = [key for key in ends["ddp"] if key.startswith("model/") and ends["ddp"][key].is_floating_point()]
        moved = max(float((ends[name][key] - ends["ddp"][key]).abs().max()) for key in tensors)
        yield Figure(
            name=f"largest difference of a step's loss to DDP's, {name}",
            value=apart,
            unit="relative",
            n=total,
            goal="at most 1e-5",
            met=apart <= 1e-5,
            reason=f"BERT ci, LAMB, clipping, accumulation 2, 2 ranks; parameters differ by at most {moved:.1e}",
        )


def counted_bytes() -> Iterator[Figure]:
    """What the loopback interface sent for a step, over what the record counts; in a network namespace of its own."""
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -m benchmarks.strategies', sys.executable]
    done = subprocess.run(alone, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else dict.fromkeys(SAME_MATHEMATICS)
    for name, seen in found.items():
        ratio = seen["sent"] / seen["counted"] if seen else None
        yield Figure(
            name=f"bytes that a rank sends in a step, of the network over counted, {name}",
            value=ratio,
            unit="ratio",
            n=COUNTED_STEPS[1] - COUNTED_STEPS[0],
            goal="1 within 0.02",
            met=None if ratio is None else abs(ratio - 1) <= 0.02,
            reason=f"{seen['counted'] / 1e6:.3f} MB counted" if seen else done.stderr[-300:],
        )


def _bytes_of_each() -> dict[str, dict[str, float]]:
    """Bytes per rank and step, by strategy; two lengths of run tell those of steps from those of the beginning."""
    found = {}
    for name in SAME_MATHEMATICS:
        sent = []
        with tempfile.TemporaryDirectory() as folder:
            for steps in COUNTED_STEPS:
                before = _loopback_bytes()
                run = _trained(name, Path(folder) / "runs", steps)
                sent.append(_loopback_bytes() - before)
        assert run.record is not None
        assert run.record.exchange is not None
        per_step = (sent[1] - sent[0]) / (COUNTED_STEPS[1] - COUNTED_STEPS[0])
        found[name] = {"sent": per_step / 2, "counted": run.record.exchange.sent_bytes or 0.0}
    return found


def _loopback_bytes() -> int:
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def sharded_update() -> Iterator[Figure]:
    """ZeRO-1: the update replicated over sharded, by optimizer, in pairs of interleaved repeats."""
    axes = ("train.optimizer.name=sgd,adamw,lars,lamb", "engine.ddp.shard_optimizer=false,true")
    words = [word for axis in axes for word in ("--sweep", axis)]
    # A warm-up that has a step to spare for memory by kind.
    settings = {**LARGER, "measure.warmup_steps": 9, "measure.measured_steps": UPDATE_STEPS}
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += ["--repeats", str(UPDATE_REPEATS), "--engine", "ddp"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs"
        run_forked(*ALIKE, *words, "--out", out)
        table = tabulate(scan(out))
        (cell,) = sweeps(table)[0].cells
        updates = {(one.optimizer, one.state): one for one in cell.updates}
    took: dict[tuple[str, bool], dict[int, float]] = {}
    for run in table.runs.values():
        key = run.plan.workload.train.optimizer.name, run.plan.engine.ddp.shard_optimizer
        took.setdefault(key, {})[run.plan.series.repeat] = table.parts[run.plan.run_id]["optimizer"]
    for name in dict.fromkeys(name for name, _ in took):
        plain, sharded = took[name, False], took[name, True]
        whole, own = updates[name, "replicated"], updates[name, "sharded (ZeRO-1)"]
        waited = own.waiting.value if own.waiting is not None else 0.0
        yield Figure.of(
            [plain[repeat] / sharded[repeat] for repeat in plain if repeat in sharded],
            name=f"update of a step with {name}, replicated over sharded on 2 ranks",
            unit="times",
            goal="measured",
            reason=f"{1e3 * whole.update.value:.1f} ms, {100 * whole.share.value:.0f} % of the step, against "
            f"{1e3 * own.update.value:.1f} ms, {100 * own.share.value:.0f} %, of it {1e3 * waited:.1f} ms waiting for "
            f"parameters; state of the largest rank {whole.state_bytes} against {own.state_bytes} bytes, largest over "
            f"mean {own.imbalance or 0.0:.3f}",
        )


def local_sgd() -> Iterator[Figure]:
    """Time to the same loss over a slow link: DDP against averages, interleaved.

    The loss is that of evaluations, which see the mean of all ranks' parameters; the time is that in training steps.
    """
    goal = "less time to the loss that all reach than DDP"
    name = f"time to the same loss, DDP over averages; bert ci, 2 x 1 ranks, links of {LINK}"
    if reason := lacking():
        yield Figure(name=name, value=None, unit="", goal=goal, reason=reason)
        return
    with shaped_cluster(nodes=2, rate=LINK) as (box, system):
        out, data = system.parent / "runs", system.parent / "text"
        command = [sys.executable, "-m", "dlbench", "data", "make", "text", str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        submit(box, *_request(data, system), "--out", str(out))
        count = LOCAL_REPEATS * (1 + len(EVERY))
        wait_for(all_ended(out, count), 120.0 * count)
        runs = scan(out).runs
    if bad := [run.detail for run in runs if run.state != "valid"]:
        yield Figure(name=name, value=None, unit="", goal=goal, reason=bad[0])
        return
    sides = {every: [run for run in runs if run.plan.sync.average_every == every] for every in (None, *EVERY)}
    # The loss that each has come to, the worst of them: every run reaches it.
    target = max(_curve(run)[-1][1] for run in runs)
    for every in EVERY:
        pairs = zip(sides[None], sides[every], strict=True)
        ratios = sorted(_time_to(ddp, target) / _time_to(own, target) for ddp, own in pairs)
        said = "; ".join(_words(run, target) for run in (*sides[None], *sides[every]))
        yield Figure(
            name=name.replace("averages", f"averages every {every} updates"),
            value=sum(ratios) / len(ratios),
            low=ratios[0],
            high=ratios[-1],
            n=len(ratios),
            unit="times (range over pairs of repeats)",
            goal=goal,
            met=ratios[0] > 1,
            reason=f"to loss {target:.3f}: {said}",
        )


def _request(data: Path, system: Path) -> Iterator[str]:
    yield from ("submit", "bert", "--preset", "ci", "--system", str(system), "--nodes", "2", "--ranks-per-node", "1")
    yield from ("--engine", "ddp", "--data", str(data), "--to-accuracy", "--repeats", str(LOCAL_REPEATS))
    yield from ("--sweep", f"sync.average_every=null,{','.join(map(str, EVERY))}")
    settings = {
        "layout.cores_per_rank": 1,
        # Parameters alone, so that bytes are 1 / H of those of gradients.
        "sync.average_momentum": "false",
        "train.schedule.warmup_steps": 10,
        "quality.target": 1.0,
        "quality.max_samples": UPDATES * GLOBAL_BATCH,
        "quality.evaluate_every_samples": LOOK_EVERY * GLOBAL_BATCH,
        "quality.evaluate_samples": 128,
    }
    yield from (word for key, value in settings.items() for word in ("--set", f"{key}={value}"))


def _words(run: Run, target: float) -> str:
    assert run.record is not None
    assert run.record.exchange is not None
    every, sent = run.plan.sync.average_every, run.record.exchange.bytes_across or 0.0
    per_sample = sent / run.plan.workload.train.batch_per_rank / 1e3
    return (
        f"{'DDP' if every is None else f'every {every}'} {_time_to(run, target):.1f} s, {per_sample:.1f} kB a sample, "
        f"loss {_curve(run)[-1][1]:.3f} after {UPDATES * GLOBAL_BATCH} samples"
    )


def _curve(run: Run) -> list[tuple[float, float]]:
    """Seconds in training steps and loss, at each evaluation."""
    assert run.record is not None
    assert run.record.quality is not None
    return [(each.train_s, each.loss or 0.0) for each in run.record.quality.evaluations]


def _time_to(run: Run, target: float) -> float:
    """Seconds in training steps until the loss is that low, linear between evaluations."""
    curve = _curve(run)
    at = next(number for number, (_, loss) in enumerate(curve) if loss <= target)
    (begin, high), (end, low) = curve[max(at - 1, 0)], curve[at]
    return end if at == 0 else begin + (high - target) / (high - low) * (end - begin)


if __name__ == "__main__":
    print(json.dumps(_bytes_of_each()))
