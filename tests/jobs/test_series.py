"""A series whose submission is cut off: what is known of it, and that completing it submits every job once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli as command_line
from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.jobs.campaign.campaign import job_of, jobs_of
from dlbench.jobs.campaign.completing import Submitted, begin, complete
from dlbench.jobs.campaign.ended import cancel_series
from dlbench.jobs.campaign.series_file import SeriesJob, is_held, submission_status
from dlbench.jobs.processes import Interruption
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.records.folder import RunFolder
from dlbench.records.status import write_status
from dlbench.specs.expand import expand_comm
from dlbench.specs.requests import CommRequest
from tests.support.programs import Program, calls
from tests.support.run_factory import BOX, plans, status

SBATCH = 'n=$(wc -l < "$CALLS"); '
"""The number of this call."""


def jobs(repeats: int = 4, series: str = "s", sides: bool = False) -> list[Job]:
    wanted = {"sides": {"a": {}, "b": {"train.seed": 7}}} if sides else {}
    made = plans(**{**BOX, "points": (1, 2) if sides else (1,), "repeats": repeats, "series": series, **wanted})
    return jobs_of(made) if sides else [job_of([plan]) for plan in made]


def begun(root: Path, **wanted: object) -> str:
    root.mkdir(exist_ok=True)
    made = jobs(**wanted)  # type: ignore[arg-type]
    return begin(root, made, chain=True, python="/python", request="dlbench submit ...")


def completed(root: Path, series: str = "s", check: Callable[[], None] = lambda: None) -> list[Submitted]:
    told: list[Submitted] = []
    complete(root, series, Slurm(), check, told.append)
    return told


def comment_of(script: Path) -> str:
    """Returns the comment that identifies the job of a script in the queue."""
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH --comment=")]
    return line.partition("=")[2]


def test_what_a_series_shall_hold_is_written_before_its_first_job(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    program("sbatch", f'cat "{root}/.series/s.json" "{root}/.series/s.plans" > "{tmp_path}/seen"; {SBATCH} echo $n')
    assert begun(root) == "s"
    assert submission_status(root, "s").text == "0 of 4 jobs submitted"
    told = completed(root)
    assert [(one.number, one.job_id, one.is_adopted) for one in told] == [(n, str(n), False) for n in range(1, 5)]
    seen = (tmp_path / "seen").read_text()
    assert all(one.job.run_ids[0] in seen for one in told)
    assert submission_status(root, "s").text == "4 of 4 jobs submitted"
    # Each after the one before, with a comment of its own.
    words = calls(tmp_path)
    assert [[word for word in call if word.startswith("--dependency")] for call in words] == [
        [],
        *([f"--dependency=afterany:{n}"] for n in (1, 2, 3)),
    ]
    comments = [comment_of(Path(call[-1])) for call in words]
    assert len(set(comments)) == 4
    assert comments[0].startswith(f"{told[0].job.run_ids[0]}/")
    assert completed(root) == []
    assert len(calls(tmp_path)) == 4


ASKED = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--engine", "ddp", "--launcher", "srun-gloo")
ASKED += ("--data", "synthetic", "--nodes", "1,2", "--series", "s")


def test_what_write_only_prints_submits_the_jobs_by_hand(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each after the one before; and a folder may be called as it likes."""
    monkeypatch.chdir(tmp_path)
    out = "my 'runs' $(touch canary)"
    done = CliRunner().invoke(command_line, [*ASKED, "--out", out, "--write-only"])
    assert done.exit_code == 0, done.output
    assert calls(tmp_path) == []
    assert "series s: 2 jobs written, nothing submitted; next: the commands above, or dlbench submit --resume s" in (
        done.stderr
    )
    program("sbatch", f'{SBATCH} echo "4$n;cluster"')
    typed = subprocess.run(["bash", "-c", done.stdout], cwd="/", capture_output=True, text=True, check=True)
    assert typed.stdout == "41;cluster\n42;cluster\n"
    first, second = (str(tmp_path / out / one.runs[0] / "job.sbatch") for one in standing_of(tmp_path / out))
    assert calls(tmp_path) == [["sbatch", "--parsable", first], ["sbatch", "--dependency=afterany:41", second]]
    assert not list(tmp_path.rglob("canary"))


def standing_of(root: Path) -> tuple[SeriesJob, ...]:
    return submission_status(root, "s").series.jobs


