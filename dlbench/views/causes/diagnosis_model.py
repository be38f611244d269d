"""Diagnosed runs as plain data: what the text and the JSON of `dlbench diagnose` both print."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate

FORMAT = "dlbench.diagnosis"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CauseShare:
    """One cause at one scaling point."""

    name: str
    """One of `dlbench.reading.causes.CAUSES`; `step` for their sum."""
    seconds: Estimate
    """Mean over runs, seconds a step."""
    ideal_seconds: float
    lost: Estimate
    """Share of the ideal lost to it (fraction); causes sum to 1 - efficiency of means."""
    is_measured: bool
    """Whether all runs of the point and of the baseline tell of it; if not, its time is part of `compute`, and its 0
    seconds here mean nothing."""
    not_measured: tuple[str, ...]
    """Why some of these runs do not tell of it, each reason once."""
    notes: tuple[str, ...]
    """How runs know it, or why it is 0."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank, or a host, for which the others waited; means over the runs of a point."""

    rank: int | None
    host: str
    last_share: float
    """Share of the steps in which it came last."""
    waited_s: float
    """Waiting for it, seconds a step, mean over all ranks."""
    waited_share: float
    """The same as a share of all waiting."""
    input_s: float
    """Its own time beyond that of the ranks in time in input wait and copy, in the steps in which it was late, seconds
    a step; of a host the mean over its ranks."""
    compute_s: float
    host_s: float
    late_by: str
    """`input`, `compute`, `host`, or `unexplained`."""


@dataclass(frozen=True, kw_only=True)
class NextExperiment:
    """Something to try."""

    text: str
    forecast_gain: float | None
    """Forecast growth of the throughput (1)."""
    basis: str
    """What the forecast was computed from, or why there is none; empty where none was asked for."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The diagnosis of a point."""

    line: str
    """In one sentence."""
    finding: str
    """See `dlbench.views.causes.diagnosis.Finding`."""
    name: str
    """network-bound, straggler-bound, input-bound, ...; empty where nothing stands out."""
    cause: str
    """The largest cause, whether it stands out or not; empty where nothing is lost."""
    bound: float | None
    """Growth of the throughput if what is lost to that cause took no time (1): a limit, no forecast."""
    experiments: tuple[NextExperiment, ...]


@dataclass(frozen=True, kw_only=True)
class DiagnosedPoint:
    """One rank count of a group."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...]
    verdict: Verdict
    efficiency: Estimate
    causes: tuple[CauseShare, ...]
    whole: CauseShare
    waiting_ranks: tuple[Straggler, ...]
    waiting_hosts: tuple[Straggler, ...]
    num_hosts: int
    """Hosts of a run, the most of any."""
    planted: tuple[tuple[int, float], ...]
    """Ranks slowed on purpose, and what that added, seconds a step, mean over runs."""


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """What watching cost in the runs of a group."""

    value: float
    """Share of the step time. Measured: of the newest series that was, at its largest rank count. Accounted: median
    over runs."""
    low: float
    """Accounted: least low end of any run."""
    high: float
    """Accounted: largest high end of any run."""
    method: str
    """`measured` if that was done for any run, else `accounted`."""
    ranks: int | None
    """Where it was measured; None if accounted, over all rank counts."""
    num_runs: int
    """Runs behind it: pairs of watched and unwatched ones if measured."""


@dataclass(frozen=True, kw_only=True)
class DiagnosedGroup:
    """Runs that may be compared with each other."""

    id: str
    label: str
    watching: str
    fault: str
    """A fault planted on purpose; empty for none."""
    watch_cost: WatchCost | None
    limits: tuple[str, ...]
    """What blurs the causes of these runs."""
    points: tuple[DiagnosedPoint, ...]


@dataclass(frozen=True, kw_only=True)
class SlowHost:
    """One host over the history of all runs."""

    host: str
    ratio: Estimate
    """Own work of its slowest rank relative to that of the other hosts' slowest ranks in the same runs."""
    last_share: float
    fair_share: float
    """Share of steps in which one of its ranks would come last if all ranks did equally often."""
    verdict: str


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """All hosts."""

    hosts: tuple[SlowHost, ...]
    exclude: tuple[str, ...]
    unsafe: tuple[str, ...]
    """Slow hosts whose names may not stand in an option."""
    option: str
    """`--exclude=...` for sbatch; empty where no host is slow."""
    threshold: float
    num_runs: int
    num_single_host: int
    num_faulty: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything `dlbench diagnose` says, but for energy and decomposition."""

    groups: tuple[DiagnosedGroup, ...]
    nodes: NodeHistory
    num_variants: int
    """Groups of runs with something taken away on purpose; they are not diagnosed by themselves."""
    without_figures: tuple[tuple[str, str, str], ...]
    """Run, state and why."""
    damaged: tuple[str, ...]
    network: str
    """System and carrier of the fitted costs behind forecasts; empty for none."""

    @property
    def has_figures(self) -> bool:
        """Whether any run has."""
        return bool(self.groups) or self.num_variants > 0
