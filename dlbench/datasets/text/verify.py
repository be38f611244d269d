"""Reads a whole text data set, raw or prepared, and names what is wrong with which file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from dlbench import pool
from dlbench.datasets.text.corpus import SAVED, open_corpus, read_documents, text_files
from dlbench.datasets.text.pretraining_hdf5 import file_fault, sample_files
from dlbench.datasets.text.vocabulary import UNKNOWN, load_vocabulary
from dlbench.errors import UserError

_R = TypeVar("_R")
_BATCH = 1024
"""Documents tokenised at a time."""


def verify_text(
    source: Path, vocabulary: str | None = None, on_progress: Callable[[str], None] | None = None, workers: int = 1
) -> list[str]:
    """One line for each bad file, `<name>: <reason>`; none if all are whole.

    Raw text must be UTF-8 and hold documents, at least two in all. HDF5 samples must have types and shapes of a
    published layout, and values in range in every row. A saved corpus must have the sizes that it states.

    Args:
        source: a text file, a folder of .txt files, a saved corpus, or HDF5 samples (file or folder).
        vocabulary: path or name; with it, ids are held against its size, and the share of [UNK] is told.
        on_progress: told one line a file, and information at the end.
        workers: processes that read.

    Raises:
        UserError: there is nothing at `source`, or no such vocabulary.
    """
    say = on_progress or (lambda _line: None)
    if (source / SAVED).is_file():
        return _verify_saved(source, vocabulary, say)
    samples = sample_files(source) if source.exists() else []
    if samples:
        size = None if vocabulary is None else len(load_vocabulary(vocabulary))
        faults = _each(partial(file_fault, vocab_size=size), samples, say, workers)
        return [f"{path.name}: {fault}" for path, fault in zip(samples, faults, strict=True) if fault]
    files = text_files(source)
    read = _each(partial(_read_text, vocabulary=vocabulary), files, say, workers)
    found = [f"{path.name}: {fault}" for path, (fault, _, _, _) in zip(files, read, strict=True) if fault]
    documents = sum(count for _, count, _, _ in read)
    tokens, unknown = sum(count for _, _, count, _ in read), sum(count for *_, count in read)
    say(f"{documents} documents in {len(files)} files")
    if tokens:
        say(f"{unknown / tokens:.3%} of {tokens} tokens are {UNKNOWN}")
    if not found and documents == 1:
        found.append(f"{source.name}: a single document; next-sentence prediction needs two, put a blank line between")
    return found


def _each(check: Callable[[Path], _R], files: list[Path], say: Callable[[str], None], workers: int) -> list[_R]:
    results: list[_R] = []
    with pool.run(check, files, workers, name=str, verb="read", ahead=2) as found:
        for number, (path, result) in enumerate(zip(files, pool.in_order(found), strict=True), 1):
            results.append(result)
            say(f"{number} of {len(files)}: {path.name}")
    return results


def _read_text(path: Path, vocabulary: str | None) -> tuple[str | None, int, int, int]:
    """What is wrong, documents, tokens and unknown tokens of one text file; no tokens without a vocabulary."""
    tokenizer, unknown_id = None, -1
    if vocabulary is not None:
        loaded = load_vocabulary(vocabulary)
        tokenizer, unknown_id = loaded.tokenizer(), loaded.id_of(UNKNOWN)
    documents = tokens = unknown = 0
    try:
        reading = read_documents([path])
        while batch := list(islice(reading, _BATCH)):
            documents += len(batch)
            if tokenizer is not None:
                sentences = [sentence for document in batch for sentence in document]
                for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                    tokens += len(encoding.ids)
                    unknown += encoding.ids.count(unknown_id)
    except UserError as error:
        return str(error).removeprefix(repr(str(path))).lstrip(":, "), documents, tokens, unknown
    return (None if documents else "no text in it"), documents, tokens, unknown


def _verify_saved(folder: Path, vocabulary: str | None, say: Callable[[str], None]) -> list[str]:
    import numpy as np

    if vocabulary is None:
        raise UserError(f"{str(folder)!r} is a tokenised corpus: give the vocabulary it was tokenised with")
    loaded = load_vocabulary(vocabulary)
    try:
        corpus = open_corpus(folder, loaded)
    except UserError as error:
        return [f"{folder.name}: {error}"]
    found = []
    for name, offsets, end in (
        ("sentence_offsets", corpus.sentence_offsets, len(corpus.tokens)),
        ("document_offsets", corpus.document_offsets, corpus.num_sentences),
    ):
        if offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) <= 0).any():
            found.append(f"{name}.npy: does not ascend from 0 to {end}")
    if len(corpus.tokens) and int(corpus.tokens.max()) >= len(loaded):
        found.append(f"tokens.npy: holds an id beyond the vocabulary's {len(loaded)} entries")
    else:
        share = float((corpus.tokens == loaded.id_of(UNKNOWN)).mean())
        say(f"{corpus.num_documents} documents; {share:.3%} of {len(corpus.tokens)} tokens are {UNKNOWN}")
    return found
