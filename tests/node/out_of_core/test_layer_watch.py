"""Layers are watched beside blocks: each is told once a pass, and what is computed again is told as such."""

from __future__ import annotations

from collections import Counter

from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.sync.timing import Clock
from dlbench.node.watching.spans import LayerWatch
from dlbench.specs.out_of_core import PlannedBlock
from tests.node.out_of_core.networks import chain_task, cut


def test_layers_of_blocks_are_told_once_a_pass() -> None:
    task = chain_task(["linear", "gelu", "residual", "linear", "gelu"])
    model = task.model()
    units = cut(task, model)
    assert len(units) == 5
    blocks = [PlannedBlock(first=0, last=2, decision="recompute"), PlannedBlock(first=3, last=4, decision="keep")]
    executor = OutOfCore(model, units, blocks)
    executor.install()
    told: list[tuple[str, int, int, int]] = []
    watch = LayerWatch(
        model,
        Clock(),
        lambda _lane, name, start, end, *, step: told.append((name, step, start, end)),
        executor.computes,
    )
    watch.open()
    for step in (1, 2):
        watch.enter(step)
        task.loss(model).backward()
        watch.leave()
    watch.close()
    executor.close()

    count = Counter((name, step) for name, step, *_ in told)
    for step in (1, 2):
        for name in ("0", "1", "2.inner", "2.norm", "3", "4"):
            assert count[f"forward {name}", step] == 1
            assert count[f"backward {name}", step] == 1
        assert count["recompute 0", step] == count["recompute 1", step] == 1
        assert not count["recompute 3", step]
    assert all(start <= end for *_, start, end in told)
