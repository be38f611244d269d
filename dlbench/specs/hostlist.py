"""Reads and writes host lists in Slurm's short form: `n[1-3,7]` for n1, n2, n3 and n7."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from dlbench.errors import UserError

_NUMBERED = re.compile(r"(.+?)([0-9]{1,18})", re.DOTALL)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MOST_NAMES = 1 << 16  # More nodes than any cluster has, so that a typing error cannot fill the memory.


def compressed(hosts: Iterable[str]) -> str:
    """Returns hosts in Slurm's short form; only trailing numbers are folded, which every version of Slurm can read."""
    numbers: dict[tuple[str, int], set[int]] = {}
    words: dict[str, None] = {}
    for host in hosts:
        match = None if "[" in host else _NUMBERED.fullmatch(host)
        if match is None:
            words[host] = None
            continue
        digits = match[2]
        # n09 and n9 are different hosts; numbers without leading zeros (n9, n10) have width 0.
        width = len(digits) if len(digits) > 1 and digits.startswith("0") else 0
        numbers.setdefault((match[1], width), set()).add(int(digits))
    for prefix, width in [key for key in numbers if key[1]]:
        # n100 belongs to n[099-100], although it has no leading zero.
        wide = numbers.get((prefix, 0), set())
        same = {number for number in wide if len(str(number)) == width}
        numbers[prefix, width] |= same
        wide -= same
    texts = [
        _folded(prefix, width, sorted(host_numbers))
        for (prefix, width), host_numbers in sorted(numbers.items())
        if host_numbers
    ]
    return ",".join([*texts, *words])


def _folded(prefix: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for first, last in ranges:
        text = f"{first:0{width}d}"
        if last > first:
            text += f"-{last:0{width}d}"
        texts.append(text)
    return f"{prefix}[{','.join(texts)}]"


def split_hosts(text: str) -> list[str]:
    """Returns the parts of a host list, split at commas outside of brackets."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    return [part.strip() for part in parts if part.strip()]


def expanded(text: str) -> Iterator[str]:
    """Yields every host name of a host list in Slurm's order; brackets may be anywhere in a name."""
    for part in split_hosts(text):
        pieces = _BRACKETS.split(part)  # text, content of brackets, text, ...
        names = [""]
        for number, piece in enumerate(pieces):
            ends = [piece] if number % 2 == 0 else _numbers(piece, part)
            if len(names) * len(ends) > _MOST_NAMES:
                raise UserError(f"{part!r}: stands for more than {_MOST_NAMES:,} hosts")
            names = list(map("".join, itertools.product(names, ends)))
        if any(character in "".join(pieces[::2]) for character in "[]"):
            raise UserError(f"{part!r}: has an unmatched bracket")
        yield from names


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for word in inside.split(","):
        ends = _RANGE.fullmatch(word.strip())
        first, last = (ends[1], ends[2] or ends[1]) if ends else ("1", "0")
        if int(last) < int(first):
            raise UserError(f"{part!r}: {word.strip()!r} is neither a number nor a range, e.g. n[1-3,7]")
        if int(last) - int(first) + len(numbers) >= _MOST_NAMES:
            raise UserError(f"{part!r}: stands for more than {_MOST_NAMES:,} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
