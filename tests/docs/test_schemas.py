"""JSON schemas of reports and files of runs: a change of one is seen, and what is written holds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dlbench.analysis.metrics import DEFAULT_METRICS
from dlbench.cli.show import schema, schemas
from dlbench.gate.comparison import compare_sides
from dlbench.gate.page import document_of as comparison_document
from dlbench.gate.sides import side_of_runs
from dlbench.gate.verdicts import Rule
from dlbench.records.scan import scan
from dlbench.report.document import Document
from dlbench.report.formats.json import to_json
from dlbench.views.diagnosis import diagnosis
from dlbench.views.estimate import estimate
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.time_to_train import TrainingQuestion
from tests.conftest import Cli
from tests.support.run_factory import write_scaling
from tests.support.schemas import validator


def test_every_schema_is_one_and_printed_as_it_is(cli: Cli) -> None:
    for name in schemas():
        jsonschema.Draft202012Validator.check_schema(schema(name))
    assert json.loads(cli("show", "--schema", "record").stdout) == schema("record")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    write_scaling(folder, points=(1, 2, 4))
    return folder


def holds(name: str, document: Document) -> dict[str, Any]:
    """The document's JSON, valid by its schema."""
    content: dict[str, Any] = json.loads(to_json(document))
    validator(name).validate(content)
    return content


def test_what_reports_write_holds_to_their_schemas(runs: Path, tmp_path: Path) -> None:
    assert holds("report", document_of(assemble(scan(runs))))["groups"]
    assert holds("diagnosis", diagnosis(scan(runs))[1])["groups"]
    assert holds("estimate", estimate(scan(runs), TrainingQuestion(deadline_s=60))[1])["groups"]
    write_scaling(tmp_path, points=(1, 2, 4), series="s2")
    a, b = (side_of_runs(scan(folder), "runs", {}, "--where") for folder in (runs, tmp_path))
    found = compare_sides(a, b, metrics=DEFAULT_METRICS, rule=Rule())
    assert holds("comparison", comparison_document(found))["points"]


@pytest.mark.parametrize("name", ["plan", "record"])
def test_files_of_runs_hold_to_their_schemas(runs: Path, name: str) -> None:
    for file in runs.glob(f"*/{name}.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        validator(name).validate(content)
        with pytest.raises(jsonschema.ValidationError, match="of_no_file"):
            validator(name).validate(content | {"of_no_file": 1})
