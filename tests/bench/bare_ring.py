"""A ring of two ranks by the calls of Gloo and MPI alone, beside dlbench's and the library's own all-reduce."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlbench.node.comm.contestants import Contestant, MpiReference, OwnAlgorithm, TorchReference, Vectors
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.measure import Measurement
from dlbench.node.comm.transport import GlooTransport, MpiTransport, start_mpi, stop_mpi
from dlbench.node.ranks import detect
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan
from tests.bench.truth.collectives import FOUND


class BareRing(Contestant):
    """The messages and the sum of a ring of two ranks; `once` binds a library's calls to them."""

    algorithm, is_in_place = "bare", True

    def __init__(self, carrier: str, rank: int, once: Callable[..., Callable[[], object]]) -> None:
        self.carrier, self._rank, self._once = carrier, rank, once

    def bind(self, vectors: Vectors) -> str:
        own, other = vectors.data.chunk(2)[:: -1 if self._rank else 1]
        self._call = self._once(own, other, torch.zeros(len(own)), 1 - self._rank)
        return ""

    def run(self, times: int) -> None:
        for _ in range(times):
            self._call()


def over_gloo(up: Any, down: Any) -> Callable[..., Callable[[], object]]:
    """A connection for each direction, as dlbench has them."""

    def once(own: torch.Tensor, other: torch.Tensor, slot: torch.Tensor, peer: int) -> Callable[[], object]:
        send, receive = (up.send, down.recv) if peer else (down.send, up.recv)
        into, arrived, owns, others, slots = own.numpy(), slot.numpy(), [own], [other], [slot]

        def call() -> None:
            arriving, leaving = receive(slots, peer, 0), send(others, peer, 0)
            leaving.wait()
            returning = receive(others, peer, 1)
            arriving.wait()
            np.add(into, arrived, into)
            leaving = send(owns, peer, 1)
            returning.wait()
            leaving.wait()

        return call

    return once


def over_mpi(mpi: Any) -> Callable[..., Callable[[], object]]:
    """Persistent requests on a communicator of their own."""
    world = mpi.COMM_WORLD.Dup()

    def once(own: torch.Tensor, other: torch.Tensor, slot: torch.Tensor, peer: int) -> Callable[[], object]:
        into, arrived = own.numpy(), slot.numpy()
        first_in, second_in = (world.Recv_init(t.numpy(), peer, tag) for tag, t in enumerate((slot, other)))
        first_out, second_out = (world.Send_init(t.numpy(), peer, tag) for tag, t in enumerate((other, own)))

        def call() -> None:
            first_in.Start()
            first_out.Start()
            first_out.Wait()
            second_in.Start()
            first_in.Wait()
            np.add(into, arrived, into)
            second_out.Start()
            second_in.Wait()
            second_out.Wait()

        return call

    return once


def rank(folder: Path) -> None:
    """One rank, on a core of its own: median seconds of each, all in turns, by carrier and size."""
    torch.set_num_threads(1)
    plan = CommPlan.model_validate_json((folder / "plan.json").read_text(encoding="utf-8"))
    comm, place, cpu = plan.comm, detect(plan), torch.device("cpu")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    control = Control(place, comm.timeout_s, plan.stall_timeout_s)
    control.start(RunFolder(folder), None)
    mpi = start_mpi(place, "mpirun", many_threads=False)
    up, down = (control.new_group("gloo", "bench") for _ in range(2))
    deadline = Deadline(place.rank, comm.timeout_s)
    deadline.start()
    sides = (
        OwnAlgorithm(comm, "ring", GlooTransport(up, down, place, place.size)),
        BareRing("torch-gloo", place.rank, over_gloo(*(group._get_backend(cpu) for group in (up, down)))),
        TorchReference("allreduce", place, up, "gloo"),
        OwnAlgorithm(comm, "ring", MpiTransport(mpi, place, place.size)),
        BareRing("mpi", place.rank, over_mpi(mpi)),
        MpiReference("allreduce", place, mpi),
    )
    measurement = Measurement(comm, place, cpu, control, deadline, lambda where: None)
    found = []
    for size in comm.sizes:
        points = measurement.points(sides, size)
        assert all(point.correct for point in points), [point.problem for point in points]
        took = [statistics.median(point.times_s) for point in points]
        found += [("torch-gloo", size, *took[:3]), ("mpi", size, *took[3:])]
    if place.rank == 0:
        (folder / FOUND).write_text(json.dumps(found), encoding="utf-8")
    control.barrier("end")
    deadline.stop()
    stop_mpi(mpi)
    control.stop()
