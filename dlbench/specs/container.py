"""The container of the ranks. Its image is identified when a run is planned, not by each of a thousand ranks."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dlbench.cache import kept
from dlbench.errors import UserError
from dlbench.opening import file_sha256, why_unreadable
from dlbench.specs.base import Flag, Form, FromText, Spec
from dlbench.specs.launch import VariableName

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), Form("64 hexadecimal digits, as sha256sum prints them")]

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
    """The container of the ranks; the run's folder, its data, the temporary folder and dlbench are mounted in it."""

    kind: ContainerKind = Field("none", description="Container runtime; pyxis: Slurm's --container-image with enroot.")
    image: ImageName | None = Field(
        None,
        description="Image; apptainer: a file or folder; pyxis: a .sqsh file or an enroot image name; podman: a name "
        "in its store, or a folder. A name should end in @sha256:DIGEST.",
    )
    sha256: Sha256 | None = Field(
        None, description="SHA-256 of the image file, or digest of the name; none: computed when a run is planned."
    )
    as_planned: Annotated[str, Field(pattern=r"^[0-9]+ [0-9]+$"), Form("two numbers")] | None = Field(
        None, description="Size in bytes and modification time of the image when planned; other files are refused."
    )
    python: Annotated[str, Field(min_length=1)] = Field("python3", description="Python interpreter in the container.")
    mount_dlbench: Flag = Field(True, description="Mount dlbench from the host; off: the image contains it.")
    mounts: Annotated[tuple[Mount, ...], FromText] = Field(
        (), description="Additional mounts: PATH, PATH:INSIDE or PATH:INSIDE:ro; a list, or text with commas."
    )
    gpu: Literal["none", "nvidia", "amd"] | None = Field(
        None, description="Vendor of the GPUs in the container; by default nvidia if node.gpus is not 0."
    )
    pass_in: Annotated[tuple[VariableName, ...], FromText] = Field(
        (), description="Host variables that podman passes in, besides those of Slurm, MPI, NCCL and launch."
    )
    withhold: Annotated[tuple[VariableName, ...], FromText] = Field(
        _OF_THE_HOST, description="Host variables that are not passed in, unless launch.environment sets them."
    )
    writable: Flag = Field(False, description="Allow writing to files of the image; writes go to memory or a copy.")
    args: Annotated[tuple[Argument, ...], FromText] = Field(
        (), description="Additional options of the runtime, each one word: --option=value."
    )

    @property
    def is_used(self) -> bool:
        return self.kind != "none"

    @property
    def is_podman(self) -> bool:
        return self.kind in ("podman", "podman-hpc")

    @property
    def is_path(self) -> bool:
        return self.image is not None and self.image.startswith("/")

    @property
    def digest(self) -> str | None:
        """The image's SHA-256, if it is known."""
        if self.sha256 is None and (in_name := _DIGEST.search(self.image or "")):
            return in_name[1]
        return self.sha256

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
                f"image {self.image!r} is not a path: each rank would pull it; run `apptainer pull` once, and give the "
                "file"
            )
        if self.kind == "pyxis" and self.is_path and not self.image.endswith(".sqsh"):
            raise ValueError(f"image {self.image!r}: pyxis takes a .sqsh file (enroot import), or an image's name")
        in_name = _DIGEST.search(self.image)
        if in_name and self.sha256 not in (None, in_name[1]):
            raise ValueError(f"sha256 is {self.sha256}, but the image's name has {in_name[1]}")
        return self


def with_image(container: ContainerSpec) -> ContainerSpec:
    """Adds the digest of the image file, which is cached, and the size and time by which nodes recognise the file."""
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
        raise UserError(f"container.sha256 is {container.sha256}, but {path} has {sha256}: it is another image")
    planned = f"{state.st_size} {state.st_mtime_ns // 10**9}"
    return container.model_copy(update={"sha256": sha256, "as_planned": planned})


@functools.cache
def _digest(path: str, size: int, changed_ns: int) -> str:
    return kept("containers", path, f"{size} {changed_ns}", lambda: file_sha256(Path(path))) or ""
