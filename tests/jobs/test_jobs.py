"""Plans become commands and batch scripts (pure), and Slurm is asked with stub programs in its place."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.jobs.campaign.campaign import job_of, jobs_of
from dlbench.jobs.campaign.completing import submit as submit_to
from dlbench.jobs.campaign.ended import cancel_run
from dlbench.jobs.scheduler import RefusedError, read_submission
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.containers import words_of
from dlbench.jobs.scripts.job import SUBMITTED, Job
from dlbench.jobs.scripts.launch import render_job, sbatch_arguments, sbatch_options
from dlbench.jobs.slurm.accounting import ask
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.records.folder import RunFolder, create
from dlbench.specs.comm import CommPlan
from dlbench.specs.expand import expand, expand_comm
from dlbench.specs.plan import LaunchPlan, RunPlan, job_label
from dlbench.specs.requests import CommRequest, Request
from tests.support.paths import GOLDEN
from tests.support.programs import Program, calls

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
PYTHON = "/opt/dlbench/bin/python"
PYTHON_VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")

PlanT = TypeVar("PlanT", bound=LaunchPlan)


submit = partial(submit_to, Slurm())


def states_of(*job_ids: str) -> dict[str, str]:
    return {job: found.state for job, found in ask(job_ids, ()).jobs.items()}


@pytest.fixture(autouse=True)
def bundled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLBENCH_PATH", raising=False)


def plan_of(**request: Any) -> RunPlan:
    """One plan whose bytes stay the same: series, time, version, batch and steps are fixed."""
    asked = {"workload": "resnet50", "preset": "ci", "series": "golden", "points_are": "nodes", "points": (2,)}
    (plan,) = expand(Request(**{**asked, "system": "box", **request}), machine_cores=4, now=NOW)
    return plan.model_copy(update={"dlbench_version": "0.0.0"})


def sides_of(a: dict[str, Any], b: dict[str, Any], **request: Any) -> Job:
    """The plans of the one job of a comparison at one point, whose bytes stay the same."""
    asked = {"workload": "resnet50", "preset": "ci", "series": "golden", "points_are": "nodes", "points": (2,)}
    sides = {"sides": {"a": a, "b": b}, "repeats": 2}
    made = expand(Request(**{**asked, "system": "box", **sides, **request}), machine_cores=4, now=NOW)
    (job,) = jobs_of([plan.model_copy(update={"dlbench_version": "0.0.0"}) for plan in made])
    return job


def comm_plan_of(**request: Any) -> CommPlan:
    """The same of the collective benchmark."""
    asked = CommRequest(**{"system": "box", "series": "golden", "points_are": "nodes", **request})
    (plan,) = expand_comm(asked, machine_cores=4, installed=(), now=NOW).plans
    return plan.model_copy(update={"dlbench_version": "0.0.0"})


def with_system(plan: PlanT, **changes: Any) -> PlanT:
    """The plan on a system of other settings; sections are merged, and all is validated again."""
    content = plan.model_dump(mode="json")
    for key, value in changes.items():
        content["system"][key] = {**content["system"][key], **value} if isinstance(value, dict) else value
    return type(plan).model_validate(content)


def folder_of(plan: LaunchPlan, root: str = "/scratch/runs") -> RunFolder:
    return RunFolder(Path(root) / plan.run_id)


def alone(plan: LaunchPlan) -> Job:
    return job_of([plan])


def render_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    return render_job(alone(plan), [folder], python)


def render_runs(job: Job, python: str = PYTHON) -> str:
    """The script of a job whose runs lie in /scratch/runs."""
    return render_job(job, [folder_of(plan) for plan in job.plans], python)


def with_plans(job: Job, change: Callable[[Any], Any]) -> Job:
    """The same job of changed plans."""
    return dataclasses.replace(job, plans=tuple(map(change, job.plans)))


# Commands


def test_the_command_of_every_launcher() -> None:
    plan = plan_of(ranks_per_node=2)
    folder = folder_of(plan)
    node = [PYTHON, "-P", "-m", "dlbench.supervisor", "-m", "dlbench.node", f"/scratch/runs/{plan.run_id}/plan.json"]
    common = ["--kill-on-bad-exit=1", "--label", "--export=ALL", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    common += ["--chdir=/", "--distribution=block:block"]
    for changes, mpi, cores in (
        ({}, "--mpi=pmix", ["--cpus-per-task=1"]),
        ({"launch": {"launcher": "srun-gloo"}}, "--mpi=none", ["--cpus-per-task=1"]),
        ({"launch": {"mpi_plugin": "pmi2"}, "slurm": {"cpus_per_task": False}}, "--mpi=pmi2", []),
    ):
        words = launch.launcher_command(with_system(plan, **changes), words_of(folder), PYTHON)
        assert words == ["srun", f"--job-name={plan.run_id}", mpi, *common, *cores, *node]
    mpirun = with_system(plan, launch={"launcher": "mpirun", "environment": {"B": "x y", "A": "1"}})
    words = launch.launcher_command(mpirun, words_of(folder), PYTHON)
    assert words[:7] == ["mpirun", "-np", "4", "--map-by", "ppr:2:node:OVERSUBSCRIBE", "--bind-to", "none"]
    assert words[-len(node) :] == node
    exports = words[7 : -len(node)]
    assert set(exports[::2]) == {"-x"}
    # Names alone: everybody may read a command line.
    assert exports[1::2] == ["A", "B", "DLBENCH_LAUNCH_TOKEN", "OMPI_MCA_mpi_yield_when_idle", *PYTHON_VARIABLES]


def test_local_ranks_know_their_places() -> None:
    plan = plan_of(system="local", points_are="ranks", points=(3,))
    made = launch.local_environments(plan, "t0k3n")
    assert [m["DLBENCH_RANK"] for m in made] == [m["DLBENCH_LOCAL_RANK"] for m in made] == ["0", "1", "2"]
    assert {(m["DLBENCH_WORLD_SIZE"], m["DLBENCH_LAUNCH_TOKEN"], m["PYTHONUNBUFFERED"]) for m in made} == {
        ("3", "t0k3n", "1")
    }


YIELDS = "OMPI_MCA_mpi_yield_when_idle"


@pytest.mark.parametrize("launcher", ["srun-mpi", "mpirun"])
def test_open_mpi_yields_only_where_ranks_share_cores(launcher: str) -> None:
    """Spinning is quicker; upstream gave the contrary up as a default."""
    fits = plan_of(system="example-gpu", launcher=launcher)
    assert (fits.layout.ranks_per_node, fits.layout.cores_per_rank, fits.layout.node_cores) == (4, 16, 64)
    assert YIELDS not in launch.rank_environment(fits)
    shares = plan_of(system="example-gpu", launcher=launcher, overrides={"layout.cores_per_rank": 17})
    assert launch.rank_environment(shares)[YIELDS] == "1"
    assert YIELDS not in launch.rank_environment(with_system(shares, launch={"oversubscribe_yield": False}))
    assert launch.rank_environment(with_system(fits, launch={"oversubscribe_yield": True}))[YIELDS] == "1"
    assert YIELDS not in launch.rank_environment(with_system(shares, launch={"launcher": "srun-gloo"}))


@pytest.mark.parametrize("launcher", ["srun-mpi", "mpirun"])
def test_open_mpi_s_ranks_of_one_node_listen_nowhere(launcher: str) -> None:
    one, two = (plan_of(launcher=launcher, points=(nodes,)) for nodes in (1, 2))
    assert launch.rank_environment(one)["OMPI_MCA_btl"] == "^tcp,ofi"
    assert "OMPI_MCA_btl" not in launch.rank_environment(two)
    asked = with_system(one, launch={"environment": {"OMPI_MCA_btl": "self,tcp"}})
    assert launch.rank_environment(asked)["OMPI_MCA_btl"] == "self,tcp"


# Batch scripts

GOLDENS: dict[str, Callable[[], LaunchPlan]] = {
    "box-srun-mpi": lambda: plan_of(),
    "box-srun-gloo": lambda: plan_of(launcher="srun-gloo", engine="ddp"),
    "box-mpirun": lambda: plan_of(launcher="mpirun", ranks_per_node=2),
    "example-gpu": lambda: plan_of(system="example-gpu", points=(4,), sweep={"sync.fusion": ("64MiB",)}),
    "comm": lambda: comm_plan_of(points=(2,), ranks_per_node=2, collective="all-gather"),
    "everything": lambda: with_system(
        plan_of(system="example-gpu", points=(1,)),
        slurm={
            "qos": "debug",
            "reservation": "bench_1",
            "account": "_my&account",
            "constraint": "[a100|h100]&nvlink",
            "nodelist": "n[01-04]",
            "exclude": [f"n{number}" for number in (*range(100, 300), 7)],
            "gpu_request": "gpus-per-task",
            "extra": ["--switches=1", "--comment=it's #7"],
            "exclusive": False,
            "cpus_per_task": False,
            "mem": 0,
            "gres": "craynetwork:1",
            "hint": "nomultithread",
            "mem_bind": "local",
            "srun_args": "--network=single_node_vni --cpu-freq=high",
            "login_shell": True,
        },
        launch={
            "environment": {
                "TEXT": "it's $HOME; `id`\n#SBATCH --wrap=id",
                "API_TOKEN": {"variable": "SITE_TOKEN"},
                "DB_PASSWORD": {"file": "~/my secrets/$(id)"},
            }
        },
        modules=["gcc/12.2", "openmpi/4.1+cuda"],
        modules_init=['module() { echo "$*" >>"$DUMP/module"; [ "$1" = purge ] || export LOADEDMODULES="$2"; }'],
        setup=["umask 022"],
        python="/opt/my env/bin/python",
    ),
}


def two_environments() -> Job:
    """Sides on the example cluster that differ in all that a job's script sets: modules, setup, python, variables."""
    job = sides_of({"engine.name": "ddp"}, {"system.launch.environment.NCCL_ALGO": "Ring"}, system="example-gpu")
    return with_plans(
        job,
        lambda plan: (
            with_system(plan, modules=["gcc/12.2"], setup=["umask 022"], python="/opt/my env/bin/python")
            if plan.series.side == "b"
            else with_system(plan, launch={"launcher": "srun-gloo"})
        ),
    )


