"""Figures of projection: held-out scales of paced ranks on a shaped box, and what a projection takes."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.shaped_cluster import lacking, shaped_cluster, submit, wait_for
from dlbench.perfmodels.predictions import features
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.projected import QUANTILES
from dlbench.records.comm import scan_comm
from dlbench.records.scan import scan
from dlbench.specs.comm import Level, NetworkModel, Piece
from tests.slurm_box.box import Box
from tests.support.run_factory import Story, constant, exchange_result, plans, write_run

RANKS_PER_NODE = 2
REPEATS = 3  # What a projection wants at its anchor.
ANCHORS, EDGES = "2,4", "1,8"  # Nodes of the points that are anchors, and of the smallest and the largest point.
ASKED = ((4, 8), (8, 16), (4, 16))  # Projected from points of at most so many ranks, to so many.
BOUND_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; it is asked once for each pair of `ASKED`."""

    name: str
    layers: tuple[tuple[int, float, float], ...]  # KiB, forward and backward seconds.
    engine: str = "ddp"
    fusion: str = "auto"
    rate: str = "200mbit"
    jitter: float = 0.01  # Of ranks, and of steps.


EVEN = tuple((512, 0.015, 0.03) for _ in range(8))  # 4 MiB, 0.36 s
LATE = ((2048, 0.05, 0.1), (512, 0.05, 0.1), (64, 0.05, 0.1))  # most bytes are ready last
EARLY = tuple(reversed(LATE))
MANY = tuple((96, 0.004, 0.008) for _ in range(32))  # 3 MiB of small gradients

CASES = (
    Case(name="DDP, even layers", layers=EVEN),
    Case(name="DDP, bytes ready last, 100 Mbit/s", layers=LATE, rate="100mbit"),
    Case(name="DDP, bytes ready first, 1 MiB", layers=EARLY, fusion="1MiB"),
    Case(name="Horovod, even layers", layers=EVEN, engine="horovod"),
    Case(name="own, one message", layers=EVEN, fusion="own:single"),
    Case(name="own, small messages", layers=MANY, fusion="own:none"),
    Case(name="DDP, jitter, 100 Mbit/s", layers=MANY, rate="100mbit", jitter=0.05),
)


def figures() -> Iterator[Figure]:
    """All figures of the area but those of `truth.projection`."""
    yield from held_out()
    yield from times()


def few() -> Iterator[Figure]:
    """The held-out figures of two configurations: some minutes."""
    yield from held_out(CASES[:1] + CASES[3:4])


@dataclass(frozen=True)
class Answer:
    """One target: projected and measured."""

    case: str
    largest: int
    ranks: int
    measured_s: float
    projected_s: float
    low_s: float  # Of the middle 80 %.
    high_s: float

    @property
    def error(self) -> float:
        return self.projected_s / self.measured_s - 1


GOALS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("mean error of the step", "<= 5 %", lambda value: value <= 5),
    ("worst error of the step", "<= 15 %", lambda value: value <= 15),
    ("80 % bands that hold", ">= 70 %", lambda value: value >= 70),
)


def held_out(cases: Sequence[Case] = CASES) -> Iterator[Figure]:
    """Paced ranks, 2 a node, on nodes with slow links; what was projected is then measured."""
    if reason := lacking():
        for name, goal, _ in GOALS:
            yield Figure(name=f"projection: {name}", value=None, unit="%", goal=goal, reason=reason)
        return
    answers: list[Answer] = []
    refused: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dlbench-projection-", dir="/tmp") as temporary:
        folder = Path(temporary)
        with shaped_cluster(nodes=8) as (box, system):
            networks = {}
            for rate in dict.fromkeys(case.rate for case in cases):
                box.shape(rate)
                networks[rate] = _network(box, system, folder / rate)
            for number, case in enumerate(cases):
                box.shape(case.rate)
                _train(box, system, case, folder / str(number))
        for number, case in enumerate(cases):
            for largest, ranks in ASKED:
                found = _asked(folder / str(number), networks[case.rate], case, largest, ranks)
                if isinstance(found, Answer):
                    answers.append(found)
                else:
                    refused.append(found)
    print(f"{'case':36} {'from':>5} {'to':>3} {'measured':>9} {'projected':>9} {'80 %':>15} {'error':>7}")
    for one in answers:
        print(
            f"{one.case:36} {one.largest:5} {one.ranks:3} {one.measured_s:7.3f} s {one.projected_s:7.3f} s "
            f"{one.low_s:7.3f}-{one.high_s:.3f} {one.error:+7.1%}"
        )
    for text in refused:
        print(text)
    errors = [abs(one.error) * 100 for one in answers]
    inside = [100.0 * (one.low_s <= one.measured_s <= one.high_s) for one in answers]
    values = (statistics.mean(errors), max(errors), statistics.mean(inside)) if answers else (None, None, None)
    for (name, goal, is_met), value in zip(GOALS, values, strict=True):
        yield Figure(
            name=f"projection: {name}",
            value=value,
            unit="%",
            n=len(answers),
            goal=goal,
            met=value is not None and is_met(value),
            reason=f"{len(answers)} of {len(cases) * len(ASKED)} answered",
        )


def _network(box: Box, system: Path, folder: Path) -> Path:
    """The network's costs, fitted to the collective benchmark on 1, 2 and 4 nodes."""
    submit(
        box,
        *("comm", "submit", "--system", str(system), "--out", str(folder), "--backends", "gloo"),
        *("--algorithms", "ring,recursive-halving-doubling", "--sizes", "64KiB,512KiB,4MiB", "--iterations", "3"),
        *("--warmup", "1", "--nodes", "1,2,4", "--ranks-per-node", str(RANKS_PER_NODE), "--repeats", "2"),
    )
    wait_for(lambda: all(run.state != "incomplete" for run in scan_comm(folder).runs), BOUND_S)
    network = folder.with_suffix(".network.json")
    submit(box, "comm", "fit", str(folder), "-o", str(network))
    return network


