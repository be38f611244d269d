"""`runs/<id>/`: the one interface between planning, running and reading. Names of its files, nothing else.

Every file is documented key by key in docs/formats.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import RunError, UserError, refused
from dlbench.records.files import write_atomic
from dlbench.sharing import share
from dlbench.specs.files import control_character
from dlbench.specs.plan import LaunchPlan

CHECKPOINT_SUFFIX = ".safetensors"

MAX_JSON = 1 << 27  # Bytes of a JSON file at most: a record has some 2 kB per rank, so this is one of 60,000 ranks.


@dataclass(frozen=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @property
    def plan(self) -> Path:
        """`plan.json`: the frozen plan; written first."""
        return self.path / "plan.json"

    @property
    def record(self) -> Path:
        """`record.json`: what happened; written last, by rank 0. Without it a run is incomplete."""
        return self.path / "record.json"

    @property
    def comm(self) -> Path:
        """`comm.json`: what a run of the collective benchmark measured; written last, by rank 0."""
        return self.path / "comm.json"

    @property
    def script(self) -> Path:
        """`job.sbatch`: the batch script as it was submitted."""
        return self.path / "job.sbatch"

    @property
    def submission(self) -> Path:
        """`submission.json`: Slurm job id and the sbatch command line."""
        return self.path / "submission.json"

    @property
    def rendezvous(self) -> Path:
        """`rendezvous.json`: where rank 0 listens while ranks find each other."""
        return self.path / "rendezvous.json"

    @property
    def launch_log(self) -> Path:
        """`launch.log`: output of mpirun or srun, all ranks together."""
        return self.path / "launch.log"

    @property
    def launch_script(self) -> Path:
        """`launch.sh`: what `dlbench run` started, where the system has modules or setup lines."""
        return self.path / "launch.sh"

    @property
    def failure(self) -> Path:
        """`failure.json`: why a launcher gave a run up."""
        return self.path / "failure.json"

    @property
    def interrupted(self) -> Path:
        """`interrupted.json`: that the run stopped on request."""
        return self.path / "interrupted.json"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/`: the newest states of training, `step-00000123.safetensors`."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The state of training after a number of optimizer steps."""
        return self.checkpoints / f"step-{step:08d}{CHECKPOINT_SUFFIX}"

    def steps(self, rank: int) -> Path:
        """`rank-0000.steps`: raw step times of one rank (see `dlbench.records.rows.steps`)."""
        return self.path / f"rank-{rank:04d}.steps"

    def spans(self, rank: int) -> Path:
        """`rank-0000.spans`: what one rank did when (see `dlbench.records.rows.spans`)."""
        return self.path / f"rank-{rank:04d}.spans"

    def profile(self, rank: int) -> Path:
        """`rank-0000.profile.json`: what torch.profiler wrote of one rank's window, a Chrome trace."""
        return self.path / f"rank-{rank:04d}.profile.json"

    def samples(self, node: int) -> Path:
        """`node-0000.samples`: what the sampler of one node read (see `dlbench.records.rows.samples`)."""
        return self.path / f"node-{node:04d}.samples"

    @property
    def clock(self) -> Path:
        """`clock.json`: where node 0 answers while nodes compare their clocks."""
        return self.path / "clock.json"

    @property
    def watch_cost(self) -> Path:
        """`watch-cost.json`: what watching cost, measured against unwatched runs of the same series."""
        return self.path / "watch-cost.json"

    @property
    def accounting(self) -> Path:
        """`accounting.json`: what Slurm says that the run took."""
        return self.path / "accounting.json"

    def status(self, rank: int) -> Path:
        """`rank-0000.status.json`: of a rank that failed or vanished, the last that is known of it."""
        return self.path / f"rank-{rank:04d}.status.json"

    def node_status(self, node: int) -> Path:
        """`node-0000.status.json`: what the ranks of one node said when a stage began."""
        return self.path / f"node-{node:04d}.status.json"

    def log(self, rank: int) -> Path:
        """`rank-0000.log`: standard output and error of one rank."""
        return self.path / f"rank-{rank:04d}.log"


def prepare_output(out: Path) -> Path:
    """Makes the folder of all runs and proves that it can be written; a group's is shared (`sharing.share`). Raises
    UserError: it is not a folder, or cannot be made or written.
    """
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
