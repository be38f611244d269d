"""`RunPlan`: all decisions of one run. Compute nodes read only this and look nothing up."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import ActsIf, Count, CountOrZero, Name, Positive, Ranks, Repeats, RunName, Spec, Tag, TagValue
from dlbench.specs.engine import EngineSpec
from dlbench.specs.strategies import ranks_per_replica, sharing_words, strategy_of, strategy_problem
from dlbench.specs.sync import MGWFBP_STEPS, SyncSpec, layout_problem
from dlbench.specs.system import SystemSpec
from dlbench.specs.training import MeasureSpec, QualitySpec, RatePoint, TrainSpec, goal_problem
from dlbench.specs.watch import FaultSpec, WatchSpec
from dlbench.specs.workload import ImageData, Workload
from dlbench.units import exact_bytes, plural

Scalar = str | int | float | bool | None
AxisValue = Scalar | tuple[Scalar, ...]  # Values of ``--set``, ``--sweep`` and ``--ab``.

Variant = Literal["plain", "synthetic-input", "cached-input", "no-exchange", "unwatched"]
"""The part of the plan that a control run leaves out; the difference shows what this part costs."""

Side = Literal["a", "b"]  # Of a paired comparison.

YIELD = "OMPI_MCA_mpi_yield_when_idle"  # Variable that lets Open MPI yield its core while it waits.
MOST_PREFETCH_BATCHES = 8  # Largest number per reader process that `auto` tries.
MAX_JOB_NAME = 64  # Characters of a job's name that fit into a readable line of squeue.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # Suffixes of files with pickled PyTorch weights.


def value_text(key: str, value: AxisValue) -> str:
    """Returns a value as ``--set`` takes it, e.g. ``[2, 2]``, or ``64MiB`` for a key that ends in ``_bytes``."""
    if isinstance(value, bool | tuple) or value is None:
        return json.dumps(value)
    if isinstance(value, int) and key.endswith("_bytes"):
        return exact_bytes(value)
    return str(value)


def job_label(prefix: str, layout: LayoutSpec, axes: Mapping[str, AxisValue], last: str) -> str:
    """Returns a job's name, e.g. ``bert-4nodes-32ranks-fusion64MiB-r2``; long values are replaced by a digest."""
    nodes = f"{layout.nodes}{plural('node', layout.nodes)}"
    ranks = f"{layout.ranks}{plural('rank', layout.ranks)}"
    texts = []
    for key, value in axes.items():
        text = value_text(key, value)
        key_word = key.rpartition(".")[2].partition("_")[0]
        if isinstance(value, bool) or value is None:
            text = f"{key_word}-{text}"
        elif not isinstance(value, str) or text[:1].isdigit():
            # A number or a size needs a word of its key; other texts explain themselves.
            text = f"{key_word}{text}"
        texts.append(text)
    swept = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-") for text in texts)
    around = f"{prefix[:24]}-{nodes}-{ranks}-{last}"
    room = MAX_JOB_NAME - len(around) - 1
    is_plain = all(re.fullmatch(r"[A-Za-z0-9._-]+", text) for text in texts)
    is_ambiguous = len(texts) > 1 and "-" in "".join(texts)
    if texts and (not is_plain or is_ambiguous or len(swept) > room):
        digest = hashlib.sha256(repr(list(axes.items())).encode()).hexdigest()[:6]
        swept = f"{swept[: room - 7]}-{digest}".lstrip("-")
    return "-".join(part for part in (prefix[:24], nodes, ranks, swept, last) if part)


class LayoutSpec(Spec):
    """Numbers of ranks, nodes and cores."""

    nodes: Ranks = Field(description="Nodes of the run.")
    ranks: Ranks = Field(description="Ranks of the run, all nodes together.")
    cores_per_rank: Ranks = Field(description="Cores, and threads, of each rank; equal in all runs of a series.")
    node_cores: Ranks | None = Field(None, description="Cores per node for a job, when planned; null: not known.")

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def is_one_rank(self) -> bool:
        return self.ranks == 1

    @property
    def is_one_node(self) -> bool:
        return self.nodes == 1

    @property
    def shares_cores(self) -> bool:
        """Returns whether the ranks of a node need more cores than it has."""
        return self.node_cores is not None and self.ranks_per_node * self.cores_per_rank > self.node_cores

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        if self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks cannot be spread evenly over {self.nodes} nodes")
        return self


