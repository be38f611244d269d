"""Scripts of one run and of requeued jobs, attempts and logs; those of the example systems, which bash and shellcheck
accept, and which say where their figures are from."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlbench.cli import cli as command_line
from dlbench.cli.streams import os_error_words
from dlbench.errors import IncompleteDataError
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scheduler import Submission
from dlbench.jobs.scripts.job import Job, render
from dlbench.jobs.scripts.launch import has_script, render_job, render_run_script
from dlbench.opening import UnfitFileError
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.status import RankStatus, write_status
from dlbench.specs.expand import expand
from dlbench.specs.files import available
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.jobs.test_jobs import (
    PYTHON,
    Cluster,
    cluster,
    may_begin_anew,
    of_two_launchers,
    rooms,
    with_plans,
    with_system,
)
from tests.support.paths import GOLDEN, ROOT
from tests.support.programs import Program
from tests.support.run_factory import BOX, plans, write_unfinished

__all__ = ["cluster"]

# A rank: INTERRUPTED and FAILING hold the plans of the runs that are told to stop, or fail.
SRUN = """#!/bin/bash
[ "$1" = --mpi=list ] && { echo pmix; exit; }
plan=${@: -1}
echo "${plan%/*}" >>"$DUMP/began"
echo {} >"${plan%/*}/node-0000.status.json"
case " ${INTERRUPTED-} " in *" $plan "*) echo {} >"${plan%/*}/interrupted.json"; exit 75 ;; esac
case " ${FAILING-} " in *" $plan "*) exit 7 ;; esac
echo {} >"${plan%/*}/record.json"
"""
# A launcher that hears a signal and, as mpirun while it starts its ranks, not the first. In WARNED is its run's plan.
LAUNCHER = """#!/bin/bash
[ "$1" = --mpi=list ] && { echo pmix; exit; }
[ "$1" = --version ] && exit
plan=${@: -1}
echo "${plan%/*}" >>"$DUMP/began"
if [ "$plan" = "${WARNED-}" ]; then
  trap '' USR1
  kill -USR1 "$PPID"
  sleep 1
  trap 'echo {} >"${plan%/*}/interrupted.json"; exit 75' USR1
  for _ in {1..300}; do sleep 0.1; done
fi
echo {} >"${plan%/*}/record.json"
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) echo "JobId=4711 PreemptEligibleTime=x PreemptTime=${PREEMPTED:-None} EndTime=${ENDS:-Unknown} Deadline=N/A" ;;
  *) echo "$*" >>"$DUMP/asked" ;;
esac
"""


class Slurm:
    """A cluster on which a job of two runs is started, perhaps several times."""

    def __init__(self, cluster: Cluster, root: Path, job: Job, launcher: str = SRUN) -> None:
        self.cluster, self.nodes = cluster, str(job.shape.layout.nodes)
        for name, text in (("srun", launcher), ("mpirun", launcher), ("scontrol", SCONTROL)):
            (cluster.bin / name).write_text(text)
            (cluster.bin / name).chmod(0o755)
        self.folders: list[RunFolder] = rooms(job, root)
        self.script = render_job(job, self.folders, PYTHON)

    def start(self, **variables: str) -> tuple[int, list[int], bool]:
        """The script's exit code, the runs that began, and whether it asked for another start."""
        done = self.cluster.run(self.script, nodes=self.nodes, **variables)
        self.said = done.stdout + done.stderr
        began, asked = (self.cluster.dump / name for name in ("began", "asked"))
        names = [str(folder.path) for folder in self.folders]
        runs = [names.index(line) for line in began.read_text().splitlines()] if began.exists() else []
        assert not asked.exists() or asked.read_text() == "requeue 4711\n"
        return done.returncode, runs, asked.exists()


