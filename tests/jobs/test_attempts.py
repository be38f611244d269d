"""What a job's script does with the files of an earlier attempt, when Slurm starts the job again."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlbench.jobs.scripts.job import render

KEPT = ("plan.json", "job.sbatch", "submission.json", "slurm-7.out", "slurm-7_1.out")
LEFT = (
    "rank-0000.status.json",
    "node-0000.status.json",
    "launch.log",
    "record.json",
    "node-0000.steps",
    "interrupted.json",
    "accounting.json",
)
ODD = ("a b", "-n", "$(touch canary)", "new\nline", "*", "'", "checkpoint", "slurm-7.txt", "attempts")

FILES = st.sets(st.sampled_from([*KEPT, *LEFT, *ODD]), max_size=8)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def start_again(run: Path) -> str:
    script = render("earlier.j2") + "\nset -u\ndlbench_run=$1\nset_aside || exit"
    done = subprocess.run(["bash", "-c", script, "bash", str(run)], capture_output=True, text=True, check=True, cwd=run)
    assert done.stderr == ""
    return done.stdout


@given(attempts=st.lists(FILES, min_size=1, max_size=3))
@example(attempts=[{"rank-0000.status.json", "-n", "*", "new\nline"}, {"launch.log"}])
@example(attempts=[{"plan.json", "slurm-7.out"}, {"rank-0000.status.json"}])
@settings(max_examples=12)  # each starts bash
def test_nothing_is_lost_and_nothing_of_an_earlier_attempt_is_left_in_its_place(attempts: list[set[str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "a run's $HOME"
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "step-1").write_text("state")
        expected: dict[str, str] = {"checkpoints/step-1": "state"}
        number = 0
        for files in attempts:
            for name in files:
                (run / name).write_text(f"{name} of {number}")
                expected[name] = f"{name} of {number}"
            said = start_again(run)
            if began := any(
                name.endswith(".status.json") or name == "launch.log" for name in expected if "/" not in name
            ):
                number += 1
                aside = f"attempt-{number:04d}"
                expected = {
                    name if "/" in name or name in KEPT else f"{aside}/{name}": text for name, text in expected.items()
                }
                assert (
                    said
                    == f"dlbench: attempt {number + 1} of {run.name}; what the one before left is in {run}/{aside}\n"
                )
            assert bool(said) == began
            assert contents(run) == expected
