"""Help, messages, reports and docs are plain English: they avoid words that readers had to read twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests import reference
from tests.support.paths import ROOT

REFUSED = {
    r"told(?! apart)": "reported, measured, set",
    r"anew": "again",
    r"beside": "next to, in addition to",
    r"in (?:its|their) stead": "instead",
    r"(?:for )?want of": "without, missing",
    r"noughts?": "zero",
    r"there and back": "in alternating order",
    r"between two looks": "polling interval",
    r"as it comes": "unchanged",
    r"said no to": "not supported",
    r"now and then": "sometimes, every N steps",
    r"what (?:comes|becomes) of": "the result of",
    r"(?:goes|go|gone|went) on with": "continues with",
    r"nothing more is to": "has finished",
    r"unlike many": "different numbers of",
    r"of one's own": "separate",
    r"by and by": "gradually",
    r"the like of": "such as",
    r"is to hear": "is notified",
    r"for good": "permanently",
}
"""Words of an earlier dialect, each with what the field says."""

PATTERN = re.compile(r"\b(?:" + "|".join(REFUSED) + r")\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Returns the docstrings of a module; only those of click commands are printed, as help."""
    constants: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                constants.add(first.value)
    return constants


def printed_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the string constants of a module that have a blank, as sentences do, with their lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in skipped:
            yield node.lineno, node.value


def refused_words(text: str) -> list[str]:
    return [match[0] for match in PATTERN.finditer(text)]


def test_help_texts_hold_no_word_of_the_dialect() -> None:
    texts = {path: command.get_help(click.Context(command)) for path, command in reference.commands()}
    assert len(texts) > 40
    assert {path: words for path, text in texts.items() if (words := refused_words(text))} == {}


def test_printed_texts_hold_no_word_of_the_dialect() -> None:
    modules = sorted((ROOT / "dlbench").rglob("*.py"))
    assert len(modules) > 350
    refused = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in modules
        for line, text in printed_texts(path)
        if (words := refused_words(text))
    ]
    assert refused == []


@pytest.mark.parametrize("folder", ["reports", "slurm", "workloads", "systems", "patches"])
def test_templates_and_bundled_files_hold_no_word_of_the_dialect(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".j2", ".yaml", ".js", ".html", ".sh")]
    assert files
    assert {str(path): words for path in files if (words := refused_words(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "page", [*reference.PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_docs_hold_no_word_of_the_dialect(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {words}" for number, line in enumerate(lines, 1) if (words := refused_words(line))] == []