def in_s(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_an_interrupted_run_begins_anew_whatever_its_folder_is_called(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "r[a-z]ns *", may_begin_anew())
    first, second = slurm.folders
    first.checkpoints.mkdir()
    assert slurm.start(INTERRUPTED=str(first.plan)) == (75, [0], True)
    assert slurm.start(SLURM_RESTART_COUNT="1") == (0, [0, 1], False)
    assert {path.name for path in first.path.iterdir()} == {
        *("attempt-0001", "checkpoints", "launch.log", "node-0000.status.json", "record.json")
    }
    assert (first.path / "attempt-0001" / "interrupted.json").exists()
    assert second.record.exists()
    assert "attempt 2 of " in slurm.said


def test_it_is_asked_for_so_often_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    plan = str(slurm.folders[0].plan)
    assert slurm.start(INTERRUPTED=plan, SLURM_RESTART_COUNT="2") == (75, [0], True)
    assert slurm.start(INTERRUPTED=plan, SLURM_RESTART_COUNT="3") == (75, [0], False)
    assert "dlbench: error: " in slurm.said
    assert "slurm.max_requeues" in slurm.said


def test_ranks_that_a_preemption_ended_have_not_failed(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    plan = str(slurm.folders[0].plan)
    assert slurm.start(FAILING=plan) == (7, [0, 1], False)
    assert slurm.start(FAILING=plan, PREEMPTED=in_s(-5)) == (75, [0], True)


def test_a_signal_that_no_rank_heard_is_not_lost(cluster: Cluster, tmp_path: Path) -> None:
    """It came between two runs, or while one was started: Slurm's clock tells."""
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    first, second = slurm.folders
    assert slurm.start(FAILING=str(first.plan), ENDS=in_s(170)) == (75, [0], True)
    assert slurm.start(FAILING=str(second.plan), ENDS=in_s(1000)) == (7, [0, 1], False)
    first.record.unlink()
    # However little time there is, a start of the job begins a run: it would be started again for nothing otherwise.
    assert slurm.start(ENDS=in_s(10)) == (75, [0], True)
    assert "no time is left for" in slurm.said
    assert slurm.start(ENDS=in_s(10)) == (0, [1], False)


@pytest.mark.parametrize("array", [False, True])
def test_without_requeue_it_ends_as_interrupted(cluster: Cluster, tmp_path: Path, array: bool) -> None:
    job = with_plans(may_begin_anew(), lambda plan: with_system(plan, slurm={"requeue": False, "warn_before_s": 120}))
    if array:
        job = dataclasses.replace(job, array_limit=1)
    slurm = Slurm(cluster, tmp_path / "runs", job)
    plan = str(slurm.folders[0].plan)
    assert slurm.start(INTERRUPTED=plan, SLURM_ARRAY_TASK_ID="1") == (75, [0], False)
    assert "was interrupted" in slurm.said


@pytest.mark.parametrize("side", ["a", "b"])
def test_in_a_job_with_mpirun_the_script_hands_the_signal_on(cluster: Cluster, tmp_path: Path, side: str) -> None:
    """To srun, too: Slurm tells the script alone."""
    slurm = Slurm(cluster, tmp_path / "runs", of_two_launchers(), LAUNCHER)
    assert "--signal=B:USR1@120" in slurm.script
    warned = next(folder for folder in slurm.folders if folder.path.name.endswith(side))
    first = slurm.folders.index(warned)
    assert slurm.start(WARNED=str(warned.plan)) == (75, list(range(first + 1)), True)
    assert f"{warned.path.name} was interrupted" in slurm.said
    (cluster.dump / "asked").unlink()
    (cluster.dump / "began").unlink()
    assert slurm.start(SLURM_RESTART_COUNT="1") == (0, list(range(first, 2)), False)


SETUP = "export SIDE='b and c'"


def plan_of(launcher: str, **overrides: Any) -> RunPlan:
    local = {"system": "local", "points_are": "ranks"} if launcher == "local" else {}
    return plans(**{**BOX, **local}, repeats=1, launcher=launcher, overrides=overrides)[0]


@pytest.mark.parametrize("launcher", ["srun-gloo", "srun-mpi", "mpirun"])
def test_a_run_loads_and_sets_what_its_job_does(launcher: str) -> None:
    wanted = {"system.modules": "gcc/12,openmpi/4", "system.setup": SETUP, "system.launch.environment.X": "1"}
    plan = plan_of(launcher, **wanted)
    folder = RunFolder(Path("/runs/x"))
    script = render_run_script(plan, folder, PYTHON)
    lines = script[script.index("\nmodule purge") : script.index("\nexec ")].strip().splitlines()
    own = "# Different in every start of this script, also after a requeue."
    job = render_job(job_of([plan]), [folder], PYTHON).splitlines()
    assert lines == [line for line in job[job.index("module purge") : job.index(")") - 2] if line not in (own, TOKEN)]
    last = job[job.index(")") - 1].replace('"${dlbench_run##*/}"', "x").replace('"$dlbench_run"', "/runs/x")
    assert script.splitlines()[-1] == f"exec {last}"


TOKEN = 'export DLBENCH_LAUNCH_TOKEN="${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"'
"""Of a run it is made anew for each start."""


def test_a_rank_of_this_machine_gets_them_too(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s|" "$SIDE" "$LOADED" "$X" "$$" > {seen}\n')
    python.chmod(0o755)
    wanted = {"system.modules": "a/1", "system.setup": SETUP, "system.launch.environment.X": "it's"}
    plan = plan_of("local", **wanted)
    script = tmp_path / "launch.sh"
    script.write_text(render_run_script(plan, RunFolder(tmp_path), str(python)))
    module = {"BASH_FUNC_module%%": '() { [ "$1" = purge ] || export LOADED="$2" LOADEDMODULES="$2"; }'}
    process = subprocess.Popen(["bash", str(script)], env={**os.environ, **module})
    assert process.wait(timeout=60) == 0
    # It becomes the rank: signals, and the end of whoever started it, reach it.
    assert seen.read_text().split("|")[:4] == ["b and c", "a/1", "it's", str(process.pid)]


def test_a_system_without_them_needs_no_shell() -> None:
    assert not has_script(plan_of("local"))
    assert has_script(plan_of("local", **{"system.setup": "true"}))


KEPT = ("plan.json", "job.sbatch", "submission.json", "slurm-7.out", "slurm-7_1.out")
LEFT = (
    "rank-0000.status.json",
    "node-0000.status.json",
    "launch.log",
    "record.json",
    "node-0000.steps",
    "interrupted.json",
    "accounting.json",
)
ODD = ("a b", "-n", "$(touch canary)", "new\nline", "*", "'", "checkpoint", "slurm-7.txt", "attempts")

FILES = st.sets(st.sampled_from([*KEPT, *LEFT, *ODD]), max_size=8)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def start_again(run: Path) -> str:
    script = render("earlier.j2") + "\nset -u\ndlbench_run=$1\nset_aside || exit"
    done = subprocess.run(["bash", "-c", script, "bash", str(run)], capture_output=True, text=True, check=True, cwd=run)
    assert done.stderr == ""
    return done.stdout


@given(attempts=st.lists(FILES, min_size=1, max_size=3))
@example(attempts=[{"rank-0000.status.json", "-n", "*", "new\nline"}, {"launch.log"}])
@example(attempts=[{"plan.json", "slurm-7.out"}, {"rank-0000.status.json"}])
@settings(max_examples=12)  # each starts bash
def test_nothing_is_lost_and_nothing_of_an_earlier_attempt_is_left_in_its_place(attempts: list[set[str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "a run's $HOME"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "step-1").write_text("state")
        expected: dict[str, str] = {"checkpoints/step-1": "state"}
        number = 0
        for files in attempts:
            for name in files:
                (run / name).write_text(f"{name} of {number}")
                expected[name] = f"{name} of {number}"
            said = start_again(run)
            if began := any(
                name.endswith(".status.json") or name == "launch.log" for name in expected if "/" not in name
            ):
                number += 1
                aside = f"attempt-{number:04d}"
                expected = {
                    name if "/" in name or name in KEPT else f"{aside}/{name}": text for name, text in expected.items()
                }
                assert (
                    said
                    == f"dlbench: attempt {number + 1} of {run.name}; what the one before left is in {run}/{aside}\n"
                )
            assert bool(said) == began
            assert contents(run) == expected


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (plan,) = plans(points=(1,), repeats=1)
    folder = write_unfinished(tmp_path / "runs", plan)
    submission = Submission(
        job_id="7", command=("sbatch",), submitted="2026-03-01T12:00:00Z", log=f"{plan.run_id}/slurm-7.out"
    )
    write_json(folder.submission, submission.model_dump(mode="json"))
    folder.launch_log.write_text("first attempt, step 1\n")
    return folder


@pytest.mark.parametrize("log", ["/etc/passwd", "../secret.out", "r/../../slurm-7.out", "r/s/slurm-7.out", "r/secret"])
def test_a_submission_that_names_another_file_is_damaged(run: RunFolder, log: str) -> None:
    content = json.loads(run.submission.read_text())
    run.submission.write_text(json.dumps({**content, "log": log}))
    done = CliRunner().invoke(command_line, ["logs", str(run.path)])
    assert isinstance(done.exception, IncompleteDataError)
    assert str(done.exception).startswith(f"{run.submission}: damaged: ")
    assert done.stdout == ""


@pytest.mark.parametrize("what", ["the file", "its folder", "the run's folder"])
def test_no_log_is_reached_through_a_link(run: RunFolder, tmp_path: Path, what: str) -> None:
    """Else who can write there would see, where a log is published, what its reader may read."""
    (tmp_path / "secret").mkdir()
    for name in ("launch.log", "slurm-7.out"):
        (tmp_path / "secret" / name).write_text("of nobody else\n")
    if what == "the file":
        run.launch_log.unlink()
        run.launch_log.symlink_to(tmp_path / "secret" / "launch.log")
    elif what == "its folder":
        (run.path.parent / "first").symlink_to(tmp_path / "secret")
        content = json.loads(run.submission.read_text())
        run.submission.write_text(json.dumps({**content, "log": "first/slurm-7.out"}))
    else:
        (tmp_path / "secret" / "plan.json").write_text("{}")
        run.path.rename(tmp_path / "moved")
        run.path.symlink_to(tmp_path / "secret")
    done = CliRunner().invoke(command_line, ["logs", run.path.name, "--out", str(run.path.parent)])
    assert isinstance(done.exception, UnfitFileError)
    assert "is a link" in os_error_words(done.exception)
    assert "of nobody else" not in done.stdout


def test_a_run_that_a_person_names_may_be_a_link(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run.path)
    done = CliRunner().invoke(command_line, ["logs", str(tmp_path / "latest")])
    assert done.stdout == "first attempt, step 1\n"


def test_a_job_that_goes_on_without_its_ranks_is_told(run: RunFolder, program: Program) -> None:
    """Slurm does not notice that the daemon which started them was killed: their supervisors said the last word."""
    program("squeue", "echo '7|RUNNING|N/A|None||/r'")
    status = RankStatus(
        rank=0, host="n1", pid=1, stage="measuring", step=12, updated="2026-03-01T12:00:09.000000Z", source="supervisor"
    )
    told = CliRunner().invoke(command_line, ["status", str(run.path)])
    assert told.stdout.splitlines()[1].startswith("  RUNNING ")
    assert "vanished" not in told.stdout
    write_status(run, status)
    told = CliRunner().invoke(command_line, ["status", str(run.path)])
    assert told.stdout.splitlines()[1].startswith("  RUNNING ")
    assert (
        "rank 0 on n1 vanished at step 12 (measuring), and its job still runs: if it does not end, scancel 7 ends it"
        in told.stdout
    )


EXAMPLES = sorted(name for name in available("systems") if name.startswith("example-") and name != "example-gpu")
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def script_of(name: str) -> str:
    asked = Request(workload="resnet50", preset="ci", series="golden", points_are="nodes", points=(2,), system=name)
    (plan,) = expand(asked, machine_cores=4, now=NOW)
    plan = plan.model_copy(update={"dlbench_version": "0.0.0"})
    return render_job(job_of([plan]), [RunFolder(Path("/scratch/runs") / plan.run_id)], PYTHON)


def test_there_are_eight_of_different_kinds() -> None:
    assert [
        f"example-{name}"
        for name in ("alps", "aws-p5", "dgx-h100", "juwels-booster", "lab", "leonardo", "lumi-g", "perlmutter")
    ] == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_names_its_sources_with_a_date(name: str) -> None:
    text = (ROOT / "systems" / f"{name}.yaml").read_text(encoding="utf-8")
    head = text[: text.index("format: ")]
    assert re.search(r"# Sources, 20\d\d-\d\d-\d\d: ", head)
    assert re.search(r"\b[a-z0-9-]+\.(com|ch|de|it|gov|eu)/", head)
    assert "dlbench preflight FILE" in " ".join(head.split())
    assert re.findall(r"^(name|title): .*  # edit", text, re.MULTILINE) == ["name", "title"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_script_is_the_golden_one_and_bash_and_shellcheck_accept_it(name: str) -> None:
    path, script = GOLDEN / "systems" / f"{name}.sbatch", script_of(name)
    if os.environ.get("DLBENCH_UPDATE_GOLDEN") == "1":
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8"), "on purpose? DLBENCH_UPDATE_GOLDEN=1, then read it"
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    command = ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_golden_script_is_left_over() -> None:
    assert sorted(path.stem for path in (GOLDEN / "systems").iterdir()) == EXAMPLES
