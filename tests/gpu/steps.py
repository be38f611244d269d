"""What ``make gpu-check`` runs on a machine: a pure function of its GPUs, so that it can be read without any.

What breaks first stands first. Seconds are arithmetic, not measurements: a start of 15 s (imports, CUDA's context, the
first step, in which cuDNN searches), and the steps that are asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu import AXES, SECONDS

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "gpu"
GIB = 2**30

PYTHON = sys.executable
DLBENCH = (PYTHON, "-P", "-m", "dlbench")

SHORT = ("measure.warmup_s=0.0", "measure.measured_s=0.0")
"""Some steps only: whether it works, not how fast. Nothing is held back in so short a warm-up."""
START_S = 15.0
SHORT_S, FIGURE_S = START_S + 5.0, START_S + 20.0

FIRST = ("hiding", "no_synchronisation", "out_of_core", "place", "clock", "horovod")
"""Files of tests in which faults are most likely; all others follow, and those of presets stand last."""
LAST = ("compile", "presets")
TESTS_S = {
    "no_synchronisation": 90.0,
    "out_of_core": 60.0,
    "checkpoint": 60.0,
    "horovod": 60.0,
    "compile": 90.0,
    "presets": 120.0,
}
"""Seconds of files that take longer than others."""
FILE_S = 20.0
ASIDE = {"presets": ("-k", "phase or not test_a_preset_for_gpus_trains")}
"""Tests whose runs are longer ones here: presets `gpu` and `gpu-compiled` are steps, with figures."""

OWN = ("sync.fusion=own:25MiB",)
"""Buckets of dlbench's own exchange, of DDP's size."""
FOR_LARGE = 60 * GIB
"""Memory that the batches of presets `gpu` take: published tables are of cards with 80 GB."""
SMALLER: Mapping[str, tuple[tuple[int, int], ...]] = {
    "resnet50": ((30 * GIB, 256), (20 * GIB, 128), (0, 48)),
    "bert": ((FOR_LARGE, 56), (35 * GIB, 28), (20 * GIB, 12), (0, 4)),
    "cosmoflow": ((20 * GIB, 8), (0, 2)),
}
"""Samples a GPU takes in preset `gpu`, by the memory that they need at least: by arithmetic, activations of the network
in bf16, and weights with gradients and state in fp32."""
PAIRS = 5
"""Of runs with and without Horovod's timeline: the fewest that give a verdict."""
TRAINED = ("gpu", "ci", "files", "checkpoints", "timeline")
"""Folders of runs that train."""
PARTS = 64
"""Of one update: the accumulation of published BERT is 32 to 256."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides which steps there are."""

    gpus: int = 0
    """GPUs that torch sees."""
    name: str = ""
    uuids: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES takes them; empty where they are not known."""
    memory_bytes: int = 0
    """Of the smallest GPU."""
    capability: tuple[int, int] = (0, 0)
    nccl_tests: str = ""
    """Path of nccl-tests' `all_reduce_perf`; empty where it is not on PATH."""
    why: str = ""
    """Why nothing can be measured here; empty where a GPU is."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the check."""

    name: str
    words: tuple[str, ...]
    """Program and arguments."""
    about_s: float = SHORT_S
    """Seconds by arithmetic."""
    limit_s: float = 300.0
    """After which it is given up."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets on top of those that are there."""
    why: str = ""
    """Why it cannot be run here; empty where it can."""
    may_lack: str = ""
    """What the machine may lack without a fault of anything: exit code 5 then says `not measured`, else it failed."""
    passes_with: tuple[int, ...] = (0,)
    """Exit codes of a command that did what it should."""
    is_told: bool = False
    """Whether what it printed is on the page though it passed."""
    needs: Path | None = None
    """What a step before it has made."""
    makes: Path | None = None
    """What a later step needs."""


def steps(machine: Machine, folder: Path, *, figures: bool) -> list[Step]:
    """What is run, in order; where the machine lacks what a step needs, the step says so.

    `folder`: of all runs; `figures`: whether every axis of precision and speed is measured, which takes hours.
    """
    found = [
        # Without a GPU, too: it says what lacks.
        Step(name="doctor", words=(*DLBENCH, "doctor"), about_s=10.0, limit_s=120.0, is_told=True),
        *_first(machine, folder),
        *_tests(FIRST),
        *_one_gpu(machine, folder),
        *_several(machine, folder),
        *_tests(()),
        *_tests(LAST),
        *_presets(machine, folder),
        *_presets_of_several(machine, folder),
    ]
    if figures:
        areas = [("host work of a step", "spine.host", 120.0)]
        areas += [(f"every axis of {workload}", f"gpu.{workload}", 4800.0) for workload in AXES]
        found += [
            Step(
                name=f"figures: {name}",
                words=(PYTHON, "-m", "benchmarks", area),
                about_s=about_s,
                limit_s=600.0 + 3 * about_s,
            )
            for name, area, about_s in areas
        ]
    if machine.why:
        return [one if one.name == "doctor" else replace(one, why=machine.why) for one in found]
    return found


