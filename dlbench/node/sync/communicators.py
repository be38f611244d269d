"""The communicators of the library that carries: chosen by name, imported only where used."""

from __future__ import annotations

import torch

from dlbench.node.sync.own.groups import Communicators
from dlbench.specs.engine import EngineName


def communicators_for(name: EngineName, device: torch.device) -> Communicators:
    """Communicators over Horovod or torch.distributed; the library must be started.

    Args:
        name: the engine that carries messages.
        device: where this rank computes.
    """
    if name == "horovod":
        from dlbench.node.sync.own.horovod_groups import HorovodCommunicators

        return HorovodCommunicators(device)
    from dlbench.node.sync.own.torch_groups import TorchCommunicators

    return TorchCommunicators()
