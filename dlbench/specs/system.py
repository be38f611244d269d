"""The system YAML, which a site's admin writes: nodes, storage tiers, scheduler, launcher and container.

The image of a container is identified when a run is planned, not by each of a thousand ranks.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dlbench.bundled import cached
from dlbench.errors import UserError
from dlbench.opening import file_sha256, why_unreadable
from dlbench.specs.base import (
    ActsIf,
    Bytes,
    Count,
    CountOrZero,
    Flag,
    Form,
    FromText,
    Name,
    NonNegative,
    Positive,
    Precision,
    Ranks,
    Spec,
)
from dlbench.specs.launch import BY_SRUN, LaunchSpec, SlurmSpec, VariableName

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
Tier = Literal["shared", "local", "memory"]
"""Storage of samples: the shared file system, a local disk of the node, or memory of the node (tmpfs)."""

StagingTier = Literal["local", "memory"]
FolderOfNode = Annotated[
    str,
    Field(pattern=r"^(/|\$[A-Za-z_][A-Za-z0-9_]*|~/)[^\x00-\x1f]*$"),
    Form("a path from / or ~/, or from a variable, e.g. $TMPDIR/dlbench"),
]
Source = Annotated[str, Field(min_length=1)]
Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$"), Form("one word, e.g. gcc/12.2")]


class ContainerSpec(Spec):
    """The container of the ranks; the run's folder, its data, the temporary folder and dlbench are mounted in it."""

    kind: ContainerKind = Field("none", description="Container runtime; pyxis: Slurm's --container-image with enroot.")
    image: ImageName | None = Field(
        None,
        description="Image; apptainer: a file or folder; pyxis: a .sqsh file or an enroot image name; podman: a name "
        "in its store, or a folder. A name should end in @sha256:DIGEST.",
    )
    sha256: Sha256 | None = Field(None, description="SHA-256 of the image file or digest of its name; none: computed.")
    as_planned: Annotated[str, Field(pattern=r"^[0-9]+ [0-9]+$"), Form("two numbers")] | None = Field(
        None, description="Size in bytes and modification time of the image when planned; other files are refused."
    )
    python: Annotated[str, Field(min_length=1)] = Field("python3", description="Python interpreter in the container.")
    mount_dlbench: Flag = Field(True, description="Mount dlbench from the host; off: the image contains it.")
    mounts: Annotated[tuple[Mount, ...], FromText] = Field(
        (), description="Additional mounts: PATH, PATH:INSIDE or PATH:INSIDE:ro; a list, or text with commas."
    )
    gpu: Literal["none", "nvidia", "amd"] | None = Field(None, description="GPU vendor; none: nvidia if node.gpus.")
    pass_in: Annotated[tuple[VariableName, ...], FromText] = Field(
        (), description="Host variables that podman passes in, besides those of Slurm, MPI, NCCL and launch."
    )
    withhold: Annotated[tuple[VariableName, ...], FromText] = Field(
        _OF_THE_HOST, description="Host variables that are not passed in, unless launch.environment sets them."
    )
    writable: Flag = Field(False, description="Allow writing to files of the image; writes go to memory or a copy.")
    args: Annotated[tuple[Argument, ...], FromText] = Field((), description="Further runtime options: --option=value.")

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
    return cached("containers", path, f"{size} {changed_ns}", lambda: file_sha256(Path(path))) or ""


class NodeSpec(Spec):
    """One node of the system."""

    cores: Ranks | None = Field(None, description="Cores per node; required with a scheduler; none: this machine's.")
    gpus: CountOrZero = Field(0, description="GPUs per node.")
    ranks: Ranks | None = Field(None, description="Ranks per node; none: one per GPU, or one per node without GPUs.")

    peak_tflops: dict[Precision, Positive] = Field(
        default_factory=dict, description="Dense peak rate of a GPU (without GPUs: of a core) by precision, TFLOP/s."
    )
    peak_source: str | None = Field(None, min_length=1, description="Source of peak_tflops; printed with each MFU.")

    @model_validator(mode="after")
    def _peak_has_source(self) -> Self:
        if self.peak_tflops and self.peak_source is None:
            raise ValueError("peak_tflops needs peak_source: a data sheet or a measurement")
        return self

    @property
    def default_ranks(self) -> int:
        """Ranks per node without --ranks-per-node."""
        return self.ranks or self.gpus or 1


