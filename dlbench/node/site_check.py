"""``python -m dlbench.node.site_check FOLDER/plan.json``: one rank of a pre-flight; writes `seen/rank-NNNN.json`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import dlbench
from dlbench.datasets.staging.copying import tier_path
from dlbench.errors import DlbenchError, EnvironmentLacksError, ExitCode, UserError
from dlbench.machine.cuda_parts import compiler_lacks
from dlbench.machine.gpus import gpus_of_node
from dlbench.machine.storage import file_system_of
from dlbench.node.ranks import CoreBinding, RankPlace, bind, detect, require_machine
from dlbench.opening import read_bytes, read_json, why_unreadable
from dlbench.records.files import write_json
from dlbench.records.folder import MAX_JSON
from dlbench.records.preflight import PreflightFolder, SeenRank, SeenScratch
from dlbench.specs.comm import CommPlan
from dlbench.specs.system import StagingTier, StorageSpec

REQUIRED = ("torch", "numpy", "safetensors")
_OPTIONAL = ("horovod", "mpi4py", "pynvml")
_MODULES = {"horovod": "horovod.torch"}  # Module whose import shows that a package works, if it is not the package.
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}  # Name on PyPI, if it is not that of the package.
_TRIAL_BYTES = 1 << 20  # Bytes that are written to try a storage tier.


def libraries() -> tuple[dict[str, str], dict[str, str]]:
    """Returns versions of packages that import, and errors of installed packages that do not."""
    versions = {"python": platform.python_version(), "dlbench": dlbench.__version__}
    broken: dict[str, str] = {}
    for name in REQUIRED + _OPTIONAL:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(_MODULES.get(name, name))
        except Exception as error:  # a library may raise anything while it is imported
            first_line = str(error).strip().partition("\n")[0]
            broken[name] = f"{type(error).__name__}: {first_line}"[:300]
            continue
        try:
            versions[name] = importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            versions[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
    return versions, broken


def scratch(storage: StorageSpec, key: StagingTier, variables: Mapping[str, str], host: str) -> SeenScratch:
    """Tries a storage tier: writes a MiB, syncs it, reads it back and deletes it."""
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
    content = secrets.token_bytes(_TRIAL_BYTES)
    file = folder / f".dlbench-preflight-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if read_bytes(file, _TRIAL_BYTES) != content:
            return f"storage.{key}.path {str(folder)!r}: a file read back differs from what was written"
    except OSError as error:
        return f"storage.{key}.path {str(folder)!r}: cannot be written: {error.strerror or error}"
    finally:
        with suppress(OSError):
            file.unlink()
    return ""


def main(arguments: list[str]) -> int:
    """Checks this rank and writes the result; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m dlbench.node.site_check FOLDER/plan.json", file=sys.stderr)
        return int(ExitCode.USAGE)
    path = Path(arguments[0]).absolute()
    try:
        try:
            plan = CommPlan.model_validate(read_json(path, MAX_JSON))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not a readable plan: {why_unreadable(error)}") from None
        folder, place = PreflightFolder(path.parent), detect(plan)
        result = check_rank(plan, place)
        write_json(folder.rank(place.rank), result.model_dump(mode="json"))
    except DlbenchError as error:
        print(f"dlbench: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.OK)


def check_rank(plan: CommPlan, place: RankPlace) -> SeenRank:
    """Returns libraries, cores, GPU and scratch folders of this rank, with their problems."""
    binding = bind(plan, place)
    node_gpus = tuple(gpu.uuid for gpu in gpus_of_node(os.environ))
    problems = []
    try:
        require_machine(plan, place)
    except DlbenchError as error:
        problems.append(str(error))
    versions, broken = libraries()
    problems += [f"{name} is not installed for {sys.executable}" for name in REQUIRED if name not in versions | broken]
    gpu, compiler = None, ""
    if "torch" in versions:
        gpu, problem = _gpu(plan, place, binding)
        problems.append(problem)
    if gpu is not None:
        compiler = "; ".join(compiler_lacks(on_gpu=True) or ())
    places: tuple[SeenScratch, ...] = ()
    if place.local_rank == 0:
        places = tuple(scratch(plan.system.storage, key, os.environ, place.host) for key in ("local", "memory"))
    near_gpu = None
    if binding.gpu is not None and binding.gpu.cores:
        near_gpu = set(binding.cores) <= set(binding.gpu.cores)
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
        near_gpu=near_gpu,
        compiler=compiler,
        problems=tuple(problem for problem in problems if problem),
        scratch=places,
    )


def _gpu(plan: CommPlan, place: RankPlace, binding: CoreBinding) -> tuple[str | None, str]:
    """Returns the UUID of this rank's GPU, None on a CPU, and the problem with it, if any."""
    from dlbench.node.devices import device_for, rank_gpu

    try:
        gpu = rank_gpu(device_for(plan, place), binding.gpu)
    except DlbenchError as error:
        return None, str(error)
    except Exception as error:  # torch passes on errors of the driver
        return None, f"{type(error).__name__}: {str(error).strip()}"[:300]
    return (None, "") if gpu is None else (gpu.uuid, "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
