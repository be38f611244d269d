"""Training out of core: a plan against every method at one memory budget, predictions against measurements.

All methods train one network in one process, in turns, so that a machine that is loaded slows all of them; each ratio
is of neighbours. The budget is half of what training holds in core or, where no plan keeps to that, the least that one
keeps to and 2 % more: in CosmoFlow the first layer and the gradients beside it alone need more than half, less so where
its layers hold about equally much.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, median_interval

if TYPE_CHECKING:
    from benchmarks.memory.workshop import Workshop

ROUNDS, STEPS, WARM = 5, 3, 2
HAND_PAIRS, HAND_LEAST, HAND_S = 24, 6, 100.0
"""At most and at least so many rounds over methods by dlbench and by hand, and no more once they took so long."""
HAND_STEPS = 2  # Of a round, behind one that makes what a method needs; tried: page faults end with that one.
FITTING_PAIRS, HOST_PAIRS = 10, 10
PREDICTED = 0.15
OVERHEAD = 1.01
SAME_PEAK = 1.02
ACCOUNT = 0.05
NO_GPU = Figure(
    name="memory on a GPU", value=None, unit="", goal="measured where one is lent", reason="GPU: not measured"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network that is trained beyond its memory; sizes at which activations are most of it on two cores."""

    title: str
    workload: str
    batch: int
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Of the network, where a setting cannot say it."""
    blocks: tuple[str, ...] = ()
    """With which a practitioner's blocks begin, for checkpoints; none: every unit."""


_STAGES = ("features.0", "features.3", "features.6", "features.9")
CASES = {
    "resnet50": Case(
        title="ResNet-50", workload="resnet50", batch=32, settings={"model.base_width": 16, "model.image_size": 96}
    ),
    "even": Case(
        title="CosmoFlow of even layers",
        workload="cosmoflow",
        batch=32,
        model={"conv_channels": (4, 32, 256, 512)},
        blocks=(*_STAGES, "regressor.1"),
    ),
    "cosmoflow": Case(
        title="CosmoFlow", workload="cosmoflow", batch=32, blocks=(*_STAGES, "features.12", "regressor.1")
    ),
}


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield from accounts()
    yield from methods()
    for workload in HANDS:
        yield from hand(workload)
    yield from largest()
    yield from fitting()
    yield from host()
    yield NO_GPU


def _figure(
    name: str, values: Sequence[float], unit: str, goal: str, met: bool | None = None, note: str = ""
) -> Figure:
    median, low, high = median_interval(values)
    return Figure(
        name=name, value=median, low=low, high=high, n=len(values), unit=unit, goal=goal, met=met, reason=note
    )


# A plan beside the methods that treat all blocks alike


def methods() -> Iterator[Figure]:
    """Throughput at one budget, and how well it was predicted."""
    best: list[float] = []
    errors: list[float] = []
    for key in CASES:
        found = _in_process("compare", key)
        yield from _compared(CASES[key], found, best)
        errors += found["errors"].values()
        for method, error in found["errors"].items():
            print(f"  {CASES[key].title}, {method}: predicted over measured pass {1 + error:.3f}")
    if best:
        mean = math.exp(statistics.fmean(map(math.log, best)))
        name = "plan over the best method that keeps within the budget: geometric mean"
        yield Figure(name=name, value=mean, n=len(best), unit="ratio of throughputs", goal="measured")
    value, low, high = median_interval([abs(error) for error in errors])
    yield Figure(
        name="predicted against measured pass: median absolute error over methods and workloads",
        value=value, low=low, high=high, n=len(errors), unit="share", goal=f"at most {PREDICTED:g}",
        met=value <= PREDICTED,
    )  # fmt: skip


def _compared(case: Case, found: dict[str, Any], best: list[float]) -> Iterator[Figure]:
    seconds, budget = found["seconds"], found["budget"]
    share = f"{budget / found['in_core']:.0%} of in core ({budget / 2**20:.0f} MiB)"
    for method, values in seconds.items():
        held = found["held"].get(method)
        note = "" if held is None else f"held {held / budget:.0%} of the budget"
        rates = [case.batch / one for one in values]
        yield _figure(f"{case.title}, {method}: samples per second", rates, "1/s", "measured", note=note)
    within = [method for method, held in found["held"].items() if held <= budget and method != "plan"]
    medians = {method: statistics.median(seconds[method]) for method in within}
    for method in found["held"]:
        if method == "plan":
            continue
        ratios = [other / own for other, own in zip(seconds[method], seconds["plan"], strict=True)]
        note = f"at {share}" + ("" if method in within else "; it does not keep within the budget")
        name = f"{case.title}: plan over {method}"
        yield _figure(name, ratios, "ratio of throughputs", "measured", note=note)
    name, goal = f"{case.title}: plan over the best method that keeps within {share}", "at least 1.0"
    if not within:
        yield Figure(name=name, value=None, unit="", goal=goal, reason="no other method keeps within it")
        return
    first = min(within, key=lambda method: medians[method])
    ratios = [other / own for other, own in zip(seconds[first], seconds["plan"], strict=True)]
    best.append(statistics.median(ratios))
    yield _figure(name, ratios, "ratio of throughputs", goal, best[-1] >= 1.0, f"the best is {first}")


