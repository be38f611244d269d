"""One rank of a run of the collective benchmark: plan in, record out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine import environment
from dlbench.node import rendezvous
from dlbench.node.comm.contestants import Contestant
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.lineup import Lineup
from dlbench.node.comm.measure import Measurement
from dlbench.node.comm.pairs import PairMeasurement
from dlbench.node.cores import CoreBinding, Seat, settle
from dlbench.node.devices import NcclLog, rank_gpu, require_own_gpu, together
from dlbench.node.ranks import RankPlace
from dlbench.node.torch_facts import torch_facts
from dlbench.node.watching.core_load import CoreLoad, node_loads
from dlbench.records.comm import CommPoint, CommRecord
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan
from dlbench.units import format_bytes, utc_now


class CommRun:
    """The collective benchmark on one rank. After an error nothing is left in order: end the process at once."""

    def __init__(
        self,
        plan: CommPlan,
        folder: RunFolder,
        place: RankPlace,
        binding: CoreBinding,
        device: torch.device,
        on_point: Callable[[int, int, str], None],
        beat: Callable[[str], None],
        started: float,
        *,
        on_stuck: Callable[[str], None] | None = None,
        nccl: NcclLog | None = None,
    ) -> None:
        """Prepares; nothing is started yet.

        `plan`: what is measured. `folder`: of the run; ranks meet through it. `place`: this rank. `binding`: its cores.
        `device`: where buffers lie; with transport mpi they lie on the CPU. `on_point`: called with points done, points
        in all, and what comes next, before each size. `beat`: called before each iteration with what comes next.
        `started`: monotonic time at which the process began, seconds. `on_stuck`: called from another thread with the
        reason, if a library waits for ever; the process then ends with exit code 124.
        `nccl`: the log of NCCL; who made it closes it.
        """
        self._plan = plan
        self._folder = folder
        self._place = place
        self._binding = binding
        self._device = torch.device("cpu") if plan.comm.transport == "mpi" else device
        self._nccl = nccl
        self._on_point = on_point
        self._beat = beat
        begun = datetime.now(UTC) - timedelta(seconds=time.monotonic() - started)
        self._started_utc = begun.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._deadline = Deadline(place.rank, plan.comm.timeout_s, on_stuck)
        self._done = 0

    def run(self) -> CommRecord | None:
        """Measures all points; the record, on rank 0. Raises `EnvironmentLacksError`: what carries the messages cannot
        be had, or nothing that was asked for can; `RunError`: a rank is gone. The others end within the plan's
        `timeout_s`: with this error, or by `on_stuck` where MPI waits.
        """
        plan, comm = self._plan, self._plan.comm
        control = Control(self._place, comm.timeout_s, plan.stall_timeout_s * rendezvous.PATIENCE)
        control.start(self._folder, plan.system.launch.interface)
        gpu = rank_gpu(self._device, self._binding.gpu)
        require_own_gpu(gpu, self._place, lambda found: control.gather("GPUs", found), by_nccl=gpu is not None)
        self._deadline.start()
        lineup = Lineup(plan, self._folder, self._place, self._device, control)
        clock = lineup.stream_clock()
        about = comm, self._place, self._device, control, self._deadline, self._beat
        measurement = (PairMeasurement if comm.pairs else Measurement)(*about, clock=clock)
        contestants = lineup.in_turns(self._deadline)
        load = CoreLoad(sees_node=self._place.local_rank == 0)
        load.measuring(True)
        total = len(comm.sizes) * (len(contestants) + ("horovod" in comm.backends))
        points = self._all_sizes(measurement, contestants, total)
        warnings = []
        apart = lineup.horovod(self._deadline)
        if apart:
            points += self._all_sizes(measurement, apart, total)
            if contestants:
                warnings.append(
                    "Horovod was timed last, not interleaved with the others: its background thread keeps polling"
                )
        if not points:
            raise EnvironmentLacksError(f"nothing that was asked for can be measured here: {lineup.not_measured[0]}")
        load.measuring(False)
        own = self._binding
        gathered = control.gather("hosts and cores", [self._place.host, list(own.cores), own.threads, own.pinned])
        seats = [
            Seat(rank=rank, host=host, cores=cores, threads=threads, pinned=pinned)
            for rank, (host, cores, threads, pinned) in enumerate(gathered)
        ]
        switches = control.gather("switches", self._place.switch)
        loads = control.gather("load of the cores", [self._place.node_rank, load.summary()])
        logs = control.gather("NCCL's logs", None if self._nccl is None else self._nccl.read())
        self._deadline.begin("end of the run")
        lineup.stop()
        control.stop()
        self._deadline.end()
        self._deadline.stop()
        if self._place.rank != 0:
            return None
        return self._record(points, seats, switches, loads, logs, lineup.not_measured, warnings)

    def _all_sizes(self, measurement: Measurement, contestants: Sequence[Contestant], total: int) -> list[CommPoint]:
        points: list[CommPoint] = []
        if contestants:
            for num_bytes in self._plan.comm.sizes:
                self._on_point(self._done, total, f"{self._plan.comm.collective} of {format_bytes(num_bytes)}")
                points += measurement.points(contestants, num_bytes)
                self._done += len(contestants)
        return points

    def _record(
        self,
        points: Sequence[CommPoint],
        seats: Sequence[Seat],
        switches: Sequence[str],
        loads: Sequence[Any],
        logs: Sequence[Any],
        not_measured: Sequence[str],
        warnings: Sequence[str],
    ) -> CommRecord:
        device = self._device
        problems: list[str] = []
        found = environment.capture(problems, withheld=self._plan.system.launch.referenced)
        found |= torch_facts(problems, device)
        return CommRecord(
            run_id=self._plan.run_id,
            state="invalid" if any(point.correct is False for point in points) else "valid",
            started=self._started_utc,
            finished=utc_now(),
            hosts=tuple(seat.host for seat in seats),
            switches=tuple(switches) if any(switches) else (),
            device=f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu",
            group_size=self._plan.group_size,
            points=tuple(points),
            load=node_loads([load for _, load in loads], seats, [node_rank for node_rank, _ in loads]),
            nccl=together(logs),
            not_measured=tuple(not_measured),
            warnings=(*self._binding.warnings, *settle(seats).warnings, *warnings, *problems),
            environment=found,
        )
