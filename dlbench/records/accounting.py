"""Slurm's accounting of a run's job: `accounting.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import CountOrZero, NonNegative, Positive, RunName, Spec


class Attempt(Spec):
    """One time that Slurm ran the job; a job that was requeued has several."""

    state: str = Field(description="Slurm's word, such as COMPLETED or PREEMPTED.")
    exit_code: str | None = Field(None, description="EXIT:SIGNAL, as Slurm writes it; null: not reported.")
    eligible: NonNegative | None = Field(
        None, description="From when it could have started, seconds since 1970; null: not reported."
    )
    started: NonNegative | None = Field(None, description="Seconds since 1970; null: it never started.")
    ended: NonNegative = Field(description="Seconds since 1970.")
    nodes: CountOrZero = Field(description="Nodes that it held, or asked for where it never started.")
    node_list: str = Field(description="Their names, as Slurm writes them; empty: none.")
    time_limit_s: Positive | None = Field(None, description="What it asked for, seconds; null: none, or not reported.")
    partition: str = Field("", description="Where it ran.")
    account: str = Field("", description="Who is charged.")
    qos: str = Field("", description="Its quality of service.")

    @property
    def elapsed_s(self) -> float:
        """From start to end."""
        return max(0.0, self.ended - self.started) if self.started is not None else 0.0

    @property
    def node_s(self) -> float:
        """Node-seconds that it held."""
        return self.nodes * self.elapsed_s

    @property
    def waited_s(self) -> float | None:
        """In the queue, from when it could have started; None where it is not reported."""
        if self.eligible is None or self.started is None:
            return None
        return max(0.0, self.started - self.eligible)


class Step(Spec):
    """One srun of the run."""

    id: str = Field(description="JOB.NUMBER.")
    state: str = Field(description="Slurm's word.")
    exit_code: str = Field(description="EXIT:SIGNAL: of the rank that ended worst.")
    started: NonNegative = Field(description="Seconds since 1970.")
    elapsed_s: NonNegative = Field(description="From start to end, seconds.")
    nodes: CountOrZero = Field(description="Nodes that it used.")
    node_list: str = Field(description="Their names.")
    max_rss_bytes: NonNegative | None = Field(
        None, description="Largest resident memory of a task, as often as Slurm looked (JobAcctGatherFrequency)."
    )
    energy_j: Positive | None = Field(None, description="Of its nodes meanwhile, joules.")


class RunAccounting(Spec):
    """What Slurm says of the job of a run, after the job has ended."""

    format: Literal["dlbench.accounting"] = Field("dlbench.accounting", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run that it belongs to.")
    source: Literal["sacct", "squeue"] = Field(
        description="Who said so. squeue knows a job's times for minutes after its end, and nothing of steps."
    )
    asked: str = Field(description="When, UTC, ISO 8601.")
    job_id: str = Field(description="Slurm's.")
    job_runs: tuple[RunName, ...] = Field(min_length=1, description="All runs of the job, in their order.")
    attempts: tuple[Attempt, ...] = Field(min_length=1, description="Every time that the job ran, in order.")
    steps: tuple[Step, ...] = Field((), description="The run's own steps, in order.")
    job_energy_j: Positive | None = Field(None, description="Of all the job's nodes, all attempts, joules.")
    not_measured: dict[str, str] = Field(description="Why a figure is not there, by its name.")

    @property
    def never_started(self) -> bool:
        """Whether the job ended in the queue: it took nothing."""
        return all(attempt.started is None for attempt in self.attempts)

    @property
    def waited_s(self) -> float | None:
        """In the queue, all attempts."""
        found = [attempt.waited_s for attempt in self.attempts if attempt.waited_s is not None]
        return sum(found) if found else None

    @property
    def job_node_s(self) -> float:
        """Node-seconds that the job held, all attempts."""
        return sum(attempt.node_s for attempt in self.attempts)

    @property
    def run_s(self) -> float | None:
        """Elapsed time of the run itself, seconds; None where the job's other runs are not separated."""
        if self.steps:
            return sum(step.elapsed_s for step in self.steps)
        return sum(attempt.elapsed_s for attempt in self.attempts) if len(self.job_runs) == 1 else None

    @property
    def run_node_s(self) -> float | None:
        """Node-seconds that the job held while the run was in it; None as `run_s`.

        The nodes of the job count, not those of the run: a smaller run of a shared job keeps the others waiting.
        """
        if len(self.job_runs) == 1 and not self.steps:
            return self.job_node_s
        held = max(attempt.nodes for attempt in self.attempts)
        return None if self.run_s is None else held * self.run_s

    @property
    def max_rss_bytes(self) -> float | None:
        """The largest of its steps."""
        return max((step.max_rss_bytes for step in self.steps if step.max_rss_bytes is not None), default=None)

    @property
    def energy_j(self) -> float | None:
        """Of the run's nodes while it ran; of a job that holds no other run, of the whole job."""
        if len(self.job_runs) == 1 and self.job_energy_j is not None:
            return self.job_energy_j
        found = [step.energy_j for step in self.steps if step.energy_j is not None]
        return sum(found) if found and len(found) == len(self.steps) else None