def several_sizes() -> Job:
    """All points of a sweep in the nodes of the largest."""
    asked = {"workload": "cosmoflow", "preset": "ci", "series": "golden", "points_are": "nodes", "points": (1, 2)}
    sweep = {"sync.fusion": ("auto", "own:single")}
    made = expand(Request(**asked, system="box", sweep=sweep, repeats=2), machine_cores=4, now=NOW)
    (job,) = jobs_of([plan.model_copy(update={"dlbench_version": "0.0.0"}) for plan in made], packing="all")
    return job


def may_begin_anew() -> Job:
    """Repeats in one job that Slurm may end early, and start again."""
    asked = {"workload": "cosmoflow", "preset": "ci", "series": "golden", "points_are": "nodes", "points": (1,)}
    overrides = {"system.slurm.requeue": True, "checkpoint.every_steps": 2}
    made = expand(Request(**asked, system="box", repeats=2, overrides=overrides), machine_cores=4, now=NOW)
    (job,) = jobs_of([plan.model_copy(update={"dlbench_version": "0.0.0"}) for plan in made])
    return job


def of_two_launchers() -> Job:
    """Sides of which only mpirun itself can tell one that the job's time ends."""
    sides = sides_of({}, {"system.launch.launcher": "mpirun"}, repeats=1, ranks_per_node=2)
    return with_plans(sides, lambda plan: with_system(plan, slurm={"requeue": True}))


def an_array() -> Job:
    """The same of one size, in jobs of their own."""
    asked = {"workload": "cosmoflow", "preset": "ci", "series": "golden", "points_are": "nodes", "points": (2,)}
    made = expand(Request(**asked, system="box", repeats=3), machine_cores=4, now=NOW)
    (job,) = jobs_of([plan.model_copy(update={"dlbench_version": "0.0.0"}) for plan in made], packing="runs")
    return job


SIDES: dict[str, Callable[[], Job]] = {
    "packed-sizes": several_sizes,
    "array": an_array,
    "requeue": may_begin_anew,
    "sides-box": lambda: sides_of({}, {"engine.name": "ddp"}),
    "sides-mpirun": lambda: sides_of({}, {"system.launch.launcher": "mpirun"}, repeats=3, ranks_per_node=2),
    "sides-requeue": of_two_launchers,
    "sides-everything": two_environments,
}


def script_of(name: str) -> str:
    return render_runs(job_named(name))


def job_named(name: str) -> Job:
    return SIDES[name]() if name in SIDES else alone(GOLDENS[name]())


@pytest.mark.parametrize("name", [*GOLDENS, *SIDES])
def test_the_script_is_the_golden_one(name: str) -> None:
    """Byte for byte; DLBENCH_UPDATE_GOLDEN=1 rewrites the files, to be read before they are committed."""
    path = GOLDEN / f"{name}.sbatch"
    script = script_of(name)
    assert script == script_of(name)
    if os.environ.get("DLBENCH_UPDATE_GOLDEN") == "1":
        path.write_text(script, encoding="utf-8")
    assert path.is_file(), f"no {path}; DLBENCH_UPDATE_GOLDEN=1 writes it"
    assert script == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*GOLDENS, *SIDES])
def test_bash_and_shellcheck_have_nothing_to_say(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    job = with_plans(job_named(name), lambda plan: with_system(plan, setup=[]))  # a site's own lines are the site's
    script = render_runs(job)
    subprocess.run(["bash", "-n"], input=script_of(name), text=True, check=True)
    # SC2016: what stands in single quotes is not to be expanded, that is the point of them.
    command = ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def told_options(script: str) -> list[str]:
    """What sbatch reads in a script, as its opt.c does: `#SBATCH` lines before the first command.

    Inside of single or double quotes blanks are kept; a backslash escapes anywhere; an open # begins a comment.
    """
    found = []
    for line in itertools.takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), script.split("\n")):
        words: list[str] = []
        quote, escaped, is_open = "", False, False
        for char in line.removeprefix("#SBATCH") if line.startswith("#SBATCH") else "":
            if not quote and not escaped and char.isspace():
                is_open = False
                continue
            if not is_open:
                words.append("")
                is_open = True
            if not escaped and char == "\\":
                escaped = True
            elif not escaped and char == quote:
                quote = ""
            elif not escaped and not quote and char in "'\"":
                quote = char
            elif not escaped and not quote and char == "#":
                break
            else:
                words[-1] += char
                escaped = False
        assert not quote, line
        found += words
    return found


