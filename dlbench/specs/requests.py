"""Parses command line texts (--set, --sweep, --ab, --tag, --sizes) into typed requests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from dlbench.errors import UserError
from dlbench.specs.base import MAX_RANKS, MAX_TAG_VALUE, Precision
from dlbench.specs.comm import ELEMENT_BYTES
from dlbench.specs.files import parse_yaml
from dlbench.specs.plan import AxisValue, LayoutSpec, Side
from dlbench.specs.system import SystemSpec
from dlbench.units import parse_bytes

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_OUTER_COMMA = re.compile(r",(?![^\[\]]*\])")  # Matches a comma outside of brackets.
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")

PLAIN = "plain"  # A side of ``--ab`` that sets nothing.

# A YAML value in quotes may contain anything; any other ends before a comma with another KEY=.
_SETTING = re.compile(
    rf"""(?P<key>{_KEY.pattern})=(?P<value>'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|(?!['"]).*?)"""
    rf"""(?:,\s*(?={_KEY.pattern}=)|\Z)""",
    re.DOTALL,
)

KEY_OF = {
    "engine": "engine.name",
    "data": "data.source",
    "resume": "checkpoint.resume_from",
    "launcher": "system.launch.launcher",
}
"""Keys that are set by a field of a request, and by the option of the same name."""

STEP = 4  # Factor between two sizes of a range without a count.
MAX_COUNT = 1000  # Sizes of a range.
MAX_BYTES = 2**44  # More memory than any rank has: a larger size has a wrong unit.


