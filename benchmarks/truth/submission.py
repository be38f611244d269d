"""Jobs lost or doubled when a submission is cut off, and ranks that are accused wrongly: counted.

A stub of sbatch keeps a queue in a file; at one job of each trial it is interrupted (SIGHUP comes while it runs), or
ends badly with a message of the real one, having taken the job or not. Then the series is completed, twice.
"""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from dlbench.errors import RunError
from dlbench.jobs.campaign import completing
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.campaign.completing import begin, complete
from dlbench.jobs.campaign.series_file import submission_status
from dlbench.jobs.processes import Interruption
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.records.folder import create
from dlbench.records.scan import read_run
from dlbench.records.status import write_status
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request
from tests.support.run_factory import plans, status

JOBS = 12
RANKS, KILLED = 8, 40

TAKEN = (
    "Batch job submission failed: Socket timed out on send/recv operation",
    "Batch job submission failed: Unable to contact slurm controller (connect failure)",
    "Batch job submission failed: Zero Bytes were transmitted or received",
    "",
)
REFUSED = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size ... limits)",
    "Batch job submission failed: Invalid account or account/partition combination specified",
    "Batch job submission failed: Requested node configuration is not available",
    "Batch job submission failed: Invalid qos specification",
)

_SBATCH = """#!/bin/bash
. ./mishap
n=$(wc -l < calls); echo x >> calls
take() { for word; do case $word in --comment=*) c=${word#*=};; --chdir=*) d=${word#*=};; esac; done
  echo "$((n + 1))|PENDING|N/A|None|$c|$d" >> queue; }
if [ "$n" = "$AT" ]; then
  case $HOW in
    signal) kill -HUP "$PPID" ;;
    taken) take "$@"; echo "sbatch: error: $WORDS" >&2; exit 1 ;;
    *) echo "sbatch: error: $WORDS" >&2; exit 1 ;;
  esac
fi
take "$@"; echo "$((n + 1))"
"""


def figures() -> Iterator[Figure]:
    """Jobs lost or doubled; ranks named wrongly."""
    for name, how, messages in (
        ("SIGHUP comes during sbatch", "signal", ("",)),
        ("sbatch fails and has taken the job", "taken", TAKEN),
        ("sbatch fails and has not taken the job", "lost", TAKEN),
        ("sbatch refuses", "lost", REFUSED),
    ):
        # Where the mishap comes, with the first message; what it is called, in the middle.
        trials = [*((messages[0], at) for at in range(JOBS)), *((words, JOBS // 2) for words in messages[1:])]
        wrong = sum(_wrong(how, words, at) for words, at in trials)
        yield Figure(
            name=f"{name}, at each of {JOBS} jobs; then completed twice: jobs lost or doubled",
            value=float(wrong),
            unit=f"of {len(trials) * JOBS}",
            goal="0",
            met=wrong == 0,
        )
    wrong, without = _accused()
    yield Figure(
        name=f"one of {RANKS} ranks is killed under srun, which ends the others: another one is named",
        value=float(wrong),
        unit=f"of {KILLED} runs",
        goal="0",
        met=wrong == 0,
        reason=f"{without} where the log is not read",
    )


@contextmanager
def _place() -> Iterator[Path]:
    """An empty folder to work in, with stubs of Slurm's programs on PATH."""
    before, path = Path.cwd(), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, body in (("sbatch", _SBATCH), ("squeue", "#!/bin/bash\ncat queue\n")):
            (folder / name).write_text(body, encoding="utf-8")
            (folder / name).chmod(0o755)
        for name in ("calls", "queue"):
            (folder / name).touch()
        os.environ["PATH"] = f"{folder}:{path}"
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            os.environ["PATH"] = path


def _wrong(how: str, words: str, at: int) -> int:
    """Jobs that are not in the queue just once after a submission with one mishap, and two completions."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    with _place() as folder:
        mishap = f"AT={at} HOW={how} WORDS={shlex.quote(words)}\n"
        (folder / "mishap").write_text(mishap, encoding="utf-8")
        pauses, completing._LOOKS_S = completing._LOOKS_S, (0.0,)
        try:
            series = begin(folder, _jobs(), chain=True, python="python3", request="bench")
            for _ in range(3):
                with suppress(KeyboardInterrupt, RunError), Interruption() as interruption:
                    complete(folder, series, Slurm(), interruption.check, lambda done: None)
        finally:
            completing._LOOKS_S = pauses
            for number, handler in handlers.items():
                signal.signal(number, handler)
        taken = Counter(line.split("|")[5] for line in (folder / "queue").read_text(encoding="utf-8").splitlines())
        now = submission_status(folder, series)
        wanted = [str(folder / job.runs[0]) for job in now.series.jobs]
        return sum(taken[place] != 1 for place in wanted) + (now.submitted != now.total)


def _jobs() -> list[Job]:
    request = Request(
        workload="cosmoflow", preset="ci", system="box", points=(1,), points_are="nodes", repeats=JOBS, series="bench"
    )
    return [job_of([plan]) for plan in expand(request, machine_cores=2)]


def _accused() -> tuple[int, int]:
    """Runs of which another rank than the one killed is named first: by their logs, and without them."""
    chance = np.random.default_rng(15)
    wrong = without = 0
    (plan,) = plans(points=(RANKS,), repeats=1)
    for _ in range(KILLED):
        with tempfile.TemporaryDirectory() as temporary:
            folder = create(Path(temporary), plan)
            victim, *others = (int(rank) for rank in chance.permutation(RANKS))
            lost = set(others[: int(chance.integers(0, 4))])
            for rank in range(RANKS):
                said = {"failure": "peer", "failed_at": "2026-03-01T12:00:00.200000Z"} if rank in lost else {}
                words = ("failed", "Connection reset by peer") if said else ("measuring", "")
                write_status(folder, status(rank, f"n{rank // 4}", *words, **said))
            without += not read_run(folder.path).detail.startswith(f"rank {victim} ")
            log = [f"srun: error: n{victim // 4}: task {victim}: Killed", "srun: launch/slurm: Terminating StepId=1.0"]
            log += [f"srun: error: n{rank // 4}: task {rank}: Killed" for rank in others if rank not in lost]
            (folder.path / "slurm-1.out").write_text("\n".join(log), encoding="utf-8")
            wrong += not read_run(folder.path).detail.startswith(f"rank {victim} ")
    return wrong, without
