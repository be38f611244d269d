"""Metrics for monitoring, read as Prometheus reads them, and the dashboard of examples/grafana that draws them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import parser as classic
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.cli import cli
from dlbench.errors import IncompleteDataError
from dlbench.exports.metrics import FIGURES, LABELS
from dlbench.records.rows.spans import STAGE
from dlbench.records.scan import scan
from tests.support.paths import ROOT
from tests.support.run_factory import Story, constant, plans, write_run, write_scaling, write_unfinished
from tests.support.watch_factory import watch_result, write_samples, write_spans

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
