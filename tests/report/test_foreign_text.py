"""Foreign text stays text: each command that prints what runs say of themselves, in each format it can write. Names,
hosts, errors, notes and keys of all runs hold markup, terminal codes, line ends and the start of a formula.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dlbench.cli import cli
from dlbench.errors import DlbenchError
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts.launch import render_job
from dlbench.records.folder import RunFolder
from dlbench.records.scan import scan
from dlbench.report import wording
from dlbench.report.document import Document, Section
from dlbench.report.formats import data, html, markdown, terminal
from dlbench.report.table import text_sheet
from dlbench.views.scaling_report import assemble, document_of
from tests.support.browser import assert_well_formed
from tests.support.foreign_text import (
    HOSTILE_NAME,
    hostile_plan,
    write_hostile,
    write_hostile_collectives,
    write_hostile_nights,
)
from tests.support.run_factory import plans

BAD_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
MARKER = "pwned"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    write_hostile(root / "runs")
    write_hostile_collectives(root / "collectives")
    write_hostile_nights(root / HOSTILE_NAME, 16)
    imported = CliRunner().invoke(cli, ["history", "import", str(root / HOSTILE_NAME), "--store", str(root / "store")])
    assert imported.exit_code == 0, imported.output
    assert_harmless(imported.output)
    assert MARKER in imported.output
    return root


def assert_harmless(text: str) -> None:
    """No character moves a cursor, turns the order of a line round or ends a line unseen."""
    assert [c for c in text if c != "\n" and unicodedata.category(c) in BAD_CATEGORIES] == []


class Elements(HTMLParser):
    """Elements and links of HTML, without what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


def check_text(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80


def check_html(text: str) -> None:
    assert_well_formed(text)
    assert len(re.findall(r"<script[ >]", text)) <= 3
    assert "img" not in Elements(text).tags
    specs = text.partition('<script type="application/json" id="chart-specs">')[2].partition("</script>")[0]
    assert not set(specs) & set("<>&")


def check_markdown(text: str) -> None:
    """As GitHub would show it: no element but those of Markdown itself, and no link."""
    reader = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    shown = reader.MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert not Elements(shown).tags & {"img", "script", "svg", "a"}


def check_csv(text: str) -> None:
    """No cell is a formula."""
    for row in csv.reader(io.StringIO(text)):
        for value in row:
            assert not value.startswith(("=", "+", "-", "@")) or re.fullmatch(r"-[\d.e+-]+|-inf", value), value


def check_json(text: str) -> None:
    """Texts are as harmless as on the page."""
    for value in strings(json.loads(text)):
        assert_harmless(value)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def check_xml(text: str) -> None:
    assert {node.tag for node in ElementTree.fromstring(text).iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "skipped", "error", "system-out", "properties", "property")
    }


def check_metrics(text: str) -> None:
    sample = re.compile(r'dlbench_\w+(\{(\w+="(\\.|[^"\\])*",?)*\})? [-+.\deNaInf]+')
    for line in text.splitlines():
        assert line.startswith("# ") or sample.fullmatch(line), line


def check_mllog(text: str) -> None:
    for line in text.splitlines():
        assert line.startswith(":::MLLOG ")
        json.loads(line.removeprefix(":::MLLOG "))


CHECKS: dict[str, Callable[[str], object]] = {
    "txt": check_text,
    "html": check_html,
    "md": check_markdown,
    "csv": check_csv,
    "txt.csv": check_csv,  # On standard output.
    "json": check_json,
    "raw.json": json.loads,  # For programs that show it themselves; no text ends its string.
    "xml": check_xml,
    "prom": check_metrics,
    "log": check_mllog,
}

COMMANDS = {
    "report RUNS": "txt html md json",
    "compare NIGHTS NIGHTS --where-a tag.half=old --where-b tag.half=new": "txt html md json xml",
    "diagnose --full RUNS": "txt json",
    "project runs RUNS --to 8": "txt html md json",
    "history list --store STORE": "txt",
    "history list --store STORE --format csv": "txt.csv",
    "history trends --store STORE": "txt html md json",
    "history trends --store STORE --table nights": "csv",
    "history slow-nodes --store STORE": "json",
    "comm report COLLECTIVES": "txt html md json",
    "comm report COLLECTIVES --table points": "csv",
    "export metrics RUNS": "prom",
    "export mllog TRAINED": "log",
    "export system NIGHT": "raw.json",
    "trace WATCHED": "raw.json",
}
WITHOUT_WORDS = {("export metrics RUNS", "prom")}
"""Nothing that is printed there can be other than a plain name."""


