"""``python -m dlbench.node runs/<id>/plan.json``: one rank of one run. Plan in, record out.

Nothing heavy is imported before the rank is bound to its cores, because thread pools are sized at import.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from pathlib import Path

STARTED = time.monotonic()

from pydantic import ValidationError  # noqa: E402  (the clock must start first)

from dlbench.errors import DlbenchError, ExitCode, UserError  # noqa: E402
from dlbench.node.cores import CoreBinding, bind  # noqa: E402
from dlbench.node.ranks import RankPlace, detect  # noqa: E402
from dlbench.node.training.progress import Progress  # noqa: E402
from dlbench.records.folder import RunFolder  # noqa: E402
from dlbench.specs.plan import RunPlan  # noqa: E402

_PR_SET_PDEATHSIG = 1


def load_plan(path: Path) -> RunPlan:
    """The plan of a run.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        return RunPlan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{path}: not a readable plan: {str(error).splitlines()[0]}") from None


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit code."""
    if len(arguments) != 1:
        print("usage: python -m dlbench.node runs/<id>/plan.json", file=sys.stderr)
        return int(ExitCode.USAGE)
    path = Path(arguments[0]).absolute()
    progress: Progress | None = None
    try:
        plan = load_plan(path)
        place = detect(plan)
        if plan.system.launch.launcher == "local":
            _end_with_launcher()
        binding = bind(plan, place)
        progress = Progress(plan, RunFolder(path.parent), place)
        progress.enter("starting")
        valid = _train(plan, RunFolder(path.parent), place, binding, progress)
    except DlbenchError as error:
        return _fail(progress, str(error), error.exit_code)
    except Exception as error:
        # A defect or a library's failure: the reason goes into the status, the traceback into the log.
        _fail(progress, f"{type(error).__name__}: {error}", ExitCode.RUN_FAILED)
        raise
    progress.enter("done", exit_code=0)
    return int(ExitCode.OK if valid else ExitCode.RUN_FAILED)


def _end_with_launcher() -> None:
    """A killed launcher must not leave ranks computing on the cores of the next measurement (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _fail(progress: Progress | None, reason: str, code: ExitCode) -> int:
    line = " ".join(reason.split())
    print(f"dlbench: error: {line}", file=sys.stderr, flush=True)
    if progress is not None:
        try:
            progress.enter("failed", reason=line[:500], exit_code=int(code))
        except DlbenchError as error:
            print(f"dlbench: error: {error}", file=sys.stderr, flush=True)
    return int(code)


def _train(plan: RunPlan, folder: RunFolder, place: RankPlace, binding: CoreBinding, progress: Progress) -> bool:
    from dlbench.node.sync.choose import build_engine
    from dlbench.node.training.prepare import device_for
    from dlbench.node.training.run import RankRun
    from dlbench.node.training.watchdog import Watchdog

    device = device_for(plan, place)
    engine = build_engine(plan, folder, place, device)
    watchdog = Watchdog(
        plan.measure.stall_timeout_s,
        lambda reason: progress.enter("failed", reason=reason, exit_code=int(ExitCode.TIMEOUT)),
        progress.tick,
    )
    watchdog.start()
    engine.start()

    def on_step(step: int) -> None:
        watchdog.beat(f"the start of step {step}")
        progress.on_step(step)

    run = RankRun(
        plan,
        folder,
        place,
        binding,
        engine,
        device,
        on_step=on_step,
        on_course=progress.expect,
        beat=watchdog.beat,
        started=STARTED,
    )
    record = run.run()
    progress.enter("finishing")
    engine.barrier()
    engine.stop()
    watchdog.stop()
    return record is None or record.state == "valid"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
