"""``python -m dlbench.node runs/<id>/plan.json``: one rank of one run; rank 0 writes its record."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

STARTED = time.monotonic()
if __name__ == "__main__":
    gc.disable()  # Imported objects are never freed, and are frozen below: collecting would cost 0.3 s of CPU.
# After the clock has started. Nothing heavy is imported before the rank is bound: thread pools are sized at import.
from pydantic import ValidationError  # noqa: E402

from dlbench.errors import DlbenchError, ExitCode, UserError  # noqa: E402
from dlbench.node.failures import RankFailure, failure_of  # noqa: E402
from dlbench.node.ranks import (  # noqa: E402
    CoreBinding,
    RankPlace,
    bind,
    by_physical_core,
    detect,
    require_machine,
    require_version,
)
from dlbench.node.training.progress import ProgressReporter, Watchdog  # noqa: E402
from dlbench.node.watching.agent import SamplerProcess, order_for  # noqa: E402
from dlbench.opening import read_json, why_unreadable  # noqa: E402
from dlbench.records.files import write_json  # noqa: E402
from dlbench.records.folder import MAX_JSON, RunFolder  # noqa: E402
from dlbench.records.status import PEER_MARK, write_interrupted  # noqa: E402
from dlbench.specs.comm import CommPlan  # noqa: E402
from dlbench.specs.plan import RunPlan  # noqa: E402
from dlbench.units import utc_now  # noqa: E402

if TYPE_CHECKING:
    import torch

    from dlbench.node.devices import NcclLog
    from dlbench.records.comm import CommRecord
    from dlbench.records.record import Record


def load_plan(path: Path) -> RunPlan | CommPlan:
    """Reads the plan of a training run or, by its format, of the collective benchmark."""
    try:
        content = read_json(path, MAX_JSON)
        if isinstance(content, dict) and content.get("format") == CommPlan.model_fields["format"].default:
            return CommPlan.model_validate(content)
        return RunPlan.model_validate(content)
    except (OSError, ValueError, ValidationError) as error:
        if isinstance(error, ValidationError) and isinstance(content, dict):  # keys of another version
            require_version(content.get("dlbench_version"))
        raise UserError(f"{path}: not a readable plan: {why_unreadable(error)}") from None


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit code."""
    if len(arguments) != 1:
        print("usage: python -m dlbench.node runs/<id>/plan.json", file=sys.stderr)
        return int(ExitCode.USAGE)
    path = Path(arguments[0]).absolute()
    progress: ProgressReporter | None = None
    plan: RunPlan | CommPlan | None = None
    sampler: SamplerProcess | None = None
    place: RankPlace | None = None
    binding: CoreBinding | None = None
    try:
        plan = load_plan(path)
        place = detect(plan)
        folder = RunFolder(path.parent)
        if isinstance(plan, RunPlan) and plan.watch is not None and plan.watch.sampler and place.local_rank == 0:
            # Before `bind`, while this process may still use every core of the node.
            sampler = SamplerProcess(order_for(plan, folder, place, by_physical_core(os.sched_getaffinity(0))))
            sampler.start()
        binding = bind(plan, place)
        progress = ProgressReporter(plan, folder, place)
        progress.enter("starting")
        require_machine(plan, place)
        if isinstance(plan, RunPlan):
            code = _train(plan, folder, place, binding, progress, sampler)
        else:
            code = _exchange(plan, folder, place, binding, progress)
    except Exception as error:
        gpu = binding.gpu if binding is not None else None
        failure = failure_of(error, place, gpu)
        _fail(progress, failure)
        # The log gets the full text of defects and of libraries' failures.
        if failure.full_text or not isinstance(error, DlbenchError):
            traceback.print_exc()
        if isinstance(plan, CommPlan):
            # Without exit handlers (MPI_Finalize, Horovod's), which would wait for ranks that hang or are gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(failure.exit_code))
        return int(failure.exit_code)
    finally:
        if sampler is not None:
            recorded = sampler.problem
            sampler.stop()
            if sampler.problem and sampler.problem != recorded:  # too late for the record
                print(f"dlbench: {sampler.problem}", file=sys.stderr, flush=True)
    progress.enter("done", exit_code=int(code) if code is ExitCode.REQUEUE else 0)
    return int(code)