class CheckpointSpec(Spec):
    """Writing of checkpoints, and initial state."""

    acting = (ActsIf("keep", "checkpoint.is_on", why="no checkpoint is written: give checkpoint.every_steps"),)

    every_steps: Count | None = Field(None, description="Steps between checkpoints; none: no checkpoint.")
    every_epochs: Positive | None = Field(None, description="Epochs between checkpoints, instead of every_steps.")
    keep: Count = Field(2, description="Number of newest checkpoints kept in the run's folder.")
    resume_from: str | None = Field(None, min_length=1, description="Checkpoint or run folder to continue from.")
    initialize_from: str | None = Field(
        None, min_length=1, description="Initial weights: safetensors with BERT's public names, or a checkpoint."
    )

    @property
    def is_on(self) -> bool:
        return self.every_steps is not None or self.every_epochs is not None

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.every_steps is not None and self.every_epochs is not None:
            raise ValueError("every_steps and every_epochs exclude each other")
        path = self.initialize_from or ""
        if path.endswith(PICKLES):
            raise ValueError(
                f"initialize_from {path}: only safetensors are read, as pickles can run code; convert trusted ones: "
                "safetensors.torch.save_file({k: v.clone() for k, v in torch.load(FILE, "
                "weights_only=True).items()}, OUT)"
            )
        if self.resume_from is not None and self.initialize_from is not None:
            raise ValueError("resume_from and initialize_from exclude each other: a resumed run has its weights")
        return self


class Published(Spec):
    """A published figure for a step; the source contains everything that is stored here."""

    value: Positive = Field(description="The published figure, in its unit.")
    unit: Literal["gain", "efficiency"] = Field(
        description="gain: throughput over that of the step before; efficiency: share of linear scaling."
    )
    what: str = Field(description="Network, machine and batch of the figure, in words.")
    source: str = Field(description="Where it is published.")


class LadderStep(Spec):
    """An optimisation that is added to those before it."""

    name: str = Field(min_length=1, max_length=32, description="Name of the step.")
    set: dict[str, AxisValue] = Field(description="Keys and values that the step sets, as in --set.")
    published: Published | None = Field(None, description="Published gain of the step; null: no source.")
    skipped: str = Field("", description="In plans: reason why the step cannot act at this rank count; empty: it runs.")


class SeriesSpec(Spec):
    """Position of the run in its series."""

    id: Name = Field(description="Name of the series: all runs planned together.")
    scaling: Literal["weak", "strong"] = Field(description="weak: fixed batch per rank; strong: fixed global batch.")
    repeat: CountOrZero = Field(description="Number of the repeat, from 0.")
    repeats: Repeats = Field(description="Runs per point.")
    position: CountOrZero = Field(description="Position in the series, from 0; repeats are interleaved over points.")
    axes: dict[str, AxisValue] = Field(default_factory=dict, description="Swept values; with a ladder, of its steps.")
    step: str = Field("", description="Name of the ladder's step (run --ladder); empty: no ladder.")
    ladder: tuple[LadderStep, ...] = Field((), description="All steps of the ladder, in order.")
    variant: Variant = Field(
        "plain",
        description="plain: as requested. synthetic-input, no-exchange: control runs without real input or without "
        "exchange (run --decompose). cached-input: with the data set in the page cache (io --tiers). unwatched: "
        "without monitoring, in series of an earlier dlbench.",
    )
    side: Literal["", "a", "b"] = Field("", description="Side of a paired comparison (run --ab A B); empty: none.")
    sides: dict[Side, dict[str, AxisValue]] = Field(
        default_factory=dict, description="Settings of each side of a paired comparison, by key; empty: no comparison."
    )

    @property
    def named(self) -> dict[str, AxisValue]:
        """The settings that distinguish the run from others of its series: swept values, or the name of its step."""
        return {"step": self.step} if self.step else self.axes


