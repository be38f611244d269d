"""Tokenises raw text into flat arrays: tokens, starts of sentences, starts of documents. Input is a UTF-8 text file or
a folder of files that end in `.txt` or, as MLPerf numbers them, `-00000-of-00500`. A blank line or the end of a file
ends a document. A line is split into sentences after `.`, `!` or `?` if white space and then a capital, a digit or an
opening quote or bracket follow. A vocabulary is a text file with one entry per line.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.datasets.splits import PART, Split, is_companion, require_no_splits, sample_names
from dlbench.errors import UserError, nearest
from dlbench.lazy import np
from dlbench.opening import open_file, read_bytes
from dlbench.specs.files import search_path

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
MAX_BYTES = 1 << 26  # largest vocabulary: published ones have some 250,000 entries of a few bytes
LAYOUT = "a UTF-8 text file or a folder of .txt files, a blank line between documents"
_HEAD_BYTES = 1 << 16  # bytes of a file that must be UTF-8 for it to count as text
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(\[])")
_BATCH = 4096  # sentences per call of the tokenizer, which limits the number of Python objects


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A WordPiece vocabulary; the position of an entry is its id."""

    path: Path
    entries: tuple[str, ...]
    sha256: str
    lowercase: bool  # whether text is lower-cased and stripped of accents first: true if no entry has a capital letter

    def __len__(self) -> int:
        return len(self.entries)

    def id_of(self, entry: str) -> int:
        return self.entries.index(entry)

    def tokenizer(self) -> Tokenizer:
        """Returns a tokenizer: BERT's normaliser and word splitter, then greedy WordPiece."""
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        ids = {entry: i for i, entry in enumerate(self.entries)}
        tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=UNKNOWN, max_input_chars_per_word=100))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer


def load_vocabulary(name: str) -> Vocabulary:
    """Loads a vocabulary by path (with a slash or the ending .txt) or by name."""
    if os.sep in name or name.endswith(".txt"):
        path = Path(name).expanduser()
    else:
        path_by_name: dict[str, Path] = {}
        for folder in search_path("workloads"):  # Folders of DLBENCH_PATH come first.
            for file in sorted((folder / "vocabularies").glob("*.txt")):
                path_by_name.setdefault(file.stem, file)
        if name not in path_by_name:
            raise UserError(f"data.vocabulary: unknown vocabulary {name!r}: {nearest(name, path_by_name)}")
        path = path_by_name[name]
    try:
        raw = read_bytes(path, MAX_BYTES)
        entries = tuple(raw.decode("utf-8").splitlines())
    except OSError as error:
        raise UserError(f"data.vocabulary: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.vocabulary: {path}: not UTF-8 at byte {error.start}") from None
    missing = [token for token in SPECIAL if token not in entries]
    if missing:
        raise UserError(f"{path}: not a WordPiece vocabulary: {', '.join(missing)} missing; give one entry per line")
    distinct: set[str] = set()
    for entry in entries:
        if entry in distinct:
            raise UserError(f"{path}: entry {entry!r} occurs twice; ids would be ambiguous")
        distinct.add(entry)
    digest = hashlib.sha256(raw).hexdigest()
    words = [entry for entry in entries if not (entry.startswith("[") and entry.endswith("]"))]
    lowercase = all(word == word.lower() for word in words)
    return Vocabulary(path=path, entries=entries, sha256=digest, lowercase=lowercase)


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCorpus:
    """Tokenised text in arrays, without a Python object per token, sentence or document."""

    source: Path
    tokens: NDArray[Any]  # (num_tokens,) ids, uint16 or, for vocabularies beyond 65,536 entries, uint32
    sentence_offsets: NDArray[np.int64]  # (num_sentences + 1,) first token of each sentence; no sentence is empty
    document_offsets: NDArray[np.int64]  # (num_documents + 1,) first sentence of each document; no document is empty
    vocabulary: Vocabulary
    sha256: str  # digest of the text files and the vocabulary

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1


def read_corpus(source: Path, vocabulary: Vocabulary, split: Split | None = None) -> TextCorpus:
    """Tokenises a text as a stream: only some thousand sentences and one document are in memory with the arrays."""
    digest = hashlib.sha256(vocabulary.sha256.encode())
    # The digest is complete when the last document has been read.
    return tokenise(read_documents(text_files(source, split), digest), vocabulary, source, digest.hexdigest)


