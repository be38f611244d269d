"""Builds Horovod from PyPI's source archive, once per toolchain, and installs the cached wheel.

Horovod 0.28.1 (June 2023) is the last release, and PyPI has only its source. It fails against
torch >= 2.1 (C++14) and its stall inspector never fires under Gloo, so the archive is fetched with
pip or given as a file, checked against a pinned SHA-256, patched (`PATCHES`), built with Gloo always, with MPI
where it is found and with NCCL and CUDA where torch is built for them and both are found, and the wheel is kept outside
the checkout under a key of everything that shapes the binary: the next install takes seconds.

What is installed and whether it works is reported by `dlbench.setup.probes`, not here.

One of the patches is for the timeline: HOROVOD_TIMELINE makes Horovod ready to write one, and operations on GPUs take
that for writing. Rank 0, the coordinator, then waits on the host for each message's gradients and for its end
(`NCCLAllreduce::WaitForData` and `FinalizeGPUQueue`), and negotiates nothing meanwhile. With the patch it does so only
while a file is open; dlbench opens and closes it between two steps, when no operation is under way. What stays in all
steps is that each vector of negotiated bits is twice as long: 50 bytes more for 400 gradients
(`CacheCoordinator::sync`).
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

from dlbench.cache import cache_folder
from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.machine.cuda_parts import Nvcc, find_cuda_parts
from dlbench.setup.probes import ask
from dlbench.units import format_seconds

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""SHA-256 of horovod-0.28.1.tar.gz as PyPI lists it."""

BUILD_REQUIREMENTS = ("cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "setuptools<80", "wheel")
"""Needed by Horovod's setup.py and at import; setuptools 80 dropped what its setup.py calls."""

SIGN_OF_LIFE_S = 10.0
"""A build says at least this often how far it is."""
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
_READBACK = """
// Added by dlbench's build: the values in force, which no other interface tells.
long long horovod_effective_fusion_threshold_bytes() {
  if (!horovod_global.initialization_done) {
    return -1;
  }
  return (long long)horovod_global.parameter_manager.TensorFusionThresholdBytes();
}

double horovod_effective_cycle_time_ms() {
  if (!horovod_global.initialization_done) {
    return -1.0;
  }
  return horovod_global.parameter_manager.CycleTimeMs();
}

// True: a timeline without an open file leaves the operations on GPUs as they are without a timeline.
bool horovod_closed_timeline_is_free() { return true; }

"""
_ACTIVE = """
  // Added by dlbench's build: whether a file is open, so that what is noted is written.
  inline bool Active() { return Initialized() && writer_.active(); }"""
_CUDA_CHECK = "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)"
_CUDA_CHECK_FOR_GPUS = """\
include(CheckLanguage)
if(DEFINED ENV{HOROVOD_GPU_OPERATIONS})
    check_language(CUDA)
endif()
if(DEFINED ENV{HOROVOD_GPU_OPERATIONS} AND NOT CMAKE_CUDA_COMPILER)"""
_AS_FOUR = "{} files read the same headers: for CPUs they are compiled as four"
_GLOO = "    target_compile_definitions(gloo PRIVATE _GLIBCXX_USE_CXX11_ABI=1)\n"
_GLOO_AS_FOUR = """\
    if(NOT HAVE_CUDA AND NOT HAVE_ROCM AND NOT CMAKE_VERSION VERSION_LESS 3.18)
        set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 13)
        # Its ReductionFunction is another than that of algorithm.h.
        set_source_files_properties(${PROJECT_SOURCE_DIR}/third_party/gloo/gloo/allreduce.cc
            TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
"""
_HOROVOD_AS_FOUR = """\
add_library(${PYTORCH_TARGET_LIB} SHARED ${PYTORCH_SOURCES} ${SOURCES})
if(NOT HAVE_CUDA AND NOT HAVE_ROCM AND NOT CMAKE_VERSION VERSION_LESS 3.18)
    set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    set_source_files_properties(${PYTORCH_SOURCES} PROPERTIES UNITY_GROUP torch)
    set(_third 0)
    foreach(_source IN LISTS SOURCES)
        math(EXPR _third "(${_third} + 1) % 3")
        set_source_files_properties(${_source} PROPERTIES UNITY_GROUP common${_third})
    endforeach()
endif()
"""
_TORCH_HEADERS = "#include <torch/extension.h>\n#include <torch/torch.h>\n"
"""All of torch's C++ interface: nearly half of what compiling for CPUs takes."""
_USED_TORCH_HEADERS = """\
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
}
"""
_ASK_TORCH_ONCE = """\
# Added by dlbench's build: for CPUs all is asked in one import of torch; what follows takes seven.
execute_process(COMMAND ${PY_EXE} -c [==[
import os, torch
from torch.utils.cpp_extension import CppExtension
if torch.version.hip is None and "HOROVOD_GPU_OPERATIONS" not in os.environ and torch.compiled_with_cxx11_abi():
    made = CppExtension("", [])
    paths = [os.path.join(made.library_dirs[0], "lib" + name + ".so") for name in made.libraries]
    if all(map(os.path.exists, paths)):
        print("set(Pytorch_VERSION", torch.__version__, ")")
        print("set(Pytorch_INCLUDE_DIRS", *("[=[" + path + "]=]" for path in made.include_dirs), ")")
        print("set(Pytorch_LIBRARIES", *("[=[" + path + "]=]" for path in paths), ")")
]==] OUTPUT_FILE ${CMAKE_BINARY_DIR}/torch-for-cpus.cmake)
include(${CMAKE_BINARY_DIR}/torch-for-cpus.cmake)
if(Pytorch_VERSION)
    set(Pytorch_CUDA FALSE)
    set(Pytorch_ROCM FALSE)
    set(Pytorch_CXX11 TRUE)
    set(Pytorch_COMPILE_FLAGS -D_GLIBCXX_USE_CXX11_ABI=1)
    include(FindPackageHandleStandardArgs)
    find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
    return()
endif()
"""
_GPU_OPERATIONS = ("nccl_operations.cc", "gpu_operations.cc", "adasum_gpu_operations.cc")
"""Files of horovod/common/ops that ask the timeline which way to take."""


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr).splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def toolchain() -> dict[str, str | None]:
    """Everything that shapes the binary: versions of Python, torch, compiler, MPI, NCCL and CUDA, and their places.

    The parts for CUDA are None where torch is built for CPUs, and where one of them is missing; ``cuda_lacks`` then
    says what, and the build is one for CPUs.
    """
    torch = ask(_ASK_TORCH)
    if isinstance(torch, str):
        raise EnvironmentLacksError("horovod: torch is not installed in this environment; pip install 'dlbench[node]'")
    facts: dict[str, str | None] = {"torch": torch["torch"], "cuda": torch["cuda"]}
    facts["python"] = ".".join(map(str, sys.version_info[:2]))
    facts["compiler"] = _first_line(os.environ.get("CXX", "g++"), "--version") or None
    facts["mpi"] = (_first_line("mpicxx", "--showme:version") or None) if shutil.which("mpicxx") else None
    return facts | _cuda_facts(torch)