@dataclass(frozen=True, kw_only=True)
class SeriesRequest:
    """The part that all requests share: system, points and repeats."""

    system: str = "local"
    launcher: str | None = None
    points: tuple[int, ...] = (1,)  # Rank counts, or node counts if `points_are` says so.
    points_are: Literal["ranks", "nodes"] = "ranks"
    ranks_per_node: int | None = None
    repeats: int = 1
    overrides: dict[str, AxisValue] = field(default_factory=dict)
    series: str | None = None

    def ranks(self, system: SystemSpec, count: int) -> int:
        if self.points_are == "nodes":
            return count * self._per_node(system)
        return count

    def layout(self, system: SystemSpec, count: int, *, cores_per_rank: int | None, machine_cores: int) -> LayoutSpec:
        """Returns the layout of one point; cores per rank are those of the largest point of the series."""
        ranks, nodes = self.ranks(system, count), self._nodes(system, count)
        if ranks > MAX_RANKS:
            raise UserError(f"{shown_count(ranks)} ranks: the limit is {MAX_RANKS:,}, as each rank writes files")
        if ranks % nodes:
            raise UserError(f"{ranks} ranks cannot be divided over {nodes} nodes of {self._per_node(system)} ranks")
        most_per_node = max(self.ranks(system, value) // self._nodes(system, value) for value in self.points)
        cores = system.node.cores
        if cores is None and system.scheduler == "slurm":
            raise UserError(f"system {system.name}: node.cores: is missing; the cores per rank depend on it")
        node_cores = cores or machine_cores
        share = max(1, node_cores // most_per_node)
        return LayoutSpec(nodes=nodes, ranks=ranks, cores_per_rank=cores_per_rank or share, node_cores=node_cores)

    def refuse_without_effect(self, system: SystemSpec) -> None:
        """Raises `UserError` if --ranks-per-node is given for a single machine, where it has no effect."""
        if self.ranks_per_node and self.points_are == "ranks" and system.scheduler == "none":
            raise UserError(f"--ranks-per-node: has no effect on system {system.name}, which is one machine")

    def _per_node(self, system: SystemSpec) -> int:
        return self.ranks_per_node or system.node.default_ranks

    def _nodes(self, system: SystemSpec, count: int) -> int:
        if self.points_are == "nodes":
            return count
        if system.scheduler != "slurm":
            return 1
        return math.ceil(count / self._per_node(system))


@dataclass(frozen=True, kw_only=True)
class Request(SeriesRequest):
    """A request for a series of training runs, before anything is resolved."""

    workload: str
    preset: str | None = None
    engine: str | None = None
    data: str | None = None
    to_accuracy: bool = False
    resume: str | None = None
    scaling: Literal["weak", "strong"] = "weak"
    sweep: dict[str, tuple[AxisValue, ...]] = field(default_factory=dict)
    decompose: bool = False  # Run also with synthetic input, and without exchange.
    tiers: bool = False  # Run with a cold and a warm page cache, and with synthetic input.
    sides: dict[Side, dict[str, AxisValue]] = field(default_factory=dict)  # Settings; empty: no comparison.
    ladder: bool = False  # Run the steps of the workload's ladder.
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CommRequest(SeriesRequest):
    """A request for a series of the collective benchmark, before anything is resolved; options as text."""

    points: tuple[int, ...] = (2,)
    collective: str = "allreduce"
    algorithms: str = "all"
    backends: str = "auto"
    sizes: str = "1KiB:64MiB"
    dtype: str = "fp32"
    transport: str = "torch"
    iterations: int = 10
    warmup: int = 2
    group_size: int | None = None
    shards: int | None = None
    victims: str | None = None
    congestors: str | None = None
    timeout_s: float = 60.0


def shown_count(count: int) -> str:
    """Returns a count with separators; of a very large one only a lower bound."""
    if count < 10**12:
        return f"{count:,}"
    return f"more than {10**12:,}"


def parse_set(items: tuple[str, ...]) -> dict[str, AxisValue]:
    """Parses ``key=value`` texts; values are YAML: ``8`` is a number, ``fp32`` a word, ``[2,2]`` a list."""
    result: dict[str, AxisValue] = {}
    for item in items:
        key, value = _split(item, "--set")
        if key in result:
            raise UserError(f"--set {key}: given twice")
        result[key] = _value(value, f"--set {key}")
    return result


def parse_sweep(items: tuple[str, ...]) -> dict[str, tuple[AxisValue, ...]]:
    """Parses ``key=a,b,c`` texts; commas in brackets do not separate: ``key=[2,2],[4,4]``."""
    result: dict[str, tuple[AxisValue, ...]] = {}
    for item in items:
        key, text = _split(item, "--sweep")
        if key in result:
            raise UserError(f"--sweep {key}: given twice")
        values = tuple(_value(part, f"--sweep {key}") for part in _OUTER_COMMA.split(text))
        if len(set(map(repr, values))) != len(values):
            raise UserError(f"--sweep {key}: a value is given twice in {text!r}")
        result[key] = values
    return result


def parse_sides(texts: tuple[str, str] | None) -> dict[Side, dict[str, AxisValue]]:
    """Returns the two texts of ``--ab`` as settings of side a and side b; empty without them.

    A comma separates settings only before another ``KEY=``; a value in quotes may contain anything.
    """
    if texts is None:
        return {}
    sides: dict[Side, dict[str, AxisValue]] = {"a": _side(texts[0], "a"), "b": _side(texts[1], "b")}
    # In Python 1, 1.0 and true are equal; in a plan they are not.
    first, second = (repr(sorted(settings.items())) for settings in sides.values())
    if sides["a"] and first == second:
        raise UserError(
            f"--ab: both sides set {texts[0]}; for two equal sides give --ab {PLAIN} {PLAIN}, and common settings by "
            "--set"
        )
    return sides


def _side(text: str, side: Side) -> dict[str, AxisValue]:
    option = f"--ab (side {side})"
    if text.strip() == PLAIN:
        return {}
    result: dict[str, AxisValue] = {}
    position = 0
    while position < len(text) or not result:
        match = _SETTING.match(text, position)
        if match is None:
            raise UserError(
                f"{option} {text[position : position + 80]!r}: must be {PLAIN}, or settings KEY=VALUE with commas "
                "between them, e.g. engine.name=ddp,sync.fusion=own:single"
            )
        key = match["key"]
        if key in result:
            raise UserError(f"{option} {key}: given twice")
        result[key] = _value(match["value"], f"{option} {key}")
        position = match.end()
    return result


def parse_tags(items: tuple[str, ...]) -> dict[str, str]:
    """Parses ``key=value`` texts of ``--tag``; values stay text, so that a commit ``0012e4`` is not a number."""
    result: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not _TAG.fullmatch(key):
            raise UserError(
                f"--tag {item[:80]!a}: must be key=value, the key up to 64 letters, digits and . _ -, the first a "
                "letter, e.g. branch=main"
            )
        if key in result:
            raise UserError(f"--tag {key}: given twice")
        result[key] = tag_value(value, f"--tag {key}")
    return result


def tag_value(value: str, origin: str) -> str:
    """Returns a tag's value. Raises `UserError`: it is empty, too long or not printable."""
    if not value.strip():
        raise UserError(f"{origin}: the value is empty")
    if len(value) > MAX_TAG_VALUE:
        raise UserError(f"{origin}: must be up to {MAX_TAG_VALUE} characters, has {len(value)}")
    if not value.isprintable():
        raise UserError(f"{origin}: {value[:80]!a} has characters that cannot be printed")
    return value


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Parses ``1,2,4`` into ascending counts. Raises `UserError`: one is not a whole number above zero, or repeated."""
    if not re.fullmatch(r"-?[0-9]{1,9}(,-?[0-9]{1,9})*", text):
        raise UserError(f"{option} {text[:80]!r}: must be whole numbers separated by commas, e.g. 1,2,4")
    counts = [int(part) for part in text.split(",")]
    if any(count < 1 for count in counts):
        raise UserError(f"{option} {text!r}: must be 1 or more")
    if len(set(counts)) != len(counts):
        raise UserError(f"{option} {text!r}: a count is given twice")
    return tuple(sorted(counts))


def parse_pairs(text: str | None, option: str, auto: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Parses ``0:1,0:2`` into pairs of ranks; without a text or with ``auto`` the `auto` pairs. Raises `UserError`."""
    if text in (None, "auto"):
        return auto
    if not re.fullmatch(r"[0-9]{1,7}:[0-9]{1,7}(,[0-9]{1,7}:[0-9]{1,7})*", text):
        raise UserError(f"{option} {text[:80]!r}: must be auto or pairs of ranks separated by commas, e.g. 0:1,0:2")
    pairs = (pair.split(":") for pair in text.split(","))
    return tuple((int(first), int(second)) for first, second in pairs)


def _split(item: str, option: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator or not _KEY.fullmatch(key):
        raise UserError(f"{option} {item[:80]!r}: must be key=value, e.g. train.batch_per_rank=16")
    return key, value


def _value(text: str, origin: str) -> AxisValue:
    if not text.strip():
        raise UserError(f"{origin}: the value is empty")
    value = parse_yaml(text, origin)
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"{origin}: must be a finite number, got {text.strip()[:80]!a}")
        if part is not None and not isinstance(part, str | int | float | bool):
            raise UserError(
                f"{origin}: must be one value, or a list of values in brackets, got {text[:80]!r}; nested values need "
                "a workload file, and a text in brackets needs quotes: '\"[...]\"'"
            )
    if isinstance(value, list):
        return tuple(parts)
    return value  # type: ignore[no-any-return]


def parse_sizes(text: str, dtype: Precision) -> tuple[int, ...]:
    """Returns sizes in bytes, ascending, of `LOW:HIGH` (factor 4), `LOW:HIGH:COUNT` (logarithmic) or `A,B,C`."""
    option = f"--sizes {text[:80]!r}"
    parts = text.split(":")
    if len(parts) == 1:
        sizes = [_message_size(part, dtype) for part in text.split(",")]
        if len(set(sizes)) != len(sizes):
            raise UserError(f"{option}: a size is given twice")
        return tuple(sorted(sizes))
    if len(parts) > 3:
        raise UserError(f"{option}: must be LOW:HIGH, LOW:HIGH:COUNT or A,B,C, e.g. 1KiB:64MiB")
    low, high = _message_size(parts[0], dtype), _message_size(parts[1], dtype)
    if low >= high:
        raise UserError(f"{option}: a range must begin below its end")
    if len(parts) == 2:
        sizes = []
        while low < high:
            sizes.append(low)
            low *= STEP
        return (*sizes, high)
    if not re.fullmatch(r"[0-9]{1,9}", parts[2]) or not 2 <= (count := int(parts[2])) <= MAX_COUNT:
        raise UserError(f"{option}: the count must be a whole number from 2 to {MAX_COUNT}")
    width = ELEMENT_BYTES[dtype]
    between = (int(low * (high / low) ** (i / (count - 1))) // width * width for i in range(1, count - 1))
    spaced = (low, *between, high)
    if len(set(spaced)) != count:
        raise UserError(f"{option}: has fewer than {count} sizes of whole {dtype} elements")
    return spaced


def _message_size(text: str, dtype: Precision) -> int:
    try:
        size = parse_bytes(text)
    except OverflowError:
        size = MAX_BYTES + 1
    except ValueError as error:
        raise UserError(f"--sizes: {error}") from None
    width = ELEMENT_BYTES[dtype]
    if size == 0:
        raise UserError("--sizes: a message of 0 bytes is empty; give one element or more")
    if size > MAX_BYTES:
        raise UserError(f"--sizes: {text[:40]!r} is more than the memory of any rank")
    if size % width:
        raise UserError(f"--sizes: {size} bytes are not a whole number of {dtype} elements of {width} bytes")
    return size