def _fail(progress: ProgressReporter | None, failure: RankFailure) -> None:
    print(f"dlbench: error: {failure.reason}", file=sys.stderr, flush=True)
    if failure.kind == "peer":
        print(PEER_MARK, file=sys.stderr, flush=True)
    if progress is not None:
        try:
            progress.fail(failure.reason, int(failure.exit_code), failure.kind)
        except DlbenchError as error:
            print(f"dlbench: error: {error}", file=sys.stderr, flush=True)


def _train(
    plan: RunPlan,
    folder: RunFolder,
    place: RankPlace,
    binding: CoreBinding,
    progress: ProgressReporter,
    sampler: SamplerProcess | None,
) -> ExitCode:
    from dlbench.node.devices import device_for, rank_gpu
    from dlbench.node.sync.build_engine import build_engine
    from dlbench.node.training.context import RankContext, RankWatch
    from dlbench.node.training.pauses import StoppedEarlyError
    from dlbench.node.training.run import Rank

    device = device_for(plan, place)
    engine = build_engine(plan, folder, place, device, rank_gpu(device, binding.gpu))
    _collect_garbage()
    with ExitStack() as closing:
        context = RankContext(
            plan=plan,
            folder=folder,
            place=place,
            binding=binding,
            engine=engine,
            device=device,
            watch=RankWatch(plan, folder, place, sampler, started=STARTED),
            status=progress,
            nccl=_nccl_log(device, place, closing),
            watchdog=_watchdog(plan.measure.stall_timeout_s, progress),
            started=STARTED,
        )
        closing.callback(context.watch.close)
        record = early = None
        try:
            engine.start()
            context.started_utc = utc_now()  # the rendezvous of ranks is no part of the run
            record = Rank(context).train()
        except StoppedEarlyError as stopped:
            early = stopped
    progress.enter("finishing")
    if early is not None and place.rank == 0:
        write_interrupted(folder, early.step, early.checkpoint)
    engine.barrier()
    engine.stop()
    context.watchdog.stop()
    return ExitCode.REQUEUE if early is not None else _code_of(record)


def _code_of(record: Record | CommRecord | None) -> ExitCode:
    return ExitCode.OK if record is None or record.state == "valid" else ExitCode.RUN_FAILED


def _watchdog(timeout_s: float, progress: ProgressReporter) -> Watchdog:
    watchdog = Watchdog(timeout_s, lambda reason: progress.fail(reason, int(ExitCode.TIMEOUT), "stalled"))
    watchdog.start()
    return watchdog


def _nccl_log(device: torch.device, place: RankPlace, closing: ExitStack) -> NcclLog | None:
    """Starts NCCL's log, which `closing` deletes, after printing that of a failed rank; None if NCCL is not used."""
    if device.type != "cuda" or place.size == 1:
        return None
    from dlbench.node.devices import NcclLog

    log = NcclLog()
    closing.push(lambda kind, _error, _trace: log.close(failed=kind is not None))
    return log


def _collect_garbage() -> None:
    """Turns the garbage collector on, and freezes imported objects."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _exchange(
    plan: CommPlan, folder: RunFolder, place: RankPlace, binding: CoreBinding, progress: ProgressReporter
) -> ExitCode:
    from dlbench.node.comm.run import measure
    from dlbench.node.devices import device_for

    _collect_garbage()
    device = device_for(plan, place)
    with ExitStack() as closing:
        nccl = _nccl_log(device, place, closing)
        watchdog = _watchdog(plan.stall_timeout_s, progress)

        def on_point(number: int, total: int, text: str) -> None:
            watchdog.beat(f"the start of point {number} ({text})")
            progress.on_point(number, total, text)

        record = measure(
            *(plan, folder, place, binding, device),
            on_point=on_point,
            beat=watchdog.beat,
            started=STARTED,
            on_stuck=watchdog.give_up,
            nccl=nccl,
        )
    progress.enter("finishing")
    if record is not None:
        write_json(folder.comm, record.model_dump(mode="json"))
    watchdog.stop()
    return _code_of(record)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    gc.freeze()  # The interpreter's end would otherwise collect all of torch's objects: 0.4 s of CPU.
    sys.exit(code)