def asked_for(job: Job, folder: RunFolder) -> list[str]:
    output = f"{folder.path}/slurm-{'%A_%a' if job.is_array else '%j'}.out"
    options = sbatch_options(job.shape, job_name=job.name, time_limit=job.time_limit, warn_script=job.passes_warning_on)
    return [*options, f"--chdir={folder.path}", f"--output={output}"]


WORD = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:,/@=+\[\]-]{0,20}", fullmatch=True)
SHELL = ["$(touch canary)", "`touch canary`", "; touch canary;", "\ntouch canary\n", "&& touch canary", "|touch canary"]
SHELL += ["'", '"', "\\", "\n", "\r", "\t", " ", "$", "${HOME}", "~", "*", "?", "[a]", "{a,b}", "!", "#", "%", "=", "-"]
SHELL += ["\n#SBATCH --wrap=id\n", "@TOKEN@", "{{ plan }}", "{% raw %}", "{# #}", "'$(touch canary)'", "\x1b[2J", "é"]
ANY = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
HOSTILE = st.lists(st.sampled_from(SHELL) | ANY, max_size=5).map("".join)


@given(
    key=st.sampled_from(["partition", "account", "constraint", "exclude", "gpu_type", "time_limit", "extra", "hint"]),
    value=WORD | HOSTILE | st.text(alphabet="0123456789:-٣\n", max_size=9),
)
@example(key="time_limit", value="٣٠")
@example(key="time_limit", value="1-00:00:00")
@example(key="extra", value="comment=$(touch canary)\\")
@example(key="constraint", value="[rack1|rack2]&a100*2")
def test_any_text_reaches_sbatch_as_one_word(key: str, value: str) -> None:
    """In the script it is a directive of one line, and nothing more."""
    content = plan_of(system="example-gpu", launcher="srun-gloo").model_dump(mode="json")
    content["system"]["slurm"][key] = [value] if key == "extra" else value
    try:
        plan = RunPlan.model_validate(content)
    except ValueError:
        return
    script = render_script(plan, folder_of(plan), PYTHON)
    job = alone(plan)
    options = sbatch_options(plan, time_limit=job.time_limit)
    assert told_options(script) == asked_for(job, folder_of(plan))
    assert all(option.startswith("--") and option.isprintable() for option in options)
    expected = {"time_limit": f"--time={job.time_limit}", "extra": f"--{value.removeprefix('--')}"}
    if key in ("partition", "account", "constraint", "time_limit", "extra", "hint"):
        assert expected.get(key, f"--{key}={value}") in options
    assert sbatch_arguments(job, folder_of(plan)) == ["sbatch", "--parsable", str(folder_of(plan).script)]
    if "canary" in value:
        with tempfile.TemporaryDirectory() as root:
            cluster = Cluster(Path(root))
            cluster.run(script)
            assert list(cluster.cwd.iterdir()) == []


def test_gpus_are_asked_for_as_the_site_wants() -> None:
    plan = plan_of(system="example-gpu")

    def asked(**changes: Any) -> list[str]:
        return [word for word in sbatch_options(with_system(plan, slurm=changes)) if "gpu:" in word or "gpus" in word]

    assert asked(gpu_request="gres") == ["--gres=gpu:a100:4"]
    assert asked(gpu_request="gres", gpu_type=None) == ["--gres=gpu:4"]
    assert asked(gpu_request="gpus-per-node") == ["--gpus-per-node=a100:4"]
    assert asked(gpu_request="gpus-per-task", gpu_type=None) == ["--gpus-per-task=1"]
    assert asked(gpu_request="gres", gres="craynetwork:1") == ["--gres=gpu:a100:4,craynetwork:1"]
    assert asked(gpu_request="none") == []
    one = plan_of(system="example-gpu", ranks_per_node=1)
    assert "--gres=gpu:a100:1" in sbatch_options(one)
    assert "--gres=gpu:a100:4" in sbatch_options(with_system(one, slurm={"gpu_count": "node"}))


@pytest.mark.parametrize(
    ("given", "right"),
    [("gpu:a100", "a100"), ("a100:4", "a100"), ("gres/gpu:h100:2", "h100"), ("gpu", "the type alone")],
)
def test_a_type_of_gpu_is_no_request(given: str, right: str) -> None:
    with pytest.raises(UserError, match=f"gpu_type: '{given}' is not only a GPU type: write {right}"):
        plan_of(system="example-gpu", overrides={"system.slurm.gpu_type": given})
    by_number = plan_of(system="example-gpu", overrides={"system.slurm.gpu_type": "4090"})
    assert "--gres=gpu:4090:4" in sbatch_options(by_number)


def test_ranks_are_not_bound_to_gpus_unless_the_site_says_otherwise() -> None:
    """--gpu-bind=none would take CUDA_VISIBLE_DEVICES away; gpus-per-task alone would bind (srun(1), --tres-bind)."""
    plan = plan_of(system="example-gpu")

    def bound(**changes: Any) -> list[str]:
        made = with_system(plan, slurm=changes)
        words = launch.launcher_command(made, words_of(folder_of(made)), PYTHON)
        return [word for word in words if word.startswith(("--gpu", "SLURM_GPUS", "SLURM_TRES"))]

    for request in ("gres", "gpus-per-node", "none"):
        assert bound(gpu_request=request) == []
    names = ["SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"]
    assert bound(gpu_request="gpus-per-task") == [*names, "--gpus-per-node=a100:4"]
    assert bound(gpu_request="gpus-per-task", gpu_bind="site") == []
    assert bound(gpu_request="gpus-per-task", gpu_bind="per_task:1") == ["--gpu-bind=per_task:1"]
    sides_of({}, {"system.slurm.gpu_bind": "closest"}, system="example-gpu")  # of one job


VALUES = st.one_of(
    st.integers(-3, 300), st.booleans(), st.none(), st.text(max_size=70), st.sampled_from(["a-b", "b-c", "a", "c"])
)


@given(
    axes=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=6, unique_by=repr),
    workload=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
)
@settings(max_examples=25)
def test_job_names_are_short_words_and_no_two_of_a_series_are_equal(axes: list[tuple[Any, Any]], workload: str) -> None:
    layout = plan_of().layout
    names = [
        job_label(workload, layout, {"data.source": one, "data.shuffle": two}, f"r{repeat}")
        for one, two in axes
        for repeat in (1, 2)
    ]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)


def test_a_job_name_says_nodes_ranks_swept_values_and_repeat() -> None:
    asked = {"sync.fusion": ("64MiB",), "train.precision": ("bf16",)}
    request = {"system": "example-gpu", "points_are": "nodes", "points": (4,), "repeats": 2, "sweep": asked}
    made = expand(Request(workload="resnet50", preset="ci", **request), machine_cores=4, now=NOW)
    assert [plan.job_name for plan in made] == [f"resnet50-4nodes-16ranks-fusion64MiB-bf16-r{n}" for n in (1, 2)]
    script = render_script(made[1], folder_of(made[1]), PYTHON)
    assert "--job-name=resnet50-4nodes-16ranks-fusion64MiB-bf16-r2" in told_options(script)
    assert "# Swept: sync.fusion=64MiB, train.precision=bf16\n" in script
    assert f"series {made[1].series.id}, repeat 2 of 2:" in script


