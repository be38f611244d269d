"""Makes a text data set from the documentation of the running Python.

The text is Python's reference topics and the docstrings of its standard library, parsed from the sources. Left out are
tests, modules that distributions package separately (tkinter, idlelib, lib2to3, distutils, turtle, ensurepip),
`encodings`, whose modules all have the same text, and paragraphs with doctests. There is one document per topic
(`topic/for`) or module (`module/asyncio/queues.py`). Long sentences occur only once. With CPython 3.11.7: 73 topics and
306 modules, 1.57 MB, 20,148 sentences, 402,625 tokens of the vocabulary english-4096, 5.1 % of them the most frequent
one (`.`), 0.01 % [UNK]. The text differs between Python versions. Copyright Python Software Foundation, PSF License
Version 2.
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
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.making.production import DatasetPart
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.errors import EnvironmentLacksError

Numbers = NDArray[np.int64]
_RULE = re.compile(r"^[\s*=~^\-_.+|]*$")
_DOCTEST = re.compile(r"^\s*>>>", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:]) +(?=[A-Z\"'(\[])")
_LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"),
    *("tkinter", "idlelib", "turtledemo", "turtle.py", "lib2to3", "distutils", "ensurepip", "config"),
}
_MIN_SENTENCES = 3  # shorter documents are left out: no next sentence could be drawn
_LONG = 40  # characters from which a sentence may occur only once, so that validation text is not in the training text
_MIN_MODULES = 100  # with fewer modules that have docstrings, the sources are not installed
NOTICE = """\
The text is the reference topics of Python {version} and the docstrings of its standard library, unwrapped to one
sentence a line. Copyright Python Software Foundation. Used under the Python Software Foundation License Version 2
(https://docs.python.org/3/license.html); examples are also under the Zero-Clause BSD License.
"""
_DEALING = 1  # added to the seed


def topic_sentences(topic: str) -> list[str]:
    """Returns the sentences of one topic, without the rules of headings and blank lines."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = [line.strip() for line in paragraph.splitlines() if not _RULE.match(line)]
        if lines:
            sentences += [part for part in _SENTENCE_END.split(" ".join(lines)) if part]
    return sentences


@dataclass(frozen=True)
class TextDocument:
    """One document of the text."""

    name: str
    sentences: tuple[str, ...]


def python_version() -> str:
    """Returns the version of the running Python, such as 3.11.7."""
    return ".".join(map(str, sys.version_info[:3]))


@lru_cache(maxsize=1)
def python_documents() -> tuple[TextDocument, ...]:
    """Returns all documents of the running Python, sorted by name; parsed once per process, in some seconds."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    documents = [TextDocument(f"topic/{name}", tuple(topic_sentences(text))) for name, text in sorted(topics.items())]
    num_modules = 0
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        # Debian and others put a config-3.11-... folder next to the modules.
        names = [re.sub(r"^config-.*", "config", part) for part in parts]
        if _LEFT_OUT.isdisjoint(names):
            sentences = _docstring_sentences(path)
            if sentences:
                num_modules += 1
            documents.append(TextDocument(f"module/{'/'.join(parts)}", tuple(sentences)))
    if num_modules < _MIN_MODULES:
        raise EnvironmentLacksError(
            f"the sources of Python's standard library are not in {library} ({num_modules} modules with docstrings); "
            "use a Python that has them, or give your own text"
        )
    return _without_repeats(sorted(documents, key=attrgetter("name")))


def _without_repeats(documents: list[TextDocument]) -> tuple[TextDocument, ...]:
    """Keeps only the first occurrence of long sentences: overridden methods repeat docstrings of other modules."""
    earlier_sentences: set[str] = set()
    unique_documents = []
    for document in documents:
        sentences = tuple(s for s in document.sentences if len(s) < _LONG or s not in earlier_sentences)
        earlier_sentences.update(sentences)
        if len(sentences) >= _MIN_SENTENCES:
            unique_documents.append(TextDocument(document.name, sentences))
    return tuple(unique_documents)


def _docstring_sentences(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # some libraries contain templates and deliberately wrong files
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    # In the order of the source: ast.walk goes level by level, and a module has no line number.
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    sentences = []
    for node in nodes:
        sentences += topic_sentences(_prose(ast.get_docstring(node) or ""))
    return sentences


def _prose(docstring: str) -> str:
    """Returns a docstring without doctests and mark-up."""
    paragraphs = re.split(r"\n\s*\n", docstring)
    text = "\n\n".join(paragraph for paragraph in paragraphs if not _DOCTEST.search(paragraph))
    # A few docstrings have characters that UTF-8 cannot encode.
    return text.replace("``", "").replace("`", "'").encode("utf-8", "ignore").decode("utf-8")


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """The text as UTF-8 files, one sentence per line, a blank line between documents."""

    seed: int = 0
    validation_share: float = 0.1  # share of the documents
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
        # Not *.txt, because that would be read as text.
        (folder / "LICENSES").write_text(NOTICE.format(version=python_version()), encoding="utf-8")

    @property
    def _split(self) -> dict[Split, Numbers]:
        """The numbers of the documents of each split, in random order."""
        num_documents = len(python_documents())
        # At least two, because a random next sentence needs another document.
        num_validation = max(2, round(num_documents * self.validation_share))
        order = np.random.default_rng([self.seed, _DEALING]).permutation(num_documents)
        return {"train": order[num_validation:], "validation": order[:num_validation]}
