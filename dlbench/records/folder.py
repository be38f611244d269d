"""`runs/<id>/`: names of the files of a run, the interface between planning, running and reading (docs/formats.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.opening import read_json, share, why_unreadable
from dlbench.records.files import Named, Numbered, write_atomic
from dlbench.specs.files import control_character
from dlbench.specs.plan import LaunchPlan

CHECKPOINT_SUFFIX = ".safetensors"

MAX_JSON = 1 << 27  # Largest JSON file, bytes: a record of 60,000 ranks, at some 2 kB per rank.


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    path: Path

    plan = Named("plan.json")  # The frozen plan; written first.
    record = Named("record.json")  # The result, written last by rank 0; without it a run is incomplete.
    comm = Named("comm.json")  # The result of the collective benchmark, written last by rank 0.
    script = Named("job.sbatch")  # The submitted batch script.
    submission = Named("submission.json")  # Slurm job id and the sbatch command line.
    rendezvous = Named("rendezvous.json")  # Where rank 0 listens while ranks find each other.
    launch_log = Named("launch.log")  # Output of mpirun or srun, all ranks together.
    launch_script = Named("launch.sh")  # Started by `dlbench run` if the system has modules or setup lines.
    failure = Named("failure.json")  # Report of a launcher that ended the run.
    interrupted = Named("interrupted.json")  # Report of a stop on request.
    checkpoints = Named("checkpoints")  # The newest states of training, `step-00000123.safetensors`.
    node_steps = Numbered("node-{:04d}.steps")  # Raw step times of a node's ranks (see `dlbench.records.rows.steps`).
    node_spans = Numbered("node-{:04d}.spans")  # Spans of a node's ranks (see `dlbench.records.rows.spans`).
    profile = Numbered("rank-{:04d}.profile.json")  # Chrome trace of a rank by torch.profiler.
    samples = Numbered("node-{:04d}.samples")  # Samples of a node (see `dlbench.records.rows.samples`).
    clock = Named("clock.json")  # Where node 0 answers while nodes compare their clocks.
    accounting = Named("accounting.json")  # Slurm's accounting of the job.
    status = Numbered("rank-{:04d}.status.json")  # Last status of a rank that failed or vanished.
    node_status = Numbered("node-{:04d}.status.json")  # Statuses of a node's ranks at the start of a stage.
    log = Numbered("rank-{:04d}.log")  # Standard output and error of one rank.

    def steps(self, rank: int) -> Path:
        """Returns the path of the step times of a rank, a part of its node's file."""
        return self.node_steps(self._node_of(rank)) / f"rank-{rank:04d}"

    def spans(self, rank: int) -> Path:
        return self.node_spans(self._node_of(rank)) / f"rank-{rank:04d}"

    def _node_of(self, rank: int) -> int:
        try:
            status = self.plan.stat()
            return rank // _ranks_per_node(self.plan, status.st_ino, status.st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            why = f"does not show which node has rank {rank}: {why_unreadable(error)}"
            raise IncompleteDataError(f"{self.plan}: {why}") from None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}{CHECKPOINT_SUFFIX}"


@lru_cache(maxsize=256)
def _ranks_per_node(plan: Path, _inode: int, _changed_ns: int) -> int:
    layout = read_json(plan, MAX_JSON)["layout"]
    return int(layout["ranks"] // layout["nodes"])  # Ranks are in blocks.


def prepare_output(out: Path) -> Path:
    """Makes the folder of all runs and tests that it is writable; it is shared if a group owns it (`sharing.share`)."""
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"--out {str(out)!a}: is not UTF-8, as plans and scripts must be") from None
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
    """Makes the folder of a run and writes its plan. Raises UserError: it exists already; or RunError: not writable."""
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
