"""A series through a scheduler that is not Slurm: exactly once whatever happens, fed, cancelled, waited for."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli as command_line
from dlbench.errors import RunError, UserError
from dlbench.jobs.campaign import series_file
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.campaign.completing import Submitted, begin, complete, write_only
from dlbench.jobs.campaign.ended import cancel_run, cancel_series, reopen
from dlbench.jobs.campaign.run_status import wait
from dlbench.jobs.campaign.series_file import (
    FOLDER,
    append,
    is_held,
    known_jobs,
    locked,
    series_path,
    submission_status,
)
from dlbench.jobs.scheduler import Answer, SchedulerUnavailableError, SubmissionUnknownError, read_submission
from dlbench.jobs.scripts.job import Job
from dlbench.records.folder import RunFolder
from dlbench.records.status import write_failure, write_status
from tests.support.desk_scheduler import Desk
from tests.support.run_factory import BOX, constant, plans, status, write_run

TIMES = constant([1, 0, 3, 5, 0, 1])
QUIET: Callable[..., None] = lambda *_: None  # noqa: E731


def jobs(count: int, series: str = "s") -> list[Job]:
    return [job_of([plan], {}) for plan in plans(**BOX, engine="ddp", repeats=count, series=series)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr("dlbench.jobs.campaign.completing._QUERY_PAUSES_S", (0.0,))
    made = Desk(queue=tmp_path / "queue")
    monkeypatch.setitem(series_file.SCHEDULERS, "slurm", lambda: made)
    return made


def begun(root: Path, count: int = 4, *, chain: bool = False) -> str:
    return begin(root, jobs(count), chain=chain, python="/python", request="dlbench submit ...")


def submitted(root: Path, desk: Desk, most: int | None = None) -> list[str]:
    told: list[Submitted] = []
    complete(root, "s", desk, QUIET, told.append, most)
    return [one.job_id for one in told]


def exactly_once(root: Path, desk: Desk, count: int) -> None:
    """Each job of the series is in the queue once, and has its folder."""
    now = submission_status(root, "s")
    assert now.text == f"{count} of {count} jobs submitted"
    runs = [job.runs[0] for job in now.series.jobs]
    assert sorted(row[3] for row in desk.lines()) == sorted(str(root / run) for run in runs)
    assert sorted(path.name for path in root.iterdir() if path.name != FOLDER) == sorted(runs)
    for run in runs:
        submission = read_submission(RunFolder(root / run))
        assert [submission.job_id] == [row[0] for row in desk.lines() if row[3] == str(root / run)]


# Exactly once


def killed_at(action: Callable[[], object], number: int) -> bool:
    """Runs it in a fork that is killed with SIGKILL at its so many-th change of the file system; whether it was."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    count = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.truncate"):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        action()
    finally:
        os._exit(0)


def sweep(tmp_path: Path, count: int, step: int) -> int:
    """Kills a submission of so many jobs at every so many-th point; returns the number of points."""
    points = 0
    made = jobs(count)
    while True:
        place = tmp_path / f"at-{points}"
        root = place / "runs"
        root.mkdir(parents=True)
        desk = Desk(queue=place / "queue")

        def both(root: Path = root, desk: Desk = desk) -> None:
            begin(root, made, chain=True, python="/python", request="dlbench submit ...")
            submitted(root, desk)

        was_killed = killed_at(both, 1 + points * step)
        if not series_path(root, "s", "json").exists():
            begin(root, made, chain=True, python="/python", request="dlbench submit ...")
        submitted(root, desk)
        exactly_once(root, desk, count)
        points += 1
        if not was_killed:
            return points


def test_a_kill_at_any_moment_loses_and_doubles_nothing(tmp_path: Path, desk: Desk) -> None:
    assert sweep(tmp_path, 3, 1) > 20


@pytest.mark.nightly
def test_a_kill_at_any_moment_of_twenty_jobs_loses_and_doubles_nothing(tmp_path: Path, desk: Desk) -> None:
    assert sweep(tmp_path, 20, 1) > 150


@pytest.mark.parametrize("is_taken", [True, False])
def test_submissions_that_end_badly_again_and_again(root: Path, desk: Desk, is_taken: bool) -> None:
    """Whether the controller took the job that it says nothing about, or not."""
    begun(root, 20, chain=True)
    doubt = Answer(doubt="sbatch failed: Socket timed out on send/recv operation")
    silent: Callable[[int], Answer | None] = lambda number: doubt if number % 2 else None  # noqa: E731
    if is_taken:
        desk.after = silent
    else:
        desk.before = silent
    for _ in range(41):
        try:
            submitted(root, desk)
        except SubmissionUnknownError:
            continue
        break
    exactly_once(root, desk, 20)
    if not is_taken:
        assert desk.times > 20


