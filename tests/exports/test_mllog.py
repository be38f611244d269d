"""Exports, read by the tools they are for: mlperf-logging checks MLPerf logs, Prometheus' parser reads metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prometheus_client import parser as classic
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.cli import cli
from dlbench.errors import IncompleteDataError, RunError
from dlbench.exports.metrics import FIGURES, LABELS
from dlbench.exports.mllog import NOTICE
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import STAGE
from dlbench.records.scan import scan
from dlbench.specs.workload import FAMILIES, MlperfRules
from tests.support.paths import ROOT
from tests.support.run_factory import Story, constant, edit_json, plans, write_run, write_scaling, write_unfinished
from tests.support.watch_factory import watch_result, write_samples, write_spans

START_MS = 1_772_366_400_000
"""2026-03-01T12:00:00 UTC."""
TIMES = constant([5, 0, 30, 50, 10, 5])
MACHINE = {"host": "n0", "os": "Debian GNU/Linux 12 (bookworm)", "kernel": "6.1.0", "gpu.driver": "570.1"}
MACHINE |= {"cpu.model": "AMD EPYC 7763 64-Core Processor", "cpu.cores": "128", "memory.bytes": str(512 * 1024**3)}
PACKAGES = {"python": "3.11.7", "package.torch": "2.13.0", "package.horovod": "0.28.1"}
GPU_STORY = Story(environment={**MACHINE, **PACKAGES})
TARGETS = {"cosmoflow": ("mae", False), "resnet50": ("top1", True), "bert": ("masked_lm_accuracy", True)}


def _rules(family: str) -> MlperfRules:
    (found,) = (one.mlperf for one in FAMILIES if one.network.endswith(family))
    return found


def events(key: str, values: list[float], samples: int) -> list[dict[str, Any]]:
    """Events of a training with one evaluation an epoch, as rank 0 records them."""
    made: list[dict[str, Any]] = []

    def add(name: str, second: float, **more: Any) -> None:
        made.append({"key": name, "time_ms": START_MS + round(second * 1000), **more})

    add("init_start", 0)
    add("init_stop", 20)
    add("staging_start", 20)
    add("staging_stop", 25)
    add("run_start", 25)
    for epoch, value in enumerate(values, start=1):
        second = 25 + 10 * (epoch - 1)
        done = {"epoch": float(epoch), "step": 100 * epoch, "samples": samples * epoch}
        add("epoch_start", second, epoch=float(epoch))
        add("epoch_stop", second + 8, **done)
        add("eval_start", second + 8, **done)
        add(key, second + 9, value=value, **done)
        add("eval_stop", second + 9, **done)
    add("run_stop", 25 + 10 * len(values), status="success", samples=samples * len(values))
    return made


def quality(metric: str, higher: bool, values: list[float], samples: int, target: float) -> dict[str, Any]:
    """What the record says of the same training."""
    cost = {"loss": 0.1, "eval_s": 1.0, "eval_samples": 65_536}
    evaluations = [
        {"step": 100 * epoch, "epoch": float(epoch), "samples": samples * epoch, "value": value, **cost}
        | {"train_s": 8.0 * epoch, "wall_s": 10.0 * epoch}
        for epoch, value in enumerate(values, start=1)
    ]
    return {
        "metric": metric,
        "higher_is_better": higher,
        "target": target,
        "reached": True,
        "predictor": "the mean of the targets",
        "predictor_value": 0.5,
        "train_samples": samples,
        "evaluations": evaluations,
        "time_to_quality_s": 10.0 * len(values),
        "samples_to_quality": samples * len(values),
        "epochs_to_quality": float(len(values)),
    }


def trained(
    out: Path, workload: str = "cosmoflow", values: tuple[float, ...] = (0.31, 0.18, 0.121), **changes: Any
) -> Path:
    """The folder of a run that trained to a quality on 4 ranks."""
    metric, higher = TARGETS[workload]
    samples = 524_288
    initial = {"checkpoint.initialize_from": "/phase1"} if workload == "bert" else {}
    overrides = {"measure.until": "quality", **initial}
    [plan] = plans(workload=workload, points=(4,), repeats=1, data=str(out), overrides=overrides)
    folder = write_run(out / "runs", plan, TIMES, GPU_STORY)
    found = json.loads(folder.record.read_text(encoding="utf-8"))
    for rank in found["ranks"]:
        rank["device"] = f"cuda:{rank['rank']} (NVIDIA A100-SXM4-40GB)"
    key = _rules(plan.workload.model.family).quality_key
    reached = quality(metric, higher, list(values), samples, plan.workload.quality.target)
    recorded = {"ranks": found["ranks"], "quality": reached, "events": events(key, list(values), samples)}
    edit_json(folder.record, **recorded, **changes)
    return folder.path


def with_events(out: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = trained(out)
    return folder, json.loads(RunFolder(folder).record.read_text(encoding="utf-8"))["events"]


def speed_run(out: Path) -> Path:
    [plan] = plans(points=(2,), repeats=1)
    return write_run(out / "runs", plan, TIMES).path


def call(*arguments: str | Path) -> Result:
    """`dlbench export ...`; a DlbenchError is raised."""
    # Through the group: a command invoked alone would keep its own help option, without -h, for later tests.
    words = ["export", *map(str, arguments)]
    return CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)


def lines(text: str) -> list[dict[str, Any]]:
    assert all(line.startswith(":::MLLOG {") for line in text.splitlines())
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def values_of(text: str) -> dict[str, Any]:
    """Key -> value; the last where a key comes again."""
    return {line["key"]: line["value"] for line in lines(text)}


def checked(file: Path, usage: str = "hpc", ruleset: str = "3.0.0") -> subprocess.CompletedProcess[str]:
    """The real compliance checker; it ends with 1 where it refuses."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", usage, "--ruleset", ruleset]
    return subprocess.run(
        [*command, "--werror", str(file)], cwd=file.parent, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_real_checker_accepts_a_cosmoflow_run(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    done = call("mllog", trained(tmp_path), "--org", "A lab", "--platform", "A cluster", "-o", log)
    assert done.exit_code == 0
    assert "will not accept" not in done.stderr
    verdict = checked(log)
    assert verdict.returncode == 0, verdict.stderr
    assert "SUCCESS" in verdict.stderr


def test_its_closed_rules_find_every_setting(tmp_path: Path) -> None:
    """The log says open, because dlbench is no reference; the closed rules ask for all of opt_* besides."""
    log = tmp_path / "result_0.txt"
    call("mllog", trained(tmp_path), "-o", log)
    text = log.read_text(encoding="ascii")
    assert values_of(text)["submission_division"] == "open"
    closed = text.replace('"submission_division", "value": "open"', '"submission_division", "value": "closed"')
    assert closed != text
    log.write_text(closed, encoding="ascii")
    verdict = checked(log)
    assert verdict.returncode == 0, verdict.stderr


@pytest.mark.parametrize(("workload", "family"), [("resnet50", "resnet"), ("bert", "bert")])
def test_the_training_rules_accept_the_other_workloads(tmp_path: Path, workload: str, family: str) -> None:
    log = tmp_path / "result_0.txt"
    call("mllog", trained(tmp_path, workload, (0.5, 0.76)), "-o", log)
    verdict = checked(log, _rules(family).usage, _rules(family).ruleset)
    assert verdict.returncode == 0, verdict.stderr


def test_the_log_says_what_the_plan_and_the_record_say(tmp_path: Path) -> None:
    text = call("mllog", trained(tmp_path)).stdout
    found = values_of(text)
    assert lines(text)[0]["value"] == NOTICE
    wanted = {"submission_benchmark": "cosmoflow", "submission_org": "not stated", "submission_status": "research"}
    wanted |= {"global_batch_size": 4, "number_of_ranks": 4, "number_of_nodes": 1, "accelerators_per_node": 4}
    wanted |= {"train_samples": 524_288, "eval_samples": 65_536, "opt_name": "sgd", "dropout": 0.5}
    wanted |= {"opt_learning_rate_warmup_epochs": 4.0, "opt_learning_rate_decay_boundary_epochs": [32.0, 64.0]}
    wanted |= {"opt_learning_rate_decay_factor": 0.25}
    assert {key: found[key] for key in wanted} == wanted
    # Base rate 0.001 at 64 samples, scaled linearly to 4; warm-up begins at the base rate.
    assert found["opt_base_learning_rate"] == pytest.approx(0.001 / 16)
    assert found["opt_learning_rate_warmup_factor"] == pytest.approx(1 / 16)
    # 4 ranks x 1 sample in 100 ms.
    assert found["tracked_stats"] == {"throughput": pytest.approx(40.0)}


def test_events_keep_their_times_order_and_kinds(tmp_path: Path) -> None:
    found = lines(call("mllog", trained(tmp_path)).stdout)
    by_key = {line["key"]: line for line in found}
    assert [line["time_ms"] for line in found] == sorted(line["time_ms"] for line in found)
    assert by_key["run_start"]["event_type"] == "INTERVAL_START"
    assert by_key["run_stop"]["event_type"] == "INTERVAL_END"
    assert by_key["run_stop"]["time_ms"] - by_key["run_start"]["time_ms"] == 30_000
    assert by_key["run_stop"]["metadata"]["status"] == "success"
    assert by_key["eval_error"]["event_type"] == "POINT_IN_TIME"
    assert by_key["eval_error"]["value"] == 0.121
    assert by_key["eval_error"]["metadata"]["epoch_num"] == 3
    assert by_key["eval_error"]["metadata"]["samples_count"] == 3 * 524_288


def test_caches_are_only_said_to_be_cleared_by_a_person(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    for options, value, note in (([], False, "clears no cache"), (["--cache-cleared"], True, "stated by the person")):
        [line] = [line for line in lines(call("mllog", folder, *options).stdout) if line["key"] == "cache_clear"]
        assert line["value"] is value
        assert note in line["metadata"]["note"]


def test_a_run_that_missed_the_target_is_exported_and_refused_by_the_checker(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    done = call("mllog", trained(tmp_path, values=(0.31, 0.18)), "-o", log)
    assert done.exit_code == 0
    assert "will not accept this log: no eval_error is at most 0.124; the best is 0.18" in done.stderr
    verdict = checked(log)
    assert verdict.returncode == 1
    assert "eval_error" in verdict.stderr


@pytest.mark.parametrize(
    "missing",
    ["init_start", "init_stop", "run_start", "run_stop", "epoch_start", "eval_start", "eval_stop", "eval_error"],
)
def test_what_the_checker_misses_is_told_before(tmp_path: Path, missing: str) -> None:
    folder, recorded = with_events(tmp_path)
    edit_json(RunFolder(folder).record, events=[e for e in recorded if e["key"] != missing])
    log = tmp_path / "result_0.txt"
    done = call("mllog", folder, "-o", log)
    assert f"events are missing: {missing}" in done.stderr
    assert checked(log).returncode == 1


def test_a_start_of_more_than_half_an_hour_is_told_before(tmp_path: Path) -> None:
    folder, recorded = with_events(tmp_path)
    recorded[0]["time_ms"] -= 31 * 60_000
    edit_json(RunFolder(folder).record, events=recorded)
    log = tmp_path / "result_0.txt"
    done = call("mllog", folder, "-o", log)
    assert "init_start to init_stop took 31.3 min, 30 are allowed" in done.stderr
    assert checked(log).returncode == 1


def test_a_run_of_speed_is_exported_with_the_reason_for_the_checkers_refusal(tmp_path: Path) -> None:
    log = tmp_path / "result_0.txt"
    done = call("mllog", speed_run(tmp_path), "-o", log)
    assert done.exit_code == 0
    assert "training 4.0.0's checker will not accept this log: the run measured speed" in done.stderr
    found = values_of(log.read_text(encoding="ascii"))
    assert found["tracked_stats"] == {"throughput": pytest.approx(80.0)}
    assert found["accelerators_per_node"] == 0
    assert not {"run_start", "eval_samples", "eval_accuracy"} & set(found)
    assert checked(log, "training", "4.0.0").returncode == 1


def test_an_aborted_run_says_so(tmp_path: Path) -> None:
    folder, recorded = with_events(tmp_path)
    recorded[-1]["status"] = "aborted"
    edit_json(RunFolder(folder).record, events=recorded)
    [line] = [line for line in lines(call("mllog", folder).stdout) if line["key"] == "run_stop"]
    assert line["metadata"]["status"] == "aborted"


@pytest.mark.parametrize("recorded", [True, False])
def test_epochs_of_a_schedule_are_those_of_whole_batches(tmp_path: Path, recorded: bool) -> None:
    """As training counts them: 1,003 samples in batches of 4 are 250 steps, and three samples left out."""
    folder = trained(tmp_path)
    content = json.loads(RunFolder(folder).plan.read_text(encoding="utf-8"))
    content["workload"]["train"]["schedule"] |= {
        "warmup_epochs": None, "warmup_steps": 500, "epoch_samples": None, "epoch_boundaries": [],
        "step_boundaries": [1000], "step_factors": [0.25],
    }  # fmt: skip
    RunFolder(folder).plan.write_text(json.dumps(content), encoding="utf-8")
    record = json.loads(RunFolder(folder).record.read_text(encoding="utf-8"))
    data = {**record["data"], "num_samples": 1003, "dropped_per_epoch": 3}
    data.pop("batches_per_epoch", None)
    if recorded:
        data["batches_per_epoch"] = 250
    edit_json(RunFolder(folder).record, data=data, quality={**record["quality"], "train_samples": 1003})
    found = values_of(call("mllog", folder).stdout)
    assert found["opt_learning_rate_warmup_epochs"] == 2.0
    assert found["opt_learning_rate_decay_boundary_epochs"] == [4.0]


def test_schedules_in_steps_become_epochs(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    content = json.loads(RunFolder(folder).plan.read_text(encoding="utf-8"))
    schedule = content["workload"]["train"]["schedule"]
    schedule |= {"warmup_epochs": None, "warmup_steps": 131_072, "warmup_from": "zero", "epoch_samples": None}
    schedule |= {"epoch_boundaries": [], "step_boundaries": [262_144, 524_288]}
    RunFolder(folder).plan.write_text(json.dumps(content), encoding="utf-8")
    found = values_of(call("mllog", folder).stdout)
    # An epoch has 524,288 / 4 = 131,072 steps.
    assert found["opt_learning_rate_warmup_epochs"] == 1.0
    assert found["opt_learning_rate_warmup_factor"] == 131_072
    assert found["opt_learning_rate_decay_boundary_epochs"] == [2.0, 4.0]


def test_the_real_checker_accepts_the_system_description(tmp_path: Path) -> None:
    file = tmp_path / "system.json"
    done = call("system", trained(tmp_path), "--org", "A lab", "--status", "onprem", "-o", file)
    assert done.exit_code == 0
    for usage, ruleset in (("hpc", "3.0.0"), ("training", "5.0.0")):
        command = [sys.executable, "-m", "mlperf_logging.system_desc_checker", str(file), usage, ruleset]
        verdict = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        # It ends with 0 even where it refuses.
        assert verdict.returncode == 0, verdict.stderr
        assert "System description checker passed" in verdict.stderr, verdict.stderr


def test_the_system_description_says_what_was_recorded_and_no_more(tmp_path: Path) -> None:
    found = json.loads(call("system", trained(tmp_path), "--org", "A lab", "--status", "cloud").stdout)
    assert len(found) == 33
    assert all(isinstance(value, str) and value for value in found.values())
    processor = {"model_name": "AMD EPYC 7763 64-Core Processor", "core_count": "not recorded"}
    wanted = {f"host_processor_{name}": value for name, value in processor.items()}
    wanted |= {"submitter": "A lab", "status": "Available cloud", "host_memory_capacity": "512 GiB"}
    wanted |= {"accelerators_per_node": "4", "accelerator_model_name": "NVIDIA A100-SXM4-40GB"}
    wanted |= {"accelerator_memory_capacity": "not recorded", "framework": "PyTorch 2.13.0"}
    assert {name: found[name] for name in wanted} == wanted
    assert "horovod 0.28.1" in found["other_software_stack"]
    assert found["operating_system"] == "Debian GNU/Linux 12 (bookworm), kernel 6.1.0"
    assert found["sw_notes"].startswith(NOTICE)


@pytest.mark.parametrize("command", ["mllog", "system"])
def test_runs_without_a_valid_record_are_refused(tmp_path: Path, command: str) -> None:
    first, second = plans(points=(2,), repeats=2)
    killed = write_unfinished(tmp_path, first)
    with pytest.raises(IncompleteDataError, match="without a record to export: 2 of 2 ranks started"):
        call(command, killed.path)
    story = Story(state="invalid", checks=({"name": "finite loss", "passed": False, "detail": "rank 1: nan"},))
    invalid = write_run(tmp_path, second, TIMES, story)
    with pytest.raises(RunError, match="a sanity check failed; only valid runs are exported: finite loss: rank 1: nan"):
        call(command, invalid.path)


Parser = Callable[[str], Iterable[Metric]]
PARSERS = {
    "OpenMetrics": openmetrics.text_string_to_metric_families,
    "textfile collector": classic.text_string_to_metric_families,
}


# A second of each step: three of warm-up, twelve measured.
STAGES = [
    {"lane": STAGE, "name": name, "start_ns": begin * 10**9, "end_ns": end * 10**9}
    for name, begin, end in (("building", 0, 1), ("warm-up", 1, 4), ("measuring", 4, 16), ("finishing", 16, 17))
]


def export(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli, ["export", "metrics", *map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def samples(text: str, parser: Parser = openmetrics.text_string_to_metric_families) -> dict[str, Any]:
    """Values by metric and labels; no series is there twice, and none has a time."""
    found: dict[str, Any] = {}
    for family in parser(text):
        # node_exporter knows no other type that a single value can have but counters and untyped ones.
        assert family.type == "gauge"
        for sample in family.samples:
            assert sample.timestamp is None
            key = f"{sample.name}{sorted(sample.labels.items())}"
            assert key not in found
            found[key] = (sample.labels, sample.value)
    return found


def values(text: str, name: str, **labels: str) -> list[float]:
    return [
        value
        for key, (own, value) in samples(text).items()
        if key.startswith(f"{name}[") and labels.items() <= own.items()
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs at 1 and at 2 ranks, two at 4, one without a figure, and runs that were made to be compared."""
    out = tmp_path_factory.mktemp("metrics") / "runs"
    write_scaling(out, points=(1, 2), repeats=5)
    write_scaling(out, points=(4,), repeats=2, series="s2")
    write_unfinished(out, plans(points=(1,), repeats=1, series="s3")[0])
    for plan in plans(points=(1,), repeats=1, series="s4", sides={"a": {}, "b": {"engine.name": "ddp"}}):
        write_run(out, plan, constant([5, 0, 30, 45, 10, 10]))
    return out


def test_no_run_is_no_file(tmp_path: Path) -> None:
    """A nightly job that looks in the wrong folder must not wipe out what monitoring reads."""
    (tmp_path / "empty").mkdir()
    file = tmp_path / "m.prom"
    file.write_text("before")
    done = CliRunner().invoke(cli, ["export", "metrics", str(tmp_path / "empty"), "-o", str(file)])
    assert isinstance(done.exception, IncompleteDataError)
    assert "empty: there is no run" in str(done.exception)
    assert file.read_text() == "before"


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_both_kinds_of_readers_see_the_same(runs: Path, parser: Parser) -> None:
    text = export(runs)
    assert text.endswith("# EOF\n")
    assert samples(text, parser) == samples(text)
    assert len(samples(text)) > 20


def test_figures_are_those_of_the_report_with_their_interval(runs: Path) -> None:
    text = export(runs)
    (group,) = [one for one in groups(tabulate(scan(runs))) if not one.sample.plan.series.side]
    for point in group.points:
        at = {"ranks": str(point.ranks), "group": group.id, "engine": "horovod", "system": "local"}
        assert values(text, "dlbench_throughput_samples_per_second", **at) == [point.throughput.value]
        assert values(text, "dlbench_scaling_efficiency_ratio", **at) == [point.efficiency.value]
        assert values(text, "dlbench_step_seconds", **at) == [point.step.value]
        assert values(text, "dlbench_point_runs", **at) == [len(point.run_ids)]
        # The range of two runs is no interval.
        low = [] if point.ranks == 4 else [point.throughput.low]
        assert values(text, "dlbench_throughput_low_samples_per_second", **at) == low
    assert values(text, "dlbench_scaling_efficiency_high_ratio", ranks="1") == []
    assert values(text, "dlbench_energy_per_sample_joules") == []
    # Sides of a pair are in no point, and what failed is counted.
    assert values(text, "dlbench_throughput_samples_per_second", engine="ddp") == []
    assert values(text, "dlbench_runs", state="valid") == [14]
    assert sum(values(text, "dlbench_runs")) == 15


def test_energy_is_told_where_it_was_measured(tmp_path: Path) -> None:
    """A GPU at 100 W: 12 measured steps of a second, 4 samples each, are 25 J a sample."""
    (plan,) = plans(points=(1,), repeats=1)
    story = Story(device="cuda:0 (NVIDIA A100)", record={"watch": watch_result()})
    folder = write_run(tmp_path, plan, constant([100, 0, 300, 400, 100, 100]), story)
    write_spans(folder, 0, STAGES)
    write_samples(folder, 0, ["gpu.0.power_w"], [(round(t * 1e9), 100.0) for t in range(-4, 19)])
    assert values(export(tmp_path), "dlbench_energy_per_sample_joules") == [pytest.approx(25.0)]


def test_labels_hold_any_text_and_one_commit_or_none(tmp_path: Path) -> None:
    odd = 'a"b\\c\\n, {}=é'
    for plan in plans(points=(1, 2), repeats=2):
        commit = odd if plan.layout.ranks == 1 else f"commit {plan.series.repeat}"
        tagged = plan.model_copy(update={"tags": {"commit": commit}})
        write_run(tmp_path, tagged, constant([5, 0, 30, 45, 10, 10]))
    text = export(tmp_path)
    commits = {
        own["ranks"]: own["commit"] for key, (own, _) in samples(text).items() if key.startswith("dlbench_point_runs[")
    }
    assert commits == {"1": odd, "2": ""}
    for parser in PARSERS.values():
        assert samples(text, parser) == samples(text)


def test_the_file_is_replaced_as_a_whole_and_readable_for_others(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "dlbench.prom"
    target.write_text("half a li", encoding="utf-8")
    before = target.stat().st_ino
    assert export(runs, "-o", target) == ""
    # Another file under the same name: a reader of the old one never sees a mixture.
    assert target.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["dlbench.prom"]
    assert target.stat().st_mode & 0o044 == 0o044
    assert samples(target.read_text(encoding="utf-8")) == samples(export(runs))


def test_no_run_with_figures_still_says_what_became_of_them(tmp_path: Path) -> None:
    write_unfinished(tmp_path, plans(points=(1,), repeats=1)[0])
    text = export(tmp_path)
    assert sum(values(text, "dlbench_runs")) == 1
    assert values(text, "dlbench_point_runs") == []


def test_the_dashboard_asks_only_for_what_is_written(runs: Path) -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    written = {key.split("[")[0]: set(own) for key, (own, _) in samples(export(runs)).items()}
    for name, unit, _ in FIGURES.values():
        for end in ("", "_low", "_high"):
            written.setdefault(f"{name.format(end)}{unit}", set(LABELS))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    legends = [target.get("legendFormat", "") for panel in dashboard["panels"] for target in panel["targets"]]
    variables = {one["name"]: one["query"]["query"] for one in dashboard["templating"]["list"]}
    for query, legend in [*zip(queries, legends, strict=True), *((text, "") for text in variables.values())]:
        (name,) = re.findall(r"dlbench_\w+", query)
        assert name in written, query
        labels = set(re.findall(r"(\w+)=~", query)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
        labels |= set(re.findall(r"by \((\w+)\)", query)) | set(re.findall(r", (\w+)\)$", query))
        assert labels, query
        assert labels <= written[name], query
        assert set(re.findall(r"\$(\w+)", query)) <= variables.keys()
    # Every figure is drawn, and every datasource is the one that the import asks for.
    assert set(written) - {"dlbench_info"} <= {name for query in queries for name in re.findall(r"dlbench_\w+", query)}
    (given,) = dashboard["__inputs"]
    sources = re.findall(r'"uid": "(\$\{\w+\})"', json.dumps(dashboard))
    assert set(sources) == {f"${{{given['name']}}}"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
