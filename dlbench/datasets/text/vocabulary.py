"""Frozen WordPiece vocabularies: a text file, one entry a line, becomes a tokenizer. None is trained at run time."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import UserError, nearest
from dlbench.opening import read_bytes, read_text, why_unreadable
from dlbench.specs.resolve import search_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
MAX_BYTES = 1 << 26
"""Of a vocabulary at most: published ones have some 250,000 entries of a few bytes."""
MAX_SIDECAR = 1 << 16
"""Of the file beside it at most: it holds one digest."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A WordPiece vocabulary; the position of an entry is its id."""

    path: Path
    entries: tuple[str, ...]
    sha256: str
    lowercase: bool
    """Whether text is lower-cased and stripped of accents first: true if no entry has a capital letter."""

    def __len__(self) -> int:
        return len(self.entries)

    def id_of(self, entry: str) -> int:
        """The id of an entry that is there."""
        return self.entries.index(entry)

    def tokenizer(self) -> Tokenizer:
        """A tokenizer with this vocabulary: BERT's normaliser and word splitter, then greedy WordPiece."""
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        ids = {entry: i for i, entry in enumerate(self.entries)}
        tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=UNKNOWN, max_input_chars_per_word=100))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer


def available_vocabularies() -> dict[str, Path]:
    """Vocabularies by name: `vocabularies/*.txt` beside the workloads, folders of DLBENCH_PATH first."""
    found: dict[str, Path] = {}
    for folder in search_path("workloads"):
        for path in sorted((folder / "vocabularies").glob("*.txt")):
            found.setdefault(path.stem, path)
    return found


def load_vocabulary(name: str) -> Vocabulary:
    """A vocabulary by path (a text with a slash or ending in .txt) or by name.

    If `<file>.sha256` lies beside the file (one line, as `sha256sum` writes it), it must match.

    Raises:
        UserError: no such vocabulary, a damaged file, a duplicate entry, or a special token missing.
    """
    if os.sep in name or name.endswith(".txt"):
        path = Path(name).expanduser()
    else:
        known = available_vocabularies()
        if name not in known:
            raise UserError(f"data.vocabulary: unknown vocabulary {name!r}: {nearest(name, known)}")
        path = known[name]
    try:
        raw = read_bytes(path, MAX_BYTES)
        entries = tuple(raw.decode("utf-8").splitlines())
    except OSError as error:
        raise UserError(f"data.vocabulary: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.vocabulary: {path}: not UTF-8 at byte {error.start}") from None
    digest = hashlib.sha256(raw).hexdigest()
    _check(path, entries, digest)
    lowercase = not any(e != e.lower() for e in entries if not (e.startswith("[") and e.endswith("]")))
    return Vocabulary(path=path, entries=entries, sha256=digest, lowercase=lowercase)


def _stated_digest(sidecar: Path) -> list[str]:
    try:
        return read_text(sidecar, MAX_SIDECAR).split()[:1]
    except (OSError, ValueError) as error:
        raise UserError(f"data.vocabulary: {sidecar}: cannot be read: {why_unreadable(error)}") from None


def _check(path: Path, entries: tuple[str, ...], digest: str) -> None:
    sidecar = path.with_name(path.name + ".sha256")
    if sidecar.is_file():
        expected = _stated_digest(sidecar)
        if expected != [digest]:
            raise UserError(f"{path}: is not the file that {sidecar.name} was written for; restore it")
    missing = [token for token in SPECIAL if token not in entries]
    if missing:
        raise UserError(f"{path}: not a WordPiece vocabulary: {', '.join(missing)} missing; one entry a line")
    if len(set(entries)) != len(entries):
        twice = next(e for i, e in enumerate(entries) if e in entries[:i])
        raise UserError(f"{path}: entry {twice!r} is there twice; ids would be ambiguous")