# Scripts that run, with stubs for what a cluster has

STUB = """#!/bin/bash
name=${0##*/}
if [ "$name $1" = "srun --mpi=list" ]; then
  cat "$LISTING" || exit
  exit "${LISTING_CODE:-0}"
fi
if [ "$name $1" = "mpirun --version" ]; then
  echo "${MPIRUN:-mpirun (Open MPI) 5.0.11}"
  exit
fi
printf '%s\\0' "$@" >> "$DUMP/$name"
/usr/bin/env -0 > "$DUMP/$name.env"
exit "${STUB_CODE:-0}"
"""
LISTING = (
    "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)


class Cluster:
    def __init__(self, root: Path) -> None:
        self.bin, self.dump, self.cwd = root / "bin", root / "dump", root / "cwd"
        for folder in (self.bin, self.dump, self.cwd):
            folder.mkdir()
        self.listing = root / "listing"
        self.listing.write_text(LISTING)
        for name in ("srun", "mpirun"):
            (self.bin / name).write_text(STUB)
            (self.bin / name).chmod(0o755)

    def run(self, script: str, nodes: str | None = "2", **variables: str) -> subprocess.CompletedProcess[str]:
        for path in self.dump.iterdir():
            path.unlink()
        file = self.bin.parent / "job.sbatch"
        file.write_bytes(script.encode())
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.cwd),
            "DUMP": str(self.dump),
            "LISTING": str(self.listing),
            "SLURM_JOB_ID": "4711",
            SUBMITTED: "1",
            **({} if nodes is None else {"SLURM_JOB_NUM_NODES": nodes}),
            **variables,
        }
        return subprocess.run(
            ["bash", str(file)], cwd=self.cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def arguments(self, name: str) -> list[str]:
        return (self.dump / name).read_bytes().decode().split("\0")[:-1]

    def environment(self, name: str) -> dict[str, str]:
        pairs = (self.dump / f"{name}.env").read_bytes().decode().split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)

    def called(self) -> set[str]:
        return {path.name for path in self.dump.iterdir() if path.suffix != ".env"}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster").mkdir()
    return Cluster(tmp_path / "cluster")


@given(
    one=HOSTILE,
    two=HOSTILE,
    python=HOSTILE.filter(bool),
    place=HOSTILE,
    launcher=st.sampled_from(["srun-mpi", "srun-gloo", "mpirun"]),
)
@example(one="@TOKEN@", two="a @TOKEN@ b", python="/@TOKEN@/python", place="@TOKEN@", launcher="mpirun")
@example(one="'", two='"', python="-c", place="-rf *", launcher="srun-mpi")
@example(one="\n#SBATCH --wrap=id\n", two="", python="a\nb", place="a\nb", launcher="srun-gloo")
def test_any_text_reaches_the_ranks_unharmed(one: str, two: str, python: str, place: str, launcher: str) -> None:
    """Variables, interpreter and folder pass through bash as they are, and nothing in them is executed."""
    plain = with_system(plan_of(), launch={"launcher": launcher, "environment": {"ONE": "", "TWO": ""}})
    plan = with_system(plain, launch={"environment": {"ONE": one, "TWO": two}})
    folder = RunFolder(Path("/scratch") / place / plan.run_id)
    script = render_script(plan, folder, python)
    read = [word for word in told_options(script) if not word.startswith(("--chdir=", "--output="))]
    assert read == asked_for(alone(plain), folder)[: len(read)]
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(Path(root))
        done = cluster.run(script)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert list(cluster.cwd.iterdir()) == []  # where a canary would be
        program = launcher.partition("-")[0]
        assert cluster.called() == {program}
        assert [program, *cluster.arguments(program)] == launch.launcher_command(plan, words_of(folder), python)
        seen = cluster.environment(program)
        assert (seen["ONE"], seen["TWO"]) == (one, two)
        assert seen.get("DLBENCH_LAUNCH_TOKEN") == ("4711-0" if launcher == "mpirun" else None)


def test_the_words_of_the_script_are_those_of_the_plan(cluster: Cluster) -> None:
    plan = GOLDENS["everything"]()
    (cluster.cwd / "my secrets").mkdir()
    (cluster.cwd / "my secrets" / "$(id)").write_text("s3cret\n")
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON), nodes="1", SITE_TOKEN="t $(id)")
    assert (done.returncode, done.stderr) == (0, "")
    assert (cluster.dump / "module").read_text().split() == ["purge", "load", "gcc/12.2", "load", "openmpi/4.1+cuda"]
    assert cluster.arguments("srun")[-7] == "/opt/my env/bin/python"  # the system's, not the submitter's
    seen = cluster.environment("srun")
    assert seen["TEXT"] == "it's $HOME; `id`\n#SBATCH --wrap=id"
    assert (seen["API_TOKEN"], seen["DB_PASSWORD"]) == ("t $(id)", "s3cret")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"variable": "NOT_SET"}, "launch.environment.API_TOKEN: NOT_SET is not set in the job"),
        ({"file": "/nosuch/file"}, "launch.environment.API_TOKEN: its file cannot be read on this node"),
    ],
)
def test_a_job_without_a_secret_ends_before_it_starts_anything(
    cluster: Cluster, source: dict[str, str], words: str
) -> None:
    plan = with_system(plan_of(), launch={"environment": {"API_TOKEN": source}})
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON))
    assert done.returncode == 2
    assert words in done.stderr
    assert "srun" not in cluster.called() or "--mpi=list" in cluster.arguments("srun")


def test_setup_lines_run_as_they_are_and_before_the_variables(cluster: Cluster) -> None:
    """A site's setup may set what the system file then sets finally."""
    plan = with_system(
        plan_of(), launch={"environment": {"X": "from the file"}}, setup=['export X=setup Y="$X$SLURM_JOB_ID"', "cd /"]
    )
    assert cluster.run(render_script(plan, folder_of(plan), PYTHON)).returncode == 0
    seen = cluster.environment("srun")
    assert (seen["X"], seen["Y"], seen["PWD"]) == ("from the file", "4711", "/")


@pytest.mark.parametrize("launcher", ["srun-mpi", "srun-gloo", "mpirun"])
def test_the_script_ends_with_what_the_ranks_end_with(cluster: Cluster, launcher: str) -> None:
    plan = with_system(plan_of(), launch={"launcher": launcher})
    script = render_script(plan, folder_of(plan), PYTHON)
    for code in (0, 3, 137):
        assert cluster.run(script, STUB_CODE=str(code)).returncode == code


@pytest.mark.parametrize("nodes", ["3", None])
def test_another_number_of_nodes_is_refused(cluster: Cluster, nodes: str | None) -> None:
    plan = plan_of()
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON), nodes=nodes)
    assert done.returncode == 3
    assert done.stderr == f"dlbench: error: Slurm granted {nodes or 0} nodes, the plan asks for 2\n"
    assert cluster.called() == set()


