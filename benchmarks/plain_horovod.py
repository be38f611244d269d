"""Trains a network as a plain script of Horovod does, without dlbench: ``plain_horovod.py MODULE BATCH EDGE STEPS``.

MODULE is a Python file with the class `Network`. The batch is random and stays in memory, as synthetic data do.
"""

import importlib.util
import sys

import horovod.torch as hvd
import torch


def main(module: str, batch: int, edge: int, steps: int) -> None:
    """Trains for some steps with one thread."""
    hvd.init()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("network", module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    network = loaded.Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    images, labels = torch.randn(batch, 3, edge, edge), torch.randint(10, (batch,))
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
