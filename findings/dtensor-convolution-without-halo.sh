#!/usr/bin/env bash
# A convolution of a DTensor that is sharded along its width is computed on each rank's columns as if they were whole
# images: the columns at the cut get the zeros of the padding in place of the neighbour's pixels. There is no error. The
# result says that it is replicated and has the shape of the whole image, while each rank holds half of it, and
# `full_tensor()` returns that half. Who shares large images or volumes over ranks in this way trains on wrong borders.
#
# torch 2.13.0 (CPU, Gloo), seen on 2026-11-28.
# Source: tried; page: torch.distributed.tensor, which names no operators that are unsafe.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""A 3 x 3 box filter over an image of ones, 8 x 8, whose left and right halves lie on two ranks."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional


def of_rank(rank: int, store: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    image, kernel = torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3)
    shards, weights = distribute_tensor(image, mesh, [Shard(3)]), distribute_tensor(kernel, mesh, [Replicate()])
    filtered = functional.conv2d(shards, weights, padding=1)
    if rank == 0:
        content = {
            "placements": str(filtered.placements),
            "shape": list(filtered.shape),
            "row of the full tensor": filtered.full_tensor()[0, 0, 4].tolist(),
            "row without sharding": functional.conv2d(image, kernel, padding=1)[0, 0, 4].tolist(),
        }
        Path(file).write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_rank, (f"{folder}/store", f"{folder}/seen.json"), nprocs=2)
        seen = json.loads(Path(folder, "seen.json").read_text())

    for name, value in seen.items():
        print(f"{name}: {value}")
    wrong = {"placements": "(Replicate(),)", "shape": [1, 1, 8, 8], "row of the full tensor": [6.0, 9.0, 9.0, 6.0]}
    if {name: seen[name] for name in wrong} != wrong:
        sys.exit(f"changed: it was {wrong}")


if __name__ == "__main__":
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
