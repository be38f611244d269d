"""`dlbench show` and `ls`: prints workloads and systems with the value, unit and meaning of every key."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dlbench.cli.options import AS_JSON, value_option
from dlbench.cli.streams import cleaned
from dlbench.errors import DlbenchError, UserError, nearest
from dlbench.specs.merge import SettingLayers
from dlbench.specs.problems import Key, chosen, keys_of, models_in
from dlbench.specs.sync import Fusion
from dlbench.units import exact_bytes

_UNITS = {
    "gb_per_s": "GB/s",
    "_s": "s",
    "_ms": "ms",
    "_steps": "steps",
    "_epochs": "epochs",
    "_samples": "samples",
    "_tflops": "TFLOP/s",
}
"""Units by the end of a key's name."""

WIDTH = 80
_VALUE_WIDTH = 16  # Columns of a value; a longer value gets a separate line.

_SCHEMAS = {
    "report": "views.scaling_report.scaling_views",
    "diagnosis": "views.diagnosis.views_of",
    "estimate": "views.estimate.views_of",
    "comparison": "gate.report.ComparisonReport",
    "trends": "history.tables.TrendsReport",
    "projection": "projection.page.ProjectionReport",
    "recorded-projection": "projection.ledger.RecordedProjection",
    "ingredients": "projection.ingredients.Ingredients",
    "ideal-projection": "projection.ideal.IdealReport",
    "collectives": "comm.report.CollectivesReport",
    "io": "views.storage.Io",
    "io-tiers": "views.stalls.IoTiers",
    "layer": "views.layer_parts.LayerTimings",
    "memory-plan": "views.out_of_core.plan.CapacityPlan",
    "plan": "specs.plan.RunPlan",
    "record": "records.record.Record",
    "comm-plan": "specs.comm.CommPlan",
    "comm": "records.comm.CommRecord",
    "rank-status": "records.status.RankStatus",
    "node-status": "records.status.NodeStatuses",
    "preflight": "records.preflight.PreflightReport",
    "failure": "records.status.Failure",
    "submission": "jobs.scheduler.Submission",
    "series": "jobs.campaign.series_file.SeriesFile",
    "acknowledgement": "history.history.Acknowledgement",
}

_HEAD = ("name", "title", "preset", "about", "notice", "sample_unit")
"""Keys that are printed above the table, without an explanation."""
_EXAMPLES = "example systems, to copy and edit"
_MODELS = "systems described by data sheets, for dlbench project spec; nothing runs on them"


@dataclass(frozen=True, kw_only=True)
class KeyLine:
    """A key with its value and meaning, as `dlbench show` prints it."""

    section: str  # Dotted name of the keys above it; empty for the first level.
    name: str
    value: str  # With its unit, e.g. ``128 MiB``.
    meaning: str  # One sentence; for a key with choices also the meaning of the value and the other choices.
    default: str | None = None  # With its unit; None if the value is the default, or the default is empty or zero.
    origin: str | None = None  # The file, preset or option that set the value; None for a default.


def settings_of(model: type[BaseModel], content: Mapping[str, Any], layers: SettingLayers) -> Iterator[KeyLine]:
    """Yields the keys of a specification in order. `content`: its values as JSON types."""
    seen_paths: set[tuple[str, ...]] = set()
    for key in keys_of(model, content):
        path = key.path
        value: Any = content
        for depth, part in enumerate(path):
            value = value[part]
            if value is None and depth + 1 < len(path):  # a section that is left out
                path = path[: depth + 1]
                break
        if path in seen_paths:
            continue
        seen_paths.add(path)
        if path == key.path:
            yield _setting(key, value, layers)
        else:
            section, meaning = ".".join(path[:-1]), section_meaning(model, path)
            yield KeyLine(section=section, name=path[-1], value="none", meaning=meaning)


def section_meaning(model: type[BaseModel], path: tuple[str, ...], content: Mapping[str, Any] | None = None) -> str:
    """Returns the first sentence of the docstring of a section's specification; empty if there is none."""
    models, values = [model], content or {}
    for part in path:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        values = values.get(part) or {}
        models = chosen([below for field in fields for below in models_in(field.annotation)], values)
    if not models:
        return ""
    return _sentences(models[0].__doc__ or "")[0]