def _cuda_facts(torch: Mapping[str, Any]) -> dict[str, str | None]:
    facts: dict[str, str | None] = dict.fromkeys(_CUDA_FACTS)
    if torch["cuda"] is None:  # NCCL serves only a torch that was built for CUDA
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
    """Those of the GPUs in sight, else all that torch is built for, as far as nvcc knows them; e.g. ``80,90``.

    Horovod by itself builds for all that nvcc knows, which takes minutes. Its build adds code that later GPUs than the
    last one of the list can translate.
    """
    names = torch["gpus"] or [match[1] for name in torch["built_for"] if (match := re.fullmatch(r"sm_(\d+)", name))]
    known = sorted(set(nvcc.architectures), key=int)
    chosen = set(names).intersection(known) if known else set(names)
    return ",".join(sorted(chosen, key=int) or known[-1:])


def build_environment(facts: Mapping[str, str | None]) -> dict[str, str]:
    """Horovod's build switches for a toolchain (names as in Horovod's installation guide)."""
    switches = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # CMake 4 dropped the policies of the versions that Horovod's vendored projects ask for.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    switches["HOROVOD_WITH_MPI" if facts.get("mpi") else "HOROVOD_WITHOUT_MPI"] = "1"
    if facts.get("nccl"):
        switches |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": str(facts["nccl_home"]),
            # What Horovod's CMake, its own search and torch's tell the compiler by.
            **dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"), str(facts["cuda_home"])),
        }
        if architectures := facts.get("architectures"):
            switches["HOROVOD_BUILD_CUDA_CC_LIST"] = architectures
    return switches


def _link_libraries(facts: Mapping[str, str | None], folder: Path) -> dict[str, str]:
    """Links by the names that linkers look for, to libraries that pip installs under others; and where they are. At run
    time the names with numbers count: torch, imported first, has loaded these very libraries.
    """
    if not facts.get("nccl"):
        return {}
    library, lib = Path(str(facts["nccl_library"])), Path(str(facts["cuda_home"])) / "lib"
    folder.mkdir()
    links = {"libnccl.so": library} if library.suffix == ".2" else {}
    links |= {path.name.partition(".so")[0] + ".so": path for path in sorted(lib.glob("libcudart.so.*"))}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    paths = os.pathsep.join([str(folder), str(lib)])
    found = {
        "CMAKE_LIBRARY_PATH": paths,
        "LIBRARY_PATH": os.pathsep.join(filter(None, [paths, os.environ.get("LIBRARY_PATH")])),
        "PATH": os.pathsep.join([str(Path(str(facts["cuda_home"])) / "bin"), os.environ.get("PATH", "")]),
    }
    if "libnccl.so" in links:
        found |= {"HOROVOD_NCCL_LIB": str(folder), "HOROVOD_NCCL_LINK": "shared"}
    return found


