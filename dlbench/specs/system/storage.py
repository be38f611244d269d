"""Tiers of storage that samples may be staged to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlbench.specs.base import Bytes, Form, Spec

Tier = Literal["shared", "local", "memory"]
"""Where samples may lie: the shared file system, a disk of the node's own, memory of the node (tmpfs)."""
StagingTier = Literal["local", "memory"]


FolderOfNode = Annotated[
    str,
    Field(pattern=r"^(/|\$[A-Za-z_][A-Za-z0-9_]*|~/)[^\x00-\x1f]*$"),
    Form("a path from / or ~/, or from a variable, e.g. $TMPDIR/dlbench"),
]


class TierSpec(Spec):
    """A place of the node's own that samples may be staged to."""

    path: FolderOfNode = Field(
        description="A folder of the node: a path from / or ~/, or one that begins with a variable of the job, e.g. "
        "$SLURM_TMPDIR or $TMPDIR/dlbench. {host} stands for the node's name."
    )
    capacity_bytes: Bytes | None = Field(
        None, description="Bytes that samples may take there on each node; none: what the file system has free."
    )


class StorageSpec(Spec):
    """Tiers of storage. The shared file system is wherever the data set lies."""

    shared_title: str | None = Field(
        None, min_length=1, description="What the shared file system is, in words, e.g. Lustre, 40 OSTs; for reports."
    )
    local: TierSpec = Field(TierSpec(path="$TMPDIR"), description="A disk of the node's own.")
    memory: TierSpec = Field(TierSpec(path="/dev/shm"), description="Memory of the node: a tmpfs.")  # noqa: S108  (a folder of the user's own is made there)

    def tier(self, name: StagingTier) -> TierSpec:
        """One of the two tiers of a node."""
        return self.local if name == "local" else self.memory
