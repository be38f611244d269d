"""YAML text becomes plain dictionaries, safely: YAML 1.2, no tags, no duplicate keys, bounded size and depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlbench.errors import UserError

MAX_BYTES = 1_000_000
MAX_DEPTH = 20


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: the file is unreadable, too large, not YAML, holds anchors, or is not a mapping.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: larger than {MAX_BYTES} bytes; this is not a specification")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: must hold keys and values, holds {type(value).__name__}")
    return dict(value)


def parse_yaml(text: str, origin: str) -> Any:
    """A YAML value; used for files and for the values of ``--set key=value``.

    Raises:
        UserError: not YAML, duplicate keys, anchors, or nested deeper than `MAX_DEPTH`.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    try:
        _refuse_anchors(yaml, text, origin)
        value = yaml.load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{origin}{where}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{origin}: nested too deeply") from None
    _refuse_depth(value, origin)
    return value


def _refuse_anchors(yaml: Any, text: str, origin: str) -> None:
    """Aliases can expand a small file into gigabytes; no specification needs them."""
    if "&" not in text and "*" not in text:
        return
    from ruamel.yaml.tokens import AliasToken, AnchorToken

    for token in yaml.scan(text):
        if isinstance(token, AliasToken | AnchorToken):
            raise UserError(f"{origin}:{token.start_mark.line + 1}: anchors and aliases are not allowed here")


def _refuse_depth(value: Any, origin: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise UserError(f"{origin}: nested deeper than {MAX_DEPTH} levels")
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for child in children:
        _refuse_depth(child, origin, depth + 1)
