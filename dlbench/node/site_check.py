"""``python -m dlbench.node.site_check FOLDER/plan.json``: one rank of a pre-flight. Plan in, `seen/rank-NNNN.json` out.

Everything is looked at, whatever was wrong before it. Nothing heavy is imported before the rank is bound to its cores.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import dlbench
from dlbench.datasets.staging.place import tier_path
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, RunError, UserError
from dlbench.machine.clock_offset import estimate
from dlbench.machine.cuda_parts import compiler_lacks
from dlbench.machine.gpus import gpus_of_node
from dlbench.machine.storage import file_system_of
from dlbench.node.cores import CoreBinding, bind
from dlbench.node.rank_checks import require_machine
from dlbench.node.ranks import RankPlace, detect
from dlbench.node.rendezvous import own_address
from dlbench.node.watching.clocks import FORMAT, MAX_BYTES, ClockServer, compare, publish
from dlbench.node.watching.core_load import CoreLoad
from dlbench.opening import read_bytes, read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON
from dlbench.records.preflight import PreflightFolder, SeenClock, SeenLoad, SeenRank, SeenScratch
from dlbench.specs.comm import CommPlan
from dlbench.specs.system import StagingTier, StorageSpec

ROUNDS = 50
WAIT_S = 20.0  # how long the first node's address is waited for, and it for the others: the job lasts a minute
_PAUSE_S = 0.1


def answer(
    path: Path, token: str, interface: str | None, others_are_done: Callable[[], bool], wait_s: float = WAIT_S
) -> str:
    """On the first node: gives the time of day until the others are done; why it cannot, or nothing."""
    try:
        server = ClockServer(own_address(single_machine=False, interface=interface), token, clock=time.time_ns)
    except (OSError, RunError) as error:
        return f"the first node cannot answer about its clock: {error}"
    server.start()
    try:
        publish(path, server, token)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not others_are_done():
            time.sleep(_PAUSE_S)
    except RunError as error:
        return str(error)
    finally:
        server.close()
    return server.problem


def ask(
    path: Path, token: str, is_lost: Callable[[], bool] = lambda: False, wait_s: float = WAIT_S
) -> tuple[SeenClock | None, str]:
    """On any other node: how far the first node's clock is ahead; or why that is not known.

    `path`: where the first node says where it answers. `is_lost`: whether the first node cannot say so any more.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            content = read_json(path, MAX_BYTES)
            if content["token"] == token and content["format"] == FORMAT:
                break
        except (OSError, ValueError, LookupError, TypeError):  # not there yet, or not as the first node writes it
            pass
        if is_lost():
            return None, "the first node could not look, and its clock is not known"
        if time.monotonic() > deadline:
            return None, f"the first node did not say within {wait_s:g} s where it answers about its clock"
        time.sleep(_PAUSE_S)
    place = str(content["address"]), int(content["port"])
    try:
        found = estimate(compare(*place, token, ROUNDS, timeout_s=wait_s / 2, clock=time.time_ns))
    except (OSError, ValueError) as error:
        return None, f"the first node's clock at {place[0]} port {place[1]}: {error}"
    return SeenClock(offset_s=found.offset_ns / 1e9, bound_s=found.bound_ns / 1e9), ""


REQUIRED = ("torch", "numpy", "safetensors")  # without these no rank trains
WANTED = {"horovod": "horovod.torch", "mpi4py": "mpi4py", "pynvml": "pynvml"}
"""Used where they are there: the package by the module that shows whether it works."""


def libraries() -> tuple[dict[str, str], dict[str, str]]:
    """Versions by name, and of what is installed and does not import, why; what is not installed is in neither."""
    versions = {"python": platform.python_version(), "dlbench": dlbench.__version__}
    broken: dict[str, str] = {}
    for name, module in {**{name: name for name in REQUIRED}, **WANTED}.items():
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a library may raise anything while it is imported
            said = next(iter(str(error).strip().splitlines()), "")
            broken[name] = f"{type(error).__name__}: {said}"[:300]
            continue
        versions[name] = _version(name)
    return versions, broken


def _version(name: str) -> str:
    try:
        return importlib.metadata.version("nvidia-ml-py" if name == "pynvml" else name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))


_TRIAL_BYTES = 1 << 20


def scratch(storage: StorageSpec, key: StagingTier, variables: Mapping[str, str], host: str) -> SeenScratch:
    """Writes a MiB there, syncs it, reads it back and takes it away again."""
    try:
        path = tier_path(storage.tier(key), key, variables, host)
    except EnvironmentLacksError as error:
        return SeenScratch(key=key, path=storage.tier(key).path, problem=str(error))
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        free = None
    return SeenScratch(
        key=key, path=str(path), file_system=file_system_of(path), free_bytes=free, problem=_trial(path, key)
    )


def _trial(folder: Path, key: str) -> str:
    """Why nothing can be kept there; empty if it can."""
    content = secrets.token_bytes(_TRIAL_BYTES)
    file = folder / f".dlbench-preflight-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if read_bytes(file, _TRIAL_BYTES) != content:
            return f"storage.{key}.path {str(folder)!r}: what was written is not what is read back"
    except OSError as error:
        return f"storage.{key}.path {str(folder)!r}: cannot be written: {error.strerror or error}"
    finally:
        with suppress(OSError):
            file.unlink()
    return ""


LOOK_S = 1.0  # how long the load of a node's cores is looked at: the kernel counts in steps of 10 ms


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
            firsts = range(place.local_size, place.size, place.local_size)  # Of every other node.
            problem = answer(
                folder.clock,
                place.token,
                plan.system.launch.interface,
                lambda: all(folder.rank(rank).exists() or folder.failed(rank).exists() for rank in firsts),
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
    """What this rank sees of its node. Raises DlbenchError: what it needs to look at all is not there."""
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
    # Whether the rank's cores are near its GPU is not known everywhere.
    near = binding.gpu.cores if binding.gpu is not None else ()
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
        beside_gpu=set(binding.cores) <= set(near) if near else None,
        compiler="; ".join(compiler_lacks(on_gpu=True) or ()) if gpu is not None else "",
        problems=tuple(problem for problem in problems if problem),
        scratch=places,
        clock=clock,
        clock_problem=clock_problem,
        load=load,
    )


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
    load = counter.summary()
    busy = load["node"]["busy_s"]
    if not busy:
        return None
    others = max(0.0, sum(busy.values()) - load["own_s"])
    return SeenLoad(window_s=load["window_s"], cores=len(busy), others_s=others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