def compare(key: str) -> dict[str, Any]:
    """Seconds of a step by every method, in turns; freed memory is kept as in runs out of core."""
    from benchmarks.memory.workshop import IN_CORE, METHODS, PLAN
    from dlbench.node.out_of_core.device_memory import keep_freed

    keep_freed()
    with _workshop(key) as shop:
        budget = max(shop.in_core_bytes // 2, math.ceil(1.02 * shop.smallest_bytes()))
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        passes: dict[str, list[float]] = {method: [] for method in METHODS}
        held: dict[str, int] = {}
        names = list(METHODS)
        for number in range(ROUNDS):
            for method in names[number % len(names) :] + names[: number % len(names)]:
                with shop.training_by(method, budget if method == PLAN else None) as memory:
                    for _ in range(WARM):
                        shop.step()
                    if memory is not None:
                        memory.begin_measuring()
                    took = shop.steps(STEPS, warm=0)
                    if memory is not None:
                        held[method] = int(memory.summary()["activation_peak_bytes"]) + shop.measured[1].fixed_bytes
                seconds[method].append(took.step)
                passes[method].append(took.passes)
        predicted = {
            method: shop.plan(method, budget if method == PLAN else None).plan.predicted.pass_s
            for method in METHODS
            if method != IN_CORE
        }
        predicted[IN_CORE] = shop.measured[1].useful_s
        errors = {method: predicted[method] / statistics.median(passes[method]) - 1 for method in METHODS}
        return {
            "seconds": seconds, "held": held, "budget": budget, "in_core": shop.in_core_bytes, "errors": errors,
        }  # fmt: skip


# The same plans by hand


HANDS = {"resnet50": ("ResNet-50", 16), "bert": ("BERT", 64), "cosmoflow": ("CosmoFlow", 16)}
"""Of preset `ci`: title and batch; a step of about a second on two slow cores at most."""


def hand(workload: str) -> Iterator[Figure]:
    """Every method over the same one by hand, and its predicted over its measured pass."""
    title, batch = HANDS[workload]
    found = _in_process("over_hand", workload, str(batch))["methods"]
    for method, one in found.items():
        what = f"{title} (ci, batch {batch}), {method}"
        if one["by_hand"]:
            ratios = [hands / own for hands, own in zip(one["by_hand"], one["own"], strict=True)]
            _, low, high = median_interval(ratios)
            live, hands = one["live"]
            met = False if high < 1.0 or live > SAME_PEAK * hands else True if low >= 1.0 else None
            note = f"{statistics.median(one['own']):.3g} s a step; {live / 2**20:.0f} MiB live, "
            note += f"by hand {hands / 2**20:.0f}; predicted {one['told'] / 2**20:.0f}, "
            note += f"resident {one['resident'] / 2**20:.0f} of it"
            goal = f"at least 1.0, with at most {SAME_PEAK:g} of its live bytes"
            yield _figure(f"{what}: over the same by hand", ratios, "ratio of throughputs", goal, met, note)
        errors = [one["predicted"] / passed for passed in one["passes"]]
        _, low, high = median_interval(errors)
        within = low >= 1 - PREDICTED and high <= 1 + PREDICTED
        beyond = high < 1 - PREDICTED or low > 1 + PREDICTED
        yield _figure(
            f"{what}: predicted over measured pass", errors, "ratio", f"within {PREDICTED:g} of 1",
            True if within else False if beyond else None,
        )  # fmt: skip


def over_hand(workload: str, batch: str) -> dict[str, Any]:
    """Seconds of steps by each method and by hand, in turns, the order alternating; and what both hold."""
    from benchmarks.memory.workshop import IN_CORE, METHODS, PLAN, Workshop
    from dlbench.machine.cgroup import peak_resident_bytes, reset_peak, resident_bytes
    from dlbench.node.out_of_core.device_memory import keep_freed

    keep_freed()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=_on_disk()) as folder:
        shop = Workshop(workload, int(batch), folder)
        before = resident_bytes() or 0
        capacity = (shop.smallest_bytes() + shop.in_core_bytes) // 2
        rooms = {method: capacity if method == PLAN else None for method in METHODS}
        for method, room in rooms.items():
            is_in_core = method == IN_CORE
            predicted = None if is_in_core else shop.plan(method, room).plan.predicted
            found[method] = {
                "own": [], "by_hand": [], "passes": [], "live": [], "resident": 0,
                "told": shop.in_core_bytes if predicted is None else predicted.peak_bytes,
                "predicted": shop.measured[1].useful_s if predicted is None else predicted.pass_s,
            }  # fmt: skip
        begun = time.monotonic()
        for number in range(HAND_PAIRS):
            if number >= HAND_LEAST and time.monotonic() - begun > HAND_S:
                break
            for method, room in rooms.items():
                one = found[method]
                sides = ("own",) if method == IN_CORE else ("own", "by_hand") if number % 2 else ("by_hand", "own")
                for side in sides:
                    trains = shop.training_by if side == "own" else shop.training_by_hand
                    with trains(method, room):
                        shop.step()
                        reset_peak()
                        took = shop.steps(HAND_STEPS, warm=0)
                        if side == "own":
                            one["passes"].append(took.passes)
                            one["resident"] = max(one["resident"], (peak_resident_bytes() or 0) - before)
                    one[side].append(took.step)
        for method, room in rooms.items():
            if method != IN_CORE:
                for trains in (shop.training_by, shop.training_by_hand):
                    with trains(method, room):
                        found[method]["live"].append(shop.live_bytes())
    return {"methods": found}