class LaunchPlan(Spec):
    """The part of any plan that launching needs: id, layout and system."""

    run_id: RunName = Field(description="Name of the run and of its folder.")
    created: str = Field(description="Time at which the plan was made, UTC, ISO 8601.")
    dlbench_version: str = Field(description="Version of dlbench that made the plan.")
    dlbench_code: str = Field("", description="Commit of a checkout, else digest of dlbench's files; empty: not known.")
    layout: LayoutSpec = Field(description="Nodes, ranks and cores.")
    system: SystemSpec = Field(description="System on which the run is executed.")
    overrides: dict[str, AxisValue] = Field(default_factory=dict, description="Settings given by --set, by key.")

    @property
    def title(self) -> str:
        """A short description of the run in safe characters."""
        raise NotImplementedError

    @property
    def word(self) -> str:
        """A word of safe characters for the kind of run."""
        raise NotImplementedError

    @property
    def job_name(self) -> str:
        """The name of the run's Slurm job in safe characters, unique in its series."""
        raise NotImplementedError

    @property
    def uses_interface(self) -> bool:
        """Returns whether ranks communicate over a network interface that dlbench chooses."""
        raise NotImplementedError

    @property
    def uses_storage(self) -> bool:
        """Returns whether samples are staged, or activations are swapped to a file, on storage of the system."""
        return False

    @property
    def yields(self) -> bool:
        """Returns whether Open MPI yields the core while it waits; by default only if ranks share cores."""
        setting = self.system.launch.oversubscribe_yield
        if setting is None:
            setting = self.layout.shares_cores
        return self.system.launch.by_mpi and setting

    @model_validator(mode="after")
    def _launcher_reaches(self) -> Self:
        if self.system.launch.launcher == "local" and self.layout.nodes != 1:
            raise ValueError(f"launcher 'local' starts ranks on one machine, not on {self.layout.nodes} nodes")
        return self

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class RunPlan(LaunchPlan):
    """The plan of one training run."""

    format: Literal["dlbench.plan"] = Field("dlbench.plan", description="Type of this file.")
    version: Literal[1] = Field(1, description="Version of the format.")
    workload: Workload = Field(description="Network, data and recipe.")
    engine: EngineSpec = Field(description="Engine that exchanges gradients.")
    sync: SyncSpec = Field(SyncSpec(), description="How gradients are exchanged, beyond the engine's own settings.")
    measure: MeasureSpec = Field(description="What is measured.")
    checkpoint: CheckpointSpec = Field(CheckpointSpec(), description="Writing of checkpoints, and initial state.")
    watch: WatchSpec | None = Field(None, description="Monitoring of the run; null: none, as in early plans.")
    fault: FaultSpec | None = Field(None, description="Injected fault; null: none.")
    series: SeriesSpec = Field(description="Position of the run in its series.")
    tags: dict[Tag, TagValue] = Field(
        default_factory=dict,
        description="Labels (--tag), by key; `commit` is the tested commit. They do not affect runs or comparability.",
    )

    @property
    def title(self) -> str:
        return f"{self.workload.name} ({self.workload.preset}), engine {self.engine_words}"

    @property
    def word(self) -> str:
        return self.workload.name

    @property
    def job_name(self) -> str:
        """Returns workload, nodes, ranks, swept values and repeat; `ab` for paired runs, which share a job."""
        last = "ab" if self.series.side else f"r{self.series.repeat + 1}"
        return job_label(self.word, self.layout, self.series.named, last)

    @property
    def engine_words(self) -> str:
        """The engine with its buckets or sharding, e.g. `horovod with own buckets of 64 MiB`."""
        words = [sharing_words(self.engine, self.sync, ranks=self.layout.ranks)]
        if self.sync.is_own and self.engine.kind.synchronises and self.layout.ranks > 1:
            words.insert(0, self.sync.own_words)
        return " with ".join(filter(None, (self.engine.name, ", ".join(filter(None, words)))))

    @property
    def engine_title(self) -> str:
        """The title of engine and sharding, e.g. `own buckets of 64 MiB over Horovod`."""
        words = sharing_words(self.engine, self.sync, ranks=self.layout.ranks)
        title = self.engine.kind.title
        if self.sync.is_own and self.engine.kind.synchronises:
            title = f"{self.sync.own_words} over {title}"
        if self.sync.average_every is not None and words:
            return f"{words} over {title}"
        return ", ".join(filter(None, (title, words)))

    @property
    def most_loader_workers(self) -> int:
        """Reader processes per rank; with `auto` the largest number that is tried: one per core of the rank."""
        workers = self.workload.data.loader_workers
        return self.layout.cores_per_rank if workers == "auto" else workers

    @property
    def most_prefetch_batches(self) -> int:
        """Batches that each reader process reads ahead; with `auto` the largest number that is tried."""
        batches = self.workload.data.prefetch_batches
        return MOST_PREFETCH_BATCHES if batches == "auto" else batches

    @property
    def group_size(self) -> int:
        return self.sync.group_size or self.layout.ranks_per_node

    @property
    def strategy(self) -> str:
        return strategy_of(self.workload.train, self.engine, self.sync, ranks=self.layout.ranks)

    @property
    def ranks_per_replica(self) -> int:
        """Number of neighbouring ranks that read the same samples; each counts its share of them."""
        return ranks_per_replica(self.engine)

    @property
    def redraws_dropout(self) -> bool:
        """Returns whether dropout uses other random numbers than replicas of one rank each."""
        return self.ranks_per_replica > 1 and getattr(self.workload.model, "dropout", 0.0) > 0

    @property
    def emulated_workers(self) -> int:
        """Number of workers that one rank emulates, each with a part of its batch; 1 with other engines."""
        return self.workload.train.gradient_accumulation if self.engine.name == "emulated" else 1

    @property
    def replicas(self) -> int:
        return self.layout.ranks // self.ranks_per_replica

    @property
    def global_batch(self) -> int:
        return self.workload.train.batch_per_rank * self.layout.ranks

    @property
    def goal(self) -> QualitySpec | None:
        """The target quality; its limits grow with the recipe if that is longer at this global batch."""
        quality, ratio = self.workload.quality, self.workload.train.lengthened(self.global_batch)
        if quality is None or ratio == 1.0:
            return quality
        if quality.max_epochs is not None:
            return quality.model_copy(update={"max_epochs": quality.max_epochs * ratio})
        return quality.model_copy(update={"max_samples": round((quality.max_samples or 0) * ratio)})

    @property
    def recipe(self) -> TrainSpec:
        return self.workload.train.at_batch(self.global_batch)

    @property
    def rate_row(self) -> RatePoint | None:
        place = self.workload.train.optimizer.place(self.global_batch)
        return None if place is None else place.row

    @property
    def counts_epochs(self) -> bool:
        quality = self.workload.quality
        if self.measure.until == "quality" and quality and (quality.evaluate_every_epochs or quality.max_epochs):
            return True
        return bool(self.workload.train.schedule.counts_epochs or self.checkpoint.every_epochs)

    @property
    def exchanges_by(self) -> str:
        """The engine that exchanges gradients; empty if nothing is exchanged (one rank, or engine single)."""
        if self.layout.is_one_rank or not self.engine.kind.synchronises:
            return ""
        return self.engine.name

    @property
    def shares_parameters(self) -> bool:
        """Returns whether ranks gather parameters from each other with engine fsdp."""
        return self.layout.ranks > self.ranks_per_replica

    @property
    def uses_interface(self) -> bool:
        return not self.layout.is_one_node and not (self.engine.name == "horovod" and self.system.launch.by_mpi)

    @property
    def uses_storage(self) -> bool:
        data, train = self.workload.data, self.workload.train
        is_staged = data.staging != "none" and not data.is_synthetic
        return is_staged or (train.swaps and train.memory.swap_folder is None)

    @property
    def decodes_images(self) -> bool:
        return isinstance(self.workload.data, ImageData) and not self.workload.data.is_synthetic

    @property
    def has_padding(self) -> bool:
        """Returns whether padding can be removed from all layers; synthetic text has none."""
        return not self.workload.data.is_synthetic or self.workload.model.padding != "unpadded"

    @property
    def has_room_for_window(self) -> bool:
        """Returns whether there are warm-up steps for the profiled steps, if any are wanted."""
        return self.measure.warmup_steps > 0 or self.watch is None or not self.watch.window_steps

    @property
    def least_training_s(self) -> float:
        """Minimum duration of the steps, seconds; it depends on whether the nodes have GPUs."""
        return sum(self.measure.wanted_seconds(on_gpu=self.system.node.gpus > 0))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.engine.kind.synchronises and self.layout.ranks != 1:
            raise ValueError(f"engine '{self.engine.name}' exchanges nothing and needs 1 rank, not {self.layout.ranks}")
        train, sharing_ranks = self.workload.train, self.engine.spatial_ranks
        if train.batch_per_rank * sharing_ranks % train.gradient_accumulation:
            raise ValueError(
                f"train.gradient_accumulation {train.gradient_accumulation} does not divide the batch of "
                f"{train.batch_per_rank * sharing_ranks} samples"
            )
        if self.engine.ddp.static_graph and self.workload.train.gradient_accumulation > 1:
            # An assertion of reducer.cpp (torch 2.13) fails in the first step, whose first parts are in no_sync().
            raise ValueError(
                "engine.ddp.static_graph needs train.gradient_accumulation 1: DDP fails if its first pass exchanges "
                "nothing"
            )
        return self

    @model_validator(mode="after")
    def _exchange_is_possible(self) -> Self:
        problem = layout_problem(self.sync, engine=self.engine.name, ranks=self.layout.ranks, nodes=self.layout.nodes)
        if problem is not None:
            raise ValueError(problem)
        if self.sync.fusion.rule == "mgwfbp" and self.layout.ranks > 1 and self.measure.warmup_steps < MGWFBP_STEPS:
            raise ValueError(
                f"sync.fusion own:mgwfbp: needs {MGWFBP_STEPS} warm-up steps before it merges, but the plan has "
                f"{self.measure.warmup_steps}; set measure.warmup_steps to {MGWFBP_STEPS} or more"
            )
        horovod = self.engine.horovod
        if self.engine.name != "horovod":
            return self
        if horovod.autotune and self.sync.is_own:
            raise ValueError("engine.horovod.autotune: tunes Horovod, but dlbench exchanges gradients; leave it out")
        if horovod.autotune and self.layout.ranks > 1 and self.measure.warmup_steps < horovod.autotune_steps:
            raise ValueError(
                f"engine.horovod.autotune: tuning takes {horovod.autotune_steps} steps; set measure.warmup_steps "
                "to that or more, so that tuned steps are measured"
            )
        return self

    @model_validator(mode="after")
    def _strategy_and_goal_are_possible(self) -> Self:
        layout, workload = self.layout, self.workload
        parts = (workload, self.engine, self.sync, self.measure)
        problem = strategy_problem(*parts, ranks=layout.ranks, ranks_per_node=layout.ranks_per_node)
        if problem is not None:
            raise ValueError(problem)
        if self.engine.name == "emulated" and (self.checkpoint.is_on or self.checkpoint.resume_from):
            raise ValueError("engine emulated: checkpoints do not contain gradients of workers that still compute")
        if self.measure.until == "quality":
            if workload.quality is None:
                raise ValueError(
                    f"measure.until quality: preset {workload.preset} of {workload.name} has no `quality` section, and "
                    "so no target that its recipe reaches"
                )
            if workload.data.is_synthetic:
                raise ValueError("measure.until quality: a network cannot learn from synthetic data; give --data")
            begins = self.checkpoint.resume_from or self.checkpoint.initialize_from
            problem = goal_problem(workload.train, workload.quality, global_batch=self.global_batch, starts_from=begins)
            if problem is not None:
                raise ValueError(f"measure.until quality: {problem}")
        if workload.data.is_synthetic and self.checkpoint.every_epochs and not workload.train.schedule.epoch_samples:
            raise ValueError("checkpoint.every_epochs: synthetic data has no epochs; use checkpoint.every_steps")
        if self.measure.noise_scale and self.layout.ranks * workload.train.gradient_accumulation == 1:
            raise ValueError(
                "measure.noise_scale compares gradients of two batch sizes: it needs two ranks, or "
                "train.gradient_accumulation of 2 or more"
            )
        return self

    def configuration_digest(self) -> str:
        """Returns a digest of all settings that affect the computation."""
        without_effect = {"run_id", "created", "series", "overrides", "tags", "dlbench_code"}
        content = self.model_dump(mode="json", exclude=without_effect)
        content["scaling"] = self.series.scaling
        # Only `cores_per_rank`, which follows from it, affects the run.
        del content["layout"]["node_cores"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