@pytest.mark.parametrize(
    ("command", "suffix"), [(command, suffix) for command, suffixes in COMMANDS.items() for suffix in suffixes.split()]
)
def test_foreign_text_stays_text(folder: Path, tmp_path: Path, command: str, suffix: str) -> None:
    paths = {
        "RUNS": folder / "runs",
        "NIGHTS": folder / HOSTILE_NAME,
        "STORE": folder / "store",
        "COLLECTIVES": folder / "collectives",
        "TRAINED": folder / "runs" / "s1-learner-tiny-p00-n0001-k00",
        "WATCHED": folder / "runs" / "s1-sample-tiny-p01-n0002-k00",
        "NIGHT": folder / HOSTILE_NAME / "h0000-sample-tiny-p00-n0002-k00",
    }
    words = [str(paths.get(word, word)) for word in command.split()]
    if suffix.startswith("txt"):
        result = CliRunner().invoke(cli, words)
        text = result.stdout
    else:
        output = tmp_path / f"out.{suffix}"
        result = CliRunner().invoke(cli, [*words, "-o", str(output)])
        text = output.read_text(encoding="utf-8")
    assert isinstance(result.exception, SystemExit | DlbenchError | None), result.exception
    assert MARKER in text or (command, suffix) in WITHOUT_WORDS
    if suffix == "html":
        # Scripts of a page are dlbench's own; they hold no other text than the specifications of charts.
        text = re.sub(r"<script>.*?</script>", "<script></script>", text, flags=re.DOTALL)
    if suffix != "raw.json":
        assert_harmless(text)
    CHECKS[suffix](text)


def test_no_cell_of_any_table_is_a_formula(folder: Path) -> None:
    document = document_of(assemble(scan(folder / "runs")))
    texts = {name: data.to_csv(document, name) for name in document.tables()}
    assert sum(MARKER in text for text in texts.values()) >= 8
    for text in texts.values():
        assert_harmless(text)
        check_csv(text)


def test_comments_of_a_batch_script_stay_comments(folder: Path) -> None:
    plan = plans(system="example-gpu", launcher="srun-gloo", points=(4,), repeats=1, tags={"note": "HOSTILE"})[0]
    script = render_job(job_of([hostile_plan(plan)]), [RunFolder(Path("/scratch/runs") / plan.run_id)], "/opt/python")
    assert [line for line in script.splitlines() if MARKER in line and not line.startswith("# ")] == []
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


# What all formats ask of their texts


@given(st.text())
def test_cleaned_text_is_one_harmless_line(text: str) -> None:
    cleaned = wording.clean(text)
    assert not {unicodedata.category(c) for c in cleaned} & set(BAD_CATEGORIES)
    assert len(cleaned.splitlines()) <= 1
    cleaned.encode("utf-8")
    assert wording.clean(cleaned) == cleaned


@given(st.text())
def test_no_text_breaks_a_markdown_table(text: str) -> None:
    assert not re.search(r"(?<!\\)(\\\\)*[|<>`*]", markdown.escape(wording.clean(text)))


def test_writers_clean_what_came_in_another_way() -> None:
    """Sections clean what enters them; here texts are put behind their back, as a new kind of field would be."""
    bad = "a\x1b]0;owned\x07\u202eb\x9bc\ud800"
    section = Section(id="one", title="One", words=("a",), facts=(("name", "value"),), notes=("small",))
    sheet = text_sheet("t", "T", ("head",), (("cell",),))
    for name, value in {"words": (bad,), "facts": ((bad, bad),), "notes": (bad,), "title": bad}.items():
        object.__setattr__(section, name, value)
    object.__setattr__(sheet, "title", bad)
    object.__setattr__(section, "sheets", (sheet,))
    document = Document(title=bad, dlbench_version="1", sections=(section,), data={"key": bad})
    texts = {
        "text": terminal.to_text(document, full=True),
        "md": markdown.to_markdown(document),
        "json": data.to_json(document),
        "csv": data.write_table(("x",), [{"x": bad}]),
        "html": html._environment().from_string("{{ bad }}").render(bad=bad),
    }
    for name, text in texts.items():
        assert [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")] == [], name
        assert "a]0;ownedbc" in text.replace("\\", ""), name


def test_rich_reads_no_markup_and_passes_no_escapes() -> None:
    sink = io.StringIO()
    words = "[bold]x[/nonsense] [link=file:///]y[/link]"
    document = Document(title="T", sections=(Section(id="one", title="One", words=(words,)),), data={})
    terminal.show(document, Console(file=sink, width=80, force_terminal=False), full=True)
    assert words in sink.getvalue()
    assert "\x1b" not in sink.getvalue()
