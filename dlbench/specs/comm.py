"""Plans of the collective benchmark, and the network costs that are fitted to its results."""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import Count, CountOrZero, Flag, Name, NonNegative, Positive, Precision, Ranks, Repeats, Spec
from dlbench.specs.plan import LaunchPlan, LayoutSpec, job_label

Collective = Literal[
    "allreduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "scatter", "gather", "all-to-all", "p2p"
]  # fmt: skip

ALGORITHMS: dict[Collective, tuple[str, ...]] = {
    "allreduce": (
        "ring",
        "binomial-tree",
        "double-binary-tree",
        "recursive-doubling",
        "recursive-halving-doubling",
        "shifted-halving-doubling",
        "direct",
        "naive",
        "parameter-server",
        "hierarchical",
        "leader",
    ),
    "reduce-scatter": ("ring", "recursive-halving", "direct"),
    "all-gather": ("ring", "recursive-doubling", "direct"),
    "broadcast": ("binomial-tree", "chain", "scatter-all-gather"),
    "reduce": ("binomial-tree", "scatter-gather"),
    "scatter": ("binomial-tree", "linear"),
    "gather": ("binomial-tree", "linear"),
    "all-to-all": ("pairwise", "direct"),
}
"""dlbench's own algorithms, executed message by message."""

DEDICATED_SERVERS = "dedicated-servers"
"""All-reduce of workers by servers that do not work, the last ranks; only modelled, as it leaves the servers out."""

ROOTED: tuple[Collective, ...] = ("broadcast", "reduce", "scatter", "gather")
"""Collectives from or to rank 0; some ranks do not wait for others."""

PAIRS: Collective = "p2p"  # Not a collective: messages between pairs of ranks.
PAIR_WAYS = ("ping-pong", "window")  # Half of a round trip; a message of several in flight, in one direction.

RankPair = tuple[CountOrZero, CountOrZero]  # First and second rank; for a window, sender and receiver.

BACKENDS = ("gloo", "mpi", "nccl", "horovod")
"""Libraries whose collectives are timed for comparison; horovod only in runs of earlier versions."""

LIBRARY = "library"  # Algorithm name of a library, which selects its algorithm.
IN_PLACE, OUT_OF_PLACE = f"{LIBRARY}-in-place", f"{LIBRARY}-out-of-place"
"""Names of MPI's all-reduce in place, as in training, and into a second buffer, as in OSU's osu_allreduce."""

GROUPED_ALGORITHMS = ("hierarchical", "leader")
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "bf16": 2}

LevelName = Literal["inside", "across", "beyond"]

LEVELS: tuple[LevelName, ...] = ("inside", "across", "beyond")
"""Inside a group of ranks (a node), across groups below one leaf switch, and between leaf switches."""

POOR_MEDIAN = 0.25  # Largest median error of useful predictions; algorithms often differ by less.
POOR_WORST = 1.0  # Largest error of useful predictions, as a share of the measured time.
DATA_SHEET = "data sheet"  # Transport of a network that was not measured.


class CommSpec(Spec):
    """Settings of the collective benchmark."""

    collective: Collective = Field("allreduce", description="The collective.")
    algorithms: tuple[str, ...] = Field((), description="Algorithms of dlbench; none: only libraries are timed.")
    backends: tuple[Literal["gloo", "mpi", "nccl", "horovod"], ...] = Field((), description="Libraries for comparison.")
    sizes: tuple[Count, ...] = Field(min_length=1, description="Buffer sizes per rank (nccl-tests), bytes, ascending.")
    dtype: Precision = Field("fp32", description="Element type.")
    transport: Literal["torch", "mpi"] = Field("torch", description="Messages by torch.distributed or by mpi4py.")
    warmup: CountOrZero = Field(2, description="Untimed iterations of each point, after trials.")
    iterations: Count = Field(10, description="Timed iterations of each point.")
    group_size: Ranks | None = Field(None, description="Ranks per group of grouped algorithms; none: per node.")
    shards: Ranks | None = Field(None, description="Number of servers of parameter-server; none: every rank is one.")
    pairs: tuple[RankPair, ...] = Field((), description="p2p: pairs of ranks to measure, one at a time.")
    congestors: tuple[RankPair, ...] = Field((), description="p2p: pairs that send at once, first to second rank.")
    timeout_s: Positive = Field(60.0, description="Maximum time of one iteration, seconds; a slower run is aborted.")
    check: Flag = Field(True, description="Compare every result with an independently computed sum.")

    @model_validator(mode="after")
    def _names_and_sizes(self) -> Self:
        valid_names = PAIR_WAYS if self.collective == PAIRS else ALGORITHMS[self.collective]
        if bool(self.pairs) != (self.collective == PAIRS) or (self.pairs and self.backends):
            raise ValueError("pairs: only p2p measures pairs of ranks, and without backends")
        for name in self.algorithms:
            if name not in valid_names:
                raise ValueError(f"algorithms: {name!r} is none of {self.collective}: {', '.join(valid_names)}")
        if not self.algorithms and not self.backends:
            raise ValueError("nothing to measure: give algorithms, backends, or both")
        width = ELEMENT_BYTES[self.dtype]
        for size in self.sizes:
            if size % width:
                raise ValueError(f"sizes: {size} bytes are not a whole number of {self.dtype} elements ({width} bytes)")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes: must ascend without repeats")
        return self


