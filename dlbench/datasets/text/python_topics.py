"""The reference topics that every CPython carries (`pydoc_data.topics`) become English text as text_corpus reads it.

One document a topic, one sentence a line as far as simple rules find its end, a blank line between documents. The text
differs between Python versions; it is documentation of Python, so its English is narrow.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FILE = "python-topics.txt"
_RULE = re.compile(r"^[\s*=~^\-_.+|]*$")
_SENTENCE_END = re.compile(r"(?<=[.!?:]) +(?=[A-Z\"'(\[])")
_NOTICE = """\
python-topics.txt is the text of the reference topics of Python {version}, unwrapped to one sentence a line.
Copyright Python Software Foundation. Used under the Python Software Foundation License Version 2
(https://docs.python.org/3/license.html); its examples are also under the Zero-Clause BSD License.
"""


def topic_sentences(topic: str) -> list[str]:
    """The sentences of one topic: paragraphs unwrapped and split, heading rules and blank lines dropped."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", topic):
        lines = [line.strip() for line in paragraph.splitlines() if not _RULE.match(line)]
        if lines:
            sentences += [part for part in _SENTENCE_END.split(" ".join(lines)) if part]
    return sentences


def named_topics() -> list[tuple[str, str]]:
    """Names and texts of all topics of the running Python, sorted by name."""
    from pydoc_data.topics import topics

    return sorted(topics.items())


def python_topics() -> list[list[str]]:
    """All topics of the running Python as lists of sentences, sorted by topic name."""
    return [topic_sentences(text) for _name, text in named_topics()]


def write_python_topics(folder: Path) -> dict[str, int]:
    """Writes the text and its licence into an existing folder; returns counts."""
    documents = [sentences for sentences in python_topics() if sentences]
    text = "\n".join("".join(f"{sentence}\n" for sentence in document) for document in documents)
    (folder / FILE).write_text(text, encoding="utf-8")
    version = ".".join(map(str, sys.version_info[:3]))
    # Not *.txt, or it would be read as text.
    (folder / "LICENSES").write_text(_NOTICE.format(version=version), encoding="utf-8")
    return {"documents": len(documents), "sentences": sum(map(len, documents))}