def test_a_lock_is_kept_by_the_command_that_runs(root: Path, desk: Desk) -> None:
    """A sbatch whose dlbench was killed still runs: until it has ended, nobody asks whether its job is there."""
    begun(root)
    with locked(root, "s") as lock:
        kept = os.dup(lock)
    assert is_held(root, "s")
    with pytest.raises(UserError, match="being submitted by another process"):
        submitted(root, desk)
    os.close(kept)
    assert len(submitted(root, desk)) == 4


def test_lines_that_were_cut_off_are_taken_away(root: Path, desk: Desk) -> None:
    begun(root)
    desk.before = lambda number: Answer(refusal="no") if number == 3 else None
    with pytest.raises(RunError):
        submitted(root, desk)
    path = series_path(root, "s", "jobs")
    first, second = known_jobs(root, "s")
    path.write_text(path.read_text()[:-2])  # of the second job's line
    assert known_jobs(root, "s") == {first: "1"}
    assert submission_status(root, "s").text == "2 of 4 jobs submitted"  # its own folder knows
    append(path, "x 7\n")
    assert known_jobs(root, "s") == {first: "1", "x": "7"}
    assert second not in known_jobs(root, "s")


def test_a_job_that_left_only_its_log_is_not_submitted_again(root: Path, desk: Desk) -> None:
    """Killed after sbatch, gone on with when Slurm had forgotten the job."""
    begun(root)
    desk.after = lambda number: Answer(doubt="it ended") if number == 1 else None
    desk.is_silent = True
    with pytest.raises(SubmissionUnknownError):
        submitted(root, desk)
    run = submission_status(root, "s").series.jobs[0].runs[0]
    (root / run / "slurm-812.out").write_text("no such Python\n")
    desk.queue.write_text("")
    desk.is_silent = False
    assert submission_status(root, "s").ids[0] == "812"
    assert len(submitted(root, desk)) == 3


# The queue's room


def test_no_more_jobs_than_asked_for_are_in_the_queue(root: Path, desk: Desk) -> None:
    begun(root, 5, chain=True)
    assert submitted(root, desk, 2) == ["1", "2"]
    assert submitted(root, desk, 2) == []
    desk.set_state("F", "1")
    assert submitted(root, desk, 2) == ["3"]
    desk.is_silent = True
    with pytest.raises(SchedulerUnavailableError, match="it is unknown how many"):
        submitted(root, desk, 2)
    desk.is_silent = False
    desk.set_state("F")
    assert submitted(root, desk, 2) == ["4", "5"]
    # A job that has ended may be forgotten, and is not waited for.
    commands = [read_submission(RunFolder(root / job.runs[0])) for job in submission_status(root, "s").series.jobs]
    after = [one.command[2].removeprefix("-Wafter=") for one in commands if one is not None]
    assert after == ["", "1", "2", "", "4"]


def test_an_array_counts_its_elements(root: Path, desk: Desk) -> None:
    plans = [plan for job in jobs(4) for plan in job.plans]
    array = Job(plans=tuple(plans), time_limit="00:10:00", array_limit=0)
    begin(root, [array], chain=False, python="/python", request="dlbench submit ...")
    with pytest.raises(UserError, match="array of 4"):
        submitted(root, desk, 3)
    assert submitted(root, desk, 4) == ["1"]
    submission = read_submission(RunFolder(root / plans[2].run_id))
    assert submission.job_id == "1_3"


def test_a_look_at_a_series_does_not_stop_who_submits_it(root: Path, desk: Desk) -> None:
    """`dlbench status` and `dlbench wait` have the lock for a moment."""
    begun(root, 2)
    with locked(root, "s") as lock:
        kept = os.dup(lock)
    threading.Timer(0.05, os.close, [kept]).start()
    assert submitted(root, desk) == ["1", "2"]


def test_a_job_that_had_the_folder_before_is_not_taken_for_a_new_one(root: Path, desk: Desk) -> None:
    """A run that never began is in a new job, of which sbatch says neither yes nor no."""
    begun(root, 1)
    submitted(root, desk)
    desk.set_state("T")
    assert reopen(root, "s", desk).runs == 1
    desk.before = lambda number: Answer(doubt="Socket timed out") if number == 2 else None
    with pytest.raises(SubmissionUnknownError):
        submitted(root, desk)
    assert submitted(root, desk) == ["2"]


# By hand


