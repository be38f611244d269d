"""Builds Horovod from PyPI's source archive, once per toolchain, and installs the cached wheel. Horovod 0.28.1 (June
2023) is the last release, and PyPI has only its source. It fails to compile with torch >= 2.1 (C++14), and its stall
inspector never reports under Gloo. The archive is checked against a SHA-256, patched (`patches/horovod.yaml`), and
built with Gloo, with MPI if it is installed, and with NCCL and CUDA if torch is built for CUDA and both are installed.
One patch is for the timeline: with HOROVOD_TIMELINE set, rank 0 waits on the host for the gradients and the end of each
message (`NCCLAllreduce::WaitForData` and `FinalizeGPUQueue`), and negotiates nothing meanwhile; with the patch only
while a file is open, which dlbench opens and closes between two steps. The remaining cost is that negotiated bit
vectors are twice as long: 50 bytes more for 400 gradients (`CacheCoordinator::sync`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlbench import bundled
from dlbench.bundled import cache_folder
from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.machine.cuda_parts import Nvcc, find_cuda_parts
from dlbench.setup.probes import ask
from dlbench.specs.files import read_yaml
from dlbench.units import format_seconds

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""SHA-256 of horovod-0.28.1.tar.gz as PyPI lists it."""

BUILD_REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools<80", "wheel")
"""Needed by Horovod's setup.py and at import; setuptools 80 removed functions that its setup.py calls."""

SIGN_OF_LIFE_S = 10.0  # Seconds between two messages of a build.
_ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__, "gpus": [], "built_for": []}
if torch.version.cuda:
    found["built_for"] = torch.cuda.get_arch_list()
    try:
        devices = range(torch.cuda.device_count())
        found["gpus"] = ["%d%d" % torch.cuda.get_device_capability(device) for device in devices]
    except Exception:  # a driver that does not answer: no GPU is visible, then
        pass