@pytest.mark.parametrize(
    ("listing", "code", "plugin", "expected"),
    [
        (LISTING, "0", "pmix", 0),
        (LISTING, "0", "pmi2", 0),
        (LISTING, "0", "pmix_v4", 0),
        (LISTING, "0", "pmi", 5),
        (LISTING, "0", "pmix_v3", 5),
        ("MPI plugin types are...\n\tnone\n\tpmix_v4\n", "0", "pmix", 5),
        ("srun: MPI types are...\nsrun: pmix\n", "0", "pmix", 0),
        ("", "0", "pmix", 5),
        ("srun: fatal: no cluster, so no pmix\n", "1", "pmix", 5),
    ],
)
def test_a_missing_mpi_plugin_is_told(cluster: Cluster, listing: str, code: str, plugin: str, expected: int) -> None:
    cluster.listing.write_text(listing)
    plan = with_system(plan_of(), launch={"mpi_plugin": plugin})
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON), LISTING_CODE=code)
    assert done.returncode == expected
    assert cluster.called() == (set() if expected else {"srun"})
    if expected:
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"dlbench: error: this Slurm has no MPI plugin {plugin};")
        assert "srun-gloo" in line


def test_a_plugin_is_found_however_slowly_slurm_lists_them(cluster: Cluster) -> None:
    """A search that ends at the first hit would end srun with SIGPIPE, and that would count as not found."""
    slow = STUB.replace('cat "$LISTING" || exit', "echo pmix; sleep 0.3; echo none; sleep 0.1; echo pmi2")
    assert slow != STUB
    (cluster.bin / "srun").write_text(slow)
    plan = plan_of()
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("answer", "owner"),
    [
        ("HYDRA build details:\n    Version: 4.1.1", "MPICH's or MVAPICH's"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", "Intel MPI's"),
    ],
)
def test_the_mpirun_of_another_mpi_ends_the_job_before_the_ranks(cluster: Cluster, answer: str, owner: str) -> None:
    plan = with_system(plan_of(), launch={"launcher": "mpirun"})
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON), MPIRUN=answer)
    assert (done.returncode, done.stdout, cluster.called()) == (5, "", set())
    assert f": mpirun is {owner}, and dlbench needs Open MPI's: load Open MPI's module" in done.stderr


def test_launchers_without_mpi_ask_for_no_plugin(cluster: Cluster) -> None:
    cluster.listing.write_text("")
    for launcher in ("srun-gloo", "mpirun"):
        plan = with_system(plan_of(), launch={"launcher": launcher})
        assert cluster.run(render_script(plan, folder_of(plan), PYTHON)).returncode == 0


# Scripts of several runs


def rooms(job: Job, root: Path) -> list[RunFolder]:
    folders = [folder_of(plan, str(root)) for plan in job.plans]
    for folder in folders:
        folder.path.mkdir(parents=True)
    return folders


# Tells who called it, from where, and with which variables; the plan of a run that shall fail stands in FAILING.
TELLING = """#!/bin/bash
[ "$1" = --mpi=list ] && { echo pmix; exit; }
[ "$1" = --version ] && exit
printf '%s\\t' "${0##*/}" "$PWD" "${@: -7:1}" "${@: -1}" "${X-unset}" "${Y-unset}" >> "$DUMP/told"
echo >> "$DUMP/told"
echo "words of a rank"
case " ${FAILING-} " in *" ${@: -1} "*) exit "${STUB_CODE:-7}" ;; esac
"""


def told_by(cluster: Cluster) -> list[list[str]]:
    file = cluster.dump / "told"
    return [line.split("\t")[:-1] for line in file.read_text().splitlines()] if file.exists() else []


def telling(cluster: Cluster) -> None:
    for name in ("srun", "mpirun"):
        (cluster.bin / name).write_text(TELLING)


def test_pairs_run_one_after_the_other_each_in_its_folder(cluster: Cluster, tmp_path: Path) -> None:
    telling(cluster)
    job = sides_of({}, {"system.python": "/new env/bin/python"}, repeats=3)
    folders = rooms(job, tmp_path / "my 'runs' $HOME")
    done = cluster.run(render_job(job, folders, PYTHON))
    assert (done.returncode, done.stderr) == (0, "")
    assert [plan.series.side for plan in job.plans] == ["a", "b", "b", "a", "a", "b"]
    pythons = {"a": PYTHON, "b": "/new env/bin/python"}
    assert told_by(cluster) == [
        ["srun", str(folder.path), pythons[plan.series.side], str(folder.plan), "unset", "unset"]
        for plan, folder in zip(job.plans, folders, strict=True)
    ]
    assert {folder.launch_log.read_text() for folder in folders} == {"words of a rank\n"}
    names = [line.rpartition(" ")[2] for line in done.stdout.splitlines()[:-1]]
    assert names == [*job.run_ids]
    assert done.stdout.splitlines()[-1] == "dlbench: 0 of 6 runs failed"


def test_no_side_inherits_from_the_other(cluster: Cluster, tmp_path: Path) -> None:
    telling(cluster)
    lines = {"a": ["export X=a", "cd /"], "b": ["export Y=${X-b}"]}
    job = sides_of({}, {"engine.name": "ddp"})
    job = with_plans(job, lambda plan: with_system(plan, setup=lines[plan.series.side]))
    folders = rooms(job, tmp_path / "runs")
    done = cluster.run(render_job(job, folders, PYTHON))
    assert (done.returncode, done.stderr) == (0, "")
    seen = [(plan.series.side, row[1] == "/", *row[4:]) for plan, row in zip(job.plans, told_by(cluster), strict=True)]
    a, b = ("a", True, "a", "unset"), ("b", False, "unset", "b")
    assert seen == [a, b, b, a]


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (1, 2), (0, 1, 2, 3)])
def test_a_run_that_fails_stops_none_and_the_job_says_so(
    cluster: Cluster, tmp_path: Path, failing: tuple[int, ...]
) -> None:
    telling(cluster)
    job = sides_of({}, {"engine.name": "ddp"})
    folders = rooms(job, tmp_path / "runs")
    plans = " ".join(str(folders[number].plan) for number in failing)
    done = cluster.run(render_job(job, folders, PYTHON), FAILING=plans)
    assert done.returncode == 7
    assert [row[3] for row in told_by(cluster)] == [str(folder.plan) for folder in folders]
    errors = done.stderr.splitlines()
    assert [line.split()[2] for line in errors] == [job.run_ids[number] for number in failing]
    told = "words of a rank\ndlbench: the run ended with exit code 7\n"
    assert [folder.launch_log.read_text() == told for folder in folders] == [n in failing for n in range(4)]
    assert all("ended with 7" in line and "launch.log" in line for line in errors)
    assert done.stdout.splitlines()[-1] == f"dlbench: {len(failing)} of 4 runs failed"


def test_the_first_failure_is_the_job_s(cluster: Cluster, tmp_path: Path) -> None:
    """Side b has no MPI plugin (5); then a run of side a fails, too (7)."""
    telling(cluster)
    job = sides_of({}, {"system.launch.mpi_plugin": "pmi2"})
    folders = rooms(job, tmp_path / "runs")
    done = cluster.run(render_job(job, folders, PYTHON), FAILING=str(folders[3].plan))
    assert done.returncode == 5
    assert len(told_by(cluster)) == 2  # side a alone
    assert "no MPI plugin pmi2" in folders[1].launch_log.read_text()