def by_hand(desk: Desk, root: Path, number: int) -> str:
    """Somebody submits the script of a job, from 0; its id."""
    entry = submission_status(root, "s").series.jobs[number]
    return a_victim(desk, entry.comment, str(root / entry.runs[0]))


def test_a_series_that_is_only_written_is_submitted_by_hand_or_resumed(root: Path, desk: Desk) -> None:
    begun(root, 3)
    assert [job.run_ids for job, _ in write_only(root, "s", desk, QUIET)] == [
        entry.runs for entry in submission_status(root, "s").series.jobs
    ]
    assert write_only(root, "s", desk, QUIET) == []
    assert desk.lines() == []
    assert submission_status(root, "s").text == "0 of 3 jobs submitted, 3 with a script only"
    told = CliRunner().invoke(command_line, ["status", str(root), "--full"])
    assert told.exit_code == 0, told.output
    assert told.stdout.count("its script was written, and not submitted yet") == 3
    assert f"the rest: dlbench submit --resume s --out {root}" in told.stdout
    # Told by the scheduler, and then by the job's own log where that has forgotten it.
    waiting = by_hand(desk, root, 1)
    told = CliRunner().invoke(command_line, ["status", str(root)])
    assert f"  job {waiting}\n" in told.stdout
    last = submission_status(root, "s").series.jobs[2].runs[0]
    (root / last / "slurm-77.out").write_text("dlbench: ...")
    assert CliRunner().invoke(command_line, ["status", str(root)]).stdout.count("  job 77\n") == 1
    assert submission_status(root, "s").ids == ("", waiting, "77")
    assert submission_status(root, "s").text == "2 of 3 jobs submitted, 1 with a script only"
    submission = read_submission(RunFolder(root / last))
    assert (submission.job_id, submission.log) == ("77", f"{last}/slurm-77.out")
    assert submitted(root, desk) == ["2"]
    assert submission_status(root, "s").text == "3 of 3 jobs submitted"


def test_resuming_takes_no_job_twice_that_was_submitted_by_hand(root: Path, desk: Desk) -> None:
    begun(root, 3)
    write_only(root, "s", desk, QUIET)
    by_hand(desk, root, 2)
    desk.is_silent = True
    with pytest.raises(SchedulerUnavailableError, match="it is unknown whether 3 jobs may be queued already"):
        submitted(root, desk)
    desk.is_silent = False
    submitted(root, desk)
    exactly_once(root, desk, 3)


def test_cancelling_takes_written_jobs_out_and_ends_those_submitted_by_hand(root: Path, desk: Desk) -> None:
    begun(root, 3)
    write_only(root, "s", desk, QUIET)
    ours = by_hand(desk, root, 0)
    assert cancel_series(root, "s", desk).text == "1 job cancelled, 2 never submitted and removed from the series"
    assert desk.cancelled == [ours]
    assert len([path for path in root.iterdir() if path.name != FOLDER]) == 1
    other = root.parent / "others"
    other.mkdir()
    begun(other)
    write_only(other, "s", desk, QUIET)
    cancel_series(other, "s", desk)
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("number", [2, 5, 8, 11, 14, 17, 20])
def test_a_kill_while_scripts_are_written_loses_and_doubles_nothing(root: Path, desk: Desk, number: int) -> None:
    begun(root, 3)
    assert killed_at(lambda: write_only(root, "s", desk, QUIET), number)
    write_only(root, "s", desk, QUIET)
    by_hand(desk, root, 1)
    # The commands of those before the kill were never printed.
    asked = ("submit", "--resume", "s", "--write-only", "--out", str(root))
    desk.is_silent = True
    assert "do not submit scripts that are in the queue already" in CliRunner().invoke(command_line, asked).stderr
    desk.is_silent = False
    for wrong in ("dry-run", "cancelled", "max-jobs=2"):
        refused = CliRunner().invoke(command_line, [*asked, f"--{wrong}"])
        assert str(refused.exception) == f"--write-only and --{wrong.partition('=')[0]} exclude each other"
    again = CliRunner().invoke(command_line, asked)
    assert again.exit_code == 0, again.output
    entries = submission_status(root, "s").series.jobs
    assert [[entry.runs[0] in line for entry in entries] for line in again.stdout.splitlines()] == [
        [True, False, False],
        [False, False, True],
    ]
    submitted(root, desk)
    exactly_once(root, desk, 3)


# Cancelling


