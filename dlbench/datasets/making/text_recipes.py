"""English that every CPython carries, as a data set.

The text is the reference topics of the running Python and the docstrings of its standard library. The docstrings are
parsed out of the sources of the running Python; nothing is imported. Left out are tests, what distributions ship apart
(tkinter, idlelib, lib2to3, distutils, turtle, ensurepip), and `encodings`, whose modules all say the same. Paragraphs
with doctests are dropped, as code is no English. One document per topic (`topic/for`) or module
(`module/asyncio/queues.py`); a module's docstrings stand in the order of its source. Long sentences stand once.

With CPython 3.11.7: 73 topics and 306 modules, 1.57 MB, 20,148 sentences, 402,625 tokens of the vocabulary
english-4096, 5.1 % of them the most frequent one (`.`), 0.01 % [UNK]. The text differs between Python versions.
Copyright Python Software Foundation, PSF License Version 2.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.making.production import DatasetPart
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.errors import EnvironmentLacksError

Numbers = NDArray[np.int64]
_RULE = re.compile(r"^[\s*=~^\-_.+|]*$")
_SENTENCE_END = re.compile(r"(?<=[.!?:]) +(?=[A-Z\"'(\[])")
_LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"),
    *("tkinter", "idlelib", "turtledemo", "turtle.py", "lib2to3", "distutils", "ensurepip", "config"),
}
_LEAST_SENTENCES = 3  # shorter documents are left out: no next sentence could be drawn
_LONG = 40  # characters. A sentence that long in a training and a validation document would give the latter away.
_LEAST_MODULES = 100  # fewer modules with docstrings than this, and the sources are not there
NOTICE = """\
The text is the reference topics of Python {version} and the docstrings of its standard library, unwrapped to one
sentence a line. Copyright Python Software Foundation. Used under the Python Software Foundation License Version 2
(https://docs.python.org/3/license.html); examples are also under the Zero-Clause BSD License.
"""
_DEALING = 1  # with the seed


def topic_sentences(topic: str) -> list[str]:
    """The sentences of one topic: paragraphs unwrapped and split, heading rules and blank lines dropped."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = [line.strip() for line in paragraph.splitlines() if not _RULE.match(line)]
        if lines:
            sentences += [part for part in _SENTENCE_END.split(" ".join(lines)) if part]
    return sentences


@dataclass(frozen=True)
class TextDocument:
    """One document of the embedded text."""

    name: str
    sentences: tuple[str, ...]


def python_version() -> str:
    """The version of the running Python, such as 3.11.7."""
    return ".".join(map(str, sys.version_info[:3]))


@lru_cache(maxsize=1)
def python_documents() -> tuple[TextDocument, ...]:
    """All documents of the running Python, sorted by name; parsed once a process, some seconds."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    found = [TextDocument(f"topic/{name}", tuple(topic_sentences(text))) for name, text in sorted(topics.items())]
    modules = 0
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        # Debian and others put a config-3.11-... folder next to the modules.
        if _LEFT_OUT.isdisjoint(part.split("-")[0] if part.startswith("config-") else part for part in parts):
            sentences = _docstring_sentences(path)
            modules += bool(sentences)
            found.append(TextDocument(f"module/{'/'.join(parts)}", tuple(sentences)))
    if modules < _LEAST_MODULES:
        raise EnvironmentLacksError(
            f"the sources of Python's standard library are not in {library} ({modules} modules with docstrings); use a "
            "Python that has them, or give a text of your own"
        )
    return _without_repeats(sorted(found, key=lambda d: d.name))


def _without_repeats(found: list[TextDocument]) -> tuple[TextDocument, ...]:
    """Long sentences stay where they stand first: overridden methods repeat docstrings of other modules."""
    seen: set[str] = set()
    kept = []
    for document in found:
        sentences = tuple(s for s in document.sentences if len(s) < _LONG or s not in seen)
        seen.update(sentences)
        if len(sentences) >= _LEAST_SENTENCES:
            kept.append(TextDocument(document.name, sentences))
    return tuple(kept)


def _docstring_sentences(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # some libraries carry templates and deliberately wrong files
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    # ast.walk goes level by level; the source has methods behind their class.
    nodes.sort(key=lambda node: 0 if isinstance(node, ast.Module) else node.lineno)
    return [sentence for node in nodes for sentence in topic_sentences(_prose(ast.get_docstring(node) or ""))]


def _prose(docstring: str) -> str:
    paragraphs = re.split(r"\n\s*\n", docstring)
    text = "\n\n".join(p for p in paragraphs if not any(line.lstrip().startswith(">>>") for line in p.splitlines()))
    # Backquotes are mark-up here. Characters that UTF-8 cannot hold stand in a few docstrings as escapes.
    return text.replace("``", "").replace("`", "'").encode("utf-8", "ignore").decode("utf-8")


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """The embedded text as UTF-8 files, one sentence a line, a blank line between documents, once."""

    seed: int = 0
    validation_share: float = 0.1  # of the documents
    kind: str = "text"

    @property
    def made_with(self) -> MadeWith:
        digest = hashlib.sha256()  # of names and sentences
        for document in python_documents():
            digest.update("\n".join([document.name, *document.sentences, "", ""]).encode("utf-8"))
        return {
            "text": "embedded",
            "text_sha256": digest.hexdigest(),
            "python": python_version(),
            "seed": self.seed,
            "validation_share": self.validation_share,
        }

    def parts(self) -> Sequence[DatasetPart]:
        return [
            DatasetPart(name=f"{split}/text-00000.txt", split=split, first=0, count=len(numbers))
            for split, numbers in self._split.items()
        ]

    def write(self, part: DatasetPart, path: Path) -> None:
        documents = python_documents()
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for number in self._split[part.split].tolist():
                file.write("".join(f"{sentence}\n" for sentence in documents[number].sentences) + "\n")

    def finish(self, folder: Path) -> None:
        # Not *.txt, or it would be read as text.
        (folder / "LICENSES").write_text(NOTICE.format(version=python_version()), encoding="utf-8")

    @property
    def _split(self) -> dict[Split, Numbers]:
        """Whole documents are dealt out, in an order drawn from the seed."""
        num_documents = len(python_documents())
        # At least two of each split, because a random next sentence needs another document.
        wanted = max(2, round(num_documents * self.validation_share))
        order = np.random.default_rng([self.seed, _DEALING]).permutation(num_documents)
        return {"train": order[wanted:], "validation": order[:wanted]}
