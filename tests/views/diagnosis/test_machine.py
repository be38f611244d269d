"""Telemetry and energy as `dlbench diagnose` tells them: words, JSON, which runs count; no raw text on the terminal."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.jobs.scheduler import Submission
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import STAGE
from dlbench.records.scan import scan
from dlbench.records.status import write_status
from dlbench.specs.plan import RunPlan
from dlbench.views.scaling_report import assemble
from dlbench.views.telemetry import TelemetryView
from tests.support.programs import on_path
from tests.support.run_factory import Story, constant, edit_json, plans, status, write_run, write_unfinished
from tests.support.watch_factory import write_samples, write_spans

S = 1_000_000_000
THERMAL = 0x20
ESCAPE = "\x1b[31m\x07\r\n"

STARTING = {"lane": STAGE, "name": "starting", "start_ns": S // 2, "end_ns": S}

COLUMNS = [
    *(f"gpu.0.{name}" for name in ("power_w", "sm_clock_hz", "clock_reasons", "temperature_c")),
    *("host.cpu.0.busy", "host.memory_used_bytes", "host.net.eth0.received_bytes", "host.net.eth1.received_bytes"),
    "host.energy.package-0_j",
]


def values(t: float) -> list[float]:
    """A GPU that throttles for a quarter of the measured window, from second 4 to 16; eth1 is at rest."""
    throttled = 10 < t < 13
    return [250.0, 1.2e9 if throttled else 1.5e9, THERMAL if throttled else 0, 61, 0.5, 3e9, 1e12 + 2e6 * t, 7, 80 * t]


def rows(make: Callable[[float], Sequence[float]] = values) -> list[tuple[float, ...]]:
    """Every second, in its middle, from before the first step to behind the last."""
    return [(round((number + 0.5) * S), *make(number + 0.5)) for number in range(-3, 19)]


def one_run(out: Path, plan: RunPlan | None = None, device: str = "cuda:0 (NVIDIA A100)", **more: Any) -> RunFolder:
    """One rank, steps of a second, and samples."""
    plan = plan or plans(points=(1,), repeats=1)[0]
    folder = write_run(out, plan, constant([100, 0, 300, 400, 100, 100]), Story(device=device))
    write_samples(folder, 0, more.pop("columns", COLUMNS), more.pop("rows", rows()), **more)
    return folder


def many_nodes(nodes: int) -> RunPlan:
    return plans(
        system="example-gpu",
        points=(nodes,),
        ranks_per_node=1,
        repeats=1,
        overrides={"layout.cores_per_rank": 1, "system.node.gpus": 1},
    )[0]


def run_cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    for text in (result.stdout, result.stderr):
        assert not set(text) & {"\x1b", "\x07", "\r"}
    return result


def section(text: str, title: str, following: str) -> list[str]:
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(title))
    end = next((n for n, line in enumerate(lines) if n > begin and line.startswith(following)), len(lines))
    return [line for line in lines[begin + 1 : end] if line.strip()]


def telemetry_lines(out: Path, code: int = 0) -> list[str]:
    result = run_cli("diagnose", "--full", out)
    assert result.exit_code == code, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    return section(result.stdout, "Telemetry", "Energy")


def runs_of(found: dict[str, Any], view: str = "telemetry") -> list[dict[str, Any]]:
    return [run for group in found["groups"] for run in group[view]["runs"]]


def joined(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def as_json(out: Path, code: int = 0) -> dict[str, Any]:
    result = run_cli("diagnose", out, "--format", "json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse)


# Words and JSON


def test_what_a_node_did_is_told_in_words(tmp_path: Path) -> None:
    one_run(tmp_path)
    text = joined(telemetry_lines(tmp_path))
    assert "At Power of its GPUs SM clock Hottest GPU Throttled CPU busy" in text
    assert "1 rank, n0 250.0 W 1,425 MHz 61 °C 25.0 % 50.0 %" in text
    assert "Host memory Received Samples 1 rank, n0 2.794 GiB 1.907 MiB/s 12" in text
    assert "eth1" not in text


def test_json_has_every_field(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    (told,) = runs_of(as_json(tmp_path))
    assert (told["run_id"], told["not_measured"]) == (folder.path.name, {})
    (node,) = told["nodes"]
    assert set(COLUMNS) - {"gpu.0.clock_reasons"} <= set(node["fields"])
    assert node["fields"]["gpu.0.power_w"]["mean"] == pytest.approx(250)
    assert node["fields"]["gpu.0.sm_clock_hz"]["mean"] == pytest.approx(1.425e9)
    received = node["fields"]["host.net.eth0.received_bytes"]
    assert (received["is_rate"], received["mean"]) == (True, pytest.approx(2e6))
    assert node["clock_reasons"] == {"gpu.0": {"sw_thermal_slowdown": pytest.approx(0.25)}}
    assert (node["num_gaps"], node["missing"], node["num_samples"]) == (0, 0.0, 12)


def test_fields_that_failed_or_hold_no_number_are_left_out(tmp_path: Path) -> None:
    """Power fails in the measured window, the clock is infinite, and the temperature was never read."""

    def failing(t: float) -> list[float]:
        told = values(t)
        told[0] = 250.0 if t < 4 else math.nan
        told[1] = math.inf
        told[3] = math.nan
        return told

    failure = {"failed": "gpu.0.power_w", "time_ns": 4 * S, "reason": f"GPU is lost{ESCAPE}"}
    one_run(tmp_path, rows=rows(failing), failures=[failure], unavailable={"gpu.0.fan": "not supported"})
    (told,) = runs_of(as_json(tmp_path))
    (node,) = told["nodes"]
    assert not {"gpu.0.power_w", "gpu.0.sm_clock_hz", "gpu.0.temperature_c"} & set(node["fields"])
    assert node["unavailable"] == {"gpu.0.fan": "not supported"}
    text = joined(telemetry_lines(tmp_path))
    assert "Power of its GPUs" not in text
    assert "SM clock" not in text
    assert "CPU busy Host memory Received Samples 1 rank, n0 25.0 % 50.0 %" in text
    assert "failed on the way gpu.0.power_w: GPU is lost" in text


def test_no_samples_in_the_window_are_words_too(tmp_path: Path) -> None:
    one_run(tmp_path, rows=rows()[:5])
    (group,) = assemble(scan(tmp_path)).groups
    section = TelemetryView().section(group)
    assert section.headline == "fewer than 3 samples in the measured steps: too short a run"
    assert not section.sheets or not section.sheets[0].to_display().rows
    (told,) = runs_of(as_json(tmp_path))
    (node,) = told["nodes"]
    assert (node["fields"], node["clock_reasons"], node["missing"]) == ({}, {}, 1.0)


def test_gaps_are_told_and_a_counter_is_not_guessed_inside(tmp_path: Path) -> None:
    """Samples are missing from second 2 to 15: only the last second of the window is known."""
    one_run(tmp_path, rows=[row for row in rows() if not 2 * S < row[0] < 15 * S])
    text = joined(telemetry_lines(tmp_path))
    assert "Samples Gaps Missing 1 rank, n0 2.794 GiB 1.907 MiB/s 1 1 95.8 %" in text
    (told,) = runs_of(as_json(tmp_path))
    received = told["nodes"][0]["fields"]["host.net.eth0.received_bytes"]
    assert (received["num_samples"], received["mean"]) == (1, pytest.approx(2e6))


def test_of_many_nodes_twelve_are_shown_and_all_are_in_the_json(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, many_nodes(14), constant([100, 0, 300, 400, 100, 100]), Story(host=lambda rank: f"n{rank}")
    )
    for node in range(14):
        # Each rank of the factory starts a second later than the one before.
        moved = [(row[0] + node * S, *row[1:]) for row in rows()]
        write_samples(folder, node, COLUMNS, moved, host=f"n{node}")
    lines = telemetry_lines(tmp_path)
    assert {line.split()[5] for line in lines if line.strip().startswith("14 ranks on 14 nodes, n")} == {
        f"n{node}" for node in range(12)
    }
    assert "At 14 ranks on 14 nodes: 12 of 14 nodes, the most throttled first." in joined(lines)
    (told,) = runs_of(as_json(tmp_path))
    assert [node["host"] for node in told["nodes"]] == [f"n{node}" for node in range(14)]
    assert all(node["num_samples"] == 12 for node in told["nodes"])


def test_runs_that_were_not_sampled_say_why(tmp_path: Path) -> None:
    plan = plans(points=(1,), repeats=1, overrides={"watch.sampler": False})[0]
    write_run(tmp_path, plan, constant([100, 0, 300, 400, 100, 100]))
    assert "all samples the run was not sampled (watch.sampler) 1" in joined(telemetry_lines(tmp_path))
    (told,) = runs_of(as_json(tmp_path))
    assert told["nodes"] == []
    assert told["not_measured"] == {"node 0": "the run was not sampled (watch.sampler)"}


def test_the_run_in_the_middle_of_a_point_is_shown(tmp_path: Path) -> None:
    made = plans(points=(1,), repeats=3)
    for number, plan in enumerate(made):
        one_run(tmp_path, plan, rows=rows(lambda t, power=200.0 + number: [power, *values(t)[1:]]))
    text = joined(telemetry_lines(tmp_path))
    assert "1 rank, n0 201.0 W" in text
    assert "200.0 W" not in text
    assert "202.0 W" not in text
    assert len(runs_of(as_json(tmp_path))) == 3


def test_names_from_samples_stay_on_their_line(tmp_path: Path) -> None:
    one_run(tmp_path, host=f"n{ESCAPE}0: [bold]")
    assert "1 rank, n[31m 0: [bold] 250.0 W" in joined(telemetry_lines(tmp_path))


# Which runs count, and how it ends


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("chosen", ["text", "json"])
def test_damaged_samples_end_with_four(tmp_path: Path, chosen: str) -> None:
    first, second = (one_run(tmp_path, plan) for plan in plans(points=(1,), repeats=2))
    damage(first.samples(0))
    result = run_cli("diagnose", "--full", tmp_path, "--format", chosen)
    assert result.exit_code == 4
    named = [line for line in result.stderr.splitlines() if line.startswith("dlbench: damaged: ")]
    assert len(named) == 1
    assert str(first.samples(0)) in named[0]
    if chosen == "json":
        found = json.loads(result.stdout, parse_constant=refuse)
        assert [one["run_id"] for one in runs_of(found, "energy")] == [second.path.name]
    else:
        assert "1 rank, n0 250.0 W" in joined(telemetry_lines(tmp_path, code=4))


def test_damaged_samples_of_the_run_that_is_told(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    damage(folder.samples(0))
    assert "damaged: " in joined(telemetry_lines(tmp_path, code=4))


def runs_told(found: dict[str, Any]) -> list[str]:
    """Runs with telemetry; those with energy are the same."""
    told = [one["run_id"] for one in runs_of(found)]
    assert [one["run_id"] for one in runs_of(found, "energy")] == told
    return told


def test_a_copied_folder_counts_once(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    shutil.copytree(folder.path, tmp_path / "copy")
    found = as_json(tmp_path, code=4)
    assert runs_told(found) == [folder.path.name]
    assert found["groups"][0]["energy"]["points"][0]["kinds"][0]["mean_power"]["n"] == 1


def test_of_a_damaged_run_and_its_whole_copy_the_copy_counts(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    shutil.copytree(folder.path, tmp_path / "zz-copy")
    folder.steps(0).write_bytes(folder.steps(0).read_bytes()[:-1])
    assert runs_told(as_json(tmp_path, code=4)) == [folder.path.name]


def test_steps_that_disagree_with_the_record_give_no_energy(tmp_path: Path) -> None:
    first, second = (one_run(tmp_path, plan) for plan in plans(points=(1,), repeats=2))
    ranks = json.loads(first.record.read_text(encoding="utf-8"))["ranks"]
    edit_json(first.record, ranks=[{**rank, "samples": rank["samples"] * 2} for rank in ranks])
    assert runs_told(as_json(tmp_path, code=4)) == [second.path.name]


# No raw text on the terminal


def killed_run(out: Path) -> RunPlan:
    plan = plans(points=(1,), repeats=1)[0]
    write_unfinished(out, plan)
    folder = RunFolder(out / plan.run_id)
    write_status(folder, status(0, f"n0{ESCAPE}x", "measuring"))
    write_spans(folder, 0, [STARTING])
    return plan


def test_hosts_of_a_trace_are_cleaned(tmp_path: Path) -> None:
    plan = killed_run(tmp_path / "runs")
    result = run_cli("trace", tmp_path / "runs" / plan.run_id, "-o", tmp_path / "t.json")
    assert result.exit_code == 4
    assert "dlbench: incomplete: the run is incomplete: " in result.stderr
    assert "n0[31m x" in joined(result.stderr.splitlines())


def test_words_of_sacct_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_run(tmp_path / "runs")
    submission = Submission(job_id="7", command=("sbatch",), submitted="2026-03-01T12:00:00Z", log="run/slurm-7.out")
    write_json(folder.submission, submission.model_dump(mode="json"))
    sacct = "printf 'sacct: \\033[31mno\\007 database' >&2; exit 1"
    monkeypatch.setenv("PATH", on_path(tmp_path / "bin", sacct=sacct))
    assert "sacct: [31mno database" in run_cli("diagnose", tmp_path / "runs", "--slurm").stderr


def test_damage_met_while_comparing_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_damage(made: Sequence[RunPlan], out: Path, *rest: object, **more: object) -> int:
        for plan in made:
            RunFolder(out / plan.run_id).path.mkdir(parents=True)
            content = {f"{ESCAPE}key": 1, **plan.model_dump(mode="json")}
            RunFolder(out / plan.run_id).plan.write_text(json.dumps(content), encoding="utf-8")
        return 0

    monkeypatch.setattr("dlbench.cli.run.run_all", leave_damage)
    result = run_cli(
        "run", "resnet50", "--preset", "ci", "--ranks", "2", "--engine", "ddp", "--repeats", "2", "--decompose",
        "--out", tmp_path / "runs", "--data", "synthetic",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "[31m key" in joined(result.stderr.splitlines())
