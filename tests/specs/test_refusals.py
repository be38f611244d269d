"""Every key of every file that people write, with wrong values of every kind: the line says what would be right."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, create_model

from dlbench.errors import UserError
from dlbench.specs.base import Spec
from dlbench.specs.choices import Choices, WorkloadFile, choose, choose_system
from dlbench.specs.files import find
from dlbench.specs.problems import keys_of, problem_of
from dlbench.specs.system import SystemSpec
from tests.conftest import Cli
from tests.specs.test_keys import SHORT

VALIDATOR = re.compile(
    r"should (be|have|match)|input tag|discriminator|valid (tuple|string|integer|number|boolean|list|dict)|instance of"
    r"|[Ii]nput (should|tag)|type=|https?:|validation error|[Pp]ydantic|Field required|Extra inputs|constrained"
    r"|literal\[|function-|\[A-Z|\[\^|\\x|\^\(|\$\]|at least \d+ item|Traceback|typing\."
)
"""Words of the validator, and signs of a regular expression."""

RIGHT = re.compile(
    r"must |is missing|unknown key|exclude|needs? |use |give |set |e\.g\.|did you mean|such as|given twice"
    r"|the plan sets|does not support|multiple of|does not fit|have the same length|contains a character"
    r"|path of a program|above 1|divide|epoch_samples|switched off by|renamed to"
)
"""One of these leads on to what would be right."""

WRONG: tuple[Any, ...] = (
    *(None, True, "no such thing", "", "a\tb", "(", 0, -1, 1.5, -1.5, 2**60, 1e300, {"nosuch": 1}),
    *((), ("no such thing",), (None, -1), (0, 0, 0), (1.5, 2.5, 3.5, 4.5, 5.5)),
)
"""A wrong type, or a value out of range, of another form or of another length: each for most keys."""


def refusals(choose_with: Callable[[Any], object]) -> list[str]:
    told = []
    for value in WRONG:
        try:
            choose_with(value)
        except UserError as error:
            told.append(str(error))
    return told


def keys() -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Every key of workloads and systems as options name it, and what sets it to a value."""
    seen = set()
    for name in ("bert", "cosmoflow", "resnet50"):
        file = WorkloadFile(find("workloads", name))
        for key in keys_of(Choices, choose(file, "ci", {}).model_dump()):
            if key.name not in seen:
                seen.add(key.name)
                yield (
                    key.name,
                    lambda value, file=file, key=key.name: choose(file, "ci", {key: (value, "--set")}),  # type: ignore[misc]
                )
    for key in keys_of(SystemSpec, {}):
        yield (
            f"system.{key.name}",
            lambda value, key=key.name: choose_system("local", {key: (value, "--set")}),  # type: ignore[misc]
        )


@pytest.mark.parametrize("section", ["model", "data", "train", "quality", "measure", "sync", "system", "rest"])
def test_every_key_refuses_in_words_that_lead_on(section: str) -> None:
    known = {name.partition(".")[0] for name, _ in keys()}
    sections = {section} if section in known else known - {"model", "data", "train", "quality", "measure", "system"}
    tried = 0
    for name, choose_with in keys():
        if name.partition(".")[0] not in sections:
            continue
        tried += 1
        told = refusals(choose_with)
        assert told, f"{name}: nothing is refused"
        for line in told:
            assert not VALIDATOR.search(line), line
            assert RIGHT.search(line), line
            # A relation of several keys is told of their section.
            assert line.startswith("--set: ") or name.partition(".")[0] in line, line
            assert name.rpartition(".")[2] in line or name.rpartition(".")[0] in line, line
    assert tried > 4


def _specifications() -> list[type[Spec]]:
    """Of all files: those that people write, and those that dlbench writes and may find damaged."""
    for room in ("gate.baseline", "history.archive", "jobs.campaign.series_file", "jobs.scheduler", "records.scan"):
        importlib.import_module(f"dlbench.{room}")
    importlib.import_module("dlbench.records.preflight")
    found, rest = [], [Spec]
    while rest:
        one = rest.pop()
        rest += one.__subclasses__()
        found.append(one)
    return [one for one in found if one.__module__.startswith("dlbench.") and one.model_fields]


