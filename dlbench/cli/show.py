"""`dlbench show`: one workload or system, every key decided and explained."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
_VALUE = 16  # Columns of a value; a longer one has a line of its own.

_SCHEMAS = {
    "report": "views.scaling_report.scaling_views",
    "diagnosis": "views.diagnosis.views_of",
    "estimate": "views.estimate.views_of",
    "comparison": "gate.report.ComparisonReport",
    "trends": "history.report.TrendsReport",
    "projection": "projection.page.ProjectionReport",
    "recorded-projection": "projection.ledger.RecordedProjection",
    "ingredients": "projection.ingredients.Ingredients",
    "ideal-projection": "projection.ideal.IdealReport",
    "collectives": "comm.report.CollectivesReport",
    "io": "views.storage.Io",
    "io-tiers": "views.stalls.IoTiers",
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
    "acknowledgement": "history.acknowledgements.Acknowledgement",
}

_HEAD = ("name", "title", "preset", "about", "notice", "sample_unit")
"""Keys that stand above the table, where they are their own explanation."""
_EXAMPLES = "examples of systems, to copy and edit"
_MODELS = "systems by data sheet, for dlbench project spec; nothing runs on them"


@dataclass(frozen=True, kw_only=True)
class KeyLine:
    """One key with what was decided."""

    section: str  # Dotted name of the keys above it; empty for the first level.
    name: str
    value: str  # With its unit, e.g. ``128 MiB``.
    meaning: str  # One sentence; of a choice that of the value, and the other values.
    default: str | None
    """The default where the value is another one; None where it is the default, or the default is nothing or zero."""
    origin: str | None  # Who set what is no default (a file, a preset of it, an option); None for a default.


def settings_of(model: type[BaseModel], content: Mapping[str, Any], layers: SettingLayers) -> Iterator[KeyLine]:
    """The keys of a decided specification in their order. `content`: its values, as in JSON."""
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
            yield KeyLine(section=section, name=path[-1], value="none", meaning=meaning, default=None, origin=None)


def section_meaning(model: type[BaseModel], path: tuple[str, ...], content: Mapping[str, Any] | None = None) -> str:
    """What a section holds, in a sentence."""
    models, values = [model], content or {}
    for part in path:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        values = values.get(part) or {}
        models = [m for field in fields for m in models_in(field.annotation)]
        models = chosen(models, values)
    return _sentences(models[0].__doc__ or "")[0] if models else ""


def _setting(key: Key, value: Any, layers: SettingLayers) -> KeyLine:
    default = key.field.get_default(call_default_factory=True)
    required = default is PydanticUndefined
    plain = str(default) if isinstance(default, Fusion) else default
    plain = list(default) if isinstance(default, tuple) else plain
    differs = required or value != plain
    sentences = _sentences(key.field.description or "")
    # Descriptions of choices say `value: meaning.` in turn.
    value_sentences = [sentence for sentence in sentences if sentence.startswith(f"{value}: ")]
    meaning = (value_sentences or sentences or [""])[0]
    others = [str(choice) for choice in typing.get_args(key.field.annotation) if isinstance(choice, str)]
    unsaid = [choice for choice in others if choice != value and not re.search(rf"\b{re.escape(choice)}\b", meaning)]
    return KeyLine(
        section=".".join(key.path[:-1]),
        name=key.path[-1],
        value=_value(key, value),
        meaning=f"{meaning} Or: {', '.join(unsaid)}." if unsaid and meaning else meaning,
        default=_value(key, plain) if differs and not required and plain else None,
        origin=layers.origin(key.path) if differs else None,
    )


def _cells_text(row: dict[str, Any]) -> str:
    """A row of a table by what it says, e.g. ``(batch 4096, learning_rate 10)``."""
    parts = (f"{name} {part:g}" if isinstance(part, float) else f"{name} {part}" for name, part in row.items() if part)
    return f"({', '.join(parts)})"


def _value(key: Key, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_cells_text(part) if isinstance(part, dict) else str(part) for part in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {part}" for name, part in value.items()) or "none"
    if isinstance(value, int) and key.is_size:
        return exact_bytes(value)
    if isinstance(value, int | float):
        unit = next((unit for end, unit in _UNITS.items() if key.path[-1].endswith(end)), "")
        return f"{value:.12g} {unit}".rstrip()
    return str(value) or "none"


def _sentences(text: str) -> list[str]:
    """Sentences of one paragraph; ``e.g. 50%`` ends none."""
    return re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)\s+", " ".join(text.split()))


def schemas() -> dict[str, Any]:
    """What has a JSON schema, by name: reports as JSON, and JSON files of runs."""
    places = {name: place.rpartition(".") for name, place in _SCHEMAS.items()}
    source_by_name = {name: getattr(import_module(f"dlbench.{module}"), of) for name, (module, _, of) in places.items()}
    return {name: source if isinstance(source, type) else source() for name, source in source_by_name.items()}


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a report or of a file of runs."""
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
@value_option(
    "--schema schema_name",
    "FILE",
    "Print the JSON schema of a report or of a file in a run folder; an unknown name lists all.",
)
def show(
    name: str | None, preset: str | None, overrides: tuple[str, ...], form: str | None, schema_name: str | None
) -> None:
    """Show every key of the workload or system NAME: value, unit and meaning.

    A letter marks each value that is not the default and says where it was set. `dlbench run` takes the same keys in
    --set and --sweep: those of a workload with their section (train.batch_per_rank), those of a system with the prefix
    system.

    \b
    Example:
      dlbench show resnet50 --preset ci
      dlbench show resnet50 --preset ci --set train.batch_per_rank=16 --yaml
      dlbench show --schema record
    """
    if schema_name is not None:
        if name is not None or preset is not None or overrides or form is not None:
            raise UserError("--schema stands alone: it is of a file, not of a workload or system")
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
            raise UserError(f"--preset {preset}: system {name} has no presets, workloads have")
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
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # the order of the fields says more
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
        about = f": {content['about']}" if content["about"] else ""
        yield from _wrapped(f"preset {content['preset']}{about}", width)
        others = f"Other presets: {', '.join(presets)}. " if presets else ""
        notice = f"Notice: {content['notice']}." if content["notice"] else ""
        yield from _wrapped(f"Samples: {content['sample_unit']}. {others}{notice}".rstrip(), width)
    key_lines = [line for line in settings_of(type(spec), content, layers) if line.section or line.name not in _HEAD]
    origins = [*dict.fromkeys(line.origin for line in key_lines if line.origin is not None)]
    marks = dict(zip(origins, map(_mark, origins), strict=True))
    yield ""
    legend = "; ".join(f"{mark} set by {_who(origin)}" for origin, mark in marks.items())
    yield from _wrapped(f"{legend}; the others are defaults." if legend else "All keys are at their defaults.", width)
    sections = [*dict.fromkeys(line.section for line in key_lines)]
    for section in sections:
        yield ""
        if section:
            meaning = section_meaning(type(spec), tuple(section.split(".")), content)
            yield from _wrapped(f"{section}: {meaning}" if meaning else section, width)
        yield from _table([line for line in key_lines if line.section == section], marks, width)


