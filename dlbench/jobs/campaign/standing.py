"""How far the submission of a series is: what its files, and the folders of its runs, say of each job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlbench.errors import IncompleteDataError
from dlbench.jobs.campaign.file import FOLDER, SeriesFile, SeriesJob, known_jobs, read_series
from dlbench.jobs.scheduler import array_of, cluster_of
from dlbench.jobs.submission import read_submission
from dlbench.records.folder import RunFolder
from dlbench.sharing import WithheldError

JobState = Literal["submitted", "begun", "unsure", "missing"]
"""unsure: its script was written, and nothing says whether Slurm took it. begun: its ranks wrote, no id is known."""

_LOG = re.compile(r"slurm-(\d+)(_\d+)?\.out")
_ANY_LOG = re.compile(rf"(earlier-)?{_LOG.pattern}")
_WROTE = re.compile(r"(rank|node)-\d+\..*|record\.json|comm\.json|rendezvous\.json|launch\.log")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a series has got."""

    series: SeriesFile
    states: tuple[JobState, ...]
    """Of each job."""
    ids: tuple[str, ...]
    """Slurm's; empty where it is not known."""

    @property
    def submitted(self) -> int:
        """Jobs that Slurm took."""
        return sum(state in ("submitted", "begun") for state in self.states)

    @property
    def clusters(self) -> set[str]:
        """Those that took its jobs; an empty name: the one here."""
        return {cluster_of(job_id) for job_id in self.ids if job_id}

    @property
    def known(self) -> bool:
        """Whether Slurm took, or may have taken, any job."""
        return any(state != "missing" for state in self.states)

    @property
    def total(self) -> int:
        """Jobs of the series."""
        return len(self.states)

    @property
    def text(self) -> str:
        """E.g. ``5 of 8 jobs submitted, 1 more may be queued``."""
        unsure = self.states.count("unsure")
        more = f", {unsure} more may be queued" if unsure else ""
        return f"{self.submitted} of {self.total} jobs submitted{more}"


def standings(root: Path) -> tuple[list[Standing], list[str]]:
    """Every series below the folder of all runs, and what is damaged, a line each."""
    found, problems = [], []
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            found.append(standing(root, path.stem))
        except WithheldError:
            continue  # so are its runs, of which that is told
        except IncompleteDataError as error:
            problems.append(str(error))
    return found, problems


def standing(root: Path, series_id: str) -> Standing:
    """How far one series has got.

    Raises:
        UserError: there is none of this name.
        IncompleteDataError: its file, or that of a run, is damaged.
    """
    series = read_series(root, series_id)
    known = known_jobs(root, series_id)
    told = [_state(root, job, known) for job in series.jobs]
    return Standing(
        series=series,
        states=tuple(state for state, _ in told),
        ids=tuple(job_id for _, job_id in told),
    )


def _state(root: Path, job: SeriesJob, known: dict[str, str]) -> tuple[JobState, str]:
    """Of a job, and Slurm's id."""
    if known.get(job.runs[0]):
        return "submitted", known[job.runs[0]]
    folders = [RunFolder(root / run_id) for run_id in job.runs]
    for folder in folders:
        submission = read_submission(folder)
        if submission is not None:
            own = submission.reference
            return "submitted", own if job.array_limit is None else array_of(own)
    wrote, job_id = _wrote(folders)
    if wrote:
        return "begun", job_id
    return ("unsure" if any(folder.script.exists() for folder in folders) else "missing"), ""


def _wrote(folders: Sequence[RunFolder]) -> tuple[bool, str]:
    """Whether a job left anything in the folders of its runs, and the id that its log is named by."""
    wrote = False
    for folder in folders:
        try:
            names = [path.name for path in folder.path.iterdir()]
        except OSError:
            continue
        for name in names:
            if found := _LOG.fullmatch(name):
                return True, found[1]
            wrote = wrote or _WROTE.fullmatch(name) is not None
    return wrote, ""


def never_began(folder: RunFolder) -> bool:
    """Whether nothing lies in a run's folder but what its submission wrote, and what the scheduler says of its job."""
    submitted = {folder.plan.name, folder.script.name, folder.submission.name, folder.accounting.name}
    try:
        names = {path.name for path in folder.path.iterdir()}
    except OSError:
        return False
    return folder.plan.name in names and all(name in submitted or _ANY_LOG.fullmatch(name) for name in names)
