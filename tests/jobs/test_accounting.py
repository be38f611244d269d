"""What Slurm's accounting says of runs: read once, kept, told with its source; and what a campaign cost by it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli as command_line
from dlbench.jobs.campaign.series_file import SeriesFile, SeriesJob, write_series
from dlbench.jobs.scheduler import Submission
from dlbench.jobs.slurm.accounting import with_accounting
from dlbench.node.ranks import switch_of
from dlbench.records.accounting import Attempt, RunAccounting, Step
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import Run, scan
from dlbench.units import utc_now
from dlbench.views.campaign_cost import campaign_cost, cost_section
from tests.slurm_box.box import Box
from tests.support.run_factory import Story, constant, plans, write_run

START = 1_772_366_400
"""2026-03-01 12:00 UTC, when the factory's runs are submitted."""


def row(job: str, state: str = "COMPLETED", begin: int = 60, last: int = 160, **more: str) -> str:
    """A line of sacct; `begin` and `last` are seconds after the submission."""
    fields = {
        "ExitCode": "0:0",
        "Eligible": str(START),
        "Start": str(START + begin),
        "End": str(START + last),
        "NNodes": "2",
        "NodeList": "n[1-2]",
        "TimelimitRaw": "10",
        "Partition": "batch",
        "Account": "lab",
        "QOS": "normal",
        "MaxRSS": "",
        "ConsumedEnergyRaw": "",
        "ConsumedEnergy": "",
        "JobName": "job",
        **more,
    }
    return "|".join([job, state, *fields.values()])


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts stubs of programs on PATH, each saying lines; returns the file with their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def place(program: str, lines: Sequence[str], code: int = 0) -> Path:
        text = "\n".join(lines)
        path = folder / program
        noted = f'echo "{program} $SLURM_TIME_FORMAT $*" >> {tmp_path}/calls'
        path.write_text(f"#!/bin/bash\n{noted}\ncat <<'E'\n{text}\nE\nexit {code}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "calls"

    return place


def series(
    out: Path, jobs: Sequence[tuple[str, Sequence[int]]], stories: Mapping[int, Story] | None = None
) -> list[Run]:
    """Runs of one rank in jobs, each job with the numbers of its runs."""
    count = sum(len(numbers) for _, numbers in jobs)
    made = plans(points=(1,), repeats=count)
    for number, plan in enumerate(made):
        write_run(out, plan, constant([100.0] * len(PHASES)), (stories or {}).get(number, Story()))
    for job, numbers in jobs:
        ids = [made[number].run_id for number in numbers]
        for run_id in ids:
            submission = Submission(
                job_id=job,
                owner="root",
                command=("sbatch",),
                submitted="2026-03-01T12:00:00Z",
                log="r/slurm-7.out",
                runs=tuple(ids) if len(ids) > 1 else (),
            )
            write_json(RunFolder(out / run_id).submission, submission.model_dump(mode="json"))
    return scan(out).runs


def test_a_run_of_a_shared_job_is_told_by_its_own_step_and_kept(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    runs = series(tmp_path / "runs", [("7", (0, 1)), ("8_2", (2,))])
    ids = [run.plan.run_id for run in runs]
    calls = slurm(
        "sacct",
        [
            row("7", begin=60, last=160),
            row("7.batch", MaxRSS="9G"),
            row("7.0", begin=60, last=100, NNodes="1", MaxRSS="1.50M", JobName=ids[0]),
            row("7.1", "FAILED", begin=100, last=150, NNodes="1", ExitCode="3:0", MaxRSS="4K", JobName=ids[1]),
            row("8_2", "PREEMPTED", begin=10, last=20),
            row("8_2", "COMPLETED", begin=50, last=70, Eligible=str(START + 20)),
            row("8_2.0", begin=50, last=70, JobName="of an older version"),
        ],
    )
    found, why_not = with_accounting(runs)
    assert why_not == {}
    one, other, third = (run.accounting for run in found)
    assert one is not None
    assert other is not None
    assert third is not None
    assert (one.source, one.waited_s, one.run_s, one.max_rss_bytes) == ("sacct", 60, 40, 1.5 * 2**20)
    assert (other.run_s, other.max_rss_bytes, other.steps[0].exit_code) == (50, 4096, "3:0")
    # While a run of one node has the job, its two nodes are held.
    assert (one.run_node_s, one.job_node_s) == (80, 200)
    assert [attempt.state for attempt in third.attempts] == ["PREEMPTED", "COMPLETED"]
    assert (third.waited_s, third.job_node_s) == (10 + 30, 20 + 40)
    assert "AcctGatherEnergyType" in one.not_measured["energy_j"]
    # Slurm is asked once for all, in seconds since 1970, and never again.
    assert [run.accounting for run in scan(tmp_path / "runs").runs] == [one, other, third]
    with_accounting(scan(tmp_path / "runs").runs)
    (call,) = calls.read_text().splitlines()
    assert call.startswith("sacct %s ")
    assert call.endswith("--jobs=7,8")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "Slurm no longer knows job 7"),
        ([row("7", "RUNNING", End="Unknown")], "job 7 has not ended"),
        ([row("7"), row("7.0", "RUNNING", End="Unknown")], "job 7 has not ended"),
        # For some seconds sacct does not know that the job waits again.
        ([row("7", "REQUEUED")], "job 7 has not ended"),
        ([row("7", "PREEMPTED"), row("7", "PENDING", End="Unknown")], "job 7 has not ended"),
        # Another job, of the year before, which had this number.
        ([row("7", begin=-31_000_000, last=-30_000_000)], "Slurm no longer knows job 7"),
    ],
)
def test_what_is_not_known_is_not_kept(
    tmp_path: Path, slurm: Callable[..., Path], lines: Sequence[str], words: str
) -> None:
    runs = series(tmp_path / "runs", [("7", (0,))])
    slurm("sacct", lines)
    (run,), why_not = with_accounting(runs)
    assert run.accounting is None
    assert list(why_not.values()) == [words]
    assert not run.folder.accounting.exists()


