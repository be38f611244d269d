"""A rank's command becomes one that runs in a container. Pure: nothing is run, nothing is looked up.

Options are those of apptainer-exec(1), of Pyxis' own --help of srun, and of podman-run(1).
"""

from __future__ import annotations

import re
from pathlib import Path

import dlbench
from dlbench.errors import UserError
from dlbench.jobs.scripts.words import joined, variable
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import TierSpec

_PREFIXES = ("DLBENCH_", "SLURM", "PMI", "OMPI_", "OPAL_", "PRTE_", "UCX_", "NCCL_", "RCCL_", "FI_", "MPICH_", "OMP_")
"""Beginnings of the variables by which ranks find each other, and their libraries the network; podman passes none in
that is not named (podman-run(1), --env)."""

_OWN = ("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TMPDIR")
"""What else dlbench sets for ranks."""

GRANTED = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""By which Slurm says which GPUs of a node are the job's: not all sites keep a job from the others by other means."""

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")  # In the path of a tier (dlbench.datasets.staging.place).


def python_of(plan: LaunchPlan, python: str) -> str:
    """Returns the Python of the ranks: the container's where they run in one, else the system's, else `python`."""
    if plan.system.container.is_used:
        return plan.system.container.python
    return plan.system.python or python


def srun_words(plan: LaunchPlan, folder: str) -> list[str]:
    """What Pyxis is given, as options of srun; empty for other kinds.

    Variables of the host go in; those that the image sets itself only where they are named.
    """
    container = plan.system.container
    if container.kind != "pyxis":
        return []
    named = sorted({*plan.system.launch.environment, *_OWN, *(["PYTHONPATH"] if _dlbench(plan) else [])})
    return [
        f"--container-image={container.image}",
        joined("--container-mounts=", joined(*_mounts(plan, folder), by=",")),
        joined("--container-workdir=", folder),
        *([f"--container-env={','.join(named)}"] if named else []),
        *("--no-container-mount-home", "--no-container-entrypoint", "--no-container-remap-root"),
        "--container-writable" if container.writable else "--container-readonly",
        *container.args,
    ]


def before_launcher(plan: LaunchPlan) -> list[str]:
    """What comes before srun where it is srun that starts the container: variables that must not go in."""
    return _withheld(plan) if plan.system.container.kind == "pyxis" else []


def in_container(plan: LaunchPlan, folder: str) -> list[str]:
    """What comes before a rank's own command; empty where ranks run in none, or Slurm starts it."""
    kind = plan.system.container.kind
    if kind == "apptainer":
        return _apptainer(plan, folder)
    return _podman(plan, folder) if plan.system.container.is_podman else []


def _apptainer(plan: LaunchPlan, folder: str) -> list[str]:
    """Without a PID namespace: the rank's supervisor sees the runtime, and ends with it.

    Apptainer itself withholds LD_LIBRARY_PATH and PATH, and passes all else in.
    """
    container = plan.system.container
    gpu = {"nvidia": ["--nv"], "amd": ["--rocm"]}.get(_gpu(plan), [])
    own = [f"PYTHONPATH={path}" for path in _dlbench(plan)]
    return [
        *(_withheld(plan) or ["env"]),
        *own,
        *("apptainer", "exec", "--no-home", *gpu),
        *(["--writable-tmpfs"] if container.writable else []),
        *(part for mount in _mounts(plan, folder) for part in ("--bind", mount)),
        *("--pwd", folder),
        *container.args,
        str(container.image),
    ]


