"""One measurement of the area in a process of its own: prints what it found as JSON."""

import json
import os
import sys

import torch

from benchmarks import memory

MEASUREMENTS = {
    one.__name__: one
    for one in (
        memory.account,
        memory.compare,
        memory.limits,
        memory.over_hand,
        memory.peak,
        memory.ratios_of_fitting,
        memory.ratios_of_host,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps(MEASUREMENTS[sys.argv[1]](*sys.argv[2:])))
