"""Writes the reference parts of the documentation from the code: ``python -m tests.reference``.

A generated region stands between `<!-- generated: NAME -->` and `<!-- end -->`; all text around it is
written by hand. `tests/docs/test_docs.py` holds that every region is what the code says now.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import click
import numpy as np
from pydantic import BaseModel, TypeAdapter

from dlbench import bundled, errors
from dlbench.cli import COMMANDS, cli
from dlbench.cli.options import OPTION_GROUPS, GroupedCommand
from dlbench.cli.show import schema, schemas
from dlbench.datasets import manifest
from dlbench.datasets.images import shards as image_shards
from dlbench.datasets.making import production
from dlbench.history.history import Acknowledgement
from dlbench.jobs.campaign.series_file import SeriesFile
from dlbench.jobs.scheduler import Submission
from dlbench.node import rendezvous
from dlbench.node.watching import clocks
from dlbench.records.comm import CommRecord
from dlbench.records.preflight import PreflightReport, SeenRank
from dlbench.records.record import Record
from dlbench.records.rows.samples import SAMPLES_FORMAT, SAMPLES_VERSION
from dlbench.records.rows.spans import SPANS_FORMAT, SPANS_VERSION
from dlbench.records.rows.steps import FIELDS, LAUNCH_FIELDS, STEPS_VERSION, narrow
from dlbench.records.status import Failure, NodeStatuses, RankStatus
from dlbench.setup import horovod
from dlbench.specs.base import Name, RunName, SlurmWord
from dlbench.specs.choices import Choices, WorkloadFile, choose
from dlbench.specs.comm import CommPlan
from dlbench.specs.engine import HOROVOD_VARIABLES
from dlbench.specs.plan import RunPlan
from dlbench.views import model as report_model
from tests.support.paths import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
REGION = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DASH = "—"

Schema = dict[str, Any]

# Forms of text that the specifications name; see docs/formats.md, "Words used in the tables".
FORMS = {
    TypeAdapter(form).json_schema()["pattern"]: word
    for form, word in ((Name, "name"), (RunName, "run name"), (SlurmWord, "Slurm word"))
}

STEP_MEANINGS = {
    "step": "number of the step in this run, from 0, warm-up included; a resumed run begins at 0, too",
    "warmup": "1 for a warm-up step, 0 for a measured one",
    "start_ns": "when the step began: CLOCK_MONOTONIC of the rank's machine, ns; comparable within one machine only",
    "step_ns": "start of this step to start of the next, ns",
    "input_ns": "waiting for the next batch, ns",
    "h2d_ns": "moving the batch to the device, ns",
    "forward_ns": "forward pass and loss, ns",
    "backward_ns": "backward pass, with the exchange that it hides, ns",
    "exchange_ns": "gradient exchange after backward, ns",
    "optimizer_ns": "clipping, learning rate, update, clearing of gradients, ns",
    "samples": "samples this rank processed in the step",
    "loss": "this rank's loss, before any averaging over ranks",
    "launch_forward_ns": "of forward, ns: the GPU waited for the host's calls for so long at most; GPUs only",
    "launch_backward_ns": "the same of backward; GPUs only",
    "launch_optimizer_ns": "the same of optimizer; GPUs only",
}


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = "".join(c for c in heading.strip().lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def code(value: object) -> str:
    """A value as JSON, in code quotes."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


# --- types in words ---------------------------------------------------------------------------------------------------


def words(schema: Schema, link: Callable[[str], str]) -> str:
    """The type of a JSON schema in a few words; `link` makes text of a reference's name."""
    if "$ref" in schema:
        return link(schema["$ref"].rsplit("/", 1)[-1])
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return _any_of([code(value) for value in schema["enum"]])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _any_of([words(part, link) for part in schema[key]])
    if not {"type"} & schema.keys():
        return "any JSON value"
    return _KINDS[schema["type"]](schema, link)