def test_a_series_is_cancelled_and_what_was_left_is_taken_out(root: Path, desk: Desk) -> None:
    begun(root, 6)
    assert submitted(root, desk, 3) == ["1", "2", "3"]
    desk.set_state("F", "1")
    stranger = desk.lines()
    stranger[2][2:] = ["", "/home/another"]  # the number went round
    desk.queue.write_text("".join("|".join(row) + "\n" for row in stranger))
    done = cancel_series(root, "s", desk)
    assert desk.cancelled == ["2"]
    assert done.text == (
        "1 job cancelled, 1 ended before, 3 never submitted and removed from the series, "
        "not cancelled, because it is no job of this series: 3"
    )
    assert submission_status(root, "s").text == "3 of 3 jobs submitted"
    assert submitted(root, desk) == []


def test_nothing_is_cancelled_while_nobody_knows_whose_the_jobs_are(root: Path, desk: Desk) -> None:
    begun(root)
    submitted(root, desk)
    desk.is_silent = True
    with pytest.raises(SchedulerUnavailableError, match="nothing was cancelled"):
        cancel_series(root, "s", desk)
    assert desk.cancelled == []


def test_a_job_that_nobody_knew_of_is_found_and_cancelled(root: Path, desk: Desk) -> None:
    begun(root, 1)
    desk.after = lambda number: Answer(doubt="it ended")
    desk.is_silent = True
    with pytest.raises(SubmissionUnknownError):
        submitted(root, desk)
    desk.is_silent = False
    assert cancel_series(root, "s", desk).jobs == ("1",)


def test_one_run_is_cancelled_if_its_job_is_its_own(root: Path, desk: Desk) -> None:
    begun(root, 2)
    submitted(root, desk)
    folder = RunFolder(root / submission_status(root, "s").series.jobs[1].runs[0])
    submission = read_submission(folder)
    assert submission is not None
    assert cancel_run(folder, submission, desk).jobs == ("2",)
    shared = submission.model_copy(update={"runs": ("a", "b", "c")})
    with pytest.raises(UserError, match="shares job 2 with 2 other runs"):
        cancel_run(folder, shared, desk)
    with pytest.raises(UserError, match="belongs to user ann"):
        cancel_run(folder, submission.model_copy(update={"owner": "ann"}), desk)


def a_victim(desk: Desk, comment: str, folder: str) -> str:
    """A job of the user's that has nothing to do with the series."""
    number = str(len(desk.lines()) + 1)
    with desk.queue.open("a", encoding="utf-8") as file:
        file.write(f"{number}|R|{comment}|{folder}\n")
    return number


def test_a_file_that_names_a_job_does_not_make_it_the_run_s(root: Path, desk: Desk, tmp_path: Path) -> None:
    """Whoever can write into the folder of runs can write comment and command of any job there."""
    begun(root, 1)
    submitted(root, desk)
    run = submission_status(root, "s").series.jobs[0].runs[0]
    folder = RunFolder(root / run)
    victim = a_victim(desk, "mine/0123abcd", str(tmp_path / "home"))
    submission = read_submission(folder)
    forged = submission.model_copy(
        update={"job_id": victim, "command": ("sbatch", "--comment=mine/0123abcd", f"--chdir={tmp_path / 'home'}")}
    )
    desk.set_state("F", "1")
    assert cancel_run(folder, forged, desk).text == (
        f"0 jobs cancelled, not cancelled, because it is no job of this series: {victim}"
    )
    listed = series_path(root, "s", "json")
    comment = submission_status(root, "s").series.jobs[0].comment
    listed.write_text(listed.read_text().replace(comment, "mine/0123abcd"))
    series_path(root, "s", "jobs").write_text(f"{run} {victim}\n")
    assert cancel_series(root, "s", desk).foreign_jobs == (victim,)
    assert desk.cancelled == []


# Waiting


def test_a_series_is_waited_for_until_nothing_more_comes(root: Path, desk: Desk) -> None:
    begun(root, 3)
    submitted(root, desk)
    told: list[str] = []
    assert not wait(root, "s", QUIET, told.append, 0.05, 0.01).is_over
    assert told == ["series s: 0 of 3 runs valid, 3 Q"]
    made = [job.plans[0] for job in jobs(3)]
    runs = [job.runs[0] for job in submission_status(root, "s").series.jobs]
    for run, plan in zip(runs[:2], made, strict=False):
        own = plan.model_copy(update={"run_id": run})
        _record(root, own)
    desk.set_state("F", "1", "2")
    desk.set_state("R", "3")
    assert wait(root, "s", QUIET, told.append, 0.05, 0.01).text == "series s: 2 of 3 runs valid, 1 R"
    write_failure(RunFolder(root / runs[2]), "rank 0 failed")
    now = wait(root, "s", QUIET, told.append, 5, 0.01)
    assert (now.is_over, now.is_valid, now.text) == (True, False, "series s: 2 of 3 runs valid, 1 failed")