def _setting(key: Key, value: Any, layers: SettingLayers) -> KeyLine:
    default = key.field.get_default(call_default_factory=True)
    is_required = default is PydanticUndefined
    if isinstance(default, Fusion):
        default = str(default)
    elif isinstance(default, tuple):
        default = list(default)
    is_changed = is_required or value != default
    section, name, meaning = ".".join(key.path[:-1]), key.path[-1], _meaning(key, value)
    line = KeyLine(section=section, name=name, value=_value(key, value), meaning=meaning)
    if is_changed:
        line = replace(line, origin=layers.origin(key.path))
    if is_changed and default and not is_required:
        line = replace(line, default=_value(key, default))
    return line


def _meaning(key: Key, value: Any) -> str:
    """Returns the first sentence of a key's description; for choices also the sentence `value: ...`, and the others."""
    meaning, *others = _sentences(key.field.description or "")
    choices = [choice for choice in typing.get_args(key.field.annotation) if isinstance(choice, str)]
    value_sentence = next((sentence for sentence in others if sentence.startswith(f"{value}: ")), "")
    if meaning.partition(": ")[0] not in choices:
        meaning = f"{meaning} {value_sentence}".rstrip()
    elif value_sentence:
        meaning = value_sentence
    unnamed = [choice for choice in choices if choice != value and not re.search(rf"\b{re.escape(choice)}\b", meaning)]
    if unnamed and meaning:
        meaning += f" Or: {', '.join(unnamed)}."
    return meaning


def _cells_text(row: dict[str, Any]) -> str:
    """Returns the cells of a table's row that are not empty, e.g. ``(batch 4096, learning_rate 10)``."""
    cells = []
    for name, cell in row.items():
        if isinstance(cell, float) and cell:
            cells.append(f"{name} {cell:g}")
        elif cell:
            cells.append(f"{name} {cell}")
    return f"({', '.join(cells)})"


def _value(key: Key, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(map(_cells_text, value))
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {part}" for name, part in value.items()) or "none"
    if isinstance(value, int) and key.is_size:
        return exact_bytes(value)
    if isinstance(value, int | float):
        unit = next((unit for end, unit in _UNITS.items() if key.path[-1].endswith(end)), "")
        return f"{value:.12g} {unit}".rstrip()
    return str(value) or "none"


def _sentences(text: str) -> list[str]:
    # The full stop of "e.g." or "i.e." does not end a sentence.
    return re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)\s+", " ".join(text.split()))


def schemas() -> dict[str, Any]:
    """Returns the classes and the views whose JSON schemas can be printed, by name."""
    sources: dict[str, Any] = {}
    for name, location in _SCHEMAS.items():
        module, _, attribute = location.rpartition(".")
        source = getattr(import_module(f"dlbench.{module}"), attribute)
        if not isinstance(source, type):
            source = source()
        sources[name] = source
    return sources


def schema(name: str) -> dict[str, Any]:
    """Returns the JSON schema of a report or of a file in a run folder."""
    from dlbench.report.formats.json import schema_of

    sources = schemas()
    if name not in sources:
        raise UserError(f"--schema {name}: {nearest(name, sources)}")
    source = sources[name]
    if not isinstance(source, type):
        from dlbench.views.model import Report, ReportGroup

        views: dict[str, Any] = source.schema(Report, ReportGroup)
        return views
    return source.model_json_schema() if issubclass(source, BaseModel) else schema_of(source)


