"""Building Horovod and telling what is installed, with stub programs for pip, compilers, MPI and Slurm."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.setup import horovod, probes
from dlbench.setup.horovod import PATCHES, VERSION, apply_patches, build_environment, cache_key, install, toolchain
from dlbench.setup.probes import Probe, examine
from tests.support.gpus import gpu_files

CUDA_PARTS = ("nccl", "nccl_home", "nccl_library", "nvcc", "cuda_home", "architectures", "cuda_lacks")
FACTS = {
    **dict.fromkeys(("cuda", "mpi")),
    "torch": "2.13.0",
    "python": "3.11",
    "compiler": "g++ 12.2.0",
    **dict.fromkeys(CUDA_PARTS),
}
FOR_CUDA = {
    **FACTS,
    "cuda": "13.0",
    "nccl": "2.29.7",
    "nccl_home": "/opt/nccl",
    "nccl_library": "/opt/nccl/lib/libnccl.so.2",
    "nvcc": "13.0.88",
    "cuda_home": "/opt/cuda",
    "architectures": "90",
}

# Patches


def source_tree(folder: Path, copies: int = 1) -> Path:
    """What the patches look for, among other text."""
    for patch in PATCHES:
        path = folder / patch.file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else "// first line\n"
        path.write_text(text + f"  {patch.old}\n" * copies + "// last line\n")
    return folder


@pytest.mark.parametrize("copies", [1, 2])
def test_every_patch_is_applied_once_at_every_place(tmp_path: Path, copies: int) -> None:
    source = source_tree(tmp_path, copies)
    before = {patch.file: (source / patch.file).read_text() for patch in PATCHES}
    apply_patches(source)
    expected = dict(before)
    for patch in PATCHES:
        expected[patch.file] = expected[patch.file].replace(patch.old, patch.new)
        assert (source / patch.file).read_text().count(patch.new) == copies
    assert {file: (source / file).read_text() for file in before} == expected
    assert {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()} == set(before)


@pytest.mark.parametrize("number", range(len(PATCHES)))
def test_another_release_is_told_from_the_right_one(tmp_path: Path, number: int) -> None:
    patch = PATCHES[number]
    changed = source_tree(tmp_path / "changed") / patch.file
    changed.write_text(changed.read_text().replace(patch.old, "something else"))
    missing = source_tree(tmp_path / "missing") / patch.file
    missing.unlink()
    for path in (changed, missing):
        with pytest.raises(RunError) as caught:
            apply_patches(tmp_path / path.relative_to(tmp_path).parts[0])
        told = str(caught.value)
        assert str(path) in told
        # Where the whole file is missing, the first of its patches does not fit.
        assert any(one.reason in told for one in PATCHES if one.file == patch.file)
        assert "does not fit this source" in told


# What a build depends on


def test_the_cache_key_names_everything_that_shapes_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache_key(FACTS)}
    changes = {
        "torch": ["2.13.1", "2.13.0+cpu"],
        "cuda": ["12.8"],
        "python": ["3.12"],
        "compiler": ["g++ 13.2.0", None],
        "mpi": ["Open MPI 4.1.4", "Open MPI 5.0.1"],
    }
    for name, values in changes.items():
        keys |= {cache_key({**FACTS, name: value}) for value in values}
    # A cluster that is upgraded in place keeps its paths.
    cuda_changes = {"nccl": "2.29.8", "nccl_home": "/usr", "nvcc": "13.1.2", "cuda_home": "/usr", "architectures": "80"}
    keys |= {cache_key(FOR_CUDA)} | {cache_key({**FOR_CUDA, name: value}) for name, value in cuda_changes.items()}
    monkeypatch.setattr(horovod, "PATCHES", PATCHES[1:])
    keys.add(cache_key(FACTS))
    monkeypatch.setattr(horovod, "PATCHES", (dataclasses.replace(PATCHES[0], new="x"), *PATCHES[1:]))
    keys.add(cache_key(FACTS))
    monkeypatch.setattr(horovod, "PATCHES", PATCHES)
    monkeypatch.setattr(horovod, "SDIST_SHA256", "0" * 64)
    keys.add(cache_key(FACTS))
    assert len(keys) == 1 + sum(map(len, changes.values())) + 1 + len(cuda_changes) + 3
    assert all(len(key) == 16 and set(key) <= set("0123456789abcdef") for key in keys)


def test_the_cache_key_forgets_what_does_not_shape_it(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(FACTS)
    assert cache_key(dict(reversed(FACTS.items()))) == key
    monkeypatch.setenv("MAKEFLAGS", "-j97")
    monkeypatch.setattr(os, "cpu_count", lambda: 97)
    assert build_environment(FACTS)["MAKEFLAGS"] == "-j97"
    assert cache_key(FACTS) == key
    assert cache_key({**FACTS, "cuda_lacks": "nvcc is missing"}) == key
    # Why a patch is there does not change what it does.
    told = tuple(dataclasses.replace(patch, reason="other words") for patch in PATCHES)
    monkeypatch.setattr(horovod, "PATCHES", told)
    assert cache_key(FACTS) == key


# A machine of stubs

PYTHON = r"""
printf '%s\0' "$@" >> "$CALLS"; printf '\n' >> "$CALLS"
case "$*" in
  *horovod*mpi_lib*) echo "${HOROVOD_ANSWER:?}" ;;
  *pynvml*) if [ -n "$NVML_ANSWER" ]; then echo "$NVML_ANSWER"; else echo 'NVMLError: no driver' >&2; exit 1; fi ;;
  *built_for*)
    echo '{"torch": "2.99.0", "cuda": '"${CUDA:-null}"', "file": "'"$ROOT"'/site/torch/__init__.py",' \
      '"gpus": '"${GPUS:-[]}"', "built_for": ["sm_80", "sm_90a", "sm_120", "sm_90", "compute_120"]}' ;;
  *torch.cuda.device_count*) echo "${TORCH_ANSWER:?}" ;;
  *"pip "*" download "*) cp "$ROOT/archive.tar.gz" "horovod-@VERSION@.tar.gz" ;;
  *"pip "*" wheel "*)
    while [ "$1" != --wheel-dir ]; do shift; done
    env > "$ROOT/build.env"
    cp -r "$3" "$ROOT/built-from"
    echo '[ 42%] Building CXX object gloo/CMakeFiles/gloo.dir/loop.cc.o'
    if [ -n "$BUILD_LASTS_S" ]; then sleep "$BUILD_LASTS_S"; echo '[ 41%] Built target gloo'; fi
    if [ -n "$BUILD_FAILS" ]; then echo 'x.cc:1: error: no such thing'; exit 1; fi
    mkdir -p "$2" && echo wheel > "$2/horovod-@VERSION@-cp311-linux.whl" ;;
  *"pip "*" install "*)
    if [ -n "$INSTALL_FAILS" ]; then echo 'ERROR: no matching distribution' >&2; exit 1; fi
    case "$*" in *.whl*) touch "$ROOT/horovod-is-here" ;; esac ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""