def _train(box: Box, system: Path, case: Case, folder: Path) -> None:
    layers = ", ".join(f"{{bytes: {kib}KiB, forward_s: {f}, backward_s: {b}}}" for kib, f, b in case.layers)
    workload = folder.with_suffix(".yaml")
    workload.write_text(
        "format: dlbench.workload\nversion: 1\nname: held-out\ndata: {format: none}\n"
        f"model: {{family: paced, layers: [{layers}], rank_jitter: {case.jitter}, step_jitter: {case.jitter}}}\n"
        "train: {batch_per_rank: 1, optimizer: {name: sgd, learning_rate: 0.01}}\n"
        "measure: {warmup_steps: 5, measured_steps: 7}\npresets: {plain: {}}\n"
    )
    settings = [f"sync.fusion={case.fusion}", "layout.cores_per_rank=1"]
    if case.engine == "horovod":
        # Ranks speak to each other in each cycle, whether or not there is something to send: 16 of them a thousand
        # times a second (the usual 1 ms) are more than two cores can bear.
        settings.append("engine.horovod.cycle_time_ms=20.0")
    for nodes, repeats in ((EDGES, 1), (ANCHORS, REPEATS)):
        submit(
            box,
            *("submit", str(workload), "--system", str(system), "--engine", case.engine, "--out", str(folder)),
            *("--nodes", nodes, "--ranks-per-node", str(RANKS_PER_NODE), "--repeats", str(repeats)),
            *(word for setting in settings for word in ("--set", setting)),
        )
        wait_for(lambda: all(run.state != "incomplete" for run in scan(folder).runs), BOUND_S)
    for run in scan(folder).runs:
        if run.state != "valid":
            raise RuntimeError(f"{case.name}: {run.plan.run_id} is {run.state}: {run.detail}")


def _asked(folder: Path, network: Path, case: Case, largest: int, ranks: int) -> Answer | str:
    """What `dlbench project` says of runs of at most `largest` ranks, and what was measured."""
    known, measured = folder.with_name(f"{folder.name}-{largest}"), []
    for run in scan(folder).runs:
        assert run.record is not None
        if run.plan.layout.ranks == ranks:
            steps = run.plan.measure.measured_steps
            measured.append(max(rank.measured_s for rank in run.record.ranks) / steps)
        if run.plan.layout.ranks <= largest:
            shutil.copytree(run.folder.path, known / run.folder.path.name, dirs_exist_ok=True)
    command = ("project", "runs", str(known), "--to", str(ranks), "--network", str(network), "--format", "json")
    done = subprocess.run([sys.executable, "-m", "dlbench", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (
            f"{case.name}, {largest} to {ranks}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
        )
    (target,) = json.loads(done.stdout)["groups"][0]["projection"]["targets"]
    low, median, high = (target["step"]["quantiles"][QUANTILES.index(one)] for one in (0.1, 0.5, 0.9))
    return Answer(case.name, largest, ranks, statistics.mean(measured), median, low, high)


def times() -> Iterator[Figure]:
    """A projection to 4,096 ranks from 20 runs of 64 ranks, and the price of a message there."""
    with tempfile.TemporaryDirectory(prefix="dlbench-projection-") as temporary:
        runs, network = Path(temporary) / "runs", Path(temporary) / "made.network.json"
        network.write_text(NETWORK.model_dump_json())
        asked = {"system": "box", "points_are": "nodes", "points": (4, 8), "ranks_per_node": 8, "repeats": 20}
        for plan in plans(**asked, launcher="srun-gloo", engine="ddp"):
            gradients = [(2**18, 0.001 * place) for place in range(60)]
            result = exchange_result(plan, gradients=gradients, alpha_s=1.6e-3, beta_s_per_byte=0.0)
            story = Story(exchange=result, host=lambda rank: f"n{rank // 8}", cores=lambda rank: (rank % 8,))
            write_run(runs, plan, constant((1.0, 0.0, 30.0, 60.0, 36.0 + plan.layout.nodes / 4, 5.0)), story)
        command = ("project", "runs", str(runs), "--to", "4096", "--network", str(network), "--format", "json")
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "dlbench", *command], capture_output=True, text=True, check=False)
        took = time.monotonic() - begin
    reason = "" if done.returncode == 0 else f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    yield Figure(
        name="4,096 ranks from 40 runs of 32 and 64 ranks, the command",
        value=took if not reason else None,
        unit="s",
        goal="< 10 s",
        met=took < 10 and not reason,
        reason=reason,
    )
    begin = time.monotonic()
    for size in SIZES:  # each of its own, so that nothing is remembered
        features("allreduce", "ring", size, Layout(ranks=4096, group_size=8), NETWORK)
    each = 1000 * (time.monotonic() - begin) / len(SIZES)
    yield Figure(name="a ring of 4,096 ranks priced", value=each, unit="ms", n=len(SIZES), goal="some ms")


SIZES = tuple(2**20 * size for size in (1, 2, 4, 8, 16, 32, 64))
NETWORK = NetworkModel(
    system="box",
    transport="torch-gloo",
    inside=Level(pieces=(Piece(alpha_s=1e-6, beta_s_per_byte=1e-10),)),
    across=Level(pieces=(Piece(alpha_s=1.2e-5, beta_s_per_byte=1e-10),)),
)