print(json.dumps(found))
"""
_CUDA_FACTS = ("nccl", "nccl_home", "nccl_library", "nvcc", "cuda_home", "architectures", "cuda_lacks")


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.partition("\n")[0].strip()


def toolchain() -> dict[str, str | None]:
    """Returns everything that affects the binary: versions and folders of Python, torch, compiler, MPI, NCCL and CUDA.
    The values for CUDA are None if torch is built for CPUs, or if a part is missing, which ``cuda_lacks`` then
    names.
    """
    torch = ask(_ASK_TORCH)
    if isinstance(torch, str):
        raise EnvironmentLacksError("horovod: torch is not installed in this environment; pip install 'dlbench[node]'")
    facts: dict[str, str | None] = {"torch": torch["torch"], "cuda": torch["cuda"]}
    facts["python"] = ".".join(map(str, sys.version_info[:2]))
    facts["compiler"] = _first_line(os.environ.get("CXX", "g++"), "--version") or None
    facts["mpi"] = _first_line("mpicxx", "--showme:version") or None
    return facts | _cuda_facts(torch)


def _cuda_facts(torch: Mapping[str, Any]) -> dict[str, str | None]:
    facts: dict[str, str | None] = dict.fromkeys(_CUDA_FACTS)
    if torch["cuda"] is None:  # NCCL needs a torch that was built for CUDA
        return facts
    parts = find_cuda_parts(torch["cuda"], Path(torch["file"]).parent.parent)
    if isinstance(parts, str):
        return {**facts, "cuda_lacks": parts}
    nccl, nvcc = parts
    return {
        "nccl": nccl.version,
        "nccl_home": str(nccl.home),
        "nccl_library": str(nccl.library),
        "nvcc": nvcc.version,
        "cuda_home": str(nvcc.home),
        "architectures": os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST") or _architectures(torch, nvcc),
        "cuda_lacks": None,
    }


def _architectures(torch: Mapping[str, Any], nvcc: Nvcc) -> str:
    """Returns the architectures of the visible GPUs, else all of torch's, as far as nvcc supports them; ``80,90``.
    Horovod's default is all that nvcc supports, which takes minutes.
    """
    architectures = set(torch["gpus"])
    if not architectures:
        architectures.update(re.findall(r"^sm_(\d+)$", "\n".join(torch["built_for"]), re.MULTILINE))
    supported = sorted(set(nvcc.architectures), key=int)
    if supported:
        architectures.intersection_update(supported)
    return ",".join(sorted(architectures, key=int) or supported[-1:])


def build_environment(facts: Mapping[str, str | None]) -> dict[str, str]:
    """Returns Horovod's build switches for a toolchain (names as in Horovod's installation guide)."""
    switches = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # CMake 4 removed the policies of the versions that Horovod's vendored projects require.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    switches["HOROVOD_WITH_MPI" if facts.get("mpi") else "HOROVOD_WITHOUT_MPI"] = "1"
    if facts.get("nccl"):
        switches |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": str(facts["nccl_home"]),
            # Variables that Horovod's CMake, its own search and torch's search read.
            **dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"), str(facts["cuda_home"])),
        }
        if architectures := facts.get("architectures"):
            switches["HOROVOD_BUILD_CUDA_CC_LIST"] = architectures
    return switches


def _link_libraries(facts: Mapping[str, str | None], folder: Path) -> dict[str, str]:
    """Links libraries from pip to the names that linkers need; returns the variables that point to them. At run time
    the names with version numbers count: torch, imported first, has loaded these libraries.
    """
    if not facts.get("nccl"):
        return {}
    library, lib = Path(str(facts["nccl_library"])), Path(str(facts["cuda_home"])) / "lib"
    folder.mkdir()
    links = {path.name.partition(".so")[0] + ".so": path for path in sorted(lib.glob("libcudart.so.*"))}
    if library.suffix == ".2":
        links["libnccl.so"] = library
    for name, target in links.items():
        (folder / name).symlink_to(target)
    paths = os.pathsep.join([str(folder), str(lib)])
    variables = {
        "CMAKE_LIBRARY_PATH": paths,
        "LIBRARY_PATH": os.pathsep.join(filter(None, [paths, os.environ.get("LIBRARY_PATH")])),
        "PATH": os.pathsep.join([str(Path(str(facts["cuda_home"])) / "bin"), os.environ.get("PATH", "")]),
    }
    if "libnccl.so" in links:
        variables |= {"HOROVOD_NCCL_LIB": str(folder), "HOROVOD_NCCL_LINK": "shared"}
    return variables


def cache_key(facts: Mapping[str, str | None]) -> str:
    """Returns a short digest of toolchain, switches and patches."""
    switches = {name: value for name, value in build_environment(facts).items() if name != "MAKEFLAGS"}
    patches = [(patch.file, patch.old, patch.new) for patch in PATCHES]
    # A missing part of CUDA does not affect a build for CPUs.
    relevant_facts = {name: fact for name, fact in facts.items() if name != "cuda_lacks"}
    text = json.dumps([VERSION, SDIST_SHA256, relevant_facts, switches, patches], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply_patches(source: Path) -> None:
    """Patches an unpacked source tree. Raises `RunError`: a text to replace is missing, as in another release."""
    for patch in PATCHES:
        path = source / patch.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if patch.old not in text:
            raise RunError(f"{path}: {patch.old!r} not found; the patch ({patch.reason}) does not fit this source")
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def _fetch(folder: Path, given: Path | None) -> Path:
    """Checks and unpacks the source archive into a folder; returns the source folder. `given`: None to download it."""
    archive = given
    if archive is None:
        words = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"horovod=={VERSION}"]
        _run_pip(words, folder)
        archive = folder / f"horovod-{VERSION}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise RunError(f"{given or archive.name}: SHA-256 is {digest}, expected {SDIST_SHA256}; nothing was built")
    root = folder / f"horovod-{VERSION}"
    with tarfile.open(archive) as tar:
        # The checksum pins the archive; only regular files and folders inside its own root are extracted.
        members = [member for member in tar if member.isfile() or member.isdir()]
        inside = [member for member in members if not ({"/", ".."} & {*Path(member.name).parts})]
        tar.extractall(folder, members=inside)  # noqa: S202  (as above)
    return root


def given_source(option: Path | None) -> Path | None:
    """Returns the source archive of the option or ``DLBENCH_HOROVOD_SDIST``; None to download it."""
    archive = option or Path(os.environ.get("DLBENCH_HOROVOD_SDIST", ""))
    if archive == Path():
        return None
    if not archive.is_file():
        setting = "--source" if option else "DLBENCH_HOROVOD_SDIST"
        raise UserError(f"{setting} {archive}: no such file; give horovod-{VERSION}.tar.gz from PyPI")
    return archive.absolute()


def _run_pip(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise RunError(f"pip {' '.join(arguments)} failed:\n{tail}")


def _compile(source: Path, environment: Mapping[str, str], log: Path, say: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--verbose"]
    command += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(source.parent / "wheels"), str(source)]
    start = time.monotonic()
    # Without variables of the caller's shell that request a CUDA build.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_GPU")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=inherited | dict(environment), cwd=source
        )
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SIGN_OF_LIFE_S)
            duration = format_seconds(max(1, int(time.monotonic() - start)))
            if process.returncode is None:
                say(f"building Horovod: {duration}")
    if process.returncode != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise RunError(f"building Horovod failed; the log is {log}\n" + "\n".join(errors[:5]))
    say(f"built Horovod {VERSION} in {duration}")


def build_wheel(facts: Mapping[str, str | None], say: Callable[[str], None], source: Path | None = None) -> Path:
    """Builds the wheel and moves it into the cache; returns its path. Raises EnvironmentLacksError or RunError."""
    for program, package in (("cmake", "cmake"), (os.environ.get("CXX", "g++"), "g++"), ("make", "make")):
        if shutil.which(program) is None:
            raise EnvironmentLacksError(f"horovod: {program} is not on PATH; install the system package {package}")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        raise EnvironmentLacksError("horovod: Python's headers are missing; install the system package python3-dev")
    target = cache_folder() / "horovod" / cache_key(facts)
    target.parent.mkdir(parents=True, exist_ok=True)
    log = target.parent / f"build-{target.name}.log"
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=target.parent) as temporary:
        work = Path(temporary)
        if source:
            say(f"using Horovod {VERSION} from {source}")
        else:
            say(f"downloading Horovod {VERSION} (source)")
        unpacked = _fetch(work, source)
        apply_patches(unpacked)
        parts = ["Gloo"]
        if facts.get("mpi"):
            parts.append("MPI")
        if nccl := facts.get("nccl"):
            parts.append(f"NCCL {nccl} and CUDA {facts['nvcc']} for compute capabilities {facts['architectures']}")
        say(f"building Horovod {VERSION} with {', '.join(parts)}; takes some minutes, only once")
        say(f"log {log}")
        _compile(unpacked, build_environment(facts) | _link_libraries(facts, work / "links"), log, say)
        built = work / "wheels"
        (built / "toolchain.json").write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        built.rename(target)
    return next(iter(sorted(target.glob("horovod-*.whl"))))


def install(say: Callable[[str], None], *, rebuild: bool = False, source: Path | None = None) -> Path:
    """Installs Horovod into this environment, from the cache or a new build, unless that wheel is installed already;
    returns the wheel. `say` and `source`: as in `build_wheel`.
    """
    source = given_source(source)
    facts = toolchain()
    if lacks := facts["cuda_lacks"]:
        say(f"torch is built for CUDA {facts['cuda']}, but {lacks}")
        say("this Horovod is therefore built for CPUs: on GPUs it supports only one rank; use engine ddp for more")
    wheel = None
    if not rebuild:
        wheel = min((cache_folder() / "horovod" / cache_key(facts)).glob("horovod-*.whl"), default=None)
    marker = Path(sys.prefix) / "horovod-installed-by-dlbench.txt"
    if wheel is not None and marker.is_file() and marker.read_text() == cache_key(facts) and find_spec("horovod"):
        say(f"Horovod {VERSION} is installed (build {cache_key(facts)})")
        return wheel
    say("installing build requirements of Horovod")
    _run_pip(["install", *BUILD_REQUIREMENTS], Path.cwd())
    if wheel is None:
        wheel = build_wheel(facts, say, source)
    else:
        say(f"using the Horovod wheel built earlier ({wheel})")
    _run_pip(["install", "--no-deps", "--force-reinstall", str(wheel)], Path.cwd())
    marker.write_text(cache_key(facts))
    return wheel


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of Horovod's source: `new` replaces `old` everywhere in `file`."""

    file: str
    old: str
    new: str
    reason: str


def _read_patches() -> tuple[Patch, ...]:
    entries = read_yaml(bundled.folder("patches") / "horovod.yaml")["patches"]
    return tuple(
        Patch(file=file, old=entry["old"], new=entry["new"], reason=entry["reason"])
        for entry in entries
        for file in entry["files"]
    )


PATCHES = _read_patches()