def seconds(all_steps: Sequence[Step]) -> float:
    """What the steps that can be run take, by arithmetic, without the compiling of a first time."""
    return sum(one.about_s for one in all_steps if not one.why)


def training(name: str, folder: Path, workload: str, *words: str, settings: Sequence[str] = (), **more: object) -> Step:
    """A step that trains; its name is also that of its series, and so of its run folders."""
    series = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
    given = [word for setting in settings for word in ("--set", setting)]
    command = (*DLBENCH, "run", workload, *words, *given, "--series", series, "--out", str(folder), "--no-progress")
    return Step(**{"name": name, "words": command, **more})  # type: ignore[arg-type]


def _first(machine: Machine, folder: Path) -> Iterator[Step]:
    """Whether anything trains at all, and by which engines."""
    ci = folder / "ci"
    for workload in AXES:
        yield training(f"{workload} ci, single", ci, workload, "--preset", "ci", "--engine", "single", settings=SHORT)
    # A build of a first time is not within the 20 minutes.
    yield Step(
        name="Horovod is built", words=(*DLBENCH, "setup", "horovod"), about_s=10.0, limit_s=2400.0,
        may_lack="compilers, CUDA's headers or a network",
    )  # fmt: skip
    for engine in ("ddp", "horovod", "fsdp"):
        yield _by_engine(ci, "resnet50", engine, 1)
    yield _by_engine(ci, "bert", "fsdp", 1, "offloaded", ("engine.fsdp.offload=true",))
    yield _by_uuid(machine, _by_engine(ci, "resnet50", "single", 1))


def _by_engine(
    folder: Path, workload: str, engine: str, ranks: int, what: str = "", settings: Sequence[str] = ()
) -> Step:
    """Preset ci: the whole path of an engine in some steps."""
    words = ("--preset", "ci", "--engine", engine, "--ranks", str(ranks))
    name = f"{workload} ci, {engine}{what and f', {what}'}" + f", {ranks} GPUs" * (ranks > 1)
    lacks = "Horovod" if engine == "horovod" else ""
    return training(name, folder, workload, *words, settings=(*SHORT, *settings), may_lack=lacks)


def _by_uuid(machine: Machine, step: Step) -> Step:
    """The same with GPUs named by UUID, the last one first: an order that numbers do not have."""
    name = f"{step.name}, GPUs by UUID"
    words = list(step.words)
    words[words.index("--series") + 1] += "-by-uuid"
    why = step.why or ("" if machine.uuids else "NVML and torch do not say the GPUs' UUIDs")
    visible = ",".join(reversed(machine.uuids))
    return replace(step, name=name, words=tuple(words), why=why, environment={"CUDA_VISIBLE_DEVICES": visible})


def _one_gpu(machine: Machine, folder: Path) -> Iterator[Step]:
    """Accumulation, out of core, checkpoints, files, evaluation: by the commands that users run."""
    ci, gpu = ("--preset", "ci", "--engine", "single"), ("--preset", "gpu", "--engine", "single")
    parts = (f"train.batch_per_rank={PARTS}", f"train.gradient_accumulation={PARTS}")
    # With seconds, so that steps are held back, which happens in longer warm-ups alone.
    yield training(
        f"bert ci, {PARTS} parts of an update", folder / "ci", "bert", *ci, settings=(*parts, *SECONDS),
        about_s=FIGURE_S,
    )  # fmt: skip
    # Next to preset `gpu` in core, which stands last.
    for name, keys in (
        ("swapped as a stream", ("train.swap=streamed",)),
        ("planned for 70 % of its memory", _planned(70)),
    ):
        settings = (*_fitting(machine, "resnet50"), *SECONDS, *keys)
        yield training(
            f"resnet50 gpu, {name}",
            folder / "gpu",
            "resnet50",
            *gpu,
            settings=settings,
            about_s=FIGURE_S,
            limit_s=600.0,
        )
    saved = folder / "checkpoints"
    run = saved / "bert-ci--checkpoints-bert-ci-p00-n0001-k00"
    yield training(
        "bert ci, checkpoints", saved, "bert", *ci, settings=(*SHORT, "checkpoint.every_steps=5"), makes=run,
    )  # fmt: skip
    yield training(
        "bert ci, resumed", saved, "bert", *ci, "--resume", str(run), needs=run,
        settings=(*SHORT, "measure.measured_steps=20"),
    )  # fmt: skip
    data = folder / "data"
    yield Step(
        name="demo data",
        words=(*DLBENCH, "data", "demo", str(data)),
        about_s=15.0,
        may_lack="scikit-image, scikit-learn",
        makes=data,
    )
    files = folder / "files"
    for workload, of in (("resnet50", "images"), ("bert", "text")):
        yield training(
            f"{workload} ci, real files and an evaluation", files, workload, *ci, "--data", str(data / of),
            "--to-accuracy", needs=data / of, settings=_little(workload),
        )  # fmt: skip
    yield training(
        "resnet50 ci, JPEGs decoded by the GPU", files, "resnet50", *ci, "--data", str(data / "images"),
        needs=data / "images", settings=(*SHORT, "data.reader=nvimagecodec"), may_lack="nvImageCodec",
    )  # fmt: skip