class TierSpec(Spec):
    """A folder on the node to which samples can be staged."""

    path: FolderOfNode = Field(
        description="Folder on the node: a path from / or ~/, or one that begins with a variable of the job, e.g. "
        "$SLURM_TMPDIR or $TMPDIR/dlbench. {host} is replaced by the node's name."
    )
    capacity_bytes: Bytes | None = Field(None, description="Maximum samples per node, bytes; none: free space.")


class StorageSpec(Spec):
    """Storage tiers. The shared file system is the one that contains the data set."""

    shared_title: str | None = Field(None, min_length=1, description="Shared file system title, e.g. Lustre, 40 OSTs.")
    local: TierSpec = Field(TierSpec(path="$TMPDIR"), description="Local disk of the node.")
    memory: TierSpec = Field(TierSpec(path="/dev/shm"), description="Memory of the node (tmpfs).")  # noqa: S108  (a private folder is created in it)

    def tier(self, name: StagingTier) -> TierSpec:
        return self.local if name == "local" else self.memory


class DeviceSpec(Spec):
    """Data sheet of a GPU (without GPUs: of a core), for projections; runs are only refused by the GPU's memory."""

    name: str | None = Field(
        None,
        min_length=1,
        description="Name as the driver reports it; a peak rate or bandwidth not given comes from its data sheet.",
    )
    memory_bytes: Bytes | None = Field(None, description="Memory size, bytes, checked before runs; none: not known.")
    memory_gb_per_s: Positive | None = Field(None, description="Peak memory bandwidth, GB/s; none: by the data sheet.")
    node_watts: Positive | None = Field(None, description="Power of a whole node that trains, W; none: not known.")
    source: Source = Field(description="Source of these values, and which of them are assumptions.")


class LinkSpec(Spec):
    """Data sheet of the links of one network level."""

    alpha_s: NonNegative = Field(description="Time of an empty message, seconds.")
    gb_per_s: Positive = Field(description="Bandwidth of one link in one direction, 10^9 bytes per second.")
    links: Count | None = Field(None, description="Links that ranks share, e.g. a node's adapters; none: one per rank.")
    source: Source = Field(description="Source of these values, and which of them are assumptions.")


class NetworkSpec(Spec):
    """Data sheet of the network, for projections beyond measured layouts; runs do not use it."""

    inside: LinkSpec | None = Field(None, description="Links between ranks of a node; none: not known.")
    across: LinkSpec | None = Field(None, description="Links between nodes of a leaf switch; none: not known.")
    beyond: LinkSpec | None = Field(None, description="Links between leaf switches; none: across / leaf_taper.")
    nodes_per_leaf: Ranks | None = Field(None, description="Nodes per leaf switch; none: not known.")
    leaf_taper: Positive | None = Field(None, description="Leaf oversubscription, e.g. 2 for 2:1; none: not known.")
    leaf_source: Source | None = Field(None, description="Source of nodes_per_leaf and leaf_taper.")

    @model_validator(mode="after")
    def _leaf_is_whole(self) -> Self:
        if self.nodes_per_leaf is None and (self.leaf_taper is not None or self.beyond is not None):
            raise ValueError("leaf_taper and beyond need nodes_per_leaf: the number of nodes per leaf switch")
        if self.nodes_per_leaf is not None and self.leaf_source is None:
            raise ValueError("nodes_per_leaf needs leaf_source: a data sheet or a measurement")
        if self.leaf_taper is not None and self.beyond is not None and self.beyond.links is not None:
            raise ValueError("leaf_taper and beyond.links have the same meaning; give one of them")
        return self