@pytest.mark.parametrize("command", ["wait", "cancel", "logs"])
def test_a_series_is_named_by_its_folder_too_and_an_error_says_what_to_type(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "my runs"
    program("sbatch", "echo 5")
    program("squeue", "echo '5|CANCELLED|N/A|None|(null)|/x'")
    begun(root, repeats=1)
    completed(root)
    (run,) = (root / entry.runs[0] for entry in standing_of(root))
    (run / "slurm-5.out").write_text("words of the job\n")
    for given in ("my runs", str(run)):
        done = CliRunner().invoke(command_line, [command, given])
        assert {"wait": "series s: 0 of 1 run valid, 1 cancelled", "cancel": "0 jobs cancelled", "logs": "words of"}[
            command
        ] in done.output
    (tmp_path / "local").mkdir()
    local = CliRunner().invoke(command_line, [command, "local"])
    if command != "logs":
        assert str(local.exception) == "local: contains no series that was submitted to Slurm"
    missing = CliRunner().invoke(command_line, [command, "nosuch", "--out", "my runs"])
    assert str(missing.exception) == (
        "nosuch: no such series or run in my runs; give --out FOLDER, or the folder itself"
    )
    begin(root, jobs(1, "other"), chain=True, python="/python", request="dlbench submit ...")
    completed(root, "other")
    several = str(CliRunner().invoke(command_line, [command, "my runs"]).exception)
    if command == "logs":
        one, other = (shlex.quote(str(path.relative_to(tmp_path))) for path in sorted(root.glob("*-*")))
        assert several == f"my runs: contains 2 runs; name one: {one}, {other}"
    else:
        assert (
            several == f"my runs: contains 2 series, other, s; name one, e.g. dlbench {command} other --out 'my runs'"
        )


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_sbatch_and_the_rest_follows_later(
    tmp_path: Path, program: Program, at: int, number: signal.Signals
) -> None:
    root = tmp_path / "runs"
    program("sbatch", f"{SBATCH} [ $n = {at} ] && {{ kill -{number.name[3:]} {os.getpid()}; sleep 0.2; }}; echo $n")
    begun(root)
    before = signal.getsignal(number)
    try:
        with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
            completed(root, check=interruption.check)
    finally:
        signal.signal(number, before)
        for other in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(other, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert submission_status(root, "s").text == f"{at} of 4 jobs submitted"
    program("sbatch", f"{SBATCH} echo $n")
    assert [one.job_id for one in completed(root)] == [str(n) for n in range(at + 1, 5)]
    assert len(calls(tmp_path)) == 4
    # The chain goes on where it was cut.
    assert all(f"--dependency=afterany:{n}" in calls(tmp_path)[n] for n in range(1, 4))


def test_an_sbatch_outlives_the_kill_of_its_dlbench_and_is_waited_for(tmp_path: Path, program: Program) -> None:
    """Else the job that it takes a moment later would be submitted a second time."""
    root, queue, go = tmp_path / "runs", tmp_path / "queue", tmp_path / "go"
    queue.touch()
    take = "for word; do :; done; c=$(grep '^#SBATCH --comment=' \"$word\"); c=${c#*=}; "
    take += f'echo "$n|PENDING|N/A|None|$c|/x" >> {queue}; echo $n'
    program("sbatch", f"{SBATCH} [ $n = 2 ] && {{ kill -9 $PPID; until [ -e {go} ]; do sleep 0.05; done; }}; {take}")
    program("squeue", f"cat {queue}")
    begun(root)
    pid = os.fork()
    if pid == 0:
        try:
            completed(root)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert is_held(root, "s")
    with pytest.raises(UserError, match="being submitted by another process"):
        completed(root)
    go.touch()
    while is_held(root, "s"):
        time.sleep(0.05)
    assert [(one.number, one.is_adopted) for one in completed(root)] == [(2, True), (3, False), (4, False)]
    assert len(queue.read_text().splitlines()) == 4


def cut_off_after_sbatch(root: Path, program: Program, answer: str = "exit 1") -> RunFolder:
    """A series whose second sbatch did not say whether it took the job."""
    program("sbatch", f"{SBATCH} [ $n = 2 ] && {{ {answer}; }}; echo $n")
    begun(root)
    with pytest.raises(RunError, match="may be queued nevertheless"):
        completed(root)
    assert submission_status(root, "s").text == "1 of 4 jobs submitted, 1 more may be queued"
    return RunFolder(root / submission_status(root, "s").series.jobs[1].runs[0])


def test_a_series_on_another_cluster_is_asked_for_and_cancelled_there(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of its jobs may be other jobs' here."""
    monkeypatch.setattr("dlbench.jobs.campaign.completing._QUERY_PAUSES_S", (0.0,))
    root = tmp_path / "runs"
    root.mkdir()
    far = {"system.slurm.extra": "clusters=far"}
    made = [job_of([plan]) for plan in plans(**BOX, repeats=3, series="s", overrides=far)]
    begin(root, made, chain=False, python="/python", request="dlbench submit ...")
    there = submission_status(root, "s").series.jobs
    listed = "".join(
        f"echo '{n}|RUNNING|N/A|None|{job.comment}|{root / job.runs[0]}'; " for n, job in enumerate(there[:2], 1)
    )
    program("squeue", f"case $* in *--clusters=far*) echo 'CLUSTER: far'; {listed};; esac")
    # Of the second sbatch does not say that it took it.
    program("sbatch", f'{SBATCH} [ $n = 2 ] && exit 1; echo "$n;far"')
    told: list[Submitted] = []
    complete(root, "s", Slurm(), lambda: None, told.append, 2)
    assert [one.job_id for one in told] == ["1;far", "2;far"]
    complete(root, "s", Slurm(), lambda: None, told.append, 2)
    assert len(told) == 2  # two run
    program("scancel", "true")
    done = cancel_series(root, "s", Slurm())
    assert done.text == "2 jobs cancelled, 1 never submitted and removed from the series"
    assert calls(tmp_path)[-1] == ["scancel", "--clusters=far", "1", "2"]


def test_nothing_is_submitted_while_slurm_does_not_answer(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlbench.jobs.campaign.completing._QUERY_PAUSES_S", (0.0,))
    root = tmp_path / "runs"
    cut_off_after_sbatch(root, program)
    before = len(calls(tmp_path))
    program("squeue", "exit 1")
    with pytest.raises(RunError, match=r"squeue failed: .* it is unknown whether 1 job may be queued already"):
        completed(root)
    assert [call[0] for call in calls(tmp_path)[before:]] == ["squeue"]


def test_a_run_that_began_is_never_submitted_again(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlbench.jobs.campaign.completing._QUERY_PAUSES_S", (0.0,))
    root = tmp_path / "runs"
    folder = cut_off_after_sbatch(root, program)
    write_status(folder, status(0, "n0", "measuring"))
    program("sbatch", "echo 50")
    assert [one.number for one in completed(root)] == [3, 4]


def test_runs_of_the_collective_benchmark_are_completed_too(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    asked = CommRequest(system="box", series="c", points_are="nodes", points=(2,), repeats=2, backends="none")
    made = [job_of([plan]) for plan in expand_comm(asked, machine_cores=2, installed=()).plans]
    begin(root, made, chain=False, python="/python", request="dlbench comm submit")
    program("sbatch", "echo 5")
    assert [one.job for one in completed(root, "c")] == made
    assert not any(word.startswith("--dependency") for call in calls(tmp_path) for word in call)


def test_one_name_takes_more_runs_and_never_the_same(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    program("sbatch", "echo 5")
    begun(root, repeats=2)
    completed(root)
    with pytest.raises(UserError, match="exists already; choose another --series"):
        begun(root, repeats=2)
    begun(root, repeats=2, sides=True)
    now = submission_status(root, "s")
    assert now.text == "2 of 4 jobs submitted"
    assert len(now.series.requests) == 2
    with pytest.raises(UserError, match="is in series s already: continue it with dlbench submit --resume s --out /"):
        begun(root, repeats=2, sides=True)
    assert len(completed(root)) == 2


def test_two_processes_do_not_submit_one_series(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    begun(root)
    seen = []

    def look() -> None:
        seen.append(is_held(root, "s"))
        with pytest.raises(UserError, match="is being submitted by another process"):
            completed(root)

    program("sbatch", "echo 5")
    completed(root, check=look)
    assert seen == [True] * 4
    assert not is_held(root, "s")


def test_a_series_of_an_earlier_dlbench_is_told(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    begun(root)
    file = root / ".series" / "s.plans"
    file.write_text(file.read_text().replace('"ddp":{', '"ddp":{"bucket_cap_bytes":26214400,'))
    with pytest.raises(IncompleteDataError, match=r"s\.plans: made by an earlier dlbench: measure again$"):
        completed(root)