def _planned(percent: int) -> tuple[str, ...]:
    return ("train.swap=planned", "train.recompute=planned", f"train.memory.capacity={percent}%")


def _little(workload: str) -> tuple[str, ...]:
    """Training that ends after its first evaluation or two, whatever it reached."""
    if workload == "bert":
        return ("quality.max_samples=2048",)
    return ("quality.max_epochs=1",)


def _several(machine: Machine, folder: Path) -> Iterator[Step]:
    """What several GPUs add, in some steps each: engines, dlbench's own exchange, fp16 on the wire; by UUID as well."""
    ci, ranks = folder / "ci", max(2, machine.gpus)
    made = [_by_engine(ci, workload, engine, ranks) for workload in AXES for engine in ("ddp", "horovod", "fsdp")]
    of_images = [
        _by_engine(ci, "resnet50", "ddp", ranks, "fp16 on the wire", ("sync.wire=fp16",)),
        _by_engine(ci, "resnet50", "horovod", ranks, "fp16 on the wire", ("sync.wire=fp16",)),
        _by_engine(ci, "resnet50", "ddp", ranks, "own exchange", OWN),
        _by_engine(ci, "resnet50", "horovod", ranks, "own exchange", OWN),
        _by_engine(ci, "resnet50", "ddp", ranks, "own exchange, fp16 on the wire", (*OWN, "sync.wire=fp16")),
        _grouped(
            _by_engine(ci, "resnet50", "ddp", _even(ranks), "own exchange in two groups", _two_groups(ranks)), ranks
        ),
    ]
    made += [
        _by_engine(ci, "bert", "fsdp", ranks, "gradients alone sharded", ("engine.fsdp.shard=gradients",)),
        _by_engine(ci, "bert", "fsdp", ranks, "two blocks ahead", ("engine.fsdp.prefetch=2",)),
        _by_engine(ci, "bert", "fsdp", ranks, "offloaded", ("engine.fsdp.offload=true",)),
        _by_engine(ci, "bert", "fsdp", ranks, "tensor parallel", ("engine.fsdp.tensor_ranks=2",)),
    ]
    again = [one for one in made if "resnet50" in one.name] + of_images
    for one in (*made, *of_images, *(_by_uuid(machine, one) for one in again)):
        yield _needs_two(machine, one)
    comm = folder / "comm"
    sizes = ("--sizes", "1KiB:64MiB")
    yield _needs_two(
        machine,
        Step(
            name=f"dlbench comm, {ranks} GPUs", about_s=90.0, limit_s=900.0, is_told=True,
            words=(
                *DLBENCH, "comm", "run", "--ranks", str(ranks), "--backends", "nccl", "--algorithms", "all", *sizes,
                "--series", "comm", "--out", str(comm), "--no-progress",
            ),
        ),
    )  # fmt: skip
    perf = Step(
        name=f"nccl-tests, {ranks} GPUs", about_s=20.0, is_told=True,
        words=(machine.nccl_tests or "all_reduce_perf", "-b", "1K", "-e", "64M", "-f", "4", "-g", str(ranks)),
        why="" if machine.nccl_tests else "all_reduce_perf of nccl-tests is not on PATH",
    )  # fmt: skip
    yield _needs_two(machine, perf)


def _even(ranks: int) -> int:
    return max(4, ranks - ranks % 2)


def _two_groups(ranks: int) -> tuple[str, ...]:
    return ("sync.exchange=hierarchical", f"sync.group_size={_even(ranks) // 2}")


def _grouped(step: Step, ranks: int) -> Step:
    return replace(step, why="" if ranks >= 4 else f"two groups of two ranks need 4 GPUs, here are {ranks}")