def _any_of(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _number(schema: Schema, link: Callable[[str], str]) -> str:
    name = schema["type"]
    if schema.get("maximum") == 1:
        return f"{name} from 0 to 1"
    if schema.get("exclusiveMinimum") == 0:
        return f"{name} above 0"
    return f"{name}, 0 or more" if schema.get("minimum") == 0 else name


def _array(schema: Schema, link: Callable[[str], str]) -> str:
    if "prefixItems" in schema:
        parts = [words(part, link) for part in schema["prefixItems"]]
        return f"list of {len(parts)}" + (f", each {parts[0]}" if len(set(parts)) == 1 else f": {', '.join(parts)}")
    return f"list of {words(schema['items'], link)}"


def _object(schema: Schema, link: Callable[[str], str]) -> str:
    values = schema.get("additionalProperties")
    if not isinstance(values, Mapping):
        return "mapping from text to any JSON value"
    keys = words(schema["propertyNames"], link) if "propertyNames" in schema else "text"
    return f"mapping from {keys} to {words(dict(values), link)}"


def _text(schema: Schema, link: Callable[[str], str]) -> str:
    if "pattern" in schema:
        return FORMS.get(schema["pattern"], "text of a checked form")
    return "text"


_KINDS: dict[str, Callable[[Schema, Callable[[str], str]], str]] = {
    "integer": _number,
    "number": _number,
    "string": _text,
    "array": _array,
    "object": _object,
    "boolean": lambda schema, link: "true or false",
    "null": lambda schema, link: "null",
}


# --- models -----------------------------------------------------------------------------------------------------------


def model_keys(model: type[BaseModel], schema_name: str, beside: type[BaseModel] | None = None) -> str:
    """What prints the schema of a file, and a line for each of its own keys that `beside` has not, too."""
    schema = model.model_json_schema()
    known = {"format", "version"} | (set() if beside is None else set(beside.model_fields))
    where = f"Every key, also those of *nested* objects: `dlbench show --schema {schema_name}`."
    return "\n".join((f"{where}\n", *_key_lines(schema, known)))


def _key_lines(schema: Schema, known: Collection[str]) -> Iterator[str]:
    for key, field in schema["properties"].items():
        if key in known:
            continue
        below = re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(field))
        described = field.get("description") or (below and schema["$defs"][below[0]].get("description"))
        about = first_sentence(described) if described else words(field, lambda name: name)
        yield f"- `{key}`{f' (*{below[0]}*)' if below else ''}: {about}"


# --- other regions ----------------------------------------------------------------------------------------------------


def steps_layout() -> str:
    """The binary record of a step file, by name, type and offset."""
    dtype = np.dtype([*narrow(FIELDS)])
    assert dtype.fields is not None
    lines = [
        f"- `{name}` (`{kind}` at {dtype.fields[name][1]}): {STEP_MEANINGS[name]}" for name, kind in narrow(FIELDS)
    ]
    further = [f"- `{name}` (`{kind}`): {STEP_MEANINGS[name]}" for name, kind in narrow(LAUNCH_FIELDS)]
    sizes = (
        f"\nA row takes {dtype.itemsize} bytes, without padding and the last three; in a block with a time of 2^32 ns"
    )
    sizes += f" (4.3 s) or longer `warmup` has `<i4` and all times `<i8`, {np.dtype([*FIELDS]).itemsize} bytes."
    return "\n".join((*lines, *further, sizes))


def format_versions() -> str:
    """Names and numbers of all formats."""

    def stamped(model: type[BaseModel]) -> tuple[str, int]:
        return model.model_fields["format"].default, model.model_fields["version"].default

    from dlbench.node.training import checkpoint

    formats: list[tuple[str, str, int]] = [
        ("workload YAML", "dlbench.workload", 1),
        ("system YAML", "dlbench.system", 1),
        ("`plan.json`", *stamped(RunPlan)),
        ("`plan.json` of `dlbench comm`", *stamped(CommPlan)),
        ("`record.json`", *stamped(Record)),
        ("`comm.json`", *stamped(CommRecord)),
        ("`node-NNNN.steps` (header)", "dlbench.steps", STEPS_VERSION),
        ("`node-NNNN.spans` (header)", SPANS_FORMAT, SPANS_VERSION),
        ("`node-NNNN.samples` (header)", SAMPLES_FORMAT, SAMPLES_VERSION),
        ("`clock.json`", clocks.FORMAT, clocks.VERSION),
        ("`node-NNNN.status.json`", *stamped(NodeStatuses)),
        ("`rank-NNNN.status.json`", *stamped(RankStatus)),
        ("`preflight.json`", *stamped(PreflightReport)),
        ("`seen/rank-NNNN.json` of a pre-flight", *stamped(SeenRank)),
        ("`submission.json`", *stamped(Submission)),
        ("`.series/ID.json`", *stamped(SeriesFile)),
        ("`acknowledged/NAME.json` of a history", *stamped(Acknowledgement)),
        ("`rendezvous.json`", rendezvous.FORMAT, rendezvous.VERSION),
        ("`failure.json`", *stamped(Failure)),
        ("`checkpoints/step-NNNNNNNN.safetensors` (header)", *_pair(checkpoint.FORMAT)),
        ("`manifest.json` of a prepared data set", manifest.FORMAT, manifest.VERSION),
        ("`.production.json` of a data set that is being made", production.FORMAT, production.VERSION),
        ("`index.npz` of image shards", *_pair(image_shards._FORMAT)),
        ("report as JSON", report_model.Report.format, report_model.Report.version),
    ]
    old = [f"`{name}` ({number})" for _, name, number in formats if number != 1]
    return (
        ", ".join(f"{file} (`{name}`)" for file, name, _ in formats)
        + f". At version 1{' but ' if old else ''}{', '.join(old)}."
    )


