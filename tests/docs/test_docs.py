"""The documentation says what is so: links, generated parts, examples, keys, and the table of rooms."""

from __future__ import annotations

import difflib
import pkgutil
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from dlbench.cli import cli
from dlbench.perfmodels.topology import read_topology
from dlbench.records.files import Named, Numbered
from dlbench.records.folder import RunFolder
from dlbench.specs.choices import Choices, Ladder, WorkloadFile, choose, choose_system
from dlbench.specs.files import find, read_yaml
from dlbench.specs.problems import models_in
from dlbench.specs.requests import parse_counts, parse_set, parse_sweep
from dlbench.specs.system import SystemSpec
from dlbench.views.forecast import AnchorFile
from tests import reference
from tests.support.paths import ROOT

PAGES = (*reference.PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")
DOCS = ROOT / "docs"

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
page_by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def quoted(page: Path) -> list[str]:
    """What stands in code quotes within the text of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


# --- length -----------------------------------------------------------------------------------------------------------


def test_the_readme_is_two_screens() -> None:
    readme = ROOT / "README.md"
    assert 300 <= len(readme.read_text(encoding="utf-8").split()) <= 450
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 80
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", prose(readme))
    assert (ROOT / picture).stat().st_size < 150_000
    commands = [line.split()[1] for line in shell_lines(readme) if line.startswith("dlbench ")]
    assert commands == ["doctor", "run", "report", "submit", "diagnose"]


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    slugs = [reference.slug(re.sub(r"[`*]", "", line)) for line in re.findall(r"^#{1,6} (.*)$", prose(page), re.M)]
    seen: Counter[str] = Counter()
    result = set()
    for slug in slugs:
        result.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return result


@page_by_name
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    assert dead == []


@page_by_name
def test_no_page_names_a_place_of_this_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert str(Path.home()) + "/" not in text


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page for page in DOCS.rglob("*.md") if f"({page.relative_to(ROOT)})" not in text] == []


# --- generated parts --------------------------------------------------------------------------------------------------


def regions() -> Iterator[tuple[Path, str, str]]:
    for page in reference.PAGES:
        for match in reference.REGION.finditer(page.read_text(encoding="utf-8")):
            yield page, match["name"], match[0]


@pytest.mark.parametrize(
    ("page", "name", "text"), [pytest.param(*region, id=f"{region[0].name}-{region[1]}") for region in regions()]
)
def test_generated_parts_are_current(page: Path, name: str, text: str) -> None:
    current = reference.regenerate(text)
    if current != text:
        changes = "\n".join(difflib.unified_diff(text.splitlines(), current.splitlines(), "page", "code", lineterm=""))
        pytest.fail(f"{page.name}, {name!r}: run `python -m tests.reference`; the differences:\n{changes}")


def test_every_exit_code_is_explained() -> None:
    """What each code is about, by hand: the generator cannot vouch for itself."""
    words = {0: "success", 1: "regression", 2: "usage", 3: "run failed", 4: "corrupted", 5: "machine lacks", 6: "noisy"}
    words |= {70: "traceback", 75: "requeued", 124: "time limit", 130: "ctrl-c"}
    lines = re.findall(
        r"^- \*\*(\d+)\*\* `[A-Z_]+`: (.*)$", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {int(number) for number, _ in lines} == words.keys()
    assert [number for number, about in lines if words[int(number)] not in about.lower()] == []


def test_thresholds_of_the_docs_are_the_code_s() -> None:
    page = (ROOT / "docs" / "measuring.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d.e+-]+) \|", page, re.MULTILINE)
    assert len(rows) > 20
    assert [name for name, value in rows if f"{pkgutil.resolve_name(f'dlbench.{name}'):g}" != value] == []


def test_every_generated_part_stands_in_a_page() -> None:
    assert {name for _, name, _ in regions()} == set(reference.REGIONS)


# --- commands and examples --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    page: str
    words: tuple[str, ...]
    """Behind `dlbench`."""

    def __str__(self) -> str:
        return f"{self.page}: dlbench {' '.join(self.words)}"


def shell_lines(page: Path) -> Iterator[str]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        if match["language"] in ("sh", "bash", "console"):
            yield from match["body"].replace("\\\n", " ").splitlines()


def examples() -> Iterator[Example]:
    for page in PAGES:
        for line in shell_lines(page):
            for call in re.findall(r"\$\((.*?)\)", line) or [line]:
                if "dlbench" not in call:
                    continue
                words = shlex.split(call, comments=True)
                starts = [i for i, word in enumerate(words) if word == "dlbench" or word.endswith("/bin/dlbench")]
                for start in starts:
                    rest = words[start + 1 :]
                    end = next((i for i, word in enumerate(rest) if word in ("|", "&&", "||", ";", ">")), len(rest))
                    yield Example(page.name, tuple(rest[:end]))


EXAMPLES = list(dict.fromkeys(examples()))


def command_of(words: tuple[str, ...]) -> tuple[click.Command, list[str]]:
    """The command a line names, and what is left of the line."""
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest.pop(0))
        assert found is not None, words
        command = found
    return command, rest


def parsed(example: Example) -> tuple[click.Command, dict[str, object]]:
    """The command and its options, without running it."""
    command, rest = command_of(example.words)
    rest = [word for word in rest if word not in ("--help", "-h", "--version")]
    if isinstance(command, click.Group):
        assert not rest, example
        return command, {}
    return command, command.make_context(command.name or "", rest).params


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_examples_parse(example: Example) -> None:
    parsed(example)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.words[:1] in (("run",), ("submit",))], ids=str)
def test_examples_of_runs_are_of_known_keys_names_and_values(example: Example) -> None:
    _, options = parsed(example)
    points = options.get("nodes") or options.get("ranks")
    assert points is None or parse_counts(str(points), "points")
    settings = parse_set(tuple(options["overrides"]))  # type: ignore[arg-type]
    swept = parse_sweep(tuple(options["sweep"]))  # type: ignore[arg-type]
    workload, system = str(options["workload"]), str(options["system"])
    # What is swept has no value of its own: alone, the others need not fit.
    singles = [{**settings, key: value} for key, values in swept.items() for value in values] or [settings]
    for chosen in singles:
        overrides = {key: (value, "--set") for key, value in chosen.items()}
        mine = {key: value for key, value in overrides.items() if not key.startswith("system.")}
        if "." not in workload:
            choose(WorkloadFile(find("workloads", workload)), options["preset"], mine)  # type: ignore[arg-type]
        if "." not in system:
            theirs = {key[len("system.") :]: value for key, value in overrides.items() if key not in mine}
            choose_system(system, theirs)


def test_every_command_has_a_section() -> None:
    headings = re.findall(r"^#+ (dlbench.*)$", prose(DOCS / "cli.md"), re.MULTILINE)
    wanted = ["dlbench", *(" ".join(("dlbench", *path)) for path, _ in reference.commands())]
    assert headings == wanted


def test_the_section_of_a_command_lists_all_of_its_options_and_no_other() -> None:
    text = prose(DOCS / "cli.md")
    for path, command in reference.commands():
        section = re.split(r"^#+ ", text.split(f"# {' '.join(('dlbench', *path))}\n")[1], flags=re.MULTILINE)[0]
        listed = re.findall(r"^- `(-[^` ]+)", section, re.MULTILINE)
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert sorted(listed) == sorted(one.opts[0] for one in options), path


@page_by_name
def test_commands_in_the_text_exist_with_their_options(page: Path) -> None:
    for span in quoted(page):
        if not span.startswith("dlbench "):
            continue
        words = tuple(word for word in span.split()[1:] if word not in ("...", "|"))
        command, rest = command_of(words)
        # Of a group, `dlbench project --set`, the options of its commands.
        parameters = [param for one in (command, *getattr(command, "commands", {}).values()) for param in one.params]
        known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help"}
        wrong = [word for word in rest if word.startswith("-") and word.split("=")[0] not in known]
        assert not wrong, f"{span}: {wrong}"


@page_by_name
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [span for span in quoted(page) if span.startswith("make ")] + list(shell_lines(page))
    wrong = [line for line in named if (match := re.match(r"make ([a-z-]+)", line)) and match[1] not in targets]
    assert wrong == []


# --- keys -------------------------------------------------------------------------------------------------------------


def known_keys(model: type[BaseModel], path: list[str]) -> set[str]:
    branches = [model]
    for part in path:
        annotations = [b.model_fields[part].annotation for b in branches if part in b.model_fields]
        # No field of that name: a key of a mapping, whose values are the branches already.
        branches = [m for annotation in annotations for m in models_in(annotation)] if annotations else branches
    return {name for branch in branches for name in branch.model_fields}


def is_key(dotted: str) -> bool:
    """Whether `--set` or a system file knows the key."""
    *path, last = dotted.split(".")
    for model, parts in (
        (Choices, path),
        (SystemSpec, path),
        (SystemSpec, path[1:] if path[:1] == ["system"] else None),
    ):
        if parts is not None and last in known_keys(model, parts):
            return True
    # A mapping of a system file takes names of its own.
    return ".".join(path).removeprefix("system.") in ("launch.environment", "peak_tflops")


def is_name_of_code(dotted: str) -> bool:
    """Whether it is a module of dlbench, with or without `dlbench.`, or something that a module defines."""
    path = ROOT / "dlbench" / Path(*dotted.removeprefix("dlbench.").split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and re.search(rf"^(def|class) {path.name}\b", module.read_text("utf-8"), re.M) is not None


def recorded_settings() -> set[str]:
    """Keys that engines and networks put into records besides those of the plan: the first words of rows of
    `settings_of`, and the keys of `Setting`.
    """
    folders = (ROOT / "dlbench" / "node" / name for name in ("sync", "models"))
    text = "\n".join(source.read_text(encoding="utf-8") for folder in folders for source in folder.rglob("*.py"))
    return set(re.findall(r'(?:\(|\bkey=|\bkey, \w+ = )"([a-z_.]+)", ', text))


ROOTS = {*Choices.model_fields, *SystemSpec.model_fields, "system"} - {"name", "title", "notice", "python", "about"}


@page_by_name
def test_keys_in_the_text_exist(page: Path) -> None:
    wrong = []
    for span in quoted(page) if page.name != "CHANGELOG.md" else ():  # which names what is gone
        match = re.match(r"([a-z_]+(?:\.[a-zA-Z_]+)+)(?::.*|=.*)?$", span)
        if (
            match is None
            or match[1].split(".")[0] not in ROOTS
            or match[1].endswith((".conf", ".log", ".py", ".sh", ".yaml", ".md"))
        ):
            continue
        if not (is_key(match[1]) or is_name_of_code(match[1]) or match[1] in recorded_settings()):
            wrong.append(span)
    assert wrong == []


def yaml_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match["language"] == "yaml":
                yield page.name, match["body"]


@pytest.mark.parametrize(("page", "body"), [pytest.param(*block, id=block[0]) for block in yaml_blocks()])
def test_yaml_examples_are_valid(page: str, body: str, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(body, encoding="utf-8")
    if "format: dlbench.system" in body:
        choose_system(str(path), {})
        return
    if body.startswith("kind: "):
        read_topology(path)
        return
    if "format: dlbench.anchors" in body:
        AnchorFile.model_validate(read_yaml(path))
        return
    if body.startswith("ladder:"):
        Ladder.model_validate(read_yaml(path))
        return
    file = WorkloadFile(path)
    for preset in file.presets:
        choose(file, preset, {})


# --- facts that stand in the text -------------------------------------------------------------------------------------


def test_every_file_of_a_run_is_described() -> None:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    folder = RunFolder(Path("run"))
    files = [getattr(folder, name) for name, value in vars(RunFolder).items() if isinstance(value, Named)]
    files += [getattr(folder, name)(0) for name, value in vars(RunFolder).items() if isinstance(value, Numbered)]
    files.append(folder.checkpoint(0))
    names = [path.relative_to(folder.path).as_posix().replace("0000", "NNNN") for path in files]
    names = [f"{name}/step-NNNNNNNN.safetensors" if name == "checkpoints" else name for name in names]
    rows = re.findall(r"^\| `([^`]+)` \|", text.split("## The folder")[1].split("\n## ")[0], re.MULTILINE)
    assert set(rows) == {*names, "launch.log", "slurm-<job>.out"}


@pytest.mark.parametrize(
    ("source", "pattern", "page"),
    [
        ("dlbench/views/doubts.py", r'(?:code=|yield \(?\s*)"([a-z-]+)"', "measuring.md"),
        ("dlbench/analysis/environments.py", r"^LOAD_CODES: tuple\[str, str\] = (.*)$", "measuring.md"),
        ("dlbench/node/training/checks.py", r'(?:name=|_same\()"([a-z ]+)"', "formats.md"),
        ("dlbench/records/rows/steps.py", r"^PHASES = (.*)$", "measuring.md"),
        ("dlbench/node/models/build.py", r"^MetricName = Literal\[(.*)\]$", "workloads.md"),
        ("dlbench/datasets/volumes.py", r"^CONTAINERS: .* = \{(.*)\}$", "formats.md"),
        ("dlbench/datasets/kinds.py", r'^    manifest_kind = "([a-z-]+)"$', "formats.md"),
        ("reports/projection.yaml", r"^  ([RF][0-9]+):", "projection.md"),
    ],
    ids=["doubts", "load", "checks", "phases", "metrics", "containers", "manifest-kinds", "codes"],
)
def test_what_the_code_names_is_explained(source: str, pattern: str, page: str) -> None:
    found = re.findall(pattern, (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for text in found for name in (re.findall(r'"([\w-]+)"', text) or [text])}
    if source.endswith("volumes.py"):
        names = {f"{name}-density" for name in names}
    assert len(names) >= 2
    text = (DOCS / page).read_text(encoding="utf-8")
    assert sorted(name for name in names if f"`{name}`" not in text) == []
