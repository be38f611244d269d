"""The environment of the ranks in one file: an image that each node unpacks for itself, or the container they run in.

What an image file of a container is, is found where a run is planned: a thousand ranks must not read it for that.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

import dlbench
from dlbench.cache import kept
from dlbench.errors import UserError
from dlbench.opening import file_sha256, read_json, why_unreadable
from dlbench.specs.base import CountOrZero, Flag, Form, FromText, Spec
from dlbench.specs.launch import VariableName

MAX_BYTES = 1 << 20  # Of an image's description at most.

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Form("64 hexadecimal digits, as sha256sum prints them")]


class ImageSpec(Spec):
    """A file made by `dlbench image build`; ranks of a job then load Python and its packages from their own node."""

    file: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$"), Form("a path from /")] | None = Field(
        None, description="The file, as dlbench image build made it; none: Python is loaded from where it is installed."
    )
    sha256: Sha256 | None = Field(None, description="Its SHA-256; none: what stands in FILE.json next to it.")
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
    """`FILE.json` next to an image: what is in it."""

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
            f"image.file {file}: no {file.name}.json next to it; copy it, too, or give image.sha256"
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


ContainerKind = Literal["none", "apptainer", "pyxis", "podman-hpc", "podman"]

_MOUNT = re.compile(r"/[^:,\x00-\x1f]*(:/[^:,\x00-\x1f]*(:(ro|rw))?)?")
_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")

_OF_THE_HOST = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE"),
    *("VIRTUAL_ENV", "CONDA_PREFIX"),
)


ImageName = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f-][^\x00-\x1f]*$"), Form("a path from / or an image's name")]
Mount = Annotated[
    str, Field(pattern=f"^{_MOUNT.pattern}$"), Form("PATH, PATH:INSIDE or PATH:INSIDE:ro, paths from /, e.g. /scratch")
]
Argument = Annotated[str, Field(pattern=r"^-[^\x00-\x1f]*$"), Form("an option as one word, e.g. --nv or --bind=/opt")]


class ContainerSpec(Spec):
    """The container of the ranks; the run's folder, its data, the temporary folder and dlbench are mounted there."""

    kind: ContainerKind = Field("none", description="What starts it; pyxis is Slurm's --container-image with enroot.")
    image: ImageName | None = Field(
        None,
        description="apptainer: a file or folder; pyxis: a .sqsh file or a name as enroot takes it; podman: a name in "
        "its store, or a folder. A name should end in @sha256:DIGEST.",
    )
    sha256: Sha256 | None = Field(
        None, description="SHA-256 of the file, or the name's digest; none: taken when a run is planned."
    )
    as_planned: Annotated[str, Field(pattern=r"^[0-9]+ [0-9]+$"), Form("two numbers")] | None = Field(
        None, description="Bytes and time of change of the file as planned; a node that finds others refuses it."
    )
    python: Annotated[str, Field(min_length=1)] = Field("python3", description="Python in the container.")
    mount_dlbench: Flag = Field(True, description="Whether dlbench itself comes from outside; off: it is in the image.")
    mounts: Annotated[tuple[Mount, ...], FromText] = Field(
        (), description="What else is mounted: PATH, PATH:INSIDE or PATH:INSIDE:ro; a list, or with commas."
    )
    gpu: Literal["none", "nvidia", "amd"] | None = Field(
        None, description="Whose GPUs it reaches; none given: nvidia where node.gpus is not 0."
    )
    pass_in: Annotated[tuple[VariableName, ...], FromText] = Field(
        (), description="Variables of the host that podman passes in, besides those of Slurm, MPI, NCCL and launch."
    )
    withhold: Annotated[tuple[VariableName, ...], FromText] = Field(
        _OF_THE_HOST, description="Variables of the host that do not go in, unless launch.environment sets them."
    )
    writable: Flag = Field(False, description="Whether files of the image may be written, into memory or a copy.")
    args: Annotated[tuple[Argument, ...], FromText] = Field(
        (), description="Further options of the runtime, each one word: --option=value."
    )

    @property
    def is_used(self) -> bool:
        return self.kind != "none"

    @property
    def is_podman(self) -> bool:
        return self.kind in ("podman", "podman-hpc")

    @property
    def is_path(self) -> bool:
        """Whether the image is a file or folder, not a name."""
        return self.image is not None and self.image.startswith("/")

    @property
    def digest(self) -> str | None:
        """The image's SHA-256, as far as it is known."""
        named = _DIGEST.search(self.image or "")
        return self.sha256 or (named[1] if named else None)

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if not self.is_used:
            if self.image is not None:
                raise ValueError("an image needs a kind: apptainer, pyxis, podman-hpc or podman")
            return self
        if self.image is None:
            raise ValueError(f"kind {self.kind} needs an image")
        if self.kind == "apptainer" and not self.is_path:
            raise ValueError(
                f"image {self.image!r} is no path: each rank would fetch it for itself; `apptainer pull` it once, and "
                "give the file"
            )
        if self.kind == "pyxis" and self.is_path and not self.image.endswith(".sqsh"):
            raise ValueError(f"image {self.image!r}: pyxis takes a .sqsh file (enroot import), or an image's name")
        named = _DIGEST.search(self.image)
        if named and self.sha256 not in (None, named[1]):
            raise ValueError(f"sha256 is {self.sha256}, and the image's name says {named[1]}")
        return self


def with_image(container: ContainerSpec) -> ContainerSpec:
    """The same with the digest of the image's file, and by what nodes know it again; a folder or a name stays as it is.

    The digest is computed once for each state of a file (its path, size, time of change) and kept in the user's cache.

    Raises `UserError`: there is no such file, or it is another than the system file says.
    """
    if not container.is_used or not container.is_path:
        return container
    path = Path(container.image or "")
    try:
        if path.is_dir():
            if container.kind == "pyxis":
                raise UserError(f"container.image {path}: is a folder; pyxis takes a .sqsh file")
            return container
        state = path.stat()
        if container.is_podman:
            raise UserError(f"container.image {path}: podman takes a name or a folder; `podman load` the file first")
        sha256 = _digest(str(path), state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise UserError(f"container.image {path}: {why_unreadable(error)}") from None
    if container.sha256 not in (None, sha256):
        raise UserError(f"container.sha256 is {container.sha256}, and {path} has {sha256}: another image")
    planned = f"{state.st_size} {state.st_mtime_ns // 10**9}"
    return container.model_copy(update={"sha256": sha256, "as_planned": planned})


@functools.cache
def _digest(path: str, size: int, changed_ns: int) -> str:
    return kept("containers", path, f"{size} {changed_ns}", lambda: file_sha256(Path(path))) or ""
