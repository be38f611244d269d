"""English that every CPython carries, BERT samples, and WordPiece vocabularies as data sets.

The text is the reference topics of the running Python and the docstrings of its standard library. The docstrings are
parsed out of the sources of the running Python; nothing is imported. Left out are tests, what distributions ship apart
(tkinter, idlelib, lib2to3, distutils, turtle, ensurepip), and `encodings`, whose modules all say the same. Paragraphs
with doctests are dropped, as code is no English. One document per topic (`topic/for`) or module
(`module/asyncio/queues.py`); a module's docstrings stand in the order of its source. Long sentences stand once.

With CPython 3.11.7: 73 topics and 306 modules, 1.57 MB, 20,148 sentences, 402,625 tokens of the vocabulary
english-4096, 5.1 % of them the most frequent one (`.`), 0.01 % [UNK]. The text differs between Python versions.
Copyright Python Software Foundation, PSF License Version 2.

Vocabularies: training is not deterministic: two trainings on one text may differ in entries that are equally frequent,
and the library numbers entries as it meets them. So a vocabulary is trained once, kept, and never trained by a run or
overwritten. What can be fixed is: the five special tokens come first, then single characters, then longer entries, each
group with beginnings of words before continuations (##), sorted by length and code points. Equal entries thus have
equal ids. The order does not change how text is split (WordPiece takes the longest entry that fits).
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.making.production import Part
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.datasets.text.corpus import (
    MAX_BYTES,
    SPECIAL,
    UNKNOWN,
    TextCorpus,
    Vocabulary,
    load_vocabulary,
    read_corpus,
    read_documents,
    text_files,
    tokenise,
)
from dlbench.datasets.text.pretraining_hdf5 import write_samples
from dlbench.datasets.text.pretraining_samples import SampleMaker, SampleRule
from dlbench.errors import EnvironmentLacksError, UserError, refused
from dlbench.opening import read_bytes

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


EMBEDDED = "embedded"  # the text of `dlbench.datasets.making.text_recipes`, as a recipe's source
TRAIN: Split = "train"
VALIDATION: Split = "validation"
SPLITS: tuple[Split, ...] = (TRAIN, VALIDATION)
# Second words of seeds, so that no two purposes draw the same numbers. 3 and 4 are those of prepared samples.
_DEALING, _PASS = 1, 2
_LONGEST_SECTION = 16  # Sentences that stay together in a redrawn document; about three samples of 128 tokens.
_LEAST_SECTION = 4


def split_documents(num_documents: int, validation_share: float, seed: int) -> dict[Split, Numbers]:
    """Deals whole documents out to `train` and `validation`, in an order drawn from the seed.

    With a share above 0 each split has two documents or more, because a random next sentence needs another document.
    Raises UserError: the share is not in [0, 1), or there are too few documents.
    """
    if not 0 <= validation_share < 1:
        raise UserError(f"validation share {validation_share} is not from 0 up to, not including, 1")
    wanted = max(2, round(num_documents * validation_share)) if validation_share else 0
    if num_documents - wanted < 2:
        raise UserError(f"{num_documents} documents are too few for a validation share of {validation_share}")
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

    @property
    def kind(self) -> str:
        return "text"

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
            "text": EMBEDDED,
            "text_sha256": documents_sha256(documents),
            "python": python_version(),
            "num_bytes": self._num_bytes,
            "seed": self.seed,
            "validation_share": self.validation_share,
            "passes_per_file": self.passes_per_file,
        }

    def parts(self) -> Sequence[Part]:
        """Files of documents, numbered within their split over all passes.

        Raises UserError: sizes are not positive, or the share does not fit.
        """
        if self.passes_per_file < 1 or self._num_bytes < 1:
            raise UserError("a text needs at least one byte, and files at least one pass")
        documents = len(self._split[TRAIN])
        whole, rest = divmod(self._num_bytes, self.distinct_bytes)
        total = whole * documents + self._documents_for(whole, rest)
        each = self.passes_per_file * documents
        parts = [
            Part(name=f"{TRAIN}/text-{i:05d}.txt", split=TRAIN, first=first, count=min(each, total - first))
            for i, first in enumerate(range(0, total, each))
        ]
        held_out = len(self._split[VALIDATION])
        if held_out:
            parts.append(Part(name=f"{VALIDATION}/text-00000.txt", split=VALIDATION, first=0, count=held_out))
        return parts

    def write(self, part: Part, path: Path) -> None:
        each = len(self._split[part.split])
        with path.open("x", encoding="utf-8", newline="\n") as file:
            stop = part.first + part.count
            for number in range(part.first // each, -(-stop // each)):
                chosen = self._pass(part.split, number)
                for document in chosen[max(0, part.first - number * each) : stop - number * each]:
                    file.write("".join(f"{sentence}\n" for sentence in document) + "\n")

    def finish(self, folder: Path) -> None:
        write_notice(folder)

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


def write_notice(folder: Path) -> None:
    """Writes the licence of the embedded text, as `LICENSES`."""
    # Not *.txt, or it would be read as text.
    (folder / "LICENSES").write_text(NOTICE.format(version=python_version()), encoding="utf-8")


Numbers = NDArray[np.int64]

VOCABULARY = "vocabulary.txt"  # the copy of the vocabulary next to the splits
# Second words of seeds, so that no two purposes draw the same numbers. 1 and 2 are those of text_recipes.
_DOCUMENT, _ORDER = 3, 4


@dataclass(frozen=True, kw_only=True)
class SamplesRecipe:
    """BERT samples (`dlbench.datasets.text.pretraining_samples`) in HDF5 (`dlbench.datasets.text.pretraining_hdf5`).

    A file holds the samples of a share of the documents, in all their duplicates, shuffled, as the published recipe
    makes one file of samples from one file of text. Training files thus differ slightly in size. Validation samples are
    made once, from documents of their own.

    Each process that writes tokenises the text once.
    """

    source: str = EMBEDDED  # a text file, a folder of .txt files, or `embedded`
    split: Split = "train"  # which of two splits that names tell apart in the folder is read
    vocabulary: str = "english-4096"  # path or name
    sequence_length: int = 128
    max_predictions: int = 20
    masked_lm_probability: float = 0.15
    short_sequence_probability: float = 0.1
    duplicates: int = 10
    """Passes over the training documents, each with other pairs and other hidden tokens; 10 as published."""
    samples_per_file: int = 8192  # about
    validation_share: float = 0.1  # of the documents; 0 if the validation text is another one
    seed: int = 0

    @property
    def kind(self) -> str:
        return "pretraining-samples"

    @property
    def estimated_bytes(self) -> int:
        row = 6 * self.sequence_length + 8 * self.max_predictions + 1
        samples = sum(self._expected(split) for split in SPLITS)
        return round(row * samples)

    @property
    def made_with(self) -> MadeWith:
        corpus = _corpus(self.source, self.vocabulary, self.split)
        return {
            "text": EMBEDDED if self.source == EMBEDDED else Path(self.source).name,
            "corpus_sha256": corpus.sha256,
            "vocabulary_sha256": corpus.vocabulary.sha256,
            "tokens": len(corpus.tokens),
            "sequence_length": self.sequence_length,
            "max_predictions": self.max_predictions,
            "masked_lm_probability": self.masked_lm_probability,
            "short_sequence_probability": self.short_sequence_probability,
            "duplicates": self.duplicates,
            "samples_per_file": self.samples_per_file,
            "validation_share": self.validation_share,
            "seed": self.seed,
        }

    def parts(self) -> Sequence[Part]:
        """Files of samples. Draws all pairs once to count them: about 10 µs per sample.

        Raises UserError: the text, the vocabulary, the share or a size does not fit.
        """
        if self.duplicates < 1 or self.samples_per_file < 1:
            raise UserError("duplicates and samples_per_file must be 1 or more")
        parts = []
        for split in SPLITS:
            first = 0
            for number, documents in enumerate(self._blocks(split)):
                count = self._count(split, documents)
                parts.append(Part(name=f"{split}/samples-{number:05d}.h5", split=split, first=first, count=count))
                first += count
        return parts

    def write(self, part: Part, path: Path) -> None:
        maker, number = self._maker(part.split), int(Path(part.name).stem.rpartition("-")[2])
        samples = []
        for duplicate in range(self._duplicates(part.split)):
            for document in self._blocks(part.split)[number].tolist():
                generator = self._generator(duplicate, document)
                pairs = maker.document_pairs(document, generator)
                samples += [maker.sample(pair, generator) for pair in pairs]
        assert len(samples) == part.count  # the same draws as in `parts`
        order = np.random.default_rng([self.seed, _ORDER, SPLITS.index(part.split), number]).permutation(len(samples))
        write_samples(path, [samples[i] for i in order])

    def finish(self, folder: Path) -> None:
        loaded = load_vocabulary(self.vocabulary)
        (folder / VOCABULARY).write_bytes(read_bytes(loaded.path, MAX_BYTES))
        (folder / f"{VOCABULARY}.sha256").write_text(f"{loaded.sha256}  {VOCABULARY}\n", encoding="utf-8")
        if self.source == EMBEDDED:
            write_notice(folder)

    def _duplicates(self, split: Split) -> int:
        return self.duplicates if split == TRAIN else 1

    def _generator(self, duplicate: int, document: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, _DOCUMENT, duplicate, document])

    def _documents(self, split: Split) -> Numbers:
        corpus = _corpus(self.source, self.vocabulary, self.split)
        return split_documents(corpus.num_documents, self.validation_share, self.seed)[split]

    def _maker(self, split: Split) -> SampleMaker:
        rule = SampleRule(
            sequence_length=self.sequence_length,
            max_predictions=self.max_predictions,
            masked_lm_probability=self.masked_lm_probability,
            short_sequence_probability=self.short_sequence_probability,
        )
        return SampleMaker(_corpus(self.source, self.vocabulary, self.split), rule, self._documents(split))

    def _blocks(self, split: Split) -> list[Numbers]:
        """The documents of each file: as many as have about equally many tokens."""
        documents = self._documents(split)
        if not len(documents):
            return []
        tokens = np.cumsum(self._tokens(documents))
        files = max(1, round(self._expected(split) / self.samples_per_file))
        cuts = np.searchsorted(tokens, tokens[-1] * np.arange(1, files) / files, side="right")
        return [block for block in np.split(documents, cuts) if len(block)]

    def _tokens(self, documents: Numbers) -> Numbers:
        corpus = _corpus(self.source, self.vocabulary, self.split)
        ends: Numbers = corpus.sentence_offsets[corpus.document_offsets]
        return ends[documents + 1] - ends[documents]

    def _expected(self, split: Split) -> float:
        """About how many samples: more than the tokens fill, as random Bs put sentences back and some are short."""
        tokens = int(self._tokens(self._documents(split)).sum())
        return 1.5 * tokens * self._duplicates(split) / self.sequence_length

    def _count(self, split: Split, documents: Numbers) -> int:
        maker = self._maker(split)
        return sum(
            len(maker.document_pairs(document, self._generator(duplicate, document)))
            for duplicate in range(self._duplicates(split))
            for document in documents.tolist()
        )


@lru_cache(maxsize=1)
def _corpus(source: str, vocabulary: str, split: Split) -> TextCorpus:
    """The tokenised text, once a process."""
    loaded = load_vocabulary(vocabulary)
    if source != EMBEDDED:
        return read_corpus(Path(source), loaded, split)
    documents = python_documents()
    digest = hashlib.sha256((loaded.sha256 + documents_sha256(documents)).encode()).hexdigest()
    return tokenise((d.sentences for d in documents), loaded, Path(EMBEDDED), lambda: digest)


_CONTINUATION = "##"
_ALPHABET_AT_MOST = 1000
"""Characters that become entries, the most frequent ones; others become [UNK]. Chinese alone has tens of thousands."""


def train_vocabulary(source: Path | None, size: int, lowercase: bool, path: Path) -> Vocabulary:
    """Trains a vocabulary with BERT's normaliser and word splitter and writes `path` and `<path>.sha256`.

    `source`: a text file or a folder of .txt files; none: the embedded text (`dlbench.datasets.making.text_recipes`).
    `path`: a new file, ending in .txt.
    Raises UserError: the file or its digest exists or cannot be written, the text is missing or too small for that many
    entries, or cased entries were asked for and the text has no capitals.
    """
    if path.suffix != ".txt":
        raise UserError(f"{str(path)!r}: a vocabulary's name ends in .txt")
    digest_path = path.with_name(path.name + ".sha256")
    for existing in (path, digest_path):
        if existing.exists():
            raise UserError(f"{str(existing)!r} exists; a vocabulary is never overwritten, give another name")
    documents: Iterable[Iterable[str]]
    if source is None:
        documents = (document.sentences for document in python_documents())
    else:
        documents = read_documents(text_files(source, "train"))
    entries = _train((sentence for document in documents for sentence in document), size, lowercase)
    if len(entries) != size:
        least_or_most = "at most" if len(entries) < size else "at least"
        raise UserError(f"vocabulary size {size}: the text gives {least_or_most} {len(entries)} entries")
    if not lowercase and not any(e != e.lower() for e in entries if e not in SPECIAL):
        raise UserError("the text has no capital letters; train a lower-case vocabulary")
    content = "".join(f"{entry}\n" for entry in entries).encode("utf-8")
    _write_new(path, content)
    _write_new(digest_path, f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode())
    return load_vocabulary(str(path.absolute()))


def _train(sentences: Iterator[str], size: int, lowercase: bool) -> list[str]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        limit_alphabet=_ALPHABET_AT_MOST,
        continuing_subword_prefix=_CONTINUATION,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return [*SPECIAL, *sorted(set(tokenizer.get_vocab()) - set(SPECIAL), key=_place)]


def _place(entry: str) -> tuple[bool, bool, int, str]:
    continues = entry.startswith(_CONTINUATION) and len(entry) > len(_CONTINUATION)
    length = len(entry) - len(_CONTINUATION) * continues
    return length > 1, continues, length, entry


def _write_new(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # A link fails where a renaming would replace what another process has just written.
        os.link(temporary, path)
    except OSError as error:
        raise refused(error, f"{str(path)!r}: cannot be written: {error.strerror}", UserError) from None
    finally:
        temporary.unlink(missing_ok=True)