def _needs_two(machine: Machine, step: Step) -> Step:
    return replace(step, why="one GPU") if machine.gpus < 2 else step


_MARKED = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.gpu\b", re.MULTILINE)
"""A file whose tests are all marked `gpu`, as it begins."""


def _tests(names: Sequence[str]) -> Iterator[Step]:
    """Files of tests marked `gpu`, each in a pytest of its own: no context and no cached memory of one stands in the
    way of another, and a file that hangs takes its own tests with it alone. Without names: all that no list names.
    """
    there = {path.stem.removeprefix("test_"): path for path in sorted(TESTS.glob("test_*.py"))}
    chosen = names or [name for name in there if name not in (*FIRST, *LAST)]
    for name in chosen:
        if name not in there or not _MARKED.search(there[name].read_text(encoding="utf-8")):
            continue
        pytest = ("-m", "pytest", "-v", "-m", "gpu", f"tests/gpu/test_{name}.py", "-p", "no:cacheprovider")
        # A test that hangs shows where it stands before its file is given up.
        more = ("-p", "tests.gpu.outcomes", "-o", "faulthandler_timeout=300", *ASIDE.get(name, ()))
        yield Step(
            name=f"tests of {name.replace('_', ' ')}",
            words=(PYTHON, *pytest, *more),
            about_s=TESTS_S.get(name, FILE_S),
            limit_s=1500.0 if name in LAST else 600.0,
            passes_with=(0, 5),
        )


def _fitting(machine: Machine, workload: str) -> tuple[str, ...]:
    """Settings by which preset `gpu` fits this card; none on those that published tables are of."""
    batches = SMALLER[workload]
    batch = next(samples for least, samples in batches if machine.memory_bytes >= least)
    found = () if batch == batches[0][1] else (f"train.batch_per_rank={batch}",)
    # bf16 is arithmetic of GPUs since Ampere.
    return found if machine.capability >= (8, 0) else (*found, "train.precision=fp16")


def _presets(machine: Machine, folder: Path) -> Iterator[Step]:
    """Throughput of one GPU, next to what is published for the card."""
    for workload in AXES:
        yield _figure(machine, folder, workload, "single", 1, repeats=3)
    for workload in AXES:
        yield _figure(machine, folder, workload, "single", 1, preset="gpu-compiled")


def _figure(
    machine: Machine,
    folder: Path,
    workload: str,
    engine: str,
    ranks: int,
    what: str = "",
    settings: Sequence[str] = (),
    repeats: int = 1,
    preset: str = "gpu",
) -> Step:
    name = f"{workload} {preset}, {engine}{what and f', {what}'}" + f", {ranks} GPUs" * (ranks > 1)
    words = ("--preset", preset, "--engine", engine, "--ranks", str(ranks), "--repeats", str(repeats))
    return training(
        name, folder / "gpu", workload, *words, settings=(*_fitting(machine, workload), *SECONDS, *settings),
        about_s=repeats * FIGURE_S, limit_s=repeats * 600.0,
        may_lack=" or ".join((*(("Horovod",) if engine == "horovod" else ()), "Triton with a C compiler")),
    )  # fmt: skip


def _presets_of_several(machine: Machine, folder: Path) -> Iterator[Step]:
    """Throughput of all GPUs by each engine and exchange, and what Horovod's timeline costs."""
    ranks = max(2, machine.gpus)
    for workload in AXES:
        yield _needs_two(machine, _figure(machine, folder, workload, "ddp", ranks, repeats=3))
        yield _needs_two(machine, _figure(machine, folder, workload, "horovod", ranks))
    for workload in ("resnet50", "bert"):
        own = _figure(machine, folder, workload, "ddp", ranks, "own exchange", OWN)
        wire = _figure(machine, folder, workload, "ddp", ranks, "fp16 on the wire", ("sync.wire=fp16",))
        two = _figure(machine, folder, workload, "ddp", _even(ranks), "own exchange in two groups", _two_groups(ranks))
        for one in (own, wire, _grouped(two, ranks)):
            yield _needs_two(machine, one)
    # Its GPU path waits on the host while the timeline is open; dlbench's change keeps it closed outside of the window.
    pairs = training(
        f"Horovod with and without its timeline, {ranks} GPUs", folder / "timeline", "resnet50", "--preset", "gpu",
        "--engine", "horovod", "--ranks", str(ranks), "--repeats", str(PAIRS), "--ab", "watch.window_steps=0", "plain",
        settings=(*_fitting(machine, "resnet50"), *SECONDS), about_s=2 * PAIRS * FIGURE_S, limit_s=2 * PAIRS * 300.0,
        may_lack="Horovod", is_told=True,
    )  # fmt: skip
    yield _needs_two(machine, pairs)