# What is told of memory, and what is held


ACCOUNTS = {"resnet50": ("ResNet-50", 48), "bert": ("BERT", 64), "cosmoflow": ("CosmoFlow", 32)}
"""Batches at which what libraries keep of their own, some MiB, is little beside activations."""


def accounts() -> Iterator[Figure]:
    """Told peaks of the `ci` networks by every method, beside live tensors and resident memory."""
    for workload, (title, batch) in ACCOUNTS.items():
        for method, found in _in_process("account", workload, str(batch))["methods"].items():
            told, live, resident = found["told"], found["live"], found["resident"]
            ratios = [told / one for one in (live, resident)]
            yield Figure(
                name=f"{title} (ci, batch {batch}), {method}: predicted over live bytes",
                value=max(ratios, key=lambda ratio: abs(math.log(ratio))),
                unit="ratio",
                n=len(ratios),
                goal=f"within {ACCOUNT:g} of 1",
                met=all(abs(ratio - 1) <= ACCOUNT for ratio in ratios),
                reason=f"{told / 2**20:.1f} MiB predicted, {live / 2**20:.1f} MiB live, "
                f"{resident / 2**20:.1f} MiB resident; in core {found['in_core'] / 2**20:.1f} predicted",
            )


def account(workload: str, batch: str, *names: str) -> dict[str, Any]:
    """Bytes of a step by some methods, or all: told by the chain, live by torch's profiler, resident by the kernel.

    The plan's capacity is half way between the smallest that would do and what training in core holds.
    """
    from benchmarks.memory.workshop import IN_CORE, METHODS, PLAN, Workshop, give_back_freed

    give_back_freed(32 << 10)
    found = {}
    with tempfile.TemporaryDirectory(dir=_on_disk()) as folder:
        shop = Workshop(workload, int(batch), folder)
        capacity = (shop.smallest_bytes() + shop.in_core_bytes) // 2
        for method in names or METHODS:
            room = capacity if method == PLAN else None
            plan = None if method == IN_CORE else shop.plan(method, room).plan
            with shop.training_by(method, room):
                found[method] = {
                    "told": shop.in_core_bytes if plan is None else plan.predicted.peak_bytes,
                    "resident": shop.peak_bytes(),
                    "live": shop.live_bytes(),
                    "in_core": shop.in_core_bytes,
                }
    return {"methods": found}


# The largest batch under a budget


def largest() -> Iterator[Figure]:
    """The largest batch of ResNet-50 that trains within half of what 32 samples hold in core, method by method."""
    case = CASES["resnet50"]
    found = _in_process("limits", "resnet50")
    budget = found["budget"]
    for method, batch in found["batches"].items():
        name = f"{case.title}, {method}: largest batch within {budget / 2**20:.0f} MiB"
        at, beyond = (_in_process("peak", "resnet50", method, str(b), str(budget)) for b in (batch, batch + 1))
        fits = at["peak"] is not None and at["peak"] <= budget
        note = f"resident peak of a step at {batch}: {_share(at['peak'], budget)}"
        note += f"; {batch + 1} {_beyond(beyond, budget)}"
        is_less = beyond["predicted"] is None or beyond["predicted"] > budget
        goal = "a real step keeps within it, and one sample more does not fit"
        yield Figure(name=name, value=batch, unit="samples", goal=goal, met=fits and is_less, reason=note)


def _share(value: int | None, budget: int) -> str:
    return "not trained" if value is None else f"{value / budget:.0%} of the budget"


def _beyond(found: dict[str, Any], budget: int) -> str:
    if found["predicted"] is None:
        return "does not fit by any plan"
    return f"would hold {found['predicted'] / budget:.0%}, measured {_share(found['peak'], budget)}"


