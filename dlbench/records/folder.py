"""`runs/<id>/`: the one interface between planning, running and reading. Names of its files, nothing else.

Every file is documented key by key in docs/formats.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.opening import read_json, why_unreadable
from dlbench.records.files import Named, Numbered, write_atomic
from dlbench.sharing import share
from dlbench.specs.files import control_character
from dlbench.specs.plan import LaunchPlan

CHECKPOINT_SUFFIX = ".safetensors"

MAX_JSON = 1 << 27  # Bytes of a JSON file at most: a record has some 2 kB per rank, so this is one of 60,000 ranks.


@dataclass(frozen=True)
class RunFolder:
    """One run's folder."""

    path: Path

    plan = Named("plan.json")  # The frozen plan; written first.
    record = Named("record.json")  # What happened; written last, by rank 0. Without it a run is incomplete.
    comm = Named("comm.json")  # What a run of the collective benchmark measured; written last, by rank 0.
    script = Named("job.sbatch")  # The batch script as it was submitted.
    submission = Named("submission.json")  # Slurm job id and the sbatch command line.
    rendezvous = Named("rendezvous.json")  # Where rank 0 listens while ranks find each other.
    launch_log = Named("launch.log")  # Output of mpirun or srun, all ranks together.
    launch_script = Named("launch.sh")  # What `dlbench run` started, where the system has modules or setup lines.
    failure = Named("failure.json")  # Why a launcher gave a run up.
    interrupted = Named("interrupted.json")  # That the run stopped on request.
    checkpoints = Named("checkpoints")  # The newest states of training, `step-00000123.safetensors`.
    node_steps = Numbered("node-{:04d}.steps")  # Raw step times of a node's ranks (see `dlbench.records.rows.steps`).
    node_spans = Numbered("node-{:04d}.spans")  # What a node's ranks did when (see `dlbench.records.rows.spans`).
    rank_steps = Numbered("rank-{:04d}.steps")  # The same of one rank, in runs of an earlier dlbench.
    rank_spans = Numbered("rank-{:04d}.spans")
    profile = Numbered("rank-{:04d}.profile.json")  # What torch.profiler wrote of one rank's window, a Chrome trace.
    samples = Numbered("node-{:04d}.samples")  # What the sampler of one node read (see `dlbench.records.rows.samples`).
    clock = Named("clock.json")  # Where node 0 answers while nodes compare their clocks.
    accounting = Named("accounting.json")  # What Slurm says that the run took.
    status = Numbered("rank-{:04d}.status.json")  # Of a rank that failed or vanished, the last that is known of it.
    node_status = Numbered("node-{:04d}.status.json")  # What the ranks of one node said when a stage began.
    log = Numbered("rank-{:04d}.log")  # Standard output and error of one rank.

    def steps(self, rank: int) -> Path:
        """The raw step times of one rank, to be read: its own file, or a part of its node's."""
        return self._rows(self.rank_steps, self.node_steps, rank)

    def spans(self, rank: int) -> Path:
        """The spans of one rank, likewise."""
        return self._rows(self.rank_spans, self.node_spans, rank)

    def _rows(self, of_rank: Callable[[int], Path], of_node: Callable[[int], Path], rank: int) -> Path:
        # Of an earlier version's run what is missing is the rank's own file.
        if (rank_file := of_rank(rank)).exists() or of_rank(0).exists():
            return rank_file
        try:
            status = self.plan.stat()
            node = rank // _ranks_per_node(self.plan, status.st_ino, status.st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            why = f"says not which node has rank {rank}: {why_unreadable(error)}"
            raise IncompleteDataError(f"{self.plan}: {why}") from None
        return of_node(node) / f"rank-{rank:04d}"

    def checkpoint(self, step: int) -> Path:
        """The state of training after a number of optimizer steps."""
        return self.checkpoints / f"step-{step:08d}{CHECKPOINT_SUFFIX}"


@lru_cache(maxsize=256)
def _ranks_per_node(plan: Path, _inode: int, _changed_ns: int) -> int:
    layout = read_json(plan, MAX_JSON)["layout"]
    return int(layout["ranks"] // layout["nodes"])  # in blocks, or no rank starts


def prepare_output(out: Path) -> Path:
    """Makes the folder of all runs and proves that it can be written; a group's is shared (`sharing.share`)."""
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"--out {str(out)!a}: is not UTF-8, in which plans and scripts are written") from None
    if problem := control_character(str(out.absolute())):
        raise UserError(f"--out {str(out.absolute())!a}: {problem}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".write-test-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise refused(
            error, f"--out {out}: cannot be written: {error.strerror or error}; choose another folder", UserError
        ) from None
    share(out)
    return out.absolute()


def create(out: Path, plan: LaunchPlan) -> RunFolder:
    """Makes the folder of one run and writes its plan. Raises UserError: a run of that name is there already; nothing
    is overwritten. Or RunError: the plan cannot be written.
    """
    folder = RunFolder(out / plan.run_id)
    try:
        folder.path.mkdir()
    except FileExistsError:
        raise UserError(f"{folder.path}: exists already; choose another --series, runs are never overwritten") from None
    except OSError as error:
        raise refused(error, f"{folder.path}: cannot be made: {error.strerror or error}", UserError) from None
    try:
        write_atomic(folder.plan, plan.to_json())
    except RunError:
        folder.path.rmdir()
        raise
    return folder
