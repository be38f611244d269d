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

from dlbench.datasets.making.production import Part
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.errors import EnvironmentLacksError, UserError

Numbers = NDArray[np.int64]
_RULE = re.compile(r"^[\s*=~^\-_.+|]*$")
_SENTENCE_END = re.compile(r"(?<=[.!?:]) +(?=[A-Z\"'(\[])")


def topic_sentences(topic: str) -> list[str]:
    """The sentences of one topic: paragraphs unwrapped and split, heading rules and blank lines dropped."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = [line.strip() for line in paragraph.splitlines() if not _RULE.match(line)]
        if lines:
            sentences += [part for part in _SENTENCE_END.split(" ".join(lines)) if part]
    return sentences


_LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"),
    *("tkinter", "idlelib", "turtledemo", "turtle.py", "lib2to3", "distutils", "ensurepip", "config"),
}
_LEAST_SENTENCES = 3  # shorter documents are left out: no next sentence could be drawn
_LONG = 40  # characters. A sentence that long in a training and a validation document would give the latter away.
_LEAST_MODULES = 100  # fewer modules with docstrings than this, and the sources are not there
NOTICE = """\
The text is the reference topics of Python {version} and the docstrings of its standard library, unwrapped to one
sentence a line, with sections in another order where it repeats. Copyright Python Software Foundation. Used under the
Python Software Foundation License Version 2 (https://docs.python.org/3/license.html); examples are also under the
Zero-Clause BSD License.
"""


@dataclass(frozen=True)
class Document:
    """One document of the embedded text."""

    name: str
    sentences: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in a text file: a sentence a line, and the blank line behind the document."""
        return sum(len(sentence.encode("utf-8")) + 1 for sentence in self.sentences) + 1


def python_version() -> str:
    """The version of the running Python, such as 3.11.7."""
    return ".".join(map(str, sys.version_info[:3]))


@lru_cache(maxsize=1)
def python_documents() -> tuple[Document, ...]:
    """All documents of the running Python, sorted by name; parsed once a process, some seconds.

    Raises EnvironmentLacksError: the sources of the standard library are not there.
    """
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    found = [Document(f"topic/{name}", tuple(topic_sentences(text))) for name, text in sorted(topics.items())]
    modules = 0
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        # Debian and others put a config-3.11-... folder next to the modules.
        if _LEFT_OUT.isdisjoint(part.split("-")[0] if part.startswith("config-") else part for part in parts):
            sentences = _docstring_sentences(path)
            modules += bool(sentences)
            found.append(Document(f"module/{'/'.join(parts)}", tuple(sentences)))
    if modules < _LEAST_MODULES:
        raise EnvironmentLacksError(
            f"the sources of Python's standard library are not in {library} ({modules} modules with docstrings); use a "
            "Python that has them, or give a text of your own"
        )
    return _without_repeats(sorted(found, key=lambda d: d.name))


def _without_repeats(found: list[Document]) -> tuple[Document, ...]:
    """Long sentences stay where they stand first: overridden methods repeat docstrings of other modules."""
    seen: set[str] = set()
    kept = []
    for document in found:
        sentences = tuple(s for s in document.sentences if len(s) < _LONG or s not in seen)
        seen.update(sentences)
        if len(sentences) >= _LEAST_SENTENCES:
            kept.append(Document(document.name, sentences))
    return tuple(kept)


def documents_sha256(documents: tuple[Document, ...]) -> str:
    """A digest of names and sentences."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update("\n".join([document.name, *document.sentences, "", ""]).encode("utf-8"))
    return digest.hexdigest()


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


TRAIN: Split = "train"
VALIDATION: Split = "validation"
SPLITS: tuple[Split, ...] = (TRAIN, VALIDATION)
# Second words of seeds, so that no two purposes draw the same numbers.
_DEALING, _PASS = 1, 2
_LONGEST_SECTION = 16  # Sentences that stay together in a redrawn document; about three samples of 128 tokens.
_LEAST_SECTION = 4


def split_documents(num_documents: int, validation_share: float, seed: int) -> dict[Split, Numbers]:
    """Deals whole documents out to `train` and `validation`, in an order drawn from the seed.

    Each split has two documents or more, because a random next sentence needs another document.
    """
    wanted = max(2, round(num_documents * validation_share))
    order = np.random.default_rng([seed, _DEALING]).permutation(num_documents)
    return {TRAIN: order[wanted:], VALIDATION: order[:wanted]}


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """The embedded text as UTF-8 files, one sentence a line, a blank line between documents.

    The first pass over the documents writes them as they are. Every later pass takes them in another order and cuts
    each into sections of 4 to 16 sentences, which follow each other in another order, too: the words are those of the
    first pass, their neighbourhood beyond a section is not. So there is no more text in it than
    `distinct_bytes` says, whatever the size.

    Validation documents are written once, and never in training.
    """

    num_bytes: int | None = None  # of the training files together, reached with whole documents; none: one pass
    seed: int = 0
    validation_share: float = 0.1  # of the documents
    passes_per_file: int = 16  # passes that share a file: 23 MB with CPython 3.11
    kind: str = "text"

    @property
    def distinct_bytes(self) -> int:
        """The training text before it repeats, bytes."""
        documents = python_documents()
        total: int = sum(documents[i].num_bytes for i in self._split[TRAIN].tolist())
        return total

    @property
    def estimated_bytes(self) -> int:
        documents = python_documents()
        validation: int = sum(documents[i].num_bytes for i in self._split[VALIDATION].tolist())
        return self._num_bytes + validation

    @property
    def made_with(self) -> MadeWith:
        documents = python_documents()
        return {
            "text": "embedded",
            "text_sha256": documents_sha256(documents),
            "python": python_version(),
            "num_bytes": self._num_bytes,
            "seed": self.seed,
            "validation_share": self.validation_share,
            "passes_per_file": self.passes_per_file,
        }

    def parts(self) -> Sequence[Part]:
        """Files of documents, numbered within their split over all passes. Raises UserError: the size is 0."""
        if self._num_bytes < 1:
            raise UserError("a text needs at least one byte")
        documents = len(self._split[TRAIN])
        whole, rest = divmod(self._num_bytes, self.distinct_bytes)
        total = whole * documents + self._documents_for(whole, rest)
        each = self.passes_per_file * documents
        parts = [
            Part(name=f"{TRAIN}/text-{i:05d}.txt", split=TRAIN, first=first, count=min(each, total - first))
            for i, first in enumerate(range(0, total, each))
        ]
        held_out = len(self._split[VALIDATION])
        return [*parts, Part(name=f"{VALIDATION}/text-00000.txt", split=VALIDATION, first=0, count=held_out)]

    def write(self, part: Part, path: Path) -> None:
        each = len(self._split[part.split])
        with path.open("x", encoding="utf-8", newline="\n") as file:
            stop = part.first + part.count
            for number in range(part.first // each, -(-stop // each)):
                chosen = self._pass(part.split, number)
                for document in chosen[max(0, part.first - number * each) : stop - number * each]:
                    file.write("".join(f"{sentence}\n" for sentence in document) + "\n")

    def finish(self, folder: Path) -> None:
        # Not *.txt, or it would be read as text.
        (folder / "LICENSES").write_text(NOTICE.format(version=python_version()), encoding="utf-8")

    @property
    def _split(self) -> dict[Split, Numbers]:
        return split_documents(len(python_documents()), self.validation_share, self.seed)

    @property
    def _num_bytes(self) -> int:
        return self.distinct_bytes if self.num_bytes is None else self.num_bytes

    def _documents_for(self, number: int, wanted: int) -> int:
        """How many documents of a pass reach `wanted` bytes."""
        count = 0
        for sentences in self._pass(TRAIN, number) if wanted else []:
            count += 1
            wanted -= Document("", tuple(sentences)).num_bytes
            if wanted <= 0:
                break
        return count

    def _pass(self, split: Split, number: int) -> list[Sequence[str]]:
        documents, mine = python_documents(), self._split[split]
        if number == 0:
            return [documents[i].sentences for i in mine.tolist()]
        generator = np.random.default_rng([self.seed, _PASS, SPLITS.index(split), number])
        return [_shuffled_sections(documents[i].sentences, generator) for i in generator.permutation(mine).tolist()]


def _shuffled_sections(sentences: Sequence[str], generator: np.random.Generator) -> list[str]:
    sections, start = [], 0
    while start < len(sentences):
        stop = start + int(generator.integers(_LEAST_SECTION, _LONGEST_SECTION + 1))
        sections.append(sentences[start:stop])
        start = stop
    return [sentence for i in generator.permutation(len(sections)).tolist() for sentence in sections[i]]