def test_more_jobs_than_an_argument_holds_are_asked_for_in_parts(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlbench.jobs.slurm.accounting.MAX_IDS", 4)
    runs = series(tmp_path / "runs", [("7", (0,)), ("8", (1,)), ("9", (2,))])
    calls = slurm("sacct", [row("7"), row("8"), row("9")])
    found, why_not = with_accounting(runs)
    assert (why_not, all(run.accounting is not None for run in found)) == ({}, True)
    assert [line.rpartition("=")[2] for line in calls.read_text().splitlines()] == ["7,8", "9"]


def test_jobs_that_never_started_took_nothing_and_hide_nothing(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    runs = series(tmp_path / "runs", [("7", (0,)), ("8", (1, 2)), ("9_2", (3,)), ("9_7", (4,))])
    cancelled = {"Start": "None", "NodeList": "None assigned"}
    slurm(
        "sacct",
        [
            row("7", begin=60, last=160, ConsumedEnergy="2M"),
            row("7.0", begin=60, last=160, JobName=runs[0].plan.run_id),
            row("8", "CANCELLED by 1000", **cancelled),
            row("9_1", begin=60, last=160),
            row("9_[2-3,5-9:2%4]", "CANCELLED by 1000", **cancelled),
        ],
    )
    told, why_not = with_accounting(runs)
    assert why_not == {}
    for run in told[1:]:
        assert (run.accounting.waited_s, run.accounting.job_node_s, run.accounting.energy_j) == (None, 0, None)
        assert set(run.accounting.not_measured.values()) == {f"job {run.accounting.job_id} ended before it started"}
    found = campaign_cost(told)
    assert (found.jobs, found.energy_j, found.median_wait_s) == (4, 2e6, 60)
    assert found.node_hours * 3600 == pytest.approx(200)
    (point,) = found.points
    assert (point.energy_j, point.node_hours) == (2e6, pytest.approx(200 / 3600))


@pytest.mark.parametrize(
    ("energies", "joules"), [(("1M", "2M"), 3e6), (("", "2M"), None), (("1M", ""), None), (("", ""), None)]
)
def test_energy_is_that_of_all_attempts_or_none(
    tmp_path: Path, slurm: Callable[..., Path], energies: tuple[str, str], joules: float | None
) -> None:
    runs = series(tmp_path / "runs", [("7", (0,))])
    slurm(
        "sacct",
        [
            row("7", "REQUEUED", begin=10, last=20, ConsumedEnergy=energies[0]),
            row("7", begin=50, last=70, Eligible=str(START + 20), ConsumedEnergy=energies[1]),
        ],
    )
    (run,), _ = with_accounting(runs)
    assert run.accounting.job_energy_j == joules
    why = run.accounting.not_measured.get("energy_j", "")
    assert ("only some of" in why, "AcctGatherEnergyType" in why) == (
        joules is None and any(energies),
        not any(energies),
    )
    found = campaign_cost([run])
    # Nodes are asked for anew each time; what the first attempt took is lost.
    assert found.requested_node_hours == pytest.approx(2 * 2 * 600 / 3600)
    assert {part.name: part.node_hours * 3600 for part in found.parts}["lost"] == pytest.approx(10)


def test_a_job_that_ran_past_its_limit_is_no_share_of_what_was_asked_for(
    tmp_path: Path, slurm: Callable[..., Path]
) -> None:
    runs = series(tmp_path / "runs", [("7", (0,))])
    slurm("sacct", [row("7", begin=0, last=3600)])
    found = campaign_cost(with_accounting(runs)[0])
    assert found is not None
    (words, *_) = cost_section(found).words
    assert words.startswith(
        "Requested: 0.333 node-hours (nodes x time limit); jobs exceeded their time limit and used 2."
    )


def test_what_a_shared_job_did_not_come_to_took_nothing(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    made = plans(points=(1,), repeats=2, launcher="srun-gloo")
    write_run(tmp_path / "runs", made[0], constant([100.0] * len(PHASES)), Story())
    RunFolder(tmp_path / "runs" / made[1].run_id).path.mkdir()
    RunFolder(tmp_path / "runs" / made[1].run_id).plan.write_text(made[1].to_json())
    ids = tuple(plan.run_id for plan in made)
    for run_id in ids:
        submission = Submission(
            job_id="7", command=("sbatch",), submitted="2026-03-01T12:00:00Z", log="r/slurm-7.out", runs=ids
        )
        write_json(RunFolder(tmp_path / "runs" / run_id).submission, submission.model_dump(mode="json"))
    slurm("sacct", [row("7", "TIMEOUT"), row("7.0", begin=60, last=150, JobName=ids[0])])
    told, _ = with_accounting(scan(tmp_path / "runs").runs)
    found = campaign_cost(told)
    parts = {part.name: part.node_hours * 3600 for part in found.parts}
    assert (parts["between"], parts.get("unknown")) == (pytest.approx(20), None)
    assert [run.node_hours for run in found.runs] == [pytest.approx(180 / 3600), 0]
    assert found.points[0].node_hours == pytest.approx(180 / 3600)


def test_a_folder_that_cannot_be_written_hinders_nothing(tmp_path: Path, slurm: Callable[..., Path]) -> None:
    runs = series(tmp_path / "runs", [("7", (0,))])
    slurm("sacct", [row("7")])
    runs[0].folder.accounting.mkdir()
    (run,), _ = with_accounting(runs)
    assert run.accounting is not None


def accounting(
    run: Run, job_runs: Sequence[str], nodes: int, times: Sequence[tuple[int, int]], end: int
) -> RunAccounting:
    """Of a job from 0 to `end`, with steps of one node at these times, seconds."""
    return RunAccounting(
        run_id=run.plan.run_id,
        source="sacct",
        asked="2026-03-01T12:00:00Z",
        job_id="7",
        job_runs=tuple(job_runs),
        attempts=(
            Attempt(state="COMPLETED", eligible=0.0, started=10.0, ended=10.0 + end, nodes=nodes, node_list="n[1-2]"),
        ),
        steps=tuple(
            Step(
                id="7.0", state="COMPLETED", exit_code="0:0", started=10.0 + a, elapsed_s=b - a, nodes=1, node_list="n1"
            )
            for a, b in times
        ),
        not_measured={},
    )


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Three with figures, and one without."""
    out = tmp_path_factory.mktemp("campaign")
    return series(out, [("7", (0, 1, 2, 3))], {3: Story(state="invalid")})


@given(lengths=st.lists(st.integers(0, 50), min_size=4, max_size=4), gap=st.integers(0, 9), nodes=st.integers(1, 4))
def test_the_parts_of_a_campaign_are_what_its_jobs_held(
    four_runs: list[Run], lengths: list[int], gap: int, nodes: int
) -> None:
    ids = [run.plan.run_id for run in four_runs]
    told, at = [], 0
    for run, length in zip(four_runs, lengths, strict=True):
        told.append((run, [(at, at + length)]))
        at += length + gap
    runs = [replace(run, accounting=accounting(run, ids, nodes, times, at)) for run, times in told]
    found = campaign_cost(runs)
    parts = {part.name: part.node_hours * 3600 for part in found.parts}
    assert sum(parts.values()) == pytest.approx(nodes * at)
    assert found.node_hours * 3600 == pytest.approx(nodes * at)
    assert parts.get("no_figure", 0) == pytest.approx(lengths[3])
    assert parts.get("between", 0) == pytest.approx(nodes * 4 * gap)
    assert parts.get("idle", 0) == pytest.approx((nodes - 1) * sum(lengths))
    # Without one of its runs nobody knows what lay between those that are left.
    found = campaign_cost(runs[1:])
    assert found.partial_jobs == 1
    assert found.node_hours * 3600 == pytest.approx(nodes * sum(lengths[1:]))


def test_the_command_tells_the_cost_on_one_screen(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = series(tmp_path / "runs", [("7", (0, 1)), ("8", (2,)), ("9", (3,))])
    ids = [run.plan.run_id for run in runs]
    slurm(
        "sacct",
        [
            row("7", last=3660),
            row("7.0", begin=60, last=1860, NNodes="1", MaxRSS="1500M", JobName=ids[0]),
            row("7.1", begin=1860, last=3660, NNodes="1", JobName=ids[1]),
            row("8", "RUNNING", End="Unknown"),
            row("9", begin=600, last=2400, NNodes="1"),
            row("9.0", begin=600, last=2400, NNodes="1", ConsumedEnergyRaw="7200000"),
        ],
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command_line, ["cost", "runs"])
    assert done.exit_code == 0, done.output
    assert "2.5 node-hours in 2 jobs" in done.output
    assert "queue wait 5 min 30 s (median)" in done.output
    assert "Nodes idle during a smaller run" in done.output
    assert "Requested: 0.5 node-hours" in done.output
    assert f"dlbench: no cost of {ids[2]}: job 8 has not ended" in done.output
    assert max(map(len, done.output.splitlines())) <= 100
    told = json.loads(CliRunner().invoke(command_line, ["cost", "runs", "--json"]).stdout)
    assert [run["run_id"] for run in told["runs"]] == [ids[0], ids[1], ids[3]]
    assert told["runs"][2]["energy_j"] == 7.2e6
    for run in runs:
        run.folder.submission.unlink()
        run.folder.accounting.unlink(missing_ok=True)
    done = CliRunner().invoke(command_line, ["cost", "runs"])
    assert "none of these runs was submitted to Slurm" in done.output
    assert done.exit_code == 6


def test_wait_keeps_what_the_jobs_took(
    tmp_path: Path, slurm: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs without a figure, too; accounting hears of the end of a job a moment later."""
    monkeypatch.setattr("dlbench.jobs.slurm.accounting.SETTLING_S", (0.0, 0.01, 0.01))
    monkeypatch.chdir(tmp_path)
    runs = series(tmp_path / "runs", [("7", (0, 1)), ("8", (2,))], {2: Story(state="invalid")})
    ids = [run.plan.run_id for run in runs]
    jobs = tuple(
        SeriesJob(runs=of_job, time_limit="00:10:00", array_limit=None, comment="c") for of_job in (ids[:2], ids[2:])
    )
    (tmp_path / "runs" / ".series").mkdir()
    file = SeriesFile(
        id="s", owner="root", created=utc_now(), requests=("dlbench submit",), chain=True, python="/p", jobs=jobs
    )
    write_series(tmp_path / "runs", file)
    calls = slurm("sacct", [row("7"), row("8", "RUNNING", End="Unknown")])
    done = CliRunner().invoke(command_line, ["wait", "s"])
    assert (done.exit_code, done.stdout) == (3, "series s: 2 of 3 runs valid, 1 invalid\n")
    assert "note: no accounting of 1 run: job 8 has not ended" in done.stderr
    assert [run.accounting is not None for run in scan(tmp_path / "runs").runs] == [True, True, False]
    # Only what is not kept is asked for again.
    assert [line.rpartition("=")[2] for line in calls.read_text().splitlines()] == ["7,8", "8", "8"]
    slurm("sacct", [row("8", "COMPLETED")])
    done = CliRunner().invoke(command_line, ["wait", "s"])
    assert "note" not in done.stderr
    assert RunFolder(tmp_path / "runs" / ids[2]).accounting.exists()


@pytest.mark.parametrize(
    ("address", "pattern", "switch"),
    [("root.leaf1.n1", "switch.switch.node", "root.leaf1"), ("n1", "node", ""), ("", "", ""), ("strange", "words", "")],
)
def test_a_rank_knows_the_switches_above_it(address: str, pattern: str, switch: str) -> None:
    assert switch_of({"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}) == switch
    assert switch_of({}) == ""


@pytest.mark.slurm
def test_real_accounting_tells_steps_memory_and_wait(
    whole_box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = series(tmp_path / "runs", [("1", (0, 1))])
    one, other = (run.plan.run_id for run in runs)
    # Slurm looks at what a step uses every two seconds.
    fill = f"{sys.executable} -c 'import time; x = bytes(range(256)) * 400_000; time.sleep(6)'"
    script = f"srun -N1 -n1 --job-name={one} {fill}; srun --job-name={other} sh -c 'exit 3'"
    environment = {**os.environ, **whole_box.environment}
    command = ["sbatch", "--parsable", "-N2", "-o/dev/null", "--wait", f"--wrap={script}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    job = done.stdout.strip()
    for run in runs:
        content = json.loads(run.folder.submission.read_text())
        write_json(run.folder.submission, {**content, "job_id": job, "submitted": utc_now()})
    monkeypatch.setenv("SLURM_CONF", str(whole_box.conf))
    deadline = time.monotonic() + 60
    while True:  # slurmctld tells slurmdbd with a delay
        found, why_not = with_accounting(runs)
        if not why_not or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    first, second = (run.accounting for run in found)
    assert first is not None
    assert second is not None
    assert (first.attempts[0].nodes, first.attempts[0].account, first.attempts[0].node_list) == (2, "lab", "n[1-2]")
    assert first.max_rss_bytes is not None
    assert first.max_rss_bytes > 100e6
    assert first.run_s is not None
    assert first.run_s >= 2
    assert first.waited_s is not None
    assert second.steps[0].exit_code == "3:0"
    assert "AcctGatherEnergyType" in first.not_measured["energy_j"]