def tokenise(
    documents: Iterable[Sequence[str]], vocabulary: Vocabulary, source: Path, digest: Callable[[], str]
) -> TextCorpus:
    """Tokenises documents, each a list of sentences; `digest`: called for `sha256` after the last document."""
    tokenizer = vocabulary.tokenizer()
    dtype = "uint16" if len(vocabulary) <= 2**16 else "uint32"
    tokens: list[NDArray[Any]] = []
    sentence_lengths: list[NDArray[np.int64]] = []
    document_lengths: list[NDArray[np.int64]] = []
    for batch in _batches(documents):
        sentences = list(chain.from_iterable(batch))
        ids = [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]
        lengths = np.array(list(map(len, ids)), dtype=np.int64)
        firsts = _starts(np.array(list(map(len, batch)), dtype=np.int64))[:-1]
        num_sentences = np.add.reduceat((lengths > 0).astype(np.int64), firsts)  # With tokens, by document.
        tokens.append(np.fromiter(chain.from_iterable(ids), dtype=dtype, count=int(lengths.sum())))
        # Sentences and documents without tokens are dropped.
        sentence_lengths.append(lengths[lengths > 0])
        document_lengths.append(num_sentences[num_sentences > 0])
    if not any(len(block) for block in document_lengths):
        raise UserError(f"{str(source)!r} holds no text; expected {LAYOUT}")
    return TextCorpus(
        source=source,
        tokens=np.concatenate(tokens),
        sentence_offsets=_starts(np.concatenate(sentence_lengths)),
        document_offsets=_starts(np.concatenate(document_lengths)),
        vocabulary=vocabulary,
        sha256=digest(),
    )


def _batches(documents: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """Collects documents until they have `_BATCH` sentences."""
    batch: list[Sequence[str]] = []
    num_sentences = 0
    for document in documents:
        batch.append(document)
        num_sentences += len(document)
        if num_sentences >= _BATCH:
            yield batch
            batch, num_sentences = [], 0
    if batch:
        yield batch


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def is_text_name(name: str) -> bool:
    """Returns whether a file's name is that of a text: `.txt`, or a part such as `part-00000-of-00500`."""
    return PART.fullmatch(name) is not None or (name.lower().endswith(".txt") and not is_companion(name))


def looks_like_text(path: Path) -> bool:
    """Returns whether the beginning of a file is UTF-8 without a zero byte. Raises OSError: it cannot be read."""
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def text_files(source: Path, split: Split | None = None) -> list[Path]:
    """Returns the text files at a path: the file itself, or those of a folder, sorted."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{str(source)!r}: no such file or folder; expected {LAYOUT}")
    visible = [path for path in source.iterdir() if not path.name.startswith(".")]
    names = [path.name for path in visible if path.is_file()]
    texts = sample_names(source, names, is_text_name, split, LAYOUT)
    if not texts or not (texts[0].lower().endswith(".txt") or looks_like_text(source / texts[0])):
        require_no_splits(source, (path.name for path in visible if path.is_dir()))
        raise UserError(f"{str(source)!r} holds no .txt file; expected {LAYOUT}")
    return [source / name for name in texts]


def read_documents(files: Iterable[Path], digest: Any = None) -> Iterator[list[str]]:
    """Yields documents as lists of sentences; updates `digest`, if given, with the names and bytes of the files."""
    digest = digest or hashlib.sha256()
    for path in files:
        sentences: list[str] = []
        number = 0
        digest.update(path.name.encode("utf-8", "surrogateescape") + b"\0")
        try:
            with open_file(path) as file:
                for raw in file:
                    number += 1
                    digest.update(raw)
                    line = raw.decode("utf-8").strip()
                    if line:
                        sentences += _SENTENCE_END.split(line)
                    elif sentences:
                        yield sentences
                        sentences = []
        except OSError as error:
            raise UserError(f"{str(path)!r}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{str(path)!r}, line {number}: not UTF-8; expected {LAYOUT}") from None
        if sentences:
            yield sentences