def _mark(origin: str) -> str:
    if origin.startswith("--"):
        return "S"
    return "P" if origin.endswith(")") else "F"


def _who(origin: str) -> str:
    """A file by its name; a preset as ``preset ci``."""
    if origin.endswith(")") and " (preset " in origin:
        return origin.rpartition(" (")[2].rstrip(")")
    return origin if origin.startswith("--") else Path(origin).name


def _table(settings: list[KeyLine], marks: dict[str, str], width: int) -> Iterator[str]:
    names = max(len(line.name) for line in settings) + 2
    values = min(max(len(line.value) for line in settings), _VALUE) + 2
    indent = 2 + names + values
    for line in settings:
        head = f"{marks[line.origin] if line.origin else ' '} {line.name:<{names}}{line.value:<{values}}"
        default = f" (default {line.default})" if line.default is not None else ""
        meaning = _wrapped(f"{line.meaning}{default}".strip(), width - indent)
        if len(head) > indent:
            yield from _wrapped(head.rstrip(), width, " " * (2 + names))
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
    width = max(len(row["name"]) for rows in content.values() for row in rows)
    for kind, rows in content.items():
        click.echo(kind)
        for row in rows:
            if _heading(row):
                continue
            click.echo(f"  {row['name']:<{width}} {cleaned(row.get('title') or row['problem'])}")
            for preset, about in row.get("presets", {}).items():
                # Without words there would be no line to indent.
                head = f"    {preset:<10} "
                click.echo(click.wrap_text(about, width=78, initial_indent=head, subsequent_indent=" " * 15) or head)
            click.echo(cleaned(f"    {row['file']}"))
    for heading in (_EXAMPLES, _MODELS):
        apart = [row for row in content["systems"] if _heading(row) == heading]
        if apart:
            click.echo(heading)
            for row in apart:
                click.echo(cleaned(f"  {row['name']:<{width}} {row['title'].removeprefix('Example: ')}"))
            click.echo(cleaned(f"    {Path(apart[0]['file']).parent}"))


def _heading(row: dict[str, Any]) -> str:
    if row.get("modelled"):
        return _MODELS
    return _EXAMPLES if row["name"].startswith("example-") and "title" in row else ""


def _rows(kind: Literal["workloads", "systems"], about: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what `about` says of each file of a kind; of one that cannot be used, why."""
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
