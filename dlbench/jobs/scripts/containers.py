"""Words of a command in a shell script (literal text, which is quoted, and variables of the script), and the commands
that run ranks in a container; nothing is run. The options are those of apptainer-exec(1), srun --help with Pyxis, and
podman-run(1).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import dlbench
from dlbench.errors import UserError
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.system import TierSpec

_PREFIXES = ("DLBENCH_", "SLURM", "PMI", "OMPI_", "OPAL_", "PRTE_", "UCX_", "NCCL_", "RCCL_", "FI_", "MPICH_", "OMP_")
"""Prefixes of variables that ranks need to find each other and the network; podman passes only named variables into a
container (podman-run(1), --env)."""

_OWN = ("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TMPDIR")
"""Other variables that dlbench sets for ranks."""

GRANTED = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables in which Slurm names the GPUs of a job: some sites do not restrict the devices in another way."""

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")  # In the path of a tier (dlbench.datasets.staging.copying).


class Shell(str):
    """Shell code, which is not quoted; any other text is."""

    __slots__ = ()


def variable(name: str) -> Shell:
    """Returns the value of a variable of the script, such as ``HOME`` or ``{job1%%;*}``."""
    return Shell(f'"${name}"')


def joined(*parts: str, by: str = "") -> str:
    """Returns parts joined to one word by the separator `by`, which must need no quotes."""
    if not any(isinstance(part, Shell) for part in parts):
        return by.join(parts)
    return Shell(by.join(in_shell(part) if part else "" for part in parts))


def in_shell(word: str) -> str:
    """Returns a word as shell code."""
    return word if isinstance(word, Shell) else shlex.quote(word)


def quoted(words: list[str]) -> str:
    """Returns a command as one line of shell code."""
    return " ".join(in_shell(word) for word in words)


class RunWords(NamedTuple):
    """The folder and the id of a run, as words of the commands that start it."""

    folder: str  # Absolute path.
    run_id: str

    @property
    def plan(self) -> str:
        return joined(self.folder, "/plan.json")


IN_SCRIPT = RunWords(variable("dlbench_run"), variable("{dlbench_run##*/}"))
"""The run whose folder is in the script's variable `dlbench_run`."""


def words_of(folder: RunFolder) -> RunWords:
    """Returns the words of a known folder."""
    return RunWords(str(folder.path), folder.path.name)


def python_of(plan: LaunchPlan, python: str) -> str:
    """Returns the Python of the ranks: the container's where they run in one, else the system's, else `python`."""
    if plan.system.container.is_used:
        return plan.system.container.python
    return plan.system.python or python


def srun_words(plan: LaunchPlan, folder: str) -> list[str]:
    """Returns the options of srun for Pyxis; empty for other kinds of container."""
    container = plan.system.container
    if container.kind != "pyxis":
        return []
    # Other variables of the host are passed in unless the image sets them itself.
    names = {*plan.system.launch.environment, *_OWN}
    if container.mount_dlbench:
        names.add("PYTHONPATH")
    access = "--container-writable" if container.writable else "--container-readonly"
    return [
        f"--container-image={container.image}",
        joined("--container-mounts=", joined(*_mounts(plan, folder), by=",")),
        joined("--container-workdir=", folder),
        f"--container-env={','.join(sorted(names))}",
        *("--no-container-mount-home", "--no-container-entrypoint", "--no-container-remap-root"),
        access,
        *container.args,
    ]


def before_launcher(plan: LaunchPlan) -> list[str]:
    """Returns what comes before srun if srun starts the container: the removal of variables that must not go in."""
    return _withheld(plan) if plan.system.container.kind == "pyxis" else []


def in_container(plan: LaunchPlan, folder: str) -> list[str]:
    """Returns what comes before a rank's own command; empty if Slurm starts the container, or there is none."""
    if plan.system.container.kind == "apptainer":
        return _apptainer(plan, folder)
    if plan.system.container.is_podman:
        return _podman(plan, folder)
    return []


def _apptainer(plan: LaunchPlan, folder: str) -> list[str]:
    """Uses no PID namespace, so that the rank's supervisor sees the runtime and ends with it."""
    container = plan.system.container
    command = _withheld(plan) or ["env"]
    command += _python_path(plan)
    command += ["apptainer", "exec", "--no-home"]
    command += {"nvidia": ["--nv"], "amd": ["--rocm"]}.get(_gpu_vendor(plan), [])
    if container.writable:
        command.append("--writable-tmpfs")
    for mount in _mounts(plan, folder):
        command += ["--bind", mount]
    return [*command, "--pwd", folder, *container.args, str(container.image)]