def _podman(plan: LaunchPlan, folder: str) -> list[str]:
    """In the host's namespaces of network, processes and shared memory, as ranks of one node need it of each other."""
    container = plan.system.container
    hpc = container.kind == "podman-hpc"
    gpu = {
        "nvidia": ["--gpu"] if hpc else ["--device=nvidia.com/gpu=all"],
        "amd": ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"],
    }.get(_gpu(plan), [])
    names = [*(f"{prefix}*" for prefix in _PREFIXES), *sorted({*_OWN, *GRANTED, *plan.system.launch.environment})]
    names += [name for name in container.pass_in if name not in names]
    return [
        *(container.kind, "run", "--rm", "--pull=never", "--network=host", "--pid=host", "--ipc=host", *gpu),
        *([] if container.writable else ["--read-only"]),
        *(f"--env={name}" for name in names),
        *(f"--env=PYTHONPATH={path}" for path in _dlbench(plan)),
        *(joined("--volume=", mount) for mount in _mounts(plan, folder)),
        joined("--workdir=", folder),
        *container.args,
        *(["--rootfs"] if container.is_path else []),
        str(container.image),
    ]


def _gpu(plan: LaunchPlan) -> str:
    return plan.system.container.gpu or ("nvidia" if plan.system.node.gpus else "none")


def _withheld(plan: LaunchPlan) -> list[str]:
    names = [name for name in plan.system.container.withhold if name not in plan.system.launch.environment]
    own = [f"PYTHONPATH={path}" for path in _dlbench(plan)] if plan.system.container.kind == "pyxis" else []
    return ["env", *(part for name in names for part in ("-u", name)), *own] if names or own else []


def _dlbench(plan: LaunchPlan) -> list[str]:
    """The folder that holds the package dlbench, which alone is mounted of it."""
    return [str(_package().parent)] if plan.system.container.mount_dlbench else []


def _package() -> Path:
    return Path(dlbench.__file__).resolve().parent


def _mounts(plan: LaunchPlan, folder: str) -> list[str]:
    """SRC:DST or SRC:DST:ro, in order; what the system file mounts at a place goes before what would be there.

    Podman refuses two mounts at one place.
    """
    given = {(mount.split(":") * 2)[1]: mount for mount in plan.system.container.mounts}
    found = {path: joined(path, path, by=":") for path in (folder, variable("TMPDIR"))}
    inputs: list[object] = []
    if isinstance(plan, RunPlan):
        data = plan.workload.data
        if data.staging != "none":
            tier = _tier_folder(plan.system.storage.tier(data.staging_tier))
            if tier != "/dev/shm":  # noqa: S108  # all kinds have the node's
                found[tier] = joined(tier, tier, by=":")
        keys = data.model_dump()
        inputs = [keys.get(key) for key in ("source", "validation", "vocabulary")]
        inputs += [plan.checkpoint.resume_from, plan.checkpoint.initialize_from]
    paths = [path for path in inputs if isinstance(path, str) and path.startswith("/")]
    package = _package()
    siblings = [package.parent / name for name in ("workloads", "systems", "slurm", "reports")]
    sources = [package, *(path for path in siblings if path.is_dir())] if plan.system.container.mount_dlbench else []
    found |= {str(path): f"{path}:{path}:ro" for path in (*sources, *paths)}
    for path in found:
        if re.search(r"[:,]", path):
            raise UserError(f"{path}: cannot be mounted in a container: its name holds a colon or a comma")
    own = [mount for path, mount in found.items() if path not in given]
    return [*own, *(mount if ":" in mount else f"{mount}:{mount}" for mount in given.values())]


def _tier_folder(tier: TierSpec) -> str:
    before, host, _ = tier.path.partition("{host}")
    path = before.rpartition("/")[0] if host else before.rstrip("/")
    if not path:
        raise UserError(f"storage: {tier.path}: cannot be mounted in a container: begin it with a folder of every node")
    home = [variable("HOME")] if path.startswith("~/") else []
    texts = VARIABLE.split(path[len(home) :])  # Every second one is a variable's name.
    return joined(*home, *(variable(text) if index % 2 else text for index, text in enumerate(texts)))


def facts(plan: LaunchPlan) -> dict[str, str]:
    """Variables by which a rank can say what it runs in; an unknown digest is none."""
    container = plan.system.container
    if not container.is_used:
        return {}
    known = {"DLBENCH_CONTAINER_SHA256": container.digest} if container.digest else {}
    return {"DLBENCH_CONTAINER_KIND": container.kind, "DLBENCH_CONTAINER_IMAGE": str(container.image), **known}