def _pair(stamp: Mapping[str, object]) -> tuple[str, int]:
    return str(stamp["format"]), int(str(stamp["version"]))


def _every_preset() -> Iterator[Choices]:
    for path in sorted(bundled.folder("workloads").glob("*.yaml")):
        file = WorkloadFile(path)
        yield from (choose(file, name, {}) for name in file.presets)


def presets() -> str:
    """The presets of the bundled workloads."""
    rows = []
    for chosen in _every_preset():
        train, measure = chosen.train, chosen.measure
        steps = f"{measure.warmup_steps} + {measure.measured_steps}"
        unit = chosen.sample_unit.removesuffix("s") if train.batch_per_rank == 1 else chosen.sample_unit
        batch = f"{train.batch_per_rank} {unit}"
        about = first_sentence(chosen.about)
        rows.append(
            f"- `{chosen.name}` `{chosen.preset}`: {batch} per rank, {train.optimizer.name}, {steps} steps. {about}"
        )
    return "\n".join(("Warm-up and measured steps are counted apart.\n", *rows))


def recipes() -> str:
    """Learning rate and goal of the presets that have one; those that agree in a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for chosen in _every_preset():
        rule, goal = chosen.train.optimizer, chosen.quality
        if goal is None:
            continue
        rate = f"{rule.learning_rate:g}"
        if rule.learning_rate_scaling != "none":
            rate += f" at {rule.reference_batch:,} ({rule.learning_rate_scaling})"
        wanted = f"{goal.target:g}" + (" at most" if chosen.model.family == "cosmoflow" else " at least")
        if goal.starts_from == "checkpoint":
            wanted += ", from a checkpoint"
        every = _so_much(goal.evaluate_every_epochs, goal.evaluate_every_samples)
        most = _so_much(goal.max_epochs, goal.max_samples)
        rows.setdefault((f"`{chosen.name}`", rate, wanted, every, most), []).append(f"`{chosen.preset}`")
    header = (
        "Workload",
        "Preset",
        "Peak learning rate at a global batch (scaled)",
        "Target",
        "Evaluated every",
        "Gives up after",
    )
    return table(header, [(name, ", ".join(presets), *rest) for (name, *rest), presets in rows.items()])


def _so_much(epochs: float | None, samples: int | None) -> str:
    if epochs is None:
        return f"{samples:,} samples"
    return f"{epochs:g} epoch" + ("" if epochs == 1 else "s")


def patches() -> str:
    """What is changed in Horovod's source, and why."""
    return table(("File", "Why"), [(f"`{patch.file}`", patch.reason) for patch in horovod.PATCHES])


def horovod_variables() -> str:
    """Horovod's variables that dlbench sets, and the key that says to what."""
    rows = [(f"`HOROVOD_{name.upper()}`", f"`{key}`") for name, key in HOROVOD_VARIABLES.items()]
    return table(("Variable", "Key"), rows)