class CommSeries(Spec):
    """Position of the run in its series."""

    id: Name = Field(description="Name of the series: all runs planned together.")
    repeat: CountOrZero = Field(description="Number of the repeat, from 0.")
    repeats: Repeats = Field(description="Runs per point.")
    position: CountOrZero = Field(description="Position in the series, from 0.")


def group_problem(group_size: int | None, layout: LayoutSpec) -> str | None:
    """Returns why the ranks cannot form groups for a grouped algorithm; None if they can."""
    group, ranks = group_size or layout.ranks_per_node, layout.ranks
    if group not in (1, ranks) and layout.ranks_per_node % group == 0:
        return None
    return f"needs two groups of two ranks or more inside nodes, but there are {ranks // group} of {group}"


class CommPlan(LaunchPlan):
    """One run of `dlbench comm`."""

    format: Literal["dlbench.comm-plan"] = Field("dlbench.comm-plan", description="Type of this file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    comm: CommSpec = Field(description="What is measured.")
    series: CommSeries = Field(description="Position of the run in its series.")
    stall_timeout_s: Positive = Field(600.0, description="A rank without progress for this time ends itself, seconds.")

    @property
    def title(self) -> str:
        return f"collective benchmark of {self.comm.collective}"

    @property
    def word(self) -> str:
        return f"comm-{self.comm.collective}"

    @property
    def job_name(self) -> str:
        return job_label(self.word, self.layout, {}, f"r{self.series.repeat + 1}")

    @property
    def uses_interface(self) -> bool:
        return self.comm.transport == "torch" or bool({"gloo", "nccl"} & set(self.comm.backends))

    @property
    def group_size(self) -> int:
        return self.comm.group_size or self.layout.ranks_per_node

    @model_validator(mode="after")
    def _groups_exist(self) -> Self:
        group, ranks = self.group_size, self.layout.ranks
        if self.comm.group_size is not None and ranks % group:
            raise ValueError(f"comm.group_size: groups of {group} do not divide {ranks} ranks")
        grouped = [name for name in self.comm.algorithms if name in GROUPED_ALGORITHMS]
        problem = group_problem(self.comm.group_size, self.layout)
        if grouped and problem is not None:
            raise ValueError(f"algorithm {grouped[0]}: {problem}; use more ranks per node, or set --group-size")
        pairs, congestors = self.comm.pairs, self.comm.congestors
        for option, (first, second) in (*(("--victims", p) for p in pairs), *(("--congestors", p) for p in congestors)):
            if first == second or max(first, second) >= ranks:
                raise ValueError(f"{option} {first}:{second}: must be two of {ranks} ranks, numbered from 0")
        if len(set(pairs)) < len(pairs):
            raise ValueError("--victims: a pair is given twice")
        busy_ranks = set(itertools.chain.from_iterable(pairs))
        for rank in itertools.chain.from_iterable(congestors):
            if rank in busy_ranks:
                raise ValueError(f"--congestors: rank {rank} is already in another pair")
            busy_ranks.add(rank)
        if self.comm.shards is not None and self.comm.shards > ranks:
            raise ValueError(f"comm.shards: {self.comm.shards} servers need at least as many ranks, not {ranks}")
        by_mpi = self.system.launch.by_mpi
        if self.comm.transport == "mpi" and not by_mpi:
            raise ValueError("transport mpi: needs launcher mpirun or srun-mpi")
        if "mpi" in self.comm.backends and not by_mpi:
            raise ValueError("backend mpi: needs launcher mpirun or srun-mpi")
        return self


class Piece(Spec):
    """Costs of messages up to a size (Hockney's model: alpha + bytes x beta)."""

    up_to_bytes: Count | None = Field(None, description="Largest message of this piece, bytes; none: no limit.")
    alpha_s: NonNegative = Field(description="Start-up time of a message, seconds.")
    beta_s_per_byte: NonNegative = Field(description="Time per byte in one direction, seconds.")
    alpha_interval_s: tuple[float, float] | None = Field(None, description="95 % interval, seconds; none: no repeats.")
    beta_interval_s_per_byte: tuple[float, float] | None = Field(
        None, description="95 % interval of beta over runs, seconds per byte; none: no repeats."
    )


class Level(Spec):
    """One level of the network: inside a group, across groups, or between leaf switches."""

    pieces: tuple[Piece, ...] = Field(min_length=1, description="Costs by message size; the last piece has no limit.")
    links: Count | None = Field(
        None,
        description="Links that a block's ranks share here: memory, a node's adapters, or uplinks; none: a port per "
        "rank.",
    )

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        limits = [piece.up_to_bytes for piece in self.pieces]
        if limits[-1] is not None or any(limit is None for limit in limits[:-1]):
            raise ValueError("the last piece, and only the last, has no up_to_bytes")
        upper_limits = [limit for limit in limits if limit is not None]
        if upper_limits != sorted(set(upper_limits)):
            raise ValueError("pieces must ascend by up_to_bytes")
        return self

    def piece(self, num_bytes: float) -> Piece:
        return next(p for p in self.pieces if p.up_to_bytes is None or num_bytes <= p.up_to_bytes)

    def time(self, num_bytes: float) -> float:
        piece = self.piece(num_bytes)
        return piece.alpha_s + num_bytes * piece.beta_s_per_byte


class LineCost(Spec):
    """A line for a whole collective of one layout: seconds = startup + bytes x seconds per byte."""

    name: str = Field(description="Name of the timed operation, e.g. ddp gloo all_reduce or hierarchical.")
    startup_s: NonNegative = Field(description="Time of an empty message, seconds.")
    per_byte_s: NonNegative = Field(description="Time per byte of the vector, seconds.")
    ranks: Ranks = Field(description="Rank count to which the line applies.")
    sizes: tuple[Count, Count] | None = Field(None, description="Smallest and largest measured vector, bytes.")
    half_width: NonNegative | None = Field(None, description="Half of the 95 % interval, as a share; none: no repeats.")
    launch_bound: tuple[Count, ...] = Field((), description="Sizes, bytes, whose GPU times may contain launch waits.")

    def time(self, num_bytes: float) -> float:
        return self.startup_s + num_bytes * self.per_byte_s


class FittedRange(Spec):
    """The range of the points in a fit of message costs; predictions outside it are extrapolations."""

    ranks: tuple[Ranks, ...] = Field(min_length=1, description="Fitted rank counts, ascending.")
    group_sizes: tuple[Ranks, ...] = Field(min_length=1, description="Fitted group sizes in ranks, ascending.")
    num_groups: tuple[Ranks, ...] = Field(min_length=1, description="Fitted numbers of groups, ascending.")
    sizes: tuple[Count, Count] = Field(description="Smallest and largest fitted buffer per rank, bytes.")
    runs: Count = Field(description="Smallest number of runs of a point.")


class SizeBias(Spec):
    """The median error of predictions of one buffer size."""

    num_bytes: Count = Field(description="Size of each rank's buffer, bytes.")
    ratio: Positive = Field(description="Predicted over measured time, median over algorithms.")


class LargestHeldOut(Spec):
    """Errors of a fit without the largest rank count when it predicts that count."""

    ranks: Ranks = Field(description="The largest rank count.")
    fitted_ranks: tuple[Ranks, ...] = Field(min_length=1, description="Rank counts of the fit, ascending.")
    num_points: Count = Field(description="Number of predicted points.")
    ratio: Positive = Field(description="Predicted over measured time, median over the points.")
    median_error: NonNegative = Field(description="Median of |predicted / measured - 1|.")
    by_size: tuple[SizeBias, ...] = Field(min_length=1, description="Ratio by buffer size, ascending.")


class Residual(Spec):
    """The range of measured over fitted times of one algorithm at one rank count."""

    collective: str = Field(description="The collective.")
    algorithm: str = Field(description="The algorithm.")
    ranks: Ranks = Field(description="The rank count.")
    least: Positive = Field(description="Measured over fitted time, minimum over its points.")
    most: Positive = Field(description="Measured over fitted time, maximum over its points.")


class FitError(Spec):
    """Errors of predictions of one algorithm at points that were left out of the fit."""

    collective: str = Field(description="The collective.")
    algorithm: str = Field(description="The algorithm.")
    median: NonNegative = Field(description="Median of |predicted / measured - 1|.")
    worst: NonNegative = Field(description="Maximum of |predicted / measured - 1|.")

    @property
    def is_poor(self) -> bool:
        return self.median > POOR_MEDIAN or self.worst > POOR_WORST


class NetworkModel(Spec):
    """Fitted network costs of one system, as in `*.network.json`."""

    format: Literal["dlbench.network"] = Field("dlbench.network", description="Type of this file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    system: str = Field(description="Name of the measured system.")
    transport: str = Field(description="Transport of the messages, e.g. torch-gloo or mpi.")
    inside: Level | None = Field(None, description="Costs inside a group; none: not measured.")
    across: Level | None = Field(None, description="Costs across groups below one leaf switch; none: not measured.")
    beyond: Level | None = Field(None, description="Costs between leaf switches; none: not measured.")
    gamma_s_per_byte: NonNegative = Field(0.0, description="Time to reduce (add) one byte, seconds.")
    collectives: tuple[LineCost, ...] = Field((), description="Collectives of libraries, each as a line.")
    median_error: NonNegative | None = Field(None, description="Median |predicted / measured - 1| at left-out points.")
    errors: tuple[FitError, ...] = Field((), description="Errors at points left out of the fit; none: not known.")
    num_points: CountOrZero = Field(0, description="Number of measured points in the fit.")
    fitted_to: Literal["median", "minimum"] = Field(
        "median", description="Fitted times of a point; minimum: of its fastest iteration, which leaves out congestion."
    )
    fitted_over: FittedRange | None = Field(None, description="Range of these points; none: no fitted message costs.")
    largest_held_out: LargestHeldOut | None = Field(None, description="Error at the largest rank count, if left out.")
    residuals: tuple[Residual, ...] = Field((), description="Errors at the fitted rank counts; none: costs not fitted.")
    draws: tuple[tuple[NonNegative, ...], ...] = Field(
        (),
        description="Costs fitted to resampled runs, for prediction intervals: alpha and beta of each piece, in the "
        "order inside, across, beyond, then gamma; none: no repeats.",
    )
    sources: tuple[str, ...] = Field((), description="Fitted runs or outputs, and parts that were left out.")
    fitted: str = Field("", description="Time of the fit, UTC, ISO 8601.")

    @model_validator(mode="after")
    def _whole_draws(self) -> Self:
        length = 2 * sum(len(level.pieces) for level in self.levels.values()) + 1
        if any(len(draw) != length for draw in self.draws):
            raise ValueError(f"a draw must have {length} costs")
        return self

    @property
    def levels(self) -> dict[LevelName, Level]:
        """Returns the measured levels, innermost first."""
        costs_by_level = zip(LEVELS, (self.inside, self.across, self.beyond), strict=True)
        return {name: level for name, level in costs_by_level if level is not None}

    @property
    def points_text(self) -> str:
        """Returns how many points were fitted, e.g. `48 points`, and that their minima were."""
        text = f"{self.num_points} points"
        return text if self.fitted_to == "median" else f"minimum times of {text}"

    def is_poor(self, collective: str, algorithm: str) -> bool:
        error = self.error_of(collective, algorithm)
        return error is not None and error.is_poor

    def error_of(self, collective: str, algorithm: str) -> FitError | None:
        key = (collective, algorithm)
        return next((error for error in self.errors if (error.collective, error.algorithm) == key), None)

    def residual(self, collective: str, algorithm: str, ranks: int) -> tuple[float, float]:
        """Returns minimum and maximum of measured over fitted time at the nearest fitted rank counts."""
        key = (collective, algorithm)
        same_key = [residual for residual in self.residuals if (residual.collective, residual.algorithm) == key]
        residuals = same_key or self.residuals
        counts = sorted({residual.ranks for residual in residuals})
        neighbours = {*[n for n in counts if n <= ranks][-1:], *[n for n in counts if n >= ranks][:1]}
        near = [residual for residual in residuals if residual.ranks in neighbours]
        least = min((residual.least for residual in near), default=1.0)
        most = max((residual.most for residual in near), default=1.0)
        return min(1.0, least), max(1.0, most)