class SystemSpec(Spec):
    """A validated system YAML."""

    acting = (
        ActsIf("slurm", "system.scheduler", "slurm", why="only scheduler slurm reads it"),
        ActsIf("storage", "uses_storage", why="data.staging is none, and nothing is swapped to a file there"),
        ActsIf("device network", "system.modelled", why="it is read from the system's file alone"),
        ActsIf("modules_init modules_reset", "system.modules", why="no modules are loaded"),
    )

    name: Name = Field(description="Name of the system, as in its file name.")
    title: str = Field(description="Description of the system in words.")
    scheduler: Literal["none", "slurm"] = Field("none", description="none: this machine. slurm: submit with sbatch.")
    slurm: SlurmSpec = Field(SlurmSpec(), description="Options of sbatch and srun.")
    node: NodeSpec = Field(NodeSpec(), description="One node.")
    launch: LaunchSpec = Field(LaunchSpec(), description="How ranks are started.")
    container: ContainerSpec = Field(ContainerSpec(), description="The container that ranks run in.")
    storage: StorageSpec = Field(StorageSpec(), description="Storage tiers for staged samples.")
    device: DeviceSpec | None = Field(None, description="Data sheet of a GPU; none: not given.")
    network: NetworkSpec | None = Field(None, description="Data sheet of the network; none: not given.")
    modelled: Flag = Field(False, description="This machine is only described for dlbench project; nothing runs on it.")
    modules: Annotated[tuple[Module, ...], FromText] = Field(
        (), description="Environment modules to load, in order; a list, or text: gcc/12.2,openmpi/4.1."
    )
    modules_init: tuple[str, ...] = Field(
        (),
        description="Shell lines before modules are loaded; none: /etc/profile is read if the command module is "
        "missing.",
    )
    modules_reset: Literal["purge", "reset", "none"] = Field(
        "purge", description="Command before the modules are loaded: module purge, module reset (Cray), or none."
    )
    setup: tuple[str, ...] = Field((), description="Shell lines between modules and ranks; a list, or one line.")
    python: str | None = Field(None, description="Python on the compute nodes; none: the one that runs dlbench.")

    @property
    def binds_gpus(self) -> bool:
        return self.slurm.asks_for_gpus and self.launch.launcher in BY_SRUN

    @field_validator("setup", "modules_init", mode="before")
    @classmethod
    def _setup_from_text(cls, value: object) -> object:
        """Accepts a text from `--set` or `--ab`: one line, or an empty text for none."""
        if not isinstance(value, str):
            return value
        return (value,) if value.strip() else ()

    @field_validator("python", mode="after")
    @classmethod
    def _python_is_one_path(cls, value: str | None) -> str | None:
        """Refuses commands with arguments; the path is started as one word and may contain spaces."""
        first, *further = (value or "").split(" ")
        if further and ("/" not in first or any(word.startswith("-") for word in further)):
            raise ValueError(
                f"{value!r} is a command with arguments, but python must be the path of a program; write a script that "
                'ends with the command (exec apptainer exec --nv image.sif python3 "$@"), and give its path'
            )
        return value

    @model_validator(mode="after")
    def _launcher_and_container_fit(self) -> Self:
        if self.scheduler == "slurm" and self.launch.launcher == "local":
            raise ValueError("launch.launcher 'local' is for one machine; use srun-mpi, srun-gloo or mpirun")
        kind = self.container.kind
        if kind == "none":
            return self
        if kind == "pyxis" and self.launch.launcher not in ("srun-mpi", "srun-gloo"):
            raise ValueError("container.kind 'pyxis' needs srun: set launch.launcher to srun-mpi or srun-gloo")
        lost = {"LD_LIBRARY_PATH", "PATH"}.intersection(self.launch.environment)
        if kind == "apptainer" and lost:
            name = min(lost)
            raise ValueError(f"launch.environment.{name} does not reach Apptainer containers: set APPTAINERENV_{name}")
        return self
