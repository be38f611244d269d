#!/usr/bin/env bash
# DistributedDataParallel with `bucket_cap_mb=25` exchanges gradients in other buckets than with the argument left out,
# although its page gives 25 MiB as the default. Left out, the first bucket is of 1 MiB, so that the exchange begins
# with the first gradients of the backward pass; given, even as 25, the first bucket is as large as all others. A sweep
# over `bucket_cap_mb` that has 25 as "the default" does not hold the default.
#
# torch 2.13.0 (CPU, Gloo), seen on 2026-11-28.
# Source: class _BucketConfig in torch/nn/parallel/distributed.py; page: torch.nn.parallel.DistributedDataParallel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Twelve layers with 1 MiB of weights each: the buckets of the third step, in MiB, in the order of the exchange."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn


def of_rank(rank: int, store: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    buckets_by_setting = {}
    for setting, arguments in (("left out", {}), ("25", {"bucket_cap_mb": 25})):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(12)]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), **arguments)
        sizes = []

        def exchange(state, bucket):
            sizes.append(bucket.buffer().nbytes / 2**20)
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / 2)

        model.register_comm_hook(None, exchange)
        for _ in range(3):
            sizes.clear()
            model(torch.ones(1, 512)).sum().backward()
        buckets_by_setting[setting] = list(sizes)
    if rank == 0:
        Path(file).write_text(json.dumps(buckets_by_setting))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_rank, (f"{folder}/store", f"{folder}/seen.json"), nprocs=2)
        seen = json.loads(Path(folder, "seen.json").read_text())

    for setting, sizes in seen.items():
        print(f"bucket_cap_mb {setting}: buckets of {sizes} MiB")
    if seen != {"left out": [1.0, 11.0], "25": [12.0]}:
        sys.exit("changed: buckets were [1, 11] MiB with the argument left out and [12] MiB with 25")


if __name__ == "__main__":
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
