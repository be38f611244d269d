"""Fitted costs of a network: what a message costs inside a group of ranks and across groups."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import Count, CountOrZero, NonNegative, Spec

LevelName = Literal["inside", "across"]


class Piece(Spec):
    """Costs of messages up to a size (Hockney's model: alpha + bytes x beta)."""

    up_to_bytes: Count | None = Field(None, description="Largest message of this piece, bytes; none: no limit.")
    alpha_s: NonNegative = Field(description="Start-up of a message, seconds.")
    beta_s_per_byte: NonNegative = Field(description="Seconds per byte and direction.")
    alpha_interval_s: tuple[float, float] | None = Field(None, description="95 % interval of alpha, seconds.")
    beta_interval_s_per_byte: tuple[float, float] | None = Field(None, description="95 % interval of beta.")


class Level(Spec):
    """One level of the network: inside a group, or across groups."""

    pieces: tuple[Piece, ...] = Field(min_length=1, description="By message size, ascending; the last has no limit.")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        limits = [piece.up_to_bytes for piece in self.pieces]
        if limits[-1] is not None or any(limit is None for limit in limits[:-1]):
            raise ValueError("the last piece, and only the last, has no up_to_bytes")
        known = [limit for limit in limits if limit is not None]
        if known != sorted(set(known)):
            raise ValueError("pieces must ascend by up_to_bytes")
        return self

    def piece(self, num_bytes: float) -> Piece:
        """The piece for a message of so many bytes."""
        return next(p for p in self.pieces if p.up_to_bytes is None or num_bytes <= p.up_to_bytes)

    def time(self, num_bytes: float) -> float:
        """Seconds of one message."""
        piece = self.piece(num_bytes)
        return piece.alpha_s + num_bytes * piece.beta_s_per_byte


class LineCost(Spec):
    """A whole collective of one kind as a line: seconds = startup + bytes x per byte, for one layout."""

    name: str = Field(description="What was timed, e.g. ddp gloo all_reduce or hierarchical.")
    startup_s: NonNegative = Field(description="Seconds of an empty message.")
    per_byte_s: NonNegative = Field(description="Seconds per byte of the vector.")
    ranks: Count = Field(description="Ranks it holds for.")

    def time(self, num_bytes: float) -> float:
        """Seconds for a vector of so many bytes."""
        return self.startup_s + num_bytes * self.per_byte_s


class NetworkModel(Spec):
    """`*.network.json`: fitted costs of one system."""

    format: Literal["dlbench.network"] = Field("dlbench.network", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    system: str = Field(description="Name of the system it was measured on.")
    transport: str = Field(description="What carried the messages, e.g. torch-gloo or mpi.")
    inside: Level | None = Field(None, description="Inside a group; none: never measured.")
    across: Level | None = Field(None, description="Across groups; none: never measured.")
    gamma_s_per_byte: NonNegative = Field(0.0, description="Seconds per byte reduced.")
    shared_link: bool = Field(
        True, description="Whether ranks of a node share one link to other nodes (one adapter a node)."
    )
    shared_memory: bool = Field(
        False,
        description="Whether ranks of a group share what carries messages inside it (memory, processors), so that the "
        "bytes of all of them add up.",
    )
    collectives: tuple[LineCost, ...] = Field((), description="Collectives of back-ends, each as a line.")
    median_error: NonNegative | None = Field(
        None, description="Median of |predicted / measured - 1| over points that the fit did not see."
    )
    num_points: CountOrZero = Field(0, description="Measured points behind the fit.")
    sources: tuple[str, ...] = Field((), description="Runs it was fitted to.")
    fitted: str = Field("", description="When, UTC, ISO 8601.")