Program = Callable[[str, str], Path]


class Machine:
    """A PATH of stubs, a Python that only pretends, a cache and a prefix of its own."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.bin, self.cache = root, root / "bin", root / "cache"
        self.prefix = root / "prefix"
        for folder in (self.bin, self.prefix):
            folder.mkdir(parents=True)
        for name in ("bash", "cp", "mkdir", "touch", "env", "true"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        for name in ("g++", "make", "cmake"):
            self.program(name, f"echo '{name} 12.2.0'; echo more")
        self.python = self.program("python", PYTHON.replace("@VERSION@", VERSION))
        patch.setattr(sys, "executable", str(self.python))
        patch.setattr(sys, "prefix", str(self.prefix))
        for name in ("CXX", "HOROVOD_NCCL_HOME", "NCCL_HOME", "CUDA", "GPUS", "NVML_ANSWER", "HOROVOD_CUDA_HOME"):
            patch.delenv(name, raising=False)
        for name in ("CUDA_HOME", "CUDA_PATH", "HOROVOD_BUILD_CUDA_CC_LIST", "DLBENCH_HOROVOD_SDIST", "LIBRARY_PATH"):
            patch.delenv(name, raising=False)
        for name in ("BUILD_FAILS", "BUILD_LASTS_S", "INSTALL_FAILS"):
            patch.delenv(name, raising=False)
        patch.setenv("PATH", str(self.bin))
        patch.setenv("ROOT", str(root))
        patch.setenv("CALLS", str(root / "calls"))
        patch.setenv("DLBENCH_CACHE", str(self.cache))
        self.said: list[str] = []

    def program(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!{self.bin / 'bash'}\n{body}\n")
        path.chmod(0o755)
        return path

    def pip(self) -> list[str]:
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        words = [line.split("\0")[:-1] for line in lines]
        verbs = ("download", "wheel", "install")
        return [next(word for word in call if word in verbs) for call in words if call[:2] == ["-m", "pip"]]

    def install(self, *, rebuild: bool = False) -> Path:
        self.said.clear()
        return install(self.said.append, rebuild=rebuild)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "machine", monkeypatch)
    archive = made.root / "archive.tar.gz"
    source = source_tree(tmp_path / f"horovod-{VERSION}")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, arcname=source.name)
        # What an archive should not hold, and what must not be unpacked.
        for name in ("/evil-absolute", f"{source.name}/../../evil-above"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo(f"{source.name}/evil-link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    monkeypatch.setattr(horovod, "SDIST_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(horovod, "find_spec", lambda name: (made.root / f"{name}-is-here").exists() or None)
    return made


def test_the_toolchain_is_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = toolchain()
    assert facts == {
        "torch": "2.99.0",
        "cuda": None,
        "python": ".".join(map(str, sys.version_info[:2])),
        "compiler": "g++ 12.2.0",
        "mpi": None,
        **dict.fromkeys(CUDA_PARTS),
    }
    machine.program("mpicxx", 'if [ "$1" = --showme:version ]; then echo "mpicxx: Open MPI 4.1.4"; fi')
    machine.program("clang++", "echo 'clang 17'")
    monkeypatch.setenv("CXX", "clang++")
    facts = toolchain()
    assert (facts["mpi"], facts["compiler"]) == ("mpicxx: Open MPI 4.1.4", "clang 17")
    machine.program("mpicxx", "exit 1")  # MPICH's wrapper knows no --showme
    assert toolchain()["mpi"] is None


def cuda_in(machine: Machine, version: str = "99.0.88") -> tuple[Path, Path]:
    """torch's own NCCL as pip installs it, and a CUDA toolkit; their folders."""
    nccl, cuda = machine.root / "site/nvidia/nccl", machine.root / "cuda"
    for folder in (nccl / "include", nccl / "lib", cuda / "bin", cuda / "include", cuda / "lib"):
        folder.mkdir(parents=True)
    (nccl / "include/nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n")
    (nccl / "lib/libnccl.so.2").write_text("NCCL")
    (cuda / "include/cuda_runtime.h").touch()
    (cuda / "lib/libcudart.so.99").write_text("runtime")
    codes = '[ $1 != --list-gpu-code ] || echo "${NVCC_KNOWS-sm_80 sm_90 sm_90a sm_120}"'
    nvcc = machine.program("nvcc", f"echo 'Cuda compilation tools, release 99.0, V{version}'; {codes}")
    nvcc.rename(cuda / "bin/nvcc")
    return nccl, cuda