def test_a_setup_line_that_fails_ends_its_run_alone(cluster: Cluster, tmp_path: Path) -> None:
    telling(cluster)
    job = with_plans(
        sides_of({}, {"engine.name": "ddp"}),
        lambda plan: with_system(plan, setup=["false", "echo unreached"] if plan.series.side == "a" else []),
    )
    folders = rooms(job, tmp_path / "runs")
    done = cluster.run(render_job(job, folders, PYTHON))
    assert done.returncode == 1
    assert [row[3] for row in told_by(cluster)] == [str(folders[1].plan), str(folders[2].plan)]
    assert "unreached" not in done.stdout + folders[0].launch_log.read_text()


def test_a_run_that_has_its_record_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    """A job that Slurm starts again goes on with what is missing."""
    telling(cluster)
    job = sides_of({}, {"engine.name": "ddp"})
    folders = rooms(job, tmp_path / "runs")
    folders[1].record.write_text("{}")
    assert cluster.run(render_job(job, folders, PYTHON)).returncode == 0
    assert [row[3] for row in told_by(cluster)] == [str(folders[number].plan) for number in (0, 2, 3)]
    plan = plan_of()
    folder = folder_of(plan, str(tmp_path / "runs"))
    folder.path.mkdir()
    folder.record.write_text("{}")
    assert cluster.run(render_script(plan, folder, PYTHON)).returncode == 0
    assert told_by(cluster) == []


def test_each_job_of_an_array_takes_its_run(cluster: Cluster, tmp_path: Path) -> None:
    telling(cluster)
    job = dataclasses.replace(sides_of({}, {"engine.name": "ddp"}), array_limit=1)
    folders = rooms(job, tmp_path / "runs")
    script = render_job(job, folders, PYTHON)
    for number, folder in enumerate(folders, 1):
        done = cluster.run(script, SLURM_ARRAY_TASK_ID=str(number), FAILING=str(folders[1].plan))
        assert (done.returncode, [row[3] for row in told_by(cluster)]) == (7 * (number == 2), [str(folder.plan)])
        assert folder.launch_log.read_text().startswith("words of a rank\n")
    assert told_options(script)[-2:] == [f"--output={folders[0].path}/slurm-%A_%a.out", "--array=1-4%1"]


def test_the_words_that_name_a_side_end_no_comment() -> None:
    made = sides_of({}, {"engine.name": "ddp"})
    sides = {"a": {}, "b": {"free": "\n#SBATCH --wrap=id\ntouch canary\n"}}
    renamed = {"sides": sides}
    job = with_plans(made, lambda plan: plan.model_copy(update={"series": plan.series.model_copy(update=renamed)}))
    script = render_runs(job)
    assert told_options(script) == told_options(render_runs(made))
    (line,) = [line for line in script.split("\n") if line.startswith("# Side b: ")]
    assert line.isprintable()
    assert "\ntouch canary" not in script


@pytest.mark.parametrize(
    ("b", "key"),
    [
        ({"system.slurm.partition": "other"}, "system.slurm.partition"),
        ({"system.slurm.gpu_request": "gres"}, "system.slurm.gpu_request"),
        ({"system.slurm.time_limit": "5"}, "system.slurm.time_limit"),
        ({"system.slurm.exclusive": True}, "system.slurm.exclusive"),
        ({"layout.cores_per_rank": 3}, "layout.cores_per_rank"),
        ({"system.node.cores": 8}, "layout.cores_per_rank"),
    ],
)
def test_sides_that_need_two_allocations_are_refused(b: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        sides_of({}, b)
    assert key in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# Submitting


def test_the_sbatch_command() -> None:
    """All that a line of the script can say stands there, and nothing twice."""
    plan, folder = plan_of(), RunFolder(Path('/scratch/my "runs" #1/100%/%j/run'))
    script = render_script(plan, folder, PYTHON)
    place = ['--chdir=/scratch/my "runs" #1/100%/%j/run', '--output=/scratch/my "runs" #1/100%%/%%j/run/slurm-%j.out']
    assert told_options(script) == [*sbatch_options(plan), *place]
    assert sbatch_arguments(alone(plan), folder) == ["sbatch", "--parsable", str(folder.script)]
    after = sbatch_arguments(alone(plan), folder, after="4711")
    assert after == ["sbatch", "--parsable", "--dependency=afterany:4711", str(folder.script)]


@pytest.mark.parametrize("place", ["/scratch/hetjob-tests", "/scratch/a\nb"])
def test_what_no_line_of_the_script_can_hold_is_an_argument_and_the_script_says_so(place: str) -> None:
    """Anywhere in an #SBATCH line sbatch takes hetjob for the beginning of another job."""
    plan, folder = plan_of(), RunFolder(Path(place) / "run")
    script = render_script(plan, folder, PYTHON)
    words = [f"--chdir={folder.path}", f"--output={folder.path}/slurm-%j.out"]
    assert told_options(script) == sbatch_options(plan)
    assert sbatch_arguments(alone(plan), folder) == ["sbatch", "--parsable", *words, str(folder.script)]
    head = script.partition("\nif [")[0].splitlines()
    assert all(line.startswith("#") or not line for line in head)
    assert "# To submit it by hand: `sbatch` with this file and the arguments below, from any folder." in script
    if place.isprintable():
        assert f"#   {words[0]} \\\n#   {words[1]}\n" in script


def a_run(tmp_path: Path) -> tuple[RunPlan, RunFolder]:
    plan = plan_of()
    out = tmp_path / "runs"
    out.mkdir(exist_ok=True)
    return plan, create(out, plan)


@pytest.mark.parametrize(
    ("answer", "job"), [("123", "123"), ("123;cluster", "123"), ("7;my-cluster.example\\n", "7"), ("123\\n\\n", "123")]
)
def test_a_job_s_id_is_kept(tmp_path: Path, program: Program, answer: str, job: str) -> None:
    program("sbatch", f'echo "sbatch: warning: be patient" >&2; printf "{answer}\\n"')
    plan, folder = a_run(tmp_path)
    made = submit(alone(plan), [folder], PYTHON, None)
    assert made.partition(";")[0] == job
    kept = read_submission(folder)
    assert (kept.job_id, kept.runs, kept.log) == (job, (), f"{plan.run_id}/slurm-{job}.out")
    assert folder.script.read_text() == render_script(plan, folder, PYTHON)
    assert list(kept.command) == sbatch_arguments(alone(plan), folder)


@pytest.mark.parametrize("name", ["a b", "'q' \"q\"", "new\nline", "100%j", "$(touch canary)", "é", "-n"])
def test_sbatch_gets_the_words_whatever_the_folder_s_name(tmp_path: Path, program: Program, name: str) -> None:
    program("sbatch", f'printf "%s\\0" sbatch "$@" > {tmp_path}/seen; echo 5')
    (tmp_path / name).mkdir()
    plan = plan_of()
    folder = create(tmp_path / name, plan)
    submit(alone(plan), [folder], PYTHON, "4")
    assert (tmp_path / "seen").read_text().split("\0")[:-1] == sbatch_arguments(alone(plan), folder, "4")
    assert not list(tmp_path.rglob("canary"))


REFUSAL = (
    "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition"
)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"cat >&2 <<'E'\n{REFUSAL}\nE\nexit 1", "invalid partition specified: nope"),
        ("echo 'a banner'; printf 'sbatch: error: Access/permission denied\\x1b[2J\\n' >&2; exit 1", "denied"),
        *(
            (f"echo 'sbatch: error: Batch job submission failed: {words}' >&2; exit 1", words)
            for words in (
                "Job violates accounting/QOS policy (job submit limit, users size and/or time limits)",
                "Invalid account or account/partition combination specified",
                "Requested node configuration is not available",
                "Requested time limit is invalid (missing or exceeds some limit)",
            )
        ),
    ],
)
def test_a_refused_run_leaves_nothing_and_says_why(tmp_path: Path, program: Program, body: str, words: str) -> None:
    program("sbatch", body)
    program("squeue", "exit 1")
    plan, folder = a_run(tmp_path)
    kept = create(folder.path.parent, plan_of(series="another"))
    with pytest.raises(RefusedError) as caught:
        submit(alone(plan), [folder], PYTHON, None)
    told = str(caught.value)
    assert told.startswith(f"sbatch refused {plan.run_id}: ")
    assert words in told
    assert "\n" not in told
    assert not folder.path.exists()
    assert kept.plan.is_file()
    assert [call[0] for call in calls(tmp_path)] == ["sbatch"]


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"

