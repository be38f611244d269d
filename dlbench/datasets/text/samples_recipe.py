"""BERT samples in HDF5 as a data set, for the production engine, from a text of one's own or from the embedded one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.making.production import Part
from dlbench.datasets.splits import Split
from dlbench.datasets.text.corpus import TextCorpus, read_corpus, tokenise
from dlbench.datasets.text.pretraining_hdf5 import write_samples
from dlbench.datasets.text.pretraining_samples import SampleMaker, SampleRule
from dlbench.datasets.text.python_text import documents_sha256, python_documents
from dlbench.datasets.text.recipes import EMBEDDED, SPLITS, TRAIN, split_documents, write_notice
from dlbench.datasets.text.vocabulary import MAX_BYTES, load_vocabulary
from dlbench.errors import UserError
from dlbench.opening import read_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

VOCABULARY = "vocabulary.txt"
"""The copy of the vocabulary beside the splits."""
# Second words of seeds, so that no two purposes draw the same numbers. 1 and 2 are those of text_recipes.
_DOCUMENT, _ORDER = 3, 4


@dataclass(frozen=True, kw_only=True)
class SamplesRecipe:
    """BERT samples (`dlbench.datasets.text.pretraining_samples`) in HDF5 (`dlbench.datasets.text.pretraining_hdf5`).

    A file holds the samples of a share of the documents, in all their duplicates, shuffled, as the published recipe
    makes one file of samples from one file of text. Training files thus differ slightly in size. Validation samples are
    made once, from documents of their own.

    Each process that writes tokenises the text once; give a large text as a saved corpus, which is mapped into memory.
    """

    source: str = EMBEDDED
    """A text file, a folder of .txt files, a saved corpus, or `embedded`."""
    vocabulary: str = "english-4096"
    """Path or name."""
    sequence_length: int = 128
    max_predictions: int = 20
    masked_lm_probability: float = 0.15
    short_sequence_probability: float = 0.1
    duplicates: int = 10
    """Passes over the training documents, each with other pairs and other hidden tokens; 10 as published."""
    samples_per_file: int = 8192
    """About so many."""
    validation_share: float = 0.1
    """Of the documents; 0 if the validation text is another one."""
    seed: int = 0

    @property
    def kind(self) -> str:
        """As the manifest says it."""
        return "pretraining-samples"

    @property
    def estimated_bytes(self) -> int:
        """Of all files, from the average number of samples."""
        row = 6 * self.sequence_length + 8 * self.max_predictions + 1
        samples = sum(self._expected(split) for split in SPLITS)
        return round(row * samples)

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        """Everything that decides the bytes, and the tokens of the text."""
        corpus = _corpus(self.source, self.vocabulary)
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
        """Files of samples. Draws all pairs once to count them: about 10 µs a sample.

        Raises:
            UserError: the text, the vocabulary, the share or a size does not fit.
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
        """Writes one file.

        Raises:
            OSError: the file exists already, or the disk refuses.
        """
        import numpy as np

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
        """Writes the vocabulary with its digest, and the licence of the embedded text."""
        loaded = load_vocabulary(self.vocabulary)
        (folder / VOCABULARY).write_bytes(read_bytes(loaded.path, MAX_BYTES))
        (folder / f"{VOCABULARY}.sha256").write_text(f"{loaded.sha256}  {VOCABULARY}\n", encoding="utf-8")
        if self.source == EMBEDDED:
            write_notice(folder)

    def _duplicates(self, split: Split) -> int:
        return self.duplicates if split == TRAIN else 1

    def _generator(self, duplicate: int, document: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng([self.seed, _DOCUMENT, duplicate, document])

    def _documents(self, split: Split) -> Numbers:
        corpus = _corpus(self.source, self.vocabulary)
        return split_documents(corpus.num_documents, self.validation_share, self.seed)[split]

    def _maker(self, split: Split) -> SampleMaker:
        rule = SampleRule(
            sequence_length=self.sequence_length,
            max_predictions=self.max_predictions,
            masked_lm_probability=self.masked_lm_probability,
            short_sequence_probability=self.short_sequence_probability,
        )
        return SampleMaker(_corpus(self.source, self.vocabulary), rule, self._documents(split))

    def _blocks(self, split: Split) -> list[Numbers]:
        """The documents of each file: as many as have about equally many tokens."""
        import numpy as np

        documents = self._documents(split)
        if not len(documents):
            return []
        tokens = np.cumsum(self._tokens(documents))
        files = max(1, round(self._expected(split) / self.samples_per_file))
        cuts = np.searchsorted(tokens, tokens[-1] * np.arange(1, files) / files, side="right")
        return [block for block in np.split(documents, cuts) if len(block)]

    def _tokens(self, documents: Numbers) -> Numbers:
        """Tokens of each document."""
        corpus = _corpus(self.source, self.vocabulary)
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
def _corpus(source: str, vocabulary: str) -> TextCorpus:
    """The tokenised text, once a process."""
    loaded = load_vocabulary(vocabulary)
    if source != EMBEDDED:
        return read_corpus(Path(source), loaded)
    documents = python_documents()
    digest = hashlib.sha256((loaded.sha256 + documents_sha256(documents)).encode()).hexdigest()
    return tokenise((d.sentences for d in documents), loaded, Path(EMBEDDED), lambda: digest)
