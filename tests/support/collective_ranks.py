"""One rank of the tests of the collective benchmark: ``python -m tests.support.collective_ranks FOLDER``.

Started by the tests with a launcher's variables; does what `tasks.json` in the folder lists, one task after the other.
Each has a folder of its own, with `plan.json`, or `plan-RANK.json` if there is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import DlbenchError, ExitCode
from dlbench.node.comm import execution, transport
from dlbench.node.comm import run as comm_run
from dlbench.node.comm.contestants import Reference
from dlbench.node.comm.execution import Execution
from dlbench.node.comm.inputs import DTYPES, Inputs, check
from dlbench.node.comm.run import measure
from dlbench.node.comm.transport import Control, Deadline, GlooTransport, MpiTransport, Transport, start_mpi
from dlbench.node.ranks import CoreBinding, RankPlace, detect
from dlbench.perfmodels.algorithms import schedule
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, CommPlan

CPU = torch.device("cpu")

kept_mpi: list[Any] = []
"""What a task would have ended MPI with."""


class Rank:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = RunFolder(folder)
        self.options = options
        self.started = time.monotonic()
        plan = CommPlan.model_validate_json(self.folder.plan.read_text(encoding="utf-8"))
        self.place: RankPlace = detect(plan)
        own = folder / f"plan-{self.place.rank}.json"
        self.plan = CommPlan.model_validate_json(own.read_text(encoding="utf-8")) if own.exists() else plan

    def control(self) -> Control:
        control = Control(self.place, self.plan.comm.timeout_s, self.plan.stall_timeout_s)
        control.start(self.folder, None)
        return control

    def measure(self, beat: Any = lambda where: None) -> None:
        points: list[tuple[int, int, str]] = []
        record = measure(
            self.plan,
            self.folder,
            self.place,
            CoreBinding(cores=tuple(sorted(os.sched_getaffinity(0))), pinned=False, threads=1, warnings=()),
            CPU,
            on_point=lambda done, total, text: points.append((done, total, text)),
            beat=beat,
            started=self.started,
            on_stuck=lambda reason: print(f"on_stuck: {reason}", file=sys.stderr, flush=True),
        )
        if record is not None:
            write_json(self.folder.path / "comm.json", record.model_dump(mode="json"))
            write_json(self.folder.path / "progress.json", {"points": points})

    def execute(self) -> None:
        """All algorithms at awkward sizes over one transport: verdict and counters of each, into a file a rank."""
        place, options = self.place, self.options
        control = self.control()
        deadline = Deadline(place.rank, 580.0)  # MPI's waits have none
        deadline.start()
        deadline.begin("execute")
        mpi = None
        carrier: Transport
        segment = options["segment_bytes"]
        execution.SLOT_MEMORY_BYTES = segment  # The fewest slots: sends wait for receives that wait for sums.
        group_size = options["group_size"]
        if self.plan.comm.transport == "mpi":
            mpi = start_mpi(place, self.plan.system.launch.launcher)
            carrier = MpiTransport(mpi, place, group_size)
        else:
            up, down = (control.new_group("gloo", "test") for _ in range(2))
            carrier = GlooTransport(up, down, place, group_size)
        carrier.segment_bytes = segment
        found = []
        for collective, names in ALGORITHMS.items():
            for name in names:
                if name in GROUPED_ALGORITHMS and group_size in (1, place.size):
                    continue
                for elements in options["elements"]:
                    inputs = Inputs(collective, place.rank, place.size, elements, "fp32")
                    given = inputs.source()
                    data = torch.zeros(elements, dtype=DTYPES["fp32"])
                    steps = schedule(collective, name, place.rank, place.size, elements, group_size=group_size)
                    bound = Execution(steps, data, carrier, given if collective == "all-to-all" else None)
                    for _ in range(2):  # the second finds everything used
                        inputs.reset(data, given)
                        carrier.counters.reset()
                        bound.run()
                        problem = check(inputs, data).problem
                        if problem:
                            break
                    counters = asdict(carrier.counters)
                    found.append([collective, name, elements, problem, counters])
        control.barrier("end")
        write_json(self.folder.path / f"found-{place.rank}.json", {"found": found})
        if mpi is not None:
            kept_mpi.append(mpi)
        control.stop()
        deadline.stop()

    def vanish(self) -> None:
        """One rank ends, or stops moving, at a certain iteration."""

        def beat(where: str) -> None:
            if self.place.rank == self.options["rank"] and where.endswith(f"iteration {self.options['iteration']}"):
                os.kill(os.getpid(), signal.Signals[self.options["signal"]])

        self.measure(beat)

    def start_late(self) -> None:
        """One rank leaves every barrier of the control channel late."""
        original, late = Control.barrier, self.place.rank == self.options["rank"]

        def barrier(control: Control, what: str) -> None:
            original(control, what)
            time.sleep(self.options["seconds"] if late else 0)

        setattr(Control, "barrier", barrier)  # noqa: B010  (mypy refuses to assign to a method)
        self.measure()

    def stand_still(self) -> None:
        """One rank stops inside a library's collective, at a certain call of it (the first is the trial); call 0: where
        libraries are ended, which waits for all ranks.
        """
        calls = 0
        original = Reference.run
        transport.LATE_S = 0.5  # The rank that waits uses a whole core.
        if self.options["call"] == 0:
            comm_run.stop_mpi = transport.stop_mpi
            if self.place.rank == self.options["rank"]:
                comm_run.stop_mpi = lambda mpi: os.kill(os.getpid(), signal.SIGSTOP)

        def run(reference: Reference, times: int) -> None:
            nonlocal calls
            calls += 1
            if calls == self.options["call"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            original(reference, times)

        if self.place.rank == self.options["rank"]:
            setattr(Reference, "run", run)  # noqa: B010  (mypy refuses to assign to a method)
        self.measure()


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    tasks = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    # MPI cannot begin again once it has ended.
    end_mpi, comm_run.stop_mpi = comm_run.stop_mpi, kept_mpi.append
    try:
        for name, task, options in tasks:
            getattr(Rank(folder / name, options), task)()
    except DlbenchError as error:
        print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
        os._exit(int(error.exit_code))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(int(ExitCode.REGRESSION))
    for mpi in kept_mpi[-1:]:
        end_mpi(mpi)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