DOUBTS = [
    (f"echo '{TIMED_OUT}' >&2; exit 1", "Socket timed out"),
    (f"echo 'sbatch: warning: invalid account, using the default'; echo '{TIMED_OUT}' >&2; exit 1", "Socket timed out"),
    (f"echo 123; cat >&2 <<'E'\n{REFUSAL}\nE\nexit 1", "Batch job submission failed"),
    ("exit 1", "it ended with 1"),
    ("echo 123; exit 1", "it ended with 1"),
    ("kill -9 $$", "9"),
    ("echo Submitted batch job 12", "Submitted batch job 12"),
    ("echo 12 13", "12 13"),
    ("echo 12abc", "12abc"),
    ("echo -5", "-5"),
    ("true", "''"),
    ("printf '\\xff\\xfe\\n'", "unexpected answer"),
]


@pytest.mark.parametrize(
    ("body", "words", "queue"),
    [
        *((*doubt, "true") for doubt in DOUBTS),
        (*DOUBTS[0], None),
        (*DOUBTS[0], "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"),
    ],
)
def test_a_job_that_may_be_queued_keeps_its_folder(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, body: str, words: str, queue: str | None
) -> None:
    """Neither yes nor no: the job may be queued, and would find its plan gone."""
    monkeypatch.setattr("dlbench.jobs.campaign.completing._QUERY_PAUSES_S", (0.0,))
    program("sbatch", body)
    if queue is not None:
        program("squeue", queue)
    plan, folder = a_run(tmp_path)
    with pytest.raises(RunError) as caught:
        submit(alone(plan), [folder], PYTHON, None, "token")
    told = str(caught.value)
    assert not isinstance(caught.value, RefusedError)
    assert plan.run_id in told
    assert words in told
    assert "may be queued" in told
    assert "\n" not in told
    assert folder.plan.is_file()
    assert folder.script.is_file()
    assert read_submission(folder) is None


@pytest.mark.parametrize(("body", "words"), DOUBTS[:6])
@pytest.mark.parametrize("by", ["comment", "folder"])
def test_a_job_that_was_taken_in_all_the_same_is_adopted(
    tmp_path: Path, program: Program, body: str, words: str, by: str
) -> None:
    program("sbatch", body)
    plan, folder = a_run(tmp_path)
    mine = "token|/elsewhere" if by == "comment" else f"a site's | own|{folder.path}"
    queue = f"76|RUNNING|N/A|None|(null)|{folder.path.parent}\n77|PENDING|N/A|Priority|{mine}\n"
    program("squeue", f"cat <<'E'\n{queue}E")
    assert submit(alone(plan), [folder], PYTHON, None, "token") == "77"
    kept = read_submission(folder)
    assert kept.job_id == "77"
    asked = calls(tmp_path)[-1]
    assert asked[0] == "squeue"
    assert f"--user={os.getuid()}" in asked


@pytest.mark.parametrize("answer", ["12\\nYour project has 5 hours left\\n123;c", "123\\n424242"])
def test_of_several_numbers_the_queue_says_which_is_the_id(tmp_path: Path, program: Program, answer: str) -> None:
    program("sbatch", f'printf "{answer}\\n"')
    program("squeue", "echo '424242|RUNNING|N/A|None|other|/x'; echo '123|PENDING|N/A|None|token|/x'")
    plan, folder = a_run(tmp_path)
    assert submit(alone(plan), [folder], PYTHON, None, "token") == "123"


