"""`dlbench comm run` and `submit` as a user meets them: plans, scripts, mistakes, and what is told of their runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.jobs.local import verdict
from dlbench.records.comm import CommRecord, read_comm_run, read_launched, scan_comm
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder, create
from dlbench.records.scan import scan
from dlbench.records.status import write_status
from dlbench.specs.comm import ALGORITHMS, ELEMENT_BYTES, CommPlan
from dlbench.specs.expand import CommRuns, expand_comm
from dlbench.specs.requests import CommRequest, parse_sizes
from tests.cli.test_cli import everything_below, without
from tests.conftest import Cli
from tests.support import run_factory
from tests.support.paths import DATA
from tests.support.programs import as_shown, on_path
from tests.support.run_factory import constant, status, write_run

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
FORMATS = DATA / "formats" / "comm"
RUN = ("comm", "run")
SUBMIT = ("comm", "submit", "--system", "box", "--series", "s")


def expanded(installed: Sequence[str] = (), **request: Any) -> CommRuns:
    return expand_comm(CommRequest(**{"series": "s", **request}), machine_cores=4, installed=installed, now=NOW)


def plans(**request: Any) -> list[CommPlan]:
    return expanded(**request).plans


def point_of(plan: CommPlan, algorithm: str, size: int, **more: Any) -> dict[str, Any]:
    what = {"collective": plan.comm.collective, "algorithm": algorithm, "carrier": "torch-gloo", "num_bytes": size}
    return {**what, "dtype": plan.comm.dtype, "correct": True, "max_error": 0.0, **more}


def write_comm(out: Path, plan: CommPlan, **changes: Any) -> RunFolder:
    out.mkdir(parents=True, exist_ok=True)
    folder = create(out, plan)
    points = [
        point_of(plan, algorithm, size, times_s=[1e-3] * plan.comm.iterations)
        for algorithm in plan.comm.algorithms
        for size in plan.comm.sizes
    ]
    content = {
        "run_id": plan.run_id,
        "state": "valid",
        "started": "2026-03-01T12:00:00Z",
        "finished": "2026-03-01T12:01:00Z",
        "hosts": ["n0"] * plan.layout.ranks,
        "device": "cpu",
        "group_size": plan.group_size,
        "points": points,
        "environment": {"host": "n0"},
        **changes,
    }
    write_json(folder.comm, CommRecord.model_validate(content).model_dump(mode="json"))
    for rank in range(plan.layout.ranks):
        write_status(folder, status(rank, "n0", "done"))
    return folder


# Plans


def test_points_are_rank_counts_and_go_there_and_back_again() -> None:
    made = plans(points=(2, 3, 4), repeats=2, sizes="1KiB:16KiB", algorithms="ring,direct", backends="gloo")
    assert [plan.run_id for plan in made] == [
        *(f"s-comm-allreduce-p0{point}-n000{ranks}-k00" for point, ranks in ((0, 2), (1, 3), (2, 4))),
        *(f"s-comm-allreduce-p0{point}-n000{ranks}-k01" for point, ranks in ((2, 4), (1, 3), (0, 2))),
    ]
    assert [plan.series.position for plan in made] == list(range(6))
    assert {plan.series.repeats for plan in made} == {2}
    # The cores of a rank are those of the largest point: its speed must not change with the count.
    assert {plan.layout.cores_per_rank for plan in made} == {1}
    (spec,) = {plan.comm for plan in made}
    assert spec.algorithms == ("ring", "direct")
    assert spec.backends == ("gloo",)
    assert spec.sizes == (1024, 4096, 16384)
    assert spec.check is True
    assert made[0] == CommPlan.model_validate(json.loads(made[0].to_json()))


def test_what_is_asked_for_stands_in_the_plan() -> None:
    asked = {"collective": "all-gather", "algorithms": "none", "backends": "gloo,nccl", "dtype": "fp16"}
    times = {"iterations": 3, "warmup": 0, "timeout_s": 900.0}
    (plan,) = plans(sizes="6,2", overrides={"system.launch.pin": False}, **asked, **times)
    comm = plan.comm
    assert (comm.collective, comm.algorithms, comm.backends) == ("all-gather", (), ("gloo", "nccl"))
    assert (comm.dtype, comm.sizes, comm.iterations, comm.warmup, comm.timeout_s) == ("fp16", (2, 6), 3, 0, 900.0)
    assert plan.system.launch.pin is False
    assert plan.overrides == {"system.launch.pin": False}
    # The watch over the whole rank must not bark before an iteration may end.
    assert plan.stall_timeout_s > plan.comm.timeout_s


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_all_algorithms_are_those_that_the_layout_permits(collective: Any) -> None:
    grouped = [name for name in ALGORITHMS[collective] if name in ("hierarchical", "leader")]
    others = tuple(name for name in ALGORITHMS[collective] if name not in grouped)
    made = expanded(collective=collective, points=(2, 4), group_size=2)
    two, four = made.plans
    assert two.comm.algorithms == others
    assert four.comm.algorithms == ALGORITHMS[collective]
    told = [note for note in made.notes if "left out at" in note and "ranks" in note]
    assert len(told) == (1 if grouped else 0)
    if grouped:
        assert told[0].startswith("hierarchical, leader left out at 2 ranks: needs two groups")


@pytest.mark.parametrize(
    ("request_", "installed", "expected"),
    [
        ({}, (), ("gloo",)),
        ({}, ("mpi4py",), ("gloo",)),
        ({"launcher": "mpirun"}, ("mpi4py",), ("gloo", "mpi")),
        ({"launcher": "mpirun", "transport": "mpi"}, ("mpi4py",), ("mpi",)),
        ({"launcher": "mpirun"}, (), ("gloo",)),
        ({"system": "box", "points_are": "nodes"}, ("mpi4py",), ("gloo", "mpi")),
        # Another Python: what it has is not known here.
        ({"system": "example-gpu", "points_are": "nodes"}, ("mpi4py",), ("nccl",)),
        ({"backends": "none"}, ("mpi4py",), ()),
    ],
)
def test_the_usual_backends(request_: dict[str, Any], installed: tuple[str, ...], expected: tuple[str, ...]) -> None:
    made = expanded(installed, **request_)
    assert made.plans[0].comm.backends == expected
    told = [note for note in made.notes if note.startswith("libraries for comparison: ")]
    assert told == ([] if "backends" in request_ else [f"libraries for comparison: {', '.join(expected)}"])


# Sizes


@given(
    dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
    low=st.integers(1, 2**20),
    times=st.integers(2, 2**14),
    count=st.integers(2, 12),
)
def test_a_range_is_of_whole_elements_and_holds_both_ends(dtype: Any, low: int, times: int, count: int) -> None:
    width = ELEMENT_BYTES[dtype]
    first, last = low * width, low * times * width
    stepped = parse_sizes(f"{first}:{last}", dtype)
    assert (stepped[0], stepped[-1]) == (first, last)
    assert all(small * 4 == large for small, large in itertools.pairwise(stepped[:-1]))
    assert stepped[-2] < last <= 4 * stepped[-2]
    if low * (times ** (1 / (count - 1)) - 1) < 1.01:
        return  # less than an element apart at the lower end: some would be the same
    spaced = parse_sizes(f"{first}:{last}:{count}", dtype)
    assert len(spaced) == count
    assert (spaced[0], spaced[-1]) == (first, last)
    assert all(size % width == 0 for size in spaced)
    assert list(spaced) == sorted(spaced)
    factor = (last / first) ** (1 / (count - 1))
    for number, size in enumerate(spaced):
        assert first * factor**number - width - 1 <= size <= first * factor**number + 1


# Mistakes

WRONG: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "collective": (("--collective", "allreduc"), ["--collective", "'allreduc'", "did you mean allreduce?"]),
    "algorithm": (("--algorithms", "ring,drect"), ["--algorithms", "'drect'", "allreduce", "direct"]),
    "algorithm of another": (
        ("--collective", "broadcast", "--algorithms", "ring"),
        ["'ring' is not a known algorithm of broadcast", "chain"],
    ),
    "removed back-end": (("--backends", "horovod"), ["--backends horovod has been removed", "--engine horovod"]),
    "back-end": (("--backends", "glo"), ["--backends", "'glo'", "gloo"]),
    "nothing": (("--algorithms", "none", "--backends", "none"), ["there is nothing to measure"]),
    "no bytes": (("--sizes", "0"), ["--sizes", "0 bytes"]),
    "no whole elements": (("--sizes", "1KiB,6"), ["--sizes", "6 bytes", "fp32 elements of 4 bytes"]),
    "sizes in words": (("--sizes", "large"), ["--sizes", "'large'"]),
    "a range backwards": (("--sizes", "1MiB:1KiB"), ["--sizes '1MiB:1KiB'", "begin below its end"]),
    "a range of four": (("--sizes", "1:2:3:4"), ["LOW:HIGH:COUNT"]),
    "a range of one": (("--sizes", "1KiB:1MiB:1"), ["the count", "from 2"]),
    "a range too fine": (("--sizes", "4:40:50"), ["fewer than 50 sizes of whole fp32 elements"]),
    "transport": (("--transport", "tcp"), ["--transport", "'tcp'", "torch"]),
    "transport without MPI": (("--transport", "mpi"), ["transport mpi", "mpirun or srun-mpi"]),
    "back-end without MPI": (("--backends", "mpi"), ["backend mpi", "mpirun or srun-mpi"]),
    "groups of one node": (("--algorithms", "hierarchical", "--ranks", "4"), ["hierarchical", "--group-size"]),
    "groups that do not divide": (("--ranks", "4", "--group-size", "3"), ["--group-size 3", "4 ranks"]),
    "too many shards": (("--shards", "3"), ["--shards 3", "here are 2"]),
    "inert shards": (("--shards", "1", "--algorithms", "ring"), ["--shards", "no effect", "parameter-server"]),
    "one rank": (("--ranks", "1"), ["1 rank", "two ranks or more"]),
    "warm-up": (("--warmup", "-1"), ["--warmup -1", "0 or more"]),
    "no repeats": (("--repeats", "0"), ["--repeats 0", "1 or more"]),
    "no time": (("--timeout", "0"), ["--timeout 0", "above 0"]),
    "a wrong key": (("--set", "system.launch.pn=1"), ["--set", "system.launch.pn", "pin"]),
    "an inert interface": (
        ("--launcher", "mpirun", "--transport", "mpi", "--backends", "mpi", "--set", "system.launch.interface=eth0"),
        ["--set system.launch.interface", "no effect"],
    ),
    "system": (("--system", "lcal"), ["system 'lcal'", "local"]),
    "outside an allocation": (("--system", "box"), ["system box", "submit"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_answered_in_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    arguments, words = WRONG[mistake]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = everything_below(tmp_path)
    done = cli(*RUN, *arguments, COLUMNS="80")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert lines[:-1] == []
    assert lines[-1].startswith("dlbench: error: ")
    assert lines[-1].isprintable()
    assert [word for word in words if word not in lines[-1]] == [], lines[-1]
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (SUBMIT, ["--nodes", "--ranks"]),
        ((*SUBMIT, "--nodes", "2", "--ranks", "2"), ["--nodes", "--ranks"]),
        ((*SUBMIT, "--nodes", "1"), ["1 rank", "two ranks or more"]),
        ((*SUBMIT, "--ranks", "3", "--ranks-per-node", "2"), ["3 ranks", "2 nodes"]),
        ((*SUBMIT, "--nodes", "2", "--out", "a\\b"), ["--out a\\b", "backslash"]),
        (("comm", "submit", "--system", "local", "--ranks", "2"), ["no scheduler", "dlbench comm run"]),
    ],
)
def test_a_mistake_in_submitting(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    done = cli(*arguments, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert [word for word in words if word not in line] == [], line
    assert everything_below(tmp_path) == {}


def test_what_is_not_installed_is_told_with_its_remedy(cli: Cli, tmp_path: Path) -> None:
    done = cli(*RUN, **without(tmp_path, "torch"))
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlbench: error: ")
    assert "torch" in line
    assert "pip install 'dlbench[node]'" in line
    assert not (tmp_path / "runs").exists()


def test_mpi4py_is_asked_for_only_by_who_names_mpi(cli: Cli, tmp_path: Path) -> None:
    variables = {**without(tmp_path, "mpi4py"), "PATH": on_path(tmp_path / "bin", mpirun="exit 7")}
    done = cli(*RUN, "--launcher", "mpirun", "--backends", "gloo,mpi", **variables)
    assert done.returncode == 5
    assert "pip install 'dlbench[mpi]'" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = cli(*RUN, "--launcher", "mpirun", **variables)
    assert done.returncode == 3  # the stub's ranks end without a record
    assert "back-end mpi left out: mpi4py is not installed" in done.stderr


# Trying without doing


def test_a_dry_run_prints_what_would_start_and_what_was_chosen(cli: Cli, tmp_path: Path) -> None:
    arguments = (*RUN, "--series", "s", "--ranks", "2,4", "--backends", "gloo", "--out", "a b", "--dry-run")
    # A login node without torch can plan.
    done = cli(*arguments, **without(tmp_path, "torch", "numpy", "mpi4py", "horovod"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("# collective benchmark of allreduce, 2 ranks     1 ")
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert [words[1:-1] for words in commands] == [["-P", "-m", "dlbench.supervisor", "-m", "dlbench.node"]] * 2
    names = ("s-comm-allreduce-p00-n0002-k00", "s-comm-allreduce-p01-n0004-k00")
    assert [words[-1] for words in commands] == [str(tmp_path / "a b" / name / "plan.json") for name in names]
    # Further lines of a note are indented.
    notes = re.sub(r"\n +", " ", done.stderr).splitlines()
    assert notes.pop(0).startswith("warning: torch is not installed in ")
    assert [note.split(":")[0] for note in notes] == ["note", "note"]
    assert "hierarchical, leader left out at 2 ranks" in notes[0]
    assert "hierarchical, leader left out at 4 ranks" in notes[1]
    assert not (tmp_path / "a b").exists()


def test_what_is_submitted_is_what_the_dry_run_showed(cli: Cli, tmp_path: Path) -> None:
    path = on_path(tmp_path / "bin", sbatch=f"printf '%s\\0' \"$@\" >> {tmp_path}/calls; date +%N")
    asked = (*SUBMIT, "--nodes", "2,3", "--ranks-per-node", "2", "--repeats", "2")
    shown = cli(*asked, "--dry-run", "--all-scripts")
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "runs").exists()
    done = cli(*asked, PATH=path)
    assert done.returncode == 0, done.stderr
    jobs = done.stdout.split()
    runs = scan_comm(tmp_path / "runs").runs
    assert [run.plan.layout.nodes for run in runs] == [2, 3, 3, 2]
    scripts = [as_shown(run.folder.script) for run in runs]
    places = [shown.stdout.index(script) for script in scripts]
    assert [places[0], places[1]] == sorted(set(places))
    one, two = jobs
    assert [json.loads(run.folder.submission.read_text())["job_id"] for run in runs] == [one, two, two, one]
    words = (tmp_path / "calls").read_text().split("\0")
    waits = [word for word in words if word.startswith("--dependency")]
    assert waits == [f"--dependency=afterany:{one}"]
    told = json.loads(cli("status", "--json", PATH=str(tmp_path)).stdout)
    assert [(row["job"], row["state"]) for row in told["runs"]] == [(job, "incomplete") for job in (one, two, two, one)]


# Reading


def mixed(root: Path) -> tuple[list[Any], list[CommPlan]]:
    """Two training runs and two of the collective benchmark in one folder."""
    training = run_factory.plans(workload="cosmoflow", preset="ci", points=(1, 2), repeats=1)
    comm = plans(points=(2, 4), algorithms="ring", sizes="1KiB")
    for one in training:
        write_run(root, one, constant([1, 0, 3, 5, 0, 1]))
    for other in comm:
        write_comm(root, other)
    return training, comm


def test_both_kinds_of_run_lie_in_one_folder(cli: Cli, tmp_path: Path) -> None:
    training, comm = mixed(tmp_path / "runs")
    found, other = scan(tmp_path / "runs"), scan_comm(tmp_path / "runs")
    assert ([run.plan for run in found.runs], found.problems) == (training, [])
    assert ([run.plan for run in other.runs], other.problems) == (comm, [])
    assert {run.state for run in other.runs} == {"valid"}
    assert {run.detail for run in other.runs} == {""}
    assert type(read_launched(other.runs[0].folder.path)) is not type(read_launched(found.runs[0].folder.path))
    done = cli("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "4 runs, 4 valid"
    report = cli("report", "runs", "--format", "json")
    assert (report.returncode, report.stderr) == (0, "")
    assert "-comm-" not in report.stdout


def test_a_wrong_result_yields_no_figure_and_says_which(tmp_path: Path) -> None:
    (plan,) = plans(algorithms="ring", sizes="1KiB,4KiB")
    point = point_of(plan, "ring", 4096, times_s=[0.1], correct=False, max_error=0.25)
    points = [point_of(plan, "ring", 1024, times_s=[0.1]), point]
    folder = write_comm(tmp_path, plan, state="invalid", points=points)
    outcome = verdict(folder, "")
    told = "allreduce ring over torch-gloo of 4 KiB: wrong result, largest relative error 0.25"
    assert (int(outcome.exit_code), outcome.detail) == (3, f"invalid: {told}")
    many = write_comm(tmp_path / "more", plan, state="invalid", points=[{**point, "problem": "overflow"}] * 5)
    assert read_comm_run(many.path).detail.endswith("of 4 KiB: overflow; and 2 points more")


ENDED, CODE = " was the first to end, ", "with exit code 137 (see launch.log)"


NOTICED = "noticed that process rank 1 with PID 7 on node n1 exited on signal"


@pytest.mark.parametrize(
    ("noticed", "told"),
    [
        (f"mpirun {NOTICED} 9 (Killed).", "rank 1" + ENDED + "by signal SIGKILL"),
        # Open MPI 5 breaks it where the name of the node has it.
        (f"prterun {NOTICED.removesuffix(' signal')}\nsignal 9 (Killed).", "rank 1" + ENDED + "by signal SIGKILL"),
        (
            f"prterun {NOTICED} 11 (Segmentation\nfault).".replace(" ", "\n"),
            "rank 1" + ENDED + "by signal SIGSEGV (see launch.log)",
        ),
        # What mpirun itself did to the others is no cause.
        (f"mpirun {NOTICED} 15 (Terminated).", "mpirun" + ENDED + CODE),
        (f"prterun {NOTICED}\n15 (Terminated).", "mpirun" + ENDED + CODE),
        ("prterun noticed that the job aborted, but has no info as to\nthe process", "mpirun" + ENDED + CODE),
    ],
)
def test_mpirun_s_word_on_a_killed_rank_is_read(cli: Cli, tmp_path: Path, noticed: str, told: str) -> None:
    """Its exit code names no rank, and it may end the others before they can say what they saw."""
    path = on_path(tmp_path / "bin", mpirun=f"echo '{noticed}'\nexit 137")
    done = cli(*RUN, "--launcher", "mpirun", "--algorithms", "ring", "--backends", "none", PATH=path)
    assert done.returncode == 3
    assert told in done.stderr
    (run,) = scan_comm(tmp_path / "runs").runs
    assert (run.state, run.detail) == ("failed", told)


@pytest.mark.parametrize("words", [RUN, ("run", "cosmoflow", "--preset", "ci")])
def test_the_mpirun_of_another_mpi_is_refused_before_anything_starts(
    cli: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = on_path(tmp_path / "bin", mpirun="echo 'HYDRA build details:'")
    done = cli(*words, "--launcher", "mpirun", PATH=path)
    assert (done.returncode, done.stdout) == (5, "")
    said = "dlbench: error: launcher mpirun: mpirun is MPICH's or MVAPICH's, and dlbench needs Open MPI's: "
    assert done.stderr.startswith(said)
    assert not (tmp_path / "runs").exists()


def test_every_form_that_was_ever_written_is_read() -> None:
    (run,) = scan_comm(FORMATS / "v1").runs
    assert (run.state, run.detail, run.plan.layout.ranks) == ("valid", "", 2)
    assert {point.algorithm for point in run.record.points} == {"ring", "direct", "library"}
