#!/usr/bin/env bash
# Gloo's reduce-scatter sends as many bytes as its all-reduce, twice what the operation needs: torch makes it of an
# all-reduce of which each rank keeps its share. FSDP (two all-gathers and a reduce-scatter a step) then sends twice the
# bytes of DDP over Gloo, where 1.5 times are needed and sent over NCCL: a model of FSDP's traffic that is checked on CPUs
# comes out wrong, and on CPUs FSDP looks slower beside DDP than it has to be.
#
# torch 2.13.0, seen on 2026-11-28. Counted by the loopback interface of Linux, so nothing else may send much there.
# Source: ProcessGroupGloo.cpp of torch (reduce_scatter); page: torch.distributed, table of collectives by backend.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Bytes that two ranks send for collectives over 64 MiB, by the counters of the loopback interface."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

VECTOR = 16 * 2**20  # Elements of 4 bytes.


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(counters[0])


def of_rank(rank: int, store: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    whole, share = torch.ones(VECTOR), torch.empty(VECTOR // 2)
    collectives = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter": lambda: dist.reduce_scatter(share, list(whole.chunk(2))),
        "all-gather": lambda: dist.all_gather(list(whole.chunk(2)), share),
    }
    sent = {}
    for name, collective in collectives.items():
        collective()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        collective()
        dist.barrier()
        sent[name] = (loopback_bytes() - before) / (4 * VECTOR) / 2
        dist.barrier()
    if rank == 0:
        Path(file).write_text(json.dumps(sent))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_rank, (f"{folder}/store", f"{folder}/seen.json"), nprocs=2)
        seen = json.loads(Path(folder, "seen.json").read_text())

    for name, share in seen.items():
        print(f"{name}: each rank sends {share:.2f} of the vector")
    needed = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.5}
    print(f"needed by two ranks: {needed}")
    if not (0.9 < seen["reduce-scatter"] < 1.1 and 0.9 < seen["all-reduce"] < 1.1 and seen["all-gather"] < 0.6):
        sys.exit("changed: reduce-scatter sent 1.0 of the vector, as all-reduce, and all-gather 0.5")


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