@click.command()
@click.argument("name", required=False)
@value_option("--preset", "NAME", "Preset of a workload.")
@value_option("--set overrides", "KEY=VALUE", "Set a key before printing, repeatable.", multiple=True)
@click.option("--yaml", "form", flag_value="yaml", help="Print YAML.")
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@value_option("--schema schema_name", "FILE", "Print the JSON schema of a report or run file; a wrong name lists all.")
def show(
    name: str | None, preset: str | None, overrides: tuple[str, ...], form: str | None, schema_name: str | None
) -> None:
    """Show every key of the workload or system NAME: value, unit and meaning.

    A letter marks each value that is not the default and says where it was set. `dlbench run` takes the keys of a
    workload in --set and --sweep (train.batch_per_rank), and those of a system with the prefix `system.`, e.g.
    system.slurm.partition.

    \b
    Example:
      dlbench show resnet50 --preset ci --set train.batch_per_rank=16 --yaml
      dlbench show --schema record
    """
    if schema_name is not None:
        if name is not None or preset is not None or overrides or form is not None:
            raise UserError("--schema cannot be combined: it prints the schema of a file, not a workload or system")
        click.echo(json.dumps(schema(schema_name), indent=1))
        return
    if name is None:
        raise click.UsageError("missing the NAME of a workload or system (dlbench ls), or --schema FILE")
    from dlbench.specs.choices import WorkloadFile, choose_system_with_origins, choose_with_origins
    from dlbench.specs.files import available, find
    from dlbench.specs.requests import parse_set

    values = {key: (value, "--set") for key, value in parse_set(overrides).items()}
    workloads, systems = available("workloads"), available("systems")
    is_system = name in systems and name not in workloads
    if os.sep in name or name.endswith((".yaml", ".yml")):
        from dlbench.specs.files import read_yaml

        is_system = Path(name).is_file() and read_yaml(Path(name)).get("format") == "dlbench.system"
    elif name not in workloads and name not in systems:
        raise UserError(f"unknown workload or system {name!r}: {nearest(name, [*workloads, *systems])}")
    spec: BaseModel
    if is_system:
        if preset is not None:
            raise UserError(f"--preset {preset}: system {name} has no presets; only workloads have")
        settings = {key.removeprefix("system."): value for key, value in values.items()}
        spec, layers = choose_system_with_origins(name, settings)
        presets: list[str] = []
    else:
        file = WorkloadFile(find("workloads", name))
        spec, layers = choose_with_origins(file, preset, values)
        presets = [preset_name for preset_name in file.presets if preset_name != spec.preset]
    content = spec.model_dump(mode="json")
    if form == "json":
        click.echo(json.dumps(content, indent=2))
    elif form == "yaml":
        from ruamel.yaml import YAML

        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keep the order of the fields
        sink = io.StringIO()
        yaml.dump(content, sink)
        click.echo(sink.getvalue(), nl=False)
    else:
        for line in _explained(spec, content, layers, presets):
            click.echo(cleaned(line))


def _explained(spec: BaseModel, content: dict[str, Any], layers: SettingLayers, presets: list[str]) -> Iterator[str]:
    width = max(60, min(shutil.get_terminal_size((WIDTH, 24)).columns, 100))
    yield from _wrapped(": ".join(dict.fromkeys((content["name"], content["title"]))), width)
    if "preset" in content:
        yield from _wrapped(": ".join(filter(None, (f"preset {content['preset']}", content["about"]))), width)
        sentences = [f"Samples: {content['sample_unit']}."]
        if presets:
            sentences.append(f"Other presets: {', '.join(presets)}.")
        if content["notice"]:
            sentences.append(f"Notice: {content['notice']}.")
        yield from _wrapped(" ".join(sentences), width)
    key_lines = [line for line in settings_of(type(spec), content, layers) if line.section or line.name not in _HEAD]
    marks = {line.origin: _mark(line.origin) for line in key_lines if line.origin is not None}
    yield ""
    legend = "All keys are at their defaults."
    if marks:
        origins = "; ".join(f"{mark} set by {_origin_name(origin)}" for origin, mark in marks.items())
        legend = f"{origins}; the others are defaults."
    yield from _wrapped(legend, width)
    sections = dict.fromkeys(line.section for line in key_lines)
    for section in sections:
        yield ""
        if section:
            meaning = section_meaning(type(spec), tuple(section.split(".")), content)
            yield from _wrapped(": ".join(filter(None, (section, meaning))), width)
        yield from _table([line for line in key_lines if line.section == section], marks, width)


