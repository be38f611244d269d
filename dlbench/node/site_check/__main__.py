"""``python -m dlbench.node.site_check FOLDER/plan.json``: one rank of a pre-flight. Plan in, `seen/rank-NNNN.json` out.

Everything is looked at, whatever was wrong before it. Nothing heavy is imported before the rank is bound to its cores.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from dlbench.errors import DlbenchError, ExitCode, UserError
from dlbench.machine.gpus import gpus_of_node
from dlbench.node.cores import CoreBinding, bind
from dlbench.node.preflight import require_machine
from dlbench.node.ranks import RankPlace, detect
from dlbench.node.site_check.clocks import answer, ask
from dlbench.node.site_check.libraries import REQUIRED, libraries
from dlbench.node.site_check.scratch import scratch
from dlbench.node.watching.core_load import CoreLoad
from dlbench.opening import read_json, why_unreadable
from dlbench.records.answers.preflight import PreflightFolder, SeenLoad, SeenRank, SeenScratch
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON
from dlbench.specs.collectives.plan import CommPlan

LOOK_S = 1.0
"""How long the load of a node's cores is looked at: the kernel counts in steps of 10 ms."""


def main(arguments: list[str]) -> int:
    """Looks, and writes what it saw; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m dlbench.node.site_check FOLDER/plan.json", file=sys.stderr)
        return int(ExitCode.USAGE)
    path = Path(arguments[0]).absolute()
    try:
        plan = _plan(path)
        folder, place = PreflightFolder(path.parent), detect(plan)
        seen = look(plan, folder, place)
        write_json(folder.rank(place.rank), seen.model_dump(mode="json"))
        if place.node_rank == 0 and place.local_rank == 0 and place.num_nodes > 1:
            problem = answer(
                folder.clock, place.token, plan.system.launch.interface, lambda: _others_done(folder, place)
            )
            if problem:
                print(f"dlbench: {problem}", file=sys.stderr)
    except DlbenchError as error:
        print(f"dlbench: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.OK)


def _plan(path: Path) -> CommPlan:
    try:
        return CommPlan.model_validate(read_json(path, MAX_JSON))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable plan: {why_unreadable(error)}") from None


def look(plan: CommPlan, folder: PreflightFolder, place: RankPlace) -> SeenRank:
    """What this rank sees of its node.

    Raises:
        DlbenchError: what it needs to look at all is not there.
    """
    is_first = place.local_rank == 0
    load = None
    if is_first:
        load = _load(folder.looked(place.node_rank))
    else:
        _wait(folder.looked(place.node_rank))
    binding = bind(plan, place)
    node_gpus = tuple(gpu.uuid for gpu in gpus_of_node(os.environ))
    problems = [_said(lambda: require_machine(plan, place))]
    versions, broken = libraries()
    problems += [
        f"{name} is not installed for {sys.executable}" for name in REQUIRED if name not in {**versions, **broken}
    ]
    gpu = None
    if "torch" in versions:
        gpu, problem = _gpu(plan, place, binding)
        problems.append(problem)
    places: tuple[SeenScratch, ...] = ()
    clock, clock_problem = None, ""
    if is_first:
        places = tuple(scratch(plan.system.storage, key, os.environ, place.host) for key in ("local", "memory"))
        if place.node_rank > 0:
            clock, clock_problem = ask(folder.clock, place.token, lambda: folder.failed(0).exists())
    return SeenRank(
        rank=place.rank,
        local_rank=place.local_rank,
        host=place.host,
        python=sys.executable,
        versions=versions,
        broken=broken,
        cores=binding.cores,
        pinned=binding.pinned,
        node_gpus=node_gpus,
        gpu=gpu,
        beside_gpu=_beside(binding),
        problems=tuple(problem for problem in problems if problem),
        scratch=places,
        clock=clock,
        clock_problem=clock_problem,
        load=load,
    )


def _beside(binding: CoreBinding) -> bool | None:
    """Whether the rank's cores are beside its GPU; None where that is not known."""
    near = binding.gpu.cores if binding.gpu is not None else ()
    return set(binding.cores) <= set(near) if near else None


def _said(call: Any) -> str:
    """What a check says; empty if it passes."""
    try:
        call()
    except DlbenchError as error:
        return str(error)
    return ""


def _gpu(plan: CommPlan, place: RankPlace, binding: CoreBinding) -> tuple[str | None, str]:
    """The GPU on which this rank would compute, and why it cannot."""
    from dlbench.node.devices import device_for, rank_gpu

    try:
        found = rank_gpu(device_for(plan, place), binding.gpu)
    except DlbenchError as error:
        return None, str(error)
    except Exception as error:  # of the driver, by way of torch
        return None, f"{type(error).__name__}: {str(error).strip()}"[:300]
    return (None if found is None else found.uuid), ""


def _wait(looked: Path) -> None:
    """Until the first rank of this node has looked who else computes there."""
    deadline = time.monotonic() + 5 * LOOK_S
    while time.monotonic() < deadline and not looked.exists():
        time.sleep(0.1)


def _load(looked: Path) -> SeenLoad | None:
    """Who else computes here, while the ranks of this node do nothing; `looked` is the mark that it is over."""
    time.sleep(LOOK_S)  # the other ranks are being started
    counter = CoreLoad(sees_node=True)
    counter.measuring(True)
    time.sleep(LOOK_S)
    counter.measuring(False)
    looked.touch()
    told = counter.told()
    busy = told["node"]["busy_s"]
    if not busy:
        return None
    others = max(0.0, sum(busy.values()) - told["own_s"])
    return SeenLoad(window_s=told["window_s"], cores=len(busy), others_s=others)


def _others_done(folder: PreflightFolder, place: RankPlace) -> bool:
    """Whether every other node's first rank has written what it saw, or has failed."""
    firsts = range(place.local_size, place.size, place.local_size)
    return all(folder.rank(rank).exists() or folder.failed(rank).exists() for rank in firsts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
