"""`record.json`: what happened in one run. Immutable; rank 0 writes it once, at the end.

Statistics are not here: raw values are kept (step files), numbers are made by `dlbench.analysis`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Flag, NonNegative, RunName, Spec


class Check(Spec):
    """One sanity check."""

    name: str = Field(description="What was checked.")
    passed: Flag = Field(description="Whether it held.")
    detail: str = Field(description="The evidence, or what went wrong.")


class Setting(Spec):
    """A requested setting and what was in force."""

    key: str = Field(
        description="Key of the plan, e.g. engine.horovod.cycle_time_ms, or a name of the same form for what a plan "
        "cannot ask for."
    )
    requested: str | int | float | bool | None = Field(description="What the plan asks for.")
    effective: str | int | float | bool | None = Field(description="What was in force; null where it cannot be told.")
    evidence: str = Field(description="How the effective value is known.")


class RankResult(Spec):
    """What one rank says of itself at the end."""

    rank: CountOrZero = Field(description="The rank, from 0.")
    node_rank: CountOrZero = Field(description="Its node, from 0.")
    host: str = Field(description="Host name.")
    device: str = Field(description="Where it computed, e.g. cpu or cuda:0 (NVIDIA A100).")
    cores: tuple[int, ...] = Field(description="Cores it was bound to (those it may use, where not bound).")
    threads: Count = Field(description="Compute threads.")
    pinned: Flag = Field(description="Whether it was bound to cores of its own.")
    samples: CountOrZero = Field(description="Samples of all measured steps.")
    measured_s: NonNegative = Field(description="Start of the first to end of the last measured step, seconds.")
    first_loss: float | None = Field(description="Loss of the first step (warm-up included); null if not finite.")
    last_loss: float | None = Field(description="Loss of the last step; null if not finite.")
    losses_finite: Flag = Field(description="Whether every loss was finite.")
    initial_parameters_sha256: str = Field(description="Digest of all parameters before the first step.")
    final_parameters_sha256: str = Field(description="Digest of all parameters after the last step.")
    peak_memory_bytes: CountOrZero = Field(description="Peak resident memory (CPU) or peak allocated (GPU), bytes.")
    startup_s: NonNegative = Field(description="Start of the process to the first step, seconds.")
    bad_samples: tuple[str, ...] = Field((), description="Unreadable samples, named.")
    bad_sample_count: CountOrZero = Field(0, description="How many samples were unreadable.")


class Record(Spec):
    """`record.json`."""

    format: Literal["dlbench.record"] = Field("dlbench.record", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run, as in its plan.")
    configuration: str = Field(description="Digest of the plan's configuration.")
    state: Literal["valid", "invalid"] = Field(description="invalid: a sanity check failed; no figure may be made.")
    started: str = Field(description="UTC, ISO 8601, of rank 0's start.")
    finished: str = Field(description="UTC, ISO 8601.")
    clock: Literal["monotonic", "cuda-events"] = Field(description="What measured the phases.")
    phases: Literal["overlapped", "synchronised"] = Field(description="The phase mode that was in force.")
    num_parameters: Count = Field(description="Trained parameters of the network.")
    gradient_bytes: Count = Field(description="Bytes of gradients exchanged in one step, before compression.")
    ranks: tuple[RankResult, ...] = Field(min_length=1, description="What every rank says of itself, by rank.")
    checks: tuple[Check, ...] = Field(min_length=1, description="The sanity checks.")
    settings: tuple[Setting, ...] = Field((), description="Settings of the engine, as asked for and as in force.")
    warnings: tuple[str, ...] = Field((), description="Reasons for doubt, each a sentence.")
    data: dict[str, Any] = Field(description="What the data source says of itself.")
    environment: dict[str, str] = Field(description="Environment of rank 0, by name.")
    environment_differences: tuple[str, ...] = Field((), description="Where other ranks' environment differs.")

    @property
    def failed_checks(self) -> list[Check]:
        """The checks that did not hold."""
        return [check for check in self.checks if not check.passed]
