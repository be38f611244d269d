"""How fast samples are staged from a slow shared file system, beside what copies the same files there is.

Source: ext4 on a loop device that reads at a limited rate (`tests.support.slow_storage`), emptied of its caches before
each copy. Target: a folder of the machine's own. Staging and the others go in turns, and each ratio is of neighbours: a
machine that is loaded slows both.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from dlbench.datasets.shuffling import first_parts
from dlbench.node.data.source import open_training
from dlbench.node.data.staging import NodeStaging
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.support.datasets import encode
from tests.support.slow_storage import SlowStorage, slow_storage, why_no_storage

BYTES_PER_S, FILE_BYTES = 30e6, 40 << 20
IMAGES, SHARDS, ROUNDS, GOAL = 400, 4, 5, 0.9


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    reason = why_no_storage()
    if reason is not None:
        yield Figure(name="staging over cp and dd", value=None, unit="", goal=f"at least {GOAL:g}", reason=reason)
        return
    with slow_storage(BYTES_PER_S, 4 * FILE_BYTES) as shared, tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        tree, shards = _tree(shared.path / "tree"), _shards(shared.path / "tree", shared.path / "shards")
        yield from _compared(shared, target, "JPEG tree", tree)
        yield from _compared(shared, target, "tar shards", shards)


def _tree(folder: Path) -> Path:
    """JPEGs of noise of about 100 KB, as ImageNet's are on average, in ten classes."""
    for number in range(IMAGES):
        place = folder / f"class-{number % 10}" / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encode((280, 360, 3), seed=number, quality=90))
    return folder


def _shards(tree: Path, folder: Path) -> Path:
    from dlbench.datasets.making.image_recipes import PackRecipe
    from dlbench.datasets.making.production import produce

    produce(PackRecipe(train=tree), folder)
    return folder / "train" if (folder / "train").is_dir() else folder


def _compared(shared: SlowStorage, target: Path, title: str, source: Path) -> Iterator[Figure]:
    num_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    ways: dict[str, Callable[[], None]] = {
        "replicate": lambda: _stage(source, target, "replicate"),
        "cp -r": lambda: _run("cp", "-r", str(source), str(target / "cp")),
        "shard": lambda: _stage(source, target, "shard"),
        "dd": lambda: _dd(source, target / "dd"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            shared.drop_caches()
            begun = time.monotonic()
            way()
            seconds[name].append(time.monotonic() - begun)
            for entry in target.iterdir():
                shutil.rmtree(entry)
    for name, values in seconds.items():
        yield Figure.of(
            [num_bytes / 1e6 / one for one in values],
            name=f"staging, {title}: {name}",
            unit="MB/s",
            goal="measured",
            reason=f"{num_bytes / 1e6:.0f} MB at a limit of {BYTES_PER_S / 1e6:.0f} MB/s",
        )
    for name in ("replicate", "shard"):
        for other in ("cp -r", "dd"):
            ratios = [b / a for a, b in zip(seconds[name], seconds[other], strict=True)]
            yield Figure.of(
                ratios,
                name=f"staging, {title}: {name} over {other}",
                unit="ratio of rates",
                goal=f"at least {GOAL:g}",
                met=lambda one: one.value >= GOAL,
            )


def _plan(source: Path, target: Path, strategy: str) -> RunPlan:
    overrides = {
        "data.staging": strategy,
        "data.shuffle": "local" if strategy == "shard" else "global",
        "system.storage.local.path": str(target),
    }
    request = Request(
        workload="resnet50", preset="ci", engine="ddp", data=str(source), points=(2,), overrides=overrides
    )
    return expand(request, machine_cores=2)[0]


def _stage(source: Path, target: Path, strategy: str) -> None:
    plan = _plan(source, target, strategy)

    def parts(num: int) -> dict[int, list[int]]:
        held = first_parts(num, 2, seed=plan.workload.train.seed, partition="shuffled")
        return {rank: np.asarray(part).tolist() for rank, part in enumerate(held)}

    work = NodeStaging(
        plan, 0, "n1", open_reader=lambda: open_training(plan.workload.model, plan.workload.data, 0), parts=parts
    )
    work.start()
    work.wait(600)
    if work.error is not None:
        raise work.error
    # What is staged stays for the moment; its removal is no part of the time, as that of the others is none.
    work.told()


def _dd(source: Path, target: Path) -> None:
    """Every file with dd, one after the other, by one shell."""
    target.mkdir()
    script = 'n=0; find "$0" -type f -print0 | sort -z | while IFS= read -r -d "" f; do n=$((n+1)); '
    script += 'dd if="$f" of="$1/$n" bs=4M status=none; done'
    _run("bash", "-c", script, str(source), str(target))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=600)
