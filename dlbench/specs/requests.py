"""What a person asked for on the command line, as text, becomes typed requests: ``--set``, ``--sweep``, ``--ranks``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from dlbench.errors import UserError
from dlbench.specs.plan import AxisValue
from dlbench.specs.yamlfile import parse_yaml

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that makes a series, before anything is resolved."""

    workload: str
    preset: str | None = None
    system: str = "local"
    engine: str | None = None
    data: str | None = None
    to_quality: bool = False
    resume: str | None = None
    points: tuple[int, ...] = (1,)
    """Rank counts, or node counts if `points_are` says so."""
    points_are: Literal["ranks", "nodes"] = "ranks"
    ranks_per_node: int | None = None
    repeats: int = 1
    scaling: Literal["weak", "strong"] = "weak"
    launcher: str | None = None
    overrides: dict[str, AxisValue] = field(default_factory=dict)
    sweep: dict[str, tuple[AxisValue, ...]] = field(default_factory=dict)
    series: str | None = None
    decompose: bool = False
    """Each run also with synthetic input, and without exchange."""
    watch_cost: bool = False
    """Each run also unwatched."""


def parse_set(items: tuple[str, ...]) -> dict[str, AxisValue]:
    """``key=value`` texts as a mapping; values are YAML scalars, so ``8`` is a number and ``fp32`` a word.

    Raises:
        UserError: no ``=``, a malformed key, a key given twice, or a value that is not a scalar.
    """
    result: dict[str, AxisValue] = {}
    for item in items:
        key, value = _split(item, "--set")
        if key in result:
            raise UserError(f"--set {key}: given twice")
        result[key] = _scalar(value, f"--set {key}")
    return result


def parse_sweep(items: tuple[str, ...]) -> dict[str, tuple[AxisValue, ...]]:
    """``key=a,b,c`` texts as axes, in the order given.

    Raises:
        UserError: as `parse_set`; also an empty or a repeated value.
    """
    result: dict[str, tuple[AxisValue, ...]] = {}
    for item in items:
        key, text = _split(item, "--sweep")
        if key in result:
            raise UserError(f"--sweep {key}: given twice")
        values = tuple(_scalar(part, f"--sweep {key}") for part in text.split(","))
        if len(set(map(repr, values))) != len(values):
            raise UserError(f"--sweep {key}: a value is given twice in {text!r}")
        result[key] = values
    return result


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """``1,2,4`` as ascending positive numbers.

    Raises:
        UserError: not whole numbers above zero, or one given twice.
    """
    if not re.fullmatch(r"-?[0-9]{1,9}(,-?[0-9]{1,9})*", text):
        raise UserError(f"{option} {text[:80]!r}: must be whole numbers separated by commas, e.g. 1,2,4")
    counts = [int(part) for part in text.split(",")]
    if any(count < 1 for count in counts):
        raise UserError(f"{option} {text!r}: must be 1 or more")
    if len(set(counts)) != len(counts):
        raise UserError(f"{option} {text!r}: a count is given twice")
    return tuple(sorted(counts))


def _split(item: str, option: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator or not _KEY.fullmatch(key):
        raise UserError(f"{option} {item!r}: must be key=value, e.g. train.batch_per_rank=16")
    return key, value


def _scalar(text: str, origin: str) -> AxisValue:
    if not text.strip():
        raise UserError(f"{origin}: the value is empty")
    value = parse_yaml(text, origin)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    raise UserError(f"{origin}: must be one value, got {text!r}")
