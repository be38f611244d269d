"""The embedded text as a data set of any size, for the production engine; and how documents are dealt out to splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.making.production import Part
from dlbench.datasets.splits import Split
from dlbench.datasets.text.python_text import NOTICE, Document, documents_sha256, python_documents, python_version
from dlbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

EMBEDDED = "embedded"
"""The text of `dlbench.datasets.text.python_text`, as a recipe's source."""
TRAIN: Split = "train"
VALIDATION: Split = "validation"
SPLITS: tuple[Split, ...] = (TRAIN, VALIDATION)
# Second words of seeds, so that no two purposes draw the same numbers. 3 and 4 are those of prepared samples.
_DEALING, _PASS = 1, 2
_LONGEST_SECTION = 16
"""Sentences that stay together where a document is redrawn, at most; about three samples of 128 tokens."""
_LEAST_SECTION = 4


def split_documents(num_documents: int, validation_share: float, seed: int) -> dict[Split, Numbers]:
    """Deals whole documents out to `train` and `validation`, in an order drawn from the seed.

    With a share above 0 each split has two documents or more, because a random next sentence needs another document.

    Raises:
        UserError: the share is not in [0, 1), or there are too few documents.
    """
    import numpy as np

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

    num_bytes: int | None = None
    """Of the training files together, reached with whole documents; none: one pass."""
    seed: int = 0
    validation_share: float = 0.1
    """Of the documents."""
    passes_per_file: int = 16
    """Passes that share a file: 23 MB with CPython 3.11."""

    @property
    def kind(self) -> str:
        """As the manifest says it."""
        return "text"

    @property
    def distinct_bytes(self) -> int:
        """The training text before it repeats, bytes."""
        documents = python_documents()
        total: int = sum(documents[i].num_bytes for i in self._split[TRAIN].tolist())
        return total

    @property
    def estimated_bytes(self) -> int:
        """Of all files, nearly."""
        documents = python_documents()
        validation: int = sum(documents[i].num_bytes for i in self._split[VALIDATION].tolist())
        return self._num_bytes + validation

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        """Everything that decides the bytes."""
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

        Raises:
            UserError: sizes are not positive, or the share does not fit.
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
        """Writes one file.

        Raises:
            OSError: the file exists already, or the disk refuses.
        """
        each = len(self._split[part.split])
        with path.open("x", encoding="utf-8", newline="\n") as file:
            stop = part.first + part.count
            for number in range(part.first // each, -(-stop // each)):
                chosen = self._pass(part.split, number)
                for document in chosen[max(0, part.first - number * each) : stop - number * each]:
                    file.write("".join(f"{sentence}\n" for sentence in document) + "\n")

    def finish(self, folder: Path) -> None:
        """Writes the licence."""
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
        """The documents of one pass, each a list of sentences."""
        import numpy as np

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