def test_nccl_counts_only_with_a_torch_for_cuda(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, cuda = cuda_in(machine)
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    assert toolchain() == {**toolchain(), **dict.fromkeys(["cuda", *CUDA_PARTS])}
    monkeypatch.setenv("CUDA", '"99.0"')
    facts = toolchain()
    assert (facts["nccl"], facts["nccl_home"], facts["nvcc"]) == ("2.29.7", str(nccl), "99.0.88")
    # GPUs in sight, else what torch is built for, else what the caller says.
    assert facts["architectures"] == "80,90,120"
    monkeypatch.setenv("GPUS", '["90", "80", "90"]')
    assert toolchain()["architectures"] == "80,90"
    # An nvcc that is older than the GPUs builds what these can translate; one that lists nothing is believed.
    monkeypatch.setenv("NVCC_KNOWS", "sm_60 sm_75")
    assert toolchain()["architectures"] == "75"
    monkeypatch.setenv("NVCC_KNOWS", "")
    assert toolchain()["architectures"] == "80,90"
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "70")
    assert toolchain()["architectures"] == "70"


def test_a_build_for_cuda_finds_torchs_nccl_by_links(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, cuda = cuda_in(machine)
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    monkeypatch.setenv("CUDA", '"99.0"')
    # The links live as long as the build: the stub compiler's last words are what they led to.
    machine.program("cat", 'while read -r line || [ -n "$line" ]; do echo "$line"; done < "$1"')
    python = machine.python.read_text()
    links = (
        'cat "$HOROVOD_NCCL_LIB/libnccl.so" > "$ROOT/linked"; cat "$HOROVOD_NCCL_LIB/libcudart.so" >> "$ROOT/linked"'
    )
    machine.program("python", python.replace('env > "$ROOT/build.env"', f'env > "$ROOT/build.env"; {links}'))
    machine.install()
    assert (machine.root / "linked").read_text() == "NCCL\nruntime\n"
    built = dict(line.split("=", 1) for line in (machine.root / "build.env").read_text().splitlines() if "=" in line)
    assert (built["HOROVOD_NCCL_LINK"], built["HOROVOD_NCCL_HOME"]) == ("shared", str(nccl))
    assert built["PATH"].startswith(f"{cuda}/bin:")
    assert built["CMAKE_LIBRARY_PATH"] == built["LIBRARY_PATH"] == f"{built['HOROVOD_NCCL_LIB']}:{cuda}/lib"
    assert any("with Gloo, NCCL 2.29.7 and CUDA 99.0.88 for compute capabilities 80,90,120;" in s for s in machine.said)


def test_a_torch_for_cuda_without_nvcc_gets_a_horovod_for_cpus_knowingly(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_in(machine, version="98.1")
    monkeypatch.setenv("CUDA", '"99.0"')
    # As an installation guide had it, and a shell still has it.
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    machine.install()
    assert machine.said[0].startswith("torch is built for CUDA 99.0, but nvcc ")
    assert "use engine ddp for more" in machine.said[1]
    built = (machine.root / "build.env").read_text()
    assert "HOROVOD_GPU" not in built
    assert "HOROVOD_NCCL" not in built
    assert any("with Gloo;" in line for line in machine.said)


@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_source_archive_that_is_here_needs_no_network(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    archive = machine.root / "archive.tar.gz"
    if way == "variable":
        monkeypatch.setenv("DLBENCH_HOROVOD_SDIST", str(archive))
    wheel = install(machine.said.append, source=archive if way == "option" else None)
    assert machine.pip() == ["install", "wheel", "install"]
    assert wheel.is_file()
    archive.write_bytes(b"another")
    with pytest.raises(RunError, match=r"archive.tar.gz: SHA-256 is .*; nothing was built"):
        install(machine.said.append, source=archive, rebuild=True)
    with pytest.raises(UserError, match=r"--source .*/gone: no such file"):
        install(machine.said.append, source=archive.with_name("gone"))


def test_horovod_is_built_once_and_taken_from_the_cache_afterwards(machine: Machine) -> None:
    wheel = machine.install()
    assert machine.pip() == ["install", "download", "wheel", "install"]
    assert wheel.parent == machine.cache / "horovod" / cache_key(toolchain())
    assert json.loads((wheel.parent / "toolchain.json").read_text()) == toolchain()
    machine.pip()
    # What was built was the patched source, with the switches, and without what climbs out of the archive.
    built = machine.root / "built-from"
    assert "set(CMAKE_CXX_STANDARD 20)" in (built / "CMakeLists.txt").read_text()
    assert (
        build_environment(toolchain()).items()
        <= dict(
            line.split("=", 1) for line in (machine.root / "build.env").read_text().splitlines() if "=" in line
        ).items()
    )
    assert not [p for p in machine.root.rglob("*") if p.name.startswith("evil")]
    assert any("with Gloo;" in line for line in machine.said)
    machine.pip()

    assert machine.install() == wheel
    assert machine.pip() == []  # installed already
    (machine.root / "horovod-is-here").unlink()
    assert machine.install() == wheel
    assert machine.pip() == ["install", "install"]  # a new environment, the old wheel
    assert machine.install(rebuild=True) == wheel
    assert machine.pip() == ["install", "download", "wheel", "install"]
    # Nothing is left of the work but the wheel and the log.
    assert sorted(p.name for p in (machine.cache / "horovod").iterdir()) == sorted(
        [wheel.parent.name, f"build-{wheel.parent.name}.log"]
    )


def test_a_failed_build_is_told_with_its_log_and_keeps_the_old_wheel(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = machine.install()
    shutil.rmtree(machine.root / "built-from")
    monkeypatch.setenv("BUILD_FAILS", "1")
    with pytest.raises(RunError) as caught:
        machine.install(rebuild=True)
    told = str(caught.value)
    assert "x.cc:1: error: no such thing" in told
    (log,) = (machine.cache / "horovod").glob("*.log")
    assert str(log) in told
    assert "error: no such thing" in log.read_text()
    assert wheel.read_text() == "wheel\n"
    assert [p.name for p in wheel.parent.parent.iterdir() if p.is_dir()] == [wheel.parent.name]


@pytest.mark.parametrize("program", ["g++", "make", "cmake"])
def test_what_a_build_needs_is_named_before_anything_is_fetched(machine: Machine, program: str) -> None:
    (machine.bin / program).unlink()
    with pytest.raises(EnvironmentLacksError, match=r"is not on PATH; install the system package") as caught:
        machine.install()
    assert program in str(caught.value)
    assert "download" not in machine.pip()


# Probes


def findings() -> dict[str, Probe]:
    found = examine()
    for finding in found:
        assert finding.state in ("ok", "absent", "problem")
        assert finding.detail
        assert finding.state == "ok" or finding.remedy, finding
        assert set(finding.as_dict()) == {"name", "state", "detail", "needed_for", "remedy"}
    return {finding.name: finding for finding in found}


def horovod_answer(**changes: object) -> str:
    """What a Horovod of dlbench's build beside a torch for CPUs answers."""
    answer = {"version": VERSION, "gloo": True, "mpi": True, "nccl": False, "cuda": False, "readback": True}
    return json.dumps({**answer, "free_timeline": True, "torch_cuda": None, "torch_file": None, **changes})


@pytest.fixture
def installed(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine on which torch, Horovod and NVML's bindings are installed, and answer what a test says."""
    site = tmp_path / "site"
    (site / "horovod").mkdir(parents=True)
    (site / "horovod" / "__init__.py").write_text("raise RuntimeError('this one is never imported here')\n")
    for name, version in (("torch", "2.99.0"), ("nvidia-ml-py", "99.0")):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer())
    monkeypatch.setenv("TORCH_ANSWER", json.dumps({"version": "2.99.0", "cuda": None, "gpus": 0, "nccl": False}))
    return machine


def test_a_machine_with_everything(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ANSWER", json.dumps({"version": "2.99.0", "cuda": "12.8", "gpus": 4, "nccl": True}))
    monkeypatch.setenv("NVML_ANSWER", json.dumps({"driver": "570.1", "gpus": ["NVIDIA H200", "NVIDIA H200"]}))
    installed.program("mpirun", "echo 'mpirun (Open MPI) 4.1.4'; echo; echo 'Report bugs to ...'")
    installed.program("mpicxx", "true")
    installed.program("sbatch", "echo 'slurm-wlm 22.05.8'")
    installed.program("sinfo", "echo 'gpu 12'; echo 'debug 2'")
    installed.program("srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmix_v4\\n\\tpmi2\\n\\tpmix\\n' >&2")
    found = findings()
    assert {found[name].state for name in ("Python", "PyTorch", "Horovod", "MPI", "Slurm", "NVML")} == {"ok"}
    assert found["PyTorch"].detail == "2.99.0, CUDA 12.8, 4 GPUs, with NCCL"
    assert found["Horovod"].detail == f"{VERSION}, built with gloo, mpi; without nccl, cuda"
    assert found["MPI"].detail == "mpirun (Open MPI) 4.1.4, with mpicxx"
    assert found["Slurm"].detail == "slurm-wlm 22.05.8; partitions gpu 12, debug 2; srun --mpi: pmi2, pmix, pmix_v4"
    assert found["NVML"].detail == "driver 570.1; NVIDIA H200, NVIDIA H200"
    assert found["Scratch TMPDIR"].state == "ok"
    assert "Scratch SLURM_TMPDIR" not in found


def test_what_is_broken_is_a_problem_and_no_crash(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ANSWER")  # its import fails
    monkeypatch.setenv("HOROVOD_ANSWER", "no JSON")
    monkeypatch.setenv("SLURM_TMPDIR", str(installed.root / "gone"))
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    installed.program("sbatch", "echo 'sbatch: fatal: no cluster' >&2; exit 1")
    found = findings()
    problems = {name for name, finding in found.items() if finding.state == "problem"}
    assert problems >= {"PyTorch", "Horovod", "Slurm", "Scratch SLURM_TMPDIR"}
    assert "TORCH_ANSWER" in found["PyTorch"].detail  # the last line of what it said
    assert "--rebuild" in found["Horovod"].remedy
    assert "SLURM_CONF" in found["Slurm"].remedy
    assert found["Scratch SLURM_TMPDIR"].detail.endswith(os.strerror(2))


def test_a_gpu_that_torch_cannot_use_is_a_problem(
    installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = gpu_files(tmp_path / "gpu")
    for name in ("is_given_gpu", "hidden_gpus", "unusable"):
        monkeypatch.setattr(probes, name, functools.partial(getattr(probes, name), root=root))
    answer = {"version": "2.13.0", "cuda": "13.0", "hip": None, "gpus": 0, "nccl": True}
    monkeypatch.setenv("TORCH_ANSWER", json.dumps(answer))
    assert findings()["PyTorch"].state == "ok", "CUDA_VISIBLE_DEVICES= means the CPU"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = findings()["PyTorch"]
    assert (found.state, found.detail.partition(": ")[0]) == ("problem", "cannot use the GPU of this machine")
    assert "needs driver 580 or newer, and the driver is 535.183.01" in found.detail
    assert found.remedy.endswith("or hide the GPU with CUDA_VISIBLE_DEVICES= to train on the CPU")
    # Libraries for forward compatibility: torch knows better than a table.
    monkeypatch.setenv("TORCH_ANSWER", json.dumps({**answer, "gpus": 1}))
    assert findings()["PyTorch"].state == "ok"
    for file in (root / "dev").iterdir():
        file.unlink()
    assert findings()["GPUs"].state == "absent"


def test_what_torch_compile_needs_is_told(installed: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    found = findings()["torch.compile"]
    assert (found.state, found.detail) == ("absent", "Triton needs a C compiler, and there is neither gcc nor clang")
    assert "train.optimizer.implementation=foreach" in found.needed_for
    installed.program("clang", "true")
    # What a header's folder is asked for here is the tests' own Python.
    monkeypatch.setattr(probes, "compiler_lacks", functools.partial(probes.compiler_lacks, include=tmp_path))
    missing = findings()["torch.compile"]
    assert missing.detail == f"Python's header is missing ({tmp_path}/Python.h)"
    assert "-dev" in missing.remedy
    (tmp_path / "Python.h").touch()
    assert findings()["torch.compile"].state == "ok"
    (installed.bin / "g++").unlink()
    assert findings()["torch.compile"].remedy == "install g++, or name one in CXX"


def test_slurm_without_a_cluster(installed: Machine) -> None:
    installed.program("sbatch", "exit 1")
    assert (findings()["Slurm"].state, findings()["Slurm"].needed_for) == ("absent", "dlbench submit")
    installed.program("sbatch", "echo 'slurm-wlm 22.05.8'")
    installed.program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    found = findings()["Slurm"]
    assert found.state == "problem"
    assert "no controller answers" in found.detail


def test_a_horovod_that_is_not_dlbench_s_build(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer(version="0.27.0", mpi=False, readback=False))
    found = findings()["Horovod"]
    assert found.state == "problem"
    assert "0.27.0, built with gloo; without mpi, nccl, cuda; not built by dlbench" in found.detail
    assert "dlbench setup horovod" in found.remedy


def test_a_horovod_without_the_mpi_that_came_later_is_named(
    installed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer(mpi=False))
    assert "Horovod with MPI" not in findings()
    for program in ("mpirun", "mpicxx"):
        installed.program(program, "echo 'mpirun (Open MPI) 4.1.4'")
    found = findings()
    assert (found["Horovod"].state, found["MPI"].state) == ("ok", "ok")
    assert found["Horovod with MPI"].state == "problem"
    assert found["Horovod with MPI"].detail == "Horovod was built without MPI, and MPI is installed now"
    assert found["Horovod with MPI"].remedy.startswith("dlbench setup horovod ")
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer())
    assert "Horovod with MPI" not in findings()


def test_a_horovod_beside_a_torch_for_cuda_says_what_it_lacks(
    installed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"torch_cuda": "99.0", "torch_file": str(installed.root / "site/torch/__init__.py")}
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer(**here))
    found = findings()["Horovod with NCCL"]
    assert found.state == "absent"
    assert found.detail.startswith("Horovod was built without NCCL; nccl.h is missing (searched include/nccl.h in ")
    _, cuda = cuda_in(installed)
    monkeypatch.setenv("CUDA_HOME", str(cuda))
    found = findings()["Horovod with NCCL"]
    assert (found.state, found.remedy.partition(" (")[0]) == ("problem", "dlbench setup horovod")
    assert found.detail == "Horovod was built without NCCL, and NCCL and nvcc are installed now"
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer(**here, nccl=True, cuda=True, free_timeline=False))
    found = findings()
    assert "Horovod with NCCL" not in found
    assert "messages of engine horovod on GPUs" in found["Horovod's timeline"].needed_for
    monkeypatch.setenv("HOROVOD_ANSWER", horovod_answer(**here, nccl=True, cuda=True))
    assert not {"Horovod with NCCL", "Horovod's timeline"} & findings().keys()


def test_an_mpirun_of_another_mpi_is_a_problem(installed: Machine) -> None:
    installed.program("mpirun", "echo 'HYDRA build details:'; echo '    Version:  4.1.1'")
    found = findings()["MPI"]
    assert (found.state, found.detail) == ("problem", "mpirun is MPICH's or MVAPICH's, and dlbench needs Open MPI's")
    assert found.remedy.startswith("load Open MPI's module or put its mpirun first on PATH")


def test_a_driver_that_is_out_of_order_is_a_problem(installed: Machine) -> None:
    error = "NVMLError_LibRmVersionMismatch: RM has"
    installed.program("python", f"case $* in *pynvml*) echo 'pynvml.{error}' >&2; exit 1 ;; esac; exit 1")
    found = findings()["NVML"]
    assert (found.state, found.detail) == ("problem", f"pynvml.{error}")
    assert "reboot the node, or end" in found.remedy


def test_a_program_that_hangs_is_given_up(installed: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = probes.subprocess.run

    def impatient(*words: object, **options: object) -> object:
        return original(*words, **{**options, "timeout": 0.3})  # type: ignore[call-overload]

    monkeypatch.setattr(probes.subprocess, "run", impatient)
    (installed.bin / "sleep").symlink_to(str(shutil.which("sleep", path="/usr/bin:/bin")))
    installed.program("mpirun", "exec sleep 60")
    installed.program("python", "exec sleep 60")
    found = findings()
    assert found["MPI"].state == "absent"
    assert found["PyTorch"].state == found["Horovod"].state == "problem"
    assert "no answer within" in found["PyTorch"].detail


@pytest.mark.parametrize(
    ("limit", "state"), [("max 100000", "ok"), ("50000 100000", "problem"), ("100000000 100000", "ok"), ("x", "ok")]
)
def test_a_cpu_limit_below_the_cores_is_a_problem(
    installed: Machine, monkeypatch: pytest.MonkeyPatch, limit: str, state: str
) -> None:
    original = Path.read_text

    def read_text(self: Path, *arguments: str, **options: str) -> str:
        return limit if str(self) == "/sys/fs/cgroup/cpu.max" else original(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    found = findings()["Cores"]
    assert found.state == state
    assert state == "ok" or "throttling" in found.remedy
