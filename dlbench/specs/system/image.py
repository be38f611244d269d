"""The environment of the ranks as one file, which each node of a job unpacks for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

import dlbench
from dlbench.errors import UserError
from dlbench.opening import read_json, why_unreadable
from dlbench.specs.base import CountOrZero, Form, Spec

MAX_BYTES = 1 << 20
"""Of an image's description at most."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Form("64 hexadecimal digits, as sha256sum prints them")]


class ImageSpec(Spec):
    """A file made by `dlbench image build`; ranks of a job then load Python and its packages from their own node."""

    file: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$"), Form("a path from /")] | None = Field(
        None, description="The file, as dlbench image build made it; none: Python is loaded from where it is installed."
    )
    sha256: Sha256 | None = Field(None, description="Its SHA-256; none: what stands in FILE.json beside it.")
    folder: Annotated[
        str,
        Field(pattern=r"^(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[^\x00-\x1f]*$"),
        Form("a path from /, or from a variable, e.g. $TMPDIR"),
    ] = Field(
        "$TMPDIR",
        description="A folder of each node's own to unpack it in: a path, or one that begins with a variable of the "
        "job; /tmp where there is no $TMPDIR.",
    )
    transfer: Literal["sbcast", "read"] = Field(
        "sbcast", description="How it comes to the nodes: sbcast, or each node reads it."
    )

    @model_validator(mode="after")
    def _digest_has_file(self) -> Self:
        if self.file is None and self.sha256 is not None:
            raise ValueError("sha256 is that of file, and there is none")
        return self


class ImageDescription(Spec):
    """`FILE.json` beside an image: what is in it."""

    format: Literal["dlbench.image"] = Field("dlbench.image", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    sha256: Sha256 = Field(description="SHA-256 of the image.")
    bytes: CountOrZero = Field(description="Its size.")
    unpacked_bytes: CountOrZero = Field(description="What its files take when unpacked, without the file system's own.")
    files: CountOrZero = Field(description="How many files it holds.")
    created: str = Field(description="UTC, ISO 8601.")
    python: str = Field(description="The Python whose environment it is.")
    python_version: str = Field(description="Its version.")
    machine: str = Field(description="Architecture it runs on, as uname -m says it.")
    libc: str = Field(description="C library of the machine that built it.")
    dlbench: str = Field(description="Version of dlbench in it, and the commit of a checkout.")
    holds_interpreter: bool = Field(description="Whether Python itself is in it; else nodes must have it.")
    outside: tuple[str, ...] = Field((), description="Folders that its modules are still loaded from: not in it.")


def description_of(file: Path) -> Path:
    """Where an image is described."""
    return file.with_name(f"{file.name}.json")


def with_digest(image: ImageSpec) -> ImageSpec:
    """The same with the digest that the image's description holds.

    Raises `UserError`: there is no such image or description, it holds another dlbench, or its digest is another one.
    """
    if image.file is None:
        return image
    file = Path(image.file)
    if not file.is_file():
        raise UserError(f"image.file {file}: no such file; `dlbench image build -o {file}` makes one")
    try:
        found = ImageDescription.model_validate(read_json(description_of(file), MAX_BYTES, follow=True))
    except FileNotFoundError:
        if image.sha256 is not None:
            return image
        raise UserError(
            f"image.file {file}: no {file.name}.json beside it; copy it, too, or give image.sha256"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{description_of(file)}: {why_unreadable(error)}") from None
    if image.sha256 not in (None, found.sha256):
        raise UserError(f"image.sha256 is {image.sha256}, and {file} has {found.sha256}: another image")
    if file.stat().st_size != found.bytes:
        raise UserError(f"image.file {file}: has {file.stat().st_size:,} bytes, its description says {found.bytes:,}")
    if found.dlbench.split(" ")[0] != dlbench.__version__:
        raise UserError(
            f"image.file {file}: holds dlbench {found.dlbench}, and this is {dlbench.__version__}; build it anew"
        )
    return image.model_copy(update={"sha256": found.sha256})
