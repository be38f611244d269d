"""The command line as a user meets it: processes, exit codes, one clear line for every mistake, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dlbench.cli import COMMANDS
from dlbench.cli import run as run_module
from dlbench.jobs import local
from dlbench.jobs.local import verdict
from dlbench.records import folder
from dlbench.records.folder import RunFolder
from dlbench.specs.choices import Choices
from dlbench.specs.engine import ENGINES
from dlbench.specs.files import parse_yaml
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import keys_of
from tests.conftest import Cli
from tests.support import run_factory
from tests.support.paths import ROOT
from tests.support.programs import as_shown, on_path
from tests.support.run_factory import NOW, Story, Training, constant, quality_plans, write_run, write_unfinished

TIMES = constant([1, 0, 3, 5, 0, 1])
COSMO = ("run", "cosmoflow", "--preset", "ci", "--engine", "single")
SUBMIT = ("submit", "cosmoflow", "--preset", "ci", "--engine", "ddp", "--system", "box", "--series", "s")


def plans(**request: Any) -> list[Any]:
    return run_factory.plans(**{"workload": "cosmoflow", "preset": "ci", **request})


def everything_below(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# What there is


def sections(text: str) -> dict[str, list[str]]:
    """First words of the entries of each section of a help."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            found[line[:-1]] = []
        elif found and re.match(r"  \S", line):
            found[list(found)[-1]].append(line.split()[0])
    return found


def test_help_has_every_command_in_one_group_and_80_columns(cli: Cli) -> None:
    for option in ("--help", "-h"):
        done = cli(option)
        assert (done.returncode, done.stderr) == (0, "")
        assert max(map(len, done.stdout.splitlines())) <= 80
        groups = sections(done.stdout)
        assert list(groups) == ["Options", "Start", "Cluster", "Compare", "Understand", "Data and export"]
        assert groups["Start"] == ["doctor", "ls", "show", "run", "report"]
        assert groups["Cluster"] == ["preflight", "submit", "status", "wait", "logs", "cancel", "cost"]
        listed = [name for title, names in groups.items() if title != "Options" for name in names]
        assert sorted(listed) == sorted({name for name, *_ in COMMANDS})


@pytest.mark.parametrize("command", ["run", "submit"])
def test_options_of_runs_stand_in_groups(cli: Cli, command: str) -> None:
    text = cli(command, "--help").stdout
    assert f"Engine: {', '.join(ENGINES)}".replace(", single", " or single") in " ".join(text.split())
    groups = sections(text)
    jobs = ["Jobs"] * (command == "submit")
    wanted = ["Training", "Runs", "System", *jobs, "Output"]
    assert [title for title in groups if title != "Example"] == wanted
    assert {"--preset", "--set"} <= set(groups["Training"])
    assert groups["Output"][-1] == "-h,"


