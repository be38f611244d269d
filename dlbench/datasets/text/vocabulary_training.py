"""Text becomes a WordPiece vocabulary, once: a file of one entry a line with its SHA-256 beside it.

Training is not deterministic: two trainings on one text may differ in entries that are equally frequent, and the
library numbers entries as it meets them. So a vocabulary is trained once, kept, and never trained by a run or
overwritten. What can be fixed is: the five special tokens come first, then single characters, then longer entries, each
group with beginnings of words before continuations (##), sorted by length and code points. Equal entries thus have
equal ids. The order does not change how text is split (WordPiece takes the longest entry that fits).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlbench.datasets.text.corpus import read_documents, text_files
from dlbench.datasets.text.python_text import python_documents
from dlbench.datasets.text.vocabulary import SPECIAL, UNKNOWN, Vocabulary, load_vocabulary
from dlbench.errors import UserError, refused

_CONTINUATION = "##"
_ALPHABET_AT_MOST = 1000
"""Characters that become entries, the most frequent ones; others become [UNK]. Chinese alone has tens of thousands."""


def train_vocabulary(source: Path | None, size: int, lowercase: bool, path: Path) -> Vocabulary:
    """Trains a vocabulary with BERT's normaliser and word splitter and writes `path` and `<path>.sha256`.

    Args:
        source: a text file or a folder of .txt files; none: the embedded text (`dlbench.datasets.text.python_text`).
        size: entries, special tokens counted.
        lowercase: whether text is lower-cased and stripped of accents first.
        path: a new file, ending in .txt.

    Raises:
        UserError: the file or its digest exists or cannot be written, the text is missing or too small for so many
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
        documents = read_documents(text_files(source))
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
