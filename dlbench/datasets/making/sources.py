"""Every file of a folder that is converted is a sample file of a split, a companion, or refused by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dlbench.datasets.account import Account, is_companion
from dlbench.datasets.splits import NAMES
from dlbench.errors import UserError

TEST = "test"  # the split that is left out: dlbench trains and validates
_SPLIT_OF = {name: split for split, names in NAMES.items() for name in names} | {TEST: TEST}


def split_called(name: str) -> str | None:
    """Returns `train`, `validation` or `test` for one of their names; None for any other."""
    return _SPLIT_OF.get(name)


def take_account(source: Path, split_of: Callable[[Path], str | None], expected: str) -> Account:
    """Lists the files of a folder and of all folders in it, but for hidden ones; `splits` may hold `test`.

    `split_of`: gives the split of a sample file by its relative path, None if it is none. `expected`: for messages.
    Raises UserError: a file is neither a sample file nor a companion, or none is for training.
    """
    samples: dict[str, list[str]] = {}
    companions = []
    for path in sorted(_files_below(source)):
        split = split_of(path)
        if split is not None:
            samples.setdefault(split, []).append(str(path))
        elif is_companion(path.name):
            companions.append(str(path))
        else:
            raise UserError(f"{str(source / path)!r}: no sample file of a split; expected {expected}; move it away")
    if "train" not in samples:
        raise UserError(f"{str(source)!r} holds no training files; expected {expected}")
    splits = {split: tuple(samples[split]) for split in (*NAMES, TEST) if split in samples}
    return Account(splits=splits, others=tuple(companions))


def _files_below(source: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename!r}: cannot be listed: {error.strerror}")

    for folder, folders, names in os.walk(source, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(source)


def account_line(account: Account, reason: str) -> str:
    """Returns which files are read and which are not; `reason`: why those of the test split are left out."""
    read = {split: names for split, names in account.splits.items() if split != TEST}
    line = Account(splits=read, others=account.others).line()
    test = account.splits.get(TEST, ())
    if not test:
        return line
    return f"{line}; left out: {TEST} ({reason}): {len(test):,} file{'s' if len(test) > 1 else ''}"