def _mark(origin: str) -> str:
    if origin.startswith("--"):
        return "S"
    return "P" if origin.endswith(")") else "F"


def _origin_name(origin: str) -> str:
    if origin.endswith(")") and " (preset " in origin:
        return origin.rpartition(" (")[2].rstrip(")")
    if origin.startswith("--"):
        return origin
    return Path(origin).name


def _table(settings: list[KeyLine], marks: dict[str, str], width: int) -> Iterator[str]:
    name_width = max(len(line.name) for line in settings) + 2
    value_width = min(max(len(line.value) for line in settings), _VALUE_WIDTH) + 2
    indent = 2 + name_width + value_width
    for line in settings:
        mark = marks.get(line.origin or "", " ")
        head = f"{mark} {line.name:<{name_width}}{line.value:<{value_width}}"
        text = line.meaning
        if line.default is not None:
            text += f" (default {line.default})"
        meaning = _wrapped(text.strip(), width - indent)
        if len(head) > indent:
            yield from _wrapped(head.rstrip(), width, " " * (2 + name_width))
        elif meaning:
            yield head + meaning.pop(0)
        else:
            yield head.rstrip()
        yield from (" " * indent + line for line in meaning)


def _wrapped(text: str, width: int, further: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=further, break_on_hyphens=False)


@click.command()
@AS_JSON
def ls(as_json: bool) -> None:
    """List workloads with their presets, and systems.

    The folders of DLBENCH_PATH are searched first (each may contain workloads/ and systems/), then dlbench itself.

    \b
    Example:
      DLBENCH_PATH=$HOME/dlbench-site dlbench ls
    """
    content = {"workloads": _rows("workloads", _about_workload), "systems": _rows("systems", _about_system)}
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    width = max(len(row["name"]) for row in itertools.chain.from_iterable(content.values()))
    for kind, rows in content.items():
        click.echo(kind)
        for row in rows:
            if _heading(row):
                continue
            click.echo(f"  {row['name']:<{width}} {cleaned(row.get('title') or row['problem'])}")
            for preset, about in row.get("presets", {}).items():
                # An empty text would be wrapped to no line at all.
                head = f"    {preset:<10} "
                click.echo(click.wrap_text(about, width=78, initial_indent=head, subsequent_indent=" " * 15) or head)
            click.echo(cleaned(f"    {row['file']}"))
    for heading in (_EXAMPLES, _MODELS):
        systems = [row for row in content["systems"] if _heading(row) == heading]
        if systems:
            click.echo(heading)
            for row in systems:
                click.echo(cleaned(f"  {row['name']:<{width}} {row['title'].removeprefix('Example: ')}"))
            click.echo(cleaned(f"    {Path(systems[0]['file']).parent}"))


def _heading(row: dict[str, Any]) -> str:
    if row.get("modelled"):
        return _MODELS
    is_example = row["name"].startswith("example-") and "title" in row
    return _EXAMPLES if is_example else ""


def _rows(kind: Literal["workloads", "systems"], about: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each file of a kind: the answer of `about`, or the reason why the file cannot be used."""
    from dlbench.specs.files import available

    rows: list[dict[str, Any]] = []
    for name, path in available(kind).items():
        try:
            content = about(path)
        except DlbenchError as error:
            content = {"problem": f"unusable: {error}"}
        rows.append({"name": name, "file": str(path), **content})
    return rows


def _about_workload(path: Path) -> dict[str, Any]:
    from dlbench.specs.choices import WorkloadFile

    file = WorkloadFile(path)
    presets = {key: " ".join(str(preset.get("about", "")).split()) for key, preset in file.presets.items()}
    return {"title": str(file.base.get("title", file.base.get("name", path.stem))), "presets": presets}


def _about_system(path: Path) -> dict[str, Any]:
    from dlbench.specs.choices import choose_system_with_origins

    system = choose_system_with_origins(str(path), {})[0]
    return {"title": system.title, "modelled": system.modelled}