def _record(root: Path, plan: object) -> None:
    """A valid record where the folder has a plan already."""
    import shutil

    from dlbench.specs.plan import RunPlan

    assert isinstance(plan, RunPlan)
    folder = root / plan.run_id
    kept = (folder / "submission.json").read_bytes()
    shutil.rmtree(folder)
    write_run(root, plan, TIMES)
    (folder / "submission.json").write_bytes(kept)


def test_jobs_that_ended_without_a_record_are_waited_for_twice(root: Path, desk: Desk) -> None:
    begun(root, 2)
    submitted(root, desk, 1)
    desk.set_state("F")
    now = wait(root, "s", QUIET, QUIET, 5, 0.01)
    assert (now.is_over, now.is_valid) == (True, False)
    assert now.text == "series s: 0 of 2 runs valid, 1 failed, 1 not submitted"


@pytest.mark.parametrize("failed", [True, False])
def test_a_failed_run_whose_job_was_requeued_is_waited_for(root: Path, desk: Desk, failed: bool) -> None:
    """The log of a job that was preempted says so until the next attempt begins."""
    begun(root, 1)
    submitted(root, desk)
    folder = RunFolder(root / submission_status(root, "s").series.jobs[0].runs[0])
    if failed:
        write_status(folder, status(0, "n0", "failed"))
    (folder.path / "slurm-1.out").write_text(
        "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT x DUE TO PREEMPTION ***\n"
    )
    now = wait(root, "s", QUIET, QUIET, 0.05, 0.01)
    assert (now.is_over, now.text) == (False, "series s: 0 of 1 run valid, 1 Q")
    (one,) = now.runs.values()
    assert "its job was requeued" in one.detail
    desk.set_state("F")
    assert wait(root, "s", QUIET, QUIET, 5, 0.01).text == "series s: 0 of 1 run valid, 1 failed"


# Two people


def as_user(uid: int, action: Callable[[], object]) -> str:
    """What an action of another user raises; empty if nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(1234)
            os.setuid(uid)
            try:
                action()
                said = ""
            except Exception as error:  # any: it is told
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as file:
        return file.read()


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A folder of runs that every user reaches: pytest's own are closed again by whoever starts pytest."""
    with tempfile.TemporaryDirectory(prefix="dlbench-users-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "runs").mkdir()
        yield Path(folder) / "runs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_in_a_folder_of_their_group(open_root: Path, desk: Desk) -> None:
    from dlbench.jobs.campaign.run_status import run_statuses
    from dlbench.records.folder import prepare_output
    from dlbench.records.scan import scan

    root = open_root
    os.chown(root, 0, 1234)
    root.chmod(0o2775)
    before = os.umask(0o077)
    try:
        prepare_output(root)
        begun(root, 2)
    finally:
        os.umask(before)
    submitted(root, desk)
    runs = [job.runs[0] for job in submission_status(root, "s").series.jobs]
    assert (root / FOLDER).stat().st_mode & 0o7777 == 0o2775
    assert series_path(root, "s", "json").stat().st_mode & 0o777 == 0o640
    assert submission_status(root, "s").series.owner == "root"
    # The same name is refused, another one is not.
    said = as_user(65534, lambda: begin(root, jobs(2), chain=False, python="/p", request="x"))
    assert said == f"UserError: {root}: series s belongs to user root; choose another --series"
    assert as_user(65534, lambda: begin(root, jobs(1, "t"), chain=False, python="/p", request="x")) == ""
    assert submission_status(root, "t").series.owner == "nobody"
    assert "belongs to user root, who alone can continue it" in as_user(65534, lambda: submitted(root, desk))
    # Runs that the group may read are read, and whose jobs they are is told.
    seen = Desk(queue=root.parent / "empty")
    series_file.SCHEDULERS["slurm"] = lambda: seen

    def read() -> None:
        found, problems = run_statuses(scan(root).runs)
        raise RunError(f"{len(found)} {problems} {found[0].detail}")

    assert as_user(65534, read).startswith(
        "RunError: 2 [] job 1 belongs to user root: Slurm no longer knows it, or shows it only to its owner; "
    )
    # Others are told, and are not damage.
    (root / runs[0]).chmod(0o700)

    def look() -> None:
        there = scan(root)
        raise RunError(f"{len(there.runs)} {there.problems} {there.withheld}")

    assert as_user(65534, look) == f"RunError: 1 [] ['{root / runs[0]}: owned by user root, not readable']"
