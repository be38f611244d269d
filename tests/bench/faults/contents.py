"""Text in records that is made to be misread, and checkpoints that are not what their names say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dlbench.records.record import Record
from dlbench.specs.plan import RunPlan
from tests.bench.faults.catalogue import Fault
from tests.bench.faults.workshop import RUN_S, CannotPlantError, DidNotHoldError, Workshop, short

HOSTILE = {
    "an escape sequence": "ev\x1b]0;pwn\x07il",
    "a change of direction": "abc\u202egnp.exe",
    "markup": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "a template": "{x} {0.__class__} {{ 7*7 }} %s",
    "Markdown": "| a | [x](javascript:alert(1)) |\n# heading",
    "a lone surrogate": "\ud800",
}


def faults() -> Iterator[Fault]:
    """Everything of this family."""
    for kind in HOSTILE:
        name = f"records with {kind} in every free text"
        yield Fault(family="contents", name=name, replay=partial(_text, name, kind))
    for kind in _CHECKPOINTS:
        name = f"run --resume: {kind}"
        yield Fault(family="contents", name=name, replay=partial(_checkpoint, name, kind))


def _text(name: str, kind: str, shop: Workshop) -> None:
    out, run = shop.copy(name)
    for file, model in (("record.json", Record), ("plan.json", RunPlan)):
        content = json.loads((run / file).read_text(encoding="utf-8"))
        # ASCII: a lone surrogate cannot be written otherwise.
        (run / file).write_text(json.dumps(_hostile(content, model, HOSTILE[kind])), encoding="ascii")
    # Half a character cannot be shown: such a file is damaged.
    told = shop.call("status", out)
    told.require((4,), "damaged") if kind == "a lone surrogate" else told.require((0,), "valid")
    page = out.parent / "page.html"
    for words in (
        ("status", out),
        ("report", out),
        ("report", out, "--format", "md"),
        ("report", out, "-o", page),
        ("diagnose", out),
        ("compare", out, out),
    ):
        shop.call(*words).require((0, 2, 4, 6))
    if page.exists() and re.search("<script>alert|<img src=x|[\x1b\u202e]", page.read_text(encoding="utf-8")):
        raise DidNotHoldError("the page holds it as it is")


_KEPT = ("run_id", "format", "id")
"""What files name each other by."""


def _hostile(content: dict[str, Any], model: type[BaseModel], text: str) -> dict[str, Any]:
    """The same, with every text replaced that may be anything: where the file is still a valid one."""
    for holder, key in list(_texts(content)):
        if key in _KEPT:
            continue
        kept, holder[key] = holder[key], text
        try:
            model.model_validate(content)
        except ValidationError:
            holder[key] = kept
    return content


def _texts(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object that holds a text, and where in it."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(pairs):
        if isinstance(value, str):
            yield content, key
        elif isinstance(value, dict | list):
            yield from _texts(value)


_CHECKPOINTS = (
    "truncated",
    "empty",
    "a flipped bit of its header",
    "a flipped bit of its tensors",
    "a step that is text",
    "a step below 0",
    "an epoch that is no number",
    "a header of too few groups",
    "a pickle",
)


def _checkpoint(name: str, kind: str, shop: Workshop) -> None:
    source = _made(shop)
    path = shop.folder(name) / source.name
    path.write_bytes(_spoilt(source.read_bytes(), kind))
    words = ("run", "bert", "--preset", "ci", "--engine", "single", "--data", "synthetic", *short(6))
    done = shop.call(*words, "--resume", path, "--out", path.parent / "runs", limit_s=RUN_S)
    done.require((2, 4), path.name)


def _made(shop: Workshop) -> Path:
    out = shop.root / "checkpoints"
    if not out.exists():
        words = ("run", "bert", "--preset", "ci", "--engine", "single", "--data", "synthetic", *short(4))
        shop.call(*words, "--set", "checkpoint.every_steps=2", "--out", out, limit_s=RUN_S).require((0,))
    found = sorted(out.glob("*/checkpoints/*.safetensors"))
    if not found:
        raise CannotPlantError("no checkpoint was written")
    return found[0]


def _spoilt(content: bytes, kind: str) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if kind == "truncated":
        return content[: len(content) // 2]
    if kind == "empty":
        return b""
    if kind == "a pickle":
        return b"\x80\x04cposix\nsystem\n(S'false'\ntR."
    if kind.startswith("a flipped bit"):
        place = 8 + length // 2 if "header" in kind else 8 + length + 16
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    header = json.loads(content[8 : 8 + length])
    told = header["__metadata__"]
    for key, value in told.items():
        told[key] = _edited(value, kind)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _edited(value: str, kind: str) -> str:
    """The text of one key of the header with the step, the epoch or the groups spoilt wherever they stand in it."""
    if kind.startswith("a step"):
        return re.sub(r'("step": ?)\d+', r'\1"x"' if "text" in kind else r"\1-5", value)
    if kind.startswith("an epoch"):
        return re.sub(r'("epoch": ?)[\d.]+', r"\1NaN", value)
    return re.sub(r'("group_steps": ?\[)[^\]]*\]', r"\1]", value)
