"""A scheduler that is no Slurm: its queue is a file, a line a job; nothing ever runs."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlbench.jobs.scheduler import Answer, Phase, Queue, QueuedJob
from dlbench.jobs.scripts.job import Job
from dlbench.records.folder import RunFolder

PHASES: dict[str, Phase] = {"Q": "waiting", "R": "running", "F": "over", "T": "over"}


@dataclass(kw_only=True)
class Desk:
    """Does what `dlbench.jobs.slurm.scheduler.Slurm` does."""

    queue: Path
    name: str = "Desk"
    before: Callable[[int], Answer | None] = lambda number: None
    """Called with the number of a submission, from 1, before the job is taken; its answer stands for that."""
    after: Callable[[int], Answer | None] = lambda number: None
    """The same when it is taken."""
    is_silent: bool = False
    stuck: str = ""
    """Why jobs that wait never start; empty: they will."""
    cancelled: list[str] = field(default_factory=list)
    times: int = 0

    def require(self) -> None:
        """Nothing is needed."""

    def render(self, job: Job, folders: Sequence[RunFolder], python: str, comment: str) -> str:
        return "".join(f"#DESK {folder.path}\n" for folder in folders)

    def command(self, job: Job, folder: RunFolder, after: str | None, comment: str) -> list[str]:
        return ["qsub", f"-N{comment}", f"-Wafter={after or ''}", str(folder.script)]

    def variables(self, job: Job) -> Sequence[str]:
        return ()

    def submit(self, job: Job, command: Sequence[str], keep_open: Sequence[int] = ()) -> Answer:
        self.times += 1
        if (answer := self.before(self.times)) is not None:
            return answer
        with self.queue.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            job_id = str(len(file.readlines()) + 1)
            file.write(f"{job_id}|Q|{command[1].removeprefix('-N')}|{Path(command[3]).parent}\n")
        return self.after(self.times) or Answer(job_id=job_id)

    def lines(self) -> list[list[str]]:
        """Id, state, comment and folder of each job."""
        return [line.split("|") for line in self.queue.read_text().splitlines()] if self.queue.exists() else []

    def set_state(self, state: str, *job_ids: str) -> None:
        rows = [[row[0], state if row[0] in job_ids or not job_ids else row[1], *row[2:]] for row in self.lines()]
        self.queue.write_text("".join("|".join(row) + "\n" for row in rows))

    def clusters(self, job: Job) -> Sequence[str]:
        return ("",)

    def query(self, job_ids: Sequence[str] = (), users: Sequence[str] = (), clusters: Sequence[str] = ()) -> Queue:
        if self.is_silent:
            return Queue(unanswered="qstat failed: no server")
        found = [
            QueuedJob(
                job_id=job,
                state=state,
                phase=PHASES[state],
                comment=comment,
                folder=folder,
                reason=self.stuck,
                is_stuck=bool(self.stuck) and PHASES[state] == "waiting",
            )
            for job, state, comment, folder in self.lines()
        ]
        return Queue(jobs={job.job_id: job for job in found})

    def script(self, job_id: str) -> str:
        return ""

    def cancel(self, job_ids: Sequence[str]) -> str:
        self.cancelled += job_ids
        self.set_state("F", *job_ids) if job_ids else None
        return ""