def cache_key(facts: Mapping[str, str | None]) -> str:
    """A short digest of toolchain, switches and patches."""
    switches = {k: v for k, v in build_environment(facts).items() if k != "MAKEFLAGS"}
    patches = [(p.file, p.old, p.new) for p in PATCHES]
    # What lacks for CUDA does not shape a build for CPUs.
    shaping = {name: fact for name, fact in facts.items() if name != "cuda_lacks"}
    text = json.dumps([VERSION, SDIST_SHA256, shaping, switches, patches], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply_patches(source: Path) -> None:
    """Patches an unpacked source tree. Raises `RunError`: a place to patch is not there, so this is not the release the
    patches were made for.
    """
    for patch in PATCHES:
        path = source / patch.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if patch.old not in text:
            raise RunError(f"{path}: {patch.old!r} not found; the patch ({patch.reason}) does not fit this source")
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def _fetch(folder: Path, given: Path | None) -> Path:
    """Gets, checks and unpacks the source archive; returns the source folder. `folder`: to work in. `given`: the
    archive, where it is here already; None to download it.
    """
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
        # The archive is pinned by its checksum; regular files and folders inside its own root are all it has.
        members = [m for m in tar if (m.isfile() or m.isdir()) and not Path(m.name).is_absolute()]
        tar.extractall(folder, members=[m for m in members if ".." not in Path(m.name).parts])  # noqa: S202  (as above)
    return root


def given_source(option: Path | None) -> Path | None:
    """The source archive that the option or ``DLBENCH_HOROVOD_SDIST`` names; None to download it. Raises `UserError`:
    it is no file.
    """
    named = option or Path(os.environ.get("DLBENCH_HOROVOD_SDIST", ""))
    if named == Path():
        return None
    if not named.is_file():
        how = "--source" if option else "DLBENCH_HOROVOD_SDIST"
        raise UserError(f"{how} {named}: no such file; horovod-{VERSION}.tar.gz from PyPI is wanted")
    return named.absolute()


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
    # Without what asks for a CUDA build, left over from the caller's shell or an installation guide.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_GPU")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=inherited | dict(environment), cwd=source
        )
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SIGN_OF_LIFE_S)
            took = format_seconds(max(1, int(time.monotonic() - start)))
            if process.returncode is None:
                say(f"building Horovod: {took}")
    if process.returncode != 0:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise RunError(f"building Horovod failed; the log is {log}\n" + "\n".join(errors[:5]))
    say(f"built Horovod {VERSION} in {took}")


def build_wheel(facts: Mapping[str, str | None], say: Callable[[str], None], source: Path | None = None) -> Path:
    """Builds the wheel for a toolchain and puts it into the cache in one step; returns its path.

    `say` takes lines. `source` is the archive, where it is not to be downloaded.

    Raises `EnvironmentLacksError`: a compiler or CMake is missing; `RunError`: download, check, patch or build failed;
    the message says where the log is.
    """
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
        say(f"taking Horovod {VERSION} from {source}" if source else f"fetching Horovod {VERSION} (source)")
        unpacked = _fetch(work, source)
        apply_patches(unpacked)
        parts = ["Gloo", *(["MPI"] if facts.get("mpi") else [])]
        if nccl := facts.get("nccl"):
            parts.append(f"NCCL {nccl} and CUDA {facts['nvcc']} for compute capabilities {facts['architectures']}")
        say(f"building Horovod {VERSION} with {', '.join(parts)}; once, some minutes, the last files take longest")
        say(f"log {log}")
        _compile(unpacked, build_environment(facts) | _link_libraries(facts, work / "links"), log, say)
        built = work / "wheels"
        (built / "toolchain.json").write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        built.rename(target)
    return next(iter(sorted(target.glob("horovod-*.whl"))))