@pytest.mark.parametrize("command", [name for name, *_ in COMMANDS])
def test_every_command_explains_itself_with_an_example(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert f"dlbench {command}" in words
    # A group's examples may stand at its commands.
    assert "Example" in words or "COMMAND" in words


def test_an_unknown_command_is_answered_with_the_nearest(cli: Cli) -> None:
    done = cli("sumbit")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "Error: unknown command 'sumbit': did you mean submit?"
    told = cli("qqqq").stderr.splitlines()[-1]
    assert told.startswith("Error: unknown command 'qqqq': known: ")
    assert [name for name, *_ in COMMANDS if name not in told] == []


def test_the_version(cli: Cli) -> None:
    done = cli("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("dlbench, version ")


def test_ls_is_machine_readable(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "site" / "workloads").mkdir(parents=True)
    (tmp_path / "site" / "systems").mkdir()
    own = (ROOT / "workloads" / "cosmoflow.yaml").read_text().replace("name: cosmoflow", "name: mine")
    (tmp_path / "site" / "workloads" / "mine.yaml").write_text(own)
    (tmp_path / "site" / "systems" / "broken.yaml").write_text("a: [")
    done = cli("ls", "--json", DLBENCH_PATH=str(tmp_path / "site"))
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(done.stdout)
    workloads = {row["name"]: row for row in content["workloads"]}
    systems = {row["name"]: row for row in content["systems"]}
    assert set(workloads) == {"bert", "cosmoflow", "mine", "paced", "resnet50"}
    bert = {"full", "gpu", "gpu-compiled", "1.3b", "13b", "175b", "phase1", "phase2", "base", "ci"}
    assert set(workloads["bert"]["presets"]) == bert
    assert workloads["mine"]["file"] == str(tmp_path / "site" / "workloads" / "mine.yaml")
    assert all(row["title"] for row in workloads.values())
    modelled = {name for name, row in systems.items() if row.get("modelled")}
    places = {name for name in systems if not name.startswith("example-")} - modelled
    assert (modelled, places) == ({"abci", "p40-roce"}, {"box", "broken", "local"})
    assert len(systems) == 5 + 9
    # One broken file hides nothing else.
    assert systems["broken"]["problem"].startswith("unusable: ")
    assert systems["box"]["title"]
    lines = cli("ls", DLBENCH_PATH=str(tmp_path / "site")).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == [
        *sorted(workloads, key=list(workloads).index),
        *sorted(systems, key=lambda name: (name in modelled, name.startswith("example-"), list(systems).index(name))),
    ]


RESNET = ("show", "resnet50", "--preset", "ci", "--set", "train.batch_per_rank=16")


def test_show_prints_every_key_decided(cli: Cli) -> None:
    done = cli(*RESNET, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(done.stdout)
    assert (content["name"], content["preset"]) == ("resnet50", "ci")
    assert content["train"]["batch_per_rank"] == 16
    assert content["train"]["optimizer"]["name"] == "sgd"
    assert content["engine"]["horovod"]["cycle_time_ms"] == 1.0  # a default that no file says
    text = cli(*RESNET, "--yaml").stdout
    assert "  batch_per_rank: 16\n" in text
    assert parse_yaml(text, "show") == content


def test_show_explains_every_key_and_marks_what_is_no_default(cli: Cli) -> None:
    done = cli(*RESNET)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "F set by resnet50.yaml; P set by preset ci; S set by --set;" in done.stdout
    for line in (
        r"S batch_per_rank +16 +Samples per rank and step\.",
        r"P image_size +64 +Height and width of the input, pixels\.",
        r"P learning_rate_scaling +linear +Scale the rate .*",
        r"  momentum +0\.9 +Momentum .*",  # as its default, though the file says it
        r"  fusion +auto +Tensor fusion of Horovod or DDP.*",
        r"P measured_steps +12 steps +Measured steps .*",
        r"  fault +none +.*",
    ):
        assert [one for one in lines if re.fullmatch(line, one)], line
    assert " ".join(done.stdout.split()).count("(default 224)") == 1
    keys = {one.name for one in keys_of(Choices, json.loads(cli(*RESNET, "--json").stdout))}
    shown = {match[1] for one in lines if (match := re.match(r"[FPS ] (\w+) ", one))}
    assert {name.rpartition(".")[2] for name in keys if "." in name and not name.startswith("fault.")} <= shown


def test_show_prints_a_system(cli: Cli, tmp_path: Path) -> None:
    done = cli("show", "box", "--set", "slurm.partition=gpu", "--json")
    assert done.returncode == 0
    content = json.loads(done.stdout)
    assert (content["name"], content["slurm"]["partition"]) == ("box", "gpu")
    assert content["slurm"]["time_limit"] == "00:10:00"
    shutil.copyfile(ROOT / "systems" / "box.yaml", tmp_path / "own.yaml")
    shutil.copyfile(ROOT / "systems" / "box.yaml", tmp_path / "own")
    for path in ("own.yaml", "./own.yaml", "./own"):
        done = cli("show", path, "--json", "--set", "system.slurm.partition=gpu")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == content


# Mistakes

WRONG: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "workload": (("run", "cosmoflw"), ["workload 'cosmoflw'", "cosmoflow"]),
    "no ranks": ((*COSMO, "--ranks", "0"), ["--ranks '0'", "1 or more"]),
    "single with two": ((*COSMO, "--ranks", "2"), ["engine 'single'", "not 2"]),
    "no data": ((*COSMO, "--data", "/nonexistent"), ["data.source /nonexistent: no such", "--data", "`synthetic`"]),
    "a terminal's words": (("run", "\x1b[2Jcosmoflow"), ["'\\x1b[2Jcosmoflow': holds the control character U+001B"]),
    "out is a file": ((*COSMO, "--out", "a file"), ["--out a file"]),
    "series": ((*COSMO, "--series", "a b"), ["--series 'a b'"]),
    "a resume that is a device": ((*COSMO, "--resume", "/dev/null"), ["--resume /dev/null", "neither a file nor"]),
    "a name too long": (("run", "n" * 300 + ".yaml"), ["nnn", "File name too long"]),
    "a script's escape": (
        (*SUBMIT, "--nodes", "1", "--dry-run", "--set", r'system.python="/py\x1b]0;x\a"'),
        ["--set system.python", "U+001B"],
    ),
    "endless repeats": ((*COSMO, "--repeats", "99999999"), ["--repeats 99,999,999", "the limit is 10,000", "planned"]),
    "endless ranks": (
        (*COSMO, "--engine", "ddp", "--ranks", "999999999"),
        ["999,999,999 ranks", "the limit is 1,000,000"],
    ),
    "too many ranks for a machine": (
        (*COSMO, "--engine", "ddp", "--ranks", "100000", "--dry-run"),
        ["--ranks 100000", "this machine takes at most", "64 for each of its"],
    ),
    "inert setting": ((*COSMO, "--set", "engine.ddp.backend=gloo"), ["--set engine.ddp.backend", "no effect"]),
    "variants to a quality": ((*COSMO, "--decompose", "--to-accuracy"), ["--decompose", "leave out --to-accuracy"]),
    "nothing to go without": ((*COSMO, "--decompose"), ["--decompose", "nothing can be left out", "--data"]),
    "too dear": (
        (*SUBMIT, "--nodes", "1,2", "--repeats", "4", "--dry-run", "--max-node-hours", "1"),
        ["--max-node-hours 1: 8 runs may take 2 node-hours", "fewer --repeats or nodes"],
    ),
    "packed apart": ((*SUBMIT, "--nodes", "1", "--pack", "all", "--one-run-per-job"), ["--pack", "--one-run-per-job"]),
    "run outside an allocation": (("run", "cosmoflow", "--preset", "ci", "--system", "box"), ["system box", "submit"]),
    "submit how large": (SUBMIT, ["--nodes", "--ranks"]),
    # Slurm takes a backslash in --output for a sign of its own, however often it is doubled: every job would fail.
    "submit into a backslash": ((*SUBMIT, "--nodes", "1", "--out", "a\\b", "--dry-run"), ["--out a\\b", "backslash"]),
    "show": (("show", "reznet50"), ["'reznet50'", "resnet50"]),
    "status of nothing": (("status", "no such"), ["no such: no such folder of runs"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_answered_in_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    arguments, words = WRONG[mistake]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)  # these tests may run inside an allocation
    (tmp_path / "a file").write_text("mine")
    before = everything_below(tmp_path)
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlbench: error: ")
    assert line.isprintable()
    assert [word for word in words if word not in line] == [], line
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        (*COSMO, "--repeats", "many"),
        (*COSMO, "--ranks"),
        (*COSMO, "--ab", "plain"),
        ("show",),
        ("ls", "everything"),
        ("setup", "horovd"),
    ],
)
def test_what_click_refuses_is_told_the_same_way(cli: Cli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert everything_below(tmp_path) == {}


def test_a_broken_file_is_named_with_its_line(cli: Cli, tmp_path: Path) -> None:
    text = (ROOT / "workloads" / "cosmoflow.yaml").read_text()
    (tmp_path / "w.yaml").write_text(text + "name: again\n")
    done = cli("run", "w.yaml", "--preset", "ci")
    assert done.returncode == 2
    number = len(text.splitlines()) + 1
    assert done.stderr.startswith(f"dlbench: error: w.yaml:{number}: ")
    assert len(done.stderr.splitlines()) == 1


# Trying without doing


def scripts_in(dry_run: str) -> list[str]:
    """The scripts in what `submit --dry-run` prints, without the comments around them."""
    return re.split(r"^#\n# (?:job \d+ of|Dry run).*\n(?:# sbatch .*\n)?", dry_run, flags=re.MULTILINE)[1:-1]


def test_a_dry_run_lists_all_jobs_and_touches_nothing(cli: Cli, tmp_path: Path) -> None:
    asked = ("--nodes", "1,2", "--repeats", "2", "--sweep", "watch.max_bytes=1MiB,20MB", "--out", "runs", "--dry-run")
    # Without Slurm's programs, without torch, and with a clock that moved on.
    one, two = cli(*SUBMIT, *asked), cli(*SUBMIT, *asked)
    assert (one.returncode, one.stderr) == (two.returncode, two.stderr) == (0, "")
    assert one.stdout == two.stdout
    assert all(line.startswith("#") for line in one.stdout.splitlines())
    rows = [line.split()[1:] for line in one.stdout.splitlines() if re.match(r"# +\d+  cosmoflow-", line)]
    assert rows == [
        ["1", "cosmoflow-1node-1rank-4runs", "1", "1", "4", "00:40:00", "0.6667", "-"],
        ["2", "cosmoflow-2nodes-2ranks-4runs", "2", "2", "4", "00:40:00", "1.333", "afterany:1"],
    ]
    assert "# Total: 2 jobs, 8 runs, at most 2 node-hours (nodes x time limit).\n" in one.stdout
    assert "# Time of 8 runs: time limit of 10 min 00 s per run.\n" in one.stdout
    assert "sbatch gets --dependency=afterany:" in one.stdout
    assert "# Scripts: --all-scripts prints them.\n" in one.stdout
    assert one.stdout.splitlines()[-1].split()[1:] == rows[-1]
    assert everything_below(tmp_path) == {}
    # A shell may read all of it.
    done = cli(*SUBMIT, *asked, "--all-scripts", "--no-chain")
    assert "cosmoflow-2nodes-2ranks-4runs" in done.stdout.splitlines()[-1]
    script = scripts_in(done.stdout)[0]
    assert "cosmoflow-1node-1rank-4runs" in script
    assert "# Swept: watch.max_bytes=1MiB,20MB\n" in script
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert re.findall(r"^run .*-n000(\d)-k0(\d)$", done.stdout, re.MULTILINE) == [
        *[("1", repeat) for repeat in "0011"],
        *[("2", repeat) for repeat in "0011"],
    ]
    assert "afterany" not in done.stdout
    apart = cli(*SUBMIT, *asked, "--one-run-per-job", "--all-scripts").stdout
    assert apart.count(" 4 in array  00:10:00 ") == 2
    assert "#SBATCH --array=1-4%1\n" in apart
    together = cli(*SUBMIT, *asked, "--pack", "all", "--time", "15").stdout
    assert "# Total: 1 job, 8 runs, at most 4 node-hours (nodes x time limit).\n" in together
    assert "# Up to 1 of these are idle nodes during smaller runs (none with --pack points).\n" in together


def test_what_is_submitted_is_what_the_dry_run_showed(cli: Cli, tmp_path: Path) -> None:
    path = on_path(tmp_path / "bin", sbatch=f"printf '%s\\0' \"$@\" >> {tmp_path}/calls; echo $((++n))$(date +%N)")
    shown = cli(*SUBMIT, "--nodes", "1,2", "--dry-run", "--all-scripts")
    done = cli(*SUBMIT, "--nodes", "1,2", PATH=path)
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "runs").glob("s-*"))
    assert [as_shown(folder / "job.sbatch") for folder in folders] == scripts_in(shown.stdout)
    assert "--dependency=afterany:JOB_ID_OF_1 " in shown.stdout
    jobs = done.stdout.split()
    assert [json.loads((folder / "submission.json").read_text())["job_id"] for folder in folders] == jobs
    calls = (tmp_path / "calls").read_text().split("\0")
    # Jobs of a series wait for each other.
    assert [word for word in calls if word.startswith("--dependency")] == [f"--dependency=afterany:{jobs[0]}"]
    again = cli(*SUBMIT, "--nodes", "1,2", PATH=path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "exists already" in again.stderr


def test_a_series_that_was_cut_off_is_told_by_status_and_resumed(cli: Cli, tmp_path: Path) -> None:
    limit = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"
    sbatch = (
        f"[ -e {tmp_path}/open ] || [ ! -e {tmp_path}/full ] || {{ echo '{limit}' >&2; exit 1; }}\n"
        f"touch {tmp_path}/full; [ -e {tmp_path}/open ] && echo 8 || echo 7"
    )
    path = on_path(tmp_path / "bin", sbatch=sbatch)
    done = cli(
        *SUBMIT, "--nodes", "1,2", "--repeats", "2", "--one-run-per-job", "--no-chain", "--max-jobs", "9", PATH=path
    )
    assert done.returncode == 3
    assert len(done.stdout.split()) == 1
    now = "1 of 2 jobs submitted; the rest: dlbench submit --resume s --out runs"
    assert f"{limit}; series s: {now}" in done.stderr
    told = cli("status", PATH=str(tmp_path))
    assert "series s: 0 of 4 runs valid, 2 incomplete, 2 not submitted; 1 of 2 jobs submitted; the rest:" in told.stdout
    assert "Slurm did not answer on job" in told.stdout
    assert "(squeue is not on PATH)" in told.stdout
    (row,) = json.loads(cli("status", "--json", PATH=str(tmp_path)).stdout)["series"]
    assert (row["series"], row["jobs"], row["submitted"], row["is_cut_off"]) == ("s", 2, 1, False)
    (tmp_path / "open").touch()
    resumed = cli("submit", "--resume", "s", "--repeats", "3", PATH=path)
    assert resumed.returncode == 2
    assert "the series already has --repeats" in resumed.stderr
    on_path(tmp_path / "bin", squeue='for j in 7_1 7_2 8_1 8_2; do echo "$j|PENDING|N/A|None||/r"; done')
    resumed = cli("submit", "--resume", "s", PATH=path)
    assert resumed.returncode == 0, resumed.stderr
    assert len(resumed.stdout.split()) == 1
    assert "series s: 2 of 2 jobs submitted, 1 of them by this command; next: dlbench status runs" in resumed.stderr
    again = cli("submit", "--resume", "s", PATH=path)
    assert (again.returncode, again.stdout) == (0, "")
    assert "series s: 2 of 2 jobs submitted: nothing left to submit; next:" in again.stderr
    assert cli("submit", "--resume", "other", PATH=path).returncode == 2
    assert cli("submit", "--nodes", "1").returncode == 2


def test_why_jobs_wait_is_told_and_they_are_waited_for_and_cancelled(cli: Cli, tmp_path: Path) -> None:
    row = 'echo "$1|PENDING|$2|$3|a site\'s own|$(cat $OUT/$1)"'
    stubs = {
        "sbatch": 'n=$(($(ls $OUT | wc -l) + 1)); for word; do :; done; echo "${word%/*}" > $OUT/$n; echo $n',
        "squeue": f"[ -e $OUT/gone ] && exit 0; row() {{ {row}; }}; row 1 2026-11-23T06:10:00 Priority; "
        "row 2 N/A DependencyNeverSatisfied",
        "scancel": 'echo "$@" > $OUT/../cancelled; touch $OUT/gone',
    }
    (tmp_path / "out").mkdir()
    # Slurm's programs get the person's variables only where a system says so.
    variables = {"PATH": on_path(tmp_path / "bin", **stubs), "OUT": str(tmp_path / "out")}
    submitted = cli(*SUBMIT, "--nodes", "1,2", "--set", "system.slurm.export=ALL", **variables)
    assert submitted.returncode == 0, submitted.stderr
    told = cli("status", **variables)
    assert told.returncode == 0, told.stderr
    assert "(Priority), expected start 2026-11-23T06:10:00\n" in told.stdout
    assert "(DependencyNeverSatisfied), its dependency can never be satisfied; it will never" in told.stdout
    assert "series s: 0 of 2 runs valid, 2 PENDING\n" in told.stdout
    rows = json.loads(cli("status", "--json", **variables).stdout)["runs"]
    assert [(row["reason"], row["starts"]) for row in rows] == [
        ("Priority", "2026-11-23T06:10:00"),
        ("DependencyNeverSatisfied", ""),
    ]
    waited = cli("wait", "s", "--timeout", "1s", "--every", "200ms", **variables)
    assert waited.returncode == 124
    assert waited.stdout == "series s: 0 of 2 runs valid, 2 PENDING\n"
    assert cli("wait", "other", **variables).returncode == 2
    cancelled = cli("cancel", "s", **variables)
    assert cancelled.returncode == 0, cancelled.stderr
    assert cancelled.stderr == "series s: 2 jobs cancelled\n"
    assert (tmp_path / "cancelled").read_text() == "1 2\n"
    waited = cli("wait", "s", "--timeout", "120s", "--every", "200ms", **variables)
    assert waited.returncode == 3
    assert "series s: 0 of 2 runs valid, 2 incomplete" in waited.stdout


def test_logs_are_found(cli: Cli, tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    run = write_run(tmp_path / "runs", plan, TIMES)
    (run.path / "slurm-7.out").write_text("srun: \x1b[31mtask 0: Killed\n")
    run.launch_log.write_text("".join(f"line {number}\n" for number in range(300)))
    run.log(0).write_text("of rank 0\n")
    told = cli("logs", plan.run_id, "--lines", "2")
    assert told.returncode == 0, told.stderr
    # As they come about: of the job, of its launcher, of the ranks.
    assert told.stdout.splitlines() == [
        f"==> {plan.run_id}/slurm-7.out <==",
        "srun: [31mtask 0: Killed",
        f"==> {plan.run_id}/launch.log <==",
        "line 298",
        "line 299",
        f"==> {plan.run_id}/rank-0000.log <==",
        "of rank 0",
    ]
    assert cli("logs", str(run.path), "--rank", "0").stdout == "of rank 0\n"
    missing = cli("logs", plan.run_id, "--rank", "9")
    assert missing.returncode == 2
    assert "has no rank-0009.log" in missing.stderr
    series = cli("logs", plan.series.id)
    assert series.returncode == 2
    assert f"is a series; name one: runs/{plan.run_id}" in series.stderr


def test_a_refused_submission_is_one_line_and_leaves_no_run(cli: Cli, tmp_path: Path) -> None:
    sbatch = "echo 'sbatch: error: invalid account' >&2\necho 'sbatch: error: failed' >&2\nexit 1"
    done = cli(*SUBMIT, "--nodes", "1", PATH=on_path(tmp_path / "bin", sbatch=sbatch))
    assert done.returncode == 3
    *cost, line = done.stderr.splitlines()
    assert [words.partition(" ")[0] for words in cost] == ["Total:", "Time"]
    assert line.startswith("dlbench: error: sbatch refused s-cosmoflow-ci-")
    assert "invalid account" in line
    assert list((tmp_path / "runs").iterdir()) == []


def test_submitting_without_slurm_is_told_before_anything_is_made(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = cli(*SUBMIT, "--nodes", "1", PATH=str(tmp_path / "bin"))
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlbench: error: sbatch is not on PATH; ")
    assert sorted(everything_below(tmp_path)) == ["bin"]


def test_a_dry_run_names_variants_and_what_is_left_out(cli: Cli, tmp_path: Path) -> None:
    words = ("run", "cosmoflow", "--preset", "ci", "--engine", "ddp", "--ranks", "1,2", "--data", "synthetic")
    done = cli(*words, "--series", "s", "--decompose", "--dry-run")
    assert done.returncode == 0, done.stderr
    rows = [line.partition("2 ranks")[2].split("  ") for line in done.stdout.splitlines() if "2 ranks" in line]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["1", "strict fp32 (TF32 off)", "4", "-"],
        [", no-exchange", "1", "strict fp32 (TF32 off)", "4", "-"],
    ]
    assert "s-cosmoflow-ci-p01-n0002-k00-apart" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["--decompose"] * 2
    assert "no runs with synthetic input" in done.stderr
    assert "no runs without exchange there" in done.stderr
    assert everything_below(tmp_path) == {}


def test_a_dry_run_of_run_prints_what_would_start(cli: Cli, tmp_path: Path) -> None:
    # Not every CPU has bf16.
    sweep = ("--sweep", "train.precision=fp32,bf16", "--set", "train.allow_emulation=true")
    done = cli(*COSMO, "--series", "s", *sweep, "--out", "a b", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        plan = tmp_path / "a b" / f"s-cosmoflow-ci-p0{number}-n0001-k00" / "plan.json"
        assert shlex.split(line) == [sys.executable, "-P", "-m", "dlbench.supervisor", "-m", "dlbench.node", str(plan)]
    assert everything_below(tmp_path) == {}


# Status


@pytest.mark.parametrize("bar", [False, True])
def test_runs_to_a_quality_say_what_they_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bar: bool
) -> None:
    values = iter([(0.2, 0.55), (0.2, 0.3), (None,)])

    def create(root: Path, plan: RunPlan) -> RunFolder:
        return write_run(root, plan, TIMES, Story(training=Training(values=next(values), every=4000)))

    # Everything is real but the ranks.
    monkeypatch.setattr(folder, "create", create)
    monkeypatch.setattr(local, "run", lambda plan, made, tell: verdict(made, ""))
    monkeypatch.setattr(run_module.signal, "signal", lambda number, action: None)
    monkeypatch.setenv("COLUMNS", "200")
    code = run_module.run_all(
        quality_plans(points=(1,), repeats=3),
        tmp_path / "runs",
        fail_fast=True,
        bar=bar,
        next_command="dlbench report runs",
    )
    assert code == 0
    said = capsys.readouterr().err
    for words in (
        ", reached 0.5 top1 after 8,000 samples; about",
        ", did NOT reach 0.5 top1 within 8,000 samples; the last evaluation is 0.3; about",
        ", did NOT reach 0.5 top1 within 4,000 samples; the last evaluation is not finite",
    ):
        assert sum(words in line for line in said.splitlines()) == 1
    assert (
        f"3 of 3 runs valid, 2 of them did NOT reach the target, in {tmp_path / 'runs'}; next: dlbench report runs"
        in said
    )


def test_status_of_good_runs(cli: Cli, tmp_path: Path) -> None:
    for plan in plans(points=(1, 2), repeats=1):
        write_run(tmp_path / "runs", plan, TIMES, Story(finished=NOW + timedelta(minutes=1)))
    done = cli("status", "runs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2 runs, 2 valid"
    rows = json.loads(cli("status", "runs", "--json").stdout)["runs"]
    assert [row["state"] for row in rows] == ["valid", "valid"]


def test_status_of_a_failed_run_says_why(cli: Cli, tmp_path: Path) -> None:
    one, two = plans(points=(2,), repeats=2)
    write_run(tmp_path / "runs", one, TIMES)
    write_unfinished(tmp_path / "runs", two, "failed", "out of\x1b[2J memory", host="node-b")
    done = cli("status")
    assert (done.returncode, done.stderr) == (3, "")
    assert "rank 0 on node-b failed at step 7: out of" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == "2 runs, 1 valid"


def test_status_tells_what_slurm_says_of_jobs_without_a_record(cli: Cli, tmp_path: Path) -> None:
    answers = {"11": "PENDING", "12": "RUNNING", "13": "CANCELLED by 0", "14": None, "15": "RUNNING"}
    made = plans(points=(1,), repeats=5)
    for plan, job in zip(made, answers, strict=True):
        folder = (
            write_run(tmp_path / "runs", plan, TIMES)
            if job == "15"
            else write_unfinished(tmp_path / "runs", plan, "measuring")
        )
        content = {
            "job_id": job,
            "command": ["sbatch"],
            "submitted": "2026-03-01T12:00:00Z",
            "log": f"r/slurm-{job}.out",
        }
        folder.submission.write_text(json.dumps({"format": "dlbench.submission", "version": 1, **content}))
    lines = "".join(f"echo '{job}|{state}|N/A|None||/r'\n" for job, state in answers.items() if state)
    path = on_path(tmp_path / "bin", squeue=f'echo "$@" >> "{tmp_path}/calls"\n{lines}', sacct="exit 1")
    done = cli("status", "--json", PATH=path)
    assert done.returncode == 3
    rows = json.loads(done.stdout)["runs"]
    assert [row["state"] for row in rows] == ["PENDING", "RUNNING", "cancelled", "incomplete", "valid"]
    assert rows[2]["detail"].startswith("job 13 ended as CANCELLED without a record")
    assert "slurm-13.out" in rows[2]["detail"]
    assert rows[3]["detail"].startswith("job 14 is no longer queued, and Slurm did not say how it ended (sacct failed")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1  # one question for all jobs, and none about a run that is done
    assert f"--user={os.getuid()} " in calls[0]


def test_status_tells_runs_of_one_job_apart(cli: Cli, tmp_path: Path) -> None:
    finished, _, waiting = made = plans(points=(1,), repeats=3)
    names = [plan.run_id for plan in made]
    for plan in made:
        folder = (
            write_run(tmp_path / "runs", plan, TIMES)
            if plan is finished
            else write_unfinished(tmp_path / "runs", plan, "measuring")
        )
        if plan is waiting:
            for path in folder.path.glob("*.status.json"):
                path.unlink()
        content = {"job_id": "21", "command": ["sbatch"], "submitted": "2026-03-01T12:00:00Z", "runs": names}
        content["log"] = f"{names[0]}/slurm-21.out"
        folder.submission.write_text(json.dumps({"format": "dlbench.submission", "version": 1, **content}))
    for state, expected in (
        ("PENDING", ["valid", "PENDING", "PENDING"]),
        ("RUNNING", ["valid", "RUNNING", "RUNNING"]),
        ("TIMEOUT", ["valid", "failed", "failed"]),
    ):
        queue = f'echo "$@" >> "{tmp_path}/calls-{state}"\necho "21|{state}|N/A|None||/r"'
        done = cli("status", "--json", PATH=on_path(tmp_path / "bin", squeue=queue))
        rows = json.loads(done.stdout)["runs"]
        assert [row["state"] for row in rows] == expected
        assert {row["job"] for row in rows} == {"21"}
        (call,) = (tmp_path / f"calls-{state}").read_text().splitlines()
        assert f"--user={os.getuid()}" in call
        told = rows[2]["detail"]
        if state == "PENDING":
            assert told == ""
        elif state == "RUNNING":
            assert rows[1]["detail"] == ""
            assert "the 3 runs of job 21 run one after the other" in told
        else:
            resume = f"dlbench submit --resume {waiting.series.id} --out runs submits it again"
            assert told == f"job 21 ended as TIMEOUT before this run began; {resume}"
            told = rows[1]["detail"]
            assert told.startswith("job 21 ended as TIMEOUT without a record; ")
            assert f"see launch.log, and {names[0]}/slurm-21.out" in told


def test_a_comparison_is_submitted_whole_or_not_at_all(cli: Cli, tmp_path: Path) -> None:
    path = on_path(tmp_path / "bin", sbatch=f'echo "$@" >> "{tmp_path}/calls"\necho 7')
    command = (*SUBMIT, "--nodes", "1,2", "--repeats", "2", "--ab", "plain", "train.seed=7")
    promised = cli(*command, "--dry-run", "--all-scripts")
    assert promised.returncode == 0, promised.stderr
    there = tmp_path / "runs" / "s-cosmoflow-ci-p00-n0001-k01-a"
    there.mkdir(parents=True)
    refused = cli(*command, PATH=path)
    assert refused.returncode == 2
    assert "exists already" in refused.stderr
    assert everything_below(tmp_path / "runs") == {there.name: None}
    there.rmdir()
    done = cli(*command, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", "7"]
    assert done.stderr.count("job of 4 runs, the first cosmoflow (ci)") == 2
    assert "Total: 2 jobs, 8 runs, at most 2 node-hours" in done.stderr
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    folders = sorted((tmp_path / "runs").glob("s-*"))
    assert len(folders) == 8
    scripts = [as_shown(folder / "job.sbatch") for folder in folders]
    assert scripts == [scripts[0]] * 4 + [scripts[4]] * 4
    assert [scripts[0], scripts[4]] == scripts_in(promised.stdout)


# What is installed

HIDING = """
import importlib.machinery, os
hidden = os.environ["HIDE"].split(",")
original = importlib.machinery.PathFinder.find_spec

@classmethod
def find_spec(cls, fullname, path=None, target=None):
    return None if fullname.split(".")[0] in hidden else original(fullname, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
"""


def without(tmp_path: Path, *packages: str) -> dict[str, str]:
    """Variables for a Python in which some packages cannot be found, as if they were not installed."""
    folder = tmp_path / "hiding"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HIDING)
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # No bytecode: tests look whether anything was left behind.
    return {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HIDE": ",".join(packages),
    }


def test_an_engine_that_is_not_installed_is_told_with_its_remedy(cli: Cli, tmp_path: Path) -> None:
    variables = without(tmp_path, "horovod")
    before = everything_below(tmp_path)
    done = cli("run", "cosmoflow", "--preset", "ci", "--engine", "horovod", **variables)
    assert (done.returncode, done.stdout) == (5, "")
    (line,) = [text for text in done.stderr.splitlines() if text]
    assert line.startswith("dlbench: error: engine horovod is not installed in ")
    assert "dlbench setup horovod" in line
    assert "--engine ddp" in line
    assert everything_below(tmp_path) == before


def test_a_login_node_without_torch_can_plan_and_tell(cli: Cli, tmp_path: Path) -> None:
    variables = without(tmp_path, "torch", "horovod", "numpy", "pandas", "scipy", "h5py")
    done = cli("run", "cosmoflow", "--preset", "ci", "--engine", "ddp", **variables)
    assert done.returncode == 5
    assert "pip install 'dlbench[node]'" in done.stderr
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    for arguments in (("ls",), ("show", "bert"), (*SUBMIT, "--nodes", "2", "--dry-run"), ("status",)):
        done = cli(*arguments, **variables)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_doctor_tells_what_is_here_and_the_remedy_for_what_is_not(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert done.stderr == ""
    findings = json.loads(done.stdout)
    assert isinstance(findings, list)
    for finding in findings:
        assert {"name", "state", "detail", "remedy"} <= set(finding)
        assert finding["state"] in ("ok", "absent", "problem")
        assert finding["detail"]
        assert finding["state"] == "ok" or finding["remedy"], finding
        # Absent is fine for some purposes: it says for which it is not.
        assert finding["state"] != "absent" or finding["needed_for"], finding
    states = {finding["name"]: finding["state"] for finding in findings}
    assert states["Python"] == "ok"
    assert {"Cores", "PyTorch", "Horovod", "MPI", "Slurm", "NVML", "Analysis", "Data", "Checkpoints"} <= set(states)
    assert done.returncode == (5 if "problem" in states.values() else 0)
