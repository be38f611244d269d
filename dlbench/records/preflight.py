"""`preflight.json`: the result of a pre-flight of a system, and the results of the ranks of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from dlbench.records.files import Named, Numbered
from dlbench.records.folder import RunFolder
from dlbench.specs.base import CountOrZero, Flag, RankNumber, RunName, Spec

FindingState = Literal["ok", "doubt", "wrong", "unknown"]
"""doubt: it works, but figures may suffer. unknown: it could not be checked here."""


class Finding(Spec):
    """The result of a check."""

    subject: str = Field(description="Subject of the check.")
    state: FindingState = Field(description="ok, doubt, wrong or unknown.")
    found: str = Field(description="Result; for unknown: the reason.")
    remedy: str = Field("", description="Remedy; empty: none needed.")


class SeenScratch(Spec):
    """A scratch folder of the system on a node."""

    key: Literal["local", "memory"] = Field(description="Its key below storage in the system file.")
    path: str = Field("", description="The folder, resolved on the node.")
    file_system: str = Field("", description="Kind of file system, e.g. ext4 or tmpfs; empty: unknown.")
    free_bytes: CountOrZero | None = Field(None, description="Free bytes; null: unknown.")
    problem: str = Field("", description="Why it is not writable; empty: a file was written, synced and read.")


class SeenRank(Spec):
    """The result of one rank of a pre-flight; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: Literal["dlbench.preflight-rank"] = Field("dlbench.preflight-rank", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    rank: RankNumber = Field(description="The rank, from 0.")
    local_rank: RankNumber = Field(description="Its place on the node, from 0.")
    host: str = Field(description="Host, under Slurm the node's name.")
    python: str = Field(description="Python executable.")
    versions: dict[str, str] = Field(
        description="Versions of Python, dlbench and imported packages; missing ones are absent."
    )
    broken: dict[str, str] = Field(
        default_factory=dict, description="Installed packages that cannot be imported, with the reason."
    )
    cores: tuple[int, ...] = Field(description="Cores of this rank.")
    pinned: Flag = Field(description="Whether it was bound, by dlbench or its launcher.")
    node_gpus: tuple[str, ...] = Field((), description="UUIDs of the GPUs that the driver shows this rank.")
    gpu: str | None = Field(None, description="UUID of its GPU; null: the CPU.")
    near_gpu: Flag | None = Field(
        None, description="Whether all its cores are on its GPU's NUMA node; null: unknown, or no GPU."
    )
    compiler: str = Field("", description="Missing parts for torch.compile on its GPU; empty: none, or no GPU.")
    problems: tuple[str, ...] = Field((), description="Errors that would end a run of this rank, each a sentence.")
    scratch: tuple[SeenScratch, ...] = Field((), description="Scratch folders of the system, by the node's first rank.")


class PreflightNode(Spec):
    """One node of a pre-flight's job."""

    host: str = Field(description="Host, under Slurm the node's name.")
    ranks: tuple[SeenRank, ...] = Field((), description="Results of its ranks; empty: no rank reported.")
    problems: tuple[str, ...] = Field((), description="Why it cannot be used; empty: it passed.")
    doubts: tuple[str, ...] = Field((), description="Warnings.")


class PreflightReport(Spec):
    """`preflight.json`."""

    format: Literal["dlbench.preflight"] = Field("dlbench.preflight", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    id: RunName = Field(description="Name of the pre-flight and of its folder.")
    system: str = Field(description="Name of the system.")
    created: str = Field(description="UTC, ISO 8601.")
    dlbench_version: str = Field(description="Version of dlbench that asked.")
    job_id: str = Field("", description="Slurm's id of the job; empty: none was submitted.")
    job: tuple[Finding, ...] = Field((), description="Results for the whole job: sbatch --test-only, the all-reduce.")
    nodes: tuple[PreflightNode, ...] = Field((), description="Its nodes.")
    exclude: str = Field("", description="Nodes to exclude, as for --exclude; empty: none.")
    exit_code: CountOrZero = Field(description="Exit code of the command.")


class PreflightFolder:
    """Names of the files of a pre-flight, in addition to those of the run of its all-reduce."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunFolder(path)

    report = Named("preflight.json")  # The result.
    seen = Named("seen")  # Files of ranks.
    hosts = Named("seen/hosts")  # Names of the job's nodes, a line each.
    ended = Named("seen/ended")  # Exit code of the job's script.
    rank = Numbered("seen/rank-{:04d}.json")  # Result of a rank.
    begun = Numbered("seen/rank-{:04d}.begun")  # Its node's name: the folder is visible and writable there.
    failed = Numbered("seen/rank-{:04d}.failed")  # Exit code of its Python if not 0.
    log = Numbered("seen/rank-{:04d}.log")  # Its output.