def test_no_field_of_any_file_is_told_of_in_the_validators_words() -> None:
    models = _specifications()
    assert len(models) > 60
    tried = 0
    for model in models:
        for name, field in model.model_fields.items():
            alone: type[BaseModel] = create_model("Alone", __base__=Spec, **{name: (field.annotation, field)})  # type: ignore[call-overload]
            for value in (*WRONG, {"family": "nosuch"}, {"format": "nosuch"}, {"family": "resnet", "nosuch": 1}):
                for content in ({name: value}, {name: value, "nosuch": 1}):
                    try:
                        alone.model_validate(content)
                    except ValidationError as error:
                        told = str(problem_of(alone, error))
                        assert not VALIDATOR.search(told), f"{model.__name__}: {told}"
                        assert told.startswith((name, "nosuch: ")), told
                        tried += 1
    assert tried > 5000


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        (
            "family: cosmoflow",
            "family: resnet50",
            "must be resnet, bert, cosmoflow or paced, got 'resnet50'",
        ),
        ("family: cosmoflow, ", "", "model.family: is missing: must be resnet, bert, cosmoflow or paced"),
        ("model: {family: cosmoflow, input_size: 64}", "model: 5", "model: must be keys and values: family, "),
        ("input_size: 64", "input_size: 64.0", "model.input_size: must be a whole number of 1 or more, got 64.0"),
        ("name: sgd", "name: adam", "train.optimizer.name: must be sgd, adamw, lars or lamb, got 'adam'"),
        ("batch_per_rank: 4", "{}", "train.batch_per_rank: is missing: must be a whole number of 1 or more"),
        ("20MB", "[20]", "watch.max_bytes: must be a number of bytes such as 67108864 or 64MiB, got [20]"),
        ("presets:\n  gpu: {}\n  bf16: {train: {precision: bf16}}\n", "", "presets: must contain at least one, e.g."),
        ("presets:", "default_preset: full\npresets:", "unknown preset 'full': known: bf16, gpu"),
        ("gpu: {}", "gpu: 3", "presets.gpu: must be keys and values, or empty, got 3"),
    ],
)
def test_a_wrong_file_is_answered_with_file_key_and_what_would_be_right(
    cli: Cli, tmp_path: Path, wrong: str, right: str, said: str
) -> None:
    assert wrong in SHORT
    file = tmp_path / "mine.yaml"
    text = SHORT.replace(wrong, right) if right != "{}" else SHORT.replace(f"  {wrong}\n", "")
    file.write_text(text)
    done = cli("show", str(file))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dlbench: error: {file}: ")
    assert said in line


def test_a_file_with_one_preset_needs_neither_its_content_nor_a_default(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(SHORT.partition("presets:")[0] + "presets:\n  mine:\n")
    done = cli("show", str(file), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["preset"] == "mine"


def test_a_system_of_another_form_is_answered_with_an_example(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = find("systems", "example-gpu").read_text()
    for wrong, right, said in (
        (
            '"01:00:00"',
            '"one hour"',
            """must be a time limit as Slurm writes it, in quotes: "00:30:00" or "1-12:00:00",""",
        ),
        ("path: $SLURM_TMPDIR", "path: tmp", "must be a path from / or ~/, or from a variable, e.g. $TMPDIR/dlbench,"),
        ("modules: []", "modules: [gcc 12]", "modules.0: must be one word, e.g. gcc/12.2, got 'gcc"),
        ("gpus: 4", "gpus: four", "node.gpus: must be a whole number of 0 or more, got 'four'"),
    ):
        assert wrong in text
        file.write_text(text.replace(wrong, right))
        with pytest.raises(UserError) as raised:
            choose_system(str(file), {})
        assert str(raised.value).startswith(f"{file}: ")
        assert said in str(raised.value)
