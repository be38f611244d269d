"""Real runs without the seconds that imports take: every rank is forked from a process that has torch loaded.

What a rank does is all of `dlbench.node`, from the plan to the record. Left out are the launcher and its supervisors,
and the new interpreter of each rank: tests/real/test_local_runs.py has those.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dlbench.cli import options
from dlbench.cli.run import run as command
from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.node import __main__ as node
from dlbench.records.folder import create, prepare_output
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import parse_counts
from tests.support.forks import run_ranks


def planned(*words: str | Path) -> tuple[list[RunPlan], Path]:
    """What ``dlbench run WORDS`` would run, and where to."""
    chosen = command.make_context("run", [str(word) for word in words]).params
    points = parse_counts(chosen.pop("ranks"), "--ranks")
    request = options.request_from(chosen, system=chosen.pop("system"), points=points, points_are="ranks")
    plans = options.expand_request(request)
    options.require_data(plans)
    return plans, chosen["out"]


def run_forked(*words: str | Path) -> list[Run]:
    """Runs what ``dlbench run WORDS`` would, in its order; every rank must end well."""
    plans, out = planned(*words)
    root = prepare_output(out)
    for plan in plans:
        folder = create(root, plan)
        environments = [resolve(one) for one in local_environments(plan, secrets.token_hex(8))]
        with tempfile.TemporaryDirectory() as logs:
            codes, said = run_ranks(rank, [str(folder.plan)], environments, Path(logs))
        assert codes == [0] * plan.layout.ranks, "\n".join(text[-4000:] for text in said)
    wanted = [plan.run_id for plan in plans]
    found = {run.plan.run_id: run for run in scan(root).runs}
    return [found[name] for name in wanted]


def mean_losses(run: Run) -> list[float]:
    """Of each step, the mean over ranks; those of a replica have the replica's loss each."""
    by_rank = [read_steps(run.folder.steps(rank)).steps["loss"].tolist() for rank in range(run.plan.layout.ranks)]
    return [fmean(losses) for losses in zip(*by_rank, strict=True)]


def rank(arguments: Sequence[str]) -> int:
    return node.main(list(arguments))
