"""Finds the files that a request names, and reads them as YAML 1.2 without tags or duplicate keys, in limited size."""

from __future__ import annotations

import copy
import functools
import json
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dlbench import bundled
from dlbench.bundled import cached
from dlbench.errors import UserError, nearest
from dlbench.opening import file_sha256, read_named, why_unreadable

Kind = Literal["workloads", "systems"]

MAX_BYTES = 1_000_000  # Largest size of a specification file.
MAX_DEPTH = 20

BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the order in which a terminal or page shows a text."""


def search_path(kind: Kind | Literal["reports"]) -> list[Path]:
    """Returns the folders to search, in order: of ``DLBENCH_PATH`` (each may contain all three kinds), bundled."""
    extra = [Path(part) for part in os.environ.get("DLBENCH_PATH", "").split(os.pathsep) if part]
    return [folder / kind for folder in extra] + [bundled.folder(kind)]


def available(kind: Kind) -> dict[str, Path]:
    """Returns every known name with its file; the first folder with a name wins."""
    path_by_name: dict[str, Path] = {}
    for folder in search_path(kind):
        for path in sorted(folder.glob("*.yaml")):
            path_by_name.setdefault(path.stem, path)
    return path_by_name


def find(kind: Kind, name: str) -> Path:
    """Returns the file of a workload or system by name or, with a slash or ending in ``.yaml``/``.yml``, by path."""
    if os.sep in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        # A pipe is allowed: `--system <(m4 machine.yaml)`.
        if not path.is_file() and not path.is_fifo():
            raise UserError(f"{name}: no such {kind[:-1]} file")
        return path
    names = available(kind)
    if name not in names:
        problem = f"unknown {kind[:-1]} {name!r}: {nearest(name, names)}"
        if name.startswith("resnet"):
            problem += " With --set model.stage_blocks=[3,4,23,3] that has 101 layers"
        raise UserError(problem)
    return names[name]


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file."""
    try:
        text = read_named(path, MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}") from None
    if path.parent in (bundled.folder("workloads"), bundled.folder("systems"), bundled.folder("reports")):
        # Parsing takes 0.15 s of CPU before every run. Other files are not cached, because they may contain secrets.
        state = f"{file_sha256(Path(__file__))}\n{text}"
        value = json.loads(cached("yaml", str(path), state, lambda: json.dumps(parse_yaml(text, str(path)))) or "null")
    else:
        value = parse_yaml(text, str(path))
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must contain keys and values, contains {type(value).__name__}")
    return dict(value)


def parse_yaml(text: str, origin: str) -> Any:
    """Returns a YAML value, of a file or of ``--set key=value``."""
    return copy.deepcopy(_parsed(text, origin))


@functools.lru_cache(maxsize=8)  # A command reads its workload file several times.
def _parsed(text: str, origin: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    try:
        _refuse_features(yaml, text, origin)
        value = yaml.load(text)
    except YAMLError as error:
        if mark := getattr(error, "problem_mark", None):
            origin += f":{mark.line + 1}"
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{origin}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{origin}: nested too deeply") from None
    except (ValueError, OverflowError, KeyError, IndexError) as error:
        # The text looks like a number or date but is not one: 2024-13-45.
        raise UserError(f"{origin}: a value cannot be read: {' '.join(str(error).split())}") from None
    _refuse_contents(value, origin)
    return value


def text_problem(text: str) -> str:
    """Returns why a text cannot be part of a plan or script (newlines and tabs are allowed); empty if it can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8: it contains half of a surrogate pair, which files cannot store"
    return control_character(text, allowed="\n\t")


def control_character(text: str, allowed: str = "") -> str:
    """Returns e.g. ``holds the control character U+001B``; empty if a text holds none."""
    if text.isprintable():
        return ""
    for letter in text:
        if letter in BIDIRECTIONAL or (letter not in allowed and unicodedata.category(letter) in ("Cc", "Zl", "Zp")):
            return f"holds the control character U+{ord(letter):04X}"
    return ""


def _refuse_features(yaml: Any, text: str, origin: str) -> None:
    """Refuses aliases, which can expand a file into gigabytes, tags, and directives, which could select YAML 1.1.

    Depth is checked here, because scanning takes time quadratic in it.
    """
    from ruamel.yaml import tokens
    from ruamel.yaml.tokens import AliasToken, AnchorToken, DirectiveToken, TagToken

    kinds = ("FlowSequence", "FlowMapping", "BlockSequence", "BlockMapping")
    opening = tuple(getattr(tokens, f"{kind}StartToken") for kind in kinds)
    closing = (tokens.FlowSequenceEndToken, tokens.FlowMappingEndToken, tokens.BlockEndToken)
    depth = 0
    for token in yaml.scan(text):
        depth += isinstance(token, opening) - isinstance(token, closing)
        if depth > MAX_DEPTH:
            raise UserError(f"{origin}:{token.start_mark.line + 1}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(token, AliasToken | AnchorToken | DirectiveToken | TagToken):
            line = token.start_mark.line + 1
            raise UserError(f"{origin}:{line}: anchors, aliases, tags and directives are not allowed here")


def _refuse_contents(value: Any, origin: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise UserError(f"{origin}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str) and (problem := text_problem(value)):
        raise UserError(f"{origin}: {value[:80]!a} {problem}")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{origin}: {key}: a key must be a word; put it in quotes")
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for child in value:
            _refuse_contents(child, origin, depth + 1)
