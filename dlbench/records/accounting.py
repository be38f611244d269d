"""`accounting.json`: Slurm's accounting of a run's job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import CountOrZero, NonNegative, Positive, RunName, Spec


class Attempt(Spec):
    """One time that Slurm ran the job; a job that was requeued has several."""

    state: str = Field(description="Slurm's word, such as COMPLETED or PREEMPTED.")
    exit_code: str | None = Field(None, description="EXIT:SIGNAL, as Slurm writes it; null: not reported.")
    eligible: NonNegative | None = Field(None, description="When it was eligible, seconds since 1970; null: unknown.")
    started: NonNegative | None = Field(None, description="Seconds since 1970; null: it never started.")
    ended: NonNegative = Field(description="Seconds since 1970.")
    nodes: CountOrZero = Field(description="Allocated nodes, or requested ones if it never started.")
    node_list: str = Field(description="Their names, as Slurm writes them; empty: none.")
    time_limit_s: Positive | None = Field(None, description="Requested, seconds; null: none, or not reported.")
    partition: str = Field("", description="Partition.")
    account: str = Field("", description="Charged account.")
    qos: str = Field("", description="Quality of service.")

    @property
    def elapsed_s(self) -> float:
        if self.started is None:
            return 0.0
        return max(0.0, self.ended - self.started)

    @property
    def node_s(self) -> float:
        """Returns the allocated node-seconds."""
        return self.nodes * self.elapsed_s

    @property
    def waited_s(self) -> float | None:
        """Returns the seconds in the queue since it was eligible; None if not reported."""
        if self.eligible is None or self.started is None:
            return None
        return max(0.0, self.started - self.eligible)


class Step(Spec):
    """A job step (srun) of the run."""

    id: str = Field(description="JOB.NUMBER.")
    state: str = Field(description="State by Slurm.")
    exit_code: str = Field(description="EXIT:SIGNAL: of the rank that ended worst.")
    started: NonNegative = Field(description="Seconds since 1970.")
    elapsed_s: NonNegative = Field(description="From start to end, seconds.")
    nodes: CountOrZero = Field(description="Nodes that it used.")
    node_list: str = Field(description="Their names.")
    max_rss_bytes: NonNegative | None = Field(None, description="MaxRSS of a task, bytes; sampled by Slurm.")
    energy_j: Positive | None = Field(None, description="Energy of its nodes, joules.")


class RunAccounting(Spec):
    """Slurm's accounting of the job of a run, after the job has ended."""

    format: Literal["dlbench.accounting"] = Field("dlbench.accounting", description="Format of the file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    run_id: RunName = Field(description="The run that it belongs to.")
    source: Literal["sacct", "squeue"] = Field(description="Source; squeue has no steps, and forgets jobs in minutes.")
    asked: str = Field(description="Time of the query, UTC, ISO 8601.")
    job_id: str = Field(description="Id of the job.")
    job_runs: tuple[RunName, ...] = Field(min_length=1, description="All runs of the job, in their order.")
    attempts: tuple[Attempt, ...] = Field(min_length=1, description="Every time that the job ran, in order.")
    steps: tuple[Step, ...] = Field((), description="The run's own steps, in order.")
    job_energy_j: Positive | None = Field(None, description="Energy of all nodes of the job, all attempts, joules.")
    not_measured: dict[str, str] = Field(description="Reasons for missing figures, by name.")

    @property
    def never_started(self) -> bool:
        return all(attempt.started is None for attempt in self.attempts)

    @property
    def waited_s(self) -> float | None:
        waits_s = [attempt.waited_s for attempt in self.attempts if attempt.waited_s is not None]
        return sum(waits_s) if waits_s else None

    @property
    def job_node_s(self) -> float:
        return sum(attempt.node_s for attempt in self.attempts)

    @property
    def run_s(self) -> float | None:
        """Returns the elapsed seconds of the run; None if the job's other runs cannot be separated."""
        if self.steps:
            return sum(step.elapsed_s for step in self.steps)
        if len(self.job_runs) > 1:
            return None
        return sum(attempt.elapsed_s for attempt in self.attempts)

    @property
    def run_node_s(self) -> float | None:
        """Returns the node-seconds of all nodes of the job during the run, as idle ones wait for it; None: unknown."""
        if len(self.job_runs) == 1 and not self.steps:
            return self.job_node_s
        nodes = max(attempt.nodes for attempt in self.attempts)
        return None if self.run_s is None else nodes * self.run_s

    @property
    def max_rss_bytes(self) -> float | None:
        return max((step.max_rss_bytes for step in self.steps if step.max_rss_bytes is not None), default=None)

    @property
    def energy_j(self) -> float | None:
        """Returns the energy of the run's nodes, joules; of the whole job if it has no other run."""
        if len(self.job_runs) == 1 and self.job_energy_j is not None:
            return self.job_energy_j
        energies_j = [step.energy_j for step in self.steps if step.energy_j is not None]
        if not energies_j or len(energies_j) < len(self.steps):
            return None
        return sum(energies_j)