def install(say: Callable[[str], None], *, rebuild: bool = False, source: Path | None = None) -> Path:
    """Makes `import horovod.torch` work in this environment; returns the wheel that was installed.

    Installs the build requirements, takes the cached wheel of this toolchain or builds one, and
    installs it unless that very wheel is installed already. `say` and `source`: see `build_wheel`.
    """
    source = given_source(source)
    facts = toolchain()
    if lacks := facts["cuda_lacks"]:
        say(f"torch is built for CUDA {facts['cuda']}, but {lacks}")
        say("so this Horovod is one for CPUs: on GPUs it serves one rank; engine ddp serves more")
    wheel = None
    if not rebuild:
        wheel = min((cache_folder() / "horovod" / cache_key(facts)).glob("horovod-*.whl"), default=None)
    marker = Path(sys.prefix) / "horovod-installed-by-dlbench.txt"
    if wheel is not None and marker.is_file() and marker.read_text() == cache_key(facts) and find_spec("horovod"):
        say(f"Horovod {VERSION} is installed (build {cache_key(facts)})")
        return wheel
    say("installing what Horovod's build needs")
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
    """One textual change of Horovod's source: `old` becomes `new` everywhere in `file`."""

    file: str
    old: str
    new: str
    reason: str


PATCHES = (
    *(
        Patch(
            file=file,
            old="set(CMAKE_CXX_STANDARD 14)",
            new="set(CMAKE_CXX_STANDARD 20)",
            reason="headers of torch >= 2.1 need C++17, newer ones C++20",
        )
        for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
    ),
    Patch(file="setup.py", old="'RelWithDebInfo'", new="'Release'", reason="the same -O3, without debug symbols"),
    Patch(file="CMakeLists.txt", old=_CUDA_CHECK, new=_CUDA_CHECK_FOR_GPUS, reason="a build for CPUs needs no nvcc"),
    Patch(file="CMakeLists.txt", old=_GLOO, new=_GLOO + _GLOO_AS_FOUR, reason=_AS_FOUR.format(38)),
    Patch(
        file="horovod/torch/CMakeLists.txt",
        old="add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n",
        new=_HOROVOD_AS_FOUR,
        reason=_AS_FOUR.format(35),
    ),
    *(
        Patch(
            file=f"horovod/torch/{file}",
            old=_TORCH_HEADERS,
            new=f"#if HAVE_GPU\n{_TORCH_HEADERS}{used}#endif\n",
            reason="of torch's headers only those that a build for CPUs uses are read",
        )
        for file, used in {"adapter_v2.h": f"#else\n{_USED_TORCH_HEADERS}", "mpi_ops_v2.cc": ""}.items()
    ),
    Patch(
        file="cmake/Modules/FindPytorch.cmake",
        old=(_first := "list(APPEND CMAKE_PREFIX_PATH ${Pytorch_ROOT})\n"),
        new=_first + _ASK_TORCH_ONCE,
        reason="torch was imported seven times, one after the other",
    ),
    Patch(
        file="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_)",
        new="global_ranks_.resize(size_)",
        reason="reserve leaves size() at 0, so the stall inspector never reports a missing rank under Gloo",
    ),
    Patch(
        file="horovod/common/operations.cc",
        old="bool horovod_gloo_built() {",
        new=_READBACK.lstrip("\n") + "bool horovod_gloo_built() {",
        reason="fusion threshold and cycle time in force can be read back into the record",
    ),
    Patch(
        file="horovod/common/timeline.h",
        old="  inline short Initialized() { return initialized_.fetch_and(1); }",
        new="  inline short Initialized() { return initialized_.fetch_and(1); }" + _ACTIVE,
        reason="a timeline that can be opened later is told from one that is open",
    ),
    *(
        Patch(
            file=f"horovod/common/ops/{file}",
            old="timeline.Initialized()",
            new="timeline.Active()",
            reason="rank 0 waits for the GPU on the host as long as it is asked so, in every step of a run",
        )
        for file in _GPU_OPERATIONS
    ),
    Patch(
        file="horovod/common/ops/cuda/CMakeLists.txt",
        old="set(CMAKE_CUDA_STANDARD 11)",
        new="set(CMAKE_CUDA_STANDARD 17)",
        reason="CUDA 13 and the headers of gcc 14 have left C++11 behind",
    ),
    Patch(
        file="horovod/torch/cuda_util.cc",
        old='dlopen("libcuda.so", RTLD_LAZY)',
        new='dlopen("libcuda.so.1", RTLD_LAZY)',
        reason="drivers install libcuda.so.1; the name without number comes with packages for development only",
    ),
    Patch(
        file="cmake/Modules/FindPytorch.cmake",
        old="(torch.version.cuda is not None) and (CUDA_HOME is not None)",
        new="(torch.version.cuda is not None) and ('HOROVOD_GPU_OPERATIONS' in __import__('os').environ)",
        reason="a torch for CUDA on a machine with some CUDA gets a half CUDA build, though none was asked for",
    ),
)