def exit_codes() -> str:
    """Number, name and meaning of every exit code.

    Raises:
        ValueError: a member has no docstring.
    """
    (body,) = ast.parse(inspect.getsource(errors.ExitCode)).body
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for member, below in pairwise(body.body):
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            meanings[ast.unparse(member.targets[0])] = str(below.value.value)
    if missing := errors.ExitCode.__members__.keys() - meanings.keys():
        raise ValueError(f"no docstring below {', '.join(sorted(missing))} of dlbench.errors.ExitCode")
    return "\n".join(f"- **{code.value}** `{code.name}`: {meanings[code.name]}" for code in errors.ExitCode)


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its path, groups before what is in them, in workflow order."""
    context = click.Context(cli)
    for name, *_ in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield (name,), command
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                yield (name, inner), _inner(command, context, inner)


def _inner(group: click.Group, context: click.Context, name: str) -> click.Command:
    """A command of a group, which may import it only now."""
    command = group.get_command(context, name)
    assert command is not None
    return command


def _option_lines(command: click.Command) -> str:
    """Returns a line for every option but --help: its forms, its help and its default.

    In the order of the command's own help and under its titles, where that has some.
    """
    context = click.Context(command)
    lines: list[tuple[str, str]] = []
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        metavar = "" if option.is_flag else " " + option.make_metavar(context)
        default = option.to_info_dict().get("default") if option.show_default else None
        sentences = [first_sentence(option.help or "")]
        sentences += ["Required."] * option.required
        sentences += ["Repeatable."] * (option.multiple and "repeatable" not in sentences[0])
        sentences += [f"[{default}]"] * (not isinstance(default, bool) and default not in (None, ()))
        written = f"`{'`, `'.join((*option.opts, *option.secondary_opts))}{metavar}`"
        lines.append((str(option.name), f"- {written}: {' '.join(filter(None, sentences))}"))
    groups = [("", [line for _, line in lines])]
    if isinstance(command, GroupedCommand):
        titles = {name: title for title, names in OPTION_GROUPS.items() for name in names.split()}
        groups = [(title, [line for name, line in lines if titles.get(name) == title]) for title in OPTION_GROUPS]
        groups.append(("Other options", [line for name, line in lines if name not in titles]))
    return "\n\n".join("\n".join((*([f"{title}:\n"] * bool(title)), *mine)) for title, mine in groups if mine)


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, without line breaks."""
    return re.split(r"(?<=[^.][^.]\.)\s+(?=[A-Z`'-])", " ".join(text.split()), maxsplit=1)[0]


def cli_reference() -> str:
    """A section for each command: its arguments, what it does, and all of its options."""
    parts = []
    for path, command in ((), cli), *commands():
        words = ("dlbench", *path)
        parts.append(f"{'#' * max(2, len(words))} {' '.join(words)}")
        arguments = [
            one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)
        ]
        about = first_paragraph(command.help or "")
        parts.append(f"`{' '.join((*words, *arguments))}`: {about}" if arguments else about)
        parts.append(_option_lines(command))
    return "\n\n".join(filter(None, parts))


def first_paragraph(text: str) -> str:
    """Of a docstring, without line breaks."""
    return " ".join(text.replace("\b", "").strip().split("\n\n")[0].split())


REGIONS: dict[str, Callable[[], str]] = {
    "cli": cli_reference,
    "exit-codes": exit_codes,
    "format-versions": format_versions,
    "presets": presets,
    "recipes": recipes,
    "patches": patches,
    "horovod-variables": horovod_variables,
    "plan": lambda: model_keys(RunPlan, "plan"),
    "record": lambda: model_keys(Record, "record"),
    "comm-plan": lambda: model_keys(CommPlan, "comm-plan", beside=RunPlan),
    "comm-record": lambda: model_keys(CommRecord, "comm", beside=Record),
    "rank-status": lambda: model_keys(RankStatus, "rank-status"),
    "steps": steps_layout,
}


def regenerate(text: str) -> str:
    """A page with every generated region as the code says now.

    Raises:
        KeyError: a region has a name that nothing makes.
    """
    return REGION.sub(lambda match: f"{match[1]}\n{REGIONS[match['name']]()}\n\n{match[3]}", text)


DIGESTS = ROOT / "tests" / "golden" / "schemas.json"
"""The first digits of the SHA-256 of every schema: a change of a format is seen in review."""


def digests() -> str:
    """The digest of the JSON schema of each report and of each JSON file of a run, as JSON."""
    found = {name: hashlib.sha256(json.dumps(schema(name)).encode()).hexdigest()[:16] for name in schemas()}
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    """Rewrites the pages and digests that are not up to date, and says which."""
    texts = {page: regenerate(page.read_text(encoding="utf-8")) for page in PAGES} | {DIGESTS: digests()}
    for page, new in texts.items():
        old = page.read_text(encoding="utf-8") if page.exists() else ""
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: written anew", file=sys.stderr)


if __name__ == "__main__":
    main()