def test_an_element_of_an_array_is_cancelled_by_the_script_that_slurm_keeps(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs of mine"
    out.mkdir()
    (job,) = jobs_of([plan_of(), plan_of(series="other")], packing="runs")
    folders = [create(out, plan) for plan in job.plans]
    program("sbatch", "echo 88")
    submit(job, folders, PYTHON, None, "token")
    program("squeue", f'for n in 1 2; do echo "88_$n|PENDING|N/A|None|token|{folders[0].path}"; done')
    program("scontrol", f"cat '{folders[0].script}'")
    program("scancel", "")
    second = read_submission(folders[1])
    assert second is not None
    assert cancel_run(folders[1], second, Slurm()).jobs == ("88_2",)
    assert calls(tmp_path)[-1] == ["scancel", "88_2"]
    # A file that says the other's number changes nothing.
    forged = second.model_copy(update={"job_id": "88_1"})
    assert cancel_run(folders[1], forged, Slurm()).foreign_jobs == ("88_1",)


def test_a_site_s_own_comment_stays(tmp_path: Path, program: Program) -> None:
    program("sbatch", "echo 5")
    plan, folder = a_run(tmp_path)
    submit(alone(plan), [folder], PYTHON, None, "token")
    assert "--comment=token" in told_options(folder.script.read_text())
    own = with_system(plan_of(series="own"), slurm={"extra": ["comment=project-7"]})
    of_own = create(folder.path.parent, own)
    submit(alone(own), [of_own], PYTHON, None, "token")
    read = told_options(of_own.script.read_text())
    assert [word for word in read if word.startswith("--comment")] == ["--comment=project-7"]


def test_an_sbatch_that_hangs_is_given_up(tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program("sbatch", "exec sleep 60")
    monkeypatch.setattr("dlbench.jobs.slurm.environment.CALL_TIMEOUT_S", 0.3)
    plan, folder = a_run(tmp_path)
    with pytest.raises(RunError, match=r"no answer within 0\.3 s; the job may be queued"):
        submit(alone(plan), [folder], PYTHON, None)
    assert folder.script.is_file()


def test_a_machine_without_slurm_is_told(program: Program) -> None:
    with pytest.raises(EnvironmentLacksError, match="sbatch is not on PATH"):
        Slurm().require()
    program("sbatch", "true")
    Slurm().require()


# Asking

SQUEUE = """\
101|PENDING|2026-03-01T12:30:00|Priority|token|/runs/a
102|RUNNING|2026-03-01T12:00:00|None|(null)|/runs/b
103|COMPLETING|2026-03-01T12:00:00|None||/runs/c
104|COMPLETED|2026-03-01T12:00:00|None|x|y|/runs/d
"""


def test_squeue_is_asked_once_for_all(tmp_path: Path, program: Program) -> None:
    program("squeue", f"cat <<'E'\n{SQUEUE}E")
    program("sacct", "echo '101|FAILED'")
    assert states_of("101", "102", "103", "104") == {
        "101": "PENDING",
        "102": "RUNNING",
        "103": "COMPLETING",
        "104": "COMPLETED",
    }
    (call,) = calls(tmp_path)
    # By user: a thousand ids do not fit everywhere.
    assert call[:5] == ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"]
    queue = ask(["101"], ["ann"])
    assert f"--user={os.getuid()},ann" in calls(tmp_path)[-1]
    waiting, running, _, over = queue.jobs.values()
    assert (waiting.phase, waiting.reason, waiting.starts) == ("waiting", "Priority", "2026-03-01T12:30:00")
    assert (running.phase, running.starts, running.comment) == ("running", "", "")
    assert (over.phase, over.comment, over.folder) == ("over", "x|y", "/runs/d")


def test_a_thousand_jobs_are_two_calls(tmp_path: Path, program: Program) -> None:
    listed = "".join(f"{number}|PENDING|N/A|Priority||/r\n" for number in range(30_000))
    (tmp_path / "listed").write_text(listed)
    program("squeue", f"cat {tmp_path}/listed")
    program("sacct", "echo '30000|COMPLETED|0:0'")
    queue = ask([str(number) for number in range(30_001)], ())
    assert len(queue.jobs) == 30_001
    assert [call[0] for call in calls(tmp_path)] == ["squeue", "sacct"]
    # More than one argument holds.
    program("squeue", "true")
    ask([str(number) for number in range(30_001)], ())
    assert f"--user={os.getuid()}" in calls(tmp_path)[-1]


def test_elements_that_were_cancelled_before_they_started_are_found_in_accounting(
    tmp_path: Path, program: Program
) -> None:
    """sacct has one row for all of them."""
    program("squeue", "true")
    program("sacct", "echo '13_1|COMPLETED|0:0'; echo '13_[2-3,7%1]|CANCELLED by 0|0:0'")
    queue = ask(["13_1", "13_3", "13_7", "13_8"], ())
    assert {job_id: job.state for job_id, job in queue.jobs.items()} == {
        "13_1": "COMPLETED",
        "13_3": "CANCELLED",
        "13_7": "CANCELLED",
    }
    assert "--jobs=13" in calls(tmp_path)[-1]


def test_jobs_here_and_on_another_cluster_are_asked_for_where_they_are(tmp_path: Path, program: Program) -> None:
    """Of runs of two systems in one folder."""
    far = "echo 'CLUSTER: far'; echo '12|RUNNING|N/A|None||/r'"
    program("squeue", f"case $* in *--clusters=far*) {far};; *) echo '12|PENDING|N/A|Priority||/r';; esac")
    program("sacct", "case $* in *--clusters=far*) echo '14_2|TIMEOUT|0:0';; *) echo '14_2|FAILED|1:0';; esac")
    queue = ask(["12", "12;far", "14_2", "14;far"], ())
    told = {ref: [job.state for job in queue.of(ref)] for ref in ("12", "12;far", "14_2", "14;far")}
    assert told == {"12": ["PENDING"], "12;far": ["RUNNING"], "14_2": ["FAILED"], "14;far": ["TIMEOUT"]}
    assert [call[0] for call in calls(tmp_path)] == ["squeue", "squeue", "sacct", "sacct"]


@pytest.mark.parametrize(
    ("rest", "comment", "folder"),
    [
        ("token|/a|b/c", "token", "/a|b/c"),
        ("a site's | own|/runs/a", "a site's | own", "/runs/a"),
        ("(null)|/a|b", "", "/a|b"),
        ("x|", "x", ""),
    ],
)
def test_a_separator_in_a_comment_or_a_folder_is_part_of_it(
    program: Program, rest: str, comment: str, folder: str
) -> None:
    program("squeue", f"echo '7|PENDING|N/A|Priority|{rest}'".replace("site's", "site'\\''s"))
    (job,) = ask(["7"], ()).of("7")
    assert (job.comment, job.folder) == (comment, folder)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1", "Connection refused"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", ""),
        ("true", ""),
    ],
)
def test_accounting_that_does_not_answer_is_not_a_job_that_is_forgotten(
    program: Program, answer: str, words: str
) -> None:
    program("squeue", "true")
    program("sacct", answer)
    queue = ask(["7"], ())
    assert (queue.unanswered, words in queue.no_history, bool(queue.no_history)) == ("", True, bool(words))


@pytest.mark.parametrize(
    ("reason", "words", "is_stuck"),
    [
        ("Priority", "", False),
        ("Resources", "", False),
        ("Dependency", "", False),
        ("DependencyNeverSatisfied", "its dependency can never be satisfied", True),
        ("JobHeldUser", "scontrol release 7", False),
        ("JobHeldAdmin", "ask them", False),
        ("QOSMaxJobsPerUserLimit", "others must end", False),
        ("QOSMaxNodePerUserLimit", "if it alone exceeds the limit", False),
        ("QOSMaxWallDurationPerJobLimit", "it exceeds a limit of its QOS", True),
        ("AssocGrpNodeLimit", "others must end", False),
        ("PartitionNodeLimit", "more nodes than its partition allows", True),
        ("PartitionTimeLimit", "more time", True),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved", False),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes that it requests are down",
            False,
        ),
        ("BadConstraints", "no node has what it requests", True),
        ("InvalidQOS", "partition is not allowed", True),
    ],
)
def test_why_a_job_waits_is_told_with_what_to_do(program: Program, reason: str, words: str, is_stuck: bool) -> None:
    program("squeue", f"echo '7|PENDING|N/A|{reason}||/r'")
    (job,) = ask(["7"], ()).of("7")
    assert (job.reason, job.is_stuck, job.starts) == (reason, is_stuck, "")
    assert words in job.advice
    assert bool(words) == bool(job.advice)
    assert ("it will never start" in job.advice) == is_stuck


def test_sacct_is_asked_for_what_squeue_forgot(tmp_path: Path, program: Program) -> None:
    program("squeue", f"cat <<'E'\n{SQUEUE}E")
    program("sacct", "cat <<'E'\n105|CANCELLED by 0|0:0\n106|NODE_FAIL|1:0\n107||\n109|FAILED|0:125\nE")
    states = states_of("101", "105", "106", "107", "108", "109")
    assert {job: states.get(job) for job in ("101", "105", "106", "107", "108", "109")} == {
        "101": "PENDING",
        "105": "CANCELLED",
        "106": "NODE_FAIL",
        "107": None,
        "108": None,
        "109": "OUT_OF_MEMORY",  # as its steps' exit code says
    }
    assert [call[0] for call in calls(tmp_path)] == ["squeue", "sacct"]
    assert "--jobs=105,106,107,108,109" in calls(tmp_path)[1]


def test_slurm_that_does_not_answer(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program("squeue", "exec sleep 60")
    program("sacct", "echo '101|TIMEOUT'")
    monkeypatch.setattr("dlbench.jobs.slurm.environment.CALL_TIMEOUT_S", 0.3)
    told = ask(["101", "102"], ())
    assert {job: found.state for job, found in told.jobs.items()} == {"101": "TIMEOUT"}
    assert told.unanswered == "squeue gave no answer within 0.3 s"
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact" in ask(["102"], ()).unanswered
    program("squeue", "true")
    assert ask(["102"], ()).unanswered == ""


def test_a_system_without_a_scheduler_has_no_nodes() -> None:
    with pytest.raises(UserError, match="one machine"):
        plan_of(system="local")
