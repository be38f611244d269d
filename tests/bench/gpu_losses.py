"""What was taken out of steps because it costs time on GPUs, as a ratio on this CPU where it acts here too.

Pairs take turns: in one process where a function can be put back as it was, else as runs by the command that users run.
What acts on a GPU alone is not measured, and says where it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

from dlbench.machine.arithmetic import lacking_arithmetic
from tests.bench import known_loops
from tests.bench.figures import Figure

PAIRS = 15
STEPS = 2
"""Of a block."""
CAST_ONCE = "BERT, 4 layers of 512, 8 x 128 tokens, bf16: residual cast once over three times"
ON_GPUS = {
    "CUDA graphs: preset gpu-compiled over gpu": "launches are a GPU's; make gpu-check FIGURES=1 (train.compile, "
    "train.cuda_graphs)",
    "batch norm of cuDNN (fp16) over torch's (bf16), ResNet-50": "cuDNN is a library for GPUs; make gpu-check "
    "FIGURES=1 (train.precision)",
    "decoder padded to a multiple of 8, BERT": "acts on tensor cores alone",
}
"""What this machine cannot show, and why."""


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    yield cast_once()
    for workload in ("resnet50", "bert"):
        yield known_loops.axis(
            workload,
            "engine.ddp.gradient_as_bucket_view",
            "true",
            ("layout.cores_per_rank=1",),
            engine="ddp",
            ranks=2,
        )
    bf16 = ("train.precision=bf16",) if not lacking_arithmetic("bf16") else ()
    # With dropout, which preset ci leaves out: it is what the compiler fuses with norms and sums.
    yield known_loops.axis("bert", "train.compile", "default", (*bf16, "model.dropout=0.1"))
    for name, why in ON_GPUS.items():
        yield Figure(name=name, value=None, unit="ratio of throughputs", goal="measured", reason=why)


def cast_once() -> Figure:
    """The residual cast once for query, key and value, over three times as autocast does it: a step of 4 layers."""
    why = lacking_arithmetic("bf16")
    if why:
        return Figure(name=CAST_ONCE, value=None, unit="ratio of throughputs", goal="measured", reason=why)
    import torch

    from dlbench.node.data.synthetic import synthetic_batch
    from dlbench.node.models import bert
    from dlbench.node.models.build import build_model, loss_for
    from dlbench.specs.workload import BertModel, TextData

    spec = BertModel(family="bert", vocab_size=4096, hidden_size=512, num_layers=4, num_heads=8, intermediate_size=2048)
    data = TextData(format="text", sequence_length=128, max_predictions=20)
    torch.manual_seed(1)
    model, loss_of = build_model(spec), loss_for(spec)
    batch = synthetic_batch(spec, data, 8, torch.Generator().manual_seed(2))

    def block() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        return time.perf_counter() - began

    def before() -> float:
        with mock.patch.object(bert, "autocast_type", return_value=None):
            return block()

    block(), before()
    ratios = []
    for pair in range(PAIRS):
        # Which goes first alternates, so that a drift falls on both alike.
        order = (block, before) if pair % 2 == 0 else (before, block)
        times = {one: one() for one in order}
        ratios.append(times[before] / times[block])
    return Figure.of(
        ratios,
        name=CAST_ONCE,
        unit="ratio of throughputs",
        goal="measured",
    )