def limits(key: str) -> dict[str, Any]:
    """The largest batch of each method by the chain, scaled; in a process of its own."""
    from benchmarks.memory.workshop import METHODS

    with _workshop(key) as shop:
        budget = shop.in_core_bytes // 2
        batches = {method: shop.largest_batch(method, budget) for method in METHODS}
        return {"budget": budget, "batches": batches}


def peak(key: str, method: str, batch: str, budget: str) -> dict[str, Any]:
    """What a method holds in a step of a batch: predicted from the chain at that batch, and measured."""
    from benchmarks.memory.workshop import IN_CORE, PLAN, give_back_freed
    from dlbench.errors import EnvironmentLacksError

    give_back_freed(32 << 10)  # tensors of few samples are small
    with _workshop(key, int(batch)) as shop:
        capacity = int(budget) if method == PLAN else None
        try:
            planned = None if method == IN_CORE else shop.plan(method, capacity).plan.predicted.peak_bytes
        except EnvironmentLacksError:
            return {"predicted": None, "peak": None}
        with shop.training_by(method, capacity):
            return {"predicted": planned or shop.in_core_bytes, "peak": shop.peak_bytes()}


# What it costs where everything fits


def fitting() -> Iterator[Figure]:
    """Steps under a plan that keeps everything over steps in core, in turns."""
    ratios = _in_process("ratios_of_fitting", "cosmoflow")["ratios"]
    yield _figure(
        "CosmoFlow: a step under a plan that keeps everything over one in core", ratios, "ratio of step times",
        f"at most {OVERHEAD:g}", statistics.median(ratios) <= OVERHEAD,
    )  # fmt: skip


def ratios_of_fitting(key: str) -> dict[str, Any]:
    """In a process of its own."""
    from benchmarks.memory.workshop import IN_CORE, PLAN

    with _workshop(key, 8) as shop:
        room = 2 * shop.in_core_bytes
        ratios = []
        for number in range(FITTING_PAIRS):
            took = {}
            for method in (IN_CORE, PLAN) if number % 2 else (PLAN, IN_CORE):
                with shop.training_by(method, room if method == PLAN else None):
                    took[method] = shop.steps(12, warm=2).step
            ratios.append(took[PLAN] / took[IN_CORE])
        return {"ratios": ratios}


# The update by the host


def host() -> Iterator[Figure]:
    """Steps with `train.optimizer_state host` over those with device, in turns."""
    for workload, title in (("resnet50", "ResNet-50"), ("bert", "BERT"), ("cosmoflow", "CosmoFlow")):
        found = _in_process("ratios_of_host", workload)
        note = (
            f"update {found['update_s'] * 1e3:.1f} ms a step, of it waited for {found['wait_s'] * 1e3:.1f} ms; on a "
            "CPU the host's memory is the device's"
        )
        yield _figure(
            f"{title} (ci): optimizer_state host over device", found["ratios"], "ratio of step times", "measured",
            note=note,
        )  # fmt: skip


def ratios_of_host(workload: str) -> dict[str, Any]:
    """In a process of its own."""
    from benchmarks.memory.workshop import Workshop

    shops = {where: Workshop(workload, None, "/", host=where == "host") for where in ("device", "host")}
    steps = 8
    for shop in shops.values():
        shop.run(3)
    update = shops["host"].host
    assert update is not None
    update.begin_measuring()
    ratios = []
    for number in range(HOST_PAIRS):
        took = {name: shops[name].run(steps) for name in (list(shops) if number % 2 else reversed(list(shops)))}
        ratios.append(took["host"] / took["device"])
    result = update.result()
    total = steps * HOST_PAIRS
    return {"ratios": ratios, "update_s": result.update_s / total, "wait_s": result.wait_s / total}


# Processes


def _workshop(key: str, batch: int | None = None) -> _Opened:
    return _Opened(CASES[key], batch)


class _Opened:
    """A workshop and a folder for its swap files, where this machine has a disk."""

    def __init__(self, case: Case, batch: int | None) -> None:
        self._case, self._batch = case, batch or case.batch
        # Under the repository: /tmp may be memory.
        self._folder = tempfile.TemporaryDirectory(dir=_on_disk())

    def __enter__(self) -> Workshop:
        from benchmarks.memory.workshop import Workshop

        case = self._case
        return Workshop(
            *(case.workload, self._batch, self._folder.name),
            settings=case.settings,
            model=case.model,
            blocks=case.blocks,
        )

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


@cache
def _on_disk() -> str:
    from benchmarks.figures import FOLDER

    FOLDER.mkdir(parents=True, exist_ok=True)
    return str(FOLDER)


def _in_process(name: str, *arguments: str) -> dict[str, Any]:
    """What a function of this module returns in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