def _podman(plan: LaunchPlan, folder: str) -> list[str]:
    """Uses the network, PID and IPC namespaces of the host, because ranks of one node share memory."""
    container = plan.system.container
    nvidia = ["--gpu"] if container.kind == "podman-hpc" else ["--device=nvidia.com/gpu=all"]
    amd = ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"]
    command = [container.kind, "run", "--rm", "--pull=never", "--network=host", "--pid=host", "--ipc=host"]
    command += {"nvidia": nvidia, "amd": amd}.get(_gpu_vendor(plan), [])
    if not container.writable:
        command.append("--read-only")
    names = [*(f"{prefix}*" for prefix in _PREFIXES), *sorted({*_OWN, *GRANTED, *plan.system.launch.environment})]
    names += [name for name in container.pass_in if name not in names]
    command += [f"--env={text}" for text in (*names, *_python_path(plan))]
    command += [joined("--volume=", mount) for mount in _mounts(plan, folder)]
    command += [joined("--workdir=", folder), *container.args]
    if container.is_path:
        command.append("--rootfs")
    return [*command, str(container.image)]


def _gpu_vendor(plan: LaunchPlan) -> str:
    if plan.system.container.gpu:
        return plan.system.container.gpu
    return "nvidia" if plan.system.node.gpus else "none"


def _withheld(plan: LaunchPlan) -> list[str]:
    """Returns an `env` command that removes variables before a container starts; empty if there is nothing to do."""
    arguments = []
    for name in plan.system.container.withhold:
        if name not in plan.system.launch.environment:
            arguments += ["-u", name]
    if plan.system.container.kind == "pyxis":
        arguments += _python_path(plan)
    return ["env", *arguments] if arguments else []


def _python_path(plan: LaunchPlan) -> list[str]:
    """Returns ``PYTHONPATH=`` with the parent folder of the package dlbench, if that is mounted into the container."""
    return [f"PYTHONPATH={_package().parent}"] if plan.system.container.mount_dlbench else []


def _package() -> Path:
    return Path(dlbench.__file__).resolve().parent


def _mounts(plan: LaunchPlan, folder: str) -> list[str]:
    """Returns mounts as SRC:DST or SRC:DST:ro, in order, one per path; podman refuses two mounts at one path."""
    mounts = {path: joined(path, path, by=":") for path in (folder, variable("TMPDIR"))}
    inputs: list[object] = []
    if isinstance(plan, RunPlan):
        data = plan.workload.data
        if data.staging != "none":
            tier = _tier_folder(plan.system.storage.tier(data.staging_tier))
            if tier != "/dev/shm":  # noqa: S108  # all kinds of container have the node's
                mounts[tier] = joined(tier, tier, by=":")
        keys = data.model_dump()
        inputs = [keys.get(key) for key in ("source", "validation", "vocabulary")]
        inputs += [plan.checkpoint.resume_from, plan.checkpoint.initialize_from]
    read_only = [path for path in inputs if isinstance(path, str) and path.startswith("/")]
    if plan.system.container.mount_dlbench:
        package = _package()
        siblings = [package.parent / name for name in ("workloads", "systems", "slurm", "reports")]
        read_only = [str(package), *(str(path) for path in siblings if path.is_dir()), *read_only]
    mounts |= {path: f"{path}:{path}:ro" for path in read_only}
    for path in mounts:
        if re.search(r"[:,]", path):
            raise UserError(f"{path}: cannot be mounted in a container: its name holds a colon or a comma")
    given_mounts: dict[str, str] = {}
    for mount in plan.system.container.mounts:
        if ":" in mount:
            given_mounts[mount.split(":")[1]] = mount
        else:
            given_mounts[mount] = f"{mount}:{mount}"
    own_mounts = [mount for path, mount in mounts.items() if path not in given_mounts]
    return [*own_mounts, *given_mounts.values()]


def _tier_folder(tier: TierSpec) -> str:
    before_host, host, _ = tier.path.partition("{host}")
    path = before_host.rpartition("/")[0] if host else before_host.rstrip("/")
    if not path:
        raise UserError(f"storage: {tier.path}: cannot be mounted in a container: begin it with a folder of every node")
    words: list[str] = []
    if path.startswith("~/"):
        words.append(variable("HOME"))
        path = path[1:]
    # Every second part is a variable's name.
    for index, text in enumerate(VARIABLE.split(path)):
        words.append(variable(text) if index % 2 else text)
    return joined(*words)


def facts(plan: LaunchPlan) -> dict[str, str]:
    """Returns variables that describe the container to a rank; without the image's digest if that is unknown."""
    container = plan.system.container
    if not container.is_used:
        return {}
    variables = {"DLBENCH_CONTAINER_KIND": container.kind, "DLBENCH_CONTAINER_IMAGE": str(container.image)}
    if container.digest:
        variables["DLBENCH_CONTAINER_SHA256"] = container.digest
    return variables
