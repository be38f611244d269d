#!/usr/bin/env bash
# Under FSDP2 (`fully_shard`) `torch.optim.AdamW(fused=True)` trains, while SGD and Adagrad with the same argument are
# made without a word and raise NotImplementedError in their first step, after the data has been staged and all ranks
# have met: DTensor has a sharding strategy for the fused Adam alone. A network that is trained by SGD loses its start.
#
# torch 2.13.0 (CPU, Gloo), seen on 2026-11-28.
# Source: torch/distributed/tensor/_ops/_pointwise_ops.py; pages: torch.optim.SGD (`fused`), torch.distributed.fsdp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""One step of each optimizer that has a fused form for CPUs, under FSDP2 on two ranks."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def of_rank(rank: int, store: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    outcomes = {}
    for name in ("Adam", "AdamW", "Adagrad", "SGD"):
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=True)
        model(torch.ones(1, 8)).sum().backward()
        try:
            optimizer.step()
            outcomes[name] = "trains"
        except NotImplementedError as error:
            outcomes[name] = f"NotImplementedError: {error}"
    if rank == 0:
        Path(file).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_rank, (f"{folder}/store", f"{folder}/seen.json"), nprocs=2)
        seen = json.loads(Path(folder, "seen.json").read_text())

    for name, outcome in seen.items():
        print(f"{name}: {outcome}")
    training = sorted(name for name, outcome in seen.items() if outcome == "trains")
    if training != ["Adam", "AdamW"]:
        sys.exit(f"changed: Adam and AdamW alone trained, now {training}")


if __name__ == "__main__":
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
