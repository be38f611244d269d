"""Names of modules and files, and schemas, that the documentation and comments mention exist and are valid."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
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
from dlbench.report.formats.data import to_json
from dlbench.views.command_reports import diagnosis, estimate
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.time_to_train import TrainingQuestion
from tests.conftest import Cli
from tests.support.paths import ROOT
from tests.support.run_factory import write_scaling
from tests.support.schemas import validator

_DOTTED = re.compile(r"(?<![\w./-])(?:dlbench|tests)(?:\.[A-Za-z_]\w*)+(?![\w/-])")
_PATH = re.compile(r"(?<![\w./-])(?:dlbench|tests)/[\w/]+\.py\b")
_OF_PATH = re.compile(r"`([A-Za-z_]\w*)`\s+(?:of|in)\s+`((?:dlbench|tests)/[\w/]+\.py)`")
# Forms of files are called so, too (`dlbench.record`), and files that are written.
_FORMAT = re.compile(r'"(dlbench\.[a-z_.-]+)"')
_WRITTEN = ("jsonl", "xml")


def texts() -> Iterator[tuple[str, str]]:
    """Where, and what is said there to a person."""
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.rglob("slurm/**/*.j2"),
    ]:
        if path.name != "CHANGELOG.md":  # of names that are gone, too
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("dlbench/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        where, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield f"{where}:{token.start[0]}", token.string
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{where}:{node.lineno}", node.value.value


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names that a module binds at its top, and those of its classes' methods."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Compare) and ast.unparse(node.left) == "name":  # in the module's `__getattr__`
            names |= {one.value for one in node.comparators if isinstance(one, ast.Constant)}
    return frozenset(names)


def is_there(name: str) -> bool:
    place, parts = ROOT, name.split(".")
    while parts and (place / parts[0] / "__init__.py").exists():
        place /= parts.pop(0)
    if not parts:
        return True
    module = place / f"{parts[0]}.py"
    if module.exists():
        return all(part in defined_in(module) for part in parts[1:])
    return place != ROOT and parts[0] in defined_in(place / "__init__.py")


def test_named_modules_and_files_are_there() -> None:
    formats = {name for path in ROOT.glob("dlbench/**/*.py") for name in _FORMAT.findall(path.read_text("utf-8"))}
    wrong = []
    for where, text in texts():
        dotted = [name for name in _DOTTED.findall(text) if name not in formats and not name.endswith(_WRITTEN)]
        wrong += [f"{where}: {name}" for name in dotted if not is_there(name)]
        wrong += [f"{where}: {path}" for path in _PATH.findall(text) if not (ROOT / path).exists()]
        for name, path in _OF_PATH.findall(text):
            if (ROOT / path).exists() and name not in defined_in(ROOT / path):
                wrong.append(f"{where}: {name} of {path}")
    assert wrong == []


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
